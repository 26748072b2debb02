"""Both databases, servers on them, and a browser, for tests that ask."""

import contextlib
import pathlib
import types

import chromium
import monitor_databases
import pytest

pytest.importorskip("sqlalchemy", reason="needs the extra `monitor`")
import monitor_server  # noqa: E402
from trainer_core import images  # noqa: E402
from training_monitor.schema import database  # noqa: E402

OF_BOTH = (
  "test_monitor_ingest.py",
  "test_monitor_later_schema.py",
  "test_monitor_reading.py",
  "test_text_index.py",
)
_NONE = types.SimpleNamespace(id="")


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
  """Path or URL of a fresh database with the schema in it."""
  with _fresh(request, tmp_path) as where:
    yield where


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def shared_target(request, tmp_path_factory):
  """As `target`, one for a module: its tests undo what they do."""
  with _fresh(request, tmp_path_factory.mktemp("shared")) as where:
    yield where


@contextlib.contextmanager
def _fresh(request, folder):
  if request.param == "sqlite":
    path = str(folder / "monitor.db")
    monitor_databases.new_sqlite(path)
    yield path
    return
  server = request.getfixturevalue("postgres")
  url = monitor_databases.new_database(server)
  yield url
  # Hundreds of databases would take minutes to delete at the end.
  monitor_databases.drop_database(server, url)


@pytest.fixture
def engine(target):
  opened = database.connect(target)
  yield opened
  opened.dispose()


@pytest.fixture
def server(target, tmp_path):
  with monitor_server.MonitorServer(target, tmp_path / "files") as running:
    yield running


@pytest.fixture
def lite(tmp_path):
  with monitor_server.sqlite_server(tmp_path) as running:
    yield running


@pytest.fixture
def store():
  return images.ImageStore()


@pytest.fixture(scope="module")
def context():
  with chromium.browser() as browser:
    opened = browser.new_context(viewport={"width": 1400, "height": 900})
    yield opened
    opened.close()


def mark_slow(items, folder: pathlib.Path) -> None:
  """Marks the PostgreSQL half of a folder's tests on both databases as slow.

  Not in the modules whose statements differ between the two.
  """
  for item in items:
    if (
      item.path.parent == folder
      and item.path.name not in OF_BOTH
      and "postgresql" in getattr(item, "callspec", _NONE).id.split("-")
    ):
      item.add_marker(pytest.mark.slow)
