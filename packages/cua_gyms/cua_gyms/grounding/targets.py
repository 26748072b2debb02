"""Makes targets: a screenshot, words for one thing on it, and its exact box.

Three sources:

- Drawn: `drawn` places a target of a kind on a random scene of the embedded
  desktop. Icons are pictures and close boxes; texts are buttons, rows and tabs;
  widgets are fields, boxes to tick, lists and sliders. Only things in plain
  sight are targets: every corner of the box shows the thing itself.
- ScreenSpot and ScreenSpot-v2: `screenspot_{desktop,mobile,web}[_v2].json`
  beside a folder of images, boxes [x, y, width, height].
- ScreenSpot-Pro: `annotations/*.json` and `images/`, boxes [x1, y1, x2, y2].

Boxes are [left, top, right, bottom] in pixels of the screenshot; a click on the
edge counts, as in the benchmarks' own evaluation.

Sources: os-copilot/screenspot-v2 and likaixin2000/ScreenSpot-Pro-GUI-Grounding
(layouts and the rule of a hit). Does not download anything.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import random
from typing import Any, Iterator, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.environments.gyms.desktop import scene as scene_lib
from tunix.rl.multi_turn.environments.gyms.desktop import scenes

SIZES = ("640x480", "1280x720", "720x1280", "1366x768", "1920x1080")
"""Screens that targets are drawn on, as far as gym.width and gym.height hold
them."""
COUNT = 500
"""Targets drawn for each size of screen."""
KINDS: Mapping[str, tuple[str, ...]] = {
  "icon": ("icon", "shape", "close box"),
  "text": ("button", "row", "tab"),
  "widget": (
    "field",
    "check box",
    "radio button",
    "drop-down",
    "slider",
    "box",
  ),
}
"""Kind of target -> kinds of widgets on the embedded desktop."""

_TRIES = 200
_SCREENSPOT = "screenspot_*.json"
_PRO = "annotations/*.json"

Box = tuple[float, float, float, float]


@dataclasses.dataclass(frozen=True)
class Target:
  """One thing to click.

  Attributes:
    words: What the thing is called, or the instruction that it answers.
    kind: "icon", "text" or "widget".
    box: [left, top, right, bottom], pixels of the screenshot.
    screenshot: uint8[H, W, 3].
    source: Seed of a drawn one, or path of the image.
  """

  words: str
  kind: str
  box: Box
  screenshot: np.ndarray
  source: int | str

  @property
  def screen(self) -> tuple[int, int]:
    height, width = self.screenshot.shape[:2]
    return width, height

  def holds(self, x: float, y: float) -> bool:
    """Whether a click hits; the edges count."""
    x1, y1, x2, y2 = self.box
    return x1 <= x <= x2 and y1 <= y <= y2


# --- drawn --------------------------------------------------------------------


def parse_size(text: str) -> tuple[int, int]:
  """Returns (width, height) of a text such as "1280x720".

  Raises:
    ValueError: not of that form, or too small to draw.
  """
  width, _, height = text.partition("x")
  if not (width.isdecimal() and height.isdecimal()):
    raise ValueError(f"sizes={text!r} must look like 1280x720")
  size = int(width), int(height)
  if size[0] < scene_lib.MIN_WIDTH or size[1] < scene_lib.MIN_HEIGHT:
    raise ValueError(
      f"sizes={text!r}: a desktop needs at least {scene_lib.MIN_WIDTH}x"
      f"{scene_lib.MIN_HEIGHT} pixels"
    )
  return size


def drawn(width: int, height: int, kind: str, seed: int) -> Target:
  """Draws a target of a kind; the same arguments give the same one."""
  rng = random.Random(f"grounding/{kind}/{seed}/{width}x{height}")
  for _ in range(_TRIES):
    scene = scenes.random_scene(width, height, rng.randrange(2**31))
    choices = [
      (words, box)
      for words, widget, box in _in_sight(scene)
      if widget.kind in KINDS[kind]
    ]
    if choices:
      words, box = rng.choice(choices)
      return Target(words, kind, box, scene.screenshot(), seed)
  raise RuntimeError(
    f"no {kind} on {_TRIES} desktops of {width}x{height}; choose larger sizes"
  )


def _in_sight(scene: scene_lib.Scene) -> Iterator[tuple[str, Any, Box]]:
  """Yields (words, widget, box) of each named thing that nothing covers."""
  k = scene.k
  for words, x, y in scene.referring_expressions():
    widget = scene.hit(x // k, y // k)
    if widget is None or words not in widget.phrases():
      continue  # The title bar of a window.
    x1, y1, x2, y2 = _extent(scene, widget, x // k, y // k)
    if x2 - x1 != widget.w or y2 - y1 != widget.h:
      continue
    corners = [scene.hit(u, v) for u in (x1, x2 - 1) for v in (y1, y2 - 1)]
    if all(corner is widget for corner in corners):
      yield words, widget, (x1 * k, y1 * k, x2 * k, y2 * k)


def _extent(
  scene: scene_lib.Scene, widget: object, x: int, y: int
) -> tuple[int, int, int, int]:
  """The widget's part around a position that shows it, in layout units."""
  x1, x2, y1, y2 = x, x + 1, y, y + 1
  while scene.hit(x1 - 1, y) is widget:
    x1 -= 1
  while scene.hit(x2, y) is widget:
    x2 += 1
  while scene.hit(x, y1 - 1) is widget:
    y1 -= 1
  while scene.hit(x, y2) is widget:
    y2 += 1
  return x1, y1, x2, y2


# --- files --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
  """A target of a benchmark's files, whose image is not read yet.

  Attributes:
    name: File and place in it, unique in the benchmark.
    family: Platform (desktop, mobile, web), or group of ScreenSpot-Pro.
    words, kind, box: See `Target`.
    image: Path of the screenshot.
  """

  name: str
  family: str
  words: str
  kind: str
  box: Box
  image: pathlib.Path

  def read(self) -> Target:
    """Returns the target with its pixels.

    Raises:
      OSError: The image is missing or damaged.
      ValueError: The box lies outside the image.
    """
    pixels = read_image(self.image)
    target = Target(self.words, self.kind, self.box, pixels, str(self.image))
    width, height = target.screen
    x1, y1, x2, y2 = self.box
    # Annotations round outwards: a pixel beyond the edge is no error.
    across = -1 <= x1 < x2 <= width + 1
    if not (across and -1 <= y1 < y2 <= height + 1):
      raise ValueError(
        f"{self.name}: bbox {list(self.box)} is not within {self.image.name}"
        f" of {width}x{height}; is it the benchmark's own image?"
      )
    return target


def read_image(path: str | pathlib.Path) -> np.ndarray:
  """Returns uint8[H, W, 3] of a picture.

  Raises:
    OSError: It is missing or damaged.
  """
  from PIL import Image  # pylint: disable=g-import-not-at-top

  with Image.open(path) as picture:
    return np.asarray(picture.convert("RGB"))


@functools.lru_cache(maxsize=4)
def read_files(path: str) -> tuple[Row, ...]:
  """Reads the targets of a local copy of ScreenSpot, -v2 or -Pro.

  Raises:
    ValueError: no such files in the folder, or a damaged one, by name.
  """
  folder = pathlib.Path(path).expanduser()
  pro = sorted(folder.glob(_PRO))
  plain = sorted(folder.glob(_SCREENSPOT))
  if not pro and not plain:
    raise ValueError(
      f"path={path}: neither {_SCREENSPOT} (ScreenSpot, ScreenSpot-v2) nor"
      f" {_PRO} (ScreenSpot-Pro) is there; give the directory of a copy"
    )
  images = folder / "images" if pro else _image_folder(folder)
  rows = []
  for file in pro or plain:
    for place, entry in enumerate(_entries(file)):
      name = f"{file.stem}/{place}"
      try:
        rows.append(_row(name, entry, images, of_pro=bool(pro)))
      except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
          f"path={path}: entry {place} of {file.name} is not as the benchmark"
          f" writes it: {type(error).__name__} {error}"
        ) from None
  missing = [row.image for row in rows if not row.image.is_file()]
  if missing:
    raise ValueError(
      f"path={path}: {len(missing)} images are missing, the first is"
      f" {missing[0]}; unpack the archive of images into the folder"
    )
  return tuple(rows)


def _image_folder(folder: pathlib.Path) -> pathlib.Path:
  for name in ("screenspotv2_image", "screenspot_imgs", "images"):
    if (folder / name).is_dir():
      return folder / name
  raise ValueError(
    f"path={folder}: no folder screenspotv2_image (ScreenSpot-v2),"
    " screenspot_imgs (ScreenSpot) or images; unpack the archive of images"
    " there"
  )


def _entries(file: pathlib.Path) -> Sequence[Mapping[str, Any]]:
  try:
    entries = json_text.read(file)
  except (OSError, ValueError) as error:
    raise ValueError(f"path: {file} cannot be read: {error}") from None
  if not isinstance(entries, list):
    raise ValueError(f"path: {file} must hold a list of targets")
  return entries


def _row(
  name: str, entry: Mapping[str, Any], images: pathlib.Path, *, of_pro: bool
) -> Row:
  a, b, c, d = (float(value) for value in entry["bbox"])
  box = (a, b, c, d) if of_pro else (a, b, a + c, b + d)
  if of_pro:
    family = str(entry["group"])
  else:
    family = name.split("_")[1].split("/")[0]
  return Row(
    name=name,
    family=family,
    words=str(entry["instruction"]),
    kind=str(entry["ui_type" if of_pro else "data_type"]),
    box=box,
    image=images / str(entry["img_filename"]),
  )


def screen_problems(
  options: Mapping[str, Any], width: int, height: int
) -> Iterator[str]:
  """Problems of the gym's options, and screens larger than the run's."""
  path, chosen = options.get("path", ""), options.get("sizes", ())
  try:
    if path:
      sizes = sorted({_size(row.image) for row in read_files(str(path))})
    else:
      sizes = [parse_size(text) for text in chosen]
  except (OSError, ValueError) as error:
    yield f"gym.options.{error}"
    return
  if path and chosen:
    yield f"gym.options.sizes={list(chosen)}: gym.options.path has its own"
  largest = max(sizes, key=lambda size: size[0] * size[1], default=(0, 0))
  if largest[0] * largest[1] > width * height:
    yield (
      f"gym.width={width}, gym.height={height}: a screenshot has"
      f" {largest[0]}x{largest[1]}; set gym.width={largest[0]}"
      f" gym.height={largest[1]}"
    )


@functools.lru_cache(maxsize=None)
def _size(image: pathlib.Path) -> tuple[int, int]:
  from PIL import Image  # pylint: disable=g-import-not-at-top

  with Image.open(image) as picture:
    return picture.size


def sizes_within(width: int, height: int) -> tuple[str, ...]:
  """Returns the `SIZES` of no more pixels than a screen, or its own alone."""
  fitting = tuple(
    text for text in SIZES if np.prod(parse_size(text)) <= width * height
  )
  return fitting or (f"{width}x{height}",)
