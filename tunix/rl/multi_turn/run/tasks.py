"""The tasks of a run, from its configuration.

`task_source.source` says where they come from: the gym makes its own, without
end, or there is a list (a gym server's, a file, a dataset). `register_tasks`
makes a gym's own known.

Does not run anything; asks a gym server for its list where there is one.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Callable, Iterator, Mapping, Sequence

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments import registry as env_registry
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.environments.gyms import genv
from tunix.rl.multi_turn.environments.gyms.android_world import (
  gym as android_world,
)
from tunix.rl.multi_turn.environments.gyms.android_world import (
  tasks as android_world_tasks,
)
from tunix.rl.multi_turn.environments.gyms.openenv import gym as openenv
from tunix.rl.multi_turn.environments.gyms.openenv import tasks as openenv_tasks
from tunix.rl.multi_turn.environments.gyms.osworld import tasks as osworld_tasks
from tunix.rl.multi_turn.environments.task_sources import cua_task
from tunix.rl.multi_turn.environments.task_sources import curriculum
from tunix.rl.multi_turn.environments.task_sources import listed
from tunix.rl.multi_turn.environments.task_sources import source as source_lib

TrainConfig = config_lib.TrainConfig
ConfigError = config_lib.ConfigError

_TASKS: registry.Registry[Callable[[TrainConfig], Any]] = registry.Registry(
    "task source"
)


def register_tasks(
    name: str, factory: Callable[[TrainConfig], Any] | None = None
) -> Any:
  """Adds `config -> task source` for the gym of that name; a decorator too.

  A task source has `train_task(family, index, seed)` and
  `eval_task(family, index, seed)`, each returning a `gyms.base.Task`.
  """
  return _TASKS.register(name, factory)


@register_tasks("desktop")
def _desktop_tasks(config: TrainConfig) -> Any:
  return env_registry.make_task_set(
      "desktop", config.task_source.families, difficulty=config.gym.options.difficulty
  )


@register_tasks("genv")
def _genv_tasks(config: TrainConfig) -> Any:
  return listed.server_tasks(config.gym.options, config.task_source.families)


@register_tasks("openenv")
def _openenv_tasks(config: TrainConfig) -> Any:
  return openenv_tasks.server_tasks(config.gym.options, config.task_source.families)


@register_tasks("osworld")
def _osworld_tasks(config: TrainConfig) -> Any:
  return osworld_tasks.tasks(config.gym.options, config.task_source.families)


@register_tasks("android_world")
def _android_world_tasks(config: TrainConfig) -> Any:
  return android_world_tasks.server_tasks(
      config.gym.options, config.task_source.families
  )


@register_tasks("browser")
def _browser_tasks(config: TrainConfig) -> Any:
  return env_registry.make_task_set(
      "browser", config.task_source.families, pages=config.gym.options.get("pages")
  )


def make_tasks(config: TrainConfig) -> Any:
  """The task source of the configured run.

  Raises:
    ConfigError: unknown gym or task, naming the nearest one; or a list that
      cannot be had, or that has nothing to train on.
  """
  name = config.gym.name
  where = "task_source.families"
  try:
    if config.task_source.source != "generated":
      where = "task_source"
      return _listed(config)
    if name in _TASKS:
      return _TASKS.get(name)(config)
    if env_registry.has_task_set(name):
      return env_registry.make_task_set(name, config.task_source.families)
    if name in env_registry.gym_names():
      raise ValueError(
          f"gym.name={name} makes no tasks of its own; set"
          " task_source.source=jsonl and task_source.path, or register some"
          " (environments.register_task_set)"
      )
    return _TASKS.get(name)(config)  # Says what there is.
  except (
      ValueError, ImportError, OSError, cua_task.UnknownTaskError,
      genv.GenvError, openenv.OpenEnvError, android_world.AndroidWorldError,
      TimeoutError,
  ) as error:  # pyformat: disable
    raise ConfigError([f"{where}: {error}"]) from None


def _listed(config: TrainConfig) -> listed.ListedTasks:
  chosen = config.task_source
  options = config.gym.options
  common = {
      "source_type": chosen.source,
      "gym_base_url": options.get("base_url")
      or genv.client.DEFAULT_BASE_URL,
      "gym_id": options.get("gym_id") or "desktop",
      "token_file": options.get("token_file") or "",
      "path": chosen.path,
      "dataset_split": chosen.dataset_split,
      "train_ratio": chosen.train_ratio,
      "eval_number_range": chosen.eval_number_range or None,
      "task_names": chosen.names or None,
      "tags": chosen.tags or None,
      "seed": chosen.seed,
  }
  everything = source_lib.read_all(source_lib.TaskSourceConfig(**common))
  if config.gym.name == "genv":
    # A file names tasks of the server that is played on.
    everything = [
        dataclasses.replace(t, gym_id=t.gym_id or common["gym_id"])
        for t in everything
    ]
  limits = {"train": chosen.limit or None, "eval": chosen.eval_limit or None}
  lists = [
      source_lib.select(
          everything,
          source_lib.TaskSourceConfig(
              split_type=split, limit=limits[split], **common
          ),
      )
      for split in source_lib.SPLITS
  ]
  return listed.ListedTasks(*lists, families=config.task_source.families)


def resolve(config: TrainConfig) -> tuple[TrainConfig, Any]:
  """(the configuration with its task families named, its task source).

  Where task_source.families is empty, all that the source has are meant.

  Raises:
    ConfigError: as `make_tasks`.
  """
  source = make_tasks(config)
  if not config.task_source.families:
    families = tuple(source.families())
    gym = dataclasses.replace(config.gym, tasks=families)
    config = dataclasses.replace(config, gym=gym)
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
          f" {list(self._families)}; give the same task_source.families to resume"
      )
    self._position = int(state["position"])


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
  return [
      source.eval_task(family, index, config.eval.seed)
      for index, family in itertools.product(
          range(config.eval.episodes_per_task), config.task_source.families
      )
  ]
