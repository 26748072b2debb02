"""Renders a run's health: environments, clients, the server itself."""

from __future__ import annotations

import collections
import threading
import time
from typing import Any

import sqlalchemy as sa

from training_monitor.dashboard import curves as curves_lib
from training_monitor.dashboard import page_request
from training_monitor.dashboard import text
from training_monitor.schema import database
from training_monitor.schema import tables

_STEPS = 3
_SLOW_TURNS = 15
_SLOWEST = 20
Row = dict[str, Any]


class Timings:
  """Seconds of the server's answers, by route. Thread-safe."""

  def __init__(self):
    self._lock = threading.Lock()
    self._known: dict[str, list[float]] = {}
    self._slow: collections.deque[tuple[float, str, float]] = collections.deque(
      maxlen=_SLOWEST
    )
    self._slow_s = 0.25

  def note(self, name: str, seconds: float) -> None:
    with self._lock:
      have = self._known.setdefault(name, [0, 0.0, 0.0])
      have[0] += 1
      have[1] += seconds
      have[2] = max(have[2], seconds)
      if seconds >= self._slow_s:
        self._slow.append((time.time(), name, seconds))

  def read(self) -> tuple[list[Row], list[Row]]:
    """Returns (means by name, slowest first; slow calls, the last first)."""
    with self._lock:
      means = [
        {"name": n, "count": int(c), "mean_s": s / c, "most_s": m}
        for n, (c, s, m) in self._known.items()
      ]
      slow = [
        {"ago_s": time.time() - at, "name": n, "seconds": s}
        for at, n, s in reversed(self._slow)
      ]
    return sorted(means, key=lambda m: -m["mean_s"]), slow


class HealthPages(page_request.RunTab):
  """See the module docstring."""

  def __init__(self, *sources: Any, timings: Timings, writer: Any):
    super().__init__(*sources)
    self._timings = timings
    self._writer = writer

  def health(self, request: page_request.PageRequest) -> page_request.Page:
    training = request.id()
    run = self._head(request.project, training)
    columns = self._curves.of(training)
    means, slow = self._timings.read()
    with database.reading(self._engine) as connection:
      steps = list(
        connection.scalars(
          sa.select(tables.step.c.id)
          .where(tables.step.c.training_id == training)
          .order_by(tables.step.c.step.desc())
          .limit(_STEPS)
        )
      )
      environments, faults = self._environments(connection, steps)
      turns = self._slow_turns(connection, steps)
    clients = self._queries.clients(request.project)["items"][:20]
    for client in clients:
      health = client["health_json"]
      client["health"] = health if isinstance(health, dict) else {}
    return page_request.Page("health.html", {
        "run": run, "tab": "health", "environments": environments,
        "faults": faults, "turns": turns, "clients": clients,
        "lost": ("dropped", "images_dropped", "images_missing",
                 "dead_letters", "failed"),
        "steps": _STEPS, "means": means, "slow": slow,
        "writer": {
            "alive": self._writer.alive,
            "waiting": self._writer.waiting_bytes,
            "batches": self._writer.batches,
            "commits": self._writer.commits,
            "failures": self._writer.failures,
        },
        "queue": [
            {"name": name, "value": columns.recent(name),
             "spark": curves_lib.sample(columns.values[name])}
            for name in ("queue_size", "dropped_stale", "refused_groups",
                         "staleness_max", "invalid_episodes",
                         "lockstep_timeouts", "engine_compiles",
                         "skipped_steps")
            if name in columns.values
        ],
    })  # fmt: skip

  def _environments(
    self, connection: sa.Connection, steps: list[int]
  ) -> tuple[list[Row], list[Row]]:
    """States of the environments of some steps, and their faults."""
    r, e = tables.rollout, tables.environment
    own = sa.and_(r.c.source_type == "step", r.c.step_id.in_(steps))
    states = [
      {"status": status, "count": count}
      for status, count in connection.execute(
        sa.select(e.c.status, sa.func.count())
        .join(r, r.c.id == e.c.rollout_id)
        .where(own)
        .group_by(e.c.status)
        .order_by(sa.func.count().desc())
      )
    ]
    broken = connection.execute(
      sa.select(
        r.c.id, r.c.status_message, r.c.error_message, r.c.errors, r.c.end_time
      )
      .where(
        own,
        r.c.status != "cancelled",
        sa.or_(r.c.status == "failed", r.c.runtime_errors > 0),
      )
      .order_by(r.c.id.desc())
      .limit(_SLOW_TURNS)
    )
    environments = []
    for row in broken:
      faults = text.read_json(row.errors)
      first = faults[0] if isinstance(faults, list) and faults else {}
      first = first if isinstance(first, dict) else {}
      environments.append(
        {
          "id": row.id,
          "status": row.status_message,
          "end": row.end_time,
          "stage": first.get("stage"),
          "kind": first.get("kind"),
          "message": row.error_message or first.get("message"),
        }
      )
    return states, environments

  def _slow_turns(
    self, connection: sa.Connection, steps: list[int]
  ) -> list[Row]:
    r, t = tables.rollout, tables.turn
    rows = connection.execute(
      sa.select(t.c.rollout_id, t.c.turn, t.c.turn_time, t.c.metrics_json)
      .join(r, r.c.id == t.c.rollout_id)
      .where(
        r.c.source_type == "step",
        r.c.step_id.in_(steps),
        t.c.turn_time.is_not(None),
      )
      .order_by(t.c.turn_time.desc())
      .limit(_SLOW_TURNS)
    )
    turns = []
    for row in rows:
      metrics = text.read_json(row.metrics_json)
      spent = metrics.get("seconds") if isinstance(metrics, dict) else None
      turns.append(
        {
          "rollout": row.rollout_id,
          "turn": row.turn,
          "seconds": row.turn_time,
          "stages": {
            str(k): v
            for k, v in (spent.items() if isinstance(spent, dict) else ())
            if isinstance(v, (int, float))
          },
        }
      )
    return turns
