"""Queues groups whose episodes another program has played.

Base of the loops that stand where a run has its collecting loop
(`buffer_loop`, `function_loop`). Groups that wait are admitted, read and
queued one after another.

Promises: a group that cannot be read, or that has fewer than
collect.min_valid members that can be trained on, is reported and dropped; many
such in a row end the run with what they have in common; the queue's consumer
gets the loop's failure.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
from typing import Any, Iterable

from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.run.recorded_data import reader as reader_lib
from tunix.rl.multi_turn.trajectory_collector import feed_loop
from tunix.rl.multi_turn.trajectory_collector import groups
from tunix.rl.queue import group_queue

_LOG = logging.getLogger(__name__)
MOST_BAD = 32
"""Groups in a row that cannot be trained on, after which the run ends."""


def instance_of(group: trajectory_lib.TrajectoryGroup) -> str:
  """The instance id of a group that these loops have named."""
  return group.group_id.rpartition("@")[0] or group.group_id


def named(
  group: trajectory_lib.TrajectoryGroup, instance_id: str, index: int
) -> trajectory_lib.TrajectoryGroup:
  """The group under its own name: an instance may come in several passes."""
  return dataclasses.replace(group, group_id=f"{instance_id}@{index}")


class GroupFeed(feed_loop.FeedLoop):
  """See the module docstring; `await run()` on the run's event loop.

  Attributes:
    counts: groups accepted, dropped, refused.
  """

  source = ""
  """Name of the other program, for reports."""

  def __init__(
    self,
    reader: reader_lib.EpisodeReader,
    queue: group_queue.GroupQueue,
    *,
    min_valid: int,
    observers: events.Observer,
  ):
    """Args:

    reader: Makes episodes of the policy.
    queue: Receives the groups.
    min_valid: Members of a group that can be trained on, at least.
    observers: Receive the episodes.
    """
    super().__init__(queue)
    self._reader = reader
    self._min_valid = min_valid
    self._observers = observers
    self._waiting: collections.deque[Any] = collections.deque()
    self._queued: dict[int, Any] = {}  # Results of `_note`, by index.
    self._refused_in_a_row = self._dropped_in_a_row = self._useless_in_a_row = 0
    queue.on_settled = self._settle

  # --- of a subclass ----------------------------------------------------------

  async def _fill(self) -> None:
    """Makes the next group wait, under the ticket that it gets."""
    raise NotImplementedError

  def _group(
    self, entry: Any, index: int, version: int
  ) -> trajectory_lib.TrajectoryGroup:
    """Reads a group that waits.

    Raises:
      SettingError: another setting would let the run use it.
      ValueError, TypeError, LookupError: it is dropped.
    """
    raise NotImplementedError

  def _name(self, entry: Any) -> str:
    """The instance id of a group that waits."""
    raise NotImplementedError

  def _note(self, entry: Any) -> Any:
    """Returns the part of a group that is kept while it is queued."""
    return entry

  def _settled(self, note: Any) -> None:
    """Reacts to a group that is trained on durably or dropped by the queue.

    Under the lock."""

  def _discarded(self, entry: Any) -> None:
    """Reacts to a group that is dropped here. Under the lock."""

  # --- running ----------------------------------------------------------------

  async def _put(self) -> None:
    """Queues the first group that waits, or drops it."""
    tickets = await self._admit([None])
    (ticket,), entry = tickets, None
    try:
      if not self._waiting:
        await self._fill()
      entry = self._waiting[0]
      try:
        group = await asyncio.to_thread(
          self._group, entry, ticket.index, ticket.start_version
        )
      except reader_lib.SettingError:
        raise
      except (ValueError, TypeError, LookupError) as error:
        self._discard()
        self._refuse(self._name(entry), str(error))
        return
      self._refused_in_a_row = 0
      groups.announce(group, "train", self._observers.on_event)
      if reason := self._refusal(group):
        self.counts["dropped"] += 1
        self._observers.on_event(events.GroupFinished(group, "dropped", reason))
        self._discard()
        self._say_dropped(self._name(entry), group, reason)
        return
      self._dropped_in_a_row = self._useless_in_a_row = 0
      with self._lock:
        # Before the queue may deliver it.
        self._waiting.popleft()
        self._queued[ticket.index] = self._note(entry)
      await self._queue.push(group, ticket)
      self.counts["accepted"] += 1
      self._observers.on_event(events.GroupFinished(group, "accepted"))
    finally:
      if self._release(tickets):  # It was not put.
        with self._lock:
          if self._queued.pop(ticket.index, None) is not None:
            self._waiting.appendleft(entry)

  def _settle(self, indices: Iterable[int]) -> None:
    """Settles groups, by index, that were trained on durably or dropped."""
    with self._lock:
      for index in indices:
        if index in self._queued:
          self._settled(self._queued.pop(index))

  # --- dropping ---------------------------------------------------------------

  def _refusal(self, group: trajectory_lib.TrajectoryGroup) -> str:
    """Returns why the group is not trained on; "" where it is."""
    valid = len(group.valid)
    if valid >= self._min_valid:
      return ""
    return (
      f"{valid} of {len(group)} episodes can be trained on,"
      f" {self._min_valid} are needed (collect.min_valid)"
      f"{group.untrained_note}"
    )

  def _discard(self) -> None:
    """Drops the first group that waits."""
    with self._lock:
      self._discarded(self._waiting.popleft())

  def _refuse(self, name: str, problem: str) -> None:
    """Reports a group that cannot be read and is dropped.

    Raises:
      ValueError: many in a row.
    """
    what = f"the group of instance {name!r} is dropped: {problem}"
    self.counts["refused"] += 1
    self._report("refused", what)
    self._refused_in_a_row += 1
    if self._refused_in_a_row >= MOST_BAD:
      raise ValueError(
        f"{MOST_BAD} groups of the {self.source} in a row cannot be read; see"
        f" what its generator writes. The last: {what}"
      )

  def _say_dropped(
    self, name: str, group: trajectory_lib.TrajectoryGroup, reason: str
  ) -> None:
    """Reports drops in a row: the 1st, 2nd, 4th, 8th …

    Raises:
      ValueError: many in a row had too little to train on.
    """
    self._dropped_in_a_row += 1
    count = self._dropped_in_a_row
    what = f"the group of instance {name!r} is dropped: {reason}"
    if count > 1:
      what += f"; {count} groups in a row were dropped"
    if count & (count - 1) == 0:
      self._report("dropped", what)
    if len(group.valid) >= self._min_valid:
      self._useless_in_a_row = 0
      return
    self._useless_in_a_row += 1
    if self._useless_in_a_row >= MOST_BAD:
      raise ValueError(
        f"{MOST_BAD} groups of the {self.source} in a row have too few"
        f" episodes to train on. The last: {what};"
        f" {reader_lib.diagnosis(group)}"
      )

  def _report(self, kind: str, what: str) -> None:
    _LOG.warning("the %s: %s", self.source, what)
    self._observers.on_event(events.Fault("buffer", kind, what))
