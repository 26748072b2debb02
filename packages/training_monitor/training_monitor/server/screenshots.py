"""Stores screenshots once each, by the hash of the policy's pixels.

The name of a screenshot is the SHA-256 of its pixels (`images.hash_pixels`),
or of the file's own bytes where the client knows no pixels.

Promises: a file is on the disk, whole and of the right content, before a
row names it; a repeated one is stored once. Files are served as images only.
"""

from __future__ import annotations

import hashlib
import io
import os
import pathlib
import re
import threading
from typing import NamedTuple, Sequence

import numpy as np
import orjson
from PIL import Image

from training_monitor.core import images as images_lib
from training_monitor.server import errors
from training_monitor.server import sql as sql_lib

SHA = re.compile(r"[0-9a-f]{64}")
FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
_SUFFIXES = {"image/png": ".png", "image/jpeg": ".jpg", "image/webp": ".webp"}
MAX_PIXELS = 64 << 20
UPSERT = sql_lib.upsert(
  "monitor_screenshot",
  ("sha256",),
  ("media_type", "num_bytes", "width", "height", "created_at"),
)
"""Of a row: a `Stored`'s fields, and when."""


def renew(sql: sql_lib.Sql, shas: Sequence[str], time: str) -> set[str]:
  """Renews the time of the stored hashes; returns these hashes."""
  sql.many(
    "UPDATE monitor_screenshot SET created_at = ? WHERE sha256 = ?",
    [(time, sha) for sha in shas],
  )
  rows = sql.among(
    "SELECT sha256 FROM monitor_screenshot WHERE sha256 {among}", (), shas
  )
  return {sha for (sha,) in rows}


class Stored(NamedTuple):
  """A screenshot that is on the disk; width and height in pixels."""

  sha: str
  media_type: str
  num_bytes: int
  width: int
  height: int


class ScreenshotFiles:
  """A folder of screenshots."""

  def __init__(self, directory: str | pathlib.Path):
    self._directory = pathlib.Path(directory)

  def path(self, sha: str, media_type: str) -> pathlib.Path:
    """Returns the path of a screenshot's file, stored or not."""
    return self._directory / sha[:2] / f"{sha}{_SUFFIXES[media_type]}"

  def store(self, sha: str, data: bytes) -> Stored:
    """Writes a screenshot; it is durable when this returns.

    Raises:
      ApiError: 400, `sha` is not its hash, or it is not a PNG, JPEG or WebP.
      OSError: the disk's.
    """
    stored, refused = self.store_all([(sha, data)])
    if refused:
      raise errors.ApiError(400, refused[sha])
    return stored[0]

  def store_all(
    self, images: Sequence[tuple[str, bytes]]
  ) -> tuple[list[Stored], dict[str, str]]:
    """Writes screenshots; they are durable when this returns.

    Args:
      images: (name, file) of each.

    Returns:
      (those that are written, name -> why another one is not what it is named
      after, or no image of a known kind).

    Raises:
      OSError: the disk's.
    """
    stored: list[Stored] = []
    refused: dict[str, str] = {}
    folders: dict[pathlib.Path, None] = {}
    for sha, data in images:
      try:
        media_type, width, height = _verify(sha, data)
      except errors.ApiError as error:
        refused[sha] = error.message
        continue
      path = self.path(sha, media_type)
      self._write(path, data)
      folders[path.parent] = None
      stored.append(Stored(sha, media_type, len(data), width, height))
    for folder in (*folders, *([self._directory] if folders else ())):
      handle = os.open(folder, os.O_RDONLY)
      try:
        os.fsync(handle)
      finally:
        os.close(handle)
    return stored, refused

  def _write(self, path: pathlib.Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    own = f"{os.getpid()}.{threading.get_ident()}"
    partial = path.with_name(f"{path.stem}.{own}.part")
    try:
      with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
      partial.replace(path)
    except OSError:
      partial.unlink(missing_ok=True)
      raise


def unpack(body: bytes) -> list[tuple[str, bytes]]:
  """Returns (name, file) of each screenshot of a request that carries several.

  A line of JSON, `{"images": [{"sha256": ..., "bytes": ...}, ...]}`, and the
  files one after the other.

  Raises:
    ApiError: 400, it is nothing of the kind.
  """
  head, _, files = body.partition(b"\n")
  try:
    listed = [
      (str(image["sha256"]), image["bytes"])
      for image in orjson.loads(head)["images"]
    ]
    if any(type(size) is not int or size < 0 for _, size in listed):
      raise ValueError
  except (ValueError, TypeError, KeyError):
    raise errors.ApiError(
      400,
      'the body begins with a line {"images": [{"sha256": text, "bytes":'
      " number}, ...]}, and the files follow",
    ) from None
  for sha, _ in listed:
    check_sha(sha)
  if (size := sum(size for _, size in listed)) != len(files):
    raise errors.ApiError(
      400, f"the images have {size} bytes, and {len(files)} follow"
    )
  images, at = [], 0
  for sha, size in listed:
    images.append((sha, files[at : at + size]))
    at += size
  return images


def check_sha(sha: str) -> str:
  """Raises ApiError unless `sha` is a SHA-256 in hex."""
  if not SHA.fullmatch(sha):
    raise errors.ApiError(
      400, f"sha256={sha[:80]!r}: give 64 hexadecimal digits, lower case"
    )
  return sha


def problem(sha: str, data: bytes) -> str:
  """Returns why `sha` is not the hash of the bytes; "" if it is."""
  try:
    _verify(sha, data)
  except errors.ApiError as error:
    return error.message
  return ""


def _verify(sha: str, data: bytes) -> tuple[str, int, int]:
  try:
    with Image.open(io.BytesIO(data), formats=list(FORMATS)) as image:
      width, height = image.size
      if width * height > MAX_PIXELS:
        raise errors.ApiError(
          400, f"{width}x{height} is larger than {MAX_PIXELS} pixels"
        )
      media_type = FORMATS[image.format or ""]
      if hashlib.sha256(data).hexdigest() != sha:
        pixels = np.asarray(image.convert("RGB"))
        if images_lib.hash_pixels(pixels) != sha:
          raise errors.ApiError(
            400,
            f"sha256={sha}: neither the bytes nor the RGB pixels of this"
            " image have this hash; nothing was stored",
          )
      else:
        image.verify()
  except errors.ApiError:
    raise
  except Exception as error:  # pylint: disable=broad-except
    # Pillow raises nearly any error for a file that is not an image.
    raise errors.ApiError(
      400,
      "the body is not a whole PNG, JPEG or WebP image"
      f" ({type(error).__name__}: {str(error)[:100]})",
    ) from None
  return media_type, width, height
