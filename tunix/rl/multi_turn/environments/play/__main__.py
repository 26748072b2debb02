"""Plays tasks of a gym, and records demonstrations.

    python -m tunix.rl.multi_turn.environments.play desktop click-button
    python -m tunix.rl.multi_turn.environments.play desktop enter-text \\
        --by oracle --episodes 20 --out demos.jsonl
    python -m tunix.rl.multi_turn.train warm_start.recordings=demos.jsonl \\
        warm_start.steps=50 tasks=[enter-text]

A person plays on a page that is served on the loopback interface. An episode
is recorded when it is over.
"""

from __future__ import annotations

import argparse
import asyncio
import pathlib
import sys
from typing import Any, Sequence

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments import options
from tunix.rl.multi_turn.environments import wire
from tunix.rl.multi_turn.environments.play import session as session_lib
from tunix.rl.multi_turn.net import http_server


def parser() -> argparse.ArgumentParser:
  out = argparse.ArgumentParser(
    prog="python -m tunix.rl.multi_turn.environments.play",
    description="Play tasks of a gym, and record demonstrations.",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
  )
  add = out.add_argument
  add("gym", help="a registered gym; genv is a gym server")
  add("task", help="a family of its tasks; of genv, also a task's id or name")
  add("--by", default="person", choices=("person", "oracle", "script"))
  add(
    "--script",
    type=pathlib.Path,
    help="for --by script: a file with an action a line, as JSON",
  )
  add("--out", type=pathlib.Path, help="file that episodes are appended to")
  add(
    "--only-solved",
    action="store_true",
    help="record episodes that are solved and no others",
  )
  add(
    "--episodes",
    type=int,
    default=1,
    help="tasks that an oracle or a script plays, one after the other",
  )
  add("--split", default="train", choices=("train", "eval"))
  add("--index", type=int, default=0, help="of the first task in its family")
  add("--seed", type=int, default=0, help="of the run whose tasks they are")
  add(
    "--settings",
    default="{}",
    metavar="YAML",
    help="options of the gym and its tasks, e.g. '{width: 256, height: 192,"
    " difficulty: 1}'",
  )
  add(
    "--import",
    dest="imports",
    action="append",
    default=[],
    metavar="MODULE",
    help="imported first: registers gyms of your own",
  )
  add("--port", type=int, default=0, help="of the page; 0: any that is free")
  add(
    "--timeout",
    type=float,
    default=60.0,
    metavar="S",
    help="deadline of each call into the gym",
  )
  return out


def read_script(path: pathlib.Path) -> list[gui_action.GuiAction]:
  """Returns the actions of a file, one a line.

  Raises:
    ValueError: naming the line.
    OSError: the file cannot be read.
  """
  actions = []
  for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
    if not line.strip():
      continue
    try:
      actions.append(wire.action_from_json(json_text.parse(line), 1, 1))
    except ValueError as error:
      raise ValueError(f"{path}, line {number}: {error}") from None
  return actions


def _check(args: argparse.Namespace) -> None:
  """Raises ValueError naming every number that cannot be."""
  wrong = [
    f"--{name}={getattr(args, name)} must be {rule}"
    for name, right, rule in (
      ("index", 0 <= args.index < 2**63, "0 or more"),
      ("seed", 0 <= args.seed < 2**63, "0 or more, below 2**63"),
      ("episodes", args.episodes >= 1, "1 or more"),
      ("timeout", 0 < args.timeout < 1e7, "a number of seconds > 0"),
    )
    if not right
  ]
  if args.out is not None and args.out.is_dir():
    wrong.append(f"--out={args.out} is a directory; give a file")
  if wrong:
    raise ValueError("; ".join(wrong))


async def _play(args: argparse.Namespace) -> int:
  """Raises ValueError, OSError or ImportError that names the bad argument."""
  _check(args)
  for name in args.imports:
    try:
      registry.import_module(name)
    except (ImportError, ValueError) as error:
      raise ValueError(f"--import {name}: {error}") from error
  settings = options.yaml_object(args.settings, "--settings")
  script = None
  if args.by == "script":
    if args.script is None:
      raise ValueError("--by script needs --script FILE")
    try:
      script = read_script(args.script)
    except OSError as error:
      raise ValueError(f"--script={args.script}: {error.strerror}") from None
  spec = gyms.get(args.gym, "operator")
  spec.check_screenshots(settings)
  if args.by == "oracle":
    spec.load_oracle()  # Refuses a gym that has none.
  task = session_lib.find_tasks(
    args.gym,
    args.task,
    split=args.split,
    index=args.index,
    seed=args.seed,
    options=settings,
  )
  gym = spec.make_gym({**spec.options_of(args.task), **settings})
  session = session_lib.Session(
    args.gym,
    gym,
    out=args.out,
    by=args.by,
    only_solved=args.only_solved,
    timeout_s=args.timeout,
  )
  try:
    if args.by != "person":
      for number in range(args.episodes):
        verdict = await session.play(
          task(number), iter(script) if script is not None else None
        )
        print(
          f"{session.task.task_id}: {session.task.instruction}"
          f" -> {'solved' if verdict.success else 'not solved'}"
          f" in {len(session.actions)} turns"
        )
    else:
      await _serve(args, session, task)
  finally:
    await session.close()
  if args.out is not None:
    print(f"{session.recorded} recorded in {args.out}")
  return 0


async def _serve(
  args: argparse.Namespace, session: session_lib.Session, task: Any
) -> None:
  from tunix.rl.multi_turn.environments.play import page as page_lib  # pylint: disable=g-import-not-at-top
  import uvicorn  # pylint: disable=g-import-not-at-top

  listening = http_server.listen("127.0.0.1", args.port, backlog=16)
  page = page_lib.Page(session, task)
  url = http_server.url_of("127.0.0.1", listening)
  # Behind '#', the key is not sent, logged or passed on by the browser.
  print(f"open {url}/#{page.key}   (Ctrl-C ends)", flush=True)
  config = http_server.config(
    page.asgi, log_config=None, timeout_graceful_shutdown=2
  )
  await uvicorn.Server(config).serve(sockets=[listening])


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns the exit status."""
  args = parser().parse_args(argv)
  try:
    return asyncio.run(_play(args))
  except (OSError, ValueError, ImportError, RuntimeError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    return 130


if __name__ == "__main__":
  sys.exit(main())
