"""Runs a generator in a process of its own, which can be stopped.

States: running, then finished, failed (with the end of what it wrote), stopped,
or late (its deadline was over).

Promises: when `stop` returns, the process and those it started are gone; they
are, too, when this process is killed. What it writes is logged line by line,
and shown to clients but for the lines that `generating.say` marks as private.

Does not limit what the generator's code may do.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import json
import logging
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Mapping

from agent_services.rollout_buffer import generating
from agent_services.rollout_buffer import plugins

_LOG = logging.getLogger(__name__)
_ROOM = "tunix.rl.multi_turn."
_MODULE = "trajectory_collector.buffer_service.generator_process"
_LIGHT = "tunix_multi_turn"
_LINES = 20
_END_S = 10.0


class GeneratorRun:
  """One run; see the module docstring.

  Attributes:
    state: see the module docstring.
    error: why it is not running or finished, else "".
    started: `time.time()`.
  """

  def __init__(
    self,
    generator: plugins.Generator,
    payload: Mapping[str, Any],
    *,
    timeout_s: float,
    grace_s: float,
    token: str = "",
    on_end: Callable[[GeneratorRun], None] = lambda run: None,
  ):
    """Starts it.

    Args:
      generator: its file.
      payload: Argument of `run_rollout`.
      timeout_s: it is ended after this long.
      grace_s: it is killed this long after it was asked to end.
      token: The service's, in its environment as TUNIX_BUFFER_TOKEN.
      on_end: called once it has ended by itself, or was late.

    Raises:
      OSError: it cannot be started.
    """
    self.generator = generator
    self.state = "running"
    self.error = ""
    self.started = time.time()
    self._timeout_s, self._grace_s = timeout_s, grace_s
    self._on_end = on_end
    self._stopping = False
    self._lines: collections.deque[str] = collections.deque(maxlen=_LINES)
    environment = dict(os.environ)
    if token:
      environment["TUNIX_BUFFER_TOKEN"] = token
    self._process = subprocess.Popen(
      [sys.executable, *_command(environment)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      env=environment,
      start_new_session=True,
    )
    order = {"file": str(generator.path.resolve()), "payload": dict(payload)}
    assert self._process.stdin is not None
    with contextlib.suppress(OSError):  # It ended; `_watch` records why.
      self._process.stdin.write(json.dumps(order).encode() + b"\n")
      self._process.stdin.flush()
    self._reader = self._thread(self._read)
    self._watcher = self._thread(self._watch)

  @property
  def running(self) -> bool:
    return self.state == "running"

  def describe(self) -> dict[str, Any]:
    """JSON for `/buffer/stats`."""
    return {
      "task_type": self.generator.task_type,
      "file": str(self.generator.path),
      "state": self.state,
      "error": self.error,
      "started": self.started,
      "log": list(self._lines),
    }

  def stop(self) -> None:
    """Ends the process and its children. Idempotent."""
    if not self.running:  # Its number may be another process's by now.
      return
    self._stopping = True
    self._end()
    self._watcher.join(_END_S)

  def _end(self) -> None:
    for sign, wait in (
      (signal.SIGTERM, self._grace_s),
      (signal.SIGKILL, _END_S),
    ):
      # Its children, too; those may be left after it has ended itself.
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(self._process.pid, sign)
      with contextlib.suppress(subprocess.TimeoutExpired):
        self._process.wait(wait)

  def _read(self) -> None:
    assert self._process.stdout is not None
    for raw in self._process.stdout:
      line = raw.decode("utf-8", "replace").rstrip()[:2000]
      shown = line.removeprefix(generating.PRIVATE)
      if line and shown == line:
        self._lines.append(line)
      if line:
        _LOG.info("generator %s: %s", self.generator.task_type, shown)

  def _watch(self) -> None:
    late = False
    try:
      code = self._process.wait(self._timeout_s)
    except subprocess.TimeoutExpired:
      late = True
      code = -1
    self._end()
    self._reader.join(2.0)
    if self._stopping:
      self.error, self.state = "it was stopped", "stopped"
      return
    if late:
      self.error = f"it was not finished after {self._timeout_s:g} s"
      self.state = "late"
    elif code:
      last = list(self._lines)[-3:]
      if last and last[-1].startswith("GeneratorError: "):
        # Whole by itself; those before it quote other servers.
        last = last[-1:]
      lines = " | ".join(last)
      self.error = f"it ended with status {code}: {lines}"[:1000]
      self.state = "failed"
    else:
      self.state = "finished"
    if self.error:
      _LOG.error("generator %s: %s", self.generator.task_type, self.error)
    self._on_end(self)

  def _thread(self, target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(
      target=target, name="tunix-generator", daemon=True
    )
    thread.start()
    return thread


def _command(environment: dict[str, str]) -> list[str]:
  """Arguments that start the module, without google-tunix where that goes."""
  roots = []
  for package in (_LIGHT, __name__.partition(".")[0]):
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
      return ["-m", _ROOM + _MODULE]
    roots.append(str(pathlib.Path(spec.origin).parents[1]))
  # Of a clone that is not installed.
  roots = [root for root in roots if root not in sys.path[1:]]
  if roots:
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (*roots, path)))
  return ["-m", _LIGHT, _MODULE]
