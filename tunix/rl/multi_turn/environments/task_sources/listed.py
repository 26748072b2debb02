"""Makes a task set of a list: `ListedTasks`, a `gyms.base.TaskSet`.

It goes through the list again and again, each family shuffled anew by the run's
seed.
"""

from __future__ import annotations

import collections
from typing import Sequence

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import seeds
from tunix.rl.multi_turn.environments.task_sources import cua_task


class ListedTasks(seeds.IndexedTasks):
  """Training and held-out tasks of two lists that share none.

  Attributes:
    listed: all of them.
  """

  def __init__(
    self,
    train: Sequence[cua_task.CUATask],
    held_out: Sequence[cua_task.CUATask],
    families: Sequence[str] = (),
  ):
    """Args:

      train, held_out: The lists; no id may be in both.
      families: Families to offer, () for every family in both lists.

    Raises:
      ValueError: a task in both, or a family without tasks.
    """
    self.listed = (*train, *held_out)
    both = {t.id for t in train} & {t.id for t in held_out}
    if both:
      raise ValueError(f"task {min(both)!r} is for training and held out")
    super().__init__(_by_family(train), _by_family(held_out), families)
    for family in families:
      for name, tasks in (("training", self._train), ("held-out", self._eval)):
        if family not in tasks:
          wrong = registry.unknown_name("task family", family, tasks)
          raise ValueError(f"no {name} task: {wrong}")
    if not self._families:
      raise ValueError(
        "no family has both training and held-out tasks: training"
        f" {sorted(self._train)}, held out {sorted(self._eval)}; change"
        " task_source.train_ratio or eval_number_range"
      )

  def eval_tasks(self) -> dict[str, list[base.Task]]:
    """Returns all held-out tasks by family."""
    return {f: list(self._eval[f]) for f in self._families}

  def train_tasks(self) -> dict[str, list[base.Task]]:
    """Returns all training tasks by family: the arms of a curriculum."""
    return {f: list(self._train[f]) for f in self._families}


class WholeList:
  """One list for an evaluation alone: every task of it, `listed`."""

  def __init__(
    self, tasks: Sequence[cua_task.CUATask], families: Sequence[str] = ()
  ):
    """Raises:

    ValueError: no task, or a family without tasks.
    """
    self.listed = tuple(tasks)
    if not tasks:
      raise ValueError("the list has no task; give another, or other filters")
    self._tasks = _by_family(tasks)
    for family in families:
      if family not in self._tasks:
        raise ValueError(
          registry.unknown_name("task family", family, self._tasks)
        )
    self._families = tuple(families) or tuple(self._tasks)

  def families(self) -> tuple[str, ...]:
    return self._families

  def eval_task(self, family: str, index: int, seed: int = 0) -> base.Task:
    """Returns the `index`-th task; the list begins again at its end."""
    del seed
    tasks = self._tasks[family]
    return tasks[index % len(tasks)]

  train_task = eval_task  # For a look at the first one; none is trained on.

  def eval_tasks(self) -> dict[str, list[base.Task]]:
    """Returns all tasks by family."""
    return {f: list(self._tasks[f]) for f in self._families}


def _by_family(tasks: Sequence[cua_task.CUATask]) -> dict[str, list[base.Task]]:
  tasks_by_family: dict[str, list[base.Task]] = collections.defaultdict(list)
  for task in tasks:
    gym_task = task.to_task()
    tasks_by_family[gym_task.family].append(gym_task)
  return dict(tasks_by_family)
