"""Reads a spool: makes its records entries of batches, and forgets those sent.

An entry has the number of the record that it was made from. So an entry that
is made again, after the reader was killed, has the number that it had, and the
server applies it once.

The rows of an event depend on the events before it. A reader that starts again
makes the rows of the oldest segment anew, from the state of the row maker
before that segment, and skips those that the server has.

Promises: a record stays until the server has it. An entry that the server
refuses, or a record that no rows can be made of, is put aside or counted, and
delays nothing. Damaged frames are counted and skipped. A screenshot stays until
an entry that shows it is at the server. Holds about one batch in memory.
For one thread.
"""

from __future__ import annotations

import collections
import io
import itertools
import os
import pathlib
import time
from typing import Callable, Collection, NamedTuple, Sequence

import msgpack
import numpy as np
import orjson
from PIL import Image

from training_monitor.client import event_codec
from training_monitor.client import frames as frames_lib
from training_monitor.client import plain_json
from training_monitor.client import spool as spool_lib
from training_monitor.client.rows import run_rows
from training_monitor.core import durable
from training_monitor.core import images as images_lib

_MOST_KNOWN = 100_000
_MOST_ENTRIES = 500


class Entry(NamedTuple):
  """A part of a batch, as JSON, and the hashes of the screenshots it shows."""

  seq: int
  body: bytes
  images: Sequence[str] = ()


class SpoolReader:
  """See the module docstring. Close it."""

  def __init__(
    self,
    path: pathlib.Path,
    header: spool_lib.Header,
    *,
    ended: Callable[[], bool],
    counters: collections.Counter[str],
    complain: Callable[[str, str], None],
    on_images_lost: Callable[[list[str]], None] = lambda shas: None,
  ):
    """Args:

      path: Folder of the spool; the caller has its lock.
      header: Header of the spool.
      ended: whether nothing more is appended.
      counters: failed, damaged, images_missing and spool_failures are counted
        there.
      complain: logs a problem, once for each key.
      on_images_lost: receives hashes of screenshots that are not there.

    Raises:
      OSError: the disk's.
      ValueError: the header is of no run.
    """
    self.path = path
    self.header = header
    self._ended = ended
    self._counters = counters
    self._complain = complain
    self._on_images_lost = on_images_lost
    self._rows: run_rows.RunRows | None = None
    if header.run is not None:
      self._rows = run_rows.RunRows(run_rows.RunFacts(**header.run))
    self._frames = frames_lib.FrameReader(
      path, header.mark, ended=ended, on_segment=self._keep_state
    )
    self._damaged = 0
    self._synced = 0
    self.acked = spool_lib.read_ack(path)
    """Number of the last record that the server has."""
    self._ack_file = os.open(
      path / spool_lib.ACK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600
    )
    self._pending: collections.deque[Entry] = collections.deque()
    self._settled: set[str] = set()
    """Screenshots that the server has or refuses."""
    self._oldest = 0
    self.images_left = bool(spool_lib.images(path))
    """Whether screenshots wait whose entries the server may have."""
    self._restore()

  @property
  def training(self) -> str | None:
    """Client id of the training whose events these are."""
    return None if self._rows is None else self._rows.training

  @property
  def empty(self) -> bool:
    """Whether the server has every record read so far, with screenshots."""
    return not (self._pending or self.images_left)

  # --- entries ----------------------------------------------------------------

  def entries(self, max_bytes: int) -> list[Entry]:
    """Returns the oldest undelivered entries, at least one if any waits.

    Raises:
      OSError: the disk's.
    """
    size = sum(len(entry.body) for entry in self._pending)
    while size < max_bytes and len(self._pending) < _MOST_ENTRIES:
      frame = self._frames.next()
      if self._frames.damaged > self._damaged:
        self._report_damage()
      if frame is None:
        break
      size += self._take(frame)
    if self._frames.seq > self._synced:
      self._frames.sync()
      self._synced = self._frames.seq
    self._acknowledge(0)  # Records without rows.
    sizes = itertools.accumulate(len(entry.body) for entry in self._pending)
    return [
      entry
      for n, (entry, size) in enumerate(zip(self._pending, sizes))
      if not n or size <= max_bytes
    ]

  def _take(self, frame: frames_lib.Frame) -> int:
    """Makes the entry of a record; returns its bytes."""
    sent = frame.seq <= self.acked
    try:
      entry = self._entry(frame, sent)
    except Exception as error:  # pylint: disable=broad-except
      # It would fail again, and may have changed the row maker's state.
      if not sent:
        self._counters["failed"] += 1
        self._complain("make", f"a record cannot be sent: {error!r}")
      return 0
    if entry is None or sent:
      return 0
    self._pending.append(entry)
    return len(entry.body)

  def _entry(self, frame: frames_lib.Frame, sent: bool) -> Entry | None:
    if frame.kind == spool_lib.PART:
      shas, body = msgpack.unpackb(frame.body)
      return Entry(frame.seq, body, shas if self.header.images else [])
    if frame.kind != spool_lib.EVENT or self._rows is None:
      raise ValueError(f"frame kind {frame.kind} is none of this spool's")
    rows = self._rows.rows(event_codec.load(frame.body))
    if rows is None:
      return None
    body = b"" if sent else plain_json.dumps(rows.part)
    return Entry(frame.seq, body, [*rows.images] if self.header.images else [])

  def _report_damage(self) -> None:
    lost = self._frames.damaged - self._damaged
    self._damaged = self._frames.damaged
    self._counters["damaged"] += lost
    self._complain(
      "damaged", f"{lost} records of {self.path} are damaged and left out"
    )

  def remove_through(self, seq: int) -> None:
    """Forgets the entries up to `seq`, which the server has."""
    while self._pending and self._pending[0].seq <= seq:
      self._pending.popleft()
    self._acknowledge(seq)

  def _acknowledge(self, seq: int) -> None:
    # Records without rows before the next entry are done with, too.
    before = self._pending[0].seq - 1 if self._pending else self._frames.seq
    seq = max(seq, before)
    if seq <= self.acked:
      return
    self.acked = seq
    try:
      os.pwrite(self._ack_file, spool_lib.packed_ack(seq), 0)
      os.fdatasync(self._ack_file)
    except OSError as error:
      # The server knows it, too.
      self._trouble(error)
    self._delete_segments()

  def _delete_segments(self) -> None:
    """Deletes segments before the oldest one that a reader has to begin at."""
    if self._oldest == self._frames.segment:
      return
    segments = frames_lib.segments(self.path)
    self._oldest = max(
      first
      for first, _ in segments
      if first == segments[0][0]
      or first <= self._frames.segment
      and first - 1 <= self.acked
      and self._has_state(first)
    )
    for first, path in segments:
      if first < self._oldest:
        path.unlink()
        spool_lib.state_path(self.path, first).unlink(missing_ok=True)

  def _has_state(self, first: int) -> bool:
    return self._rows is None or spool_lib.state_path(self.path, first).exists()

  def bury(self, entry: Entry, reason: str) -> None:
    """Takes an entry that the server will never accept out of the way."""
    line = orjson.dumps({
        "seq": entry.seq, "time": time.time(), "reason": reason,
        "body": entry.body.decode("utf-8", "replace"),
    }) + b"\n"  # fmt: skip
    try:
      with open(self.path / spool_lib.DEAD, "ab") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
      self._trouble(error)
    self.remove_through(entry.seq)

  # --- the row maker's state --------------------------------------------------

  def _keep_state(self, first: int) -> None:
    """Keeps the state before a segment, which begins now."""
    if self._rows is None:
      return
    try:
      durable.write_bytes(
        spool_lib.state_path(self.path, first),
        event_codec.pack(self._rows.state()),
      )
    except OSError as error:
      self._trouble(error)  # The segments before it stay.

  def _restore(self) -> None:
    segments = frames_lib.segments(self.path)
    self._oldest = segments[0][0] if segments else 0
    if self._rows is None or self._oldest <= 1:
      return
    try:
      data = spool_lib.state_path(self.path, self._oldest).read_bytes()
      self._rows.restore(event_codec.unpack(data))
    except Exception as error:  # pylint: disable=broad-except
      self._counters["damaged"] += 1
      self._complain(
        "state",
        f"the state before {self._oldest} of {self.path} is damaged"
        f" ({error!r}): episodes that had begun get rows of their ends only",
      )

  # --- screenshots ------------------------------------------------------------

  def unsettled(self, shas: Collection[str]) -> list[str]:
    """Returns the hashes that the server may lack, each once."""
    return [s for s in dict.fromkeys(shas) if s not in self._settled]

  def left_images(self, most: int) -> list[str]:
    """Returns screenshots of which no entry waits."""
    if not self.images_left:
      return []
    waiting = {sha for entry in self._pending for sha in entry.images}
    remaining = spool_lib.images(self.path) - waiting
    self._oldest = 0
    self.images_left = bool(remaining)
    return sorted(remaining)[:most]

  def image(self, sha: str) -> bytes | None:
    """Returns a screenshot's file; counts a missing one and returns None.

    Raises:
      OSError: the disk's.
    """
    file = self._encoded(sha)
    if file is None:
      self._counters["images_missing"] += 1
      self._on_images_lost([sha])
    return file

  def _encoded(self, sha: str) -> bytes | None:
    try:
      return spool_lib.image_path(self.path, sha, spool_lib.PNG).read_bytes()
    except FileNotFoundError:
      pass
    try:
      raw = spool_lib.image_path(self.path, sha, spool_lib.RGB).read_bytes()
    except FileNotFoundError:
      return None
    try:
      shape = spool_lib.RGB_HEAD.unpack_from(raw)
      pixels = np.frombuffer(
        raw, np.uint8, offset=spool_lib.RGB_HEAD.size
      ).reshape(*shape, 3)
      if images_lib.hash_pixels(pixels) != sha:
        raise ValueError("other pixels")
    except Exception as error:  # pylint: disable=broad-except
      # A power loss: the disk has its name, and not its pixels.
      self._complain("image", f"a screenshot is damaged: {error!r}")
      self._delete_images([sha])
      return None
    return encode_png(pixels)

  def settle_images(self, shas: Collection[str]) -> None:
    """Deletes screenshots that the server has or refuses."""
    self._delete_images(shas)
    if len(self._settled) > _MOST_KNOWN:
      self._settled.clear()  # The server knows which it has.
    self._settled.update(shas)

  def _delete_images(self, shas: Collection[str]) -> None:
    for sha, suffix in itertools.product(shas, (spool_lib.RGB, spool_lib.PNG)):
      spool_lib.image_path(self.path, sha, suffix).unlink(missing_ok=True)

  def shrink(self, until: Callable[[], bool]) -> None:
    """Encodes screenshots that wait, which makes them smaller."""
    folder = self.path / spool_lib.IMAGES
    for path in folder.glob(f"*{spool_lib.RGB}"):
      if until():
        return
      try:
        file = self._encoded(path.stem)
        if file is None:
          self._on_images_lost([path.stem])
          continue
        durable.write_bytes(
          path.with_suffix(spool_lib.PNG), file, durably=False
        )
        path.unlink()
      except OSError as error:
        self._trouble(error)
        return

  # --- the end ----------------------------------------------------------------

  def _trouble(self, error: OSError) -> None:
    self._counters["spool_failures"] += 1
    self._complain("disk", f"{self.path} cannot be written: {error}")

  def close(self) -> None:
    """Closes the files. Deletes the spool if nothing waits in it."""
    delivered = self._ended() and self.empty and self._frames.next() is None
    self._frames.close()
    if self._ack_file >= 0:
      os.close(self._ack_file)
      self._ack_file = -1
      if delivered:
        spool_lib.remove(self.path)


def encode_png(pixels: np.ndarray) -> bytes:
  """Returns the PNG of uint8[H, W, 3] pixels: the hash of the pixels holds."""
  file = io.BytesIO()
  Image.fromarray(pixels).save(file, "PNG", compress_level=1)
  return file.getvalue()
