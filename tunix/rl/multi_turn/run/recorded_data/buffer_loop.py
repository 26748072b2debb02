"""Feeds a run's queue from a rollout buffer service (`rollout.via=buffer`).

Stands where a run has its collecting loop: groups are admitted, gated by
staleness, made durable and trained on as always, and only their episodes come
from the service.

Promises: what was read under a lease is acknowledged only when it is trained
on and a checkpoint holds that, or when it was dropped; a group that the service
gives again is recognised by its members' uids, and never trained on twice, by a
resumed run either; such a run asks the service to skip the instances it has
finished. A failed call is repeated after a pause, `buffer.retries` times in a
row; the consumer never waits for a loop that has ended: one whose generator
failed fails, and one whose generator is over reads what is left and closes the
queue.

Does not: decide which groups are valid (the service does), but drops one with
fewer than collect.min_valid members that can be trained on, and reports and
drops one with an item that cannot be read; many such in a row, of either kind,
end the run with what they have in common. What the service itself drops is
reported, each time that it has doubled.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import hashlib
import logging
import threading
from typing import Any, Callable, Container, Iterable, Mapping, NamedTuple
import uuid

from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.net import http
from tunix.rl.multi_turn.run.recorded_data import reader as reader_lib
from tunix.rl.multi_turn.run.recorded_data import service_figures
from tunix.rl.multi_turn.trajectory_collector import records
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import client
from tunix.rl.queue import group_queue
from tunix.rl.queue import ledger

_LOG = logging.getLogger(__name__)
_HELD_S = 0.05
_LONGEST_PAUSE_S = 30.0
_END_S = 10.0
_MOST_REFUSED = 32
"""Groups in a row that cannot be read, after which the run ends."""
_LOOK_EVERY = 5
"""Reads, with groups or without, between two looks at the service."""
_REFUSED = frozenset((400, 401, 403, 404, 422))
_WRITTEN_ELSEWHERE = "external"
"""Task type of a generator that ends at once: programs elsewhere write."""


class GeneratorFailed(RuntimeError):
  """The service's generator failed, and writes no more."""


def uids_of(group: trajectory_lib.TrajectoryGroup) -> frozenset[str]:
  """The uids of a group's items: copies of a member have its uid."""
  names = [t.trajectory_id for t in group]
  members = set(names)
  copies = {f"{name}#{n}" for name in names for n in range(2, len(names) + 1)}
  return frozenset(members - copies)


def instance_of(group: trajectory_lib.TrajectoryGroup) -> str:
  """The instance id of a group that this loop has named."""
  return group.group_id.rpartition("@")[0] or group.group_id


def named(
  group: trajectory_lib.TrajectoryGroup, instance_id: str, index: int
) -> trajectory_lib.TrajectoryGroup:
  """The group under its own name: an instance may come in several passes."""
  return dataclasses.replace(group, group_id=f"{instance_id}@{index}")


def announce(
  observers: events.Observer, group: trajectory_lib.TrajectoryGroup
) -> None:
  """Sends the beginning and the end of each of a group's episodes."""
  for member in group:
    about: dict[str, Any] = dict(
      group_id=group.group_id, task_id=group.task_id, split="train"
    )
    observers.on_event(
      events.EpisodeStarted(trajectory_id=member.trajectory_id, **about)
    )
    observers.on_event(events.EpisodeFinished(trajectory=member, **about))


class LeasedQueue(group_queue.GroupQueue):
  """A `GroupQueue` that reports the groups that are done with."""

  settled: Callable[[Iterable[int]], None] | None = None

  def ack(self, indices: Iterable[int] | None = None) -> None:
    settled = self.unacked() if indices is None else list(indices)
    super().ack(settled)
    if self.settled is not None:
      self.settled(settled)

  def _report(self, dropped: list[ledger.QueuedGroup]) -> None:
    indices = [entry.index for entry in dropped]
    super()._report(dropped)
    if indices and self.settled is not None:
      self.settled(indices)


@dataclasses.dataclass(frozen=True)
class _Group:
  """Items of one instance that are to be queued."""

  items: list[records.Record]
  about: _About


class _About(NamedTuple):
  """Identity of a group, by which a repeated delivery is recognised."""

  key: str
  name: str  # Of its instance; "" where that is unknown.
  uids: frozenset[str]

  @classmethod
  def of(cls, name: str, uids: Iterable[str]) -> _About:
    text = "\n".join((name, *sorted(uids)))
    digest = hashlib.blake2b(text.encode(), digest_size=12)
    return cls(digest.hexdigest(), name, frozenset(uids))

  def to_json(self) -> list[Any]:
    return [self.name, sorted(self.uids)]


class BufferLoop:
  """See the module docstring; `await run()` on the run's event loop."""

  def __init__(
    self,
    make_client: Callable[[], client.BufferClient],
    reader: reader_lib.EpisodeReader,
    queue: LeasedQueue,
    settings: Any,
    *,
    batch_size: int,
    group_size: int = 0,
    raw: bool = False,
    min_valid: int,
    payload: Callable[[list[str]], Mapping[str, Any]] | None,
    observers: events.Observer,
  ):
    """Args:

    make_client: Makes a client of the service.
    reader: Makes episodes of the policy.
    queue: takes the groups.
    settings: a `BufferConfig`.
    batch_size: Size of a read, see `BufferClient.read`.
    group_size: Size of the buffer's groups if other programs write; 0 = any.
    raw: Whether rewards that other programs write must not be normalised.
    min_valid: members of a group that can be trained on, at least.
    payload: instance ids to skip -> body of `/start_rollout`; None starts
      nothing.
    observers: receive the episodes.
    """
    self._make_client = make_client
    self._reader = reader
    self._queue = queue
    self._settings = settings
    self._batch_size: int | None = batch_size
    # Where it starts the generator, the service takes it from the start.
    self._group_size = group_size if payload is None else 0
    self._bounded = payload is not None
    self._members = group_size
    self._taken = 0  # Items that were read, without repeated ones.
    self._raw = raw and payload is None
    self._min_valid = min_valid
    self._payload = payload
    self._observers = observers
    self._lock = threading.Lock()
    self._finished: dict[str, _About] = {}  # By its key.
    self._queued: dict[int, _About] = {}  # By its index.
    # (Instance id, uid) -> key of the group that has it.
    self._seen: dict[tuple[str, str], str] = {}
    self._leases: dict[str, set[str]] = {}  # Lease -> keys to be settled.
    self._waiting: collections.deque[_Group] = collections.deque()
    self._acks: set[concurrent.futures.Future[None]] = set()
    self._loop: asyncio.AbstractEventLoop | None = None
    self._task: asyncio.Task[Any] | None = None
    self._stopping = self._held = False
    self._failures = self._refused_in_a_row = 0
    self._dropped_in_a_row = self._useless_in_a_row = 0
    self._empty = 0  # Reads without a group in a row.
    self._full = 0  # Reads with groups.
    self._ended = ""  # State of a generator that the latest look saw end.
    self._drops = service_figures.DropReport(observers)
    self.over = ""
    """Why nothing more will be read; "" while there may be."""
    self.counts: collections.Counter[str] = collections.Counter()
    """groups accepted, dropped, refused, repeated; failed calls."""
    queue.settled = self._settle

  # --- state -----------------------------------------------------------------

  def state_dict(self) -> dict[str, Any]:
    """JSON: what is finished, and what was queued."""
    with self._lock:
      finished, queued = self._finished.values(), self._queued.items()
      return {
        "finished": [about.to_json() for about in finished],
        "queued": [[index, *about.to_json()] for index, about in queued],
      }

  def load_state_dict(
    self,
    state: Mapping[str, Any],
    consumed: Iterable[int] = (),
    stored: Iterable[tuple[int, trajectory_lib.TrajectoryGroup]] = (),
  ) -> None:
    """Restores the loop from a saved state. Call it before `run`.

    Args:
      state: State of a checkpoint; {} without one.
      consumed: indices that the checkpoint holds the training of.
      stored: groups that the queue's store holds, which are delivered again.
    """
    trained = set(consumed)
    finished = [_About.of(*about) for about in state.get("finished", ())]
    for index, *about in state.get("queued", ()):
      if index in trained:
        finished.append(_About.of(*about))
    self._finished = {about.key: about for about in finished}
    self._queued = {
      index: _About.of(instance_of(group), uids_of(group))
      for index, group in stored
    }
    self._seen = {}
    for about in (*finished, *self._queued.values()):
      self._see(about)

  def skipped(self) -> list[str]:
    """Instances that the service need not make again, one for each pass."""
    with self._lock:
      every = (*self._finished.values(), *self._queued.values())
    return [about.name for about in every if about.name]

  # --- running ---------------------------------------------------------------

  async def run(self) -> None:
    """Reads until `stop`, or until the queue closes.

    Raises:
      Exception: the loop's failure; the queue's consumer gets it too.
    """
    self._loop = asyncio.get_running_loop()
    self._task = asyncio.current_task()
    service = self._make_client()
    try:
      if self._payload is not None:
        body = self._payload(self.skipped())
        self._members = int(body.get("num_repeat_per_sample", self._members))
        # Kept items count as written, and this run has not read them.
        self._bounded = not body.get("keep_items")
        body = {"allowed_items": self._allowed_items(), **body}
        answer = await self._tried(lambda: service.start(body), final=_REFUSED)
        _LOG.info("the rollout buffer: %s", answer)
      await self._ask_stats(service)  # What was dropped is counted from here.
      while not self._stopping and not self.over:
        if not self._waiting:
          await self._read(service)
        else:
          await self._put(self._waiting[0])
          self._waiting.popleft()
    except (asyncio.CancelledError, group_queue.QueueClosed):
      if not self._stopping and not self._queue.closed:
        raise
    except BaseException as error:
      self._queue.fail(error)
      raise
    finally:
      await service.aclose()
    self._queue.close()

  def stop(self) -> None:
    """Reads no more. Thread-safe, returns at once."""
    self._stopping = True
    if self._loop is not None and self._task is not None:
      try:
        self._loop.call_soon_threadsafe(self._task.cancel)
      except RuntimeError:  # The loop has ended already.
        pass

  def hold(self) -> None:
    """Admits no group until `release`. Thread-safe."""
    self._held = True

  def release(self) -> None:
    self._held = False

  def finish(self) -> None:
    """Waits for acknowledgements after the last checkpoint, with a deadline."""
    with self._lock:
      acks = list(self._acks)
    concurrent.futures.wait(acks, _END_S)

  async def _tried(
    self, call: Callable[[], Any], final: Container[int] = ()
  ) -> Any:
    """`call()`'s result, repeated until it succeeds or too many have failed.

    Answers of a status in `final` are not asked for again.
    """
    while True:
      try:
        result = await call()
        self._failures = 0
        return result
      except (http.CallError, ValueError, TimeoutError) as error:
        self.counts["failed_calls"] += 1
        self._failures += 1
        if getattr(error, "status", 0) in final:
          raise
        if 0 <= self._settings.retries <= self._failures:
          raise
        pause = min(_LONGEST_PAUSE_S, self._settings.poll_s * self._failures)
        _LOG.warning("the rollout buffer, again in %g s: %s", pause, error)
        self._observers.on_event(
          events.Fault("buffer", type(error).__name__, str(error))
        )
        await asyncio.sleep(pause)

  async def _compare(self, service: client.BufferClient) -> None:
    """See `service_figures.check_groups`."""
    stats = await self._tried(service.stats)
    if "group_size" not in stats:  # It is not made yet, or no service of ours.
      return
    size, raw = self._group_size, self._raw
    self._group_size, self._raw = 0, False
    service_figures.check_groups(stats, self._settings.url, size, raw)

  async def _read(self, service: client.BufferClient) -> None:
    if self._group_size or self._raw:
      await self._compare(service)
    lease = uuid.uuid4().hex  # Of all tries: an answer may be lost.
    batch = await self._tried(
      lambda: service.read(
        self._read_size(),
        lease_s=self._settings.lease_s,
        lease=lease,
        allowed_items=self._allowed_items(),
      )
    )
    if batch is None:
      self._empty += 1
      if self._empty % _LOOK_EVERY == 0:
        await self._look(service)
      if not self.over:
        await asyncio.sleep(self._settings.poll_s)
      return
    self._empty, self._ended = 0, ""
    self._full += 1
    groups = client.sift(batch)
    refused = []
    with self._lock:
      open_keys: set[str] = set()
      for group in groups:
        about = _About.of(group.instance_id, group.uids)
        before = {
          self._seen[about.name, uid]
          for uid in about.uids
          if (about.name, uid) in self._seen
        }
        if before:
          self.counts["repeated"] += 1
          open_keys |= before - set(self._finished)
          continue
        self._see(about)
        self._taken += len(about.uids)
        if group.problem:
          refused.append((about, group.problem))
        else:
          self._waiting.append(_Group(group.records, about))
          open_keys.add(about.key)
      if batch.lease:
        self._leases[batch.lease] = open_keys
    for about, problem in refused:
      self._refuse(about, problem)
    self._acknowledge()
    if self._full % _LOOK_EVERY == 0:
      await self._ask_stats(service)

  async def _look(self, service: client.BufferClient) -> None:
    """Ends the loop where the generator that it started writes no more.

    Raises:
      GeneratorFailed: it failed.
    """
    stats = await self._ask_stats(service)
    if self._payload is None or stats is None:
      return
    run = stats.get("generator") or {}
    state, before = run.get("state", ""), self._ended
    if state not in ("finished", "stopped", "failed", "late"):
      state = ""
    if run.get("task_type") == _WRITTEN_ELSEWHERE:
      state = ""
    self._ended = state
    if not state or state != before:
      return  # The last groups may have come after the latest read.
    if state in ("failed", "late"):
      raise GeneratorFailed(
        f"the generator {run.get('task_type')!r} of the rollout buffer"
        f" {self._settings.url} failed: {run.get('error')}; see its log in"
        " /buffer/stats, mend it and resume the run"
      )
    if self._batch_size is not None:
      self._batch_size = None  # Less than a whole batch may be left.
      return
    with self._lock:
      # Groups that another reader holds may return.
      lent = stats.get("leases", 0) > len(self._leases)
    if not lent and not stats.get("waiting_items", 0):
      self.over = (
        f"the generator {run.get('task_type')!r} of the rollout buffer is"
        f" {state}, and nothing is left to read; for more set"
        f" buffer.num_epoch={self._settings.num_epoch} higher, or give more"
        " tasks"
      )

  async def _ask_stats(
    self, service: client.BufferClient
  ) -> dict[str, Any] | None:
    """The service's figures, of which drops are reported; None: no answer."""
    try:
      stats = await service.stats()
    except (http.CallError, ValueError, TimeoutError) as error:
      _LOG.warning("the rollout buffer does not tell its state: %s", error)
      return None
    self._drops.look(stats)
    return stats

  def _room(self) -> int:
    """Returns the groups that the queue would admit now."""
    return 0 if self._held else self._queue.room()

  def _read_size(self) -> int | None:
    """Returns the items of a read: a step's, or as many as may be written.

    A step that lacks one group, dropped or replaced, must not wait for a batch
    that the bound keeps the generator from writing.
    """
    if self._batch_size is None or not self._bounded:
      return self._batch_size
    return min(self._batch_size, self._members * max(1, self._room()))

  def _allowed_items(self) -> int | None:
    """Returns the items that the generator may have begun since the start.

    The items that were read count, and the groups that the queue would admit
    now: the bound on staleness reaches the generator. None where other programs
    write, and where the buffer keeps earlier items.
    """
    if not self._bounded:
      return None
    waiting = sum(len(group.about.uids) for group in self._waiting)
    return max(0, self._taken - waiting + self._members * self._room())

  def _see(self, about: _About) -> None:
    for uid in about.uids:
      self._seen[about.name, uid] = about.key

  def _refuse(self, about: _About, problem: str) -> None:
    """Drops a group that cannot be read, and says so.

    Raises:
      ValueError: many in a row.
    """
    what = f"the group of instance {about.name!r} is dropped: {problem}"
    _LOG.warning("the rollout buffer: %s", what)
    self.counts["refused"] += 1
    self._observers.on_event(events.Fault("buffer", "refused", what))
    with self._lock:
      self._finish(about)
    self._refused_in_a_row += 1
    if self._refused_in_a_row >= _MOST_REFUSED:
      raise ValueError(
        f"{_MOST_REFUSED} groups of the rollout buffer in a row cannot be"
        f" read; see what its generator writes. The last: {what}"
      )

  def _say_dropped(
    self, about: _About, group: trajectory_lib.TrajectoryGroup, reason: str
  ) -> None:
    """Reports drops in a row: the 1st, 2nd, 4th, 8th …

    Raises:
      ValueError: many in a row had too little to train on.
    """
    self._dropped_in_a_row += 1
    count = self._dropped_in_a_row
    what = f"the group of instance {about.name!r} is dropped: {reason}"
    if count > 1:
      what += f"; {count} groups in a row were dropped"
    if count & (count - 1) == 0:
      _LOG.warning("the rollout buffer: %s", what)
      self._observers.on_event(events.Fault("buffer", "dropped", what))
    if len(group.valid) >= self._min_valid:
      self._useless_in_a_row = 0
      return
    self._useless_in_a_row += 1
    if self._useless_in_a_row >= _MOST_REFUSED:
      with self._lock:
        self._finish(about)
      raise ValueError(
        f"{_MOST_REFUSED} groups of the rollout buffer in a row have too few"
        f" episodes to train on. The last: {what};"
        f" {reader_lib.diagnosis(group)}"
      )

  async def _put(self, waiting: _Group) -> None:
    while self._held:
      await asyncio.sleep(_HELD_S)
    ticket = await self._queue.acquire_start_async()
    try:
      version = ticket.start_version
      try:
        group = await asyncio.to_thread(
          self._group, waiting, ticket.index, version
        )
      except reader_lib.SettingError:
        raise
      except (ValueError, TypeError, LookupError) as error:
        self._refuse(waiting.about, str(error))
        self._acknowledge()
        return
      self._refused_in_a_row = 0
      announce(self._observers, group)
      if reason := self._refusal(group):
        self.counts["dropped"] += 1
        self._say_dropped(waiting.about, group, reason)
        self._observers.on_event(events.GroupFinished(group, "dropped", reason))
        with self._lock:
          self._finish(waiting.about)
        self._acknowledge()
        return
      self._dropped_in_a_row = self._useless_in_a_row = 0
      with self._lock:
        # Before the queue may deliver it.
        self._queued[ticket.index] = waiting.about
      await self._queue.aput(group, ticket)
      self.counts["accepted"] += 1
      self._observers.on_event(events.GroupFinished(group, "accepted"))
    finally:
      try:
        self._queue.release_start(ticket)
      except ValueError:
        pass  # It was put.
      else:
        with self._lock:
          self._queued.pop(ticket.index, None)

  def _group(
    self, waiting: _Group, index: int, version: int
  ) -> trajectory_lib.TrajectoryGroup:
    episodes = [
      self._reader.episode(record, version=version) for record in waiting.items
    ]
    group = records.group_of(waiting.items, episodes, start_version=version)
    return named(group, waiting.items[0].instance_id, index)

  def _refusal(self, group: trajectory_lib.TrajectoryGroup) -> str:
    valid = len(group.valid)
    if valid < self._min_valid:
      return (
        f"{valid} of {len(group)} episodes can be trained on,"
        f" {self._min_valid} are needed (collect.min_valid)"
        f"{group.untrained_note}"
      )
    if group.newest_version > self._queue.version:
      return (
        f"its newest token is of version {group.newest_version}, and the"
        f" learner is at {self._queue.version}: of another run, or of one"
        " that this run was taken back from"
      )
    return ""

  # --- leases ----------------------------------------------------------------

  def _finish(self, about: _About) -> None:
    """Under the lock."""
    self._finished[about.key] = about
    for keys in self._leases.values():
      keys.discard(about.key)

  def _settle(self, indices: Iterable[int]) -> None:
    """Finishes groups, by index, that were trained on durably or dropped."""
    with self._lock:
      for index in indices:
        about = self._queued.pop(index, None)
        if about is not None:
          self._finish(about)
    self._acknowledge()

  def _acknowledge(self) -> None:
    """Acknowledges leases of which nothing is left."""
    with self._lock:
      settled = [lease for lease, keys in self._leases.items() if not keys]
      for lease in settled:
        del self._leases[lease]
        if self._loop is None or self._loop.is_closed():
          continue
        work = asyncio.run_coroutine_threadsafe(self._ack(lease), self._loop)
        self._acks.add(work)
        work.add_done_callback(self._acks.discard)

  async def _ack(self, lease: str) -> None:
    service = self._make_client()
    try:
      await service.ack(lease)
    except http.CallError as error:
      # Its groups come again, and are recognised.
      _LOG.warning("the rollout buffer keeps lease %s: %s", lease, error)
    finally:
      await service.aclose()
