"""Keeps a program's records on the disk until the server has them.

A spool is a folder, an append-only log with screenshots beside it:

    header.json    id, server, and the run whose events it has
    <number>.seg   frames, see `frames`
    <number>.state the row maker before that segment, see `spool_reader`
    images/        each screenshot once, <sha256>.rgb or .png
    ack            number of the last frame that the server has
    dead.jsonl     records that the server refuses
    lock           held by the processes that append and read

Promises: a frame is in the log when `append` returns, whatever kills the
process; `sync` returns once the disk has it, too. A write that fails leaves no
part of a frame. Beyond `max_bytes` nothing more goes in; screenshots stop at
three quarters of it. The lock ends with the last process that has it: then
`claim_orphans` finds the spool. For one thread at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import pathlib
import shutil
import struct
import time
from typing import Any, Iterator, Mapping, NamedTuple, Sequence
import uuid
import weakref
import zlib

import numpy as np

from training_monitor.client import frames as frames_lib
from training_monitor.core import durable
from training_monitor.core import json_text

_LOG = logging.getLogger(__name__)
SUFFIX = ".spool"
DAMAGED = ".damaged"
"""Suffix that a spool gets when it cannot be read."""
EVENT, PART = 1, 2
"""Kinds of frames: an event of `event_codec`, or MessagePack of the part of a
batch: [hashes of its screenshots, its JSON]."""
HEADER, LOCK, ACK, DEAD, IMAGES = (
  "header.json",
  "lock",
  "ack",
  "dead.jsonl",
  "images",
)
RGB, PNG = ".rgb", ".png"
RGB_HEAD = struct.Struct(">II")
"""(height, width), before the pixels of a `.rgb`."""
_ACK = struct.Struct(">QI")
_MOST_SEGMENT = 8 << 20
_LEAST_SEGMENT = 1 << 10
_IMAGES_SHARE = 0.75


class SpoolFull(Exception):
  """The spool has no room for a frame or a screenshot."""


@dataclasses.dataclass(frozen=True)
class Header:
  """Identity of a spool.

  Attributes:
    id: its name at the server.
    target: the server that it is for.
    run: the run whose events it has, fields of `run_rows.RunFacts`; None of a
      program that sends parts of batches.
    images: whether screenshots are sent.
  """

  id: str
  target: str
  run: Mapping[str, Any] | None = None
  images: bool = True

  @property
  def mark(self) -> bytes:
    """Begins each frame."""
    return bytes.fromhex(self.id)[: frames_lib.MARK_BYTES]

  @classmethod
  def read(cls, folder: pathlib.Path) -> Header:
    """Raises OSError, or ValueError if it is none."""
    try:
      header = cls(**json_text.read(folder / HEADER))
      if len(header.mark) != frames_lib.MARK_BYTES or not isinstance(
        header.target, str
      ):
        raise ValueError("no id")
    except (TypeError, ValueError) as error:
      raise ValueError(f"{HEADER} is damaged: {error}") from None
    return header


class Lock:
  """Holds a spool's lock; a child gets it by `fileno`, not by a fork."""

  def __init__(self, folder: pathlib.Path, *, make: bool = False):
    """Takes it.

    Args:
      folder: Folder of the spool.
      make: makes its file.

    Raises:
      BlockingIOError: another process has it.
      OSError: there is no such file.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if make else 0)
    self._file = os.open(folder / LOCK, flags, 0o600)
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      self.release()
      raise BlockingIOError(
        error.errno, "another process has this spool", str(folder)
      ) from None
    _HELD.add(self)

  def fileno(self) -> int:
    return self._file

  def release(self) -> None:
    if self._file >= 0:
      os.close(self._file)
      self._file = -1


_HELD: weakref.WeakSet[Lock] = weakref.WeakSet()
# A fork that outlives this process must not keep its spools from the next.


def _release_all() -> None:
  for lock in list(_HELD):
    lock.release()


os.register_at_fork(after_in_child=_release_all)


def is_owned(folder: pathlib.Path) -> bool:
  """Returns whether a live process has a spool."""
  try:
    Lock(folder).release()
  except BlockingIOError:
    return True
  except OSError:
    pass
  return False


class Spool:
  """The end that appends; see the module docstring."""

  def __init__(
    self,
    path: str | pathlib.Path,
    target: str,
    *,
    run: Mapping[str, Any] | None = None,
    images: bool = True,
    max_bytes: int = 2 << 30,
  ):
    """Makes a spool, or opens an existing one.

    Args:
      path: the folder.
      target: the server that it is for.
      run: Facts of the run whose events it takes, None for parts of batches.
      images: whether screenshots are sent.
      max_bytes: Limit of frames, refused records and screenshots together.

    Raises:
      BlockingIOError: another process has it.
      OSError, ValueError: the folder cannot be one.
    """
    self.path = pathlib.Path(path)
    self._max = max_bytes
    self._segment_bytes = max(
      _LEAST_SEGMENT, min(_MOST_SEGMENT, max_bytes // 8)
    )
    self._file = -1
    self._size = 0
    self._unsynced = False
    if self.path.exists():
      self.lock = Lock(self.path)
    else:
      self.lock = _made(
        self.path, Header(uuid.uuid4().hex, target, run, images)
      )
    try:
      self.header = Header.read(self.path)
      self.seq = last_frame(self.path, self.header)
      """Number of the last frame."""
      self.bytes = 0
      """At most these lie on the disk: the reader frees some meanwhile."""
      self._measure_at = 0.0
      self.measure()
    except BaseException:
      self.close()
      raise

  def measure(self) -> None:
    """Counts the bytes on the disk, in a tenth of the time at most."""
    began = time.monotonic()
    if began >= self._measure_at:
      self.bytes = sum(_sizes(self.path)) + sum(_sizes(self.path / IMAGES))
      now = time.monotonic()
      self._measure_at = now + 10 * (now - began)

  def _has_room(self, size: int, most: float) -> bool:
    if self.bytes + size > most:
      self.measure()
    return self.bytes + size <= most

  def append(self, records: Sequence[tuple[int, bytes]]) -> int:
    """Appends (kind, body) of records, in order.

    Returns:
      How many went in before the room was used up or the disk failed; at least
      one of them.

    Raises:
      SpoolFull: there is no room for the first one.
      OSError: the disk's; none of them is in.
    """
    parts: list[bytes] = []
    ends: list[int] = []
    size = 0
    for number, (kind, body) in enumerate(records, self.seq + 1):
      part = frames_lib.packed(self.header.mark, kind, number, body)
      if not self._has_room(size + len(part), self._max):
        break
      parts.append(part)
      size += len(part)
      ends.append(size)
    if records and not parts:
      raise SpoolFull(f"{self.bytes} of {self._max} bytes are taken")
    self._open()
    failure, written = self._write(memoryview(b"".join(parts)))
    # Whole frames stay: a reader may have them already.
    num_frames = sum(end <= written for end in ends)
    num_bytes = ends[num_frames - 1] if num_frames else 0
    if failure is not None:
      self._cut_off(self._size + num_bytes)
      if not num_frames:
        raise failure
    self.seq += num_frames
    self._size += num_bytes
    self._unsynced = True
    self.bytes += num_bytes
    return num_frames

  def _write(self, view: memoryview) -> tuple[OSError | None, int]:
    written = 0
    try:
      while written < len(view):
        written += os.write(self._file, view[written:])
    except OSError as error:
      return error, written
    return None, written

  def _cut_off(self, size: int) -> None:
    """Leaves no part of a frame: the next one goes where it began."""
    try:
      os.ftruncate(self._file, size)
    except OSError:
      self._leave_segment()  # The reader skips the part.

  def _open(self) -> None:
    if self._file >= 0 and self._size >= self._segment_bytes:
      self.sync()
      self._leave_segment()
    if self._file < 0:
      path = frames_lib.segment_path(self.path, self.seq + 1)
      # Left empty by a process that was killed, or after a failed write.
      self._file = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
      )
      self._size = os.fstat(self._file).st_size

  def _leave_segment(self) -> None:
    if self._file >= 0:
      os.close(self._file)
      self._file = -1

  def sync(self) -> None:
    """Returns once every frame is on the disk. Raises OSError."""
    if self._unsynced and self._file >= 0:
      os.fdatasync(self._file)
    self._unsynced = False

  def keep_image(self, sha: str, image: np.ndarray | bytes) -> None:
    """Keeps a screenshot, uint8[H, W, 3] or a file's bytes, once.

    Raises:
      SpoolFull: there is no room for it.
      OSError: the disk's.
    """
    if isinstance(image, np.ndarray):
      kind, head = RGB, RGB_HEAD.pack(*image.shape[:2])
      body = np.ascontiguousarray(image).data.cast("B")
    else:
      kind, head, body = PNG, b"", memoryview(image)
    path = image_path(self.path, sha, kind)
    size = len(head) + len(body)
    if not self._has_room(size, self._max * _IMAGES_SHARE):
      raise SpoolFull(f"{self.bytes} of {self._max} bytes are taken")
    partial = path.with_suffix(".part")
    try:
      with open(partial, "wb", buffering=0) as file:
        file.write(head)
        while body:
          body = body[file.write(body) :]
      partial.replace(path)
    except BaseException:
      partial.unlink(missing_ok=True)
      raise
    self.bytes += size

  def close(self) -> None:
    """Lets the spool go. Idempotent."""
    self._leave_segment()
    self.lock.release()


def _made(path: pathlib.Path, header: Header) -> Lock:
  """Makes a spool's folder, which is locked when others see it."""
  new = path.with_name(f".{path.name}.{os.getpid()}")
  lock = None
  try:
    (new / IMAGES).mkdir(parents=True)
    lock = Lock(new, make=True)
    durable.write_bytes(
      new / HEADER, json.dumps(dataclasses.asdict(header)).encode()
    )
    new.rename(path)
    durable.sync(path.parent)
    return lock
  except BaseException:
    if lock is not None:
      lock.release()
    shutil.rmtree(new, ignore_errors=True)
    raise


def image_path(folder: pathlib.Path, sha: str, suffix: str) -> pathlib.Path:
  return folder / IMAGES / f"{sha}{suffix}"


def images(folder: pathlib.Path) -> set[str]:
  """Returns the hashes of the screenshots that a spool has."""
  return {
    name[:-4] for name in _names(folder / IMAGES) if name.endswith((RGB, PNG))
  }


def read_ack(folder: pathlib.Path) -> int:
  """Returns the number of the last acknowledged frame; 0 if unknown."""
  try:
    seq, check = _ACK.unpack((folder / ACK).read_bytes())
  except (OSError, struct.error):
    return 0
  return seq if zlib.crc32(b"%d" % seq) == check else 0


def packed_ack(seq: int) -> bytes:
  return _ACK.pack(seq, zlib.crc32(b"%d" % seq))


def last_frame(folder: pathlib.Path, header: Header) -> int:
  """Returns the number of a log's last frame. Raises OSError."""
  segments = frames_lib.segments(folder)
  if not segments:
    return read_ack(folder)
  first, path = segments[-1]
  frames = frames_lib.parsed(path.read_bytes(), header.mark)
  return max((frame.seq for frame, _ in frames), default=first - 1)


def dead(folder: pathlib.Path) -> list[tuple[int, str, str]]:
  """Returns (number, record, reason) of every record the server refused."""
  try:
    lines = (folder / DEAD).read_text("utf-8", "replace").splitlines()
  except FileNotFoundError:
    return []
  records = {}
  for line in lines:
    try:
      record = json_text.parse(line)
      records[record["seq"]] = record["seq"], record["body"], record["reason"]
    except (ValueError, TypeError, KeyError):
      continue  # Cut off by a kill, and written again.
  return list(records.values())


class Contents(NamedTuple):
  """Records and screenshots that wait in a spool."""

  records: int
  images: int
  dead: list[tuple[int, str, str]]
  target: str


def contents(folder: pathlib.Path) -> Contents:
  """Looks into a spool, changing nothing.

  Raises:
    OSError, ValueError: it cannot be read.
  """
  header = Header.read(folder)
  last = max(last_frame(folder, header), read_ack(folder))
  return Contents(
    last - read_ack(folder), len(images(folder)), dead(folder), header.target
  )


def claim_orphans(
  folder: str | pathlib.Path, target: str, own: pathlib.Path
) -> Iterator[tuple[pathlib.Path, Header, Lock]]:
  """Yields locked spools that ended processes left for this server."""
  for path in sorted(pathlib.Path(folder).glob(f"*{SUFFIX}")):
    if path == own:
      continue
    try:
      lock = Lock(path)
    except (BlockingIOError, FileNotFoundError):
      continue  # Its owner lives, or has just deleted it.
    except OSError as error:
      put_aside(path, error)
      continue
    try:
      header = Header.read(path)
    except (OSError, ValueError) as error:
      lock.release()
      put_aside(path, error)
      continue
    waits = frames_lib.segments(path) or images(path)
    if header.target == target and waits:
      yield path, header, lock
      continue
    if header.target == target and not (path / DEAD).exists():
      remove(path)
    lock.release()


def remove(folder: pathlib.Path) -> None:
  """Deletes a spool in which nothing waits; refused records stay."""
  for first, path in frames_lib.segments(folder):
    path.unlink(missing_ok=True)
    state_path(folder, first).unlink(missing_ok=True)
  if (folder / DEAD).exists():
    return
  for name in _names(folder / IMAGES):
    (folder / IMAGES / name).unlink(missing_ok=True)
  try:
    (folder / IMAGES).rmdir()
    for name in sorted(set(_names(folder)) - {LOCK}):
      (folder / name).unlink(missing_ok=True)
    (folder / LOCK).unlink(missing_ok=True)
    folder.rmdir()
  except OSError as error:
    _LOG.warning("the spool %s cannot be deleted: %s", folder, error)


def state_path(folder: pathlib.Path, first: int) -> pathlib.Path:
  return folder / f"{first:020d}.state"


def put_aside(path: pathlib.Path, error: Exception) -> None:
  """Gives a damaged spool another name: it would be met at every start."""
  if not path.exists():
    return
  _LOG.warning("the spool %s cannot be read: %s", path, error)
  if isinstance(error, OSError) and not isinstance(
    error, (FileNotFoundError, NotADirectoryError)
  ):
    return  # A disk that fails may be well again.
  try:
    path.rename(path.with_name(path.name + DAMAGED))
  except OSError as failure:
    _LOG.warning("%s cannot be put aside: %s", path, failure)


def _names(folder: pathlib.Path) -> list[str]:
  try:
    return os.listdir(folder)
  except FileNotFoundError:
    return []


def _sizes(folder: pathlib.Path) -> Iterator[int]:
  """Yields the sizes of the files; the uploader may delete some meanwhile."""
  with os.scandir(folder) as entries:
    for entry in entries:
      if entry.name == DEAD or entry.name.endswith(
        (frames_lib.SEGMENT, RGB, PNG)
      ):
        with contextlib.suppress(FileNotFoundError):
          yield entry.stat().st_size
