"""Makes the rows of tasks, and of what decides their success.

A task is recorded when an episode of it begins; those of a list all at once,
before the first one, with what only the list knows of them.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Mapping, Sequence

from training_monitor.schema import vocabulary


@dataclasses.dataclass(frozen=True)
class World:
  """World that a run's episodes are played in.

  Attributes:
    box: "linux" or "android".
    name: Name of the gym, or of the environment without one.
    trajectories: file of the run's trajectories, "" for none.
  """

  box: str = "linux"
  name: str = "gym"
  trajectories: str = ""


@dataclasses.dataclass(frozen=True)
class Verdict:
  """Criterion of success at a task.

  Attributes:
    kind: Kind of the validator.
    query: Question to the validator; None where the gym decides.
    expected: the right answer; None where success is one.
  """

  kind: str = "state"
  query: str | None = None
  expected: str | None = None


def task_part(
  task_id: str, task: object, world: World, split: str
) -> dict[str, Any]:
  """Returns the row of an episode's task."""
  fields = task if isinstance(task, Mapping) else {}
  instruction = str(fields.get("instruction") or task_id)
  family = str(fields.get("family") or "")
  return {
    "client_id": task_id,
    "task_id": task_id,
    "name": instruction[:200],
    "description": instruction,
    "max_steps": fields.get("max_turns"),
    "app_name": family or None,
    "source_type": world.name,
    "tags": [t for t in (family, split) if t],
    "validation_type": "state",
  }


def listed(
  tasks: Sequence[Mapping[str, Any]], world: World
) -> dict[str, list[dict[str, Any]]]:
  """Returns the rows of listed tasks and of their validators."""
  part: dict[str, list[dict[str, Any]]] = {"tasks": [], "validators": []}
  for task in tasks:
    name = str(task["task_id"])
    columns = {
      column: vocabulary.canonical("task", column, str(task.get(column)))
      for column in ("difficulty", "category", "validation_type")
    }
    # Words that the database does not have are still found as tags.
    tags = [
      str(task[column])
      for column, word in columns.items()
      if task.get(column) and word is None
    ]
    tags += [str(t) for t in task.get("tags") or ()]
    tags += [t for t in (task.get("family"), task.get("split")) if t]
    text = str(task.get("instruction") or task.get("description") or name)
    query = task.get("validation_query") or None
    expected = _as_text(task.get("expected_result"))
    part["tasks"].append({
        "client_id": name, "task_id": name,
        "name": str(task.get("name") or text)[:200], "description": text,
        "max_steps": task.get("max_steps"),
        "app_name": task.get("family") or None,
        "source_type": world.name, "tags": list(dict.fromkeys(tags)),
        "prerequisites": list(task.get("prerequisites") or ()),
        "validation_query": query, "expected_result": expected, **columns,
    })  # fmt: skip
    part["validators"].append(
      validator(name, world, verdict_of(part["tasks"][-1]))
    )
  return part


def verdict_of(task: Mapping[str, Any]) -> Verdict:
  """Returns the criterion of success at a task of `listed`."""
  return Verdict(
    task["validation_type"] or "state",
    task["validation_query"],
    task["expected_result"],
  )


def validator(task_id: str, world: World, verdict: Verdict) -> dict[str, Any]:
  return {
    "client_id": f"{task_id}:validator",
    "task_id": task_id,
    "validator_type": verdict.kind,
    "validation_query": verdict.query,
    "validation_method": f"{world.name}.evaluate",
    "config_json": {"expected_result": verdict.expected},
  }


def environment(rollout: str, world: World) -> dict[str, Any]:
  return {
    "client_id": f"{rollout}:env",
    "rollout_id": rollout,
    "env_type": world.box,
    "box_type": world.box,
    "config_json": {"gym": world.name},
  }


def _as_text(value: object) -> str | None:
  if value is None or value == "":
    return None
  return (
    value
    if isinstance(value, str)
    else json.dumps(value, default=str, ensure_ascii=False)
  )
