"""Recorded episodes: what was shown, what was done, how it ended.

A file has one episode a line, as JSON, screenshots included, so that it can be
read where the gym is not, and whatever the gym would show today. `ReplayGym`
plays one again behind the `Gym` protocol.

Promises: what was appended is there whole or not at all, also after a crash;
a line that is no recording is refused with its number.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any, Mapping, Sequence

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments import wire
from tunix.rl.multi_turn.environments.gyms import base

VERSION = 1


@dataclasses.dataclass(frozen=True)
class Recording:
  """One episode.

  Attributes:
    gym: its registered name.
    task: what was to be done, with the instruction that was shown.
    observations: the first, and one after each action.
    actions: in pixels of the screenshot before them.
    targets: what each pointed at, in words; None where nobody knows.
    evaluation: how it ended.
    by: "person", "oracle" or "script".
  """

  gym: str
  task: base.Task
  observations: tuple[base.Observation, ...]
  actions: tuple[gui_action.GuiAction, ...]
  targets: tuple[str | None, ...]
  evaluation: base.Evaluation
  by: str = "person"

  def __post_init__(self):
    for name in ("observations", "actions", "targets"):
      object.__setattr__(self, name, tuple(getattr(self, name)))
    if len(self.observations) != len(self.actions) + 1:
      raise ValueError(
          f"a recording has one observation more than actions, got"
          f" {len(self.observations)} and {len(self.actions)}"
      )
    if len(self.targets) != len(self.actions):
      raise ValueError(
          f"a recording has a target an action, got {len(self.targets)} and"
          f" {len(self.actions)}"
      )

  @property
  def success(self) -> bool:
    return self.evaluation.success

  def to_json(self) -> dict[str, Any]:
    return {
        "version": VERSION,
        "gym": self.gym,
        "by": self.by,
        "task": self.task.to_json(),
        "actions": [a.to_json() for a in self.actions],
        "targets": list(self.targets),
        "evaluation": {
            "score": float(self.evaluation.score),
            "success": bool(self.evaluation.success),
            "details": wire.jsonable(self.evaluation.details),
        },
        "observations": [
            wire.observation_to_json(
                seen, picture=wire.screenshot_to_json(seen.screenshot)
            )
            for seen in self.observations
        ],
    }

  @classmethod
  def from_json(cls, data: Any, where: str = "a recording") -> Recording:
    """Raises:

      ValueError: naming `where` and what is wrong.
    """
    if not isinstance(data, Mapping) or data.get("version") != VERSION:
      raise ValueError(
          f"{where} is no recording of version {VERSION}; record it with"
          " python -m tunix.rl.multi_turn.environments.play"
      )
    try:
      return cls(
          gym=str(data["gym"]),
          task=base.Task.from_json(data["task"]),
          observations=tuple(
              wire.observation_from_json(o) for o in data["observations"]
          ),
          actions=tuple(
              gui_action.GuiAction.from_json(a) for a in data["actions"]
          ),
          targets=tuple(data["targets"]),
          evaluation=base.Evaluation(**data["evaluation"]),
          by=str(data.get("by", "person")),
      )
    except (KeyError, TypeError, ValueError) as error:
      raise ValueError(
          f"{where}: {type(error).__name__}: {error}"
      ) from None


def append(path: str | os.PathLike[str], recording: Recording) -> None:
  """Adds a line to the file, which is made if it is not there."""
  line = json.dumps(recording.to_json(), separators=(",", ":")) + "\n"
  file = pathlib.Path(path).expanduser()
  file.parent.mkdir(parents=True, exist_ok=True)
  with open(file, "ab") as out:
    # A line that a crash cut is ended first, and dropped when it is read.
    if out.tell() and not _ends_with_newline(file):
      out.write(b"\n")
    out.write(line.encode("utf-8"))
    out.flush()
    os.fsync(out.fileno())


def _ends_with_newline(file: pathlib.Path) -> bool:
  with open(file, "rb") as opened:
    opened.seek(-1, os.SEEK_END)
    return opened.read(1) == b"\n"


def read(path: str | os.PathLike[str]) -> list[Recording]:
  """All episodes of a file, in order; a line that a crash cut is left out.

  Raises:
    OSError: the file cannot be read.
    ValueError: a line that is whole and no recording.
  """
  found = []
  file = pathlib.Path(path).expanduser()
  with open(file, encoding="utf-8", errors="replace") as lines:
    for number, line in enumerate(lines, 1):
      if not line.strip():
        continue
      try:
        data = json.loads(line)
      except ValueError:
        continue  # Cut.
      found.append(Recording.from_json(data, f"{path}, line {number}"))
  return found


class ReplayGym:
  """Shows a recording again; one that plays it must act as it was acted.

  Points may differ a little (grammars round them), kinds may not.
  """

  def __init__(self, recordings: Sequence[Recording]):
    """`recordings` are found by their tasks' ids, which must differ."""
    self._all = {r.task.task_id: r for r in recordings}
    if len(self._all) != len(recordings):
      raise ValueError("two recordings are of one task id")
    self._now: Recording | None = None
    self._step = 0

  async def start(self, task: base.Task) -> base.Observation:
    self._now, self._step = self._all[task.task_id], 0
    return self._now.observations[0]

  async def act(self, action: gui_action.GuiAction) -> base.Observation:
    expected = self.next_action()
    if expected is None:  # The end that a demonstrator adds.
      return dataclasses.replace(self._now.observations[-1], done=True)
    if action.kind is not expected.kind:
      raise ValueError(
          f"step {self._step + 1} of {self._now.task.task_id} was a"
          f" {expected.kind.value}, not a {action.kind.value}"
      )
    self._step += 1
    return self._now.observations[self._step]

  async def evaluate(self) -> base.Evaluation:
    return self._now.evaluation

  async def close(self) -> None:
    self._now = None

  def next_action(self) -> gui_action.GuiAction | None:
    """What was done next; None at the end."""
    if self._now is None or self._step == len(self._now.actions):
      return None
    return self._now.actions[self._step]

  def target(self) -> str | None:
    """What the next action pointed at."""
    if self._now is None or self._step == len(self._now.actions):
      return None
    return self._now.targets[self._step]
