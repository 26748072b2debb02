"""The queue between collecting and training: groups of trajectories.

Bounded, safe from any mix of threads and event loops, and gated both ways so
that no batch is trained on data older than the run allows:

* Admission. A producer calls `acquire_start` before it starts a group and is
  held until `accepted + running < (max_staleness + version + 1) *
  groups_per_step`. `version` is the learner's, `groups_per_step` what it
  consumes per version.
* Delivery. A group whose oldest token lags the version by more than
  `max_staleness` is dropped, counted, and its admission refunded. This is a
  hard bound; admission alone is not, because episodes take their time.

Promises: a group is delivered at most once; ready groups are delivered even
when the queue is closed or a producer has failed; `close` and `fail` wake
every waiter; nothing waits for a lock while somebody holds it waiting.

With a `GroupStore`, a group is durable before `put` returns and stays so until
`ack` says that its training is durable too.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import logging
import math
import queue as std_queue
from typing import Any, Callable, Iterable

from tunix.rl.multi_turn.core import trajectory
from tunix.rl.queue import admission
from tunix.rl.queue import async_condition
from tunix.rl.queue import data_queue
from tunix.rl.queue import group_store

_LOG = logging.getLogger(__name__)
_WAIT = async_condition.WAIT

TrajectoryGroup = trajectory.TrajectoryGroup
GroupStore = group_store.GroupStore
QueueClosed = admission.QueueClosed
QueueFailed = admission.QueueFailed
StaleGroupError = admission.StaleGroupError
Ticket = admission.Ticket
MemoryGroupStore = group_store.MemoryGroupStore
ORDERS = admission.ORDERS
_COUNTED = (
    *("started", "put", "delivered", "acked", "released"),
    *("dropped_stale", "refunded", "restored", "lost"),
)


@dataclasses.dataclass
class _Entry:
  index: int
  group: TrajectoryGroup
  oldest: int


class GroupQueue(data_queue.AbstractDataQueue[TrajectoryGroup]):
  """See the module docstring."""

  def __init__(
      self,
      groups_per_step: int,
      max_staleness: int = 0,
      *,
      capacity: int | None = None,
      order: str = "ready",
      stale_policy: str = "drop",
      version: int = 0,
      store: GroupStore | None = None,
      on_drop: Callable[[TrajectoryGroup, str], None] | None = None,
  ):
    """Args:

      groups_per_step: groups the learner consumes per version.
      max_staleness: versions a token may lag behind the learner; 0 is
        synchronous training.
      capacity: ready groups held; `put` waits beyond. By default as many as
        admission lets in, so that an admitted group never waits.
      order: "ready" delivers what is there, oldest admission first within a
        batch; a slow group may end up dropped. "admission" delivers strictly
        in the order of admission and waits for slow groups instead; batches
        are then the same in every run.
      stale_policy: "drop" a group that became too old, or fail the run with
        a StaleGroupError ("error").
      version: the learner's, when it resumes.
      store: durability; groups it still holds are ready at once.
      on_drop: told about groups dropped at delivery and why. Must return at
        once.
    """
    if capacity is None:
      capacity = (max_staleness + 1) * groups_per_step
    admission.check_settings(
        groups_per_step, max_staleness, capacity, order, stale_policy, version
    )
    self.groups_per_step = groups_per_step
    self.max_staleness = max_staleness
    self.capacity = capacity
    self.order = order
    self._stale_is_error = stale_policy == "error"
    self._store: GroupStore = store or MemoryGroupStore()
    # Of its own, as an event loop's may be full of calls that hang.
    self._writer = concurrent.futures.ThreadPoolExecutor(1, "queue-store")
    self._on_drop = on_drop
    self._monitor = async_condition.Monitor()
    self._version = version
    self._ready: collections.OrderedDict[int, _Entry] = (
        collections.OrderedDict()
    )
    self._running: dict[int, Ticket] = {}
    self._putting: set[int] = set()
    self._expected: set[int] = set()
    self._unacked: set[int] = set()
    self._closed = False
    self._error: BaseException | None = None
    self._counts: collections.Counter[str] = collections.Counter()
    self._max_lag = 0
    self._lag_sum = 0
    for index, group in self._store.load():
      self._ready[index] = _Entry(index, group, group.oldest_version)
    self._next_index = max(self._store.known(), default=-1) + 1
    # Groups that count against admission: those consumed in versions before
    # this one, and those that wait here.
    self._accepted = version * groups_per_step + len(self._ready)
    self._counts["restored"] = len(self._ready)
    self._counts["lost"] = self._store.lost

  # --- State ----------------------------------------------------------------

  @property
  def version(self) -> int:
    """The learner's version."""
    return self._version

  @property
  def closed(self) -> bool:
    return self._closed

  def qsize(self) -> int:
    """Groups ready for delivery."""
    with self._monitor:
      return len(self._ready)

  def counters(self) -> dict[str, int | float]:
    """Counts since construction, and the present state:

    started, put, delivered, acked, released (given back unfinished),
    dropped_stale, refunded, restored, lost (not restorable); ready, running,
    accepted (net of drops and refunds), version; max_lag and mean_lag in
    versions, of delivered groups' oldest tokens.
    """
    with self._monitor:
      delivered = self._counts["delivered"]
      return {
          **{name: self._counts[name] for name in _COUNTED},
          "ready": len(self._ready),
          "running": len(self._running),
          "accepted": self._accepted,
          "version": self._version,
          "max_lag": self._max_lag,
          "mean_lag": self._lag_sum / delivered if delivered else 0.0,
      }

  def known(self) -> set[int]:
    """Indices of all groups ever accepted and not lost, before a crash too."""
    return self._store.known()

  def set_version(self, version: int) -> None:
    """The learner has moved on; opens the gate and drops what is too old.

    Raises:
      ValueError: the version went backwards.
    """
    with self._monitor:
      if version < self._version:
        raise ValueError(
            f"version must not go back from {self._version} to {version}"
        )
      self._version = version
      dropped = self._purge()
      self._monitor.notify()
    self._report(dropped)

  # --- Producers ------------------------------------------------------------

  def acquire_start(
      self, timeout: float | None = None, *, index: int | None = None
  ) -> Ticket:
    """Waits for permission to start a group.

    Args:
      timeout: seconds; None waits for ever.
      index: of an unfinished group of a resumed run, which waits only for
        groups before it; a new one by default.

    Raises:
      QueueClosed, QueueFailed: no more groups are wanted.
      queue.Full: time was up.
    """
    return self._monitor.wait(
        lambda: self._try_start(index),
        timeout,
        self._late(std_queue.Full, timeout),
    )

  async def acquire_start_async(
      self, timeout: float | None = None, *, index: int | None = None
  ) -> Ticket:
    """`acquire_start` without blocking the event loop."""
    return await self._monitor.wait_async(
        lambda: self._try_start(index),
        timeout,
        self._late(std_queue.Full, timeout),
    )

  def expect(self, indices: Iterable[int], next_index: int = 0) -> None:
    """Unfinished groups of a resumed run will be started under these indices;
    delivery in admission order waits for them.

    Args:
      indices: of the unfinished groups.
      next_index: all smaller indices are taken; new groups get this one or
        higher ones.
    """
    with self._monitor:
      self._expected.update(indices)
      self._next_index = max(
          self._next_index, next_index, max(self._expected, default=-1) + 1
      )

  def refresh_start(self, ticket: Ticket) -> Ticket:
    """The same permission for another attempt, with today's version."""
    with self._monitor:
      self._require_running(ticket)
      fresh = dataclasses.replace(ticket, start_version=self._version)
      self._running[ticket.index] = fresh
      return fresh

  def release_start(self, ticket: Ticket) -> None:
    """Gives a permission back: its group will never come."""
    with self._monitor:
      self._require_running(ticket)
      del self._running[ticket.index]
      self._counts["released"] += 1
      self._monitor.notify()

  def put(
      self,
      item: TrajectoryGroup,
      ticket: Ticket | None = None,
      timeout: float | None = None,
  ) -> None:
    """Hands a finished group over; waits while the queue is full.

    Args:
      item: the group.
      ticket: the permission it ran under; None for groups that need none
        (offline data).
      timeout: seconds; None waits for ever. The group is not accepted then.

    Raises:
      QueueClosed, QueueFailed: not accepted.
      queue.Full: time was up; not accepted.
    """
    entry = self._entry(item)
    self._monitor.wait(
        lambda: self._reserve(entry, ticket),
        timeout,
        self._late(std_queue.Full, timeout),
    )
    self._persist_and_commit(entry, ticket)

  async def aput(
      self,
      item: TrajectoryGroup,
      ticket: Ticket | None = None,
      timeout: float | None = None,
  ) -> None:
    """`put` without blocking the event loop."""
    entry = self._entry(item)
    await self._monitor.wait_async(
        lambda: self._reserve(entry, ticket),
        timeout,
        self._late(std_queue.Full, timeout),
    )
    if isinstance(self._store, MemoryGroupStore):
      self._persist_and_commit(entry, ticket)
      return
    # Once it is on its way to the disk it is accepted, cancelled or not.
    work = asyncio.get_running_loop().run_in_executor(
        self._writer, self._persist_and_commit, entry, ticket
    )
    try:
      await asyncio.shield(work)
    except asyncio.CancelledError:
      # Who cancels may look at the store next; its locks have deadlines.
      await asyncio.wait((work,))
      raise

  # --- Consumers ------------------------------------------------------------

  def get(
      self, block: bool = True, timeout: float | None = None
  ) -> TrajectoryGroup:
    """Takes one group; see `get_batch`."""
    return self.get_batch(1, timeout if block else 0.0)[0]

  def get_batch(
      self, n: int | None = None, timeout: float | None = None
  ) -> list[TrajectoryGroup]:
    """Takes exactly `n` groups at once, ordered by admission.

    Args:
      n: `groups_per_step` by default.
      timeout: seconds; None waits for ever.

    Raises:
      QueueFailed: a producer failed and not enough groups are ready.
      QueueClosed: closed and not enough groups are ready; those that are can
        still be taken one by one.
      queue.Empty: time was up.
      ValueError: `n` groups can never be ready.
    """
    n = self._check_batch(n)
    dropped: list[_Entry] = []
    try:
      return self._monitor.wait(
          lambda: self._try_take(n, dropped),
          timeout,
          self._late(std_queue.Empty, timeout),
      )
    finally:
      self._report(dropped)

  async def aget(self, timeout: float | None = None) -> TrajectoryGroup:
    """`get` without blocking the event loop."""
    return (await self.aget_batch(1, timeout))[0]

  async def aget_batch(
      self, n: int | None = None, timeout: float | None = None
  ) -> list[TrajectoryGroup]:
    """`get_batch` without blocking the event loop."""
    n = self._check_batch(n)
    dropped: list[_Entry] = []
    try:
      return await self._monitor.wait_async(
          lambda: self._try_take(n, dropped),
          timeout,
          self._late(std_queue.Empty, timeout),
      )
    finally:
      self._report(dropped)

  def unacked(self) -> list[int]:
    """Indices of what was delivered and not acknowledged, ascending."""
    with self._monitor:
      return sorted(self._unacked)

  def ack(self, indices: Iterable[int] | None = None) -> None:
    """What was delivered is trained on, durably.

    Call it when the learner's state that contains it has been saved. Groups
    delivered and not acknowledged are delivered again after a crash.

    Args:
      indices: some of `unacked`; None is all that was delivered so far.
    """
    with self._monitor:
      done = set(self._unacked)
      if indices is not None:
        done.intersection_update(indices)
      self._unacked -= done
      self._counts["acked"] += len(done)
    if done:
      self._store.remove(sorted(done))

  def refund(self, n: int) -> None:
    """`n` delivered groups went into no training step (they taught nothing);
    admits as many more, so that the step can be filled."""
    if n < 0:
      raise ValueError(f"refund needs n >= 0, got {n}")
    with self._monitor:
      self._accepted -= n
      self._counts["refunded"] += n
      self._monitor.notify()

  # --- Ends -----------------------------------------------------------------

  def close(self) -> None:
    """No more groups: wakes every waiter. Idempotent."""
    with self._monitor:
      self._closed = True
      self._monitor.notify()

  def fail(self, error: BaseException) -> None:
    """A producer failed: consumers learn of it once nothing is ready for
    them, producers at once. The first failure is kept."""
    with self._monitor:
      if self._error is None:
        self._error = error
      self._monitor.notify()

  # --- Under the lock -------------------------------------------------------

  def _limit(self) -> int:
    return (self.max_staleness + self._version + 1) * self.groups_per_step

  def _check_open(self) -> None:
    if self._error is not None:
      raise self._failure()
    if self._closed:
      raise QueueClosed("the group queue is closed")

  def _failure(self) -> QueueFailed:
    error = QueueFailed(
        f"collecting failed: {type(self._error).__name__}: {self._error}"
    )
    error.__cause__ = self._error
    return error

  def _require_running(self, ticket: Ticket) -> None:
    if ticket.index not in self._running:
      raise ValueError(
          f"ticket {ticket.index} is not running: it was put or released"
          " before"
      )

  def _try_start(self, index: int | None) -> Any:
    self._check_open()
    ahead = [*self._ready, *self._running]
    consumed = self._accepted - len(self._ready)
    if index is not None:
      ahead = [other for other in ahead if other < index]
    if consumed + len(ahead) >= self._limit():
      return _WAIT
    if index is None:
      index = self._next_index
    elif index in self._running or index in self._ready:
      raise ValueError(f"group {index} is already running or ready")
    self._next_index = max(self._next_index, index + 1)
    ticket = Ticket(index, self._version)
    self._running[index] = ticket
    self._expected.discard(index)
    self._counts["started"] += 1
    return ticket

  @staticmethod
  def _entry(group: TrajectoryGroup) -> _Entry:
    if not isinstance(group, TrajectoryGroup):
      raise TypeError(
          "a group queue holds TrajectoryGroups, got"
          f" {type(group).__name__}"
      )
    return _Entry(-1, group, group.oldest_version)

  def _reserve(self, entry: _Entry, ticket: Ticket | None) -> Any:
    """Makes room for a group that is about to be stored."""
    self._check_open()
    if ticket is not None:
      self._require_running(ticket)
      if ticket.index in self._putting:
        raise ValueError(f"ticket {ticket.index} is being put already")
    if len(self._ready) + len(self._putting) >= self.capacity:
      # In admission order the consumer may be waiting for this very group
      # while later ones fill the queue: it must get in.
      awaited = (
          self.order == "admission"
          and ticket is not None
          and ticket.index == min(self._running)
      )
      if not awaited:
        return _WAIT
    if ticket is not None:
      entry.index = ticket.index
    else:
      entry.index = self._next_index
      self._next_index += 1
    self._putting.add(entry.index)
    return None

  def _persist_and_commit(self, entry: _Entry, ticket: Ticket | None) -> None:
    try:
      self._store.append(entry.index, entry.group)
    except BaseException:
      with self._monitor:
        self._putting.discard(entry.index)
        self._monitor.notify()
      raise
    with self._monitor:
      self._putting.discard(entry.index)
      if ticket is not None:
        self._running.pop(ticket.index, None)
      self._accepted += 1
      self._counts["put"] += 1
      self._ready[entry.index] = entry
      dropped = self._purge()
      self._monitor.notify()
    self._report(dropped)

  def _purge(self) -> list[_Entry]:
    """Takes what is too old out of the ready groups."""
    bound = self._version - self.max_staleness
    dropped = [e for e in self._ready.values() if e.oldest < bound]
    for entry in dropped:
      del self._ready[entry.index]
    self._counts["dropped_stale"] += len(dropped)
    # Refunded, or the gate would stay shut with too few groups behind it.
    self._accepted -= len(dropped)
    if dropped and self._stale_is_error and self._error is None:
      worst = min(dropped, key=lambda e: e.oldest)
      self._error = StaleGroupError(
          f"group {worst.group.group_id!r} holds a token of version"
          f" {worst.oldest}; the learner is at {self._version} and"
          f" max_staleness is {self.max_staleness}"
      )
    return dropped

  def _try_take(self, n: int, dropped: list[_Entry]) -> Any:
    stale = self._purge()
    if stale:
      dropped.extend(stale)
      self._monitor.notify()
    taken = self._select(n)
    if taken is None:
      if self._putting:  # Accepted and on its way to the disk.
        return _WAIT
      if self._error is not None:
        raise self._failure()
      if self._closed:
        raise QueueClosed(
            f"the group queue is closed; {len(self._ready)} groups are ready,"
            f" {n} were asked for"
        )
      return _WAIT
    for entry in taken:
      del self._ready[entry.index]
      self._unacked.add(entry.index)
      lag = max(0, self._version - entry.oldest)
      self._max_lag = max(self._max_lag, lag)
      self._lag_sum += lag
    self._counts["delivered"] += n
    self._monitor.notify()
    return [entry.group for entry in taken]

  def _select(self, n: int) -> list[_Entry] | None:
    if len(self._ready) < n:
      return None
    if self.order == "ready":
      taken = [e for e, _ in zip(self._ready.values(), range(n))]
      return sorted(taken, key=lambda e: e.index)
    taken = sorted(self._ready.values(), key=lambda e: e.index)[:n]
    # Once closed or failed, what still runs will never be put.
    if not self._closed and self._error is None:
      coming = min((*self._running, *self._expected), default=math.inf)
      if coming < taken[-1].index:
        return None
    return taken

  def _check_batch(self, n: int | None) -> int:
    if n is None:
      n = self.groups_per_step
    if n < 1:
      raise ValueError(f"a batch needs at least 1 group, got n={n}")
    if n > self.capacity:
      raise ValueError(
          f"a batch of {n} groups never fits the queue's capacity of"
          f" {self.capacity}; raise capacity or groups_per_step"
      )
    admitted = (self.max_staleness + 1) * self.groups_per_step
    if n > admitted and self._counts["started"]:
      raise ValueError(
          f"a batch of {n} groups is never admitted: max_staleness"
          f" {self.max_staleness} and groups_per_step {self.groups_per_step}"
          f" let {admitted} groups in between two versions"
      )
    return n

  def _report(self, dropped: list[_Entry]) -> None:
    """Outside the lock: tells the store and the listener."""
    if not dropped:
      return
    entries = list(dropped)
    dropped.clear()
    self._store.remove([e.index for e in entries])
    if self._on_drop is None:
      return
    for entry in entries:
      reason = (
          f"its oldest token is of version {entry.oldest}, more than"
          f" {self.max_staleness} behind the learner"
      )
      try:
        self._on_drop(entry.group, reason)
      except Exception:  # pylint: disable=broad-except
        _LOG.exception("on_drop failed for group %s", entry.group.group_id)

  def _late(self, expired: type[Exception], timeout: float | None):
    """Makes the exception of a wait in vain."""
    return lambda: expired(
        f"nothing after {timeout:g} s: version {self._version},"
        f" {len(self._ready)} groups ready, {len(self._running)} running,"
        f" {self._accepted} accepted of {self._limit()} admitted"
    )
