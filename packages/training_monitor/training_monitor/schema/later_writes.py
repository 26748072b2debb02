"""Triggers by which the views of the later schema can be written.

INSERT, UPDATE and DELETE of `monitor_later_<table>` and of `"group"` change the
table behind the view. A column that the later schema added is stored as the raw
value that `later_views` reads; NULL removes it, and the view derives the column
again. `group_num`, `action_name` and `args` are other names of columns.
Defaults and rules are the table's own.

An environment of the later schema exists before its rollout: it waits in
`monitor_pending_environment` until a rollout names it by `env_id`.

SQLite reports no id of a row that is inserted into a view; give one, or look
the row up by its key. PostgreSQL returns it.
"""

from __future__ import annotations

from typing import Iterable

import sqlalchemy as sa

from training_monitor.schema import later_views
from training_monitor.schema import tables
from training_monitor.schema import triggers
from training_monitor.schema import vocabulary

_ALIASES = {
  ("rollout", "group"): "group_num",
  ("action", "tool_name"): "action_name",
  ("action", "tool_args"): "args",
}
"""(table, column) -> the later schema's name of the column."""
_DERIVED = frozenset({"group_id", "env_id", "source_type", *_ALIASES.values()})
"""Added columns that are no raw values."""
_GROUP_NUM = (
  "(SELECT g.group_num FROM monitor_group g WHERE g.id = NEW.group_id)"
)
_NEXT_ENVIRONMENT = (
  "(SELECT max(n) + 1 FROM (SELECT 0 AS n UNION ALL SELECT max(id) FROM"
  " environment UNION ALL SELECT max(id) FROM monitor_pending_environment"
  " UNION ALL SELECT seq FROM sqlite_sequence WHERE name = 'environment'))"
)


def statements(dialect: str) -> list[str]:
  """Returns DDL that makes all triggers, once the views exist.

  Args:
    dialect: "sqlite" or "postgresql".
  """
  ddl = []
  for view, table, added in (
    *((f"{later_views.PREFIX}{k}", k, n) for k, n in later_views.ADDED.items()),
    (f"{later_views.PREFIX}environment", "environment", ()),
    (f"{later_views.PREFIX}group", "monitor_group", later_views.GROUP),
    ("group", "monitor_group", later_views.GROUP),
  ):
    ddl += _Writes(view, tables.metadata.tables[table], added, dialect).ddl()
  return ddl


class _Writes:
  """Triggers of one view."""

  def __init__(
    self, view: str, table: sa.Table, added: Iterable[str], dialect: str
  ):
    self._view = view
    self._table = table
    self._name = str(table.name)
    self._columns = [str(c.name) for c in table.c]
    self._raw = [n for n in added if n not in _DERIVED]
    self._sqlite = dialect == "sqlite"
    self._differs = "IS NOT" if self._sqlite else "IS DISTINCT FROM"
    self._id = "NEW.id"
    if self._sqlite:  # Ids grow; other rows change last_insert_rowid().
      self._id = f"COALESCE(NEW.id, (SELECT max(id) FROM {self._name}))"

  def ddl(self) -> list[str]:
    bodies = {
      "INSERT": self._insert(),
      "UPDATE": self._update(),
      "DELETE": self._delete(),
    }
    name = self._view.removeprefix("monitor_")
    if self._sqlite:
      return [
        f"CREATE TRIGGER {triggers.PREFIX}{name}_{event.lower()} INSTEAD OF"
        f' {event} ON "{self._view}" BEGIN {"; ".join(body)}; END'
        for event, body in bodies.items()
      ]
    parts = "".join(
      f" IF TG_OP = '{event}' THEN {'; '.join(body)}; RETURN"
      f" {'OLD' if event == 'DELETE' else 'NEW'}; END IF;"
      for event, body in bodies.items()
    )
    return [
      f"CREATE OR REPLACE FUNCTION monitor_fn_{name}() RETURNS trigger AS $$"
      f" BEGIN{parts} END $$ LANGUAGE plpgsql",
      f"CREATE TRIGGER {triggers.PREFIX}{name} INSTEAD OF INSERT OR UPDATE OR"
      f' DELETE ON "{self._view}" FOR EACH ROW EXECUTE FUNCTION'
      f" monitor_fn_{name}()",
    ]

  # --- the row ----------------------------------------------------------------

  def _insert(self) -> list[str]:
    body = self._checks()
    if not self._sqlite:
      body.append(f"NEW.id := COALESCE(NEW.id, nextval('{self._name}_id_seq'))")
    names = ", ".join(f'"{c}"' for c in self._columns)
    values = ", ".join(map(self._inserted, self._columns))
    insert = f'INSERT INTO "{self._name}" ({names})'
    if self._name != "environment":
      body += [f"{insert} VALUES ({values})", *self._unless_ignored()]
    else:
      body.append(f"{insert} SELECT {values} WHERE NEW.rollout_id IS NOT NULL")
      body.append(
        "INSERT INTO monitor_pending_environment (id, project_id,"
        f" fields_json, created_at) SELECT {self._inserted('id')}, 0,"
        f" {self._pending()}, CURRENT_TIMESTAMP WHERE NEW.rollout_id IS NULL"
      )
    return [*body, *self._keep_raw(new=True), *self._take_environment()]

  def _update(self) -> list[str]:
    sets = ", ".join(
      f'"{c}" = {self._updated(c)}' for c in self._columns if c != "id"
    )
    body = [
      *self._checks(),
      f'UPDATE "{self._name}" SET {sets} WHERE id = OLD.id',
    ]
    if self._name != "environment":
      body += self._unless_ignored()
    else:
      names = ", ".join(f'"{c}"' for c in self._columns)
      values = ", ".join(f'NEW."{c}"' for c in self._columns)
      body += [
        "UPDATE monitor_pending_environment SET fields_json ="
        f" {self._pending()} WHERE id = OLD.id",
        f"INSERT INTO environment ({names}) SELECT {values} WHERE"
        " OLD.rollout_id IS NULL AND NEW.rollout_id IS NOT NULL",
        "DELETE FROM monitor_pending_environment WHERE id = OLD.id AND"
        " NEW.rollout_id IS NOT NULL",
      ]
    return [*body, *self._keep_raw(new=False), *self._take_environment()]

  def _delete(self) -> list[str]:
    body = [f'DELETE FROM "{self._name}" WHERE id = OLD.id']
    if self._name == "environment":  # One that waits has no row.
      body += [
        "DELETE FROM monitor_pending_environment WHERE id = OLD.id",
        *triggers.after_delete("environment", self._sqlite),
      ]
    return body

  def _inserted(self, column: str) -> str:
    values = [f'NEW."{column}"']
    if self._sqlite and (self._name, column) == ("environment", "id"):
      values.append(_NEXT_ENVIRONMENT)
    alias = _ALIASES.get((self._name, column))
    if alias:
      values.append(f'NEW."{alias}"')
    if (self._name, column) == ("rollout", "group"):
      values.append(_GROUP_NUM)
    default = self._table.c[column].server_default
    if default is not None and column != "id":
      values.append(_default(default))
    if len(values) == 1:
      return values[0]
    return f"COALESCE({', '.join(values)})"

  def _updated(self, column: str) -> str:
    alias = _ALIASES.get((self._name, column))
    if not alias:
      return f'NEW."{column}"'
    grouped = ""
    if column == "group":
      grouped = (
        f" WHEN {self._changed('group_id')} AND NEW.group_id IS NOT NULL THEN"
        f" {_GROUP_NUM}"
      )
    return (
      f'CASE WHEN {self._changed(alias)} THEN NEW."{alias}"{grouped} ELSE'
      f' NEW."{column}" END'
    )

  def _changed(self, column: str) -> str:
    return f'NEW."{column}" {self._differs} OLD."{column}"'

  # --- beside the row ---------------------------------------------------------

  def _checks(self) -> list[str]:
    """Returns SQL that refuses a group whose `source_type` has no id."""
    if self._name != "monitor_group":
      return []
    wrong = " OR ".join(
      f"(NEW.source_type = '{s}' AND NEW.{s}_id IS NULL)"
      for s in vocabulary.SOURCE_TYPES
    )
    return self._refuse(
      wrong, "group.source_type: the id that it names is NULL"
    )

  def _unless_ignored(self) -> list[str]:
    """Returns SQL that ends where SQLite's `OR IGNORE` left the row as it was.

    Raw values would become those of the newest row otherwise.
    """
    return ["SELECT RAISE(IGNORE) WHERE changes() = 0"] if self._sqlite else []

  def _refuse(self, condition: str, why: str) -> list[str]:
    if self._sqlite:
      return [f"SELECT RAISE(ABORT, '{why}') WHERE {condition}"]
    return [
      f"IF {condition} THEN RAISE EXCEPTION '{why}' USING ERRCODE ="
      " 'check_violation'; END IF"
    ]

  def _keep_raw(self, new: bool) -> list[str]:
    """Returns SQL that stores the added columns that are new or changed."""
    if not self._raw:
      return []
    rows = " UNION ALL ".join(
      f"SELECT '{n}' AS field, CAST(NEW.\"{n}\" AS TEXT) AS value"
      + ("" if new else f" WHERE {self._changed(n)}")
      for n in self._raw
    )
    keep = (
      "INSERT INTO monitor_raw_value (kind, entity_id, field, value) SELECT"
      f" '{self._name}', {self._id if new else 'OLD.id'}, c.field, c.value"
      f" FROM ({rows}) c WHERE c.value IS NOT NULL"
    )
    if new:
      return [keep]
    return [
      f"DELETE FROM monitor_raw_value WHERE kind = '{self._name}' AND"
      f" entity_id = OLD.id AND field IN (SELECT c.field FROM ({rows}) c)",
      keep,
    ]

  def _pending(self) -> str:
    """Returns SQL of the JSON of an environment that waits."""
    names = [n for n in self._columns if n not in later_views.NOT_PENDING]
    pairs = ", ".join(f"'{n}', NEW.\"{n}\"" for n in names)
    if self._sqlite:
      return f"json_patch('{{}}', json_object({pairs}))"
    return f"CAST(json_strip_nulls(json_build_object({pairs})) AS TEXT)"

  def _take_environment(self) -> list[str]:
    """Returns SQL that gives a rollout the environment that waited for it."""
    if self._name != "rollout":
      return []
    environment = tables.metadata.tables["environment"]
    names = [c.name for c in environment.c if c.name != "rollout_id"]
    columns = ", ".join(f'"{n}"' for n in names)
    view = f"{later_views.PREFIX}environment"
    return [
      f"INSERT INTO environment (rollout_id, {columns}) SELECT {self._id},"
      f" {columns} FROM {view} WHERE id = NEW.env_id AND rollout_id IS NULL",
      "DELETE FROM monitor_pending_environment WHERE id = NEW.env_id",
      *self._refuse(
        "NEW.env_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM environment e"
        f" WHERE e.id = NEW.env_id AND e.rollout_id = {self._id})",
        "rollout.env_id: there is no such environment, or it is another"
        " rollout''s",
      ),
    ]


def _default(default: sa.schema.FetchedValue) -> str:
  """Returns SQL of a column's default."""
  argument = default.arg  # type: ignore[attr-defined]
  if isinstance(argument, str):
    return f"'{argument}'"
  return str(argument)
