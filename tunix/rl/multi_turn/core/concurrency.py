"""Running other people's code: sync or async, under a deadline.

Promises: a deadline always ends the wait, whatever the code does. A coroutine
is cancelled and, if it swallows that, left behind; a thread cannot be
cancelled, so it is abandoned: its slot is given to a fresh thread, it is
counted, and it ends by itself when its code returns. Threads are daemons and
bounded, abandoned ones too.

Does not: kill threads. Code that never returns keeps its thread until the
process ends; `WorkerPool.lost` tells how many there are.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import inspect
import logging
import math
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


def is_own_cancellation() -> bool:
  """Whether a CancelledError, just caught, is the awaited code's own doing.

  Passed on, it would look like a cancellation of the task that awaited it.
  """
  task = asyncio.current_task()
  return task is not None and not task.cancelling()


async def done_by(task: asyncio.Future[Any], due: float) -> bool:
  """Waits for `task`, but not past `loop.time() == due`; whether it is done."""
  loop = asyncio.get_running_loop()
  waiter = loop.create_future()

  def wake(_=None):
    if not waiter.done():
      waiter.set_result(None)

  task.add_done_callback(wake)
  timer = loop.call_at(due, wake) if due != math.inf else None
  try:
    await waiter
  finally:
    if timer is not None:
      timer.cancel()
  return task.done()


def outcome(task: asyncio.Future[T], what: str) -> T:
  """Result or exception of a task that is done.

  Raises:
    RuntimeError: naming `what`; its code cancelled itself.
  """
  if task.cancelled():
    raise RuntimeError(f"{what} cancelled itself")
  return task.result()


async def with_deadline(
    awaitable: Awaitable[T], seconds: float | None, what: str = "call"
) -> T:
  """Awaits at most `seconds` (None: no limit).

  Unlike `asyncio.wait_for`, returns in time even when the awaited code
  swallows its cancellation.

  Raises:
    DeadlineExceeded: naming `what`.
    RuntimeError: naming `what`; the awaited code cancelled itself.
  """
  if seconds is None:
    try:
      return await awaitable
    except asyncio.CancelledError:
      if is_own_cancellation():
        raise RuntimeError(f"{what} cancelled itself") from None
      raise
  task = asyncio.ensure_future(awaitable)
  due = asyncio.get_running_loop().time() + seconds
  try:
    done = await done_by(task, due)
  except asyncio.CancelledError:
    _leave(task)
    raise
  if done:
    return outcome(task, what)
  _leave(task)
  raise DeadlineExceeded(f"{what} did not finish within {seconds:g} s")


def _leave(task: asyncio.Future) -> None:
  _LEFT_BEHIND.add(task)
  task.add_done_callback(_forget)
  task.cancel()


async def to_the_end(awaitable: Awaitable[T]) -> T:
  """Awaits what must not be given up half-way, such as a cleanup.

  When the caller is cancelled it goes on by itself, referenced until it ends.
  """
  task = asyncio.ensure_future(awaitable)
  try:
    return await asyncio.shield(task)
  except asyncio.CancelledError:
    if not task.done():
      _LEFT_BEHIND.add(task)
      task.add_done_callback(_forget)
    raise


class PoolExhaustedError(RuntimeError):
  """Too many threads are held by calls that outlived their deadlines."""


class StuckCall:
  """A call that could not be stopped and may still come back one day."""

  def __init__(self, description: str):
    self.description = description
    self.since = time.time()
    self._lock = threading.Lock()
    self._returned = False
    self._callbacks: list[Callable[[], None]] = []

  @property
  def returned(self) -> bool:
    return self._returned

  def then(self, callback: Callable[[], None]) -> None:
    """Runs `callback` once the call has returned, in whatever thread it did.

    Runs it now when the call has already returned.
    """
    with self._lock:
      if not self._returned:
        self._callbacks.append(callback)
        return
    callback()

  def mark_returned(self) -> None:
    """Told by whoever saw the call come back."""
    with self._lock:
      self._returned = True
      callbacks, self._callbacks = self._callbacks, []
    for callback in callbacks:
      callback()


class Job:
  """A call handed to a `WorkerPool`.

  Attributes:
    future: its outcome; cancelled when the call was given up.
    started_at: `time.monotonic()` when a thread took it up, else None.
    started: set then.
  """

  def __init__(self, fn: Callable[[], Any]):
    self.fn = fn
    self.future: concurrent.futures.Future = concurrent.futures.Future()
    self.started = threading.Event()
    self.started_at: float | None = None
    self.stuck: StuckCall | None = None

  @property
  def running(self) -> bool:
    return self.started_at is not None and not self.future.done()


class WorkerPool:
  """Daemon threads that may be lost one by one.

  At most `max_threads` work at a time. A thread whose call was abandoned no
  longer counts and is replaced, until `max_lost` are lost at once; from there
  every further loss shrinks the pool, and an empty pool refuses calls. Idle
  threads end after `idle` seconds.
  """

  def __init__(
      self,
      max_threads: int = 64,
      max_lost: int = 64,
      idle: float = 10.0,
      name: str = "tunix-call",
  ):
    if max_threads < 1 or max_lost < 0:
      raise ValueError(
          "WorkerPool needs max_threads >= 1 and max_lost >= 0, got"
          f" {max_threads} and {max_lost}"
      )
    self._max_threads = max_threads
    self._max_lost = max_lost
    self._idle = idle
    self._name = name
    self._cond = threading.Condition()
    self._jobs: collections.deque[Job] = collections.deque()
    self._threads = 0
    self._waiting = 0
    self._lost = 0
    self._closed = False
    self._alive: set[threading.Thread] = set()

  @property
  def lost(self) -> int:
    """Threads held by calls that outlived their deadlines, now."""
    with self._cond:
      return self._lost

  @property
  def threads(self) -> int:
    """Threads that work or wait for work; lost ones do not count."""
    with self._cond:
      return self._threads

  def submit(self, fn: Callable[[], Any]) -> Job:
    """Queues `fn()`.

    Raises:
      PoolExhaustedError: hung calls hold every thread there may be.
      RuntimeError: the pool is closed, or the system starts no more threads;
        `fn` is not called then.
    """
    job = Job(fn)
    with self._cond:
      if self._closed:
        raise RuntimeError("the worker pool is closed")
      if self._limit() < 1:
        raise self._exhausted()
      self._jobs.append(job)
      if self._waiting >= len(self._jobs):
        self._cond.notify()
      else:
        try:
          self._spawn()
        except Exception:
          self._jobs.remove(job)
          raise
    return job

  def abandon(self, job: Job, what: str = "call") -> StuckCall | None:
    """Gives `job` up: None when it never ran or is done, else what is stuck."""
    doomed: list[Job] = []
    with self._cond:
      if job.future.done() or job.stuck is not None:
        return job.stuck
      if job.started_at is None:
        self._jobs.remove(job)
        doomed.append(job)
        stuck = None
      else:
        stuck = job.stuck = StuckCall(what)
        self._threads -= 1
        self._lost += 1
        if self._limit() < 1:
          error = self._exhausted()
          doomed.extend(self._jobs)
          self._jobs.clear()
        elif self._jobs:
          try:
            self._spawn()
          except Exception as e:  # pylint: disable=broad-except
            if not self._threads:  # Nobody is left to take them up.
              error = e
              doomed.extend(self._jobs)
              self._jobs.clear()
    # Outside the lock: whoever waits may call back into the pool.
    if stuck is None:
      job.future.cancel()
      return None
    for other in doomed:
      other.future.set_exception(error)
    return stuck

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
      # A queued call is taken up, or fails when the pool is exhausted.
      while not job.started.wait(0.2) and not job.future.done():
        pass
      began = job.started_at or time.monotonic()
      left = began + seconds - time.monotonic()
      try:
        return job.future.result(timeout=max(0.0, left))
      except concurrent.futures.TimeoutError:
        if job.future.done():  # Its own TimeoutError, or done just now.
          return job.future.result()
        raise DeadlineExceeded(
            f"{what} did not finish within {seconds:g} s"
        ) from None
    finally:
      self.abandon(job, what)

  async def arun(
      self,
      fn: Callable[[], T],
      seconds: float | None,
      what: str = "call",
      on_stuck: Callable[[StuckCall], None] | None = None,
  ) -> T:
    """`run` for the event loop, which it does not block.

    `on_stuck` is told about a call that still runs when the wait is over,
    because its time was up or the caller was cancelled.
    """
    job = self.submit(fn)
    try:
      if await self.finished(job, math.inf if seconds is None else seconds):
        return job.future.result()
      raise DeadlineExceeded(f"{what} did not finish within {seconds:g} s")
    finally:
      stuck = self.abandon(job, what)
      if stuck is not None and on_stuck is not None:
        on_stuck(stuck)

  async def finished(
      self, job: Job, seconds: float = math.inf, at: float = math.inf
  ) -> bool:
    """Waits until `job` is done or its time is up; whether it is done.

    Args:
      job: of this pool; it is not abandoned.
      seconds: it may run; its time in the queue is not counted.
      at: `loop.time()` when the wait ends in any case.
    """
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()
    timer: asyncio.TimerHandle | None = None

    def wake():
      if not waiter.done():
        waiter.set_result(None)

    def returned(_):
      try:
        loop.call_soon_threadsafe(wake)
      except RuntimeError:  # The loop was closed; nobody waits any more.
        pass

    def check():
      nonlocal timer
      now = loop.time()
      began = job.started_at
      due = min(at, (now if began is None else began) + seconds)
      if due > now:
        timer = loop.call_at(due, check)
      else:
        wake()

    job.future.add_done_callback(returned)
    first = min(at, loop.time() + seconds)
    if first != math.inf:
      timer = loop.call_at(first, check)
    try:
      await waiter
    finally:
      if timer is not None:
        timer.cancel()
    return job.future.done()

  def close(self, timeout: float = 5.0) -> bool:
    """Ends the idle threads; True when none is left but the lost ones."""
    with self._cond:
      self._closed = True
      self._cond.notify_all()
    deadline = time.monotonic() + timeout
    while True:
      with self._cond:
        if not self._threads:
          return True
        threads = list(self._alive)
      for thread in threads:
        thread.join(max(0.0, min(0.05, deadline - time.monotonic())))
      if time.monotonic() >= deadline:
        with self._cond:
          return not self._threads

  def _limit(self) -> int:
    return self._max_threads - max(0, self._lost - self._max_lost)

  def _exhausted(self) -> PoolExhaustedError:
    return PoolExhaustedError(
        f"{self._lost} calls outlived their deadlines and still hold their"
        " threads, more than the pool may lose"
        f" (max_lost={self._max_lost}, max_threads={self._max_threads}); mend"
        " the code that hangs, or make it async so that it can be cancelled"
    )

  def _spawn(self) -> None:
    if self._threads >= self._limit():
      return
    self._threads += 1
    thread = threading.Thread(target=self._work, name=self._name, daemon=True)
    self._alive.add(thread)
    try:
      thread.start()
    except Exception:
      self._alive.discard(thread)
      self._threads -= 1
      raise

  def _take(self) -> Job | None:
    """The next call; None when this thread is no longer needed."""
    with self._cond:
      while not self._jobs:
        if self._closed or self._threads > self._limit():
          self._threads -= 1
          return None
        self._waiting += 1
        woken = self._cond.wait(self._idle)
        self._waiting -= 1
        if not woken and not self._jobs:
          self._threads -= 1
          return None
      job = self._jobs.popleft()
      job.started_at = time.monotonic()
      return job

  def _work(self) -> None:
    try:
      while (job := self._take()) is not None:
        job.started.set()
        result, error = None, None
        try:
          result = job.fn()
        except BaseException as raised:  # pylint: disable=broad-except
          error = raised
          if not isinstance(raised, Exception) or isinstance(
              raised, StopIteration
          ):
            # sys.exit() in a tool must not end the trainer, and asyncio's
            # futures cannot carry StopIteration.
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
            error.__cause__ = raised
        with self._cond:
          stuck = job.stuck
          if stuck is not None:
            self._lost -= 1
          elif error is None:
            job.future.set_result(result)
          else:
            job.future.set_exception(error)
        if stuck is not None:
          # A replacement may already stand in for this thread.
          _LOG.warning(
              "%s had passed its deadline and returned after %.1f s",
              stuck.description,
              time.monotonic() - job.started_at,
          )
          job.future.cancel()
          stuck.mark_returned()
          return
        del job, result, error
    finally:
      with self._cond:
        self._alive.discard(threading.current_thread())


_DEFAULT_POOL: WorkerPool | None = None
_DEFAULT_LOCK = threading.Lock()


def default_pool() -> WorkerPool:
  """The process-wide pool for user code that gives no pool of its own."""
  global _DEFAULT_POOL
  with _DEFAULT_LOCK:
    if _DEFAULT_POOL is None:
      _DEFAULT_POOL = WorkerPool()
    return _DEFAULT_POOL


async def acall(
    fn: Callable[..., T],
    *args: Any,
    seconds: float | None = None,
    what: str = "call",
    pool: WorkerPool | None = None,
    on_stuck: Callable[[StuckCall], None] | None = None,
    **kwargs: Any,
) -> T:
  """Calls sync or async `fn` without blocking the loop, under a deadline.

  An async function runs on the loop, a sync one in a thread of `pool`; a sync
  one that returns an awaitable is awaited as well. `on_stuck` is told about a
  sync call that still runs when the wait is over, see `WorkerPool.arun`.

  Raises:
    DeadlineExceeded: naming `what`.
    RuntimeError: naming `what`; an async `fn` cancelled itself.
  """
  if is_async(fn):
    return await with_deadline(fn(*args, **kwargs), seconds, what)
  result = await (pool or default_pool()).arun(
      lambda: fn(*args, **kwargs), seconds, what, on_stuck
  )
  if inspect.isawaitable(result):
    result = await with_deadline(result, seconds, what)
  return result


def call(
    fn: Callable[..., T],
    *args: Any,
    seconds: float | None = None,
    what: str = "call",
    pool: WorkerPool | None = None,
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
