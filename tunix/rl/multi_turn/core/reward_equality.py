"""Compares rewards that are sums: equal means equal up to rounding.

An episode's reward is the sum of its turns' rewards, and equal amounts in other
parts differ in their last bits: .1 + .2 is 0.30000000000000004, .3 + 0 is 0.3.
No way of summing mends that, `math.fsum` neither: the parts themselves are
rounded before they are added. So all code that compares rewards calls this
module. A difference that is rounding alone is no signal to learn from: division
by a standard deviation, and optimizers that normalise, would make a full step
of it.

Promises: the tolerance is relative to the magnitudes that were summed and
never absolute, so that rewards of 1e-9 and 0 differ, and multiplying all
rewards by a power of two changes no answer.

Does not: know episodes (see `trajectory.TrajectoryGroup.varies`).
"""

from __future__ import annotations

import math
from typing import Iterable, Sequence

import numpy as np

ROUNDING = 64 * float(np.finfo(np.float64).eps)
"""Largest share of the sum of magnitudes that counts as rounding, 1.4e-14. A
sum of K parts, each rounded, is off by K / 2 eps at most, and by sqrt(K) / 2
eps as a rule; parts that are differences of larger numbers by more."""


def all_equal(
  rewards: Sequence[float] | np.ndarray,
  magnitudes: Sequence[float] | np.ndarray | None = None,
) -> bool:
  """Whether one number exists of which every reward may be the rounding.

  Fewer than two rewards are equal.

  Args:
    rewards: Finite numbers.
    magnitudes: Of each reward, the sum of the absolute values of its parts; by
      default the reward has one part.
  """
  values = np.asarray(rewards, np.float64)
  if values.size < 2:
    return True
  slack = _slack(values, magnitudes)
  return bool((values - slack).max() <= (values + slack).min())


def exceeds(reward: float, bound: float, magnitude: float = 0.0) -> bool:
  """Whether a reward is larger than a bound by more than rounding."""
  return reward - ROUNDING * max(abs(reward), magnitude) > bound


def reaches(
  rewards: np.ndarray, bound: float, magnitudes: np.ndarray | None = None
) -> np.ndarray:
  """bool[N]: whether each reward is at least a bound, up to rounding."""
  return rewards + _slack(rewards, magnitudes) >= bound


def total(rewards: Iterable[float]) -> float:
  """Sum of rewards; exactly 0 where only rounding is left of its parts."""
  parts = tuple(rewards)
  value = math.fsum(parts)
  if is_rounding(value, math.fsum(map(abs, parts))):
    return 0.0
  return value


def is_rounding(difference: float, magnitude: float) -> bool:
  """Whether a difference of sums of this magnitude is rounding alone."""
  return abs(difference) <= ROUNDING * magnitude


def _slack(
  values: np.ndarray, magnitudes: Sequence[float] | np.ndarray | None
) -> np.ndarray:
  return ROUNDING * np.abs(values if magnitudes is None else magnitudes)
