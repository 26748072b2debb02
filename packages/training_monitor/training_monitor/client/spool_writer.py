"""Puts a program's items into its spool, on a thread of its own.

    put ─► bounded memory ─► a thread: bytes ─► spool

Promises: `put` takes microseconds and never waits, neither for the disk nor for
the network. Items that memory or the spool has no room for are dropped and
counted. A disk that fails loses nothing as long as memory has room.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from typing import Any, Callable

from training_monitor.client import complaints as complaints_lib
from training_monitor.client import spool as spool_lib

_TICK_S = 0.25
_PLENTY = 256  # Items that are written without waiting for the tick.
_WRITE_BYTES = 1 << 18
_YIELD_EVERY_S = 1e-3
_YIELD_S = 1e-5
_RETRY_S = 0.5


class SpoolWriter:
  """See the module docstring. Close it."""

  def __init__(
    self,
    spool: spool_lib.Spool,
    encode: Callable[[Any], tuple[int, bytes]],
    *,
    max_pending: int,
    counters: collections.Counter[str],
    complaints: complaints_lib.Complaints,
    on_tick: Callable[[int], None] = lambda pending: None,
  ):
    """Args:

    spool: Owned by the writer from now on.
    encode: makes (kind, body) of an item's record, on the thread; an item
      for which it raises OSError is kept for another attempt.
    max_pending: items in memory.
    counters: dropped_memory, dropped_disk, failed and spool_failures are
      counted there.
    complaints: logs problems.
    on_tick: receives how many items wait, on the thread, after each round.
    """
    self.spool = spool
    self._encode = encode
    self._max_pending = max_pending
    self._counters = counters
    self._complaints = complaints
    self._on_tick = on_tick
    self._pending: collections.deque[Any] = collections.deque()
    self._made: list[tuple[int, bytes]] = []
    """Records that are not in the spool yet."""
    self._lock = threading.Lock()
    self._taken = 0
    self._handled = 0
    """Items that are no longer pending."""
    self._synced = 0
    """Those of them that are on the disk."""
    self._sync_through = 0
    """Those that a flush waits for."""
    self._work = threading.Event()
    self._hurried = -_TICK_S
    self._closing = threading.Event()
    self._thread = threading.Thread(
      target=self._run, name="monitor-spool", daemon=True
    )
    self._thread.start()

  @property
  def pending(self) -> int:
    """Items that are not in the spool yet."""
    return len(self._pending) + len(self._made)

  def put(self, item: object, *, soon: bool = False) -> bool:
    """Takes an item; it must not change afterwards.

    Args:
      item: Argument of `encode`.
      soon: it does not wait for others, unless one has just not waited.

    Returns:
      False when it was dropped.
    """
    pending = self._pending
    with self._lock:
      if self._closing.is_set() or len(pending) >= self._max_pending:
        self._counters["dropped_memory"] += 1
        return False
      pending.append(item)
      self._taken += 1
    if soon:
      now = time.monotonic()
      if now - self._hurried > _TICK_S:
        self._hurried = now
        self._work.set()
    elif len(pending) == _PLENTY:
      self._work.set()
    return True

  def flush(self, timeout_s: float = 10.0) -> bool:
    """Waits until all items are on the disk; False when time ran out."""
    target, deadline = self._taken, time.monotonic() + timeout_s
    with self._lock:
      self._sync_through = max(self._sync_through, target)
    while self._synced < target and self._thread.is_alive():
      if time.monotonic() > deadline:
        break
      self._work.set()
      time.sleep(0.005)
    return self._synced >= target

  def close(self, timeout_s: float = 10.0) -> bool:
    """Flushes and ends; the spool stays open. Idempotent."""
    flushed = self.flush(timeout_s)
    with self._lock:
      self._closing.set()
    self._work.set()
    self._thread.join(max(1.0, timeout_s))
    return flushed and not self.pending

  # --- the thread -------------------------------------------------------------

  def _run(self) -> None:
    while not self._closing.is_set():
      if len(self._pending) < _PLENTY and not self._made:
        self._work.wait(_TICK_S)
        self._work.clear()
      try:
        self._round()
        self.spool.measure()
        self._complaints.over("disk")
      except OSError as error:
        # Items stay in memory, which is bounded.
        self._counters["spool_failures"] += 1
        self._complaints.complain(
          "disk", f"{self.spool.path} cannot be written: {error}"
        )
        self._closing.wait(_RETRY_S)
      self._on_tick(self.pending)
    with contextlib.suppress(OSError):  # What came too late for the flush.
      self._round()

  def _round(self) -> None:
    """Puts the pending items into the spool. Raises OSError."""
    remaining = len(self._pending)
    yielded = time.perf_counter()
    while remaining or self._made:
      size = sum(len(body) for _, body in self._made)
      while remaining and size < _WRITE_BYTES:
        size += self._make(self._pending[0])
        self._pending.popleft()
        self._handled += 1
        remaining -= 1
        if time.perf_counter() - yielded > _YIELD_EVERY_S:
          # Another thread gets the interpreter now, not after a switch
          # interval.
          time.sleep(_YIELD_S)
          yielded = time.perf_counter()
      if self._made:
        self._append()
    if self._synced < self._sync_through:
      self.spool.sync()
      self._synced = self._handled

  def _make(self, item: object) -> int:
    """Makes an item's record; returns its bytes. Raises OSError."""
    try:
      self._made.append(self._encode(item))
      return len(self._made[-1][1])
    except OSError:
      raise  # It is made again.
    except Exception as error:  # pylint: disable=broad-except
      # One bad item must not kill the thread.
      self._counters["failed"] += 1
      self._complaints.complain("make", f"an item cannot be sent: {error!r}")
      return 0

  def _append(self) -> None:
    """Raises OSError."""
    try:
      del self._made[: self.spool.append(self._made)]
    except spool_lib.SpoolFull as error:
      self._complaints.complain("full", f"the monitor's spool is full: {error}")
      self._counters["dropped_disk"] += 1
      del self._made[0]
