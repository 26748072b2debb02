"""Draws the package's values in notebooks: episodes, turns, screens, tasks.

IPython asks here when a cell's value is one of `DRAWN`;
`tunix.rl.multi_turn` registers that by the classes' names when it is imported
in a notebook, so the rooms that define them know nothing of HTML.

Promises: a screenshot is found by its content, in any store of this process or
any run that was read here; one that is gone is a remark in its place.

Does not: hold pixels, or draw in a terminal (`repr` is one line).
"""

from __future__ import annotations

import base64
import collections
import html
import io
import math
import pathlib
from typing import Any, Callable, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn.api import html as html_lib
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.reporting import report
from tunix.rl.multi_turn.reporting import run_data

_WIDTH = 480  # Of a screenshot, px, as data.
_COLUMN_PX, _CAPTION_PX, _COLUMNS = 230, 120, 4  # Of a strip, about.
_LINE_PX, _LINE_CHARS = 18, 24  # Of a caption in such a column.
_DIRECTORIES = 64  # Runs whose screenshots are looked for.
_directories: collections.OrderedDict[pathlib.Path, None] = (
  collections.OrderedDict()
)


def remember(directory: pathlib.Path) -> None:
  """Screenshots of this run directory are found from here on."""
  _directories[directory] = None
  _directories.move_to_end(directory)
  while len(_directories) > _DIRECTORIES:
    _directories.popitem(last=False)


class Anywhere:
  """Screenshots of every store in this process and every run read here."""

  def open_image(self, ref: trajectory_lib.ImageRef) -> Any | None:
    """A PIL image; None when it is nowhere."""
    from PIL import Image  # pylint: disable=g-import-not-at-top

    if (pixels := images_lib.find(ref)) is not None:
      return Image.fromarray(np.asarray(pixels))
    for directory in reversed(list(_directories)):
      run = run_data.RunDirectory(directory, {}, (), (), "")
      if (picture := run.open_image(ref)) is not None:
        return picture
    return None


def strip_height(frames: Sequence[run_data.Frame]) -> int:
  """Returns the height, px, of a frame for a strip of screens with captions."""
  height = 50
  for first in range(0, max(1, len(frames)), _COLUMNS):
    row = frames[first : first + _COLUMNS]
    lines = max((sum(map(_lines, (f.note, f.text))) for f in row), default=0)
    height += int(_COLUMN_PX * tallest(row)) + 20 + _LINE_PX * (lines + 1)
  return height


def _lines(text: str | None) -> int:
  return math.ceil(min(len(text or ""), report.TEXT) / _LINE_CHARS)


# --- what a value looks like -------------------------------------------------


def trajectory(value: trajectory_lib.Trajectory) -> str:
  """Its screens in a row, with what was done on each."""
  frames = run_data.frames_of(value)
  task = value.task if isinstance(value.task, dict) else {}
  instruction = str(task.get("instruction") or "") or run_data.asked(value)
  good = value.status is trajectory_lib.TrajectoryStatus.SUCCEEDED
  turns = "1 turn" if value.num_turns == 1 else f"{value.num_turns} turns"
  facts = [f"reward {value.reward:g}", turns]
  if value.versions:
    oldest, newest = value.versions
    span = f"{newest}" if oldest == newest else f"{oldest} to {newest}"
    facts.append(f"weights version {span}")
  if value.num_sampled:
    facts.append(f"{value.num_sampled} sampled tokens")
  head = (
    f"<p><span class={'good' if good else 'bad'}>"
    f"{html.escape(value.status.value)}</span>"
    f" “{html.escape(instruction)}” <small>{', '.join(facts)}</small></p>"
  )
  error = f"<p class=bad>{html.escape(value.error)}</p>" if value.error else ""
  figures = [report.figure(Anywhere(), frame, _WIDTH) for frame in frames]
  body = f"{head}{error}<div class=strip>{''.join(figures)}</div>"
  return html_lib.framed(repr(value), [body], strip_height(frames))


def step(value: trajectory_lib.Step) -> str:
  """Its screen with what was done, and its figures."""
  frame = run_data.frames_of(trajectory_lib.Trajectory(steps=[value]))[0]
  ending = ", the last turn" if value.done else ""
  rows = [f"<p><small>reward {value.reward:g}{ending}</small></p>"]
  if value.thought and value.thought not in (frame.text or ""):
    rows.append(f"<p>{html.escape(value.thought)}</p>")
  rows.append(
    "<div style='max-width:320px'>"
    f"{report.figure(Anywhere(), frame, _WIDTH)}</div>"
  )
  height = int(320 * tallest([frame])) + _CAPTION_PX + 70
  return html_lib.framed(repr(value), ["".join(rows)], height)


def observation(value: Any) -> str:
  """Its screenshot, and the texts beside it."""
  texts = [t for t in (value.instruction, value.text) if t]
  if value.done:
    texts.append("The gym has ended the episode.")
  paragraphs = "".join(f"<p>{html.escape(text)}</p>" for text in texts)
  if value.axtree:
    paragraphs += f"<pre>{html.escape(value.axtree)}</pre>"
  if value.screenshot is None:
    return paragraphs
  height, width = value.screenshot.shape[:2]
  png = observation_png(value) or b""
  return (
    f'<img src="{_uri(png)}" alt="{width}x{height}"'
    f' style="max-width:100%;min-width:{min(320, 2 * width)}px">{paragraphs}'
  )


def task(value: Any) -> str:
  return _table(
    {
      "task": value.task_id,
      "family": value.family,
      "instruction": value.instruction or "(the gym has it)",
      "seed": value.seed,
      "turns at most": value.max_turns or "as the run sets",
      **{str(k): v for k, v in value.params.items()},
    }
  )


def evaluation(value: Any) -> str:
  """A gym's verdict."""
  return _table(
    {
      "solved": "yes" if value.success else "no",
      "score": f"{value.score:g}",
      **{str(k): v for k, v in value.details.items()},
    }
  )


def image(value: trajectory_lib.ImageRef) -> str | None:
  """A remark where the screenshot is gone; else its picture is shown alone."""
  if Anywhere().open_image(value) is not None:
    return None
  return (
    f"<p><code>{html.escape(repr(value))}</code>: no store of this process"
    " and no run that was read has this screenshot</p>"
  )


def image_png(value: trajectory_lib.ImageRef) -> bytes | None:
  picture = Anywhere().open_image(value)
  return None if picture is None else _png(picture)


def observation_png(value: Any) -> bytes | None:
  from PIL import Image  # pylint: disable=g-import-not-at-top

  if value.screenshot is None:
    return None
  return _png(Image.fromarray(np.asarray(value.screenshot)))


def _table(rows: Mapping[str, Any]) -> str:
  def cell(value: object) -> str:
    text = str(value)
    return html.escape(text if len(text) <= 400 else text[:399] + "…")

  lines = "".join(
    f"<tr><th style='text-align:left'>{cell(name)}</th>"
    f"<td style='text-align:left'>{cell(value)}</td></tr>"
    for name, value in rows.items()
  )
  return f"<table>{lines}</table>"


def tallest(frames: Any) -> float:
  """Heights a width of the tallest screen."""
  return max(
    (f.image.height / f.image.width for f in frames if f.image), default=0.5
  )


def _png(picture: Any) -> bytes:
  buffer = io.BytesIO()
  picture.save(buffer, format="PNG")
  return buffer.getvalue()


def _uri(png: bytes) -> str:
  return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


DRAWN: Mapping[tuple[str, str], Callable[[Any], Any]] = {
  ("Trajectory", "text/html"): trajectory,
  ("Step", "text/html"): step,
  ("ImageRef", "text/html"): image,
  ("ImageRef", "image/png"): image_png,
  ("Observation", "text/html"): observation,
  ("Observation", "image/png"): observation_png,
  ("Task", "text/html"): task,
  ("Evaluation", "text/html"): evaluation,
}
"""(class, MIME type) -> what draws it; `tunix.rl.multi_turn` has the names."""
