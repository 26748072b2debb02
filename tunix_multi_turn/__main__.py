"""`python -m tunix_multi_turn environments.gym_server …`; see the package."""

import sys

import tunix_multi_turn

if __name__ == "__main__":
  sys.exit(tunix_multi_turn.main())
