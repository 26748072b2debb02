"""Serves gyms over HTTP.

    python -m tunix.rl.multi_turn.environments.gym_server desktop --port 5010
    python -m tunix.rl.multi_turn.environments.gym_server gyms.yaml

Binds the loopback interface; another address needs a token. What is served,
and how it is asked, is in docs/gym_server.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import pathlib
import sys
from typing import Any, Mapping, Sequence

from tunix.rl.multi_turn.core import http_server
from tunix.rl.multi_turn.environments import options
from tunix.rl.multi_turn.environments import workers as workers_lib
from tunix.rl.multi_turn.environments.gym_server import app as app_lib
from tunix.rl.multi_turn.environments.gym_server import catalog
from tunix.rl.multi_turn.environments.gym_server import executions
from tunix.rl.multi_turn.environments.gym_server import reading
import yaml

TOKEN_VARIABLE = "TUNIX_GYM_TOKEN"
_BACKLOG = 4096  # Connections that wait until they are served.
_LIMITS = executions.Limits()


def parser() -> argparse.ArgumentParser:
  out = argparse.ArgumentParser(
      prog="python -m tunix.rl.multi_turn.environments.gym_server",
      description="Serve gyms over HTTP.",
      formatter_class=argparse.ArgumentDefaultsHelpFormatter,
  )
  add = out.add_argument
  add("gyms", nargs="+", metavar="GYM",
      help="registered gyms, or YAML files with a list of gym specifications")
  add("--host", default="127.0.0.1")
  add("--port", type=int, default=5010, help="0: any that is free")
  add("--token-file", type=pathlib.Path,
      help=f"holds what clients must present; or set {TOKEN_VARIABLE}")
  add("--import", dest="imports", action="append", default=[],
      metavar="MODULE", help="imported first: registers gyms of your own")
  add("--families", default="", metavar="A[,B]",
      help="task families that are offered (all)")
  add("--train-tasks", type=int, default=16, metavar="N",
      help="listed training tasks of each family")
  add("--eval-tasks", type=int, default=4, metavar="N",
      help="listed held-out tasks of each family")
  add("--seed", type=int, default=0, help="of the listed tasks")
  add("--settings", default="{}", metavar="YAML",
      help="of the gyms, e.g. '{width: 256, height: 192}'")
  add("--task-settings", default="{}", metavar="YAML",
      help="of their task sets, e.g. '{difficulty: 1}'")
  add("--client-settings", default="", metavar="A[,B]",
      help="gym settings that clients may choose (none)")
  add("--shape", default="summary", choices=catalog.SHAPES,
      help="of task lists unless a request asks for another")
  add("--workers", type=int, default=0, metavar="N",
      help="processes that hold the gyms; 0: this one does")
  add("--capacity", type=int, default=_LIMITS.capacity,
      help="executions held at a time")
  add("--creating", type=int, default=_LIMITS.creating,
      help="gyms that start at a time; more wait for their turn")
  add("--lease", type=float, default=_LIMITS.lease, metavar="S",
      help="an execution that is not called for so long is closed")
  add("--max-seconds", type=float, default=_LIMITS.max_seconds, metavar="S",
      help="an execution's whole life")
  for name in ("start", "step", "evaluate", "close"):
    add(f"--{name}-timeout", type=float, default=getattr(_LIMITS, name),
        metavar="S", help=f"deadline of a gym's {name}")
  return out  # pyformat: disable


def _names(text: str) -> tuple[str, ...]:
  return tuple(n.strip() for n in text.split(",") if n.strip())


def specs(args: argparse.Namespace) -> list[catalog.GymSpec]:
  """What the command line and its files say is served.

  Raises:
    ValueError: naming what cannot be.
    OSError: a file cannot be read.
  """
  common: dict[str, Any] = {
      "families": _names(args.families),
      "train_tasks": args.train_tasks,
      "eval_tasks": args.eval_tasks,
      "seed": args.seed,
      "settings": options.yaml_object(args.settings, "--settings"),
      "task_settings": options.yaml_object(
          args.task_settings, "--task-settings"
      ),
      "client_settings": _names(args.client_settings),
      "shape": args.shape,
  }
  found = []
  for gym in args.gyms:
    if not gym.endswith((".yaml", ".yml")):
      found.append(catalog.GymSpec(gym_id=gym, gym=gym, **common))
      continue
    data = yaml.safe_load(pathlib.Path(gym).read_text(encoding="utf-8"))
    if not isinstance(data, list):
      raise ValueError(f"{gym} must hold a list of gyms")
    for i, one in enumerate(data):
      found.append(_from_file(one, common, f"{gym}, gym {i + 1}"))
  return found


def _from_file(
    data: Any, common: Mapping[str, Any], where: str
) -> catalog.GymSpec:
  known = [f.name for f in dataclasses.fields(catalog.GymSpec)]
  if not isinstance(data, Mapping) or "gym" not in data:
    raise ValueError(f"{where} must be an object with 'gym'")
  unknown = sorted(set(data) - set(known))
  if unknown:
    raise ValueError(
        f"{where} takes no {unknown[0]!r}; known: {', '.join(known)}"
    )
  values = {**common, "gym_id": data["gym"], **data}
  for name in ("families", "client_settings"):
    values[name] = tuple(values[name])
  try:
    return catalog.GymSpec(**values)
  except ValueError as error:
    raise ValueError(f"{where}: {error}") from None


def make_app(args: argparse.Namespace, token: str = "") -> app_lib.App:
  """The application that the arguments describe.

  Raises:
    ValueError, ImportError, OSError: naming what cannot be.
  """
  for name in args.imports:
    importlib.import_module(name)
  limits = executions.Limits(
      capacity=args.capacity,
      creating=args.creating,
      lease=args.lease,
      max_lease=max(_LIMITS.max_lease, args.lease),
      max_seconds=args.max_seconds,
      start=args.start_timeout,
      step=args.step_timeout,
      evaluate=args.evaluate_timeout,
      close=args.close_timeout,
  )
  workers: dict[str, Any] = {}
  if args.workers:
    processes = workers_lib.GymWorkers(args.workers, imports=args.imports)
    workers = {"make_gym": processes.make, "close": processes.aclose}
  return app_lib.App(specs(args), limits=limits, token=token, **workers)


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns the exit status."""
  import uvicorn  # pylint: disable=g-import-not-at-top

  args = parser().parse_args(argv)
  listening = None
  try:
    token = http_server.token(args.token_file, args.host, TOKEN_VARIABLE)
    app = make_app(args, token)
    listening = http_server.listen(args.host, args.port, _BACKLOG)
  except (OSError, ValueError, ImportError) as error:
    if listening is not None:
      listening.close()
    print(f"error: {error}", file=sys.stderr)
    return 2
  # From the moment that the address is printed, clients may come.
  url = http_server.url_of(args.host, listening)
  print(f"serving {', '.join(args.gyms)} at {url}", flush=True)
  config = uvicorn.Config(
      app.asgi,
      log_level="warning",
      # Clients keep their connections between the turns of a slow policy.
      timeout_keep_alive=300,
      ws_max_size=reading.MAX_BODY,
      timeout_graceful_shutdown=5,
      backlog=_BACKLOG,
  )
  uvicorn.Server(config).run(sockets=[listening])
  return 0


if __name__ == "__main__":
  sys.exit(main())
