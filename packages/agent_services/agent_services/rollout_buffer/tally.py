"""Counts what a buffer took in since its last read, for the read's statistics.

Also the instances of dropped groups, which the next read reports.

Promises: bounded, also without any read: the oldest items are no longer
counted, and the oldest instances no longer reported.

Does not lock, or store anything (`buffers` does).
"""

from __future__ import annotations

import collections
from typing import Iterable, NamedTuple


class Counted(NamedTuple):
  """An item that the next read counts; `size` in bytes."""

  seq: int
  instance_id: str
  reward: float
  size: int


class Tally:
  """See the module docstring.

  Attributes:
    cleared: number of the newest item that is not counted any more.
    dropped: instances of dropped groups that no read has reported, in order.
  """

  def __init__(self, most: int):
    """Counts at most the `most` newest items."""
    self._most = most
    self._counted: collections.deque[Counted] = collections.deque()
    self.cleared = 0
    self.dropped: dict[str, None] = {}

  def reset(self, cleared: int) -> None:
    """Begins anew behind an item."""
    self._counted.clear()
    self.dropped.clear()
    self.cleared = cleared

  @property
  def counted(self) -> list[Counted]:
    """The items that the next read counts, oldest first."""
    return list(self._counted)

  def add(self, one: Counted) -> None:
    """Counts an item; called in the order of the items' numbers."""
    if one.seq <= self.cleared:
      return
    self._counted.append(one)
    if len(self._counted) > self._most:
      self.cleared = self._counted.popleft().seq

  def drop(self, instance_ids: Iterable[str]) -> None:
    """Has the next read report instances whose groups were dropped."""
    for name in instance_ids:
      self.dropped[name] = None
    while len(self.dropped) > self._most:
      del self.dropped[next(iter(self.dropped))]

  def clear(self, cleared: int, reported: Iterable[str]) -> None:
    """A read has counted all items up to one, and reported instances."""
    self.cleared = max(self.cleared, cleared)
    while self._counted and self._counted[0].seq <= self.cleared:
      self._counted.popleft()
    for name in reported:
      self.dropped.pop(name, None)
