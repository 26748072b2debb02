"""Brings a policy to its start: weights loaded, demonstrations cloned, saved.

The one stage before GRPO. It decides which weights a run starts with, which of
them are loaded before the first evaluation and which after it, and which work a
resumed run skips.

Promises: `warm_start/` of the run directory holds the whole policy after
cloning or does not exist; a resumed run begins with it, and it is the KL
reference. A stage that was interrupted resumes from its last checkpoint;
checkpoints are deleted once `warm_start/` has been loaded or written. Building
the stage writes and deletes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from typing import Any, Callable, Iterator, Mapping, Sequence, TYPE_CHECKING

import jax
import numpy as np
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.agents import agent_registry
from tunix.rl.multi_turn.config import run_sections
from tunix.rl.multi_turn.core import durable
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.learner import checkpoint as checkpoint_lib
from tunix.rl.multi_turn.learner import learner as learner_lib
from tunix.rl.multi_turn.net import peers as peers_lib
from tunix.rl.multi_turn.run import episodes
from tunix.rl.multi_turn.run import models
from tunix.rl.multi_turn.run import resuming
from tunix.rl.multi_turn.run.warm_start import conversing
from tunix.rl.multi_turn.run.warm_start import demonstrations
from tunix.rl.multi_turn.run.warm_start import recorded

if TYPE_CHECKING:
  from tunix.rl.multi_turn.run import run

_CHECKPOINTS = "cloning"
_RESULT = models.WARM_START


Play = Callable[
  [Sequence[tuple[gym_base.Task, int]]], list[trajectory_lib.Trajectory]
]
"""(task, seed) pairs -> their demonstrations, in order. Tasks without a
solution, which some pages draw now and then, are left out."""

_LEFT_OUT_AT_MOST = 0.2


def clone(
  learner: learner_lib.Learner,
  play: Play,
  tasks: Iterator[gym_base.Task],
  config: run_sections.WarmStartConfig,
  *,
  longest: int,
  seed: int,
  observers: events.Observer,
  first_step: int = 0,
  after_update: Callable[[], None] = lambda: None,
  processes: peers_lib.Peers = peers_lib.ALONE,
) -> None:
  """Updates `learner` from `first_step` to `config.steps`.

  Args:
    learner: Learner with the objective behaviour_cloning.
    play: called once a step, also with nothing to play; its errors end the
      cloning.
    tasks: Tasks to demonstrate, without end.
    config: steps, batch size and number of demonstrations.
    longest: tokens of a sequence; a demonstration with a longer one, which
      the policy itself could not play, is left out.
    seed: Seed of the batches.
    observers: receive the progress.
    first_step: Updates that the learner has made before; their demonstrations
      are
      played again, which takes a fraction of the time.
    after_update: called after each update.
    processes: Processes that learn together; each plays all demonstrations, and
      learns
      from its share of a batch.

  Raises:
    RuntimeError: too many tasks have no solution to be shown, or too long a
      one.
  """
  played: list[trajectory_lib.Trajectory] = []
  tried = too_long = 0
  rng = np.random.default_rng(seed)
  for step in range(config.steps):
    target = min(config.demonstrations, config.batch_size * (step + 1))
    pairs = [(next(tasks), i) for i in range(tried, max(tried, target))]
    shown = play(pairs)
    fitting = [e for e in shown if all(len(s) <= longest for s in e.sequences)]
    played += fitting
    too_long += len(shown) - len(fitting)
    tried += len(pairs)
    if len(played) < (1 - _LEFT_OUT_AT_MOST) * tried:
      raise RuntimeError(_too_few(len(played), tried, too_long, longest))
    chosen = rng.choice(len(played), config.batch_size).tolist()
    if step < first_step:
      observers.on_event(
        events.Progress("playing demonstrations again", step + 1, first_step)
      )
      continue
    metrics = learner.update_on_sequences(
      [s for i in processes.share(chosen) for s in played[i].sequences]
    )
    observers.on_event(
      events.Progress(
        "cloning demonstrations",
        step + 1,
        config.steps,
        f"loss {metrics['loss']:.3f}"
        + (f", {too_long} too long" if too_long else ""),
      )
    )
    after_update()


def _too_few(played: int, tried: int, too_long: int, longest: int) -> str:
  if too_long > tried - played - too_long:
    return (
      f"{too_long} of {tried} demonstrations have sequences of more than"
      f" {longest} tokens; raise engine.context_length and"
      " learner.row_length, or set warm_start.steps=0"
    )
  return (
    f"the oracle could demonstrate only {played + too_long} of {tried} tasks,"
    " the others offer it nothing to act on; leave out such"
    " task_source.families or set warm_start.steps=0"
  )


class WarmStart:
  """The warm-start stage of a run; see the module docstring.

  Attributes:
    clones: whether demonstrations are yet to be cloned; the run then evaluates
      what it begins with, too.
    policy: Policy that the run begins with, until `apply` returns GRPO's first
      one: a second copy of the weights is not kept.
  """

  def __init__(
    self,
    config: config_lib.TrainConfig,
    mesh: jax.sharding.Mesh | None,
    task_source: gym_base.TaskSet,
    tools: Sequence[Mapping[str, Any]] = (),
    processes: peers_lib.Peers = peers_lib.ALONE,
  ):
    """Builds the policy with the weights that the run begins with.

    `tools` are the schemas that its episodes offer, for demonstrations.

    Raises:
      ConfigError: no such weights, or no demonstrations.
    """
    self._config = config
    self._mesh = mesh
    self._processes = processes
    self._resuming = bool(config.run.resume)
    self._directory = config.run_dir
    self._steps = config.warm_start.steps
    source = models.warm_start_source(config)
    random = models.starts_random(config, source)
    self.policy = models.make_policy(config, mesh, "" if random else source)
    self._load_later = source if random else ""
    if self._resuming and self._is_cloned():
      self._steps, self._load_later = 0, str(self._result)
    self.clones = self._steps > 0
    if self._load_later:
      models.check_weights(config, self.policy, self._load_later)
    self._demonstrations = None
    if self._steps:
      self._demonstrations = recorded.for_run(config, task_source, tools)

  @property
  def _result(self):
    return self._directory / _RESULT

  def _is_cloned(self) -> bool:
    """Whether a start of this run before has cloned to the end.

    Raises:
      ConfigError: it has, and the result is damaged.
    """
    try:
      durable.check(self._result)
    except (OSError, ValueError) as error:
      if not (self._result / durable.SUMS).exists():
        # Of an older version, which began with config.json and ended with the
        # removal of the checkpoints.
        checkpoints = self._directory / _CHECKPOINTS
        return (self._result / "config.json").exists() and (
          not checkpoints.exists()
        )
      raise config_lib.ConfigError(
        [
          f"{self._result} is damaged: {error}; restore it from a copy, or"
          " delete the directory to clone again"
        ]
      ) from None
    return True

  def apply(self, run: run.Run) -> models.LoadedPolicy:
    """The policy that GRPO begins with.

    Args:
      run: a `run.Run`, entered.

    Raises:
      loop_thread.Interrupted: the run was asked to stop; what was cloned is in
        a checkpoint.
    """
    policy = self.policy
    del self.policy
    if self._load_later:
      policy = models.make_policy(self._config, self._mesh, self._load_later)
    if not self._steps:
      # A run that ended just after the result was saved kept its checkpoints.
      self._delete_checkpoints()
    if self._steps:
      policy = self._clone(run, policy)
    return policy

  def _clone(
    self, run: run.Run, policy: models.LoadedPolicy
  ) -> models.LoadedPolicy:
    """Behaviour cloning on demonstrations."""
    config = self._config
    # Demonstrations may have to teach anything: all weights learn from them.
    learner = models.make_cloning_learner(
      config,
      models.without_adapter(policy),
      run.images,
      self._mesh,
      self._processes,
    )
    source = self._demonstrations
    assert source is not None  # `clones` is set.
    play = self._demonstrator(run, policy, source)
    with self._checkpoints(learner) as save_when_due:
      clone(
        learner,
        lambda tasks: run.wait(
          demonstrations.play_all(play, tasks, config.collect.concurrency)
        ),
        source.tasks,
        config.warm_start,
        longest=config.engine.context_length,
        seed=config.run.seed,
        observers=run.observers,
        first_step=learner.version,
        after_update=save_when_due,
        processes=self._processes,
      )
    policy = dataclasses.replace(policy, model=learner.policy())
    run.save_policy(_RESULT, policy.model)
    self._delete_checkpoints()
    models.add_adapter(config, policy.model)
    return policy

  def _delete_checkpoints(self) -> None:
    if self._processes.first:
      shutil.rmtree(self._directory / _CHECKPOINTS, ignore_errors=True)

  def _demonstrator(
    self,
    run: run.Run,
    policy: models.LoadedPolicy,
    source: recorded.Source | recorded.Conversations,
  ) -> Any:
    """(task, seed) -> the awaitable of a demonstration."""
    config = self._config
    if isinstance(source, recorded.Conversations):
      return conversing.Converser(
        policy.renderer,
        run.episodes,
        source.solve,
        config.environment.max_turns,
        config.collect.deadlines,
      ).episode
    return demonstrations.Demonstrator(
      policy.renderer,
      run.episodes.make_agent,
      source.make_gym
      or (lambda: episodes.make_gym(config, config.task_source.families[0])),
      source.oracle,
      run.images,
      grid=demonstrations.POINT_GRID,
      screenshots=agent_registry.screenshot_options(config.agent),
      deadlines=config.collect.deadlines,
    ).episode

  @contextlib.contextmanager
  def _checkpoints(
    self, learner: learner_lib.Learner
  ) -> Iterator[Callable[[], None]]:
    """Restores a started learner; saves it at the end, also on failure.

    Yields:
      A function that saves when a checkpoint is due.
    """
    every = self._config.checkpoint.every
    with checkpoint_lib.LearnerCheckpoints(
      self._directory / _CHECKPOINTS,
      dataclasses.replace(self._config.checkpoint, keep=1),
    ) as checkpoints:
      if self._resuming and checkpoints.steps():
        checkpoints.restore(learner)

      options = {resuming.RECORDED: resuming.recorded(self._config).to_dict()}

      def save_when_due() -> None:
        if every and learner.version % every == 0:
          checkpoints.save(learner, options)

      try:
        yield save_when_due
      except BaseException:
        checkpoints.wait()
        if learner.version and learner.version not in checkpoints.steps():
          checkpoints.save(learner, options)
        raise
