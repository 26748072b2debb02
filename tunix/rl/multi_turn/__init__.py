"""Multi-turn reinforcement learning of computer-using agents, in JAX.

    import tunix.rl.multi_turn as mt

    run = mt.train(steps=40, gym="desktop")   # as the command `train`
    run = mt.load("runs/desktop-…")           # a run made before
    run.metrics, run.evaluations, run.episodes, run.plot(), run.watch(-1)
    mt.evaluate(run, attempts=4)              # as the command `evaluate`
    mt.play(run, "enter-text")                # one episode, to be looked at

Importing this imports nothing else: these names are imported on first use, and
the rooms are subpackages.
"""

from __future__ import annotations

import importlib
from typing import Any

_API = {
    "BusyError": "api.exclusive",
    "ConfigError": "config",
    "Episode": "api.episodes",
    "EvaluationRun": "api.runs",
    "Run": "api.runs",
    "TrainingRun": "api.training",
    "load": "api.runs",
    "play": "api.playing",
}


def __getattr__(name: str) -> Any:
  if name in ("TrajectoryCollector", "evaluate", "train"):
    return importlib.import_module(f"{__name__}.{name}")
  if name in _API:
    module = importlib.import_module(f"{__name__}.{_API[name]}")
    return getattr(module, name)
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  return sorted({*globals(), *_API, "evaluate", "train"})
