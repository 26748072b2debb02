"""Who works at the same time: exact shares of a run's wall time.

Told of every change of an episode's stage, it adds up, over the time between
two readings, how many episodes an environment or the policy worked for, and
for how long both worked at once. Reads the monotonic clock, so that a clock
that is set changes nothing. Thread-safe.

Does not see what is not told: outside agents, whose turns nobody announces.
"""

from __future__ import annotations

import collections
import threading
import time
from typing import Callable

from tunix.rl.multi_turn.core import events

STAGES = ("model", "env")


class Overlap:
  """The mutable owner of the present stages; see the module docstring."""

  def __init__(self, clock: Callable[[], float] = time.perf_counter):
    self._clock = clock
    self._lock = threading.Lock()
    self._stage: dict[str, str] = {}  # Of each episode that is in one.
    self._now_in: collections.Counter[str] = collections.Counter()
    self._since = self._at = clock()
    self._told = False
    self._episode_seconds = self._both_seconds = 0.0

  def on_event(self, event: events.StageChanged) -> None:
    with self._lock:
      self._told = True
      self._advance()
      left = self._stage.pop(event.trajectory_id, "")
      if left:
        self._now_in[left] -= 1
      if event.stage:
        self._stage[event.trajectory_id] = event.stage
        self._now_in[event.stage] += 1

  def take(self) -> dict[str, float]:
    """Readings since the last call, or the beginning; {} of no time or news.

    episodes_busy: seconds that environments and the policy worked for
    episodes, summed over the episodes, a second of wall time.
    overlap: share of wall time in which an environment and the policy worked
    at once, for whichever episodes.
    """
    with self._lock:
      self._advance()
      seconds, self._since = self._at - self._since, self._at
      spent, both = self._episode_seconds, self._both_seconds
      self._episode_seconds = self._both_seconds = 0.0
      if not self._told or seconds <= 0:
        return {}
      return {"episodes_busy": spent / seconds, "overlap": both / seconds}

  def _advance(self) -> None:
    now = self._clock()
    passed, self._at = now - self._at, now
    model, env = (self._now_in[stage] for stage in STAGES)
    self._episode_seconds += passed * (model + env)
    if model and env:
      self._both_seconds += passed
