"""Accounts for the wall time between two updates, by what the learner did.

Promises: the phases of `take` and `time/other` sum to `time/step`, the wall
seconds since the last `take`; a phase within another counts once, as the inner
one.

Does not: know what the rollout did meanwhile (`reporting.step_metrics` does).
"""

from __future__ import annotations

import contextlib
import time
from typing import Callable, Iterator

PHASES = ("wait", "learn", "publish", "save", "evaluate", "report")


class StepSeconds:
  """Wall seconds of one thread, by phase."""

  def __init__(self, clock: Callable[[], float] = time.perf_counter):
    self._clock = clock
    self._since = self._at = clock()
    self._phase = "other"
    self._seconds: dict[str, float] = {}

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    """Time within is of `phase`, one of PHASES."""
    if phase not in PHASES:
      raise ValueError(f"phase must be one of {PHASES}, got {phase!r}")
    before = self._phase
    self._advance(phase)
    try:
      yield
    finally:
      self._advance(before)

  def take(self) -> dict[str, float]:
    """`time/step` and `time/<phase>` since the last call, in seconds."""
    self._advance(self._phase)
    step, self._since = self._at - self._since, self._at
    spent, self._seconds = self._seconds, {}
    return {"time/step": step} | {
        f"time/{phase}": spent.get(phase, 0.0) for phase in (*PHASES, "other")
    }

  def _advance(self, phase: str) -> None:
    now = self._clock()
    spent = self._seconds.get(self._phase, 0.0) + now - self._at
    self._seconds[self._phase] = spent
    self._at, self._phase = now, phase
