"""Computes the size at which Qwen-VL and GLM-V policies see an image.

Promises: `smart_resize` equals the reference of that name, for every
size that it takes.

Does not: touch pixels (see `qwen_vl_inputs`), or import numpy.
"""

from __future__ import annotations

import math

MAX_ASPECT_RATIO = 200


def smart_resize(
    height: int,
    width: int,
    factor: int,
    min_pixels: int,
    max_pixels: int,
    lift_sides: bool = False,
) -> tuple[int, int]:
  """Returns the size an image is resized to before it is cut into patches.

  Sides become multiples of `factor`, the area lies between the limits, and the
  aspect ratio stays near the original. Sides are rounded half to even, as
  Python rounds: 720 / 32 = 22.5 becomes 22, so 720 rows become 704.

  The result exceeds max_pixels, as the source's does, where a side would
  otherwise fall below `factor`, and where min_pixels is so near max_pixels
  that rounding up passes it.

  Source: `smart_resize` of Qwen's qwen-vl-utils and of transformers'
  models/qwen2_vl/image_processing_qwen2_vl.py and, with `lift_sides`,
  models/glm4v/image_processing_glm4v.py (5.12.1), whose limits are those of a
  still taken twice.

  Args:
    height: pixels, > 0.
    width: pixels, > 0.
    factor: pixels of a vision token's side, patch_size * merge_size.
    min_pixels: least area, > 0.
    max_pixels: largest area, >= min_pixels.
    lift_sides: enlarge an image with a side below `factor` to it first.

  Returns:
    (height, width), multiples of `factor`, > 0.

  Raises:
    ValueError: the size is not positive, or one side is more than
      MAX_ASPECT_RATIO times the other.
  """
  if height <= 0 or width <= 0:
    raise ValueError(f"image size must be > 0, got {width}x{height}")
  if lift_sides and min(height, width) < factor:
    lift = max(factor / height, factor / width)
    height, width = int(height * lift), int(width * lift)
  if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
    raise ValueError(
        f"a {width}x{height} image has an aspect ratio of"
        f" {max(height, width) / min(height, width):.1f}, Qwen-VL takes at most"
        f" {MAX_ASPECT_RATIO}; crop it or make the gym's screen less narrow"
    )
  rows = round(height / factor) * factor
  cols = round(width / factor) * factor
  # The order of the operations is the source's: another one rounds otherwise.
  if rows * cols > max_pixels:
    scale = math.sqrt((height * width) / max_pixels)
    rows = max(factor, math.floor(height / scale / factor) * factor)
    cols = max(factor, math.floor(width / scale / factor) * factor)
  elif rows * cols < min_pixels:
    scale = math.sqrt(min_pixels / (height * width))
    rows = math.ceil(height * scale / factor) * factor
    cols = math.ceil(width * scale / factor) * factor
  return rows, cols


def pixel_budget(
    max_pixels: int, trajectory_pixels: int, images: int, factor: int = 32
) -> int:
  """`max_pixels` for each image of a trajectory that has a budget as a whole.

  Args:
    max_pixels: limit of a single image, in pixels.
    trajectory_pixels: limit of all images of a trajectory together, in pixels
      after resizing.
    images: screenshots a trajectory may hold.
    factor: pixels of a vision token's side; Qwen3-VL's unless given.

  Returns:
    Pixels an image may have, with the exceptions of `smart_resize`'s
    max_pixels.

  Raises:
    ValueError: `images` is not positive, or a vision token's factor**2 pixels
      do not fit.
  """
  if images <= 0:
    raise ValueError(f"images must be > 0, got {images}")
  budget = min(max_pixels, trajectory_pixels // images)
  if budget < factor**2:
    raise ValueError(
        f"max_pixels={max_pixels} and trajectory_pixels={trajectory_pixels}"
        f" leave each of {images} images {budget} pixels, one vision token"
        f" takes {factor**2}; raise them to at least {factor**2} and"
        f" {images * factor**2}, or keep fewer images"
    )
  return budget
