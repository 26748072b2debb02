"""Delivers recorded groups to the learner, epoch after epoch.

Stands where a run has its queue and its collecting loop, with
`rollout.via=offline`.

Promises: the order is a function of run.seed and the epoch; a resumed run goes
on with the group after the last one that its checkpoint holds, so that its
curve is the one of a run that never stopped.

Does not: gate by staleness: recorded versions are of other weights.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
from typing import Any, Iterable, Mapping, Protocol

from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.queue import admission
from tunix.rl.queue import ledger


class Groups(Protocol):
  """Recorded groups by number."""

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> trajectory_lib.TrajectoryGroup: ...


class OfflineQueue:
  """See the module docstring; a `learner.loop.GatedQueue`."""

  max_staleness = 2**31
  closed = False

  def __init__(
    self,
    groups: Groups,
    groups_per_step: int,
    *,
    seed: int = 0,
    epochs: int = 0,
    shuffle: bool = True,
  ):
    """Args:

    groups: recorded.
    groups_per_step: default of `get_batch`.
    seed: Seed of the order.
    epochs: after which the queue is closed; 0 repeats without end.
    shuffle: False keeps the order of the groups.
    """
    self._groups = groups
    self._digest = getattr(groups, "digest", "")
    self._per_step = groups_per_step
    self._seed = seed
    self._epochs = epochs
    self._shuffle = shuffle
    self._next = 0
    self._again: list[int] = []  # Taken before, and not trained on.
    self._unacked: list[int] = []
    self._orders: dict[int, list[int]] = {}
    self._lock = threading.Lock()
    self._counts = dict.fromkeys(("delivered", "acked"), 0)
    self._error: BaseException | None = None
    self._version = 0
    self.over = ""
    """Why no more groups will come; "" while there may be."""

  @property
  def epoch(self) -> int:
    """Passes that have been begun, from 0."""
    return max(0, self._next - 1) // len(self._groups)

  # --- the learner's side ----------------------------------------------------

  def get_batch(
    self, n: int | None = None, timeout: float | None = None
  ) -> list[trajectory_lib.TrajectoryGroup]:
    """Takes the next `n` groups.

    Raises:
      QueueClosed: the epochs are over, or fewer groups are left in them.
      ValueError: an episode that this policy cannot learn from.
    """
    del timeout
    count = self._per_step if n is None else n
    with self._lock:
      if self._error is not None:
        raise admission.QueueFailed(str(self._error)) from self._error
      indices = self._again[:count]
      fresh = range(self._next, self._next + count - len(indices))
      if self.closed:
        raise admission.QueueClosed("the queue was closed")
      if self._epochs and fresh.stop > self._epochs * len(self._groups):
        self.over = (
          f"the recorded episodes are over after {self._epochs} epochs"
        )
        raise admission.QueueClosed(self.over)
      self._again = self._again[count:]
      self._next = fresh.stop
      indices += fresh
      self._unacked += indices
      self._counts["delivered"] += len(indices)
    return [self.group(i) for i in indices]

  def group(self, index: int) -> trajectory_lib.TrajectoryGroup:
    """Returns the group of a position in all epochs."""
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
      # A step may reach into the next one.
      self._orders = {
        k: v for k, v in self._orders.items() if k >= epoch - 1
      } | {epoch: order}
    return self._orders[epoch]

  def set_version(self, version: int) -> None:
    self._version = version

  def unacked(self) -> list[int]:
    with self._lock:
      return list(self._unacked)

  def ack(self, indices: Iterable[int] | None = None) -> None:
    with self._lock:
      acknowledged = set(self._unacked if indices is None else indices)
      self._counts["acked"] += len(acknowledged & set(self._unacked))
      self._unacked = [i for i in self._unacked if i not in acknowledged]

  def refund(self, n: int) -> None:
    """Does nothing, as groups are never short."""

  def forfeit(self, n: int) -> None:
    """Does nothing, as no other queue gives groups to a step."""

  def qsize(self) -> int:
    """Counts the groups left in the epochs; those of one if they do not end."""
    with self._lock:
      total = self._epochs * len(self._groups) - self._next
      return total if self._epochs else len(self._groups)

  def counters(self) -> dict[str, int | float]:
    """Returns counts as `GroupQueue.counters` does; none dropped or late."""
    with self._lock:
      ready = len(self._groups) - self._next % len(self._groups)
      return {
        **dict.fromkeys(ledger.COUNTED, 0),
        **self._counts,
        "accepted": self._next,
        "max_lag": 0,
        "mean_lag": 0.0,
        "ready": ready,
        "running": 0,
        "version": self._version,
        "epoch": self.epoch,
      }

  def close(self) -> None:
    self.closed = True

  def fail(self, error: BaseException) -> None:
    self._error = self._error or error

  # --- the collecting loop's side --------------------------------------------

  async def run(self) -> None:
    """Returns at once: nothing is collected."""
    await asyncio.sleep(0)

  def stop(self) -> None:
    """Does nothing, as nothing runs."""

  def hold(self) -> None:
    """Does nothing, as nothing starts."""

  def release(self) -> None:
    """Does nothing, as `hold` does nothing."""

  def state_dict(self) -> dict[str, Any]:
    """Returns, as JSON, the next position and the unacknowledged ones."""
    with self._lock:
      return {
        "groups": len(self._groups),
        "digest": self._digest,
        "next": self._next,
        "unacked": sorted([*self._unacked, *self._again]),
      }

  def load_state_dict(
    self, state: Mapping[str, Any], consumed: Iterable[int] = ()
  ) -> None:
    """Restores the queue from a saved state.

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
    if (before := state.get("digest")) and before != self._digest:
      raise ValueError(
        "its recorded groups have other names or sizes than those that the"
        " checkpoint was training on, or another order; give the same"
        " offline.path, or begin a new run"
      )
    trained = set(consumed)
    self._next = int(state["next"])
    self._again = [i for i in state["unacked"] if i not in trained]
