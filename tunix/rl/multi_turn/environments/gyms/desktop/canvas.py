"""Draws the desktop: rectangles, masks, text and themes.

A `Canvas` draws in layout units ("dp") and multiplies by a whole factor, so a
picture at 640x480 has the same crisp edges as one at 128x96. Only filled
rectangles and cached binary masks reach Pillow: no anti-aliasing, no outline
rasteriser, hence the same pixels on every machine.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from PIL import Image
from tunix.rl.multi_turn.environments.gyms.desktop import font

Color = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Theme:
  """Colours of a desktop; every text/background pair has high contrast."""

  name: str
  wall_top: Color
  wall_bottom: Color
  window: Color
  border: Color
  title: Color
  title_text: Color
  title_idle: Color
  text: Color
  faint: Color
  button: Color
  button_edge: Color
  field: Color
  accent: Color
  accent_text: Color
  icon_text: Color


LIGHT = Theme(
    "light", (88, 140, 196), (58, 98, 158), (243, 244, 247), (70, 78, 96),
    (38, 60, 104), (255, 255, 255), (128, 140, 164), (18, 20, 28),
    (128, 134, 148), (219, 225, 235), (104, 116, 140), (255, 255, 255),
    (30, 100, 220), (255, 255, 255), (255, 255, 255),
)  # fmt: skip
THEMES = (
    LIGHT,
    Theme(
        "forest", (104, 150, 118), (52, 96, 78), (244, 246, 240), (66, 82, 70),
        (36, 84, 62), (255, 255, 255), (124, 148, 134), (16, 24, 18),
        (126, 138, 126), (218, 230, 216), (98, 122, 100), (255, 255, 255),
        (20, 130, 86), (255, 255, 255), (255, 255, 255),
    ),
    Theme(
        "sand", (214, 180, 140), (168, 122, 92), (250, 246, 238), (104, 84, 66),
        (120, 68, 44), (255, 255, 255), (170, 144, 124), (32, 22, 14),
        (146, 132, 116), (238, 226, 206), (142, 120, 94), (255, 255, 255),
        (190, 90, 30), (255, 255, 255), (32, 22, 14),
    ),
    Theme(
        "dark", (46, 50, 66), (24, 26, 38), (52, 56, 68), (14, 16, 22),
        (28, 31, 42), (240, 242, 248), (70, 74, 88), (240, 242, 248),
        (158, 164, 178), (80, 86, 104), (132, 140, 160), (32, 35, 45),
        (92, 150, 255), (8, 12, 24), (240, 242, 248),
    ),
)  # fmt: skip


def _inside(points: tuple[tuple[int, int], ...], x: np.ndarray, y: np.ndarray):
  """Even-odd test in whole numbers."""
  inside = np.zeros(np.broadcast(x, y).shape, bool)
  for (x0, y0), (x1, y1) in zip(points, points[1:] + points[:1]):
    if y0 == y1:
      continue
    crosses = (y0 > y) != (y1 > y)
    # The sign of the edge function is the side of the edge on which x lies.
    side = (x - x0) * (y1 - y0) - (y - y0) * (x1 - x0)
    inside ^= crosses & ((side < 0) == (y1 > y0))
  return inside


# Corners in 1/1000 of the box; whole numbers, so no rounding can differ.
_POLYGONS = {
    "triangle": ((500, 40), (990, 960), (10, 960)),
    "diamond": ((500, 0), (1000, 500), (500, 1000), (0, 500)),
    "star": (
        (500, 20), (622, 352), (975, 365), (697, 584), (794, 924),
        (500, 728), (206, 924), (303, 584), (25, 365), (378, 352),
    ),
    "down": ((0, 200), (1000, 200), (500, 800)),
    "right": ((200, 0), (800, 500), (200, 1000)),
}  # fmt: skip


@functools.lru_cache(maxsize=1024)
def shape_mask(shape: str, width: int, height: int) -> Image.Image:
  """`L` mask of a named shape: circle, ring, round or one of `_POLYGONS`."""
  y, x = np.mgrid[0:height, 0:width]
  if shape in ("circle", "ring"):
    # Pixel centres at odd positions of a doubled grid.
    u, v = 2 * x + 1 - width, 2 * y + 1 - height
    bits = (u * height) ** 2 + (v * width) ** 2 <= (width * height) ** 2
  elif shape.startswith("round"):
    radius = int(shape[5:])
    bits = np.ones((height, width), bool)
    dx = np.maximum(radius - x, x - (width - 1 - radius)).clip(0)
    dy = np.maximum(radius - y, y - (height - 1 - radius)).clip(0)
    bits = dx * dx + dy * dy <= radius * radius
  else:
    points = tuple(
      (px * 2 * width, py * 2 * height) for px, py in _POLYGONS[shape]
    )
    bits = _inside(points, (2 * x + 1) * 1000, (2 * y + 1) * 1000)
  return Image.fromarray(np.where(bits, 255, 0).astype(np.uint8))


@functools.lru_cache(maxsize=64)
def wallpaper(width: int, height: int, theme: Theme) -> Image.Image:
  """Background of the desktop: a vertical blend in steps of 12 rows."""
  steps = max(8, height // 12)
  image = Image.new("RGB", (width, height), theme.wall_bottom)
  for step in range(steps):
    color = tuple(
      (a * (steps - 1 - step) + b * step) // (steps - 1)
      for a, b in zip(theme.wall_top, theme.wall_bottom)
    )
    image.paste(
      color, (0, height * step // steps, width, height * (step + 1) // steps)
    )
  return image


class Canvas:
  """Draws on an image in layout units; `k` pixels a unit."""

  def __init__(self, image: Image.Image, k: int, ox: int = 0, oy: int = 0):
    self.image = image
    self.k = k
    self.ox = ox
    self.oy = oy

  def rect(self, x: int, y: int, w: int, h: int, color: Color) -> None:
    if w > 0 and h > 0:
      k = self.k
      x, y = (x - self.ox) * k, (y - self.oy) * k
      self.image.paste(color, (x, y, x + w * k, y + h * k))

  def frame(self, x: int, y: int, w: int, h: int, color: Color) -> None:
    """An outline one unit thick."""
    self.rect(x, y, w, 1, color)
    self.rect(x, y + h - 1, w, 1, color)
    self.rect(x, y, 1, h, color)
    self.rect(x + w - 1, y, 1, h, color)

  def shape(
    self, shape: str, x: int, y: int, w: int, h: int, color: Color
  ) -> None:
    if w > 0 and h > 0:
      k = self.k
      if shape == "square":
        self.rect(x, y, w, h, color)
        return
      if shape.startswith("round"):
        shape = f"round{int(shape[5:]) * k}"
      mask = shape_mask(shape, w * k, h * k)
      self.image.paste(color, ((x - self.ox) * k, (y - self.oy) * k), mask)

  def box(
    self, x: int, y: int, w: int, h: int, fill: Color, edge: Color
  ) -> None:
    """A filled box with an outline and softened corners."""
    self.shape("round2", x, y, w, h, edge)
    self.shape("round1", x + 1, y + 1, w - 2, h - 2, fill)

  def text(
    self, x: int, y: int, text: str, color: Color, bold: bool = False
  ) -> None:
    """One line; (x, y) is the top left of the capitals."""
    if text:
      mask = font.text_mask(text, self.k, bold)
      k = self.k
      self.image.paste(color, ((x - self.ox) * k, (y - self.oy) * k), mask)

  def text_in(
    self, x: int, y: int, w: int, h: int, text: str, color: Color
  ) -> None:
    """One line centred in a box, cut to its width."""
    text = font.fit(text, w)
    text_x = x + (w - font.text_width(text)) // 2
    self.text(text_x, y + (h - font.ASCENT) // 2, text, color)

  def sub(self, x: int, y: int, w: int, h: int, fill: Color) -> Canvas:
    """Makes a canvas for a clipped area; `put` it back when drawn."""
    image = Image.new("RGB", (w * self.k, h * self.k), fill)
    return Canvas(image, self.k, x, y)

  def put(self, other: Canvas, x: int, y: int) -> None:
    k = self.k
    self.image.paste(other.image, ((x - self.ox) * k, (y - self.oy) * k))
