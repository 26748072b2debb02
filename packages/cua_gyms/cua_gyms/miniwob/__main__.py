"""Lists and tries the MiniWoB++ tasks: the `miniwob` command.

    python -m tunix.rl.multi_turn.environments.gyms.miniwob list
    python -m tunix.rl.multi_turn.environments.gyms.miniwob list email --json
    python -m tunix.rl.multi_turn.environments.gyms.miniwob smoke

`smoke` plays one instance of each with a scripted policy, lists which passed,
and exits with 1 when one did not.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import time
from typing import Sequence

from cua_gyms.chromium import devtools
from cua_gyms.miniwob import miniwob_gym
from cua_gyms.miniwob import miniwob_tasks
from cua_gyms.miniwob import oracle
from cua_gyms.miniwob import smoke


def parser() -> argparse.ArgumentParser:
  out = argparse.ArgumentParser(
    prog="python -m tunix.rl.multi_turn.environments.gyms.miniwob",
    description="List the MiniWoB++ tasks, and try them.",
  )
  commands = out.add_subparsers(dest="command", required=True)
  for name, text in (
    ("list", "what there is: turns, the page's time limit, what to do"),
    ("smoke", "play one instance of each with a scripted policy"),
  ):
    command = commands.add_parser(name, help=text, description=text)
    command.add_argument(
      "part", nargs="?", default="", help="only names that hold this"
    )
    command.add_argument("--json", action="store_true", help="an object a line")
    if name == "smoke":
      command.add_argument(
        "--parallel", type=int, default=4, help="tasks at a time (4)"
      )
      command.add_argument(
        "--index", type=int, default=0, help="of the training instance (0)"
      )
      command.add_argument(
        "--seed", type=int, default=0, help="of instances and policy (0)"
      )
  return out


def _chosen(part: str) -> list[str]:
  names = [name for name in miniwob_tasks.families() if part in name]
  if not names:
    miniwob_tasks.page_url(part)  # Says what is nearest.
  return names


def list_tasks(part: str, as_json: bool) -> int:
  """Prints the tasks; returns the exit status."""
  rows = [
    miniwob_tasks.about(name, name in oracle.ORACLE_FAMILIES)
    for name in _chosen(part)
  ]
  if as_json:
    for row in rows:
      print(json.dumps(dataclasses.asdict(row)))
    return 0
  wide = max(len(row.family) for row in rows)
  print(f"{'task':{wide}}  turns  limit  notes   what to do")
  for row in rows:
    notes = ("oracle " if row.oracle else "") + ("quick" if row.quick else "")
    limit = f"{row.limit_s:g} s"
    print(
      f"{row.family:{wide}}  {row.max_turns:5}  {limit:>5}  {notes:12} "
      f" {row.words}"
    )
  print(
    f"\n{len(rows)} tasks. limit: of the page's time, where time_limit=true."
    " oracle: can be\ndemonstrated. quick: restarts without loading the page."
  )
  return 0


async def _smoke(args: argparse.Namespace) -> int:
  names = _chosen(args.part)
  tasks = miniwob_tasks.MiniWobTasks()
  browser = miniwob_gym.Browser(max_pages=args.parallel)
  queue = list(reversed(names))
  failed = 0
  began = time.perf_counter()

  async def work() -> None:
    nonlocal failed
    while queue:
      name = queue.pop()
      task = tasks.train_task(name, args.index, args.seed)
      report = await smoke.try_family(name, task, browser, args.seed)
      failed += bool(report.problem)
      if args.json:
        print(json.dumps(dataclasses.asdict(report)), flush=True)
        continue
      verdict = "FAIL" if report.problem else "pass"
      print(
        f"{verdict}  {name:28} {report.turns:3} turns"
        f"  {'decided' if report.decided else 'open':7}"
        f" {report.score:6.2f}  start {report.start_ms:5.0f} ms"
        f"  step {report.step_ms:4.0f} ms  {report.problem}",
        flush=True,
      )

  try:
    await asyncio.gather(*(work() for _ in range(args.parallel)))
  finally:
    await browser.close()
  if not args.json:
    print(
      f"{len(names) - failed} of {len(names)} passed in"
      f" {time.perf_counter() - began:.0f} s; browser started"
      f" {browser.launches} times, {browser.crashes} crashed pages"
    )
  return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns the exit status."""
  args = parser().parse_args(argv)
  try:
    if args.command == "list":
      return list_tasks(args.part, args.json)
    if args.parallel < 1 or args.index < 0 or args.seed < 0:
      raise ValueError("--parallel must be >= 1, --index and --seed >= 0")
    return asyncio.run(_smoke(args))
  except (
    ValueError,
    miniwob_tasks.PagesNotFound,
    devtools.DevToolsError,
  ) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    return 130


if __name__ == "__main__":
  sys.exit(main())
