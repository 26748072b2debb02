"""The gym server answers while clients hold what they can."""

import attacks
import gym_servers
import pytest

PATH = "/api/v1/desktop/tasks/001"


@pytest.fixture(scope="module", name="server")
def _server():
  with gym_servers.serving(connections=attacks.LIMITS) as (url, _):
    yield attacks.Server(url, PATH, 4 << 20)


def test_half_heads_are_displaced(server):
  attacks.half_heads_are_displaced(server)


def test_bodies_that_do_not_come_hold_no_place(server):
  attacks.bodies_that_do_not_come_hold_no_place(server)


def test_bodies_are_bounded(server):
  attacks.large_bodies_are_refused_unread(server)
  attacks.chunks_are_counted(server, 1 << 20)
  attacks.bodies_wait_for_memory(server)


def test_who_sends_too_much_hears_so_at_the_end(server):
  status, body = server.post((4 << 20) + 1)
  assert status == 413 and body["code"] == "too_large"


def test_strangers_hold_nothing():
  with gym_servers.serving(token="t", connections=attacks.LIMITS) as (url, _):
    attacks.strangers_hold_nothing(attacks.Server(url, PATH, 4 << 20))
