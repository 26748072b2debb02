"""Plays an evaluation by itself: no learner, no queue, resumable by episode.

The directory holds config.yaml, evaluation.json (what was evaluated, results),
episodes.jsonl (an outcome a line), trajectories.jsonl and images/ (a sample of
the episodes, see `report.episodes`), summary.json and report.html.

Promises: an episode is identified by mode, place and id of its task and
attempt, has its own random numbers, and is counted once, however often the
evaluation was stopped; a resumed evaluation plays those that are missing, and
those that a gym or server broke. More tasks, attempts or modes may be asked of
it, and nothing that would make its episodes others. A gym or server that fails
episode after episode ends it.

Does not: evaluate a run's updates while it trains (`evaluation`).
"""

from __future__ import annotations

import dataclasses
import pathlib
import threading
import time
from typing import Any, Callable, Coroutine, Mapping, Sequence

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import reporting
from tunix.rl.multi_turn.config import loader
from tunix.rl.multi_turn.core import durable
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.core.statistics import success_rates
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.environments.gyms import gym_registry as gyms
from tunix.rl.multi_turn.reporting import evaluation_journal
from tunix.rl.multi_turn.reporting import files
from tunix.rl.multi_turn.run import before_jax
from tunix.rl.multi_turn.run import disk_full
from tunix.rl.multi_turn.run import episodes
from tunix.rl.multi_turn.run import first_episode
from tunix.rl.multi_turn.run import loop_thread
from tunix.rl.multi_turn.run import observers as observers_lib
from tunix.rl.multi_turn.run import proxy
from tunix.rl.multi_turn.run import resuming
from tunix.rl.multi_turn.run import run_lock
from tunix.rl.multi_turn.run import tasks as run_tasks
from tunix.rl.multi_turn.run.evaluations import evaluation
from tunix.rl.multi_turn.run.evaluations import subjects

EvaluationConfig = config_lib.EvaluationConfig
ConfigError = config_lib.ConfigError
NAME = "evaluation"
FILE = "evaluation.json"

_MAY_CHANGE = (
    "run.", "engine.slots", "engine.lockstep", "collect.concurrency",
    "collect.deadlines.", "report.", "monitor.", "tracking.", "mesh.",
    "rollout.host", "rollout.port", "rollout.public_url", "watchdog.",
    "eval.attempts", "eval.episodes_per_task", "eval.modes", "eval.slots",
    "evaluate.",
)  # fmt: skip
_MUST_NOT = (
  "run.seed",
  "evaluate.run",
  "evaluate.checkpoint",
  "evaluate.model",
)
"""Settings that episodes do not depend on, and those among them that they do;
also more of what may change: attempts, tasks and modes only add episodes."""


Choose = Callable[[EvaluationConfig, Any], Sequence[gym_base.Task]]
"""(configuration, its task source) -> tasks."""


class GaveUp(RuntimeError):
  """Episode after episode was broken; the text has the last one's reason."""


class Evaluation:
  """One evaluation; use as a context manager, then call `run`.

  Attributes:
    config: complete, with the task families and the checkpoint named.
    directory: Directory of its files.
    stop: set to end it; it can be resumed.
    subject: Policy or server that is evaluated.
    notes: Notes for the user, before it begins.
  """

  def __init__(self, config: EvaluationConfig, choose: Choose | None = None):
    """Builds the parts; changes no directory, but locks one that it resumes.

    Args:
      config: checked.
      choose: the tasks that are played; None: those of section eval.

    Raises:
      ConfigError: lists the parts that cannot be built.
    """
    self.directory = config.run_dir
    self.resuming = bool(config.run.resume)
    self.stop = threading.Event()
    self.notes: list[str] = []
    self._lock: run_lock.RunLock | None = None
    self._before = _recorded(self.directory) if self.resuming else {}
    if not self.resuming:
      if (self.directory / FILE).exists():
        raise ConfigError(
          [
            f"run.name={config.run.name}: {self.directory} holds an evaluation"
            " already; choose another name, or continue it with"
            f" resume={self.directory}"
          ]
        )
      if (self.directory / "metrics.jsonl").exists():
        raise ConfigError(
          [
            f"run.name={config.run.name}: {self.directory} holds a run; choose"
            " another name"
          ]
        )
    elif not config.run.dry_run:
      self._take_lock()
    try:
      self._build(config, choose)
    except BaseException:
      loop_thread.close_parts(self._lock)
      raise

  def _build(self, config: EvaluationConfig, choose: Choose | None) -> None:
    if self._lock is None:
      before_jax.place_of_evaluation(config)
    config = subjects.decided(config)
    config, self._tasks = run_tasks.resolve(config)
    self.config = config
    if self.resuming:
      self.notes += _check(config, self._before)
    self.images = images_lib.ImageStore(self.directory / "image_cache")
    self.episodes = episodes.EpisodeFactory(config, self.images)
    first_episode.try_first_episode(config, self.episodes, self._tasks)
    self._planned = evaluation.plan(
      config,
      choose(config, self._tasks)
      if choose is not None
      else run_tasks.eval_tasks(config, self._tasks),
    )
    self.subject = subjects.make(
      config, self.images, self.episodes.make_agent()
    )
    self.observers = events.Observers()
    self._counts = reporting.RunCounts()
    self._writers: list[Any] = []
    self._journal: evaluation_journal.Journal | None = None
    self._loop: loop_thread.LoopThread | None = None
    self._proxy: proxy.RunProxy | None = None
    self._started = time.time()
    self._since = time.monotonic()
    self._broken = 0

  def describe(self) -> str:
    """Configuration, shapes and memory, for a dry run."""
    count = len(self._planned)
    shown = self.subject.describe(self.config, self.episodes, self.directory)
    return f"{shown}\n\n  {count} episodes"

  # --- life ------------------------------------------------------------------

  def __enter__(self) -> Evaluation:
    config = self.config
    try:
      self._loop = loop_thread.LoopThread()
      # Before anything is written: a server that is not there leaves nothing.
      self.notes += self._wait(self.subject.check())
      self._facts = self.subject.facts()
      self._same_subject()
      self._open()
      if config.rollout.via == "proxy" and self.subject.engine is not None:
        self._proxy = proxy.RunProxy(
          config, self.subject.policy, self.subject.engine, self.images
        )
        self._proxy.start()
    except BaseException:
      self.__exit__()
      raise
    return self

  def _open(self) -> None:
    config = self.config
    try:
      self.directory.mkdir(parents=True, exist_ok=True)
      self._take_lock()
      durable.write_text(
        self.directory / resuming.CONFIG,
        config_lib.seal(resuming.recorded(config).to_yaml()),
      )
      self._journal = evaluation_journal.Journal(self.directory)
      observers_lib.attach(
        config,
        self.observers,
        self._writers,
        self.images,
        directory=self.directory,
        resume_step=0 if self.resuming else None,
        facts=lambda: {"evaluates": self._facts},
        counts=self._counts,
      )
    except OSError as error:
      raise disk_full.unwritable(self.directory, error) from None

  def _take_lock(self) -> None:
    if self._lock is None:
      if not self.directory.is_dir():
        raise ConfigError(
          [
            f"run.resume={self.directory} is not a directory; give one that an"
            " evaluation wrote"
          ]
        )
      self._lock = run_lock.RunLock(self.directory)

  def __exit__(self, *exc_info: Any) -> None:
    loop = self._loop
    if loop is not None:
      self._close_on(loop)
      loop.close()
    self.subject.close(loop_thread.STOP_TIMEOUT_S)
    loop_thread.close_parts(*self._writers, self._journal, self._lock)

  def _close_on(self, loop: loop_thread.LoopThread) -> None:
    loop_thread.try_to_close(
      "what the gyms share", lambda: loop.finish(self.episodes.close_shared())
    )
    if self._proxy is not None:
      opened = self._proxy
      loop_thread.try_to_close("the proxy", lambda: opened.close(loop.finish))
    loop_thread.try_to_close(
      "the subject", lambda: loop.finish(self.subject.aclose())
    )

  def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
    if self._loop is None:
      raise RuntimeError("enter the evaluation first: with evaluation: …")
    return self._loop.wait(work, self.stop)

  def _same_subject(self) -> None:
    """Refuses other weights at the place that the evaluation began with.

    Raises:
      ConfigError: naming it.
    """
    before = self._before.get("subject", {}).get("fingerprint")
    if before not in (None, self._facts["fingerprint"]):
      place = self._facts.get("weights") or self._facts.get("model")
      raise ConfigError(
        [
          f"run.resume={self.directory}: {place} is not what it was when the"
          " evaluation began; begin a new one"
        ]
      )

  # --- playing ---------------------------------------------------------------

  def run(self) -> dict[str, Any]:
    """Plays what is missing; returns the content of evaluation.json.

    Raises:
      loop_thread.Interrupted: `stop` was set.
      GaveUp: see `evaluate.give_up_after`.
    """
    status, error = "failed", None
    self.observers.on_event(
      events.RunStarted(
        self.config.run.name,
        self.config.to_dict(),
        config_lib.changed(self.config),
      )
    )
    try:
      self._write("running")
      self.subject.warm_up(self._compiling)
      self._play()
      status = "completed"
    except loop_thread.Interrupted:
      status = "interrupted"
      raise
    except BaseException as failure:
      error = f"{type(failure).__name__}: {failure}"
      raise
    finally:
      written = self._write(status, error)
      if results := written["results"]:
        self.observers.on_event(events.EvalFinished(NAME, results))
      self.observers.on_event(events.RunFinished(status, error))
    return written

  def _compiling(self, count: int, total: int, what: str) -> None:
    self.observers.on_event(
      events.Progress("compiling the engine", count, total, what)
    )

  def _play(self) -> None:
    journal = self._journal
    assert journal is not None
    remaining = [one for one in self._planned if self._is_left(one)]
    total = len(self._planned)
    if not remaining:
      return
    played = total - len(remaining)

    def started(mode: str) -> None:
      version = self._facts.get("version", 0)
      self.observers.on_event(events.EvalStarted(NAME, mode, total, version))

    def ended(
      one: evaluation.Planned, episode: trajectory_lib.Trajectory
    ) -> None:
      nonlocal played
      if episode.status is trajectory_lib.TrajectoryStatus.CANCELLED:
        return  # Stopped; it is played when the evaluation is resumed.
      tokens = self.subject.tokens_of(episode.trajectory_id)
      outcome = evaluation_journal.Outcome.of(
        one.key, one.task.family, episode, tokens
      )
      journal.add(outcome)
      played += 1
      self.observers.on_event(events.Progress("evaluating", played, total))
      self._judge(outcome)

    def make_collector(mode: str) -> Any:
      connection = self.subject.connection
      if self._proxy is not None:
        connection = self._proxy.connection
      return episodes.make_collector(
        self.config,
        self.episodes,
        self.subject.engine,
        None if self.subject.policy is None else self.subject.policy.renderer,
        observers=self.observers,
        mode=mode,
        connection=connection,
      )

    self._wait(evaluation.play(remaining, make_collector, started, ended))

  def _is_left(self, one: evaluation.Planned) -> bool:
    assert self._journal is not None
    outcome = self._journal.outcomes.get(one.key)
    if outcome is None:
      return True
    return not outcome.valid and self.config.evaluate.replay_invalid

  def _judge(self, outcome: evaluation_journal.Outcome) -> None:
    self._broken = 0 if outcome.valid else self._broken + 1
    most = self.config.evaluate.give_up_after
    if most and self._broken >= most:
      raise GaveUp(
        f"{self._broken} episodes in a row were broken"
        f" (evaluate.give_up_after), the last one: {outcome.status},"
        f" {outcome.error or 'without a reason'}"
      )

  # --- results ---------------------------------------------------------------

  def _write(self, status: str, error: str | None = None) -> dict[str, Any]:
    assert self._journal is not None
    planned = {one.key for one in self._planned}
    outcomes = [
      one
      for key, one in sorted(self._journal.outcomes.items())
      if key in planned
    ]
    data: dict[str, Any] = {
      "name": self.config.run.name,
      "status": status,
      "error": error,
      "subject": self._facts,
      "settings": resuming.recorded(self.config).to_dict(),
      "started": self._before.get("started") or self._started,
      "seconds": (self._before.get("seconds") or 0.0)
      + time.monotonic()
      - self._since,
      "planned": len(planned),
      "played": len(outcomes),
      "results": self._results(outcomes),
    }
    if outcomes and status != "running":
      data |= self._digest(outcomes)
    files.write_json(self.directory / FILE, data)
    return data

  def _digest(
    self, outcomes: list[evaluation_journal.Outcome]
  ) -> dict[str, Any]:
    """{"digest": what the gym says of the episodes}; {} for most gyms."""
    if not self.episodes.acts_on_gym:
      return {}
    digest = gyms.get(self.config.gym.name, "operator").load_digest()
    if digest is None:
      return {}
    return {
      "digest": digest(
        [dataclasses.asdict(one) for one in outcomes], self.directory
      )
    }

  def _results(
    self, outcomes: list[evaluation_journal.Outcome]
  ) -> dict[str, Any]:
    if not outcomes:
      return {}
    modes = self.config.eval.modes
    results = success_rates.summarise([one.result() for one in outcomes], modes)
    for mode in modes:
      if mode in results:
        results[mode]["spread"] = evaluation_journal.statistics_of(
          [one for one in outcomes if one.mode == mode]
        )
    results["spread"] = results[results["headline"]]["spread"]
    return results


def _recorded(directory: pathlib.Path) -> dict[str, Any]:
  """evaluation.json of an evaluation that is resumed.

  Raises:
    ConfigError: there is none.
  """
  data = files.read_json(directory / FILE)
  if not data:
    raise ConfigError(
      [
        f"run.resume={directory} holds no evaluation ({FILE} is missing or"
        " damaged); give the directory of one"
      ]
    )
  return data


def _check(config: EvaluationConfig, before: Mapping[str, Any]) -> list[str]:
  """Notes about what an evaluation is resumed with; refuses other episodes.

  Raises:
    ConfigError: naming each setting with both its values.
  """
  problems, notes = [], []
  now = resuming.recorded(config).to_dict()
  for key in loader.leaves(EvaluationConfig):
    old = resuming.value_of(before.get("settings", {}), key)
    new = resuming.value_of(now, key)
    if old is resuming.MISSING or old == new:
      continue
    if key.startswith(_MAY_CHANGE) and key not in _MUST_NOT:
      if not key.startswith(("run.", "evaluate.")):
        notes.append(f"{key}={new}, {old} before")
    else:
      problems.append(
        f"{key}={new}: {config.run.resume} was begun with {old}, which cannot"
        " change; leave it out, or begin a new evaluation"
      )
  if problems:
    raise ConfigError(problems)
  return notes
