"""Pictures decoded by a detour have the pixels that Pillow gives them."""

import io
import struct
import zlib

from agent_services.serving import pictures
import numpy as np
from PIL import Image
import pytest
from tunix.rl.multi_turn.core import images as images_lib

SIZE = 241, 190


def picture(mode, seed=0):
  rng = np.random.default_rng(seed)
  width, height = SIZE
  pixels = np.full((height, width, 4), 200, np.uint8)
  for _ in range(30):
    x, y = rng.integers(0, width), rng.integers(0, height)
    pixels[y : y + 40, x : x + 50] = rng.integers(0, 256, 4)
  pixels[50:90, 60:120] = rng.integers(0, 256, (40, 60, 4))
  image = Image.fromarray(pixels)
  if mode == "I;16":
    grey = rng.integers(0, 1 << 16, (height, width)).astype(np.uint16)
    return Image.fromarray(grey)
  if mode == "P":
    return image.convert("RGB").quantize(37)
  return image.convert(mode)


def png(image, **options):
  out = io.BytesIO()
  image.save(out, "PNG", **options)
  return out.getvalue()


def chunks(data):
  at, pieces = 8, []
  while at < len(data):
    (length,) = struct.unpack_from(">I", data, at)
    pieces.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
    at += 12 + length
  return pieces


def joined(pieces):
  out = b"\x89PNG\r\n\x1a\n"
  for name, body in pieces:
    check = zlib.crc32(name + body)
    out += struct.pack(">I", len(body)) + name + body
    out += struct.pack(">I", check)
  return out


def rewritten(data, change):
  """The file with its inflated pixel data changed, in chunks of 1000 bytes."""
  pieces = chunks(data)
  raw = zlib.decompress(b"".join(b for n, b in pieces if n == b"IDAT"))
  body = zlib.compress(change(raw))
  parts = [body[i : i + 1000] for i in range(0, len(body), 1000)]
  head = [c for c in pieces if c[0] not in (b"IDAT", b"IEND")]
  return joined([*head, *((b"IDAT", p) for p in parts), (b"IEND", b"")])


def by_pillow(data, monkeypatch):
  """Pixels, or the kind of refusal, without the detour."""
  with monkeypatch.context() as without:
    without.setattr(pictures, "stored", lambda data: None)
    return decoded(data)


def decoded(data):
  try:
    return pictures.decode(data, 1 << 20)
  except pictures.PictureError as error:
    return error.code, str(error)


def same(one, other):
  if isinstance(one, tuple) or isinstance(other, tuple):
    return one == other
  return np.array_equal(one, other)


@pytest.mark.parametrize("level", [1, 6, 9])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "I;16"])
def test_the_detour_changes_no_pixel(mode, level, monkeypatch):
  for options in ({}, {"transparency": 3} if mode == "P" else {}):
    data = png(picture(mode), compress_level=level, **options)
    detour = pictures.stored(data)
    if mode in ("L", "P"):
      assert detour is None  # Too small to be worth it.
    else:
      assert detour is not None and detour != data
    want = by_pillow(data, monkeypatch)
    assert isinstance(want, np.ndarray)
    assert same(decoded(data), want)


def test_the_detour_changes_no_pixel_of_small_depths_and_palettes(monkeypatch):
  monkeypatch.setattr(pictures, "_SMALL", 1)
  for mode, options in (
    ("1", {}),
    ("L", {}),
    ("P", {}),
    ("P", {"transparency": 3}),
    ("P", {"bits": 4}),
    ("P", {"transparency": bytes(range(0, 250, 7))}),
    ("L", {"transparency": 200}),
    ("RGB", {"transparency": (200, 200, 200)}),
  ):
    data = png(picture(mode), **options)
    assert pictures.stored(data) is not None
    want = by_pillow(data, monkeypatch)
    assert isinstance(want, np.ndarray)
    assert same(decoded(data), want), (mode, options)


def test_metadata_and_each_filter_are_kept(monkeypatch):
  image = picture("RGB")
  exif = Image.Exif()
  exif[0x0112] = 6  # Turned by 90 degrees, which is not applied.
  data = png(image, exif=exif, dpi=(72, 72))
  assert pictures.stored(data) is not None
  assert same(decoded(data), np.asarray(image))
  row = 1 + 3 * SIZE[0]
  for kind in range(6):  # 5 is none.

    def change(raw, kind=kind):
      changed = bytearray(raw)
      changed[::row] = bytes([kind]) * SIZE[1]
      return bytes(changed)

    data = rewritten(data, change)
    assert pictures.stored(data) is not None
    got = decoded(data)
    assert same(got, by_pillow(data, monkeypatch))
    assert isinstance(got, np.ndarray) == (kind < 5)


def test_what_is_unusual_is_left_to_pillow(monkeypatch):
  plain = png(picture("RGB"))
  pieces = chunks(plain)
  (body,) = (b for n, b in pieces if n == b"IDAT")
  idat = [n for n, _ in pieces].index(b"IDAT")
  late = [*pieces[:-1], (b"tEXt", b"a\0b"), pieces[-1]]
  split = [
    *pieces[:idat],
    (b"IDAT", body[:500]),
    (b"tEXt", b"a\0b"),
    (b"IDAT", body[500:]),
    pieces[-1],
  ]
  header = bytearray(pieces[0][1])
  header[12] = 1  # Interlaced, it says.
  cases = {
    "cut": plain[: len(plain) // 2],
    "cut at the end": plain[:-5],
    "more after the end": plain + b"more",
    "a chunk after the pixels": joined(late),
    "pixels in two places": joined(split),
    "interlaced": joined([(b"IHDR", bytes(header)), *pieces[1:]]),
    "too few pixels": rewritten(plain, lambda raw: raw[:-700]),
    "too many": rewritten(plain, lambda raw: raw + bytes(700)),
    "not deflate": joined([*pieces[:idat], (b"IDAT", b"x" * 9), pieces[-1]]),
    "a wrong sum": joined(
      [*pieces[:idat], (b"IDAT", body[:-4] + b"abcd"), pieces[-1]]
    ),
    "more after the stream": joined(
      [*pieces[:idat], (b"IDAT", body + b"more"), pieces[-1]]
    ),
    "a chunk longer than the file": plain[:-12] + b"\xff\0\0\0tEXt",
    "no pixels": joined([*pieces[:idat], pieces[-1]]),
  }
  for name, data in cases.items():
    assert pictures.stored(data) is None, name
    assert same(decoded(data), by_pillow(data, monkeypatch)), name


def test_any_broken_byte_is_treated_as_pillow_treats_it(monkeypatch):
  plain = png(picture("RGB", seed=2))
  rng = np.random.default_rng(0)
  refused = 0
  for _ in range(80):
    data = bytearray(plain)
    at = int(rng.integers(8, min(len(data), 3000)))
    data[at] ^= 1 << int(rng.integers(0, 8))
    got = decoded(bytes(data))
    assert same(got, by_pillow(bytes(data), monkeypatch)), at
    refused += isinstance(got, tuple)
  assert refused


def test_what_inflates_without_end_is_cut_off():
  width, height = 300, 300
  body = zlib.compress(bytes(200 << 20), 9)  # 200 KB of 200 MB.
  data = joined(
    [
      (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
      (b"IDAT", body),
      (b"IEND", b""),
    ]
  )
  assert pictures.stored(data) is None
  decoded(data)  # Pillow decodes it: its pixels are complete.
  with pytest.raises(pictures.PictureError, match="too many pixels"):
    pictures.decode(data, width * height - 1)


def test_a_store_keeps_decoded_pixels_without_a_copy_and_others_with_one():
  store = images_lib.ImageStore()
  pixels = pictures.decode(png(picture("RGB")), 1 << 20)
  assert not pixels.flags.writeable
  assert np.shares_memory(store.get(store.put(pixels)), pixels)
  own_pixels = pixels.copy()
  stored = store.get(images_lib.ImageStore.put(store, own_pixels[:100]))
  assert not np.shares_memory(stored, own_pixels)
  view = pixels[:50]  # It would hold on to all rows.
  assert not np.shares_memory(store.get(store.put(view)), pixels)
