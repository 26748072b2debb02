"""Plays one episode from a notebook or a script, to be looked at.

    mt.play("oracle", "enter-text", gym="desktop")
    mt.play("runs/desktop-…", "enter-text", index=3).trajectory
    mt.play([GuiAction("click", x=20, y=30)], "click-button")

Promises: a policy plays as an evaluation does (`run.evaluations.evaluator`), an
oracle or a script as the command `environments.play`; the same task, by
number, for each.
The notebook's stop button (or Ctrl-C) ends the episode and closes its gym.
Nothing is left on the disk once the episode is forgotten.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
import threading
import time
from typing import Any, Mapping, Sequence

from PIL import Image
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.api import episodes as episodes_lib
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments import recordings
from tunix.rl.multi_turn.environments import spec as environment_spec
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.environments.play import session as session_lib
from tunix.rl.multi_turn.reporting import run_data

ORACLE = "oracle"
_STOPPED = "the episode was stopped before its end"
Status = trajectory_lib.TrajectoryStatus


def play(
  policy: object,
  task: str | gym_base.Task | None = None,
  *,
  index: int = 0,
  split: str = "eval",
  mode: str = "sampled",
  config: str | pathlib.Path | Mapping[str, Any] | None = None,
  **settings: Any,
) -> episodes_lib.Episode:
  """Plays a task once and returns the episode, which a notebook draws.

  Args:
    policy: See `evaluate`; "oracle" for the gym's own; or a script, a list
      of `GuiAction` in pixels of the gym's screen.
    task: a family, the `index`-th task of which is played; or a task itself;
      None: the first family.
    index: 0 ….
    split: "eval", tasks that are held out, or "train".
    mode: Sampling of a policy: "sampled", or "greedy".
    config: a YAML file, or a mapping as one would hold.
    **settings: Settings as of `evaluate`: `gym="desktop"`, `seed=3`.

  Raises:
    ConfigError: lists every problem of the settings, or what cannot be built.
    BusyError: this process trains or plays by a policy.
    RuntimeError: the gym or the server broke the episode, or it was stopped.
  """
  problems = []
  if split not in ("train", "eval"):
    problems.append(f"split={split!r} must be 'train' or 'eval'")
  if mode not in ("sampled", "greedy"):
    problems.append(f"mode={mode!r} must be 'sampled' or 'greedy'")
  if not isinstance(index, int) or index < 0:
    problems.append(f"index={index!r} must be a number from 0")
  if task is not None and not isinstance(task, (str, gym_base.Task)):
    problems.append(f"task={task!r} must be a family's name or a Task")
  if problems:
    raise config_lib.ConfigError(problems)
  chosen = _Chosen(task, split, index)
  script = None
  if not isinstance(policy, str) and isinstance(policy, Sequence):
    script = list(policy)
    if any(not isinstance(one, gui_action.GuiAction) for one in script):
      raise config_lib.ConfigError(
        [
          "policy: a script is a list of GuiActions"
          " (tunix.rl.multi_turn.core.gui_action)"
        ]
      )
  if script is not None or policy == ORACLE:
    return _by_session(chosen, script, config, settings)
  return _by_policy(policy, chosen, mode, config, settings)


@dataclasses.dataclass(frozen=True)
class _Chosen:
  """The task that is played."""

  task: str | gym_base.Task | None
  split: str
  index: int

  @property
  def families(self) -> str | None:
    """Value of the setting `tasks`."""
    return self.task if isinstance(self.task, str) else None

  def of(
    self, config: config_lib.TrainConfig, source: gym_base.TaskSet
  ) -> gym_base.Task:
    """Of a configuration and its task source."""
    if isinstance(self.task, gym_base.Task):
      return self.task
    family = self.task or config.task_source.families[0]
    if self.split == "train":
      return source.train_task(family, self.index, config.run.seed)
    return source.eval_task(family, self.index, config.eval.seed)


def _by_policy(
  policy: object,
  chosen: _Chosen,
  mode: str,
  config: str | pathlib.Path | Mapping[str, Any] | None,
  settings: Mapping[str, Any],
) -> episodes_lib.Episode:
  from tunix.rl.multi_turn.api import evaluating  # pylint: disable=g-import-not-at-top

  place = tempfile.TemporaryDirectory(prefix="tunix-play-")
  overrides = {
    "report.progress": "none",
    **settings,
    "run.dir": place.name,
    "run.name": "played",
    "eval.modes": [mode],
    "eval.attempts": 1,
    "report.episodes": 1,
    "evaluate.give_up_after": 1,
  }
  argv = evaluating.arguments(policy, chosen.families, config, overrides)
  evaluation = evaluating.play(argv, lambda c, source: [chosen.of(c, source)])
  episodes = episodes_lib.Episodes.read(run_data.load(evaluation.directory))
  if not episodes:
    raise RuntimeError(_STOPPED)
  episodes[0].keep(place)
  return episodes[0]


def _by_session(
  chosen: _Chosen,
  script: Sequence[gui_action.GuiAction] | None,
  config: str | pathlib.Path | Mapping[str, Any] | None,
  settings: Mapping[str, Any],
) -> episodes_lib.Episode:
  from tunix.rl.multi_turn.api import evaluating  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.run import episodes as run_episodes  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.run import interrupts  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.run import loop_thread  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.run import tasks as run_tasks  # pylint: disable=g-import-not-at-top

  c = config_lib.load_evaluation(
    evaluating.arguments(None, chosen.families, config, settings)
  )
  if not environment_spec.get(c.environment.name).gym:
    raise config_lib.ConfigError(
      [
        f"environment.name={c.environment.name} acts on no gym; oracles and"
        " scripts play environment=cua"
      ]
    )
  if c.gym.observation != "screenshot":
    raise config_lib.ConfigError(
      [
        f"gym.observation={c.gym.observation}: oracles and scripts are recorded"
        " by screenshots; leave it out"
      ]
    )
  spec = gyms.get(c.gym.name, "operator")
  if script is None and spec.oracle is None:
    raise config_lib.ConfigError(
      [
        f"gym.name={c.gym.name} has no oracle; give a policy, or a list of"
        " GuiActions"
      ]
    )
  c, source = run_tasks.resolve(c)
  task = chosen.of(c, source)
  seconds = c.collect.deadlines.step
  session = session_lib.Session(
    c.gym.name,
    run_episodes.make_gym(c, task.family),
    by=ORACLE if script is None else "script",
    timeout_s=seconds,
  )

  async def closed() -> None:
    await session.close()
    if (close := spec.load_close_shared()) is not None:
      await close()  # Of this loop's gyms alone.

  # A notebook's own thread has a loop already.
  loop, stop = loop_thread.LoopThread(), threading.Event()
  try:
    with interrupts.asked(stop, "stopping the episode"):
      loop.wait(
        session.play(task, iter(script) if script is not None else None), stop
      )
    recording = session.recording()
  except loop_thread.Interrupted:
    raise RuntimeError(_STOPPED) from None
  finally:
    loop_thread.try_to_close("the gym", lambda: loop.finish(closed()))
    loop.close()
  return _episode(recording, chosen.split)


def _episode(
  recording: recordings.Recording, split: str
) -> episodes_lib.Episode:
  """A recording as an episode."""
  place = tempfile.TemporaryDirectory(prefix="tunix-play-")
  directory = pathlib.Path(place.name)
  (directory / "images").mkdir()
  run = run_data.RunDirectory(directory, {}, (), (), "")
  store = images_lib.ImageStore()
  screens = []
  for observation in recording.observations:
    image = store.put(observation.pixels)
    Image.fromarray(observation.pixels).save(run.image_path(image))
    screens.append(image)
  task = recording.task
  verdict = recording.evaluation
  messages: list[trajectory_lib.Message] = []
  steps = []
  for turn, (action, target) in enumerate(
    zip(recording.actions, recording.targets)
  ):
    texts = [task.instruction] if not turn else []
    if recording.observations[turn].text:
      texts.append(recording.observations[turn].text)
    parts = [{"type": "text", "text": text} for text in texts]
    picture = {"type": "image", "image": screens[turn]}
    messages = [*messages, {"role": "user", "content": [picture, *parts]}]
    steps.append(
      trajectory_lib.Step(
        chat_completions=messages,
        action=action.to_json(),
        observation={"image": screens[turn + 1]},
        info={
          "gui_actions": [action.to_json()],
          **({"target": target} if target else {}),
        },
      )
    )
  if steps:
    steps[-1].done, steps[-1].reward = True, verdict.score
  trajectory = trajectory_lib.Trajectory(
    task=task.to_json(),
    steps=steps,
    reward=verdict.score,
    status=Status.SUCCEEDED if verdict.success else Status.FAILED,
  )
  extra = (
      0, time.time(), split, recording.by, "", task.task_id, task.family, 0
  )  # fmt: skip
  episode = episodes_lib.Episode(
    run, {**trajectory.to_json(), **dict(zip(run_data.BESIDE, extra))}
  )
  episode.keep(place)
  return episode
