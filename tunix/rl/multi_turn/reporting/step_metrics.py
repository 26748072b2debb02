"""Puts the readings of episodes, queue and engine beside the learner's.

Those of episodes are of the groups that the update learned from, whenever
they were collected.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.reporting import metrics
from tunix.rl.multi_turn.reporting import overlap


class StepMetrics:
  """Adds the readings of episodes, queue and engine to each StepFinished.

  Stands between the learner loop and the observers. Changes of stages end
  here: there are several in each turn, and the readings are all of them.
  """

  def __init__(self, downstream: events.Observers, queue: Any, engine: Any):
    self._downstream = downstream
    self._queue = queue
    self._engine = engine
    self._refused = 0
    self._lock = threading.Lock()
    self._overlap = overlap.Overlap()
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
