"""One named buffer: what it holds, and what a reader gets of it.

Every read takes whole groups and lends them, under a lease that the store holds
before the answer leaves. A reader that asked for a lease acknowledges it, or
the groups return after its time. A read without one is `final`: the sender of
the answer acknowledges it with the last byte, as clients of the protocol
expect.

Promises: nothing that was answered is lost or delivered again once it was
acknowledged, also over a kill; a read commits only what is encoded already; a
read under a lease, and an acknowledgement, may be repeated; contents on the
disk are those of items that are counted against the limits; writers never wait
for a reader. Thread-safe; methods that read block, call them in a thread.

Does not know HTTP, run generators, or call hooks (`judging` does).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import sqlite3
import threading
import time
from typing import Any, Callable, Iterator, Mapping, Sequence
import uuid

import orjson

from agent_services.rollout_buffer import buffer_settings
from agent_services.rollout_buffer import groups
from agent_services.rollout_buffer import items
from agent_services.rollout_buffer import judging
from agent_services.rollout_buffer import rules
from agent_services.rollout_buffer import store
from agent_services.rollout_buffer import store_work
from agent_services.rollout_buffer import tally

_LOG = logging.getLogger(__name__)
_SENDING_S = 600.0
"""Longest time that the answer to a final read takes to leave."""


class BufferFull(RuntimeError):
  """The buffer holds as much as it may."""


class UnknownLease(KeyError):
  """No lease has this id any more."""


class LeaseUsed(ValueError):
  """The id of another lease, or of one that was acknowledged."""


@dataclasses.dataclass(frozen=True)
class Read:
  """The result of a read.

  Attributes:
    data: JSON of the protocol's `data`; with a lease that the reader has to
      acknowledge also `lease`, and `groups`, which has for each item the number
      of its group, as an instance may have several.
    count: items in it.
    available: items in readable groups, before the filter.
    short: whether there are fewer than the reader asked for.
    lease: id of the lease; "" where there are no items.
    final: whether the lease ends with the answer.
    delivery: number of the answer; a repeated read has a higher one.
  """

  data: bytes = b'{"data":[],"meta_info":{}}'
  count: int = 0
  available: int = 0
  short: bool = False
  lease: str = ""
  final: bool = False
  delivery: int = 0


@dataclasses.dataclass(slots=True)
class _Lease:
  """Groups that a reader has; 0 seconds: of a final read."""

  groups: list[groups.Group]
  seconds: float
  due: float
  delivery: int


class Buffer:
  """See the module docstring.

  Attributes:
    id, name: in the store, and for clients.
    judge: applies the rules of its rollout.
    allowed_items: Items that a trainer lets the generator begin, without the
      dropped ones; None without such a bound.
  """

  def __init__(
    self,
    buffer: int,
    name: str,
    item_store: store.Store,
    limits: buffer_settings.BufferLimits,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Args:

    buffer, name: in the store.
    item_store: The store.
    limits: Bounds of the service.
    clock: seconds; groups' ages and leases are measured with it.
    """
    self.id, self.name = buffer, name
    self.judge = judging.Judge(name, item_store, limits)
    self._store = item_store
    self._limits = limits
    self._clock = clock
    self._lock = threading.Lock()
    # Of reads, acknowledgements and expiries: one at a time.
    self._taking = threading.RLock()
    self._groups = groups.Groups(self.judge.rules.group_size)
    self._leases: dict[str, _Lease] = {}
    self._deliveries = itertools.count(1)
    self._max_bytes = limits.max_gib * (1 << 30)
    self._tally = tally.Tally(max(limits.max_items, limits.remembered_uids))
    self._items = self._bytes = self._reserved = self._reserved_bytes = 0
    self.allowed_items: int | None = None
    self._forgotten = 0  # Newest item that the store does not count any more.
    self.refused = 0
    """Writes that found no room."""

  # --- state from the disk ----------------------------------------------------

  def configure(
    self, rollout_rules: rules.GroupRules, hooks: rules.Hooks, task_type: str
  ) -> None:
    """Takes a rollout's rules, and forms the groups anew from the store.

    Ages of groups begin anew; leases run again from their beginning, and those
    of final reads, whose answers are not complete, are over.
    """

    def load(contents: store_work.Contents) -> None:
      with self._lock:
        self.judge.rules, self.judge.hooks = rollout_rules, hooks
        self.judge.task_type = task_type
        self._load(contents)

    with self._taking:
      # By the writing thread, so that no write is missed or taken twice.
      self._store.do(store_work.contents(self.id), load)

  def _load(self, contents: store_work.Contents) -> None:
    now = self._clock()
    self._groups = groups.Groups(self.judge.rules.group_size)
    before, self._leases = self._leases, {}
    self._tally.reset(contents.cleared)
    self._items = self._bytes = 0
    lent: dict[tuple[str, int], groups.Group] = {}
    for record in contents.records:
      member = groups.Member(record.seq, record.reward, record.size)
      self._tally.add(
        tally.Counted(
          record.seq, record.instance_id, record.reward, record.size
        )
      )
      if record.state in (store.WAITS, store.LENT):
        self._items += 1
        self._bytes += record.size
      if record.state == store.WAITS or (
        record.state == store.LENT and record.lease not in contents.seconds
      ):
        self._groups.add(record.instance_id, member, now)
      elif record.state == store.LENT:
        key = (str(record.lease), record.grp or 0)
        if key in lent:
          lent[key].members.append(member)
        else:
          lent[key] = groups.Group(record.instance_id, [member], now)
      elif record.state == store.DROPPED and record.seq > contents.cleared:
        self._tally.drop([record.instance_id])
    for (lease, _), group in lent.items():
      seconds = contents.seconds[lease]
      due = now + seconds if seconds else -math.inf
      delivery = before[lease].delivery if lease in before else 0
      self._leases.setdefault(
        lease, _Lease([], seconds, due, delivery)
      ).groups.append(group)

  def reset(self) -> None:
    """Forgets all items, their uids and leases."""
    with self._taking:
      self._store.do(store_work.reset(self.id), lambda _: self._forget())

  def _forget(self) -> None:
    with self._lock:
      self._load(store_work.Contents())

  def allow(self, allowed_items: int | None) -> None:
    """Raises the bound on the generator's items; a rollout without stays so."""
    with self._lock:
      if self.allowed_items is not None and allowed_items is not None:
        self.allowed_items = max(self.allowed_items, allowed_items)

  # --- writing ----------------------------------------------------------------

  @contextlib.contextmanager
  def reserving(self, written: Sequence[items.Item]) -> Iterator[None]:
    """Holds room for items until they are stored, or are not.

    Raises:
      BufferFull: there is none.
    """
    size = sum(len(item.body) for item in written)
    with self._lock:
      count = self._items + self._reserved + len(written)
      total = self._bytes + self._reserved_bytes + size
      if count > self._limits.max_items:
        self.refused += 1
        raise BufferFull(
          f"buffer {self.name!r} holds {self._items} items, which is as many"
          f" as it may (--max-items={self._limits.max_items}); read from it,"
          " or write again later"
        )
      if total > self._max_bytes:
        self.refused += 1
        raise BufferFull(
          f"buffer {self.name!r} holds {self._bytes} bytes, which is as many"
          f" as it may (--max-gib={self._limits.max_gib:g}); read from it,"
          " or write again later"
        )
      self._reserved += len(written)
      self._reserved_bytes += size
    try:
      yield
    finally:
      with self._lock:
        self._reserved -= len(written)
        self._reserved_bytes -= size

  def stored(self, new: list[tuple[int, items.Item]]) -> None:
    """Takes items that the store has now; called in their order."""
    now = self._clock()
    with self._lock:
      for seq, item in new:
        member = groups.Member(seq, item.reward, len(item.body))
        self._groups.add(item.instance_id, member, now)
        self._tally.add(
          tally.Counted(seq, item.instance_id, item.reward, member.size)
        )
        self._items += 1
        self._bytes += member.size

  # --- reading ----------------------------------------------------------------

  def read(
    self,
    batch_size: int = -1,
    *,
    lease_s: float | None = None,
    lease: str = "",
    exact: bool = False,
    clear: bool = True,
  ) -> Read:
    """Takes groups until they have `batch_size` items, or all there are.

    Args:
      batch_size: items; -1 for all.
      lease_s: time until the read must be acknowledged; None: it is final.
      lease: id for the lease. A read that is repeated with it, as its answer
        was lost, returns the same groups, and their time begins anew.
      exact: takes nothing when there are fewer.
      clear: the statistics of `meta_info` begin anew.

    Raises:
      LeaseUsed: the id cannot be this lease's.
      StoreError: the disk's; nothing was taken.
    """
    with self._taking:
      self._expire()
      if lease:
        if lease in self._leases:
          return self._again(lease)
        if self._store.rows("SELECT 1 FROM leases WHERE id = ?", lease):
          raise _used(lease)
      usable, dropped = self._judge()
      available = sum(len(group.members) for group in usable)
      if exact and 0 <= batch_size and available < batch_size:
        self._drop(dropped)
        return Read(available=available, short=True)
      if not usable:
        self._drop(dropped)
        return Read(short=batch_size > 0)
      return self._deliver(
        usable, dropped, batch_size, lease_s, lease or uuid.uuid4().hex, clear
      )

  def _deliver(
    self,
    usable: list[groups.Group],
    dropped: list[groups.Group],
    batch_size: int,
    lease_s: float | None,
    lease: str,
    clear: bool,
  ) -> Read:
    with self._lock:
      counted = self._tally.counted
    # Before the rules change anything, as its clients know it.
    meta = self.judge.meta_info(counted)
    available = sum(len(group.members) for group in usable)
    lent: list[groups.Group] = []
    written: list[bytes] = []
    numbers: list[int] = []
    size = 0
    for group in usable:
      if lent and size + group.size > self._limits.read_mib << 20:
        break
      with self._lock:
        self._groups.close(group)  # It must not grow from here on.
      contents = self.judge.contents(group)
      if contents is None:
        dropped.append(group)
        continue
      lent.append(group)
      size += group.size
      written.extend(contents)
      numbers.extend([group.number] * len(contents))
      if 0 <= batch_size <= len(written):
        break
    if not lent:
      self._drop(dropped)
      return Read(available=available)
    with self._lock:
      for group in dropped:
        self._groups.close(group)
    unreported = list(self._tally.dropped)
    finished = [*unreported, *(g.instance_id for g in (*lent, *dropped))]
    meta["finished_groups"] = list(dict.fromkeys(finished))
    final = lease_s is None
    data = _data(written, meta, numbers, "" if final else lease)
    cleared = counted[-1].seq if clear and counted else 0
    take = store_work.take(
      self.id,
      [(group.number, group.seqs) for group in lent],
      [seq for group in dropped for seq in group.seqs],
      lease=(lease, lease_s or 0.0),
      cleared=cleared,
      remembered=self._limits.remembered_uids,
    )
    try:
      self._store.do(take)
    except sqlite3.IntegrityError:  # Another buffer has lent under the id.
      raise _used(lease) from None
    delivery = next(self._deliveries)
    with self._lock:
      for group in (*lent, *dropped):
        self._groups.take(group)
      due = self._clock() + (lease_s or _SENDING_S)
      self._leases[lease] = _Lease(lent, lease_s or 0.0, due, delivery)
      self._uncount(dropped)
      self._tally.clear(cleared, unreported)
    return Read(
      data, len(written), available, lease=lease, final=final, delivery=delivery
    )

  def _again(self, lease: str) -> Read:
    """Returns the groups of a lease again; its time begins anew."""
    again = self._leases[lease]
    members = [
      tally.Counted(member.seq, group.instance_id, member.reward, member.size)
      for group in again.groups
      for member in group.members
    ]
    meta = self.judge.meta_info(members)
    names = (group.instance_id for group in again.groups)
    meta["finished_groups"] = list(dict.fromkeys(names))
    written: list[bytes] = []
    numbers: list[int] = []
    for group in again.groups:
      contents = self.judge.contents(group) or []
      written.extend(contents)
      numbers.extend([group.number] * len(contents))
    data = _data(written, meta, numbers, lease)
    again.due = self._clock() + again.seconds
    again.delivery = next(self._deliveries)
    return Read(
      data, len(written), len(members), lease=lease, delivery=again.delivery
    )

  def available(self) -> int:
    """Items in groups that may be read."""
    with self._taking:
      self._expire()
      return sum(len(group.members) for group in self._judge()[0])

  def peek(self, count: int) -> list[bytes]:
    """The first items that a read would begin with, as JSON.

    At most `read_mib` of them, the first in any case.
    """
    with self._taking:
      usable, _ = self._judge()
      members = [m for group in usable for m in group.members][:count]
      sizes = itertools.accumulate(m.size for m in members)
      most = self._limits.read_mib << 20
      seqs = [
        m.seq
        for m, size in zip(members, sizes)
        if size <= most or m is members[0]
      ]
      return [body for body in self._store.bodies(seqs) if body is not None]

  def sweep(self) -> None:
    """Ends leases that are over, and drops groups that waited too long."""
    with self._taking:
      self._expire()
      self._drop(self._judge()[1])
      if self._tally.cleared > self._forgotten:
        cleared = self._tally.cleared
        self._store.do(
          store_work.forget(self.id, cleared, self._limits.remembered_uids)
        )
        self._forgotten = cleared
        with self._lock:  # Their contents are gone from the disk.
          self._tally.clear(cleared, ())

  def _judge(self) -> tuple[list[groups.Group], list[groups.Group]]:
    """(groups that may be read, groups to drop), oldest first."""
    now = self._clock()
    with self._lock:
      current = [(g, len(g.members), g.last) for g in self._groups]
    usable, dropped = [], []
    for group, count, last in current:
      judged = self.judge.judged(group, count)
      with self._lock:
        if len(group.members) != count or group.last != last:
          continue  # It has grown meanwhile.
        answer = groups.verdict(group, self.judge.rules, now, judged)
      if answer == "use":
        usable.append(group)
      elif answer == "drop":
        dropped.append(group)
    return usable, dropped

  # --- leaving ----------------------------------------------------------------

  def acknowledge(self, lease: str) -> int:
    """Ends a lease whose items were taken over; repeated, it is 0.

    Returns:
      The number of items.

    Raises:
      UnknownLease: it is over, and its groups are read again; or never was.
    """
    with self._taking:
      self._expire()
      current = self._leases.get(lease)
      if current is None:
        if self._store.rows(
          "SELECT 1 FROM leases WHERE id = ? AND buffer = ? AND"
          " acknowledged > 0",
          lease,
          self.id,
        ):
          return 0
        raise UnknownLease(
          f"lease {lease!r} is over or never was; its groups are read again"
        )
      seqs = [seq for group in current.groups for seq in group.seqs]
      self._store.do(
        store_work.acknowledge(self.id, lease, seqs, current.seconds > 0)
      )
      with self._lock:
        del self._leases[lease]
        self._uncount(current.groups)
      return len(seqs)

  def release(self, lease: str, delivery: int | None = None) -> int:
    """Gives a lease's groups back at once; the number of its items.

    Args:
      lease: Its id.
      delivery: Number of an answer that was broken off. The lease stays where
        a later answer has been made under its id.

    Raises:
      UnknownLease: see `acknowledge`.
    """
    with self._taking:
      self._expire()
      current = self._leases.get(lease)
      if current is None or delivery not in (None, current.delivery):
        raise UnknownLease(f"lease {lease!r} is over or never was")
      return self._return(lease)

  def _expire(self) -> None:
    now = self._clock()
    for lease in [i for i, one in self._leases.items() if now > one.due]:
      _LOG.warning(
        "buffer %s: lease %s was not acknowledged in time; its groups are"
        " read again",
        self.name,
        lease,
      )
      self._return(lease)

  def _return(self, lease: str) -> int:
    current = self._leases[lease]
    seqs = [seq for group in current.groups for seq in group.seqs]
    waits = self._store.do(store_work.give_back(lease, seqs))
    with self._lock:
      del self._leases[lease]
      if not waits:  # It was acknowledged by a commit that came late.
        self._uncount(current.groups)
        return 0
      self._groups.put_back(current.groups)
    return len(seqs)

  def _drop(self, dropped: Sequence[groups.Group]) -> None:
    """Drops groups that no reader gets; the next read reports them."""
    if not dropped:
      return
    with self._lock:
      for group in dropped:
        self._groups.close(group)
    seqs = [seq for group in dropped for seq in group.seqs]
    self._store.do(store_work.drop(self.id, seqs))
    with self._lock:
      for group in dropped:
        self._groups.take(group)
      self._tally.drop(group.instance_id for group in dropped)
      self._uncount(dropped)

  def _uncount(self, departures: Sequence[groups.Group]) -> None:
    self._items -= sum(len(group.members) for group in departures)
    self._bytes -= sum(group.size for group in departures)

  # --- about it ---------------------------------------------------------------

  def stats(self) -> dict[str, Any]:
    """Figures of `/buffer/stats`."""
    with self._taking:
      usable, _ = self._judge()
      (row,) = self._store.rows(
        "SELECT written, read, dropped, reads FROM buffers WHERE id = ?",
        self.id,
      )
      with self._lock:
        lent = sum(
          len(group.members)
          for current in self._leases.values()
          for group in current.groups
        )
        return {
          "current_size": sum(len(group.members) for group in usable),
          "max_size": self._limits.max_items,
          "total_written": row[0],
          "total_read": row[1],
          "total_dropped": row[2],
          "reads": row[3],
          "buffer": self.name,
          "task_type": self.judge.task_type,
          "group_size": self.judge.rules.group_size,
          "group_rules": "raw" if self.judge.rules.raw else "normalized",
          "allowed_items": self.allowed_items,
          "items": self._items,
          "bytes": self._bytes,
          "waiting_items": self._groups.items,
          "waiting_groups": len(self._groups),
          "leased_items": lent,
          "leases": len(self._leases),
          "refused_writes": self.refused,
          "hook_failures": self.judge.failures,
          "errors": list(self.judge.errors),
        }

  def counts(self) -> dict[str, float]:
    """Gauges that cost nothing to take."""
    with self._lock:
      return {
        "items": self._items,
        "bytes": self._bytes,
        "waiting_groups": len(self._groups),
        "leases": len(self._leases),
      }


def _used(lease: str) -> LeaseUsed:
  return LeaseUsed(
    f"lease={lease!r} was acknowledged, or is another buffer's; give each"
    " read an id of its own"
  )


def _data(
  written: Sequence[bytes],
  meta: Mapping[str, Any],
  numbers: Sequence[int],
  lease: str,
) -> bytes:
  """Encodes the `data` of a `Read`, around items that are JSON."""
  data: dict[str, Any] = {
    "data": [orjson.Fragment(item) for item in written],
    "meta_info": meta,
  }
  if lease:
    data.update(lease=lease, groups=numbers)
  return orjson.dumps(data)
