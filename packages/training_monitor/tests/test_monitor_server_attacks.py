"""The monitor answers while clients hold what they can."""

import attacks
import monitor_server
import pytest

PATH = "/api/ingest/batch"


@pytest.fixture(scope="module", name="server")
def _server(tmp_path_factory):
  folder = tmp_path_factory.mktemp("attacked")
  with monitor_server.sqlite_server(
    folder, connections=attacks.LIMITS
  ) as server:
    yield attacks.Server(server.url, PATH, 16 << 20)


class TestAttacks(attacks.Withstands):
  """On the fixture's server."""


def test_strangers_hold_nothing(tmp_path):
  with monitor_server.sqlite_server(
    tmp_path, token="t", connections=attacks.LIMITS
  ) as server:
    attacks.strangers_hold_nothing(attacks.Server(server.url, PATH, 16 << 20))
