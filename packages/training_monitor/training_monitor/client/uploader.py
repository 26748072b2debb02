"""Uploader process: sends a run's events as rows, off the trainer's CPU.

    trainer: events ─► spool ─► here: rows ─► server

Making an episode's rows, JSON and requests takes a millisecond, most of it
holding the interpreter; the trainer's own interpreter would lose it. This
process runs at low priority instead.

Standard input and output carry JSON lines. In: {"spool", "url", "token",
"config"} first, then {"counters"} of the trainer, and {"drain" or "close":
number, "through": record, "timeout_s"}. Out: {"ready"} or {"error": text}
first, then {"log": text, "level": number} for each log record, {"lost": [hash]}
for screenshots that are neither here nor at the server, {"freed": bytes} of the
spool, and {"answer": number, "done", "closed", "counters"} for each request.
The input ends when the trainer ends, however that happens: then this delivers
for `close_timeout_s`, at most 5 s, and the spool keeps the rest.
"""

from __future__ import annotations

import collections
import logging
import pathlib
import signal
import sys
import threading
from typing import Any, Mapping

import orjson

from training_monitor.client import complaints as complaints_lib
from training_monitor.client import shipper as shipper_lib
from training_monitor.client import spool as spool_lib
from training_monitor.client import transport as transport_lib
from training_monitor.core import monitor_settings as settings_lib

_LOG = logging.getLogger(__name__)
_ABANDONED_S = 5.0
"""Longest delivery after the trainer's death."""


class _LogForwarder(logging.Handler):
  """Sends log records to the trainer, which logs them."""

  def emit(self, record: logging.LogRecord) -> None:
    send(log=_encodable(self.format(record)), level=record.levelno)


def _encodable(text: str) -> str:
  """Returns text for JSON: an error may quote a lone surrogate."""
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


class _Uploader:
  """Ships one spool, and does what the trainer asks."""

  def __init__(self, begin: Mapping[str, Any]):
    """Raises ValueError, TypeError, KeyError or OSError."""
    config = settings_lib.MonitorConfig(**begin["config"])
    path = pathlib.Path(begin["spool"])
    self._close_s = config.close_timeout_s
    self._ended = False
    self._counters: collections.Counter[str] = collections.Counter()
    self._trainers: Mapping[str, int] = {}
    self._complaints = complaints_lib.Complaints()
    self._shipper = shipper_lib.Shipper(
        transport_lib.Transport(
            begin["url"], begin["token"], config.timeout_s
        ),
        path, spool_lib.Header.read(path), config,
        ended=lambda: self._ended, counters=self._counters,
        complaints=self._complaints, health=self._health,
        on_freed=lambda size: send(freed=size),
        on_images_lost=lambda shas: send(lost=shas),
    )  # pyformat: disable

  def _health(self) -> dict[str, int]:
    return dict(self._counters + collections.Counter(self._trainers))

  def handle(self, message: Mapping[str, Any]) -> None:
    """Does what a line asks for."""
    if "counters" in message:
      self._trainers = message["counters"]
      return
    number = message.get("drain") or message["close"]
    self._ended = "close" in message
    # Who asks has everything on the disk.
    self._trainers = {**self._trainers, "pending": 0}
    delivered = self._shipper.drain(message["through"], message["timeout_s"])
    if self._ended:
      self._close(delivered)
    send(
        answer=number, done=delivered, closed=self._ended,
        counters=dict(self._counters),
    )  # pyformat: disable

  @property
  def closed(self) -> bool:
    return self._ended

  def abandoned(self) -> None:
    """Delivers for the last time, after the trainer's death."""
    self._ended = True
    delivered = self._shipper.drain(None, min(self._close_s, _ABANDONED_S))
    self._close(delivered)

  def _close(self, delivered: bool) -> None:
    self._shipper.close()
    if not delivered:
      _LOG.warning(
          "events wait in the spool %s for the monitor; the next run from there"
          " delivers them", self._shipper.path,
      )  # pyformat: disable


def main() -> int:
  """Uploads until the input ends; returns the exit status."""
  # A signal to all processes of a job must not end this one before the trainer
  # has sent its end. It ends with its input.
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
  logging.getLogger().addHandler(_LogForwarder())
  try:
    begin = orjson.loads(sys.stdin.buffer.readline())
  except ValueError:
    send(error="a run starts this process itself: set monitor.url or .embedded")
    return 2
  try:
    uploader = _Uploader(begin)
  except Exception as error:  # pylint: disable=broad-except
    send(error=_encodable(f"{error}" or type(error).__name__))
    return 2
  send(ready=True)
  for line in sys.stdin.buffer:
    uploader.handle(orjson.loads(line))
    if uploader.closed:
      return 0
  uploader.abandoned()
  return 0
