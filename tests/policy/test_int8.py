"""Int8 copies: how far a weight moves, and that the copy computes with it."""

import asyncio

from flax import nnx
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trials
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.policy import int8
from tunix.rl.multi_turn.policy import lora
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

from tests.policy import test_hf_checkpoint as checkpoints
from tests.policy import test_lora as adapters

FAMILIES = adapters.FAMILIES
STACKED = ("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl")
pytestmark = pytest.mark.timeout(300)

matrices = hnp.arrays(
  np.float32,
  hnp.array_shapes(min_dims=2, max_dims=3, min_side=1, max_side=9),
  elements=st.floats(-1e4, 1e4, width=32),
)


@settings(max_examples=200, deadline=None)
@given(matrices)
@pytest.mark.slow
def test_a_weight_moves_by_half_a_level_at_most(weight):
  levels, scale = int8.quantize(weight)
  most = np.abs(weight).max(-2, keepdims=True)
  assert levels.dtype == jnp.int8
  assert np.abs(np.asarray(levels, int)).max() <= 127
  off = np.abs(np.asarray(levels, np.float32) * scale - weight)
  # Denormal scales are flushed to 0, and their channels with them.
  assert (off <= most / 254 * 1.001 + 1e-35).all()


def restored(model):
  """The float policy whose weights are those of the int8 copy."""
  converted = int8.Converter(model)(named(model))
  copy = nnx.clone(model)
  for path, variable in nnx.to_flat_state(nnx.state(copy)):
    path = tuple(map(str, path))
    scale = converted.get((*path[:-1], path[-1] + "_scale"))
    if scale is not None:
      variable.set_value(converted[path].astype(jnp.float32) * scale)
  return copy


def named(model):
  return {
    tuple(map(str, path)): variable[...]
    for path, variable in nnx.to_flat_state(nnx.state(model))
  }


@nnx.jit
def _logits(model, tokens):
  b, n = tokens.shape
  hidden, _ = model.extend(
    tokens,
    jnp.broadcast_to(jnp.arange(n)[None, :, None], (b, n, 3)),
    jnp.zeros(b, int),
    jnp.full(b, n),
    model.init_cache(b, n + 4),
  )
  return model.logits(hidden)


def logits(model, seed=0):
  rng = np.random.default_rng(seed)
  return _logits(model, rng.integers(0, 60, (2, 12)))


@pytest.mark.parametrize(
  "family, scan",
  trials.by_default(
    [("qwen2_5_vl", False), ("qwen3_vl_moe", True)],
    # The scan of stacked layers is that of all families.
    [*((f, False) for f in FAMILIES), *((f, True) for f in STACKED)],
    unlike=[
      *((f, False) for f in (*checkpoints.DIFFERENT, *checkpoints.UNLIKE)),
      ("qwen3_vl", True),
    ],
  ),
)
def test_the_copy_computes_with_the_rounded_weights(family, scan):
  model = adapters.policy(family, scan_layers=scan)
  copy = int8.quantized(model)
  got, want = logits(copy), logits(restored(model))
  scale = np.abs(want).max()
  np.testing.assert_allclose(got / scale, want / scale, atol=1e-5)
  moved = np.abs(got - logits(model)).max() / scale
  assert 1e-5 < moved < 0.2  # It is another policy, if a near one.


def test_bfloat16_activations_lose_no_more_to_the_copy():
  """The product with a unit vector is the rounded matrix's row."""
  rng = np.random.default_rng(0)
  model = adapters.policy("qwen3_vl", compute_dtype="bfloat16")
  linear = model.language_model.layers[0].self_attn.q_proj
  inputs, outputs = linear.weight.shape
  # Channels of very different sizes.
  weight = rng.normal(size=(inputs, outputs)) * 10.0 ** rng.uniform(
    -2, 2, outputs
  )
  linear.weight.set_value(jnp.asarray(weight, jnp.float32))
  copy = int8.quantized(model).language_model.layers[0].self_attn.q_proj
  got = np.asarray(copy(jnp.eye(inputs, dtype=jnp.bfloat16)), np.float32)
  off = np.abs(got - weight) / np.abs(weight).max(0)
  assert off.max() < 1 / 254 + 2**-8  # Half a level, and bfloat16's own.
  assert abs(np.mean((got - weight) / np.abs(weight).max(0))) < 1e-4


def test_a_copy_is_refused_where_the_weights_themselves_are_needed(tmp_path):
  model = adapters.adapted("qwen3_vl")
  copy = int8.quantized(model)
  with pytest.raises(ValueError, match="rounded to int8"):
    int8.quantized(copy)
  with pytest.raises(ValueError, match="rounded to int8"):
    lora.merge(copy)
  lora.remove(copy)
  with pytest.raises(ValueError, match="rounded to int8"):
    checkpoint.save_policy(tmp_path / "copy", copy)
  assert not list((tmp_path / "copy").glob("*.safetensors"))


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_of_the_decoder_take_a_byte_a_number(family):
  copy = named(int8.quantized(adapters.policy(family)))
  kinds = {path for path, x in copy.items() if x.dtype == jnp.int8}
  for path, x in copy.items():
    matrix = (
      "layers" in path
      and path[0] == "language_model"
      and (
        path[-2].endswith(("_proj", "in_proj_qkv", "in_proj_z"))
        or path[-2] == "experts"
      )
    )
    if matrix and path[-1] in ("weight", "gate_up_proj", "down_proj"):
      assert path in kinds, path
    elif path[-1].endswith("_scale"):
      assert x.dtype == jnp.float32
    else:
      assert x.dtype == jnp.float32 and path not in kinds, path


def test_the_original_is_left_alone():
  model = adapters.policy("qwen3_vl")
  before = named(model)
  int8.quantized(model)
  after = named(model)
  assert all(after[path] is x for path, x in before.items())


def test_an_adapter_stays_as_it_is_on_top():
  model = adapters.adapted("qwen3_vl")
  copy = int8.quantized(model)
  base = nnx.clone(model)
  lora.remove(base)
  np.testing.assert_allclose(
    logits(copy), logits(restored(model)), rtol=1e-5, atol=1e-4
  )
  assert np.abs(logits(copy) - logits(int8.quantized(base))).max() > 1e-3


def test_what_did_not_change_is_not_rounded_again():
  model = adapters.adapted("qwen3_vl")
  convert = int8.Converter(model)
  weights = named(model)
  first, again = convert(weights), convert(weights)
  assert all(first[path] is again[path] for path in first)
  copy = named(convert.copy())
  assert all(copy[path] is x for path, x in first.items())
  path = next(p for p in weights if p[-1] == "weight" and "q_proj" in p)
  other = convert(weights | {path: weights[path] * 2})
  changed = {p for p in first if other[p] is not first[p]}
  assert changed == {path, (*path[:-1], "weight_scale")}


def test_a_policy_without_such_matrices_is_refused():
  model, _, _ = checkpoint.create_policy("nano")
  with pytest.raises(ValueError, match="int8 weights are for Qwen policies"):
    int8.quantized(model)


@pytest.mark.slow
def test_the_engine_samples_from_the_rounded_weights_also_of_an_update():
  model, processor, _ = checkpoint.create_policy("qwen3_vl_tiny")
  nnx.update(
    model, jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, nnx.state(model))
  )
  tokens = np.arange(5, 15, dtype=np.int32)
  sampling = policy_client.SamplingParams(max_new_tokens=6, temperature=1.0)

  def check(policy):
    completion = asyncio.run(
      engine.generate(
        policy_client.TokenPrompt(tokens), sampling, session="one"
      )
    )
    full = np.append(tokens, completion.tokens)[None]
    n = full.shape[1]
    scores = _logits(policy, full)
    scores = scores.at[..., list(model.config.banned_token_ids)].set(-1e30)
    logprobs = np.asarray(jax.nn.log_softmax(scores, -1))[0]
    want = logprobs[np.arange(9, n - 1), full[0, 10:]]
    np.testing.assert_allclose(completion.logprobs, want, atol=1e-4)
    return completion

  with engine_lib.RolloutEngine(
    model,
    processor,
    images.ImageStore(),
    engine_config.EngineConfig(
      slots=2, context_length=32, weights="int8", on_update="recompute"
    ),
    image_sizes=((16, 16),),
    banned_token_ids=model.config.banned_token_ids,
  ) as engine:
    engine.warm_up()
    check(restored(model))
    newer = nnx.clone(model)
    nnx.update(newer, jax.tree.map(lambda x: x * 1.1, nnx.state(newer)))
    engine.update_weights(1, nnx.state(newer)).result(60)
    assert check(restored(newer)).versions.min() == 1
    assert engine.stats()["compiles_after_warm_up"] == 0
    with pytest.raises(ValueError, match="has shape"):
      engine.update_weights(
        2, jax.tree.map(lambda x: x[:1] if x.ndim == 2 else x, nnx.state(model))
      )


def test_unknown_weights_are_refused():
  with pytest.raises(ValueError, match="weights\n.*'same' or 'int8'.*int4"):
    engine_config.EngineConfig(weights="int4")
