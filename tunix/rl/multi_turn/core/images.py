"""Stores screenshots by content.

An `ImageStore` keeps each distinct screenshot once, under the SHA-256 of its
RGB bytes, and hands out `ImageRef`s. Memory is bounded; with a directory,
an evicted image is written there as PNG (lossless: the hash holds) and read
back on demand. Thread-safe.

Promises: `put` writes no file, since it runs on event loops; a background
thread writes images before they are evicted. An image leaves the memory only
once its file is on the disk, so that it can be read at any time; a file that
exists is whole, after a power loss too. If the file cannot be written, the
image stays in memory, beyond the capacity if need be, and the failure is
reported in the log and in `write_failures`. Pixels that are read back are those
that were stored: a damaged file is an error that names it.

Does not delete files.
"""

from __future__ import annotations

import collections
import hashlib
import io
import logging
import pathlib
import threading
import time
from typing import Any
import weakref
import zlib

import numpy as np

from . import durable
from . import trajectory

_LOG = logging.getLogger(__name__)


def hash_pixels(pixels: np.ndarray) -> str:
  """SHA-256 of `"rgb8 WxH\\n"` and the bytes of uint8[H, W, 3] pixels."""
  height, width, _ = pixels.shape
  digest = hashlib.sha256(f"rgb8 {width}x{height}\n".encode())
  digest.update(np.ascontiguousarray(pixels).data)
  return digest.hexdigest()


def decode(content: bytes, max_pixels: int = 16_777_216) -> np.ndarray:
  """uint8[H, W, 3] of a PNG, JPEG or WebP file; pixels are counted first.

  Raises:
    ValueError: it is none, or too large.
  """
  from PIL import Image  # pylint: disable=g-import-not-at-top

  try:
    with Image.open(
      io.BytesIO(content), formats=("PNG", "JPEG", "WEBP")
    ) as image:
      if image.width * image.height > max_pixels:
        raise ValueError(
          f"the image is {image.width}x{image.height}, more than"
          f" max_pixels={max_pixels}"
        )
      return np.array(image.convert("RGB"))
  except (OSError, SyntaxError, Image.DecompressionBombError) as error:
    raise ValueError(f"no image: {error}") from None


def _name(sha: str) -> str:
  return f"{sha}.png"


def _is_constant(pixels: np.ndarray) -> bool:
  """Whether `pixels` is immutable and keeps no larger buffer alive.

  Decoders return such arrays: rows of a `bytes`.
  """
  base: Any = pixels
  while isinstance(base, np.ndarray):
    base = base.base
  return (
    isinstance(base, bytes)
    and len(base) == pixels.nbytes
    and pixels.flags.c_contiguous
  )


_stores: weakref.WeakSet[ImageStore] = weakref.WeakSet()
_stores_lock = threading.Lock()


def find(ref: trajectory.ImageRef) -> np.ndarray | None:
  """Its pixels, uint8[H, W, 3], of whichever store in this process has them.

  None where no store has them any more.
  """
  with _stores_lock:
    stores = list(_stores)
  for store in stores:
    if ref in store:
      try:
        return store.get(ref)
      except (KeyError, OSError, ValueError):  # Gone since, or damaged.
        continue
  return None


CAPACITY_BYTES = 1 << 30
"""Pixels that a store keeps in memory unless it is told otherwise."""


class ImageStore:
  """Bounded, content-addressed store of uint8[H, W, 3] screenshots."""

  def __init__(
    self,
    directory: str | pathlib.Path | None = None,
    capacity_bytes: int = CAPACITY_BYTES,
  ):
    """Args:

    directory: Folder of evicted images, `<sha256>.png`; None forgets them.
    capacity_bytes: pixels kept in memory, in bytes.
    """
    if capacity_bytes <= 0:
      raise ValueError(f"capacity_bytes must be > 0, got {capacity_bytes}")
    self._directory = pathlib.Path(directory) if directory else None
    self._capacity = capacity_bytes
    self._pixels: collections.OrderedDict[str, np.ndarray] = (
      collections.OrderedDict()
    )
    self._bytes = 0
    self._lock = threading.Lock()
    self._evicting: threading.Thread | None = None
    self._failing = False
    self.write_failures = 0
    """Attempts to write an evicted image that failed."""
    with _stores_lock:
      _stores.add(self)

  def put(self, pixels: np.ndarray) -> trajectory.ImageRef:
    """Stores uint8[H, W, 3] pixels and returns their reference."""
    pixels = np.asarray(pixels)
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
      raise ValueError(
        "a screenshot must be uint8[H, W, 3], got"
        f" {pixels.dtype}{list(pixels.shape)}"
      )
    sha = hash_pixels(pixels)
    ref = trajectory.ImageRef(sha, pixels.shape[1], pixels.shape[0])
    with self._lock:
      if sha in self._pixels:
        self._pixels.move_to_end(sha)
        return ref
    stored = pixels
    if not _is_constant(pixels):
      stored = np.array(pixels, copy=True, order="C")
      stored.flags.writeable = False
    self._insert(sha, stored)
    return ref

  def get(self, ref: trajectory.ImageRef) -> np.ndarray:
    """Returns the read-only uint8[H, W, 3] pixels of `ref`.

    Raises:
      KeyError: the image was never stored, or was evicted from a store
        without a directory.
      ValueError: its file is damaged.
    """
    with self._lock:
      pixels = self._pixels.get(ref.sha256)
      if pixels is not None:
        self._pixels.move_to_end(ref.sha256)
        return pixels
    path = self._path(ref.sha256)
    if path is None or not path.exists():
      raise KeyError(
        f"image {ref.sha256[:12]}… is not in the store; raise its capacity"
        f" (now {self._capacity} bytes) or give it a directory"
      )
    from PIL import Image  # pylint: disable=g-import-not-at-top

    try:
      with Image.open(path) as image:
        pixels = np.array(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
      raise _damaged(path, str(error)) from None
    if hash_pixels(pixels) != ref.sha256:
      raise _damaged(path, "its pixels are not those of its name")
    pixels.flags.writeable = False
    self._insert(ref.sha256, pixels)
    return pixels

  def pack(self, ref: trajectory.ImageRef) -> bytes:
    """Compresses the pixels of `ref`. Raises KeyError as `get` does."""
    return zlib.compress(self.get(ref).tobytes(), 1)

  def put_packed(self, ref: trajectory.ImageRef, packed: bytes) -> None:
    """Stores the pixels of `pack`.

    Raises:
      ValueError, zlib.error: they are not those of `ref`.
    """
    pixels = np.frombuffer(zlib.decompress(packed), np.uint8)
    if self.put(pixels.reshape(ref.height, ref.width, 3)) != ref:
      raise ValueError(f"its image {ref.sha256[:12]}… is another one")

  def flush(self, timeout: float | None = None) -> bool:
    """Waits until no eviction is under way.

    Args:
      timeout: seconds; None waits for ever.

    Returns:
      False when time was up.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
      with self._lock:
        thread = self._evicting
      if thread is None:
        return True
      seconds_left = None if deadline is None else deadline - time.monotonic()
      if seconds_left is not None and seconds_left <= 0:
        return False
      thread.join(seconds_left)

  def __contains__(self, ref: trajectory.ImageRef) -> bool:
    with self._lock:
      if ref.sha256 in self._pixels:
        return True
    path = self._path(ref.sha256)
    return path is not None and path.exists()

  def __len__(self) -> int:
    """Images held in memory."""
    with self._lock:
      return len(self._pixels)

  @property
  def nbytes(self) -> int:
    """Bytes of pixels held in memory."""
    with self._lock:
      return self._bytes

  def _path(self, sha: str) -> pathlib.Path | None:
    return self._directory / _name(sha) if self._directory else None

  def _insert(self, sha: str, pixels: np.ndarray) -> None:
    with self._lock:
      if sha in self._pixels:
        return
      self._pixels[sha] = pixels
      self._bytes += pixels.nbytes
      if self._directory is None:
        while self._is_over(self._capacity):
          self._forget(next(iter(self._pixels)))
      elif self._is_over(self._capacity) and self._evicting is None:
        thread = threading.Thread(
          target=self._evict, name="tunix-image-store", daemon=True
        )
        try:
          thread.start()
        except RuntimeError:  # No thread to be had; the next `put` tries again.
          self._failed()
        else:
          self._evicting = thread

  def _is_over(self, limit: int) -> bool:
    """Under the lock. The newest image stays, whatever its size."""
    return self._bytes > limit and len(self._pixels) > 1

  def _forget(self, sha: str) -> None:
    pixels = self._pixels.pop(sha, None)
    if pixels is not None:
      self._bytes -= pixels.nbytes

  def _failed(self) -> None:
    """Under the lock, in the handler of an exception."""
    self.write_failures += 1
    if not self._failing:  # Once, until it works again.
      _LOG.warning(
        "an evicted screenshot cannot be written to %s; screenshots stay in"
        " memory, beyond the capacity of %d bytes",
        self._directory,
        self._capacity,
        exc_info=True,
      )
    self._failing = True

  def _evict(self) -> None:
    """A thread's work: writes the oldest images and lets them go.

    Ends below the capacity, so that a full store does not need a thread for
    every image.
    """
    while True:
      with self._lock:
        if not self._is_over(self._capacity - self._capacity // 8):
          self._evicting = None
          return
        sha, pixels = next(iter(self._pixels.items()))
      try:
        path = self._path(sha)
        if path is not None and not path.exists():
          self._write(path, pixels)
      except Exception:  # pylint: disable=broad-except
        with self._lock:
          self._failed()
          self._evicting = None
        return
      with self._lock:
        self._failing = False
        self._forget(sha)

  def _write(self, path: pathlib.Path, pixels: np.ndarray) -> None:
    from PIL import Image  # pylint: disable=g-import-not-at-top

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{threading.get_ident()}.part")
    try:
      Image.fromarray(pixels).save(partial, format="PNG", compress_level=1)
      durable.sync(partial)  # Before its name says that it is whole.
      partial.replace(path)
    except BaseException:
      partial.unlink(missing_ok=True)
      raise


def _damaged(path: pathlib.Path, reason: str) -> ValueError:
  return ValueError(
    f"{path} is damaged: {reason}; delete it, and a resumed run collects the"
    " groups again that show it"
  )
