"""Talks with the worker process of an environment of verifiers.

Promises: a worker that dies, writes what is no message, or does not answer in
time raises `VerifiersError` in each of its episodes, with the end of what it
wrote to stderr; it is ended, and the next episode starts another. Workers end
with this process.

Does not import verifiers. Thread-safe; belongs to no event loop.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import concurrent.futures
import contextlib
import itertools
import json
import os
import pathlib
import subprocess
import threading
import time
from typing import Any, Mapping

_WORKER = pathlib.Path(__file__).parent / "worker.py"
_CANCEL_S = 5.0  # For the event loop of a worker to answer.
_END_S = 5.0
_RETRY_S = 30.0  # Between two starts, the first of which failed.


class VerifiersError(RuntimeError):
  """The environment, or the process that it runs in, failed."""


class Worker:
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
    self._name = request["module"]
    self._lock = threading.Lock()
    self._ids = itertools.count(1)
    self._waiting: dict[Any, concurrent.futures.Future[Any]] = {}
    self._end = ""  # Why it ended.
    self._stderr: collections.deque[str] = collections.deque(maxlen=8)
    # Paths of this interpreter are not that one's.
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    try:
      self._process = subprocess.Popen(
          [python, "-u", str(_WORKER)],
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          stderr=subprocess.PIPE,
          env=inherited,
          encoding="utf-8",
          errors="replace",
      )
    except OSError as error:
      raise VerifiersError(f"{python} does not start: {error}") from error
    self._errors = self._thread(self._read_stderr)
    self._thread(self._read)
    ready = self._expect("ready")
    self._send(request)
    try:
      self.facts: dict[str, Any] = ready.result(start_s)
    except concurrent.futures.TimeoutError:
      self.end(f"it was not loaded after {start_s:g} s (start_s)")
      raise VerifiersError(self._end) from None
    except BaseException:
      self.end("it could not be loaded")
      raise

  @property
  def alive(self) -> bool:
    return not self._end and self._process.poll() is None

  async def play(
      self, request: Mapping[str, Any], seconds: float
  ) -> dict[str, Any]:
    """Plays an episode; see worker.py. Ends it if the caller is cancelled.

    Raises:
      VerifiersError: it failed, or took longer than `seconds`.
    """
    number = next(self._ids)
    answer = self._expect(number)
    self._send({"id": number, "play": dict(request)})
    try:
      return await asyncio.wait_for(asyncio.wrap_future(answer), seconds)
    except TimeoutError:
      self._cancel(number)
      raise VerifiersError(
          f"{self._name}: the episode was not over after {seconds:g} s; raise"
          " environment.options.episode_s and collect.deadlines.step"
      ) from None
    except asyncio.CancelledError:
      self._cancel(number)
      raise

  def end(self, why: str) -> None:
    """Ends the process; its episodes fail with that text. Idempotent."""
    with self._lock:
      first, self._end = not self._end, self._end or f"{self._name}: {why}"
      waiting, self._waiting = self._waiting, {}
    for future in waiting.values():
      _fail(future, VerifiersError(self._end))
    if first:
      self._process.kill()
      self._process.wait(_END_S)

  def _cancel(self, number: int) -> None:
    """Ends an episode, and the process if its loop does not answer."""
    answer = self._expect(("cancelled", number))
    self._send({"cancel": number})

    def watch() -> None:
      try:
        answer.result(_CANCEL_S)
      except concurrent.futures.TimeoutError:
        self.end(
            f"the worker did not answer for {_CANCEL_S:g} s and was ended; the"
            " environment blocks its event loop"
        )
      except VerifiersError:
        pass  # It has ended.

    self._thread(watch)

  def _expect(self, key: Any) -> concurrent.futures.Future[Any]:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    with self._lock:
      if not self._end:
        self._waiting[key] = future
        return future
    future.set_exception(VerifiersError(self._end))
    return future

  def _send(self, message: Mapping[str, Any]) -> None:
    assert self._process.stdin is not None
    line = json.dumps(message) + "\n"
    # Its thread reads all the time, so this waits for a stopped process only.
    with contextlib.suppress(OSError, ValueError):  # `_read` reports the end.
      with self._lock:
        self._process.stdin.write(line)
        self._process.stdin.flush()

  def _read(self) -> None:
    assert self._process.stdout is not None
    for line in self._process.stdout:
      try:
        message = json.loads(line)
        self._take(message)
      except (ValueError, TypeError, KeyError, AttributeError) as error:
        self.end(f"the worker wrote what is no message: {error}")
        return
    self._errors.join(1.0)
    code = self._process.wait()
    said = " | ".join(self._stderr)[-600:]
    self.end(
        f"the worker ended with status {code}" + (f": {said}" if said else "")
    )

  def _take(self, message: dict[str, Any]) -> None:
    error: str | None = None
    if "fatal" in message:
      key, result, error = "ready", None, message["fatal"]
    elif "ready" in message:
      key, result = "ready", message["ready"]
    elif "cancelled" in message:
      key, result = ("cancelled", message["cancelled"]), None  # type: ignore[assignment]
    else:
      key, error = message["id"], message.get("error")
      result = message["result"] if error is None else None
    with self._lock:
      future = self._waiting.pop(key, None)
    if future is None:
      return  # Of an episode that nobody waits for any more.
    if error is not None:
      _fail(future, VerifiersError(f"{self._name}: {error}"))
    elif future.set_running_or_notify_cancel():
      future.set_result(result)

  def _read_stderr(self) -> None:
    assert self._process.stderr is not None
    for line in self._process.stderr:
      if line.strip():
        self._stderr.append(line.strip())

  def _thread(self, target: Any) -> threading.Thread:
    thread = threading.Thread(
        target=target, name=f"verifiers-{self._name}", daemon=True
    )
    thread.start()
    return thread


def _fail(
    future: concurrent.futures.Future[Any], error: BaseException
) -> None:
  if future.set_running_or_notify_cancel():
    future.set_exception(error)


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
