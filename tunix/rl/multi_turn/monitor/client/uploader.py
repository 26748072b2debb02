"""Uploader process: sends a run's events as rows, off the trainer's CPU.

    trainer: events ─► event log ─► pipe ─► here: rows ─► spool ─► server

Making an episode's rows, JSON and requests takes a millisecond, most of it
holding the interpreter; the trainer's own interpreter would lose it. This
process runs at low priority instead.

Standard input carries frames (see `event_log`), standard output JSON lines:
{"ready": true} or {"error": text} first, then {"log": text, "level": number}
for each log record, {"lost": [hash]} for screenshots that it has dropped, and
{"answer": number, "done": bool} for each drain and close request. The input
ends when the trainer ends, however that happens: the uploader keeps what it
received, and delivers as much as time allows.
"""

from __future__ import annotations

import collections
import logging
import signal
import sys
import threading
from typing import Any, Mapping

import msgpack
import numpy as np
import orjson
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.monitor import settings as settings_lib
from tunix.rl.multi_turn.monitor.client import event_codec
from tunix.rl.multi_turn.monitor.client import event_log
from tunix.rl.multi_turn.monitor.client import ingest_client
from tunix.rl.multi_turn.monitor.client import observer as observer_lib
from tunix.rl.multi_turn.monitor.client import png

_LOG = logging.getLogger(__name__)


class _Screenshots:
  """Received screenshots that no episode has shown yet; keeps the newest."""

  def __init__(self, max_bytes: int):
    self._max = max_bytes
    self._lock = threading.Lock()
    self._files: collections.OrderedDict[str, bytes] = (
        collections.OrderedDict()
    )
    self._bytes = 0

  def put(self, sha: str, file: bytes) -> None:
    with self._lock:
      self._bytes += len(file) - len(self._files.pop(sha, b""))
      self._files[sha] = file
      while self._bytes > self._max and len(self._files) > 1:
        self._bytes -= len(self._files.popitem(last=False)[1])

  def pop(self, ref: trajectory_lib.ImageRef) -> bytes:
    """Raises KeyError."""
    with self._lock:
      found = self._files.pop(ref.sha256)
      self._bytes -= len(found)
    return found


class _LogForwarder(logging.Handler):
  """Sends log records to the trainer, which logs them."""

  def emit(self, record: logging.LogRecord) -> None:
    send(log=_encodable(self.format(record)), level=record.levelno)


def _encodable(text: str) -> str:
  """Text that JSON can hold: an error may quote a lone surrogate."""
  return text.encode("utf-8", "replace").decode()


_SENDING = threading.Lock()


def send(**fields: Any) -> None:
  """Writes a line to the trainer."""
  with _SENDING:
    try:
      sys.stdout.buffer.write(orjson.dumps(fields) + b"\n")
      sys.stdout.buffer.flush()
    except (OSError, ValueError):
      pass  # The trainer has ended.


def _observer(
    begin: Mapping[str, Any],
) -> tuple[observer_lib.MonitorObserver, _Screenshots]:
  """Raises ValueError, OSError or sqlite3.Error, as `IngestClient` does."""
  run = event_log.RunSpec(**begin["run"])
  config = settings_lib.MonitorConfig(**begin["config"])
  files = _Screenshots(config.image_memory_mb << 20)
  client = ingest_client.IngestClient(
      run.url, run.token, config.timeout_s, spool_dir=run.spool_dir,
      name=run.name, target=run.target, config=config,
  )  # pyformat: disable
  observer = observer_lib.MonitorObserver(
      client,
      observer_lib.RunIdentity(run.training_id, run.session),
      run.training,
      png_of=files.pop if begin["images"] else None,
      on_images_lost=lambda shas: send(lost=list(shas)),
      start_step=run.start_step,
      task_source=run.task_source,
      environment=run.environment,
      trajectories=run.trajectories,
      max_turns=run.max_turns,
      close_s=config.close_timeout_s,
  )
  return observer, files


def main() -> int:
  """Uploads until the input ends; returns the exit status."""
  # A signal to all processes of a job must not end this one before the trainer
  # has sent its end. It ends with its input.
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
  logging.getLogger().addHandler(_LogForwarder())
  frames = event_log.frames(sys.stdin.buffer)
  kind, body = next(frames, (None, b""))
  if kind != event_log.FrameKind.BEGIN:
    send(error="a run starts this process itself: set monitor.url or .embedded")
    return 2
  try:
    observer, files = _observer(msgpack.unpackb(body))
  except Exception as error:  # pylint: disable=broad-except
    send(error=_encodable(f"{error}" or type(error).__name__))
    return 2
  send(ready=True)
  try:
    for kind, body in frames:
      _handle(observer, files, kind, body)
      if kind == event_log.FrameKind.CLOSE:
        break
  finally:
    observer.close()
  return 0


def _handle(
    observer: observer_lib.MonitorObserver,
    files: _Screenshots,
    kind: int,
    body: bytes,
) -> None:
  if kind == event_log.FrameKind.EVENT:
    try:
      event = event_codec.load(body)
    except ValueError as error:
      _LOG.warning("an event cannot be read: %s", error)
      observer.client.sender.counters["failed"] += 1
      return
    observer.on_event(event)
  elif kind == event_log.FrameKind.IMAGE:
    sha, height, width = event_log.IMAGE_HEAD.unpack_from(body)
    pixels = np.frombuffer(body, np.uint8, offset=event_log.IMAGE_HEAD.size)
    # Encoded here, so that pixels arrive no faster than they become small.
    file = png.encode(pixels.reshape(height, width, 3))
    files.put(sha.decode(), file)
  elif kind == event_log.FrameKind.COUNT:
    observer.client.sender.counters.update(msgpack.unpackb(body))
  elif kind == event_log.FrameKind.DRAIN:
    number, seconds = msgpack.unpackb(body)
    send(answer=number, done=observer.client.drain(seconds))
  elif kind == event_log.FrameKind.CLOSE:
    (number,) = msgpack.unpackb(body)
    send(answer=number, done=observer.close())
  else:
    known = ", ".join(map(str, event_log.FrameKind))
    raise ValueError(f"frame kind {kind} is unknown; known: {known}")
