"""Adds readings of episodes, queue and engine to the learner's metrics.

Readings of episodes are of the groups that the update learned from, whenever
they were collected. `Overlap` measures the shares of wall time in which
environments and the policy work, exactly.

Promises: where several processes make the run, each process emits the readings
of all of them, so that a watchdog or a progress line anywhere judges the run.

Does not: see outside agents, whose turns emit no `StageChanged`.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from typing import Any, Callable, Iterable, Mapping, Protocol

from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.net import peers as peers_lib
from tunix.rl.multi_turn.reporting import episode_tally
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
      stage = self._stage.pop(event.trajectory_id, "")
      if stage:
        self._now_in[stage] -= 1
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
  def stats(self) -> Mapping[str, float]: ...


class _Queue(Protocol):
  def counters(self) -> Mapping[str, int]: ...


class StepMetrics:
  """Adds the readings of episodes, queue and engine to each StepFinished.

  Stands between the learner loop and the observers. `StageChanged` events end
  here: there are several in each turn, and observers need only the readings.
  """

  def __init__(
    self,
    downstream: events.Observers,
    queue: _Queue,
    engine: _Engine,
    processes: peers_lib.Peers = peers_lib.ALONE,
  ):
    """Args:

    downstream: receives the events.
    queue, engine: of this process.
    processes: Processes of the run. Each emits its StepFinished of every
      step,
      which waits until all have come to it, as the next step would.
    """
    self._downstream = downstream
    self._queue = queue
    self._engine = engine
    self._processes = processes
    self._refused = 0
    self._lock = threading.Lock()
    self._overlap = Overlap()
    self._stats = _numbers(engine.stats())
    self._since = time.perf_counter()

  def on_event(self, event: events.Event) -> None:
    if isinstance(event, events.StageChanged):
      self._overlap.on_event(event)
      return
    if isinstance(event, events.GroupFinished):
      with self._lock:
        self._refused += event.outcome != "accepted"
    elif isinstance(event, events.StepFinished):
      readings = self._processes.gather("readings", self._own(event))
      event = dataclasses.replace(event, metrics=_of_all(readings))
    self._downstream.on_event(event)

  def _own(self, event: events.StepFinished) -> dict[str, Any]:
    """JSON: this process's part of a step's readings."""
    now = time.perf_counter()
    with self._lock:
      refused, self._refused = self._refused, 0
    stats, counters = _numbers(self._engine.stats()), self._queue.counters()
    own = {
      "tally": episode_tally.of_groups(event.groups),
      "engine": [self._stats, stats, now - self._since],
      "engines": getattr(self._engine, "engines", 1),
      "readings": {
        **self._overlap.take(),
        "refused_groups": float(refused),
        "queue_size": counters["ready"],
        "dropped_stale": counters["dropped_stale"],
        # Pooled by the learner, but for seconds and the like.
        **event.metrics,
      },
    }
    self._stats, self._since = stats, now
    return own


def _of_all(readings: list[dict[str, Any]]) -> dict[str, float]:
  """The run's readings, from each process's `_own`."""
  befores, afters, seconds = zip(*(one["engine"] for one in readings))
  tally = episode_tally.added(one["tally"] for one in readings)
  return {
    **episode_tally.readings(tally),
    **metrics.engine_metrics(
      _sum(befores),
      _sum(afters),
      max(seconds),
      sum(one["engines"] for one in readings),
    ),
    **metrics.over_processes([one["readings"] for one in readings]),
  }


def _numbers(stats: Mapping[str, Any]) -> dict[str, float]:
  return {k: v for k, v in stats.items() if isinstance(v, (int, float))}


def _sum(counters: Iterable[Mapping[str, float]]) -> dict[str, float]:
  total: collections.Counter[str] = collections.Counter()
  for one in counters:
    total.update(one)
  return dict(total)
