"""Splits readings of an update by the turn of a token and by its images.

The learner adds up the tokens, the sampler's KL and the entropy of each group
of `core.turn_groups` inside the compiled step; `finished` makes means of them.
An update whose tokens are all of one group has none: the whole says the same.

Axis names: S = buffers, M = sampled tokens of one, V = values, G = groups.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.core import turn_groups

VALUES = ("sampler_kl", "entropy")
_COUNT = len(turn_groups.NAMES)
SHAPE = (1 + len(VALUES), len(turn_groups.BY), _COUNT)
_PREFIX = "turn_group/"

Metrics = dict[str, float]


def sums(
    stream_SM: jax.Array, mask_SM: jax.Array, values_VSM: tuple[jax.Array, ...]
) -> jax.Array:
  """float32[1 + V, 2, G]: tokens and sums of the values, by group."""
  number = stream_SM.astype(jnp.int32)
  groups = jnp.stack([number // _COUNT, number % _COUNT])
  is_of = groups[..., None] == jnp.arange(_COUNT)
  values = jnp.stack([jnp.ones_like(mask_SM, jnp.float32), *values_VSM])
  masked = jnp.where(mask_SM, jax.lax.stop_gradient(values), 0.0)
  return jnp.einsum(
      "vsm,bsmg->vbg", masked, is_of.astype(jnp.float32),
      precision=jax.lax.Precision.HIGHEST,
  )  # pyformat: disable


def of_step(sums_VBG: np.ndarray, tokens: float) -> Metrics:
  """A step's sums for each token of it, to be averaged over steps."""
  return {
      f"{_PREFIX}{index}": float(value) / tokens
      for index, value in enumerate(np.ravel(sums_VBG))
  }


def finished(learned: Metrics) -> Metrics:
  """Averaged readings with the means of each group in place of sums."""
  out = {k: v for k, v in learned.items() if not k.startswith(_PREFIX)}
  flat = [
      learned.get(f"{_PREFIX}{i}", 0.0) for i in range(int(np.prod(SHAPE)))
  ]
  counts, *values = np.reshape(flat, SHAPE)
  for b, by in enumerate(turn_groups.BY):
    present = np.flatnonzero(counts[b])
    if len(present) < 2:
      continue
    for name, of_value in zip(VALUES, values):
      for g in present:
        key = f"{name}_by_{by}/{turn_groups.NAMES[g]}"
        out[key] = float(of_value[b, g] / counts[b, g])
  return out
