"""The gated delta rule against its token-by-token definition in float64."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tunix.rl.multi_turn.policy.layers import decoder_layers as layers
from tunix.rl.multi_turn.policy.layers import linear_attention
from tunix.rl.multi_turn.policy.models.qwen import qwen_shapes

ROWS, TOKENS, HEADS, KEY, VALUE = 2, 150, 3, 16, 8


def inputs(seed=0):
  """q, k, v, g, beta: strong and weak decay, and a run of equal keys."""
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.normal(size=(ROWS, TOKENS, HEADS, *shape))
  q, k, v = draw(KEY), draw(KEY), draw(VALUE)
  g, beta = -np.exp(2 * draw()), rng.uniform(size=(ROWS, TOKENS, HEADS))
  q[:, 20:60], k[:, 20:60] = q[:, 20:21], k[:, 20:21]
  g[:, 20:60], beta[:, 20:60] = -1e-4, 0.999
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  parts = unit(q) * KEY**-0.5, unit(k), v, g, beta
  return [x.astype(np.float32) for x in parts]


def definition(parts, row, start, end, state=None):
  """float64: what tokens [start, end) of a row read, and the state."""
  q, k, v, g, beta = (x[row].astype(np.float64) for x in parts)
  shape = HEADS, KEY, VALUE
  state = np.zeros(shape) if state is None else state.astype(np.float64)
  out = []
  for i in range(start, end):
    state = state * np.exp(g[i])[:, None, None]
    stored = np.einsum("nhv,nh->nv", state, k[i])
    change = (v[i] - stored) * beta[i][:, None]
    state = state + k[i][:, :, None] * change[:, None]
    out.append(np.einsum("nhv,nh->nv", state, q[i]))
  return np.array(out), state


run = jax.jit(linear_attention.delta_rule, static_argnums=7)
ZERO = jnp.zeros((ROWS, HEADS, KEY, VALUE))


@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_chunks_are_the_definition_in_every_segment(chunk):
  parts = inputs()
  segments = np.ones((ROWS, TOKENS), np.int32)
  segments[0, 70:], segments[0, 120:], segments[1, 33:] = 2, 3, 2
  out, state = run(*parts, segments, ZERO, chunk)
  for row, cuts in enumerate([(0, 70, 120, TOKENS), (0, 33, TOKENS)]):
    for start, end in zip(cuts, cuts[1:]):
      want, last = definition(parts, row, start, end)
      np.testing.assert_allclose(out[row, start:end], want, atol=2e-6)
    np.testing.assert_allclose(state[row], last, atol=2e-6)


def test_a_state_goes_on_where_tokens_were_cut():
  parts = inputs(1)
  segments = np.ones((ROWS, TOKENS), np.int32)
  state, outputs, at = ZERO, [], 0
  for count in (37, 64, 1, 48):
    part = [x[:, at : at + count] for x in (*parts, segments)]
    if count == 1:
      one, state = linear_attention.step(*(x[:, 0] for x in part[:5]), state)
      out = one[:, None]
    else:
      out, state = run(*part, state, 64)
    outputs.append(out)
    at += count
  for row in range(ROWS):
    want, last = definition(parts, row, 0, TOKENS)
    np.testing.assert_allclose(np.concatenate(outputs, 1)[row], want, atol=2e-6)
    np.testing.assert_allclose(state[row], last, atol=2e-6)


def test_gradients_of_chunks_are_those_of_single_tokens():
  parts = inputs(2)
  segments = np.ones((ROWS, TOKENS), np.int32)
  segments[0, 70:] = 2
  weights = np.random.default_rng(3).normal(size=(ROWS, TOKENS, HEADS, VALUE))

  def loss(parts, chunk):
    out, _ = linear_attention.delta_rule(*parts, segments, ZERO, chunk)
    return (out * weights).sum()

  grad = jax.jit(jax.grad(loss), static_argnums=1)
  for got, want in zip(grad(parts, 64), grad(parts, 1)):
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_a_neighbour_in_the_row_changes_nothing():
  """The whole layer: convolution and rule, on either side of a border."""
  text = qwen_shapes.TextConfig(
      vocab_size=8, hidden_size=24, intermediate_size=8, num_hidden_layers=1,
      num_attention_heads=1, num_key_value_heads=1, linear_num_key_heads=2,
      linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6,
      linear_conv_kernel_dim=4,
  )  # fmt: skip
  init = layers.Init(nnx.Rngs(0), std=0.3)
  net = linear_attention.GatedDeltaNet(text, init, None)
  rng = np.random.default_rng(4)
  x = rng.normal(size=(1, 90, 24)).astype(np.float32)
  segments = np.repeat([1, 2, 3], [31, 40, 19])[None].astype(np.int32)
  layer = nnx.jit(lambda net, x, ids: net(x, ids))
  packed = layer(net, x, segments)
  own = (segments == 2).astype(np.int32)
  alone = layer(net, x * own[..., None], own)
  np.testing.assert_array_equal(packed[:, 31:71], alone[:, 31:71])
  # A whole chunk later, where sums are cut at the same tokens.
  late = np.pad(own, [(0, 0), (linear_attention.CHUNK, 0)])
  moved = layer(
    net, np.pad(x, [(0, 0), (linear_attention.CHUNK, 0), (0, 0)]), late
  )
  np.testing.assert_allclose(moved[late == 1], alone[own == 1], atol=5e-6)
  other = x.copy()
  other[:, :31] = rng.normal(size=(1, 31, 24))
  np.testing.assert_array_equal(
    np.asarray(layer(net, other, segments))[:, 31:], packed[:, 31:]
  )
