"""Gets the vision tokens of prompts' images onto the device.

Promises: an image is encoded once while it stays in the pool and the weights
are the same; one that cannot be had fails with an error that names it.

Not thread-safe: the engine's thread owns it.

Axis names: see `programs`.
"""

from __future__ import annotations

import time
from typing import Sequence

import jax
import numpy as np
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import buckets as buckets_lib
from tunix.rl.multi_turn.engine import programs as programs_lib
from tunix.rl.multi_turn.engine import requests as requests_lib
from tunix.rl.multi_turn.engine import vision_pool


class VisionFeed:
  """Encodes images into the device's pool and says where they lie."""

  def __init__(
      self,
      programs: programs_lib.Programs,
      patches: vision_pool.PatchCache,
      counters: requests_lib.Counters,
      image_buckets: tuple[int, ...],
      patch_buckets: tuple[int, ...],
  ):
    """Args:

      programs: the device side.
      patches: where images' patches come from.
      counters: added to.
      image_buckets: images of an encode call.
      patch_buckets: patches of an image.
    """
    self._programs = programs
    self._patches = patches
    self._counters = counters
    self._image_buckets = image_buckets
    self._patch_buckets = patch_buckets
    self._pool = vision_pool.VisionPool(programs.vision_tokens)

  def clear(self) -> None:
    """Forgets every image: the weights changed, or the pool was reset."""
    self._pool.clear()

  def fits(self, spans: Sequence[trajectory.ImageSpan]) -> bool:
    """Whether these images can be on the device at one time."""
    return self._pool.fits(spans)

  def places(self, span: trajectory.ImageSpan) -> np.ndarray:
    """int32[num_tokens] places in the pool of an image that `ensure` put."""
    return self._pool.places(span.image.sha256)

  def check(self, spans: Sequence[trajectory.ImageSpan]) -> None:
    """Reads what is not on the device yet.

    Raises:
      ValueError: an image cannot be had, or they do not fit.
    """
    largest = self._patch_buckets[-1]
    for span in spans:
      if span.image.sha256 in self._pool:
        continue
      patched = self._patches.get(span)
      if len(patched.patches) > largest:
        raise ValueError(
            f"an image of {span.image.width}x{span.image.height} has"
            f" {len(patched.patches)} patches, more than the engine's largest"
            f" patch bucket, {largest}; raise patch_buckets"
        )
    if not self._pool.fits(spans):
      raise ValueError(
          f"{len(spans)} images of one chunk do not fit the vision pool of"
          f" {self._pool.capacity} tokens; raise vision_cache_tokens"
      )

  def ensure(self, spans: Sequence[trajectory.ImageSpan]) -> None:
    """Encodes those images whose vision tokens are not in the pool."""
    if not spans:
      return
    started = time.perf_counter()
    distinct = len({s.image.sha256 for s in spans})
    new = self._pool.reserve(spans)
    self._counters.vision_cache_hits += distinct - len(new)
    groups: dict[int, list[trajectory.ImageSpan]] = {}
    try:
      for span in new:
        patched = self._patches.get(span)
        size = buckets_lib.smallest(self._patch_buckets, len(patched.patches))
        groups.setdefault(size, []).append(span)
      for size, group in groups.items():
        most = self._image_buckets[-1]
        for i in range(0, len(group), most):
          self._encode(group[i : i + most], size)
      jax.block_until_ready(self._programs.pool)
    except BaseException:
      for span in new:
        self._pool.forget(span.image.sha256)
      raise
    self._counters.seconds_vision += time.perf_counter() - started

  def _encode(
      self, spans: Sequence[trajectory.ImageSpan], size: int
  ) -> None:
    count = buckets_lib.smallest(self._image_buckets, len(spans))
    programs = self._programs
    patches = np.zeros((count, size, programs.patch_bytes), np.uint8)
    real = np.zeros((count, size), bool)
    positions = np.zeros((count, size, programs.position_axes), np.int32)
    destination = np.full(
        (count, size // programs.patches_per_token),
        programs.vision_tokens,
        np.int32,
    )
    for i, span in enumerate(spans):
      patched = self._patches.get(span)
      n = len(patched.patches)
      patches[i, :n] = patched.patches
      real[i, :n] = True
      positions[i, :n] = patched.positions
      places = self.places(span)
      destination[i, : len(places)] = places
    programs.encode(patches, real, positions, destination)
    self._counters.images_encoded += len(spans)
