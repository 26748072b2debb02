"""Runs the event loop of a run's episodes in a thread of its own.

Promises: a `wait` of the main thread ends when the run is to stop, and when the
loop has died, with the reason; exits that code of an episode raises do not end
the loop; closing has a deadline, and logs what missed it.

Does not: know episodes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from typing import Any, Callable, Coroutine

from tunix.rl.multi_turn.core import containment
from tunix.rl.multi_turn.net import concurrency

_LOG = logging.getLogger(__name__)
STOP_TIMEOUT_S = 30.0
"""In which what belongs to a run ends."""


def try_to_close(name: str, close: Callable[[], object]) -> None:
  """Closes a part of a run and logs what it raises, so that all close."""
  try:
    close()
  except Exception as error:  # pylint: disable=broad-except
    _LOG.warning("%s did not close: %r", name, error)


def close_parts(*parts: Any) -> None:
  """Closes parts one after another, whatever one raises; None is skipped."""
  for part in parts:
    if part is not None:
      try_to_close(type(part).__name__, part.close)


class Interrupted(Exception):
  """The user asked to stop."""


class LoopDiedError(RuntimeError):
  """The event loop of the episodes has ended; the message holds the reason."""


class LoopThread:
  """An event loop in a thread, which runs the episodes.

  One loop for a whole run, as gyms share what belongs to a loop (a browser).
  """

  def __init__(self):
    self._loop = asyncio.new_event_loop()
    self._closing = False
    self._died: LoopDiedError | None = None
    self._on_death: list[Callable[[LoopDiedError], object]] = []
    self._lock = threading.Lock()
    self._thread = threading.Thread(
      target=self._run, name="tunix-episodes", daemon=True
    )
    self._thread.start()

  def _run(self) -> None:
    while not self._closing:
      reason = "code of an episode stopped it (loop.stop)"
      try:
        containment.run_forever(self._loop)
      except BaseException as error:  # pylint: disable=broad-except
        reason = containment.describe(error)
      if self._closing or self._died is not None:
        return
      # It goes on once, for the cleanup.
      died = LoopDiedError(f"the event loop of the episodes ended: {reason}")
      with self._lock:
        self._died, callbacks = died, list(self._on_death)
      for callback in callbacks:
        callback(died)

  def on_death(self, callback: Callable[[LoopDiedError], object]) -> None:
    """Calls back, once, should the loop die; now if it has. Must not raise."""
    with self._lock:
      died = self._died
      if died is None:
        self._on_death.append(callback)
    if died is not None:
      callback(died)

  def submit(
    self, work: Coroutine[Any, Any, Any]
  ) -> concurrent.futures.Future[Any]:
    """Begins `work` on the loop; its exits become `ExitRaised`."""
    if not self._thread.is_alive():
      work.close()
      ended: concurrent.futures.Future[Any] = concurrent.futures.Future()
      ended.set_exception(self._died or LoopDiedError("the loop was closed"))
      return ended

    async def contained() -> Any:
      with concurrency.contained():
        return await work

    return asyncio.run_coroutine_threadsafe(contained(), self._loop)

  def wait(self, work: Coroutine[Any, Any, Any], stop: threading.Event) -> Any:
    """Runs `work` on the loop and returns its result.

    Raises:
      Interrupted: `stop` was set; the work is cancelled.
      LoopDiedError: the loop has ended.
    """
    if stop.is_set():
      work.close()
      raise Interrupted()
    future = self.submit(work)
    while True:
      try:
        return future.result(0.2)
      except concurrent.futures.TimeoutError:
        if future.done():  # Since then, or it was its own time that was up.
          return future.result()
        if self._died is not None:
          future.cancel()
          raise self._died from None
        if stop.is_set():
          future.cancel()
          raise Interrupted() from None

  def finish(self, work: Coroutine[Any, Any, Any]) -> Any:
    """Runs `work`, which closes something, within `STOP_TIMEOUT_S`."""
    return self.submit(work).result(STOP_TIMEOUT_S)

  def close(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Cancels the loop's tasks and ends the thread; idempotent."""
    if self._loop.is_closed():
      return

    async def cancel_all():
      tasks = asyncio.all_tasks() - {asyncio.current_task()}
      for task in tasks:
        task.cancel()
      await asyncio.gather(*tasks, return_exceptions=True)
      await self._loop.shutdown_default_executor()

    try:
      self.submit(cancel_all()).result(timeout_s)
    except concurrent.futures.TimeoutError:
      _LOG.warning("some episodes did not end within %g s", timeout_s)
    except LoopDiedError as error:
      _LOG.warning("episodes were not closed: %s", error)
    self._closing = True
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join(timeout_s)
    if not self._thread.is_alive():
      self._loop.close()
