"""Views with the columns of the later schema of other monitors.

`monitor_later_<table>` has every column of the table and, behind them, those
that the later schema added: sent ones from `monitor_raw_value`, absent ones
derived where the tables have what they need. They hold no data, so `database`
replaces all of them whenever they differ from those that are installed.

`monitor_later_group`, and `group` by its own name, have the groups that clients
sent, with figures of their rollouts; `monitor_later_environment` also has those
that wait for their rollout. `later_writes` makes the views writable.
"""

from __future__ import annotations

from typing import Mapping

import sqlalchemy as sa

from training_monitor.schema import tables
from training_monitor.schema import vocabulary

PREFIX = "monitor_later_"
_TIMING = ("avg_turn_time", "estimated_total_time", "estimated_remaining_time")
ADDED: Mapping[str, tuple[str, ...]] = {
    **{kind: _TIMING for kind in ("step", "eval", "baseline", "training")},
    "task": ("instruction",),
    "rollout": (
        "group_id", "env_id", "group_num", "trajectory_data_json",
        "avg_turn_time",
    ),
    "turn": (
        "model_response", "thinking", "text", "screen_before", "screen_after",
        "action_json", "model_specific_input_json", "avg_turn_time",
    ),
    "action": ("action_name", "args", "call_id", "json"),
    "validation": ("screenshot_uri",),
}  # fmt: skip
"""Table -> columns that the later schema added, in an order in which a view's
parts come first."""
_OF_GROUP = {
    "batch": "integer", "status": "text", "progress_percent": "number",
    "current_phase": "text", "status_message": "text",
    "error_message": "text", "start_time": "time", "end_time": "time",
    "num_rollouts": "integer", "completed_rollouts": "integer",
    "reward_mean": "number", "reward_std": "number",
    "success_count": "integer", "metrics_json": "text",
    **dict.fromkeys(_TIMING, "number"),
}  # fmt: skip
GROUP = ("source_type", *_OF_GROUP)
"""Columns of a group beyond those of `monitor_group`."""
NOT_PENDING = ("id", "rollout_id", "created_at", "updated_at")
"""Columns of an environment that one that waits for its rollout lacks."""


def statements(dialect: str) -> list[str]:
  """Returns DDL that makes all views.

  Args:
    dialect: "sqlite" or "postgresql".
  """
  of = _Expressions(dialect == "sqlite")
  views = [] if of.sqlite else [JSON_TEXT, _TIME]
  for kind, names in ADDED.items():
    added = ", ".join(f"{of.column(kind, n)} AS {n}" for n in names)
    views.append(
      f'CREATE VIEW {PREFIX}{kind} AS SELECT t.*, {added} FROM "{kind}" t'
    )
  figures = "".join(f", {of.of_group(n)} AS {n}" for n in _OF_GROUP)
  return [
    *views,
    f"CREATE VIEW {PREFIX}environment AS SELECT t.* FROM environment t UNION"
    f" ALL SELECT {', '.join(map(of.pending, tables.environment.c))} FROM"
    " monitor_pending_environment p",
    f"CREATE VIEW {PREFIX}group AS SELECT t.*, CASE WHEN t.step_id IS NOT"
    " NULL THEN 'step' WHEN t.eval_id IS NOT NULL THEN 'eval' ELSE"
    f" 'baseline' END AS source_type{figures} FROM monitor_group t",
    f'CREATE VIEW "group" AS SELECT * FROM {PREFIX}group',
  ]


def has_foreign_group(connection: sa.Connection) -> bool:
  """Returns whether `"group"` is a table or view that the monitor lacks."""
  inspector = sa.inspect(connection)
  if "group" in inspector.get_table_names():
    return True
  if "group" not in inspector.get_view_names():
    return False
  return f"{PREFIX}group" not in inspector.get_view_definition("group")


def drop(connection: sa.Connection) -> None:
  """Takes away every view of the monitor."""
  connection.exec_driver_sql('DROP VIEW IF EXISTS "group"')
  for kind in ("group", "environment", *reversed(tuple(ADDED))):
    connection.exec_driver_sql(f"DROP VIEW IF EXISTS {PREFIX}{kind}")


# PostgreSQL 15 has no other way to read what may be no JSON or no time.
_TIME = (
  "CREATE OR REPLACE FUNCTION monitor_fn_time(given text) RETURNS timestamp"
  " AS $$ BEGIN RETURN given::timestamp; EXCEPTION WHEN others THEN RETURN"
  " NULL; END $$ LANGUAGE plpgsql STABLE"
)
JSON_TEXT = (
  "CREATE OR REPLACE FUNCTION monitor_fn_json_text(given text, name text)"
  " RETURNS text AS $$ BEGIN RETURN given::json ->> name; EXCEPTION WHEN"
  " others THEN RETURN NULL; END $$ LANGUAGE plpgsql IMMUTABLE"
)


class _Expressions:
  """SQL of the added columns of a row `t`."""

  def __init__(self, sqlite: bool):
    self.sqlite = sqlite

  def column(self, kind: str, name: str) -> str:
    if name == "avg_turn_time":
      return f"COALESCE({self._number(kind, name)}, {self._turn_time(kind)})"
    if name.startswith("estimated_"):
      return f"COALESCE({self._number(kind, name)}, {self._time(kind, name)})"
    sent = self._raw(kind, name)
    derived = self._derived(kind, name)
    return f"COALESCE({sent}, {derived})" if derived else sent

  def of_group(self, name: str) -> str:
    """Returns SQL of a column of a group `t`."""
    kind = _OF_GROUP[name]
    if kind == "time":
      value = "v.value" if self.sqlite else "monitor_fn_time(v.value)"
      sent = self._raw("monitor_group", name, value)
    elif kind == "text":
      sent = self._raw("monitor_group", name)
    else:
      sent = self._number("monitor_group", name, integer=kind == "integer")
    words = ", ".join(f"'{w}'" for w in sorted(vocabulary.FINISHED["rollout"]))
    ended = f"count(CASE WHEN r.status IN ({words}) THEN 1 END)"
    figure = {
      "num_rollouts": "count(*)",
      "completed_rollouts": (
        "count(CASE WHEN r.status = 'completed' THEN 1 END)"
      ),
      "success_count": "count(CASE WHEN r.task_success = 1 THEN 1 END)",
      "reward_mean": "avg(r.reward)",
      "status": (
        f"CASE WHEN count(*) = 0 THEN 'pending' WHEN {ended} = count(*)"
        " THEN 'completed' ELSE 'running' END"
      ),
      "progress_percent": f"100.0 * {ended} / NULLIF(count(*), 0)",
      "start_time": "min(r.start_time)",
      "end_time": f"CASE WHEN {ended} = count(*) THEN max(r.end_time) END",
      "avg_turn_time": (
        "avg((SELECT avg(x.turn_time) FROM turn x WHERE x.rollout_id = r.id))"
      ),
    }.get(name)
    if figure is None:
      return sent
    own = " OR ".join(
      f"(r.source_type = '{s}' AND r.{s}_id = t.{s}_id)"
      for s in vocabulary.SOURCE_TYPES
    )
    return (
      f"COALESCE({sent}, (SELECT {figure} FROM rollout r WHERE ({own}) AND"
      ' r."group" = t.group_num))'
    )

  def pending(self, column: sa.Column) -> str:
    """Returns SQL of a column of an environment `p` without a rollout."""
    name = str(column.name)
    if name in ("id", "created_at"):
      return f"p.{name}"
    if name == "updated_at":
      return "p.created_at"
    if name == "rollout_id":
      return "NULL"
    if self.sqlite:
      value = f"json_extract(p.fields_json, '$.{name}')"
    else:
      value = f"monitor_fn_json_text(p.fields_json, '{name}')"
      if isinstance(column.type, sa.TIMESTAMP):
        value = f"monitor_fn_time({value})"
    return f"COALESCE({value}, 'pending')" if name == "status" else value

  def _derived(self, kind: str, name: str) -> str:
    return {
      ("task", "instruction"): "t.description",
      ("rollout", "group_num"): 't."group"',
      ("rollout", "env_id"): (
        "(SELECT e.id FROM environment e WHERE e.rollout_id = t.id)"
      ),
      ("rollout", "group_id"): self._group(),
      ("turn", "model_response"): self._metric("model_response"),
      ("turn", "thinking"): self._metric("thought"),
      ("turn", "screen_before"): self._screen("ASC"),
      ("turn", "screen_after"): self._screen("DESC"),
      ("action", "action_name"): "t.tool_name",
      ("action", "args"): "t.tool_args",
      ("action", "call_id"): self._raw("action", "action_call_id"),
      ("action", "json"): self._raw("action", "action_json"),
    }.get((kind, name), "")

  def _raw(self, kind: str, name: str, value: str = "v.value") -> str:
    if (kind, name) in (
      ("rollout", "group_id"),
      ("rollout", "env_id"),
      ("rollout", "group_num"),
    ):
      return "NULL"  # Ids of a client are no ids of this database.
    return (
      f"(SELECT {value} FROM monitor_raw_value v WHERE v.kind = '{kind}' AND"
      f" v.entity_id = t.id AND v.field = '{name}')"
    )

  def _number(self, kind: str, name: str, integer: bool = False) -> str:
    """Returns SQL of a raw value as a number; NULL where it is none.

    Args:
      kind: Kind of the row.
      name: Field of the raw value.
      integer: Whether only a whole number of at most 15 digits is one.
    """
    if self.sqlite:
      number = (
        "json_type(v.value) = 'integer' AND length(abs(v.value)) <= 15 THEN"
        " CAST(v.value AS INTEGER)"
        if integer
        else "json_type(v.value) IN ('integer', 'real') THEN CAST(v.value AS"
        " REAL)"
      )
      value = f"CASE WHEN json_valid(v.value) THEN CASE WHEN {number} END END"
    elif integer:
      value = "CASE WHEN v.value ~ '^-?[0-9]{1,15}$' THEN v.value::bigint END"
    else:
      value = (
        "CASE WHEN v.value ~"
        " '^-?[0-9]{1,15}([.][0-9]{1,30})?([eE][-+]?[0-9]{1,2})?$' THEN"
        " v.value::double precision END"
      )
    return self._raw(kind, name, value)

  def _turn_time(self, kind: str) -> str:
    if kind == "turn":
      return "t.turn_time"
    if kind == "rollout":
      return "(SELECT avg(x.turn_time) FROM turn x WHERE x.rollout_id = t.id)"
    if kind == "training":  # Of all its turns it would take seconds.
      return (
        f"(SELECT s.avg_turn_time FROM {PREFIX}step s WHERE s.training_id ="
        " t.id ORDER BY s.step DESC LIMIT 1)"
      )
    return (
      "(SELECT avg(x.turn_time) FROM rollout r JOIN turn x ON x.rollout_id ="
      f" r.id WHERE r.source_type = '{kind}' AND r.{kind}_id = t.id)"
    )

  def _time(self, kind: str, name: str) -> str:
    """Returns SQL of seconds estimated from the progress."""
    end = "COALESCE(t.end_time, t.updated_at)"
    spent = (
      f"((julianday({end}) - julianday(t.start_time)) * 86400.0)"
      if self.sqlite
      else f"CAST(EXTRACT(EPOCH FROM {end} - t.start_time) AS double precision)"
    )
    ended = ", ".join(f"'{w}'" for w in sorted(vocabulary.FINISHED[kind]))
    total = name == "estimated_total_time"
    share = "100.0" if total else "(100.0 - t.progress_percent)"
    return (
      f"CASE WHEN t.status IN ({ended}) THEN {spent if total else '0.0'}"
      f" WHEN t.progress_percent > 1e-6 THEN {spent} * {share} /"
      " t.progress_percent END"
    )

  def _group(self) -> str:
    parts = [
      f"WHEN t.source_type = '{s}' THEN (SELECT g.id FROM monitor_group g"
      f' WHERE g.{s}_id = t.{s}_id AND g.group_num = t."group")'
      for s in vocabulary.SOURCE_TYPES
    ]
    return f"CASE {' '.join(parts)} END"

  def _metric(self, name: str) -> str:
    if self.sqlite:
      return (
        "CASE WHEN json_valid(t.metrics_json) THEN"
        f" json_extract(t.metrics_json, '$.{name}') END"
      )
    return f"monitor_fn_json_text(t.metrics_json, '{name}')"

  def _screen(self, order: str) -> str:
    return (
      "(SELECT o.screenshot_uri FROM obs o WHERE o.turn_id = t.id AND"
      f" o.screenshot_uri IS NOT NULL ORDER BY o.id {order} LIMIT 1)"
    )


assert set(ADDED) <= {t.name for t in tables.TABLES}
