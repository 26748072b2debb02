"""Queues a client's items: memory, then spool, then server, each at its pace.

    put ─► bounded memory ─► spool (a thread) ─► server (another thread)

Promises: `put` takes microseconds and never waits; an item that the spool has
taken (`flush`) survives the process; everything in the spool reaches the server
at least once and is applied there once, in order, however often it is sent (see
`delivery`). Items that memory or the disk has no room for are dropped and
counted. A server that is slow, dead or wrong is logged once and affects nothing
else.
"""

from __future__ import annotations

import collections
import logging
import pathlib
import random
import sqlite3
import threading
import time
from typing import Any, Callable, Iterable, Mapping

from tunix.rl.multi_turn.monitor import settings as settings_lib
from tunix.rl.multi_turn.monitor.client import delivery as delivery_lib
from tunix.rl.multi_turn.monitor.client import plain_json
from tunix.rl.multi_turn.monitor.client import spool as spool_lib
from tunix.rl.multi_turn.monitor.client import transport as transport_lib

_LOG = logging.getLogger(__name__)
# Each append is an fsync, and each delivery one on the server: items within
# these times go together.
_TICK_S = 0.25
_PACE_S = 0.25
_PLENTY = 100  # Entries that are handled without waiting for the tick.
_YIELD_S = 1e-5
_YIELD_EVERY_S = 1e-3
_IDLE_S = 0.1
_APPEND_BYTES = 1 << 20  # Of one append.
_IMAGES_SHARE = 0.25

Part = Mapping[str, Any]
"""A part of a batch: `training` and arrays, as the protocol has them."""


class SpoolItem:
  """A part of a batch with its images; a `put` callable may return it."""

  __slots__ = ("part", "images")

  def __init__(self, part: Part, images: Mapping[str, bytes] | None = None):
    self.part = part
    self.images = images or {}


class Sender:
  """See the module docstring. Close it."""

  def __init__(
      self,
      base_url: str,
      token: str,
      folder: str | pathlib.Path,
      config: settings_lib.MonitorConfig,
      *,
      name: str,
      target: str = "",
      on_reply: Callable[[Mapping[str, Any]], None] = lambda reply: None,
  ):
    """Args:

      base_url: of the server.
      token: of the project.
      folder: of spools; those that ended processes left there are delivered,
        too.
      config: `timeout_s`, `max_pending`, `heartbeat_s`, and `spool_mb`, of
        which screenshots fill three quarters.
      name: of this process's spool, unique in the folder.
      target: identifies the server in its spools; "" takes the URL.
      on_reply: receives the reply to each batch, on the sending thread.

    Raises:
      ValueError: `base_url` is not a URL.
      OSError, sqlite3.Error: the spool cannot be opened.
    """
    self._transport = transport_lib.Transport(
        base_url, token, config.timeout_s
    )
    self._folder = pathlib.Path(folder)
    self._target = target or base_url.rstrip("/")
    self.spool = spool_lib.Spool(
        self._folder / f"{name}{spool_lib.SUFFIX}",
        self._target,
        max_bytes=config.spool_bytes,
    )
    self._max_pending = config.max_pending
    self._heartbeat_s = config.heartbeat_s
    self._on_reply = on_reply
    self._pending: collections.deque[Any] = collections.deque()
    self.counters: collections.Counter[str] = collections.Counter()
    """dropped_memory, dropped_disk, dropped_images, dead_letters, failed,
    sent, retries."""
    self.training: str | int | None = None
    """Training that heartbeats are sent for."""
    self.on_images_lost: Callable[[Iterable[str]], None] = lambda shas: None
    """Receives the hashes of dropped images, on the spool's thread."""
    self._lock = threading.Lock()
    self._taken = 0
    self._kept = 0
    self._closing = threading.Event()
    self._abandon = threading.Event()
    self._work = threading.Event()
    self._keep_now = threading.Event()
    self._hurry = threading.Event()
    self._hurried = -_TICK_S
    self._delivered = threading.Event()
    self._complaints: set[str] = set()
    self._delivery = delivery_lib.Delivery(
        self._transport, self.counters, abandon=self._abandon,
        hurry=self._hurry, health=self.health, on_reply=self._replied,
        complain=self._complain,
    )  # pyformat: disable
    self._keeping = threading.Thread(
        target=self._keep, name="monitor-spool", daemon=True
    )
    self._sending = threading.Thread(
        target=self._send, name="monitor-send", daemon=True
    )
    self._keeping.start()
    self._sending.start()

  def put(
      self,
      make: Callable[[], SpoolItem | Part | None] | Part,
      *,
      soon: bool = False,
  ) -> bool:
    """Takes a part of a batch, or a callable that makes one on another thread.

    Args:
      make: the part, or makes it.
      soon: it does not wait for others, unless one has just not waited.

    Returns:
      False when it was dropped.
    """
    pending = self._pending
    if self._closing.is_set() or len(pending) >= self._max_pending:
      with self._lock:
        self.counters["dropped_memory"] += 1
      return False
    with self._lock:
      pending.append(make)
      self._taken += 1
    now = time.monotonic() if soon else 0.0
    if soon and now - self._hurried > _TICK_S:
      self._hurried = now
      self._keep_now.set()
    elif len(pending) > self._max_pending // 4:
      self._keep_now.set()
    return True

  def flush(self, timeout_s: float = 10.0) -> bool:
    """Waits until all queued items are in the spool; False on timeout."""
    wanted, deadline = self._taken, time.monotonic() + timeout_s
    while self._kept < wanted:
      if time.monotonic() > deadline or not self._keeping.is_alive():
        return self._kept >= wanted
      self._keep_now.set()
      time.sleep(0.005)
    return True

  def drain(self, timeout_s: float = 10.0) -> bool:
    """Waits until everything is delivered; False when time ran out."""
    deadline = time.monotonic() + timeout_s
    if not self.flush(timeout_s):
      return False
    self._hurry.set()
    try:
      return self._drain(deadline)
    finally:
      self._hurry.clear()

  def _drain(self, deadline: float) -> bool:
    while True:
      self._delivered.clear()
      self._work.set()
      try:
        counts = self.spool.counts()
      except sqlite3.Error:
        return False  # Logged already, where reading it failed.
      if not counts["entry"] and not counts["image"]:
        return True
      left = deadline - time.monotonic()
      if left <= 0 or not self._sending.is_alive():
        return False
      self._delivered.wait(min(left, 0.5))

  def close(self, timeout_s: float = 10.0) -> bool:
    """Delivers as much as the time allows, and ends. Idempotent.

    Returns:
      Whether everything was delivered; else it waits for the next start.
    """
    if self._closing.is_set():
      return self.counters["undelivered"] == 0
    deadline = time.monotonic() + timeout_s
    kept = self.flush(timeout_s)
    self._closing.set()
    self._keep_now.set()
    self._keeping.join(max(0.1, deadline - time.monotonic()))
    done = kept and self.drain(max(0.0, deadline - time.monotonic()))
    self._abandon.set()
    self._hurry.set()
    self._work.set()
    self._transport.close()
    self._sending.join(5.0)
    try:
      left = self.spool.counts()
      self.counters["undelivered"] = left["entry"] + left["image"]
    except sqlite3.Error as error:
      _LOG.warning("the spool %s cannot be read: %s", self.spool.path, error)
      self.counters["undelivered"] += 1
      done = False
    lost = {
        k: v for k, v in self.counters.items()
        if v and k.startswith(("dropped", "dead", "failed", "images_missing"))
    }  # pyformat: disable
    if lost:
      _LOG.warning("the monitor did not receive everything: %s", lost)
    if not done:
      _LOG.warning(
          "%d parts wait in %s for the monitor; the next run from there"
          " delivers them",
          self.counters["undelivered"],
          self.spool.path,
      )
    if not self._keeping.is_alive() and not self._sending.is_alive():
      self.spool.close()
    return done

  def health(self) -> dict[str, int]:
    """Counters and fill of memory and spool, sent with each batch."""
    return {
        **self.counters,
        "pending": len(self._pending),
        "spool_bytes": int(self.spool.bytes),
    }

  # --- memory to spool ------------------------------------------------------

  def _keep(self) -> None:
    while True:
      closing = self._closing.is_set()
      if self._pending:
        try:
          self._keep_some()
        except Exception:  # pylint: disable=broad-except
          self._complain("spool", "the monitor's spool failed")
          time.sleep(0.5)
      elif closing:
        return
      if not closing:
        if len(self._pending) < _PLENTY:
          self._keep_now.wait(_TICK_S)
        self._keep_now.clear()
      elif self._abandon.is_set():
        return

  def _keep_some(self) -> None:
    bodies: list[bytes] = []
    images: dict[str, bytes] = {}
    size = taken = 0
    yielded = time.perf_counter()
    while taken < len(self._pending) and size < _APPEND_BYTES:
      make = self._pending[taken]  # Stays until it is on the disk.
      taken += 1
      try:
        item = make() if callable(make) else make
        if not item:
          self._pending[taken - 1] = _NOTHING
          continue
        if not isinstance(item, SpoolItem):
          item = SpoolItem(item)
        body = plain_json.dumps(item.part)
      except Exception as error:  # pylint: disable=broad-except
        self.counters["failed"] += 1
        self._complain("make", f"an item cannot be sent: {error!r}")
        # It would fail again, and may have changed the callable's state.
        self._pending[taken - 1] = _NOTHING
        continue
      # Made once: a second attempt must not make it again.
      self._pending[taken - 1] = _again(item)
      bodies.append(body)
      if time.perf_counter() - yielded > _YIELD_EVERY_S:
        # Another thread gets the interpreter now, not after a switch interval.
        time.sleep(_YIELD_S)
        yielded = time.perf_counter()
      images.update(item.images)
      size += len(body) + sum(map(len, item.images.values()))
    if images and self.spool.room < _IMAGES_SHARE:
      self._lose(images)
      images = {}
    try:
      if bodies:
        self.spool.append(bodies, images)
    except spool_lib.SpoolFull as error:
      self._complain("full", f"the monitor's spool is full: {error}")
      self._lose(images)
      if not images or not self._append_words(bodies):
        self.counters["dropped_disk"] += len(bodies)
    except sqlite3.Error as error:
      # Pending items stay in memory, which is bounded.
      self.counters["spool_failures"] += 1
      self._complain("disk", f"{self.spool.path} cannot be written: {error}")
      time.sleep(0.5)
      return
    for _ in range(taken):
      self._pending.popleft()
    self._kept += taken
    self._work.set()

  def _lose(self, images: Iterable[str]) -> None:
    lost = list(images)
    self.counters["dropped_images"] += len(lost)
    if lost:
      self.on_images_lost(lost)

  def _append_words(self, bodies: list[bytes]) -> bool:
    """Appends items without the images that there was no room for."""
    try:
      self.spool.append(bodies, {})
    except (spool_lib.SpoolFull, sqlite3.Error):
      return False
    return True

  # --- spool to server ------------------------------------------------------

  def _send(self) -> None:
    failures = 0
    beat = time.monotonic()
    orphans: list[spool_lib.Spool] | None = None
    while not self._abandon.is_set():
      try:
        sent = self.counters["sent"]
        worked = self._delivery.some(self.spool)
        if self.counters["sent"] > sent:
          beat = time.monotonic()
        if not worked and orphans is None:
          orphans = list(
              spool_lib.claim_orphans(
                  self._folder, self._target, self.spool.path
              )
          )
        worked += self._send_orphans(orphans or [])
        failures = 0
        now = time.monotonic()
        if now - beat > self._heartbeat_s and self.training is not None:
          beat = now
          self._delivery.beat(self.training)
      except transport_lib.TransportError as error:
        if self._abandon.is_set():
          break
        failures += 1
        self.counters["retries"] += 1
        self._complain(
            f"send{error.status}",
            f"the monitor does not answer, training continues: {error}",
        )
        self._pause(delivery_lib.backoff(error, failures))
        continue
      except Exception:  # pylint: disable=broad-except
        if self._abandon.is_set():
          break
        self._complain("sending", "sending to the monitor failed")
        self._abandon.wait(1.0)
        continue
      if not worked:
        self._delivered.set()
        self._work.wait(_IDLE_S)
        self._work.clear()
      elif worked < _PLENTY:
        self._hurry.wait(_PACE_S)
    for orphan in orphans or ():
      orphan.close()

  def _send_orphans(self, orphans: list[spool_lib.Spool]) -> int:
    """A round of each; empty and unreadable ones are removed."""
    worked = 0
    for orphan in list(orphans):
      try:
        found = self._delivery.some(orphan)
        counts = orphan.counts()
        empty = not counts["entry"] and not counts["image"]
      except sqlite3.Error as error:
        self._complain(
            f"orphan {orphan.path}",
            f"the spool {orphan.path} cannot be read: {error}",
        )
        orphan.close(remove_if_empty=False)
        spool_lib.put_aside(orphan.path, error)
        orphans.remove(orphan)
        continue
      worked += found
      if empty:
        orphan.close()
        orphans.remove(orphan)
    return worked

  def _pause(self, seconds: float) -> None:
    # Many trainers must not retry at the same moment.
    seconds *= random.uniform(0.5, 1.0)
    if self._hurry.is_set():
      self._abandon.wait(min(seconds, delivery_lib.HURRIED_S))
    else:
      self._hurry.wait(seconds)

  def _replied(self, reply: Mapping[str, Any]) -> None:
    self._complaints.difference_update(
        [c for c in self._complaints if c.startswith("send")]
    )
    self._on_reply(reply)

  def _complain(self, what: str, message: str) -> None:
    """Logs it once, until it has worked again."""
    if what not in self._complaints:
      self._complaints.add(what)
      _LOG.warning("%s", message, exc_info=what in ("spool", "sending"))


def _NOTHING() -> None:  # pylint: disable=invalid-name
  return None


def _again(item: SpoolItem) -> Callable[[], SpoolItem]:
  return lambda: item
