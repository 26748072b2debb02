"""Attention block by block against attention under the explicit mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trials
from tunix.rl.multi_turn.policy import blocks
from tunix.rl.multi_turn.policy import kernels

B, N, K, H = 2, 4, 2, 8


def case(t, kind, prefix, seed=4):
  """Queries, keys, values, segments and the other segments that are seen."""
  rng = np.random.default_rng(seed)
  qkv = tuple(
      jnp.asarray(rng.normal(size=(B, t, heads, H)), jnp.float32)
      for heads in (N, K, K)
  )
  segments = rng.integers(0, 6, (B, t)).astype(np.int32)
  if kind == "in turn":
    segments = np.sort(segments, axis=1)
  elif kind == "one":
    segments[:] = 3
  elif kind == "filled":  # Padding after the last segment.
    segments = np.sort(segments, axis=1) + 1
    segments[:, t - t // 5 :] = -1
  other = np.where(segments > 2, 1, -1).astype(np.int32) if prefix else None
  return qkv, segments, other


def masked(q, k, v, segments, other, causal):
  mask = segments[:, :, None] == segments[:, None]
  if other is not None:
    mask |= other[:, :, None] == segments[:, None]
  if causal:
    mask &= np.tri(segments.shape[1], dtype=bool)
  return kernels.attend(q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask)


def value_and_slopes(attention, qkv):
  """The attention, and a random weighting's gradients."""
  weigh = np.random.default_rng(5).normal(size=qkv[0].shape)

  def weighed(*qkv):
    mixed = attention(*qkv)
    return jnp.sum(mixed * weigh), mixed

  slopes, mixed = jax.jit(
      jax.grad(weighed, argnums=(0, 1, 2), has_aux=True)
  )(*qkv)
  return mixed, slopes


@pytest.mark.parametrize("t", trials.by_default([401], (160, 401)))
@pytest.mark.parametrize(
    "kind",
    trials.by_default(
        ["one", "mixed"], ("in turn", "one", "filled", "mixed")
    ),
)
@pytest.mark.parametrize("prefix", (False, True))
@pytest.mark.parametrize("causal", (False, True))
def test_values_and_gradients_are_those_under_the_mask(
    t, kind, prefix, causal, monkeypatch
):
  monkeypatch.setattr(blocks, "_most", lambda causal: 48)
  qkv, segments, other = case(t, kind, prefix)
  got, slopes = value_and_slopes(
      lambda *qkv: blocks.attend(*qkv, segments, other, causal=causal), qkv
  )
  want, want_slopes = value_and_slopes(
      lambda *qkv: masked(*qkv, segments, other, causal), qkv
  )
  np.testing.assert_allclose(got, want, atol=3e-6)
  for a, b in zip(slopes, want_slopes, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_scores_of_any_size_are_safe():
  """Large ones neither overflow nor hide the keys that come later."""
  (q, k, v), segments, _ = case(300, "in turn", False)
  got = blocks.attend(200 * q, k, v, segments, causal=True)
  want = masked(200 * q, k, v, segments, None, True)
  # Scores of a thousand carry errors of 1e-4.
  np.testing.assert_allclose(got, want, atol=5e-4)


def compiled(t):
  """Compiles the gradient's program for one row of `t` tokens."""
  shape = lambda heads: jax.ShapeDtypeStruct((1, t, heads, H), jnp.float32)
  ids = jax.ShapeDtypeStruct((1, t), jnp.int32)
  attend = functools.partial(blocks.attend, causal=True)
  slopes = jax.grad(
      lambda *qkv: jnp.sum(attend(*qkv) ** 2), argnums=(0, 1, 2)
  )
  return jax.jit(slopes).lower(shape(N), shape(K), shape(K), ids).compile()


def test_memory_grows_with_the_tokens_and_the_program_not_at_all():
  short, long = compiled(4096), compiled(32768)
  temporary = lambda c: c.memory_analysis().temp_size_in_bytes
  assert temporary(long) < 10 * temporary(short)
  assert len(long.as_text()) < 1.1 * len(short.as_text())
