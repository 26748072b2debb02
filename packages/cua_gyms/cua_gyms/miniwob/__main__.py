"""Lists the MiniWoB++ tasks: the `miniwob` command.

python -m tunix.rl.multi_turn.environments.gyms.miniwob list
python -m tunix.rl.multi_turn.environments.gyms.miniwob list email --json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Sequence

from cua_gyms.miniwob import miniwob_tasks
from cua_gyms.miniwob import oracle


def parser() -> argparse.ArgumentParser:
  out = argparse.ArgumentParser(
    prog="python -m tunix.rl.multi_turn.environments.gyms.miniwob",
    description="List the MiniWoB++ tasks.",
  )
  commands = out.add_subparsers(dest="command", required=True)
  text = "what there is: turns, the page's time limit, what to do"
  command = commands.add_parser("list", help=text, description=text)
  command.add_argument(
    "part", nargs="?", default="", help="only names that hold this"
  )
  command.add_argument("--json", action="store_true", help="an object a line")
  return out


def list_tasks(part: str, as_json: bool) -> None:
  """Prints the tasks.

  Raises:
    ValueError: No task's name holds `part`; gives the nearest.
  """
  names = [name for name in miniwob_tasks.families() if part in name]
  if not names:
    miniwob_tasks.page_url(part)  # Says what is nearest.
  rows = [
    miniwob_tasks.about(name, name in oracle.ORACLE_FAMILIES) for name in names
  ]
  if as_json:
    for row in rows:
      print(json.dumps(dataclasses.asdict(row)))
    return
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


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns the exit status."""
  args = parser().parse_args(argv)
  try:
    list_tasks(args.part, args.json)
  except (ValueError, miniwob_tasks.PagesNotFound) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
