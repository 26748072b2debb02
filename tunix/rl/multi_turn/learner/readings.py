"""Computes the readings of an update: seconds, samples, optimizer steps.

Where several processes learn together, each has readings of its own groups;
`of_all` makes one set of them.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.core.statistics import turn_groups
from tunix.rl.multi_turn.learner.batches import examples as example_lib

Metrics = dict[str, float]


TURN_VALUES = ("sampler_kl", "entropy")
_COUNT = len(turn_groups.NAMES)
TURN_SHAPE = (1 + len(TURN_VALUES), len(turn_groups.BY), _COUNT)
_PREFIX = "turn_group/"


def turn_sums(
  stream_SM: jax.Array, mask_SM: jax.Array, values_VSM: tuple[jax.Array, ...]
) -> jax.Array:
  """float32[1 + V, 2, G]: tokens and sums of the values, by group."""
  number = stream_SM.astype(jnp.int32)
  groups = jnp.stack([number // _COUNT, number % _COUNT])
  is_of = groups[..., None] == jnp.arange(_COUNT)
  values = jnp.stack([jnp.ones_like(mask_SM, jnp.float32), *values_VSM])
  masked = jnp.where(mask_SM, jax.lax.stop_gradient(values), 0.0)
  return jnp.einsum(
    "vsm,bsmg->vbg",
    masked,
    is_of.astype(jnp.float32),
    precision=jax.lax.Precision.HIGHEST,
  )


def turns_of_step(sums_VBG: np.ndarray, tokens: float) -> Metrics:
  """A step's sums for each token of it, to be averaged over steps."""
  return {
    f"{_PREFIX}{index}": float(value) / tokens
    for index, value in enumerate(np.ravel(sums_VBG))
  }


def with_turn_means(learned: Metrics) -> Metrics:
  """Averaged readings with the means of each group in place of sums."""
  out = {k: v for k, v in learned.items() if not k.startswith(_PREFIX)}
  flat = [
    learned.get(f"{_PREFIX}{i}", 0.0) for i in range(int(np.prod(TURN_SHAPE)))
  ]
  counts, *values = np.reshape(flat, TURN_SHAPE)
  for b, by in enumerate(turn_groups.BY):
    present = np.flatnonzero(counts[b])
    if len(present) < 2:
      continue
    for name, of_value in zip(TURN_VALUES, values):
      for g in present:
        key = f"{name}_by_{by}/{turn_groups.NAMES[g]}"
        out[key] = float(of_value[b, g] / counts[b, g])
  return out


class Clock:
  """Wall seconds by phase."""

  def __init__(self):
    self.seconds: dict[str, float] = {}

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
      yield
    finally:
      spent = time.perf_counter() - started
      self.seconds[phase] = self.seconds.get(phase, 0.0) + spent


def of_samples(
  examples: Sequence[example_lib.Example], version: int
) -> Metrics:
  """Staleness and advantages of sampled tokens, skipped ones included."""
  if not examples:
    return {}
  masks = [e.sequence.loss_mask for e in examples]
  lag = version - np.concatenate(
    [e.sequence.versions[m] for e, m in zip(examples, masks)]
  )
  values = np.concatenate([e.advantages[m] for e, m in zip(examples, masks)])
  return {
    "staleness_mean": float(lag.mean()),
    "staleness_max": float(lag.max()),
    "advantage_mean": float(values.mean()),
    "advantage_std": float(values.std()),
    "advantage_abs_max": float(np.abs(values).max()),
    "completion_tokens": float(len(values)),
  }


def mean(readings: Sequence[Metrics]) -> Metrics:
  """Means over optimizer steps, extremes of extremes; {} of no steps."""
  out: Metrics = {}
  for name in readings[0] if readings else ():
    values = [r[name] for r in readings]
    if name == "ratio_min":
      out[name] = -max(values)
    elif name.endswith("_max"):
      out[name] = max(values)
    else:
      out[name] = math.fsum(values) / len(values)
  return out


_SUMS = (
    "groups", "zero_advantage_groups", "episodes", "valid_episodes",
    "completion_tokens", "sequences", "tokens", "sampled_tokens",
    "shared_tokens", "dropped_sequences", "learner_tokens_per_second",
)  # fmt: skip
_POOLED = {
  "reward": "valid_episodes",
  "success_rate": "valid_episodes",
  "turns": "valid_episodes",
  "staleness": "completion_tokens",
  "kl": "completion_tokens",
  "overlong_price": "valid_episodes",
  "advantage": "completion_tokens",
  "value": "completion_tokens",
  "value_target": "completion_tokens",
  "packing_efficiency": "micro_batches",
  "patch_efficiency": "micro_batches",
}
"""Means, and the counts that weigh them; their names may end in `_mean`."""


def of_all(readings: Sequence[Metrics]) -> Metrics:
  """Returns the readings of all processes' samples, from each process's.

  Counts add up, means and standard deviations are pooled, and of all others
  (seconds, extremes, and what is equal in all processes) the largest counts.
  """
  if len(readings) == 1:
    return dict(readings[0])
  names = {name: None for one in readings for name in one}
  out = {}
  for name in names:
    values = [one[name] for one in readings if name in one]
    out[name] = math.fsum(values) if name in _SUMS else max(values)
  for stem, count in _POOLED.items():
    name = stem if stem in names else f"{stem}_mean"
    have = [one for one in readings if name in one and one.get(count)]
    weights = np.array([one[count] for one in have])
    if not have:
      continue
    means = np.array([one[name] for one in have])
    share = weights / weights.sum()
    out[name] = float(share @ means)
    if (spread := f"{stem}_std") in names:
      squares = np.array([one[spread] for one in have]) ** 2 + means**2
      out[spread] = math.sqrt(max(float(share @ squares) - out[name] ** 2, 0))
  return out
