"""What this folder's tests share, importable however pytest was started."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture(scope="session", name="running")
def _running():
  """A server; only what can be undone may be done to it."""
  import rollout_server  # Not before a test asks for it: it is slow to import.

  with rollout_server.Running(features=("details", "grammar")) as running:
    yield running
    stats = running.engine.stats()
    assert stats["compiles_after_warm_up"] == stats["compiles_on_demand"] == 0
