"""One task at a time, played by whoever acts, and recorded.

Does not know how actions come in; `page` and `terminal` do.
"""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
from typing import Any, Callable

from tunix.rl.multi_turn.core import concurrency
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import registry as names
from tunix.rl.multi_turn.environments import recordings
from tunix.rl.multi_turn.environments import registry
from tunix.rl.multi_turn.environments.gyms import base

Kind = gui_action.GuiActionKind
ENDS = (Kind.ANSWER, Kind.TERMINATE)
_GYMS = "tunix.rl.multi_turn.environments.gyms"
ORACLES = {
    "desktop": (
        f"{_GYMS}.desktop:oracle_action", f"{_GYMS}.desktop:DesktopGym.describe"
    ),
    "miniwob": (f"{_GYMS}.miniwob:oracle_action", f"{_GYMS}.miniwob:describe"),
    "xdesktop": (
        f"{_GYMS}.xdesktop:oracle_action", f"{_GYMS}.xdesktop:describe"
    ),
}  # pyformat: disable
"""Gym -> what knows the next right action, and what things are called."""


class Session:
  """Plays and records the tasks of one gym.

  Attributes:
    task: that is played, with the instruction that was shown.
    seen: the newest observation.
    actions: made so far.
    evaluation: of the task when it is over, else None.
    recorded: episodes written.
  """

  def __init__(
      self,
      gym_name: str,
      gym: Any,
      *,
      out: pathlib.Path | None = None,
      by: str = "person",
      only_solved: bool = False,
      timeout_s: float = 60.0,
  ):
    """Args:

      gym_name: the registered name.
      gym: it.
      out: file that episodes are appended to; None records nothing.
      by: who plays.
      only_solved: write episodes that are solved and no others.
      timeout_s: deadline of each call into the gym.
    """
    self._gym_name = gym_name
    self._gym = gym
    self._calls = concurrency.Guarded(gym, name="the gym")
    self._out = out
    self._by = by
    self._only_solved = only_solved
    self._seconds = timeout_s
    self._describe: Callable[..., Any] | None = None
    if gym_name in ORACLES:
      self._describe = names.import_path(ORACLES[gym_name][1])
    self.task: base.Task | None = None
    self.seen: base.Observation | None = None
    self.evaluation: base.Evaluation | None = None
    self.actions: list[gui_action.GuiAction] = []
    self.recorded = 0
    self._observations: list[base.Observation] = []
    self._targets: list[str | None] = []

  async def start(self, task: base.Task) -> base.Observation:
    """Begins a task; what was played of another is dropped."""
    self.evaluation = None
    self.actions, self._targets = [], []
    self.seen = await self._call("start", task)
    self.task = dataclasses.replace(
        task, instruction=task.instruction or self.seen.instruction
    )
    self._observations = [self.seen]
    return self.seen

  async def act(self, action: gui_action.GuiAction) -> base.Observation:
    """Carries out an action; the end of the task is judged and recorded.

    Raises:
      RuntimeError: no task is played, or it is over.
    """
    if self.seen is None or self.evaluation is not None:
      raise RuntimeError("no task is being played; start one")
    target = await self._target(action)
    self.seen = await self._call("act", action)
    self.actions.append(action)
    self._targets.append(target)
    self._observations.append(self.seen)
    if self.seen.done or action.kind in ENDS:
      await self.finish()
    return self.seen

  async def finish(self) -> base.Evaluation:
    """Judges the task as it stands, and records the episode."""
    if self.evaluation is None:
      self.evaluation = await self._call("evaluate")
      if self._out is not None and (
          self.evaluation.success or not self._only_solved
      ):
        recordings.append(self._out, self.recording())
        self.recorded += 1
    return self.evaluation

  def recording(self) -> recordings.Recording:
    return recordings.Recording(
        gym=self._gym_name,
        task=self.task,
        observations=tuple(self._observations),
        actions=tuple(self.actions),
        targets=tuple(self._targets),
        evaluation=self.evaluation,
        by=self._by,
    )

  async def next_right(self) -> gui_action.GuiAction | None:
    """The oracle's next action; None when it is over.

    Raises:
      ValueError: the gym has no oracle.
    """
    if self._gym_name not in ORACLES:
      raise ValueError(
          f"gym {self._gym_name!r} has no oracle; {' and '.join(ORACLES)} do"
      )
    oracle = names.import_path(ORACLES[self._gym_name][0])
    return await _value(oracle(self._gym), self._seconds)

  async def close(self) -> None:
    """Idempotent."""
    await self._calls.close(seconds=self._seconds)

  async def _target(self, action: gui_action.GuiAction) -> str | None:
    if self._describe is None or action.x is None:
      return None
    return await _value(
        self._describe(self._gym, action.x, action.y), self._seconds
    )

  async def _call(self, name: str, *args: Any) -> Any:
    return await self._calls.call(name, *args, seconds=self._seconds)


async def _value(found: Any, seconds: float) -> Any:
  if inspect.isawaitable(found):
    return await concurrency.with_deadline(found, seconds, "the oracle")
  return found


def find_tasks(
    gym_name: str, identifier: str, *, split: str, index: int, seed: int,
    settings: dict[str, Any], task_settings: dict[str, Any],
) -> Callable[[int], base.Task]:  # pyformat: disable
  """n -> the n-th of the tasks that the command line names.

  Args:
    gym_name: the registered name.
    identifier: a family of the gym; with genv, anything the server has.
    split, index, seed: which of the family's comes first.
    settings: of the gym.
    task_settings: of its task set.

  Raises:
    ValueError: no such gym or family.
  """
  if gym_name == "genv":
    from tunix.rl.multi_turn.environments.task_sources import listed  # pylint: disable=g-import-not-at-top

    try:
      tasks = listed.server_tasks(settings, (identifier,))
    except ValueError:
      # No family: the server finds it, or says that it has none.
      return lambda number: base.Task(identifier, "genv")
  else:
    tasks = registry.make_task_set(gym_name, (identifier,), **task_settings)
  draw = tasks.train_task if split == "train" else tasks.eval_task
  return lambda number: draw(identifier, index + number, seed)
