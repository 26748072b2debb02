"""Draws the misses of an evaluation of `grounding` on their screenshots.

A tile for each of the shown misses: the screenshot, the target's box in green,
the click in red, a line between the two; below it the target's words.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from PIL import Image
from PIL import ImageDraw

from cua_gyms.grounding import targets

_COLUMNS, _MOST = 4, 24
_WIDTH, _HEIGHT, _TEXT = 320, 240, 18
_PAPER, _INK = (250, 250, 250), (40, 40, 48)
_BOX, _CLICK = (0, 170, 70), (230, 20, 20)


def draw_misses(misses: Sequence[Mapping[str, Any]]) -> Image.Image:
  """A sheet of at most 24 misses, evenly spaced among all.

  Args:
    misses: Details of `GroundingGym.evaluate`, with points.

  Raises:
    OSError: An image of the benchmark is missing.
  """
  step = max(1.0, len(misses) / _MOST)
  shown = [misses[int(i * step)] for i in range(min(_MOST, len(misses)))]
  rows = -(-len(shown) // _COLUMNS)
  columns = min(_COLUMNS, len(shown))
  sheet = Image.new("RGB", (columns * _WIDTH, rows * (_HEIGHT + _TEXT)), _PAPER)
  for place, miss in enumerate(shown):
    row, column = divmod(place, _COLUMNS)
    _draw(sheet, miss, column * _WIDTH, row * (_HEIGHT + _TEXT))
  return sheet


def _draw(sheet: Image.Image, miss: Mapping[str, Any], x: int, y: int) -> None:
  width, height = miss["screen"]
  scale = min((_WIDTH - 8) / width, (_HEIGHT - 8) / height)
  size = max(1, round(width * scale)), max(1, round(height * scale))
  screen = Image.fromarray(_pixels(miss))
  x, y = x + 4, y + 4
  sheet.paste(screen.resize(size, Image.Resampling.BOX), (x, y))
  pen = ImageDraw.Draw(sheet)

  def at(px: float, py: float) -> tuple[float, float]:
    # A click outside the screen is drawn on its edge.
    return (
      x + min(max(px, 0), width) * scale,
      y + min(max(py, 0), height) * scale,
    )

  x1, y1, x2, y2 = miss["box"]
  pen.rectangle([at(x1, y1), at(x2, y2)], outline=_BOX, width=2)
  u, v = at(*miss["point"])
  pen.line([(u, v), at((x1 + x2) / 2, (y1 + y2) / 2)], fill=_CLICK)
  pen.ellipse([u - 3, v - 3, u + 3, v + 3], fill=_CLICK)
  pen.text((x, y + _HEIGHT - 6), str(miss["words"])[:48], fill=_INK)


def _pixels(miss: Mapping[str, Any]) -> Any:
  source = miss["source"]
  if isinstance(source, str):
    return targets.read_image(source)
  return targets.drawn(*(*miss["screen"], miss["kind"], source)).screenshot
