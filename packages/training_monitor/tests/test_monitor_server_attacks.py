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


def test_half_heads_are_displaced(server):
  attacks.half_heads_are_displaced(server)


def test_bodies_that_do_not_come_hold_no_place(server):
  attacks.bodies_that_do_not_come_hold_no_place(server)


def test_bodies_are_bounded(server):
  attacks.large_bodies_are_refused_unread(server)
  attacks.chunks_are_counted(server, 1 << 20)
  attacks.bodies_wait_for_memory(server)


def test_strangers_hold_nothing(tmp_path):
  with monitor_server.sqlite_server(
    tmp_path, token="t", connections=attacks.LIMITS
  ) as server:
    attacks.strangers_hold_nothing(attacks.Server(server.url, PATH, 16 << 20))
