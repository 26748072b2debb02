"""Keeps the outcome of each episode of an evaluation: episodes.jsonl.

A line an episode, written when it ends, under its key (mode, place of the task,
task id, attempt). Of two lines with one key the later one holds.

Promises: what was written before a kill is kept; a torn last line is
dropped. (A power loss may take the newest lines: those episodes are played
again.)
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import threading
import time
from typing import Any, Mapping, Sequence

from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.core.statistics import success_rates
from tunix.rl.multi_turn.reporting import files

NAME = "episodes.jsonl"
Key = tuple[str, int, str, int]


@dataclasses.dataclass(frozen=True)
class Outcome:
  """An episode of an evaluation, as episodes.jsonl holds it.

  Attributes:
    mode, index, task_id, attempt: its key.
    family: Family of the task.
    status: how it ended.
    success: whether the gym called the task solved.
    valid: whether the policy decided how it ended.
    reward: undiscounted sum.
    turns: taken.
    tokens: sampled.
    seconds: wall time, and by `model` and `env`.
    error: text of what broke it, "" for nothing.
    trajectory_id: Id in trajectories.jsonl.
    time: Time of its end, since the epoch.
    details: What the gym's evaluation says beside the success.
  """

  mode: str
  index: int
  task_id: str
  attempt: int
  family: str
  status: str
  success: bool
  valid: bool
  reward: float
  turns: int
  tokens: int
  seconds: Mapping[str, float]
  error: str
  trajectory_id: str
  time: float
  details: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def key(self) -> Key:
    return self.mode, self.index, self.task_id, self.attempt

  @classmethod
  def of(
    cls,
    key: Key,
    family: str,
    episode: trajectory_lib.Trajectory,
    tokens: int = 0,
  ) -> Outcome:
    """The outcome of a finished trajectory.

    Args:
      key: Key of the episode.
      family: Family of its task.
      episode: the trajectory.
      tokens: sampled, where the trajectory has no record of them.
    """
    mode, index, task_id, attempt = key
    metrics = episode.metrics
    return cls(
      mode=mode,
      index=index,
      task_id=task_id,
      attempt=attempt,
      family=family,
      status=episode.status.value,
      success=episode.status is trajectory_lib.TrajectoryStatus.SUCCEEDED,
      valid=episode.status.is_policy_outcome,
      reward=float(episode.reward),
      turns=episode.num_turns,
      tokens=episode.num_sampled or tokens,
      seconds={
        name: round(float(metrics[metric]), 4)
        for name, metric in _SECONDS.items()
        if metric in metrics
      },
      error=str(episode.error or "")[:2000],
      trajectory_id=episode.trajectory_id,
      time=time.time(),
      details=_details(episode),
    )

  def result(self) -> success_rates.EpisodeResult:
    return success_rates.EpisodeResult(
      family=self.family,
      mode=self.mode,
      status=trajectory_lib.TrajectoryStatus(self.status),
      success=self.success,
      reward=self.reward,
      turns=self.turns,
      task=f"{self.index} {self.task_id}",
    )


_SECONDS = {"all": "seconds", "model": "seconds_model", "env": "seconds_env"}
_FIELDS = {field.name for field in dataclasses.fields(Outcome)}
_REQUIRED = _FIELDS - {"details"}


def _details(episode: trajectory_lib.Trajectory) -> Mapping[str, Any]:
  if not episode.steps:
    return {}
  return episode.steps[-1].info.get("evaluation", {}).get("details", {})


class Journal:
  """The file of one evaluation. Thread-safe; `close` it."""

  def __init__(self, directory: pathlib.Path):
    """Reads the outcomes of an earlier start.

    Raises:
      OSError: the disk's.
    """
    self._path = directory / NAME
    self._lock = threading.Lock()
    self.outcomes: dict[Key, Outcome] = {}
    if self._path.exists():
      # A line torn by a kill would swallow the next one.
      files.rewrite_lines(self._path, lambda line: _REQUIRED <= set(line))
      self.outcomes = load(directory)
    self._file = self._path.open("a", encoding="utf-8")

  def add(self, outcome: Outcome) -> None:
    """Appends an outcome.

    Raises:
      OSError: the disk's.
    """
    line = json.dumps(files.plain(dataclasses.asdict(outcome)))
    with self._lock:
      self.outcomes[outcome.key] = outcome
      self._file.write(line + "\n")
      self._file.flush()

  def close(self) -> None:
    with self._lock:
      self._file.close()


def load(directory: pathlib.Path) -> dict[Key, Outcome]:
  """The outcomes in a directory, by key; {} without the file."""
  outcomes: dict[Key, Outcome] = {}
  for line in files.read_lines(directory / NAME):
    if _REQUIRED <= set(line):
      own = _FIELDS & set(line)
      outcome = Outcome(**{name: line[name] for name in own})
      outcomes[outcome.key] = outcome
  return outcomes


def statistics_of(outcomes: Sequence[Outcome]) -> dict[str, Any]:
  """Mean, median, 90th percentile and most of what valid episodes took.

  {"turns", "tokens", "tokens_per_turn", "seconds", "seconds_model",
  "seconds_env"}, those that were measured.
  """
  valid = [one for one in outcomes if one.valid]
  values_of = {
    "turns": [float(one.turns) for one in valid],
    "tokens": [float(one.tokens) for one in valid if one.tokens],
    "tokens_per_turn": [
      one.tokens / one.turns for one in valid if one.tokens and one.turns
    ],
    "seconds": [one.seconds["all"] for one in valid if "all" in one.seconds],
    **{
      f"seconds_{name}": [
        one.seconds[name] for one in valid if name in one.seconds
      ]
      for name in ("model", "env")
    },
  }
  return {name: _spread(values) for name, values in values_of.items() if values}


def _spread(values: Sequence[float]) -> dict[str, float]:
  ordered = sorted(values)
  # The nearest rank: an observed value.
  p90 = ordered[max(0, -(-9 * len(ordered) // 10) - 1)]
  return {
    "mean": statistics.fmean(ordered),
    "median": statistics.median(ordered),
    "p90": p90,
    "max": ordered[-1],
  }
