"""Makes the monitor's rows of a run's events, one event after the other.

Promises: the rows are a function of the events so far and of nothing else, so
that a process that starts again makes the same ones: `state` and `restore`.

How a run becomes rows: its measurements before training are baselines, later
ones evaluations of their step; an episode belongs to the step that was current
when it began (`rollout.batch` is the update that learned from it), and to the
policy version that it began with (`model_path`).
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Callable, Mapping, NamedTuple

import numpy as np

from training_monitor.client import monitor_training_hooks as hooks
from training_monitor.client import plain_json
from training_monitor.client.rows import ingest_rows
from training_monitor.client.rows import task_rows
from training_monitor.core import events
from training_monitor.core import trajectory as trajectory_lib

_BEFORE_TRAINING = ("initial", "warm_start")
_MESSAGE_EVERY_S = 1.0
_MOST_KNOWN = 100_000
_LONGEST_TRACEBACK = 30_000
_STATUS = {
  "completed": "completed",
  "failed": "failed",
  "interrupted": "paused",
}


Part = Mapping[str, Any]
"""A part of a batch: `training` and arrays, as the protocol has them."""


class Rows(NamedTuple):
  """Rows of an event, and the screenshots that they show, by hash."""

  part: Part
  images: Mapping[str, trajectory_lib.ImageRef]


@dataclasses.dataclass(frozen=True)
class RunFacts:
  """A run, as far as its events do not tell.

  Attributes:
    training_id: client id of the training, the same through all its starts.
    training: columns of the training's row, beyond what events carry.
    session: how many starts it had before; episodes of different starts may
      have the same names.
    start_step: updates made before this start.
    task_source: source of the tasks: the gym, or the environment without one.
    environment: Kind of its worlds, "linux" or "android".
    trajectories: file of the run's trajectories, "" for none.
    max_turns: Limit of turns for a task without its own.
  """

  training_id: str
  training: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  session: int = 0
  start_step: int = 0
  task_source: str = "gym"
  environment: str = "linux"
  trajectories: str = ""
  max_turns: int | None = None


_STATE = (
    "verdicts", "step", "done_step", "version", "eval", "eval_source",
    "eval_fields", "evals", "results", "running", "names", "summaries",
    "steps", "updating", "reported_at",
)  # fmt: skip


class RunRows:
  """See the module docstring. For one thread."""

  def __init__(self, run: RunFacts):
    self._run = run
    self._training = dict(run.training)
    self._world = task_rows.World(
      run.environment, run.task_source, run.trajectories
    )
    self._max_turns = run.max_turns
    start_step = run.start_step
    self._verdicts: dict[str, task_rows.Verdict] = {}
    """Of the tasks of a list, of which the list knows more than an episode."""
    self._step = start_step + 1
    self._done_step = start_step
    self._version = 0
    self._eval: str | None = None
    self._eval_source: dict[str, Any] = {}
    self._eval_fields: dict[str, Any] = {}
    self._evals = 0
    self._results: dict[str, dict[str, Any]] = {}
    self._running: dict[str, ingest_rows.RunningEpisode] = {}
    self._names: dict[str, str] = {}
    self._summaries: dict[str, dict[str, Any]] = {}
    """Of episodes that no update has learned from yet."""
    self._steps: dict[int, dict[str, int]] = {}
    self._updating: tuple[int, float] | None = None
    """(step, when it began) of the update that is made, or was last."""
    self._reported_at = 0.0
    self._handlers: dict[type, Callable[[Any], Any]] = {
      events.RunStarted: self._run_started,
      events.RunFinished: self._run_finished,
      events.TasksListed: self._tasks_listed,
      events.EpisodeStarted: self._episode_started,
      events.EnvironmentReady: self._environment_ready,
      events.TurnFinished: self._turn_finished,
      events.EpisodeFinished: self._episode_finished,
      events.GroupFinished: self._group_finished,
      events.Fault: self._fault,
      events.UpdateStarted: self._update_started,
      events.StepFinished: self._step_finished,
      events.CheckpointSaved: self._checkpoint_saved,
      events.WeightsPublished: self._weights_published,
      events.EvalStarted: self._eval_started,
      events.EvalFinished: self._eval_finished,
      events.Progress: self._progress,
    }

  @property
  def training(self) -> str:
    """Client id of the training."""
    return self._run.training_id

  def rows(self, event: events.Event) -> Rows | None:
    """Returns the rows of the next event; None if it has none.

    Raises:
      Exception: whatever an event that is not as it should be leads to.
    """
    handler = self._handlers.get(type(event))
    rows = None if handler is None else handler(event)
    if not rows or isinstance(rows, Rows):
      return rows or None
    return Rows(rows, {})

  def state(self) -> dict[str, Any]:
    """Returns the row maker's memory, which `restore` takes back."""
    return {name: getattr(self, f"_{name}") for name in _STATE}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Restores a state of `state`. Raises KeyError if a field is missing."""
    for name in _STATE:
      setattr(self, f"_{name}", state[name])

  # --- the run ----------------------------------------------------------------

  def _run_started(self, event: events.RunStarted) -> Part:
    return {
      "training": {
        "client_id": self._run.training_id,
        "run_name": event.run_name,
        **self._training,
        "config_json": dict(event.config),
        "changed_settings": plain_json.dumps(dict(event.changed)).decode(),
        "status": "initializing",
        "current_phase": "initialization",
        "start_time": event.time if not self._run.session else None,
        "current_step": self._step - 1,
        "status_message": (
          f"start {self._run.session + 1}" if self._run.session else "started"
        ),
      }
    }

  def _run_finished(self, event: events.RunFinished) -> Part:
    return self._training_part(
      status=_STATUS.get(event.status, "failed"),
      status_message=event.status,
      error_message=event.error,
      traceback=event.traceback[-_LONGEST_TRACEBACK:] or None,
      end_time=event.time,
    )

  def _progress(self, event: events.Progress) -> Part | None:
    now = event.time
    # A clock that went back does not silence it.
    recent = 0 <= now - self._reported_at < _MESSAGE_EVERY_S
    if recent and event.done != event.total:
      return None
    self._reported_at = now
    total = "" if event.total is None else f" of {event.total}"
    message = f"{event.stage}: {event.done}{total} {event.message}"
    return self._training_part(status_message=message.strip())

  def _training_part(self, **fields: Any) -> Part:
    return {"training": {"client_id": self._run.training_id, **fields}}

  # --- measurements -----------------------------------------------------------

  def _eval_started(self, event: events.EvalStarted) -> Part:
    self._eval, self._evals = event.name, self._evals + 1
    training = self._run.training_id
    greedy = event.mode == "greedy"
    self._eval_fields = {
      "temperature": 0.0 if greedy else self._training.get("temperature")
    }
    for name in [n for n in self._names if n.startswith("eval/")]:
      del self._names[name]
    row = {
      "training_id": training,
      "status": "running",
      "current_phase": "rollout",
      "total_tasks": event.episodes,
      "model_path": self._model_path(),
      "status_message": event.name,
    }
    kind = "baseline" if event.name in _BEFORE_TRAINING else "eval"
    name = f"{training}:{kind}:{event.name}"
    self._eval_source = {"source_type": kind, f"{kind}_id": name}
    if kind == "eval":
      # The table has one evaluation a step: the last one joins it.
      name = f"{training}:eval:{event.step}"
      self._eval_source["eval_id"] = name
      row["step"] = event.step
    part = self._training_part(
      status="running", current_phase="evaluation", status_message=event.name
    )
    return {
      **part,
      f"{kind}s": [{"client_id": name, "start_time": event.time, **row}],
    }

  def _eval_finished(self, event: events.EvalFinished) -> Part | None:
    if event.step is not None:
      kind, name = "eval", f"{self._run.training_id}:eval:{event.step}"
    elif self._eval_source:
      kind = self._eval_source["source_type"]
      name = self._eval_source[f"{kind}_id"]
    else:
      return None
    self._eval, self._eval_source = None, {}
    results = self._results.setdefault(name, {})
    results[event.name] = dict(event.results)
    return {
      f"{kind}s": [
        {
          "client_id": name,
          "status": "completed",
          "current_phase": "aggregation",
          "status_message": event.name,
          "end_time": event.time,
          "eval_time": event.time,
          "metrics_json": dict(results),
        }
      ],
      **self._training_part(current_phase="rollout"),
    }

  # --- tasks ------------------------------------------------------------------

  def _tasks_listed(self, event: events.TasksListed) -> Part:
    part = task_rows.listed(event.tasks, self._world)
    for task in part["tasks"]:
      if len(self._verdicts) < _MOST_KNOWN:
        self._verdicts[task["task_id"]] = task_rows.verdict_of(task)
    return part

  # --- steps ------------------------------------------------------------------

  def _weights_published(self, event: events.WeightsPublished) -> None:
    self._version = event.version
    self._step = max(self._step, event.version + 1)

  def _update_started(self, event: events.UpdateStarted) -> Part:
    part = self._step_part(event.step)
    part["steps"][0] |= {
      "status": "training",
      "current_phase": "training",
      "rollout_end_time": event.time,
      "training_start_time": event.time,
      "training_progress": {"completed_substeps": 0},
    }
    self._updating = (event.step, event.time)
    return {**part, **self._training_part(current_phase="training")}

  def _step_finished(self, event: events.StepFinished) -> Part:
    self._step = max(self._step, event.step + 1)
    self._done_step = max(self._done_step, event.step)
    part = self._step_part(event.step)
    progress = self._steps.pop(event.step, None) or {}
    for old in [s for s in self._steps if s < event.step]:
      del self._steps[old]
    metrics = {
      k: float(v) if isinstance(v, np.generic) else v
      for k, v in event.metrics.items()
    }
    begun = event.time - sum(
      metrics.get(name) or 0.0 for name in ("seconds_publish", "seconds_learn")
    )
    if self._updating is not None and self._updating[0] == event.step:
      begun = self._updating[1]
    substeps = int(metrics.get("optimizer_steps") or 1)
    (step,) = part["steps"]
    step |= {
      **hooks.step_fields(metrics),
      "status": "completed",
      "current_phase": "training",
      "batch": event.step,
      "end_time": event.time,
      "rollout_end_time": begun,
      "training_start_time": begun,
      "training_end_time": event.time,
      "rollout_progress": _capped(progress) or None,
      "training_progress": {
        "completed_substeps": substeps,
        "total_substeps": substeps,
      },
      "model_path": self._model_path(),
    }
    learned = []
    for group in event.groups:
      for episode in group.trajectories:
        name = self._names.pop(f"train/{episode.trajectory_id}", None)
        if name is None:
          continue
        row = {"client_id": name, "batch": event.step}
        summary = self._summaries.pop(name, None)
        weights = event.advantages.get(episode.trajectory_id)
        left_out = event.left_out.get(episode.trajectory_id)
        if (weights or left_out) and summary is not None:
          # The column is replaced as a whole.
          row["summary_json"] = summary = dict(summary)
          if weights:
            summary["advantage"] = sum(weights) / len(weights)
            summary["advantages"] = list(weights)
          if left_out:
            summary["left_out"] = list(left_out)
        learned.append(row)
    return {
      **part,
      "rollouts": learned,
      **self._training_part(
        current_step=event.step,
        current_phase="rollout",
        status_message=f"step {event.step}",
      ),
    }

  def _checkpoint_saved(self, event: events.CheckpointSaved) -> Part | None:
    if not event.step:
      return None
    part = self._step_part(event.step)
    part["steps"][0]["checkpoint_path"] = event.path
    return part

  def _step_name(self, step: int) -> str:
    return f"{self._run.training_id}:step:{step}"

  def _step_part(self, step: int) -> dict[str, Any]:
    return {
      "steps": [
        {
          "client_id": self._step_name(step),
          "step": step,
          "training_id": self._run.training_id,
        }
      ]
    }

  def _group_finished(self, event: events.GroupFinished) -> Part | None:
    names = [self._names.get(f"train/{e.trajectory_id}") for e in event.group]
    episodes = [n for n in names if n is not None]
    if event.outcome != "accepted":
      message = f"group {event.outcome}: {event.reason}".rstrip(": ")
      rows = []
      for name in episodes:
        row: dict[str, Any] = {"client_id": name, "status_message": message}
        # No update will learn from it: a requeued task is tried anew.
        summary = self._summaries.pop(name, None)
        if summary is not None:
          row["summary_json"] = {
            **summary,
            "left_out": f"group_{event.outcome}",
          }
        rows.append(row)
      return {"rollouts": rows}
    step = self._current_step()
    progress = self._steps.get(step)
    if progress is None:
      return None
    progress["completed_groups"] += 1
    progress["completed_envs"] += len(event.group)
    part = self._step_part(step)
    part["steps"][0]["rollout_progress"] = _capped(progress)
    if self._updating is None or self._updating[0] != step:
      # Groups come in while the update is made, too: it goes on.
      part["steps"][0] |= {
        "current_phase": "rollout_execution",
        "status": "rollout_running",
      }
    return part

  def _current_step(self) -> int:
    """Returns the step of an episode that starts now."""
    total = self._training.get("total_steps")
    return min(self._step, total) if total else self._step

  # --- episodes --------------------------------------------------------------

  def _episode_started(self, event: events.EpisodeStarted) -> Part:
    _, running, more = self._begin(event, event.time)
    task = task_rows.task_part(event.task_id, None, self._world, event.split)
    source = running.source
    if source["source_type"] != "step":
      kind = source["source_type"]
      more[f"{kind}s"] = [
        {
          "client_id": source[f"{kind}_id"],
          "current_task_index": _last_number(event.group_id),
        }
      ]
    return {**more, **ingest_rows.begun(running, task, self._world)}

  def _environment_ready(self, event: events.EnvironmentReady) -> Part | None:
    running = self._find(event.trajectory_id)
    if running is None:
      return None
    name = running.rollout_id
    return {
      "rollouts": [
        {
          "client_id": name,
          "status": "agent_init",
          "current_phase": "agent_initialization",
        }
      ],
      "environments": [{"client_id": f"{name}:env", "status": "running"}],
    }

  def _begin(
    self, event: Any, started: float
  ) -> tuple[str, ingest_rows.RunningEpisode, dict[str, Any]]:
    """Names an episode, and finds its step or evaluation."""
    trajectory_id = getattr(event, "trajectory_id", None)
    if trajectory_id is None:
      trajectory_id = event.trajectory.trajectory_id
    key = f"{event.split}/{trajectory_id}"
    more: dict[str, Any] = {}
    if event.split == "eval" and self._eval_source:
      source = dict(self._eval_source)
      place = f"{self._eval}.{self._evals}"
      fields = dict(self._eval_fields)
    else:
      step = self._current_step()
      source = {"source_type": "step", "step_id": self._step_name(step)}
      place = "train"
      fields = {"temperature": self._training.get("temperature")}
      if step not in self._steps and step > self._done_step:
        more = self._begin_step(step, started)
    session = self._run.session
    running = ingest_rows.RunningEpisode(
      f"{self._run.training_id}/{session}/{place}/{trajectory_id}",
      source,
      started,
      fields={
        **fields,
        "model_path": self._model_path(),
        "group": _last_number(event.group_id),
        "env_index": _last_number(trajectory_id.rpartition(".")[2]),
        "max_turns": self._max_turns,
      },
    )
    self._running[key] = running
    self._names[key] = running.rollout_id
    for cache in (self._names, self._summaries):
      if len(cache) > _MOST_KNOWN:
        for old in list(itertools.islice(cache, _MOST_KNOWN // 2)):
          del cache[old]
    return key, running, more

  def _begin_step(self, step: int, started: float) -> dict[str, Any]:
    groups = self._training.get("groups_per_batch") or 0
    size = self._training.get("group_size") or 0
    self._steps[step] = progress = {
      "completed_groups": 0,
      "total_groups": groups,
      "completed_envs": 0,
      "total_envs": groups * size,
    }
    part = self._step_part(step)
    part["steps"][0] |= {
      "status": "rollout_collecting",
      "start_time": started,
      "current_phase": "rollout_collection",
      "rollout_start_time": started,
      "rollout_progress": dict(progress),
      "model_path": self._model_path(),
    }
    return {
      **part,
      **self._training_part(status="running", current_phase="rollout"),
    }

  def _turn_finished(self, event: events.TurnFinished) -> Part | Rows | None:
    running = self._find(event.trajectory_id)
    if running is None:
      return None
    running.turns.append((event.time, dict(event.seconds)))
    name = running.rollout_id
    first = len(running.turns) == 1
    begun = event.time - sum(event.seconds.values())
    rows, images = ingest_rows.live_turn(running, event)
    part = {
      "rollouts": [
        {
          "client_id": name,
          "status": "running",
          "current_phase": "task_execution",
          "current_turn": event.turn + 1,
          "task_start_time": max(begun, running.started) if first else None,
        }
      ],
      # Its start may have been dropped.
      "environments": [{"client_id": f"{name}:env", "status": "running"}]
      if first
      else [],
      **rows,
    }
    return Rows(part, images) if rows else part

  def _episode_finished(self, event: events.EpisodeFinished) -> Rows:
    episode = event.trajectory
    key = f"{event.split}/{episode.trajectory_id}"
    running = self._running.pop(key, None)
    more: dict[str, Any] = {}
    if running is None:  # Its beginning was dropped.
      seconds = float(episode.metrics.get("seconds", 0.0))
      key, running, more = self._begin(event, event.time - seconds)
      self._running.pop(key, None)
    task = task_rows.task_part(
      event.task_id, episode.task, self._world, event.split
    )
    part = ingest_rows.ended(
      running,
      episode,
      event.time,
      task,
      self._world,
      self._max_turns,
      self._verdicts.get(event.task_id, task_rows.Verdict()),
    )
    if event.task_id in self._verdicts:
      part["tasks"] = [{k: task[k] for k in ("client_id", "task_id")}]
    if event.split == "train":
      (rollout,) = part["rollouts"]
      self._summaries[running.rollout_id] = rollout["summary_json"]
    images = ingest_rows.images_of(episode)
    return Rows({**more, **part}, images)

  def _fault(self, event: events.Fault) -> None:
    running = self._find(event.trajectory_id)
    if running is not None:
      running.faults.append(
        {"stage": event.stage, "kind": event.kind, "message": event.message}
      )

  def _find(
    self, trajectory_id: str | None
  ) -> ingest_rows.RunningEpisode | None:
    for split in ("train", "eval"):
      running = self._running.get(f"{split}/{trajectory_id}")
      if running is not None:
        return running
    return None

  def _model_path(self) -> str:
    return f"{self._training.get('model_name', '')}@{self._version}"


def _capped(progress: Mapping[str, int]) -> dict[str, int]:
  """Caps progress at its total; requeued groups run again."""
  capped = dict(progress)
  for what in ("groups", "envs"):
    if f"total_{what}" in capped:
      capped[f"completed_{what}"] = min(
        capped[f"completed_{what}"], capped[f"total_{what}"]
      )
  return capped


def _last_number(name: str) -> int | None:
  """Returns the number in "train-000012-r1", 12; None if there is none."""
  name = name.partition("-r")[0]
  digits = "".join(
    reversed(list(itertools.takewhile(str.isdigit, reversed(name))))
  )
  return int(digits) if digits else None
