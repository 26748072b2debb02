"""Declares the settings of reporting: a run's sections `tracking` and `report`.

The trackers, the writers of the run directory, the progress line and the
report take these classes as they are.

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
      default="tunix-multi-turn",
      doc="Project at W&B, and experiment at MLflow.",
  )
  close_timeout_s: float = _setting(
      default=10.0,
      doc="When the run ends, each tracker gets this long to send its rest.",
      unit="s",
      ge=0,
  )
  request_timeout_s: int = _setting(
      default=10, doc="Deadline of a request to MLflow.", unit="s", ge=1
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
      default=6,
      doc="Episodes drawn in report.html.",
      ge=0,
  )
  film_turns: int = _setting(
      default=12,
      doc="Turns drawn of each of them.",
      ge=2,
  )
  image_width: int = _setting(
      default=960,
      doc="Wider screenshots are scaled down in report.html.",
      unit="px",
      ge=16,
  )
  progress: Literal["auto", "bar", "lines", "none"] = _setting(
      default="auto",
      doc="bar, plain lines, or none. auto: a bar on a terminal, else lines.",
  )
  progress_s: float = _setting(
      default=5.0,
      doc="Smallest time between two progress lines.",
      unit="s",
      ge=0,
  )
  summary_s: float = _setting(
      default=5.0,
      doc="Smallest time between two writes of summary.json while training.",
      unit="s",
      ge=0,
  )
