"""Lists the package's commands, one line each."""

from __future__ import annotations

import argparse
from typing import Sequence

from tunix.rl.multi_turn import commands


def listing() -> str:
  """Both groups of commands, aligned."""
  width = max(map(len, [*commands.COMMANDS, *commands.MAINTAINERS]))
  blocks = []
  for title, group in (
      ("Commands, each with --help:", commands.COMMANDS),
      ("A maintainer's, for what the package ships:", commands.MAINTAINERS),
  ):
    lines = [
        f"  python -m {module.ljust(width)}  {text}"
        for module, text in group.items()
    ]
    blocks.append("\n".join([title, *lines]))
  return "\n\n".join(blocks)


def main(argv: Sequence[str] | None = None) -> None:
  argparse.ArgumentParser(
      prog="python -m tunix.rl.multi_turn.commands",
      description=listing(),
      formatter_class=argparse.RawDescriptionHelpFormatter,
  ).parse_args(argv)
  print(listing())


if __name__ == "__main__":
  main()
