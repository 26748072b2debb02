"""Collects for a run with `fleet=join` or `fleet=ray`; needs no devices.

    python -m tunix_multi_turn commands.collect runs/<name> [key=value ...]

Start it on as many machines as have gyms, before or after the learner, also in
the middle of a run: collectors come and go. Each takes the run's settings from
the learner, whose address and token stand in `rollout.json` of the run's
directory, or, where no file is shared, in $TUNIX_FLEET_URL and
$TUNIX_FLEET_TOKEN, and plays episodes with gyms of its own.

Promises: ends with 0 when the run does, with one line and 2 where it cannot
collect for it, and with 1 when no learner was there for `--patience` seconds;
SIGTERM gives its groups back at once.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from typing import Sequence

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.run.fleet import collector as collector_lib
from tunix.rl.multi_turn.run.rollout_hosts import player

_URL, _TOKEN = "TUNIX_FLEET_URL", "TUNIX_FLEET_TOKEN"


def parser() -> argparse.ArgumentParser:
  """Returns the parser of the command's arguments."""
  result = argparse.ArgumentParser(
    prog="python -m tunix_multi_turn commands.collect",
    description=__doc__.partition("\n")[0],
  )
  result.add_argument(
    "directory",
    nargs="?",
    default="",
    help=f"the run's directory; without it, ${_URL} and ${_TOKEN}",
  )
  player.add_arguments(result, "gym.options={...}")
  result.add_argument(
    "--episodes",
    type=int,
    default=0,
    metavar="N",
    help="episodes at a time; 0 = as many as the run wants (%(default)s)",
  )
  return result


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns the exit status."""
  args = parser().parse_args(argv)
  logging.basicConfig(level=logging.WARNING)
  if "=" in args.directory:  # The first override, where no file is shared.
    args.directory, args.overrides = "", [args.directory, *args.overrides]

  def play() -> tuple[player.GroupPlayer, str]:
    collector = collector_lib.Collector(
      _learner(args.directory, args.patience),
      player.overrides_of(args.overrides, "gym.options={...}"),
      args.episodes,
    )
    return collector, asyncio.run(collector.until_terminated())

  return player.exit_status(play)


def _learner(directory: str, patience_s: float) -> player.Learner:
  """The learner of a directory, or of the environment."""
  if directory:
    return player.Learner.of_directory(directory, patience_s)
  url, token = (os.environ.get(name, "") for name in (_URL, _TOKEN))
  if not (url and token):
    raise config_lib.ConfigError(
      [
        f"give the run's directory, or its rollout.json's url in ${_URL} and"
        f" token in ${_TOKEN}"
      ]
    )
  address = {"url": url.rstrip("/"), "token": token}
  address["policy"] = address["url"].removesuffix("/fleet")
  return player.Learner(lambda: address, f"${_URL}={url}", patience_s)


if __name__ == "__main__":
  sys.exit(main())
