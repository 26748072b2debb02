"""Counts what a buffer took in since its last read, for the read's statistics.

Also the instances of dropped groups, which the next read reports, and those
dropped items whose contents a generator's statistics need.

Promises: bounded, also without any read: the oldest items are no longer
counted, the oldest instances no longer reported, and the oldest contents are
removed before they fill the buffer.

Does not lock, or store anything (`buffers` does).
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Iterable, NamedTuple, Sequence

from agent_services.rollout_buffer import groups

_SHARE = 4
"""Contents of dropped items take a fourth of the buffer's bounds at most."""


class Counted(NamedTuple):
  """An item that the next read counts; `size` in bytes."""

  seq: int
  instance_id: str
  reward: float
  size: int


@dataclasses.dataclass(frozen=True)
class Kept:
  """Contents of dropped items, by number: what stays, and what goes.

  Attributes:
    sizes: Bytes of the items that stay.
    released: Numbers of the items whose contents go.
  """

  sizes: dict[int, int]
  released: list[int]


class Tally:
  """See the module docstring.

  Attributes:
    cleared: number of the newest item that is not counted any more.
    dropped: instances of dropped groups that no read has reported, in order.
  """

  def __init__(self, most: int, max_items: int, max_bytes: float):
    """Args:

    most: items that are counted.
    max_items, max_bytes: bounds of the buffer.
    """
    self._most = most
    self._most_kept = max_items // _SHARE
    self._most_bytes = max_bytes / _SHARE
    self._counted: collections.deque[Counted] = collections.deque()
    self._kept: dict[int, int] = {}
    self.kept_bytes = 0
    self.cleared = 0
    self.dropped: dict[str, None] = {}

  def reset(self, cleared: int) -> None:
    """Begins anew behind an item."""
    self._counted.clear()
    self.dropped.clear()
    self.keep(Kept({}, []))
    self.cleared = cleared

  @property
  def kept_items(self) -> int:
    """Dropped items whose contents are kept."""
    return len(self._kept)

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
    stays = {s: n for s, n in self._kept.items() if s > self.cleared}
    self.keep(Kept(stays, []))

  def kept_with(self, members: Sequence[groups.Member], needed: bool) -> Kept:
    """The contents that are kept once these items are dropped, too.

    Args:
      members: Items to drop.
      needed: whether a generator's statistics need contents.
    """
    if not needed:
      return Kept({}, [*self._kept, *(member.seq for member in members)])
    sizes = dict(self._kept)
    obsolete = []
    for member in members:
      if member.seq > self.cleared:
        sizes[member.seq] = member.size
      else:
        obsolete.append(member.seq)
    total = sum(sizes.values())
    for seq in sorted(sizes):
      if len(sizes) <= self._most_kept and total <= self._most_bytes:
        break
      total -= sizes.pop(seq)
      obsolete.append(seq)
    return Kept(sizes, obsolete)

  def keep(self, retained: Kept) -> None:
    """Takes over what `kept_with` returned."""
    self._kept = dict(retained.sizes)
    self.kept_bytes = sum(self._kept.values())
