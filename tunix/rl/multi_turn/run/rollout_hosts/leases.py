"""Lends groups to rollout hosts, and takes them back from silent ones.

A lease is one group to be collected. It waits, is lent to one host, and ends
with the group, or withdrawn. A host that is not heard of for `silence_s` loses
its leases to others; should it come back, the first group that arrives counts,
or, in an `exclusive` book, that of the host that has the lease now.

A group is never lost and never counted twice, because:

1. `lend` opens a lease under a new number and puts it at the end of the waiting
   ones.
2. `take` gives the oldest waiting lease to the host that asks, and notes when.
3. Every call of a host proves that it is alive; `beat` also names the leases it
   works on. A lease that it does not name, though lent long ago, never arrived.
4. Each call may look for silent hosts, at most twenty times in `silence_s`.
   Their leases go to the head of the waiting ones: they are the oldest.
5. `finish` removes the lease under the lock before it sets the result. A second
   group of the same number finds no open lease and is refused.

Promises: thread-safe; what a call costs does not grow with the hosts; a host's
silence is noticed within a twentieth of `silence_s`; a lease ends once; numbers
are not those of an earlier process's leases; a host that dies costs its groups'
time and nothing else.

Does not: know HTTP, or what a group is.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import math
import threading
import time
from typing import Any, Callable, Iterable, Mapping

_LOOKS = 20  # For silent hosts, in the time that makes one silent.


@dataclasses.dataclass(eq=False)
class Lease:
  """A group to be collected.

  Attributes:
    number: Number of the lease.
    order: JSON for the host.
    result: Future of the collected group.
    host: Name of the host that has it; "" while it waits.
    since: time at which it was lent.
    lent: how often it was.
  """

  number: int
  order: dict[str, Any]
  result: concurrent.futures.Future[Any]
  host: str = ""
  since: float = 0.0
  lent: int = 0


class LeaseBook:
  """See the module docstring."""

  def __init__(
    self,
    silence_s: float,
    clock: Callable[[], float] = time.monotonic,
    *,
    exclusive: bool = False,
  ):
    """Args:

    silence_s: after which a host loses its leases.
    clock: Returns seconds.
    exclusive: a group counts from the host that has its lease only, as where
      what a former host works with is taken away.
    """
    self._silence_s = silence_s
    self._exclusive = exclusive
    self._failed: BaseException | None = None
    self._clock = clock
    self._lock = threading.Lock()
    self._open: dict[int, Lease] = {}
    self._waiting: collections.deque[Lease] = collections.deque()
    self._of: collections.defaultdict[str, dict[int, Lease]] = (
      collections.defaultdict(dict)
    )  # Lent ones, by host.
    self._seen: dict[str, float] = {}
    self._looked = -math.inf  # When silent hosts were looked for.
    self._on_waiting: Callable[[], object] | None = None
    self._stats: dict[str, dict[str, float]] = {}
    # A host may still work for the learner that this one follows.
    self._number = time.time_ns() // 1000
    self.counts: collections.Counter[str] = collections.Counter()
    """lent, finished, taken back, withdrawn, refused."""
    self.finished: collections.Counter[str] = collections.Counter()
    """Groups by the host that collected them."""

  def on_waiting(self, callback: Callable[[], object]) -> None:
    """Calls back, from any thread, when a lease begins to wait."""
    self._on_waiting = callback

  def lend(self, order: Mapping[str, Any]) -> Lease:
    """A new lease; its `result` ends with the group."""
    with self._lock:
      self._number += 1
      lease = Lease(self._number, dict(order), concurrent.futures.Future())
      if self._failed is not None:
        lease.result.set_exception(self._failed)
        return lease
      self._open[lease.number] = lease
      self._waiting.append(lease)
    self._announce()
    return lease

  def _announce(self) -> None:
    if self._on_waiting is not None:
      self._on_waiting()

  def withdraw(self, lease: Lease) -> None:
    """Ends a lease without a group."""
    with self._lock:
      if self._open.pop(lease.number, None) is not None:
        self.counts["withdrawn"] += 1
        self._forget(lease)

  def take(self, host: str) -> Lease | None:
    """The next lease for a host, the oldest first."""
    with self._lock:
      self._hear(host)
      if not self._waiting:
        return None
      lease = self._waiting.popleft()
      lease.host, lease.since = host, self._clock()
      lease.lent += 1
      self._of[host][lease.number] = lease
      self.counts["lent"] += 1
      return lease

  def finish(self, number: int, host: str, value: object) -> bool:
    """Ends a lease with its group; False if it had ended before."""
    with self._lock:
      self._hear(host)
      lease = self._open.get(number)
      if lease is None or (self._exclusive and lease.host != host):
        self.counts["refused"] += 1
        return False
      del self._open[number]
      self.finished[host] += 1
      self._forget(lease)
      self.counts["finished"] += 1
    lease.result.set_result(value)
    return True

  def beat(
    self, host: str, numbers: Iterable[int], stats: Mapping[str, float]
  ) -> list[int]:
    """Hears of a host; returns those of its leases that are not its any more.

    Args:
      host: its name.
      numbers: Numbers of the leases that it works on.
      stats: Counters of its engine.
    """
    with self._lock:
      self._hear(host)
      self._stats[host] = dict(stats)
      reported = set(numbers)
      lost = self._clock() - self._silence_s
      lent = self._of.get(host, {})
      for lease in list(lent.values()):
        # Lost on the way to it, or before it began anew.
        if lease.number not in reported and lease.since < lost:
          self._take_back(lease)
      return sorted(reported - lent.keys())

  def lose(self, host: str) -> None:
    """Takes a host's leases back at once: it is known to be dead."""
    with self._lock:
      self._lose(host)

  def fail(self, error: BaseException) -> None:
    """Ends every lease, those to come included, with an error."""
    with self._lock:
      self._failed = error
      leases = list(self._open.values())
      self._open.clear()
      self._of.clear()
      self._waiting.clear()
    for lease in leases:
      lease.result.set_exception(error)

  @property
  def silence_s(self) -> float:
    """After which a host loses its leases."""
    return self._silence_s

  @property
  def host_count(self) -> int:
    """Number of `hosts`."""
    return len(self._seen)

  def hosts(self) -> list[str]:
    """Names of the hosts that were heard of in time."""
    with self._lock:
      return sorted(self._seen)

  def stats(self) -> dict[str, float]:
    """The sum of the hosts' engine counters; silent hosts' are kept."""
    with self._lock:
      total: collections.Counter[str] = collections.Counter()
      for of_host in self._stats.values():
        total.update(of_host)
      return dict(total)

  def _hear(self, host: str) -> None:
    now = self._clock()
    self._seen[host] = now
    if now - self._looked < self._silence_s / _LOOKS:
      return
    self._looked = now
    silent = [h for h, at in self._seen.items() if now - at > self._silence_s]
    for name in silent:
      self._lose(name)

  def _lose(self, host: str) -> None:
    self._seen.pop(host, None)
    for lease in list(self._of.get(host, {}).values()):
      self._take_back(lease)
    self._of.pop(host, None)

  def _forget(self, lease: Lease) -> None:
    """Takes a lease that has ended from where it is."""
    if lease.host:
      self._of.get(lease.host, {}).pop(lease.number, None)
    else:  # It waits, perhaps because it was taken back.
      self._waiting.remove(lease)

  def _take_back(self, lease: Lease) -> None:
    self._of.get(lease.host, {}).pop(lease.number, None)
    lease.host = ""
    self.counts["taken back"] += 1
    self._waiting.appendleft(lease)
    self._announce()
