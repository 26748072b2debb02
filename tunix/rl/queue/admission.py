"""What a group queue is set to, what it hands out, and what it raises."""

from __future__ import annotations

import dataclasses

ORDERS = ("ready", "admission")
STALE_POLICIES = ("drop", "error")


class QueueClosed(Exception):
  """The queue was closed and has nothing (more) for the caller."""


class QueueFailed(RuntimeError):
  """The other side of the queue failed; `__cause__` says how."""


class StaleGroupError(RuntimeError):
  """A group became too old and `stale_policy` is "error"."""


@dataclasses.dataclass(frozen=True)
class Ticket:
  """Permission to run one group.

  Attributes:
    index: position in the order of admission, from 0.
    start_version: the learner's version at admission.
  """

  index: int
  start_version: int


def check_settings(
    groups_per_step: int,
    max_staleness: int,
    capacity: int,
    order: str,
    stale_policy: str,
    version: int,
) -> None:
  """Raises ValueError unless a queue can work like this."""
  if groups_per_step < 1:
    raise ValueError(f"groups_per_step must be >= 1, got {groups_per_step}")
  if max_staleness < 0:
    raise ValueError(f"max_staleness must be >= 0, got {max_staleness}")
  if version < 0:
    raise ValueError(f"version must be >= 0, got {version}")
  if order not in ORDERS:
    raise ValueError(f"order must be one of {ORDERS}, got {order!r}")
  if stale_policy not in STALE_POLICIES:
    raise ValueError(
        f"stale_policy must be one of {STALE_POLICIES}, got {stale_policy!r}"
    )
  if capacity < groups_per_step:
    raise ValueError(
        f"capacity must be at least groups_per_step={groups_per_step}, or a"
        f" batch never fits; got {capacity}"
    )
