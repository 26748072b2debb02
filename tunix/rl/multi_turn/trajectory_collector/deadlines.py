"""Calls into other people's code that always come back in time.

`CallRunner.call` runs a synchronous or asynchronous function under a deadline.
Asynchronous code gets a task of its own, which is cancelled when time is up;
synchronous code runs in a bounded pool of daemon threads. Code that declares
itself cheap (`runs_inline`) is called where the caller stands, without a task
or thread.

Promises: a call returns or raises `CallTimeout` within its deadline plus
`grace` seconds; code that cannot be stopped is reported to `on_stuck` as a
`StuckCall` and never shares its object with another call by us; a lost thread
is replaced, up to a bound; nothing in here blocks the event loop.

Does not: stop a thread (Python cannot), or interrupt inline synchronous code.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import enum
import inspect
import math
import threading
import time
from typing import Any, Callable

_INF = math.inf


@dataclasses.dataclass(frozen=True)
class Deadlines:
  """Longest time each call of an episode may take, in seconds.

  The episode as a whole is bounded by the engine's `timeout`, which starts
  after reset. `math.inf` switches a bound off.

  Attributes:
    reset: `env.reset`, and building the pair when its factory is async.
    model: one model call.
    step: one `env.step`.
    reward: the final reward function, or the environment's own evaluation.
    close: `env.close` and the release of the policy's session, each.
    turn: model call and step of one turn together.
  """

  reset: float = 120.0
  model: float = 300.0
  step: float = 60.0
  reward: float = 60.0
  close: float = 30.0
  turn: float = _INF

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not value > 0:
        raise ValueError(
            f"Deadlines.{field.name} must be > 0 seconds, got {value!r}"
        )


class CallTimeout(Exception):
  """A call outlived its deadline.

  Attributes:
    stuck: the call when it could not be stopped, else None.
  """

  def __init__(self, message: str, stuck: StuckCall | None = None):
    super().__init__(message)
    self.stuck = stuck


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

  def _return(self) -> None:
    with self._lock:
      self._returned = True
      callbacks, self._callbacks = self._callbacks, []
    for callback in callbacks:
      callback()


class _State(enum.Enum):
  PENDING = "pending"
  RUNNING = "running"
  ABANDONED = "abandoned"
  DONE = "done"


class _Job:
  """One call for a worker thread. The pool's lock guards `state`."""

  __slots__ = (
      "fn", "args", "loop", "future", "state", "started", "stuck"
  )

  def __init__(self, fn, args, loop, future):
    self.fn = fn
    self.args = args
    self.loop = loop
    self.future = future
    self.state = _State.PENDING
    self.started: float | None = None
    self.stuck: StuckCall | None = None


class WorkerPool:
  """Daemon threads that may be lost one by one.

  At most `max_threads` work at a time. A thread whose call was abandoned no
  longer counts and is replaced, until `max_lost` are lost at once; from there
  every further loss shrinks the pool. Idle threads end after `idle` seconds.
  """

  def __init__(
      self, max_threads: int = 64, max_lost: int = 64, idle: float = 10.0
  ):
    if max_threads < 1 or max_lost < 0:
      raise ValueError(
          f"WorkerPool needs max_threads >= 1 and max_lost >= 0, got"
          f" {max_threads} and {max_lost}"
      )
    self._max_threads = max_threads
    self._max_lost = max_lost
    self._idle = idle
    self._cond = threading.Condition()
    self._jobs: collections.deque[_Job] = collections.deque()
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

  def _limit(self) -> int:
    return self._max_threads - max(0, self._lost - self._max_lost)

  def submit(
      self,
      fn: Callable[..., Any],
      args: tuple[Any, ...],
      loop: asyncio.AbstractEventLoop,
      future: asyncio.Future[Any],
  ) -> _Job:
    """Queues `fn(*args)`; its outcome is set on `future` in `loop`."""
    job = _Job(fn, args, loop, future)
    with self._cond:
      if self._closed:
        raise RuntimeError("the worker pool is closed")
      if self._limit() < 1:
        raise self._exhausted()
      self._jobs.append(job)
      if self._waiting >= len(self._jobs):
        self._cond.notify()
      else:
        self._spawn()
    return job

  def cancel(self, job: _Job, description: str) -> StuckCall | None:
    """Gives the job up: None when it never ran or is done, else stuck."""
    doomed: list[_Job] = []
    with self._cond:
      if job.state is _State.PENDING:
        job.state = _State.DONE
        self._jobs.remove(job)
        return None
      if job.state is not _State.RUNNING:
        return job.stuck
      job.state = _State.ABANDONED
      job.stuck = StuckCall(description)
      self._threads -= 1
      self._lost += 1
      if self._limit() < 1:
        doomed = list(self._jobs)
        self._jobs.clear()
        for other in doomed:
          other.state = _State.DONE
      elif self._jobs:
        self._spawn()
    for other in doomed:
      _deliver(other, None, self._exhausted())
    return job.stuck

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

  def _exhausted(self) -> PoolExhaustedError:
    return PoolExhaustedError(
        f"{self._lost} calls outlived their deadlines and still hold their"
        " threads, more than the pool may lose"
        f" (max_lost={self._max_lost}, max_threads={self._max_threads}); mend"
        " the environment that hangs, or make it async so that it can be"
        " cancelled"
    )

  def _spawn(self) -> None:
    if self._threads >= self._limit():
      return
    self._threads += 1
    thread = threading.Thread(
        target=self._work, name="tunix-collector-worker", daemon=True
    )
    self._alive.add(thread)
    thread.start()

  def _work(self) -> None:
    try:
      while True:
        with self._cond:
          while not self._jobs:
            if self._closed or self._threads > self._limit():
              self._threads -= 1
              return
            self._waiting += 1
            woken = self._cond.wait(self._idle)
            self._waiting -= 1
            if not woken and not self._jobs:
              self._threads -= 1
              return
          job = self._jobs.popleft()
          job.state = _State.RUNNING
          job.started = time.monotonic()
        result, error = None, None
        try:
          result = job.fn(*job.args)
        except StopIteration as e:  # A future refuses to carry one.
          error = RuntimeError(f"StopIteration: {e}")
        except BaseException as e:  # pylint: disable=broad-except
          error = e
        with self._cond:
          abandoned = job.state is _State.ABANDONED
          job.state = _State.DONE
          if abandoned:
            self._lost -= 1
        if abandoned:
          # A replacement may already stand in for this thread.
          job.stuck._return()  # pylint: disable=protected-access
          return
        _deliver(job, result, error)
        del job, result, error
    finally:
      with self._cond:
        self._alive.discard(threading.current_thread())


def _deliver(job: _Job, result: Any, error: BaseException | None) -> None:
  def settle():
    if job.future.done():
      return
    if error is None:
      job.future.set_result(result)
    else:
      job.future.set_exception(error)

  try:
    job.loop.call_soon_threadsafe(settle)
  except RuntimeError:  # The loop was closed; nobody waits any more.
    pass


def is_async(fn: Any) -> bool:
  """True when calling `fn` gives a coroutine."""
  return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
      getattr(fn, "__call__", None)
  )


class CallRunner:
  """Runs calls under deadlines; see the module docstring. Thread-safe."""

  def __init__(
      self,
      pool: WorkerPool | None = None,
      grace: float = 1.0,
  ):
    """Args:

      pool: threads for synchronous code; a new one by default.
      grace: seconds that cancelled code may take to clean up after itself
        before it counts as stuck.
    """
    if not grace >= 0:
      raise ValueError(f"grace must be >= 0 seconds, got {grace!r}")
    self.pool = pool or WorkerPool()
    self._grace = grace
    self._stuck: set[StuckCall] = set()
    self._tasks: set[asyncio.Task[Any]] = set()

  @property
  def stuck(self) -> list[StuckCall]:
    """Calls that outlived their deadlines and have not returned."""
    return list(self._stuck)

  def close(self, timeout: float = 5.0) -> bool:
    """Ends idle threads; True when only lost ones are left."""
    return self.pool.close(timeout)

  async def call(
      self,
      fn: Callable[..., Any],
      *args: Any,
      limit: float = _INF,
      at: float = _INF,
      inline: bool = False,
      on_stuck: Callable[[StuckCall], None] | None = None,
  ) -> Any:
    """Returns `fn(*args)`, awaited when it is awaitable.

    Args:
      fn: synchronous or asynchronous function.
      *args: its arguments.
      limit: seconds it may run. Time in the queue for a thread is not counted.
      at: `loop.time()` when it must be over in any case.
      inline: no task and no thread. Only for code that is cheap and, if
        asynchronous, honours cancellation.
      on_stuck: told about the call if it cannot be stopped, whether time was
        up or the caller was cancelled.

    Raises:
      CallTimeout: time was up.
      Exception: whatever `fn` raised.
    """
    if is_async(fn):
      return await self.run(
          fn(*args), limit=limit, at=at, inline=inline, on_stuck=on_stuck
      )
    if inline:
      result = fn(*args)
    else:
      result = await self._run_in_thread(fn, args, limit, at, on_stuck)
    if inspect.isawaitable(result):
      return await self.run(
          result, limit=limit, at=at, inline=inline, on_stuck=on_stuck
      )
    return result

  async def run(
      self,
      awaitable: Any,
      *,
      limit: float = _INF,
      at: float = _INF,
      inline: bool = False,
      on_stuck: Callable[[StuckCall], None] | None = None,
  ) -> Any:
    """Awaits under a deadline; arguments and errors as for `call`."""
    loop = asyncio.get_running_loop()
    due = min(at, loop.time() + limit)
    if inline:
      try:
        async with asyncio.timeout_at(None if due == _INF else due) as scope:
          return await awaitable
      except TimeoutError:
        if scope.expired():
          raise CallTimeout(_name(awaitable)) from None
        raise
    task = asyncio.ensure_future(awaitable)
    waiter = loop.create_future()

    def wake(_=None):
      if not waiter.done():
        waiter.set_result(None)

    task.add_done_callback(wake)
    timer = loop.call_at(due, wake) if due != _INF else None
    try:
      await waiter
    except asyncio.CancelledError:
      await self._stop(task, on_stuck)
      raise
    finally:
      if timer is not None:
        timer.cancel()
    if task.done():
      if task.cancelled():
        # Not our doing: the code cancelled itself. Passing this on would
        # look like a cancellation of the caller.
        raise RuntimeError(f"{_name(task)} cancelled itself")
      return task.result()
    stuck = await self._stop(task, on_stuck)
    raise CallTimeout(_name(task), stuck)

  async def _stop(
      self,
      task: asyncio.Future[Any],
      on_stuck: Callable[[StuckCall], None] | None,
  ) -> StuckCall | None:
    """Cancels and waits `grace` seconds; reports what does not obey."""
    task.cancel()
    try:
      await asyncio.wait({task}, timeout=self._grace)
    finally:
      stuck = None
      if task.done():
        if not task.cancelled():
          task.exception()  # Retrieved, so that asyncio does not complain.
      else:
        stuck = StuckCall(_name(task))
        self._stuck.add(stuck)
        self._tasks.add(task)  # asyncio itself holds tasks weakly.
        task.add_done_callback(lambda t: self._task_returned(t, stuck))
        if on_stuck is not None:
          on_stuck(stuck)
    return stuck

  def _task_returned(self, task, stuck: StuckCall) -> None:
    self._tasks.discard(task)
    self._stuck.discard(stuck)
    if not task.cancelled():
      task.exception()
    stuck._return()  # pylint: disable=protected-access

  async def _run_in_thread(self, fn, args, limit, at, on_stuck) -> Any:
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    job = self.pool.submit(fn, args, loop, future)
    timer: asyncio.TimerHandle | None = None
    expired = False

    def check():
      nonlocal timer, expired
      if future.done():
        return
      now = loop.time()
      started = job.started
      due = min(at, (now if started is None else started) + limit)
      if due > now:
        timer = loop.call_at(due, check)
        return
      expired = True
      future.set_result(None)

    first = min(at, loop.time() + limit)
    if first != _INF:
      timer = loop.call_at(first, check)
    try:
      result = await future
    except asyncio.CancelledError:
      await self._give_up(job, fn, on_stuck)
      raise
    finally:
      if timer is not None:
        timer.cancel()
    if not expired:
      return result
    stuck = await self._give_up(job, fn, on_stuck, wait=False)
    raise CallTimeout(_name(fn), stuck)

  async def _give_up(self, job, fn, on_stuck, wait=True) -> StuckCall | None:
    """Leaves a thread to itself, after `grace` seconds if `wait`."""
    try:
      if wait and job.state is _State.RUNNING:
        due = time.monotonic() + self._grace
        while job.state is _State.RUNNING and time.monotonic() < due:
          await asyncio.sleep(min(0.01, self._grace))
    finally:
      stuck = self.pool.cancel(job, _name(fn))
      if stuck is not None:
        self._stuck.add(stuck)
        stuck.then(lambda: self._stuck.discard(stuck))
        if on_stuck is not None:
          on_stuck(stuck)
    return stuck


def _name(thing: Any) -> str:
  if isinstance(thing, asyncio.Task):
    thing = thing.get_coro()
  return getattr(thing, "__qualname__", None) or type(thing).__qualname__


_default: CallRunner | None = None
_default_lock = threading.Lock()


def default_runner() -> CallRunner:
  """The process's shared runner."""
  global _default
  with _default_lock:
    if _default is None:
      _default = CallRunner()
    return _default
