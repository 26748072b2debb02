"""Records episodes (screenshots, actions, verdict) and replays them as a gym.

A file has one episode a line, as JSON with its screenshots, so that reading it
needs no gym. `ReplayGym` plays recordings behind the `Gym` protocol.

Promises: an appended episode is in the file whole or not at all, also after a
crash; a line that is not a recording raises with its number.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any, Mapping, Sequence

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import shell_hints
from tunix.rl.multi_turn.environments import wire
from tunix.rl.multi_turn.environments.gyms import base

VERSION = 1


@dataclasses.dataclass(frozen=True)
class Recording:
  """One episode.

  Attributes:
    gym: registered name of the gym.
    task: Task with the instruction that the player saw.
    observations: the first, and one after each action.
    actions: Actions in pixels of the screenshot before them.
    targets: name of the element that each action hit; None: unknown.
    evaluation: the gym's verdict.
    by: the player: "person", "oracle" or "script".
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
        "a recording needs one observation more than actions, got"
        f" {len(self.observations)} and {len(self.actions)}"
      )
    if any(o.screenshot is None or o.axtree for o in self.observations):
      raise ValueError(
        "a recording holds screenshots and no accessibility trees; record"
        f" {self.gym} with observation=screenshot"
      )
    if len(self.targets) != len(self.actions):
      raise ValueError(
        f"a recording needs one target an action, got {len(self.targets)}"
        f" and {len(self.actions)}"
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
          shown, picture=wire.screenshot_to_json(shown.pixels)
        )
        for shown in self.observations
      ],
    }

  @classmethod
  def from_json(cls, data: object, where: str = "a recording") -> Recording:
    """Raises:

    ValueError: naming `where` and the wrong field.
    """
    if not isinstance(data, Mapping) or data.get("version") != VERSION:
      raise ValueError(
        f"{where} is not a recording of version {VERSION}; record it with"
        f" {shell_hints.command('environments.play')}"
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
      raise ValueError(f"{where}: {type(error).__name__}: {error}") from None


def append(path: str | os.PathLike[str], recording: Recording) -> None:
  """Adds a line to the file; makes the file if needed."""
  line = json.dumps(recording.to_json(), separators=(",", ":")) + "\n"
  file = pathlib.Path(path).expanduser()
  file.parent.mkdir(parents=True, exist_ok=True)
  with open(file, "ab") as out:
    # Ends a line that a crash cut; `read` drops it.
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
  """Returns all episodes of a file, in order, without lines that a crash cut.

  Raises:
    OSError: the file cannot be read.
    ValueError: a whole line is not a recording.
  """
  recordings = []
  file = pathlib.Path(path).expanduser()
  with open(file, encoding="utf-8", errors="replace") as lines:
    for number, line in enumerate(lines, 1):
      if not line.strip():
        continue
      try:
        data = json_text.parse(line)
      except json.JSONDecodeError:
        continue  # Cut.
      except ValueError as error:
        raise ValueError(f"{path}, line {number}: {error}") from None
      recordings.append(Recording.from_json(data, f"{path}, line {number}"))
  return recordings


class ReplayGym:
  """Plays recordings; accepts the recorded kinds of actions only.

  Points may differ a little, as grammars round them.
  """

  def __init__(self, recordings: Sequence[Recording]):
    """`recordings` must have different task ids, which `start` looks up."""
    self._all = {r.task.task_id: r for r in recordings}
    if len(self._all) != len(recordings):
      raise ValueError(
        "two recordings have the same task id; replay them with two gyms"
      )
    self._now: Recording | None = None
    self._step = 0

  async def start(self, task: base.Task) -> base.Observation:
    self._now, self._step = self._all[task.task_id], 0
    return self._now.observations[0]

  async def act(self, action: gui_action.GuiAction) -> base.Observation:
    expected, now = self.next_action(), self._playing
    if expected is None:  # The `terminate` that a demonstrator adds.
      return dataclasses.replace(now.observations[-1], done=True)
    if action.kind is not expected.kind:
      raise ValueError(
        f"step {self._step + 1} of {now.task.task_id} was a"
        f" {expected.kind.value}, not a {action.kind.value}"
      )
    self._step += 1
    return now.observations[self._step]

  async def evaluate(self) -> base.Evaluation:
    return self._playing.evaluation

  async def close(self) -> None:
    self._now = None

  @property
  def _playing(self) -> Recording:
    if self._now is None:
      raise RuntimeError("no recording is playing; start a task")
    return self._now

  def next_action(self) -> gui_action.GuiAction | None:
    """Returns the recorded next action; None at the end."""
    if self._now is None or self._step == len(self._now.actions):
      return None
    return self._now.actions[self._step]

  def target(self) -> str | None:
    """The element that the next action hits; None: unknown, or the end."""
    if self._now is None or self._step == len(self._now.actions):
      return None
    return self._now.targets[self._step]
