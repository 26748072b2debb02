"""Opens the database: SQLite by a path, PostgreSQL by a URL.

Promises: on SQLite, WAL with full synchronisation, so that a commit
survives a power loss; a transaction that writes takes its lock at once
(BEGIN IMMEDIATE), so that it waits its turn instead of failing in the middle;
foreign keys hold. On both, a database of another schema is refused.

Times are UTC.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import pathlib
import threading
from typing import Any, Iterator
import weakref

import sqlalchemy as sa

from training_monitor.net import credentials
from training_monitor.schema import later_views
from training_monitor.schema import later_writes
from training_monitor.schema import migrations
from training_monitor.schema import tables
from training_monitor.schema import text_index
from training_monitor.schema import triggers

_BUSY_S = 30.0
_POSTGRES_LOCK = 0x74756E6978  # Any number: an upgrade holds it.
_WRITERS_LOCK = 0x6D6F6E69746F72  # One writer at a time.
_TRIGGERS = "triggers"
_RESERVED = 2  # Connections that readers leave to the writer.
_READER_S = 20.0
_upgrading = threading.Lock()
_readers: weakref.WeakKeyDictionary[sa.Engine, threading.Semaphore] = (
  weakref.WeakKeyDictionary()
)


DriverError = sa.exc.DBAPIError
"""Raised where the database itself refuses."""


class DatabaseError(Exception):
  """The database cannot be used; the text has the reason and the fix."""


def now() -> datetime.datetime:
  """Returns the time as the database has it: UTC without a zone."""
  return datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)


def reason(error: sa.exc.DBAPIError) -> str:
  """Returns the driver's message on one line."""
  return " ".join(str(error.orig or error).split())


def file_of(url: sa.URL) -> pathlib.Path:
  """Returns the file of a SQLite database."""
  return pathlib.Path(url.database or "")


def driver_of(engine: sa.Engine) -> sa.engine.interfaces.DBAPIModule:
  """Returns the module of the engine's driver."""
  driver = engine.dialect.dbapi
  assert driver is not None, "an engine that only compiles"
  return driver


def url_of(target: str | pathlib.Path) -> sa.URL:
  """Returns a database URL of a URL, or of the path of a SQLite file.

  Raises:
    DatabaseError: neither, or a kind of database that is not supported.
  """
  text = str(target)
  if "://" not in text:
    if not text.strip():
      raise DatabaseError(
        "database='': give a file, or a URL such as postgresql://user@host/name"
      )
    path = pathlib.Path(text).expanduser().absolute()
    return sa.URL.create("sqlite", database=str(path))
  try:
    url = sa.make_url(text)
  except sa.exc.ArgumentError as error:
    shown = credentials.masked(text)
    raise DatabaseError(
      f"database={shown!r} is not a URL:"
      f" {credentials.masked(str(error))}; give a path, or"
      " postgresql://user@host/name"
    ) from None
  kind = url.get_backend_name()
  if kind == "postgres":
    kind = "postgresql"
  if kind == "postgresql":
    return url.set(drivername="postgresql+psycopg")
  if kind == "sqlite" and url.database and url.database != ":memory:":
    return url
  raise DatabaseError(
    f"database={url.render_as_string(hide_password=True)}: the monitor runs"
    " on a SQLite file or on PostgreSQL; give a path, or"
    " postgresql://user@host/name"
  )


def connect(target: str | pathlib.Path, *, pool_size: int = 8) -> sa.Engine:
  """Returns an engine for the database; its folder is made, its tables are not.

  Raises:
    DatabaseError: the target is none, or its driver is not installed.
  """
  url = url_of(target)
  if url.get_backend_name() == "sqlite":
    file_of(url).parent.mkdir(parents=True, exist_ok=True)
    engine = sa.create_engine(
      url,
      connect_args={"timeout": _BUSY_S, "check_same_thread": False},
      pool_size=pool_size,
      max_overflow=0,
    )
    _limit_readers(engine, pool_size)
    sa.event.listen(engine, "connect", _set_up_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine
  try:
    engine = sa.create_engine(
      url,
      connect_args={
        "connect_timeout": 10,
        "options": "-c timezone=UTC -c statement_timeout=60000",
      },
      pool_size=pool_size,
      max_overflow=0,
      pool_pre_ping=True,
    )
    _limit_readers(engine, pool_size)
    return engine
  except ImportError as error:
    raise DatabaseError(
      f"PostgreSQL needs psycopg ({error}); pip install 'psycopg[binary]'"
    ) from None


def _limit_readers(engine: sa.Engine, pool_size: int) -> None:
  _readers[engine] = threading.Semaphore(max(1, pool_size - _RESERVED))


def _set_up_sqlite(connection: Any, record: object) -> None:
  del record
  # SQLAlchemy begins transactions, not the driver.
  connection.isolation_level = None
  for pragma in (
    "journal_mode=WAL",
    "synchronous=FULL",
    "foreign_keys=ON",
    f"busy_timeout={int(_BUSY_S * 1000)}",
    "journal_size_limit=67108864",
    "cache_size=-65536",
  ):
    connection.execute(f"PRAGMA {pragma}").fetchall()


def _begin_sqlite(connection: sa.Connection) -> None:
  options = connection.get_execution_options()
  mode = "IMMEDIATE" if options.get("monitor_writes") else "DEFERRED"
  connection.exec_driver_sql(f"BEGIN {mode}")


@contextlib.contextmanager
def writing(engine: sa.Engine) -> Iterator[sa.Connection]:
  """Opens a transaction that writes; an error undoes it."""
  with engine.connect() as connection:
    connection = connection.execution_options(monitor_writes=True)
    with connection.begin():
      yield connection


@contextlib.contextmanager
def reading(engine: sa.Engine) -> Iterator[sa.Connection]:
  """Opens one consistent view of the database for the block.

  Raises:
    sqlalchemy.exc.TimeoutError: too many others read, for too long.
  """
  limit = _readers.get(engine)
  if limit is not None and not limit.acquire(timeout=_READER_S):
    raise sa.exc.TimeoutError("too many readers")
  try:
    with _reading(engine) as connection:
      yield connection
  finally:
    if limit is not None:
      limit.release()


@contextlib.contextmanager
def _reading(engine: sa.Engine) -> Iterator[sa.Connection]:
  with engine.connect() as connection:
    if engine.dialect.name == "postgresql":
      connection = connection.execution_options(
        isolation_level="REPEATABLE READ", postgresql_readonly=True
      )
    with connection.begin():
      yield connection


def hold_writers(connection: sa.Connection) -> None:
  """Makes a transaction the only one that writes; SQLite's always is."""
  if connection.dialect.name == "postgresql":
    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_WRITERS_LOCK})")


def upgrade(engine: sa.Engine) -> None:
  """Makes the tables, and brings triggers and views up to date.

  Several may do so at once.

  Raises:
    DatabaseError: it has another schema, or tables of another program.
  """
  with _upgrading, engine.connect() as connection:
    connection = connection.execution_options(monitor_writes=True)
    with connection.begin():
      if engine.dialect.name == "postgresql":
        connection.exec_driver_sql(
          f"SELECT pg_advisory_xact_lock({_POSTGRES_LOCK})"
        )
      if _is_empty(engine, connection):
        migrations.create(connection)
      text_index.install(connection)
      _install_triggers(connection)


def _is_empty(engine: sa.Engine, connection: sa.Connection) -> bool:
  """Returns whether the monitor's tables are to be made; refuses others."""
  where = engine.url.render_as_string(hide_password=True)
  revision = migrations.revision_of(connection)
  if revision not in (None, migrations.REVISION):
    raise DatabaseError(
      f"{where} has schema {revision}, and this version knows"
      f" {migrations.REVISION}; use the version that wrote it, or another"
      " database"
    )
  if revision is None:
    present = set(sa.inspect(connection).get_table_names())
    clash = sorted(present & set(tables.metadata.tables))
    if clash:
      raise DatabaseError(
        f"{where} has a table {clash[0]!r} that the monitor did not make;"
        " give it a database of its own"
      )
  return revision is None


def _install_triggers(connection: sa.Connection) -> None:
  """Installs what is made of code alone: triggers and views."""
  if _triggers_are_current(connection):
    return
  statements = _made_of_code(connection.dialect.name)
  triggers.drop(connection)
  _drop_views(connection)
  for statement in statements:
    if connection.dialect.name == "postgresql":
      statement = statement.replace("%", "%%")  # Its driver's placeholders.
    connection.exec_driver_sql(statement)
  meta = tables.meta
  connection.execute(sa.delete(meta).where(meta.c.key == _TRIGGERS))
  connection.execute(
    sa.insert(meta).values(key=_TRIGGERS, value=_digest(statements))
  )


def _drop_views(connection: sa.Connection) -> None:
  if later_views.has_foreign_group(connection):
    where = connection.engine.url.render_as_string(hide_password=True)
    raise DatabaseError(
      f"{where} has a table or view 'group' that the monitor did not make;"
      " the monitor has a view of this name: rename yours, or give the"
      " monitor a database of its own"
    )
  later_views.drop(connection)


def _triggers_are_current(connection: sa.Connection) -> bool:
  """Returns whether the installed triggers and views are this version's."""
  meta = tables.meta
  digest = connection.execute(
    sa.select(meta.c.value).where(meta.c.key == _TRIGGERS)
  ).scalar()
  return digest == _digest(_made_of_code(connection.dialect.name))


def _made_of_code(dialect: str) -> list[str]:
  return [
    *triggers.statements(dialect),
    *later_views.statements(dialect),
    *later_writes.statements(dialect),
    *text_index.statements(dialect),
  ]


def _digest(statements: list[str]) -> str:
  return hashlib.sha256("\n".join(statements).encode()).hexdigest()
