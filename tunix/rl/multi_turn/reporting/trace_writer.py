"""Writes trace.json, a timeline of a run for Perfetto and chrome://tracing.

Lanes, in Chrome's trace event format:

    learner        an update's phases; its parts beneath `learn`
    evaluation     each evaluation
    queue          groups that wait (a counter); those dropped and requeued
    engine         turns that wait for the policy, side by side; its seconds of
                   each update by part (a counter)
    environment    turns that wait for their environment, side by side
    uploader       events that wait for the monitor's uploader (a counter)

An update's lengths are measured. Their order within the update is that of the
learner's loop, as only sums are recorded: phases that alternate are drawn in
one piece each. A turn is drawn when it ends, from its own measurements.

Promises: the file is not larger than `ReportConfig.profile_mib`, turns end
before updates do, and what is left out is counted in its last event. It can be
opened while the run lives, and after a crash: viewers need no closing bracket.

Does not: trace programs on a device (`jax.profiler` does), or processes of
other hosts.
"""

from __future__ import annotations

import json
import pathlib
import threading
import time
from typing import Any, Callable, Mapping

from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.reporting import reporting_settings
from tunix.rl.multi_turn.reporting import time_metrics

LANES = 16
"""Turns drawn side by side; one that begins while all are taken is left out."""
PHASES = time_metrics.LEARNER
WITHIN_LEARN = ("seconds_pack", "seconds_score", "seconds_step")
_OF_TURNS = 0.9  # Share of the file.
_LAST = 512  # Bytes kept for the last event.
_UPLOADER_S = 1.0  # Between two readings.
_RUN, _ENGINE, _ENVIRONMENT = 1, 2, 3  # "Processes" of the format: groups.
_LEARNER, _EVALUATION, _QUEUE, _UPLOADER = 1, 2, 3, 4  # "Threads" of _RUN.
_NAMES = {
  _LEARNER: "learner",
  _EVALUATION: "evaluation",
  _QUEUE: "queue",
  _UPLOADER: "uploader",
}


class _Lanes:
  """Places intervals so that none overlaps another in its lane."""

  def __init__(self):
    self._ends = [float("-inf")] * LANES

  def place(self, begin: float, end: float) -> int | None:
    """The lane, from 1, that is free longest; None where all are taken."""
    lane = min(range(LANES), key=self._ends.__getitem__)
    if self._ends[lane] > begin:
      return None
    # The fullest that is free, so that few lanes are drawn in a quiet run.
    lane = max(
      (i for i in range(LANES) if self._ends[i] <= begin),
      key=lambda i: (self._ends[i], -i),
    )
    self._ends[lane] = end
    return lane + 1


class TraceWriter:
  """Observer that draws the run's timeline.

  Attributes:
    uploader: readings of the monitor's uploader; None without one.
    left_out: turns and other events that had no room.
  """

  receives = (
    events.EvalFinished,
    events.EvalStarted,
    events.GroupFinished,
    events.RunFinished,
    events.StepFinished,
    events.TurnFinished,
  )

  def __init__(
    self,
    directory: str | pathlib.Path,
    config: reporting_settings.ReportConfig,
    *,
    resume_step: int | None = None,
    clock: Callable[[], float] = time.time,
  ):
    """Args:

    directory: Directory of the run. A resumed run writes a file of its own,
      trace-<step>.json.
    config: `profile_mib` of it.
    resume_step: step of the checkpoint that the run resumes from.
    clock: seconds since the epoch, as events have them.
    """
    name = "trace.json" if resume_step is None else f"trace-{resume_step}.json"
    self.path = pathlib.Path(directory) / name
    self.uploader: Callable[[], Mapping[str, float]] | None = None
    self.left_out = {"turns": 0, "others": 0}
    self._room = int(config.profile_mib * (1 << 20)) - _LAST
    self._began = clock()
    self._lock = threading.Lock()
    self._lanes = {_ENGINE: _Lanes(), _ENVIRONMENT: _Lanes()}
    self._queued = 0
    self._read_at = float("-inf")
    self._evaluations: dict[str, float] = {}
    self._published = float("-inf")  # Where the last update was drawn to.
    self._written = 0
    self._file = self.path.open("w", encoding="utf-8")
    self._put("[\n")
    for pid, name in (
      (_RUN, "run"),
      (_ENGINE, "engine"),
      (_ENVIRONMENT, "environment"),
    ):
      self._name("process_name", pid, 0, name)
    for tid, name in _NAMES.items():
      self._name("thread_name", _RUN, tid, name)
    for pid in self._lanes:
      for lane in range(1, LANES + 1):
        self._name("thread_name", pid, lane, f"turn {lane}")

  def on_event(self, event: events.Event) -> None:
    with self._lock:
      if self._file.closed:
        return
      if isinstance(event, events.TurnFinished):
        self._turn(event)
      elif isinstance(event, events.GroupFinished):
        self._group(event)
      elif isinstance(event, events.StepFinished):
        self._step(event)
        self._file.flush()
      elif isinstance(event, events.EvalStarted):
        self._evaluations.setdefault(event.name, event.time)
      elif isinstance(event, events.EvalFinished):
        begun = self._evaluations.pop(event.name, None)
        if begun is not None:
          self._slice(_RUN, _EVALUATION, event.name, begun, event.time)
      self._read_uploader(event.time)
      if isinstance(event, events.RunFinished):
        self._end(event.time)

  def close(self) -> None:
    """Completes the file. Idempotent."""
    with self._lock:
      if not self._file.closed:
        self._end(self._read_at)

  # --- events -----------------------------------------------------------------

  def _turn(self, event: events.TurnFinished) -> None:
    env = event.seconds.get("env", 0.0)
    model = event.seconds.get("model", 0.0) + event.seconds.get("render", 0.0)
    middle = event.time - env
    args = {"episode": event.trajectory_id, "turn": event.turn}
    for pid, name, begin, end in (
      (_ENGINE, "model", middle - model, middle),
      (_ENVIRONMENT, "env", middle, event.time),
    ):
      lane = None
      if self._written < _OF_TURNS * self._room:
        lane = self._lanes[pid].place(begin, end)
      if lane is None:
        self.left_out["turns"] += 1
      else:
        self._slice(pid, lane, name, begin, end, args)

  def _group(self, event: events.GroupFinished) -> None:
    if event.outcome == "accepted":
      self._queued += 1
      self._counter(
        _QUEUE, "groups waiting", event.time, {"groups": self._queued}
      )
    else:
      self._event(
        {
          "ph": "i",
          "s": "t",
          "pid": _RUN,
          "tid": _QUEUE,
          "name": f"{event.outcome}: {event.reason}"[:120],
          "ts": self._micros(event.time),
        }
      )

  def _step(self, event: events.StepFinished) -> None:
    metrics = event.metrics
    spent = {
      phase: float(metrics.get(f"time/{phase}", 0.0)) for phase in PHASES
    }
    at = max(event.time - sum(spent.values()), self._published)
    for phase in PHASES:
      end = min(at + spent[phase], event.time)
      if end > at:
        args = {"step": event.step, "version": event.version}
        self._slice(_RUN, _LEARNER, phase, at, end, args)
        if phase == "learn":
          self._within_learn(metrics, at, end)
      at = end
    self._published = event.time
    self._queued = int(
      metrics.get("queue_size", max(0, self._queued - len(event.groups)))
    )
    self._counter(
      _QUEUE, "groups waiting", event.time, {"groups": self._queued}
    )
    engine = {
      part: round(float(metrics[f"time/engine_{part}"]), 6)
      for part in time_metrics.ENGINE
      if f"time/engine_{part}" in metrics
    }
    if engine:
      self._counter(0, "seconds of an update", event.time, engine, _ENGINE)

  def _within_learn(
    self, metrics: Mapping[str, float], at: float, limit: float
  ) -> None:
    for name in WITHIN_LEARN:
      end = min(at + float(metrics.get(name, 0.0)), limit)
      if end > at:
        label = name.removeprefix("seconds_")
        self._slice(_RUN, _LEARNER, label, at, end)
      at = end

  def _read_uploader(self, at: float) -> None:
    if self.uploader is None or at - self._read_at < _UPLOADER_S:
      return
    self._read_at = at
    self._counter(_UPLOADER, "uploader", at, dict(self.uploader()))

  def _end(self, at: float) -> None:
    self._room += _LAST
    began = self._began if at == float("-inf") else at
    self._event({
        "ph": "i", "s": "g", "pid": _RUN, "tid": _LEARNER, "name": "end",
        "ts": self._micros(began), "args": {"left_out": dict(self.left_out)},
    }, last=True)  # fmt: skip
    self._file.close()

  # --- the format -------------------------------------------------------------

  def _micros(self, at: float) -> int:
    return round((at - self._began) * 1e6)

  def _slice(
    self,
    pid: int,
    tid: int,
    name: str,
    begin: float,
    end: float,
    args: Mapping[str, Any] | None = None,
  ) -> None:
    start = self._micros(begin)
    self._event({
        "ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start,
        "dur": max(0, self._micros(end) - start),
        **({"args": dict(args)} if args else {}),
    })  # fmt: skip

  def _counter(
    self,
    tid: int,
    name: str,
    at: float,
    values: Mapping[str, float],
    pid: int = _RUN,
  ) -> None:
    self._event({
        "ph": "C", "pid": pid, "tid": tid, "name": name,
        "ts": self._micros(at), "args": dict(values),
    })  # fmt: skip

  def _name(self, kind: str, pid: int, tid: int, name: str) -> None:
    self._event(
      {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}
    )

  def _event(self, event: Mapping[str, Any], last: bool = False) -> None:
    line = json.dumps(event) + ("\n]\n" if last else ",\n")
    if self._written + len(line) <= self._room:
      self._put(line)
    else:
      self.left_out["others"] += 1

  def _put(self, text: str) -> None:
    self._file.write(text)
    self._written += len(text)
