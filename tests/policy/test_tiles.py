"""Attention tile by tile against attention under the explicit mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tunix.rl.multi_turn.policy import kernels
from tunix.rl.multi_turn.policy import tiles

B, T, N, K, H = 2, 160, 4, 2, 8


def case(prefix, causal):
  """Queries, keys, values, `tiles.Ids` and the mask they stand for."""
  rng = np.random.default_rng(4)
  q, k, v = (
      jnp.asarray(rng.normal(size=(B, T, heads, H)), jnp.float32)
      for heads in (N, K, K)
  )
  segments = np.sort(rng.integers(0, 4, (B, T)), axis=1).astype(np.int32)
  other = np.where(segments == 3, 1, -1).astype(np.int32) if prefix else None
  mask = segments[:, :, None] == segments[:, None]
  if prefix:
    mask |= other[:, :, None] == segments[:, None]
  if causal is not None:
    mask &= np.tri(T, T, dtype=bool)
  return (q, k, v), tiles.Ids(segments, segments, other), mask


def slopes(attention, qkv):
  weigh = jnp.asarray(
      np.random.default_rng(5).normal(size=(B, T, N, H)), jnp.float32
  )
  return jax.jit(
      jax.value_and_grad(
          lambda *qkv: jnp.sum(attention(*qkv) * weigh), argnums=(0, 1, 2)
      )
  )(*qkv)


@pytest.mark.parametrize("prefix", (False, True))
@pytest.mark.parametrize("causal", (None, 0))
def test_values_and_gradients_are_those_under_the_mask(prefix, causal):
  qkv, ids, mask = case(prefix, causal)
  tiled = lambda q, k, v: tiles.attend(q, k, v, ids, causal)
  plain = lambda q, k, v: kernels.attend(
      q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask
  )
  np.testing.assert_allclose(tiled(*qkv), plain(*qkv), atol=2e-6)
  (got, got_slopes), (want, want_slopes) = (
      slopes(f, qkv) for f in (tiled, plain)
  )
  np.testing.assert_allclose(got, want, rtol=1e-5)
  for a, b in zip(got_slopes, want_slopes):
    np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
