"""Scaled rotary positions against transformers'."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import published_sizes
import pytest
import trials
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy.layers import decoder_layers as layers
from tunix.rl.multi_turn.policy.layers import rope_scaling
from tunix.rl.multi_turn.policy.models.qwen import qwen_config
from tunix.rl.multi_turn.policy.models.qwen import qwen_text_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
rope_utils = pytest.importorskip("transformers.modeling_rope_utils")

import qwen_reference  # noqa: E402

FAMILIES = tuple(
  family
  for family in (*qwen_config.FAMILIES, *qwen_text_config.FAMILIES)
  if family != "opencua"  # Its classes come with its checkpoints.
)
# As the published READMEs advise it, and every field that is read.
ASKED = {
    "yarn": {
        "rope_type": "yarn", "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "yarn of 4.45": {
        "type": "yarn", "factor": 2.0,
        "original_max_position_embeddings": 262144,
    },
    "yarn of the context's length": {"rope_type": "yarn", "factor": 3.0},
    "betas": {
        "rope_type": "yarn", "factor": 8.0, "beta_fast": 20, "beta_slow": 2,
        "original_max_position_embeddings": 4096, "truncate": False,
    },
    "attention": {
        "rope_type": "yarn", "factor": 16.0, "attention_factor": 0.7,
        "original_max_position_embeddings": 8192,
    },
    "mscale": {
        "rope_type": "yarn", "factor": 40.0, "mscale": 0.8,
        "mscale_all_dim": 1.2, "original_max_position_embeddings": 4096,
    },
    "a short context": {
        "rope_type": "yarn", "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "less than one": {
        "rope_type": "yarn", "factor": 0.5,
        "original_max_position_embeddings": 2048,
    },
    "linear": {"rope_type": "linear", "factor": 2.5},
    # As published: Llama 3.1 and 3.2.
    "llama 3.1": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
    "llama 3.2": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
}  # fmt: skip


def raw_of(family, scaling):
  """A config.json with these rotary positions."""
  vl = family in qwen_config.FAMILIES
  if vl:
    sizes = {
      "qwen3_vl": "Qwen3-VL-8B",
      "qwen3_vl_moe": "Qwen3-VL-30B-A3B",
      "qwen2_5_vl": "Qwen2.5-VL-7B",
      "qwen2_vl": "Qwen2-VL-7B",
      "qwen3_5": "Qwen3.5-9B",
      "qwen3_5_moe": "Qwen3.5-35B-A3B",
      "glm4v": "GLM-4.1V-9B",
      "glm4v_moe": "GLM-4.5V",
      "gemma3": "Gemma-3-4B",
      "smolvlm": "SmolVLM2-256M",
      "idefics3": "SmolVLM2-256M",
    }
    config = dataclasses.replace(
      published_sizes.SIZES[sizes[family]], family=family
    )
    raw = qwen_config.to_hf(config)
  else:
    raw = qwen_text_config.to_hf(qwen_reference.TEXT_CONFIGS[family])
  part = raw["text_config"] if vl else raw
  rope = part["rope_parameters"]
  if family.startswith("gemma3"):  # Those of full attention.
    rope = rope["full_attention"]
    rope.pop("factor", None)
  rope |= scaling
  if "type" in scaling:
    del rope["rope_type"]
  return json.loads(json.dumps(raw))


def read(raw):
  vl = raw["model_type"] in qwen_config.FAMILIES
  return (qwen_config if vl else qwen_text_config).from_hf(raw).text


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ASKED)
def test_frequencies_are_transformers(family, name):
  raw = raw_of(family, ASKED[name])
  text = read(raw)
  fields = dict(raw)
  config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
  config = config.get_text_config()
  kind = text.rope_scaling.kind
  windows = family.startswith("gemma3")
  layers_ = {"layer_type": "full_attention"} if windows else {}
  want, factor = rope_utils.ROPE_INIT_FUNCTIONS[kind](config, "cpu", **layers_)
  plain = layers.rope_frequencies(text.rotary_dim, text.rope_theta)
  got = text.rope_scaling.scaled(plain, text.rope_theta)
  assert got.dtype == np.float32
  np.testing.assert_allclose(got, want.numpy(), rtol=2e-6)
  assert text.rope_scaling.attention_factor == pytest.approx(factor, rel=1e-7)
  if kind == "yarn" and text.rope_scaling.factor > 1 and text.rotary_dim > 64:
    assert not np.allclose(got, plain, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["betas", "mscale", "linear"])
def test_scaling_survives_its_file(family, name):
  raw = raw_of(family, ASKED[name])
  module = qwen_config if family in qwen_config.FAMILIES else qwen_text_config
  config = module.from_hf(raw)
  again = json.loads(json.dumps(module.to_hf(config)))
  assert module.from_hf(again) == config


@pytest.mark.peer("transformers")
@pytest.mark.parametrize(
  "name", trials.by_default(["qwen3_vl"], ["qwen3_vl", "qwen2_5_vl", "qwen3"])
)
@pytest.mark.parametrize(
  "kind", trials.by_default(["yarn"], ["yarn", "linear"], unlike=["linear"])
)
def test_logits_are_transformers(name, kind, tmp_path):
  scaling = {
    # A context that the test's sequences are longer than.
    "yarn": rope_scaling.RopeScaling(
      "yarn", 4.0, 16, 8.0, 1.0, attention_factor=1.3
    ),
    "linear": rope_scaling.RopeScaling("linear", 2.5),
  }[kind]
  base = {**qwen_reference.CONFIGS, **qwen_reference.TEXT_CONFIGS}[name]
  config = dataclasses.replace(
    base, text=dataclasses.replace(base.text, rope_scaling=scaling)
  )
  reference = qwen_reference.Reference(config, tmp_path)
  assert hf_checkpoint.load_config(tmp_path).text.rope_scaling == scaling
  rng = np.random.default_rng(0)
  patches = 556 if name in qwen_reference.CONFIGS else 0
  batch = qwen_reference.draw_batch(rng, rows=2, buffers=1, patches=patches)
  want = reference.run(batch)
  got = qwen_reference.scorer(reference.policy())(batch)
  np.testing.assert_allclose(got.logits, want.logits, atol=5e-5)
  plain = hf_checkpoint.load_model(tmp_path)
  plain.decoder.config = dataclasses.replace(base)
  other = qwen_reference.scorer(plain)(batch)
  assert np.abs(other.logits - want.logits).max() > 1e-2


def test_dynamic_positions_are_refused_for_what_they_are():
  """Plain within the trained context; beyond it every angle changes, of tokens
  that a cache holds already."""
  text = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "rope_parameters": {
      "rope_type": "dynamic",
      "factor": 2.0,
      "rope_theta": 1e6,
    },
  }
  config = transformers.Qwen3Config(**text)
  of = lambda length: rope_utils.ROPE_INIT_FUNCTIONS["dynamic"](
    config, "cpu", seq_len=length
  )[0].numpy()
  plain = layers.rope_frequencies(16, 1e6)
  for length in (1, 31, 32):
    np.testing.assert_allclose(of(length), plain, rtol=2e-6)
  assert not np.allclose(of(33), plain, rtol=1e-3)
  assert not np.allclose(of(64), of(33), rtol=1e-3)
  raw = raw_of("qwen3", {"rope_type": "dynamic", "factor": 2.0})
  raw["max_position_embeddings"] = 4096
  with pytest.raises(ValueError, match="=4096 tokens it changes nothing: rem"):
    read(raw)


def test_a_cache_goes_on_with_scaled_positions():
  """Positions are absolute: a later token's angle is of its own place."""
  scaling = rope_scaling.RopeScaling("yarn", 4.0, 16)
  frequencies = scaling.scaled(layers.rope_frequencies(16, 1e4), 1e4)
  axes = layers.mrope_axes((4, 2, 2), True)
  place = jnp.arange(40)[None, :, None] * jnp.ones(3, jnp.int32)
  full = layers.mrope(place, axes, frequencies)
  last = layers.mrope(place[:, 39:], axes, frequencies)
  for a, b in zip(full, last):
    np.testing.assert_array_equal(a[:, 39:], b)


@pytest.mark.parametrize(
  "fields, message",
  [
    (("ntk", 2.0), "kind must be one of"),
    (("linear", 0.0), "factor must be > 0"),
    (("yarn", 2.0, 0), "original_max_position_embeddings must be >= 1"),
  ],
)
def test_impossible_scalings_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    rope_scaling.RopeScaling(*fields)
