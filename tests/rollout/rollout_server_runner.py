"""The server in a thread of its own, around an engine that is there."""

from __future__ import annotations

import threading
import time

import httpx
from tunix.rl.multi_turn.rollout import serve
import uvicorn


class Server:
  """Serves while it is entered; `url` is where. The engine stays open."""

  def __init__(self, name, engine, policy, store, **options):
    self.engine = engine
    self.app = serve.make_app(name, engine, policy, store, **options)
    self._server = uvicorn.Server(
        uvicorn.Config(self.app.asgi, port=0, log_level="warning")
    )
    self._thread = threading.Thread(target=self._server.run, daemon=True)
    self.url = ""

  def __enter__(self):
    self._thread.start()
    while not self._server.started:
      time.sleep(0.01)
    port = self._server.servers[0].sockets[0].getsockname()[1]
    self.url = f"http://127.0.0.1:{port}"
    return self

  def __exit__(self, *exc_info):
    self._server.should_exit = True
    self._thread.join(20)

  async def post(self, path, body=None):
    """The answer to a JSON body."""
    # Reading certificates would take longer than many a request.
    async with httpx.AsyncClient(timeout=100, verify=False) as client:
      return await client.post(self.url + path, json=body or {})

  async def start(self):
    """A new session: session_id, api_key, base_url."""
    return (await self.post("/rl/start_session", {"task_id": "t"})).json()
