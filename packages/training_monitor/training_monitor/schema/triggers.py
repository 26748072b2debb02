"""Triggers of SQLite and PostgreSQL: rules that hold for every writer.

- A status follows another only along `vocabulary.TRANSITIONS`.
- `status_history` gets a row when an entity is made and when its status
  changes, and none otherwise.
- `updated_at` moves with every change that does not set it.
- `rollout.is_eval` is derived: 0 for a training step's rollout, else 1.
- Raw values and the history of a row go with the row, and servers drop their
  caches: the generation in `monitor_meta` changes.

They are made from the vocabulary and hold no data, so `database` replaces all
of them whenever they differ from those that are installed.
"""

from __future__ import annotations

import sqlalchemy as sa

from training_monitor.schema import tables
from training_monitor.schema import vocabulary

PREFIX = "monitor_trg_"
GENERATION = "generation"
"""Key of `monitor_meta`: its value changes after rows were deleted or imported,
so that readers drop their caches."""
_KINDS = tuple(
  t.name for t in (*tables.TABLES, tables.group) if t.name != "status_history"
)
_SQLITE_NOW = "strftime('%Y-%m-%d %H:%M:%f', 'now')"


def statements(dialect: str) -> list[str]:
  """Returns DDL that makes all triggers.

  Args:
    dialect: "sqlite" or "postgresql".

  Raises:
    ValueError: another.
  """
  if dialect == "sqlite":
    return _sqlite()
  if dialect == "postgresql":
    return _postgresql()
  raise ValueError(
    f"the monitor runs on sqlite and postgresql, not on {dialect!r}"
  )


def drop(connection: sa.Connection) -> None:
  """Takes away every trigger of the monitor."""
  if connection.dialect.name == "sqlite":
    rows = connection.execute(
      sa.text("SELECT name FROM sqlite_master WHERE type = 'trigger'")
    )
    for (name,) in rows.fetchall():
      if name.startswith(PREFIX):
        connection.exec_driver_sql(f'DROP TRIGGER "{name}"')
    return
  rows = connection.execute(
    sa.text(
      "SELECT DISTINCT trigger_name, event_object_table FROM"
      " information_schema.triggers WHERE trigger_schema ="
      " current_schema()"
    )
  )
  for name, table in rows.fetchall():
    if name.startswith(PREFIX):
      connection.exec_driver_sql(f'DROP TRIGGER "{name}" ON "{table}"')


def _allowed(table: str, old: str, new: str) -> str:
  """Returns SQL that holds if `table` allows a status `new` after `old`."""
  pairs = []
  for word, following in vocabulary.TRANSITIONS[table].items():
    if following:
      words = ", ".join(f"'{w}'" for w in sorted(following))
      pairs.append(f"({old} = '{word}' AND {new} IN ({words}))")
  return " OR ".join(pairs)


def _with_updated_at() -> list[str]:
  return [t.name for t in tables.TABLES if "updated_at" in t.c]


def after_delete(table: str, sqlite: bool) -> list[str]:
  """Returns SQL that deletes what is beside the deleted row `OLD`."""
  own = "entity_id = OLD.id"
  body = [f"DELETE FROM monitor_raw_value WHERE kind = '{table}' AND {own}"]
  if table in vocabulary.STATEFUL:
    body.append(
      f"DELETE FROM status_history WHERE entity_type = '{table}' AND {own}"
    )
  return [*body, _new_generation(sqlite)]


def _new_generation(sqlite: bool) -> str:
  token = "lower(hex(randomblob(16)))" if sqlite else "gen_random_uuid()"
  return (
    f"INSERT INTO monitor_meta (key, value) VALUES ('{GENERATION}', {token})"
    " ON CONFLICT (key) DO UPDATE SET value = excluded.value"
  )


def _history_values(table: str, old: str) -> str:
  progress = "NULL" if table == "environment" else "NEW.progress_percent"
  return f"'{table}', NEW.id, {old}, NEW.status, {progress}, NEW.status_message"


def _sqlite() -> list[str]:
  ddl = []
  columns = (
    "entity_type, entity_id, old_status, new_status, progress_percent,"
    " status_message, changed_at"
  )
  for table in vocabulary.STATEFUL:
    name = f"{PREFIX}{table}"
    ddl += [
      f"CREATE TRIGGER {name}_transition BEFORE UPDATE OF status ON"
      f' "{table}" WHEN NEW.status IS NOT OLD.status AND NOT'
      f" ({_allowed(table, 'OLD.status', 'NEW.status')}) BEGIN SELECT"
      f" RAISE(ABORT, '{table}.status: this transition is not allowed; an"
      " ended entity stays as it is'); END",
      f'CREATE TRIGGER {name}_created AFTER INSERT ON "{table}" BEGIN'
      f" INSERT INTO status_history ({columns}) VALUES"
      f" ({_history_values(table, 'NULL')}, {_SQLITE_NOW}); END",
      f'CREATE TRIGGER {name}_changed AFTER UPDATE OF status ON "{table}"'
      " WHEN NEW.status IS NOT OLD.status BEGIN INSERT INTO status_history"
      f" ({columns}) VALUES ({_history_values(table, 'OLD.status')},"
      f" {_SQLITE_NOW}); END",
    ]
  for table in _with_updated_at():
    ddl.append(
      f'CREATE TRIGGER {PREFIX}{table}_updated AFTER UPDATE ON "{table}"'
      " WHEN NEW.updated_at IS OLD.updated_at BEGIN UPDATE"
      f' "{table}" SET updated_at = {_SQLITE_NOW} WHERE id = NEW.id; END'
    )
  for table in _KINDS:
    ddl.append(
      f'CREATE TRIGGER {PREFIX}{table}_deleted AFTER DELETE ON "{table}"'
      f" BEGIN {'; '.join(after_delete(table, sqlite=True))}; END"
    )
  for event in ("INSERT", "UPDATE OF source_type, is_eval"):
    kind = event.split()[0].lower()
    ddl.append(
      f"CREATE TRIGGER {PREFIX}rollout_is_eval_{kind} AFTER {event} ON"
      " rollout WHEN NEW.is_eval IS NOT (NEW.source_type <> 'step') BEGIN"
      " UPDATE rollout SET is_eval = (NEW.source_type <> 'step') WHERE id ="
      " NEW.id; END"
    )
  return ddl


def _postgresql() -> list[str]:
  columns = (
    "entity_type, entity_id, old_status, new_status, progress_percent,"
    " status_message, changed_at"
  )
  now = "clock_timestamp()"
  ddl = []
  for table in vocabulary.STATEFUL:
    function = f"monitor_fn_{table}_status"
    allowed = _allowed(table, "OLD.status", "NEW.status")
    ddl += [
      f"CREATE OR REPLACE FUNCTION {function}() RETURNS trigger AS $$ BEGIN"
      " IF TG_OP = 'INSERT' THEN INSERT INTO status_history"
      f" ({columns}) VALUES ({_history_values(table, 'NULL')}, {now});"
      " ELSIF NEW.status IS DISTINCT FROM OLD.status THEN"
      f" IF NOT ({allowed}) THEN RAISE EXCEPTION '{table}.status: % may not"
      " follow %; an ended entity stays as it is', NEW.status, OLD.status"
      " USING ERRCODE = 'check_violation'; END IF;"
      f" INSERT INTO status_history ({columns}) VALUES"
      f" ({_history_values(table, 'OLD.status')}, {now}); END IF; RETURN"
      " NULL; END $$ LANGUAGE plpgsql",
      f"CREATE TRIGGER {PREFIX}{table}_status AFTER INSERT OR UPDATE ON"
      f' "{table}" FOR EACH ROW EXECUTE FUNCTION {function}()',
    ]
  ddl.append(
    "CREATE OR REPLACE FUNCTION monitor_fn_updated_at() RETURNS trigger AS"
    " $$ BEGIN IF NEW.updated_at IS NOT DISTINCT FROM OLD.updated_at THEN"
    f" NEW.updated_at = {now}; END IF; RETURN NEW; END $$ LANGUAGE plpgsql"
  )
  for table in _with_updated_at():
    ddl.append(
      f"CREATE TRIGGER {PREFIX}{table}_updated BEFORE UPDATE ON"
      f' "{table}" FOR EACH ROW EXECUTE FUNCTION monitor_fn_updated_at()'
    )
  # Once a statement: a row that changes often in a transaction gets slow.
  own = "o WHERE x.{} = TG_TABLE_NAME::text AND x.entity_id = o.id"
  ddl += [
    "CREATE OR REPLACE FUNCTION monitor_fn_deleted() RETURNS trigger AS $$"
    " BEGIN IF EXISTS (SELECT 1 FROM old_rows) THEN DELETE FROM"
    f" monitor_raw_value x USING old_rows {own.format('kind')}; DELETE FROM"
    f" status_history x USING old_rows {own.format('entity_type')};"
    f" {_new_generation(sqlite=False)}; END IF; RETURN NULL; END $$ LANGUAGE"
    " plpgsql",
    *(
      f'CREATE TRIGGER {PREFIX}{table}_deleted AFTER DELETE ON "{table}"'
      " REFERENCING OLD TABLE AS old_rows FOR EACH STATEMENT EXECUTE"
      " FUNCTION monitor_fn_deleted()"
      for table in _KINDS
    ),
    "CREATE OR REPLACE FUNCTION monitor_fn_is_eval() RETURNS trigger AS $$"
    " BEGIN NEW.is_eval = CASE WHEN NEW.source_type = 'step' THEN 0 ELSE 1"
    " END; RETURN NEW; END $$ LANGUAGE plpgsql",
    f"CREATE TRIGGER {PREFIX}rollout_is_eval BEFORE INSERT OR UPDATE ON"
    " rollout FOR EACH ROW EXECUTE FUNCTION monitor_fn_is_eval()",
  ]
  return ddl
