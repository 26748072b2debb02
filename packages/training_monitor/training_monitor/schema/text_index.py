"""An index of the words of turns: SQLite's FTS5, PostgreSQL's tsvector.

Indexed are a turn's thought, response and typed text (their raw values of other
recorders, too), and with a rollout's first turn the task's description: the
first 50,000 characters of each. Triggers note a turn as pending for every
writer; `catch_up` indexes many pending turns at once. Characters of a script
without spaces are words of their own.

Promises: `find` misses no turn that has all the words: it returns every pending
one, too. The index may have words that the turn no longer has, or turns that
are gone, so that a reader looks at what it finds (`place`): nothing is deleted
from it, which FTS5 could do only with the old text. `rebuild` leaves them out.

Does not: rank.
"""

from __future__ import annotations

import re
from typing import Any, Iterator, Mapping, Sequence

import orjson
import sqlalchemy as sa

from training_monitor.schema import tables
from training_monitor.schema import triggers

TABLE = "monitor_turn_words"
_PENDING = f"{TABLE}_pending"
_KEY = "text_index"
_VERSION = "2"
_MOST = 50_000
_RUN = "\ue000"
"""Begins the word that names a turn's run, which no query can have."""
_RAW_FIELDS = ("thinking", "model_response", "text")
"""Raw values of a turn that are texts."""
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\U0003ffff"
_TERM = re.compile(rf"[{_UNSPACED}]+|(?:(?![{_UNSPACED}])[^\W_])+\*?")
_CHARACTER = re.compile(f"[{_UNSPACED}]")


def terms_of(query: str) -> list[str]:
  """Returns the terms of a query: words, some with an asterisk behind them."""
  return _TERM.findall(query)


def place(term: str, text: str) -> int:
  """Returns the position of a term in a text; -1: nowhere.

  It is a whole word, or the beginning of one if it ends in an asterisk, or
  anywhere if it is of a script without spaces.
  """
  word = re.escape(term.rstrip("*"))
  if not _CHARACTER.match(term):
    end = "" if term[-1] == "*" else rf"(?!(?![{_UNSPACED}])[^\W_])"
    word = rf"(?<![^\W_{_UNSPACED}]){word}{end}"
  match = re.search(word, text, re.IGNORECASE)
  return -1 if match is None else match.start()


# --- the texts of a turn ------------------------------------------------------


def _joined(text: sa.Column, table: sa.Table, own: sa.ColumnElement) -> Any:
  return (
    sa.select(sa.func.aggregate_strings(text, "\n"))
    .select_from(table)
    .where(own)
    .correlate(tables.turn)
    .scalar_subquery()
  )


def turns(*columns: Any) -> sa.Select:
  """Returns turns with their `texts` and other columns of rows around them.

  The run's id is `run`; tasks, rollouts and sources are joined.
  """
  t, r, k = tables.turn, tables.rollout, tables.task
  s, e, b = tables.step, tables.eval_, tables.baseline
  a, v = tables.action, tables.raw_value
  typed = sa.and_(a.c.turn_id == t.c.id, a.c.action_type == "type")
  raw = sa.and_(
    v.c.kind == "turn", v.c.entity_id == t.c.id, v.c.field.in_(_RAW_FIELDS)
  )
  return (
    sa.select(
      t.c.id,
      t.c.turn,
      t.c.metrics_json,
      _joined(a.c.tool_args, a, typed).label("typed"),
      _joined(v.c.value, v, raw).label("raw"),
      k.c.description,
      RUN_OF_TURN.label("run"),
      *columns,
    )
    .join(r, r.c.id == t.c.rollout_id)
    .join(k, k.c.id == r.c.task_id)
    .outerjoin(s, s.c.id == r.c.step_id)
    .outerjoin(e, e.c.id == r.c.eval_id)
    .outerjoin(b, b.c.id == r.c.baseline_id)
  )


RUN_OF_TURN: sa.ColumnElement[int] = sa.func.coalesce(
  tables.step.c.training_id,
  tables.eval_.c.training_id,
  tables.baseline.c.training_id,
)
"""Of a turn of `turns`: the id of its run."""


def texts(row: sa.Row) -> dict[str, str]:
  """Returns the texts of a turn of `turns` that are searched, by kind."""
  metrics = _object(row.metrics_json)
  by_kind = {
    n: str(metrics.get(n) or "") for n in ("thought", "model_response")
  }
  lines = (row.typed or "").split("\n")  # JSON of an action has no such break.
  typed = [_object(line).get("text") for line in lines]
  by_kind["typed"] = "\n".join(one for one in typed if isinstance(one, str))
  by_kind["recorded"] = row.raw or ""
  if row.turn <= 1:
    by_kind["task"] = row.description
  return by_kind


def _object(text: str | None) -> Mapping[str, Any]:
  try:
    value = orjson.loads(text or "{}")
  except orjson.JSONDecodeError:
    return {}
  return value if isinstance(value, dict) else {}


# --- the index ----------------------------------------------------------------


def install(connection: sa.Connection) -> None:
  """Makes a missing index; the caller then makes its triggers."""
  meta, run = tables.meta, connection.exec_driver_sql
  version = sa.select(meta.c.value).where(meta.c.key == _KEY)
  if connection.scalar(version) == _VERSION:
    return
  run(f"DROP TABLE IF EXISTS {TABLE}")
  for statement in _TABLES[connection.dialect.name]:
    run(statement)
  _renew(connection)
  connection.execute(sa.delete(meta).where(meta.c.key == _KEY))
  connection.execute(sa.insert(meta).values(key=_KEY, value=_VERSION))


def _renew(connection: sa.Connection) -> None:
  """Makes every turn pending."""
  connection.exec_driver_sql(f"DELETE FROM {_PENDING}")
  connection.exec_driver_sql(f"INSERT INTO {_PENDING} SELECT id FROM turn")


def rebuild(connection: sa.Connection) -> None:
  """Leaves out what is gone."""
  if connection.dialect.name == "sqlite":
    connection.exec_driver_sql(
      f"INSERT INTO {TABLE} ({TABLE}) VALUES ('delete-all')"
    )
  else:
    connection.exec_driver_sql(f"TRUNCATE {TABLE}")
  _renew(connection)
  while catch_up(connection, 2000):
    pass


def pending(connection: sa.Connection) -> bool:
  """Returns whether `catch_up` has turns to index."""
  query = f"SELECT EXISTS (SELECT 1 FROM {_PENDING})"
  return bool(connection.exec_driver_sql(query).scalar())


def catch_up(connection: sa.Connection, most: int) -> bool:
  """Indexes pending turns, the oldest first; whether others are left.

  Args:
    connection: Connection in a transaction that writes.
    most: turns, at most.
  """
  ids = list(
    connection.scalars(
      sa.text(f"SELECT turn_id FROM {_PENDING} ORDER BY turn_id LIMIT :most"),
      {"most": most},
    )
  )
  if not ids:
    return False
  rows = connection.execute(turns().where(tables.turn.c.id.in_(ids)))
  lite = connection.dialect.name == "sqlite"
  words = [
    {"turn": row.id, "run": row.run, "words": " ".join(_words(row, lite))}
    for row in rows
  ]
  if words:
    connection.execute(sa.text(_INDEX[connection.dialect.name]), words)
  connection.execute(
    sa.text(f"DELETE FROM {_PENDING} WHERE turn_id <= :last"), {"last": ids[-1]}
  )
  return len(ids) == most


def _words(row: sa.Row, with_run: bool) -> Iterator[str]:
  if with_run:
    yield f"{_RUN}{row.run}"
  for text in texts(row).values():
    yield from index_words(_TERM.findall(text[:_MOST]))


def index_words(terms: Sequence[str]) -> Iterator[str]:
  """Yields the words of the index that a turn with the terms has."""
  for term in terms:
    if _CHARACTER.match(term):
      yield from filter(str.isalnum, term)
    else:
      yield term


def find(
  connection: sa.Connection,
  training: int,
  terms: Sequence[str],
  before: int | None,
  count: int,
) -> list[int]:
  """Returns turns that may be of the run and have every term, newest first.

  A word that ends in an asterisk is found by its beginning. FTS5 reads every
  turn that has such a word, where of a whole word it reads the newest.

  Args:
    connection: Connection to the database.
    training: the run.
    terms: Terms from `terms_of`.
    before: only turns before this one.
    count: at most.

  Raises:
    sqlalchemy.exc.DBAPIError: a word is more than one to the index.
  """
  if connection.dialect.name == "sqlite":
    words = [f"{_RUN}{training:d}", *index_words(terms)]
    query = " AND ".join(f'"{w}"'.replace('*"', '"*') for w in words)
  else:
    words = [w.replace("*", ":*") for w in index_words(terms)]
    query = " & ".join(words)
  values = {
    "query": query, "run": training, "before": before or _LAST, "count": count,
  }  # fmt: skip
  matches: set[int] = set()
  for statement in (_FIND[connection.dialect.name], _FIND_PENDING):
    matches.update(connection.scalars(sa.text(statement), values))
  return sorted(matches, reverse=True)[:count]


# --- SQL ---------------------------------------------------------------------

_LAST = (1 << 63) - 1
_TABLES = {
  "sqlite": [
    f"CREATE VIRTUAL TABLE {TABLE} USING fts5(words, content='',"
    ' columnsize=0, detail=none, tokenize="unicode61'
    ' remove_diacritics 0")',
    f"CREATE TABLE IF NOT EXISTS {_PENDING} (turn_id integer PRIMARY KEY)",
  ],
  "postgresql": [
    f"CREATE TABLE {TABLE} (turn_id bigint PRIMARY KEY REFERENCES turn (id)"
    " ON DELETE CASCADE, training_id bigint NOT NULL, words tsvector NOT"
    " NULL)",
    f"CREATE INDEX idx_{TABLE} ON {TABLE} USING gin (words)",
    f"CREATE INDEX idx_{TABLE}_run ON {TABLE} (training_id, turn_id)",
    f"CREATE TABLE IF NOT EXISTS {_PENDING} (turn_id bigint PRIMARY KEY)",
  ],
}
_INDEX = {
  "sqlite": f"INSERT INTO {TABLE} (rowid, words) VALUES (:turn, :words)",
  "postgresql": f"INSERT INTO {TABLE} VALUES (:turn, :run,"
  " strip(to_tsvector('simple', :words))) ON CONFLICT (turn_id) DO UPDATE SET"
  " training_id = excluded.training_id, words = excluded.words",
}
_FIND = {
  "sqlite": f"SELECT rowid FROM {TABLE} WHERE {TABLE} MATCH :query AND rowid <"
  " :before ORDER BY rowid DESC LIMIT :count",
  "postgresql": f"SELECT turn_id FROM {TABLE} WHERE training_id = :run"
  " AND words @@ to_tsquery('simple', :query) AND turn_id < :before ORDER BY"
  " turn_id DESC LIMIT :count",
}
_FIND_PENDING = (
  f"SELECT turn_id FROM {_PENDING} WHERE turn_id < :before ORDER BY turn_id"
  " DESC LIMIT :count"
)
_NOTED = (
  ("turn_made", "INSERT", "turn", "NEW.id > 0", "id"),
  ("turn_changed", "UPDATE OF metrics_json", "turn", "NEW.id > 0", "id"),
  ("typed", "INSERT", "action", "NEW.action_type = 'type'", "turn_id"),
  (
    "typed_changed", "UPDATE OF tool_args, action_type", "action",
    "NEW.action_type = 'type'", "turn_id",
  ),
  ("raw", "INSERT", "monitor_raw_value", "NEW.kind = 'turn'", "entity_id"),
  (
    "raw_changed", "UPDATE OF value", "monitor_raw_value",
    "NEW.kind = 'turn'", "entity_id",
  ),
)  # fmt: skip
"""Triggers that note a turn: (name, event, table, condition, its id)."""


def statements(dialect: str) -> list[str]:
  """Returns DDL of the index's triggers."""
  ddl = []
  for name, event, table, when, turn in _NOTED:
    head = (
      f"CREATE TRIGGER {triggers.PREFIX}words_{name} AFTER {event} ON {table}"
    )
    note = f"INSERT INTO {_PENDING} VALUES (NEW.{turn}) ON CONFLICT DO NOTHING"
    if dialect == "sqlite":
      ddl.append(f"{head} WHEN {when} BEGIN {note}; END")
    else:
      function = f"monitor_fn_words_{name}"
      ddl += [
        f"CREATE OR REPLACE FUNCTION {function}() RETURNS trigger AS $$ BEGIN"
        f" {note}; RETURN NULL; END $$ LANGUAGE plpgsql",
        f"{head} FOR EACH ROW WHEN ({when}) EXECUTE FUNCTION {function}()",
      ]
  return ddl
