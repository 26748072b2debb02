"""Holds the parts of one training run, and opens and closes them.

Two loops meet at the queue and at the weights: collecting, on an event loop in
a thread of its own, and learning, in the main thread. The stages themselves
are elsewhere: `warm_start.stage`, `evaluation`, `training`.

Several processes may make one run (see `processes`): each rolls out with its
own devices and plays its share of the tasks, all learn together on one mesh,
and process 0 writes the run directory, which all of them see. The others keep
their images, queue and trajectories in its subdirectory `processes`.

Promises: a bad configuration is refused before anything in the run directory is
changed; one process at a time has the directory, from before it is read until
every part is closed (`run_lock`); every part that was opened is closed, each
under its deadline, whatever the stages do.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, Coroutine, TYPE_CHECKING

from flax import nnx
import jax
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import reporting
from tunix.rl.multi_turn.core import durable
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.engine import device_state
from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import peers as peers_lib
from tunix.rl.multi_turn.planning import dry_run
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import host_memory
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.reporting import watchdog as watchdog_lib
from tunix.rl.multi_turn.run import before_jax
from tunix.rl.multi_turn.run import disk_full
from tunix.rl.multi_turn.run import episodes
from tunix.rl.multi_turn.run import first_episode
from tunix.rl.multi_turn.run import fleet
from tunix.rl.multi_turn.run import interrupts
from tunix.rl.multi_turn.run import learner_ahead
from tunix.rl.multi_turn.run import loop_thread
from tunix.rl.multi_turn.run import models
from tunix.rl.multi_turn.run import observers as observers_lib
from tunix.rl.multi_turn.run import preflight
from tunix.rl.multi_turn.run import recorded_data
from tunix.rl.multi_turn.run import resuming
from tunix.rl.multi_turn.run import run_lock
from tunix.rl.multi_turn.run import tasks as run_tasks
from tunix.rl.multi_turn.run.multiprocess import peer_watch
from tunix.rl.multi_turn.run.multiprocess import process_layout
from tunix.rl.multi_turn.run.multiprocess import processes as processes_lib
from tunix.rl.multi_turn.run.warm_start import stage as warm_start_lib
from tunix.rl.queue import group_store

if TYPE_CHECKING:
  from tunix.rl.multi_turn.clients import proxy as proxy_lib
  from tunix.rl.multi_turn.run import proxy
  from tunix.rl.multi_turn.run.fleet import service as fleet_lib
  from tunix.rl.multi_turn.run.recorded_data import files


class Run:
  """One training run; use as a context manager.

  Attributes:
    config: complete, with the task families named.
    processes: Processes of the run.
    directory: Directory of the run.
    own_directory: Directory of this process; the same in process 0.
    resuming: whether it continues a run that began before.
    changed: settings that a resumed run changes, each with its old value.
    stop: set to end the run after the present update.
    policy: the present one, on `mesh`.
    memory: Memory that the run takes, and the memory available.
    engine: rolls out.
    episodes: task -> (agent, environment).
    watchdog: judges the metrics.
    counts: Counts of episodes, groups and faults.
    updates: made so far, as far as evaluations are concerned.
    notes: Sentences about the end that a reader must know, e.g. that nothing
      was learned.
    evaluated: (updates, results) of the last evaluation, or None.
    store: accepted groups that survive a crash, or None.
    recorded: groups of offline.path; None without.
    fleet: collectors in other processes, or None.
  """

  def __init__(
    self,
    config: config_lib.TrainConfig,
    processes: peers_lib.Peers = peers_lib.ALONE,
    task_source: Any = None,
  ):
    """Builds the parts; changes no directory, but locks one that it resumes.

    Args:
      config: equal in all processes.
      processes: Processes of the run; each calls the same methods.
      task_source: As `before_jax.checked` returned it with `config`.

    Raises:
      ConfigError: lists the parts that cannot be built, or names the process
        that has the run.
      PeerError: another process cannot build them.
    """
    self.processes = processes
    processes_lib.check(processes, config)
    self.directory = config.run_dir
    self.own_directory = process_layout.directory_of(
      self.directory, processes.index
    )
    self.resuming = bool(config.run.resume)
    self.changed: list[str] = []
    self.task_source = task_source
    self._lock: run_lock.RunLock | None = None
    if self.resuming:
      resuming.check_directory(config)
      if not config.run.dry_run:
        # Before anything is read: another process may be about to change it.
        processes.together("lock", self._take_lock)
    try:
      processes.together("build", lambda: self._build(config))
    except BaseException:
      loop_thread.close_parts(self._lock)
      raise

  def _build(self, config: config_lib.TrainConfig) -> None:
    if self.resuming:
      resuming.check_file(config)
    was_tried = self.task_source is not None
    if config.plays and not was_tried:
      config, self.task_source = run_tasks.resolve(config)
    self.config = config
    if self.resuming:
      self.changed = resuming.check(config)
      resuming.checkpoint_step(config)
    self.stop = threading.Event()
    preflight.before_building(config)
    self.mesh = models.make_mesh(config)
    self.images = images_lib.ImageStore(self.own_directory / "image_cache")
    self.episodes = episodes.EpisodeFactory(config, self.images)
    # It is tried once.
    if config.plays and self.processes.index == 0 and not was_tried:
      first_episode.try_first_episode(config, self.episodes, self.task_source)
    self.warm_start = warm_start_lib.WarmStart(
      config,
      self.mesh,
      self.task_source,
      self.episodes.tool_schemas,
      self.processes,
    )
    self.policy = self.warm_start.policy
    self.teacher = models.make_teacher(config, self.policy, self.mesh)
    self.memory = preflight.with_policy(
      config, self.policy, self.episodes.make_agent(), self.mesh
    )
    self._copies: sharding.HostCopies | None = None
    if self.mesh is not None and self.processes.count > 1:
      self._copies = sharding.HostCopies(self.mesh)
    self._to_engine: sharding.Copies | None = self._copies
    if self.mesh is not None and config.mesh.engine:
      own = jax.devices()[config.mesh.devices :]
      types = device_state.types_to_send(
        self.policy.model, config.engine.weights
      )
      self._to_engine = sharding.EngineCopies(self.mesh, own, types)
    model = None
    if self._to_engine is not None and not self._hosts:
      model = self._to_engine.of_module(self.policy.model)
    self.engine = models.make_engine(
      config,
      self.policy,
      self.images,
      model,
      directory=self.directory,
      processes=self.processes,
      copies=self._copies,
    )
    self.recorded: files.RecordedGroups | None = None
    if config.rollout.via == "offline":
      self.recorded = recorded_data.make_groups(self)
    self.observers = events.Observers()
    watched = config.watchdog
    rounds = False
    if config.rollout.via == "external":
      from tunix.rl.multi_turn.run import external_engine  # pylint: disable=g-import-not-at-top

      rounds = external_engine.weights_dtype(config) != "float32"
    if rounds or not config.samples_exactly:
      watched = dataclasses.replace(watched, gap_limit=0.0)
    self.watchdog = watchdog_lib.Watchdog(watched, self.observers.on_event)
    self.counts = reporting.RunCounts(config.collect.parts)
    self.updates = 0
    self.notes: list[str] = []
    self.evaluated: tuple[int, dict[str, Any]] | None = None
    self.store: group_store.SqliteGroupStore | None = None
    self._loop: loop_thread.LoopThread | None = None
    self._proxy: proxy.RunProxy | None = None
    self.fleet: fleet_lib.Fleet | None = None
    self._writers: list[Any] = []
    self._monitor_url = ""
    self._watches: list[Any] = []
    self._ahead: learner_ahead.LearnerAhead | None = None

  @property
  def connection(self) -> proxy_lib.ProxyConnection | fleet_lib.Fleet | None:
    """The episodes' client of the engine, or the fleet that plays them; None
    where they call the engine directly."""
    if self.fleet is not None:
      return self.fleet
    if self._proxy is None or self.config.rollout.via == "buffer":
      return None
    return self._proxy.connection

  @property
  def policy_server(self) -> tuple[str, str]:
    """(URL, bearer token) of the server that samples from the policy."""
    if self._proxy is None:
      raise RuntimeError("this run has no server; see rollout.via")
    return self._proxy.address

  @property
  def tokenizer_path(self) -> str:
    """Directory of the policy's tokenizer; "" without one."""
    file = models.tokenizer_file(self.config)
    return "" if file is None else str(file.parent)

  @property
  def loop(self) -> loop_thread.LoopThread:
    """The event loop of the episodes; only inside the context."""
    if self._loop is None:
      raise RuntimeError("enter the run first: with run: …")
    return self._loop

  def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
    """Runs `work` on the episodes' loop and returns its result.

    Raises:
      loop_thread.Interrupted: the run was asked to stop.
    """
    return self.loop.wait(work, self.stop)

  @property
  def _hosts(self) -> bool:
    """Whether rollout hosts play the episodes, with devices of their own."""
    return self.config.rollout.via == "hosts"

  # --- weights ---------------------------------------------------------------

  def here(self, model: base.Policy) -> Any:
    """A policy's module on the devices of this process.

    Where there are several, all of them must call this together.
    """
    return model if self._copies is None else self._copies.of_module(model)

  def publish(self, version: int, state: nnx.State) -> Any:
    """Gives the engine weights, as `engine.update_weights`; see `here`."""
    # Rollout hosts' engine copies a tensor at a time, and not to devices.
    if self._to_engine is not None and not self._hosts:
      state = self._to_engine.of_state(state)
    return self.engine.update_weights(version, state)

  def save_policy(self, name: str, model: base.Policy) -> None:
    """Writes a policy directory of the run; see `here`."""
    local = self.here(model)

    def save() -> None:
      if self.processes.first:
        models.save_policy(self.config, self.directory / name, local)

    self.processes.together(f"save {name}", save)

  # --- life ------------------------------------------------------------------

  def __enter__(self) -> Run:
    try:
      queues = self.processes.together("claim", self._claim_directory)
      self.processes.together("store", lambda: self._open_store(queues[0]))
      if self.config.fleet.away:
        self.fleet = fleet.Fleet(
          self.config, self.policy, self.engine, self.images, self.own_directory
        )
        self.fleet.start()
      elif self.config.rollout.via in ("proxy", "buffer"):
        from tunix.rl.multi_turn.run import proxy  # pylint: disable=g-import-not-at-top

        self._proxy = proxy.RunProxy(
          self.config, self.policy, self.engine, self.images
        )
        self._proxy.start()
    except BaseException:
      self.engine.close(loop_thread.STOP_TIMEOUT_S)
      loop_thread.close_parts(self.store, self._lock)
      raise
    self._loop = loop_thread.LoopThread()
    self._watches = [
      peer_watch.PeerWatch(self.processes, self.stop),
      interrupts.PreemptionWatch(self.config.run.preemption, self.stop),
    ]
    for watch in self._watches:
      watch.start()
    return self

  def _claim_directory(self) -> str:
    """Takes the directory; returns the name of the queues' files in it."""
    config = self.config
    self._take_lock()
    if not self.processes.first:
      return ""
    if not self.resuming and (problem := before_jax.taken(config)):
      raise config_lib.ConfigError([problem])
    count = self.processes.count
    try:
      process_layout.check(self.directory, count, config)
      resuming.delete_leftovers(self.directory)
      durable.write_text(
        self.directory / resuming.CONFIG,
        config_lib.seal(resuming.recorded(config).to_yaml()),
      )
      return process_layout.adopt(self.directory, count).queue
    except OSError as error:
      raise disk_full.unwritable(self.directory, error) from None

  def _take_lock(self) -> None:
    if self._lock is None and self.processes.first:
      try:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = run_lock.RunLock(self.directory)
      except OSError as error:
        raise disk_full.unwritable(self.directory, error) from None

  def _open_store(self, queue: str) -> None:
    if self.config.rollout.via == "offline":
      return  # Its episodes are on the disk already.
    try:
      self.own_directory.mkdir(parents=True, exist_ok=True)
      self.store = models.make_store(
        self.config, self.images, self.own_directory / queue
      )
    except OSError as error:
      raise disk_full.unwritable(self.own_directory, error) from None

  def __exit__(self, *exc_info: Any) -> None:
    if self._loop is not None:
      self._close_loop(self._loop)
    self.engine.close(loop_thread.STOP_TIMEOUT_S)
    loop_thread.close_parts(*self._writers, self.store, self._lock)
    for watch in self._watches:
      watch.close()
    if self._ahead is not None:
      # Last: it may compile for long, and holds nothing that others wait for.
      self._ahead.close(loop_thread.STOP_TIMEOUT_S)

  def _close_loop(self, loop: loop_thread.LoopThread) -> None:
    if self.config.plays:
      loop_thread.try_to_close(
        "what the gyms share", lambda: loop.finish(self.episodes.close_shared())
      )
    for served in (self.fleet, self._proxy):
      if served is not None:
        served.close(loop.finish)
    engine: Any = self.engine
    if self.config.rollout.via == "external":
      loop_thread.try_to_close(
        "the external engine", lambda: loop.finish(engine.aclose())
      )
    loop.close()

  # --- stages ----------------------------------------------------------------

  def attach_observers(self, resume_step: int | None) -> None:
    """Attaches the run's observers; `resume_step` None for a new run.

    Raises:
      ConfigError: one cannot be opened, or the directory cannot be written.
    """
    try:
      self._monitor_url = observers_lib.attach(
        self.config,
        self.observers,
        self._writers,
        self.images,
        directory=self.own_directory,
        resume_step=resume_step,
        facts=self._facts,
        counts=self.counts,
      )
      self.observers.add(self.watchdog)
    except OSError as error:
      raise disk_full.unwritable(self.directory, error) from None

  def share_counts(self) -> None:
    """Tells process 0 what the others have counted in training."""
    counts = self.processes.gather("counts", self.counts.of_training())
    if self.processes.first:
      self.counts.set_training_of_others(counts[1:])

  def _facts(self) -> dict[str, Any]:
    return {
      "parameters": dry_run.parameter_count(self.policy.model),
      "devices": [str(d) for d in jax.devices()],
      "engine": dict(self.engine.stats()),
      "observer_failures": dict(self.observers.failures),
      "monitor_url": self._monitor_url,
    }

  def warm_up(self) -> None:
    """Compiles the engine's programs, and the learner's beside them.

    A server that the run samples with first answers its first requests.
    """
    asks_first = self.config.rollout.via == "external"
    if not asks_first:
      self._ahead = learner_ahead.LearnerAhead.where_it_helps(self)

    def progress(count: int, total: int, what: str) -> None:
      self.observers.on_event(
        events.Progress("compiling the engine", count, total, what)
      )

    self.engine.warm_up(progress)
    host_memory.release()
    if asks_first:
      self._ahead = learner_ahead.LearnerAhead.where_it_helps(self)
    if self._hosts:
      # They have no weights but those that are published.
      self.publish(0, nnx.state(self.policy.model))

  def make_learner(self) -> learner_lib.Learner:
    """The learner of GRPO, which begins with the present policy.

    Raises:
      ConfigError: it cannot be built.
    """
    if self._ahead is not None and not self._ahead.taken:
      return self._ahead.take(self.policy)
    return models.make_learner(
      self.config,
      self.policy,
      self.images,
      self.mesh,
      self.processes,
      self.teacher,
    )

  def apply_warm_start(self) -> None:
    """Replaces the present weights by those that GRPO begins with."""
    self.policy = self.warm_start.apply(self)
    state = nnx.state(self.policy.model)
    seconds = self.config.external.load_timeout_s
    arriving = self.publish(0, state)
    if not concurrency.finished(arriving, seconds, self.stop):
      if self.stop.is_set():
        raise loop_thread.Interrupted()
      raise TimeoutError(
        "the first weights did not reach the rollout engine within"
        f" {seconds:g} s (external.load_timeout_s)"
      )
    arriving.result()
    host_memory.release()  # The learner that cloned is gone.
