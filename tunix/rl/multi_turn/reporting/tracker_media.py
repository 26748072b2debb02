"""Film strips and a table of an evaluation's episodes, for trackers.

Promises: of each evaluation at most `most` episodes are held for strips, half
of them failures where there are as many, and at most `ROWS` rows; counts of all
others stay in the figures. `EvalMedia.add` reads no pixels: strips are drawn
where `strip` is called.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping, Sequence

import numpy as np
from PIL import Image
from PIL import ImageDraw
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory as trajectory_lib

ROWS = 200
COLUMNS = ("task", "family", "status", "reward", "turns", "last response")
_FRAMES = 8
_HEIGHT_PX = 240
_GAP_PX = 4
_RESPONSE = 500  # Characters.
_MARK = (230, 30, 60)


@dataclasses.dataclass(frozen=True)
class Frame:
  """A screen of a strip, and the pixel that was acted on."""

  image: trajectory_lib.ImageRef
  at: tuple[float, float] | None


@dataclasses.dataclass(frozen=True)
class Strip:
  """Frames of an episode.

  Attributes:
    caption: task, status and reward.
    success: whether the episode was solved.
    frames: at most 8, the first and the last among them.
  """

  caption: str
  success: bool
  frames: tuple[Frame, ...]


class EvalMedia:
  """Collects an evaluation's episodes.

  Attributes:
    rows: `COLUMNS` of each.
  """

  def __init__(self, most: int):
    """Args:

    most: strips that are kept.
    """
    self._most = most
    self._strips: dict[bool, list[Strip]] = {True: [], False: []}
    self.rows: list[tuple[Any, ...]] = []

  def add(self, event: events.EpisodeFinished) -> None:
    one = event.trajectory
    steps = one.steps
    family = str((one.task or {}).get("family", ""))
    if len(self.rows) < ROWS:
      response = steps[-1].model_response if steps else ""
      self.rows.append((
          event.task_id, family, one.status.value, float(one.reward),
          len(steps), (response or "")[:_RESPONSE],
      ))  # fmt: skip
    success = one.status is trajectory_lib.TrajectoryStatus.SUCCEEDED
    strips = self._strips[success]
    if len(strips) >= self._most:
      return
    if frames := _frames(steps):
      caption = f"{event.task_id}: {one.status.value}, reward {one.reward:g}"
      strips.append(Strip(caption, success, frames))

  @property
  def strips(self) -> tuple[Strip, ...]:
    good, bad = self._strips[True], self._strips[False]
    failures = bad[: max(self._most // 2, self._most - len(good))]
    return (*good[: self._most - len(failures)], *failures)


def _frames(steps: Sequence[trajectory_lib.Step]) -> tuple[Frame, ...]:
  """Returns the screens that the policy saw, and the one that it left."""
  frames = []
  for step in steps:
    image = _last_image(step.chat_completions)
    if image is None:
      continue
    actions = step.info.get("gui_actions") or [{}]
    place = actions[-1] if isinstance(actions[-1], Mapping) else {}
    x, y = place.get("x"), place.get("y")
    frames.append(Frame(image, None if x is None or y is None else (x, y)))
  final = steps[-1].observation if steps else None
  if isinstance(final, Mapping):
    image = _image(final.get("screenshot", final.get("image")))
    if image is not None and (not frames or frames[-1].image != image):
      frames.append(Frame(image, None))
  if len(frames) > _FRAMES:
    chosen = np.linspace(0, len(frames) - 1, _FRAMES).round().astype(int)
    frames = [frames[i] for i in chosen]
  return tuple(frames)


def _last_image(
  messages: Sequence[Mapping[str, Any]],
) -> trajectory_lib.ImageRef | None:
  for message in reversed(messages or ()):
    content = message.get("content")
    parts: list[Any] = content if isinstance(content, list) else []
    for part in reversed(parts):
      if not isinstance(part, Mapping) or part.get("type") != "image":
        continue
      if image := _image(part.get("image")):
        return image
  return None


def _image(value: object) -> trajectory_lib.ImageRef | None:
  if isinstance(value, trajectory_lib.ImageRef):
    return value
  if isinstance(value, Mapping) and "sha256" in value:
    return trajectory_lib.ImageRef.from_json(dict(value))
  return None


def strip(one: Strip, store: images_lib.ImageStore) -> np.ndarray | None:
  """Draws frames side by side in uint8[H, W, 3], a ring where it acted.

  None when the store has none of the screens any more.
  """
  drawn = []
  for frame in one.frames:
    try:
      pixels = store.get(frame.image)
    except KeyError:
      continue
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    scale = _HEIGHT_PX / picture.height
    picture = picture.resize(
      (max(1, round(picture.width * scale)), _HEIGHT_PX),
      Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST,
    )
    if frame.at is not None:
      x, y = (value * scale for value in frame.at)
      ImageDraw.Draw(picture).ellipse(
        (x - 9, y - 9, x + 9, y + 9), outline=_MARK, width=3
      )
    drawn.append(np.asarray(picture.convert("RGB")))
    drawn.append(np.full((_HEIGHT_PX, _GAP_PX, 3), 255, np.uint8))
  return np.concatenate(drawn[:-1], axis=1) if drawn else None


def markdown(rows: list[tuple[Any, ...]]) -> str:
  """Returns the table in Markdown."""
  lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
  cell = lambda v: " ".join(str(v).split()).replace("|", "\\|")
  return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)
