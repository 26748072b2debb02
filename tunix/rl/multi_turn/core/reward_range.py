"""Bounds rewards, so that no sum, mean or deviation of them overflows.

Promises: a reward that passed `checked` is a finite float of at most
`MAX_REWARD`; sums and squares of such rewards are finite in float64, and their
differences in float32.

Does not: convert what carries a reward (see `trajectory_collector.adapters`).
"""

from __future__ import annotations

import math
from typing import Any

MAX_REWARD = 1e12
"""Largest absolute reward that may be trained on, of a turn or an episode."""


class RewardRangeError(ValueError):
  """A reward is not finite, or larger than allowed."""


def checked(value: Any, limit: float = MAX_REWARD, setting: str = "") -> float:
  """`value` as a float.

  Args:
    value: a number.
    limit: largest absolute value.
    setting: named in the error, as the way to raise the limit.

  Raises:
    RewardRangeError: not finite, or beyond the limit.
    TypeError, ValueError: no number.
  """
  try:
    number = float(value)
  except OverflowError:
    raise RewardRangeError(
      f"a reward must be a finite number, got one of {value.bit_length()} bits"
    ) from None
  if not math.isfinite(number):
    raise RewardRangeError(f"a reward must be a finite number, got {number}")
  if abs(number) > limit:
    fix = f"raise {setting} (at most {MAX_REWARD:g})" if setting else ""
    raise RewardRangeError(
      f"a reward of {number:g} is larger than {limit:g}; scale the rewards"
      + (f", or {fix}" if fix else "")
    )
  return number
