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
import concurrent.futures
import dataclasses
import inspect
import math
import threading
import time
from typing import Any, Callable

from tunix.rl.multi_turn import concurrency

PoolExhaustedError = concurrency.PoolExhaustedError
StuckCall = concurrency.StuckCall
WorkerPool = concurrency.WorkerPool
is_async = concurrency.is_async

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
    self.pool = pool or WorkerPool(name="tunix-collector-worker")
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
    stuck.mark_returned()

  async def _run_in_thread(self, fn, args, limit, at, on_stuck) -> Any:
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    job = self.pool.submit(lambda: fn(*args))
    job.future.add_done_callback(lambda done: _pass_on(done, future, loop))
    timer: asyncio.TimerHandle | None = None
    expired = False

    def check():
      nonlocal timer, expired
      if future.done():
        return
      now = loop.time()
      started = job.started_at
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
      if wait and job.running:
        due = time.monotonic() + self._grace
        while job.running and time.monotonic() < due:
          await asyncio.sleep(min(0.01, self._grace))
    finally:
      stuck = self.pool.abandon(job, _name(fn))
      if stuck is not None:
        self._stuck.add(stuck)
        stuck.then(lambda: self._stuck.discard(stuck))
        if on_stuck is not None:
          on_stuck(stuck)
    return stuck


def _pass_on(
    done: concurrent.futures.Future[Any],
    future: asyncio.Future[Any],
    loop: asyncio.AbstractEventLoop,
) -> None:
  """Settles `future` in its loop as `done` was settled in a thread."""

  def settle():
    if future.done():
      return
    if done.cancelled():
      future.cancel()
    elif (error := done.exception()) is not None:
      future.set_exception(error)
    else:
      future.set_result(done.result())

  try:
    loop.call_soon_threadsafe(settle)
  except RuntimeError:  # The loop was closed; nobody waits any more.
    pass


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
