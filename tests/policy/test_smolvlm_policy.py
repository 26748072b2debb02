"""A SmolVLM checkpoint from its files to its turns, against transformers.

Prompts are those of `Idefics3Processor` and of SmolVLM's, pixels too;
completions those of `generate`, with its cache; the learner scores them as they
were sampled.
"""

import dataclasses
import importlib
import json

import numpy as np
from PIL import Image
import published_sizes
import pytest
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.renderer import choice
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy.checkpoints import image_settings
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.policy.models.qwen import qwen_config
from tunix.rl.multi_turn.policy.models.smolvlm import smolvlm_inputs

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import chat_families  # noqa: E402
import qwen_reference  # noqa: E402
import screen_turns  # noqa: E402

TILE, EDGE, PATCH, MERGE = 18, 36, 4, 2  # Two pixels of a tile are not part.
CONTEXT = 512
CLASSES = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}
families = pytest.mark.parametrize("family", CLASSES)


def pil_of(family):
  module = importlib.import_module(
    f"transformers.models.{family}.image_processing_pil_{family}"
  )
  return getattr(module, f"{CLASSES[family]}ImageProcessorPil")


def words(family):
  kind = chat_families.FAMILIES[family]
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=chat_families.tokenizer(kind).backend_tokenizer,
    eos_token="<end_of_utterance>",
    pad_token="<|endoftext|>",
    chat_template=chat_families.source(kind),
  )


def config_of(family, tokenizer):
  config = qwen_reference.CONFIGS["smolvlm"]
  image = tokenizer.convert_tokens_to_ids("<image>")
  return dataclasses.replace(
    config,
    family=family,
    vision=dataclasses.replace(config.vision, tile_size=TILE),
    text=dataclasses.replace(
      config.text, vocab_size=-(-len(tokenizer) // 64) * 64
    ),
    image_token_id=image,
    video_token_id=image,
    vision_start_token_id=image,
    vision_end_token_id=image,
  )


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
  """Family -> directory of a whole checkpoint, model of transformers."""
  by_family = {}
  for family in CLASSES:
    path = tmp_path_factory.mktemp(family)
    tokenizer = words(family)
    reference = qwen_reference.Reference(config_of(family, tokenizer), path)
    tokenizer.save_pretrained(path)
    pil_of(family)(
      size={"longest_edge": EDGE}, max_image_size={"longest_edge": TILE}
    ).save_pretrained(path)
    file = path / image_settings.PREPROCESSOR
    raw = json.loads(file.read_text())
    raw["image_processor_type"] = f"{CLASSES[family]}ImageProcessor"
    file.write_text(json.dumps(raw))
    by_family[family] = path, reference.module
  return by_family


@pytest.fixture(scope="module")
def policies(directories):
  """Family -> model, processor, renderer."""
  by_family = {}
  for family, (path, _) in directories.items():
    model, processor, tokenizer = checkpoint.load_policy(path)
    template = policy_files.chat_template(path)
    renderer = choice.make_renderer(
      tokenizer, base.layout_of(processor), template
    )
    by_family[family] = model, processor, renderer
  return by_family


def talk_of(family, store, seed):
  """Small pictures, wide ones, and squares."""
  kind = chat_families.FAMILIES[family]
  return screen_turns.Talk(kind, store, seed, sides=(4, 90), squares=0.3)


def asked_of(family, directory, store, messages):
  """(pixels [tiles, 3, H, W] or None, ids) of transformers' processor."""
  texts, pictures = screen_turns.plain(messages)
  tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
  text = tokenizer.apply_chat_template(
    texts, tokenize=False, add_generation_prompt=True
  )
  shown = [Image.fromarray(store.get(p)) for p in pictures]
  of_images = pil_of(family).from_pretrained(directory)
  if family == "idefics3":
    inputs = transformers.Idefics3Processor(
      of_images, tokenizer, image_seq_len=4
    )(
      text=text,
      images=[shown] if shown else None,
      add_special_tokens=False,
      return_tensors="np",
    )
    pixels = inputs["pixel_values"][0] if shown else None
    return pixels, inputs["input_ids"][0].tolist()
  # The whole of its processor needs packages for video.
  module = importlib.import_module(
    "transformers.models.smolvlm.processing_smolvlm"
  )
  pixels = None
  if shown:
    inputs = of_images([shown], return_row_col_info=True, return_tensors="np")
    first, *later = text.split("<image>")
    text = first + "".join(
      module.get_image_prompt_string(
        rows, columns, 4, "<fake_token_around_image>", "<image>", "<global-img>"
      )
      + behind
      for rows, columns, behind in zip(
        inputs["rows"][0], inputs["cols"][0], later, strict=True
      )
    )
    pixels = inputs["pixel_values"][0]
  return pixels, tokenizer.encode(text, add_special_tokens=False)


def normalised(processor, patched):
  """float32[tiles, 3, side, side]."""
  across = processor.tile_size // processor.factor
  merge, patch = processor.merge_size, processor.patch_size
  cells = patched.patches.reshape(
    -1, across, across, merge, merge, 3, patch, patch
  ).transpose(0, 5, 1, 3, 6, 2, 4, 7)
  side = across * merge * patch
  return cells.reshape(-1, 3, side, side).astype(np.float32) / 127.5 - 1


@families
def test_prompts_and_pixels_are_those_of_its_processor(
  family, directories, policies
):
  _, processor, renderer = policies[family]
  assert renderer.format_name != "ChatML"
  side = TILE // PATCH * PATCH
  store, layouts, several = images_lib.ImageStore(), set(), 0
  for seed in range(25):
    messages = talk_of(family, store, seed).history()
    pixels, ids = asked_of(family, directories[family][0], store, messages)
    got = renderer.render(messages)
    assert got.tokens.tolist() == ids, messages
    positions = processor.positions(got.tokens, got.images)
    np.testing.assert_array_equal(positions[:, 0], np.arange(len(ids)))
    trajectory.TokenSequence(
      got.tokens,
      np.zeros(len(ids)),
      np.zeros(len(ids)),
      [-1] * len(ids),
      np.zeros(len(ids)),
      got.images,
    )  # Of legal spans.
    again = renderer.prompt_of_tokens(ids, [s.image for s in got.images])
    assert again.images == got.images
    at = 0
    for span in got.images:
      patched = processor.patchify(store.get(span.image))
      tiles = len(patched.patches) // (side // PATCH) ** 2
      layouts.add(processor.image_layout(span.image.width, span.image.height))
      numbers = span.numbers(got.tokens)
      shown = numbers[numbers >= 0]
      np.testing.assert_array_equal(shown, np.arange(patched.num_tokens))
      np.testing.assert_allclose(
        normalised(processor, patched),
        pixels[at : at + tiles, :, :side, :side],
        atol=2e-6,
      )
      at += tiles
    several += len(got.images) > 1
  assert {(2, 2, 4), (2, 1, 4), (1, 2, 4)} <= layouts and several > 5


@families
@pytest.mark.parametrize(
  "edge, tile, splits",
  [
    (64, 16, True),
    (48, 20, True),
    (64, 16, False),
    (16, 16, True),
    (60, 22, True),
  ],
)
def test_tiles_are_cut_as_its_processor_cuts_them(family, edge, tile, splits):
  """One tile alone, edges that are no whole tiles, images not split."""
  reference = pil_of(family)(
    size={"longest_edge": edge},
    max_image_size={"longest_edge": tile},
    do_image_splitting=splits,
  )
  patch = tile // 4
  processor = smolvlm_inputs.SmolVLMProcessor(
    patch_size=patch,
    merge_size=4,
    tile_size=tile,
    splits=splits,
    min_pixels=tile**2,
    max_pixels=edge**2,
  )
  rng = np.random.default_rng(edge)
  for case in range(30):
    height, width = rng.integers(4, 200 if case % 3 else 24, 2)
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    want = reference(
      [[Image.fromarray(pixels)]], return_row_col_info=True, return_tensors="np"
    )
    layout = processor.image_layout(int(width), int(height))
    assert layout == (want["rows"][0][0], want["cols"][0][0], 1)
    got = normalised(processor, processor.patchify(pixels))
    side = 4 * patch
    np.testing.assert_allclose(
      got, want["pixel_values"][0][:, :, :side, :side], atol=2e-6
    )


@families
def test_edges_are_bounded_as_its_processor_bounds_them(family):
  module = importlib.import_module(pil_of(family).__module__)
  processor = smolvlm_inputs.SmolVLMProcessor(
    patch_size=512,
    merge_size=1,
    tile_size=512,
    min_pixels=512**2,
    max_pixels=9000**2,
  )
  rng = np.random.default_rng(0)
  for height, width in rng.integers(1, 300, (200, 2)).tolist():
    want = module.get_resize_output_image_size(
      np.zeros((3, height, width)), 9000
    )
    assert processor._sizes(width, height)[0] == want[::-1]
    assert max(want) == 4096


@pytest.fixture(scope="module")
def turns(policies):
  """Two turns of two sessions, with screenshots: what was sampled and how."""
  return screen_turns.play(
    policies["idefics3"],
    lambda store, seed: talk_of("idefics3", store, seed),
    2,
    CONTEXT,
    prefill_buckets=(40,),
    patch_buckets=(5 * (TILE // PATCH) ** 2,),
  )


def test_completions_are_those_of_transformers_generate(
  directories, policies, turns
):
  _, processor, _ = policies["idefics3"]
  store, played = turns
  pixels_of = lambda images: np.concatenate(
    [
      normalised(processor, processor.patchify(store.get(s.image)))
      for s in images
    ]
  )[None]
  screen_turns.check_generate(
    directories["idefics3"][1],
    policies["idefics3"],
    played,
    pixels_of,
    pad_token_id=0,
  )


def test_the_learner_scores_packed_rows_as_they_were_sampled(policies, turns):
  screen_turns.check_scores(policies["idefics3"], *turns, row_length=700)


# --- files -------------------------------------------------------------------


@families
def test_a_saved_policy_is_a_whole_checkpoint(
  family, directories, policies, tmp_path
):
  model, processor, _ = policies[family]
  checkpoint.save_policy(tmp_path, model, directories[family][0])
  reference, info = transformers.AutoModelForImageTextToText.from_pretrained(
    tmp_path, output_loading_info=True
  )
  assert not any(info.values()), info
  assert type(reference).__name__.startswith(CLASSES[family])
  again = pil_of(family).from_pretrained(tmp_path)
  assert dict(again.size)["longest_edge"] == EDGE
  assert dict(again.max_image_size)["longest_edge"] == TILE
  assert checkpoint.load_policy(tmp_path)[1] == processor
  raw = json.loads((tmp_path / image_settings.PROCESSOR).read_text())
  assert raw == {
    "processor_class": f"{CLASSES[family]}Processor",
    "image_seq_len": 4,
  }


def test_the_small_policy_has_smolvlms_tokens(tmp_path):
  # Fewer tiles than four a side, which a saved policy keeps.
  model, processor, tokenizer = checkpoint.create_policy(
    "smolvlm_tiny", max_pixels=128 * 128 + 5
  )
  renderer = choice.make_renderer(
    tokenizer,
    base.layout_of(processor),
    policy_files.chat_template("smolvlm_tiny"),
  )
  plain = policy_files.load_tokenizer("tiny_vl").get_vocab()
  added = tokenizer.get_vocab().keys() - plain.keys()
  assert {k: v for k, v in tokenizer.get_vocab().items() if k in plain} == plain
  assert added == {
    "<global-img>",
    "<fake_token_around_image>",
    "<image>",
    "<end_of_utterance>",
    *(f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)),
  }
  image = trajectory.ImageRef("0" * 64, 160, 210)
  part = {"type": "image", "image": image}
  prompt = renderer.render([{"role": "user", "content": [part]}])
  text = tokenizer.decode(prompt.tokens, skip_special_tokens=False)
  assert text.startswith(
    "<|im_start|>User:<fake_token_around_image><row_1_col_1><image><image>"
  )
  assert text.endswith(
    "\n\n<fake_token_around_image><global-img>"
    + "<image>" * 4
    + "<fake_token_around_image><end_of_utterance>\nAssistant:"
  )
  (span,) = prompt.images
  assert processor.image_layout(160, 210) == (2, 2, 4)
  assert span.numbers(prompt.tokens).max() + 1 == 5 * 4
  checkpoint.save_policy(tmp_path, model)
  loaded, again, _ = checkpoint.load_policy(tmp_path)
  assert again == processor and loaded.config.max_pixels == 128 * 128
  with pytest.raises(ValueError, match="one tile of 64x64 takes 4096"):
    checkpoint.create_policy("smolvlm_tiny", image_budget=(8000, 2))
  with pytest.raises(ValueError, match="min_pixels=4: every image is enlarged"):
    checkpoint.create_policy("smolvlm_tiny", min_pixels=4)


@pytest.mark.parametrize(
  "change, message",
  [
    ({"resample": 3}, "resample=3, only 1"),
    ({"do_resize": False}, "do_resize=False, only True"),
    ({"size": {"height": 32, "width": 32}}, "size.longest_edge; give that"),
    ({"max_image_size": {"longest_edge": 16}}, "image_size=16.*=18"),
    ({"image_processor_type": "Qwen2VLImageProcessor"}, "for smolvlm"),
  ],
  ids=str,
)
def test_images_that_are_made_otherwise_are_refused(
  directories, change, message, tmp_path
):
  screen_turns.check_image_settings_refused(
    directories["smolvlm"][0], change, message, tmp_path
  )


RAW = qwen_config.to_hf(published_sizes.SIZES["SmolVLM2-2.2B"])


@pytest.mark.parametrize(
  "section, field, value, message",
  [
    ("text_config", "hidden_act", "gelu", "only silu"),
    ("text_config", "mlp_bias", True, "smolvlm has none"),
    ("text_config", "attention_bias", True, "smolvlm has none"),
    ("text_config", "model_type", "mistral", "only llama is computed"),
    ("vision_config", "hidden_act", "gelu", "has gelu_pytorch_tanh"),
    ("vision_config", "image_size", [384, 384], "tiles are squares"),
    ("vision_config", "num_channels", 1, "only 3 is known"),
    ("", "scale_factor", 2, "divide it"),
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


def test_the_published_file_is_the_published_size():
  """With the fields that SmolVLM2-256M-Video-Instruct's config.json has."""
  raw = {
      "architectures": ["SmolVLMForConditionalGeneration"],
      "image_token_id": 49190, "model_type": "smolvlm", "pad_token_id": 2,
      "scale_factor": 4, "tie_word_embeddings": False,
      "text_config": {
          "architectures": ["VLlama3ForCausalLM"], "head_dim": 64,
          "hidden_size": 576, "intermediate_size": 1536, "is_llama_config":
          True, "max_position_embeddings": 8192, "model_type": "llama",
          "num_attention_heads": 9, "num_hidden_layers": 30,
          "num_key_value_heads": 3, "pixel_shuffle_factor": 4,
          "qk_layer_norms": False, "rms_norm_eps": 1e-05, "rope_theta": 100000,
          "torch_dtype": "bfloat16", "use_resampler": False,
          "vocab_size": 49280,
      },
      "vision_config": {
          "hidden_size": 768, "image_size": 512, "max_image_size":
          {"longest_edge": 512}, "model_type": "smolvlm_vision",
          "num_attention_heads": 12, "patch_size": 16,
          "size": {"longest_edge": 2048}, "tie_word_embeddings": False,
      },
      "torch_dtype": "bfloat16", "vocab_size": 49280,
  }  # fmt: skip
  assert qwen_config.from_hf(raw) == published_sizes.SIZES["SmolVLM2-256M"]


def test_spans_that_are_not_their_images_are_refused(policies):
  model, processor, renderer = policies["smolvlm"]
  image = trajectory.ImageRef("0" * 64, 40, 40)
  part = {"type": "image", "image": image}
  prompt = renderer.render([{"role": "user", "content": [part]}])
  (span,) = prompt.images
  assert span.row == 4 and len(prompt.tokens) > span.end
  for bad in (
    dataclasses.replace(span, row=3),
    dataclasses.replace(span, num_tokens=span.num_tokens - 1),
    dataclasses.replace(span, offset=len(prompt.tokens) - 2),
    dataclasses.replace(span, image=trajectory.ImageRef("0" * 64, 90, 40)),
    dataclasses.replace(span, offset=span.offset - 1),
  ):
    with pytest.raises(ValueError, match="runs of 4 and lie within 0"):
      processor.positions(prompt.tokens, [bad])
  del model


def test_weights_round_trip(directories, policies, tmp_path):
  from tests.policy import test_hf_checkpoint as checkpoints

  model = policies["idefics3"][0]
  hf_checkpoint.save_model(tmp_path / "ours", model)
  reference = transformers.AutoModelForImageTextToText.from_pretrained(
    tmp_path / "ours"
  )
  reference.save_pretrained(tmp_path / "theirs")
  checkpoints.assert_same(model, hf_checkpoint.load_model(tmp_path / "theirs"))
