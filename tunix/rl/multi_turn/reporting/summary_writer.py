"""Writes summary.json, the state of a run in one object, replaced atomically.

Written when the run starts and ends, after each evaluation, and at most every
few seconds while it learns; a reader never sees half a file. Holds the
evaluations under `eval.<name>`, the last metrics, counts of episodes, groups
and contained faults (see `run_counts`), and drops of other observers. What an
evaluation found survives a power loss.

Does not: judge; thresholds and verdicts are the reader's.
"""

from __future__ import annotations

import pathlib
import threading
import time
from typing import Any, Callable, Mapping

from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.reporting import files
from tunix.rl.multi_turn.reporting import run_counts

_INTERVAL_S = 5.0
"""Smallest time between two writes while training."""


class SummaryWriter:
  """Observer; see the module docstring."""

  receives = (
    *run_counts.RunCounts.receives,
    events.Progress,
    events.RunStarted,
    events.RunFinished,
  )

  def __init__(
    self,
    path: str | pathlib.Path,
    *,
    resume_step: int | None = None,
    last_metrics: Mapping[str, Any] | None = None,
    counts: run_counts.RunCounts | None = None,
    extra: Callable[[], Mapping[str, Any]] | None = None,
  ):
    """Args:

    path: the file.
    resume_step: continue an existing file at this step: its counts, and
      the evaluations of weights that the run still goes through; later
      steps and the end will come again. None = begin a new file.
    last_metrics: Metrics of `resume_step`, if known.
    counts: receives the events it counts; a new one by default. Of an
      existing file it gets the counts of the evaluations that still hold,
      and those of training; who knows these better restores them after.
    extra: called at each write for more keys (parameters, devices, counters
      of other parts); when it fails they are left out.
    """
    self._path = pathlib.Path(path)
    self._extra = extra
    self._lock = threading.Lock()
    self._written = 0.0
    old = {}
    self.counts = counts or run_counts.RunCounts()
    if resume_step is not None:
      old = _as_of(files.read_json(self._path), resume_step, last_metrics)
      tallies = old.get("counts", {})
      self.counts.restore_evaluations(
        {k: v for k, v in tallies.get("eval", {}).items() if k in old["eval"]}
      )
      self.counts.restore_training({"settled": tallies.get("training")}, None)
    self._before = float(old.get("seconds") or 0.0)
    self._started = time.monotonic()
    self._data: dict[str, Any] = {
      "run_name": old.get("run_name", ""),
      "status": "running",
      "error": None,
      "notes": [],
      "started": old.get("started"),
      "seconds": self._before,
      "resumed": old.get("resumed", 0) + (resume_step is not None),
      "step": old.get("step", 0),
      "version": old.get("version", 0),
      "eval": old.get("eval", {}),
      "last_metrics": old.get("last_metrics", {}),
      "stage_seconds": old.get("stage_seconds", {}),
    }
    self._stage: tuple[str, float] | None = None

  def on_event(self, event: events.Event) -> None:
    write = durably = False
    self.counts.on_event(event)
    with self._lock:
      data = self._data
      if isinstance(event, events.StepFinished):
        self._enter("train", event.time)
        data.update(
          step=event.step,
          version=event.version,
          last_metrics=dict(event.metrics),
        )
        write = time.monotonic() - self._written >= _INTERVAL_S
      elif isinstance(event, events.EvalFinished):
        data["eval"] = {**data["eval"], event.name: dict(event.results)}
        write = durably = True
      elif isinstance(event, events.Progress):
        self._enter(event.stage, event.time)
      elif isinstance(event, events.RunStarted):
        data["run_name"] = event.run_name
        data["started"] = data["started"] or event.time
        write = True
      elif isinstance(event, events.RunFinished):
        self._enter("", event.time)
        data.update(
          status=event.status, error=event.error, notes=list(event.notes)
        )
        write = durably = True
      if write:
        self._write(durably)

  def _enter(self, stage: str, now: float) -> None:
    """Books the time since the last event on the stage it belonged to."""
    if self._stage is not None and self._stage[0]:
      name, since = self._stage
      seconds = self._data["stage_seconds"]
      seconds[name] = seconds.get(name, 0.0) + max(0.0, now - since)
    self._stage = (stage, now)

  def _write(self, durably: bool) -> None:
    self._written = time.monotonic()
    self._data["seconds"] = self._before + self._written - self._started
    more: Mapping[str, Any] = {}
    if self._extra is not None:
      try:
        more = self._extra()
      except Exception as error:  # pylint: disable=broad-except
        more = {"extra_error": repr(error)}
    former = {
      "training": self.counts.training()["settled"],
      "eval": self.counts.evaluations(),
    }
    files.write_json(
      self._path,
      {**self._data, **self.counts.totals(), "counts": former, **more},
      durably=durably,
    )


_SHAPE: dict[str, type | tuple[type, ...]] = {
  "seconds": (int, float),
  "resumed": int,
  "step": int,
  "version": int,
  "eval": dict,
  "last_metrics": dict,
  "stage_seconds": dict,
  "counts": dict,
}


def problem(path: pathlib.Path) -> str | None:
  """Describes why a run cannot resume with a summary; None if it can.

  An absent file is none: there may have been no time to write one.
  """
  if not path.exists():
    return None
  try:
    data = json_text.read(path)
  except (OSError, ValueError) as error:
    return f"it is not whole JSON ({error})"
  if not isinstance(data, dict):
    return f"it holds a {type(data).__name__} in place of an object"
  for name, kind in _SHAPE.items():
    if name in data and not isinstance(data[name], kind):
      return f"{name} is {data[name]!r:.40}"
  for name, results in data.get("eval", {}).items():
    if not isinstance(results, dict) or not {"by_task", "headline"} <= set(
      results
    ):
      return f"eval.{name} is no evaluation"
  return None


def _as_of(
  data: dict[str, Any], step: int, last_metrics: Mapping[str, Any] | None
) -> dict[str, Any]:
  """A summary's entries that still hold when its run resumes after `step`."""
  if not data:
    return {"eval": {}}
  data = dict(data)
  if data.get("step", 0) != step:
    data |= {
      "step": step,
      "version": step,
      "last_metrics": dict(last_metrics or {}),
    }
  data["eval"] = {
    name: results
    for name, results in data.get("eval", {}).items()
    if name != "final" and not _step_of(name) > step
  }
  return data


def _step_of(name: str) -> int:
  number = name.removeprefix("step_")
  return int(number) if number.isdigit() else -1
