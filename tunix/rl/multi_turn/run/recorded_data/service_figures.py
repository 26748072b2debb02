"""Reads the figures of a rollout buffer's /buffer/stats, for its trainer.

Does not ask for them (the loop does).
"""

from __future__ import annotations

import logging
from typing import Any, Mapping

from tunix.rl.multi_turn.core import events

_LOG = logging.getLogger(__name__)


def check_groups(
  stats: Mapping[str, Any], url: str, size: int, raw: bool
) -> None:
  """Refuses a buffer whose groups are of another size, or other rules.

  Args:
    stats: the figures.
    url: Address of the service.
    size: Size of the groups; 0 = any.
    raw: rewards must not be normalised.

  Raises:
    ValueError: naming both.
  """
  served_size = stats["group_size"]
  problems = []
  if size and served_size != size:
    problems.append(
      f"the rollout buffer {url} makes groups of {served_size}, and"
      f" collect.group_size={size}; start it with --group-size={size}"
      f" (or its rollout with num_repeat_per_sample={size}), or set"
      f" collect.group_size={served_size}"
    )
  if raw and stats.get("group_rules") == "normalized":
    problems.append(
      f"the rollout buffer {url} normalises rewards, which"
      " algorithm.advantage would do again; start it with"
      " --group-rules=raw (or its rollout with group_rules=raw), or set"
      " algorithm.advantage=reward"
    )
  if problems:
    raise ValueError("; ".join(problems))


class DropReport:
  """Says what the service has dropped: the first, and each doubling."""

  def __init__(self, observers: events.Observer):
    """Args:

    observers: receive a `Fault` for each time that it is said.
    """
    self._observers = observers
    # Items that were dropped before; None: nothing was looked at yet.
    self._before: int | None = None
    self._say_from = 1

  def look(self, stats: Mapping[str, Any]) -> None:
    """Compares figures with the first ones, which are the beginning."""
    total = stats.get("total_dropped", 0)  # None of one not made yet.
    if not isinstance(total, int):
      return
    if self._before is None:
      self._before = total
    elif total < self._before:  # Another rollout has begun.
      self._before, self._say_from = 0, 1
    count = total - self._before
    if count < self._say_from:
      return
    self._say_from = 2 * count
    size = max(1, stats.get("group_size") or 1)
    what = (
      f"it dropped {count} episodes since this run began, {count / size:.3g}"
      f" groups of {size}: the rewards of a group were all equal or outside"
      " of [0, 1], or it was not complete in time (group_timeout_seconds)"
    )
    _LOG.warning("the rollout buffer: %s", what)
    self._observers.on_event(events.Fault("buffer", "dropped", what))
