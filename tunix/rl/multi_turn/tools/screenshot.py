"""Turns a gym's pixels into the stored screenshots that the policy sees.

A `ScreenshotTool` brings pixels to the size the policy wants, stores them once
by content and returns the reference. It is also an ordinary tool: with a
source of pixels, a policy may call it.

The policy gets the stored bytes. Its processor may resize them once more when
it cuts patches (Qwen-VL does, to multiples of its patch size); sizes of
`fit_size` are left alone. Coordinates are pixels of the stored screenshot;
`scale` leads back to the gym's.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable

import numpy as np
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.tools import tool_base


@dataclasses.dataclass(frozen=True)
class Screenshot:
  """A stored screenshot.

  Attributes:
    image: the stored screenshot, at the policy's size.
    width: Width of the gym's own picture, in pixels.
    height: Height of that picture, in pixels.
  """

  image: trajectory.ImageRef
  width: int
  height: int

  @property
  def scale(self) -> tuple[float, float]:
    """Gym pixels for one screenshot pixel, along x and y."""
    return self.width / self.image.width, self.height / self.image.height


def fit_size(
  width: int,
  height: int,
  *,
  factor: int = 1,
  min_pixels: int | None = None,
  max_pixels: int | None = None,
) -> tuple[int, int]:
  """Returns the (width, height) at which a Qwen-VL processor leaves an image
  alone.

  Each side becomes a multiple of `factor`, rounding half to even, and the area
  is brought between `min_pixels` and `max_pixels` with its shape kept as far
  as multiples allow.
  """
  if width < 1 or height < 1 or factor < 1:
    raise ValueError(
      f"sizes and factor must be >= 1, got {width}x{height}, {factor}"
    )
  w = max(factor, round(width / factor) * factor)
  h = max(factor, round(height / factor) * factor)
  if max_pixels is not None and w * h > max_pixels:
    ratio = math.sqrt(width * height / max_pixels)
    w = max(factor, math.floor(width / ratio / factor) * factor)
    h = max(factor, math.floor(height / ratio / factor) * factor)
  elif min_pixels is not None and w * h < min_pixels:
    ratio = math.sqrt(min_pixels / (width * height))
    w = math.ceil(width * ratio / factor) * factor
    h = math.ceil(height * ratio / factor) * factor
  return w, h


def shrunk_size(width: int, height: int, scale: float) -> tuple[int, int]:
  """Returns (width, height) of `shrunk`: each side's share, a pixel at
  least."""
  return max(1, round(width * scale)), max(1, round(height * scale))


def shrunk(
  store: images.ImageStore, image: trajectory.ImageRef, scale: float
) -> trajectory.ImageRef:
  """Returns a stored screenshot at a share of its sides.

  Raises:
    KeyError: the store does not have the image any more.
  """
  from PIL import Image  # pylint: disable=g-import-not-at-top

  size = shrunk_size(image.width, image.height, scale)
  picture = Image.fromarray(store.get(image))
  return store.put(np.asarray(picture.resize(size, Image.Resampling.BICUBIC)))


class ScreenshotTool(tool_base.BaseTool):
  """Takes a screenshot of the computer."""

  def __init__(
    self,
    image_store: images.ImageStore,
    name: str = "screenshot",
    description: str = "Takes a screenshot of the computer.",
    *,
    size: tuple[int, int] | None = None,
    factor: int = 1,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    source: Callable[[], np.ndarray] | None = None,
  ):
    """Args:

    image_store: keeps the screenshots.
    name, description: as for any tool.
    size: (width, height) every screenshot is brought to.
    factor, min_pixels, max_pixels: otherwise, see `fit_size`.
    source: gives uint8[H, W, 3] pixels when the tool is called by a policy.
    """
    super().__init__(name, description)
    if size is not None and (factor, min_pixels, max_pixels) != (1, None, None):
      raise ValueError("give size, or factor and pixel limits, not both")
    self.image_store = image_store
    self.size = size
    self._fit: dict[str, Any] = {
      "factor": factor,
      "min_pixels": min_pixels,
      "max_pixels": max_pixels,
    }
    self._source = source

  @property
  def json(self) -> dict[str, Any]:
    return {
      "type": "function",
      "function": {
        "name": self.name,
        "description": self.description,
        "parameters": {"type": "object", "properties": {}},
      },
    }

  def capture(self, pixels: np.ndarray) -> Screenshot:
    """Stores uint8[H, W, 3] pixels at the policy's size.

    Raises:
      ValueError: not such an array.
    """
    pixels = np.asarray(pixels)
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
      raise ValueError(
        "a screenshot must be uint8[H, W, 3], got"
        f" {pixels.dtype}{list(pixels.shape)}"
      )
    height, width = pixels.shape[:2]
    target = self.size or fit_size(width, height, **self._fit)
    if target != (width, height):
      from PIL import Image  # pylint: disable=g-import-not-at-top

      image = Image.fromarray(pixels).resize(target, Image.Resampling.BICUBIC)
      pixels = np.asarray(image)
    return Screenshot(self.image_store.put(pixels), width, height)

  def forward(self) -> tool_base.ToolOutput:
    if self._source is None:
      raise ValueError(f"tool {self.name!r} has no source of pixels")
    shot = self.capture(self._source())
    return tool_base.ToolOutput(
      self.name,
      f"screenshot of {shot.width}x{shot.height} pixels",
      metadata={"image": shot.image},
    )
