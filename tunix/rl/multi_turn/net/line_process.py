"""Runs a worker process that answers requests by lines of JSON.

The first line it reads is its set-up, which it answers with `{"ready": facts}`
or `{"fatal": text}`. Then `{"id", "play": request}` is answered by `{"id",
"result": {…}}` or `{"id", "error": text}`, and `{"cancel": id}` by
`{"cancelled": id}`.

Promises: a worker that dies, writes what is no message, or does not answer in
time raises `WorkerError` in each of its requests, with the end of what it wrote
to stderr, and is ended. Workers end with this process, as their stdin does.

Imports the standard library only. Thread-safe; belongs to no event loop.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import itertools
import json
import os
import subprocess
import threading
from typing import Any, Callable, Mapping, Sequence

from ..core import json_text

CANCEL_S = 5.0  # For the event loop of a worker to answer.
_END_S = 5.0


class WorkerError(RuntimeError):
  """The process failed, or what runs in it."""


class Worker:
  """One process, which answers any number of requests at a time."""

  def __init__(
    self,
    command: Sequence[str],
    name: str,
    setup: Mapping[str, Any],
    start_s: float,
    *,
    path: str = "",
    late: str = "",
    error: type[WorkerError] = WorkerError,
  ):
    """Starts it, and waits until it is ready.

    Args:
      command: the interpreter first.
      name: Name of the program, for errors.
      setup: its first line.
      start_s: Deadline of its start.
      path: directory that its interpreter imports from; this process's
        PYTHONPATH is not for it.
      late: Setting to raise if an answer comes too late.
      error: class of what is raised.

    Raises:
      WorkerError: it cannot be started, or is not ready.
    """
    self._name, self._late, self._error = name, late, error
    self._lock = threading.Lock()
    self._ids = itertools.count(1)
    self._waiting: dict[Any, concurrent.futures.Future[Any]] = {}
    self._end = ""  # Why it ended.
    self._stderr: collections.deque[str] = collections.deque(maxlen=8)
    # Paths of this interpreter are not that one's.
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if path:
      inherited["PYTHONPATH"] = path
    try:
      self._process = subprocess.Popen(
        list(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=inherited,
        encoding="utf-8",
        errors="replace",
      )
    except OSError as cause:
      raise self._error(f"{command[0]} does not start: {cause}") from cause
    self._errors = self._thread(self._read_stderr)
    self._thread(self._read)
    ready = self._expect("ready")
    self._send(setup)
    try:
      self.facts: dict[str, Any] = ready.result(start_s)
    except concurrent.futures.TimeoutError:
      self.end(f"it was not loaded after {start_s:g} s (start_s)")
      raise self._error(self._end) from None
    except BaseException:
      self.end("it could not be loaded")
      raise

  @property
  def alive(self) -> bool:
    return not self._end and self._process.poll() is None

  async def play(
    self, request: Mapping[str, Any], seconds: float
  ) -> dict[str, Any]:
    """Answers a request, which ends if the caller is cancelled.

    Raises:
      WorkerError: it failed, or took longer than `seconds`.
    """
    number = next(self._ids)
    answer = self._expect(number)
    self._send({"id": number, "play": dict(request)})
    try:
      return await asyncio.wait_for(asyncio.wrap_future(answer), seconds)
    except TimeoutError:
      self._cancel(number)
      raise self._error(
        f"{self._name}: the episode was not over after {seconds:g} s"
        + (f"; raise {self._late}" if self._late else "")
      ) from None
    except asyncio.CancelledError:
      self._cancel(number)
      raise

  def end(self, why: str) -> None:
    """Ends the process; its requests fail with that text. Idempotent."""
    with self._lock:
      first, self._end = not self._end, self._end or f"{self._name}: {why}"
      waiting, self._waiting = self._waiting, {}
    for future in waiting.values():
      _fail(future, self._error(self._end))
    if first:
      self._process.kill()
      self._process.wait(_END_S)

  def _cancel(self, number: int) -> None:
    """Ends an episode, and the process if its loop does not answer."""
    answer = self._expect(("cancelled", number))
    self._send({"cancel": number})

    def watch() -> None:
      try:
        answer.result(CANCEL_S)
      except concurrent.futures.TimeoutError:
        self.end(
          f"the worker did not answer for {CANCEL_S:g} s and was ended; the"
          " environment blocks its event loop"
        )
      except WorkerError:
        pass  # It has ended.

    self._thread(watch)

  def _expect(self, key: object) -> concurrent.futures.Future[Any]:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    with self._lock:
      if not self._end:
        self._waiting[key] = future
        return future
    future.set_exception(self._error(self._end))
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
        message = json_text.parse(line)
        self._take(message)
      except (ValueError, TypeError, KeyError, AttributeError) as error:
        self.end(f"the worker wrote what is no message: {error}")
        return
    self._errors.join(1.0)
    code = self._process.wait()
    stderr = " | ".join(self._stderr)[-600:]
    self.end(
      f"the worker ended with status {code}" + (f": {stderr}" if stderr else "")
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
      return  # Of a request that was given up.
    if error is not None:
      _fail(future, self._error(f"{self._name}: {error}"))
    elif future.set_running_or_notify_cancel():
      future.set_result(result)

  def _read_stderr(self) -> None:
    assert self._process.stderr is not None
    for line in self._process.stderr:
      if line.strip():
        self._stderr.append(line.strip())

  def _thread(self, target: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(
      target=target, name=f"worker-{self._name}", daemon=True
    )
    thread.start()
    return thread


def _fail(future: concurrent.futures.Future[Any], error: BaseException) -> None:
  if future.set_running_or_notify_cancel():
    future.set_exception(error)
