"""Takes the times, the outcome and the counts of an ended episode.

They are the episode's own records; nothing is computed twice.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
import itertools
from typing import Any

from training_monitor.client.rows import turn_rows
from training_monitor.core import trajectory as trajectory_lib

Status = trajectory_lib.TrajectoryStatus
_ANSWERS = frozenset({"answer", "terminate"})
_DECIDED = frozenset({Status.SUCCEEDED, Status.FAILED})


def turn_times(
  started: float,
  measured: Sequence[tuple[float, Mapping[str, float]]],
  episode: trajectory_lib.Trajectory,
  end: float,
) -> list[tuple[float, float, Mapping[str, float]]]:
  """Returns (start, end, seconds by stage) of each turn, in order of time.

  Args:
    started: Start of the episode, seconds since the epoch.
    measured: (end, seconds by stage) of the turns that were reported.
    episode: The finished episode.
    end: End of the episode, seconds since the epoch.
  """
  times = []
  last = started
  for _, recorded in itertools.zip_longest(
    episode.steps, measured[: len(episode.steps)]
  ):
    finish, seconds = recorded or (end, {})
    finish = max(last, min(finish, end) if end > last else last)
    start = max(last, finish - sum(seconds.values()))
    times.append((start, finish, seconds))
    last = finish
  return times


def times(
  started: float,
  episode: trajectory_lib.Trajectory,
  turns: Sequence[Any],
  end: float,
) -> dict[str, Any]:
  """Returns the times at which the measured stages ended.

  The verdict of a gym is part of the last turn, which then ends the task when
  it begins; another one comes after that turn.
  """
  end = max(end, started)
  spent = episode.metrics
  first = turns[0][0] if turns else None
  last = turns[-1][1] if turns else None
  created = ready = None
  if "seconds_reset" in spent:
    created = min(started + spent["seconds_reset"], first or end)
    if "seconds_agent_init" in spent:
      ready = min(created + spent["seconds_agent_init"], first or end)
  judged = spent.get("seconds_evaluate")
  verdict = None
  if last is not None and judged is not None:
    if "evaluation" in last_info(episode):
      verdict, last = last, max(turns[-1][0], last - judged)
    else:
      verdict = min(last + judged, end)
  return {
    "start_time": started,
    "end_time": end,
    "env_creation_time": created,
    "agent_init_time": ready,
    "task_start_time": first,
    "task_end_time": last,
    "validation_time": verdict,
    "rollout_time": end - started,
  }


def last_info(episode: trajectory_lib.Trajectory) -> Mapping[str, Any]:
  """Returns the info of the last turn, which has the gym's verdict."""
  return episode.steps[-1].info if episode.steps else {}


def outcome(
  episode: trajectory_lib.Trajectory, info: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the columns of success, claims and reward."""
  success = episode.status is Status.SUCCEEDED
  claims = [
    a
    for step in episode.steps
    for a in turn_rows.gui_actions(step)
    if a["kind"] in _ANSWERS
  ]
  claimed = None
  if claims:
    # An answer claims success, unless it claims failure.
    claimed = claims[-1].get("success") is not False
  won = [n for n, s in enumerate(episode.steps, 1) if s.info.get("success")]
  paid = [n for n, s in enumerate(episode.steps, 1) if s.reward > 0]
  first = next(iter(won or paid), None)
  return {
    "task_completed": episode.status in _DECIDED,
    "task_success": success,
    "agent_reported_success": claimed,
    "validation_passed": (bool(info["success"]) if "success" in info else None),
    "ran_out_of_turns": episode.status is Status.MAX_TURNS,
    "attempted_completion": bool(claims),
    "turn_first_success": first,
    "turn_task_completed": (
      episode.num_turns if episode.status in _DECIDED else None
    ),
    "num_turns": episode.num_turns,
    "current_turn": episode.num_turns,
    "reward": float(episode.reward),
  }


def counts(
  episode: trajectory_lib.Trajectory, faults: Sequence[dict[str, str]]
) -> dict[str, int]:
  """Returns the columns that count actions, errors and contained `faults`."""
  actions = [a for step in episode.steps for a in turn_rows.gui_actions(step)]
  unparsed = named = argued = 0
  for step in episode.steps:
    kinds = collections.Counter(step.info.get("invalid_kinds") or ())
    if step.info.get("parse_errors") or kinds[trajectory_lib.NO_CALL]:
      unparsed += 1
      continue
    untyped = len(step.info.get("invalid_actions") or ()) - kinds.total()
    named += kinds[trajectory_lib.TOOL_NAME]
    argued += kinds[trajectory_lib.TOOL_ARGUMENTS] + max(0, untyped)
  failed = episode.error is not None and not episode.status.is_policy_outcome
  return {
    "num_total_actions": len(actions),
    "consecutive_repeated_actions": sum(
      a == b for a, b in zip(actions, actions[1:])
    ),
    "parse_errors": unparsed,
    "tool_name_errors": named,
    "tool_arg_errors": argued,
    "runtime_errors": max(len(faults), int(failed)),
  }


def errors(
  episode: trajectory_lib.Trajectory, faults: Sequence[dict[str, str]]
) -> list[dict[str, Any]]:
  """Returns every failure; parsing and call errors name their turn."""
  entries: list[dict[str, Any]] = list(faults)
  if episode.error and not entries:
    entries.append({"kind": episode.status.value, "message": episode.error})
  for number, step in enumerate(episode.steps, 1):
    for kind in ("parse_errors", "invalid_actions"):
      entries += [
        {"kind": kind, "turn": number, "message": str(text)}
        for text in step.info.get(kind) or ()
      ]
  return entries
