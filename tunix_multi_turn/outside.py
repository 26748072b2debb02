"""The process that plays our gyms for another program; see `run.evaluations`.

Imported where verifiers is installed, and needs nothing else there; the process
runs by this package's own interpreter.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import threading
from typing import Any, Mapping, Sequence

NAME = "tunix-multi-turn"
_ROOT = pathlib.Path(__file__).resolve().parents[1]
_WORKER = "run.evaluations.outside_policy"


class Host:
  """The process that plays; started again once it has ended. Thread-safe."""

  def __init__(
    self,
    settings: Mapping[str, Any] | Sequence[str],
    train: int,
    eval: int,  # pylint: disable=redefined-builtin
    python: str,
    start_s: float,
    turn_s: float,
  ):
    """Checks the arguments, which are those of `verifiers_env`.

    Raises:
      ValueError: naming the argument.
    """
    for name, count in (("train", train), ("eval", eval)):
      if type(count) is not int or count < 1:
        raise ValueError(
          f"{name}={count!r} must be a number of tasks, 1 or more"
        )
    for name, seconds in (("start_s", start_s), ("turn_s", turn_s)):
      if not seconds > 0:
        raise ValueError(f"{name}={seconds} must be a number of seconds")
    if isinstance(settings, str):
      settings = settings.split()
    if isinstance(settings, Mapping):
      settings = [f"{key}={_text(value)}" for key, value in settings.items()]
    self._setup = {"settings": list(settings), "train": train, "eval": eval}
    python = python or os.environ.get("TUNIX_PYTHON", "")
    own = _ROOT / ".venv/bin/python"
    if not python:
      python = str(own) if own.is_file() else sys.executable
    if not pathlib.Path(python).is_file():
      raise ValueError(
        f"python={python}: no such file; name the interpreter of an"
        " environment that has tunix-multi-turn, or set TUNIX_PYTHON"
      )
    self._command = [python, "-u", "-m", "tunix_multi_turn", _WORKER]
    self._start_s, self.turn_s = start_s, turn_s
    # An installed package is found by its own interpreter.
    clone = (_ROOT / "pyproject.toml").is_file()
    self._path = str(_ROOT) if clone else ""
    self._lock = threading.Lock()
    self._worker: Any = None

  def worker(self) -> Any:
    """Blocks while it starts.

    Raises:
      ValueError: it does not start, or refuses the settings.
    """
    from tunix.rl.multi_turn.net import line_process  # pylint: disable=g-import-not-at-top

    with self._lock:
      if self._worker is None or not self._worker.alive:
        try:
          self._worker = line_process.Worker(
            self._command,
            NAME,
            self._setup,
            self._start_s,
            path=self._path,
            late="turn_s",
          )
        except line_process.WorkerError as error:
          raise ValueError(str(error)) from None
      return self._worker

  def end(self) -> None:
    with self._lock:
      if self._worker is not None:
        self._worker.end("the environment was closed")


def _text(value: Any) -> str:
  """A setting's value as YAML reads it."""
  return value if isinstance(value, str) else json.dumps(value)
