"""Defines the protocols of gyms and task sets, and the data they exchange.

A gym starts one task at a time, carries out `GuiAction`s, shows screenshots
and evaluates the state it is in. Single use is not required: `start` may be
called again after an episode. Anything may raise; the collector turns that
into data. The methods may be coroutine functions; plain ones run in threads,
so they may block.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping, Protocol

import numpy as np
from tunix.rl.multi_turn.core import gui_action

_SHOWN = 120
"""Characters of a text that a repr shows."""


def _cut(text: str) -> str:
  return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


@dataclasses.dataclass(frozen=True)
class Task:
  """One task instance.

  Attributes:
    task_id: unique; the same id always means the same initial state.
    family: task family, the unit success is reported by.
    instruction: the goal, in plain language; may be empty when only
      the gym knows it before `start` (its first Observation then carries it).
    seed: decides the instance within the family.
    max_turns: turns the episode may take, or None for the run's default.
    params: gym-specific settings, JSON values.
  """

  task_id: str
  family: str
  instruction: str = ""
  seed: int = 0
  max_turns: int | None = None
  params: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def to_json(self) -> dict[str, Any]:
    return {**dataclasses.asdict(self), "params": dict(self.params)}

  def __repr__(self) -> str:
    return f"Task({_cut(self.task_id)!r}, {_cut(self.instruction)!r})"

  @classmethod
  def from_json(cls, data: Mapping[str, Any]) -> Task:
    """Returns the task of a JSON object.

    Raises:
      TypeError: A field is unknown or missing, or `params` is no object.
    """
    task = cls(**data)
    if not isinstance(task.params, Mapping):
      raise TypeError("params must be an object, such as {}")
    return task


@dataclasses.dataclass(frozen=True, eq=False)
class Observation:
  """The gym's answer to `start` or `act`.

  Attributes:
    screenshot: uint8[H, W, 3]; None where the gym shows a tree instead.
    instruction: set by `start` when the task's own is empty.
    text: anything the policy should read beside the picture ("" for none).
    done: the gym has ended the episode; `evaluate` is meaningful now.
    info: Further facts, for logs.
    axtree: Accessibility tree of the page ("" where the gym shows none).
  """

  screenshot: np.ndarray | None
  instruction: str = ""
  text: str = ""
  done: bool = False
  info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  axtree: str = ""

  @property
  def pixels(self) -> np.ndarray:
    """`screenshot` of a gym that shows one. Raises ValueError without one."""
    if self.screenshot is None:
      raise ValueError("the observation has no screenshot")
    return self.screenshot

  @property
  def size(self) -> tuple[int, int]:
    """(width, height) of the screenshot. Raises ValueError without one."""
    height, width = np.shape(self.pixels)[:2]
    return width, height

  def __repr__(self) -> str:
    size = "no screenshot"
    if self.screenshot is not None:
      size = "{}x{}".format(*self.size)
    text = f", {_cut(self.text)!r}" if self.text else ""
    return f"Observation({size}{text}{', done' if self.done else ''})"


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Outcome of a task, by state.

  Attributes:
    score: reward, usually in [0, 1].
    success: whether the task counts as solved.
    details: Further facts, for logs.
  """

  score: float
  success: bool
  details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def as_evaluation(verdict: object, **details: Any) -> Evaluation:
  """Turns the verdict of a user's evaluator into an Evaluation.

  Args:
    verdict: an Evaluation, a bool, or a number in [0, 1], which is a success
      from 1 on.
    **details: Details of an Evaluation that is made of a number.

  Raises:
    TypeError: `verdict` has another type.
  """
  if isinstance(verdict, Evaluation):
    return verdict
  if isinstance(verdict, (bool, int, float, np.bool_, np.integer, np.floating)):
    if 0 <= verdict <= 1:  # Not so for NaN.
      return Evaluation(float(verdict), bool(verdict >= 1), details)
  raise TypeError(
    "an evaluator must return an Evaluation, a bool or a number in [0, 1],"
    f" got {verdict!r}"
  )


class Gym(Protocol):
  """A world that plays one task at a time; `close` must be idempotent."""

  async def start(self, task: Task) -> Observation: ...

  async def act(self, action: gui_action.GuiAction) -> Observation: ...

  async def evaluate(self) -> Evaluation: ...

  async def close(self) -> None: ...


class TaskSet(Protocol):
  """Makes a family's tasks: `GymSpec.tasks`.

  `train_task(family, index, seed)` is the `index`-th training task of the run
  with this `seed`, `eval_task` the `index`-th held-out one; both always give
  the same task for the same arguments. The two never share an instance.

  A `train_task` that raises StopIteration ends the run: what it gave before is
  trained on, and the last update may be of fewer groups.
  """

  def families(self) -> tuple[str, ...]: ...

  def train_task(self, family: str, index: int, seed: int) -> Task: ...

  def eval_task(self, family: str, index: int, seed: int) -> Task: ...
