"""Runs executions: one gym with one task each, held by a client.

An execution is created, stepped, evaluated and terminated. Promises:

* executions share nothing but the process (or, with workers, not even that):
  no action, exception or wait of one changes another;
* every call into a gym has a deadline, closing included; after a failure or a
  missed deadline the execution is over, its gym is closed, and every later
  call raises the reason (`code`);
* no call of a gym, its close included, runs beside another: one that cannot be
  stopped keeps the gym until it returns, and the close follows then;
* steps with the same number are one step, however often a client sends them.

Does not know HTTP, nor other executions (`store` does).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any, Awaitable, Callable, Iterator, Mapping
import uuid

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import settings as settings_lib
from tunix.rl.multi_turn.environments import wire
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import http

from cua_gyms import applications
from cua_gyms.gym_server import schemas
from cua_gyms.gym_server import validators

_LOG = logging.getLogger(__name__)
_INLINE_BYTES = 1 << 19  # Larger screenshots are encoded in a thread.
Kind = gui_action.GuiActionKind
State = schemas.State


TRANSITIONS: Mapping[State, frozenset[State]] = {
  State.CREATING: frozenset(
    {State.RUNNING, State.TERMINATED, State.FAILED, State.EXPIRED}
  ),
  State.RUNNING: frozenset({State.TERMINATED, State.FAILED, State.EXPIRED}),
  State.TERMINATED: frozenset(),
  State.FAILED: frozenset(),
  State.EXPIRED: frozenset(),
}


@settings_lib.settings
class ExecutionLimits:
  """Bounds of a server's executions."""

  capacity: int = settings_lib.setting(
    default=256, doc="Executions held at a time.", ge=1, le=65_536
  )
  max_megapixels: int = settings_lib.setting(
    default=512,
    doc="Screens of all executions, together; a create beyond it gets 429."
    " One whose size only its gym knows counts as a megapixel.",
    unit="megapixels",
    ge=1,
    le=65_536,
  )
  creating: int = settings_lib.setting(
    default=32, doc="Gyms that start at a time; further creates wait.", ge=1
  )
  lease: float = settings_lib.setting(
    default=300.0,
    doc="Close an execution that gets no call for so long.",
    unit="s",
    gt=0,
  )
  max_lease: float = settings_lib.setting(
    default=3600.0,
    doc="Longest lease that a client may ask for.",
    unit="s",
    gt=0,
  )
  max_seconds: float = settings_lib.setting(
    default=7200.0, doc="Longest life of an execution.", unit="s", gt=0
  )
  start: float = settings_lib.setting(
    default=120.0, doc="Deadline of a gym's start.", unit="s", gt=0
  )
  step: float = settings_lib.setting(
    default=60.0, doc="Deadline of a gym's step.", unit="s", gt=0
  )
  evaluate: float = settings_lib.setting(
    default=60.0, doc="Deadline of a gym's evaluation.", unit="s", gt=0
  )
  close: float = settings_lib.setting(
    default=30.0, doc="Deadline of a gym's close.", unit="s", gt=0
  )
  retry_after: float = settings_lib.setting(
    default=1.0, doc="Retry-After of a create without room.", unit="s", gt=0
  )
  remembered: int = settings_lib.setting(
    default=2048,
    doc="Ended executions whose reason the server still knows.",
    ge=1,
  )

  def problems(self) -> Iterator[str]:
    if self.lease > self.max_lease:
      yield (
        f"lease={self.lease} exceeds max_lease={self.max_lease}; raise the"
        " second"
      )


class Execution:
  """One gym with one task; `store.ExecutionStore` makes it.

  Attributes:
    id: name in addresses.
    gym_id: the served gym's name.
    task: given to the gym's `start`.
    names: {"identifier", "number", "key"} of the task and the create.
    state: see `TRANSITIONS`.
    reason: Why it ended, in words; "" while it runs.
    code: Name of that reason, for programs.
    pixels: Size of its screen.
    steps: actions carried out.
    seen: the newest observation.
    started_s: duration of the gym's start.
  """

  def __init__(
    self,
    gym_id: str,
    task: base.Task,
    names: Mapping[str, str],
    lease: float,
    limits: ExecutionLimits,
    pixels: int = 0,
  ):
    self.id = uuid.uuid4().hex
    self.gym_id = gym_id
    self.task = task
    self.names = dict(names)
    self.lease = lease
    self.pixels = pixels
    self.state = State.CREATING
    self.reason = ""
    self.code = ""
    self.steps = 0
    self.seen: base.Observation | None = None
    self.started_s = 0.0
    self.created = time.monotonic()
    self.closed = asyncio.Event()
    self.verdict: base.Evaluation | None = None
    self.answered = False
    self._limits = limits
    self._gym: concurrency.Guarded | None = None
    self._lock = asyncio.Lock()
    self._calls: set[asyncio.Task[Any]] = set()
    self._last_call = self.created
    self._last_action: gui_action.GuiAction | None = None
    self._picture: tuple[base.Observation, wire.Screenshot] | None = None

  @property
  def live(self) -> bool:
    return bool(TRANSITIONS[self.state])

  @property
  def shown(self) -> base.Observation:
    """The newest observation of an execution that has started."""
    if self.seen is None:
      raise RuntimeError(f"execution {self.id} has shown nothing yet")
    return self.seen

  @property
  def idle_s(self) -> float:
    """Seconds since the last call; 0 during one."""
    return 0.0 if self._calls else time.monotonic() - self._last_call

  @property
  def lease_left_s(self) -> float:
    return max(0.0, self.lease - self.idle_s)

  @property
  def gym_is_lost(self) -> bool:
    """Whether the gym's worker process has ended."""
    gym = self._gym
    return gym is not None and bool(getattr(gym.target, "lost", False))

  def touch(self) -> None:
    """Renews the lease."""
    self._last_call = time.monotonic()

  # --- calls ------------------------------------------------------------------

  async def start(self, make_gym: Callable[[], Any]) -> None:
    """Makes the gym and starts the task; a failure ends the execution."""

    async def begin(due: float) -> base.Observation:
      began = time.monotonic()
      gym = await concurrency.maybe_await(make_gym())
      self._gym = concurrency.Guarded(gym, name="the gym")
      observation = await self._observe(due, "start", self.task)
      self.started_s = time.monotonic() - began
      return observation

    self.seen = await self._guard(begin, self._limits.start, "start")
    self._become(State.RUNNING)

  async def step(
    self, action: gui_action.GuiAction, number: int | None
  ) -> base.Observation:
    """Carries out an action, once.

    Args:
      action: GUI action in pixels of the gym's screen.
      number: Number of this step, from 1; the previous number with the same
        action returns the same observation again. None: the next number.

    Raises:
      ServiceError: out of order, after the end, or a failure of the gym.
    """
    async with self._turn():
      if number is not None and number != self.steps + 1:
        if number == self.steps and self.steps and action == self._last_action:
          return self.shown
        raise applications.ServiceError(
          409,
          f"step {number} is out of order: {self.steps} are done; send step"
          f" {self.steps + 1}",
          code="step_out_of_order",
        )
      if self.shown.done:
        raise applications.ServiceError(
          409,
          "the task has ended; evaluate or terminate the execution",
          code="task_ended",
        )
      self.seen = await self._guard(
        lambda due: self._observe(due, "act", action), self._limits.step, "act"
      )
      self.steps += 1
      self._last_action = action
      self.verdict = None
      self.answered = self.answered or action.kind is Kind.ANSWER
      return self.shown

  async def evaluate(self, answer: str) -> base.Evaluation:
    """Evaluates the gym, which receives an outstanding answer first."""
    async with self._turn():
      if answer and not self.answered and not self.shown.done:
        say = gui_action.GuiAction(Kind.ANSWER, text=answer)
        self.seen = await self._guard(
          lambda due: self._observe(due, "act", say), self._limits.step, "act"
        )
        self.answered, self.verdict = True, None
      if self.verdict is None:
        self.verdict = await self._guard(
          self._judge, self._limits.evaluate, "evaluate"
        )
      return self.verdict

  async def judge(self, submission: validators.Submission) -> schemas.Result:
    """Evaluates the gym and weighs its verdict by `validators.judge`."""
    verdict = await self.evaluate(submission.answer_text)
    try:
      result = validators.judge(self.task, verdict, submission)
    except ValueError as error:
      raise applications.ServiceError(
        500, f"task {self.task.task_id}: {error}", code="bad_task"
      ) from error
    return {**result, "details": wire.jsonable(verdict.details)}

  async def picture(self) -> wire.Screenshot:
    """Returns the newest screenshot in JSON's form; encoded once."""
    observation = self.shown
    if self._picture is None or self._picture[0] is not observation:
      encode = lambda: wire.screenshot_to_json(observation.pixels)
      if observation.pixels.nbytes > _INLINE_BYTES:
        picture = await concurrency.acall(
          encode, seconds=self._limits.step, what="encoding a screenshot"
        )
      else:
        picture = encode()
      self._picture = observation, picture
    return self._picture[1]

  @contextlib.asynccontextmanager
  async def _turn(self):
    """Admits one call at a time, while the execution runs."""
    self.check()
    self.touch()
    async with self._lock:
      self.check()
      yield
      self.touch()

  def check(self) -> None:
    """Raises:

    ServiceError: the execution is over, with the reason, or still starting.
    """
    if self.state is State.RUNNING:
      return
    if self.state is State.CREATING:
      raise applications.ServiceError(
        409,
        f"execution {self.id} has not started yet",
        code="not_started",
        retry_s=1.0,
      )
    raise applications.ServiceError(
      410,
      f"execution {self.id} is over ({self.state.value}): {self.reason}",
      code=self.code,
    )

  async def _observe(
    self, due: float, name: str, *args: Any
  ) -> base.Observation:
    return _observation(await self._invoke(due, name, *args), name)

  async def _judge(self, due: float) -> base.Evaluation:
    verdict = await self._invoke(due, "evaluate")
    if not isinstance(verdict, base.Evaluation):
      raise TypeError(
        "the gym's evaluate must return an Evaluation, got"
        f" {type(verdict).__name__}"
      )
    wire.number(verdict.score, "score")  # Raises unless it is finite.
    return verdict

  async def _guard(
    self, work: Callable[[float], Awaitable[Any]], seconds: float, what: str
  ) -> Any:
    """Runs `work(due)`, due in loop time; a failure ends the execution."""
    due = asyncio.get_running_loop().time() + seconds
    task = asyncio.ensure_future(
      concurrency.with_deadline(work(due), seconds, f"the gym's {what}")
    )
    self._calls.add(task)
    try:
      await asyncio.wait({task})
    finally:
      self._calls.discard(task)
      if not task.done():  # The caller was cancelled: the server ends.
        task.cancel()
    self.touch()
    if not self.live:
      if not task.cancelled():
        task.exception()  # Retrieved; the execution's reason replaces it.
      self.check()
    try:
      if task.cancelled():
        raise RuntimeError(f"the gym's {what} was cancelled")
      return task.result()
    except Exception as error:  # pylint: disable=broad-except
      code = getattr(error, "code", None)
      if not isinstance(code, str):
        late = isinstance(error, concurrency.DeadlineExceeded)
        code = "deadline" if late else "gym_error"
      reason = f"{type(error).__name__}: {error}"
      if isinstance(error, http.CallError):
        # A remote gym's words are for the log alone.
        _LOG.warning("execution %s: %s", self.id, reason)
        reason = error.summary
      self.end(State.FAILED, reason, code)
      _LOG.warning(
        "execution %s (%s) failed in %s",
        self.id,
        self.task.task_id,
        what,
        exc_info=code == "gym_error" and error or None,
      )
      raise applications.ServiceError(
        504 if code == "deadline" else 502,
        f"the gym failed in {what}: {self.reason}",
        code=code,
      ) from error

  async def _invoke(self, due: float, name: str, *args: Any) -> Any:
    """Calls the gym; sync methods run in a thread.

    The deadline of `_guard` comes first, as it counts the wait for a thread. A
    call that does not end even then keeps the gym to itself.
    """
    gym = self._gym
    if gym is None:
      raise RuntimeError(f"execution {self.id} has no gym")
    return await gym.run(
      getattr(gym.target, name), *args, at=due + 1.0, what=f"the gym's {name}"
    )

  # --- the end ----------------------------------------------------------------

  def end(self, state: State, reason: str, code: str) -> bool:
    """Ends the execution, closes its gym; False when it had ended before."""
    if not self.live:
      return False
    self._become(state)
    self.reason, self.code = reason, code
    for call in self._calls:
      call.cancel()
    closing = asyncio.ensure_future(self._close())
    _CLOSING.add(closing)
    closing.add_done_callback(_CLOSING.discard)
    return True

  def _become(self, state: State) -> None:
    if state not in TRANSITIONS[self.state]:
      raise RuntimeError(f"{self.state.value} never becomes {state.value}")
    self.state = state

  async def _close(self) -> None:
    """Closes the gym, once a call stuck in it has returned."""
    try:
      if self._calls:
        # Cancelled calls have a moment to release the gym.
        await asyncio.wait(set(self._calls), timeout=self._limits.close)
      if self._gym is not None:
        await self._gym.close(seconds=self._limits.close)
    except concurrency.StillRunningError as error:
      _LOG.warning("execution %s: %s", self.id, error)
    except Exception:  # pylint: disable=broad-except
      _LOG.exception("closing the gym of execution %s failed", self.id)
    finally:
      self._gym = None
      self._picture = None
      self.closed.set()

  def describe(self) -> schemas.Execution:
    """Returns the state of the execution, as clients see it."""
    data: schemas.Execution = {
      "execution_id": self.id,
      "gym_id": self.gym_id,
      "task_id": self.task.task_id,
      "status": self.state,
      "steps": self.steps,
      "done": bool(self.seen is not None and self.seen.done),
      "age_s": round(time.monotonic() - self.created, 3),
      "lease_s": self.lease,
      "lease_left_s": round(self.lease_left_s, 3) if self.live else 0.0,
    }
    if self.reason:
      data |= {"reason": self.reason, "code": self.code}
    return data


_CLOSING: set[asyncio.Task[None]] = set()


def _observation(value: object, what: str) -> base.Observation:
  if not isinstance(value, base.Observation):
    raise TypeError(
      f"the gym's {what} must return an Observation, got {type(value).__name__}"
    )
  pixels: Any = value.screenshot
  if (
    getattr(pixels, "ndim", 0) != 3
    or pixels.shape[2] != 3
    or (str(pixels.dtype) != "uint8")
  ):
    raise TypeError(
      f"the gym's {what} must show uint8[H, W, 3], got"
      f" {getattr(pixels, 'dtype', '?')}{getattr(pixels, 'shape', '')}"
    )
  if value.axtree:
    raise TypeError(
      f"the gym's {what} shows an accessibility tree, which a server does"
      " not pass on; serve it with observation=screenshot"
    )
  return value
