"""Trains with GRPO: the collecting loop and the learner's, joined by the queue.

Promises: an interrupt, a failure or a stop by the watchdog leaves a checkpoint
and the policy after the last update; a resumed run trains on no group twice,
continues with the next task, and makes the missing evaluations.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import time
from typing import Any

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.learner import checkpoint as checkpoint_lib
from tunix.rl.multi_turn.learner import loop as loop_lib
from tunix.rl.multi_turn.learner import replay as replay_lib
from tunix.rl.multi_turn.reporting import step_metrics
from tunix.rl.multi_turn.run import episodes
from tunix.rl.multi_turn.run import evaluation
from tunix.rl.multi_turn.run import loop_thread
from tunix.rl.multi_turn.run import models
from tunix.rl.multi_turn.run import resuming
from tunix.rl.multi_turn.run import run as run_lib
from tunix.rl.multi_turn.run import tasks as run_tasks
from tunix.rl.multi_turn.trajectory_collector import collect_loop
from tunix.rl.queue import group_queue
from tunix.rl.queue import group_store

_LOG = logging.getLogger(__name__)


class Training:
  """The GRPO stage of a run; call `run` once."""

  def __init__(self, run: run_lib.Run):
    """Builds the learner, queue and collecting loop, restored if resuming."""
    self._run = run
    config = run.config
    self._config = config
    self._learner = models.make_learner(
        config, run.policy, run.images, run.mesh, run.processes, run.teacher
    )
    self._checkpoints = checkpoint_lib.LearnerCheckpoints(
        run.directory / "checkpoints", config.checkpoint
    )
    extras: dict[str, Any] = {}
    if run.resuming and self._checkpoints.steps():
      extras = self._own(self._checkpoints.restore(self._learner))
    if run.store is not None:
      run.store.remove(extras.get(loop_lib.CONSUMED, ()))
    if run.resuming:
      stored = None if run.store is None else run.store.load()
      run.counts.restore_training(
          extras.get("counts"),
          None if stored is None else [group for _, group in stored],
      )
    self._queue = self._make_queue(self._learner.version)
    metrics = step_metrics.StepMetrics(
        run.observers, self._queue, run.engine
    )
    self._collecting = self._make_collect_loop(metrics, extras.get("collect"))
    self._collected: concurrent.futures.Future[None] | None = None
    self._replayed: group_store.SqliteGroupStore | None = None
    self._loop = loop_lib.LearnerLoop(
        self._learner,
        self._queue,
        run.publish,
        observers=metrics,
        checkpoints=self._checkpoints,
        publish_timeout_s=config.external.load_timeout_s,
        extras=self._extras,
        updated=self._hold_when_due,
        processes=run.processes,
        replay=self._make_replay(),
    )

  def _own(self, extras: dict[str, Any]) -> dict[str, Any]:
    """The part of a checkpoint's extras that this process gave.

    Raises:
      ConfigError: another number of processes saved it.
    """
    processes, parts = self._run.processes, extras.get(loop_lib.PROCESSES)
    saved = len(parts or [extras])
    if saved != processes.count:
      raise config_lib.ConfigError([
          f"the checkpoint is of {saved} processes, each with tasks of its own,"
          f" and this run has {processes.count}; resume with {saved}"
      ])
    return extras | parts[processes.index] if parts else extras

  def _extras(self) -> dict[str, Any]:
    """State of the run that a checkpoint keeps beside the learner's."""
    return {
        "collect": self._collecting.state_dict(),
        "counts": self._run.counts.training(),
        resuming.RECORDED: resuming.recorded(self._config).to_dict(),
    }

  def run(self) -> None:
    """Updates until learner.steps, an interrupt or the time budget."""
    run, config = self._run, self._config
    budget, started = config.run.time_budget_s, time.monotonic()
    try:
      self._loop.publish()
      self._evaluate_when_due()
      if self._is_unfinished():
        self._collected = run.loop.submit(self._collecting.run())
        run.loop.on_death(self._queue.fail)
      run.watchdog.on_stop(self._queue.fail)
      while self._is_unfinished():
        stop = run.stop.is_set() or (
            budget and time.monotonic() - started > budget
        )
        if run.processes.any("stop", stop):
          break
        if self._loop.step(run.stop) is None:
          break
        run.share_counts()
        run.processes.together("watch", run.watchdog.check)
        self._evaluate_when_due()
    except group_queue.QueueFailed:
      run.watchdog.check()
      raise
    finally:
      self._end()
    self._publish_latest()
    run.policy = dataclasses.replace(
        run.policy, model=self._learner.policy()
    )

  def _is_unfinished(self) -> bool:
    return self._learner.counters.updates < self._config.learner.steps

  def _end(self) -> None:
    """Stops collecting and saves; also after a failure."""
    self._stop_collecting()
    self._queue.close()
    if self._learner.counters.updates:
      self._loop.save()
      self._loop.settle()
      self._run.save_policy("policy", self._learner.policy())
    self._checkpoints.close()
    if self._replayed is not None:
      self._replayed.close()

  def _stop_collecting(self) -> None:
    if self._collected is None:
      return
    self._collecting.stop()
    timeout_s = loop_thread.STOP_TIMEOUT_S
    done, _ = concurrent.futures.wait([self._collected], timeout_s)
    if not done:
      _LOG.warning("collecting did not stop within %g s", timeout_s)
    self._collected = None

  def _publish_latest(self) -> None:
    if self._run.engine.version != self._learner.version:
      self._loop.publish()

  # --- evaluations -----------------------------------------------------------

  def _hold_when_due(self) -> None:
    # Episodes of an evaluation would wait for those of training, which hold
    # all engine slots and browser tabs, and in lockstep for their sessions.
    # After the last update nothing is left to collect for.
    due = self._evaluation_due(self._learner.counters.updates)
    if due or not self._is_unfinished():
      self._collecting.hold()

  def _evaluate_when_due(self) -> None:
    run = self._run
    run.updates = self._learner.counters.updates
    if self._evaluation_due(run.updates):
      self._publish_latest()
      evaluation.evaluate(run, f"step_{run.updates}")
    if self._is_unfinished():
      self._collecting.release()

  def _evaluation_due(self, step: int) -> bool:
    every = self._config.eval.every
    if not (every and step and step % every == 0):
      return False
    # Measured already if the run was stopped after it.
    measured = resuming.evaluations(self._run.directory)
    name = f"step_{step}"
    return self._run.processes.of_first(name, name not in measured)

  # --- parts -----------------------------------------------------------------

  def _make_queue(self, version: int) -> group_queue.GroupQueue:
    config, observers = self._config, self._run.observers

    def dropped(group: trajectory_lib.TrajectoryGroup, reason: str) -> None:
      observers.on_event(events.GroupFinished(group, "dropped", reason))

    return group_queue.GroupQueue(
        self._learner.groups_per_step,
        config.queue,
        order="admission" if config.lockstep else "ready",
        version=version,
        store=self._run.store,
        on_drop=dropped,
    )

  def _make_replay(self) -> replay_lib.SuccessReplay | None:
    """Of recent successes, durable where the queue is; None without."""
    age = self._config.learner.success_replay
    if not age:
      return None
    if not self._config.queue.path:
      return replay_lib.SuccessReplay(age)
    self._replayed = group_store.SqliteGroupStore(
        self._run.own_directory / "replay.db", images=self._run.images
    )
    return replay_lib.SuccessReplay(age, self._replayed)

  def _make_collect_loop(
      self, metrics: step_metrics.StepMetrics, state: dict[str, Any] | None
  ) -> collect_loop.CollectLoop:
    """The loop that fills the queue, from `state` where a run is resumed."""
    run, config = self._run, self._config
    sampler = run_tasks.make_sampler(config, run.task_source)
    if hasattr(sampler, "on_event"):
      run.observers.add(sampler)
    if run.processes.count > 1:
      sampler = run_tasks.DealtTasks(sampler, run.processes)
    collecting = collect_loop.CollectLoop(
        episodes.make_collector(
            config,
            run.episodes,
            run.engine,
            run.policy.renderer,
            observers=metrics,
            connection=run.connection,
        ),
        sampler,
        self._queue,
        task_from_json=gym_base.Task.from_json,
        number=run.processes.number,
    )
    if run.resuming:
      # Also without a checkpoint: the store may hold groups.
      collecting.load_state_dict(state or collecting.state_dict())
    return collecting
