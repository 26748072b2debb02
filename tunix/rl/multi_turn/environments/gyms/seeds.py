"""Draws the seeds of training instances and of held-out ones.

The seeds of training instances lie in [0, bound), those of held-out ones in
[bound, 2 * bound): the two never share one. The classes are bases of task
sets.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any, Callable, Mapping, Sequence

from tunix.rl.multi_turn.environments.gyms import base

EVAL_SEEDS_FROM = 1_000_000_000
"""Instance seeds: training below, evaluation from here up to twice this."""


class SeededTasks:
  """Base of a task set whose instances are seeds; `task` makes one of them.

  Seeds below `EVAL_SEEDS_FROM` are for training and seeds from it up to twice
  it for evaluation: `train_task` and `eval_task` never return the same one.
  """

  _families: tuple[str, ...]
  task: Callable[..., base.Task]

  def families(self) -> tuple[str, ...]:
    return self._families

  def train_task(
    self, family: str, index: int, seed: int = 0, **options: Any
  ) -> base.Task:
    """Returns the `index`-th training instance of the run with this `seed`."""
    number = train_seed(family, index, seed, EVAL_SEEDS_FROM)
    return self.task(family, number, **options)

  def eval_task(
    self, family: str, index: int, seed: int = 0, **options: Any
  ) -> base.Task:
    """Returns the `index`-th held-out instance; see `eval_seed`."""
    number = eval_seed(family, index, seed, EVAL_SEEDS_FROM)
    return self.task(family, number, **options)


class SplitTasks:
  """Base of a task set without end; `_task` makes the tasks of each split."""

  _families: tuple[str, ...]

  def families(self) -> tuple[str, ...]:
    return self._families

  def train_task(self, family: str, index: int, seed: int = 0) -> base.Task:
    return self._task(family, "train", index, seed)

  def eval_task(self, family: str, index: int, seed: int = 0) -> base.Task:
    return self._task(family, "eval", index, seed)

  def _task(self, family: str, split: str, index: int, seed: int) -> base.Task:
    raise NotImplementedError


class IndexedTasks:
  """Task set of two lists for each family, passed through again and again."""

  def __init__(
    self,
    train: Mapping[str, Sequence[base.Task]],
    held_out: Mapping[str, Sequence[base.Task]],
    families: Sequence[str] = (),
  ):
    """Args:

    train, held_out: Tasks by family.
    families: Families to offer; () for those that both mappings have.
    """
    self._train, self._eval = train, held_out
    common = tuple(f for f in train if f in held_out)
    self._families = tuple(families) or common

  def families(self) -> tuple[str, ...]:
    return self._families

  def train_task(self, family: str, index: int, seed: int = 0) -> base.Task:
    """Returns the `index`-th of an endless sequence of shuffled passes."""
    tasks = self._train[family]
    epoch, place = divmod(index, len(tasks))
    order = list(range(len(tasks)))
    random.Random(f"{seed}/{family}/{epoch}").shuffle(order)
    return tasks[order[place]]

  def eval_task(self, family: str, index: int, seed: int = 0) -> base.Task:
    """Returns held-out task `index`; the list begins again at its end."""
    del seed  # Every held-out task is played, so there is nothing to choose.
    tasks = self._eval[family]
    return tasks[index % len(tasks)]


def train_seed(family: str, index: int, seed: int, bound: int) -> int:
  """Returns the seed of a run's `index`-th training instance."""
  return _number(f"train/{family}/{index}/{seed}") % bound


def eval_seed(family: str, index: int, seed: int, bound: int) -> int:
  """Returns the seed of the `index`-th held-out instance; distinct below bound.

  Families share no seeds: a generator's first numbers decide what is easy in
  many of them alike, and an evaluation would count as many what is one.

  Raises:
    ValueError: a negative argument.
  """
  if index < 0 or seed < 0:
    raise ValueError(f"index and seed must be >= 0, got {index}, {seed}")
  return bound + (_number(f"eval/{family}/{seed}") + index) % bound


def _number(text: str) -> int:
  digest = hashlib.sha256(text.encode()).digest()
  return int.from_bytes(digest[:8], "little")
