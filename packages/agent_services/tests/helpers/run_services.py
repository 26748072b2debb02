"""Run services on the loopback interface, and ones that misbehave."""

import contextlib

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
