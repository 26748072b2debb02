"""Draws actions over a screenshot: clicks, drags, scrolls; names every action.

    gestures = [click_overlay.gesture("click", {"x": 40, "y": 60})]
    marks = click_overlay.marks(gestures, 800, 600)
    svg = click_overlay.svg(marks, 800, 600)

The report, the dashboard and its exports all draw through this module. Sizes
and colours are attributes and classes, never styles: the dashboard's policy
allows none inside a page. A page styles the classes `overlay`, `rim` (a light
edge, visible on any background), `act`, `ring` and `dot`.

A click has as many rings as it has clicks; a square stands for a ring where
the button is not the left one, and a filled circle is held down. A caption
names an action as it was: "double click", "scroll down 40", "type “farm”".

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
})  # fmt: skip
_NAMES = {
  "left_click": ("click", "left", 1),
  "right_click": ("click", "right", 1),
  "middle_click": ("click", "middle", 1),
  "tap": ("tap", "left", 1),
  "double_click": ("click", "left", 2),
  "double_tap": ("tap", "left", 2),
  "triple_click": ("click", "left", 3),
  "left_click_drag": ("drag", "left", 1),
}
"""Kinds that name a button or a count: (kind, button, count)."""
_COUNTS = {2: "double", 3: "triple"}
_MOST_RINGS = 3
_LONGEST = 60
_RING, _DOT, _HEAD = 2.2, 0.5, 2.0
"""Radii and the arrow head's length, in hundredths of the longer side."""


@dataclasses.dataclass(frozen=True)
class Gesture:
  """A drawn action.

  Attributes:
    label: its kind, with button, count and direction, e.g. "double click",
      "right click", "scroll down 40".
    at: Point where it acts or begins, px; None without one.
    to: End of a drag, px.
    scroll: (dx, dy) of a scroll, px; positive shows more below and right.
    text: text or keys that it types.
    clicks: how often the button is pressed; 0 for an action without a press.
    button: Button of the mouse.
    held: whether it is held down in its place.
  """

  label: str
  at: Point | None = None
  to: Point | None = None
  scroll: tuple[float, float] | None = None
  text: str = ""
  clicks: int = 0
  button: str = "left"
  held: bool = False

  @property
  def caption(self) -> str:
    """The label, with what it types, in a line."""
    if not self.text:
      return self.label
    text = self.text if len(self.text) <= _LONGEST else self.text[:59] + "…"
    return f"{self.label} “{text}”"


@dataclasses.dataclass(frozen=True)
class Mark:
  """The geometry of one gesture, px.

  Attributes:
    ring: centre of a circle with a dot.
    line: a shaft from the ring; None without a ring.
    head: three corners of an arrow head.
    number: place among several gestures, from 1; 0 if there is only one.
    unit: a hundredth of the longer side times the scale; sizes are multiples.
    rings: circles around the dot, one a click; 0 only marks the place.
    square: whether they are squares, of a button that is not the left one.
    held: whether the innermost is filled.
  """

  ring: Point | None
  line: tuple[Point, Point] | None
  head: tuple[Point, Point, Point] | None
  number: int
  unit: float
  rings: int = 1
  square: bool = False
  held: bool = False

  @property
  def radius(self) -> float:
    """Of the innermost ring, px."""
    return _RING * self.unit

  @property
  def radii(self) -> tuple[float, ...]:
    """Of every ring, from the inside."""
    return tuple(self.radius * (1 + 0.7 * n) for n in range(self.rings))


def gesture(kind: str, arguments: Mapping[str, Any]) -> Gesture:
  """Reads an action of any grammar.

  Args:
    kind: Kind of the action, e.g. "click".
    arguments: Values in pixels, named as in `GuiAction` (x, y, x2, y2, dx, dy)
      or of a tool's own grammar (point, coordinate, start, end, …).
  """
  at = _pair(arguments, "x", "y") or _point(
    arguments, "point", "coordinate", "start", "start_coordinate", "start_point"
  )
  to = _pair(arguments, "x2", "y2") or _point(
    arguments, "end", "coordinate2", "end_coordinate", "end_point"
  )
  name, button, count = _NAMES.get(kind, (kind, "left", 1))
  value = arguments.get("button")
  if isinstance(value, str) and value and kind != "system_button":
    button = value
  value = arguments.get("count")
  if isinstance(value, int) and value > 1:
    count = value
  label, scroll = name.replace("_", " "), None
  if kind == "scroll" and to is None:
    dx, dy = arguments.get("dx") or 0, arguments.get("dy") or 0
    if all(isinstance(v, (int, float)) for v in (dx, dy)):
      scroll = float(dx), float(dy)
      label = " ".join(filter(None, (label, *_directions(*scroll))))
  if button != "left":
    label = f"{button} {label}"
  if count > 1 and kind in _POINTED | _NAMES.keys():
    label = f"{_COUNTS.get(count, f'{count} ×')} {label}"
  pressed = kind in (_POINTED | _NAMES.keys()) - {"move", "left_click_drag"}
  return Gesture(
      label, at, to, scroll, _typed(arguments), count if pressed else 0,
      button, kind == "long_press",
  )  # fmt: skip


def _directions(dx: float, dy: float) -> list[str]:
  """Directions of a scroll with their pixels."""
  return [
    f"{positive if size > 0 else negative} {abs(size):g}"
    for size, positive, negative in ((dy, "down", "up"), (dx, "right", "left"))
    if size
  ]


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
    gestures: Gestures in order.
    width: Width of the screenshot, px.
    height: Height of the screenshot, px.
    scale: larger marks for smaller pictures.
  """
  unit = max(width, height) / 100 * scale
  result = []
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
    result.append(
      Mark(
        ring=at,
        line=None if at is None or to is None else (at, to),
        head=None
        if to is None
        else arrow_head(at or (to[0] - 1, to[1]), to, _HEAD * unit),
        number=number if len(gestures) > 1 else 0,
        unit=unit,
        rings=min(max(1, one.clicks), _MOST_RINGS),
        square=one.button != "left",
        held=one.held,
      )
    )
  return result


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
  return (
    f'<svg class="overlay" viewBox="0 0 {width} {height}"'
    f' aria-hidden="true">{shapes(drawn)}</svg>'
  )


def shapes(drawn: Sequence[Mark]) -> str:
  """The elements of marks, for an `svg` whose units are the screen's pixels."""
  parts = []
  for mark in drawn:
    lines = _shapes(mark)
    parts += [f'<g class="rim">{lines}</g>', f'<g class="act">{lines}</g>']
    if mark.number:
      assert mark.ring or mark.head, "a numbered mark has a ring or a head"
      x, y = mark.ring or mark.head[1]  # type: ignore[index]
      parts.append(
        f'<text x="{x + 3 * mark.unit:.1f}" y="{y - 2 * mark.unit:.1f}"'
        f' font-size="{3 * mark.unit:.1f}">{mark.number}</text>'
      )
  return "".join(parts)


def svg_of_attempts(
  attempts: Sequence[tuple[str, Sequence[Mark]]], width: int, height: int
) -> str:
  """Marks of several attempts on one screenshot, each of a class of its own.

  Args:
    attempts: (class, marks) of each; later ones lie on top.
    width: Width of the screenshot, px.
    height: Height of the screenshot, px.
  """
  parts = []
  for name, drawn in attempts:
    for mark in drawn:
      shapes = _shapes(mark)
      parts.append(f'<g class="rim">{shapes}</g>')
      parts.append(f'<g class="act {name}">{shapes}</g>')
  return (
    f'<svg class="overlay" viewBox="0 0 {width} {height}"'
    f' aria-hidden="true">{"".join(parts)}</svg>'
  )


def _shapes(mark: Mark) -> str:
  shapes = []
  if mark.ring is not None:
    x, y = mark.ring
    for place, r in enumerate(mark.radii):
      css_class = " held" if mark.held and not place else ""
      shapes.append(
        f'<rect class="ring{css_class}" x="{x - r:.1f}" y="{y - r:.1f}"'
        f' width="{2 * r:.1f}" height="{2 * r:.1f}"/>'
        if mark.square
        else f'<circle class="ring{css_class}" cx="{x:.1f}" cy="{y:.1f}"'
        f' r="{r:.1f}"/>'
      )
    shapes.append(
      f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}"'
      f' r="{_DOT * mark.unit:.1f}"/>'
    )
  for line in (mark.line, mark.head):
    if line is not None:
      path = "L".join(f"{x:.1f} {y:.1f}" for x, y in line)
      shapes.append(f'<path d="M{path}"/>')
  return "".join(shapes)
