"""Patched images are kept by content, within bounds."""

import numpy as np
import pytest
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import vision_cache
from tunix.rl.multi_turn.policy import patch_cache
from tunix.rl.multi_turn.policy.models.tiny_vl import vision_inputs

PROCESSOR = vision_inputs.TinyVLProcessor()


def _spans(store, count):
  rng = np.random.default_rng(0)
  for _ in range(count):
    pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    yield trajectory.ImageSpan(store.put(pixels), 0, 4)


def test_the_cache_is_bounded_and_hits():
  store = images.ImageStore()
  first, *further = _spans(store, 5)
  one = PROCESSOR.patchify(store.get(first.image)).patches.nbytes
  cache = patch_cache.PatchCache(store, PROCESSOR, capacity_bytes=2 * one)
  for _ in range(3):
    cache.get(first)
  assert cache.misses == 1
  for span in further:
    cache.get(span)
    assert cache._bytes <= 2 * one  # pylint: disable=protected-access
  assert cache.misses == 5
  cache.get(further[-2])
  assert cache.misses == 5
  cache.get(first)
  assert cache.misses == 6


def test_missing_and_mismatched_images_are_refused():
  store = images.ImageStore()
  (span,) = _spans(store, 1)
  wrong = trajectory.ImageSpan(span.image, 7, 3)
  for cache in (
    patch_cache.PatchCache(store, PROCESSOR),
    vision_cache.PatchCache(store, PROCESSOR),
  ):
    for _ in range(2):  # Patchified and from the cache.
      with pytest.raises(ValueError, match="4 tokens, the prompt holds 3"):
        cache.get(wrong)
    assert cache.misses == 1
  empty = images.ImageStore()
  with pytest.raises(KeyError, match="not in the store"):
    patch_cache.PatchCache(empty, PROCESSOR).get(span)
  # To the engine it is a bad request.
  with pytest.raises(ValueError, match="at token 0 is not in the engine"):
    vision_cache.PatchCache(empty, PROCESSOR).get(span)
