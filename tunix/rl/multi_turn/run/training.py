"""Trains with GRPO: the collecting loop and the learner's, joined by the queue.

Promises: an interrupt, a failure or a stop by the watchdog leaves a checkpoint
and the policy after the last update; a resumed run trains on no group twice,
continues with the next task, and makes the missing evaluations, each of the
weights of its update.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import math
import time
from typing import Any

from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.learner import checkpoint as checkpoint_lib
from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.multi_turn.learner import loop as loop_lib
from tunix.rl.multi_turn.learner.batches import replay as replay_lib
from tunix.rl.multi_turn.net import peers as peers_lib
from tunix.rl.multi_turn.reporting import step_metrics
from tunix.rl.multi_turn.reporting import watchdog as watchdog_lib
from tunix.rl.multi_turn.run import loop_thread
from tunix.rl.multi_turn.run import recorded_data
from tunix.rl.multi_turn.run import resuming
from tunix.rl.multi_turn.run import run as run_lib
from tunix.rl.multi_turn.run import tasks as run_tasks
from tunix.rl.multi_turn.run.evaluations import best_checkpoint
from tunix.rl.multi_turn.run.evaluations import evaluation
from tunix.rl.multi_turn.run.multiprocess import process_layout
from tunix.rl.multi_turn.trajectory_collector import collect_loop
from tunix.rl.multi_turn.trajectory_collector import feed_loop
from tunix.rl.queue import group_queue
from tunix.rl.queue import group_store

_LOG = logging.getLogger(__name__)


def _nothing_learned(
  counters: learner_lib.LearnerCounters, uneven: bool
) -> str:
  """Why training has taught the policy nothing; "" where it may have.

  Args:
    counters: Of the learner, at the end.
    uneven: Whether the rewards of a group differed in any update.
  """
  if not counters.updates:
    return (
      "completed without an update: no group of valid episodes reached the"
      " learner, and the policy is the one that the run began with; see the"
      " faults in summary.json"
    )
  if counters.optimizer_steps and uneven:
    return ""
  what = (
    "completed without an update"
    if not counters.optimizer_steps
    else ("nothing was learned from rewards")
  )
  if counters.skipped_steps and not counters.optimizer_steps:
    return (
      f"{what}: no gradient was finite in {counters.updates} steps of the"
      " learner; lower learner.learning_rate"
    )
  return (
    f"{what}: the episodes of each group got the same reward in all"
    f" {counters.updates} steps of the learner; check environment.reward,"
    " clone demonstrations first (warm_start.steps), or choose tasks that the"
    " policy solves sometimes"
  )


class Training:
  """The GRPO stage of a run; call `run` once."""

  def __init__(self, run: run_lib.Run):
    """Builds the learner, queue and collecting loop, restored if resuming."""
    self._run = run
    config = run.config
    self._config = config
    self._learner = run.make_learner()
    self._checkpoints = checkpoint_lib.LearnerCheckpoints(
      run.directory / "checkpoints", config.checkpoint
    )
    extras: dict[str, Any] = {}
    if run.resuming and self._checkpoints.steps():
      step = resuming.checkpoint_step(config)
      extras = process_layout.own_extras(
        self._checkpoints.restore(self._learner, step), run.processes, config
      )
      if self._checkpoints.delete_newer(step) and run.store is not None:
        # Of weights that the run has not got yet.
        run.store.remove(run.store.known())
    if run.store is not None:
      run.store.remove(extras.get(loop_lib.CONSUMED, ()))
    if run.resuming:
      stored = None if run.store is None else run.store.load()
      run.counts.restore_training(
        extras.get("counts"),
        None if stored is None else [group for _, group in stored],
      )
    self._best = self._best_so_far()
    self._beside: evaluation.BesideEvaluations | None = None
    if config.eval.beside and config.eval.every:
      self._beside = evaluation.BesideEvaluations(run)
      self._checkpoints.pinned |= set(self._unevaluated())
    self._queue = self._make_queue(self._learner.version)
    metrics = step_metrics.StepMetrics(
      run.observers, self._queue, run.engine, run.processes
    )
    self._collecting = self._make_collecting(metrics, extras)
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
      parts=config.collect.parts,
      # An engine elsewhere may serve the next request with older weights.
      publish_ahead=config.queue.max_staleness > 0
      and config.rollout.via != "external",
      processes=run.processes,
      share_timeout_s=config.processes.share_s or None,
      replay=self._make_replay(),
      experts=bool(config.collect.expert_share),
      prepare=self._prepared,
    )

  def _extras(self) -> dict[str, Any]:
    """State of the run that a checkpoint keeps beside the learner's."""
    state = {
      "collect": self._collecting.state_dict(),
      "counts": self._run.counts.training(),
      resuming.RECORDED: resuming.recorded(self._config).to_dict(),
    }
    if self._config.rollout.via == "buffer":
      # The number of the last update: of a rollout, where none was dropped.
      state["rollout_id"] = self._learner.counters.updates - 1
    return state

  def _prepared(
    self, groups: list[trajectory_lib.TrajectoryGroup]
  ) -> list[trajectory_lib.TrajectoryGroup]:
    """The groups of an update, as the learner takes them."""
    if self._config.rollout.via == "buffer":
      return recorded_data.prepared(self._learner, groups)
    if self._config.collects:
      return groups
    return recorded_data.fill_logprobs(self._learner, groups)

  def run(self) -> None:
    """Updates until learner.steps or the time budget.

    Raises:
      loop_thread.Interrupted: the run was asked to stop; all is saved.
    """
    run, config = self._run, self._config
    budget, started = config.run.time_budget_s, time.monotonic()
    uneven = run.resuming  # Whether a group's rewards differed.
    try:
      if self._beside is not None:
        self._beside.warm_up()
      self._publish_latest(always=True)
      self._evaluate_when_due()
      if self._is_unfinished():
        self._collected = run.loop.submit(self._collecting.run())
        run.loop.on_death(self._queue.fail)
      run.watchdog.on_stop(self._queue.fail)
      while self._is_unfinished():
        spent = bool(budget) and time.monotonic() - started > budget
        if run.processes.any("stop", spent or run.stop.is_set()):
          if spent:
            run.notes.append(
              f"run.time_budget_s={budget:g} ended training after"
              f" {self._learner.counters.updates} of"
              f" learner.steps={config.learner.steps} updates"
            )
          break
        try:
          metrics = self._loop.step(run.stop)
          if metrics is None:
            break
          even = metrics.get("zero_advantage_groups", 0.0)
          uneven = uneven or even < metrics.get("groups", math.inf)
        except group_queue.QueueClosed:
          if not self._collecting.over:
            raise
          _LOG.warning(
            "%s; all were trained on or are reported as dropped, and the run"
            " ends after %d of learner.steps=%d updates",
            self._collecting.over,
            self._learner.counters.updates,
            config.learner.steps,
          )
          break
        with self._loop.seconds("report"):
          run.share_counts()
          self._watch()
        self._evaluate_when_due()
      if self._beside is not None and not run.stop.is_set():
        self._await_beside(self._beside)
    except group_queue.QueueFailed:
      self._watch()
      raise
    except peers_lib.PeerError as error:
      if error.kind == group_queue.QueueFailed.__name__:
        self._watch()
      raise
    except BaseException as error:
      run.processes.part(error)
      raise
    finally:
      self._end()
    run.policy = dataclasses.replace(run.policy, model=self._learner.policy())
    if self._is_unfinished() and run.processes.any(
      "interrupted", run.stop.is_set()
    ):
      raise loop_thread.Interrupted()
    self._publish_latest()
    if nothing := _nothing_learned(self._learner.counters, uneven):
      run.notes.append(nothing)

  def _watch(self) -> None:
    """Ends the run in every process where a watchdog ended it in one.

    Raises:
      RunStopped: a watchdog did.
    """
    self._run.processes.together(
      "watch", self._run.watchdog.check, [watchdog_lib.RunStopped]
    )

  def _is_unfinished(self) -> bool:
    return self._learner.counters.updates < self._config.learner.steps

  def _end(self) -> None:
    """Stops collecting and saves; also after a failure."""
    self._stop_collecting()
    if self._beside is not None:
      self._beside.close()
    self._queue.close()
    try:
      self._save_last()
      self._collecting.finish()
    finally:
      if self._replayed is not None:
        self._replayed.close()

  def _save_last(self) -> None:
    if self._run.processes.parted:  # No checkpoint without the others.
      return
    if self._learner.counters.updates:
      self._loop.save()
      self._loop.settle()
      self._run.save_policy("policy", self._learner.policy())
    self._checkpoints.close()

  def _stop_collecting(self) -> None:
    if self._collected is None:
      return
    self._collecting.stop()
    timeout_s = loop_thread.STOP_TIMEOUT_S
    ended, _ = concurrent.futures.wait([self._collected], timeout_s)
    if not ended:
      _LOG.warning("collecting did not stop within %g s", timeout_s)
    self._collected = None

  def _publish_latest(self, always: bool = False) -> None:
    """Gives the engine the present weights, unless it has them.

    Raises:
      loop_thread.Interrupted: the run was asked to stop before they arrived.
    """
    stop = self._run.stop
    arrived = self._loop.await_weights(stop)
    if arrived and (
      always or self._run.engine.version != self._learner.version
    ):
      arrived = self._loop.publish(stop)
    if not arrived:
      raise loop_thread.Interrupted()

  # --- evaluations -----------------------------------------------------------

  def _hold_when_due(self) -> None:
    # Episodes of an evaluation would wait for those of training, which hold
    # all engine slots and browser tabs, and in lockstep for their sessions.
    # After the last update nothing is left to collect for.
    due = self._evaluation_due(self._learner.counters.updates)
    if (due and self._beside is None) or not self._is_unfinished():
      self._collecting.hold()

  def _evaluate_when_due(self) -> None:
    run = self._run
    run.updates = self._learner.counters.updates
    due = self._evaluation_due(run.updates)
    if self._beside is not None:
      with self._loop.seconds("evaluate"):
        self._evaluate_beside(self._beside, due)
    elif due:
      name = f"step_{run.updates}"
      self._publish_latest()
      if self._config.checkpoint.keep_best:
        self._save_pinned(run.updates)
      with self._loop.seconds("evaluate"):
        results = evaluation.evaluate(run, name)
      self._consider(run.updates, results)
    if self._is_unfinished():
      self._collecting.release()

  def _evaluate_beside(
    self, evaluations: evaluation.BesideEvaluations, due: bool
  ) -> None:
    self._take_finished(evaluations)
    step = self._run.updates
    if due:
      self._save_pinned(step)
      self._await_beside(evaluations)
    if not evaluations.under_way:
      # Those that an earlier start of the run has left.
      for step in self._unevaluated():
        if due and step == self._run.updates:
          state = self._learner.policy_state()
        else:
          state = self._checkpoints.restore_parameters(
            self._run.policy.model, step
          )
        evaluations.start(f"step_{step}", step, state)
        if due and step != self._run.updates:
          self._await_beside(evaluations)
          continue
        break

  def _await_beside(self, evaluations: evaluation.BesideEvaluations) -> None:
    with self._loop.seconds("evaluate"):
      evaluations.wait()
    self._take_finished(evaluations)

  def _take_finished(self, evaluations: evaluation.BesideEvaluations) -> None:
    if (result := evaluations.finished()) is not None:
      name, results = result
      step = int(name.removeprefix("step_"))
      self._run.evaluated = step, results
      if self._best is None or self._best.step != step:
        self._checkpoints.pinned.discard(step)
      self._consider(step, results)

  def _unevaluated(self) -> list[int]:
    """Updates with a checkpoint whose evaluation is missing."""
    return [s for s in self._checkpoints.steps() if self._evaluation_due(s)]

  def _save_pinned(self, step: int) -> None:
    """Saves the present update; its checkpoint stays until it is let go."""
    self._checkpoints.pinned.add(step)
    self._loop.save()

  # --- the best update -------------------------------------------------------

  def _best_so_far(self) -> best_checkpoint.Best | None:
    run = self._run
    if not (self._config.checkpoint.keep_best and run.resuming):
      return None
    best = best_checkpoint.load(run.directory)
    if best is None:
      return None
    if best.step not in self._checkpoints.steps():
      _LOG.warning(
        "checkpoint %d, the best by %s, is not there any more; the best of"
        " the evaluations to come is kept",
        best.step,
        best.metric,
      )
      return None
    self._checkpoints.pinned.add(best.step)
    return best

  def _consider(self, step: int, results: dict[str, Any]) -> None:
    """Keeps an evaluated update's checkpoint if it is the best so far."""
    metric = self._config.checkpoint.keep_best
    if not metric:
      return
    best = best_checkpoint.better(metric, step, results, self._best)
    if best is None:
      self._checkpoints.pinned.discard(step)
      return
    self._checkpoints.pinned.add(step)
    self._loop.settle()  # It is on the disk before it is named.
    if self._run.processes.first:
      best_checkpoint.save(self._run.directory, best)
    if self._best is not None:
      self._checkpoints.pinned.discard(self._best.step)
    self._best = best

  def _evaluation_due(self, step: int) -> bool:
    every = self._config.eval.every if self._config.evaluates else 0
    if not (every and step and step % every == 0):
      return False
    # Measured already if the run was stopped after it.
    measured = resuming.evaluations(self._run.directory)
    name = f"step_{step}"
    return self._run.processes.of_first(name, name not in measured)

  # --- parts -----------------------------------------------------------------

  def _make_queue(self, version: int) -> group_queue.GroupQueue:
    config, observers = self._config, self._run.observers
    groups_per_step = self._learner.groups_per_step * config.collect.parts
    settings = config.queue
    if config.rollout.via == "offline":
      settings = recorded_data.queue_config(groups_per_step)

    def dropped(group: trajectory_lib.TrajectoryGroup, reason: str) -> None:
      observers.on_event(events.GroupFinished(group, "dropped", reason))

    return group_queue.GroupQueue(
      groups_per_step,
      settings,
      # One order for all collectors, where a step has all groups anyway.
      order="admission"
      if config.lockstep
      or (config.fleet.away and config.queue.max_staleness == 0)
      else "ready",
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

  def _make_collecting(
    self, metrics: step_metrics.StepMetrics, extras: dict[str, Any]
  ) -> feed_loop.FeedLoop:
    """Returns the loop that fills the queue, restored from `extras`."""
    run, config = self._run, self._config
    state = extras.get("collect")
    consumed = extras.get(loop_lib.CONSUMED, ())
    if config.rollout.via == "offline":
      return recorded_data.make_offline(run, self._queue, state, consumed)
    if config.rollout.via == "buffer":
      return recorded_data.make_buffer_loop(
        run, self._queue, metrics, state, consumed
      )
    sampler = run_tasks.make_sampler(config, run.task_source)
    if hasattr(sampler, "on_event"):
      run.observers.add(sampler)
    if run.processes.count > 1:
      sampler = run_tasks.DealtTasks(sampler, run.processes)
    collecting = collect_loop.CollectLoop(
      evaluation.collector_of(run, run.engine, "train", observers=metrics),
      sampler,
      self._queue,
      task_from_json=gym_base.Task.from_json,
      number=run.processes.number,
    )
    if run.resuming:
      # Also without a checkpoint: the store may hold groups.
      collecting.load_state_dict(state or collecting.state_dict())
    return collecting
