"""Attaches a run's observers: progress, metrics and trajectory files, summary,
trackers, the timeline, the Training Monitor.

Does not: make events.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any, Callable

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import reporting
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.reporting import trackers
from tunix.rl.multi_turn.run import models
from tunix.rl.multi_turn.run import monitor as monitor_lib


def attach(
  config: config_lib.TrainConfig,
  observers: events.Observers,
  writers: list[Any],
  images: images_lib.ImageStore,
  *,
  directory: pathlib.Path,
  resume_step: int | None,
  facts: Callable[[], dict[str, Any]],
  counts: reporting.RunCounts,
) -> str:
  """Opens the configured observers and adds them.

  Args:
    config: Settings of the run.
    observers: receives them.
    writers: receives each one that must be closed after the run, as soon as it
      is open: a later one may fail.
    images: screenshots of the trajectories.
    directory: Folder of their files; another than the run's in a process that
      is
      not the first, which writes its trajectories only.
    resume_step: step of the checkpoint that the run resumes from; None for a
      new run.
    facts: more keys of summary.json.
    counts: receives what it counts.

  Returns:
    the address of its Training Monitor, "" without one.
  """
  report = config.report
  trajectories = reporting.TrajectoryWriter(
    directory,
    images,
    report,
    resume=bool(config.run.resume),
    trains=bool(config.learner.steps or config.warm_start.steps),
  )
  if directory != config.run_dir:
    writers.append(trajectories)
    observers.add(trajectories)
    observers.add(counts)
    return ""
  metrics = reporting.MetricsWriter(
    directory / "metrics.jsonl", resume_step=resume_step
  )
  writers += [trajectories, metrics]
  for observer in (
    metrics,
    trajectories,
    reporting.SummaryWriter(
      directory / "summary.json",
      resume_step=resume_step,
      last_metrics=metrics.last,
      counts=counts,
      extra=facts,
    ),
    reporting.ProgressBar(config.learner.steps, report, start=resume_step or 0),
  ):
    observers.add(observer)
  for tracker in trackers.of_run(
    config.tracking, directory, resume_step, images
  ):
    writers.append(tracker)
    observers.add(tracker)
  trace = None
  if report.profile:
    trace = reporting.TraceWriter(directory, report, resume_step=resume_step)
    writers.append(trace)
    observers.add(trace)
  if config.monitor.on:
    monitor = monitor_lib.RunMonitor(
      config,
      images,
      resume_step=resume_step,
      tokenizer=models.tokenizer_file(config),
    )
    writers.append(monitor)
    observers.add(monitor.observer)
    if trace is not None:
      trace.uploader = monitor.observer.readings
    print(f"training monitor: {monitor.url}", file=sys.stderr)
    return monitor.url
  return ""
