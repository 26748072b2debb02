"""Makes a run's tasks, and draws them in the configured order.

They come from where `task_source.source` names: the gym or environment makes
its own, without end, or there is a list (a gym server's, a file, a dataset).

Does not run anything; asks a gym server for its list where there is one.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Iterator, Mapping, Sequence, TypeVar

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments import spec as environment_spec
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.environments.task_sources import curriculum
from tunix.rl.multi_turn.environments.task_sources import listed
from tunix.rl.multi_turn.environments.task_sources import source as source_lib
from tunix.rl.multi_turn.net import peers as peers_lib

TrainConfig = config_lib.TrainConfig
ConfigError = config_lib.ConfigError
C = TypeVar("C", bound=TrainConfig)


def make_tasks(config: TrainConfig) -> Any:
  """The task source of the configured run.

  Raises:
    ConfigError: an unknown gym or task, naming the nearest one; or a list that
      cannot be read, or that has nothing to train on.
  """
  where = "task_source.families"
  environment = environment_spec.get(config.environment.name)
  families = config.task_source.families
  if families:  # Else all.
    for section in ("eval", "warm_start"):
      if further := getattr(config, section).families:
        families = tuple(dict.fromkeys((*families, *further)))
        where += f" or {section}.families"
  if config.task_source.levels and not environment.gym:
    raise ConfigError(
      [
        f"task_source.levels={list(config.task_source.levels)} are a gym's, and"
        f" environment.name={config.environment.name} has none; leave them out"
      ]
    )
  try:
    if config.task_source.source != "generated":
      where = "task_source"
      return _listed(config, environment.gym, families)
    if environment.gym:
      spec = gyms.get(config.gym.name, "operator")
      size = {
        name: getattr(config.gym, fact)
        for name, fact in spec.set_by_run.items()
        if fact in ("width", "height")
      }
      return spec.make_tasks(families, {**size, **config.gym.options})
    return registry.import_path(environment.tasks)(families)
  except Exception as error:  # pylint: disable=broad-except
    # A user's own gym or environment may raise anything.
    path = config.task_source.path
    if isinstance(error, OSError) and str(error.filename) == path:
      raise ConfigError(
        [f"task_source.path={path}: {error.strerror}; give a file of tasks"]
      ) from error
    wrong = source_lib.file_as_family(families) or error
    raise ConfigError([f"{where}: {wrong}"]) from error


def _listed(
  config: TrainConfig, of_gym: bool, families: Sequence[str]
) -> listed.ListedTasks | listed.WholeList:
  chosen = config.task_source
  if of_gym:
    tasks = source_lib.read(chosen, config.gym.name, config.gym.options)
  else:
    tasks = source_lib.read(chosen, as_task=source_lib.CUATask.from_fields)
  lists = [source_lib.select(tasks, chosen, s) for s in source_lib.SPLITS]
  if config.eval.split == "all":
    return listed.WholeList(
      [task for of_split in lists for task in of_split], families
    )
  return listed.ListedTasks(lists[0], lists[1], families)


def resolve(config: C) -> tuple[C, Any]:
  """(the configuration with its task families named, its task source).

  An empty task_source.families becomes all families of the source.

  Raises:
    ConfigError: See `make_tasks`; or every task of a source without end is to
      be evaluated.
  """
  source = make_tasks(config)
  if (
    config.evaluates
    and not config.eval.episodes_per_task
    and not hasattr(source, "eval_tasks")
  ):
    raise ConfigError(
      [
        "eval.episodes_per_task=0 is every task of a list, and"
        f" task_source.source={config.task_source.source} makes tasks without"
        " end; give a number of them"
      ]
    )
  chosen = config.task_source
  if not chosen.families:
    chosen = dataclasses.replace(chosen, families=tuple(source.families()))
    config = dataclasses.replace(config, task_source=chosen)
  return config, source


class TrainTasks:
  """Training tasks for ever: the families in turn, each with fresh seeds.

  A sampler of `CollectLoop`: its state is a position.
  """

  def __init__(self, source: Any, families: Sequence[str], seed: int):
    self._source = source
    self._families = tuple(families)
    self._seed = seed
    self._position = 0

  def __iter__(self) -> Iterator[gym_base.Task]:
    return self

  def __next__(self) -> gym_base.Task:
    index, family = divmod(self._position, len(self._families))
    self._position += 1
    return self._source.train_task(self._families[family], index, self._seed)

  def state_dict(self) -> dict[str, Any]:
    return {"position": self._position, "families": list(self._families)}

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    if list(state["families"]) != list(self._families):
      raise ValueError(
        f"the checkpoint was training on {state['families']}, this run on"
        f" {list(self._families)}; give the same task_source.families to"
        " resume"
      )
    self._position = int(state["position"])


class DealtTasks:
  """One process's share of the tasks that a sampler draws."""

  def __init__(self, sampler: Any, processes: peers_lib.Peers):
    self._sampler = sampler
    self._processes = processes
    self._begun = False

  def __iter__(self) -> Iterator[gym_base.Task]:
    return self

  def __next__(self) -> gym_base.Task:
    skipped = self._processes.count - 1
    if not self._begun:
      self._begun, skipped = True, self._processes.index
    for _ in range(skipped):
      next(self._sampler)
    return next(self._sampler)

  def state_dict(self) -> dict[str, Any]:
    return {"begun": self._begun, "sampler": self._sampler.state_dict()}

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    self._begun = bool(state["begun"])
    self._sampler.load_state_dict(state["sampler"])


def make_sampler(config: TrainConfig, source: Any) -> Any:
  """Training tasks in the configured order.

  With task_source.order=curriculum also an observer, to be attached.
  """
  families, seed = config.task_source.families, config.run.seed
  chosen = config.task_source
  if chosen.order != "curriculum":
    return TrainTasks(source, families, seed)
  if isinstance(source, listed.ListedTasks):
    # Each task is an arm of its own.
    tasks = {
      task.task_id: task
      for of_family in source.train_tasks().values()
      for task in of_family
    }
    arms: Sequence[str] = tuple(tasks)
    draw = lambda arm, index: tasks[arm]
  elif chosen.levels:
    at = {
      f"{family}/{level}": (family, level)
      for level in chosen.levels
      for family in families
    }
    arms = tuple(at)

    def draw(arm: str, index: int) -> gym_base.Task:
      family, level = at[arm]
      return source.train_task(family, index, seed, difficulty=level)

  else:
    arms = families
    draw = lambda arm, index: source.train_task(arm, index, seed)
  return curriculum.CurriculumSampler(
    arms,
    draw,
    seed=seed,
    round_size=config.learner.groups_per_step,
    floor=chosen.curriculum_floor,
    decay=chosen.curriculum_decay,
  )


def eval_tasks(config: TrainConfig, source: Any) -> list[gym_base.Task]:
  """Held-out tasks: the same for every evaluation of a run."""
  families = config.evaluated_families
  if not config.eval.episodes_per_task:
    of_family = source.eval_tasks()
    return [task for family in families for task in of_family[family]]
  return [
    source.eval_task(family, index, config.eval.seed)
    for index, family in itertools.product(
      range(config.eval.episodes_per_task), families
    )
  ]
