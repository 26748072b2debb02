"""Queues groups of trajectories between collecting and training.

A `GroupQueue` is bounded, safe from any mix of threads and event loops, and
gated both ways so that no batch is trained on data older than the run allows:

* Admission. A producer calls `acquire_start` before it starts a group and is
  held until `accepted + running < (max_staleness + version + 1) *
  groups_per_step`. `version` is the learner's, `groups_per_step` the
  number that it consumes per version. With `admission` "finished", running
  groups do not count, with "recent" late ones do not (`QueueConfig.counts`):
  the producer bounds them.
* Delivery. A group whose oldest token lags the version by more than
  `max_staleness` is dropped, counted, and its admission refunded; with
  `stale_policy` "trim" it is delivered without those tokens in the loss. This
  is a hard bound; admission alone is not, because episodes take their time.

Promises: a group is delivered at most once; ready groups are delivered even
when the queue is closed or a producer has failed; `close` and `fail` wake
every waiter; nothing waits while it holds the lock.

It is a `transport.GroupTransport`; `put`, `get_batch` and `ack` are the forms
for threads. With a `GroupStore`, a group is durable before `put` returns and
stays so until `ack` confirms that its training is durable too. The rules are
`Ledger`'s.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import logging
import queue as std_queue
from typing import Any, Callable, Iterable, Sequence

from tunix.rl.multi_turn.core import trajectory
from tunix.rl.queue import admission
from tunix.rl.queue import async_condition
from tunix.rl.queue import group_store
from tunix.rl.queue import ledger
from tunix.rl.queue import transport

_LOG = logging.getLogger(__name__)
_UPSTREAM = "tunix.rl.queue.data_queue"

TrajectoryGroup = trajectory.TrajectoryGroup
GroupStore = group_store.GroupStore
QueueConfig = admission.QueueConfig
QueueClosed = admission.QueueClosed
QueueFailed = admission.QueueFailed
StaleGroupError = admission.StaleGroupError
Ticket = admission.Ticket
MemoryGroupStore = group_store.MemoryGroupStore
ORDERS = admission.ORDERS


def _queue_base() -> Any:
  """Returns google-tunix's class of queues; `object` where it is absent."""
  try:
    data_queue = importlib.import_module(_UPSTREAM)
  except ModuleNotFoundError as error:
    if error.name != _UPSTREAM:
      raise  # It is installed, and lacks a package of its own.
    return object
  return data_queue.AbstractDataQueue


_QueueBase: Any = _queue_base()


class GroupQueue(_QueueBase):
  """See the module docstring."""

  def __init__(
    self,
    groups_per_step: int,
    config: QueueConfig = QueueConfig(),
    *,
    order: str = "ready",
    version: int = 0,
    store: GroupStore | None = None,
    on_drop: Callable[[TrajectoryGroup, str], None] | None = None,
  ):
    """Args:

    groups_per_step: groups the learner consumes per version.
    config: staleness and capacity. The default capacity is what admission
      lets in, so that an admitted group never waits in `put`.
    order: "ready" delivers ready groups, oldest admission first, as their
      tokens are the next to grow too old; a slow group may end up dropped.
      "admission" delivers strictly in the order of admission and waits for
      slow groups instead; batches are then the same in every run.
    version: the learner's, when it resumes.
    store: durability; groups it still holds are ready at once.
    on_drop: receives each group dropped at delivery, and the reason. Must
      return at once.
    """
    self._ledger = ledger.Ledger(groups_per_step, config, order, version)
    self._store: GroupStore = store or MemoryGroupStore()
    # Of its own, as an event loop's may be full of calls that hang.
    self._writer = concurrent.futures.ThreadPoolExecutor(1, "queue-store")
    self._on_drop = on_drop or (lambda group, reason: None)
    self.on_settled: Callable[[list[int]], None] = lambda indices: None
    """Receives the indices of groups that never come again: acknowledged, or
    dropped at delivery."""
    self._condition = async_condition.AsyncCondition()
    self._lent: dict[int, list[int]] = {}  # Index -> id of its latest lease.
    self._ledger.restore(
      [
        ledger.QueuedGroup.of(group, index)
        for index, group in self._store.load()
      ],
      self._store.known(),
      self._store.lost,
    )

  # --- State ----------------------------------------------------------------

  @property
  def version(self) -> int:
    """The learner's version."""
    return self._ledger.version

  @property
  def closed(self) -> bool:
    return self._ledger.closed

  @property
  def max_staleness(self) -> int:
    """Versions a token may lag behind the learner."""
    return self._ledger.config.max_staleness

  @property
  def bounds_running(self) -> bool:
    """Whether admission by itself bounds the groups that run."""
    return self._ledger.config.bounds_running

  @property
  def capacity(self) -> int:
    """Groups held."""
    return self._ledger.capacity

  def qsize(self) -> int:
    """Counts the groups that are ready for delivery."""
    with self._condition:
      return self._ledger.ready

  def room(self) -> int:
    """Returns the number of groups that may start now."""
    with self._condition:
      return self._ledger.room

  def counters(self) -> dict[str, int | float]:
    """Returns counts since construction, and the present state:

    started, put, delivered, acked, released (given back unfinished),
    dropped_stale, refunded, forfeited, restored, lost (not restorable),
    trimmed_tokens (that left the loss for their age); ready, running,
    accepted (net of drops and refunds), version; max_lag and mean_lag in
    versions, of delivered groups' oldest tokens.
    """
    with self._condition:
      return self._ledger.counters()

  def known(self) -> set[int]:
    """Indices of all groups ever accepted and not lost, before a crash too."""
    return self._store.known()

  def set_version(self, version: int) -> None:
    """Records the learner's new version: opens the gate, drops old groups.

    Raises:
      ValueError: the version went backwards.
    """
    with self._condition:
      if version < self.version:
        raise ValueError(
          f"version must not go back from {self.version} to {version}"
        )
      self._ledger.version = version
      dropped = self._ledger.purge()
      self._condition.notify()
    self._report(dropped)

  # --- Producers ------------------------------------------------------------

  def acquire_start(
    self, timeout: float | None = None, *, index: int | None = None
  ) -> Ticket:
    """Waits for permission to start a group.

    Args:
      timeout: seconds; None waits without end.
      index: Index of an unfinished group of a resumed run, which waits only for
        groups before it; a new one by default.

    Raises:
      QueueClosed, QueueFailed: no more groups are wanted.
      queue.Full: time was up.
    """
    return self._condition.wait(
      lambda: self._ledger.start([index]),
      timeout,
      self._late(std_queue.Full, timeout),
    )[0]

  async def acquire_parts_async(
    self, indices: Sequence[int | None], timeout: float | None = None
  ) -> list[Ticket]:
    """`acquire_start` of a group's parts, all at once, without blocking the
    event loop.

    Args:
      indices: ascending, of the unfinished parts of a resumed run; None each
        for a new group's.
      timeout: See `acquire_start`.
    """
    return await self._condition.wait_async(
      lambda: self._ledger.start(indices),
      timeout,
      self._late(std_queue.Full, timeout),
    )

  def expect(self, indices: Iterable[int], next_index: int = 0) -> None:
    """Announces unfinished groups of a resumed run, to be started under these
    indices; delivery in admission order waits for them.

    Args:
      indices: Indices of the unfinished groups.
      next_index: all smaller indices are taken; new groups get this one or
        higher ones.
    """
    with self._condition:
      self._ledger.expect(indices, next_index)

  def refresh_start(self, ticket: Ticket) -> Ticket:
    """Returns the ticket for another attempt, with the present version."""
    with self._condition:
      return self._ledger.refresh(ticket)

  def release_start(self, ticket: Ticket) -> None:
    """Gives a ticket back whose group will never come."""
    with self._condition:
      self._ledger.release(ticket)
      self._condition.notify()

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
      timeout: seconds; None waits without end. The group is not accepted then.

    Raises:
      QueueClosed, QueueFailed: not accepted.
      queue.Full: time was up; not accepted.
    """
    entry = self._entry(item)
    self._condition.wait(
      lambda: self._ledger.reserve(entry, ticket),
      timeout,
      self._late(std_queue.Full, timeout),
    )
    self._persist_and_commit(entry, ticket)

  async def push(
    self,
    item: TrajectoryGroup,
    ticket: Ticket | None = None,
    timeout: float | None = None,
  ) -> None:
    """`put` without blocking the event loop."""
    entry = self._entry(item)
    await self._condition.wait_async(
      lambda: self._ledger.reserve(entry, ticket),
      timeout,
      self._late(std_queue.Full, timeout),
    )
    if isinstance(self._store, MemoryGroupStore):
      self._persist_and_commit(entry, ticket)
      return
    # Once it is on its way to the disk it is accepted, cancelled or not.
    try:
      work = asyncio.get_running_loop().run_in_executor(
        self._writer, self._persist_and_commit, entry, ticket
      )
    except RuntimeError:  # The writer has ended.
      with self._condition:
        self._ledger.cancel(entry)
        self._condition.notify()
      raise QueueClosed("the queue was closed") from None
    try:
      await asyncio.shield(work)
    except asyncio.CancelledError:
      # The caller may read the store next; its locks have deadlines.
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
      timeout: seconds; None waits without end.

    Raises:
      QueueFailed: a producer failed and not enough groups are ready.
      QueueClosed: closed and not enough groups are ready; those that are can
        still be taken one by one.
      queue.Empty: time was up.
      ValueError: `n` groups can never be ready.
    """
    n = self._ledger.check_batch(n)
    dropped: list[ledger.QueuedGroup] = []
    try:
      entries = self._condition.wait(
        lambda: self._take(n, dropped),
        timeout,
        self._late(std_queue.Empty, timeout),
      )
    finally:
      self._report(dropped)
    return _groups(entries)

  async def lease(
    self, n: int | None = None, timeout: float | None = None
  ) -> transport.Lease[TrajectoryGroup] | None:
    """`get_batch` without blocking the event loop; None: time was up."""
    n = self._ledger.check_batch(n)
    dropped: list[ledger.QueuedGroup] = []
    try:
      entries = await self._condition.wait_async(
        lambda: self._take(n, dropped),
        timeout,
        self._late(std_queue.Empty, timeout),
      )
    except std_queue.Empty:
      return None
    finally:
      self._report(dropped)
    indices = [e.index for e in entries]
    with self._condition:
      self._lent.update(dict.fromkeys(indices, indices))
    return transport.Lease(indices, _groups(entries))

  def unacked(self) -> list[int]:
    """Indices of delivered groups without acknowledgement, ascending."""
    with self._condition:
      return self._ledger.unacked()

  def ack(self, indices: Iterable[int] | None = None) -> None:
    """Confirms that delivered groups are trained on, durably.

    Call it when the learner's state that contains it has been saved. Groups
    delivered and not acknowledged are delivered again after a crash.

    Args:
      indices: Part of `unacked`; None acknowledges every delivered group.
    """
    with self._condition:
      acked = self._ledger.ack(indices)
      for index in acked:
        self._lent.pop(index, None)
    if acked:
      self._store.remove(acked)
      self.on_settled(acked)

  async def acknowledge(self, lease_id: list[int]) -> None:
    """`ack` of a lease, without blocking the event loop."""
    await asyncio.to_thread(self.ack, self._still_lent(lease_id))

  async def release(self, lease: transport.Lease[TrajectoryGroup]) -> None:
    """Makes the groups of a lease ready again."""
    with self._condition:
      groups = dict(zip(lease.id, lease.groups))
      self._ledger.put_back(
        ledger.QueuedGroup.of(groups[index], index)
        for index in self._still_lent(lease.id)
        if self._lent.pop(index)
      )
      self._condition.notify()

  def _still_lent(self, lease_id: list[int]) -> list[int]:
    """Indices of a lease that are in no later one; the id is compared as an
    object, as the later one may have equal indices."""
    return [index for index in lease_id if self._lent.get(index) is lease_id]

  def refund(self, n: int) -> None:
    """Admits `n` more groups in place of delivered ones that went into no
    training step, so that the step can be filled."""
    if n < 0:
      raise ValueError(f"refund needs n >= 0, got {n}")
    with self._condition:
      self._ledger.refund(n)
      self._condition.notify()

  def forfeit(self, n: int) -> None:
    """Admits `n` groups fewer: another queue gave them to a training step."""
    if n < 0:
      raise ValueError(f"forfeit needs n >= 0, got {n}")
    with self._condition:
      self._ledger.forfeit(n)

  # --- Ends -----------------------------------------------------------------

  def close(self) -> None:
    """Refuses further groups and wakes every waiter. Idempotent."""
    with self._condition:
      self._ledger.closed = True
      self._condition.notify()
    self._writer.shutdown(wait=False)

  def fail(self, error: BaseException) -> None:
    """Records a producer's failure: it is raised to producers at once, to
    consumers when nothing is ready. The first failure is kept."""
    with self._condition:
      if self._ledger.error is None:
        self._ledger.error = error
      self._condition.notify()

  # --- Inside ---------------------------------------------------------------

  @staticmethod
  def _entry(group: TrajectoryGroup) -> ledger.QueuedGroup:
    if not isinstance(group, TrajectoryGroup):
      raise TypeError(
        f"a group queue holds TrajectoryGroups, got {type(group).__name__}"
      )
    return ledger.QueuedGroup.of(group)

  def _persist_and_commit(
    self, entry: ledger.QueuedGroup, ticket: Ticket | None
  ) -> None:
    # 1. Store the group outside the lock: a slow disk holds up no other caller,
    #    and a group is never delivered before it is durable.
    try:
      self._store.append(entry.index, entry.group)
    except BaseException:
      with self._condition:
        self._ledger.cancel(entry)
        self._condition.notify()
      raise
    # 2. Make it ready. The learner may have advanced since it was reserved, so
    #    groups that are too old are taken out in the same hold of the lock.
    with self._condition:
      self._ledger.commit(entry, ticket)
      dropped = self._ledger.purge()
      self._condition.notify()
    self._report(dropped)

  def _take(
    self, n: int, dropped: list[ledger.QueuedGroup]
  ) -> list[ledger.QueuedGroup] | None:
    """Tries to take `n` groups; adds those that are too old to `dropped`."""
    stale = self._ledger.purge()
    if stale:
      dropped.extend(stale)
      self._condition.notify()
    result = self._ledger.take(n)
    if result is None:
      return None
    self._condition.notify()
    return result

  def _report(self, dropped: list[ledger.QueuedGroup]) -> None:
    """Frees stored groups and calls `on_drop`; not under the lock."""
    if not dropped:
      return
    entries = list(dropped)
    dropped.clear()
    indices = [e.index for e in entries]
    self._store.remove(indices)
    for entry in entries:
      which, version = "oldest", entry.oldest
      if self._ledger.config.stale_policy == "trim":
        which, version = "newest", entry.newest
      reason = (
        f"its {which} token is of version {version}, more than"
        f" {self.max_staleness} behind the learner"
      )
      try:
        self._on_drop(entry.group, reason)
      except Exception:  # pylint: disable=broad-except
        _LOG.exception("on_drop failed for group %s", entry.group.group_id)
    self.on_settled(indices)

  def _late(
    self, expired: type[Exception], timeout: float | None
  ) -> Callable[[], Exception]:
    """Makes the exception of a timeout."""
    return lambda: expired(
      f"nothing after {timeout:g} s: {self._ledger.describe()}"
    )


def _groups(entries: list[ledger.QueuedGroup]) -> list[TrajectoryGroup]:
  return [entry.group for entry in entries]
