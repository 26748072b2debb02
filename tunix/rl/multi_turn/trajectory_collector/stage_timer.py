"""Whom an episode waits for, and for how long."""

from __future__ import annotations

import contextlib
import time
from typing import Iterator

from tunix.rl.multi_turn.core import events


class Stages:
  """The mutable owner of one episode's seconds by stage.

  An episode is in one stage at a time; what is in none is its own.
  """

  def __init__(self, trajectory_id: str, observers: events.Observer | None):
    self._id = trajectory_id
    self._observers = observers
    self._seconds: dict[str, float] = {}

  @contextlib.contextmanager
  def __call__(self, stage: str, counted: str) -> Iterator[None]:
    """A stage of `events.StageChanged`; its time counts as `counted`."""
    started = time.perf_counter()
    self._say(stage)
    try:
      yield
    finally:
      spent = time.perf_counter() - started
      self._seconds[counted] = self._seconds.get(counted, 0.0) + spent
      self._say("")

  def metrics(self) -> dict[str, float]:
    """`seconds_<counted>`, wall seconds; what never was is left out."""
    return {f"seconds_{k}": v for k, v in self._seconds.items()}

  def _say(self, stage: str) -> None:
    if self._observers is not None:
      self._observers.on_event(events.StageChanged(self._id, stage))
