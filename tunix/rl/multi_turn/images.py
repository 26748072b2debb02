"""Screenshots by content.

An `ImageStore` keeps each distinct screenshot once, under the SHA-256 of its
RGB bytes, and hands out `ImageRef`s. Memory is bounded; with a directory,
what falls out of memory is written there as PNG (lossless: the hash holds) and
read back on demand. Thread-safe.

Does not encode anything on `put`: a PNG is written only on eviction or by
`save`, and neither belongs on an event loop.
"""

from __future__ import annotations

import collections
import hashlib
import pathlib
import threading

import numpy as np
from tunix.rl.multi_turn import trajectory


def hash_pixels(pixels: np.ndarray) -> str:
  """SHA-256 of `"rgb8 WxH\\n"` and the bytes of uint8[H, W, 3] pixels."""
  height, width, _ = pixels.shape
  digest = hashlib.sha256(f"rgb8 {width}x{height}\n".encode())
  digest.update(np.ascontiguousarray(pixels))
  return digest.hexdigest()


class ImageStore:
  """Bounded, content-addressed store of uint8[H, W, 3] screenshots."""

  def __init__(
      self,
      directory: str | pathlib.Path | None = None,
      capacity_bytes: int = 1 << 30,
  ):
    """Args:

      directory: where evicted and saved images are written as
        `<sha256>.png`; None keeps images in memory only.
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
    kept = np.array(pixels, copy=True, order="C")
    kept.flags.writeable = False
    self._insert(sha, kept)
    return ref

  def get(self, ref: trajectory.ImageRef) -> np.ndarray:
    """Returns the read-only uint8[H, W, 3] pixels of `ref`.

    Raises:
      KeyError: the image was never stored, or was evicted from a store
        without a directory.
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

    with Image.open(path) as image:
      pixels = np.array(image.convert("RGB"))
    pixels.flags.writeable = False
    self._insert(ref.sha256, pixels)
    return pixels

  def save(self, ref: trajectory.ImageRef) -> pathlib.Path:
    """Writes `ref` as PNG into the directory, once; returns its path."""
    path = self._path(ref.sha256)
    if path is None:
      raise ValueError("this ImageStore has no directory to save into")
    if not path.exists():
      self._write(path, self.get(ref))
    return path

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
    return self._directory / f"{sha}.png" if self._directory else None

  def _insert(self, sha: str, pixels: np.ndarray) -> None:
    evicted = []
    with self._lock:
      if sha in self._pixels:
        return
      self._pixels[sha] = pixels
      self._bytes += pixels.nbytes
      while self._bytes > self._capacity and len(self._pixels) > 1:
        old, old_pixels = self._pixels.popitem(last=False)
        self._bytes -= old_pixels.nbytes
        evicted.append((old, old_pixels))
    for old, old_pixels in evicted:
      path = self._path(old)
      if path is not None and not path.exists():
        self._write(path, old_pixels)

  def _write(self, path: pathlib.Path, pixels: np.ndarray) -> None:
    from PIL import Image  # pylint: disable=g-import-not-at-top

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{threading.get_ident()}.part")
    Image.fromarray(pixels).save(partial, format="PNG", compress_level=1)
    partial.replace(path)
