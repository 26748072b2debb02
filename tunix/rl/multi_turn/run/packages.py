"""Finds what the packages beside the framework offer, by entry points.

A package names the parts that a run uses in a group of `PACKAGES`; the
framework does not import it.
"""

from __future__ import annotations

import functools
from importlib import metadata

from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import moved_rooms

PACKAGES = {"monitor": "training_monitor", "services": "agent_services"}
"""Group below `tunix.rl.multi_turn`, and extra -> the package that fills it."""


@functools.cache
def part(group: str, name: str, setting: str) -> metadata.EntryPoint:
  """Returns an entry point of a package, without importing what it names.

  Args:
    group: One of `PACKAGES`.
    name: Name of the part.
    setting: The setting that needs it, for the error.

  Raises:
    ConfigError: The package is not installed.
  """
  points = metadata.entry_points(group=f"tunix.rl.multi_turn.{group}")
  if name not in points.names:
    raise config_lib.ConfigError([moved_rooms.where(setting, PACKAGES[group])])
  return points[name]
