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
import dataclasses
import inspect
import math
import threading
import time
from typing import Any, Callable

from tunix.rl.multi_turn.core import concurrency

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
      try:
        result = fn(*args)
      except asyncio.CancelledError:  # Nothing was awaited: it is its own.
        raise RuntimeError(f"{_name(fn)} cancelled itself") from None
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
      except asyncio.CancelledError:
        if concurrency.is_own_cancellation():
          raise RuntimeError(f"{_name(awaitable)} cancelled itself") from None
        raise
    task = asyncio.ensure_future(awaitable)
    try:
      done = await concurrency.done_by(task, due)
    except asyncio.CancelledError:
      await self._stop(task, on_stuck)
      raise
    if done:
      return concurrency.outcome(task, _name(task))
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
    job = self.pool.submit(lambda: fn(*args))
    try:
      done = await self.pool.finished(job, limit, at)
    except asyncio.CancelledError:
      await self._give_up(job, fn, on_stuck)
      raise
    if done:
      return job.future.result()
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


def _name(thing: Any) -> str:
  if isinstance(thing, asyncio.Task):
    thing = thing.get_coro()
  return getattr(thing, "__qualname__", None) or type(thing).__qualname__


_default: CallRunner | None = None
_default_lock = threading.Lock()


def default_runner() -> CallRunner:
  """The process's shared runner.

  Its threads are not those of `concurrency.default_pool`: an environment's
  step in one of these may wait for a tool in one of those, and a bounded pool
  whose calls wait for calls of the same pool comes to a standstill.
  """
  global _default
  with _default_lock:
    if _default is None:
      _default = CallRunner()
    return _default
