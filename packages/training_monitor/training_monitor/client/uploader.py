"""Uploader process: sends a run's events as rows, off the trainer's CPU.

    trainer: events ─► spool ─► here: rows ─► server

Making an episode's rows, JSON and requests takes a millisecond, most of it
holding the interpreter; the trainer's own interpreter would lose it. This
process runs at low priority instead.

Standard input and output carry JSON lines. In: {"spool", "url", "token",
"config"} first, then {"counters"} of the trainer, {"hurry": seconds} while it
waits for the delivery, and {"close": seconds} to deliver at the end. Out:
{"ready"} or {"error": text} first, then {"log": text, "level": number} for each
log record, {"lost": [hash]} for screenshots that are neither here nor at the
server, and {"acked": record, "empty", "counters"} after a round that has
changed them. The input ends when the trainer ends, however that happens: then
this delivers for `close_timeout_s`, at most 5 s, and the spool keeps the rest.
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
  """Ships one spool, and follows the trainer's messages."""

  def __init__(self, begin: Mapping[str, Any]):
    """Raises ValueError, TypeError, KeyError or OSError."""
    config = settings_lib.MonitorConfig(**begin["config"])
    path = pathlib.Path(begin["spool"])
    self._abandoned_s = min(config.close_timeout_s, _ABANDONED_S)
    self._ended = False
    self._counters: collections.Counter[str] = collections.Counter()
    self._trainers: Mapping[str, int] = {}
    self._sent: dict[str, Any] = {}
    self._shipper = shipper_lib.Shipper(
      transport_lib.Transport(begin["url"], begin["token"], config.timeout_s),
      path,
      spool_lib.Header.read(path),
      config,
      ended=lambda: self._ended,
      counters=self._counters,
      complaints=complaints_lib.Complaints(),
      health=lambda: dict(self._counters + collections.Counter(self._trainers)),
      on_round=self._report,
      on_images_lost=lambda shas: send(lost=shas),
    )

  def _report(self, acked: int, empty: bool) -> None:
    report = {"acked": acked, "empty": empty, "counters": dict(self._counters)}
    if report != self._sent:
      self._sent = report
      send(**report)

  def run(self) -> None:
    """Ships until the trainer closes it or ends."""
    timeout_s = self._abandoned_s
    for line in sys.stdin.buffer:
      message = orjson.loads(line)
      if "counters" in message:
        self._trainers = message["counters"]
        continue
      # A trainer that waits has everything on the disk.
      self._trainers = {**self._trainers, "pending": 0}
      if "close" in message:
        timeout_s = message["close"]
        break
      self._shipper.hurry(message["hurry"])
    self._ended = True
    spool = self._shipper.spool
    delivered = self._shipper.drain(
      spool_lib.last_frame(spool.path, spool.header), timeout_s
    )
    self._shipper.close()
    self._report(spool.acked, delivered)
    if not delivered:
      _LOG.warning(
        "events wait in the spool %s for the monitor; the next run from there"
        " delivers them",
        spool.path,
      )


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
  uploader.run()
  return 0
