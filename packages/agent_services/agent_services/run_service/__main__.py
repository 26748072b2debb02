"""Serves runs: whole episodes of an agent, played for other programs.

    python -m tunix.rl.multi_turn.agents.run_service --port 3000
    tunix-run-service --gyms desktop,miniwob

The second needs neither JAX nor google-tunix. Binds the loopback interface;
another address needs a token. docs/run_service.md describes the protocol.

Promises: once the address is printed, clients can connect; a wrong argument
ends the command with status 2 and one line on stderr.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Sequence

from tunix.rl.multi_turn.core import settings as settings_lib
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.net import json_models

from agent_services.run_service import app as app_lib

TOKEN_VARIABLE = "TUNIX_RUN_SERVICE_TOKEN"
_BACKLOG = 1024


def parser() -> argparse.ArgumentParser:
  out = argparse.ArgumentParser(
    prog="python -m tunix.rl.multi_turn.agents.run_service",
    description="Play whole episodes for programs that ask over HTTP.",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
  )
  add = out.add_argument
  add("--host", default="127.0.0.1", help="address to bind")
  add("--port", type=int, default=3000, help="0: any free one")
  add(
    "--public-url",
    default="",
    metavar="URL",
    help="of this service as others reach it, for addresses of screenshots",
  )
  add(
    "--token-file",
    type=pathlib.Path,
    help=f"holds the token of clients; or set {TOKEN_VARIABLE}",
  )
  add(
    "--gyms",
    default="desktop",
    metavar="A[,B]",
    help="gyms that runs may play in this process: registered names, or"
    " paths package.module:attribute",
  )
  add(
    "--client-settings",
    default="",
    metavar="A[,B]",
    help="settings of these gyms that a run may choose (env.settings)",
  )
  for field in settings_lib.fields(app_lib.RunLimits):
    add(
      f"--{field.name.replace('_', '-')}",
      type=field.type,
      default=field.default,
      metavar="N",
      help=field.doc,
    )
  http_server.add_options(out)
  return out


def _names(text: str) -> tuple[str, ...]:
  return tuple(n.strip() for n in text.split(",") if n.strip())


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns the exit status."""
  from tunix.rl.multi_turn.net import connections  # pylint: disable=g-import-not-at-top
  import uvicorn  # pylint: disable=g-import-not-at-top

  args = parser().parse_args(argv)
  connections.raise_open_files()
  try:
    limits = app_lib.RunLimits(
      **{
        field.name: getattr(args, field.name)
        for field in settings_lib.fields(app_lib.RunLimits)
      }
    )
    connection_limits = http_server.limits_of(args)
    token = http_server.token(args.token_file, args.host, TOKEN_VARIABLE)
    app = app_lib.App(
      gyms=_names(args.gyms),
      client_settings=_names(args.client_settings),
      limits=limits,
      token=token,
      base_url=args.public_url,
    )
    listening = http_server.listen(args.host, args.port, _BACKLOG)
  except (OSError, ValueError, ImportError) as error:
    print(f"error: {json_models.refusal(error)}", file=sys.stderr)
    return 2
  url = http_server.url_of(args.host, listening)
  app.urls.base_url = app.urls.base_url or url
  print(f"serving runs at {url}", flush=True)
  config = http_server.config(app.asgi, connection_limits, backlog=_BACKLOG)
  uvicorn.Server(config).run(sockets=[listening])
  return 0


if __name__ == "__main__":
  sys.exit(main())
