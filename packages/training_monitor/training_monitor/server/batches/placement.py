"""Places rollouts that name a group, or no source at all.

Works inside a transaction that it neither begins nor ends.
"""

from __future__ import annotations

from typing import Any, Sequence

from training_monitor.schema import vocabulary
from training_monitor.server import errors
from training_monitor.server import sql as sql_lib
from training_monitor.server.batches import items as items_lib
from training_monitor.server.batches import references

_SOURCES = tuple(f"{kind}_id" for kind in vocabulary.SOURCE_TYPES)


def group_key(item: items_lib.Item) -> tuple[str, ...] | None:
  """Returns the columns that a group is found by; None without a source."""
  sources = [c for c in _SOURCES if item.values.get(c) is not None]
  if len(sources) != 1 or item.values.get("group_num") is None:
    return None
  return (sources[0], "group_num")


def check_new_group(item: items_lib.Item) -> None:
  """Checks that a group is of one step, evaluation or baseline.

  Raises:
    ApiError: 400.
  """
  sources = [c for c in _SOURCES if item.values.get(c) is not None]
  if len(sources) != 1:
    raise errors.invalid(
      [
        errors.fault(
          f"{item.path}.step_id",
          sources,
          "a new group needs one of step_id, eval_id and baseline_id",
        )
      ]
    )


def by_groups(
  sql: sql_lib.Sql, who: references.References, items: Sequence[items_lib.Item]
) -> list[dict[str, Any]]:
  """Gives rollouts the source and number of the group that they name.

  A group of no known id is kept as the raw value that it is. What a rollout
  states itself stands.

  Returns:
    Faults: rollouts that state another number than their group has.
  """
  named = [item for item in items if "group_id" in item.raw]
  if not named:
    return []
  names = who.look_up("monitor_group", [item.raw["group_id"] for item in named])
  by_group: dict[int, list[items_lib.Item]] = {}
  for item in named:
    group_id = item.raw["group_id"]
    id_ = names.get(group_id)
    if id_ is None and len(group_id) < 19 and group_id.isascii():
      id_ = int(group_id) if group_id.isdigit() else None
    if id_ is not None:
      by_group.setdefault(id_, []).append(item)
  who.check_numbers("monitor_group", sorted(by_group))
  own_groups = [id_ for id_ in by_group if ("monitor_group", id_) in who.mine]
  if not own_groups:
    return []
  rows = sql.among(
    f"SELECT id, group_num, {', '.join(_SOURCES)} FROM monitor_group WHERE"
    " id {among}",
    (),
    own_groups,
  )
  faults = []
  for id_, number, *sources in rows:
    for item in by_group[id_]:
      values = item.values
      if values.setdefault("group", number) != number:
        faults.append(
          {
            "kind": "rollout",
            "client_id": item.client_id,
            "field": "group_id",
            "value": item.raw["group_id"],
            "kept": f"group {values['group']}, which the rollout states",
          }
        )
      elif all(values.get(c) is None for c in _SOURCES):
        for kind, column, value in zip(
          vocabulary.SOURCE_TYPES, _SOURCES, sources
        ):
          if value is not None:
            values[column] = value
            values["source_type"] = kind
  return faults


def under_newest_step(
  sql: sql_lib.Sql, training: int | None, item: items_lib.Item
) -> dict[str, Any] | None:
  """Puts a step's rollout that names no step under the run's newest one.

  Returns:
    The fault to report, if it did.
  """
  values = item.values
  if (
    values.get("source_type") not in (None, "step")
    or training is None
    or any(values.get(c) is not None for c in _SOURCES)
  ):
    return None
  rows = sql.rows(
    "SELECT id, step FROM step WHERE training_id = ? ORDER BY step DESC"
    " LIMIT 1",
    (training,),
  )
  if not rows:
    return None
  values["source_type"], values["step_id"] = "step", rows[0][0]
  return {
    "kind": "rollout",
    "client_id": item.client_id,
    "field": "step_id",
    "value": None,
    "kept": f"step {rows[0][1]}, the run's newest",
  }
