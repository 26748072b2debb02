"""Rolls out for a run whose learner is another process (`rollout.via=hosts`).

    python -m tunix.rl.multi_turn.commands.rollout runs/<name> [key=value ...]

Start it on as many hosts as there are, before or after the learner. Each takes
the run's settings from the learner, whose address and token stand in
`rollout.json` of the run's directory, and samples with all devices that JAX
sees here; `mesh.*` split the policy over them.

Promises: ends with 0 when the run does, with one line and 2 where it cannot
roll out for it, and with 1 when no learner was there for `--patience` seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Sequence

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import http
from tunix.rl.multi_turn.policy import compile_cache
from tunix.rl.multi_turn.policy import host_memory
from tunix.rl.multi_turn.run.rollout_hosts import host as host_lib
from tunix.rl.multi_turn.run.rollout_hosts import player


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns the exit status."""
  parser = argparse.ArgumentParser(
      prog="python -m tunix.rl.multi_turn.commands.rollout",
      description=__doc__.partition("\n")[0],
  )
  parser.add_argument("directory", help="the run's directory")
  parser.add_argument(
      "overrides",
      nargs="*",
      metavar="key=value",
      help="this host's own settings, e.g. mesh.fsdp=4 engine.slots=32",
  )
  parser.add_argument(
      "--patience",
      type=float,
      default=600.0,
      metavar="S",
      help="seconds to wait for a learner that is not there (%(default)s)",
  )
  args = parser.parse_args(argv)
  host_memory.tune()
  compile_cache.enable("auto")
  try:
    overrides = player.overrides_of(args.overrides, "mesh.fsdp=4")
    host = host_lib.RolloutHost(args.directory, overrides, args.patience)
    asyncio.run(host.run())
  except config_lib.ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  except (player.LearnerGone, http.CallError, ValueError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    return 130
  print(f"the run has ended; {host.collected} groups were collected here")
  return 0


if __name__ == "__main__":
  sys.exit(main())
