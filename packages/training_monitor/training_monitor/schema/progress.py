"""Computes the progress of entities, in percent.

Pure functions. All return a number in [0, 100] and take unknown values as
None; nothing divides by zero.
"""

from __future__ import annotations

from typing import Any, Mapping

_ROLLOUT_SHARE = 50.0


def ratio(count: float | None, total: float | None) -> float:
  """Returns `count` of `total` in percent; 0 while either is unknown."""
  if not count or not total or total <= 0:
    return 0.0
  return max(0.0, min(100.0, 100.0 * count / total))


def training(
    status: str | None, current_step: int | None, total_steps: int | None
) -> float:
  """Returns the share of steps made; 100 for a completed run."""
  if status == "completed":
    return 100.0
  return ratio(current_step, total_steps)


def measuring(
    status: str | None, completed_tasks: int | None, total_tasks: int | None
) -> float:
  """Returns the share of completed tasks; 100 for a completed measurement."""
  if status == "completed":
    return 100.0
  return ratio(completed_tasks, total_tasks)


def rollout(
    status: str | None, current_turn: int | None, max_turns: int | None
) -> float:
  """Returns the share of the allowed turns; 100 for a completed episode."""
  if status == "completed":
    return 100.0
  return ratio(current_turn, max_turns)


def step(
    status: str | None,
    rollout_progress: Mapping[str, Any] | None,
    training_progress: Mapping[str, Any] | None,
) -> float:
  """Returns the progress: half for the rollouts, half for the update.

  Args:
    status: Status of the step. From `training` on the rollouts are done.
    rollout_progress: {completed_groups, total_groups, completed_envs,
      total_envs}; environments count where they are known.
    training_progress: {completed_substeps, total_substeps}.
  """
  if status == "completed":
    return 100.0
  collected = rollout_progress or {}
  updated = training_progress or {}
  if status == "training":
    rollouts = 100.0
  elif collected.get("total_envs"):
    rollouts = ratio(collected.get("completed_envs"), collected["total_envs"])
  else:
    rollouts = ratio(
        collected.get("completed_groups"), collected.get("total_groups")
    )
  substeps = ratio(
      updated.get("completed_substeps"), updated.get("total_substeps")
  )
  share = _ROLLOUT_SHARE / 100.0
  return share * rollouts + (1.0 - share) * substeps


ROLLOUT_PROGRESS_KEYS = (
    "completed_groups", "total_groups", "completed_envs", "total_envs",
)  # pyformat: disable
TRAINING_PROGRESS_KEYS = ("completed_substeps", "total_substeps")
