"""Task sets of lists: what a run draws its tasks from.

`ListedTasks` goes through a list again and again, each family shuffled anew
by the run's seed; `GenvTasks` names the instances of a gym server, without
end, as the gym behind it makes them. Both are `gyms.base.TaskSet`s.
"""

from __future__ import annotations

import collections
import random
from typing import Any, Mapping, Sequence

from tunix.rl.multi_turn.core import concurrency
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms.genv import client as genv_client
from tunix.rl.multi_turn.environments.gyms.genv import gym as genv_gym
from tunix.rl.multi_turn.environments.task_sources import cua_task
from tunix.rl.multi_turn.environments.task_sources import source


class ListedTasks:
  """Training and held-out tasks of two lists that share none."""

  def __init__(
      self,
      train: Sequence[cua_task.CUATask],
      held_out: Sequence[cua_task.CUATask],
      families: Sequence[str] = (),
  ):
    """Args:

      train, held_out: the lists; no id may be in both.
      families: those to offer, () for all that both lists have.

    Raises:
      ValueError: a task in both, or a family without tasks.
    """
    both = {t.id for t in train} & {t.id for t in held_out}
    if both:
      raise ValueError(f"task {min(both)!r} is for training and held out")
    self._train, self._eval = _by_family(train), _by_family(held_out)
    known = [f for f in self._train if f in self._eval]
    for family in families:
      for name, tasks in (("training", self._train), ("held-out", self._eval)):
        if family not in tasks:
          wrong = registry.unknown_name("task family", family, tasks)
          raise ValueError(f"no {name} task: {wrong}")
    if not known and not families:
      raise ValueError(
          "no family has both training and held-out tasks: training"
          f" {sorted(self._train)}, held out {sorted(self._eval)}; change"
          " task_source.train_ratio or eval_number_range"
      )
    self._families = tuple(families) or tuple(known)

  def families(self) -> tuple[str, ...]:
    return self._families

  def train_task(self, family: str, index: int, seed: int = 0) -> base.Task:
    """The `index`-th of an endless sequence of shuffled passes."""
    tasks = self._train[family]
    epoch, place = divmod(index, len(tasks))
    order = list(range(len(tasks)))
    random.Random(f"{seed}/{family}/{epoch}").shuffle(order)
    return tasks[order[place]]

  def eval_task(self, family: str, index: int, seed: int = 0) -> base.Task:
    """The held-out tasks in their order, again and again."""
    del seed  # All of them, so there is nothing to choose.
    tasks = self._eval[family]
    return tasks[index % len(tasks)]

  def train_tasks(self) -> dict[str, list[base.Task]]:
    """All of them, by family: the arms of a curriculum."""
    return {f: list(self._train[f]) for f in self._families}


def _by_family(
    tasks: Sequence[cua_task.CUATask],
) -> dict[str, list[base.Task]]:
  found: dict[str, list[base.Task]] = collections.defaultdict(list)
  for task in tasks:
    made = task.to_task()
    found[made.family].append(made)
  return dict(found)


class GenvTasks:
  """Instances of a gym server's families, beyond its list.

  They are named, not fetched: `<family>@<split>:<index>:<seed>`.
  """

  def __init__(
      self,
      gym_id: str,
      max_turns: Mapping[str, int | None],
      families: Sequence[str] = (),
  ):
    """Args:

      gym_id: of the server.
      max_turns: of the tasks of each family that it has.
      families: those to offer, () for all.

    Raises:
      ValueError: a family that it has not.
    """
    for family in families:
      if family not in max_turns:
        wrong = registry.unknown_name("task family", family, max_turns)
        raise ValueError(f"gym {gym_id!r} of the server: {wrong}")
    self._gym_id = gym_id
    self._max_turns = dict(max_turns)
    self._families = tuple(families) or tuple(max_turns)

  def families(self) -> tuple[str, ...]:
    return self._families

  def train_task(self, family: str, index: int, seed: int = 0) -> base.Task:
    return self._task(family, "train", index, seed)

  def eval_task(self, family: str, index: int, seed: int = 0) -> base.Task:
    return self._task(family, "eval", index, seed)

  def _task(self, family: str, split: str, index: int, seed: int) -> base.Task:
    name = f"{family}@{split}:{index}:{seed}"
    return base.Task(
        task_id=f"{self._gym_id}/{name}",
        family=family,
        max_turns=self._max_turns.get(family),
        params={"genv": {"identifier": name, "gym_id": self._gym_id}},
    )


def server_tasks(settings: Mapping[str, Any], families: Sequence[str]) -> Any:
  """The tasks of the gym server that a `genv` gym's settings name.

  Its instances if it has any to name; else those of its list, split in two.

  Raises:
    ValueError: a setting that cannot be, or an unknown family.
    GenvError: the server cannot be asked.
  """

  async def ask() -> dict[str, Any] | None:
    client = genv_gym.make_client(settings)
    try:
      for gym in await client.gyms():
        if gym.get("gym_id") == client.gym_id:
          return gym
      return None
    finally:
      await client.aclose()

  where = settings.get("base_url") or genv_client.DEFAULT_BASE_URL
  gym_id = settings.get("gym_id") or "desktop"
  found = concurrency.call(ask, seconds=130.0, what=f"asking {where}")
  if found is not None and isinstance(found.get("max_turns"), dict) and (
      found.get("instances")
  ):
    return GenvTasks(gym_id, found["max_turns"], families)
  common = {
      "gym_base_url": where,
      "gym_id": gym_id,
      "token_file": settings.get("token_file") or "",
  }
  listed = source.read_all(source.TaskSourceConfig(**common))
  split = [
      source.select(listed, source.TaskSourceConfig(split_type=s, **common))
      for s in source.SPLITS
  ]
  return ListedTasks(*split, families=families)
