"""Makes parts of the ingest protocol from episodes: begun, under way, ended.

Turns are numbered from 1.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

from training_monitor.client.rows import episode_figures
from training_monitor.client.rows import live_turns
from training_monitor.client.rows import task_rows
from training_monitor.client.rows import turn_rows
from training_monitor.client.rows import turn_tokens
from training_monitor.core import events
from training_monitor.core import trajectory as trajectory_lib

Status = trajectory_lib.TrajectoryStatus
_CANCELLED = frozenset({Status.CANCELLED})
_VERDICT_STAGES = frozenset({"evaluate", "reward"})


@dataclasses.dataclass
class RunningEpisode:
  """An episode before it ends.

  Attributes:
    rollout_id: its name at the monitor.
    source: source_type and the id that goes with it.
    started: seconds since the epoch.
    turns: (end, seconds by stage) of each turn so far.
    faults: contained failures.
    fields: columns that are known from the beginning.
    image: the screen after the last turn; None where it was not sent.
  """

  rollout_id: str
  source: dict[str, Any]
  started: float
  turns: list[tuple[float, Mapping[str, float]]] = dataclasses.field(
    default_factory=list
  )
  faults: list[dict[str, str]] = dataclasses.field(default_factory=list)
  fields: dict[str, Any] = dataclasses.field(default_factory=dict)
  image: trajectory_lib.ImageRef | None = None


def rollout_status(status: Status) -> str:
  """Returns the database's status of an ended episode."""
  if status.is_policy_outcome:
    return "completed"
  return "cancelled" if status in _CANCELLED else "failed"


def begun(
  running: RunningEpisode, task: Mapping[str, Any], world: task_rows.World
) -> dict[str, Any]:
  """Returns the rows of an episode's start."""
  name = running.rollout_id
  return {
      "tasks": [{
          "client_id": task["client_id"], "task_id": task["task_id"],
          "source_type": task["source_type"],
      }],
      "rollouts": [{
          "client_id": name, "rollout_id": name,
          "task_id": task["client_id"], **running.source, **running.fields,
          "status": "env_creation", "current_phase": "env_creation",
          "start_time": running.started,
      }],
      "environments": [{
          **task_rows.environment(name, world),
          "status": "creating", "creation_time": running.started,
      }],
  }  # fmt: skip


def ended(
  running: RunningEpisode,
  episode: trajectory_lib.Trajectory,
  time: float,
  task: Mapping[str, Any],
  world: task_rows.World,
  max_turns: int | None,
  verdict: task_rows.Verdict = task_rows.Verdict(),
) -> dict[str, list[dict[str, Any]]]:
  """Returns the rows of an episode that has ended.

  Args:
    running: Record of the episode from its start; None without one.
    episode: The finished episode.
    time: End of the episode, seconds since the epoch.
    task: Row of the task, from `task_part`.
    world: World that the episode was played in.
    max_turns: Limit of turns for a task without its own.
    verdict: how the task's success is decided.
  """
  name = running.rollout_id
  turns = episode_figures.turn_times(
    running.started, running.turns, episode, time
  )
  info = episode_figures.last_info(episode)
  rollout = {
    "client_id": name,
    "rollout_id": name,
    "task_id": task["client_id"],
    **running.source,
    **running.fields,
    **episode_figures.times(running.started, episode, turns, time),
    **episode_figures.outcome(episode, info),
    **episode_figures.counts(episode, running.faults),
    "status": rollout_status(episode.status),
    "current_phase": "cleanup",
    "status_message": episode.status.value,
    "error_message": episode.error,
    "max_turns": (
      episode.task.get("max_turns")
      if isinstance(episode.task, Mapping)
      else None
    )
    or max_turns,
    "errors": episode_figures.errors(episode, running.faults),
    "trajectory_path": world.trajectories or None,
    "summary_json": {
      "trajectory_status": episode.status.value,
      "metrics": dict(episode.metrics),
      "policy_versions": episode.versions,
      "tokens": sum(len(s) for s in episode.sequences),
      "sampled_tokens": episode.num_sampled,
      "sequences": len(episode.sequences),
    },
  }
  broken = episode.status is Status.ENV_ERROR
  part: dict[str, list[dict[str, Any]]] = {
      "tasks": [dict(task)],
      "validators": [task_rows.validator(task["client_id"], world, verdict)],
      "rollouts": [rollout],
      "environments": [{
          **task_rows.environment(name, world),
          "status": "error" if broken else "terminated",
          "creation_time": running.started, "termination_time": time,
          "error_message": episode.error if broken else None,
      }],
      "turns": [], "actions": [], "observations": [], "validations": [],
  }  # fmt: skip
  sampled = turn_tokens.by_turn(episode)
  before = _first_image(episode)
  num_messages = 0
  for index, (step, (start, end, seconds)) in enumerate(
    zip(episode.steps, turns)
  ):
    messages, num_messages = turn_rows.new_messages(step, num_messages)
    rows = turn_rows.of_turn(
      name,
      index,
      step,
      (start, end, seconds),
      before,
      sampled.get(index, turn_tokens.NONE),
      messages,
    )
    for kind, new_rows in rows.items():
      part[kind] += new_rows
    after = live_turns.image_of(step.observation)
    before = after if after is not None else before
  failure = _verdict_failure(episode, running)
  if "success" in info or "evaluation" in info or failure is not None:
    evaluation = info.get("evaluation") or {}
    part["validations"].append(
      {
        "client_id": f"{name}:validation",
        "rollout_id": name,
        "validator_id": f"{task['client_id']}:validator",
        "validation_time": rollout["validation_time"],
        "validation_query": verdict.query or f"{world.name}.evaluate",
        "expected_result": verdict.expected or "success",
        "success": bool(info.get("success")) and failure is None,
        "actual_result": str(evaluation.get("score", "")) or None,
        "execution_time": episode.metrics.get("seconds_evaluate"),
        "error_message": failure,
        "details_json": trajectory_lib.encode(evaluation),
      }
    )
  return part


def _verdict_failure(
  episode: trajectory_lib.Trajectory, running: RunningEpisode
) -> str | None:
  """Returns why a verdict is missing; None where none is missing."""
  if episode.status.is_policy_outcome:
    return None
  for fault in running.faults:
    if fault["stage"] in _VERDICT_STAGES:
      return f"{fault['kind']}: {fault['message']}"
  return None


def live_turn(
  running: RunningEpisode, event: events.TurnFinished
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, trajectory_lib.ImageRef]]:
  """Returns the rows of a running episode's turn, and their screenshots.

  The rows of its end have the same ids and more in them. ({}, {}) of a turn
  too short to be watched.
  """
  step = live_turns.shown(event)
  before, running.image = running.image, None
  if step is None:
    return {}, {}
  images = live_turns.images_of(step)
  before = live_turns.first_image(step) or before
  running.image = live_turns.image_of(step.observation) or before
  start = max(running.started, event.time - sum(event.seconds.values()))
  rows = turn_rows.of_turn(
    running.rollout_id,
    event.turn,
    step,
    (start, max(start, event.time), event.seconds),
    before,
    turn_tokens.NONE,
    None,
  )
  return rows, images


def images_of(
  episode: trajectory_lib.Trajectory,
) -> dict[str, trajectory_lib.ImageRef]:
  """Returns the screenshots that `ended` refers to, by hash."""
  refs = [_first_image(episode)]
  refs += [live_turns.image_of(step.observation) for step in episode.steps]
  return {ref.sha256: ref for ref in refs if ref is not None}


def _first_image(
  episode: trajectory_lib.Trajectory,
) -> trajectory_lib.ImageRef | None:
  """Returns the policy's input before its first turn."""
  if not episode.steps:
    return None
  return live_turns.first_image(episode.steps[0]) or next(
    (span.image for s in episode.sequences[:1] for span in s.images), None
  )
