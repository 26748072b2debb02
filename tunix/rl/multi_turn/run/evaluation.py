"""Measures success on the held-out tasks of a run.

Promises: every evaluation of a run plays the same tasks, in the same order,
once in each mode of `eval.modes`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import peers as peers_lib
from tunix.rl.multi_turn.core import success_rates
from tunix.rl.multi_turn.run import episodes
from tunix.rl.multi_turn.run import loop_thread
from tunix.rl.multi_turn.run import run as run_lib
from tunix.rl.multi_turn.run import tasks as run_tasks
from tunix.rl.multi_turn.trajectory_collector import groups

_REPORT_EVERY = 20  # Episodes between two progress events.


def evaluate(run: run_lib.Run, name: str) -> dict[str, Any]:
  """Evaluates the engine's present weights.

  Args:
    run: entered.
    name: of the evaluation in the summary, e.g. "final".

  Returns:
    The summary by mode and family; see `success_rates.summarise`.

  Raises:
    loop_thread.Interrupted: the run was asked to stop.
  """
  config = run.config
  processes = run.processes
  tasks = processes.share(run_tasks.eval_tasks(config, run.task_source))
  total = len(tasks) * len(config.eval.modes)
  results: list[success_rates.EpisodeResult] = []

  async def play_all() -> None:
    for mode in config.eval.modes:
      run.observers.on_event(
          events.EvalStarted(name, mode, total, run.updates)
      )
      collector = episodes.make_collector(
          config,
          run.episodes,
          run.engine,
          run.policy.renderer,
          observers=run.observers,
          mode=mode,
          connection=run.connection,
      )
      async for group in groups.iterate_groups(
          collector, tasks, number=processes.number
      ):
        (episode,) = group.trajectories
        family = tasks[len(results) % len(tasks)].family
        results.append(
            success_rates.EpisodeResult.from_trajectory(episode, family, mode)
        )
        if len(results) % _REPORT_EVERY == 0 or len(results) == total:
          run.observers.on_event(
              events.Progress(f"evaluating {name}", len(results), total)
          )

  def play() -> list[dict[str, Any]]:
    run.wait(play_all())
    return [dataclasses.asdict(result) for result in results]

  try:
    of_all = processes.together(f"evaluate {name}", play)
  except peers_lib.PeerError as error:
    if error.kind == loop_thread.Interrupted.__name__:
      raise loop_thread.Interrupted(str(error)) from None
    raise
  if processes.count > 1:
    results = [
        success_rates.EpisodeResult(**result)
        for found in of_all
        for result in found
    ]
  counted = processes.gather("counts", run.counts.of_evaluation())
  if processes.first:
    run.counts.add_evaluation_of_others(counted[1:])
  summary = success_rates.summarise(results, config.eval.modes)
  run.observers.on_event(events.EvalFinished(name, summary))
  return summary
