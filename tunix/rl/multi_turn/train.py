"""Trains a vision-language policy to use a computer.

    python -m tunix.rl.multi_turn.train [config.yaml] [key=value ...]

Composition only: the parts are built by `assembly`, connected here, and run.
Two loops meet at the queue and at the weights: collecting, on an event loop in
a thread of its own, and learning, in the main thread.

A run evaluates random weights (unless its policy is a directory, which brings
its own), makes a warm start, evaluates that, trains with GRPO, and evaluates
the result, all on the same held-out tasks. Its directory
holds config.yaml, metrics.jsonl, summary.json, trajectories.jsonl, images/,
cloning/ (checkpoints while demonstrations are cloned), warm_start/ (the policy
after that), checkpoints/, policy/ (the trained policy) and report.html.

Promises: an interrupt (Ctrl-C) or a failure saves a checkpoint, leaves a
summary and a report that say what happened (the traceback is in
traceback.txt), and tells how to resume; a resumed run trains on no group
twice, goes on with the next task, and makes the evaluations it lacks.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import importlib
import logging
import shlex
import shutil
import signal
import sys
import threading
import time
import traceback
from typing import Any, Callable, Iterator, Sequence

import jax
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.clients import proxy
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import success_rates
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.learner import checkpoint as checkpoint_lib
from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.multi_turn.learner import loop as loop_lib
from tunix.rl.multi_turn.policy import compile_cache
from tunix.rl.multi_turn.policy import host_memory
from tunix.rl.multi_turn.reporting import report
from tunix.rl.multi_turn.reporting import step_metrics
from tunix.rl.multi_turn.run import assembly
from tunix.rl.multi_turn.run import dry_run
from tunix.rl.multi_turn.run import loop_thread
from tunix.rl.multi_turn.run import observers
from tunix.rl.multi_turn.run import proxy as proxy_lib
from tunix.rl.multi_turn.run import resuming
from tunix.rl.multi_turn.run import tasks as run_tasks
from tunix.rl.multi_turn.run.warm_start import cloning
from tunix.rl.multi_turn.run.warm_start import demonstrations
from tunix.rl.multi_turn.run.warm_start import recorded
from tunix.rl.multi_turn.trajectory_collector import collect_loop
from tunix.rl.multi_turn.trajectory_collector import groups as groups_lib
from tunix.rl.queue import group_queue
from tunix.rl.queue import group_store

TrainConfig = config_lib.TrainConfig
ConfigError = config_lib.ConfigError
_LOG = logging.getLogger(__name__)
TRACEBACK = "traceback.txt"
_CLONING = "cloning"


class Run:
  """One training run; use as a context manager."""

  def __init__(self, config: TrainConfig):
    config, self.task_source = run_tasks.resolve(config)
    self.config = config
    self.directory = config.run_dir
    self.resuming = bool(config.run.resume)
    self.stop = threading.Event()
    if self.resuming:
      resuming.check(config)
    self.mesh = assembly.make_mesh(config)
    self.images = images_lib.ImageStore(self.directory / "image_cache")
    self.episodes = assembly.EpisodeFactory(config, self.images)
    # Bad gym options should fail now and not in every episode.
    assembly.try_gym(config, self.task_source)
    self._cloning_steps = config.warm_start.steps
    self._start_from = assembly.warm_start_source(config)
    # A directory's own weights are there from the beginning.
    self.starts_random = self._start_from != config.policy.name or (
        config.policy.name in assembly.BUILT_IN
    )
    self.policy = assembly.make_policy(
        config, self.mesh, "" if self.starts_random else self._start_from
    )
    if not self.starts_random:
      self._start_from = ""
    self._cloned = self.directory / "warm_start"
    if self.resuming and (self._cloned / "config.json").exists():
      self._cloning_steps, self._start_from = 0, str(self._cloned)
      # A run that ended just after it had saved them had no time for that.
      shutil.rmtree(self.directory / _CLONING, ignore_errors=True)
    if self._start_from:
      assembly.check_weights(config, self.policy, self._start_from)
    self._demonstrations = None
    if self._cloning_steps:
      self._demonstrations = recorded.for_run(config, self.task_source)
    self.engine = assembly.make_engine(config, self.policy, self.images)
    self.observers = events.Observers()
    self._loop: loop_thread.LoopThread | None = None
    self._proxy: proxy_lib.RunProxy | None = None
    self._collecting: concurrent.futures.Future[None] | None = None
    self._collect_loop: collect_loop.CollectLoop | None = None
    self._writers: list[Any] = []
    self._updates = 0
    self._store: group_store.SqliteGroupStore | None = None

  @property
  def connection(self) -> proxy.ProxyConnection | None:
    """How episodes reach the engine, if not in this process's own way."""
    return None if self._proxy is None else self._proxy.connection

  # --- life ------------------------------------------------------------------

  def __enter__(self) -> Run:
    try:
      self._claim_directory()
      if self.config.rollout.via == "proxy":
        self._proxy = proxy_lib.RunProxy(
            self.config, self.policy, self.engine, self.images
        )
        self._proxy.start()
    except BaseException:
      self.engine.close(loop_thread.STOP_TIMEOUT_S)
      if self._store is not None:
        self._store.close()
      raise
    self._loop = loop_thread.LoopThread()
    return self

  def _claim_directory(self) -> None:
    config = self.config
    if not self.resuming and (self.directory / "metrics.jsonl").exists():
      raise ConfigError([
          f"run.name={config.run.name}: {self.directory} holds a run already;"
          f" choose another name, or go on with resume={self.directory}"
      ])
    self._store = assembly.make_store(config, self.images)
    self.directory.mkdir(parents=True, exist_ok=True)
    # The file repeats the run, it does not go on with it.
    repeat = dataclasses.replace(config.run, resume="", dry_run=False)
    (self.directory / "config.yaml").write_text(
        dataclasses.replace(config, run=repeat).to_yaml()
    )

  def __exit__(self, *exc_info: Any) -> None:
    self._stop_collecting()
    if self._loop is not None:
      loop_thread.close_shared_browser(self._loop, self.config.gym.name)
      if self._proxy is not None:
        self._proxy.close(
            lambda work: self._loop.submit(work).result(
                loop_thread.STOP_TIMEOUT_S
            )
        )
      if self.config.rollout.via == "external":
        try:
          self._loop.submit(self.engine.aclose()).result(loop_thread.STOP_TIMEOUT_S)
        except Exception as error:  # pylint: disable=broad-except
          # The files are yet to be closed.
          _LOG.warning("the external engine did not close: %r", error)
      self._loop.close()
    self.engine.close(loop_thread.STOP_TIMEOUT_S)
    for writer in self._writers:
      writer.close()
    if self._store is not None:
      self._store.close()

  def attach_observers(self, resume_step: int | None) -> None:
    """Those who are told what the run does."""
    observers.attach(
        self.config,
        self.observers,
        self._writers,
        self.images,
        resume_step=resume_step,
        facts=self._facts,
    )

  def _facts(self) -> dict[str, Any]:
    return {
        "parameters": dry_run.parameter_count(self.policy.model),
        "devices": [str(d) for d in jax.devices()],
        "engine": dict(self.engine.stats()),
        "observer_failures": dict(self.observers.failures),
    }

  # --- stages -----------------------------------------------------------------

  def warm_up(self) -> None:
    """Compiles the engine's programs."""

    def progress(done: int, total: int, what: str) -> None:
      self.observers.on_event(
          events.Progress("compiling the engine", done, total, what)
      )

    self.engine.warm_up(progress)

  def evaluate(self, name: str) -> dict[str, Any]:
    """Success on the held-out tasks in every configured mode."""
    tasks = assembly.eval_tasks(self.config, self.task_source)
    results: list[success_rates.EpisodeResult] = []
    total = len(tasks) * len(self.config.eval.modes)

    async def run_all():
      for mode in self.config.eval.modes:
        self.observers.on_event(
            events.EvalStarted(name, mode, total, self._updates)
        )
        collector = assembly.make_collector(
            self.config,
            self.episodes,
            self.engine,
            self.policy.renderer,
            observers=self.observers,
            mode=mode,
            connection=self.connection,
        )
        async for group in groups_lib.iterate_groups(collector, tasks):
          (episode,) = group.trajectories
          family = tasks[len(results) % len(tasks)].family
          results.append(
              success_rates.EpisodeResult.from_trajectory(episode, family, mode)
          )
          if len(results) % 20 == 0 or len(results) == total:
            self.observers.on_event(
                events.Progress(f"evaluating {name}", len(results), total)
            )

    self._loop.wait(run_all(), self.stop)
    summary = success_rates.summarise(results, self.config.eval.modes)
    self.observers.on_event(events.EvalFinished(name, summary))
    return summary

  def warm_start(self) -> None:
    """Replaces the present weights by the configured start."""
    if self._start_from:
      self.policy = assembly.make_policy(
          self.config, self.mesh, self._start_from
      )
    if self._cloning_steps:
      self._clone()
    self.engine.update_weights(0, self.policy.model).result(
        self.config.external.load_timeout_s
    )

  def _clone(self) -> None:
    """Behaviour cloning on demonstrations by the gym's oracle."""
    config = self.config
    # Demonstrations may have to teach anything: all weights learn from them.
    learner = assembly.make_learner(
        config,
        assembly.without_adapter(self.policy),
        self.images,
        self.mesh,
        cloning=True,
    )
    demonstrator = demonstrations.Demonstrator(
        self.policy.renderer,
        lambda: assembly.make_agent(config),
        self._demonstrations.make_gym
        or (lambda: assembly.make_gym(config, config.gym.tasks[0])),
        self._demonstrations.oracle,
        self.images,
        grid=demonstrations.POINT_GRID,
    )
    with self._cloning_checkpoints(learner) as save:
      cloning.clone(
          learner,
          lambda tasks: self._loop.wait(
              demonstrator.episodes(tasks, config.rollout.concurrency),
              self.stop,
          ),
          self._demonstrations.tasks,
          config.warm_start,
          longest=config.rollout.context_length,
          seed=config.run.seed,
          observers=self.observers,
          done=learner.version,
          after_update=save,
      )
    self.policy = dataclasses.replace(self.policy, model=learner.policy())
    # What a resumed run begins with, and its KL reference.
    assembly.save_policy(config, self._cloned, self.policy.model)
    shutil.rmtree(self.directory / _CLONING)
    assembly.add_adapter(config, self.policy.model)

  @contextlib.contextmanager
  def _cloning_checkpoints(
      self, learner: learner_lib.Learner
  ) -> Iterator[Callable[[], None]]:
    """Restores a learner that had begun, and saves it; also when it ends early.

    Yields:
      What saves it when that is due.
    """
    every = self.config.checkpoint.every
    with checkpoint_lib.LearnerCheckpoints(
        self.directory / _CLONING, keep=1
    ) as checkpoints:
      if self.resuming and checkpoints.steps():
        checkpoints.restore(learner)

      def save_when_due() -> None:
        if every and learner.version % every == 0:
          checkpoints.save(learner)

      try:
        yield save_when_due
      except BaseException:
        checkpoints.wait()
        if learner.version and learner.version not in checkpoints.steps():
          checkpoints.save(learner)
        raise

  def train(self) -> int:
    """GRPO; returns the steps made in all."""
    config = self.config
    learner = assembly.make_learner(
        config, self.policy, self.images, self.mesh
    )
    checkpoints = checkpoint_lib.LearnerCheckpoints(
        self.directory / "checkpoints", keep=config.checkpoint.keep
    )
    extras: dict[str, Any] = {}
    if self.resuming and checkpoints.steps():
      extras = checkpoints.restore(learner)
    if self._store is not None:
      self._store.remove(extras.get(loop_lib.CONSUMED, ()))
    queue = self._make_queue(learner.version)
    metrics = step_metrics.StepMetrics(self.observers, queue, self.engine)
    collecting = self._make_collect_loop(queue, metrics, extras.get("collect"))

    def hold_when_due() -> None:
      # An evaluation's episodes would wait for those of training, which hold
      # what there is of engine slots and browser tabs, and in lockstep for
      # those.
      if self._evaluation_due(learner.counters.updates):
        collecting.hold()

    loop = loop_lib.LearnerLoop(
        learner,
        queue,
        self.engine.update_weights,
        groups_per_step=config.learner.groups_per_step,
        publish_every=config.learner.publish_every,
        observers=metrics,
        checkpoints=checkpoints,
        checkpoint_every=config.checkpoint.every,
        publish_timeout_s=config.external.load_timeout_s,
        extras=lambda: {"collect": collecting.state_dict()},
        updated=hold_when_due,
    )

    def publish_latest() -> None:
      if self.engine.version != learner.version:
        loop.publish()

    def evaluate_when_due() -> None:
      self._updates = learner.counters.updates
      if self._evaluation_due(self._updates):
        publish_latest()
        self.evaluate(f"step_{self._updates}")
      collecting.release()

    started = time.monotonic()
    try:
      loop.publish()
      evaluate_when_due()
      self._collect_loop = collecting
      self._collecting = self._loop.submit(collecting.run())
      while learner.counters.updates < config.learner.steps:
        if self.stop.is_set() or loop.step(self.stop) is None:
          break
        evaluate_when_due()
        budget = config.run.time_budget_s
        if budget and time.monotonic() - started > budget:
          break
    finally:
      self._stop_collecting()
      queue.close()
      if learner.counters.updates:
        loop.save()
        loop.settle()
        assembly.save_policy(
            config, self.directory / "policy", learner.policy()
        )
      checkpoints.close()
    publish_latest()
    self.policy = dataclasses.replace(self.policy, model=learner.policy())
    return self._updates

  def _make_queue(self, version: int) -> group_queue.GroupQueue:
    config = self.config

    def dropped(group: trajectory_lib.TrajectoryGroup, reason: str) -> None:
      self.observers.on_event(events.GroupFinished(group, "dropped", reason))

    return group_queue.GroupQueue(
        config.learner.groups_per_step,
        config.queue.max_staleness,
        capacity=config.queue_capacity,
        order="admission" if config.lockstep else "ready",
        stale_policy=config.queue.stale_policy,
        version=version,
        store=self._store,
        on_drop=dropped,
    )

  def _make_collect_loop(
      self,
      queue: group_queue.GroupQueue,
      metrics: step_metrics.StepMetrics,
      state: dict[str, Any] | None,
  ) -> collect_loop.CollectLoop:
    """What fills the queue; going on from `state` where a run is resumed."""
    config = self.config
    sampler = run_tasks.make_sampler(config, self.task_source)
    if hasattr(sampler, "on_event"):
      self.observers.add(sampler)
    collecting = collect_loop.CollectLoop(
        assembly.make_collector(
            config,
            self.episodes,
            self.engine,
            self.policy.renderer,
            observers=metrics,
            connection=self.connection,
        ),
        sampler,
        queue,
        max_requeues=config.collect.max_requeues,
        task_from_json=gym_base.Task.from_json,
    )
    if self.resuming:
      # Without a checkpoint from the first task: the store may hold groups.
      collecting.load_state_dict(state or collecting.state_dict())
    return collecting

  def _evaluation_due(self, step: int) -> bool:
    every = self.config.eval.every
    if not (every and step and step % every == 0):
      return False
    # Else it was measured before the run was stopped.
    return f"step_{step}" not in resuming.evaluations(self.directory)

  # --- helpers ----------------------------------------------------------------

  def _stop_collecting(self) -> None:
    if self._collect_loop is not None and self._collecting is not None:
      self._collect_loop.stop()
      timeout_s = loop_thread.STOP_TIMEOUT_S
      done, _ = concurrent.futures.wait([self._collecting], timeout_s)
      if not done:
        _LOG.warning("collecting did not stop within %g s", timeout_s)
    self._collecting = None


def execute(run: Run) -> tuple[str, str | None]:
  """All stages of a run; returns its status, and its error if it failed."""
  config = run.config
  step, measured = None, {}
  if run.resuming:
    step = resuming.checkpoint_step(run.directory)
    measured = resuming.stages_measured(run.directory)
  run.attach_observers(step)
  run.observers.on_event(
      events.RunStarted(config.run.name, config.to_dict())
  )
  details = run.directory / TRACEBACK
  details.unlink(missing_ok=True)
  status, error = "completed", None
  try:
    run.warm_up()
    if run.starts_random and "initial" not in measured:
      run.evaluate("initial")
    run.warm_start()
    if "warm_start" not in measured:
      run.evaluate("warm_start")
    if config.learner.steps:
      run.train()
    run.evaluate("final")
  except loop_thread.Interrupted:
    status = "interrupted"
  except BaseException as failure:
    status, error = "failed", f"{type(failure).__name__}: {failure}"
    with contextlib.suppress(OSError):  # Perhaps it is the disk that failed.
      details.write_text(traceback.format_exc())
    if not isinstance(failure, Exception):  # Ctrl-C twice.
      raise
  finally:
    run.observers.on_event(events.RunFinished(status, error))
  return status, error


def _import_modules(names: Sequence[str]) -> None:
  for name in names:
    try:
      importlib.import_module(name)
    except ImportError as error:
      raise ConfigError(
          [f"run.imports: cannot import {name}: {error}"]
      ) from None


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns the exit status."""
  argv = sys.argv[1:] if argv is None else list(argv)
  host_memory.tune()
  try:
    config = config_lib.load_config(argv)
    _import_modules(config.run.imports)
    compile_cache.enable(config.run.compile_cache)
    run = Run(config)
    if config.run.dry_run:
      print(
          dry_run.describe(
              config, run.policy, run.directory, run.engine
          )
      )
      run.engine.close()
      return 0
    return _run_to_end(run)
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2


def _run_to_end(run: Run) -> int:
  def interrupt(signum, frame):
    del frame
    if run.stop.is_set():  # The second time, at once.
      signal.signal(signum, signal.SIG_DFL)
      raise KeyboardInterrupt
    print(
        "\nstopping after this step and saving; press Ctrl-C again to quit at"
        " once",
        file=sys.stderr,
    )
    run.stop.set()

  before = {s: signal.signal(s, interrupt) for s in _stop_signals()}
  try:
    with run:
      print(f"run directory: {run.directory}", file=sys.stderr)
      if hint := host_memory.advice():
        print(f"note: {hint}", file=sys.stderr)
      status, error = execute(run)
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
  if error:
    print(f"error: {error} (see {run.directory / TRACEBACK})", file=sys.stderr)
  page = report.build_report(
      run.directory, observers.report_settings(run.config)
  )
  summaries = resuming.stages_measured(run.directory)
  if summaries:
    print(success_rates.format_table(summaries))
  print(f"report: {page}")
  if status != "completed":
    command = f"resume={shlex.quote(str(run.directory))}"
    print(
        f"{status}; go on with: python -m tunix.rl.multi_turn.train {command}"
    )
  return {"completed": 0, "failed": 1, "interrupted": 130}[status]


def _stop_signals() -> tuple[int, ...]:
  if threading.current_thread() is not threading.main_thread():
    return ()
  return (signal.SIGINT, signal.SIGTERM)


if __name__ == "__main__":
  sys.exit(main())
