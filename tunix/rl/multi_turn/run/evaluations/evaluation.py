"""Measures success on the held-out tasks of a run.

Promises: every evaluation of a run plays the same episodes, in the same order:
in each mode of `eval.modes` each task, in mode sampled `eval.attempts` times.
An episode's random numbers depend on run.seed, its task's place and its attempt
alone, so neither the process, nor other episodes, nor a retry changes them. The
results name the weights that the tokens were sampled with (`versions`).

Does not: decide when a run is evaluated (`training` and `train` do).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import logging
import time
from typing import Any, Callable, Mapping, Sequence

from flax import nnx
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.config import train_config
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.core.statistics import success_rates
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.reporting import watchdog
from tunix.rl.multi_turn.run import episodes
from tunix.rl.multi_turn.run import loop_thread
from tunix.rl.multi_turn.run import models
from tunix.rl.multi_turn.run import resuming
from tunix.rl.multi_turn.run import run as run_lib
from tunix.rl.multi_turn.run import tasks as run_tasks
from tunix.rl.multi_turn.trajectory_collector import groups

_REPORT_EVERY = 20  # Episodes between two progress events.


_LOG = logging.getLogger(__name__)
_POLL_S = 0.2


@dataclasses.dataclass
class _UnderWay:
  name: str
  playing: concurrent.futures.Future[dict[str, Any]]
  waited: float = 0.0


class BesideEvaluations:
  """Plays the evaluations of a run while it goes on training.

  A second engine holds a copy of the weights that are evaluated. One evaluation
  is played at a time: `start` begins it, `finished` hands over its results.
  Belongs to the thread of the learner.
  """

  def __init__(self, run: run_lib.Run):
    """Builds the second engine; run.policy gives its first weights."""
    config = run.config
    slots = config.eval.slots or config.engine.slots
    self._run = run
    self._concurrency = episodes.evaluated_beside(config)
    self._planned = plan(config, run_tasks.eval_tasks(config, run.task_source))
    self._engine = models.make_engine(
      dataclasses.replace(
        config, engine=dataclasses.replace(config.engine, slots=slots)
      ),
      run.policy,
      run.images,
    )
    self._now: _UnderWay | None = None

  @property
  def under_way(self) -> str:
    """Name of the evaluation that is being played, "" for none."""
    return "" if self._now is None else self._now.name

  def warm_up(self) -> None:
    """Compiles the second engine's programs, before anything waits for it."""
    self._engine.warm_up()

  def start(self, name: str, step: int, state: nnx.State) -> None:
    """Begins an evaluation; none may be under way.

    Args:
      name: Key of its results in the summary.
      step: the update whose weights are evaluated, at least the one before.
      state: its parameters, a copy.
    """
    if self._now is not None:
      raise RuntimeError(f"evaluation {self._now.name} has not ended")
    run = self._run
    self._engine.update_weights(step, state).result(
      run.config.external.load_timeout_s
    )
    outcomes = Outcomes()

    async def play_all() -> dict[str, Any]:
      await play(
        self._planned,
        lambda mode: collector_of(
          run,
          self._engine,
          mode,
          connection=None,
          concurrency=self._concurrency,
        ),
        lambda mode: run.observers.on_event(
          events.EvalStarted(name, mode, len(self._planned), step)
        ),
        outcomes.add,
      )
      return outcomes.to_json()

    self._now = _UnderWay(name, run.loop.submit(play_all()))

  def finished(self) -> tuple[str, dict[str, Any]] | None:
    """(name, results) of an evaluation that has ended since the last call.

    Raises:
      Exception: The failure that ended it.
    """
    now = self._now
    if now is None or not now.playing.done():
      return None
    self._now = None
    results = merged([now.playing.result()], self._run.config.eval.modes)
    results |= {"beside": True, "seconds_waited": now.waited}
    self._run.observers.on_event(events.EvalFinished(now.name, results))
    return now.name, results

  def wait(self) -> None:
    """Waits until none is under way.

    Raises:
      loop_thread.Interrupted: the run was asked to stop.
      loop_thread.LoopDiedError: no episode is played any more.
    """
    now = self._now
    if now is None:
      return
    since = time.monotonic()
    while not now.playing.done():
      self._run.wait(asyncio.sleep(_POLL_S))
    now.waited += time.monotonic() - since

  def close(self) -> None:
    """Ends the one under way without a result, and the engine. Idempotent."""
    now, self._now = self._now, None
    if now is not None:
      now.playing.cancel()
      timeout_s = loop_thread.STOP_TIMEOUT_S
      if not concurrent.futures.wait([now.playing], timeout_s).done:
        _LOG.warning("%s did not stop within %g s", now.name, timeout_s)
    self._engine.close(loop_thread.STOP_TIMEOUT_S)


@dataclasses.dataclass(frozen=True)
class Planned:
  """An episode of an evaluation.

  Attributes:
    mode: "sampled" or "greedy".
    index: place of the task among the evaluation's.
    attempt: 0 …, at this task.
    task: Task to play.
  """

  mode: str
  index: int
  attempt: int
  task: gym_base.Task

  @property
  def key(self) -> tuple[str, int, str, int]:
    """Identifies it among the episodes of equal settings."""
    task_id = groups.task_id_of(self.task)
    return self.mode, self.index, task_id, self.attempt


Done = Callable[[Planned, trajectory_lib.Trajectory], None]


def plan(
  config: train_config.TrainConfig,
  tasks: Sequence[gym_base.Task],
  number: Callable[[int], int] = lambda place: place,
) -> list[Planned]:
  """The episodes of an evaluation, in their order.

  Args:
    config: Settings with the section `eval`.
    tasks: Tasks to play.
    number: Maps a place in `tasks` to the task's number in the evaluation.
  """
  return [
    Planned(mode, number(place), attempt, task)
    for mode in config.eval.modes
    for place, task in enumerate(tasks)
    for attempt in range(config.eval.attempts if mode == "sampled" else 1)
  ]


async def play(
  planned: Sequence[Planned],
  make_collector: Callable[[str], groups.GroupCollector],
  started: Callable[[str], None],
  on_end: Done,
) -> None:
  """Plays episodes, mode after mode, many at a time.

  Args:
    planned: Episodes in the order of their start.
    make_collector: Mode -> its collector, which plays `concurrency` at a time.
    started: Called with each mode before its episodes.
    on_end: Receives each episode when it ends; an exception ends the others.
  """
  for mode in dict.fromkeys(one.mode for one in planned):
    started(mode)
    of_mode = [one for one in planned if one.mode == mode]
    await _play(make_collector(mode), of_mode, on_end)


async def _play(
  collector: groups.GroupCollector, planned: Sequence[Planned], on_end: Done
) -> None:
  remaining = iter(planned)

  async def work() -> None:
    for one in remaining:
      group = await collector.collect(
        one.task, index=one.index, samples=(one.attempt,)
      )
      (episode,) = group.trajectories
      on_end(one, episode)

  workers = [
    asyncio.ensure_future(work())
    for _ in range(min(collector.config.concurrency, len(planned)))
  ]
  try:
    await asyncio.gather(*workers)
  finally:
    for worker in workers:
      worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)


class Outcomes:
  """Results of the episodes that have ended."""

  def __init__(self):
    self._since = time.monotonic()
    self._found: dict[tuple[str, int, int], success_rates.EpisodeResult] = {}
    self._versions: set[int] = set()

  def __len__(self) -> int:
    return len(self._found)

  def add(self, one: Planned, episode: trajectory_lib.Trajectory) -> None:
    self._found[one.mode, one.index, one.attempt] = (
      success_rates.EpisodeResult.from_trajectory(
        episode, one.task.family, one.mode, groups.task_id_of(one.task)
      )
    )
    for sequence in episode.sequences:
      self._versions |= set(sequence.versions[sequence.loss_mask].tolist())

  def to_json(self) -> dict[str, Any]:
    """For other processes; see `merged`."""
    return {
      "results": [
        dataclasses.asdict(self._found[key]) for key in sorted(self._found)
      ],
      "versions": sorted(self._versions),
      "seconds": time.monotonic() - self._since,
    }


def merged(
  of_all: Sequence[Mapping[str, Any]], modes: Sequence[str]
) -> dict[str, Any]:
  """The JSON of an evaluation, of what each process found.

  Beside the keys of `success_rates.summarise`: `seconds` that it took, and
  `versions` [oldest, newest] of the weights it was sampled with, where tokens
  were recorded.
  """
  results = [
    success_rates.EpisodeResult(**result)
    for process in of_all
    for result in process["results"]
  ]
  summary = success_rates.summarise(results, modes)
  summary["seconds"] = max(process["seconds"] for process in of_all)
  versions = [v for process in of_all for v in process["versions"]]
  if versions:
    summary["versions"] = [min(versions), max(versions)]
  return summary


def evaluate(run: run_lib.Run, name: str) -> dict[str, Any]:
  """Evaluates the engine's present weights; training waits.

  Args:
    run: Run, inside its context.
    name: Name of the evaluation in the summary, e.g. "final".

  Returns:
    The summary by mode and family; see `merged`.

  Raises:
    loop_thread.Interrupted: the run was asked to stop.
    RunStopped: The watchdog ended the run.
  """
  config, processes = run.config, run.processes
  tasks = processes.share(run_tasks.eval_tasks(config, run.task_source))
  planned = plan(config, tasks, processes.number)
  outcomes = Outcomes()

  def done(one: Planned, episode: trajectory_lib.Trajectory) -> None:
    run.watchdog.check()
    outcomes.add(one, episode)
    count = len(outcomes)
    if count % _REPORT_EVERY == 0 or count == len(planned):
      run.observers.on_event(
        events.Progress(f"evaluating {name}", count, len(planned))
      )

  def play_all() -> dict[str, Any]:
    run.wait(
      play(
        planned,
        lambda mode: collector_of(run, run.engine, mode),
        lambda mode: run.observers.on_event(
          events.EvalStarted(name, mode, len(planned), run.updates)
        ),
        done,
      )
    )
    return outcomes.to_json()

  ends = [loop_thread.Interrupted, watchdog.RunStopped]
  of_all = processes.together(f"evaluate {name}", play_all, ends)
  counted = processes.gather("counts", run.counts.of_evaluation())
  if processes.first:
    run.counts.add_evaluation_of_others(counted[1:])
  summary = merged(of_all, config.eval.modes)
  run.evaluated = run.updates, summary
  run.observers.on_event(events.EvalFinished(name, summary))
  return summary


def try_outside_agent(run: run_lib.Run) -> None:
  """Plays one turn with `rollout.agent`, and refuses what no episode survives.

  Such an agent writes its own prompts: how long they are is known once it has
  asked. Does nothing for the run's own agents, which `preflight` checks, and
  with a fleet, whose collectors may come later.

  Raises:
    ConfigError: The prompt does not fit the context, or the run service does
      not play.
    Interrupted: The run was asked to stop.
  """
  config = run.config
  agent = config.rollout.agent
  if not (agent and config.plays) or run.fleet is not None:
    return
  family = config.task_source.families[0]
  task = run.task_source.train_task(family, 0, config.run.seed)
  collector = collector_of(run, run.engine, "sampled", observers=None)
  group = run.wait(
    collector.collect(dataclasses.replace(task, max_turns=1), index=0)
  )
  (episode,) = group.trajectories
  by_service = agent == episodes.RUN_SERVICE
  named = f"rollout.agent={agent}"
  if by_service:
    service = config.run_service
    named += (
      f", run_service.agent={service.agent} at"
      f" run_service.base_url={service.url}"
    )
  status = trajectory_lib.TrajectoryStatus
  context = config.engine.context_length
  if episode.status is status.CONTEXT_LIMIT and not episode.num_sampled:
    raise config_lib.ConfigError(
      [
        f"{named}: the first prompt of task {task.task_id} does not fit"
        f" engine.context_length={context} ({episode.error}); raise"
        " engine.context_length and learner.row_length above it, or choose an"
        " agent with a shorter prompt"
        + (" (run_service.agent=compact)" if by_service else "")
      ]
    )
  if by_service and episode.status is status.MODEL_ERROR:
    raise config_lib.ConfigError(
      [f"{named} does not play task {task.task_id}: {episode.error}"]
    )


def evaluate_last(run: run_lib.Run) -> None:
  """The evaluation at the end of training.

  Where eval.every has evaluated the last update, an evaluation of the same
  weights, tasks and seeds would find the same: those results are the final
  ones. A run that was stopped in between takes them from its summary when it
  resumes with the same settings.
  """
  updates, name = run.updates, f"step_{run.updates}"
  step, results = run.evaluated or (0, None)
  if step != updates:
    results = None
    if run.resuming and not run.changed:
      results = run.processes.of_first(
        name, resuming.evaluations(run.directory).get(name)
      )
  if updates and results:
    run.observers.on_event(events.EvalFinished("final", results, step=updates))
  else:
    evaluate(run, "final")


def collector_of(
  run: run_lib.Run, engine: object, mode: str, **options: Any
) -> groups.GroupCollector:
  """Collects the episodes of a mode with an engine of the run.

  Args:
    run, engine, mode: See `episodes.make_collector`.
    **options: More of its arguments, in place of the run's.
  """
  of_run: dict[str, Any] = {
    "observers": run.observers,
    "connection": run.connection,
  }
  return episodes.make_collector(
    run.config,
    run.episodes,
    engine,
    run.policy.renderer,
    mode=mode,
    **{**of_run, **options},
  )
