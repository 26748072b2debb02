"""Fresh monitor databases: SQLite files, and a PostgreSQL of the tests' own."""

import contextlib
import functools
import glob
import itertools
import os
import pathlib
import shutil
import subprocess
import tempfile
import time

import sqlalchemy as sa
from training_monitor.schema import database

_COUNT = itertools.count()


class NoPostgres(Exception):
  """There is none here; says why."""


def _binaries() -> pathlib.Path:
  programs = sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"))
  if not programs:
    path = shutil.which("initdb")
    if path is None:
      raise NoPostgres(
        "PostgreSQL is not installed (Debian: apt-get install postgresql)"
      )
    programs = [path]
  return pathlib.Path(programs[-1]).resolve().parent


def _as_user() -> list[str]:
  """PostgreSQL refuses to run as root."""
  if os.getuid() != 0:
    return []
  if shutil.which("runuser") is None:
    raise NoPostgres("root cannot run PostgreSQL, and there is no runuser")
  result = subprocess.run(["id", "postgres"], capture_output=True, check=False)
  if result.returncode:
    raise NoPostgres("root cannot run PostgreSQL: no user named postgres")
  return ["runuser", "-u", "postgres", "--"]


class Postgres:
  """A running PostgreSQL; called with a database's name it gives its URL."""

  def __init__(self, folder, run, options):
    self._folder = folder
    self._run = run
    self._options = options

  def __call__(self, name: str) -> str:
    return f"postgresql://postgres@/{name}?host={self._folder}"

  def start(self) -> None:
    self._run("pg_ctl", "-w", "-o", self._options, "-l",
              str(self._folder / "log"), "start")  # fmt: skip

  def stop(self, mode: str) -> None:
    """`immediate` ends it as a crash would: without a checkpoint."""
    self._run("pg_ctl", "-m", mode, "-w", "stop")

  def backends(self, name: str) -> list[int]:
    """Process ids of the backends of a database's connections."""
    rows = _ask(
      self,
      f"SELECT pid FROM pg_stat_activity WHERE datname = '{name}'"
      " AND backend_type = 'client backend'",
    )
    return [pid for (pid,) in rows]

  def wait(self, seconds: float = 60.0) -> None:
    """Until it answers, as after a crash."""
    deadline = time.monotonic() + seconds
    while True:
      try:
        _ask(self, "SELECT 1")
        return
      except sa.exc.OperationalError:
        if time.monotonic() > deadline:
          raise
        time.sleep(0.05)


@contextlib.contextmanager
def postgres_server(durable=False):
  """A PostgreSQL on a socket in a folder of its own; yields a `Postgres`.

  Args:
    durable: Whether a commit is on the disk, as in production; tests are
      quicker without.

  Raises:
    NoPostgres: it cannot be had here.
  """
  binaries, user = _binaries(), _as_user()
  folder = pathlib.Path(tempfile.mkdtemp(prefix="monitor-pg-", dir="/tmp"))
  if user:
    shutil.chown(folder, "postgres")
  data = folder / "data"
  # A hundred databases live for a second each; none is worth a vacuum.
  sync = "" if durable else "-F -c full_page_writes=off -c autovacuum=off"
  options = f"-k {folder} -h '' {sync} -c max_connections=40"

  def run(command, *arguments):
    result = subprocess.run(
      [*user, str(binaries / command), "-D", str(data), *arguments],
      capture_output=True,
      text=True,
      timeout=60,
      check=False,
      cwd="/",
    )
    if result.returncode:
      raise NoPostgres(f"{command} failed: {result.stderr[-300:]}")

  server = Postgres(folder, run, options)
  try:
    run(
        "initdb", "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8",
        "--locale=C",
    )  # fmt: skip
    server.start()
    yield server
  finally:
    with contextlib.suppress(NoPostgres):
      server.stop("immediate")
    shutil.rmtree(folder, ignore_errors=True)


def new_sqlite(path) -> None:
  """Makes a SQLite file with the monitor's schema in it."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(_sqlite_template())


@functools.cache
def _sqlite_template() -> bytes:
  with tempfile.TemporaryDirectory(prefix="monitor-lite-") as folder:
    path = pathlib.Path(folder) / "m.db"
    engine = database.connect(path)
    database.upgrade(engine)
    engine.dispose()  # The last connection writes the log into the file.
    assert os.listdir(folder) == ["m.db"]
    return path.read_bytes()


def prepare_template(url) -> None:
  """A database named `template` with the monitor's schema."""
  _admin(url, "CREATE DATABASE template")
  engine = database.connect(url("template"))
  database.upgrade(engine)
  engine.dispose()


def new_database(url) -> str:
  """The URL of a fresh copy of the template."""
  name = f"monitor_{next(_COUNT)}"
  _admin(url, f"CREATE DATABASE {name} TEMPLATE template")
  return url(name)


def drop_database(url, database_url: str) -> None:
  """Deletes a database, and ends the connections to it."""
  name = sa.make_url(database_url).database
  _admin(url, f"DROP DATABASE {name} WITH (FORCE)")


def empty_database(url) -> str:
  name = f"empty_{next(_COUNT)}"
  _admin(url, f"CREATE DATABASE {name}")
  return url(name)


def _admin(url, statement: str) -> None:
  _ask(url, statement)


def _ask(url, statement: str) -> list:
  engine = sa.create_engine(
    database.url_of(url("postgres")), isolation_level="AUTOCOMMIT"
  )
  try:
    with engine.connect() as connection:
      result = connection.exec_driver_sql(statement)
      return result.fetchall() if result.returns_rows else []
  finally:
    engine.dispose()
