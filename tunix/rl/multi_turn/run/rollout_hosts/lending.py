"""Collects groups by lending them to players elsewhere.

Stands where a run has its own collectors: groups are admitted, numbered,
retried and made durable as always, and only their episodes are played
elsewhere.

Promises: a cancelled group is withdrawn from its player; each group's events
are emitted here when it arrives.

Does not import JAX.
"""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
from typing import Any, Iterable, Mapping, Protocol

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import durable
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.run.rollout_hosts import leases as leases_lib
from tunix.rl.multi_turn.run.rollout_hosts import player
from tunix.rl.multi_turn.trajectory_collector import groups


class Lender(Protocol):
  """Process whose groups are lent.

  Attributes:
    book: Leases of its groups.
    serial: number of the newest weights that players load; 0: they load none.
  """

  book: leases_lib.LeaseBook

  @property
  def serial(self) -> int: ...


def write_address(
  directory: pathlib.Path, *learners: Mapping[str, str]
) -> None:
  """Writes the addresses of a run's learners, readable by its owner."""
  address: dict[str, Any] = dict(learners[0])
  if len(learners) > 1:
    address[player.LEARNERS] = list(learners)
  path = directory / player.ADDRESS
  # Where there was one it is always there: players take its absence for the
  # end of the run.
  new = path.with_suffix(".new")
  new.unlink(missing_ok=True)
  descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
  with os.fdopen(descriptor, "w", encoding="utf-8") as file:
    json.dump(address, file)
  durable.sync(new)
  new.replace(path)
  durable.sync(directory)


def settings_of(config: config_lib.TrainConfig) -> dict[str, Any]:
  """Returns the settings from which players build equal episodes."""
  keep = (
      "environment", "gym", "task_source", "agent", "policy", "sampling",
      "engine", "collect", "algorithm", "rollout", "run",
  )  # fmt: skip
  data = config.to_dict()
  # As `models.make_engine` decides for an engine of the run's own.
  data["engine"]["entropies"] |= config.monitor.on and config.monitor.entropies
  return {name: data[name] for name in keep} | {
    # Sections that contradict each other in a learner only: steps=0 has none.
    "learner": {
      "row_length": data["learner"]["row_length"],
      "steps": 0,
      "skip_zero_advantage": False,
    }
  }


class RemoteCollector(groups.GroupCollector):
  """A `GroupCollector` whose groups are played elsewhere."""

  def __init__(self, lender: Lender, mode: str, *args: Any, **kwargs: Any):
    """Args:

    lender: Process that lends the groups.
    mode: See `episodes.make_collector`.
    *args, **kwargs: of `GroupCollector`.
    """
    super().__init__(*args, **kwargs)
    self._lender = lender
    self._mode = mode

  async def collect(
    self,
    task: Any,
    *,
    index: int = 0,
    attempt: int = 0,
    start_version: int = 0,
    group_size: int | None = None,
    samples: Iterable[int] | None = None,
  ) -> groups.TrajectoryGroup:
    book = self._lender.book
    numbers = None if samples is None else list(samples)
    lease = book.lend(
      {
        "mode": self._mode,
        "task": task.to_json(),
        "index": index,
        "attempt": attempt,
        "greedy": bool(self.beside),
        "group_id": self.group_id(index, attempt),
        "start_version": start_version,
        "group_size": group_size,
        "samples": numbers,
        "serial": self._lender.serial,
      }
    )
    try:
      group, faults = await asyncio.wrap_future(lease.result)
    finally:
      book.withdraw(lease)
    split = "train" if self._mode == "train" else "eval"
    for stage, kind, message, name in faults:
      self.emit(events.Fault(stage, kind, message, trajectory_id=name or None))
    groups.announce(group, split, self.emit)
    return group
