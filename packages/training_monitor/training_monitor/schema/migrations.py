"""Brings a database to the present schema, which `tables` describes.

A new database gets every table at once. A database of an earlier schema gets
the tables and indices that it lacks, then the `_STEPS` that came after its own
schema. `alembic_version` names the schema of a database; the table has its
name from the tool that made the first databases.

A change of `tables` puts a new name at the front of `REVISIONS`. A change that
is more than a new table or index (a column, a constraint, values) also gets a
step of that name.
"""

from __future__ import annotations

import collections
from typing import Any, Callable, Mapping

import sqlalchemy as sa

from training_monitor.schema import tables

REVISIONS = tuple(f"{number:04d}" for number in range(11, 0, -1))
"""Every schema that this version can open or upgrade, the present one first."""
_STAMP = sa.Table(
  "alembic_version",
  sa.MetaData(),
  sa.Column("version_num", sa.String(32), nullable=False),
  sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
_REPLACED_INDEX = "idx_rollout_step_id_reward"


def revision_of(connection: sa.Connection) -> str | None:
  """Returns the schema that the database has; None without one."""
  if not sa.inspect(connection).has_table(_STAMP.name):
    return None
  return connection.execute(sa.select(_STAMP.c.version_num)).scalar()


def upgrade(connection: sa.Connection) -> None:
  """Makes or completes the tables, and stamps the database as present."""
  revision = revision_of(connection)
  if revision is not None:
    _drop_changed_indices(connection)
  order: collections.Counter[str] = collections.Counter(
    {str(index.name): n for n, index in enumerate(tables.LIST_INDICES, 1)}
  )
  for table in tables.metadata.sorted_tables:
    connection.execute(sa.schema.CreateTable(table, if_not_exists=True))
    by_name = {str(index.name): index for index in table.indexes}
    for name in sorted(by_name, key=lambda n: (order[n], n)):
      connection.execute(
        sa.schema.CreateIndex(by_name[name], if_not_exists=True)
      )
  for later, step in _STEPS.items():
    if revision is None or revision < later:
      step(connection)
  _STAMP.create(connection, checkfirst=True)
  connection.execute(sa.delete(_STAMP))
  connection.execute(sa.insert(_STAMP).values(version_num=REVISIONS[0]))


def _drop_changed_indices(connection: sa.Connection) -> None:
  """Drops indices whose columns differ from those in `tables`."""
  inspector = sa.inspect(connection)
  for table in tables.metadata.sorted_tables:
    if not inspector.has_table(table.name):
      continue
    expected = {
      str(index.name): ([c.name for c in index.columns], bool(index.unique))
      for index in table.indexes
    }
    for present in inspector.get_indexes(table.name):
      name = str(present["name"])
      columns: tuple[list[Any], bool] = (
        present["column_names"],
        bool(present["unique"]),
      )
      if name == _REPLACED_INDEX or expected.get(name, columns) != columns:
        connection.exec_driver_sql(f'DROP INDEX "{name}"')


def _separate_modes(connection: sa.Connection) -> None:
  """Recomputes the figures of measurements from their sampled attempts.

  Greedy attempts count where a measurement has no others, as they do for new
  rows; see `server.side_rows.update_figures`.
  """
  for kind in ("eval", "baseline"):
    own = (
      f"FROM rollout WHERE source_type = '{kind}' AND {kind}_id ="
      f" \"{kind}\".id AND status = 'completed' AND"
      " coalesce(temperature, 1.0) <> 0"
    )
    mixed = (
      f"EXISTS (SELECT 1 FROM rollout WHERE source_type = '{kind}' AND"
      f' {kind}_id = "{kind}".id AND temperature = 0) AND EXISTS (SELECT 1'
      f" {own})"
    )
    connection.exec_driver_sql(
      f'UPDATE "{kind}" SET success_rate = (SELECT avg(CASE WHEN'
      f" task_success = 1 THEN 1.0 ELSE 0.0 END) {own}), successful_tasks ="
      f" (SELECT count(CASE WHEN task_success = 1 THEN 1 END) {own}),"
      f" avg_reward = (SELECT avg(reward) {own}), avg_turns = (SELECT"
      f" avg(num_turns) {own}) WHERE {mixed}"
    )


def _accept_booleans(connection: sa.Connection) -> None:
  """Lets PostgreSQL store booleans in columns of 0 and 1, as SQLite does.

  Only a superuser may add a cast between two types of the system. Without the
  cast the schema is complete, and PostgreSQL refuses booleans.
  """
  if connection.dialect.name != "postgresql":
    return
  run = connection.exec_driver_sql
  if not run(
    "SELECT rolsuper FROM pg_roles WHERE rolname = current_user"
  ).scalar_one():
    return
  run(
    "CREATE OR REPLACE FUNCTION monitor_fn_flag(boolean) RETURNS bigint"
    " LANGUAGE sql IMMUTABLE STRICT AS"
    " 'SELECT CASE WHEN $1 THEN 1::bigint ELSE 0::bigint END'"
  )
  if not run(
    "SELECT count(*) FROM pg_cast WHERE castsource = 'boolean'::regtype AND"
    " casttarget = 'bigint'::regtype"
  ).scalar():
    run(
      "CREATE CAST (boolean AS bigint) WITH FUNCTION"
      " monitor_fn_flag(boolean) AS ASSIGNMENT"
    )


_STEPS: Mapping[str, Callable[[sa.Connection], None]] = {
  "0006": _separate_modes,
  "0008": _accept_booleans,
}
"""What a schema changed beyond new tables and indices."""
