"""A run's events, on their way to the process that tells the monitor.

    on_event ─► bounded memory ─► a thread: bytes ─► pipe ─► `courier`

What is done here of an event is what cannot be done elsewhere: writing it
down, with the pixels that it shows for the first time. A frame is its kind and
its length, `>BI`, and so many bytes.

Promises: `on_event` only appends to a list and never waits. What the pipe has
taken survives the trainer, however it ends. What there is no room for is
dropped and counted. A courier that dies is replaced; one that hangs holds up
nothing, `close` included.
"""

from __future__ import annotations

import collections
import enum
import fcntl
import logging
import os
import pathlib
import struct
import subprocess
import sys
import threading
import time
from typing import Any, BinaryIO, Callable, Iterator, Mapping, Sequence

import msgpack
import numpy as np
import orjson
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.monitor.client import event_codec
from tunix.rl.multi_turn.monitor.client import ingest_rows

_LOG = logging.getLogger(__name__)
_PROGRAM = str(pathlib.Path(__file__).parents[1] / "__main__.py")
_HEAD = struct.Struct(">BI")
_TICK_S = 0.25
_PLENTY = 256  # Events that are not waited for.
_MOST_WAITING = 4096
_MOST_KNOWN = 100_000
_PIPE_BYTES = 1 << 20
_WRITE_BYTES = 1 << 18
_BREATH_EVERY_S = 1e-3
_BREATH_S = 1e-5
_START_S = 60.0
_GRACE_S = 10.0
_MOST_BACKOFF_S = 60.0
COMMAND = "courier"
"""Of `monitor/__main__.py`."""
NICENESS = 10
"""Of a courier: below training, above what nobody waits for."""


class Kind(enum.IntEnum):
  """What a frame has, in MessagePack."""

  BEGIN = 0  # What the courier is to be, see `courier`.
  EVENT = 1  # As `event_frames.dump` makes it.
  IMAGE = 2  # Not MessagePack: `IMAGE_HEAD`, and the RGB bytes.
  COUNT = 3  # {counter: so many more}
  DRAIN = 4  # [number of the answer, seconds]
  CLOSE = 5  # [number of the answer]


IMAGE_HEAD = struct.Struct(">64sII")
"""(SHA-256 in hex, height, width)."""


def frame(kind: Kind, body: bytes) -> bytes:
  return _HEAD.pack(kind, len(body)) + body


def frames(source: BinaryIO) -> Iterator[tuple[int, bytes]]:
  """(kind, body) of each until the end; one that is cut off is none."""
  while True:
    head = source.read(_HEAD.size)
    if len(head) < _HEAD.size:
      return
    kind, size = _HEAD.unpack(head)
    body = source.read(size)
    if len(body) < size:
      return
    yield kind, body


class Relay:
  """An `events.Observer`; see the module docstring. Close it."""

  def __init__(
      self,
      told: Mapping[str, Any],
      *,
      images: images_lib.ImageStore | None = None,
      close_s: float = 15.0,
  ):
    """Starts the courier, and waits until it is ready.

    Args:
      told: {url, token, client, identity, training, observer: what its
        `IngestClient`, `RunIdentity` and `MonitorObserver` are made of};
        `client.name` gets a number for each courier.
      images: where the screenshots' pixels are; None tells no pixels.
      close_s: how long `close` may deliver.

    Raises:
      ValueError: it says that it cannot, and why.
      OSError: it cannot be started.
    """
    self._told = {**told, "images": images is not None}
    self._told["observer"] = {**told["observer"], "close_s": close_s}
    self._images = images
    self._close_s = close_s
    self._waiting: collections.deque[events.Event] = collections.deque()
    self._sent_images: set[str] = set()
    self._again: dict[type[Any], events.Event] = {}
    """What a courier that is started again must know: see `_frames_of`."""
    self.dropped = 0
    """Events that there was no room for."""
    self._untold: collections.Counter[str] = collections.Counter()
    self._lock = threading.Lock()
    self._asked: list[bytes] = []
    self._work = threading.Event()
    self._closing = threading.Event()
    self._given_up = False
    self._delivered = False
    self._questions = 0
    self._starts = 0
    self._courier = self._start()
    self._thread = threading.Thread(
        target=self._run, name="monitor-relay", daemon=True
    )
    self._thread.start()

  @property
  def pid(self) -> int:
    """Of the courier."""
    return self._courier.pid

  def on_event(self, event: events.Event) -> None:
    if type(event) not in event_codec.TOLD:
      return
    waiting = self._waiting
    if self._closing.is_set() or len(waiting) >= _MOST_WAITING:
      self._count("dropped_memory", 1)
      return
    waiting.append(event)
    if len(waiting) == _PLENTY:
      self._work.set()

  def drain(self, timeout_s: float = 10.0) -> bool:
    """Waits until everything is delivered; False when time ran out."""
    return self._ask(Kind.DRAIN, timeout_s, timeout_s)

  def close(self) -> bool:
    """Delivers what it can; the rest waits on the disk. Idempotent.

    Returns:
      Whether everything was delivered.
    """
    if self._closing.is_set():
      return self._delivered
    self._closing.set()
    deadline = time.monotonic() + self._close_s + _GRACE_S
    self._delivered = self._ask(Kind.CLOSE, self._close_s + _GRACE_S)
    self._given_up = True
    self._courier.end(max(1.0, deadline - time.monotonic()))
    self._work.set()
    self._thread.join(_GRACE_S)
    if not self._thread.is_alive():
      self._courier.release()
    if lost := self.dropped + len(self._waiting):
      _LOG.warning("the monitor was not told of %d events", lost)
    return self._delivered

  def _count(self, what: str, how_many: int) -> None:
    with self._lock:
      self._untold[what] += how_many
      self.dropped += how_many if what == "dropped_memory" else 0

  def _ask(self, kind: Kind, wait_s: float, *more: float) -> bool:
    deadline = time.monotonic() + wait_s
    with self._lock:
      self._questions += 1
      number = self._questions
      self._asked.append(frame(kind, msgpack.packb([number, *more])))
    self._work.set()
    while time.monotonic() < deadline:
      courier = self._courier
      answer = courier.answer(number, min(0.5, deadline - time.monotonic()))
      if answer is not None:
        return answer
      if self._closing.is_set() and not self._thread.is_alive():
        return False
      if courier.ended:
        time.sleep(0.02)  # Until there is another.
    return False

  # --- the relay's thread -----------------------------------------------------

  def _run(self) -> None:
    failures = 0
    last = False
    while True:
      closing = self._closing.is_set()
      if closing and self._courier.ended and not (self._asked or self._waiting):
        return
      if not self._asked and len(self._waiting) < _PLENTY:
        self._work.wait(_TICK_S)
        self._work.clear()
      try:
        if failures:
          self._courier = self._start()
        self._pass_on()
        failures = 0
      except (OSError, ValueError) as error:
        if last or self._given_up:
          return
        # What waits at the end is worth one more courier.
        last = closing
        if not failures:
          _LOG.warning(
              "what tells the monitor has ended (%s); it is started again, and"
              " training goes on",
              error,
          )
          self._courier.end(0.0)
          self._courier.release()
        failures += 1
        delay = min(_MOST_BACKOFF_S, 0.5 * 2 ** min(failures, 10))
        self._closing.wait(delay)

  def _start(self) -> _Courier:
    """Raises ValueError or OSError."""
    told = dict(self._told)
    client = told["client"]
    # The one before may not have let its spool go yet.
    name = client["name"] + (f"-{self._starts}" if self._starts else "")
    told["client"] = {**client, "name": name}
    # Whichever of its screenshots it loses are brought again.
    courier = _Courier(told, self._sent_images.difference_update)
    if self._starts:
      self._waiting.extendleft(reversed(self._again.values()))
    self._starts += 1
    self._sent_images.clear()
    return courier

  def _pass_on(self) -> None:
    with self._lock:
      asked, self._asked = self._asked, []
      untold, self._untold = self._untold, collections.Counter()
    parts: list[bytes | memoryview] = []
    if untold:
      parts.append(frame(Kind.COUNT, msgpack.packb(dict(untold))))
    size = 0
    taken: list[events.Event] = []
    breath = time.perf_counter()
    try:
      while self._waiting:
        event = self._waiting.popleft()
        taken.append(event)
        for part in self._frames_of(event):
          parts.append(part)
          size += len(part)
        if size > _WRITE_BYTES:
          self._courier.write(parts)
          parts.clear()
          taken.clear()
          size = 0
        if time.perf_counter() - breath > _BREATH_EVERY_S:
          # Whoever waits for the interpreter gets it now, not after a switch
          # interval.
          time.sleep(_BREATH_S)
          breath = time.perf_counter()
      self._courier.write([*parts, *asked])
    except OSError:
      # For the next one. What this one has told of them counts once.
      self._waiting.extendleft(reversed(taken))
      with self._lock:
        self._asked = asked + self._asked
        self._untold.update(untold)
      raise

  def _frames_of(self, event: events.Event) -> Iterator[bytes | memoryview]:
    if isinstance(event, events.StepFinished):
      # A courier that is started again begins here.
      self._told["observer"]["start_step"] = max(
          event.step, self._told["observer"].get("start_step", 0)
      )
    elif isinstance(event, (events.WeightsPublished, events.EvalStarted)):
      self._again[type(event)] = event
    elif isinstance(event, events.EvalFinished):
      self._again.pop(events.EvalStarted, None)
    try:
      if isinstance(event, events.EpisodeFinished):
        yield from self._pixels(event.trajectory)
      yield frame(Kind.EVENT, event_codec.dump(event))
    except Exception as error:  # pylint: disable=broad-except
      # Nobody's mistake may end the thread that tells of all the others.
      _LOG.warning("an event cannot be told: %r", error)
      self._count("failed", 1)

  def _pixels(
      self, episode: trajectory_lib.Trajectory
  ) -> Iterator[bytes | memoryview]:
    """Screenshots that the courier may not have."""
    if self._images is None:
      return
    for sha, ref in ingest_rows.images_of(episode).items():
      if sha in self._sent_images:
        continue
      try:
        pixels = self._images.get(ref)
      except (KeyError, OSError, ValueError):
        continue  # The courier counts it, as it has not got it either.
      if len(self._sent_images) >= _MOST_KNOWN:
        self._sent_images.clear()  # The server knows which it has.
      self._sent_images.add(sha)
      head = IMAGE_HEAD.pack(sha.encode(), *pixels.shape[:2])
      yield _HEAD.pack(Kind.IMAGE, len(head) + pixels.nbytes) + head
      yield memoryview(np.ascontiguousarray(pixels)).cast("B")


class _Courier:
  """One process. Written to by one thread at a time."""

  def __init__(
      self,
      told: Mapping[str, Any],
      on_images_lost: Callable[[Sequence[str]], None],
  ):
    """Starts it and waits for its word.

    Raises:
      ValueError: it says that it cannot.
      OSError: it does not start, or says nothing.
    """
    self._process = subprocess.Popen(
        [sys.executable, "-P", _PROGRAM, COMMAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Ctrl-C is for the run. A session of its own would make its niceness
        # meaningless, see `run_monitor`.
        process_group=0,
    )
    self.pid = self._process.pid
    self.ended = False
    self._on_images_lost = on_images_lost
    self._answers: dict[int, bool] = {}
    self._said = threading.Condition()
    self._first: dict[str, Any] | None = None
    if hasattr(os, "setpriority"):
      try:
        os.setpriority(os.PRIO_PROCESS, self.pid, NICENESS)
      except OSError:
        pass
    self._pipe = self._process.stdin.fileno()
    if hasattr(fcntl, "F_SETPIPE_SZ"):
      try:
        fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
      except OSError:
        pass  # Above what the user may have: it waits a little more often.
    threading.Thread(
        target=self._listen, name="monitor-relay-said", daemon=True
    ).start()
    try:
      self.write([frame(Kind.BEGIN, msgpack.packb(told))])
    except OSError:
      pass  # What it says is the reason.
    with self._said:
      self._said.wait_for(
          lambda: self._first is not None or self.ended, _START_S
      )
    if self._first is None or "error" in self._first:
      self.end(_GRACE_S if self._first else 0.0)
      self.release()
      if self._first is None:
        raise OSError("the process that tells the monitor did not start")
      raise ValueError(self._first["error"])

  def write(self, parts: Sequence[bytes | memoryview]) -> None:
    """Small parts in one go; pixels are not copied for it.

    Raises:
      OSError: it has ended.
    """
    small: list[bytes] = []
    for part in parts:
      if isinstance(part, bytes):
        small.append(part)
      else:
        self._write(memoryview(b"".join(small)))
        small.clear()
        self._write(part)
    self._write(memoryview(b"".join(small)))

  def _write(self, view: memoryview) -> None:
    while view:
      view = view[os.write(self._pipe, view[:_PIPE_BYTES]) :]

  def answer(self, number: int, wait_s: float) -> bool | None:
    """What it says to this question; None while it says nothing."""
    with self._said:
      self._said.wait_for(
          lambda: number in self._answers or self.ended, max(0.0, wait_s)
      )
      return self._answers.pop(number, None)

  def _listen(self) -> None:
    for line in self._process.stdout:
      try:
        said = orjson.loads(line)
        if "log" in said:
          _LOG.log(said["level"], "%s", said["log"])
          continue
        if "lost" in said:
          self._on_images_lost(said["lost"])
          continue
      except (ValueError, TypeError, KeyError):
        _LOG.warning("%s", line.decode("utf-8", "replace").rstrip())
        continue
      with self._said:
        if self._first is None:
          self._first = said
        elif "answer" in said:
          self._answers[said["answer"]] = bool(said.get("done"))
        self._said.notify_all()
    with self._said:
      self.ended = True
      self._said.notify_all()

  def end(self, timeout_s: float) -> None:
    """Waits until it has ended, and ends it when the time is over."""
    try:
      self._process.wait(timeout_s)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait(_GRACE_S)
    with self._said:
      self._said.wait_for(lambda: self.ended, _GRACE_S)

  def release(self) -> None:
    """Closes its pipes, when it has ended and nobody writes any more."""
    for pipe in (self._process.stdin, self._process.stdout):
      try:
        pipe.close()
      except OSError:
        pass
