"""Prepares inputs of SmolVLM and Idefics3 policies: tiles, patches, positions.

An image is enlarged or shrunk to the longest edge that the processor's file
names, then to whole tiles, which follow each other row by row; the whole image,
as one more tile, comes last. An image that fits one tile is that tile alone. A
token counts as one position, of a word or of an image.

Promises: the pixels are those of transformers' `Idefics3ImageProcessorPil` and
`SmolVLMImageProcessorPil`, bit for bit, except that they stay uint8 and that
pixels beyond a tile's last whole patch, which no model sees, are left out.

Does not: take video, or normalise. Axis names: see `qwen_vl_inputs`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Mapping

import numpy as np
from PIL import Image
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy.checkpoints import image_settings
from tunix.rl.multi_turn.policy.models.qwen import qwen_shapes
from tunix.rl.multi_turn.policy.models.qwen import qwen_vl_inputs

_LONGEST = 4096  # No edge is longer after the first resizing.
_TILES = 4  # Of the longest edge, where no file names it.


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolVLMProcessor(qwen_vl_inputs.QwenVLProcessor):
  """`base.Processor` of SmolVLM and Idefics3; stateless, thread-safe.

  A patch's position is (row, column, tile, tiles of its image).

  Attributes:
    tile_size: Pixels of a tile's side.
    splits: whether an image has tiles beside the whole of it.
    min_pixels, max_pixels: areas of squares, of a tile's side and of the
      longest edge.
  """

  tile_size: int
  splits: bool = True
  flat_positions: bool = True

  resample: ClassVar[Image.Resampling] = Image.Resampling.LANCZOS

  @property
  def longest_edge(self) -> int:
    """Pixels of an image's longer side before it is cut."""
    return math.isqrt(self.max_pixels)

  @property
  def tile_tokens(self) -> int:
    """Vision tokens of a tile."""
    return (self.tile_size // self.patch_size // self.merge_size) ** 2

  def describe(self) -> str:
    """Returns the settings and their source, in a line for people."""
    side = self.tile_size
    split = f"tiles of {side}x{side} of up to {self.longest_edge} and one of"
    return (
      split
      * self.splits
      + f" all of {side}x{side}, patches of {self.patch_size},"
      f" {self.merge_size}x{self.merge_size} a token"
      + f" ({self.source})"
      * bool(self.source)
    ).lstrip()

  def image_size(self, width: int, height: int) -> tuple[int, int]:
    """(width, height) in pixels that an image is cut into tiles at.

    Raises:
      ValueError: a side is not positive.
    """
    return self._sizes(width, height)[-1]

  def _sizes(self, width: int, height: int) -> list[tuple[int, int]]:
    """(width, height) after each resizing, of which there are two."""
    if min(width, height) <= 0:
      raise ValueError(f"image size must be > 0, got {width}x{height}")
    tile = self.tile_size
    width, height = _of_longest(width, height, self.longest_edge)
    if max(width, height) > _LONGEST:
      width, height = _of_longest(width, height, _LONGEST, even=False)
    first = width, height
    if not self.splits:
      return [first, (tile, tile)]
    rounded = lambda side: math.ceil(side / tile) * tile
    ratio = width / height
    if width >= height:
      width = rounded(width)
      height = rounded(int(width / ratio))
    else:
      height = rounded(height)
      width = rounded(int(height * ratio))
    return [first, (width, height)]

  def image_layout(self, width: int, height: int) -> tuple[int, int, int]:
    """Returns (rows, columns, tokens of a tile); 0 rows of one tile alone.

    Raises:
      ValueError: a side is not positive.
    """
    width, height = self.image_size(width, height)
    rows, columns = height // self.tile_size, width // self.tile_size
    if rows * columns == 1:
      rows = columns = 0
    return rows, columns, self.tile_tokens

  def num_image_tokens(self, width: int, height: int) -> int:
    """Vision tokens of all tiles of an image of this size, in pixels.

    Raises:
      ValueError: a side is not positive.
    """
    rows, columns, tokens = self.image_layout(width, height)
    return (rows * columns + 1) * tokens

  def grid(self, width: int, height: int) -> tuple[int, int]:
    """(tiles, patches of a tile) of an image of this size, in pixels.

    Raises:
      ValueError: a side is not positive.
    """
    patches = self.tile_tokens * self.patches_per_token
    return self.num_image_tokens(width, height) // self.tile_tokens, patches

  def patchify(self, pixels: np.ndarray) -> base.PatchedImage:
    """Returns the patches of all tiles; see `QwenVLProcessor.patchify`.

    Raises:
      ValueError: not uint8[H, W, 3].
    """
    of_tile = super().patchify
    tiles = [of_tile(tile) for tile in self._cut(pixels)]
    for number, tile in enumerate(tiles):
      tile.positions[:, 2:] = number, len(tiles)
    return base.PatchedImage(
      np.concatenate([tile.patches for tile in tiles]),
      np.concatenate([tile.positions for tile in tiles]),
      sum(tile.num_tokens for tile in tiles),
    )

  def resize(self, pixels: np.ndarray) -> np.ndarray:
    """Returns a tile, which `_cut` has resized, without its last pixels."""
    side = self.tile_size // self.patch_size * self.patch_size
    return pixels[:side, :side]

  def _cut(self, pixels: np.ndarray) -> list[np.ndarray]:
    """Returns uint8[tile, tile, 3] of each tile, that of the whole last."""
    pixels = np.asarray(pixels)
    qwen_vl_inputs.check_pixels(pixels)
    height, width, _ = pixels.shape
    image = Image.fromarray(np.ascontiguousarray(pixels))
    for size in self._sizes(width, height):
      if size != image.size:
        image = image.resize(size, self.resample)
    side = self.tile_size
    if image.size == (side, side):
      return [np.asarray(image)]
    resized = np.asarray(image)
    return [
      resized[y : y + side, x : x + side]
      for y in range(0, image.height, side)
      for x in range(0, image.width, side)
    ] + [np.asarray(image.resize((side, side), self.resample))]

  def _check_span(
    self, tokens_T: np.ndarray, span: trajectory.ImageSpan, cursor: int
  ) -> tuple[int, int]:
    """Raises a ValueError unless a span is of its image's runs."""
    image = span.image
    count = self.num_image_tokens(image.width, image.height)
    row = span.row or span.num_tokens
    shown = 0
    if cursor <= span.offset and span.end <= len(tokens_T):
      numbers = span.numbers(tokens_T)
      shown = int(numbers.max()) + 1
    if (
      shown != count
      or row != self.tile_tokens
      or (self.image_token_id not in (None, tokens_T[span.offset]))
    ):
      raise ValueError(
        f"image span [{span.offset}, {span.end}) of {image.width}x"
        f"{image.height} image {image.sha256[:12]}… must hold {count} tokens"
        f" {self.image_token_id} in runs of {self.tile_tokens} and lie within"
        f" {cursor} and {len(tokens_T)}, and holds {shown} in runs of"
        f" {row}; render the prompt with this"
        " processor's image_layout"
      )
    return 1, count


def _of_longest(
  width: int, height: int, edge: int, even: bool = True
) -> tuple[int, int]:
  """Returns a size whose longer side is `edge`, the other `even` if need be."""
  ratio = width / height
  if width >= height:
    width, height = edge, int(edge / ratio)
    height += even and height % 2
  else:
    width, height = int(edge * ratio), edge
    width += even and width % 2
  return max(width, 1), max(height, 1)


def default_settings(
  config: qwen_shapes.QwenVLConfig,
) -> image_settings.ImageSettings:
  """Settings in place of missing files: four tiles a side, as published."""
  vision = config.vision
  values = {
    "image_size": vision.tile_size,
    "max_pixels": (_TILES * vision.tile_size) ** 2,
    "do_image_splitting": True,
    "image_mean": vision.image_mean,
    "image_std": vision.image_std,
  }
  return image_settings.ImageSettings(
    values, f"no processor file: config.json's image_size, {_TILES} a side"
  )


def processor(
  settings: image_settings.ImageSettings,
  config: qwen_shapes.QwenVLConfig,
  pixels: Mapping[str, Any],
  budget: tuple[int, int] | None = None,
) -> SmolVLMProcessor:
  """Returns the host side of a config.

  Args:
    settings: Settings of `image_settings.read`.
    config: Configuration of the model.
    pixels: limits of an image's area that were asked for: `max_pixels` is that
      of a square of the longest edge, rounded down to whole tiles.
    budget: (pixels, images) of a trajectory.

  Raises:
    ValueError: the limits leave no tile.
  """
  vision, tile = config.vision, config.vision.tile_size
  most = settings.values["max_pixels"]
  limits = [pixels.get("max_pixels", most)]
  if budget is not None:
    limits.append(budget[0] // budget[1])
  if min(limits) != most:
    most = (math.isqrt(min(limits)) // tile * tile) ** 2
  if most < tile**2:
    raise ValueError(
      f"max_pixels={pixels.get('max_pixels')}, trajectory_pixels of"
      f" {budget} leave an image {min(limits)} pixels, one tile of"
      f" {tile}x{tile} takes {tile**2}; raise them, or keep fewer images"
    )
  if pixels.get("min_pixels", tile**2) != tile**2:
    raise ValueError(
      f"min_pixels={pixels['min_pixels']}: every image is enlarged to"
      f" {config.family}'s longest edge; leave it out"
    )
  return SmolVLMProcessor(
    patch_size=vision.patch_size,
    merge_size=vision.spatial_merge_size,
    tile_size=tile,
    splits=settings.values["do_image_splitting"],
    min_pixels=tile**2,
    max_pixels=most,
    image_token_id=config.image_token_id,
    mean=settings.values["image_mean"],
    std=settings.values["image_std"],
    source=settings.source,
  )
