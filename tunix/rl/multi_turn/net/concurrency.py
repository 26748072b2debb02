"""Calls untrusted code, sync or async, under a deadline.

`CallRunner` is the one way to give up on a call. Asynchronous code gets a task
of its own, which is cancelled when time is up; synchronous code runs in a
bounded pool of daemon threads. `Guarded` gives an object with sync or async
methods an async face and keeps it to itself while a call of it is stuck.
`acall`, `call` and `with_deadline` use the process's own runner.

Promises: a call returns or raises an Exception, whatever the called code raises
(see `containment`); it does so, or raises `CallTimeout`, within its deadline
plus the runner's grace; a call that cannot be stopped is reported as a
`StuckCall`, and its `Guarded` object is never called beside it; a lost thread
is replaced, up to a bound; nothing in here blocks the event loop but `call` and
`drive`. Deadlines stand still within `off_the_clock`.

Does not: stop a thread (Python cannot), or interrupt inline synchronous code.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import inspect
import logging
import math
import threading
import time
from typing import Any, Awaitable, Callable, Iterator, TypeVar

from ..core import containment
from . import worker_pool

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
contained = containment.contained
describe = containment.describe
ExitRaised = containment.ExitRaised
is_own_cancellation = containment.is_own_cancellation
DeadlineExceeded = worker_pool.DeadlineExceeded
PoolExhaustedError = worker_pool.PoolExhaustedError
StuckCall = worker_pool.StuckCall
WorkerPool = worker_pool.WorkerPool
STOP_S = 2.0
"""Grace of what a user's request to stop ends."""
_INF = math.inf


class CallTimeout(DeadlineExceeded):
  """The deadline that a runner was given for a call has passed.

  Inside another call it arrives as a plain `DeadlineExceeded`, so that it is
  not taken for the outer call's deadline.

  Attributes:
    stuck: the call when it could not be stopped, else None.
  """

  def __init__(self, message: str, stuck: StuckCall | None = None):
    super().__init__(message)
    self.stuck = stuck


class StillRunningError(RuntimeError):
  """The object is held by a call that was given up and still runs."""


class Clock:
  """The time of a call, which stands still within `off_the_clock`.

  Attributes:
    stopped_s: Seconds that it has stood still.
    on_change: Called when `due` has changed.
  """

  def __init__(self, due: float):
    """Args:

    due: `loop.time()` when the time is up.
    """
    self.stopped_s = 0.0
    self.on_change: Callable[[], None] = lambda: None
    self._due = due
    self._holds = 0
    self._since = 0.0
    self._loop = asyncio.get_running_loop()

  @property
  def due(self) -> float:
    """`loop.time()` when the time is up; infinite while it stands still."""
    return _INF if self._holds else self._due

  def stop(self) -> None:
    self._holds += 1
    if self._holds == 1:
      self._since = self._loop.time()
      self.on_change()

  def start(self) -> None:
    """Ends one `stop`."""
    self._holds -= 1
    if not self._holds:
      seconds = self._loop.time() - self._since
      self.stopped_s += seconds
      self._due += seconds
      self.on_change()

  @property
  def loop(self) -> asyncio.AbstractEventLoop:
    return self._loop


_CLOCKS: contextvars.ContextVar[tuple[Clock, ...]] = contextvars.ContextVar(
  "_CLOCKS", default=()
)


@contextlib.contextmanager
def clocked(due: float = _INF) -> Iterator[Clock]:
  """Gives the code within, and the tasks that it starts, a clock."""
  outer = _CLOCKS.get()
  clock = Clock(due)
  _CLOCKS.set((*outer, clock))
  try:
    yield clock
  finally:
    _CLOCKS.set(outer)


def clocks_around() -> tuple[Clock, ...]:
  """The clocks of all calls around the caller, on its event loop."""
  loop = asyncio.get_running_loop()
  return tuple(clock for clock in _CLOCKS.get() if clock.loop is loop)


@contextlib.contextmanager
def off_the_clock() -> Iterator[None]:
  """Stops the deadlines of all calls around the caller, on its event loop.

  For waits that are not the call's own, such as for an engine that loads
  weights. They need a deadline of their own.
  """
  clocks = clocks_around()
  for clock in clocks:
    clock.stop()
  try:
    yield
  finally:
    for clock in clocks:
      clock.start()


async def maybe_await(value: object) -> Any:
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


def runs_inline(thing: object) -> bool:
  """Whether a function, gym or environment asks to be called on the event
  loop itself, by an attribute `runs_inline`."""
  return bool(getattr(thing, "runs_inline", False))


class CallRunner:
  """Runs calls under deadlines; see the module docstring. Thread-safe."""

  def __init__(self, pool: WorkerPool | None = None, grace: float = 1.0):
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
    self._tasks: set[asyncio.Future[Any]] = set()

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
    seconds: float | None = None,
    at: float = _INF,
    inline: bool = False,
    what: str = "",
    on_stuck: Callable[[StuckCall], None] | None = None,
  ) -> Any:
    """Returns `fn(*args)`, awaited when it is awaitable.

    Args:
      fn: synchronous or asynchronous function.
      *args: its arguments.
      seconds: it may run, None for no limit. Time in the queue for a thread is
        not counted.
      at: `loop.time()` when it must be over in any case.
      inline: no task and no thread. Only for code that is cheap and, if
        asynchronous, honours cancellation.
      what: names the call in errors; the function's name by default.
      on_stuck: receives the call if it cannot be stopped, whether time was up
        or the caller was cancelled.

    Raises:
      CallTimeout: time was up.
      PoolExhaustedError: stuck calls hold every thread there may be.
      ExitRaised: `fn` cancelled itself, or raised what is no Exception.
      Exception: whatever else `fn` raised.
    """
    what = what or _name(fn)
    more: dict[str, Any] = dict(
      seconds=seconds, at=at, what=what, on_stuck=on_stuck
    )
    if is_async(fn):
      return await self.run(fn(*args), inline=inline, **more)
    if inline:
      with contained(what):
        result = fn(*args)
    else:
      result = await self._run_in_thread(fn, args, **more)
    if inspect.isawaitable(result):
      return await self.run(result, inline=inline, **more)
    return result

  async def run(
    self,
    awaitable: Awaitable[T],
    *,
    seconds: float | None = None,
    at: float = _INF,
    inline: bool = False,
    what: str = "",
    on_stuck: Callable[[StuckCall], None] | None = None,
  ) -> T:
    """Awaits under a deadline; arguments and errors as for `call`.

    Without a deadline the caller's own task awaits.
    """
    what = what or _name(awaitable)
    due = at
    if seconds is not None:
      due = min(at, asyncio.get_running_loop().time() + seconds)
    if due == _INF:
      return await _awaited(awaitable, what)
    with clocked(due) as clock:
      if inline:
        return await _run_inline(awaitable, clock, seconds, what)
      task = asyncio.ensure_future(_contained(awaitable, what))
    if inspect.iscoroutine(awaitable):  # Cancelled before it has begun.
      task.add_done_callback(lambda _: awaitable.close())
    try:
      in_time = await _done_by(task, clock)
    except asyncio.CancelledError:
      await self._stop(task, what, on_stuck)
      raise
    if not in_time:
      stuck = await self._stop(task, what, on_stuck)
      raise CallTimeout(_late(what, seconds), stuck)
    return _outcome(task)

  async def _stop(self, task, what, on_stuck) -> StuckCall | None:
    """Cancels and waits `grace` seconds; reports a task that does not end."""
    task.cancel()
    stuck = None
    try:
      await asyncio.wait({task}, timeout=self._grace)
    finally:
      if not task.done():
        stuck = StuckCall(what)
        self._note(stuck, on_stuck)
        self._tasks.add(task)  # asyncio itself holds tasks weakly.
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: stuck.mark_returned())
      task.add_done_callback(_retrieve)
    return stuck

  async def _run_in_thread(self, fn, args, seconds, at, what, on_stuck) -> Any:
    job = self.pool.submit(lambda: fn(*args))
    limit = _INF if seconds is None else seconds
    try:
      in_time = await self.pool.finished(job, limit, at)
    except asyncio.CancelledError:
      await self._give_up(job, what, on_stuck, self._grace)
      raise
    if in_time:
      return _outcome(job.future)
    stuck = await self._give_up(job, what, on_stuck)
    raise CallTimeout(_late(what, seconds), stuck)

  async def _give_up(
    self, job, what, on_stuck, grace: float = 0.0
  ) -> StuckCall | None:
    """Leaves a thread to itself, after `grace` seconds."""
    try:
      due = time.monotonic() + grace
      while job.running and time.monotonic() < due:
        await asyncio.sleep(min(0.01, grace))
    finally:
      stuck = self.pool.abandon(job, what)
      if stuck is not None:
        self._note(stuck, on_stuck)
    return stuck

  def _note(self, stuck: StuckCall, on_stuck) -> None:
    self._stuck.add(stuck)
    stuck.then(lambda: self._stuck.discard(stuck))
    if on_stuck is not None:
      on_stuck(stuck)


class Guarded:
  """The async face of an object whose methods may block, hang or be async.

  Promises: a call that could not be stopped keeps the object to itself until
  it returns: other calls raise StillRunningError, and `close` happens then.

  Attributes:
    target: the object.
    inline: its methods are called on the event loop (they must be cheap).
  """

  def __init__(
    self,
    target: object,
    *,
    runner: CallRunner | None = None,
    inline: bool = False,
    name: str = "",
  ):
    """Args:

    target: the object; its methods are looked up at each call.
    runner: Runner of its calls; the process's by default.
    inline: see the attributes.
    name: Name of the object in errors, e.g. "the gym"; its class by default.
    """
    self.target = target
    self.inline = inline
    self._runner = runner or _RUNNER
    self._name = name or type(target).__name__
    self._stuck: StuckCall | None = None
    self._closes_later = False

  @property
  def stuck(self) -> StuckCall | None:
    """The call that holds the object, None when it is free."""
    if self._stuck is not None and self._stuck.returned:
      self._stuck = None
    return self._stuck

  async def call(self, method: str, *args: Any, **limits: Any) -> Any:
    """`run` for the object's method of that name."""
    what = f"{type(self.target).__name__}.{method}"
    return await self.run(
      getattr(self.target, method), *args, what=what, **limits
    )

  async def run(
    self,
    fn: Callable[..., Any],
    *args: Any,
    inline: bool = False,
    **limits: Any,
  ) -> Any:
    """Calls `fn`, which uses the object; see `CallRunner.call`.

    Raises:
      StillRunningError: an earlier call has not returned.
    """
    self._check()
    return await self._runner.call(
      fn, *args, inline=inline or self.inline, on_stuck=self._hold, **limits
    )

  async def close(
    self,
    *,
    seconds: float | None = None,
    closed_late: Callable[[Exception | None], None] | None = None,
  ) -> None:
    """Calls the object's `close`, if it has one.

    Args:
      seconds: deadline.
      closed_late: called with the error, or None, of a close that had to wait
        for a stuck call; by default errors are logged.

    Raises:
      StillRunningError: an earlier call has not returned; the object is closed
        when it does.
      CallTimeout, Exception: as `CallRunner.call`.
    """
    stuck = self.stuck
    if stuck is None:
      await self._close(seconds)
      return
    if not self._closes_later:
      self._closes_later = True
      self._close_after(stuck, seconds, closed_late or self._log)
    self._check()

  async def _close(self, seconds: float | None) -> None:
    if getattr(self.target, "close", None) is not None:
      await self.call("close", seconds=seconds)

  def _close_after(self, stuck, seconds, closed_late) -> None:
    loop = asyncio.get_running_loop()

    async def close() -> None:
      error = None
      try:
        await self._close(seconds)
      except Exception as e:  # pylint: disable=broad-except
        error = e
      closed_late(error)

    def on_loop() -> None:
      task = loop.create_task(close())
      _BACKGROUND.add(task)
      task.add_done_callback(_BACKGROUND.discard)
      # A loop that ends cancels its tasks: the object must be closed still.
      task.add_done_callback(lambda t: in_thread() if t.cancelled() else None)

    def in_thread() -> None:
      threading.Thread(
        target=lambda: asyncio.run(close()), name="tunix-close", daemon=True
      ).start()

    def returned() -> None:
      try:
        loop.call_soon_threadsafe(on_loop)
      except RuntimeError:  # The loop is gone.
        in_thread()

    stuck.then(returned)

  def _hold(self, stuck: StuckCall) -> None:
    self._stuck = stuck
    self._closes_later = False

  def _check(self) -> None:
    if self.stuck is not None:
      raise StillRunningError(
        f"{self.stuck.description} was given up and still runs;"
        f" {self._name} can only be closed when it returns"
      )

  def _log(self, error: Exception | None) -> None:
    if error is not None:
      _LOG.error("closing %s failed", self._name, exc_info=error)


# Work that outlives the task that began it; asyncio itself holds tasks weakly.
_BACKGROUND: set[asyncio.Future[Any]] = set()


async def to_the_end(awaitable: Awaitable[T]) -> T:
  """Awaits work that must not be given up half-way, such as a cleanup.

  If the caller is cancelled, it keeps running, referenced until it ends.
  """
  task = asyncio.ensure_future(awaitable)
  try:
    return await asyncio.shield(task)
  except asyncio.CancelledError:
    if not task.done():
      _BACKGROUND.add(task)
      task.add_done_callback(_BACKGROUND.discard)
      task.add_done_callback(_retrieve)
    raise


async def create_or_rollback(
  created: Awaitable[T],
  undo: Callable[[T], Awaitable[Any]],
  undoing: set[asyncio.Future[Any]],
) -> T:
  """Awaits a creation; if the caller is cancelled, undoes it once it completes.

  Args:
    created: keeps running when the caller is cancelled.
    undo: called with its result in that case.
    undoing: holds the task that does so until it is done.
  """
  creating = asyncio.ensure_future(created)

  async def rollback() -> None:
    try:
      await undo(await creating)
    except Exception:  # pylint: disable=broad-except
      pass  # Nothing was made, or it ends by its own timeout.

  try:
    return await asyncio.shield(creating)
  except asyncio.CancelledError:
    task = asyncio.ensure_future(rollback())
    undoing.add(task)
    task.add_done_callback(undoing.discard)
    raise


# --- Calls by the process's own runner --------------------------------------

# Of code that gives no runner of its own. Cancelled code that itself awaits
# tasks needs a moment to let go; a caller waits no longer than that.
_RUNNER = CallRunner(grace=0.05)

EPISODE_RUNNER = CallRunner(WorkerPool(name="tunix-collector-worker"))
"""The process's runner of episodes.

Its threads are not those of `acall`: an environment's step in one of these may
wait for a tool in one of those, and a bounded pool whose calls wait for calls
of the same pool comes to a standstill.
"""


async def with_deadline(
  awaitable: Awaitable[T], seconds: float | None, what: str = "call"
) -> T:
  """Awaits at most `seconds` (None: no limit).

  Unlike `asyncio.wait_for`, returns in time even when the awaited code
  swallows its cancellation.

  Raises:
    DeadlineExceeded: naming `what`.
    ExitRaised: the awaited code cancelled itself (naming `what`), or raised
      what is no Exception.
  """
  return await _RUNNER.run(awaitable, seconds=seconds, what=what)


def finished(
  future: concurrent.futures.Future[Any],
  seconds: float,
  stop: threading.Event | None = None,
) -> bool:
  """Waits for `future`, in a thread; whether it is done.

  Args:
    future: Of any outcome.
    seconds: Longest wait.
    stop: Ends the wait `STOP_S` seconds after it was set.
  """
  due, stopping = time.monotonic() + seconds, False
  while True:
    now = time.monotonic()
    if not stopping and stop is not None and stop.is_set():
      due, stopping = min(due, now + STOP_S), True
    longest = due - now if stop is None else min(due - now, 0.2)
    if concurrent.futures.wait([future], max(0.0, longest)).done:
      return True
    if time.monotonic() >= due:
      return False


async def inline_deadline(
  awaitable: Awaitable[T], seconds: float, what: str = "call"
) -> T:
  """As `with_deadline`, without a task: for code that honours cancellation."""
  return await _RUNNER.run(awaitable, seconds=seconds, what=what, inline=True)


async def acall(
  fn: Callable[..., Any],
  *args: Any,
  seconds: float | None = None,
  what: str = "call",
  on_stuck: Callable[[StuckCall], None] | None = None,
  **kwargs: Any,
) -> Any:
  """Calls sync or async `fn` without blocking the loop; see `CallRunner.call`.

  Raises:
    DeadlineExceeded: naming `what`.
    ExitRaised: `fn` cancelled itself (naming `what`), or raised what is no
      Exception.
  """
  return await _RUNNER.call(
    functools.partial(fn, **kwargs) if kwargs else fn,
    *args,
    seconds=seconds,
    what=what,
    on_stuck=on_stuck,
  )


def call(
  fn: Callable[..., Any],
  *args: Any,
  seconds: float | None = None,
  what: str = "call",
  **kwargs: Any,
) -> Any:
  """`acall` for code without an event loop (or inside one, blocking it)."""

  def run() -> Any:
    result = fn(*args, **kwargs)
    return drive(result) if inspect.isawaitable(result) else result

  return _RUNNER.pool.run(run, seconds, what)


def drive(awaitable: Awaitable[T]) -> T:
  """Awaits from code without an event loop (or inside one, blocking it)."""

  async def main() -> T:
    return await awaitable

  try:
    asyncio.get_running_loop()
  except RuntimeError:
    return asyncio.run(main())
  # A thread outside every pool: a bounded pool whose calls wait for calls of
  # the same pool comes to a standstill.
  pool = WorkerPool(max_threads=1, max_lost=0)
  try:
    return pool.run(lambda: asyncio.run(main()), None)
  finally:
    pool.close(0.0)


async def _contained(awaitable: Awaitable[T], what: str) -> T:
  with contained(what):
    return await awaitable


async def _awaited(awaitable, what) -> Any:
  try:
    with contained(what):
      return await awaitable
  except CallTimeout as e:
    raise DeadlineExceeded(str(e)) from e


async def _run_inline(awaitable, clock: Clock, seconds, what) -> Any:
  try:
    async with asyncio.timeout_at(clock.due) as scope:

      def reschedule() -> None:
        if not scope.expired():
          scope.reschedule(None if clock.due == _INF else clock.due)

      clock.on_change = reschedule
      try:
        return await _awaited(awaitable, what)
      finally:
        clock.on_change = lambda: None
  except TimeoutError:
    if scope.expired():
      raise CallTimeout(_late(what, seconds)) from None
    raise


async def _done_by(task: asyncio.Future[Any], clock: Clock) -> bool:
  """Waits for `task` until its time is up; whether it is done."""
  loop = asyncio.get_running_loop()
  waiter = loop.create_future()

  def wake(_=None):
    if not waiter.done():
      waiter.set_result(None)

  timer: asyncio.TimerHandle | None = None

  def arm() -> None:
    nonlocal timer
    if timer is not None:
      timer.cancel()
    timer = None if clock.due == _INF else loop.call_at(clock.due, wake)

  task.add_done_callback(wake)
  clock.on_change = arm
  arm()
  try:
    await waiter
  finally:
    clock.on_change = lambda: None
    if timer is not None:
      timer.cancel()
  return task.done()


def _outcome(future: Any) -> Any:
  try:
    return future.result()
  except CallTimeout as e:
    raise DeadlineExceeded(str(e)) from e


def _retrieve(task: asyncio.Future) -> None:
  if not task.cancelled():
    task.exception()  # Retrieved, so that asyncio does not log it.


def _late(what: str, seconds: float | None) -> str:
  if seconds is None:
    return f"{what} did not finish in time"
  return f"{what} did not finish within {seconds:g} s"


def _name(thing: object) -> str:
  if isinstance(thing, asyncio.Task):
    thing = thing.get_coro()
  return getattr(thing, "__qualname__", None) or type(thing).__qualname__
