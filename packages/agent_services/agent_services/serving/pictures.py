"""Decodes untrusted encoded pictures to opaque RGB with Pillow.

Pillow spends most of a screenshot's time inflating: its wheels use the system's
zlib, several times slower than zlib-ng. So a plain PNG (one run of pixel data,
not interlaced) is inflated here, and Pillow reads the same file with its pixel
data stored instead of compressed: filters, palettes, transparency and depths
stay Pillow's work. Any other file goes to Pillow unchanged, which also decides
what to refuse.

Promises: pixels are counted before they are decoded; inflating stops after a
picture's pixels; pixels equal those that Pillow decodes from the file itself.
Inflating releases the GIL.

Does not apply EXIF rotation, or play animations (refused).
"""

from __future__ import annotations

import io
import struct

import numpy as np
from PIL import Image
from zlib_ng import zlib_ng

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # By colour type.
_END = b"\0\0\0\0IEND\xaeB`\x82"
_SMALL = 1 << 16  # Bytes of pixels below which inflating here gains nothing.


class PictureError(ValueError):
  """A refused picture; `code` is image_too_large or invalid_image."""

  def __init__(self, code: str, message: str):
    super().__init__(message)
    self.code = code


def decode(data: bytes, max_pixels: int) -> np.ndarray:
  """Returns uint8[H, W, 3] of a PNG, JPEG, WebP or GIF; transparency shows
  white.

  Args:
    data: Bytes of a whole file.
    max_pixels: Largest product of width and height; at most Pillow's own limit.

  Raises:
    PictureError: why not, and what to do.
  """
  try:
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
      if image.width * image.height > max_pixels:
        raise Image.DecompressionBombError(f"{image.width}×{image.height}")
      # A photograph with its depth map (MPO) is one picture.
      animated = getattr(image, "is_animated", False)
      if animated and image.format != "MPO":
        raise PictureError("invalid_image", "animated; send one frame as PNG")
      same = stored(data) if image.format == "PNG" else None
      if same is None:
        return _to_rgb(image)
    with Image.open(io.BytesIO(same), formats=("PNG",)) as image:
      return _to_rgb(image)
  except (Image.DecompressionBombError, Image.DecompressionBombWarning) as e:
    raise PictureError(
      "image_too_large",
      f"too many pixels ({e}), max_pixels is {max_pixels}; send a smaller"
      " image",
    ) from None
  except (PictureError, MemoryError):
    raise
  except Exception as e:  # Broken files make decoders raise anything.
    raise PictureError(
      "invalid_image",
      f"no readable PNG, JPEG, WebP or GIF ({type(e).__name__}); send a"
      " whole file of one of these",
    ) from e


def stored(data: bytes) -> bytes | None:
  """Returns the PNG with its pixel data stored instead of compressed; None
  where Pillow reads the file itself.

  Args:
    data: Bytes of a PNG whose size was checked.
  """
  try:
    size = _raw_size(data)
    head, compressed = _pixel_data(data) if size >= _SMALL else (b"", b"")
    if not compressed:
      return None
    inflate = zlib_ng.decompressobj()
    raw = inflate.decompress(compressed, size + 1)
    # With one byte more or less, Pillow decides.
    if len(raw) != size or not inflate.eof or inflate.unused_data:
      return None
    body = zlib_ng.compress(raw, 0)
  except (struct.error, zlib_ng.error):  # type: ignore[misc]  # Of its stub.
    return None
  name = b"IDAT"
  check = zlib_ng.crc32(body, zlib_ng.crc32(name))
  return b"".join((
      head, struct.pack(">I", len(body)), name, body,
      struct.pack(">I", check), _END,
  ))  # fmt: skip


def _raw_size(data: bytes) -> int:
  """Returns the size of the inflated pixel data; 0 for an unusual PNG."""
  if data[:8] != _SIGNATURE or data[12:16] != b"IHDR":
    return 0
  width, height, depth, colour, _, _, interlaced = struct.unpack_from(
    ">IIBBBBB", data, 16
  )
  if interlaced or colour not in _CHANNELS:
    return 0
  # A filter's number stands before each row.
  return height * (1 + (width * depth * _CHANNELS[colour] + 7) // 8)


def _pixel_data(data: bytes) -> tuple[bytes, bytes]:
  """Returns the bytes before the pixel data, and the pixel data; empty where
  anything but the end comes after it."""
  at, begin, parts = 8, 0, []
  view = memoryview(data)
  while at < len(data):
    length, name = struct.unpack_from(">I4s", data, at)
    if name == b"IDAT":
      begin = begin or at
      parts.append(view[at + 8 : at + 8 + length])
    elif begin:
      plain = data[at:] == _END
      return (data[:begin], b"".join(parts)) if plain else (b"", b"")
    at += 12 + length
  return b"", b""


def _to_rgb(image: Image.Image) -> np.ndarray:
  """Returns uint8[H, W, 3]; transparent parts become white."""
  if image.mode.startswith("I"):  # 16-bit grey, which `convert` would clip.
    grey = (np.asarray(image) >> 8).astype(np.uint8)
    return np.repeat(grey[:, :, None], 3, axis=2)
  if image.has_transparency_data:
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    image = Image.alpha_composite(white, image)
  # `convert` would copy a picture that is RGB already.
  return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
