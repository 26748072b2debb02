"""Reports on a run: observers of the run directory, trackers, the report.

Names are imported on first use, so that the modules also run as programs.
"""

import importlib

_HOMES = {
  "MetricsWriter": "metrics_writer",
  "ProgressBar": "progress",
  "RunCounts": "run_counts",
  "SummaryWriter": "summary_writer",
  "TraceWriter": "trace_writer",
  "Tracker": "trackers",
  "TrajectoryWriter": "trajectory_writer",
  "build_report": "report",
  "engine_metrics": "metrics",
  "group_metrics": "metrics",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
  if name not in _HOMES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
