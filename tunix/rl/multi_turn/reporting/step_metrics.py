"""Adds readings of episodes, queue and engine to the learner's metrics.

Readings of episodes are of the groups that the update learned from, whenever
they were collected. `Overlap` measures the shares of wall time in which
environments and the policy work, exactly.

Does not: see outside agents, whose turns emit no `StageChanged`.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from typing import Callable, Mapping, Protocol

from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.reporting import metrics

STAGES = ("model", "env")
_WORKING = {
    (True, False): "model",
    (False, True): "env",
    (True, True): "both",
    (False, False): "none",
}
"""(the policy works, an environment does) -> its name in `time/rollout_…`."""


class Overlap:
  """Adds up episodes' stages over the time between two readings.

  Counts how many episodes an environment or the policy works for, and how long
  both work at once. Reads the monotonic clock. Thread-safe.
  """

  def __init__(self, clock: Callable[[], float] = time.perf_counter):
    self._clock = clock
    self._lock = threading.Lock()
    self._stage: dict[str, str] = {}  # Of each episode that is in one.
    self._now_in: collections.Counter[str] = collections.Counter()
    self._since = self._at = clock()
    self._seen = False
    self._episode_seconds = 0.0
    self._seconds = dict.fromkeys(_WORKING.values(), 0.0)

  def on_event(self, event: events.StageChanged) -> None:
    with self._lock:
      self._seen = True
      self._advance()
      left = self._stage.pop(event.trajectory_id, "")
      if left:
        self._now_in[left] -= 1
      if event.stage:
        self._stage[event.trajectory_id] = event.stage
        self._now_in[event.stage] += 1

  def take(self) -> dict[str, float]:
    """Readings since the last call, or the beginning; {} without
    an event.

    episodes_busy: seconds that environments and the policy worked for
    episodes, summed over the episodes, a second of wall time.
    overlap: share of wall time in which an environment and the policy worked
    at once, for whichever episodes.
    time/rollout_<model, env, both, none>: wall seconds in which these worked.
    """
    with self._lock:
      self._advance()
      seconds, self._since = self._at - self._since, self._at
      spent, self._episode_seconds = self._episode_seconds, 0.0
      worked, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
      if not self._seen or seconds <= 0:
        return {}
      return {
          "episodes_busy": spent / seconds,
          "overlap": worked["both"] / seconds,
          **{f"time/rollout_{who}": s for who, s in worked.items()},
      }

  def _advance(self) -> None:
    now = self._clock()
    passed, self._at = now - self._at, now
    model, env = (self._now_in[stage] for stage in STAGES)
    self._episode_seconds += passed * (model + env)
    self._seconds[_WORKING[bool(model), bool(env)]] += passed


class _Engine(Protocol):

  def stats(self) -> Mapping[str, float]:
    ...


class _Queue(Protocol):

  def counters(self) -> Mapping[str, int]:
    ...


class StepMetrics:
  """Adds the readings of episodes, queue and engine to each StepFinished.

  Stands between the learner loop and the observers. `StageChanged` events end
  here: there are several in each turn, and observers need only the readings.
  """

  def __init__(
      self, downstream: events.Observers, queue: _Queue, engine: _Engine
  ):
    self._downstream = downstream
    self._queue = queue
    self._engine = engine
    self._refused = 0
    self._lock = threading.Lock()
    self._overlap = Overlap()
    self._stats = dict(engine.stats())
    self._since = time.perf_counter()

  def on_event(self, event: events.Event) -> None:
    if isinstance(event, events.StageChanged):
      self._overlap.on_event(event)
      return
    if isinstance(event, events.GroupFinished):
      with self._lock:
        self._refused += event.outcome != "accepted"
    elif isinstance(event, events.StepFinished):
      now = time.perf_counter()
      with self._lock:
        refused, self._refused = self._refused, 0
      stats = dict(self._engine.stats())
      counters = self._queue.counters()
      readings = {
          **metrics.group_metrics(event.groups),
          **metrics.engine_metrics(self._stats, stats, now - self._since),
          **self._overlap.take(),
          "refused_groups": float(refused),
          "queue_size": counters["ready"],
          "dropped_stale": counters["dropped_stale"],
          **event.metrics,
      }
      self._stats, self._since = stats, now
      event = dataclasses.replace(event, metrics=readings)
    self._downstream.on_event(event)
