"""Tries a run's first task before anything is loaded or compiled.

A gym, task set, environment, agent or reward of the user's own plays one
episode of one turn: `reset`, a click in the middle of the screen (or a word
where actions are text), `evaluate`, the reward. What would fail in every
episode is refused in one line that names the setting, the function's error and
its place: wrong arguments, a wrong result, a name or attribute that is not
there, any error of `reset`. Any other error of the user's code may be due to
the invented turn, or pass, and is a warning.

Promises: nothing is played where all parts come with the package, in a dry run,
in a run that is resumed, where another program plays the episodes
(`rollout.agent`, rollout hosts, collectors on other machines), or where a part
of the user's has coroutines, which may belong to the event loop of the run.
"""

from __future__ import annotations

import inspect
import logging
import traceback
from typing import Any, Callable, Iterable

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import rewards
from tunix.rl.multi_turn.agents import base_agent
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.environments.gyms import gym_registry as gyms
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import http
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.run import episodes as episodes_lib
from tunix.rl.multi_turn.trajectory_collector import episode as episode_lib

TrainConfig = config_lib.TrainConfig
ConfigError = config_lib.ConfigError
_PACKAGE = "tunix.rl.multi_turn."
_WORD = "0"
"""An answer for an environment whose actions are text."""
_LOG = logging.getLogger(__name__)


def try_first_episode(
  config: TrainConfig,
  episodes: episodes_lib.EpisodeFactory,
  source: gym_base.TaskSet,
) -> None:
  """Refuses now what would fail in every episode: see the module docstring.

  A gym whose screen size is unknown until it has started is started once, with
  a training task, and closed; not for a dry run.

  Args:
    config: Settings of the run.
    episodes: Makes its agents and environments.
    source: Makes its tasks.

  Raises:
    ConfigError: Names the setting and the error, or the size of the screen.
  """
  task = _task_of(config, source, "train_task", config.run.seed)
  if config.evaluates and config.eval.episodes_per_task:
    _task_of(config, source, "eval_task", config.eval.seed)
  try:
    agent, env = episodes(task)
  except ConfigError:
    raise
  except Exception as error:  # pylint: disable=broad-except
    # A user's agent, environment or gym: it may raise anything.
    text = episodes_lib.error_text(error)
    raise ConfigError([f"task {task.task_id}: {text}"]) from error
  if config.run.dry_run:
    return
  if (
    episodes.acts_on_gym
    and gyms.get(config.gym.name, "operator").size_known_after_start
  ):
    _check_screen(config, task)
  if (
    config.run.resume
    or config.rollout.agent
    or config.rollout.via == "hosts"
    or config.fleet.away
  ):
    return
  own = [
    part
    for part in (
      type(agent),
      type(env),
      type(getattr(env, "gym", None)),
      type(source),
      *_rewards(config),
    )
    if _is_own(part)
  ]
  if own and not any(_has_coroutines(part) for part in own):
    _play(config, episodes, task, (agent, env), own)


# --- tasks --------------------------------------------------------------------


def _task_of(
  config: TrainConfig, source: gym_base.TaskSet, method: str, seed: int
) -> Any:
  """The first task of a split.

  Raises:
    ConfigError: There is none, or it is no Task.
  """
  families = config.task_source.families
  if method == "eval_task":
    families = config.evaluated_families
  family = families[0]
  call = f"{type(source).__name__}.{method}({family!r}, 0, {seed})"
  try:
    task = getattr(source, method)(family, 0, seed)
  except StopIteration as error:
    raise _refused(config, f"{call} has no task") from error
  except Exception as error:  # pylint: disable=broad-except
    # A user's own, which may raise anything.
    text = f"{call}: {describe(error, [type(source)])}"
    raise _refused(config, text) from error
  if not isinstance(task, gym_base.Task):
    raise _refused(
      config,
      f"{call} must return a gyms.base.Task, got a {type(task).__name__}",
    )
  return task


def _refused(config: TrainConfig, text: str) -> ConfigError:
  return ConfigError([f"{_world(config)}: {text}"])


def _world(config: TrainConfig) -> str:
  """The setting that names what the episodes act on."""
  if episodes_lib.environment_spec.get(config.environment.name).gym:
    return f"gym.name={config.gym.name}"
  return f"environment.name={config.environment.name}"


# --- parts of the user's own --------------------------------------------------


def _rewards(config: TrainConfig) -> list[Callable[..., Any]]:
  spec = config.environment.reward
  names = [spec] if isinstance(spec, str) else list(spec)
  return [rewards.get_reward_fn(name, "operator") for name in names]


def _is_own(part: object) -> bool:
  module = getattr(part, "__module__", "") or ""
  return module != "builtins" and not module.startswith(_PACKAGE)


def _has_coroutines(part: object) -> bool:
  members = (getattr(part, name, None) for name in dir(part))
  return any(map(inspect.iscoroutinefunction, (part, *members)))


def _files(own: Iterable[Any]) -> set[str]:
  files = set()
  for part in own:
    try:
      files.add(inspect.getfile(part))
    except (TypeError, OSError):
      pass  # Made at a prompt.
  return files


def _is_certain(error: BaseException, stage: str, own: Iterable[Any]) -> bool:
  """Whether an error would end every episode, whatever the policy writes."""
  if isinstance(error, (OSError, http.CallError)):
    return False
  if stage == "reset" or isinstance(error, (NameError, ImportError)):
    return True
  if isinstance(error, AttributeError):
    return error.obj is not None  # None: of something that was not found.
  files = _files(own)
  # Outside the user's code: its arguments or its result are wrong.
  return not any(
    frame.filename in files
    for frame in traceback.extract_tb(error.__traceback__)
  )


def describe(error: BaseException, own: Iterable[Any]) -> str:
  """An error in one line, with its place in the files of `own` parts."""
  text = " ".join(concurrency.describe(error).split())
  if isinstance(error, TypeError) and "Task.__init__()" in text:
    fields = ", ".join(gym_base.Task.__dataclass_fields__)
    text += f"; a Task has {fields}, and params takes a mapping of your own"
  files = _files(own)
  frames = traceback.extract_tb(error.__traceback__)
  for frame in reversed(frames):
    if frame.filename in files:
      return f"{text} ({frame.filename}, line {frame.lineno})"
  return text


# --- playing ------------------------------------------------------------------


def _play(
  config: TrainConfig,
  episodes: episodes_lib.EpisodeFactory,
  task: gym_base.Task,
  pair: tuple[Any, Any],
  own: list[Any],
) -> None:
  """Plays one turn of `task`, evaluates it and closes the environment.

  Raises:
    ConfigError: The environment, agent or reward failed.
  """
  agent, env = pair
  engine = episode_lib.TrajectoryCollectEngine(
    agent,
    env,
    lambda messages: _reply(config, agent),
    episodes.episode_reward,
    max_steps=1,
    timeout=config.collect.deadlines.episode,
    deadlines=config.collect.deadlines,
    task=task,
  )

  async def collect() -> Any:
    try:
      return await engine.collect()
    finally:
      await episodes.close_shared()

  trajectory = concurrency.drive(collect())
  error, stage = engine.failure, engine.failed_stage
  if trajectory.status.is_policy_outcome:
    return
  late = trajectory.status == trajectory_lib.TrajectoryStatus.TIMEOUT
  text = trajectory.error
  if error is not None and not late:  # The former names a late call's deadline.
    text = describe(error, own)
  text = (
    f"{_setting(config, stage, error)} fails in a trial of task"
    f" {task.task_id}, before the run: {text}"
  )
  if error is None or late or _is_certain(error, stage, own):
    raise ConfigError([text]) from error
  _LOG.warning("%s", text)


def _reply(config: TrainConfig, agent: base_agent.BaseAgent) -> str:
  """A click in the middle of the screen, or a word, in the agent's grammar."""
  parser = getattr(agent, "tool_parser", None)
  if parser is None:
    parser = tool_parser.make_tool_parser(config.agent.parser, "operator")
  if not isinstance(parser, tool_parser.GuiActionParser):
    return _WORD
  width, height = episodes_lib.screen_size(config)
  kind = gui_action.GuiActionKind.CLICK
  click = gui_action.GuiAction(kind, x=width / 2, y=height / 2)
  return parser.format_gui_action(click, width, height)


def _setting(
  config: TrainConfig, stage: str, error: BaseException | None
) -> str:
  """The setting that names the part that failed, with its value."""
  if stage == "agent":
    return f"agent.name={config.agent.name}"
  frames = traceback.extract_tb(error.__traceback__) if error else []
  folder = "/".join((*_PACKAGE.split(".")[:-1], "rewards"))
  if any(folder in frame.filename.replace("\\", "/") for frame in frames):
    return f"environment.reward={config.environment.reward}"
  return _world(config)


# --- the screen ---------------------------------------------------------------


def _check_screen(config: TrainConfig, task: gym_base.Task) -> None:
  gym = episodes_lib.make_gym(config, task.family)
  deadlines = config.collect.deadlines

  async def look() -> gym_base.Observation:
    try:
      return await gym.start(task)
    finally:
      await concurrency.with_deadline(
        gym.close(), deadlines.close, "closing the gym"
      )

  try:
    first = concurrency.call(
      lambda: concurrency.with_deadline(
        look(),
        deadlines.reset,
        f"the first start of gym.name={config.gym.name}",
      ),
      seconds=deadlines.reset + deadlines.close + 5.0,
      what="trying the gym",
    )
  except Exception as error:  # pylint: disable=broad-except
    # A user's gym may raise anything; no run can be made of it.
    raise ConfigError(
      [
        f"gym.name={config.gym.name} does not start task {task.task_id}:"
        f" {type(error).__name__}: {error}"
      ]
    ) from error
  if first.screenshot is None:
    return
  height, width = first.screenshot.shape[:2]
  if (width, height) != (config.gym.width, config.gym.height):
    raise ConfigError(
      [
        f"gym.width={config.gym.width}, gym.height={config.gym.height}: the"
        f" screen of gym.name={config.gym.name} is {width}x{height}; set"
        f" gym.width={width} gym.height={height}, or the screen's size"
      ]
    )
