"""Reads a run directory for the report.

Tolerant where a run may have been cut off: a missing or torn file means less
to show, not an error. Only a directory that holds no run at all is refused.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.reporting import files

Status = trajectory_lib.TrajectoryStatus


@dataclasses.dataclass(frozen=True)
class Frame:
  """One turn of an episode: its screenshot and the actions on it.

  Attributes:
    image: the screen the policy saw; None where it saw text only.
    actions: GuiActions as JSON, in pixels of that screen.
    text: the policy's completion.
    note: faults of this turn, "" for none.
    label: "turn 1", or the outcome for the last screen.
    observed: the text that the policy answered, where it saw no screen.
  """

  image: trajectory_lib.ImageRef | None
  actions: tuple[dict[str, Any], ...]
  text: str
  note: str
  label: str
  observed: str = ""


@dataclasses.dataclass(frozen=True)
class ShownEpisode:
  """The parts of a line of trajectories.jsonl that are shown."""

  index: int
  split: str
  family: str
  task_id: str
  instruction: str
  version: int
  time: float
  status: Status
  reward: float
  error: str | None
  frames: tuple[Frame, ...]

  @property
  def success(self) -> bool:
    return self.status is Status.SUCCEEDED

  def __repr__(self) -> str:
    return (
      f"ShownEpisode({self.split} {self.index}, {self.family},"
      f" {self.status.value}, reward {self.reward:g}, {len(self.frames)}"
      " frames)"
    )


@dataclasses.dataclass(frozen=True)
class RunDirectory:
  """The content of a run directory.

  Attributes:
    directory: Its path.
    summary: summary.json, {} without one.
    metrics: lines of metrics.jsonl in order of their step.
    episodes: kept episodes in order of time.
    config: text of config.yaml.
    evaluation: evaluation.json, {} where there is none.
  """

  directory: pathlib.Path
  summary: dict[str, Any]
  metrics: tuple[dict[str, Any], ...]
  episodes: tuple[ShownEpisode, ...]
  config: str
  evaluation: dict[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def name(self) -> str:
    return self.summary.get("run_name") or self.directory.name

  @property
  def evaluations(self) -> dict[str, dict[str, Any]]:
    """Evaluations that have a rate, in the order they were made."""
    by_name = self.summary.get("eval")
    if not isinstance(by_name, dict):
      return {}
    usable = {
      name: results
      for name, results in by_name.items()
      if isinstance(results, dict) and results.get("success_rate") is not None
    }
    return dict(sorted(usable.items(), key=lambda item: _order(item[0])))

  def series(self, name: str) -> tuple[list[float], list[float]]:
    """Steps and values of a metric where it was measured."""
    steps, values = [], []
    for line in self.metrics:
      value = line.get(name)
      if isinstance(value, (int, float)) and not isinstance(value, bool):
        steps.append(float(line["step"]))
        values.append(float(value))
    return steps, values

  def image_path(self, ref: trajectory_lib.ImageRef) -> pathlib.Path:
    return self.directory / "images" / f"{ref.sha256}.png"

  def open_image(self, ref: trajectory_lib.ImageRef) -> Any | None:
    """A kept screenshot as a PIL image; None when it is not there."""
    from PIL import Image  # pylint: disable=g-import-not-at-top

    try:
      with Image.open(self.image_path(ref)) as image:
        return image.convert("RGB")
    except OSError:
      return None

  def __repr__(self) -> str:
    return (
      f"RunDirectory({str(self.directory)!r}, {len(self.metrics)} updates,"
      f" {len(self.episodes)} episodes)"
    )


def _order(name: str) -> tuple[int, int, str]:
  if name.startswith("step_") and name[5:].isdigit():
    return 2, int(name[5:]), name
  ranks = {"initial": 0, "warm_start": 1, "final": 4}
  return ranks.get(name, 3), 0, name


def _runs_in(directory: pathlib.Path) -> str:
  """Newest of the runs that a directory holds, or is the policy of; "" """
  if (directory.parent / "summary.json").is_file():
    return f"the run, {directory.parent}"
  runs = [path.parent for path in directory.glob("*/summary.json")]
  runs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
  return " or ".join(map(str, runs[:3]))


def load(directory: str | pathlib.Path) -> RunDirectory:
  """Reads a run directory.

  Raises:
    FileNotFoundError: it has neither summary.json nor metrics.jsonl.
  """
  directory = pathlib.Path(directory)
  metrics = [
    line
    for line in files.read_lines(directory / "metrics.jsonl")
    if isinstance(line.get("step"), (int, float))
  ]
  summary = files.read_json(directory / "summary.json")
  if not metrics and not summary:
    raise FileNotFoundError(
      f"{directory} is not a run directory: it has neither summary.json nor"
      f" metrics.jsonl; give {_runs_in(directory) or 'runs/<name>'}"
    )
  episodes = []
  for line in files.read_lines(directory / "trajectories.jsonl"):
    try:
      episodes.append(shown_episode(line))
    except (KeyError, TypeError, ValueError):
      continue  # Written by another version, or torn.
  config = directory / "config.yaml"
  return RunDirectory(
    directory=directory,
    summary=summary,
    metrics=tuple(sorted(metrics, key=lambda line: line["step"])),
    episodes=tuple(sorted(episodes, key=lambda e: e.time)),
    config=config.read_text(encoding="utf-8") if config.exists() else "",
    evaluation=files.read_json(directory / "evaluation.json"),
  )


BESIDE = (
  "index",
  "time",
  "split",
  "mode",
  "group_id",
  "task_id",
  "family",
  "version",
)


def shown_episode(line: dict[str, Any]) -> ShownEpisode:
  trajectory = trajectory_lib.Trajectory.from_json(
    # The tokens are not shown, and the largest part to check.
    {k: v for k, v in line.items() if k not in BESIDE} | {"sequences": []}
  )
  task = trajectory.task if isinstance(trajectory.task, dict) else {}
  return ShownEpisode(
    index=int(line["index"]),
    split=str(line["split"]),
    family=str(line["family"]),
    task_id=str(line["task_id"]),
    instruction=str(task.get("instruction") or "") or asked(trajectory),
    version=int(line["version"]),
    time=float(line["time"]),
    status=trajectory.status,
    reward=trajectory.reward,
    error=trajectory.error,
    frames=tuple(frames_of(trajectory)),
  )


def asked(trajectory: trajectory_lib.Trajectory) -> str:
  """The first user message's text."""
  for step in trajectory.steps[:1]:
    for message in step.chat_completions:
      if message.get("role") == "user":
        return _text(message.get("content"))
  return ""


def _text(content: object) -> str:
  if isinstance(content, str):
    return content
  parts = content if isinstance(content, list) else []
  return " ".join(
    str(part.get("text", ""))
    for part in parts
    if isinstance(part, dict) and part.get("type") == "text"
  ).strip()


def frames_of(trajectory: trajectory_lib.Trajectory) -> list[Frame]:
  """Its turns, and the last screen with the outcome."""
  frames = []
  for number, step in enumerate(trajectory.steps, 1):
    image, text = None, ""
    for message in step.chat_completions:
      image = _image(message.get("content")) or image
      if message.get("role") != "assistant":
        text = _text(message.get("content")) or text
    info = step.info if isinstance(step.info, dict) else {}
    actions = info.get("gui_actions") or ()
    notes = list(info.get("parse_errors") or ())
    notes += list(info.get("invalid_actions") or ())
    frames.append(
      Frame(
        image=image,
        actions=tuple(a for a in actions if isinstance(a, dict)),
        text=str(step.model_response or ""),
        note="; ".join(dict.fromkeys(map(str, notes))),
        label=f"turn {number}{', a summary' if info.get('summary') else ''}",
        observed="" if image else text,
      )
    )
  if trajectory.steps:
    last = _image(trajectory.steps[-1].observation)
    outcome = f"{trajectory.status.value}, reward {trajectory.reward:g}"
    if last is not None:
      frames.append(Frame(last, (), "", trajectory.error or "", outcome))
  return frames


def _image(value: object) -> trajectory_lib.ImageRef | None:
  """The last screenshot in a message's content or an observation."""
  if isinstance(value, trajectory_lib.ImageRef):
    return value
  if isinstance(value, dict):
    value = list(value.values())
  if isinstance(value, (list, tuple)):
    for inner in reversed(value):
      nested = _image(inner)
      if nested is not None:
        return nested
  return None


def choose_episodes(
  episodes: tuple[ShownEpisode, ...], count: int
) -> list[tuple[ShownEpisode, ...]]:
  """Chooses episodes to draw: of each family an early failure, a late success.

  Args:
    episodes: Episodes in order of time.
    count: at most this many episodes in all.

  Returns:
    One tuple a family, in order of time; families that have both come first,
    then those with more turns.
  """
  families: dict[str, list[ShownEpisode]] = {}
  for episode in episodes:
    if episode.status.is_policy_outcome and episode.frames:
      families.setdefault(episode.family, []).append(episode)
  stories = []
  for members in families.values():
    failed = [e for e in members if not e.success]
    solved = [e for e in members if e.success]
    if failed and solved:
      story: tuple[ShownEpisode, ...] = (failed[0], solved[-1])
      story = story if story[0].time <= story[1].time else story[::-1]
    elif solved:
      story = (solved[-1],)
    else:
      story = (failed[-1],)
    stories.append(story)
  stories.sort(key=lambda s: (-len(s), -max(len(e.frames) for e in s)))
  chosen, remaining = [], count
  for story in stories:
    if len(story) <= remaining:
      chosen.append(story)
      remaining -= len(story)
  return chosen


def smooth(values: list[float], span: int) -> list[float]:
  """Exponential mean with the weight of `span` values, unbiased at the start.

  span <= 1 returns the values.
  """
  if span <= 1:
    return list(values)
  decay = 1 - 2 / (span + 1)
  total = weight = 0.0
  out = []
  for value in values:
    total = decay * total + value
    weight = decay * weight + 1
    out.append(total / weight)
  return out


def describe_action(action: dict[str, Any]) -> str:
  """A GuiAction's JSON in a few words."""
  kind = str(action.get("kind", "?"))
  count = action.get("count", 1)
  if kind == "click" and count in (2, 3):
    kind = {2: "double click", 3: "triple click"}[count]
  if action.get("button", "left") != "left":
    kind = f"{action['button']} {kind}"
  parts = [kind]
  if "x" in action and "y" in action:
    parts.append(f"({action['x']:.0f}, {action['y']:.0f})")
  if "x2" in action and "y2" in action:
    parts.append(f"to ({action['x2']:.0f}, {action['y2']:.0f})")
  if action.get("dx") or action.get("dy"):
    parts.append(f"by ({action.get('dx', 0):.0f}, {action.get('dy', 0):.0f})")
  if action.get("text") is not None:
    parts.append(f"“{action['text']}”")
  if action.get("keys"):
    parts.append("+".join(map(str, action["keys"])))
  if action.get("success") is not None:
    parts.append("success" if action["success"] else "failure")
  return " ".join(parts)
