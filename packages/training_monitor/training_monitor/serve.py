"""Runs `python -m training_monitor`: the server, tokens, upkeep.

Promises: a server on the loopback address asks for no token unless the database
has some; on any other address it does not start without one.
"""

from __future__ import annotations

import argparse
import logging
import os
import pathlib
import signal
import sys
import threading
import types
from typing import Sequence

import uvicorn

from training_monitor import app as app_lib
from training_monitor.core import monitor_settings as settings_lib
from training_monitor.core import shell_hints
from training_monitor.maintenance import commands as maintenance
from training_monitor.net import connections
from training_monitor.net import credentials
from training_monitor.net import http_server
from training_monitor.schema import database
from training_monitor.server import access as access_lib

TOKEN_VARIABLE = settings_lib.TOKEN_VARIABLE
_DATABASE = "runs/monitor.db"
_LAST_LOOK_S = 3.0
"""For pages that are open when a run's own server ends."""


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m training_monitor",
    description="The Training Monitor's server and its upkeep.",
  )
  commands = parser.add_subparsers(dest="command", required=True)
  serve = commands.add_parser("serve", help="store and show runs")
  token = commands.add_parser("token", help="make a token of a project")
  for one in (serve, token, *maintenance.add(commands)):
    one.add_argument(
      "--database",
      default=_DATABASE,
      help="SQLite file, or postgresql://user@host/name (%(default)s)",
    )
  serve.add_argument("--host", default="127.0.0.1")
  serve.add_argument(
    "--port", type=int, default=8765, help="0 takes a free one (%(default)s)"
  )
  serve.add_argument(
    "--files",
    default="",
    help="folder of screenshots and videos (beside the SQLite file)",
  )
  serve.add_argument(
    "--token",
    default=os.environ.get(TOKEN_VARIABLE, ""),
    help=f"opens the default project (${TOKEN_VARIABLE})",
  )
  serve.add_argument(
    "--max-body-mb", type=int, default=16, help="of a batch (%(default)s)"
  )
  serve.add_argument(
    "--tokenizer",
    action="append",
    default=[],
    metavar="MODEL=PATH",
    help="tokenizer.json of a policy.name, to show tokens as text",
  )
  serve.add_argument(
    "--until-eof",
    action="store_true",
    help="stop when the standard input ends, as its owner has, and not at"
    " SIGTERM, which may be meant for both",
  )
  http_server.add_options(serve, body_memory=256)
  token.add_argument("--project", default=access_lib.DEFAULT_PROJECT)
  token.add_argument("--scopes", default="ingest,read")
  token.add_argument("--note", default="")
  args = parser.parse_args(argv)
  try:
    if args.command == "serve":
      return _serve(args)
    if args.command == "token":
      return _token(args)
    return args.call(args, files_of)
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    return 130
  except (
    database.DatabaseError,
    maintenance.MaintenanceError,
    ValueError,
    OSError,
  ) as error:
    print(f"error: {credentials.masked(str(error))}", file=sys.stderr)
    return 2
  except database.DriverError as error:
    # Not a database, or a server that is not there.
    print(
      f"error: --database={credentials.masked(args.database)}:"
      f" {credentials.masked(database.reason(error))}; give a file that the"
      " monitor made or may make, or postgresql://user@host/name",
      file=sys.stderr,
    )
    return 2
  except Exception as error:  # pylint: disable=broad-except
    # A missing database fails in many ways, all for the user to see.
    text = credentials.masked(f"{type(error).__name__}: {error}")
    print(f"error: {text}", file=sys.stderr)
    return 1


def files_of(target: str, files: str) -> pathlib.Path:
  """Returns the folder beside a database.

  Raises:
    ValueError: it has none, and none is given.
  """
  if files:
    return pathlib.Path(files).expanduser()
  url = database.url_of(target)
  if url.get_backend_name() != "sqlite":
    raise ValueError("--files: PostgreSQL has no folder; give one for images")
  path = database.file_of(url)
  return path.with_name(f"{path.stem}_files")


def _token(args: argparse.Namespace) -> int:
  engine = database.connect(args.database)
  database.upgrade(engine)
  scopes = tuple(s.strip() for s in args.scopes.split(",") if s.strip())
  print(access_lib.make_token(engine, args.project, scopes, args.note))
  print("keep it: it is not stored", file=sys.stderr)
  engine.dispose()
  return 0


def _serve(args: argparse.Namespace) -> int:
  logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
  if args.until_eof:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Until `_Server` has it.
  if args.max_body_mb < 1:
    raise ValueError(f"--max-body-mb={args.max_body_mb}: give 1 or more")
  limits = http_server.limits_of(args)
  connections.raise_open_files()
  files = files_of(args.database, args.files)
  tokenizers = dict(_tokenizer(option) for option in args.tokenizer)
  engine = database.connect(args.database)
  database.upgrade(engine)
  guarded = bool(args.token) or access_lib.has_tokens(engine)
  if not guarded and not http_server.is_loopback(args.host):
    raise ValueError(
      f"--host={args.host} can be reached by others: give a --token (or"
      f" ${TOKEN_VARIABLE}), or make tokens with:"
      f" {shell_hints.program('training_monitor', 'token')}"
    )
  # A reader of the URL may connect at once, and waits until it is served.
  listening = http_server.listen(args.host, args.port, backlog=128)
  app = app_lib.MonitorApp(
    engine,
    files,
    access_lib.Access(engine, args.token, open_to_all=not guarded),
    app_lib.IngestLimits(batch=args.max_body_mb << 20),
    tokenizers,
  )
  server = _Server(app, limits, until_eof=args.until_eof)
  if args.until_eof:
    threading.Thread(
      target=_stop_at_eof, args=(server, app), name="monitor-eof", daemon=True
    ).start()
  url = http_server.url_of(args.host, listening)
  print(f"Training Monitor: {url}", flush=True)
  server.run(sockets=[listening])
  engine.dispose()
  return 0


def _tokenizer(option: str) -> tuple[str, str]:
  # Both a name and a path may hold "=": the existing path decides.
  cuts = [i for i, c in enumerate(option) if c == "="]
  splits = [(option[:i], option[i + 1 :]) for i in cuts]
  model, path = next(
    (s for s in splits if s[1] and pathlib.Path(s[1]).expanduser().exists()),
    splits[-1] if splits else ("", ""),
  )
  if not model or not path:
    raise ValueError(
      f"--tokenizer={option}: give the policy's name and a path, as in"
      " Qwen/Qwen2.5-VL-3B-Instruct=/models/qwen"
    )
  return model, path


class _Server(uvicorn.Server):
  """Ends event streams before it waits for requests to end."""

  def __init__(
    self,
    app: app_lib.MonitorApp,
    limits: connections.ConnectionLimits = connections.ConnectionLimits(),
    *,
    until_eof: bool = False,
  ):
    super().__init__(
      http_server.config(
        app.asgi,
        limits,
        ws="none",
        access_log=False,
        timeout_graceful_shutdown=10,
        server_header=False,
      )
    )
    self._app = app
    self._until_eof = until_eof

  def handle_exit(self, sig: int, frame: types.FrameType | None) -> None:
    # A signal to all processes of a job must not end a run's server before the
    # run, which still has events to send.
    if not (self._until_eof and sig == signal.SIGTERM):
      super().handle_exit(sig, frame)

  async def shutdown(self, sockets=None) -> None:
    self._app.stop_streams()
    await super().shutdown(sockets)


def _stop_at_eof(server: uvicorn.Server, app: app_lib.MonitorApp) -> None:
  try:
    while sys.stdin.buffer.read(4096):
      pass
    app.announce_end(_LAST_LOOK_S)
  finally:
    server.should_exit = True
