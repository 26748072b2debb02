"""What a change does to an entity that has a status.

Pure: nothing here asks the database.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

import orjson
from tunix.rl.multi_turn.monitor.schema import progress
from tunix.rl.multi_turn.monitor.schema import vocabulary
from tunix.rl.multi_turn.monitor.server import errors
from tunix.rl.multi_turn.monitor.server import items

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
}  # pyformat: disable
"""What must be known of an entity, beside its status, to change it."""
_INPUTS = {
    "training": {"status", "current_step", "total_steps"},
    "baseline": {"status", "completed_tasks", "total_tasks"},
    "eval": {"status", "completed_tasks", "total_tasks"},
    "step": {"status", "rollout_progress", "training_progress"},
    "rollout": {"status", "current_turn", "max_turns"},
}
"""What progress is computed from."""
_SOURCE_IDS = tuple((w, f"{w}_id") for w in vocabulary.SOURCE_TYPES)


@dataclasses.dataclass(slots=True)
class Row:
  """An entity while a batch is applied.

  Attributes:
    status: None before it is made.
    fields: its `COLUMNS`.
  """

  status: str | None
  fields: dict[str, Any]


def check_source(item: items.Item, row: Row) -> None:
  """Refuses a rollout that has not exactly the source that it names.

  Raises:
    ApiError: 400.
  """
  now = lambda name: item.values.get(name, row.fields.get(name))
  kind = now("source_type")
  given = [w for w, name in _SOURCE_IDS if now(name) is not None]
  if kind is None or given != [kind]:
    raise errors.invalid([errors.fault(
        f"{item.path}.source_type", kind,
        "a rollout has exactly one of step_id, eval_id and baseline_id, the"
        f" one that source_type names; this one has"
        f" {', '.join(f'{w}_id' for w in given) or 'none'}",
    )])  # pyformat: disable


def refused_status(
    kind: str, item: items.Item, row: Row
) -> dict[str, Any] | None:
  """Takes a status out of a change that may not follow the present one.

  Returns:
    What to tell the client; None when nothing was taken out.
  """
  new = item.values.get("status")
  if new is None or row.status is None:
    return None
  if vocabulary.may_follow(kind, row.status, new):
    return None
  del item.values["status"]
  return {
      "kind": kind, "client_id": item.client_id, "field": "status",
      "value": new, "kept": row.status,
  }  # pyformat: disable


def advance(kind: str, row: Row, values: dict[str, Any]) -> None:
  """Brings `row` to what it will be; adds progress to a change's `values`.

  What a client says of progress wins; else it is computed, when something that
  it depends on is new.
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
    # Late news does not set a step back.
    values["progress_percent"] = state["progress_percent"] = max(
        values["progress_percent"], before.get("progress_percent") or 0.0
    )
  row.fields = state


def _percent(
    kind: str, status: str | None, state: Mapping[str, Any]
) -> float | None:
  if kind == "training":
    return progress.training(
        status, state.get("current_step"), state.get("total_steps")
    )
  if kind in ("baseline", "eval"):
    return progress.measuring(
        status, state.get("completed_tasks"), state.get("total_tasks")
    )
  if kind == "rollout":
    return progress.rollout(
        status, state.get("current_turn"), state.get("max_turns")
    )
  if kind == "step":
    return progress.step(
        status,
        _loads(state.get("rollout_progress")),
        _loads(state.get("training_progress")),
    )
  return None


def _loads(value: str | None) -> Any:
  return None if value is None else orjson.loads(value)
