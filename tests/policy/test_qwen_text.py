"""Qwen2.5's and Qwen3's text models against transformers, and their files.

Packed, padded batches of ours; the reference gets each sequence alone. Errors
of gradients are relative to the largest entry of the tensor's gradient.
"""

import dataclasses
import functools
import json
import re
import shutil

from flax import nnx
import numpy as np
import pytest
import trials

torch = pytest.importorskip("torch")

import qwen_reference  # noqa: E402
import transformers  # noqa: E402
from tunix.rl.multi_turn.core import trajectory  # noqa: E402
from tunix.rl.multi_turn.policy import base  # noqa: E402
from tunix.rl.multi_turn.policy import int8  # noqa: E402
from tunix.rl.multi_turn.policy import lora  # noqa: E402
from tunix.rl.multi_turn.policy.checkpoints import checkpoint  # noqa: E402
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint  # noqa: E402
from tunix.rl.multi_turn.policy.checkpoints import policy_files  # noqa: E402
from tunix.rl.multi_turn.policy.models.qwen import qwen_checkpoint  # noqa: E402
from tunix.rl.multi_turn.policy.models.qwen import qwen_text_config  # noqa: E402

TOL = 1e-5

DIFFERENT = ("qwen3", "qwen2 tied", "llama tied", "gemma3_text wide")
"""Each family once, with tied and untied weights."""
UNLIKE = ("llama", "gemma3_text")
"""Slow cases of `.ci/run`: others tie their weights as another family does."""
configuration = pytest.mark.parametrize(
  "name",
  trials.by_default(DIFFERENT, qwen_reference.TEXT_CONFIGS, unlike=UNLIKE),
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
  """Name of a configuration -> its model of transformers, as saved there."""

  @functools.cache
  def make(name):
    return qwen_reference.Reference(
      qwen_reference.TEXT_CONFIGS[name], tmp_path_factory.mktemp("qwen")
    )

  return make


def draw(seed):
  rng = np.random.default_rng(seed)
  return qwen_reference.draw_batch(rng, length=200, patches=0)


# --- numbers -----------------------------------------------------------------


@pytest.mark.parametrize(
  "name, scan_layers",
  trials.by_default(
    [(name, False) for name in DIFFERENT],
    # The scan of stacked layers is that of all families.
    [
      *((name, False) for name in qwen_reference.TEXT_CONFIGS),
      ("qwen2", True),
      ("qwen3 tied", True),
    ],
    unlike=[*((name, False) for name in UNLIKE), ("qwen2", True)],
  ),
)
def test_logits_and_gradients_are_the_references(name, scan_layers, reference):
  batch = draw(3)
  assert len(batch.cases) > 20 and any(c.start > 0 for c in batch.cases)
  _, same = qwen_reference.targets(batch.inputs)
  rng = np.random.default_rng(4)
  weights = np.where(same, rng.normal(size=same.shape), 0).astype(np.float32)
  want = reference(name).run(batch, weights)
  model = reference(name).policy(scan_layers=scan_layers)
  assert model.decoder.stacked == scan_layers
  got = qwen_reference.differentiator(model)(batch, weights, want)
  np.testing.assert_allclose(got.logits, want.logits, rtol=0, atol=TOL)
  np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=0, atol=TOL)
  assert 0.3 < want.logits.std() < 3  # Of order 1.
  assert set(got.gradients) == set(want.gradients)
  for key, value in want.gradients.items():
    error = np.abs(got.gradients[key] - value).max() / np.abs(value).max()
    assert error <= TOL, f"{key}: {error:.1e}"


@configuration
def test_layers_of_two_kinds_of_attention_are_not_stacked(name, reference):
  model = reference(name).policy(scan_layers=True)
  assert model.decoder.stacked == (not name.startswith("gemma3_text"))


@configuration
def test_transformers_loads_what_is_saved_here(name, reference, tmp_path):
  model = reference(name).policy()
  config = qwen_reference.TEXT_CONFIGS[name]
  assert model.config == config
  hf_checkpoint.save_model(tmp_path, model)
  loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
  assert (
    type(loaded).__name__ == qwen_text_config.to_hf(config)["architectures"][0]
  )
  want = reference(name).module.state_dict()
  got = loaded.state_dict()
  assert got.keys() == want.keys()
  for key, value in want.items():
    assert torch.equal(got[key], value), key
  batch = draw(5)
  np.testing.assert_allclose(
    reference(name).run(batch, module=loaded.eval().float()).logits,
    qwen_reference.scorer(model)(batch).logits,
    rtol=0,
    atol=TOL,
  )


def test_a_fresh_policy_is_saved_for_transformers(tmp_path):
  model, _, encoder = checkpoint.create_policy("qwen3_text_tiny", seed=3)
  checkpoint.save_policy(tmp_path, model)
  loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
  assert type(loaded).__name__ == "Qwen3ForCausalLM"
  ids = np.array(encoder.encode("Add 3 and 4.").ids, np.int32)
  with torch.no_grad():
    want = loaded(torch.tensor(ids).long()[None]).logits[0].numpy()
  again, processor, _ = checkpoint.load_policy(tmp_path)
  assert model.config == dataclasses.replace(again.config, remat="none")
  score = nnx.jit(lambda model, inputs: model.logits(model(inputs)))
  got = np.asarray(score(again, inputs_of(processor, ids)))[0]
  np.testing.assert_allclose(got, want, rtol=0, atol=TOL)
  # Once more, as a run with policy=<directory> saves it.
  checkpoint.save_policy(tmp_path / "again", again, tmp_path)
  third, _, _ = checkpoint.load_policy(tmp_path / "again")
  parameters = checkpoint.named_parameters(model)
  for key, value in checkpoint.named_parameters(third).items():
    np.testing.assert_array_equal(value, parameters[key], err_msg=key)


def inputs_of(processor, ids):
  t = len(ids)
  return base.PolicyInputs(
    tokens=ids[None],
    positions=processor.positions(ids)[None],
    segment_ids=np.ones((1, t), np.int32),
    vision_index=np.full((1, t), -1, np.int32),
    patches=np.zeros((1, 0, processor.patch_bytes), np.uint8),
    patch_segments=np.zeros((1, 0), np.int32),
    patch_positions=np.zeros((1, 0, processor.position_axes), np.int32),
  )


@pytest.mark.parametrize(
  "name",
  trials.by_default(
    ["gemma3_text"],
    ["qwen3", "qwen2", "llama", "gemma3_text"],
    unlike=["qwen3", "qwen2", "llama"],
  ),
)
def test_an_adapter_is_merged_into_what_it_computes(name, reference):
  model = hf_checkpoint.load_model(reference(name).directory)
  lora.add(model, rank=2, alpha=4.0)
  rng = np.random.default_rng(0)
  for layer in lora.adapted(model):
    b = layer.linear.lora_b
    b.set_value(rng.normal(0, 0.1, b.shape).astype(np.float32))
  batch = draw(6)
  adapted = qwen_reference.scorer(model)(batch).logits
  plain = qwen_reference.scorer(reference(name).policy())(batch).logits
  assert np.abs(adapted - plain).max() > 0.01
  lora.merge(model)
  merged = qwen_reference.scorer(model)(batch).logits
  np.testing.assert_allclose(merged, adapted, rtol=0, atol=TOL)


def test_an_int8_copy_rounds_the_decoder(reference):
  model = reference("qwen3").policy()
  copy = int8.quantized(model)
  assert copy.model.layers[0].mlp.up_proj.weight[...].dtype == np.int8
  batch = draw(7)
  got = qwen_reference.scorer(copy)(batch).logits
  want = qwen_reference.scorer(model)(batch).logits
  assert 0 < np.abs(got - want).max() < 0.3


# --- names and files ---------------------------------------------------------


def test_placeholders_are_banned_and_images_refused():
  model, processor, encoder = checkpoint.create_policy("qwen3_text_tiny")
  assert model.config.banned_token_ids == (
    encoder.token_to_id("<|image_pad|>"),
    encoder.token_to_id("<|video_pad|>"),
  )
  refused = pytest.raises(
    ValueError, match="qwen3_text_tiny reads text only.*vision-language"
  )
  with refused:
    processor.num_image_tokens(64, 48)
  with refused:
    processor.patchify(np.zeros((48, 64, 3), np.uint8))
  span = trajectory.ImageSpan(trajectory.ImageRef("0" * 64, 64, 48), 1, 2)
  with refused:
    processor.positions(np.arange(4), [span])
  np.testing.assert_array_equal(
    processor.positions(np.arange(5), (), 3), [[3] * 3, [4] * 3]
  )


def test_a_published_directory_needs_no_chat_template_file(reference, tmp_path):
  """Qwen3's files hold it in tokenizer_config.json."""
  source = tmp_path / "published"
  shutil.copytree(reference("qwen3").directory, source)
  with pytest.raises(FileNotFoundError, match="tokenizer.json"):
    checkpoint.load_policy(source)
  tokenizer = {
    "version": "1.0",
    "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    "added_tokens": [],
  }
  (source / "tokenizer.json").write_text(json.dumps(tokenizer))
  model, processor, _ = checkpoint.load_policy(source)
  assert model.config.banned_token_ids == ()
  assert processor.policy == str(source)
  checkpoint.save_policy(tmp_path / "out", model, source)
  assert (tmp_path / "out" / "tokenizer.json").is_file()
  checkpoint.check(tmp_path / "out", model)
  fresh, _, _ = checkpoint.create_like(source, seed=1)
  assert fresh.config == model.config


def test_weights_of_another_architecture_are_refused(tmp_path):
  model, _, _ = checkpoint.create_policy("qwen3_text_tiny")
  checkpoint.save_policy(tmp_path, model)
  other, _, _ = checkpoint.create_policy("qwen3_vl_tiny")
  with pytest.raises(ValueError, match="another architecture"):
    checkpoint.check(tmp_path, other)
  with pytest.raises(ValueError, match="another architecture"):
    checkpoint.check(policy_files.DATA / "qwen3_vl_tiny", model)
  with pytest.raises(ValueError, match="'max_pixels' cannot be changed"):
    checkpoint.load_policy(tmp_path, max_pixels=1)
  with pytest.raises(ValueError, match="no policy is called.*qwen3_text_tiny"):
    checkpoint.create_policy("qwen3_text_huge")


@configuration
def test_a_configuration_survives_its_file(name):
  config = qwen_reference.TEXT_CONFIGS[name]
  raw = json.loads(json.dumps(qwen_text_config.to_hf(config)))
  assert qwen_text_config.from_hf(raw) == config


# As published, Qwen/Qwen3-0.6B and Qwen/Qwen2.5-0.5B-Instruct.
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False,
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
    "initializer_range": 0.02, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "max_window_layers": 28,
    "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 21,
    "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip


@pytest.mark.parametrize(
  "raw, parameters", [(QWEN3, 596_049_920), (QWEN2, 494_032_768)]
)
def test_a_published_file_has_the_references_parameters(raw, parameters):
  config = qwen_text_config.from_hf(raw)
  with torch.device("meta"):
    module = qwen_reference.build(config)
  want = {key: tuple(w.shape) for key, w in module.named_parameters()}
  abstract = hf_checkpoint.abstract_model(
    dataclasses.replace(config, scan_layers=True)
  )
  got = {
    key: tensor.shape
    for tensor in hf_checkpoint.tensors_of(abstract)
    for key in tensor.keys
  }
  assert got == want
  assert sum(np.prod(s, dtype=np.int64) for s in got.values()) == parameters


@pytest.mark.parametrize(
  "raw, field, value, message",
  [
    (QWEN3, "model_type", "qwen3_moe", "='qwen3_moe' is none of"),
    (QWEN3, "hidden_act", "gelu", "hidden_act='gelu'"),
    (QWEN2, "use_sliding_window", True, "no windows here"),
    (QWEN3, "layer_types", ["full_attention", "sliding"], "['sliding']"),
    (QWEN3, "attention_bias", True, "have none here"),
    (
      QWEN3,
      "rope_scaling",
      {"rope_type": "dynamic", "factor": 2},
      "rope_type='dynamic'",
    ),
    (
      QWEN3,
      "quantization_config",
      {"quant_method": "awq"},
      "quant_method='awq'",
    ),
    (QWEN3, "rope_parameters", {"rope_theta": 5.0}, "rope_theta=1000000"),
    (QWEN3, "num_key_value_heads", 5, "heads=16 is not a multiple"),
    (QWEN3, "num_attention_heads", 0, ">= 1, got 0"),
    (QWEN3, "head_dim", 7, "head_dim=7 must be even"),
    (QWEN2, "head_dim", 32, "head_dim=32, qwen2's is"),
  ],
)
def test_what_would_be_computed_wrongly_is_refused(raw, field, value, message):
  with pytest.raises(ValueError, match=re.escape(message)) as error:
    qwen_text_config.from_hf({**raw, field: value})
  assert field.removesuffix("_scaling") in str(error.value)


def test_only_what_a_run_decides_can_be_changed():
  config = qwen_text_config.from_hf(QWEN3, compute_dtype="bfloat16")
  assert config.compute_dtype == "bfloat16"
  with pytest.raises(ValueError, match="'text' .* cannot be changed.*remat"):
    qwen_text_config.from_hf(QWEN3, text=None)
  with pytest.raises(ValueError, match="remat must be one of none, dots"):
    qwen_checkpoint.small_config("qwen3_text_tiny", remat="all")
