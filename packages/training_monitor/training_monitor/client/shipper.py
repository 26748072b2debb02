"""Ships spools to the server, on a thread: a program's own, then orphans.

Promises: everything in the spools reaches the server at least once and is
applied there once, in order, however often it is sent (see `delivery`). A
server that is slow, dead or wrong is logged once and affects nothing else.
"""

from __future__ import annotations

import collections
import logging
import pathlib
import random
import threading
import time
from typing import Any, Callable, Mapping

from training_monitor.client import complaints as complaints_lib
from training_monitor.client import delivery as delivery_lib
from training_monitor.client import spool as spool_lib
from training_monitor.client import spool_reader
from training_monitor.client import transport as transport_lib
from training_monitor.core import monitor_settings as settings_lib

_LOG = logging.getLogger(__name__)
# Each delivery is an fsync here and one on the server: entries within this time
# go together.
_PACE_S = 0.25
_PLENTY = 100  # Entries that do not wait for it.
_IDLE_S = 0.1
_JOIN_S = 5.0


class Shipper:
  """See the module docstring. Close it."""

  def __init__(
      self,
      transport: transport_lib.Transport,
      path: pathlib.Path,
      header: spool_lib.Header,
      config: settings_lib.MonitorConfig,
      *,
      ended: Callable[[], bool],
      counters: collections.Counter[str],
      complaints: complaints_lib.Complaints,
      health: Callable[[], Mapping[str, int]],
      on_reply: Callable[[Mapping[str, Any]], None] = lambda reply: None,
      on_freed: Callable[[int], None] = lambda size: None,
      on_images_lost: Callable[[list[str]], None] = lambda shas: None,
  ):
    """Args:

      transport: Connection to the server; the shipper closes it.
      path: Folder of the program's spool, whose lock the caller has; orphans
        lie beside it.
      header: Header of that spool.
      config: `heartbeat_s`.
      ended: whether nothing more goes into the spool.
      counters: dead_letters, failed, damaged, images_missing, spool_failures,
        sent and retries are counted there.
      complaints: logs problems.
      health: counters of the client, sent with each batch.
      on_reply: receives the reply to each batch.
      on_freed: receives the bytes that the spool has lost.
      on_images_lost: receives hashes of screenshots that are not there.

    Raises:
      OSError, ValueError: the spool cannot be read.
    """
    self._transport = transport
    self._heartbeat_s = config.heartbeat_s
    self._on_reply = on_reply
    self._on_freed = on_freed
    self._counters = counters
    self._complaints = complaints
    self._abandon = threading.Event()
    self._hurry = threading.Event()
    self._work = threading.Event()
    self._rounds = threading.Condition()
    self._settled = (0, False)
    """(Last record that the server has, whether nothing that was read waits)
    after a round."""
    self._idle = 0
    """Rounds that found nothing to do."""
    self._beaten = time.monotonic()
    self._reader = self._read(
        path, header, ended, on_images_lost=on_images_lost
    )
    self.training: str | int | None = self._reader.training
    """Training that heartbeats are sent for."""
    self._orphans: dict[spool_reader.SpoolReader, spool_lib.Lock] | None = None
    self._delivery = delivery_lib.Delivery(
        transport, counters, abandon=self._abandon, hurry=self._hurry,
        health=health, on_reply=self._replied, complain=complaints.complain,
    )  # pyformat: disable
    self._thread = threading.Thread(
        target=self._run, name="monitor-send", daemon=True
    )
    self._thread.start()

  def _read(
      self,
      path: pathlib.Path,
      header: spool_lib.Header,
      ended: Callable[[], bool],
      **options: Any,
  ) -> spool_reader.SpoolReader:
    return spool_reader.SpoolReader(
        path, header, ended=ended, counters=self._counters,
        complain=self._complaints.complain, **options,
    )  # pyformat: disable

  @property
  def path(self) -> pathlib.Path:
    """Of the program's spool."""
    return self._reader.path

  @property
  def acked(self) -> int:
    """Number of the last record of the program's spool that the server has."""
    return self._reader.acked

  def wake(self) -> None:
    """Wakes the thread: the spool has something new."""
    self._work.set()

  def drain(self, through: int | None, timeout_s: float = 10.0) -> bool:
    """Waits until the server has records and their screenshots.

    Args:
      through: the last of the records; None for all, of orphans too.
      timeout_s: how long.

    Returns:
      False when time ran out.
    """
    deadline = time.monotonic() + timeout_s
    self._hurry.set()
    try:
      with self._rounds:
        before = self._idle
        while not self._settled[1] or (
            self._idle == before
            if through is None
            else self._settled[0] < through
        ):
          remaining_s = deadline - time.monotonic()
          if remaining_s <= 0 or not self._thread.is_alive():
            return False
          self._work.set()
          self._rounds.wait(min(remaining_s, 0.5))
      return True
    finally:
      self._hurry.clear()

  def close(self) -> None:
    """Stops the thread; deletes an empty spool. Idempotent."""
    self._abandon.set()
    self._hurry.set()
    self._work.set()
    self._transport.close()
    self._thread.join(_JOIN_S)
    if self._thread.is_alive():
      return
    for orphan, lock in (self._orphans or {}).items():
      orphan.close()
      lock.release()
    try:
      self._reader.close()
    except OSError as error:
      _LOG.warning("the spool %s: %s", self._reader.path, error)

  # --- the thread -------------------------------------------------------------

  def _run(self) -> None:
    failures = 0
    while not self._abandon.is_set():
      try:
        worked = self._ship()
        failures = 0
      except transport_lib.TransportError as error:
        if self._abandon.is_set():
          break
        failures += 1
        self._counters["retries"] += 1
        self._complaints.complain(
            f"send{error.status}",
            f"the monitor does not answer, training continues: {error}",
        )
        self._pause(delivery_lib.backoff(error, failures))
        continue
      except Exception as error:  # pylint: disable=broad-except
        if self._abandon.is_set():
          break
        self._counters["spool_failures"] += isinstance(error, OSError)
        self._complaints.complain(
            "sending", f"sending to the monitor failed: {error!r}"
        )
        self._abandon.wait(1.0)
        continue
      self._complaints.over("sending")
      self._report_freed()
      with self._rounds:
        self._settled = self.acked, self._reader.empty
        self._idle += not worked
        self._rounds.notify_all()
      if not worked:
        if self._reader.left(1):
          self._reader.shrink(self._work.is_set)
          self._report_freed()
        self._work.wait(_IDLE_S)
        self._work.clear()
      elif worked < _PLENTY:
        self._hurry.wait(_PACE_S)

  def _ship(self) -> int:
    """Ships a round of each spool; returns how much was sent."""
    sent = self._counters["sent"]
    worked = self._delivery.some(self._reader)
    if not worked and self._orphans is None:
      self._orphans = self._claimed()
    worked += self._ship_orphans()
    now = time.monotonic()
    if self._counters["sent"] > sent:
      self._beaten = now
    elif now - self._beaten > self._heartbeat_s and self.training is not None:
      self._beaten = now
      self._delivery.beat(self.training)
    return worked

  def _claimed(self) -> dict[spool_reader.SpoolReader, spool_lib.Lock]:
    path, target = self._reader.path, self._reader.header.target
    locks = {}
    for orphan, header, lock in spool_lib.claim_orphans(
        path.parent, target, path
    ):
      try:
        locks[self._read(orphan, header, lambda: True)] = lock
      except Exception as error:  # pylint: disable=broad-except
        self._unreadable(orphan, error)
        lock.release()
    return locks

  def _ship_orphans(self) -> int:
    """Ships a round of each orphan; lets go of empty and unreadable ones."""
    worked = 0
    orphans = self._orphans or {}
    for orphan, lock in list(orphans.items()):
      try:
        shipped = self._delivery.some(orphan)
        worked += shipped
        if shipped or not orphan.empty:
          continue
        orphan.close()
      except OSError as error:
        self._unreadable(orphan.path, error)
      lock.release()
      del orphans[orphan]
    return worked

  def _unreadable(self, path: pathlib.Path, error: Exception) -> None:
    self._complaints.complain(
        f"orphan {path}", f"the spool {path} cannot be read: {error}"
    )
    if not isinstance(error, OSError):
      spool_lib.put_aside(path, error)

  def _pause(self, seconds: float) -> None:
    # Many trainers must not retry at the same moment.
    seconds *= random.uniform(0.5, 1.0)
    until = time.monotonic() + seconds
    # Screenshots become smaller meanwhile, so that more of them have room.
    self._reader.shrink(
        lambda: self._hurry.is_set() or time.monotonic() > until
    )
    self._report_freed()
    remaining_s = max(0.0, until - time.monotonic())
    if self._hurry.is_set():
      self._abandon.wait(min(remaining_s, delivery_lib.HURRIED_S))
    else:
      self._hurry.wait(remaining_s)

  def _report_freed(self) -> None:
    freed = self._reader.take_freed()
    if freed:
      self._on_freed(freed)

  def _replied(self, reply: Mapping[str, Any]) -> None:
    self._complaints.over("send")
    self._on_reply(reply)
