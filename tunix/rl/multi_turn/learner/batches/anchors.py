"""Digests screenshots so that a moving clock makes no new state.

GiGPO compares turns that began in the same state. By default two states are the
same if their observations are, to the last pixel: a clock in the corner then
leaves no two. `Looks` covers the masked parts of a screenshot before it is
digested, and may reduce the rest to the brightness of coarse cells, which a
blinking caret or the rounding of a video codec does not change.

Does not: change what the policy sees, or digest text.
"""

from __future__ import annotations

import hashlib
from typing import Sequence

import numpy as np
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner import config as config_lib

_LEVEL = 16
"""Steps of brightness, of 256, that count as one."""


class Looks:
  """Digest of an image; each image is decoded once."""

  def __init__(
    self, store: images.ImageStore, mask: Sequence[float] = (), cells: int = 0
  ):
    """Args:

    store: Holds the screenshots.
    mask: left, top, right, bottom of each part to leave out, as shares of
      the screen.
    cells: Cells along each side that the rest is reduced to; 0 keeps every
      pixel.
    """
    self._store = store
    self._mask = np.reshape(np.asarray(mask, np.float64), (-1, 4))
    self._cells = cells
    self._digests: dict[str, str] = {}

  def __call__(self, image: trajectory.ImageRef) -> str:
    """Returns the digest; that of the exact bytes where they are gone."""
    digest = self._digests.get(image.sha256)
    if digest is None:
      try:
        pixels = self._store.get(image)
      except KeyError:
        return image.sha256
      digest = self._digests[image.sha256] = self._digest(pixels)
    return digest

  def _digest(self, pixels: np.ndarray) -> str:
    covered = pixels.copy()
    height, width = covered.shape[:2]
    for x1, y1, x2, y2 in self._mask:
      # Outwards: a part's edge pixels may belong to the clock.
      rows = slice(int(y1 * height), int(np.ceil(y2 * height)))
      columns = slice(int(x1 * width), int(np.ceil(x2 * width)))
      covered[rows, columns] = 0
    if self._cells:
      from PIL import Image  # pylint: disable=g-import-not-at-top

      grey = Image.fromarray(covered).convert("L")
      small = grey.resize((self._cells, self._cells), Image.Resampling.BOX)
      covered = np.asarray(small) // _LEVEL
    size = f"{width}x{height}/".encode()
    return hashlib.sha256(size + covered.tobytes()).hexdigest()


def look_of(
  config: config_lib.AlgorithmConfig, store: images.ImageStore
) -> Looks | None:
  """Returns the digest that the settings choose; None for the exact bytes."""
  if not (config.gigpo_mask or config.gigpo_cells):
    return None
  return Looks(store, config.gigpo_mask, config.gigpo_cells)
