"""Serves rollout buffers: where agents write episodes, and trainers read them.

    python -m tunix.rl.multi_turn.trajectory_collector.buffer_service
    tunix-rollout-buffer --port 8889 --dir buffer

The second needs neither JAX nor google-tunix. Binds the loopback interface;
another address needs a token. docs/rollout_buffer.md describes the protocol.

Promises: once the address is printed, clients can connect; a wrong argument
ends the command with status 2 and one line on stderr; Ctrl-C and SIGTERM end it
once running requests are answered and writes are on the disk.
"""

from __future__ import annotations

import argparse
import logging
import pathlib
import sys
import typing
from typing import Sequence

import pydantic
from tunix.rl.multi_turn.core import settings as settings_lib
from tunix.rl.multi_turn.environments.gyms import gym_registry as gyms
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.net import json_models

from agent_services.rollout_buffer import buffer_app
from agent_services.rollout_buffer import buffer_settings
from agent_services.rollout_buffer import rights
from agent_services.rollout_buffer import service

TOKEN_VARIABLE = "TUNIX_BUFFER_TOKEN"
PORT = 8889
_BACKLOG = 4096
_METAVARS = {"s": "S", "MiB": "MIB", "GiB": "GIB"}


def parser() -> argparse.ArgumentParser:
  out = argparse.ArgumentParser(
    prog="python -m tunix.rl.multi_turn.trajectory_collector.buffer_service",
    description="Serve rollout buffers: agents write episodes, trainers read"
    " groups of them.",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
  )
  add = out.add_argument
  add("--host", default="127.0.0.1", help="address to bind")
  add("--port", type=int, default=PORT, help="0: any free one")
  add(
    "--dir",
    type=pathlib.Path,
    default=pathlib.Path("rollout_buffer"),
    help="holds the items; a service that starts again goes on with them",
  )
  add(
    "--public-url",
    default="",
    metavar="URL",
    help="of this service as generators reach it; else as it is bound",
  )
  add(
    "--token-file",
    type=pathlib.Path,
    help=f"holds the token of clients; or set {TOKEN_VARIABLE}",
  )
  add(
    "--generators",
    type=pathlib.Path,
    action="append",
    default=[],
    metavar="DIR",
    help="a folder with generators of your own",
  )
  for field in settings_lib.fields(buffer_settings.BufferLimits):
    choices = typing.get_args(field.type) or None  # Of a Literal.
    add(
      f"--{field.name.replace('_', '-')}",
      type=str if choices else field.type,
      choices=choices,
      default=field.default,
      help=field.doc,
      metavar=None if choices else _METAVARS.get(field.unit, "N"),
    )
  for field in settings_lib.fields(rights.Rights):
    add(
      f"--{field.name.replace('_', '-')}",
      default=",".join(field.default),
      help=field.doc,
      metavar="A[,B]",
    )
  http_server.add_options(out, max_client_connections=4096)
  return out


def _limits(args: argparse.Namespace) -> buffer_settings.BufferLimits:
  """Raises ValueError, naming the option."""
  values = {
    field.name: getattr(args, field.name)
    for field in settings_lib.fields(buffer_settings.BufferLimits)
  }
  try:
    return buffer_settings.BufferLimits(**values)
  except pydantic.ValidationError as error:
    name, _, wrong = json_models.problem(error).partition(" ")
    raise ValueError(f"--{name.replace('_', '-')} {wrong}") from None


def _rights(args: argparse.Namespace) -> rights.Rights:
  """Raises ValueError, ImportError or TypeError: a gym that does not exist."""
  listed = rights.Rights(
    **{
      field.name: tuple(
        name.strip()
        for name in getattr(args, field.name).split(",")
        if name.strip()
      )
      for field in settings_lib.fields(rights.Rights)
    }
  )
  for gym in listed.gyms:
    try:
      spec = gyms.get(gym, "operator")
    except (ImportError, TypeError, ValueError) as error:
      raise ValueError(f"--gyms: {error}") from None
    spec.check_client_settings(listed.client_settings, "--client-settings")
  for folder in listed.input_roots:
    if not pathlib.Path(folder).is_dir():
      raise ValueError(f"--input-roots={folder} is no folder; name one")
  return listed


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns the exit status."""
  from tunix.rl.multi_turn.net import connections  # pylint: disable=g-import-not-at-top
  import uvicorn  # pylint: disable=g-import-not-at-top

  args = parser().parse_args(argv)
  logging.basicConfig(
    level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
  )
  connections.raise_open_files()
  try:
    limits = _limits(args)
    allowed = _rights(args)
    connection_limits = http_server.limits_of(args)
    token = http_server.token(args.token_file, args.host, TOKEN_VARIABLE)
    listening = http_server.listen(args.host, args.port, _BACKLOG)
    url = http_server.url_of(args.host, listening)
    buffers = service.Service(
      args.dir,
      limits=limits,
      rights=allowed,
      generators=args.generators,
      token=token,
      url=args.public_url or url,
    )
  except (OSError, ValueError, ImportError) as error:
    print(f"error: {json_models.refusal(error)}", file=sys.stderr)
    return 2
  app = buffer_app.App(buffers, token=token)
  print(f"serving rollout buffers of {args.dir} at {url}", flush=True)
  config = http_server.config(
    app.asgi, connection_limits, backlog=_BACKLOG, log_config=None
  )
  try:
    uvicorn.Server(config).run(sockets=[listening])
  finally:
    buffers.close()
  return 0


if __name__ == "__main__":
  sys.exit(main())
