"""Computes the readings of an update: seconds, samples, optimizer steps.

Where several processes learn together, each has readings of its own groups;
`of_all` makes one set of them.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import Iterator, Sequence

import numpy as np
from tunix.rl.multi_turn.learner import examples as example_lib

Metrics = dict[str, float]


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
)  # pyformat: disable
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
