"""Serves gyms over HTTP.

    python -m tunix.rl.multi_turn.environments.gym_server desktop --port 5010
    python -m tunix.rl.multi_turn.environments.gym_server gyms.yaml

Binds the loopback interface; another address needs a token. docs/gym_server.md
describes the protocol.

Promises: once the address is printed, clients can connect; a wrong argument
ends the command with status 2 and one line on stderr.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any, Mapping, Sequence

import pydantic
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.core import settings as settings_lib
from tunix.rl.multi_turn.environments import options
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.net import json_models
import yaml

from cua_gyms import workers as workers_lib
from cua_gyms.gym_server import catalog
from cua_gyms.gym_server import executions
from cua_gyms.gym_server import gym_app
from cua_gyms.gym_server import reading

TOKEN_VARIABLE = "TUNIX_GYM_TOKEN"
_BACKLOG = 4096  # Connections that wait until the server accepts them.
_DEADLINES = ("start", "step", "evaluate", "close")
_FROM_FILE = ("gym_id", "gym")  # Of a `ServedGym`; the rest are options.


def parser() -> argparse.ArgumentParser:
  out = argparse.ArgumentParser(
    prog="python -m tunix.rl.multi_turn.environments.gym_server",
    description="Serve gyms over HTTP.",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
  )
  add = out.add_argument
  add(
    "gyms",
    nargs="+",
    metavar="GYM",
    help="registered gyms, or YAML files with a list of gyms",
  )
  add("--host", default="127.0.0.1", help="address to bind")
  add("--port", type=int, default=5010, help="0: any free one")
  add(
    "--token-file",
    type=pathlib.Path,
    help=f"holds the token of clients; or set {TOKEN_VARIABLE}",
  )
  add(
    "--import",
    dest="imports",
    action="append",
    default=[],
    metavar="MODULE",
    help="imported first: registers your own gyms",
  )
  add(
    "--workers",
    type=int,
    default=0,
    metavar="N",
    help="processes that hold the gyms; 0: the server's own",
  )
  for field in settings_lib.fields(catalog.ServedGym):
    if field.name not in _FROM_FILE:
      add(_option(field.name), help=field.doc, **_kind(field.default))
  for field in settings_lib.fields(executions.ExecutionLimits):
    add(_option(field.name), help=field.doc, **_kind(field.default))
  http_server.add_options(out, body_memory=256)
  return out


def _option(name: str) -> str:
  suffix = "-timeout" if name in _DEADLINES else ""
  return f"--{name.replace('_', '-')}{suffix}"


def _kind(default: object) -> dict[str, Any]:
  """Keywords of `add_argument` for a setting with this default."""
  if isinstance(default, tuple):
    return {"default": "", "metavar": "A[,B]"}
  if isinstance(default, dict):
    return {"default": "{}", "metavar": "YAML"}
  if isinstance(default, str):
    return {"default": default, "choices": catalog.SHAPES}
  metavar = "S" if isinstance(default, float) else "N"
  return {"default": default, "type": type(default), "metavar": metavar}


def _names(text: str) -> tuple[str, ...]:
  return tuple(n.strip() for n in text.split(",") if n.strip())


def specs(args: argparse.Namespace) -> list[catalog.ServedGym]:
  """Returns the gyms of the command line and its files.

  Raises:
    ValueError: naming the wrong argument.
    OSError: a file cannot be read.
  """
  common: dict[str, Any] = {}
  for field in settings_lib.fields(catalog.ServedGym):
    if field.name in _FROM_FILE:
      continue
    value = getattr(args, field.name)
    if isinstance(field.default, tuple):
      value = _names(value)
    elif isinstance(field.default, dict):
      value = options.yaml_object(value, _option(field.name))
    common[field.name] = value
  gyms = []
  for gym in args.gyms:
    if not gym.endswith((".yaml", ".yml")):
      gyms.append(catalog.ServedGym(gym_id=gym, gym=gym, **common))
      continue
    data = _read(gym)
    if not isinstance(data, list):
      raise ValueError(
        f"{gym} must hold a list of gyms, e.g. [{{gym: desktop}}]"
      )
    for i, one in enumerate(data):
      gyms.append(_from_file(one, common, f"{gym}, gym {i + 1}"))
  return gyms


def _read(path: str) -> Any:
  """Returns the value of a YAML file.

  Raises:
    ValueError: the file is not YAML; the message names the line.
    OSError: the file cannot be read.
  """
  try:
    return yaml.safe_load(pathlib.Path(path).read_text(encoding="utf-8"))
  except UnicodeDecodeError as error:
    raise ValueError(f"{path} is no text in UTF-8: {error.reason}") from None
  except yaml.YAMLError as error:
    where, why = "", str(error).splitlines()[0]
    if isinstance(error, yaml.MarkedYAMLError):
      mark, why = error.problem_mark, error.problem or why
      where = f", line {mark.line + 1}" if mark else ""
    raise ValueError(
      f"{path}{where}: {why}; YAML is indented with spaces"
    ) from None
  except RecursionError:
    raise ValueError(f"{path} nests too deeply") from None


def _import(name: str) -> None:
  """Imports a user's module.

  Raises:
    ValueError: the module cannot be imported.
  """
  try:
    registry.import_module(name)
  except (ImportError, ValueError) as error:
    raise ValueError(
      f"--import={name}: {error}; the module must be importable and register"
      " gyms"
    ) from None


def _from_file(
  data: object, common: Mapping[str, Any], where: str
) -> catalog.ServedGym:
  field_names = [f.name for f in settings_lib.fields(catalog.ServedGym)]
  if not isinstance(data, Mapping) or "gym" not in data:
    raise ValueError(f"{where} must be an object with 'gym'")
  unknown = sorted(set(data) - set(field_names))
  if unknown:
    raise ValueError(
      f"{where} takes no {unknown[0]!r}; known: {', '.join(field_names)}"
    )
  values = {**common, "gym_id": data["gym"], **data}
  try:
    return catalog.ServedGym(**values)
  except pydantic.ValidationError as error:
    raise ValueError(f"{where}: {json_models.problem(error)}") from None


def make_app(args: argparse.Namespace, token: str = "") -> gym_app.App:
  """Returns the application that the arguments describe.

  Raises:
    ValueError, ImportError, OSError: naming the wrong argument.
  """
  for name in args.imports:
    _import(name)
  values = {
    field.name: getattr(
      args, field.name + ("_timeout" if field.name in _DEADLINES else "")
    )
    for field in settings_lib.fields(executions.ExecutionLimits)
  }
  # The operator's own lease may exceed the bound of clients'.
  values["max_lease"] = max(values["max_lease"], values["lease"])
  limits = executions.ExecutionLimits(**values)
  workers: dict[str, Any] = {}
  if args.workers:
    processes = workers_lib.GymWorkers(args.workers, imports=args.imports)
    workers = {"make_gym": processes.make, "close": processes.aclose}
  return gym_app.App(specs(args), limits=limits, token=token, **workers)


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns the exit status."""
  from tunix.rl.multi_turn.net import connections  # pylint: disable=g-import-not-at-top
  import uvicorn  # pylint: disable=g-import-not-at-top

  args = parser().parse_args(argv)
  connections.raise_open_files()
  try:
    connection_limits = http_server.limits_of(args)
    token = http_server.token(args.token_file, args.host, TOKEN_VARIABLE)
    app = make_app(args, token)
    listening = http_server.listen(args.host, args.port, _BACKLOG)
  except (OSError, ValueError, ImportError) as error:
    print(f"error: {json_models.refusal(error)}", file=sys.stderr)
    return 2
  url = http_server.url_of(args.host, listening)
  print(f"serving {', '.join(args.gyms)} at {url}", flush=True)
  config = http_server.config(
    app.asgi, connection_limits, ws_max_size=reading.MAX_BODY, backlog=_BACKLOG
  )
  uvicorn.Server(config).run(sockets=[listening])
  return 0


if __name__ == "__main__":
  sys.exit(main())
