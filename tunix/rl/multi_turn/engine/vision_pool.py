"""Which vision tokens lie where in the device's pool.

Promises: an image's vision tokens are found again while they stay in the pool
and the weights' version is the same; what is needed by the call at hand is
never evicted to make room for another of its images.

Does not touch the device: it hands out places, the caller fills them.
Not thread-safe.
"""

from __future__ import annotations

import collections
from typing import Iterable, Sequence

import numpy as np
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import patch_cache


class PatchCache(patch_cache.PatchCache):
  """Here a missing image is an error of the request that shows it."""

  def get(self, span: trajectory.ImageSpan) -> base.PatchedImage:
    """Patches of the span's image.

    Raises:
      ValueError: the image is unknown, or does not become as many tokens as
        the span holds.
    """
    try:
      return super().get(span)
    except KeyError as error:
      raise ValueError(
          f"image {span.image.sha256[:12]}… at token {span.offset} is not in"
          f" the engine's ImageStore: {error.args[0]}"
      ) from error


class VisionPool:
  """Hands out places (indices of vision tokens) to images, by content."""

  def __init__(self, capacity: int):
    """Args:

      capacity: vision tokens the pool holds.
    """
    self.capacity = capacity
    self._places: collections.OrderedDict[str, np.ndarray] = (
        collections.OrderedDict()
    )
    self._free = np.arange(capacity - 1, -1, -1, dtype=np.int32)
    self._num_free = capacity

  def clear(self) -> None:
    """Forgets every image: the weights changed, or the pool was reset."""
    self._places.clear()
    self._free = np.arange(self.capacity - 1, -1, -1, dtype=np.int32)
    self._num_free = self.capacity

  def __len__(self) -> int:
    return len(self._places)

  def __contains__(self, sha: str) -> bool:
    return sha in self._places

  def places(self, sha: str) -> np.ndarray:
    """int32[num_tokens] places of an image that `reserve` has admitted."""
    return self._places[sha]

  def fits(self, spans: Iterable[trajectory.ImageSpan]) -> bool:
    """Whether these images can be in the pool at one time."""
    sizes = {s.image.sha256: s.num_tokens for s in spans}
    return sum(sizes.values()) <= self.capacity

  def reserve(
      self, spans: Sequence[trajectory.ImageSpan]
  ) -> list[trajectory.ImageSpan]:
    """Gives every image a place; returns one span of each that is new.

    The caller encodes the new ones into `places` before anything reads them.
    """
    needed = {s.image.sha256: s for s in spans}
    new = []
    for sha, span in needed.items():
      if sha in self._places:
        self._places.move_to_end(sha)
      else:
        new.append(span)
    room = sum(s.num_tokens for s in new)
    for sha in list(self._places):
      if self._num_free >= room:
        break
      if sha not in needed:
        self._release(sha)
    if self._num_free < room:
      raise ValueError(
          f"{len(needed)} images need {room} more vision tokens than the pool"
          f" of {self.capacity} can free; raise vision_cache_tokens"
      )
    for span in new:
      self._num_free -= span.num_tokens
      end = self._num_free + span.num_tokens
      self._places[span.image.sha256] = self._free[self._num_free : end].copy()
    return new

  def forget(self, sha: str) -> None:
    """Takes a place back, e.g. when encoding failed."""
    if sha in self._places:
      self._release(sha)

  def _release(self, sha: str) -> None:
    places = self._places.pop(sha)
    self._free[self._num_free : self._num_free + len(places)] = places
    self._num_free += len(places)
