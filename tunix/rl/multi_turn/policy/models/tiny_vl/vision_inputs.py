"""Prepares TinyVL's inputs: screenshots to patches and positions. Numpy only.

A patch is a cell of 16x16 pixels with a halo of 4 pixels on each side, so
that the convolutional stem sees across cell borders although patches lie in
one flat buffer. Outside the image the edge pixel is repeated; sides that are
no multiple of 16 are filled up on the right and below in the same way. One
patch becomes one vision token.

A patch's position is the centre of its cell's part of the image, as a
fraction of the image's height and width, in units of 1/POSITION_UNIT: a
coordinate means the same for screenshots of every size.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.policy import base

CELL = 16
HALO = 4
WINDOW = CELL + 2 * HALO
POSITION_UNIT = 1 << 16


class TinyVLProcessor:
  """`base.Processor` of TinyVL; stateless and thread-safe."""

  patch_bytes = WINDOW * WINDOW * 3
  patches_per_token = 1
  position_axes = 2

  def __init__(self, max_cells: int = 1600):
    """Args:

    max_cells: screenshots of more cells than this are refused.
    """
    self.max_cells = max_cells

  def num_image_tokens(self, width: int, height: int) -> int:
    """Cells of a screenshot of width x height pixels.

    Raises:
      ValueError: the size is not positive or gives more than max_cells.
    """
    if width <= 0 or height <= 0:
      raise ValueError(f"screenshot size must be > 0, got {width}x{height}")
    cells = -(-width // CELL) * -(-height // CELL)
    if cells > self.max_cells:
      raise ValueError(
        f"a {width}x{height} screenshot needs {cells} cells of {CELL} pixels,"
        f" this policy takes {self.max_cells}; make the gym's screen smaller"
        " or raise max_cells"
      )
    return cells

  def patchify(self, pixels: np.ndarray) -> base.PatchedImage:
    """Cuts uint8[H, W, 3] into cells in raster order.

    Raises:
      ValueError: wrong dtype or shape, or too large an image.
    """
    pixels = np.asarray(pixels)
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
      raise ValueError(
        f"pixels must be uint8[H, W, 3], got {pixels.dtype}{list(pixels.shape)}"
      )
    height, width, _ = pixels.shape
    num_tokens = self.num_image_tokens(width, height)
    rows, cols = -(-height // CELL), -(-width // CELL)
    y = np.clip(np.arange(-HALO, rows * CELL + HALO), 0, height - 1)
    x = np.clip(np.arange(-HALO, cols * CELL + HALO), 0, width - 1)
    padded = pixels[y[:, None], x[None, :]]
    windows = np.lib.stride_tricks.as_strided(
      padded,
      (rows, cols, WINDOW, WINDOW, 3),
      (CELL * padded.strides[0], CELL * padded.strides[1], *padded.strides),
      writeable=False,
    )
    patches = windows.reshape(num_tokens, self.patch_bytes)
    positions = np.empty((rows, cols, 2), np.int32)
    positions[..., 0] = _centres(rows, height)[:, None]
    positions[..., 1] = _centres(cols, width)[None, :]
    return base.PatchedImage(patches, positions.reshape(-1, 2), num_tokens)

  def positions(
    self,
    tokens: np.ndarray,
    images: Sequence[trajectory.ImageSpan] = (),
    start: int = 0,
  ) -> np.ndarray:
    """Returns int32[T - start, 3]: 0, 1, 2, … on all three axes."""
    del images  # Vision tokens count like any other.
    index = np.arange(start, len(tokens), dtype=np.int32)
    return np.repeat(index[:, None], 3, axis=1)


def _centres(cells: int, side: int) -> np.ndarray:
  """Centres of the cells along a side of `side` pixels, in POSITION_UNITs."""
  begin = np.arange(cells) * CELL
  end = np.minimum(begin + CELL, side)
  return np.rint((begin + end) * (0.5 * POSITION_UNIT / side))
