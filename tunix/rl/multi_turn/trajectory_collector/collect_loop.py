"""Feeds the queue with groups of episodes, task after task, for ever.

Promises: a group starts only when the queue admits it, and a group that comes
in parts (`CollectConfig.part_size`) with a ticket for each; one with too few
valid members is tried again under the same admission, a bounded number of
times, and then given up; and those of `feed_loop`.

Does not: know how a group is trained on.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import random
from typing import (
  Any,
  AsyncGenerator,
  Callable,
  cast,
  Iterator,
  Mapping,
  Protocol,
  Sequence,
)

from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.trajectory_collector import feed_loop
from tunix.rl.multi_turn.trajectory_collector import groups
from tunix.rl.queue import group_queue

_MAX_BACKOFF = 30.0  # seconds


class CollectError(RuntimeError):
  """Collecting cannot continue."""


class Sampler(Protocol):
  """Yields tasks. `state_dict` is JSON."""

  def __next__(self) -> Any:
    """The next task; StopIteration ends the run."""
    ...

  def state_dict(self) -> dict[str, Any]: ...

  def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class TaskSampler:
  """Goes through a list of tasks, shuffled anew each epoch.

  The order is a function of the seed and the epoch. The state is a position.
  """

  def __init__(
    self,
    tasks: Sequence[Any],
    *,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = None,
  ):
    """Args:

    tasks: at least one.
    seed: Seed of the order.
    shuffle: False keeps the list's order.
    epochs: times through the list; None repeats it for ever.
    """
    if not tasks:
      raise ValueError("TaskSampler needs at least one task")
    if epochs is not None and epochs < 1:
      raise ValueError(f"epochs must be >= 1 or None, got {epochs}")
    self._tasks = tasks
    self._seed = seed
    self._shuffle = shuffle
    self._epochs = epochs
    self._epoch = 0
    self._position = 0
    self._order: list[int] | None = None

  def __iter__(self) -> Iterator[Any]:
    return self

  def __next__(self) -> Any:
    if self._position == len(self._tasks):
      self._epoch += 1
      self._position = 0
      self._order = None
    if self._epochs is not None and self._epoch >= self._epochs:
      raise StopIteration
    if self._order is None:
      self._order = list(range(len(self._tasks)))
      if self._shuffle:
        random.Random(f"{self._seed}/{self._epoch}").shuffle(self._order)
    task = self._tasks[self._order[self._position]]
    self._position += 1
    return task

  def state_dict(self) -> dict[str, Any]:
    return {
      "epoch": self._epoch,
      "position": self._position,
      "num_tasks": len(self._tasks),
    }

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    """Continues where `state` was taken.

    Raises:
      ValueError: the state is of another list of tasks.
    """
    if state["num_tasks"] != len(self._tasks):
      raise ValueError(
        f"the sampler's state is of {state['num_tasks']} tasks, this list"
        f" has {len(self._tasks)}"
      )
    self._epoch = int(state["epoch"])
    self._position = int(state["position"])
    self._order = None


class CollectLoop(feed_loop.FeedLoop):
  """See the module docstring. `await run()`.

  Attributes:
    counts: groups accepted, requeued, given_up; episodes by status.
  """

  def __init__(
    self,
    collector: groups.GroupCollector,
    tasks: Sampler | Iterator[Any],
    queue: group_queue.GroupQueue,
    *,
    backoff: float = 0.5,
    max_failed_groups: int = 64,
    task_from_json: Callable[[Any], Any] | None = None,
    number: Callable[[int], int] = lambda index: index,
  ):
    """Args:

    collector: collects one group; its config holds min_valid and
      max_requeues.
    tasks: an iterator; with `state_dict` and `load_state_dict` a run can be
      resumed.
    queue: takes the groups.
    backoff: seconds before the first retry, doubled for each further one.
    max_failed_groups: groups dropped in a row, retries included, before the
      loop gives up with a CollectError: a world in which nothing works must
      not look like a slow one.
    task_from_json: Reads an unfinished task of `state_dict`, which holds
      `task.to_json()` or `trajectory.encode(task)`; None =
      `trajectory.decode`.
    number: Number of a group in the whole run, from its index in this queue:
      another one where several processes collect.
    """
    if not backoff >= 0:
      raise ValueError(f"backoff must be >= 0 seconds, got {backoff}")
    if max_failed_groups < 1:
      raise ValueError(
        f"max_failed_groups must be >= 1, got {max_failed_groups}"
      )
    super().__init__(queue)
    self._collector = collector
    self._tasks = tasks
    self._max_requeues = collector.config.max_requeues
    self._parts = collector.config.parts
    self._backoff = backoff
    self._max_failed = max_failed_groups
    self._from_json = task_from_json or trajectory_lib.decode
    self._number = number
    self._unfinished: dict[int, Any] = {}
    self._pending: list[Any] = []  # Drawn and not yet admitted.
    # Indices in the queue of the parts to collect; () for a whole group.
    self._resumed: list[tuple[tuple[int, ...], Any]] = []
    self._next_index = 0
    self._failed_in_row = 0

  # --- State ----------------------------------------------------------------

  def state_dict(self) -> dict[str, Any]:
    """JSON: the sampler's position and the tasks that are under way."""
    sampler = self._sampler()
    with self._lock:
      return {
        "sampler": sampler.state_dict(),
        "next_index": self._next_index,
        "unfinished": [
          {"index": index, "task": _task_to_json(task)}
          for index, task in [
            *sorted(self._unfinished.items()),
            *((None, task) for task in self._pending),
          ]
        ],
      }

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    """Continues a run: unfinished tasks first. Call it before the start.

    The queue's store may be ahead of the state: what was drawn after the
    state was taken is drawn again here, under the same indices. A task whose
    group the store holds is not run again, and of one whose parts it holds,
    only the others are.
    """
    if self._loop is not None:
      raise RuntimeError("load_state_dict must be called before the loop runs")
    self._sampler().load_state_dict(state["sampler"])
    accepted = self._queue.known()
    drawn: list[tuple[int | None, Any]] = [
      (item["index"], self._from_json(item["task"]))
      for item in state["unfinished"]
    ]
    pending = collections.deque(t for i, t in drawn if i is None)
    resumed = [(i, t) for i, t in drawn if i is not None and i not in accepted]
    self._next_index = int(state["next_index"])
    while self._next_index <= max(accepted, default=-1):
      try:
        task = pending.popleft() if pending else next(self._tasks)
      except StopIteration:
        break
      first, self._next_index = self._next_index, self._next_index + self._parts
      parts = range(first, self._next_index)
      resumed += [(index, task) for index in parts if index not in accepted]
    self._queue.expect(
      (index for index, _ in resumed), next_index=self._next_index
    )
    self._unfinished = dict(resumed)
    self._pending = list(pending)
    groups_left: dict[int, tuple[tuple[int, ...], Any]] = {}
    for index, task in resumed:
      number = index // self._parts
      before, _ = groups_left.get(number, ((), None))
      groups_left[number] = ((*before, index), task)
    self._resumed = [*groups_left.values(), *(((), task) for task in pending)]

  def _sampler(self) -> Sampler:
    if not hasattr(self._tasks, "state_dict"):
      raise TypeError(
        f"the task iterator {type(self._tasks).__name__} has no state_dict;"
        " use TaskSampler to be able to resume"
      )
    return cast(Sampler, self._tasks)

  # --- Running --------------------------------------------------------------

  async def _feed(self) -> None:
    resumed = collections.deque(self._resumed)
    while True:
      if not self._queue.bounds_running:
        await self._collector.wait_for_room()
      # Pulled before it is admitted: the end of the tasks must be seen even
      # when the gate is shut.
      indices: tuple[int, ...] = ()
      with self._lock:
        if resumed:
          indices, task = resumed.popleft()
        else:
          try:
            with concurrency.contained("the task source"):
              task = next(self._tasks)
          except StopIteration:
            drawn = self._next_index // self._parts
            self.over = f"the task source ended after {drawn} groups"
            return
          self._pending.append(task)
      tickets = await self._admit(indices or [None] * self._parts)
      with self._lock:
        if not indices:
          self._pending.pop(0)  # This task: they are admitted in their order.
        for ticket in tickets:
          self._unfinished[ticket.index] = task
          self._next_index = max(self._next_index, ticket.index + 1)
      self._announce(tickets)
      running = asyncio.ensure_future(self._group(task, tickets))
      self._running.add(running)
      running.add_done_callback(
        functools.partial(self._give_back, tickets=tickets)
      )
      running.add_done_callback(self._ended_one)

  def _announce(self, tickets: Sequence[group_queue.Ticket]) -> None:
    if not self._queue.bounds_running:
      size = self._collector.config.group_size
      members = size * len(tickets) // self._parts
      self._collector.announce(members + self._collector.beside)

  def _give_back(
    self, ended: asyncio.Task[None], tickets: list[group_queue.Ticket]
  ) -> None:
    """Releases the tickets of a group cancelled before its first step."""
    if ended.cancelled():
      self._release(tickets)

  async def _group(
    self, task: object, tickets: list[group_queue.Ticket]
  ) -> None:
    """One task, until its group is accepted, all parts of it, or given up."""
    remaining = collections.deque(tickets)
    number = self._number(tickets[0].index // self._parts)
    try:
      for attempt in range(self._max_requeues + 1):
        if attempt:
          await asyncio.sleep(
            min(_MAX_BACKOFF, self._backoff * 2 ** (attempt - 1))
          )
          fresh = map(self._queue.refresh_start, remaining)
          remaining = collections.deque(fresh)
          self._announce(remaining)
        async with contextlib.aclosing(
          self._collect(task, number, attempt, remaining[0], len(remaining))
        ) as parts:
          async for group in parts:
            for member in group:
              self.counts[f"episodes_{member.status.value}"] += 1
            reason = self._refusal(group)
            if reason is None:
              self._failed_in_row = 0
              await self._queue.push(group, remaining[0])
              self._finished(group, remaining.popleft(), "accepted", "")
        if reason is None or len(remaining) < len(tickets):
          break
        self._check_hope(group, reason)
        if attempt < self._max_requeues:
          self.counts["requeued"] += 1
          self._collector.emit(
            events.GroupFinished(group, outcome="requeued", reason=reason)
          )
      if reason is not None:
        self._finished(group, remaining[0], "dropped", reason)
      with self._lock:
        for ticket in remaining:  # Of parts that never came.
          self._unfinished.pop(ticket.index, None)
    finally:
      self._release(remaining)

  async def _collect(
    self,
    task: object,
    number: int,
    attempt: int,
    ticket: group_queue.Ticket,
    parts: int,
  ) -> AsyncGenerator[trajectory_lib.TrajectoryGroup, None]:
    """The group of a task, or its parts, as they end."""
    version = ticket.start_version
    if self._parts == 1:
      yield await self._collector.collect(
        task, index=number, attempt=attempt, start_version=version
      )
      return
    async with contextlib.aclosing(
      self._collector.collect_parts(
        task, index=number, attempt=attempt, start_version=version, parts=parts
      )
    ) as outcomes:
      async for part in outcomes:
        yield part

  def _finished(self, group, ticket, outcome: str, reason: str) -> None:
    with self._lock:
      self._unfinished.pop(ticket.index, None)
    self.counts["accepted" if outcome == "accepted" else "given_up"] += 1
    self._collector.emit(
      events.GroupFinished(group, outcome=outcome, reason=reason)
    )

  def _refusal(self, group: trajectory_lib.TrajectoryGroup) -> str | None:
    # A later part has the members of earlier ones to be compared with.
    least = 1 if group.peer_rewards else self._collector.config.min_valid
    valid = len(group.valid)
    if group.extra is not None and not group.extra.status.is_policy_outcome:
      error = group.extra.error
      ended = group.extra.status.value
      text = f"its greedy episode, the baseline, ended as {ended}"
      return f"{text}: {error}" if error else text
    if valid >= least:
      return None
    errors = [t.error for t in group if t.error]
    text = f"{valid} of {len(group)} episodes are valid, {least} are needed"
    text = f"{text}; e.g. {errors[-1]}" if errors else text
    return text + group.untrained_note

  def _check_hope(self, group, reason: str) -> None:
    self._failed_in_row += 1
    if self._failed_in_row >= self._max_failed:
      raise CollectError(
        f"{self._failed_in_row} groups in a row failed, the last one"
        f" ({group.group_id}, task {group.task_id}): {reason}"
      )


def _task_to_json(task: object) -> Any:
  if hasattr(task, "to_json"):
    return task.to_json()
  return trajectory_lib.encode(task)
