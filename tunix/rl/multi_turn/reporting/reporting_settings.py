"""Declares the settings of reporting: a run's sections `tracking`, `report` and
`watchdog`.

The trackers, the writers of the run directory, the progress line, the report
and the watchdog take these classes.

Does not: import a tracker's package, or JAX.
"""

from __future__ import annotations

from typing import Iterator, Literal

from tunix.rl.multi_turn.core import settings

_setting = settings.setting


@settings.settings
class TrackingConfig:
  """Experiment trackers that receive the run's numbers."""

  tensorboard: bool = _setting(
    default=False, doc="Event files for TensorBoard, in the run directory."
  )
  wandb: Literal["off", "online", "offline"] = _setting(
    default="off",
    doc="Weights & Biases. offline: files in the run directory, for `wandb"
    " sync`.",
  )
  mlflow: str = _setting(
    default="",
    doc="MLflow's tracking server, http(s)://host:port, or a database file,"
    ' sqlite:///path. "" = none.',
  )
  project: str = _setting(
    default="tunix-multi-turn", doc="Project at W&B, and experiment at MLflow."
  )
  close_timeout_s: float = _setting(
    default=10.0,
    doc="When the run ends, each tracker gets this long to send its rest.",
    unit="s",
    ge=0,
  )
  max_pending: int = _setting(
    default=10_000,
    doc="Calls that wait for a slow tracker; more are dropped and counted.",
    ge=1,
  )
  give_up_after: int = _setting(
    default=5,
    doc="A tracker is abandoned after this many failures in a row.",
    ge=1,
  )
  film_strips: int = _setting(
    default=4,
    doc="Episodes of each evaluation that TensorBoard and W&B show as film"
    " strips, half of them failures, beside a table of its episodes."
    " 0 = neither.",
    ge=0,
    le=64,
  )

  def problems(self) -> Iterator[str]:
    if self.mlflow and not self.mlflow.startswith(
      ("http://", "https://", "sqlite:///", "postgresql://", "databricks")
    ):
      yield (
        f"tracking.mlflow={self.mlflow!r}: give http://host:port, or"
        " sqlite:///path for a file"
      )
    if not self.project.strip():
      yield "tracking.project='': give a name, or leave it as it is"


@settings.settings
class ReportConfig:
  """The run directory's records for people, and the progress line."""

  episodes: int = _setting(
    default=400,
    doc="Episodes kept in trajectories.jsonl, thinned evenly over the run, a"
    " quarter of them from evaluations. 0 = none.",
    ge=0,
  )
  images: bool = _setting(default=True, doc="Keep those episodes' screenshots.")
  max_pending: int = _setting(
    default=256,
    doc="Episodes that wait to be written; more are dropped and counted.",
    ge=1,
  )
  film_strips: int = _setting(
    default=6, doc="Episodes drawn in report.html.", ge=0
  )
  progress: Literal["auto", "bar", "lines", "none"] = _setting(
    default="auto",
    doc="bar, plain lines, or none. auto: a bar on a terminal, else lines.",
  )
  progress_s: float = _setting(
    default=5.0, doc="Smallest time between two progress lines.", unit="s", ge=0
  )
  profile: bool = _setting(
    default=False,
    doc="Write trace.json, a timeline of the run by engine, environment,"
    " learner, queue and uploader, for https://ui.perfetto.dev (which opens"
    " it in the browser) or chrome://tracing; see docs/doctor.md.",
  )
  profile_mib: float = _setting(
    default=64.0,
    doc="Largest trace.json. Turns are left out beyond nine tenths of it,"
    " everything beyond the whole, and counted.",
    unit="MiB",
    ge=0.01,
  )


WatchdogRule = Literal[
  "unsolved",
  "no_variance",
  "nan",
  "gradient",
  "kl",
  "entropy",
  "logprob_gap",
  "environments",
]


@settings.settings
class WatchdogConfig:
  """Warnings about training that cannot succeed, and when to stop it."""

  on: bool = _setting(default=True, doc="Watch the run.")
  stop: tuple[WatchdogRule, ...] = _setting(
    default=(),
    doc="Rules that end the run, with a checkpoint and their diagnosis;"
    " others warn.",
  )
  window: int = _setting(
    default=10,
    doc="Updates that gradient, entropy and logprob_gap are averaged over.",
    unit="updates",
    ge=1,
  )
  no_gradient_updates: int = _setting(
    default=20,
    doc="unsolved, no_variance: updates in a row without a group that has a"
    " gradient. 0 = not watched.",
    unit="updates",
    ge=0,
  )
  nan_updates: int = _setting(
    default=3,
    doc="nan: updates in a row with a loss or gradient that is not finite."
    " 0 = not watched.",
    unit="updates",
    ge=0,
  )
  gradient_factor: float = _setting(
    default=50.0,
    doc="gradient: a norm of this many times the median of the window. 0 ="
    " not watched.",
    ge=0,
  )
  gradient_floor: float = _setting(
    default=1.0, doc="gradient: a norm below this is never reported.", ge=0
  )
  max_kl: float = _setting(
    default=1.0,
    doc="kl: mean KL a token from the reference, with algorithm.kl_coef > 0."
    " 0 = not watched.",
    unit="nats",
    ge=0,
  )
  entropy_fraction: float = _setting(
    default=0.05,
    doc="entropy: below this share of the first window's, while success is"
    " below 0.9. 0 = not watched.",
    ge=0,
    lt=1,
  )
  gap_factor: float = _setting(
    default=10.0,
    doc="logprob_gap: the KL of learner and sampler is this many times the"
    " first window's. 0 = not watched.",
    ge=0,
  )
  gap_limit: float = _setting(
    default=0.01,
    doc="logprob_gap: the KL of learner and sampler is above this in three"
    " updates in a row, of those with staleness 0, one optimizer step and no"
    " mixed_kv_tokens; or that of one group of turns or of numbers of images"
    " is. Not watched where the two differ by design: recorded"
    " episodes, int8 weights in the engine, weights narrower than float32 in"
    " an external one, truncated sampling without"
    " algorithm.keep_sampling_mask, other sampling that is trained on."
    " 0 = never watched.",
    unit="nats",
    ge=0,
  )
  gap_floor: float = _setting(
    default=0.01,
    doc="logprob_gap: a KL below this is never reported.",
    unit="nats",
    ge=0,
  )
  failed_episodes: int = _setting(
    default=32,
    doc="environments: episodes in a row that infrastructure ended, and not"
    " the policy. 0 = not watched.",
    unit="episodes",
    ge=0,
  )
  invalid_episodes: int = _setting(
    default=64,
    doc="invalid: the run ends where this many first episodes, evaluations"
    " included, were all ended by infrastructure or before a turn, or have"
    " no token to train on, whatever `stop` has; in training not before the"
    " retries of a group have failed too (collect.max_requeues). 0 = not"
    " watched.",
    unit="episodes",
    ge=0,
  )
