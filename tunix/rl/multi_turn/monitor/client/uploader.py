"""The process that tells the monitor of a run, so that the run does not.

    trainer: events ─► relay ─► pipe ─► here: rows ─► spool ─► server

Making rows, JSON and requests takes a millisecond of an episode, most of it
holding the interpreter; in the trainer's process every one of them would be
training's. Here they are of a process that has the CPU nobody else wants.

The standard input is frames (see `relay`), the standard output JSON lines:
{"ready": true} or {"error": text} first, then {"log": text, "level": number}
whenever there is something to say, {"lost": [hash]} of screenshots that it has
not got any more, and {"answer": number, "done": whether} when a drain or the
end was asked for. The end of the input is the end of the trainer, however that
came: what was told is kept, and delivered as far as the time allows.
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
from tunix.rl.multi_turn.monitor.client import event_codec
from tunix.rl.multi_turn.monitor.client import event_log
from tunix.rl.multi_turn.monitor.client import ingest_client
from tunix.rl.multi_turn.monitor.client import observer as observer_lib
from tunix.rl.multi_turn.monitor.client import png

_MOST_BYTES = 256 << 20  # Of screenshots that no episode has shown yet.
_LOG = logging.getLogger(__name__)


class _Files:
  """Screenshots that came and were not asked for yet; the newest of them."""

  def __init__(self):
    self._lock = threading.Lock()
    self._files: collections.OrderedDict[str, bytes] = (
        collections.OrderedDict()
    )
    self._bytes = 0

  def put(self, sha: str, file: bytes) -> None:
    with self._lock:
      self._bytes += len(file) - len(self._files.pop(sha, b""))
      self._files[sha] = file
      while self._bytes > _MOST_BYTES and len(self._files) > 1:
        self._bytes -= len(self._files.popitem(last=False)[1])

  def pop(self, ref: trajectory_lib.ImageRef) -> bytes:
    """Raises KeyError."""
    with self._lock:
      found = self._files.pop(ref.sha256)
      self._bytes -= len(found)
    return found


class _Says(logging.Handler):
  """What is logged here is the trainer's to log."""

  def emit(self, record: logging.LogRecord) -> None:
    say(log=_clean(self.format(record)), level=record.levelno)


def _clean(text: str) -> str:
  """What JSON can say: an error may quote a lone surrogate."""
  return text.encode("utf-8", "replace").decode()


_SAYING = threading.Lock()


def say(**fields: Any) -> None:
  with _SAYING:
    try:
      sys.stdout.buffer.write(orjson.dumps(fields) + b"\n")
      sys.stdout.buffer.flush()
    except (OSError, ValueError):
      pass  # Nobody listens any more.


def _observer(
    told: Mapping[str, Any], files: _Files
) -> observer_lib.MonitorObserver:
  """Raises ValueError, OSError or sqlite3.Error, as `IngestClient` does."""
  client = ingest_client.IngestClient(
      told["url"], told["token"], **told["client"]
  )
  return observer_lib.MonitorObserver(
      client,
      observer_lib.RunIdentity(**told["identity"]),
      told["training"],
      png_of=files.pop if told["images"] else None,
      on_images_lost=lambda shas: say(lost=list(shas)),
      **told["observer"],
  )


def main() -> int:
  """Tells until the input ends; returns the exit status."""
  # Who ends all processes of a job must not end this one before the trainer
  # has told it of its end. The end of the input is what it waits for.
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
  logging.getLogger().addHandler(_Says())
  frames = event_log.frames(sys.stdin.buffer)
  files = _Files()
  kind, body = next(frames, (None, b""))
  if kind != event_log.Kind.BEGIN:
    say(error="this is a run's own process: see monitor.url and .embedded")
    return 2
  try:
    observer = _observer(msgpack.unpackb(body), files)
  except Exception as error:  # pylint: disable=broad-except
    say(error=_clean(f"{error}" or type(error).__name__))
    return 2
  say(ready=True)
  try:
    for kind, body in frames:
      _take(observer, files, kind, body)
      if kind == event_log.Kind.CLOSE:
        break
  finally:
    observer.close()
  return 0


def _take(
    observer: observer_lib.MonitorObserver,
    files: _Files,
    kind: int,
    body: bytes,
) -> None:
  if kind == event_log.Kind.EVENT:
    try:
      event = event_codec.load(body)
    except ValueError as error:
      _LOG.warning("an event cannot be read: %s", error)
      observer.client.sender.counters["failed"] += 1
      return
    observer.on_event(event)
  elif kind == event_log.Kind.IMAGE:
    sha, height, width = event_log.IMAGE_HEAD.unpack_from(body)
    pixels = np.frombuffer(body, np.uint8, offset=event_log.IMAGE_HEAD.size)
    # Here, so that pixels come no faster than they become small.
    file = png.encode(pixels.reshape(height, width, 3))
    files.put(sha.decode(), file)
  elif kind == event_log.Kind.COUNT:
    observer.client.sender.counters.update(msgpack.unpackb(body))
  elif kind == event_log.Kind.DRAIN:
    number, seconds = msgpack.unpackb(body)
    say(answer=number, done=observer.client.drain(seconds))
  elif kind == event_log.Kind.CLOSE:
    (number,) = msgpack.unpackb(body)
    say(answer=number, done=observer.close())
  else:
    raise ValueError(f"frame kind {kind}: none of those there are")
