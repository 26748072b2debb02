"""The policy server answers while clients hold what they can."""

import attacks
import pytest
from tunix.rl.multi_turn.net import http_server

PATH = "/v1/chat/completions"


@pytest.fixture(scope="module", name="server")
def _server(running):
  """The application behind another door; its sessions outlive that."""

  async def no_lifespan(scope, receive, send):
    assert scope["type"] == "http"
    await running.app.asgi(scope, receive, send)

  with http_server.LoopbackServer(no_lifespan, limits=attacks.LIMITS) as door:
    yield attacks.Server(door.url, PATH, 64 << 20)


class TestAttacks(attacks.Withstands):
  """On the fixture's server."""


def test_strangers_hold_nothing(server, running, monkeypatch):
  monkeypatch.setattr(running.app, "_token", "t")
  attacks.strangers_hold_nothing(server)


def test_a_full_server_refuses_before_it_reads(server, running, monkeypatch):
  service = running.app._service  # pylint: disable=protected-access
  monkeypatch.setattr(service, "_max", 0)
  with server.connect(server.head("Content-Length: 900000")) as line:
    status, reply = attacks.answer(line)  # Nothing of the body is sent.
  assert status == 429 and reply["error"]["code"] == "too_many_requests"
