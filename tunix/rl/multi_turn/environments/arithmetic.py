"""Makes arithmetic problems: the tasks that come with text environments.

Families `add`, `subtract`, `multiply` of numbers below ten, and `add_tens` of
numbers below a hundred. A problem is a function of family, split, index and
seed; training and held-out problems share no pair of numbers.
"""

from __future__ import annotations

import random
from typing import Sequence

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments.gyms import base

_FAMILIES = {
    "add": ("+", 10, lambda a, b: a + b),
    "subtract": ("-", 10, lambda a, b: a - b),
    "multiply": ("*", 10, lambda a, b: a * b),
    "add_tens": ("+", 100, lambda a, b: a + b),
}
_HELD_OUT = 5  # One pair of numbers in so many.


class ArithmeticTasks:
  """A `gyms.base.TaskSet` without end; see the module docstring."""

  def __init__(self, families: Sequence[str] | None = None):
    """`families`: those to offer, none or empty for `add` alone.

    Raises:
      ValueError: an unknown family, naming the nearest one.
    """
    for family in families or ():
      if family not in _FAMILIES:
        raise ValueError(
            registry.unknown_name("task family", family, _FAMILIES)
        )
    self._families = tuple(families or ("add",))

  def families(self) -> tuple[str, ...]:
    return self._families

  def train_task(self, family: str, index: int, seed: int = 0) -> base.Task:
    return _task(family, "train", index, seed)

  def eval_task(self, family: str, index: int, seed: int = 0) -> base.Task:
    return _task(family, "eval", index, seed)


def _task(family: str, split: str, index: int, seed: int) -> base.Task:
  sign, limit, result = _FAMILIES[family]
  draw = random.Random(f"{family}/{split}/{index}/{seed}")
  while True:
    a, b = draw.randrange(limit), draw.randrange(limit)
    if ((a * limit + b) % _HELD_OUT == 0) == (split == "eval"):
      break
  question = f"What is {a} {sign} {b}?"
  return base.Task(
      task_id=f"{family}/{split}/{index}/{seed}",
      family=family,
      instruction=question,
      seed=seed,
      params={"question": question, "answer": str(result(a, b))},
  )
