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


def share(status: str | None, count: int | None, total: int | None) -> float:
  """Returns the progress of a run, measurement or episode; 100 once completed.

  Args:
    status: Status of the entity.
    count: Number of steps, tasks or turns that it has made.
    total: Number of steps, tasks or turns that it may make.
  """
  return 100.0 if status == "completed" else ratio(count, total)


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
  "completed_groups",
  "total_groups",
  "completed_envs",
  "total_envs",
)
TRAINING_PROGRESS_KEYS = ("completed_substeps", "total_substeps")
