"""Groups turns by their number, and by the screenshots that precede them.

Groups grow with the number, so that an episode of 60 turns has seven curves
and not 60. Their names stand behind a metric's, as in
`sampler_kl_by_turn/03-04`, and sort as they count.

Axis names: T = tokens of a sequence.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from .. import trajectory

NAMES = ("00", "01", "02", "03-04", "05-08", "09-16", "17-32", "33+")
"""Groups of numbers from 0."""
_FROM = (1, 2, 3, 5, 9, 17, 33)

By = Literal["turn", "images"]
BY: tuple[By, ...] = ("turn", "images")


def group_of(numbers: np.ndarray | int) -> np.ndarray:
  """Places in `NAMES` of numbers >= 0."""
  return np.searchsorted(_FROM, numbers, side="right")


def tokens_T(sequence: trajectory.TokenSequence, by: By) -> np.ndarray:
  """int[T], the group of each token's turn (the first is 1) or of the number
  of images before it in the sequence."""
  if by == "turn":
    return group_of(sequence.turn_ids + 1)
  offsets = np.sort([span.offset for span in sequence.images])
  places = np.arange(len(sequence.tokens))
  return group_of(np.searchsorted(offsets, places, side="right"))


STREAM = "turn_group"
"""Name of `stream_T` among an example's streams."""


def stream_T(sequence: trajectory.TokenSequence) -> np.ndarray:
  """float32[T], a token's groups in one number: turn x len(NAMES) + images."""
  by_turn, by_images = (tokens_T(sequence, by) for by in BY)
  return (by_turn * len(NAMES) + by_images).astype(np.float32)
