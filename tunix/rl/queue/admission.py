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
  admission: Literal["started", "finished"] = settings.setting(
      default="started",
      doc="Groups that count against the admission of new ones. started: all"
      " that run or wait. finished: those that wait; a new group starts"
      " whenever collect.concurrency has room, which keeps the engine busy"
      " beside long episodes. Use it with stale_policy=trim.",
  )
  path: str = settings.setting(
      default=AUTO,
      doc="File that makes accepted groups survive a crash. auto = queue.db in"
      ' the run directory. "" = memory only.',
  )

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
