"""Keeps the worker processes of environments of verifiers, one for each.

Promises: a worker that failed is ended, and the next episode starts another;
see `core.line_process`. Workers end with this process.

Does not import verifiers. Thread-safe; belongs to no event loop.
"""

from __future__ import annotations

import atexit
import collections
import json
import pathlib
import threading
import time
from typing import Any, Mapping

from tunix.rl.multi_turn.core import line_process

_WORKER = pathlib.Path(__file__).parent / "worker.py"
_RETRY_S = 30.0  # Between two starts, the first of which failed.


class VerifiersError(line_process.WorkerError):
  """The environment, or the process that it runs in, failed."""


class Worker(line_process.Worker):
  """One process, which plays episodes of one environment at a time or more."""

  def __init__(self, python: str, request: Mapping[str, Any], start_s: float):
    """Starts it, and waits until its environment is loaded.

    Args:
      python: interpreter of the environment that has verifiers.
      request: `module`, `args` and `path`.
      start_s: for that.

    Raises:
      VerifiersError: it cannot be started, or cannot load the environment.
    """
    super().__init__(
        [python, "-u", str(_WORKER)],
        request["module"],
        request,
        start_s,
        late="environment.options.episode_s and collect.deadlines.step",
        error=VerifiersError,
    )


_SHARED: dict[str, Worker] = {}
_FAILED: dict[str, tuple[float, str]] = {}  # When a start failed, and why.
_STARTING: dict[str, threading.Lock] = collections.defaultdict(threading.Lock)


def shared(python: str, request: Mapping[str, Any], start_s: float) -> Worker:
  """The worker of that environment, started unless it runs. Blocks.

  A start that failed is tried again half a minute later; until then its error
  is raised at once, so that a run with a wrong module ends soon.

  Raises:
    VerifiersError: see `Worker`.
  """
  key = json.dumps([python, request], sort_keys=True)
  with _STARTING[key]:
    worker = _SHARED.get(key)
    if worker is not None and worker.alive:
      return worker
    when, why = _FAILED.get(key, (0.0, ""))
    if why and time.monotonic() < when + _RETRY_S:
      raise VerifiersError(why)
    try:
      worker = _SHARED[key] = Worker(python, request, start_s)
    except VerifiersError as error:
      _FAILED[key] = time.monotonic(), str(error)
      raise
    return worker


@atexit.register
def close_all() -> None:
  """Ends all shared workers."""
  while _SHARED:
    _SHARED.popitem()[1].end("this process ends")
