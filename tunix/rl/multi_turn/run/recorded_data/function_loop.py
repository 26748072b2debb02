"""Feeds a run's queue from a rollout function (`buffer.function`).

The function is the rollout buffer protocol's: (args, rollout_id, data_buffer)
-> samples, plain or async; it runs in a thread of its own, and may block it.
`args` has the arguments of the protocol's trainer under their own names, made
of the run's settings.

Promises: the function is called for rollout_id 0, 1, 2 … as the queue admits
groups, once for each; a checkpoint holds the number of the next rollout, the
data buffer, and the samples that the function has returned and that are not
trained on, so that a resumed run goes on where it was taken and loses none. A
rollout of another number of groups than learner.groups_per_step ends the run.

Does not: decide which groups are valid (the service or the function does),
but drops those that cannot be trained on (`feeding`).
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
from typing import Any, Awaitable, Callable, Iterable, Mapping, Sequence

from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.run.recorded_data import feeding
from tunix.rl.multi_turn.trajectory_collector import records
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import samples

_PAUSE_S = 0.05

Group = list[dict[str, Any]]
"""The items of a group."""


class FunctionLoop(feeding.GroupFeed):
  """See the module docstring."""

  source = "rollout function"

  def __init__(
    self,
    function: Callable[..., Any],
    args: argparse.Namespace,
    decode: Callable[[Sequence[int]], str],
    *parts: Any,
    **options: Any,
  ):
    """Args:

      function: The rollout function.
      args: Its first argument; `num_rollout` and `rollout_batch_size` bound
        the loop.
      decode: Token ids to text, for the reports of episodes.
      *parts, **options: Arguments of `GroupFeed`.

    Raises:
      ValueError: buffer.filter names no function.
    """
    super().__init__(*parts, **options)
    self._function = function
    self._args = args
    self._decode = decode
    self._buffer = samples.DataBuffer(args)
    self._next = 0
    self._call: _Call | None = None
    self._dropped = 0

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

  async def _feed(self) -> None:
    while not self._stopping:
      if self._waiting or self._is_due():
        # The group is admitted before the function is called: with
        # queue.max_staleness=0 a rollout begins after the update before it.
        await self._put()
      else:
        await asyncio.sleep(_PAUSE_S)

  def stop(self) -> None:
    """Calls the function no more. Thread-safe, returns at once."""
    super().stop()
    if self._call is not None:
      self._call.cancel()

  def _is_due(self) -> bool:
    """Whether the run needs another rollout, groups that were dropped too."""
    size = self._args.rollout_batch_size
    dropped = self._all_dropped()
    return self._next < self._args.num_rollout + -(-dropped // size)

  def _all_dropped(self) -> int:
    """Returns the number of groups dropped here and by the queue."""
    return self._dropped + int(self._queue.counters()["dropped_stale"])

  async def _fill(self) -> None:
    """Calls the function for the next rollout."""
    rollout_id = self._next
    self._call = _Call(self._function, self._args, rollout_id, self._buffer)
    result = await concurrency.acall(
      self._call.result, what="the rollout function"
    )
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

  def _name(self, entry: Group) -> str:
    return str(entry[0]["instance_id"])

  def _discarded(self, entry: Group) -> None:
    self._dropped += 1

  def _group(
    self, entry: Group, index: int, version: int
  ) -> trajectory_lib.TrajectoryGroup:
    members, episodes = [], []
    for item in entry:
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
    return feeding.named(group, members[0].instance_id, index)


class _Call:
  """One call of the function; `result` blocks the thread that it gets."""

  def __init__(self, function: Callable[..., Any], *arguments: Any):
    self._function = function
    self._arguments = arguments
    self._own: asyncio.AbstractEventLoop | None = None
    self._task: asyncio.Task[Any] | None = None
    self._canceled = False

  def result(self) -> Any:
    """The function's result, awaited where that is needed."""
    value = self._function(*self._arguments)
    if inspect.isawaitable(value):
      return asyncio.run(self._awaited(value))
    return value

  async def _awaited(self, value: Awaitable[Any]) -> Any:
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
