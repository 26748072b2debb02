"""Queues recorded groups, epoch after epoch (`rollout.via=offline`).

Promises: the order is a function of run.seed and the epoch; a resumed run goes
on with the group after the last one that its checkpoint holds, so that its
curve is the one of a run that never stopped. A group's index in the queue is
its position in all epochs.

Does not: gate by staleness, as recorded versions are of other weights.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from typing import Any, Iterable, Mapping, Protocol

from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.trajectory_collector import feed_loop
from tunix.rl.queue import group_queue


class Groups(Protocol):
  """Recorded groups by number."""

  digest: str

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> trajectory_lib.TrajectoryGroup: ...


def queue_config(groups_per_step: int) -> group_queue.QueueConfig:
  """Settings of a queue that gates nothing and holds a step's groups."""
  return group_queue.QueueConfig(max_staleness=2**31, capacity=groups_per_step)


class OfflineFeed(feed_loop.FeedLoop):
  """See the module docstring."""

  def __init__(
    self,
    groups: Groups,
    queue: group_queue.GroupQueue,
    *,
    seed: int = 0,
    epochs: int = 0,
    shuffle: bool = True,
  ):
    """Args:

    groups: Recorded groups.
    queue: Queue with `queue_config`.
    seed: Seed of the order.
    epochs: Passes, after which the queue is closed; 0 repeats without end.
    shuffle: False keeps the order of the groups.
    """
    super().__init__(queue)
    self._groups = groups
    self._seed = seed
    self._epochs = epochs
    self._shuffle = shuffle
    self._next = 0
    self._untrained: set[int] = set()  # Positions before `_next`.
    self._orders: dict[int, list[int]] = {}
    queue.on_settled = self._settle

  async def _feed(self) -> None:
    for index in itertools.chain(
      sorted(self._untrained), itertools.count(self._next)
    ):
      if self._epochs and index >= self._epochs * len(self._groups):
        self.over = (
          f"the recorded episodes are over after {self._epochs} epochs"
        )
        return
      tickets = await self._admit([index])
      try:
        group = await asyncio.to_thread(self.group, index)
        with self._lock:
          self._untrained.add(index)
          self._next = max(self._next, index + 1)
        await self._queue.push(group, tickets[0])
      finally:
        self._release(tickets)

  def _settle(self, indices: Iterable[int]) -> None:
    with self._lock:
      self._untrained.difference_update(indices)

  def group(self, index: int) -> trajectory_lib.TrajectoryGroup:
    """Returns the group of a position in all epochs.

    Raises:
      ValueError: an episode that this policy cannot learn from.
    """
    epoch, place = divmod(index, len(self._groups))
    recorded = self._groups[self._order(epoch)[place]]
    if not epoch:
      return recorded
    # Ids are unique in a run.
    return dataclasses.replace(
      recorded,
      group_id=f"{recorded.group_id}@{epoch}",
      trajectories=tuple(
        dataclasses.replace(t, trajectory_id=f"{t.trajectory_id}@{epoch}")
        for t in recorded.trajectories
      ),
    )

  def _order(self, epoch: int) -> list[int]:
    if epoch not in self._orders:
      order = list(range(len(self._groups)))
      if self._shuffle:
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
      self._orders = {epoch: order}
    return self._orders[epoch]

  def state_dict(self) -> dict[str, Any]:
    """Returns, as JSON, the next position and those not trained on before."""
    with self._lock:
      return {
        "groups": len(self._groups),
        "digest": self._groups.digest,
        "next": self._next,
        "unacked": sorted(self._untrained),
      }

  def load_state_dict(
    self, state: Mapping[str, Any], consumed: Iterable[int] = ()
  ) -> None:
    """Restores the feed from a saved state. Call it before `run`.

    Args:
      state: State of a checkpoint.
      consumed: positions that the checkpoint holds the training of.

    Raises:
      ValueError: the state is of other data.
    """
    if "groups" not in state:
      raise ValueError(
        "the checkpoint was not training on recorded groups; resume it with"
        " the rollout.via that it was begun with, or begin a new run"
      )
    if state["groups"] != len(self._groups):
      raise ValueError(
        f"the checkpoint was training on {state['groups']} recorded groups,"
        f" and there are {len(self._groups)}; give the same offline.path"
      )
    # Checkpoints of before have no digest.
    if (before := state.get("digest")) and before != self._groups.digest:
      raise ValueError(
        "its recorded groups have other names or sizes than those that the"
        " checkpoint was training on, or another order; give the same"
        " offline.path, or begin a new run"
      )
    self._next = int(state["next"])
    self._untrained = {*state["unacked"]} - {*consumed}
