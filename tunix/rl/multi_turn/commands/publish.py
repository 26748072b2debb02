"""Puts a run's policy or episodes on the Hugging Face Hub, or in a folder.

    python -m tunix.rl.multi_turn.commands.publish runs/x policy --to me/agent
    python -m tunix.rl.multi_turn.commands.publish runs/x episodes --out data

The folder is what the Hub would get: a policy's files and a model card, or the
kept episodes as Parquet with their screenshots and a data set card. The token
is HF_TOKEN's or that of `hf auth login`.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Sequence

from tunix.rl.multi_turn.reporting import publishing

_EXAMPLES = """\
examples:
  %(prog)s runs/desktop-x policy --to me/desktop-agent --private
  %(prog)s runs/desktop-x policy --out agent --license apache-2.0
  %(prog)s runs/desktop-x episodes --to me/desktop-episodes
"""


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m tunix.rl.multi_turn.commands.publish",
    description=__doc__.splitlines()[0],
    epilog=_EXAMPLES,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("run", type=pathlib.Path, help="a run's directory")
  parser.add_argument(
    "content",
    choices=publishing.CONTENTS,
    help="the trained policy, or the kept episodes",
  )
  place = parser.add_mutually_exclusive_group(required=True)
  place.add_argument("--to", metavar="OWNER/NAME", help="repository on the Hub")
  place.add_argument(
    "--out", metavar="FOLDER", help="absent or empty folder to write"
  )
  parser.add_argument(
    "--private",
    action="store_true",
    help="a new repository is private; one that exists must be",
  )
  parser.add_argument(
    "--license", default="", metavar="ID", help="for the card: apache-2.0, …"
  )
  parser.add_argument(
    "--base-model",
    default="",
    metavar="OWNER/NAME",
    help="for the card: what was trained, on the Hub",
  )
  parser.add_argument("--message", default="", help="of the commit")
  return parser


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns the exit status."""
  parsed = _parser().parse_args(argv)
  try:
    about = {"license": parsed.license, "base_model": parsed.base_model}
    if parsed.out is not None:
      place: object = publishing.save(
        parsed.run, parsed.content, parsed.out, **about
      )
    else:
      place = publishing.push(
        parsed.run,
        parsed.content,
        parsed.to,
        private=True if parsed.private else None,
        message=parsed.message,
        **about,
      )
  except (publishing.PublishError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  print(place)
  return 0


if __name__ == "__main__":
  sys.exit(main())
