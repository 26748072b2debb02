"""Encodes images as the data URLs that OpenAI's clients send.

Promises: a cached image is encoded once, however many callers ask for it; the
encoding is lossless, so the decoded image, unless it is resized, has the same
SHA-256; no image is encoded on an event loop; memory is bounded.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import concurrent.futures
import io
import threading
from typing import Callable

import numpy as np

from ..core import images
from ..core import trajectory

_KEPT = 1024  # Images; a screenshot's URL has some 10 to 500 KB.


class DataUrls:
  """Data URLs of one store's images. Thread-safe; serves any event loops."""

  def __init__(
    self,
    store: images.ImageStore,
    capacity: int = _KEPT,
    resize: Callable[[np.ndarray], np.ndarray] | None = None,
  ):
    """Args:

    store: holds the pixels.
    kept: URLs cached; the least recently used are evicted first.
    resize: Maps the uint8[H, W, 3] pixels to those that are encoded.
    """
    if capacity < 1:
      raise ValueError(f"kept must be >= 1, got {capacity}")
    self._store, self._resize = store, resize
    self._kept = capacity
    self._lock = threading.Lock()
    self._urls: collections.OrderedDict[str, concurrent.futures.Future[str]] = (
      collections.OrderedDict()
    )
    self._threads = concurrent.futures.ThreadPoolExecutor(1, "tunix-data-urls")

  async def of(self, image: trajectory.ImageRef) -> str:
    """The URL.

    Raises:
      KeyError: the store does not have the image any more.
    """
    with self._lock:
      url = self._urls.get(image.sha256)
      if url is None:
        url = self._threads.submit(self._encode, image)
        self._urls[image.sha256] = url
        if len(self._urls) > self._kept:
          self._urls.popitem(last=False)
      else:
        self._urls.move_to_end(image.sha256)
    if url.done() and url.exception() is None:
      return url.result()
    try:
      # Shielded: other callers may wait for it.
      return await asyncio.shield(asyncio.wrap_future(url))
    except Exception:  # The next to ask tries again.
      with self._lock:
        if self._urls.get(image.sha256) is url:
          del self._urls[image.sha256]
      raise

  def close(self) -> None:
    """Ends the thread. Idempotent."""
    self._threads.shutdown(wait=False, cancel_futures=True)

  def _encode(self, image: trajectory.ImageRef) -> str:
    from PIL import Image  # pylint: disable=g-import-not-at-top

    out = io.BytesIO()
    pixels = self._store.get(image)
    if self._resize is not None:
      pixels = self._resize(pixels)
    Image.fromarray(pixels).save(out, format="PNG", compress_level=1)
    data = base64.b64encode(out.getvalue()).decode()
    return f"data:image/png;base64,{data}"
