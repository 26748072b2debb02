"""Lists the package's commands, one line each."""

from __future__ import annotations

import argparse
from typing import Sequence

from tunix.rl.multi_turn import commands


def listing() -> str:
  """The commands, aligned."""
  width = max(map(len, commands.COMMANDS))
  lines = [
    f"  python -m {module.ljust(width)}  {text}"
    for module, text in commands.COMMANDS.items()
  ]
  return "\n".join(["Commands, each with --help:", *lines])


def main(argv: Sequence[str] | None = None) -> None:
  argparse.ArgumentParser(
    prog="python -m tunix.rl.multi_turn.commands",
    description=listing(),
    formatter_class=argparse.RawDescriptionHelpFormatter,
  ).parse_args(argv)
  print(listing())


if __name__ == "__main__":
  main()
