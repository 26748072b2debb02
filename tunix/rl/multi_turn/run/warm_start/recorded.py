"""Finds demonstrations for a run to clone: an oracle's, or recorded ones.

Recorded episodes are shown again by a `ReplayGym`, so that they become tokens
in the run's own grammar and format, wherever they were recorded. Points are
written as they were made, with the name of their target where it was recorded.
Without a gym, demonstrations are conversations: the environment's oracle
writes them, or they come from a file.

Does not play or clone anything; no JAX.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any, Callable, Iterator, Mapping, Sequence

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.core import shell_hints
from tunix.rl.multi_turn.environments import conversations
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments import recordings as recordings_lib
from tunix.rl.multi_turn.environments import spec as environment_spec
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.run import tasks as run_tasks
from tunix.rl.multi_turn.run.warm_start import conversing

ConfigError = config_lib.ConfigError


@dataclasses.dataclass(frozen=True)
class Source:
  """A source of demonstrations.

  Attributes:
    oracle: gives the right actions.
    tasks: Tasks to demonstrate, without end.
    make_gym: a gym to demonstrate in; None for the run's own.
  """

  oracle: gyms.Oracle
  tasks: Iterator[gym_base.Task]
  make_gym: Callable[[], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Conversations:
  """A source of demonstrations without a gym.

  Attributes:
    solve: gives the turns that solve a task.
    tasks: Tasks to demonstrate, without end.
  """

  solve: conversing.Solve
  tasks: Iterator[gym_base.Task]


def for_run(
  config: config_lib.TrainConfig,
  task_source: gym_base.TaskSet,
  tools: Sequence[Mapping[str, Any]] = (),
) -> Source | Conversations:
  """The source that `warm_start` describes.

  `tools` are the schemas that an environment without a gym offers.

  Raises:
    ConfigError: no oracle for the gym or its tasks, or a file without
      episodes that this run could learn from.
  """
  if not environment_spec.get(config.environment.name).gym:
    return _conversations(config, task_source, tools)
  if config.warm_start.recordings:
    return _recorded(config)
  return _oracle(config, task_source)


def _oracle(
  config: config_lib.TrainConfig, task_source: gym_base.TaskSet
) -> Source:
  steps = config.warm_start.steps
  try:
    oracle = gyms.get(config.gym.name, "operator").load_oracle(
      config.gym.observation
    )
  except ValueError as error:
    screenshots = config.gym.observation == "screenshot"
    raise ConfigError(
      [
        f"warm_start.steps={steps}: {error}; set warm_start.steps=0"
        + (", or warm_start.recordings" if screenshots else "")
      ]
    ) from None
  solved = oracle.families or ()
  where, families = _families(config)
  unknown = [f for f in families if solved and f not in solved]
  if unknown:
    raise ConfigError(
      [
        f"warm_start.steps={steps}: no oracle can demonstrate"
        f" {where}={unknown}, only {', '.join(solved)}; name families that it"
        " can in warm_start.families, or set warm_start.steps=0"
      ]
    )
  tasks = run_tasks.TrainTasks(task_source, families, config.run.seed + 1)
  return Source(oracle, tasks)


def _families(config: config_lib.TrainConfig) -> tuple[str, tuple[str, ...]]:
  """Returns the setting that names the demonstrated families, and these."""
  if config.warm_start.families:
    return "warm_start.families", config.warm_start.families
  return "task_source.families", config.task_source.families


def _conversations(
  config: config_lib.TrainConfig,
  task_source: gym_base.TaskSet,
  tools: Sequence[Mapping[str, Any]],
) -> Conversations:
  start = config.warm_start
  if start.recordings:
    where = f"warm_start.recordings={start.recordings}"
    try:
      chats = conversations.read(start.recordings)
    except (OSError, ValueError) as error:
      raise ConfigError([f"{where}: {error}"]) from None
    turns = {c.task.task_id: c.turns for c in chats}
    return Conversations(
      lambda task: turns[task.task_id],
      _endless([c.task for c in chats], config.run.seed + 1),
    )
  name = config.environment.name
  path = environment_spec.get(name).oracle
  if not path:
    raise ConfigError(
      [
        f"warm_start.steps={start.steps} needs demonstrations, and"
        f" environment.name={name} has no oracle; set warm_start.recordings,"
        " or warm_start.steps=0"
      ]
    )
  oracle = registry.import_path(path)

  def solve(task: gym_base.Task) -> Sequence[conversations.Turn]:
    return oracle(environment_spec.fields_of(task), tools)

  _, families = _families(config)
  try:
    for family in families:
      solve(task_source.train_task(family, 0, config.run.seed + 1))
  except LookupError as error:
    raise ConfigError(
      [
        f"warm_start.steps={start.steps}: {error}; or set"
        " warm_start.recordings, or warm_start.steps=0"
      ]
    ) from None
  return Conversations(
    solve, run_tasks.TrainTasks(task_source, families, config.run.seed + 1)
  )


def _recorded(config: config_lib.TrainConfig) -> Source:
  path = config.warm_start.recordings
  where = f"warm_start.recordings={path}"
  try:
    episodes = recordings_lib.read(path)
  except (OSError, ValueError) as error:
    raise ConfigError([f"{where}: {error}"]) from None
  solved = [r for r in episodes if r.success and r.actions]
  if not solved:
    raise ConfigError(
      [
        f"{where}: none of its {len(episodes)} episodes was solved; record some"
        f" with {shell_hints.command('environments.play')}"
      ]
    )
  size = (config.gym.height, config.gym.width)
  for recording in solved:
    width, height = recording.observations[0].size
    if (height, width) != size:
      raise ConfigError(
        [
          f"{where}: {recording.task.task_id} shows {width}x{height}, the run"
          f" {size[1]}x{size[0]} (gym.width, gym.height); they must be the"
          " same"
        ]
      )
  parser = tool_parser.make_tool_parser(config.agent.parser, "operator")
  named = []
  for i, recording in enumerate(solved):
    try:
      named.append(_renamed(_sayable(recording, parser), i))
    except tool_parser.ToolParseError as error:
      raise ConfigError(
        [
          f"{where}: {recording.task.task_id} was solved by what"
          f" agent.parser={config.agent.parser} cannot write: {error}"
        ]
      ) from None
  oracle = gyms.Oracle(
    lambda gym: gym.next_action(), lambda gym, x, y: gym.target()
  )
  return Source(
    oracle,
    _endless([r.task for r in named], config.run.seed + 1),
    lambda: recordings_lib.ReplayGym(named),
  )


def _sayable(
  recording: recordings_lib.Recording, parser: Any
) -> recordings_lib.Recording:
  """The recording in the grammar's reach.

  A person's "done" is left out where the grammar has no word for it: the
  episode is over then with the action before.

  Raises:
    ToolParseError: the grammar has no word for another action.
  """
  width, height = recording.observations[0].size
  actions = list(recording.actions)
  shown = list(recording.observations)
  for i, action in enumerate(recording.actions):
    try:
      parser.format_gui_action(action, width, height)
    except tool_parser.ToolParseError:
      last = i + 1 == len(recording.actions) and i > 0
      if not last or action.kind is not gui_action.GuiActionKind.TERMINATE:
        raise
      actions.pop()
      shown.pop()
      shown[-1] = dataclasses.replace(shown[-1], done=True)
  return dataclasses.replace(
    recording,
    actions=tuple(actions),
    targets=recording.targets[: len(actions)],
    observations=tuple(shown),
  )


def _renamed(
  recording: recordings_lib.Recording, number: int
) -> recordings_lib.Recording:
  """Gives each recording's task an id of its own: repeats count separately."""
  task = recording.task
  return dataclasses.replace(
    recording,
    task=dataclasses.replace(
      task,
      task_id=f"recording-{number}/{task.task_id}",
      # All of it, and the end that the demonstrator adds.
      max_turns=len(recording.actions) + 1,
    ),
  )


def _endless(
  tasks: Sequence[gym_base.Task], seed: int
) -> Iterator[gym_base.Task]:
  epoch = 0
  while True:
    order = list(tasks)
    random.Random(f"{seed}/{epoch}").shuffle(order)
    yield from order
    epoch += 1
