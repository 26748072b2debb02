"""Times the stages of an episode: waiting for the model, for the environment.

Does not: know deadlines.
"""

from __future__ import annotations

import contextlib
import time
from typing import Iterator

from tunix.rl.multi_turn.core import events


class StageTimer:
  """Times an episode's stages (model, env).

  An episode is in one stage at a time; time in none is its own.
  """

  def __init__(self, trajectory_id: str, observers: events.Observer | None):
    self._id = trajectory_id
    self._observers = observers
    self._seconds: dict[str, float] = {}

  @contextlib.contextmanager
  def __call__(self, stage: str, *counted: str) -> Iterator[None]:
    """A stage of `events.StageChanged`; its time counts as each `counted`."""
    started = time.perf_counter()
    self._emit(stage)
    try:
      yield
    finally:
      spent = time.perf_counter() - started
      for name in counted:
        self._seconds[name] = self._seconds.get(name, 0.0) + spent
      self._emit("")

  def metrics(self) -> dict[str, float]:
    """`seconds_<counted>`, wall seconds; a stage that never was is left out."""
    return {f"seconds_{k}": v for k, v in self._seconds.items()}

  def _emit(self, stage: str) -> None:
    if self._observers is not None:
      self._observers.on_event(events.StageChanged(self._id, stage))
