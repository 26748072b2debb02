"""One named buffer: what it holds, and what a reader gets of it.

Every read takes whole groups. Without a lease it is acknowledged at once, as
clients of the protocol expect; with one the groups are lent, and return when
they are not acknowledged in time.

Promises: nothing that was answered is lost or delivered again once it was
acknowledged, also over a kill; a hook or a group that fails is recorded, and
costs that group only; writers never wait for a reader. Thread-safe; methods
that read block, call them in a thread.

Does not know HTTP, or run generators.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
import time
from typing import Any, Callable, Iterator, Sequence
import uuid

import orjson
from tunix.rl.multi_turn.core import concurrency
from tunix.rl.multi_turn.trajectory_collector.buffer_service import groups
from tunix.rl.multi_turn.trajectory_collector.buffer_service import items
from tunix.rl.multi_turn.trajectory_collector.buffer_service import rules
from tunix.rl.multi_turn.trajectory_collector.buffer_service import settings
from tunix.rl.multi_turn.trajectory_collector.buffer_service import store
from tunix.rl.multi_turn.trajectory_collector.buffer_service import store_work

_LOG = logging.getLogger(__name__)
_MOST_ERRORS = 20
_COMMIT_S = 120.0
OnRead = Callable[["Buffer", int, list[dict[str, Any]]], None]


class BufferFull(RuntimeError):
  """The buffer holds as much as it may."""


class UnknownLease(KeyError):
  """No lease has this id any more."""


@dataclasses.dataclass(frozen=True)
class Read:
  """What a read found.

  Attributes:
    items: of whole groups.
    meta_info: of the protocol.
    available: items in readable groups, before the filter.
    short: whether there are fewer than were asked for.
    lease: its id; "" without one.
    groups: for each item the number of its group, as an instance may have
      several.
  """

  items: list[dict[str, Any]]
  meta_info: dict[str, Any]
  available: int
  short: bool = False
  lease: str = ""
  groups: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class _Lease:
  groups: list[groups.Group]
  seconds: float
  due: float


class Buffer:
  """See the module docstring.

  Attributes:
    id, name: in the store, and for clients.
    rules: of its rollout.
    task_type: of its generator; "" before one.
    hooks: of its generator.
    errors: the newest faults of hooks and groups, oldest first.
  """

  def __init__(
      self,
      buffer: int,
      name: str,
      kept: store.Store,
      limits: settings.BufferLimits,
      clock: Callable[[], float] = time.monotonic,
      on_read: OnRead | None = None,
  ):
    """Args:

      buffer, name: in the store.
      kept: the store.
      limits: of the service.
      clock: seconds; groups' ages and leases are measured with it.
      on_read: called with the buffer, the read's number and its items, before
        a read is committed; an error of it ends the read.
    """
    self.id, self.name = buffer, name
    self.rules = rules.GroupRules(group_size=limits.group_size)
    self.hooks = rules.Hooks()
    self.task_type = ""
    self.errors: collections.deque[str] = collections.deque(
        maxlen=_MOST_ERRORS
    )
    self._store = kept
    self._limits = limits
    self._clock = clock
    self._on_read = on_read
    self._lock = threading.Lock()
    # Of reads, acknowledgements and expiries: one at a time.
    self._taking = threading.RLock()
    self._groups = groups.Groups(self.rules.group_size)
    self._leases: dict[str, _Lease] = {}
    self._fresh: list[tuple[int, str, float]] = []
    self._unreported: list[str] = []
    self._items = self._bytes = self._reserved = self._reserved_bytes = 0
    self.refused = 0
    """Writes that found no room."""
    self.hook_failures = 0

  # --- state from the disk ----------------------------------------------------

  def configure(
      self, asked: rules.GroupRules, hooks: rules.Hooks, task_type: str
  ) -> None:
    """Takes a rollout's rules, and forms the groups anew from the store.

    Ages of groups begin anew; leases run again from their beginning.
    """
    def load(found: store_work.Contents) -> None:
      with self._lock:
        self.rules, self.hooks, self.task_type = asked, hooks, task_type
        self._load(found)

    with self._taking:
      # By the writing thread, so that no write is missed or taken twice.
      self._wait(self._store.call(store_work.contents(self.id), load))

  def _load(self, found: store_work.Contents) -> None:
    now = self._clock()
    records, cleared, seconds = found
    self._groups = groups.Groups(self.rules.group_size)
    self._leases, self._fresh, self._unreported = {}, [], []
    self._items = self._bytes = 0
    lent: dict[tuple[str, int], groups.Group] = {}
    for record in records:
      member = groups.Member(record.seq, record.reward, record.size)
      if record.seq > cleared:
        self._fresh.append((record.seq, record.instance_id, record.reward))
      if record.state in (store.WAITS, store.LENT):
        self._items += 1
        self._bytes += record.size
      if record.state == store.WAITS or (
          record.state == store.LENT and record.lease not in seconds
      ):
        self._groups.add(record.instance_id, member, now)
      elif record.state == store.LENT:
        key = (str(record.lease), record.grp or 0)
        if key in lent:
          lent[key].members.append(member)
        else:
          lent[key] = groups.Group(record.instance_id, [member], now)
      elif record.state == store.DROPPED and record.seq > cleared:
        if record.instance_id not in self._unreported:
          self._unreported.append(record.instance_id)
    for (lease, _), group in lent.items():
      self._leases.setdefault(
          lease, _Lease([], seconds[lease], now + seconds[lease])
      ).groups.append(group)

  def reset(self) -> None:
    """Forgets all items, their uids and leases."""
    with self._taking:
      self._wait(
          self._store.call(
              store_work.reset(self.id), lambda _: self._forget()
          )
      )

  def _forget(self) -> None:
    with self._lock:
      self._load(((), 0, {}))

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
      if total > self._limits.max_gib * (1 << 30):
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
        self._fresh.append((seq, item.instance_id, item.reward))
        self._items += 1
        self._bytes += member.size

  # --- reading ----------------------------------------------------------------

  def read(
      self,
      batch_size: int = -1,
      *,
      lease_s: float | None = None,
      exact: bool = False,
      clear: bool = True,
  ) -> Read:
    """Takes groups until they have `batch_size` items, or all there are.

    Args:
      batch_size: items; -1 for all.
      lease_s: time until the read must be acknowledged; None: it is at once.
      exact: takes nothing when there are fewer.
      clear: the statistics of `meta_info` begin anew.

    Raises:
      StoreError: the disk's; nothing was taken.
    """
    with self._taking:
      self._expire()
      usable, dropped = self._judge()
      available = sum(len(group.members) for group in usable)
      if exact and 0 <= batch_size and available < batch_size:
        self._drop(dropped)
        return Read([], {}, available, short=True)
      if not usable:
        self._drop(dropped)
        return Read([], {}, 0, short=batch_size > 0)
      return self._deliver(usable, dropped, batch_size, lease_s, clear)

  def _deliver(
      self,
      usable: list[groups.Group],
      dropped: list[groups.Group],
      batch_size: int,
      lease_s: float | None,
      clear: bool,
  ) -> Read:
    with self._lock:
      fresh = list(self._fresh)
    # Before the rules change anything, as its clients know it.
    meta = self._meta_info(fresh)
    available = sum(len(group.members) for group in usable)
    taken: list[groups.Group] = []
    found: list[dict[str, Any]] = []
    numbers: list[int] = []
    size = 0
    for group in usable:
      if taken and size + group.size > self._limits.read_mib << 20:
        break
      with self._lock:
        self._groups.close(group)  # It must not grow from here on.
      got = self._contents(group)
      if got is None:
        dropped.append(group)
        continue
      taken.append(group)
      size += group.size
      found.extend(got)
      numbers.extend([group.number] * len(got))
      if 0 <= batch_size <= len(found):
        break
    if not taken:
      self._drop(dropped)
      return Read([], meta, available)
    with self._lock:
      for group in dropped:
        self._groups.close(group)
    read = self._reads() + 1
    if self._on_read is not None:
      self._on_read(self, read, found)
    lease = uuid.uuid4().hex if lease_s is not None else ""
    cleared = max((seq for seq, *_ in fresh), default=0) if clear else 0
    with self._lock:
      unreported = list(self._unreported)
    self._wait(
        self._store.call(
            store_work.take(
                self.id,
                [(group.number, group.seqs) for group in taken],
                [seq for group in dropped for seq in group.seqs],
                lease=(lease, lease_s or 0.0) if lease else None,
                cleared=cleared,
                remembered=self._limits.remembered_uids,
            )
        )
    )
    finished = [*unreported, *(g.instance_id for g in (*taken, *dropped))]
    with self._lock:
      for group in (*taken, *dropped):
        self._groups.take(group)
      if lease:
        due = self._clock() + (lease_s or 0.0)
        self._leases[lease] = _Lease(taken, lease_s or 0.0, due)
      gone = dropped if lease else [*taken, *dropped]
      self._uncount(gone)
      self._fresh = [one for one in self._fresh if one[0] > cleared]
      del self._unreported[: len(unreported)]
    meta["finished_groups"] = list(dict.fromkeys(finished))
    return Read(found, meta, available, lease=lease, groups=numbers)

  def available(self) -> int:
    """Items in groups that may be read."""
    with self._taking:
      self._expire()
      return sum(len(group.members) for group in self._judge()[0])

  def peek(self, count: int) -> list[dict[str, Any]]:
    """The first items that a read would begin with, as they were written."""
    with self._taking:
      usable, _ = self._judge()
      seqs = [seq for group in usable for seq in group.seqs][:count]
      return [
          orjson.loads(body)
          for body in self._store.bodies(seqs)
          if body is not None
      ]

  def sweep(self) -> None:
    """Ends leases that are over, and drops groups that waited too long."""
    with self._taking:
      self._expire()
      self._drop(self._judge()[1])

  def _judge(self) -> tuple[list[groups.Group], list[groups.Group]]:
    """(groups that may be read, groups to drop), oldest first."""
    now = self._clock()
    with self._lock:
      found = [(g, len(g.members), g.last) for g in self._groups]
    usable, dropped = [], []
    for group, count, last in found:
      judged = self._judged(group, count)
      with self._lock:
        if len(group.members) != count or group.last != last:
          continue  # It has grown meanwhile.
        answer = groups.verdict(group, self.rules, now, judged)
      if answer == "use":
        usable.append(group)
      elif answer == "drop":
        dropped.append(group)
    return usable, dropped

  def _judged(
      self, group: groups.Group, count: int
  ) -> tuple[bool, bool] | None:
    """A hook's judgement, made once for each size of a group."""
    hook = self.hooks.is_valid_group
    if hook is None or self.rules.raw:
      return None
    if group.judged is None or group.judged[0] != count:
      try:
        contents = self._parsed(group.seqs[:count])
        answer = rules.judged(
            self._call(
                hook,
                (group.instance_id, contents),
                self.rules.min_valid_group_size,
                self.task_type,
            )
        )
      except Exception as error:  # pylint: disable=broad-except
        self._note(f"is_valid_group of group {group.instance_id!r}", error)
        answer = (False, True)  # It cannot be judged, and is dropped.
      group.judged = (count, *answer)
    return group.judged[1:]

  def _contents(self, group: groups.Group) -> list[dict[str, Any]] | None:
    """What a reader gets of a group; None where it is to be dropped."""
    try:
      pair = (group.instance_id, self._parsed(group.seqs))
      if not pair[1]:
        return None
      args = (pair, self.rules, self.hooks, self.task_type)
      if self.hooks == rules.Hooks():
        return rules.delivered(*args)
      return self._call(rules.delivered, *args)
    except Exception as error:  # pylint: disable=broad-except
      # Another read would fail on it again, and all groups behind it wait.
      self._note(f"group {group.instance_id!r}", error)
      return None

  def _parsed(self, seqs: Sequence[int]) -> list[dict[str, Any]]:
    found = []
    for seq, body in zip(seqs, self._store.bodies(seqs)):
      if body is None:
        self._note(f"item {seq}", store.StoreError("the disk has lost it"))
      else:
        found.append(orjson.loads(body))
    return found

  def _meta_info(
      self, fresh: Sequence[tuple[int, str, float]]
  ) -> dict[str, Any]:
    hook = self.hooks.get_group_data_meta_info
    if hook is not None:
      try:
        by_instance: dict[str, list[Any]] = {}
        for item in self._parsed([seq for seq, *_ in fresh]):
          by_instance.setdefault(item["instance_id"], []).append(item)
        found = self._call(hook, by_instance)
        orjson.dumps(found)
        return dict(found)
      except Exception as error:  # pylint: disable=broad-except
        self._note("get_group_data_meta_info", error)
    rewards: dict[str, list[float]] = {}
    for _, instance_id, reward in fresh:
      rewards.setdefault(instance_id, []).append(reward)
    return rules.meta_info(rewards)

  def _call(self, hook: Callable[..., Any], *args: Any) -> Any:
    return concurrency.call(
        hook,
        *args,
        seconds=self._limits.hook_timeout,
        what=f"the generator's {getattr(hook, '__name__', 'hook')}",
    )

  def _note(self, what: str, error: Exception) -> None:
    self.hook_failures += 1
    text = f"{what}: {concurrency.describe(error)}"
    self.errors.append(text[:500])
    _LOG.error("buffer %s: %s", self.name, text, exc_info=error)

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
      held = self._leases.get(lease)
      if held is None:
        if self._store.rows(
            "SELECT 1 FROM leases WHERE id = ? AND buffer = ? AND"
            " acknowledged = 1",
            lease, self.id,
        ):  # pyformat: disable
          return 0
        raise UnknownLease(
            f"lease {lease!r} is over or never was; its groups are read again"
        )
      seqs = [seq for group in held.groups for seq in group.seqs]
      self._wait(
          self._store.call(store_work.acknowledge(self.id, lease, seqs))
      )
      with self._lock:
        del self._leases[lease]
        self._uncount(held.groups)
      return len(seqs)

  def release(self, lease: str) -> int:
    """Gives a lease's groups back at once; the number of its items.

    Raises:
      UnknownLease: see `acknowledge`.
    """
    with self._taking:
      self._expire()
      if lease not in self._leases:
        raise UnknownLease(f"lease {lease!r} is over or never was")
      return self._return(lease)

  def _expire(self) -> None:
    now = self._clock()
    for lease in [i for i, held in self._leases.items() if now > held.due]:
      _LOG.warning(
          "buffer %s: lease %s was not acknowledged in time; its groups are"
          " read again", self.name, lease,
      )  # pyformat: disable
      self._return(lease)

  def _return(self, lease: str) -> int:
    held = self._leases[lease]
    seqs = [seq for group in held.groups for seq in group.seqs]
    self._wait(self._store.call(store_work.give_back(lease, seqs)))
    with self._lock:
      del self._leases[lease]
      self._groups.put_back(held.groups)
    return len(seqs)

  def _drop(self, dropped: Sequence[groups.Group]) -> None:
    """Drops groups that no reader gets; the next read reports them."""
    if not dropped:
      return
    with self._lock:
      for group in dropped:
        self._groups.close(group)
    seqs = [seq for group in dropped for seq in group.seqs]
    self._wait(self._store.call(store_work.drop(self.id, seqs)))
    with self._lock:
      for group in dropped:
        self._groups.take(group)
        if group.instance_id not in self._unreported:
          self._unreported.append(group.instance_id)
      self._uncount(dropped)

  def _uncount(self, gone: Sequence[groups.Group]) -> None:
    self._items -= sum(len(group.members) for group in gone)
    self._bytes -= sum(group.size for group in gone)

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
            for held in self._leases.values()
            for group in held.groups
        )
        return {
            "current_size": sum(len(group.members) for group in usable),
            "max_size": self._limits.max_items,
            "total_written": row[0],
            "total_read": row[1],
            "total_dropped": row[2],
            "reads": row[3],
            "buffer": self.name,
            "task_type": self.task_type,
            "group_size": self.rules.group_size,
            "items": self._items,
            "bytes": self._bytes,
            "waiting_items": self._groups.items,
            "waiting_groups": len(self._groups),
            "leased_items": lent,
            "leases": len(self._leases),
            "refused_writes": self.refused,
            "hook_failures": self.hook_failures,
            "errors": list(self.errors),
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

  def _reads(self) -> int:
    (row,) = self._store.rows(
        "SELECT reads FROM buffers WHERE id = ?", self.id
    )
    return row[0]

  def _wait(self, future: Any) -> Any:
    return future.result(_COMMIT_S)
