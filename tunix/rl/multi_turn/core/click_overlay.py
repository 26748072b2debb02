"""Draws actions over a screenshot: clicks, drags, scrolls.

    gestures = [click_overlay.gesture("click", {"x": 40, "y": 60})]
    marks = click_overlay.marks(gestures, 800, 600)
    svg = click_overlay.svg(marks, 800, 600)

The report, the dashboard and its exports all draw through this module. Sizes
and colours are attributes and classes, never styles: the dashboard's policy
allows none inside a page. A page styles the classes `overlay`, `rim` (a light
edge, visible on any background), `act`, `ring` and `dot`.

Does not: draw text that an action typed; `Gesture.text` has it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Mapping, Sequence

Point = tuple[float, float]
_POINTED = frozenset({
    "click", "tap", "double_click", "long_press", "move", "left_click",
    "right_click", "double_tap",
})  # pyformat: disable
_DRAGGED = frozenset({"drag", "swipe", "left_click_drag"})
_RING, _DOT, _HEAD = 2.2, 0.5, 2.0
"""Radii and the arrow head's length, in hundredths of the longer side."""


@dataclasses.dataclass(frozen=True)
class Gesture:
  """An action as it is shown.

  Attributes:
    label: its kind, with button and count, e.g. "right click ×2".
    at: where it acts or begins, px; None without a place.
    to: where a drag ends, px.
    scroll: (dx, dy) of a scroll, px; positive shows more below and right.
    text: text or keys that it types.
  """

  label: str
  at: Point | None = None
  to: Point | None = None
  scroll: tuple[float, float] | None = None
  text: str = ""


@dataclasses.dataclass(frozen=True)
class Mark:
  """The geometry of one gesture, px.

  Attributes:
    ring: centre of a circle with a dot.
    line: a shaft from the ring; None without a ring.
    head: three corners of an arrow head.
    number: place among several gestures, from 1; 0 if there is only one.
    unit: a hundredth of the longer side times the scale; sizes are multiples.
  """

  ring: Point | None
  line: tuple[Point, Point] | None
  head: tuple[Point, Point, Point] | None
  number: int
  unit: float

  @property
  def radius(self) -> float:
    return _RING * self.unit


def gesture(kind: str, arguments: Mapping[str, Any]) -> Gesture:
  """Reads an action of any grammar.

  Args:
    kind: of the action, e.g. "click".
    arguments: in pixels, with the names of `GuiAction` (x, y, x2, y2, dx, dy)
      or of a tool's own grammar (point, coordinate, start, end, …).
  """
  at = _pair(arguments, "x", "y") or _point(
      arguments, "point", "coordinate", "start", "start_coordinate",
      "start_point",
  )  # pyformat: disable
  to = _pair(arguments, "x2", "y2") or _point(
      arguments, "end", "coordinate2", "end_coordinate", "end_point"
  )
  label, scroll = kind, None
  if kind == "scroll" and to is None:
    dx, dy = arguments.get("dx") or 0, arguments.get("dy") or 0
    if all(isinstance(v, (int, float)) for v in (dx, dy)):
      scroll = float(dx), float(dy)
      label = f"scroll {dx:g}, {dy:g}"
  count, button = arguments.get("count"), arguments.get("button")
  if kind in _POINTED and isinstance(count, int) and count > 1:
    label = f"{kind} ×{count}"
  if isinstance(button, str) and button != "left" and kind != "system_button":
    label = f"{button} {label}"
  return Gesture(label, at, to, scroll, _typed(arguments))


def _typed(arguments: Mapping[str, Any]) -> str:
  for name in ("text", "keys", "key", "content", "answer"):
    value = arguments.get(name)
    if value not in (None, "", []):
      if isinstance(value, (list, tuple)):
        value = "+".join(map(str, value))
      return str(value)
  return ""


def _point(arguments: Mapping[str, Any], *names: str) -> Point | None:
  for name in names:
    value = arguments.get(name)
    if isinstance(value, (list, tuple)) and len(value) >= 2:
      if len(value) == 4:  # A box: its middle.
        value = (value[0] + value[2]) / 2, (value[1] + value[3]) / 2
      if all(isinstance(v, (int, float)) for v in value[:2]):
        return float(value[0]), float(value[1])
  return None


def _pair(arguments: Mapping[str, Any], x: str, y: str) -> Point | None:
  a, b = arguments.get(x), arguments.get(y)
  if isinstance(a, (int, float)) and isinstance(b, (int, float)):
    return float(a), float(b)
  return None


def marks(
    gestures: Sequence[Gesture], width: int, height: int, scale: float = 1.0
) -> list[Mark]:
  """The geometry of gestures on a screenshot; those without a place have none.

  Args:
    gestures: in order.
    width: of the screenshot, px.
    height: of the screenshot, px.
    scale: larger marks for smaller pictures.
  """
  unit = max(width, height) / 100 * scale
  found = []
  for number, one in enumerate(gestures, 1):
    at, to = one.at, one.to
    if one.scroll is not None:
      at = at or (width / 2, height / 2)
      length = math.hypot(*one.scroll)
      if length:
        reach = min(length, min(width, height) / 3) / length
        # Towards the content that comes into view.
        to = at[0] + one.scroll[0] * reach, at[1] + one.scroll[1] * reach
    if at is None and to is None:
      continue
    found.append(
        Mark(
            ring=at,
            line=None if at is None or to is None else (at, to),
            head=None if to is None else arrow_head(
                at or (to[0] - 1, to[1]), to, _HEAD * unit
            ),
            number=number if len(gestures) > 1 else 0,
            unit=unit,
        )
    )
  return found


def arrow_head(
    start: Point, end: Point, size: float
) -> tuple[Point, Point, Point]:
  """The three corners of an arrow's head at `end`."""
  angle = math.atan2(end[1] - start[1], end[0] - start[0])
  left, right = (
      (
          end[0] - size * math.cos(angle + turn),
          end[1] - size * math.sin(angle + turn),
      )
      for turn in (0.45, -0.45)
  )
  return left, end, right


def svg(drawn: Sequence[Mark], width: int, height: int) -> str:
  """Marks as an `svg` element that lies over the screenshot."""
  parts = []
  for mark in drawn:
    shapes = _shapes(mark)
    parts += [f'<g class="rim">{shapes}</g>', f'<g class="act">{shapes}</g>']
    if mark.number:
      assert mark.ring or mark.head, "a numbered mark has a ring or a head"
      x, y = mark.ring or mark.head[1]  # type: ignore[index]
      parts.append(
          f'<text x="{x + 3 * mark.unit:.1f}" y="{y - 2 * mark.unit:.1f}"'
          f' font-size="{3 * mark.unit:.1f}">{mark.number}</text>'
      )
  return (
      f'<svg class="overlay" viewBox="0 0 {width} {height}"'
      f' aria-hidden="true">{"".join(parts)}</svg>'
  )


def _shapes(mark: Mark) -> str:
  shapes = []
  if mark.ring is not None:
    x, y = mark.ring
    shapes.append(
        f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}"'
        f' r="{mark.radius:.1f}"/><circle class="dot" cx="{x:.1f}"'
        f' cy="{y:.1f}" r="{_DOT * mark.unit:.1f}"/>'
    )
  for line in (mark.line, mark.head):
    if line is not None:
      path = "L".join(f"{x:.1f} {y:.1f}" for x, y in line)
      shapes.append(f'<path d="M{path}"/>')
  return "".join(shapes)
