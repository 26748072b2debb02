"""Who is told what a run does: the run directory, trackers, the monitor.

Does not make events.
"""

from __future__ import annotations

import sys
from typing import Any, Callable

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import reporting
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.reporting import trackers
from tunix.rl.multi_turn.run import assembly
from tunix.rl.multi_turn.run import monitor as monitor_lib


def attach(
    config: config_lib.TrainConfig,
    observers: events.Observers,
    writers: list[Any],
    images: images_lib.ImageStore,
    *,
    resume_step: int | None,
    facts: Callable[[], dict[str, Any]],
) -> None:
  """Progress, metrics, trajectories and summary into the run directory, and
  who else is configured.

  Args:
    config: names them.
    observers: to which they are added.
    writers: to which is added what has to be closed when the run is over, as
      soon as it is open: a later one may fail.
    images: screenshots of the trajectories.
    resume_step: updates that a run had when it is gone on with; None: new.
    facts: what the summary says beside what it hears.
  """
  directory = config.run_dir
  trajectories = reporting.TrajectoryWriter(
      directory,
      images if config.report.images else None,
      limit=config.report.episodes,
      resume=bool(config.run.resume),
  )
  metrics = reporting.MetricsWriter(
      directory / "metrics.jsonl", resume_step=resume_step
  )
  writers += [trajectories, metrics]
  for observer in (
      metrics,
      trajectories,
      reporting.SummaryWriter(
          directory / "summary.json", resume_step=resume_step, extra=facts
      ),
      reporting.ProgressBar(
          config.learner.steps,
          mode=config.report.progress,
          start=resume_step or 0,
      ),
  ):
    observers.add(observer)
  for tracker in trackers.of_run(config.tracking, directory, resume_step):
    writers.append(tracker)
    observers.add(tracker)
  if config.monitor.on:
    monitor = monitor_lib.RunMonitor(
        config,
        images,
        resume_step=resume_step,
        tokenizer=assembly.tokenizer_file(config),
    )
    writers.append(monitor)
    observers.add(monitor.observer)
    print(f"training monitor: {monitor.url}", file=sys.stderr)
