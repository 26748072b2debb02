"""Reads an evaluation of `grounding`: where clicks land, and why they miss.

Accuracy by kind, screen, size of the target and its place; and readings, of
which each explains misses by one mistake:

- the axes are swapped;
- thousandths of the screen were read as pixels, or pixels as thousandths;
- the screenshot was resized to multiples of 28 where the model counts in
  multiples of 32, or the other way round;
- another scale or offset, along x or y, fitted robustly (Theil-Sen).

A reading is reported only if it brings at least `_CLEAR` of the clicks nearer
to the middle of their targets (a sign test, p < 0.001) and the median distance
down to `_NEARER` of what it was, so that a policy that cannot point at all gets
none. A fit is reported where no named mistake comes close to it.

Does not: know the gym; it reads the details of `GroundingGym.evaluate`.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib
from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn.tools import screenshot

PICTURE = "misses.png"
_SIZES = (0.01, 0.02, 0.04, 0.08, 0.16)
"""Bounds of the groups of targets by size: the root of the share of the screen.
"""
_PLACES = ("top", "middle", "bottom"), ("left", "centre", "right")
_LEAST = 12
"""Clicks below which no reading is tried."""
_CLEAR, _NEARER, _CHANCE = 0.75, 0.6, 1e-3
_CLOSE = 1.5
_PAIRS = 400
"""Clicks of a screen that a fit takes at most; their pairs are many."""


@dataclasses.dataclass(frozen=True)
class Clicks:
  """The clicks of an evaluation that pointed anywhere.

  Attributes:
    points: float64[N, 2], pixels of the gym's screen.
    boxes: float64[N, 4], left, top, right, bottom.
    screens: float64[N, 2], width and height.
  """

  points: np.ndarray
  boxes: np.ndarray
  screens: np.ndarray

  @property
  def middles(self) -> np.ndarray:
    return (self.boxes[:, :2] + self.boxes[:, 2:]) / 2

  def hits(self, points: np.ndarray) -> np.ndarray:
    """bool[N], whether points lie in the boxes, their edges included."""
    after = points >= self.boxes[:, :2]
    before = points <= self.boxes[:, 2:]
    return np.all(after & before, axis=1)

  def distances(self, points: np.ndarray) -> np.ndarray:
    """float64[N], to the middles, in shares of the screen's diagonal."""
    away = np.linalg.norm(points - self.middles, axis=1)
    return away / np.linalg.norm(self.screens, axis=1)


@dataclasses.dataclass(frozen=True)
class Reading:
  """One mistake that explains the misses.

  Attributes:
    name: "swapped", "thousandths", "pixels", "factor_28", "factor_32" or "fit".
    text: What it is and what to look at.
    accuracy: Of the clicks that pointed, once they are corrected.
    nearer: Share of the clicks that the correction brings nearer.
  """

  name: str
  text: str
  accuracy: float
  nearer: float


def digest(
  outcomes: Sequence[Mapping[str, Any]], folder: pathlib.Path
) -> dict[str, Any]:
  """Accuracy and readings of an evaluation; draws its misses.

  Args:
    outcomes: Valid and invalid ones, as in episodes.jsonl.
    folder: Gets `misses.png` where a click missed.
  """
  valid = [
    one for one in outcomes if one["valid"] and one["details"].get("box")
  ]
  if not valid:
    return {}
  data: dict[str, Any] = {"targets": len(valid), **rates(valid)}
  pointed = [one for one in valid if one["details"]["point"]]
  data["without_a_point"] = len(valid) - len(pointed)
  readings = find_readings(clicks_of(pointed))
  data["readings"] = [dataclasses.asdict(reading) for reading in readings]
  data["lines"] = list(_lines(data))
  missed = [one for one in pointed if not one["success"]]
  if missed:
    from cua_gyms.grounding import picture  # pylint: disable=g-import-not-at-top

    picture.draw_misses([one["details"] for one in missed]).save(
      folder / PICTURE
    )
    data["pictures"] = [PICTURE]
  return data


def clicks_of(outcomes: Sequence[Mapping[str, Any]]) -> Clicks:
  details = [one["details"] for one in outcomes]
  return Clicks(
    *(
      np.array([one[name] for one in details], np.float64).reshape(-1, width)
      for name, width in (("point", 2), ("box", 4), ("screen", 2))
    )
  )


# --- accuracy -----------------------------------------------------------------


def rates(outcomes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """{"accuracy", "by_kind", "by_screen", "by_size", "by_place"}: {group:
  {"targets", "accuracy"}}."""
  groups: dict[str, dict[str, list[bool]]] = {
    name: collections.defaultdict(list) for name in _GROUPS
  }
  for one in outcomes:
    for name, group_of in _GROUPS.items():
      groups[name][group_of(one["details"])].append(bool(one["success"]))
  return {
    "accuracy": float(np.mean([bool(one["success"]) for one in outcomes])),
    **{
      name: {
        group: {"targets": len(hits), "accuracy": float(np.mean(hits))}
        for group, hits in sorted(by.items())
      }
      for name, by in groups.items()
    },
  }


def size_group(details: Mapping[str, Any]) -> str:
  """Group by the root of the target's share of the screen, smallest first."""
  x1, y1, x2, y2 = details["box"]
  width, height = details["screen"]
  share = math.sqrt((x2 - x1) * (y2 - y1) / (width * height))
  for place, bound in enumerate(_SIZES):
    if share < bound:
      return f"{place + 1}: under {bound:.0%}"
  return f"{len(_SIZES) + 1}: {_SIZES[-1]:.0%} and over"


def place_group(details: Mapping[str, Any]) -> str:
  """One of nine parts of the screen, by the middle of the target."""
  x1, y1, x2, y2 = details["box"]
  middle = (y1 + y2) / 2, (x1 + x2) / 2
  sides = details["screen"][::-1]
  return " ".join(
    names[min(2, max(0, int(3 * at / side)))]
    for names, at, side in zip(_PLACES, middle, sides)
  )


_GROUPS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
  "by_kind": lambda details: str(details["kind"]),
  "by_screen": lambda details: "{:g}x{:g}".format(*details["screen"]),
  "by_size": size_group,
  "by_place": place_group,
}


# --- readings -----------------------------------------------------------------


def find_readings(clicks: Clicks) -> list[Reading]:
  """The mistakes that explain the misses, the best explanation first."""
  if len(clicks.points) < _LEAST:
    return []
  before = clicks.distances(clicks.points)
  readings = []
  for name, text, points in _corrections(clicks):
    after = clicks.distances(points)
    nearer = int((after < before - 1e-9).sum())
    moved = nearer + int((after > before + 1e-9).sum())
    if (
      nearer >= _CLEAR * len(before)
      and np.median(after) <= _NEARER * np.median(before)
      and _chance(nearer, moved) < _CHANCE
    ):
      accuracy = float(clicks.hits(points).mean())
      reading = Reading(name, text, accuracy, nearer / len(before))
      readings.append((float(np.median(after)), reading))
  # The fit has the most to choose from, so it is nearest with any noise: a
  # named mistake that comes close to it says more.
  fits = [after for after, reading in readings if reading.name == "fit"]
  named = [
    (after, reading)
    for after, reading in readings
    if reading.name != "fit" and (not fits or after <= _CLOSE * fits[0])
  ]
  chosen = sorted(named or readings, key=lambda one: one[0])
  return [reading for _, reading in chosen]


def _chance(nearer: int, moved: int) -> float:
  """Of at least `nearer` heads in `moved` throws of a coin."""
  ways = sum(math.comb(moved, k) for k in range(nearer, moved + 1))
  return ways / 2**moved if moved else 1.0


def _corrections(clicks: Clicks) -> Iterator[tuple[str, str, np.ndarray]]:
  """(name, text, corrected points) of each mistake."""
  points, screens = clicks.points, clicks.screens
  shares = points / screens
  for swapped in (shares[:, ::-1] * screens, points[:, ::-1]):
    yield (
      "swapped",
      "the axes are swapped: the model writes y before x, or the grammar"
      " reads them so; look at agent.parser",
      swapped,
    )
  yield (
    "thousandths",
    "the model writes thousandths of the screen, which the grammar reads as"
    " pixels; choose the grammar without _absolute in agent.parser",
    points / 1000 * screens,
  )
  yield (
    "pixels",
    "the model writes pixels, which the grammar reads as thousandths of the"
    " screen; choose an _absolute grammar in agent.parser",
    shares * 1000,
  )
  for model, used in ((28, 32), (32, 28)):
    yield (
      f"factor_{model}",
      f"the model counts pixels of a screenshot resized to multiples of"
      f" {model}, and this one was resized to multiples of {used}; look at"
      " agent.resize and the processor's patch size",
      points * _sizes(screens, used) / _sizes(screens, model),
    )
  if (fit := _fitted(clicks)) is not None:
    yield "fit", *fit


def _sizes(screens: np.ndarray, factor: int) -> np.ndarray:
  return np.array(
    [
      screenshot.fit_size(int(width), int(height), factor=factor)
      for width, height in screens
    ],
    np.float64,
  )


def _fitted(clicks: Clicks) -> tuple[str, np.ndarray] | None:
  """(text, corrected points) of a scale and an offset per axis and screen."""
  points = clicks.points.copy()
  texts = []
  for screen in np.unique(clicks.screens, axis=0):
    rows = np.flatnonzero((clicks.screens == screen).all(axis=1))
    fits = [
      _line(clicks.points[rows, axis], clicks.middles[rows, axis])
      for axis in (0, 1)
    ]
    if len(rows) < _LEAST or None in fits:
      continue
    for axis, (scale, offset) in enumerate(fits):  # type: ignore[misc]
      points[rows, axis] = scale * points[rows, axis] + offset
    (a, b), (c, d) = fits  # type: ignore[misc]
    texts.append(
      f"{screen[0]:g}x{screen[1]:g}: x {a:.3f}·x{b:+.0f}, y {c:.3f}·y{d:+.0f}"
    )
  if not texts:
    return None
  return (
    "clicks are off by a scale or an offset (middle of the target of a click"
    f" at x, y: {'; '.join(texts)}); compare the sizes that the agent and the"
    " processor resize a screenshot to (agent.resize, agent.max_pixels,"
    " policy.max_pixels)",
    points,
  )


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float] | None:
  """(slope, offset) of the median of the slopes of all pairs (Theil-Sen)."""
  x, y = x[:_PAIRS], y[:_PAIRS]
  i, j = np.triu_indices(len(x), 1)
  far = np.abs(x[i] - x[j]) > 1e-6
  if not far.any():
    return None
  slope = float(np.median((y[i] - y[j])[far] / (x[i] - x[j])[far]))
  return slope, float(np.median(y - slope * x))


# --- words --------------------------------------------------------------------


def _lines(data: Mapping[str, Any]) -> Iterator[str]:
  yield (
    f"{data['accuracy']:.3f} of {data['targets']} targets hit,"
    f" {data['without_a_point']} answers without a point"
  )
  for name in _GROUPS:
    groups = "  ".join(
      f"{group} {figures['accuracy']:.3f} ({figures['targets']})"
      for group, figures in data[name].items()
    )
    yield f"{name.replace('_', ' ')}:  {groups}"
  for reading in data["readings"]:
    yield (
      f"{reading['text']} (so read, {reading['accuracy']:.3f} of the clicks"
      " would hit)"
    )
