"""Multi-turn reinforcement learning of computer-using agents, in JAX.

Importing this imports nothing else; the rooms are subpackages.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
  if name == "TrajectoryCollector":  # The source document's name of the room.
    return importlib.import_module(f"{__name__}.trajectory_collector")
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
