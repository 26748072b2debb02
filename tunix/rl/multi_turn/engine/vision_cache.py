"""Keeps the vision tokens of prompts' images on the device.

`PatchCache` keeps patches on the host, `VisionPool` hands out places in the
device's pool of vision tokens, `VisionCache` encodes images that are not in it.

On a mesh the pool is split into shards, each with an order of its own: images
are given with the shard whose rows read them.

Promises: an image is encoded once for a shard, while it stays there and the
weights are the same; no image of a call is evicted for another of the same
call; an image that cannot be had fails with an error that names it.

Not thread-safe: the engine's thread owns it.

Axis names: see `programs`.
"""

from __future__ import annotations

import collections
from typing import Callable, Iterable, Sequence

import jax
import numpy as np
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import buckets as buckets_lib
from tunix.rl.multi_turn.engine import programs as programs_lib
from tunix.rl.multi_turn.engine import requests as requests_lib
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import patch_cache

Placed = tuple[int, trajectory.ImageSpan]
"""A shard, and an image that its rows read."""


class PatchCache(patch_cache.PatchCache):
  """A patch cache whose missing images are errors of their requests."""

  def get(self, span: trajectory.ImageSpan) -> base.PatchedImage:
    """Returns the patches of the span's image.

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
  """Hands out places (indices of vision tokens) to images, by content.

  Does not touch the device: its caller fills the places.
  """

  def __init__(
    self,
    capacity: int,
    size_of: Callable[[trajectory.ImageSpan], int] = lambda s: s.num_tokens,
  ):
    """Args:

    capacity: vision tokens that the pool, or a shard of it, holds.
    size_of: Returns the vision tokens of a span's image.
    """
    self.capacity = capacity
    self._size_of = size_of
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
    """Returns int32[num_tokens], places of an image that `reserve` took."""
    return self._places[sha]

  def fits(self, spans: Iterable[trajectory.ImageSpan]) -> bool:
    """Returns whether the pool can hold these images at one time."""
    sizes = {s.image.sha256: self._size_of(s) for s in spans}
    return sum(sizes.values()) <= self.capacity

  def reserve(
    self, spans: Sequence[trajectory.ImageSpan]
  ) -> list[trajectory.ImageSpan]:
    """Gives every image a place; returns one span of each new image.

    The caller encodes the new ones into `places` before anything reads them.

    Raises:
      ValueError: the images do not fit.
    """
    needed = {s.image.sha256: s for s in spans}
    new = []
    for sha, span in needed.items():
      if sha in self._places:
        self._places.move_to_end(sha)
      else:
        new.append(span)
    room = sum(map(self._size_of, new))
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
      end = self._num_free
      self._num_free -= self._size_of(span)
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


class VisionCache:
  """Encodes images into the device's pool and finds their places."""

  def __init__(
    self,
    programs: programs_lib.Programs,
    patches: PatchCache,
    counters: requests_lib.Counters,
    buckets: buckets_lib.Buckets,
  ):
    """Args:

    programs: the device side.
    patches: makes images' patches.
    counters: added to.
    buckets: shapes of encode calls.
    """
    self._programs = programs
    self._patches = patches
    self._counters = counters
    self._buckets = buckets
    self._pools = [
      VisionPool(programs.state.vision_tokens, self._size_of)
      for _ in range(programs.state.shards)
    ]

  def _size_of(self, span: trajectory.ImageSpan) -> int:
    image = span.image
    processor = self._programs.state.processor
    return processor.num_image_tokens(image.width, image.height)

  def clear(self) -> None:
    """Forgets every image: the weights changed, or the pool was reset."""
    for pool in self._pools:
      pool.clear()

  def fits(self, spans: Sequence[Placed]) -> bool:
    """Returns whether the devices can hold these images at one time."""
    return all(
      pool.fits(span for s, span in spans if s == shard)
      for shard, pool in enumerate(self._pools)
    )

  def places(self, shard: int, span: trajectory.ImageSpan) -> np.ndarray:
    """Returns int32[num_tokens], the shard's places of an ensured image."""
    return self._pools[shard].places(span.image.sha256)

  def check(self, spans: Sequence[Placed]) -> None:
    """Cuts the images that are not on the device yet into patches.

    Raises:
      ValueError: An image is missing or too large, or all together do not fit.
    """
    largest = self._buckets.patches[-1]
    for shard, span in spans:
      if span.image.sha256 in self._pools[shard]:
        continue
      patched = self._patches.get(span)
      if len(patched.patches) > largest:
        size = f"{span.image.width}x{span.image.height}"
        raise ValueError(
          f"an image of {size} has {len(patched.patches)} patches, the engine"
          f" takes up to {largest}: send a smaller one, serve with --screen"
          f" {size}, or raise engine.patch_buckets"
        )
    if not self.fits(spans):
      shards = len(self._pools)
      raise ValueError(
        f"{len(spans)} images of one chunk do not fit the vision pool of"
        f" {self._pools[0].capacity} tokens"
        + f", a shard of {shards}," * (shards > 1)
        + "; raise vision_cache_tokens"
      )

  def ensure(self, spans: Sequence[Placed]) -> None:
    """Encodes those images whose vision tokens are not in their shard."""
    if not spans:
      return
    with self._counters.spending("vision"):
      distinct = len({(shard, s.image.sha256) for shard, s in spans})
      new: list[Placed] = []
      groups: dict[int, list[Placed]] = {}
      try:
        for shard, pool in enumerate(self._pools):
          own = [span for s, span in spans if s == shard]
          if own:
            new += [(shard, span) for span in pool.reserve(own)]
        self._counters.vision_cache_hits += distinct - len(new)
        for shard, span in new:
          count = len(self._patches.get(span).patches)
          size = buckets_lib.smallest(self._buckets.patches, count)
          groups.setdefault(size, []).append((shard, span))
        for size, group in groups.items():
          for call in buckets_lib.deal(
            [shard for shard, _ in group],
            self._buckets.images,
            len(self._pools),
          ):
            self._encode([group[item] for item in call.items], call, size)
        jax.block_until_ready(self._programs.state.pool)
      except BaseException:
        for shard, span in new:
          self._pools[shard].forget(span.image.sha256)
        raise

  def _encode(
    self, spans: Sequence[Placed], call: buckets_lib.Call, size: int
  ) -> None:
    count = call.size
    state = self._programs.state
    processor = state.processor
    patches = np.zeros((count, size, processor.patch_bytes), np.uint8)
    real = np.zeros((count, size), bool)
    positions = np.zeros((count, size, processor.position_axes), np.int32)
    destination = np.full(
      (count, size // processor.patches_per_token),
      state.vision_tokens,
      np.int32,
    )
    for i, (shard, span) in zip(call.rows, spans, strict=True):
      patched = self._patches.get(span)
      n = len(patched.patches)
      patches[i, :n] = patched.patches
      real[i, :n] = True
      positions[i, :n] = patched.positions
      places = self.places(shard, span)
      destination[i, : len(places)] = places
    self._programs.encode(patches, real, positions, destination)
    self._counters.images_encoded += len(spans)
