"""Running other people's code: sync or async, under a deadline.

Promises: a deadline always ends the wait, whatever the code does. A coroutine
is cancelled and, if it swallows that, left behind; a thread cannot be
cancelled, so it is abandoned: its slot is given to a fresh thread, it is
counted, and it ends by itself when its code returns. Threads are daemons and
bounded, abandoned ones too.

Does not: kill threads. Code that never returns keeps its thread until the
process ends; `DeadlinePool.abandoned` tells how many there are.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import inspect
import logging
import threading
import time
from typing import Any, Awaitable, Callable, TypeVar

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class DeadlineExceeded(TimeoutError):
  """A call did not return within its deadline."""


async def maybe_await(value: Any) -> Any:
  """`value`, awaited when it is awaitable: both kinds of code are welcome."""
  if inspect.isawaitable(value):
    return await value
  return value


def is_async(fn: Callable[..., Any]) -> bool:
  """Whether calling `fn` gives a coroutine (functions, methods, objects)."""
  if inspect.iscoroutinefunction(fn):
    return True
  call = getattr(fn, "__call__", None)
  return inspect.iscoroutinefunction(call)


# Tasks that swallowed their cancellation: referenced, so that the event loop
# cannot drop them half-run, until they end.
_LEFT_BEHIND: set[asyncio.Future] = set()


def _forget(task: asyncio.Future) -> None:
  _LEFT_BEHIND.discard(task)
  if not task.cancelled():
    task.exception()  # Retrieved, so that asyncio does not log it.


async def with_deadline(
    awaitable: Awaitable[T], seconds: float | None, what: str = "call"
) -> T:
  """Awaits at most `seconds` (None: no limit).

  Unlike `asyncio.wait_for`, returns in time even when the awaited code
  swallows its cancellation.

  Raises:
    DeadlineExceeded: naming `what`.
  """
  if seconds is None:
    return await awaitable
  task = asyncio.ensure_future(awaitable)
  try:
    done, _ = await asyncio.wait((task,), timeout=max(0.0, seconds))
  except asyncio.CancelledError:
    _leave(task)
    raise
  if done:
    return task.result()
  _leave(task)
  raise DeadlineExceeded(f"{what} did not finish within {seconds:g} s")


def _leave(task: asyncio.Future) -> None:
  _LEFT_BEHIND.add(task)
  task.add_done_callback(_forget)
  task.cancel()


class Job:
  """A call handed to a `DeadlinePool`."""

  def __init__(self, fn: Callable[[], Any]):
    self.fn = fn
    self.future: concurrent.futures.Future = concurrent.futures.Future()
    self.started = threading.Event()
    self.started_at: float | None = None
    self.abandoned = False


class DeadlinePool:
  """Bounded daemon threads whose hung calls do not cost a slot for ever.

  Attributes:
    max_threads: calls running at once.
    max_abandoned: calls that may be running past their deadline; more are
      refused, since then something is wrong for good.
  """

  def __init__(
      self,
      max_threads: int = 32,
      max_abandoned: int = 256,
      name: str = "tunix-call",
  ):
    if max_threads < 1 or max_abandoned < 0:
      raise ValueError(
          "max_threads must be >= 1 and max_abandoned >= 0, got"
          f" {max_threads} and {max_abandoned}"
      )
    self.max_threads = max_threads
    self.max_abandoned = max_abandoned
    self._name = name
    self._jobs: collections.deque[Job] = collections.deque()
    self._lock = threading.Lock()
    self._wake = threading.Condition(self._lock)
    self._threads = 0
    self._idle = 0
    self._abandoned = 0
    self._spawned = 0

  @property
  def threads(self) -> int:
    """Threads that serve calls, abandoned ones not counted."""
    with self._lock:
      return self._threads

  @property
  def abandoned(self) -> int:
    """Calls still running past their deadline."""
    with self._lock:
      return self._abandoned

  def submit(self, fn: Callable[[], Any]) -> Job:
    """Queues `fn()`.

    Raises:
      RuntimeError: too many calls are still running past their deadline.
    """
    job = Job(fn)
    with self._lock:
      if self._abandoned > self.max_abandoned:
        raise RuntimeError(
            f"{self._abandoned} calls are still running past their deadline"
            f" (limit {self.max_abandoned}); the code they run hangs"
        )
      self._jobs.append(job)
      if self._idle >= len(self._jobs):
        self._wake.notify()
      else:
        self._spawn_if_room()
    return job

  def abandon(self, job: Job) -> None:
    """Stops caring about `job`: dropped when queued, left when running."""
    with self._lock:
      if job.future.done() or job.abandoned:
        return
      job.abandoned = True
      if job.started_at is None:
        try:
          self._jobs.remove(job)
        except ValueError:
          pass
        job.future.cancel()
        return
      self._threads -= 1
      self._abandoned += 1
      if self._jobs:
        self._spawn_if_room()

  def run(
      self, fn: Callable[[], T], seconds: float | None, what: str = "call"
  ) -> T:
    """Runs `fn()` in a thread and waits. See `wait`."""
    return self.wait(self.submit(fn), seconds, what)

  def wait(self, job: Job, seconds: float | None, what: str = "call") -> Any:
    """Waits for `job`; its deadline counts from when it began to run.

    Raises:
      DeadlineExceeded: naming `what`; the call is abandoned.
    """
    try:
      if seconds is None:
        return job.future.result()
      job.started.wait()
      left = job.started_at + seconds - time.monotonic()
      try:
        return job.future.result(timeout=max(0.0, left))
      except concurrent.futures.TimeoutError:
        if job.future.done():  # Its own TimeoutError, or done just now.
          return job.future.result()
        raise DeadlineExceeded(
            f"{what} did not finish within {seconds:g} s"
        ) from None
    finally:
      self.abandon(job)

  async def arun(
      self, fn: Callable[[], T], seconds: float | None, what: str = "call"
  ) -> T:
    """`run` for the event loop, which it does not block."""
    job = self.submit(fn)
    try:
      waiter = asyncio.wrap_future(job.future)
      timeout = seconds
      while True:
        done, _ = await asyncio.wait((waiter,), timeout=timeout)
        if done:
          return waiter.result()
        if job.started_at is None:  # Still queued: its time has not begun.
          timeout = seconds
          continue
        timeout = job.started_at + seconds - time.monotonic()
        if timeout <= 0:
          raise DeadlineExceeded(f"{what} did not finish within {seconds:g} s")
    finally:
      self.abandon(job)

  def _spawn_if_room(self) -> None:
    if self._threads >= self.max_threads:
      return
    self._threads += 1
    self._spawned += 1
    threading.Thread(
        target=self._work, name=f"{self._name}-{self._spawned}", daemon=True
    ).start()

  def _work(self) -> None:
    while True:
      with self._lock:
        while not self._jobs:
          self._idle += 1
          signalled = self._wake.wait(timeout=10.0)
          self._idle -= 1
          if not signalled and not self._jobs:
            self._threads -= 1
            return
        job = self._jobs.popleft()
        job.started_at = time.monotonic()
      job.started.set()
      try:
        result, error = job.fn(), None
      except BaseException as raised:  # pylint: disable=broad-except
        result, error = None, raised
        if not isinstance(raised, Exception) or isinstance(
            raised, StopIteration
        ):
          # sys.exit() in a tool must not end the trainer, and asyncio's
          # futures cannot carry StopIteration.
          error = RuntimeError(f"{type(raised).__name__}: {raised}")
          error.__cause__ = raised
      with self._lock:
        if job.abandoned:
          self._abandoned -= 1
        elif error is None:
          job.future.set_result(result)
        else:
          job.future.set_exception(error)
        leave = job.abandoned
      if leave:
        _LOG.warning(
            "a call that had passed its deadline returned after %.1f s",
            time.monotonic() - job.started_at,
        )
        return
      del job, result, error


_DEFAULT_POOL: DeadlinePool | None = None
_DEFAULT_LOCK = threading.Lock()


def default_pool() -> DeadlinePool:
  """The process-wide pool for user code that gives no pool of its own."""
  global _DEFAULT_POOL
  with _DEFAULT_LOCK:
    if _DEFAULT_POOL is None:
      _DEFAULT_POOL = DeadlinePool()
    return _DEFAULT_POOL


async def acall(
    fn: Callable[..., T],
    *args: Any,
    seconds: float | None = None,
    what: str = "call",
    pool: DeadlinePool | None = None,
    **kwargs: Any,
) -> T:
  """Calls sync or async `fn` without blocking the loop, under a deadline.

  An async function runs on the loop, a sync one in a thread of `pool`; a sync
  one that returns an awaitable is awaited as well.

  Raises:
    DeadlineExceeded: naming `what`.
  """
  if is_async(fn):
    return await with_deadline(fn(*args, **kwargs), seconds, what)
  result = await (pool or default_pool()).arun(
      lambda: fn(*args, **kwargs), seconds, what
  )
  if inspect.isawaitable(result):
    result = await with_deadline(result, seconds, what)
  return result


def call(
    fn: Callable[..., T],
    *args: Any,
    seconds: float | None = None,
    what: str = "call",
    pool: DeadlinePool | None = None,
    **kwargs: Any,
) -> T:
  """`acall` for code without an event loop (or inside one, blocking it)."""

  def run() -> Any:
    result = fn(*args, **kwargs)
    if inspect.isawaitable(result):
      return asyncio.run(_drive(result))
    return result

  return (pool or default_pool()).run(run, seconds, what)


async def _drive(awaitable: Awaitable[T]) -> T:
  return await awaitable
