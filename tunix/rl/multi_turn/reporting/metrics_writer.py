"""Writes metrics.jsonl, one JSON object a learner step.

A line is complete on disk as soon as its step has ended. Resuming removes the
lines of steps that will be made again, so that a step stands there once.

Does not: average, smooth or drop anything.
"""

from __future__ import annotations

import json
import logging
import pathlib
import threading
from typing import Any

from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.reporting import files
from tunix.rl.multi_turn.reporting import metrics as metrics_lib

_LOG = logging.getLogger(__name__)


class MetricsWriter:
  """Observer of `StepFinished`.

  Attributes:
    last: metrics of the step that the run resumes from; {} without.
  """

  receives = (events.StepFinished, events.RunFinished)

  def __init__(
    self, path: str | pathlib.Path, *, resume_step: int | None = None
  ):
    """Args:

    path: the file; its directory is made.
    resume_step: keep the lines of steps up to this one and append. None =
      begin an empty file.
    """
    self._path = pathlib.Path(path)
    self._path.parent.mkdir(parents=True, exist_ok=True)
    self.last: dict[str, Any] = {}
    if resume_step is not None and self._path.exists():
      self._keep(resume_step)
    elif self._path.exists():
      self._path.unlink()
    self._lock = threading.Lock()
    self._file = self._path.open("a", encoding="utf-8")
    self._unknown: set[str] = set()

  def _keep(self, resume_step: int) -> None:
    """Leaves the lines of steps up to this one, each step once."""
    steps: set[int] = set()

    def keep(line: dict[str, Any]) -> bool:
      step = line.get("step")
      if not isinstance(step, int) or step > resume_step or step in steps:
        return False
      steps.add(step)
      if step == resume_step:
        keys = ("step", "version", "time")
        self.last = {k: v for k, v in line.items() if k not in keys}
      return True

    files.rewrite_lines(self._path, keep)

  def on_event(self, event: events.Event) -> None:
    if isinstance(event, events.RunFinished):
      self.close()
    if not isinstance(event, events.StepFinished):
      return
    record = {
      "step": event.step,
      "version": event.version,
      "time": event.time,
      **event.metrics,
    }
    line = json.dumps(files.plain(record), ensure_ascii=False)
    unknown = set(metrics_lib.undocumented(record)) - self._unknown
    if unknown:
      self._unknown |= unknown
      _LOG.warning(
        "metrics without documentation: %s; add them to reporting/metrics.py",
        ", ".join(sorted(unknown)),
      )
    with self._lock:
      if self._file.closed:
        self._file = self._path.open("a", encoding="utf-8")
      self._file.write(line + "\n")
      self._file.flush()

  def close(self) -> None:
    """Idempotent; a later event opens the file again."""
    with self._lock:
      self._file.close()
