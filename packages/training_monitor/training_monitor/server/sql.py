"""Runs the writer's SQL on the driver's own cursor.

Thousands of rows a second pass through; SQLAlchemy's overhead of each statement
would cost as much as the rows. The text is made once, from the metadata.
"""

from __future__ import annotations

import functools
from typing import Any, Iterable, Sequence

import orjson
import sqlalchemy as sa

from training_monitor.schema import tables


class Sql:
  """A transaction's cursor. Statements have `?` for every value."""

  def __init__(self, connection: sa.Connection):
    self.sqlite = connection.dialect.name == "sqlite"
    self._cursor = connection.connection.cursor()

  def run(self, statement: str, values: Sequence[Any] = ()) -> int:
    """Runs a statement; returns the number of changed rows."""
    self._cursor.execute(self._of(statement), values)
    return self._cursor.rowcount

  def many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
    if rows:
      self._cursor.executemany(self._of(statement), rows)

  def rows(
    self, statement: str, values: Sequence[Any] = ()
  ) -> list[tuple[Any, ...]]:
    return self._cursor.execute(self._of(statement), values).fetchall()

  def among(
    self, statement: str, values: Sequence[Any], among: Iterable[Any]
  ) -> list[tuple[Any, ...]]:
    """Returns rows of a statement whose last condition is `column {among}`."""
    if self.sqlite:
      return self.rows(
        statement.format(among="IN (SELECT value FROM json_each(?))"),
        (*values, orjson.dumps(list(among)).decode()),
      )
    return self.rows(statement.format(among="= ANY(?)"), (*values, list(among)))

  def rows_of(
    self,
    statement: str,
    pairs: Sequence[tuple[str, str]],
    values: Sequence[Any],
  ) -> list[tuple[Any, ...]]:
    """Returns the rows of a statement over pairs of text.

    Args:
      statement: has `{pairs} JOIN`, then `{first}` and `{second}` of a pair.
      pairs: the table's rows.
      values: Values of the statement, behind the pairs.
    """
    if self.sqlite:
      return self.rows(
        statement.format(
          pairs="json_each(?) AS pair CROSS",  # Keeps their order.
          first="json_extract(pair.value, '$[0]')",
          second="json_extract(pair.value, '$[1]')",
        ),
        (orjson.dumps(pairs).decode(), *values),
      )
    return self.rows(
      statement.format(
        pairs="unnest(?::text[], ?::text[]) AS pair (one, two)",
        first="pair.one",
        second="pair.two",
      ),
      ([p[0] for p in pairs], [p[1] for p in pairs], *values),
    )

  def next_ids(self, table: str, count: int, used: dict[str, int]) -> range:
    """Returns ids for `count` new rows, never used before.

    Args:
      table: they are for.
      count: how many.
      used: table -> the last id taken in this transaction; updated.
    """
    if not self.sqlite:
      rows = self.rows(
        f"SELECT nextval('{table}_id_seq') FROM generate_series(1, {count:d})"
      )
      ids = [row[0] for row in rows]
      if ids[-1] - ids[0] + 1 != count:  # Another writer took some.
        ((start,),) = self.rows(
          f"SELECT setval('{table}_id_seq', (SELECT last_value FROM"
          f" {table}_id_seq) + {count:d}) - {count:d} + 1"
        )
        return range(start, start + count)
      return range(ids[0], ids[0] + count)
    if not used:
      used.update(
        self.rows(
          "SELECT name, max(seq) FROM (SELECT name, seq FROM sqlite_sequence"
          " UNION ALL SELECT 'environment', max(id) FROM"
          " monitor_pending_environment) WHERE seq IS NOT NULL GROUP BY name"
        )
      )
    last = used.get(table, 0)
    used[table] = last + count
    return range(last + 1, last + 1 + count)

  def reserve(self, table: str, id_: int) -> None:
    """Reserves an id that no row has yet."""
    if self.sqlite and not self.run(
      "UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = ?",
      (id_, table),
    ):
      self.run("INSERT INTO sqlite_sequence VALUES (?, ?)", (table, id_))

  def savepoint(self) -> None:
    self._cursor.execute("SAVEPOINT batch")

  def release(self) -> None:
    self._cursor.execute("RELEASE SAVEPOINT batch")

  def undo(self) -> None:
    self._cursor.execute("ROLLBACK TO SAVEPOINT batch")
    self._cursor.execute("RELEASE SAVEPOINT batch")

  def close(self) -> None:
    self._cursor.close()

  def _of(self, statement: str) -> str:
    return statement if self.sqlite else _for_psycopg(statement)


@functools.lru_cache(4096)
def _for_psycopg(statement: str) -> str:
  return statement.replace("?", "%s")


@functools.cache
def columns(table: str) -> tuple[str, ...]:
  """Returns every column of a table."""
  return tuple(c.name for c in tables.metadata.tables[table].c)


@functools.cache
def insert(table: str) -> str:
  """Inserts all columns."""
  names = columns(table)
  return (
    f'INSERT INTO "{table}" ({", ".join(_quoted(names))}) VALUES'
    f" ({', '.join('?' * len(names))})"
  )


@functools.lru_cache(4096)
def update(table: str, names: tuple[str, ...]) -> str:
  """Sets columns of one row; the id is the last value."""
  sets = ", ".join(f"{n} = ?" for n in _quoted(names))
  return f'UPDATE "{table}" SET {sets} WHERE id = ?'


@functools.cache
def upsert(table: str, keys: tuple[str, ...], values: tuple[str, ...]) -> str:
  """Inserts, or replaces the values of the row with these keys."""
  names = keys + values
  sets = ", ".join(f"{n} = excluded.{n}" for n in values)
  action = f"UPDATE SET {sets}" if values else "NOTHING"
  return (
    f"INSERT INTO {table} ({', '.join(names)}) VALUES"
    f" ({', '.join('?' * len(names))}) ON CONFLICT ({', '.join(keys)}) DO"
    f" {action}"
  )


def _quoted(names: Iterable[str]) -> list[str]:
  return [f'"{name}"' for name in names]
