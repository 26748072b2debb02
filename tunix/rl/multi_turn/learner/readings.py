"""Computes the readings of an update: seconds, samples, optimizer steps."""

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
