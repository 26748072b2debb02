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

import collections
import os
import pathlib
import struct
from typing import Callable, Iterator, NamedTuple
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
  return _HEAD.pack(mark, kind, seq, len(body), _check(kind, seq, body)) + body


def _check(kind: int, seq: int, body: bytes) -> int:
  return zlib.crc32(body, zlib.crc32(_CHECKED.pack(kind, seq, len(body))))


def size_of(body: bytes) -> int:
  """Returns the size of a frame in bytes."""
  return _HEAD.size + len(body)


def parsed(data: bytes, mark: bytes) -> Iterator[tuple[Frame, int]]:
  """Yields the whole frames, each with the offset behind it."""
  at = data.find(mark)
  while 0 <= at <= len(data) - _HEAD.size:
    _, kind, seq, size, check = _HEAD.unpack_from(data, at)
    start = at + _HEAD.size
    end = start + size
    body = data[start:end] if end <= len(data) else None
    if body is not None and _check(kind, seq, body) == check:
      yield Frame(kind, seq, body), end
      at = data.find(mark, end)
    else:
      at = data.find(mark, at + 1)


def segments(folder: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
  """Returns (number of the first frame, file) of a log's segments, in order."""
  return sorted(
    (int(path.stem), path)
    for path in folder.glob(f"*{SEGMENT}")
    if path.stem.isdigit()
  )


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
    self._offset = 0
    """In the segment, behind the last whole frame that was parsed."""
    self._frames: collections.deque[Frame] = collections.deque()
    self._cut = False
    """Whether a frame that is cut off at the end is counted already."""
    self.segment = 0
    """First number of the segment that is read; 0 before the first one."""
    self.seq = 0
    """Number of the last frame that was read."""
    self.damaged = 0
    """Frames that were lost to damage; the last may count as one of many."""

  def next(self) -> Frame | None:
    """Returns the next frame; None while there is none.

    Raises:
      OSError: the disk's.
    """
    while self._frames or self._more():
      frame = self._frames.popleft()
      if frame.seq > self.seq:  # Else a write that failed half-way, repeated.
        self.damaged += frame.seq - self.seq - 1
        self.seq = frame.seq
        return frame
    return None

  def _more(self) -> bool:
    """Parses what lies ahead; returns whether there are frames."""
    while not self._parse():
      # Checked first: what is appended before the end is read after it.
      following = self._following()
      last = following is not None or self._ended()
      if self._parse():
        break
      if not last:
        return False
      if following is not None:
        self._open(*following)
      else:
        size = os.fstat(self._file).st_size if self._file >= 0 else 0
        if size > self._offset and not self._cut:
          self._cut = True
          self.damaged += 1
        return False
    return True

  def _parse(self) -> bool:
    if self._file < 0:
      return False
    start = self._offset
    size = os.fstat(self._file).st_size - start
    # The second attempt is for a large frame, and for one behind damage.
    for most in (_CHUNK, size):
      if size > 0 and not self._frames:
        data = os.pread(self._file, min(size, most), start)
        # The writer may replace an incomplete frame: it is read anew.
        for frame, end in parsed(data, self._mark):
          self._frames.append(frame)
          self._offset = start + end
    return bool(self._frames)

  def _following(self) -> tuple[int, pathlib.Path] | None:
    # The common case needs no listing.
    direct = segment_path(self._folder, self.seq + 1)
    if self.seq >= self.segment > 0 and direct.exists():
      return self.seq + 1, direct
    return next(
      (s for s in segments(self._folder) if s[0] > self.segment), None
    )

  def _open(self, first: int, path: pathlib.Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    self.close()
    begun, self.segment = self.segment > 0, first
    self._file, self._offset = file, 0
    if begun:
      self._on_segment(first)
    else:
      self.seq = first - 1

  def sync(self) -> None:
    """Returns once the frames read so far are on the disk. Raises OSError."""
    if self._file >= 0:
      os.fdatasync(self._file)

  def close(self) -> None:
    if self._file >= 0:
      os.close(self._file)
      self._file = -1
