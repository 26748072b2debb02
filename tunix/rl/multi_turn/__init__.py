"""Multi-turn reinforcement learning of computer-using agents, in JAX.

    import tunix.rl.multi_turn as mt

    run = mt.train(steps=40, gym="desktop")   # as the command `train`
    run = mt.load("runs/desktop-…")           # a run made before
    run.metrics, run.evaluations, run.episodes, run.plot(), run.watch(-1)
    mt.evaluate(run, attempts=4)              # as the command `evaluate`
    mt.play(run, "enter-text")                # one episode, to be looked at

Importing this imports next to nothing: these names are imported on first use,
and the rooms are subpackages.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any, Mapping

from tunix.rl.multi_turn import moved_rooms

moved_rooms.install()

_API = {
  "BusyError": "api.cell",
  "ConfigError": "config",
  "Episode": "api.episodes",
  "EvaluationRun": "api.runs",
  "Run": "api.runs",
  "TrainingRun": "api.training",
  "load": "api.runs",
  "play": "api.playing",
}


def __getattr__(name: str) -> Any:
  if name == "TrajectoryCollector":
    return importlib.import_module(f"{__name__}.{name}")
  if name in ("evaluate", "train"):
    module = importlib.import_module(f"{__name__}.commands.command_module")
    return module.deferred(f"{__name__}.{name}")
  if name in _API:
    module = importlib.import_module(f"{__name__}.{_API[name]}")
    return getattr(module, name)
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_DRAWN = {
  "Trajectory": ("core.trajectory", ("text/html",)),
  "Step": ("core.trajectory", ("text/html",)),
  "ImageRef": ("core.token_sequence", ("text/html", "image/png")),
  "Observation": ("environments.gyms.base", ("text/html", "image/png")),
  "Task": ("environments.gyms.base", ("text/html",)),
  "Evaluation": ("environments.gyms.base", ("text/html",)),
}
"""Classes that a notebook draws: where they are, and as what."""


def _draw(name: str, mime: str, value: object) -> Any:
  drawings = importlib.import_module(f"{__name__}.api.drawings")
  return drawings.DRAWN[name, mime](value)


def _draw_in(formatters: Mapping[str, Any]) -> None:
  """Registers what draws the classes, by name: nothing is imported."""
  for name, (module, mimes) in _DRAWN.items():
    for mime in mimes:
      formatters[mime].for_type_by_name(
        f"{__name__}.{module}", name, functools.partial(_draw, name, mime)
      )


def _notebook_formatters() -> Mapping[str, Any]:
  """IPython's, by MIME type; none outside of it."""
  interactive = sys.modules.get("IPython")
  find = getattr(interactive, "get_ipython", None)
  shell = find() if find is not None else None
  return {} if shell is None else shell.display_formatter.formatters


if _formatters := _notebook_formatters():
  _draw_in(_formatters)


def __dir__() -> list[str]:
  return sorted({*_API, "evaluate", "train"})
