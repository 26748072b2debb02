"""Declares a group queue's settings, its tickets and its errors."""

from __future__ import annotations

import dataclasses
from typing import Literal

from tunix.rl.multi_turn.core import settings

AUTO = "auto"
"""`QueueConfig.path` of a run: a file in its directory."""

ORDERS = ("ready", "admission")


class QueueClosed(Exception):
  """The queue was closed and has nothing (more) for the caller."""


class QueueFailed(RuntimeError):
  """The other side of the queue failed; `__cause__` is its error."""


class StaleGroupError(RuntimeError):
  """A group became too old and `stale_policy` is "error"."""


@settings.settings
class QueueConfig:
  """The queue between collecting and learning."""

  max_staleness: int = settings.setting(
    default=0,
    doc="Versions the oldest token of a batch may lag behind the learner. 0 ="
    " synchronous.",
    unit="versions",
    ge=0,
  )
  capacity: int = settings.setting(
    default=0,
    doc="Groups held; finished ones wait beyond. 0 = (max_staleness + 1) *"
    " groups_per_step, as many as are admitted.",
    unit="groups",
    ge=0,
  )
  stale_policy: Literal["drop", "trim", "error"] = settings.setting(
    default="drop",
    doc="drop: a group with a token that is too old is dropped and counted."
    " trim: such tokens leave the loss and stay as context; a group is"
    " dropped when none of its tokens is left. error: the run fails.",
  )
  admission: Literal["started", "recent", "finished"] = settings.setting(
    default="started",
    doc="Groups that count against the admission of new ones. started: all"
    " that run or wait. recent: those that wait, and those that started less"
    " than max_staleness versions ago; one that runs longer is late, and"
    " another starts in its place. finished: those that wait. With recent"
    " and finished a new group also needs room in collect.concurrency; use"
    " them with stale_policy=trim.",
  )
  path: str = settings.setting(
    default=AUTO,
    doc="File that makes accepted groups survive a crash. auto = queue.db in"
    ' the run directory. "" = memory only.',
  )

  @property
  def bounds_running(self) -> bool:
    """Whether admission by itself bounds the groups that run."""
    return self.admission == "started"

  def counts(self, ticket: Ticket, version: int) -> bool:
    """Whether a running group counts against the admission of new ones.

    Args:
      ticket: Ticket of the group.
      version: The learner's.
    """
    if self.admission == "recent":
      return version - ticket.start_version < self.max_staleness
    return self.admission == "started"

  def capacity_for(self, groups_per_step: int) -> int:
    """Groups held, 0 resolved."""
    return self.capacity or (self.max_staleness + 1) * groups_per_step


@dataclasses.dataclass(frozen=True)
class Ticket:
  """Permission to run one group.

  Attributes:
    index: position in the order of admission, from 0.
    start_version: the learner's version at admission.
  """

  index: int
  start_version: int
