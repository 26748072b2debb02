"""The run itself: its place, evaluation, checkpoints, and who is told of it.

Sections whose fields carry default, meaning, unit and range, and what of them
cannot go together. Loads nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Iterator

from tunix.rl.multi_turn.config import loader
from tunix.rl.multi_turn.core import run_tags as tags_lib

_opt = loader.option


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """The run: where it writes, its seed, how long it may take."""

  name: str = _opt(
      "", 'Directory below run.dir. "" = gym name and the time of start.'
  )
  dir: str = _opt("runs", "Where run directories are made.")
  seed: int = _opt(
      0,
      "Every random choice derives from it. Two synchronous runs with one"
      " seed are equal.",
      at_least=0,
  )
  resume: str = _opt(
      "",
      'Run directory to continue from its last checkpoint; its config.yaml is'
      ' the base that overrides apply to. "" = a new run.',
  )
  time_budget_s: float = _opt(
      0.0,
      "Training stops after the update in which this much time has passed,"
      " then evaluates and saves. 0 = no limit.",
      unit="s",
      at_least=0,
  )
  compile_cache: str = _opt(
      "auto",
      "Directory of compiled programs, which the next start need not compile"
      " again. auto: $JAX_COMPILATION_CACHE_DIR, else one below the user's"
      " cache directory. off: none.",
  )
  imports: tuple[str, ...] = _opt(
      (),
      "Python modules imported first: the place to register your own gym and"
      " its tasks, parser, reward or algorithm.",
  )
  dry_run: bool = _opt(
      False,
      "Build everything, print the resolved configuration, shapes and memory,"
      " and exit. Same as --dry-run.",
  )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """Success on held-out seeds."""

  episodes_per_task: int = _opt(
      50, "Episodes of each family and mode.", at_least=1
  )
  every: int = _opt(
      0,
      "Evaluate every this many updates; no episode of training begins"
      " meanwhile. 0 = start and end.",
      at_least=0,
  )
  modes: tuple[str, ...] = _opt(
      ("sampled", "greedy"),
      "sampled: as in training. greedy: the likeliest token. The first is the"
      " one reported as success_rate.",
      choices=("greedy", "sampled"),
  )
  seed: int = _opt(
      1, "Chooses the held-out tasks; the same for every evaluation.",
      at_least=0,
  )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """What survives."""

  every: int = _opt(
      40, "Save every this many updates. 0 = only at the end.", at_least=0
  )
  keep: int = _opt(2, "Newest checkpoints kept.", at_least=1)


@dataclasses.dataclass(frozen=True)
class MonitorConfig:
  """The Training Monitor: everything the run does, in a database."""

  url: str = _opt(
      "",
      "Server that is told of the run, http(s)://host:port; its token is"
      ' $TUNIX_MONITOR_TOKEN. "" = none.',
  )
  embedded: bool = _opt(
      False,
      "Start a server of the run's own on this machine, which ends with the"
      " run, and print its URL.",
  )
  database: str = _opt(
      "", 'SQLite file of the embedded server. "" = monitor.db in run.dir.'
  )
  tags: tuple[str, ...] = _opt(
      (), "What to find the run by. A start adds them to those that it has."
  )
  images: bool = _opt(True, "Tell of the screenshots' pixels too.")
  entropies: bool = _opt(
      True,
      "Have the embedded engine tell each sampled token's entropy; engines of"
      " others do not. Compiled into its programs when a monitor is on.",
  )
  timeout_s: float = _opt(
      30.0, "A request to the server may take.", unit="s", above=0
  )
  close_timeout_s: float = _opt(
      15.0,
      "At the end, what is not told yet is delivered for this long; the rest"
      " waits for the next run in run.dir.",
      unit="s",
      at_least=0,
  )
  spool_mb: int = _opt(
      2048,
      "Disk that may hold what is not delivered yet; more is dropped and"
      " counted.",
      unit="MiB",
      at_least=1,
  )

  @property
  def on(self) -> bool:
    """Whether anybody is told."""
    return bool(self.url or self.embedded)


@dataclasses.dataclass(frozen=True)
class TrackingConfig:
  """Experiment trackers that are told of the run's numbers."""

  tensorboard: bool = _opt(
      False, "Event files for TensorBoard, in the run directory."
  )
  wandb: str = _opt(
      "off",
      "Weights & Biases. offline: files in the run directory, for `wandb"
      " sync`.",
      choices=("off", "online", "offline"),
  )
  mlflow: str = _opt(
      "",
      "MLflow's tracking server, http(s)://host:port, or a database file,"
      ' sqlite:///path. "" = none.',
  )
  project: str = _opt(
      "tunix-multi-turn", "Project at W&B, and experiment at MLflow."
  )
  close_timeout_s: float = _opt(
      10.0,
      "At the end, a tracker may take this long for what it was not told yet.",
      unit="s",
      at_least=0,
  )


@dataclasses.dataclass(frozen=True)
class ReportConfig:
  """What the run directory keeps for people."""

  episodes: int = _opt(
      400,
      "Episodes kept in trajectories.jsonl, thinned evenly over the run. 0 ="
      " none.",
      at_least=0,
  )
  images: bool = _opt(True, "Keep those episodes' screenshots.")
  film_strips: int = _opt(
      6, "Episodes drawn in report.html.", at_least=0
  )
  progress: str = _opt(
      "auto",
      "bar, plain lines, or none. auto: a bar on a terminal, else lines.",
      choices=("auto", "bar", "lines", "none"),
  )


def problems(
    evaluation: EvalConfig, monitor: MonitorConfig, tracking: TrackingConfig
) -> Iterator[str]:
  """Values that cannot go together: which fields, why, and what to change."""
  if not evaluation.modes:
    yield "eval.modes is empty; keep greedy, sampled, or both"
  if len(set(evaluation.modes)) != len(evaluation.modes):
    yield (
        f"eval.modes={list(evaluation.modes)} names a mode twice; name each"
        " once"
    )
  yield from _monitor_problems(monitor)
  yield from _tracking_problems(tracking)


def _monitor_problems(monitor: MonitorConfig) -> Iterator[str]:
  if monitor.url and monitor.embedded:
    yield (
        f"monitor.url={monitor.url} is one monitor and monitor.embedded=true"
        " another; give one of them"
    )
  if monitor.url and not monitor.url.startswith(("http://", "https://")):
    yield f"monitor.url={monitor.url!r}: give http://host:port or https://host"
  if monitor.database and not monitor.embedded:
    yield (
        f"monitor.database={monitor.database} is of the embedded server; set"
        " monitor.embedded=true, or leave it empty"
    )
  try:
    tags_lib.clean_all(monitor.tags)
  except ValueError as error:
    yield f"monitor.tags={list(monitor.tags)}: {error}"


def _tracking_problems(tracking: TrackingConfig) -> Iterator[str]:
  if tracking.mlflow and not tracking.mlflow.startswith(
      ("http://", "https://", "sqlite:///", "postgresql://", "databricks")
  ):
    yield (
        f"tracking.mlflow={tracking.mlflow!r}: give http://host:port, or"
        " sqlite:///path for a file"
    )
  if not tracking.project.strip():
    yield "tracking.project='': give a name, or leave it as it is"
