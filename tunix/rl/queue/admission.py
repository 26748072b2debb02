"""What a group queue hands out, and what it raises."""

from __future__ import annotations

import dataclasses


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
