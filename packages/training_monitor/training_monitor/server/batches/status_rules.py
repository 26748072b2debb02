"""Rules of entities: defaults, status transitions, sources, progress.

Does not: ask the database.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

import orjson

from training_monitor.schema import progress
from training_monitor.schema import vocabulary
from training_monitor.server import errors
from training_monitor.server.batches import items

COLUMNS = {
    "training": ("current_step", "total_steps", "run_name", "model_name"),
    "baseline": ("completed_tasks", "total_tasks", "training_id"),
    "eval": ("completed_tasks", "total_tasks", "training_id"),
    "step": (
        "rollout_progress", "training_progress", "progress_percent",
        "training_id", "model_path",
    ),
    "rollout": (
        "current_turn", "max_turns", "num_turns", "source_type", "step_id",
        "eval_id", "baseline_id",
    ),
    "environment": ("rollout_id",),
}  # fmt: skip
"""Columns that a change of an entity needs, beside its status."""
_INPUTS = {
  "training": {"status", "current_step", "total_steps"},
  "baseline": {"status", "completed_tasks", "total_tasks"},
  "eval": {"status", "completed_tasks", "total_tasks"},
  "step": {"status", "rollout_progress", "training_progress"},
  "rollout": {"status", "current_turn", "max_turns"},
}
"""Columns that progress is computed from."""
_SOURCE_IDS = tuple((w, f"{w}_id") for w in vocabulary.SOURCE_TYPES)


@dataclasses.dataclass(slots=True)
class EntityState:
  """An entity while a batch is applied.

  Attributes:
    status: None before it is made.
    fields: its `COLUMNS`.
  """

  status: str | None
  fields: dict[str, Any]


def check_source(item: items.Item, row: EntityState) -> None:
  """Refuses a rollout unless it has exactly the source that it names.

  Raises:
    ApiError: 400.
  """
  now = lambda name: item.values.get(name, row.fields.get(name))
  kind = now("source_type")
  sources = [w for w, name in _SOURCE_IDS if now(name) is not None]
  if kind is None or sources != [kind]:
    raise errors.invalid(
      [
        errors.fault(
          f"{item.path}.source_type",
          kind,
          "a rollout has exactly one of step_id, eval_id and baseline_id, the"
          f" one that source_type names; this one has"
          f" {', '.join(f'{w}_id' for w in sources) or 'none'}",
        )
      ]
    )


def refused_status(
  kind: str, item: items.Item, row: EntityState
) -> dict[str, Any] | None:
  """Takes a status out of a change that may not follow the present one.

  Returns:
    The reply's entry on it; None when nothing was taken out.
  """
  new = item.values.get("status")
  if new is None or row.status is None:
    return None
  if vocabulary.may_follow(kind, row.status, new):
    return None
  del item.values["status"]
  return {
    "kind": kind,
    "client_id": item.client_id,
    "field": "status",
    "value": new,
    "kept": row.status,
  }


def advance(kind: str, row: EntityState, values: dict[str, Any]) -> None:
  """Updates `row` with a change; adds progress to the change's `values`.

  A client's own progress wins; else it is computed, when one of its inputs is
  new.
  """
  before = row.fields
  state = {n: values.get(n, before.get(n)) for n in COLUMNS[kind]}
  status = values.get("status", row.status)
  new = row.status is None or not _INPUTS.get(kind, set()).isdisjoint(values)
  if new and "progress_percent" not in values:
    percent = _percent(kind, status, state)
    if percent is not None:
      values["progress_percent"] = percent
  if kind == "step" and "progress_percent" in values:
    # A late change does not set a step back.
    values["progress_percent"] = state["progress_percent"] = max(
      values["progress_percent"], before.get("progress_percent") or 0.0
    )
  row.fields = state


_COUNTED = {
  "training": ("current_step", "total_steps"),
  "baseline": ("completed_tasks", "total_tasks"),
  "eval": ("completed_tasks", "total_tasks"),
  "rollout": ("current_turn", "max_turns"),
}


def _percent(
  kind: str, status: str | None, state: Mapping[str, Any]
) -> float | None:
  if kind in _COUNTED:
    count, total = _COUNTED[kind]
    return progress.share(status, state.get(count), state.get(total))
  if kind == "step":
    return progress.step(
      status,
      _loads(state.get("rollout_progress")),
      _loads(state.get("training_progress")),
    )
  return None


def _loads(value: str | None) -> Any:
  return None if value is None else orjson.loads(value)


def fill_defaults(kind: str, item: items.Item, now: str, project: int) -> None:
  """Sets the columns of a new entity that its client left out.

  Args:
    kind: Kind of the entity.
    item: Item of the client; its values are completed.
    now: the time, in the database's form.
    project: Project that the entity belongs to.
  """
  values = item.values
  if kind == "training":
    values.setdefault("run_name", item.client_id or f"run {now} #{project}")
    values.setdefault("log_path", "")
    values.setdefault("model_name", "")
    values.setdefault("last_heartbeat", now)
  elif kind == "task":
    values.setdefault("name", values.get("task_id"))
    values.setdefault("description", values["name"])
  elif kind == "rollout":
    sources = [
      w for w in vocabulary.SOURCE_TYPES if values.get(f"{w}_id") is not None
    ]
    if len(sources) == 1:
      values.setdefault("source_type", sources[0])
    values["is_eval"] = int(values.get("source_type") != "step")
    values.setdefault("model_path", "")
  elif kind == "turn":
    values.setdefault("start_time", now)
  elif kind == "validation":
    values.setdefault("validation_time", now)
