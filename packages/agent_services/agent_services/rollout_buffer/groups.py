"""Keeps a buffer's items in groups, in memory, without their contents.

An instance's items form groups of `group_size` in the order of their arrival.
The group that grows is *open*; a full one, or one that a reader had, is closed,
and the next item of its instance opens another.

Promises: the same items in the same order form the same groups, also after a
restart.

Does not lock (`buffers` does), or judge groups by their contents.
"""

from __future__ import annotations

import dataclasses
from typing import Iterable, Iterator

from agent_services.rollout_buffer import rules


@dataclasses.dataclass(slots=True)
class Member:
  """An item of a group: its number in the store, its reward, its bytes."""

  seq: int
  reward: float
  size: int


@dataclasses.dataclass(slots=True, eq=False)
class Group:
  """Items that are compared with one another.

  Attributes:
    instance_id: Their common instance.
    members: Items in the order of their arrival.
    last: time of the last write.
    judged: (members, valid, finished) at the last judgement by a hook.
  """

  instance_id: str
  members: list[Member]
  last: float
  judged: tuple[int, bool, bool] | None = None

  @property
  def number(self) -> int:
    """Of its first item: groups are read in this order."""
    return self.members[0].seq

  @property
  def size(self) -> int:
    """Bytes."""
    return sum(member.size for member in self.members)

  @property
  def seqs(self) -> list[int]:
    return [member.seq for member in self.members]


class Groups:
  """The groups of a buffer that no reader has."""

  def __init__(self, group_size: int):
    self._group_size = group_size
    self._groups: dict[int, Group] = {}
    self._open: dict[str, Group] = {}
    self.items = 0

  def __len__(self) -> int:
    return len(self._groups)

  def __iter__(self) -> Iterator[Group]:
    return iter(sorted(self._groups.values(), key=lambda g: g.number))

  def add(self, instance_id: str, member: Member, now: float) -> None:
    """Adds an item to its instance's open group."""
    group = self._open.get(instance_id)
    if group is None:
      group = self._open[instance_id] = Group(instance_id, [member], now)
      self._groups[group.number] = group
    else:
      group.members.append(member)
      group.last = now
    self.items += 1
    if len(group.members) >= self._group_size:
      del self._open[instance_id]

  def close(self, group: Group) -> None:
    """Lets the next item of the group's instance open another."""
    if self._open.get(group.instance_id) is group:
      del self._open[group.instance_id]

  def take(self, group: Group) -> None:
    """Removes a group, and closes it."""
    del self._groups[group.number]
    self.close(group)
    self.items -= len(group.members)

  def put_back(self, groups: Iterable[Group]) -> None:
    """Adds groups that a reader had, at their places."""
    for group in groups:
      self._groups[group.number] = group
      self.items += len(group.members)


def verdict(
  group: Group,
  rollout_rules: rules.GroupRules,
  now: float,
  judged: tuple[bool, bool] | None = None,
) -> rules.Verdict:
  """Decides what becomes of a group now.

  Args:
    group: Member of a `Groups`.
    rollout_rules: The rollout's.
    now: Time, as that of writes.
    judged: (valid, finished) by a hook; None for the default rule.
  """
  if judged is None:
    judged = rules.is_valid_group(
      [m.reward for m in group.members], rollout_rules
    )
  return rules.verdict(
    *judged, len(group.members), now - group.last, rollout_rules
  )
