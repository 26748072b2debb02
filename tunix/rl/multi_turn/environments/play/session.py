"""Plays and records the tasks of a gym, one at a time.

Does not read input; `page` does.
"""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
from typing import Any, Callable, Iterator, Mapping

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments import recordings
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.net import concurrency

Kind = gui_action.GuiActionKind
ENDS = (Kind.ANSWER, Kind.TERMINATE)
MAX_TURNS = 100
"""Of a task without a number of its own, by an oracle or a script."""


class Session:
  """Plays and records the tasks of one gym.

  Attributes:
    task: the current one, with the instruction that was shown.
    seen: the newest observation.
    actions: Actions played so far.
    evaluation: Evaluation of the task when it is over, else None.
    recorded: episodes written.
  """

  def __init__(
    self,
    gym_name: str,
    gym: base.Gym,
    *,
    out: pathlib.Path | None = None,
    by: str = "person",
    only_solved: bool = False,
    timeout_s: float = 60.0,
  ):
    """Args:

    gym_name: the registered name.
    gym: built from its declaration.
    out: file that episodes are appended to; None records nothing.
    by: the player, e.g. "person" or "oracle".
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
    spec = gyms.get(gym_name, "operator")
    self._oracle = spec.load_oracle() if spec.oracle is not None else None
    self.task: base.Task  # This and the next are of `start`.
    self.seen: base.Observation
    self.evaluation: base.Evaluation | None = None
    self.actions: list[gui_action.GuiAction] = []
    self.recorded = 0
    self._observations: list[base.Observation] = []
    self._targets: list[str | None] = []

  async def start(self, task: base.Task) -> base.Observation:
    """Starts a task; drops an unfinished episode of another."""
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
    if not self._observations or self.evaluation is not None:
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
    """Judges the current state, and records the episode."""
    if self.evaluation is None:
      self.evaluation = await self._call("evaluate")
      if self._out is not None and (
        self.evaluation.success or not self._only_solved
      ):
        recordings.append(self._out, self.recording())
        self.recorded += 1
    return self.evaluation

  async def play(
    self, task: base.Task, script: Iterator[gui_action.GuiAction] | None = None
  ) -> base.Evaluation:
    """Plays a task to its end: the actions of `script`, or the oracle's.

    It is judged as it stands when they end, or its turns are used up.

    Raises:
      ValueError: the gym has no oracle.
    """
    await self.start(task)
    limit = task.max_turns or MAX_TURNS
    while self.evaluation is None:
      action = next(script, None) if script else await self.next_right()
      if action is None or len(self.actions) >= limit:
        return await self.finish()
      await self.act(action)
    return self.evaluation

  def recording(self) -> recordings.Recording:
    assert self.evaluation is not None
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
    """Returns the oracle's next action; None when it is over.

    Raises:
      ValueError: the gym has no oracle.
    """
    oracle = self._oracle or gyms.get(self._gym_name, "operator").load_oracle()
    return await _value(oracle.act(self._gym), self._seconds)

  async def close(self) -> None:
    """Closes the gym; idempotent."""
    await self._calls.close(seconds=self._seconds)

  async def _target(self, action: gui_action.GuiAction) -> str | None:
    if self._oracle is None or action.x is None or action.y is None:
      return None
    return await _value(
      self._oracle.describe(self._gym, action.x, action.y), self._seconds
    )

  async def _call(self, name: str, *args: Any) -> Any:
    return await self._calls.call(name, *args, seconds=self._seconds)


async def _value(result: object, seconds: float) -> Any:
  if inspect.isawaitable(result):
    return await concurrency.with_deadline(result, seconds, "the oracle")
  return result


def find_tasks(
  gym_name: str,
  identifier: str,
  *,
  split: str,
  index: int,
  seed: int,
  options: Mapping[str, Any],
) -> Callable[[int], base.Task]:
  """n -> the n-th of the tasks that the command line names.

  Args:
    gym_name: the registered name.
    identifier: a family of the gym; where a task's id is enough to start it,
      also such an id.
    split, index, seed: The family's task that comes first.
    options: Options of the gym and its tasks.

  Raises:
    ValueError: no such gym or family.
  """
  spec = gyms.get(gym_name, "operator")
  try:
    tasks = spec.make_tasks((identifier,), options)
  except ValueError:
    if not spec.starts_by_id:
      raise
    # No family: the gym finds it, or reports that it has none.
    return lambda number: base.Task(identifier, gym_name)
  draw = tasks.train_task if split == "train" else tasks.eval_task
  return lambda number: draw(identifier, index + number, seed)
