"""Frames of an append-only log, and the reader that follows its segments.

A log is a folder with segments `<number>.seg`, each named by the number of its
first frame. A frame is a mark of 8 bytes that only this log has, its kind, its
number, its length, a CRC-32 of kind, number, length and body, and its body.
Numbers count from 1.

Promises: the reader returns each frame once, in order, exactly as it was
appended. A frame that is cut off at the end of a log whose writer lives is
awaited, else it is left out. Damaged bytes are skipped up to the next whole
frame, and the frames that were lost with them are counted.
"""

from __future__ import annotations

import os
import pathlib
import struct
from typing import Callable, NamedTuple
import zlib

SEGMENT = ".seg"
MARK_BYTES = 8
_HEAD = struct.Struct(f">{MARK_BYTES}sBQII")
_CHECKED = struct.Struct(">BQI")
_CHUNK = 1 << 20


class Frame(NamedTuple):
  """A record of a log."""

  kind: int
  seq: int
  body: bytes


def packed(mark: bytes, kind: int, seq: int, body: bytes) -> bytes:
  checked = _CHECKED.pack(kind, seq, len(body))
  check = zlib.crc32(body, zlib.crc32(checked))
  return _HEAD.pack(mark, kind, seq, len(body), check) + body


def size_of(body: bytes) -> int:
  """Returns the size of a frame in bytes."""
  return _HEAD.size + len(body)


def segments(folder: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
  """Returns (number of the first frame, file) of a log's segments, in order."""
  numbered = []
  for path in folder.glob(f"*{SEGMENT}"):
    if path.stem.isdigit():
      numbered.append((int(path.stem), path))
  return sorted(numbered)


def segment_path(folder: pathlib.Path, first: int) -> pathlib.Path:
  return folder / f"{first:020d}{SEGMENT}"


class FrameReader:
  """Reads a log's frames while it grows. For one thread."""

  def __init__(
      self,
      folder: pathlib.Path,
      mark: bytes,
      *,
      ended: Callable[[], bool],
      on_segment: Callable[[int], None] = lambda first: None,
  ):
    """Args:

      folder: Folder of the log.
      mark: Mark of its frames.
      ended: whether nothing more is appended.
      on_segment: receives the first number of each segment that follows the
        first one, before its frames are read.
    """
    self._folder = folder
    self._mark = mark
    self._ended = ended
    self._on_segment = on_segment
    self._file = -1
    self._first = 0
    self._offset = 0
    """In the segment, of the first byte of `_data`."""
    self._data = b""
    self._at = 0
    self._hopeless = 0
    """Size of the segment when no frame was found in its rest."""
    self._cut = False
    """Whether a frame that is cut off at the end is counted already."""
    self.seq = 0
    """Number of the last frame that was read."""
    self.damaged = 0
    """Frames that were lost to damage; the last may count as one of many."""

  @property
  def segment(self) -> int:
    """First number of the segment that is read; 0 before the first one."""
    return self._first

  def next(self) -> Frame | None:
    """Returns the next frame; None while there is none.

    Raises:
      OSError: the disk's.
    """
    while True:
      if self._file < 0 and not self._open_next():
        return None
      frame = self._whole()
      if frame is None:
        # Asked first: what is appended before the end is read after it.
        last = self._ended() or self._following() is not None
        frame = self._whole() or self._behind_damage()
        if frame is None and not (last and self._leave_segment()):
          return None
      if frame is None or frame.seq <= self.seq:
        continue  # A write that failed half-way is repeated.
      self.damaged += frame.seq - self.seq - 1
      self.seq = frame.seq
      return frame

  def skip_to_last(self) -> None:
    """Goes to the last segment; `on_segment` does not receive it."""
    present = segments(self._folder)
    if present:
      self._open(present[-1])

  def sync(self) -> None:
    """Returns once the frames read so far are on the disk. Raises OSError."""
    if self._file >= 0:
      os.fdatasync(self._file)

  def close(self) -> None:
    if self._file >= 0:
      os.close(self._file)
      self._file = -1

  # --- segments ---------------------------------------------------------------

  def _leave_segment(self) -> bool:
    """Moves to the next segment, if there is one; returns whether there is."""
    if self._following() is not None:
      return self._open_next()
    if not self._cut and os.fstat(self._file).st_size > self._offset:
      self._cut = True
      self.damaged += 1
    return False

  def _following(self) -> tuple[int, pathlib.Path] | None:
    if not self._first:
      return next(iter(segments(self._folder)), None)
    # The common case needs no listing.
    direct = segment_path(self._folder, self.seq + 1)
    if self.seq >= self._first and direct.exists():
      return self.seq + 1, direct
    later = [s for s in segments(self._folder) if s[0] > self._first]
    return later[0] if later else None

  def _open_next(self) -> bool:
    following = self._following()
    if following is None:
      return False
    begun = self._first > 0
    last = self.seq
    self._open(following)
    if begun:
      self.seq = last
      self._on_segment(self._first)
    return True

  def _open(self, segment: tuple[int, pathlib.Path]) -> None:
    file = os.open(segment[1], os.O_RDONLY | os.O_CLOEXEC)
    self.close()
    self._file, self._first = file, segment[0]
    self._offset, self._data, self._at, self._hopeless = 0, b"", 0, 0
    self.seq = self._first - 1

  # --- frames -----------------------------------------------------------------

  def _fill(self, size: int) -> bool:
    """Reads until `size` bytes lie ahead; returns whether they do."""
    while len(self._data) - self._at < size:
      end = self._offset + len(self._data)
      missing = size - (len(self._data) - self._at)
      more = os.pread(self._file, max(missing, _CHUNK), end)
      if not more:
        return False
      self._offset += self._at
      self._data = self._data[self._at :] + more
      self._at = 0
    return True

  def _whole(self) -> Frame | None:
    """Returns the frame that begins here; None if it is incomplete."""
    frame = self._parsed(0, self._fill) if self._fill(_HEAD.size) else None
    if frame is None:
      self._forget()
    else:
      self._at += size_of(frame.body)
    return frame

  def _forget(self) -> None:
    """Drops the buffered bytes: the writer may replace an incomplete frame."""
    self._offset += self._at
    self._data, self._at = b"", 0

  def _parsed(self, skip: int, fill: Callable[[int], bool]) -> Frame | None:
    """Returns the frame `skip` bytes from here."""
    mark, kind, seq, size, check = _HEAD.unpack_from(
        self._data, self._at + skip
    )
    if mark != self._mark or not fill(skip + _HEAD.size + size):
      return None
    start = self._at + skip + _HEAD.size
    body = self._data[start : start + size]
    if zlib.crc32(body, zlib.crc32(_CHECKED.pack(kind, seq, size))) != check:
      return None
    return Frame(kind, seq, body)

  def _behind_damage(self) -> Frame | None:
    """Returns the next whole frame behind damaged bytes; None without one."""
    size = os.fstat(self._file).st_size
    if size <= self._offset or size == self._hopeless:
      return None
    self._fill(size - self._offset)
    has = lambda count: len(self._data) - self._at >= count
    at = self._at
    while (at := self._data.find(self._mark, at + 1)) >= 0:
      skip = at - self._at
      if not has(skip + _HEAD.size):
        break
      frame = self._parsed(skip, has)
      if frame is not None:
        self._at = at + size_of(frame.body)
        return frame
    self._hopeless = size
    self._forget()
    return None
