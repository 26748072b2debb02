"""Records a run's events and streams them to the uploader process.

    on_event ─► bounded memory ─► a thread: bytes ─► pipe ─► `uploader`

The trainer's process only writes each event down, with the pixels that it
shows for the first time. A frame is its kind and its length, `>BI`, then that
many bytes.

Promises: `on_event` only appends to a list and never waits. Frames that the
pipe has taken survive the trainer, however it ends. Events that memory has no
room for are dropped and counted. An uploader that dies is replaced; one that
hangs delays nothing, `close` included.
"""

from __future__ import annotations

import collections
import dataclasses
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
from tunix.rl.multi_turn.monitor import settings as settings_lib
from tunix.rl.multi_turn.monitor.client import event_codec
from tunix.rl.multi_turn.monitor.client import ingest_rows
from tunix.rl.multi_turn.monitor.client import live_turns

_LOG = logging.getLogger(__name__)
_PROGRAM = str(pathlib.Path(__file__).parents[1] / "__main__.py")
_HEAD = struct.Struct(">BI")
_TICK_S = 0.25
_PLENTY = 256  # Events that are written without waiting for the tick.
_MAX_KNOWN_IMAGES = 100_000
_PIPE_BYTES = 1 << 20
_WRITE_BYTES = 1 << 18
_YIELD_EVERY_S = 1e-3
_YIELD_S = 1e-5
_GRACE_S = 10.0
_MAX_BACKOFF_S = 60.0
COMMAND = "uploader"
"""Argument of `monitor/__main__.py` that starts the uploader."""


class FrameKind(enum.IntEnum):
  """Kind of a frame; its body is MessagePack unless noted."""

  BEGIN = 0  # {"run": RunSpec, "config": MonitorConfig, "images": bool}
  EVENT = 1  # As `event_codec.dump` makes it.
  IMAGE = 2  # Not MessagePack: `IMAGE_HEAD`, and the RGB bytes.
  COUNT = 3  # {counter: increment}
  DRAIN = 4  # [number of the request, seconds]
  CLOSE = 5  # [number of the request]


IMAGE_HEAD = struct.Struct(">64sII")
"""(SHA-256 in hex, height, width)."""


@dataclasses.dataclass(frozen=True)
class RunSpec:
  """The run that an uploader sends, and where to.

  Attributes:
    url: of the server.
    token: of the project, "" for none.
    spool_dir: folder of the spools.
    name: of this trainer's spool, unique in the folder; a replaced uploader
      appends a number.
    target: identifies the server across addresses; "" takes the URL.
    training_id: client id of the training, the same through all its starts.
    session: earlier starts of the run.
    training: columns of the training's row, beyond what events carry.
    start_step: updates made before this start.
    task_source: source of the tasks: the gym, or the environment without one.
    environment: what its worlds are, "linux" or "android".
    trajectories: file of the run's trajectories, "" for none.
    max_turns: of an episode whose task has no limit of its own.
  """

  url: str
  training_id: str
  training: Mapping[str, Any]
  spool_dir: str
  name: str
  token: str = ""
  target: str = ""
  session: int = 0
  start_step: int = 0
  task_source: str = "gym"
  environment: str = "linux"
  trajectories: str = ""
  max_turns: int | None = None


def frame(kind: FrameKind, body: bytes) -> bytes:
  return _HEAD.pack(kind, len(body)) + body


def frames(source: BinaryIO) -> Iterator[tuple[int, bytes]]:
  """Yields (kind, body) until the end; a truncated frame is left out."""
  while True:
    head = source.read(_HEAD.size)
    if len(head) < _HEAD.size:
      return
    kind, size = _HEAD.unpack(head)
    body = source.read(size)
    if len(body) < size:
      return
    yield kind, body


class EventLog:
  """An `events.Observer`; see the module docstring. Close it."""

  def __init__(
      self,
      run: RunSpec,
      config: settings_lib.MonitorConfig = settings_lib.MonitorConfig(),
      *,
      images: images_lib.ImageStore | None = None,
  ):
    """Starts the uploader, and waits until it is ready.

    Args:
      run: the run and its server.
      config: limits and deadlines. `url`, `embedded` and `images` are not
        read: `run` and `images` decide them.
      images: pixels of the screenshots; None sends no pixels.

    Raises:
      ValueError: the uploader refuses to start; its reason.
      OSError: the uploader cannot be started.
    """
    self._run = run
    self._config = config
    self._images = images
    self._waiting: collections.deque[events.Event] = collections.deque()
    self._sent_images: set[str] = set()
    self._replayed: dict[Any, events.Event] = {}
    """Events that a replaced uploader must know: see `_frames_of`."""
    self.dropped = 0
    """Events that there was no room for."""
    self._uncounted: collections.Counter[str] = collections.Counter()
    self._lock = threading.Lock()
    self._requests: list[bytes] = []
    self._work = threading.Event()
    self._hurried = -_TICK_S
    self._closing = threading.Event()
    self._given_up = False
    self._delivered = False
    self._last_request = 0
    self._starts = 0
    self._uploader = self._start()
    self._thread = threading.Thread(
        target=self._forward, name="monitor-event-log", daemon=True
    )
    self._thread.start()

  @property
  def pid(self) -> int:
    """Process id of the uploader."""
    return self._uploader.pid

  def readings(self) -> dict[str, int]:
    """Events that wait for the uploader, and those dropped."""
    return {"waiting": len(self._waiting), "dropped": self.dropped}

  def on_event(self, event: events.Event) -> None:
    if type(event) not in event_codec.RECORDED:
      return
    waiting = self._waiting
    if self._closing.is_set() or len(waiting) >= self._config.max_pending:
      self._count("dropped_memory", 1)
      return
    waiting.append(event)
    if len(waiting) == _PLENTY:
      self._work.set()
    elif type(event) is events.TurnFinished and live_turns.is_watched(event):
      # Somebody may watch it; of many at a time, the first of each tick.
      now = time.monotonic()
      if now - self._hurried > _TICK_S:
        self._hurried = now
        self._work.set()

  def drain(self, timeout_s: float = 10.0) -> bool:
    """Waits until everything is delivered; False when time ran out."""
    return self._request(FrameKind.DRAIN, timeout_s, timeout_s)

  def close(self) -> bool:
    """Delivers for `close_timeout_s`; the spool keeps the rest. Idempotent.

    Returns:
      Whether everything was delivered.
    """
    if self._closing.is_set():
      return self._delivered
    self._closing.set()
    allowed = self._config.close_timeout_s + _GRACE_S
    deadline = time.monotonic() + allowed
    self._delivered = self._request(FrameKind.CLOSE, allowed)
    self._given_up = True
    self._uploader.end(max(1.0, deadline - time.monotonic()))
    self._work.set()
    self._thread.join(_GRACE_S)
    if not self._thread.is_alive():
      self._uploader.release()
    if lost := self.dropped + len(self._waiting):
      _LOG.warning("the monitor did not receive %d events", lost)
    return self._delivered

  def _count(self, name: str, increment: int) -> None:
    with self._lock:
      self._uncounted[name] += increment
      self.dropped += increment if name == "dropped_memory" else 0

  def _request(self, kind: FrameKind, wait_s: float, *more: float) -> bool:
    deadline = time.monotonic() + wait_s
    with self._lock:
      self._last_request += 1
      number = self._last_request
      self._requests.append(frame(kind, msgpack.packb([number, *more])))
    self._work.set()
    while time.monotonic() < deadline:
      uploader = self._uploader
      answer = uploader.answer(number, min(0.5, deadline - time.monotonic()))
      if answer is not None:
        return answer
      if self._closing.is_set() and not self._thread.is_alive():
        return False
      if uploader.ended:
        time.sleep(0.02)  # Until its replacement has started.
    return False

  # --- the forwarding thread --------------------------------------------------

  def _forward(self) -> None:
    failures = 0
    last = False
    while True:
      closing = self._closing.is_set()
      if closing and self._uploader.ended and not (
          self._requests or self._waiting
      ):
        return
      if not self._requests and len(self._waiting) < _PLENTY:
        self._work.wait(_TICK_S)
        self._work.clear()
      try:
        if failures:
          self._uploader = self._start()
        self._write_waiting()
        failures = 0
      except (OSError, ValueError) as error:
        if last or self._given_up:
          return
        # Events that wait at the end are worth one more uploader.
        last = closing
        if not failures:
          _LOG.warning(
              "the monitor's uploader has ended (%s); it is restarted, and"
              " training continues",
              error,
          )
          self._uploader.end(0.0)
          self._uploader.release()
        failures += 1
        delay = min(_MAX_BACKOFF_S, 0.5 * 2 ** min(failures, 10))
        self._closing.wait(delay)

  def _start(self) -> _UploaderProcess:
    """Raises ValueError or OSError."""
    run = self._run
    if self._starts:  # The one before may not have released its spool yet.
      run = dataclasses.replace(run, name=f"{run.name}-{self._starts}")
    begin = {
        "run": dataclasses.asdict(run),
        "config": dataclasses.asdict(self._config),
        "images": self._images is not None,
    }
    # A screenshot that it loses is sent again with the next episode.
    uploader = _UploaderProcess(
        begin, self._config, self._sent_images.difference_update
    )
    if self._starts:
      self._waiting.extendleft(reversed(self._replayed.values()))
    self._starts += 1
    self._sent_images.clear()
    return uploader

  def _write_waiting(self) -> None:
    with self._lock:
      requests, self._requests = self._requests, []
      uncounted, self._uncounted = self._uncounted, collections.Counter()
    parts: list[bytes | memoryview] = []
    if uncounted:
      parts.append(frame(FrameKind.COUNT, msgpack.packb(dict(uncounted))))
    size = 0
    taken: list[events.Event] = []
    yielded = time.perf_counter()
    try:
      while self._waiting:
        event = self._waiting.popleft()
        taken.append(event)
        for part in self._frames_of(event):
          parts.append(part)
          size += len(part)
        if size > _WRITE_BYTES:
          self._uploader.write(parts)
          parts.clear()
          taken.clear()
          size = 0
        if time.perf_counter() - yielded > _YIELD_EVERY_S:
          # Another thread gets the interpreter now, not after a switch
          # interval.
          time.sleep(_YIELD_S)
          yielded = time.perf_counter()
      self._uploader.write([*parts, *requests])
    except OSError:
      # For the replacement. Events that this one has sent count once.
      self._waiting.extendleft(reversed(taken))
      with self._lock:
        self._requests = requests + self._requests
        self._uncounted.update(uncounted)
      raise

  def _frames_of(self, event: events.Event) -> Iterator[bytes | memoryview]:
    if isinstance(event, events.StepFinished):
      # A replaced uploader begins here.
      self._run = dataclasses.replace(
          self._run, start_step=max(event.step, self._run.start_step)
      )
    elif isinstance(event, (events.WeightsPublished, events.EvalStarted)):
      self._replayed[type(event)] = event
    elif isinstance(event, events.TasksListed):
      self._replayed[type(event), event.tasks[0]["task_id"]] = event
    elif isinstance(event, events.EvalFinished):
      self._replayed.pop(events.EvalStarted, None)
    try:
      if isinstance(event, events.EpisodeFinished):
        yield from self._pixels(ingest_rows.images_of(event.trajectory))
      elif isinstance(event, events.TurnFinished):
        yield from self._pixels(live_turns.images_of(live_turns.shown(event)))
      yield frame(FrameKind.EVENT, event_codec.dump(event))
    except Exception as error:  # pylint: disable=broad-except
      # One bad event must not kill the forwarding thread.
      _LOG.warning("an event cannot be recorded: %r", error)
      self._count("failed", 1)

  def _pixels(
      self, images: Mapping[str, trajectory_lib.ImageRef]
  ) -> Iterator[bytes | memoryview]:
    """Screenshots that the uploader may not have."""
    if self._images is None:
      return
    for sha, ref in images.items():
      if sha in self._sent_images:
        continue
      try:
        pixels = self._images.get(ref)
      except (KeyError, OSError, ValueError):
        continue  # The uploader counts it, as it has not received it either.
      if len(self._sent_images) >= _MAX_KNOWN_IMAGES:
        self._sent_images.clear()  # The server knows which it has.
      self._sent_images.add(sha)
      head = IMAGE_HEAD.pack(sha.encode(), *pixels.shape[:2])
      yield _HEAD.pack(FrameKind.IMAGE, len(head) + pixels.nbytes) + head
      yield memoryview(np.ascontiguousarray(pixels)).cast("B")


class _UploaderProcess:
  """One uploader process. One thread at a time writes to it."""

  def __init__(
      self,
      begin: Mapping[str, Any],
      config: settings_lib.MonitorConfig,
      on_images_lost: Callable[[Sequence[str]], None],
  ):
    """Starts it and waits for its first line.

    Args:
      begin: body of the `BEGIN` frame.
      config: its niceness, and how long it may take to start.
      on_images_lost: receives the hashes of screenshots that it has dropped.

    Raises:
      ValueError: it refuses; its reason.
      OSError: it does not start, or does not answer.
    """
    self._process = subprocess.Popen(
        [sys.executable, "-P", _PROGRAM, COMMAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Ctrl-C is for the run. A session of its own would make its niceness
        # meaningless, see `run.monitor`.
        process_group=0,
    )
    self.pid = self._process.pid
    self.ended = False
    self._on_images_lost = on_images_lost
    self._answers: dict[int, bool] = {}
    self._changed = threading.Condition()
    self._first: dict[str, Any] | None = None
    if hasattr(os, "setpriority"):
      try:
        os.setpriority(os.PRIO_PROCESS, self.pid, config.uploader_niceness)
      except OSError:
        pass
    self._pipe = self._process.stdin.fileno()
    if hasattr(fcntl, "F_SETPIPE_SZ"):
      try:
        fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
      except OSError:
        pass  # Above the user's limit: the thread waits a little more often.
    threading.Thread(
        target=self._listen, name="monitor-uploader-output", daemon=True
    ).start()
    try:
      self.write([frame(FrameKind.BEGIN, msgpack.packb(begin))])
    except OSError:
      pass  # Its first line has the reason.
    with self._changed:
      self._changed.wait_for(
          lambda: self._first is not None or self.ended,
          config.start_timeout_s,
      )
    if self._first is None or "error" in self._first:
      self.end(_GRACE_S if self._first else 0.0)
      self.release()
      if self._first is None:
        raise OSError("the monitor's uploader did not start")
      raise ValueError(self._first["error"])

  def write(self, parts: Sequence[bytes | memoryview]) -> None:
    """Writes small parts at once; pixels are not copied.

    Raises:
      OSError: the process has ended.
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
    """The answer to this request; None while there is none."""
    with self._changed:
      self._changed.wait_for(
          lambda: number in self._answers or self.ended, max(0.0, wait_s)
      )
      return self._answers.pop(number, None)

  def _listen(self) -> None:
    for line in self._process.stdout:
      try:
        message = orjson.loads(line)
        if "log" in message:
          _LOG.log(message["level"], "%s", message["log"])
          continue
        if "lost" in message:
          self._on_images_lost(message["lost"])
          continue
      except (ValueError, TypeError, KeyError):
        _LOG.warning("%s", line.decode("utf-8", "replace").rstrip())
        continue
      with self._changed:
        if self._first is None:
          self._first = message
        elif "answer" in message:
          self._answers[message["answer"]] = bool(message.get("done"))
        self._changed.notify_all()
    with self._changed:
      self.ended = True
      self._changed.notify_all()

  def end(self, timeout_s: float) -> None:
    """Waits for the process to end, and kills it when time runs out."""
    try:
      self._process.wait(timeout_s)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait(_GRACE_S)
    with self._changed:
      self._changed.wait_for(lambda: self.ended, _GRACE_S)

  def release(self) -> None:
    """Closes its pipes, once it has ended and no thread writes any more."""
    for pipe in (self._process.stdin, self._process.stdout):
      try:
        pipe.close()
      except OSError:
        pass
