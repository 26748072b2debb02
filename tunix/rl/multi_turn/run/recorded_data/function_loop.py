"""Feeds a run's queue from a rollout function (`buffer.function`).

Stands where a run has its collecting loop. The function is the rollout buffer
protocol's: (args, rollout_id, data_buffer) -> samples, plain or async; it runs
in a thread of its own, and may block it. `args` has the arguments of the
protocol's trainer under their own names, made of the run's settings.

Promises: the function is called for rollout_id 0, 1, 2 … as the queue admits
groups, once for each; a checkpoint holds the number of the next rollout, the
data buffer, and the samples that the function has returned and that are not
trained on, so that a resumed run goes on where it was taken and loses none. A
rollout of another number of groups than learner.groups_per_step ends the run.

Does not: decide which groups are valid (the service or the function does), but
reports and drops one with a sample that the policy cannot have sampled, or with
fewer than collect.min_valid members that can be trained on. Many such in a row
end the run.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import inspect
import threading
from typing import Any, Callable, Iterable, Mapping, Sequence

from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.run.recorded_data import buffer_loop
from tunix.rl.multi_turn.run.recorded_data import reader as reader_lib
from tunix.rl.multi_turn.trajectory_collector import records
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import samples
from tunix.rl.queue import group_queue

_PAUSE_S = 0.05
_MOST_DROPPED = 32
"""Groups in a row that cannot be trained on, after which the run ends."""

Group = list[dict[str, Any]]
"""The items of a group."""


class FunctionLoop:
  """See the module docstring; `await run()` on the run's event loop."""

  def __init__(
    self,
    function: Callable[..., Any],
    args: argparse.Namespace,
    reader: reader_lib.EpisodeReader,
    queue: buffer_loop.LeasedQueue,
    decode: Callable[[Sequence[int]], str],
    *,
    min_valid: int,
    observers: events.Observer,
  ):
    """Args:

      function: The rollout function.
      args: Its first argument; `num_rollout` and `rollout_batch_size` bound
        the loop.
      reader: Makes episodes of the policy.
      queue: Receives the groups.
      decode: Token ids to text, for the reports of episodes.
      min_valid: Members of a group that can be trained on, at least.
      observers: Receive the episodes.

    Raises:
      ValueError: buffer.filter names no function.
    """
    self._function = function
    self._args = args
    self._reader = reader
    self._queue = queue
    self._decode = decode
    self._min_valid = min_valid
    self._observers = observers
    self._buffer = samples.DataBuffer(args)
    self._next = 0
    self._waiting: collections.deque[Group] = collections.deque()
    self._queued: dict[int, Group] = {}  # By index.
    self._lock = threading.Lock()
    self._loop: asyncio.AbstractEventLoop | None = None
    self._task: asyncio.Task[Any] | None = None
    self._call: _Call | None = None
    self._stopping = self._paused = False
    self._dropped = self._dropped_in_a_row = 0
    self.over = ""
    """Always "": `num_rollout` alone ends the loop."""
    queue.settled = self._settle

  # --- state -----------------------------------------------------------------

  def state_dict(self) -> dict[str, Any]:
    """JSON: the next rollout, the data buffer, and items not trained on."""
    with self._lock:
      state = {
        "next_rollout": self._next,
        "data_buffer": self._buffer.state_dict(),
        "queued": [[index, group] for index, group in self._queued.items()],
        "waiting": list(self._waiting),
      }
    # Last: a group that left in between is counted, and made up for.
    return {**state, "dropped": self._all_dropped()}

  def load_state_dict(
    self,
    state: Mapping[str, Any],
    consumed: Iterable[int] = (),
    stored: Iterable[tuple[int, trajectory_lib.TrajectoryGroup]] = (),
  ) -> None:
    """Restores the state of a checkpoint. Call it before `run`.

    Args:
      state: Of `state_dict`; {} without a checkpoint.
      consumed: Indices that the checkpoint holds the training of.
      stored: Groups that the queue's store delivers again.
    """
    if not state:
      return
    self._next = int(state["next_rollout"])
    self._dropped = int(state.get("dropped", 0))
    self._buffer.load_state_dict(state["data_buffer"])
    settled = {*consumed, *(index for index, _ in stored)}
    for index, group in state["queued"]:
      if index not in settled:
        self._waiting.append(group)
    self._waiting.extend(state["waiting"])

  # --- running ---------------------------------------------------------------

  async def run(self) -> None:
    """Makes rollouts until `stop`, or until the queue closes.

    Raises:
      Exception: the function's; the queue's consumer gets it too.
    """
    self._loop = asyncio.get_running_loop()
    self._task = asyncio.current_task()
    try:
      while not self._stopping:
        if self._paused or not (self._waiting or self._is_due()):
          await asyncio.sleep(_PAUSE_S)
          continue
        await self._put()
    except (asyncio.CancelledError, group_queue.QueueClosed):
      if not self._stopping and not self._queue.closed:
        raise
    except BaseException as error:
      self._queue.fail(error)
      raise

  def stop(self) -> None:
    """Calls the function no more. Thread-safe, returns at once."""
    self._stopping = True
    if self._call is not None:
      self._call.cancel()
    if self._loop is not None and self._task is not None:
      try:
        self._loop.call_soon_threadsafe(self._task.cancel)
      except RuntimeError:  # The loop has ended already.
        pass

  def hold(self) -> None:
    """Admits no group until `release`. Thread-safe."""
    self._paused = True

  def release(self) -> None:
    self._paused = False

  def finish(self) -> None:
    """Does nothing: no lease is open."""

  def _is_due(self) -> bool:
    """Whether the run needs another rollout, groups that were dropped too."""
    size = self._args.rollout_batch_size
    dropped = self._all_dropped()
    return self._next < self._args.num_rollout + -(-dropped // size)

  def _all_dropped(self) -> int:
    """Returns the number of groups dropped here and by the queue."""
    return self._dropped + int(self._queue.counters()["dropped_stale"])

  async def _put(self) -> None:
    """Queues a group; calls the function first where none waits.

    The group is admitted before: with queue.max_staleness=0 a rollout begins
    after the update before it.
    """
    ticket = await self._queue.acquire_start_async()
    try:
      if not self._waiting:
        await self._fill()
      data = self._waiting[0]
      try:
        group = await asyncio.to_thread(
          self._group, data, ticket.index, ticket.start_version
        )
      except reader_lib.SettingError:
        raise
      except ValueError as error:
        self._drop(
          f"the group of instance {data[0]['instance_id']!r} is dropped:"
          f" {error}"
        )
        return
      buffer_loop.announce(self._observers, group)
      if self._is_useless(group):
        return
      with self._lock:
        # Before the queue may deliver it.
        self._waiting.popleft()
        self._queued[ticket.index] = data
      await self._queue.aput(group, ticket)
      self._observers.on_event(events.GroupFinished(group, "accepted"))
    finally:
      try:
        self._queue.release_start(ticket)
      except ValueError:
        pass  # It was put.
      else:
        with self._lock:
          if ticket.index in self._queued:
            self._waiting.appendleft(self._queued.pop(ticket.index))

  async def _fill(self) -> None:
    rollout_id = self._next
    self._call = _Call(self._function, self._args, rollout_id, self._buffer)
    result = await self._call.result()
    groups = samples.groups_of(
      list(result or ()), self._args.n_samples_per_prompt
    )
    size = self._args.rollout_batch_size
    if len(groups) != size:
      raise ValueError(
        f"the rollout function returned {len(groups)} groups for rollout"
        f" {rollout_id}, and learner.groups_per_step (--rollout-batch-size)"
        f" is {size}; return samples of as many index values, each with"
        f" {self._args.n_samples_per_prompt} samples"
        " (--n-samples-per-prompt)"
      )
    new = [samples.items_of(group) for group in groups]
    with self._lock:
      self._waiting.extend(new)
      self._next = rollout_id + 1

  def _group(
    self, data: Group, index: int, version: int
  ) -> trajectory_lib.TrajectoryGroup:
    members, episodes = [], []
    for item in data:
      reply_ids = [
        token
        for sequence in item["sequences"]
        for token, mask in zip(sequence["tokens"], sequence["loss_mask"])
        if mask
      ]
      text = self._decode(reply_ids)
      reply = {"role": "assistant", "content": text}
      record = records.read({**item, "messages": [reply]})
      members.append(record)
      episode = self._reader.episode(record, version=version)
      if record.extra_info.get(samples.TEXT_ONLY):
        episode.metrics[samples.TEXT_ONLY] = 1.0
      episodes.append(episode)
    group = records.group_of(members, episodes, start_version=version)
    return buffer_loop.named(group, members[0].instance_id, index)

  def _is_useless(self, group: trajectory_lib.TrajectoryGroup) -> bool:
    """Whether the first waiting group is dropped, which is reported.

    Raises:
      ValueError: many in a row are.
    """
    valid = len(group.valid)
    if valid >= self._min_valid:
      self._dropped_in_a_row = 0
      return False
    self._drop(
      f"the group of instance {buffer_loop.instance_of(group)!r} is dropped:"
      f" {valid} of {len(group)} episodes can be trained on,"
      f" {self._min_valid} are needed (collect.min_valid)"
      f"{group.untrained_note}",
      f"; {reader_lib.diagnosis(group)}",
    )
    return True

  def _drop(self, what: str, more: str = "") -> None:
    """Drops the first waiting group, counts it and reports it.

    Args:
      what: Name of the group, and the reason.
      more: Text for the error of the last in a row.

    Raises:
      ValueError: many in a row are dropped.
    """
    with self._lock:
      self._waiting.popleft()
      self._dropped += 1
    self._dropped_in_a_row += 1
    self._observers.on_event(events.Fault("buffer", "dropped", what))
    if self._dropped_in_a_row >= _MOST_DROPPED:
      raise ValueError(
        f"{_MOST_DROPPED} groups of the rollout function in a row cannot be"
        f" trained on. The last: {what}{more}"
      )

  def _settle(self, indices: Iterable[int]) -> None:
    """Forgets dropped groups and those whose training a checkpoint holds."""
    with self._lock:
      for index in indices:
        self._queued.pop(index, None)


class _Call:
  """One call of the function, in a daemon thread: it may never return."""

  def __init__(self, function: Callable[..., Any], *arguments: Any):
    self._function = function
    self._arguments = arguments
    self._own: asyncio.AbstractEventLoop | None = None
    self._task: asyncio.Task[Any] | None = None
    self._canceled = False

  async def result(self) -> Any:
    """The function's result, awaited where that is needed."""
    caller = asyncio.get_running_loop()
    future: asyncio.Future[Any] = caller.create_future()

    def settle(value: object, error: BaseException | None) -> None:
      if future.done():
        return
      if error is None:
        future.set_result(value)
      else:
        future.set_exception(error)

    def work() -> None:
      value, problem = None, None
      try:
        value = self._function(*self._arguments)
        if inspect.isawaitable(value):
          value = asyncio.run(self._awaited(value))
      except BaseException as error:  # pylint: disable=broad-except
        # Whatever the user's code raises is the caller's.
        problem = error
      try:
        caller.call_soon_threadsafe(settle, value, problem)
      except RuntimeError:  # The run has ended.
        pass

    threading.Thread(
      target=work, name="tunix-rollout-function", daemon=True
    ).start()
    return await future

  async def _awaited(self, value: Any) -> Any:
    self._own = asyncio.get_running_loop()
    self._task = asyncio.current_task()
    if self._canceled:
      raise asyncio.CancelledError()
    return await value

  def cancel(self) -> None:
    """Ends an async function at its next await. Thread-safe."""
    self._canceled = True
    if self._own is not None and self._task is not None:
      try:
        self._own.call_soon_threadsafe(self._task.cancel)
      except RuntimeError:  # It has ended already.
        pass
