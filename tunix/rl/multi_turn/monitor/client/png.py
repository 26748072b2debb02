"""Encodes pixels as PNG, without blocking the process.

Lossless, so the hash of the pixels holds. zlib lets other threads run while
it works; filtering is numpy's.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

_UP = 2


def encode(pixels: np.ndarray) -> bytes:
  """The PNG of uint8[H, W, 3] pixels.

  Raises:
    ValueError: they are of another shape or type.
  """
  if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
    raise ValueError(
        f"need uint8[H, W, 3], got {pixels.dtype}{list(pixels.shape)}"
    )
  height, width, _ = pixels.shape
  rows = np.empty((height, 1 + 3 * width), np.uint8)
  rows[:, 0] = _UP  # Each row as its difference to the one above.
  flat = pixels.reshape(height, 3 * width)
  rows[:1, 1:] = flat[:1]
  np.subtract(flat[1:], flat[:-1], out=rows[1:, 1:])
  header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
  return b"".join((
      b"\x89PNG\r\n\x1a\n",
      _chunk(b"IHDR", header),
      _chunk(b"IDAT", zlib.compress(rows, 3)),
      _chunk(b"IEND", b""),
  ))


def _chunk(name: bytes, data: bytes) -> bytes:
  check = zlib.crc32(data, zlib.crc32(name))
  return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)
