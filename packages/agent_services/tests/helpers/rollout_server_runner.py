"""Runs the server in its own thread, around a given engine."""

from __future__ import annotations

from agent_services.serving import server as server_lib
import httpx
from tunix.rl.multi_turn.net import http_server


class Server:
  """Serves while it is entered; `url` is where. The engine stays open."""

  def __init__(self, name, engine, policy, store, **options):
    self.engine = engine
    self.app = server_lib.make_app(name, engine, policy, store, **options)
    self._server = http_server.LoopbackServer(self.app.asgi)
    self.url = self._server.url

  def __enter__(self):
    self._server.start()
    return self

  def __exit__(self, *exc_info):
    self._server.close()

  async def post(self, path, body=None):
    """The answer to a JSON body."""
    # Reading certificates would take longer than many a request.
    async with httpx.AsyncClient(timeout=100, verify=False) as client:
      return await client.post(self.url + path, json=body or {})

  async def start(self):
    """A new session: session_id, api_key, base_url."""
    return (await self.post("/rl/start_session", {"task_id": "t"})).json()
