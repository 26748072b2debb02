"""Draws small pictures as SVG: sparklines, bars, histograms, actions.

Sizes and colours are attributes and classes, never styles: the pages' policy
allows none inside.
"""

from __future__ import annotations

import math
from typing import Any, Mapping, Sequence

import markupsafe

from training_monitor.core import click_overlay

_Markup = markupsafe.Markup
_CROP = (420, 260)
_CROP_MARKS = 0.5


def sparkline(
  values: Sequence[float | None],
  width: int = 120,
  height: int = 24,
  share: bool = False,
) -> _Markup:
  """Returns a line without axes, of a `share` from 0 to 1."""
  readings = [v for v in values if v is not None and math.isfinite(v)]
  if len(readings) < 2:
    return _Markup('<span class="faint">–</span>')
  low, high = (0.0, 1.0) if share else (min(readings), max(readings))
  span = (high - low) or 1.0
  right = max(1, len(values) - 1)
  path, pen = [], "M"
  for index, value in enumerate(values):
    if value is None or not math.isfinite(value):
      continue  # The line continues: runs may lack single readings.
    x = 2 + (width - 4) * index / right
    y = height - 3 - (height - 6) * (value - low) / span
    path.append(f"{pen}{x:.1f} {y:.1f}")
    pen = "L"
  return _Markup(
    '<svg class="spark" width="{w}" height="{h}" viewBox="0 0 {w} {h}"'
    ' role="img" aria-label="from {a:.3g} to {b:.3g}"><path d="{p}"/></svg>'
  ).format(w=width, h=height, a=readings[0], b=readings[-1], p="".join(path))


def plot(
  values: Sequence[float | None], first: str, last: str, width: int = 360
) -> _Markup:
  """Returns readings as dots and a line, with both axes; none without two.

  Args:
    values: Readings, the oldest first.
    first: Label of the first reading, below the left end.
    last: Label of the last reading.
    width: Pixels; a phone's page is as wide.
  """
  readings = [v for v in values if v is not None and math.isfinite(v)]
  if len(readings) < 2:
    return _Markup("")
  low, high = min(0.0, *readings), max(readings)
  high = high if high > low else low + 1.0
  start, end, top, bottom = 44, width - 10, 10, 90
  points = []
  for index, value in enumerate(values):
    if value is not None and math.isfinite(value):
      x = start + 4 + (end - start - 8) * index / (len(values) - 1)
      y = bottom - (bottom - top) * (value - low) / (high - low)
      points.append((f"{x:.1f}", f"{y:.1f}"))
  grid = _Markup().join(
    _Markup(
      '<path class="grid" d="M{l} {y:.1f}H{r}"/><text class="end" x="{x}"'
      ' y="{ty:.1f}">{v:.3g}</text>'
    ).format(l=start, r=end, x=start - 5, y=y, ty=y + 4, v=value)
    for value, y in (
      (low, bottom),
      ((low + high) / 2, (top + bottom) / 2),
      (high, top),
    )
  )
  dots = _Markup().join(
    _Markup('<circle cx="{}" cy="{}" r="2.5"/>').format(*one) for one in points
  )
  return _Markup(
      '<svg class="plotted" width="{w}" height="112" viewBox="0 0 {w} 112"'
      ' role="img" aria-label="{n} rewards from {a:.3g} to {b:.3g}, between'
      ' {low:.3g} and {high:.3g}">{grid}<path class="line" d="M{path}"/>{dots}'
      '<text x="{l}" y="107">{first}</text><text class="end" x="{r}"'
      ' y="107">{last}</text></svg>'
  ).format(
      w=width, n=len(readings), a=readings[0], b=readings[-1], low=low,
      high=high, grid=grid, dots=dots, l=start, r=end, first=first, last=last,
      path="L".join(" ".join(one) for one in points),
  )  # fmt: skip


def interval(rate: float, low: float, high: float, width: int = 90) -> _Markup:
  """Returns a rate in [0, 1] as a bar with its interval as a whisker."""
  inner = width - 2
  return _Markup(
    '<svg class="interval" width="{w}" height="12" viewBox="0 0 {w} 12"'
    ' aria-hidden="true"><rect class="rail" x="1" y="3" width="{i}"'
    ' height="6"/><rect class="value" x="1" y="3" width="{v:.1f}"'
    ' height="6"/><path class="whisker" d="M{a:.1f} 6H{b:.1f}M{a:.1f}'
    ' 3V9M{b:.1f} 3V9"/></svg>'
  ).format(
    w=width, i=inner, v=inner * rate, a=1 + inner * low, b=1 + inner * high
  )


def signed_bar(value: float | None, most: float, width: int = 56) -> _Markup:
  """Returns a bar to the right of its middle, or to the left below 0."""
  if value is None:
    return _Markup("")
  half = width / 2
  length = half * min(1.0, abs(value) / most) if most else 0.0
  return _Markup(
    '<svg class="signed {c}" width="{w}" height="6" viewBox="0 0 {w} 6"'
    ' aria-hidden="true"><rect class="rail" width="{w}" height="6"/><rect'
    ' class="value" x="{x:.1f}" width="{l:.1f}" height="6"/><path'
    ' d="M{h} 0V6"/></svg>'
  ).format(
    c="up" if value >= 0 else "down",
    w=width,
    h=half,
    l=length,
    x=half if value >= 0 else half - length,
  )


def bins(values: Sequence[float], most: int = 20) -> list[dict[str, float]]:
  """Returns equal bins over the values, [low, high) and the last [low, high].

  Few distinct values get a bin each.
  """
  if not values:
    return []
  low, high = min(values), max(values)
  if high <= low:
    return [{"low": low, "high": high, "count": len(values)}]
  count = min(most, max(10, len(set(values))))
  width = high / count - low / count  # Their difference may be infinite.
  edges = [low + width * i for i in range(count)] + [high]
  buckets = [
    {"low": a, "high": b, "count": 0} for a, b in zip(edges, edges[1:])
  ]
  for value in values:
    index = min(count - 1, int(value / width - low / width))
    # Rounding must not put a value outside of the bin that selects it.
    while index and value < edges[index]:
      index -= 1
    while index < count - 1 and value >= edges[index + 1]:
      index += 1
    buckets[index]["count"] += 1
  return buckets


# --- actions ------------------------------------------------------------------


def gesture(action: Mapping[str, Any]) -> click_overlay.Gesture:
  """Reads a row of `action`: action_type, tool_name, tool_args in pixels."""
  arguments = action.get("tool_args")
  arguments = arguments if isinstance(arguments, Mapping) else {}
  nested = arguments.get("args")
  if isinstance(nested, Mapping):
    arguments = {**nested, **arguments}
  kind = str(action.get("action_type") or action.get("tool_name") or "?")
  return click_overlay.gesture(kind, arguments)


def overlay(
  gestures: Sequence[click_overlay.Gesture],
  width: int,
  height: int,
  scale: float = 1.0,
) -> _Markup:
  """Returns gestures drawn over a screenshot of `width` x `height` pixels."""
  marks = click_overlay.marks(gestures, width, height, scale)
  return _Markup(click_overlay.svg(marks, width, height))


def crops(
  gestures: Sequence[click_overlay.Gesture], images: Sequence[Any]
) -> list[_Markup]:
  """Returns crops around a turn's gestures, before and after it, unscaled.

  Args:
    gestures: Gestures of the turn.
    images: `exports.StoredImage`s: the screen before, and the one after.

  Returns:
    SVGs, one an image; none where nothing has a place, or where the screen is
    hardly larger.
  """
  pairs = list(zip(("before", "after"), (images[:1], images[1:][-1:])))
  shown = [(word, overlays[0]) for word, overlays in pairs if overlays]
  return [
    crop
    for word, image in shown
    if not isinstance(image, dict)
    and not image.missing
    and (crop := _crop(gestures, word, image))
  ]


def _crop(
  gestures: Sequence[click_overlay.Gesture], word: str, image: Any
) -> _Markup | None:
  width, height = _CROP
  if image.width < 1.5 * width or image.height < 1.5 * height:
    return None
  points = [p for one in gestures for p in (one.at, one.to) if p is not None]
  if not points:
    return None
  x, y = (
    max(
      0.0,
      min(_middle([p[axis] for p in points], size) - size / 2, extent - size),
    )
    for axis, size, extent in (
      (0, width, image.width),
      (1, height, image.height),
    )
  )
  marks = click_overlay.marks(
    gestures if word == "before" else (), image.width, image.height, _CROP_MARKS
  )
  return _Markup(
      '<svg class="crop" viewBox="{x:.0f} {y:.0f} {w} {h}" width="{w}"'
      ' height="{h}" role="img" aria-label="around the action, {word}"><image'
      ' href="/api/v1/screenshots/{sha}" width="{iw}" height="{ih}"/><g'
      ' class="overlay">{marks}</g></svg>'
  ).format(
      x=x, y=y, w=width, h=height, word=word, sha=image.sha,
      iw=image.width, ih=image.height,
      marks=_Markup(click_overlay.shapes(marks)),
  )  # fmt: skip


def _middle(values: Sequence[float], size: float) -> float:
  """Of what fits into `size`: of all, or of the first."""
  low, high = min(values), max(values)
  return (low + high) / 2 if high - low < size else values[0]
