"""Defines typed events: stages emit them, observers receive them.

Observers are the progress bar, the metrics file, the trajectory log, trackers
and the monitor; no stage calls them directly. An observer must return at once
and must not raise; one that raises is counted and reported once, and never
stops a run.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from typing import Any, Mapping, Protocol, Sequence

from . import containment
from . import trajectory

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Event:
  """Base of all events. `time` is seconds since the epoch."""

  time: float = dataclasses.field(default_factory=time.time, kw_only=True)


@dataclasses.dataclass(frozen=True)
class RunStarted(Event):
  run_name: str
  config: Mapping[str, Any]
  # Dotted key of each setting that is not its default -> the default.
  changed: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RunFinished(Event):
  status: str  # "completed", "interrupted" or "failed"
  error: str | None = None
  traceback: str = ""  # Of a failure that is no user's mistake.
  notes: tuple[str, ...] = ()  # What its reader must know about the end.


TASKS_LISTED = 500
"""Tasks that one `TasksListed` has at most."""


@dataclasses.dataclass(frozen=True)
class TasksListed(Event):
  """Some tasks of a run that has a list of them, before its first episode.

  `tasks` are as `CUATask.to_record` makes them.
  """

  tasks: tuple[Mapping[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class EpisodeStarted(Event):
  trajectory_id: str
  group_id: str
  task_id: str
  split: str = "train"  # "train" or "eval"


@dataclasses.dataclass(frozen=True)
class EnvironmentReady(Event):
  """An episode's environment has started; its agent is set up now."""

  trajectory_id: str


@dataclasses.dataclass(frozen=True)
class StageChanged(Event):
  """An episode begins to wait for the model or its environment, or stops.

  `stage`: "model" (the policy, rendering and the engine's queue included),
  "env" (reset, step, reward and closing), or "" for neither.
  """

  trajectory_id: str
  stage: str


@dataclasses.dataclass(frozen=True)
class TurnFinished(Event):
  """`seconds` maps stage (model, env, render) to wall seconds.

  `step` is the turn itself, for observers that show an episode as it runs. It
  is the episode's own object, which is still written to; None without it.
  """

  trajectory_id: str
  turn: int
  seconds: Mapping[str, float]
  step: trajectory.Step | None = None


@dataclasses.dataclass(frozen=True)
class EpisodeFinished(Event):
  trajectory: trajectory.Trajectory
  group_id: str
  task_id: str
  split: str = "train"


@dataclasses.dataclass(frozen=True)
class GroupFinished(Event):
  """A group is complete. `outcome`: "accepted", "dropped" or "requeued"."""

  group: trajectory.TrajectoryGroup
  outcome: str
  reason: str = ""


@dataclasses.dataclass(frozen=True)
class Fault(Event):
  """A failure that was contained. `kind` is an error class or stage name."""

  stage: str  # "reset", "step", "evaluate", "reward", "close", "model", …
  kind: str
  message: str
  trajectory_id: str | None = None


@dataclasses.dataclass(frozen=True)
class UpdateStarted(Event):
  """Update number `step` begins: its groups have arrived."""

  step: int


@dataclasses.dataclass(frozen=True)
class StepFinished(Event):
  """One learner update, from `groups`.

  `metrics` are documented in docs/metrics.md. `advantages` are of the turns of
  the groups' valid members, by trajectory id: the weight of every token
  sampled in that turn in the update. `left_out` is of the turns of all members:
  why the update did not put that turn's tokens into its loss ("invalid",
  "zero_advantage", "too_long" or "truncated", see `learner.batches.examples`),
  "" where it did.
  """

  step: int
  version: int
  metrics: Mapping[str, float]
  groups: tuple[trajectory.TrajectoryGroup, ...] = ()
  advantages: Mapping[str, tuple[float, ...]] = dataclasses.field(
    default_factory=dict
  )
  left_out: Mapping[str, tuple[str, ...]] = dataclasses.field(
    default_factory=dict
  )


@dataclasses.dataclass(frozen=True)
class CheckpointSaved(Event):
  """The checkpoint after update number `step` was handed to its writer."""

  step: int
  path: str


@dataclasses.dataclass(frozen=True)
class WeightsPublished(Event):
  version: int
  seconds: float


@dataclasses.dataclass(frozen=True)
class EvalStarted(Event):
  """The episodes of split "eval" that follow belong to it.

  Emitted for each of its modes; `episodes` is of all of them. `step` is the
  number of updates made before it.
  """

  name: str  # As in EvalFinished.
  mode: str  # "sampled" or "greedy"
  episodes: int
  step: int = 0


@dataclasses.dataclass(frozen=True)
class EvalFinished(Event):
  """`results` is the JSON that summary.json holds under eval.<name>.

  One with `step` has no EvalStarted: it gives the evaluation after update
  `step` another name.
  """

  name: str  # "initial", "warm_start", "final" or "step_<n>"
  results: Mapping[str, Any]
  step: int | None = None


@dataclasses.dataclass(frozen=True)
class Progress(Event):
  """Long work outside the training loop. `total` None = unknown."""

  stage: str
  done: int
  total: int | None = None
  message: str = ""


class Observer(Protocol):
  """Receives events. Must return at once, not raise, and be thread-safe.

  A class may name the types it receives in `receives: tuple[type, ...]`;
  `Observers` sends it no others. Without it, an observer receives all.
  """

  def on_event(self, event: Event) -> None: ...


class Observers:
  """Fans events out to observers and contains their failures."""

  def __init__(self, observers: Sequence[Observer] = ()):
    self._observers = list(observers)
    self._receivers: dict[type, list[Observer]] = {}
    self.failures: collections.Counter[str] = collections.Counter()

  def add(self, observer: Observer) -> None:
    self._observers.append(observer)
    self._receivers = {}

  def _receivers_of(self, kind: type) -> list[Observer]:
    return [
      observer
      for observer in self._observers
      if issubclass(kind, getattr(observer, "receives", object))
    ]

  def on_event(self, event: Event) -> None:
    kind, receivers = type(event), self._receivers
    if kind not in receivers:
      receivers[kind] = self._receivers_of(kind)
    for observer in receivers[kind]:
      try:
        with containment.contained("the observer"):
          observer.on_event(event)
      except Exception as error:  # pylint: disable=broad-except
        name = type(observer).__name__
        if not self.failures[name]:
          _LOG.error(
            "observer %s failed on %s (%r); later failures are only counted",
            name,
            type(event).__name__,
            error,
            exc_info=not isinstance(error, OSError),
          )
        self.failures[name] += 1
