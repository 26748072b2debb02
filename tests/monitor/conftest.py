"""Both databases, for every test that asks for `engine`."""

import monitor_databases
import pytest

pytest.importorskip("sqlalchemy", reason="needs the extra `monitor`")
from tunix.rl.multi_turn.monitor.schema import database  # noqa: E402


@pytest.fixture(scope="session")
def postgres():
  """name -> URL on a server of the session's own."""
  try:
    with monitor_databases.postgres_server() as url:
      monitor_databases.prepare_template(url)
      yield url
  except monitor_databases.NoPostgres as reason:
    pytest.skip(f"no PostgreSQL: {reason}")


@pytest.fixture(params=["sqlite", "postgresql"])
def target(request, tmp_path):
  """Where a fresh database is, with the schema in it."""
  if request.param == "sqlite":
    path = str(tmp_path / "monitor.db")
    engine = database.connect(path)
    database.upgrade(engine)
    engine.dispose()
    return path
  return monitor_databases.new_database(request.getfixturevalue("postgres"))


@pytest.fixture
def engine(target):
  found = database.connect(target)
  yield found
  found.dispose()
