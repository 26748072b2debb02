"""Caches patched images by content; the engine and the learner each own one.

Promises: an image is patchified once while it stays in the cache; the cache is
bounded in bytes, except that one image always fits.

Does not: lock; one thread uses a cache.
"""

from __future__ import annotations

import collections

from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.policy import base


class PatchCache:
  """Patched images by hash, the least recently used leaves first."""

  def __init__(
    self,
    store: images_lib.ImageStore,
    processor: base.Processor,
    capacity_bytes: int = 256 << 20,
  ):
    """Args:

    store: Store of the images' pixels.
    processor: Processor of the policy.
    capacity_bytes: patches kept, in bytes.
    """
    self._store = store
    self._processor = processor
    self._capacity = capacity_bytes
    self._images: collections.OrderedDict[str, base.PatchedImage] = (
      collections.OrderedDict()
    )
    self._bytes = 0
    self.misses = 0

  def get(self, span: trajectory.ImageSpan) -> base.PatchedImage:
    """Returns the patches of the span's image.

    Raises:
      KeyError: the store no longer has it.
      ValueError: it does not become as many tokens as the span holds.
    """
    image = span.image
    patched = self._images.get(image.sha256)
    if patched is not None:
      self._images.move_to_end(image.sha256)
    else:
      self.misses += 1
      patched = self._processor.patchify(self._store.get(image))
      self._images[image.sha256] = patched
      self._bytes += patched.patches.nbytes
      while self._bytes > self._capacity and len(self._images) > 1:
        _, old = self._images.popitem(last=False)
        self._bytes -= old.patches.nbytes
    # Placeholders of several runs are counted by `Processor.positions`.
    if not span.row and patched.num_tokens != span.num_tokens:
      raise ValueError(
        f"image {image.sha256[:12]}… of {image.width}x{image.height} becomes"
        f" {patched.num_tokens} tokens, the prompt holds {span.num_tokens}"
        f" placeholders for it at token {span.offset}"
      )
    return patched
