"""`python -m tunix_multi_turn environments.gym_server …`; see the package."""

import sys

import tunix_multi_turn

if __name__ == "__main__":
  if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
    print(
      "usage: python -m tunix_multi_turn MODULE [arguments], where MODULE is"
      " of tunix.rl.multi_turn, e.g. environments.gym_server",
      file=sys.stderr,
    )
    sys.exit(2)
  tunix_multi_turn.run(sys.argv.pop(1))
