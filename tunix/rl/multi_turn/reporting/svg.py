"""Draws charts and marked screenshots as inline SVG.

Colours are CSS variables (`--ink`, `--faint`, `--grid`, `--c0` …), so that a
page decides on dark and light. All text is escaped.
"""

from __future__ import annotations

import dataclasses
import html
import math
from typing import Any, Sequence

from tunix.rl.multi_turn.core import click_overlay


@dataclasses.dataclass(frozen=True)
class Line:
  """A curve: `strong` is drawn over the faint `raw` one of the same x."""

  label: str
  x: Sequence[float]
  raw: Sequence[float]
  strong: Sequence[float]
  colour: int = 0


@dataclasses.dataclass(frozen=True)
class Interval:
  """A point with an interval, e.g. an evaluation at a step."""

  x: float
  y: float
  low: float
  high: float
  label: str


def number(value: float) -> str:
  """A tick or reading, short."""
  if value == 0:
    return "0"
  size = abs(value)
  if size >= 10000 or size < 0.001:
    return f"{value:.1e}".replace("e+0", "e").replace("e-0", "e-")
  digits = max(0, 2 - int(math.floor(math.log10(size))))
  text = f"{value:.{digits}f}"
  return text.rstrip("0").rstrip(".") if "." in text else text


def ticks(
  low: float, high: float, count: int = 5, *, integers: bool = False
) -> list[float]:
  """Round numbers in [low, high]: `count` at most, and two at least.

  Args:
    low: Least value of the axis.
    high: Largest value of the axis; [low] if it is not above `low`.
    count: Most ticks of an uncrowded scale; exceeded if fewer than two fit.
    integers: Integers only, one if no more fit.
  """
  span = high - low
  if not span > 0:
    return [low]
  values: list[float] = []
  size = 10 ** math.floor(math.log10(span / count))
  steps = [size * factor for factor in (10, 5, 2, 1, 0.5, 0.2, 0.1)]
  for step in steps:
    if integers and step < 1:
      break
    if len(values) > 1 and span / step > count:
      break
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    values = [i * step for i in range(first, last + 1)]
  return values


def line_chart(
  lines: Sequence[Line],
  *,
  width: int = 720,
  height: int = 260,
  y_range: tuple[float, float] | None = None,
  x_label: str = "step",
  marks: Sequence[Interval] = (),
) -> str:
  """Curves over a common x axis; "" when there is nothing to draw."""
  lines = [line for line in lines if line.x]
  if not lines and not marks:
    return ""
  xs = [x for line in lines for x in line.x] + [m.x for m in marks]
  ys = [y for line in lines for y in (*line.raw, *line.strong)]
  ys += [v for m in marks for v in (m.low, m.high)]
  x0, x1 = min(xs), max(xs)
  if x0 == x1:
    x0, x1 = x0 - 0.5, x1 + 0.5
  if y_range is None:
    y0, y1 = min(ys), max(ys)
    pad = (y1 - y0) * 0.06 or abs(y1) * 0.1 or 1.0
    # A reading of zeros, as a share or a count, is never below.
    y0, y1 = (y0 - pad, y1 + pad) if y0 or y1 else (0.0, 1.0)
  else:
    y0, y1 = y_range
  left, right, top, bottom = 46, 12, 12, 30

  def px(x: float) -> float:
    return left + (x - x0) / (x1 - x0) * (width - left - right)

  def py(y: float) -> float:
    y = min(max(y, y0), y1)
    return height - bottom - (y - y0) / (y1 - y0) * (height - top - bottom)

  out = [_open(width, height)]
  for y in ticks(y0, y1, max(2, height // 50)):
    out.append(
      f'<line class="grid" x1="{left}" x2="{width - right}"'
      f' y1="{py(y):.1f}" y2="{py(y):.1f}"/><text class="tick"'
      f' text-anchor="end" x="{left - 6}" y="{py(y) + 4:.1f}">'
      f"{number(y)}</text>"
    )
  integers = all(float(x).is_integer() for x in xs)
  for x in ticks(x0, x1, max(2, width // 90), integers=integers):
    out.append(
      f'<text class="tick" text-anchor="middle" x="{px(x):.1f}"'
      f' y="{height - bottom + 16}">{number(x)}</text>'
    )
  out.append(
    f'<text class="tick" text-anchor="end" x="{width - right}"'
    f' y="{height - 2}">{html.escape(x_label)}</text>'
  )
  for line in lines:
    for values, kind in ((line.raw, "raw"), (line.strong, "strong")):
      if not values or (kind == "raw" and values == line.strong):
        continue
      points = " ".join(
        f"{px(x):.1f},{py(y):.1f}" for x, y in zip(line.x, values)
      )
      shape = (
        f'<polyline points="{points}"/>'
        if len(line.x) > 1
        else f'<circle cx="{px(line.x[0]):.1f}"'
        f' cy="{py(values[0]):.1f}" r="2.5"/>'
      )
      out.append(f'<g class="{kind} c{line.colour}">{shape}</g>')
  for mark in marks:
    x = px(mark.x)
    out.append(
      f'<g class="mark"><title>{html.escape(mark.label)}</title>'
      f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{py(mark.low):.1f}"'
      f' y2="{py(mark.high):.1f}"/><circle cx="{x:.1f}"'
      f' cy="{py(mark.y):.1f}" r="4"/></g>'
    )
  return "".join(out) + "</svg>"


def interval_bars(
  groups: Sequence[str],
  series: Sequence[tuple[str, Sequence[tuple[float, float, float] | None]]],
  *,
  width: int = 720,
  height: int = 260,
) -> str:
  """Bars of rates in [0, 1] with whiskers, one cluster a group.

  Args:
    groups: names below the clusters.
    series: (label, one (rate, low, high) or None a group).
    width: Width of the picture, px.
    height: Height of the picture, px.
  """
  if not groups or not series:
    return ""
  left, right, top, bottom = 46, 12, 18, 44
  slot = (width - left - right) / len(groups)
  bar = min(34.0, slot * 0.78 / len(series))

  def py(y: float) -> float:
    return height - bottom - y * (height - top - bottom)

  out = [_open(width, height)]
  for y in (0, 0.25, 0.5, 0.75, 1):
    out.append(
      f'<line class="grid" x1="{left}" x2="{width - right}"'
      f' y1="{py(y):.1f}" y2="{py(y):.1f}"/><text class="tick"'
      f' text-anchor="end" x="{left - 6}" y="{py(y) + 4:.1f}">{y:g}</text>'
    )
  for g, name in enumerate(groups):
    centre = left + slot * (g + 0.5)
    start = centre - bar * len(series) / 2
    for s, (label, values) in enumerate(series):
      value = values[g]
      if value is None:
        continue
      rate, low, high = value
      x = start + s * bar
      middle = x + bar * 0.45
      tip = f"{label}, {name}: {rate:.3f} [{low:.3f}, {high:.3f}]"
      out.append(
        f'<g class="bar c{s}"><title>{html.escape(tip)}</title>'
        f'<rect x="{x:.1f}" width="{bar * 0.9:.1f}" y="{py(rate):.1f}"'
        f' height="{max(py(0) - py(rate), 1):.1f}"/><line'
        f' x1="{middle:.1f}" x2="{middle:.1f}" y1="{py(low):.1f}"'
        f' y2="{py(high):.1f}"/></g><text class="value"'
        f' text-anchor="middle" x="{middle:.1f}"'
        f' y="{py(high) - 4:.1f}">{rate:.2f}</text>'
      )
    shown = name if len(name) * 7 < slot else name[: int(slot / 7) - 1] + "…"
    out.append(
      f'<text class="tick" text-anchor="middle" x="{centre:.1f}"'
      f' y="{height - bottom + 16}">{html.escape(shown)}</text>'
    )
  return "".join(out) + "</svg>"


def legend(labels: Sequence[str]) -> str:
  items = "".join(
    f'<span class="key c{i}"><i></i>{html.escape(label)}</span>'
    for i, label in enumerate(labels)
  )
  return f'<div class="legend">{items}</div>'


def marked_screenshot(
  data_uri: str, width: int, height: int, actions: Sequence[dict[str, Any]]
) -> str:
  """A screenshot with the actions drawn over it.

  Args:
    data_uri: the picture.
    width: Width of the screenshot, px; the actions' coordinates.
    height: Height of the screenshot, px.
    actions: GuiActions as JSON.
  """
  gestures = [
    click_overlay.gesture(str(action.get("kind", "?")), action)
    for action in actions
  ]
  # Larger marks: a film strip shows the screenshot small.
  marks = click_overlay.marks(gestures, width, height, scale=1.8)
  return (
    f'<svg class="screen" viewBox="0 0 {width} {height}" role="img">'
    f'<image href="{data_uri}" width="{width}" height="{height}"/>'
    f"{click_overlay.svg(marks, width, height)}</svg>"
  )


def _open(width: int, height: int) -> str:
  return f'<svg class="chart" viewBox="0 0 {width} {height}" role="img">'
