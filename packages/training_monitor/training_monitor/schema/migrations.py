"""Makes the tables, which `tables` describes, and names their schema.

`alembic_version` names the schema of a database; the table has its name from
the tool that made the first databases. A change of `tables` gets a new name.
"""

from __future__ import annotations

import collections

import sqlalchemy as sa

from training_monitor.schema import tables

REVISION = "0011"
_STAMP = sa.Table(
  "alembic_version",
  sa.MetaData(),
  sa.Column("version_num", sa.String(32), nullable=False),
  sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)


def revision_of(connection: sa.Connection) -> str | None:
  """Returns the schema that the database has; None without one."""
  if not sa.inspect(connection).has_table(_STAMP.name):
    return None
  return connection.execute(sa.select(_STAMP.c.version_num)).scalar()


def create(connection: sa.Connection) -> None:
  """Makes the tables of an empty database, and stamps it."""
  order: collections.Counter[str] = collections.Counter(
    {str(index.name): n for n, index in enumerate(tables.LIST_INDICES, 1)}
  )
  for table in tables.metadata.sorted_tables:
    connection.execute(sa.schema.CreateTable(table))
    by_name = {str(index.name): index for index in table.indexes}
    for name in sorted(by_name, key=lambda n: (order[n], n)):
      connection.execute(sa.schema.CreateIndex(by_name[name]))
  _accept_booleans(connection)
  _STAMP.create(connection)
  connection.execute(sa.insert(_STAMP).values(version_num=REVISION))


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
