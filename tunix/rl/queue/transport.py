"""Declares how groups move from those who collect them to those who train.

| `GroupTransport` | moves groups between |
|---|---|
| `group_queue.GroupQueue` | threads of a process; over its death with a store |
| `agent_rollout.client.BufferClient` | processes, by a rollout buffer service |

A run's groups take the first; where programs elsewhere collect, they take the
second before it. tests/queue/test_transports.py holds both to the contract.
`rollout.via` chooses, in `run/training.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, Protocol, Sequence, TypeVar

Pushed = TypeVar("Pushed", contravariant=True)
Leased = TypeVar("Leased")


@dataclasses.dataclass(frozen=True)
class Lease(Generic[Leased]):
  """Groups that one consumer holds.

  Attributes:
    id: Name of the lease, for `acknowledge`.
    groups: The groups, oldest first.
  """

  id: Any
  groups: Sequence[Leased]


class GroupTransport(Protocol[Pushed, Leased]):
  """Delivers each group that was pushed exactly once.

  1. A group is durable, as far as the transport is, before `push` returns.
  2. A group is in one lease at a time.
  3. An acknowledged group is never leased again, after a crash either: its
     consumer has made durable what it made of the group.
  4. A released group is leased again, before those that were pushed after it.
     So is one whose consumer died, once the transport knows of that: a queue
     when its store is opened again, a service when the lease's time is over.
  5. The end of a lease that has ended changes no later lease of its groups.
  """

  async def push(self, group: Pushed, /) -> Any:
    """Hands a finished group over; waits while there is no room."""
    ...

  async def lease(self, count: int | None = None, /) -> Lease[Leased] | None:
    """Takes groups, as many as `count` asks for; None: they do not come."""
    ...

  async def acknowledge(self, lease_id: Any, /) -> None:
    """Ends a lease whose groups are trained on, durably."""
    ...

  async def release(self, lease: Lease[Leased], /) -> None:
    """Ends a lease whose groups are to be leased again."""
    ...
