"""Waits for a condition from threads and event loops alike.

A waiter passes an `attempt`, which runs under the lock and returns None until
it can do its work. Every change of state is announced with `notify`, and every
waiter then tries again.

Promises: an attempt that succeeds has its result returned, even when the
waiter is cancelled or its time is up at that moment (a cancelled waiter has
taken nothing); an event loop is never blocked while waiting; a closed loop's
waiters are forgotten.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any, Callable, TypeVar

T = TypeVar("T")


class AsyncCondition:
  """A re-entrant lock (as a context manager) and its waiters."""

  def __init__(self):
    self._cond = threading.Condition()
    self._async_waiters: set[
      tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]
    ] = set()

  def __enter__(self) -> AsyncCondition:
    self._cond.acquire()
    return self

  def __exit__(self, *unused: Any) -> None:
    self._cond.release()

  @property
  def waiting(self) -> int:
    """Waiters, threads and coroutines together."""
    with self._cond:
      threads = self._cond._waiters  # type: ignore[attr-defined]  # pylint: disable=protected-access
      return len(threads) + len(self._async_waiters)

  def notify(self) -> None:
    """Makes every waiter try again. Call it under the lock."""
    self._cond.notify_all()
    waiters, self._async_waiters = self._async_waiters, set()
    for loop, future in waiters:
      try:
        loop.call_soon_threadsafe(_wake, future)
      except RuntimeError:  # That loop is closed, and so are its waiters.
        pass

  def wait(
    self,
    attempt: Callable[[], T | None],
    timeout: float | None,
    expired: Callable[[], Exception],
  ) -> T:
    """Blocks until `attempt` succeeds; returns its result.

    Args:
      attempt: runs under the lock; returns None to be tried again.
      timeout: seconds; None waits without end.
      expired: makes the exception of a timeout, under the lock.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    with self._cond:
      while True:
        result = attempt()
        if result is not None:
          return result
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
          raise expired()
        self._cond.wait(remaining)

  async def wait_async(
    self,
    attempt: Callable[[], T | None],
    timeout: float | None,
    expired: Callable[[], Exception],
  ) -> T:
    """`wait` without blocking the event loop."""
    loop = asyncio.get_running_loop()
    deadline = None if timeout is None else loop.time() + timeout
    while True:
      with self._cond:
        result = attempt()
        if result is not None:
          return result
        if deadline is not None and loop.time() >= deadline:
          raise expired()
        waiter = (loop, loop.create_future())
        self._async_waiters.add(waiter)
      timer = None
      if deadline is not None:
        timer = loop.call_at(deadline, _wake, waiter[1])
      try:
        await waiter[1]
      finally:
        if timer is not None:
          timer.cancel()
        with self._cond:
          self._async_waiters.discard(waiter)


def _wake(future: asyncio.Future[None]) -> None:
  if not future.done():
    future.set_result(None)
