"""A Gemma 3 checkpoint from its files to its turns, against transformers.

The directory is as Google publishes one: weights under the published names, a
tokenizer with the chat template, a processor's files. Prompts are those of
`Gemma3Processor`, pixels too; completions those of `generate`, with its cache;
the learner scores them as they were sampled.
"""

import json

import numpy as np
from PIL import Image
import published_sizes
import pytest
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.renderer import choice
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy.checkpoints import image_settings
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.policy.models.qwen import qwen_checkpoint
from tunix.rl.multi_turn.policy.models.qwen import qwen_config

from tests.policy import test_hf_checkpoint as checkpoints

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import chat_families  # noqa: E402
import qwen_reference  # noqa: E402
import screen_turns  # noqa: E402

pil = pytest.importorskip(
  "transformers.models.gemma3.image_processing_pil_gemma3"
)

FAMILY = chat_families.FAMILIES["gemma_vl"]
SIDE, TOKENS = 32, 16  # 8 x 8 patches of 4 pixels, 2 x 2 a token.
CONTEXT = 256


def words():
  encoder = chat_families.tokenizer(FAMILY)
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=encoder.backend_tokenizer,
    bos_token="<bos>",
    eos_token="<end_of_turn>",
    pad_token="<unk>",
    chat_template=chat_families.source(FAMILY),
    extra_special_tokens={
      "image_token": "<image_soft_token>",
      "boi_token": "<start_of_image>",
      "eoi_token": "<end_of_image>",
    },
  )


def config_of(tokenizer, window=20):
  find = tokenizer.convert_tokens_to_ids
  return qwen_config.QwenVLConfig(
    family="gemma3",
    vision=qwen_config.VisionConfig(
      depth=2,
      hidden_size=32,
      intermediate_size=40,
      num_heads=2,
      out_hidden_size=48,
      patch_size=4,
      num_position_embeddings=(SIDE // 4) ** 2,
    ),
    text=qwen_config.TextConfig(
      vocab_size=-(-len(tokenizer) // 64) * 64,
      hidden_size=48,
      intermediate_size=72,
      num_hidden_layers=3,
      num_attention_heads=4,
      num_key_value_heads=2,
      head_dim=16,
      rope_theta=1e6,
      mrope_section=(8, 0, 0),
      full_attention_layers=(1,),
      sliding_window=window,
      local_rope_theta=1e4,
      query_pre_attn_scalar=16.0,
    ),
    tie_word_embeddings=True,
    image_token_id=find("<image_soft_token>"),
    video_token_id=find("<image_soft_token>"),
    vision_start_token_id=find("<start_of_image>"),
    vision_end_token_id=find("<end_of_image>"),
  )


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  """Of a whole checkpoint; its model of transformers is `reference`."""
  path = tmp_path_factory.mktemp("gemma")
  tokenizer = words()
  reference = qwen_reference.Reference(config_of(tokenizer), path)
  tokenizer.save_pretrained(path)
  pil.Gemma3ImageProcessorPil(
    size={"height": SIDE, "width": SIDE}
  ).save_pretrained(path)
  return path, reference.module


@pytest.fixture(scope="module")
def reference_processor(directory):
  """transformers' processor of the directory."""
  return transformers.Gemma3Processor(
    pil.Gemma3ImageProcessorPil.from_pretrained(directory[0]),
    transformers.PreTrainedTokenizerFast.from_pretrained(directory[0]),
    chat_template=chat_families.source(FAMILY),
    image_seq_length=TOKENS,
  )


@pytest.fixture(scope="module")
def policy(directory):
  model, processor, tokenizer = checkpoint.load_policy(directory[0])
  template = policy_files.chat_template(directory[0])
  renderer = choice.make_renderer(
    tokenizer, processor.num_image_tokens, template
  )
  return model, processor, renderer


def asked_of(processor, store, messages):
  """Inputs of transformers' model, and their tokens."""
  texts, pictures = screen_turns.plain(messages)
  text = processor.apply_chat_template(
    texts, tokenize=False, add_generation_prompt=True
  )
  shown = [Image.fromarray(store.get(p)) for p in pictures]
  inputs = processor(
    text=text,
    images=shown or None,
    add_special_tokens=False,
    return_tensors="pt",
  )
  return inputs, inputs["input_ids"][0].tolist()


def normalised(processor, patched):
  """float32[3, side, side]."""
  merge, patch = processor.merge_size, processor.patch_size
  across = processor.side // processor.factor
  cells = patched.patches.reshape(
    across, across, merge, merge, 3, patch, patch
  ).transpose(4, 0, 2, 5, 1, 3, 6)
  return cells.reshape(3, processor.side, -1).astype(np.float32) / 127.5 - 1


def test_prompts_and_pixels_are_those_of_its_processor(
  reference_processor, policy
):
  _, processor, renderer = policy
  assert renderer.format_name != "ChatML"
  store, images = images_lib.ImageStore(), 0
  for seed in range(25):
    messages = screen_turns.Talk(FAMILY, store, seed).history()
    inputs, ids = asked_of(reference_processor, store, messages)
    got = renderer.render(messages)
    assert got.tokens.tolist() == ids, messages
    # Text that joins two images has been dropped by the template at times;
    # the frame's end and beginning are between them.
    positions = processor.positions(got.tokens, got.images)
    np.testing.assert_array_equal(positions[:, 0], np.arange(len(ids)))
    for i, span in enumerate(got.images):
      patched = processor.patchify(store.get(span.image))
      assert patched.num_tokens == span.num_tokens == TOKENS
      np.testing.assert_allclose(
        normalised(processor, patched), inputs["pixel_values"][i], atol=2e-6
      )
      images += 1
  assert images > 30


@pytest.fixture(scope="module")
def turns(policy):
  """Three turns of two sessions, with screenshots: what was sampled and how."""
  return screen_turns.play(
    policy,
    lambda store, seed: screen_turns.Talk(FAMILY, store, seed),
    3,
    CONTEXT,
    prefill_buckets=(20,),
    patch_buckets=(64,),
  )


def test_completions_are_those_of_transformers_generate(
  directory, policy, turns
):
  model, processor, _ = policy
  store, played = turns
  pixels_of = lambda images: np.stack(
    [
      normalised(processor, processor.patchify(store.get(s.image)))
      for s in images
    ]
  )
  screen_turns.check_generate(
    directory[1],
    policy,
    played,
    pixels_of,
    token_type_ids=lambda ids: (ids == model.config.image_token_id).long(),
  )


def test_the_learner_scores_packed_rows_as_they_were_sampled(policy, turns):
  screen_turns.check_scores(policy, *turns, row_length=400)


# --- files -------------------------------------------------------------------

# Beginnings of the published keys, and those of transformers 4.52 to 4.57 and
# of 5.
SPELLINGS = {
  "4": (
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model.language_model."),
  ),
  "5": (("vision_tower.vision_model.", "vision_tower."),),
}


@pytest.mark.parametrize("version", SPELLINGS)
def test_files_of_every_spelling_are_read(version, tmp_path):
  from safetensors import numpy as safetensors_numpy

  # A head of its own, so that the file has its key as well.
  config = qwen_reference.CONFIGS["gemma3 wide"]
  model = checkpoints.policy(config)
  hf_checkpoint.save_model(tmp_path, model)
  file = tmp_path / hf_checkpoint.SINGLE
  tensors = safetensors_numpy.load_file(file)
  assert "language_model.lm_head.weight" in tensors
  assert "vision_tower.vision_model.post_layernorm.weight" in tensors

  def renamed(key):
    for prefix, other in SPELLINGS[version]:
      if key.startswith(prefix):
        return other + key.removeprefix(prefix)
    return key

  other = {renamed(key): value for key, value in tensors.items()}
  assert other.keys() != tensors.keys()
  safetensors_numpy.save_file(other, file)
  checkpoints.assert_same(model, hf_checkpoint.load_model(tmp_path))


def test_a_head_of_its_own_survives_the_reference(tmp_path):
  config = qwen_reference.CONFIGS["gemma3 wide"]
  model = checkpoints.policy(config)
  hf_checkpoint.save_model(tmp_path / "ours", model)
  reference, info = transformers.AutoModelForImageTextToText.from_pretrained(
    tmp_path / "ours", output_loading_info=True
  )
  assert not any(info.values()), info
  reference.save_pretrained(tmp_path / "theirs")
  checkpoints.assert_same(model, hf_checkpoint.load_model(tmp_path / "theirs"))


def test_a_saved_policy_is_a_whole_checkpoint(directory, policy, tmp_path):
  checkpoint.save_policy(tmp_path, policy[0], directory[0])
  reference = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
  assert type(reference).__name__ == "Gemma3ForConditionalGeneration"
  again = pil.Gemma3ImageProcessorPil.from_pretrained(tmp_path)
  assert dict(again.size) == {"height": SIDE, "width": SIDE}
  processor = qwen_checkpoint.processor_of(
    checkpoint.load_config(tmp_path), tmp_path
  )
  assert processor == policy[1]
  # And without a file of the source's.
  source = tmp_path / "source"
  source.mkdir()
  for file in directory[0].iterdir():
    if file.name != image_settings.PREPROCESSOR:
      (source / file.name).write_bytes(file.read_bytes())
  model, processor, _ = checkpoint.load_policy(source)
  assert processor.side == SIDE and "config.json" in processor.describe()
  checkpoint.save_policy(tmp_path / "new", model, source)
  again = pil.Gemma3ImageProcessorPil.from_pretrained(tmp_path / "new")
  assert dict(again.size) == {"height": SIDE, "width": SIDE}


@pytest.mark.parametrize(
  "change, message",
  [
    ({"do_pan_and_scan": True}, "do_pan_and_scan=True, .*set it to false"),
    ({"resample": 3}, "resample=3, only 2"),
    ({"do_resize": False}, "do_resize=False, only True"),
    ({"size": {"height": 32, "width": 64}}, "squares: give height and"),
    ({"size": {"shortest_edge": 32}}, "squares: give height and width"),
    ({"size": {"height": 64, "width": 64}}, "image_size=64.*image_size=32"),
    ({"size": None}, "image_size=224.*image_size=32"),
    ({"image_processor_type": "Qwen2VLImageProcessor"}, "for gemma3"),
  ],
  ids=str,
)
def test_images_that_are_made_otherwise_are_refused(
  directory, change, message, tmp_path
):
  screen_turns.check_image_settings_refused(
    directory[0], change, message, tmp_path
  )


def test_the_size_of_images_is_not_a_runs_to_choose(directory):
  with pytest.raises(ValueError, match="max_pixels=4096.*32x32 = 1024"):
    checkpoint.load_policy(directory[0], max_pixels=4096)
  with pytest.raises(ValueError, match="trajectory_pixels=2000 of 2.*2048"):
    checkpoint.load_policy(directory[0], image_budget=(2000, 2))
  _, processor, _ = checkpoint.load_policy(
    directory[0], max_pixels=1024, image_budget=(2048, 2)
  )
  assert processor.image_size(1280, 720) == (32, 32)


def test_images_that_follow_each_other_immediately_are_refused(policy):
  processor = policy[1]
  pad = processor.image_token_id
  ref = trajectory.ImageRef("0" * 64, 20, 20)
  spans = [trajectory.ImageSpan(ref, at, TOKENS) for at in (1, 1 + TOKENS)]
  tokens = np.array([5, *[pad] * (2 * TOKENS), 6])
  with pytest.raises(ValueError, match="image at 17 follows another one"):
    processor.positions(tokens, spans)


RAW = qwen_config.to_hf(published_sizes.SIZES["Gemma-3-4B"])


@pytest.mark.parametrize(
  "section, field, value, message",
  [
    ("text_config", "hidden_activation", "silu", "only gelu_pytorch_tanh"),
    ("vision_config", "hidden_act", "gelu", "only gelu_pytorch_tanh"),
    ("text_config", "attn_logit_softcapping", 50.0, "not capped here"),
    ("text_config", "final_logit_softcapping", 30.0, "not capped here"),
    ("text_config", "attention_bias", True, "have none here"),
    ("text_config", "use_bidirectional_attention", True, "earlier ones"),
    ("text_config", "sliding_window", 128, "less than an image's 256"),
    ("text_config", "sliding_window", None, "number of tokens is needed"),
    ("text_config", "layer_types", ["chunked"] * 34, r"\['chunked'\]"),
    ("text_config", "layer_types", ["full_attention"], "names 1 layers"),
    ("vision_config", "vision_use_head", True, "no pooling head"),
    ("vision_config", "image_size", [896, 448], "images are squares"),
    ("vision_config", "image_size", 900, "no multiple of patch_size=14"),
    ("vision_config", "num_channels", 1, "only 3 is known"),
    ("", "mm_tokens_per_image", 250, "must be a square whose side"),
    ("", "mm_tokens_per_image", 324, "must be a square whose side"),
  ],
)
def test_what_would_be_computed_wrongly_is_refused(
  section, field, value, message
):
  raw = json.loads(json.dumps(RAW))
  (raw[section] if section else raw)[field] = value
  with pytest.raises(ValueError, match=message) as error:
    qwen_config.from_hf(raw)
  assert field in str(error.value)


def test_scaled_positions_of_windows_are_refused():
  raw = json.loads(json.dumps(RAW))
  rope = raw["text_config"]["rope_parameters"]["sliding_attention"]
  rope |= {"rope_type": "linear", "factor": 2.0}
  with pytest.raises(ValueError, match="of sliding_attention layers are scal"):
    qwen_config.from_hf(raw)


# config.json of google/gemma-3-27b-it, as published with transformers 4.50.
PUBLISHED = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144,
    "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504,
        "model_type": "gemma3_text", "num_attention_heads": 32,
        "num_hidden_layers": 62, "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
    "vision_config": {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
        "model_type": "siglip_vision_model", "num_attention_heads": 16,
        "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip


def test_the_published_files_are_the_published_sizes():
  assert qwen_config.from_hf(PUBLISHED) == published_sizes.SIZES["Gemma-3-27B"]
  # Of transformers 4.5x, which wrote the pattern and both bases.
  text = PUBLISHED["text_config"] | {
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
  }
  old = PUBLISHED | {"text_config": text}
  assert qwen_config.from_hf(old) == published_sizes.SIZES["Gemma-3-27B"]
