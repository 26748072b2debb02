"""What this folder's tests share, importable however pytest was started."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture(scope="session", name="running")
def _running():
  """A server; only what can be undone may be done to it."""
  import rollout_server  # Not before a test asks for it: it is slow to import.

  with rollout_server.Running() as running:
    yield running
    assert running.engine.stats()["compiles_after_warm_up"] == 0
