"""An index of the words of turns: SQLite's FTS5, PostgreSQL's tsvector.

Indexed are a turn's thought, response and typed text (their raw values of other
recorders, too), and with a rollout's first turn the task's description: the
first 50,000 characters of each. Triggers keep it, for every writer: those of
PostgreSQL write it, those of SQLite note the turn as pending, and `catch_up`
indexes many pending turns at once. FTS5 writes a part of its index at the end
of every statement that has a trigger, which costs ten times the words.

Promises: `find` misses no turn that has all the words: it returns every pending
one, too. The index may have words that the turn no longer has, or turns that
are gone, so that a reader looks at what it finds: nothing is deleted from it,
which FTS5 could do only with the old text. `rebuild` leaves them out.

Does not: rank. Where SQLite has no FTS5, there is no index, and `ready` is
False; the next program that has it builds it anew.
"""

from __future__ import annotations

import functools
import re
import sqlite3
from typing import Sequence

import sqlalchemy as sa

from training_monitor.schema import later_views
from training_monitor.schema import tables
from training_monitor.schema import triggers

TABLE = "monitor_turn_words"
_PENDING = f"{TABLE}_pending"
_KEY = "text_index"
_VERSION = "1"
_MOST = 50_000
_RUN = "\ue000"
"""Begins the word that names a turn's run, which no query can have."""
RAW_FIELDS = ("thinking", "model_response", "text")
"""Raw values of a turn that are texts."""
_RAW = ", ".join(f"'{name}'" for name in RAW_FIELDS)
_WORD = re.compile(r"[^\W_]+\*?")
# Written without spaces: no index by words finds a part of them.
_UNSPACED = re.compile(
  "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\U0003ffff]"
)
_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


@functools.cache
def available(dialect: str) -> bool:
  """Returns whether the database's program has what the index needs."""
  if dialect != "sqlite":
    return True
  connection = sqlite3.connect(":memory:")
  try:
    connection.execute("CREATE VIRTUAL TABLE t USING fts5(words)")
  except sqlite3.OperationalError:
    return False
  finally:
    connection.close()
  return True


def words_of(text: str) -> list[str] | None:
  """The words to search for, with an asterisk behind those that begin others.

  None where only reading the texts finds them.
  """
  words = _WORD.findall(text)
  if not words or _UNSPACED.search(text):
    return None
  return words


def statements(dialect: str) -> list[str]:
  """Returns DDL of the index's triggers; none where it is unavailable."""
  if not available(dialect):
    return []
  return _sqlite() if dialect == "sqlite" else _postgresql()


def install(connection: sa.Connection) -> None:
  """Makes and fills a missing index; the caller then makes its triggers."""
  meta = tables.meta
  if not available(connection.dialect.name):
    connection.execute(sa.delete(meta).where(meta.c.key == _KEY))
    return
  if connection.dialect.name == "sqlite":
    connection.exec_driver_sql(
      f"CREATE TABLE IF NOT EXISTS {_PENDING} (turn_id INTEGER PRIMARY KEY)"
    )
  if ready(connection):
    return
  drop(connection)
  if connection.dialect.name == "postgresql":  # Millions of turns take longer.
    connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
  for statement in _TABLES[connection.dialect.name]:
    connection.exec_driver_sql(statement)
  _fill(connection)
  connection.execute(sa.insert(meta).values(key=_KEY, value=_VERSION))


def ready(connection: sa.Connection) -> bool:
  """Returns whether the index has every turn."""
  meta = tables.meta
  return (
    connection.execute(
      sa.select(meta.c.value).where(meta.c.key == _KEY)
    ).scalar()
    == _VERSION
  )


def rebuild(connection: sa.Connection) -> None:
  """Leaves out what is gone; does nothing without an index."""
  if not ready(connection):
    return
  if connection.dialect.name == "sqlite":
    connection.exec_driver_sql(
      f"INSERT INTO {TABLE} ({TABLE}) VALUES ('delete-all')"
    )
    connection.exec_driver_sql(f"DELETE FROM {_PENDING}")
  else:
    connection.exec_driver_sql(f"TRUNCATE {TABLE}")
  _fill(connection)


def pending(connection: sa.Connection) -> bool:
  """Returns whether `catch_up` has turns to index."""
  return (
    connection.dialect.name == "sqlite"
    and ready(connection)
    and bool(
      connection.exec_driver_sql(
        f"SELECT EXISTS (SELECT 1 FROM {_PENDING})"
      ).scalar()
    )
  )


def catch_up(connection: sa.Connection, most: int) -> bool:
  """Indexes pending turns, the oldest first; whether others are left.

  Args:
    connection: Connection in a transaction that writes.
    most: turns, at most.
  """
  if not pending(connection):
    return False
  run = connection.exec_driver_sql
  last, count = run(
    f"SELECT max(turn_id), count(*) FROM (SELECT turn_id FROM {_PENDING}"
    " ORDER BY turn_id LIMIT ?)",
    (most,),
  ).one()
  run(
    f"INSERT INTO {TABLE} (rowid, words) SELECT t.id,"
    f" {_sqlite_words()} FROM {_PENDING} p JOIN turn t ON t.id = p.turn_id"
    " WHERE p.turn_id <= ? ORDER BY p.turn_id",
    (last,),
  )
  run(f"DELETE FROM {_PENDING} WHERE turn_id <= ?", (last,))
  return count == most


def drop(connection: sa.Connection) -> None:
  """Takes the index away, before its triggers fire again."""
  meta = tables.meta
  connection.execute(sa.delete(meta).where(meta.c.key == _KEY))
  connection.exec_driver_sql(f"DROP TABLE IF EXISTS {TABLE}")


def find(
  connection: sa.Connection,
  training: int,
  words: Sequence[str],
  before: int | None,
  count: int,
) -> list[int]:
  """Returns turns that may be of the run and have every word, newest first.

  A word that ends in an asterisk is found by its beginning. FTS5 reads every
  turn that has such a word, where of a whole word it reads the newest.

  Args:
    connection: Connection to the database.
    training: the run.
    words: Words from `words_of`.
    before: only turns before this one.
    count: at most.

  Raises:
    sqlalchemy.exc.DBAPIError: a word is more than one to the index.
  """
  behind = "" if before is None else f" AND {{}} < {int(before)}"
  if connection.dialect.name == "sqlite":
    query = " AND ".join(
      f'"{word.rstrip("*")}"{"*" if word[-1] == "*" else ""}' for word in words
    )
    turns = set(
      connection.scalars(
        sa.text(
          f"SELECT rowid FROM {TABLE} WHERE {TABLE} MATCH :query"
          f"{behind.format('rowid')} ORDER BY rowid DESC LIMIT :count"
        ),
        {"query": f'"{_RUN}{training:d}" AND {query}', "count": count},
      )
    )
    turns.update(
      connection.scalars(
        sa.text(
          f"SELECT turn_id FROM {_PENDING} WHERE"
          f" TRUE{behind.format('turn_id')} ORDER BY turn_id DESC LIMIT"
          " :count"
        ),
        {"count": count},
      )
    )
    return sorted(turns, reverse=True)[:count]
  query = " & ".join(
    f"'{word.rstrip('*')}'{':*' if word[-1] == '*' else ''}" for word in words
  )
  return list(
    connection.scalars(
      sa.text(
        f"SELECT turn_id FROM {TABLE} WHERE training_id = :training AND words"
        f" @@ to_tsquery('simple', :query){behind.format('turn_id')} ORDER BY"
        " turn_id DESC LIMIT :count"
      ),
      {"training": training, "query": query, "count": count},
    )
  )


# --- SQL ---------------------------------------------------------------------

_TABLES = {
  "sqlite": [
    f"CREATE VIRTUAL TABLE {TABLE} USING fts5(words, content='',"
    ' columnsize=0, detail=none, tokenize="unicode61'
    ' remove_diacritics 0")'
  ],
  "postgresql": [
    f"CREATE TABLE {TABLE} (turn_id bigint PRIMARY KEY REFERENCES turn (id)"
    " ON DELETE CASCADE, training_id bigint NOT NULL, words tsvector NOT"
    " NULL)",
    f"CREATE INDEX idx_{TABLE} ON {TABLE} USING gin (words)",
    f"CREATE INDEX idx_{TABLE}_run ON {TABLE} (training_id, turn_id)",
  ],
}

_RUN_OF = (
  "(SELECT COALESCE(s.training_id, e.training_id, b.training_id) FROM rollout"
  " r LEFT JOIN step s ON s.id = r.step_id LEFT JOIN eval e ON e.id ="
  " r.eval_id LEFT JOIN baseline b ON b.id = r.baseline_id WHERE r.id ="
  " {rollout})"
)
_TASK_OF = (
  "(SELECT k.description FROM rollout r JOIN task k ON k.id = r.task_id WHERE"
  " r.id = {rollout})"
)


def _fill(connection: sa.Connection) -> None:
  if connection.dialect.name == "sqlite":
    connection.exec_driver_sql(
      f"INSERT INTO {TABLE} (rowid, words) SELECT t.id, {_sqlite_words()}"
      " FROM turn t ORDER BY t.id"
    )
    return
  for statement in _functions():
    connection.exec_driver_sql(statement.replace("%", "%%"))
  connection.exec_driver_sql(
    "SELECT monitor_fn_index_turn(t.id) FROM turn t ORDER BY t.id"
  )


def _cut(text: str) -> str:
  return f"COALESCE(substr({text}, 1, {_MOST}), '')"


def _sqlite_words() -> str:
  """Returns the words of a row `t` of `turn`."""
  metrics = (
    "CASE WHEN json_valid(t.metrics_json) THEN"
    " json_extract(t.metrics_json, '$.{}') END"
  )
  typed = (
    "CASE WHEN json_valid(a.tool_args) THEN json_extract(a.tool_args,"
    " '$.text') END"
  )
  run, task = (of.format(rollout="t.rollout_id") for of in (_RUN_OF, _TASK_OF))
  parts = [
    f"'{_RUN}' || {run}",
    _cut(metrics.format("thought")),
    _cut(metrics.format("model_response")),
    f"CASE WHEN t.turn <= 1 THEN {_cut(task)} ELSE '' END",
    f"COALESCE((SELECT group_concat({_cut(typed)}, ' ') FROM action a WHERE"
    " a.turn_id = t.id AND a.action_type = 'type'), '')",
    f"COALESCE((SELECT group_concat({_cut('v.value')}, ' ') FROM"
    " monitor_raw_value v WHERE v.kind = 'turn' AND v.entity_id = t.id AND"
    f" v.field IN ({_RAW})), '')",
  ]
  return " || ' ' || ".join(parts)


def _sqlite() -> list[str]:
  """Returns triggers that note turns whose words change as pending."""
  of = f"INSERT OR IGNORE INTO {_PENDING} VALUES (NEW.{{}})".format
  every = (
    f"INSERT OR IGNORE INTO {_PENDING} SELECT t.id FROM rollout r JOIN turn t"
    " ON t.rollout_id = r.id WHERE {}"
  ).format
  is_raw = f"NEW.kind = 'turn' AND NEW.field IN ({_RAW})"
  moved = " OR ".join(
    f"NEW.{c} IS NOT OLD.{c}" for c in ("step_id", "eval_id", "baseline_id")
  )
  specs = (
      ("turn_made", "AFTER INSERT ON turn", "", of("id")),
      (
          "turn_changed", "AFTER UPDATE OF metrics_json, rollout_id ON turn",
          "NEW.metrics_json IS NOT OLD.metrics_json OR NEW.rollout_id IS NOT"
          " OLD.rollout_id", of("id"),
      ),
      (
          "typed", "AFTER INSERT ON action", "NEW.action_type = 'type'",
          of("turn_id"),
      ),
      (
          "typed_changed", "AFTER UPDATE OF tool_args, action_type ON action",
          "NEW.action_type = 'type' AND (NEW.tool_args IS NOT OLD.tool_args OR"
          " OLD.action_type IS NOT 'type')", of("turn_id"),
      ),
      ("raw", "AFTER INSERT ON monitor_raw_value", is_raw, of("entity_id")),
      (
          "raw_changed", "AFTER UPDATE OF value ON monitor_raw_value",
          f"{is_raw} AND NEW.value <> OLD.value", of("entity_id"),
      ),
      (
          "moved", "AFTER UPDATE OF step_id, eval_id, baseline_id ON rollout",
          moved, every("r.id = NEW.id"),
      ),
      (
          "task", "AFTER UPDATE OF description ON task",
          "NEW.description <> OLD.description",
          every("r.task_id = NEW.id AND t.turn <= 1"),
      ),
  )  # fmt: skip
  return [
    f"CREATE TRIGGER {triggers.PREFIX}words_{name} {event}"
    f"{f' WHEN {when}' if when else ''} BEGIN {does}; END"
    for name, event, when, does in specs
  ]


def _functions() -> list[str]:
  """Functions of PostgreSQL that the triggers and filling call."""
  spaces = " " * len(_PUNCTUATION)
  marks = _PUNCTUATION.replace("'", "''")
  text = lambda name: f"monitor_fn_json_text(one.metrics_json, '{name}')"
  return [
    later_views.JSON_TEXT,
    # What is left has no word of more than one part.
    "CREATE OR REPLACE FUNCTION monitor_fn_words(given text) RETURNS tsvector"
    " AS $$ SELECT strip(to_tsvector('simple', translate(COALESCE(left(given,"
    f" {_MOST}), ''), '{marks}', '{spaces}'))) $$ LANGUAGE sql IMMUTABLE",
    "CREATE OR REPLACE FUNCTION monitor_fn_index_turn(wanted bigint) RETURNS"
    " void AS $$ DECLARE one turn; run bigint; have tsvector; BEGIN SELECT *"
    " INTO one FROM turn WHERE id = wanted; IF NOT FOUND THEN RETURN; END"
    f" IF; SELECT {_RUN_OF.format(rollout='one.rollout_id')} INTO run; IF"
    " run IS NULL THEN RETURN; END IF; have :="
    f" monitor_fn_words({text('thought')}) ||"
    f" monitor_fn_words({text('model_response')}); IF one.turn <= 1 THEN"
    " have := have ||"
    f" monitor_fn_words({_TASK_OF.format(rollout='one.rollout_id')}); END"
    " IF; SELECT have || monitor_fn_words(string_agg("
    " monitor_fn_json_text(tool_args, 'text'), ' ')) INTO have FROM action"
    " WHERE turn_id = wanted AND action_type = 'type'; SELECT have ||"
    " monitor_fn_words(string_agg(value, ' ')) INTO have FROM"
    " monitor_raw_value WHERE kind = 'turn' AND entity_id = wanted AND field"
    f" IN ({_RAW}); INSERT INTO {TABLE} VALUES (wanted, run, have) ON"
    " CONFLICT (turn_id) DO UPDATE SET training_id = excluded.training_id,"
    " words = excluded.words; END $$ LANGUAGE plpgsql",
  ]


def _postgresql() -> list[str]:
  ddl = _functions()
  changed = " OR ".join(
    f"NEW.{c} IS DISTINCT FROM OLD.{c}"
    for c in ("step_id", "eval_id", "baseline_id")
  )
  each = (
    "PERFORM monitor_fn_index_turn(t.id) FROM rollout r JOIN turn t ON"
    " t.rollout_id = r.id WHERE {}"
  )
  is_raw = f"NEW.kind = 'turn' AND NEW.field IN ({_RAW})"
  specs = (
      (
          "turn", "turn", "INSERT OR UPDATE OF metrics_json, rollout_id", "",
          "PERFORM monitor_fn_index_turn(NEW.id)",
      ),
      (
          "typed", "action", "INSERT OR UPDATE OF tool_args, action_type",
          "NEW.action_type = 'type'",
          "PERFORM monitor_fn_index_turn(NEW.turn_id)",
      ),
      (
          "raw", "monitor_raw_value", "INSERT OR UPDATE OF value", is_raw,
          "PERFORM monitor_fn_index_turn(NEW.entity_id)",
      ),
      (
          "moved", "rollout", "UPDATE OF step_id, eval_id, baseline_id",
          changed, each.format("r.id = NEW.id"),
      ),
      (
          "task", "task", "UPDATE OF description",
          "NEW.description IS DISTINCT FROM OLD.description",
          each.format("r.task_id = NEW.id AND t.turn <= 1"),
      ),
  )  # fmt: skip
  for name, table, event, when, does in specs:
    function = f"monitor_fn_words_{name}"
    ddl += [
      f"CREATE OR REPLACE FUNCTION {function}() RETURNS trigger AS $$ BEGIN"
      f" {does}; RETURN NULL; END $$ LANGUAGE plpgsql",
      f"CREATE TRIGGER {triggers.PREFIX}words_{name} AFTER {event} ON"
      f' "{table}" FOR EACH ROW'
      f"{f' WHEN ({when})' if when else ''} EXECUTE FUNCTION {function}()",
    ]
  return ddl
