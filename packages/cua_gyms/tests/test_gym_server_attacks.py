"""The gym server answers while clients hold what they can."""

import attacks
import gym_servers
import pytest

PATH = "/api/v1/desktop/tasks/001"


@pytest.fixture(scope="module", name="server")
def _server():
  with gym_servers.serving(connections=attacks.LIMITS) as (url, _):
    yield attacks.Server(url, PATH, 4 << 20)


class TestAttacks(attacks.Withstands):
  """On the fixture's server."""


def test_who_sends_too_much_hears_so_at_the_end(server):
  status, body = server.post((4 << 20) + 1)
  assert status == 413 and body["code"] == "too_large"


def test_strangers_hold_nothing():
  with gym_servers.serving(token="t", connections=attacks.LIMITS) as (url, _):
    attacks.strangers_hold_nothing(attacks.Server(url, PATH, 4 << 20))
