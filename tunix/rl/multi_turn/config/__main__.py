"""Prints docs/configuration.md; see there."""

from tunix.rl.multi_turn import config
from tunix.rl.multi_turn.core import shell_hints

if __name__ == "__main__":
  shell_hints.show(config.reference().removesuffix("\n"))
