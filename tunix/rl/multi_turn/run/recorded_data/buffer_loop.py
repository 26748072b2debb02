"""Feeds a run's queue from a rollout buffer service (`rollout.via=buffer`).

Groups are admitted, gated by staleness, made durable and trained on as always,
and only their episodes come from the service.

Promises: what was read under a lease is acknowledged only when it is trained
on and a checkpoint holds that, or when it was dropped; a group that the service
gives again is recognised by its members' uids, and never trained on twice, by a
resumed run either; such a run asks the service to skip the instances it has
finished. A failed call is repeated after a pause, `buffer.retries` times in a
row, and an acknowledgement until the run ends; the consumer never waits for a
loop that has ended: one whose generator failed fails, and one whose generator
is over reads what is left and closes the queue.

Does not: decide which groups are valid (the service does), but drops those that
cannot be trained on (`feeding`). What the service itself drops is reported,
each time that it has doubled.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from typing import Any, Callable, Container, Iterable, Mapping, NamedTuple
import uuid

from tunix.rl.multi_turn.config import data_sections
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.net import http
from tunix.rl.multi_turn.run.recorded_data import feeding
from tunix.rl.multi_turn.trajectory_collector import records
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import client

_LOG = logging.getLogger(__name__)
_LONGEST_PAUSE_S = 30.0
_END_S = 10.0
_LOOK_EVERY = 5
"""Reads, with groups or without, between two looks at the service."""
_REFUSED = frozenset((400, 401, 403, 404, 422))
_WRITTEN_ELSEWHERE = "external"
"""Task type of a generator that ends at once: programs elsewhere write."""


class GeneratorFailed(RuntimeError):
  """The service's generator failed, and writes no more."""


def uids_of(group: trajectory_lib.TrajectoryGroup) -> frozenset[str]:
  """Returns the uids of a group's items; a copy of a member has its uid."""
  names = [t.trajectory_id for t in group]
  members = set(names)
  copies = {f"{name}#{n}" for name in names for n in range(2, len(names) + 1)}
  return frozenset(members - copies)


class _About(NamedTuple):
  """Identity of a group, by which a repeated delivery is recognised."""

  name: str  # Of its instance; "" where that is unknown.
  uids: frozenset[str]

  @classmethod
  def of(cls, name: str, uids: Iterable[str]) -> _About:
    return cls(name, frozenset(uids))

  def to_json(self) -> list[Any]:
    return [self.name, sorted(self.uids)]


class BufferLoop(feeding.GroupFeed):
  """See the module docstring."""

  source = "rollout buffer"

  def __init__(
    self,
    make_client: Callable[[], client.BufferClient],
    settings: data_sections.BufferConfig,
    *parts: Any,
    batch_size: int,
    group_size: int = 0,
    raw: bool = False,
    payload: Callable[[list[str]], Mapping[str, Any]] | None,
    **options: Any,
  ):
    """Args:

    make_client: Makes a client of the service.
    settings: a `BufferConfig`.
    *parts, **options: Arguments of `GroupFeed`.
    batch_size: Size of a read, see `BufferClient.read`.
    group_size: Size of the buffer's groups if other programs write; 0 = any.
    raw: Whether rewards that other programs write must not be normalised.
    payload: instance ids to skip -> body of `/start_rollout`; None starts
      nothing.
    """
    super().__init__(*parts, **options)
    self._make_client = make_client
    self._settings = settings
    self._batch_size: int | None = batch_size
    # Where it starts the generator, the service takes it from the start.
    self._group_size = group_size if payload is None else 0
    self._bounded = payload is not None
    self._members = group_size
    self._taken = 0  # Items that were read, without repeated ones.
    self._raw = raw and payload is None
    self._payload = payload
    self._finished: dict[_About, None] = {}
    # (Instance id, uid) -> the group that has it.
    self._seen: dict[tuple[str, str], _About] = {}
    self._leases: dict[str, set[_About]] = {}  # Lease -> groups to be settled.
    self._acks: set[concurrent.futures.Future[None]] = set()
    self._failures = 0
    self._empty = 0  # Reads without a group in a row.
    self._full = 0  # Reads with groups.
    self._ended = ""  # State of a generator that the latest look saw end.
    self._drops = _DropReport(self._report)

  # --- state -----------------------------------------------------------------

  def state_dict(self) -> dict[str, Any]:
    """Returns, as JSON, the groups that are finished and those in the queue."""
    with self._lock:
      finished, queued = list(self._finished), self._queued.items()
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
    self._finished = dict.fromkeys(finished)
    self._queued = {
      index: _About.of(feeding.instance_of(group), uids_of(group))
      for index, group in stored
    }
    self._seen = {}
    for about in (*finished, *self._queued.values()):
      self._see(about)

  def skipped(self) -> list[str]:
    """Instances that the service need not make again, one for each pass."""
    with self._lock:
      every = (*self._finished, *self._queued.values())
    return [about.name for about in every if about.name]

  # --- running ---------------------------------------------------------------

  async def _feed(self) -> None:
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
        if self._waiting:
          await self._put()
          self._acknowledge()
        else:
          await self._read(service)
    finally:
      await service.aclose()

  def finish(self) -> None:
    """Waits for acknowledgements after the last checkpoint, with a deadline."""
    due = time.monotonic() + _END_S
    while self._acks and (left_s := due - time.monotonic()) > 0:
      concurrent.futures.wait(self._acks.copy(), left_s)
      self._acknowledge()

  async def _tried(
    self, call: Callable[[], Any], final: Container[int] = ()
  ) -> Any:
    """Repeats `call()` until it succeeds or too many have failed.

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
    """Compares the service's groups with the run's, see `_check_groups`."""
    stats = await self._tried(service.stats)
    if "group_size" not in stats:  # It is not made yet, or no service of ours.
      return
    size, raw = self._group_size, self._raw
    self._group_size, self._raw = 0, False
    _check_groups(stats, self._settings.url, size, raw)

  async def _read(self, service: client.BufferClient) -> None:
    if self._group_size or self._raw:
      await self._compare(service)
    lease_id = uuid.uuid4().hex  # Of all tries: an answer may be lost.
    lease = await self._tried(
      lambda: service.lease(
        self._read_size(),
        lease_s=self._settings.lease_s,
        lease_id=lease_id,
        allowed_items=self._allowed_items(),
      )
    )
    if lease is None:
      self._empty += 1
      if self._empty % _LOOK_EVERY == 0:
        await self._look(service)
      if not self.over:
        await asyncio.sleep(self._settings.poll_s)
      return
    self._empty, self._ended = 0, ""
    self._full += 1
    refused = []
    with self._lock:
      open_groups: set[_About] = set()
      for group in lease.groups:
        about = self._note(group)
        before = {
          self._seen[about.name, uid]
          for uid in about.uids
          if (about.name, uid) in self._seen
        }
        if before:
          self.counts["repeated"] += 1
          open_groups |= before - self._finished.keys()
          continue
        self._see(about)
        self._taken += len(about.uids)
        if group.problem:
          refused.append((about, group.problem))
        else:
          self._waiting.append(group)
          open_groups.add(about)
      if lease.id:
        self._leases[lease.id] = open_groups
    for about, problem in refused:
      with self._lock:
        self._settled(about)
      self._refuse(about.name, problem)
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
    """Asks for the service's figures, reports drops; None: no answer."""
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
    waiting = sum(len(group.uids) for group in self._waiting)
    return max(0, self._taken - waiting + self._members * self._room())

  def _see(self, about: _About) -> None:
    for uid in about.uids:
      self._seen[about.name, uid] = about

  def _name(self, entry: client.ReadGroup) -> str:
    return entry.instance_id

  def _note(self, entry: client.ReadGroup) -> _About:
    return _About(entry.instance_id, entry.uids)

  def _group(
    self, entry: client.ReadGroup, index: int, version: int
  ) -> trajectory_lib.TrajectoryGroup:
    episodes = [
      self._reader.episode(record, version=version) for record in entry.records
    ]
    group = records.group_of(entry.records, episodes, start_version=version)
    return feeding.named(group, entry.records[0].instance_id, index)

  def _refusal(self, group: trajectory_lib.TrajectoryGroup) -> str:
    if reason := super()._refusal(group):
      return reason
    if group.newest_version > self._queue.version:
      return (
        f"its newest token is of version {group.newest_version}, and the"
        f" learner is at {self._queue.version}: of another run, or of one"
        " that this run was taken back from"
      )
    return ""

  # --- leases ----------------------------------------------------------------

  def _settled(self, note: _About) -> None:
    self._finished[note] = None
    for groups in self._leases.values():
      groups.discard(note)

  def _discarded(self, entry: client.ReadGroup) -> None:
    self._settled(self._note(entry))

  def _settle(self, indices: Iterable[int]) -> None:
    super()._settle(indices)
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
      await service.acknowledge(lease)
    except (http.CallError, TimeoutError) as error:
      _LOG.warning("the rollout buffer keeps lease %s: %s", lease, error)
      if getattr(error, "status", 0) not in _REFUSED:
        await asyncio.sleep(self._settings.poll_s)
        with self._lock:
          self._leases[lease] = set()  # The next acknowledgement includes it.
    finally:
      await service.aclose()


def _check_groups(
  stats: Mapping[str, Any], url: str, size: int, raw: bool
) -> None:
  """Refuses a buffer whose groups are of another size, or other rules.

  Args:
    stats: the figures.
    url: Address of the service.
    size: Size of the groups; 0 = any.
    raw: rewards must not be normalised.

  Raises:
    ValueError: naming both.
  """
  served_size = stats["group_size"]
  problems = []
  if size and served_size != size:
    problems.append(
      f"the rollout buffer {url} makes groups of {served_size}, and"
      f" collect.group_size={size}; start it with --group-size={size}"
      f" (or its rollout with num_repeat_per_sample={size}), or set"
      f" collect.group_size={served_size}"
    )
  if raw and stats.get("group_rules") == "normalized":
    problems.append(
      f"the rollout buffer {url} normalises rewards, which"
      " algorithm.advantage would do again; start it with"
      " --group-rules=raw (or its rollout with group_rules=raw), or set"
      " algorithm.advantage=reward"
    )
  if problems:
    raise ValueError("; ".join(problems))


class _DropReport:
  """Says what the service has dropped: the first, and each doubling."""

  def __init__(self, report: Callable[[str, str], object]):
    """Args:

    report: Receives the kind and the text of each message.
    """
    self._report = report
    # Items that were dropped before; None: nothing was looked at yet.
    self._before: int | None = None
    self._say_from = 1

  def look(self, stats: Mapping[str, Any]) -> None:
    """Compares figures with the first ones, which are the beginning."""
    total = stats.get("total_dropped", 0)  # None of one not made yet.
    if not isinstance(total, int):
      return
    if self._before is None:
      self._before = total
    elif total < self._before:  # Another rollout has begun.
      self._before, self._say_from = 0, 1
    count = total - self._before
    if count < self._say_from:
      return
    self._say_from = 2 * count
    size = max(1, stats.get("group_size") or 1)
    what = (
      f"it dropped {count} episodes since this run began, {count / size:.3g}"
      f" groups of {size}: the rewards of a group were all equal or outside"
      " of [0, 1], or it was not complete in time (group_timeout_seconds)"
    )
    self._report("dropped", what)
