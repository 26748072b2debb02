"""Runs blocking calls in daemon threads that may be lost one by one.

Promises: threads are bounded, lost ones too; a call that is given up loses its
thread, which a fresh one replaces; a lost thread ends by itself when its call
returns.

Does not: kill threads. Code that never returns keeps its thread until the
process ends; `WorkerPool.lost` counts such threads.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import logging
import math
import os
import threading
import time
from typing import Any, Callable, TypeVar
import weakref

from ..core import containment

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


def usable_cores() -> int:
  """Cores that this process may use; a cgroup's share is not looked at."""
  affinity = getattr(os, "sched_getaffinity", None)  # Not on macOS.
  return len(affinity(0)) if affinity else os.cpu_count() or 1


class DeadlineExceeded(TimeoutError):
  """A call did not return within its deadline."""


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
    """Runs the callbacks; to be called once the call has returned."""
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
    started: set at that time.
    stuck: the call, once it was given up while it ran.
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


class _Wakes:
  """Calls that threads leave for an event loop, made together.

  A loop is woken by a write to a pipe: once for all calls that come before it
  looks, instead of once a call.
  """

  def __init__(self, loop: asyncio.AbstractEventLoop):
    self._loop = weakref.ref(loop)
    self._lock = threading.Lock()
    self._calls: list[Callable[[], None]] = []

  def post(self, call: Callable[[], None]) -> None:
    """Has the loop make the call soon; nothing where it was closed."""
    loop = self._loop()
    if loop is None:
      return
    with self._lock:
      self._calls.append(call)
      if len(self._calls) > 1:  # It was woken and has yet to look.
        return
    try:
      loop.call_soon_threadsafe(self._drain)
    except RuntimeError:  # The loop was closed, and the wait with it.
      with self._lock:
        self._calls.clear()

  def _drain(self) -> None:
    with self._lock:
      calls, self._calls = self._calls, []
    for call in calls:
      call()


_WAKES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Wakes] = (
  weakref.WeakKeyDictionary()
)
_WAKES_LOCK = threading.Lock()


def _wakes_of(loop: asyncio.AbstractEventLoop) -> _Wakes:
  """The loop's own; called on the loop."""
  wakes = _WAKES.get(loop)
  if wakes is None:
    with _WAKES_LOCK:
      wakes = _WAKES.setdefault(loop, _Wakes(loop))
  return wakes


class WorkerPool:
  """Daemon threads that may be lost one by one.

  At most `max_threads` work at a time. A thread whose call was abandoned no
  longer counts and is replaced, until `max_lost` are lost at once; from there
  every further loss shrinks the pool, and an empty pool refuses calls. Idle
  threads end after `idle` seconds (None: with the pool).
  """

  def __init__(
    self,
    max_threads: int = 64,
    max_lost: int = 64,
    idle: float | None = 10.0,
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
    """Gives `job` up; returns the stuck call, None if it never ran or ended."""
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
          error: Exception = self._exhausted()
          doomed.extend(self._jobs)
          self._jobs.clear()
        elif self._jobs:
          try:
            self._spawn()
          except Exception as e:  # pylint: disable=broad-except
            if not self._threads:  # No thread is left to take them up.
              error = e
              doomed.extend(self._jobs)
              self._jobs.clear()
    # Outside the lock: a waiter may call back into the pool.
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
      seconds_left = began + seconds - time.monotonic()
      try:
        return job.future.result(timeout=max(0.0, seconds_left))
      except concurrent.futures.TimeoutError:
        if job.future.done():  # Its own TimeoutError, or done just now.
          return job.future.result()
        raise DeadlineExceeded(
          f"{what} did not finish within {seconds:g} s"
        ) from None
    finally:
      self.abandon(job, what)

  async def finished(
    self, job: Job, seconds: float = math.inf, at: float = math.inf
  ) -> bool:
    """Waits until `job` is done or its time is up; whether it is done.

    Args:
      job: Job of this pool; it is not abandoned.
      seconds: it may run; its time in the queue is not counted.
      at: `loop.time()` when the wait ends in any case.
    """
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()
    timer: asyncio.TimerHandle | None = None

    def wake():
      if not waiter.done():
        waiter.set_result(None)

    wakes = _wakes_of(loop)

    def returned(_):
      wakes.post(wake)

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
        seconds_left = max(0.0, min(0.05, deadline - time.monotonic()))
        # Not so where Ctrl-C ended the wait for its start: it starts still.
        if thread.is_alive():
          thread.join(seconds_left)
        else:
          time.sleep(min(seconds_left, 0.01))
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
            error = containment.ExitRaised(containment.describe(raised))
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
            "%s returned %.1f s after it was given up",
            stuck.description,
            time.time() - stuck.since,
          )
          job.future.cancel()
          stuck.mark_returned()
          return
        del job, result, error
    finally:
      with self._cond:
        self._alive.discard(threading.current_thread())
