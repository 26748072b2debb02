"""Run services on the loopback interface, and ones that misbehave."""

import contextlib
import json

from agent_services.run_service import app as app_lib
from scripted_http import call  # noqa: F401
from scripted_http import completion  # noqa: F401
from scripted_http import Logged  # noqa: F401
from scripted_http import Scripted  # noqa: F401
from scripted_http import scripted  # noqa: F401
from tunix.rl.multi_turn.net import http_server


@contextlib.contextmanager
def serving(**options):
  """(url, app) of a run service of this package."""
  app = app_lib.App(**options)
  with http_server.LoopbackServer(app.asgi) as server:
    yield server.url, app


class Rewriting:
  """In front of a run service: changes the JSON that passes.

  Attributes:
    run: Changes the body of each request for a run, or None.
    event: Changes each event that is read, or None.
  """

  def __init__(self, app, run=None, event=None):
    self.app, self.run, self.event = app, run, event

  async def __call__(self, scope, receive, send):
    path, parts = scope.get("path", ""), []
    if self.event and path.endswith("/events"):

      async def keep(message):
        parts.append(message)

      await self.app(scope, receive, keep)
      content = _changed(parts, self._change_events)
      kind = [(b"content-type", b"application/json")]
      start = {"type": "http.response.start", "status": 200, "headers": kind}
      await send(start)
      await send({"type": "http.response.body", "body": content})
    elif self.run and (scope.get("method"), path) == ("POST", "/runs"):
      while not parts or parts[-1].get("more_body"):
        parts.append(await receive())
      content = _changed(parts, self.run)
      headers = [(k, v) for k, v in scope["headers"] if k != b"content-length"]
      headers.append((b"content-length", str(len(content)).encode()))

      async def changed():
        return {"type": "http.request", "body": content, "more_body": False}

      await self.app({**scope, "headers": headers}, changed, send)
    else:
      await self.app(scope, receive, send)

  def _change_events(self, body):
    for event in body["events"]:
      self.event(event)


def _changed(messages, change):
  """Returns the JSON of ASGI's messages after `change(value)`."""
  value = json.loads(b"".join(m.get("body", b"") for m in messages))
  change(value)
  return json.dumps(value).encode()
