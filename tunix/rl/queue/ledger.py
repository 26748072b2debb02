"""Keeps a group queue's books: which groups run, wait, were taken or dropped.

A `Ledger` holds the state of a `GroupQueue` and applies its rules: admission,
order of delivery, the bound on staleness. A method that cannot do its work yet
changes nothing and returns None.

Does not: lock, wait, wake or store anything (`GroupQueue` does).
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Iterable, Sequence

from tunix.rl.multi_turn.core import trajectory
from tunix.rl.queue import admission

Ticket = admission.Ticket

COUNTED = (
  *("started", "put", "delivered", "acked", "released"),
  *("dropped_stale", "refunded", "forfeited", "restored", "lost"),
  "trimmed_tokens",
)


@dataclasses.dataclass
class QueuedGroup:
  """A finished group with its place in the order of admission.

  Attributes:
    index: -1 until `Ledger.reserve` gives it one.
    group: the group.
    oldest, newest: versions of its oldest and its newest token.
  """

  index: int
  group: trajectory.TrajectoryGroup
  oldest: int
  newest: int

  @classmethod
  def of(
    cls, group: trajectory.TrajectoryGroup, index: int = -1
  ) -> QueuedGroup:
    return cls(index, group, group.oldest_version, group.newest_version)


class Ledger:
  """The state of a queue. The caller holds a lock around every call.

  Attributes:
    groups_per_step, config, capacity, order: as the queue's.
    version: the learner's.
    closed: no more groups are wanted.
    error: the first failure of a producer, or a StaleGroupError.
    counts: see `counters`.
  """

  def __init__(
    self,
    groups_per_step: int,
    config: admission.QueueConfig,
    order: str,
    version: int,
  ):
    capacity = config.capacity_for(groups_per_step)
    if groups_per_step < 1:
      raise ValueError(f"groups_per_step must be >= 1, got {groups_per_step}")
    if version < 0:
      raise ValueError(f"version must be >= 0, got {version}")
    if order not in admission.ORDERS:
      raise ValueError(
        f"order must be one of {admission.ORDERS}, got {order!r}"
      )
    if capacity < groups_per_step:
      raise ValueError(
        f"capacity must be at least groups_per_step={groups_per_step}, or a"
        f" batch never fits; got {capacity}"
      )
    self.groups_per_step = groups_per_step
    self.config = config
    self.capacity = capacity
    self.order = order
    self.version = version
    self.closed = False
    self.error: BaseException | None = None
    self.counts: collections.Counter[str] = collections.Counter()
    self._ready: collections.OrderedDict[int, QueuedGroup] = (
      collections.OrderedDict()
    )
    self._running: dict[int, Ticket] = {}
    self._putting: set[int] = set()
    self._expected: set[int] = set()
    self._unacked: dict[int, int] = {}  # Index -> lag at the delivery.
    self._next_index = 0
    # Groups that count against admission: those consumed in versions before
    # this one, and those that wait here.
    self._accepted = version * groups_per_step
    self._max_lag = 0
    self._lag_sum = 0

  def restore(
    self, entries: Iterable[QueuedGroup], indices: Iterable[int], lost: int
  ) -> None:
    """Takes over a store's groups; none of `indices` is given again."""
    for entry in entries:
      self._ready[entry.index] = entry
    self._next_index = max(indices, default=-1) + 1
    self._accepted += len(self._ready)
    self.counts["restored"] = len(self._ready)
    self.counts["lost"] = lost

  @property
  def ready(self) -> int:
    """Groups ready for delivery."""
    return len(self._ready)

  def counters(self) -> dict[str, int | float]:
    """Returns the counts, see `GroupQueue.counters`."""
    delivered = self.counts["delivered"]
    return {
      **{name: self.counts[name] for name in COUNTED},
      "ready": len(self._ready),
      "running": len(self._running),
      "accepted": self._accepted,
      "version": self.version,
      "max_lag": self._max_lag,
      "mean_lag": self._lag_sum / delivered if delivered else 0.0,
    }

  def describe(self) -> str:
    """Describes the state in one line, for errors."""
    return (
      f"version {self.version}, {len(self._ready)} groups ready,"
      f" {len(self._running)} running, {self._accepted} accepted of"
      f" {self._limit()} admitted"
    )

  # --- Admission ------------------------------------------------------------

  @property
  def room(self) -> int:
    """Number of new groups that `start` would admit."""
    counted = len(self._ready) + sum(map(self._counts, self._running))
    return max(0, self._limit() - self._accepted + len(self._ready) - counted)

  def start(self, indices: Sequence[int | None]) -> list[Ticket] | None:
    """Returns a ticket for each group, in ascending order; see `_ticket`."""
    self._check_open()
    earlier = [*self._ready, *filter(self._counts, self._running)]
    consumed = self._accepted - len(self._ready)
    last = indices[-1]
    if last is not None:
      earlier = [i for i in earlier if i < last and i not in indices]
    if consumed + len(earlier) + len(indices) > self._limit():
      return None
    for index in indices:
      if index in self._running or index in self._ready:
        raise ValueError(f"group {index} is already running or ready")
    return [self._ticket(index) for index in indices]

  def _counts(self, index: int) -> bool:
    return self.config.counts(self._running[index], self.version)

  def _ticket(self, index: int | None) -> Ticket:
    """Makes the ticket of a new group (None), or of an unfinished one."""
    if index is None:
      index = self._next_index
    self._next_index = max(self._next_index, index + 1)
    ticket = Ticket(index, self.version)
    self._running[index] = ticket
    self._expected.discard(index)
    self.counts["started"] += 1
    return ticket

  def expect(self, indices: Iterable[int], next_index: int) -> None:
    """Notes unfinished groups, see `GroupQueue.expect`."""
    self._expected.update(indices)
    self._next_index = max(
      self._next_index, next_index, max(self._expected, default=-1) + 1
    )

  def refresh(self, ticket: Ticket) -> Ticket:
    """Returns the ticket with the present version."""
    self._require_running(ticket)
    fresh = dataclasses.replace(ticket, start_version=self.version)
    self._running[ticket.index] = fresh
    return fresh

  def release(self, ticket: Ticket) -> None:
    """Ends a ticket whose group will never come."""
    self._require_running(ticket)
    del self._running[ticket.index]
    self.counts["released"] += 1

  def refund(self, n: int) -> None:
    """Admits `n` more groups, in place of accepted ones not trained on."""
    self._accepted -= n
    self.counts["refunded"] += n

  def forfeit(self, n: int) -> None:
    """Counts `n` groups as consumed that another queue has delivered."""
    self._accepted += n
    self.counts["forfeited"] += n

  # --- Acceptance -----------------------------------------------------------

  def reserve(
    self, entry: QueuedGroup, ticket: Ticket | None
  ) -> QueuedGroup | None:
    """Makes room for a group that is about to be stored; gives it an index."""
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
        return None
    if ticket is not None:
      entry.index = ticket.index
    else:
      entry.index = self._next_index
      self._next_index += 1
    self._putting.add(entry.index)
    return entry

  def cancel(self, entry: QueuedGroup) -> None:
    """Gives the room of a group back that could not be stored."""
    self._putting.discard(entry.index)

  def commit(self, entry: QueuedGroup, ticket: Ticket | None) -> None:
    """Makes a stored group ready."""
    self._putting.discard(entry.index)
    if ticket is not None:
      self._running.pop(ticket.index, None)
    self._accepted += 1
    self.counts["put"] += 1
    self._ready[entry.index] = entry

  # --- Delivery -------------------------------------------------------------

  def purge(self) -> list[QueuedGroup]:
    """Takes groups that are too old out of the ready ones."""
    bound, trims = self._bound(), self.config.stale_policy == "trim"
    dropped = [
      e
      for e in self._ready.values()
      if (e.newest if trims else e.oldest) < bound
    ]
    for entry in dropped:
      del self._ready[entry.index]
    self.counts["dropped_stale"] += len(dropped)
    # Refunded, or the gate would stay shut with too few groups behind it.
    self._accepted -= len(dropped)
    is_error = self.config.stale_policy == "error"
    if dropped and is_error and self.error is None:
      worst = min(dropped, key=lambda e: e.oldest)
      self.error = admission.StaleGroupError(
        f"group {worst.group.group_id!r} holds a token of version"
        f" {worst.oldest}; the learner is at {self.version} and"
        f" max_staleness is {self.config.max_staleness}"
      )
    return dropped

  def take(self, n: int) -> list[QueuedGroup] | None:
    """Takes `n` ready groups, ordered by admission, trimmed if need be.

    Raises:
      QueueFailed, QueueClosed: they will never be ready.
    """
    entries = self._select(n)
    if entries is None:
      if self._putting:  # Accepted and on its way to the disk.
        return None
      if self.error is not None:
        raise self._failure()
      if self.closed:
        raise admission.QueueClosed(
          f"the group queue is closed; {len(self._ready)} groups are ready,"
          f" {n} were asked for"
        )
      return None
    for entry in entries:
      del self._ready[entry.index]
      if entry.oldest < self._bound():
        before = _stale_tokens(entry.group)
        entry.group = entry.group.trimmed(self._bound())
        entry.oldest = entry.group.oldest_version
        self.counts["trimmed_tokens"] += _stale_tokens(entry.group) - before
      lag = max(0, self.version - entry.oldest)
      self._unacked[entry.index] = lag
      self._max_lag = max(self._max_lag, lag)
      self._lag_sum += lag
    self.counts["delivered"] += n
    return entries

  def _select(self, n: int) -> list[QueuedGroup] | None:
    if len(self._ready) < n:
      return None
    entries = sorted(self._ready.values(), key=lambda e: e.index)[:n]
    # Once closed or failed, a running group will never be put.
    awaits = self.order == "admission"
    if awaits and not self.closed and self.error is None:
      coming = min((*self._running, *self._expected), default=math.inf)
      if coming < entries[-1].index:
        return None
    return entries

  def check_batch(self, n: int | None) -> int:
    """Returns the size of a batch, `groups_per_step` by default.

    Raises:
      ValueError: More groups than can ever be ready.
    """
    if n is None:
      n = self.groups_per_step
    if n < 1:
      raise ValueError(f"a batch needs at least 1 group, got n={n}")
    if n > self.capacity:
      raise ValueError(
        f"a batch of {n} groups never fits the queue's capacity of"
        f" {self.capacity}; raise capacity or groups_per_step"
      )
    staleness = self.config.max_staleness
    admitted = (staleness + 1) * self.groups_per_step
    if n > admitted and self.counts["started"]:
      raise ValueError(
        f"a batch of {n} groups is never admitted: max_staleness"
        f" {staleness} and groups_per_step {self.groups_per_step}"
        f" let {admitted} groups in between two versions"
      )
    return n

  def put_back(self, entries: Iterable[QueuedGroup]) -> None:
    """Makes delivered groups ready again that are not acknowledged."""
    for entry in entries:
      if entry.index in self._unacked:
        self._lag_sum -= self._unacked.pop(entry.index)
        self._ready[entry.index] = entry
        self.counts["delivered"] -= 1

  def unacked(self) -> list[int]:
    """Indices of delivered groups without acknowledgement, ascending."""
    return sorted(self._unacked)

  def ack(self, indices: Iterable[int] | None) -> list[int]:
    """Acknowledges delivered groups, all or some; returns their indices."""
    acked = set(self._unacked)
    if indices is not None:
      acked.intersection_update(indices)
    for index in acked:
      del self._unacked[index]
    self.counts["acked"] += len(acked)
    return sorted(acked)

  # --- Checks ---------------------------------------------------------------

  def _bound(self) -> int:
    """Returns the oldest version that may be trained on."""
    return self.version - self.config.max_staleness

  def _limit(self) -> int:
    staleness = self.config.max_staleness
    return (staleness + self.version + 1) * self.groups_per_step

  def _check_open(self) -> None:
    if self.error is not None:
      raise self._failure()
    if self.closed:
      raise admission.QueueClosed("the group queue is closed")

  def _failure(self) -> admission.QueueFailed:
    error = admission.QueueFailed(
      f"collecting failed: {type(self.error).__name__}: {self.error}"
    )
    error.__cause__ = self.error
    return error

  def _require_running(self, ticket: Ticket) -> None:
    if ticket.index not in self._running:
      raise ValueError(
        f"ticket {ticket.index} is not running: it was put or released before"
      )


def _stale_tokens(group: trajectory.TrajectoryGroup) -> int:
  return sum(member.stale_tokens for member in group)
