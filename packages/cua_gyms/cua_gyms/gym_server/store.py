"""Stores a server's executions: creates, finds, ends and forgets them.

Promises: the store holds at most `capacity` gyms, those that are still closing
included; creates under one key are one execution; an execution without calls
is closed; the store keeps the reason of an ended one for a while.

Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import time
from typing import Any, Callable, Mapping

from tunix.rl.multi_turn.environments.gyms import base

from cua_gyms import applications
from cua_gyms.gym_server import executions

Execution = executions.Execution
ExecutionLimits = executions.ExecutionLimits
State = executions.State


@dataclasses.dataclass(frozen=True)
class _Keyed:
  """A create with a key."""

  request: Any
  execution: Execution
  started: asyncio.Future[None]


class ExecutionStore:
  """A server's executions."""

  def __init__(
    self,
    limits: ExecutionLimits = ExecutionLimits(),
    *,
    on_end: Callable[[Execution], None] | None = None,
  ):
    """`on_end` receives each execution once, after its end."""
    self.limits = limits
    self._all: dict[str, Execution] = {}
    self._ended: collections.OrderedDict[str, Execution] = (
      collections.OrderedDict()
    )
    self._keys: dict[tuple[str, str], _Keyed] = {}
    self._starting = asyncio.Semaphore(limits.creating)
    # Referenced: the event loop keeps only weak references to tasks.
    self._starts: set[asyncio.Task[None]] = set()
    self._following: set[asyncio.Task[None]] = set()
    self._on_end = on_end or (lambda execution: None)
    self._closed = False

  @property
  def open(self) -> int:
    """Executions that hold a gym: live ones and those that are closing."""
    return len(self._all)

  def live(self) -> list[Execution]:
    return [e for e in self._all.values() if e.live]

  def get(self, gym_id: str, execution_id: str) -> Execution:
    """Raises:

    ServiceError: no execution has that id, or it ended too long ago.
    """
    kind, _, key = execution_id.partition(":")
    if kind == "key" and (keyed := self._keys.get((gym_id, key))):
      # The client never got the answer to its create.
      return keyed.execution
    execution = self._all.get(execution_id) or self._ended.get(execution_id)
    if execution is None or execution.gym_id != gym_id:
      raise applications.ServiceError(
        404,
        f"gym {gym_id!r} has no execution {execution_id!r}",
        code="unknown_execution",
      )
    return execution

  async def create(
    self,
    gym_id: str,
    task: base.Task,
    names: Mapping[str, str],
    make_gym: Callable[[], Any],
    *,
    lease: float | None = None,
    key: str = "",
    request: object = None,
    pixels: int = 0,
  ) -> tuple[Execution, bool]:
    """Starts an execution, or finds the one that `key` stands for.

    Args:
      gym_id, task, names: attributes of the execution.
      make_gym: returns a new gym, or an awaitable of one.
      lease: seconds; None: the limits' own.
      key: chosen by the client, "" for none.
      request: the create's content; a key must come with the same one again.
      pixels: Of the screen.

    Returns:
      (the execution, whether it existed before).

    Raises:
      ServiceError: no room (429), another request under the key (409), the gym
        failed (502, 504), or the execution of that key has ended (410).
    """
    earlier = self._keys.get((gym_id, key)) if key else None
    if earlier is not None:
      if earlier.request != request:
        raise applications.ServiceError(
          409,
          f"idempotency key {key!r} was used for another request; choose a"
          " new one for each execution",
          code="key_reused",
        )
      await asyncio.shield(earlier.started)
      earlier.execution.check()
      earlier.execution.touch()
      return earlier.execution, True
    if self._closed:
      raise applications.ServiceError(
        503, "the server is stopping", code="ending", retry_s=10.0
      )
    if self.open >= self.limits.capacity:
      raise applications.ServiceError(
        429,
        f"all {self.limits.capacity} executions are taken; terminate one, or"
        " try again later",
        code="no_capacity",
        retry_s=self.limits.retry_after,
      )
    self._check_pixels(pixels)
    execution = Execution(
      gym_id, task, names, lease or self.limits.lease, self.limits, pixels
    )
    self._all[execution.id] = execution

    async def start() -> None:
      try:
        async with self._starting:
          if not execution.live:
            execution.check()  # Ended while it waited for its turn.
          execution.touch()
          await execution.start(make_gym)
      except BaseException:
        # A second create under the key makes a new gym.
        self._keys.pop((gym_id, key), None)
        raise

    started = asyncio.ensure_future(start())
    self._starts.add(started)
    started.add_done_callback(self._started)
    following = asyncio.ensure_future(self._follow(execution))
    self._following.add(following)
    following.add_done_callback(self._following.discard)
    if key:
      self._keys[gym_id, key] = _Keyed(request, execution, started)
      execution.names["key"] = key
    # Shielded: a client that goes away must not cancel the start for another
    # create under the same key.
    await asyncio.shield(started)
    return execution, False

  def _check_pixels(self, pixels: int) -> None:
    """Refuses a screen that is too large beside those of the executions."""
    most = self.limits.max_megapixels
    if pixels > most * 1_000_000:
      raise applications.invalid(
        f"options.gym.width and options.gym.height are {pixels} pixels, and"
        f" all executions have max_megapixels={most}"
      )
    reserved = sum(e.pixels for e in self._all.values())
    if reserved + pixels > most * 1_000_000:
      raise applications.ServiceError(
        429,
        f"the screens of running executions have {reserved} pixels, and"
        f" {pixels} more exceed max_megapixels={most}; terminate one, or try"
        " again later",
        code="no_capacity",
        retry_s=self.limits.retry_after,
      )

  def _started(self, task: asyncio.Task[None]) -> None:
    self._starts.discard(task)
    if not task.cancelled():
      task.exception()  # Retrieved: those that wait raise it.

  async def _follow(self, execution: Execution) -> None:
    """Moves the execution to the ended ones once its gym is closed."""
    await execution.closed.wait()
    self._all.pop(execution.id, None)
    execution.seen = execution.seen and dataclasses.replace(
      execution.seen, screenshot=None
    )
    self._ended[execution.id] = execution
    while len(self._ended) > self.limits.remembered:
      _, old = self._ended.popitem(last=False)
      key = (old.gym_id, old.names.get("key", ""))
      if key in self._keys and self._keys[key].execution is old:
        del self._keys[key]
    self._on_end(execution)

  async def terminate(self, execution: Execution) -> None:
    """Ends an execution and waits for its gym to close; idempotent."""
    execution.end(State.TERMINATED, "terminated by its client", "terminated")
    with contextlib.suppress(asyncio.TimeoutError):
      await asyncio.wait_for(execution.closed.wait(), self.limits.close)

  def reap(self) -> list[Execution]:
    """Ends executions that are idle, too old or lost; returns them."""
    now = time.monotonic()
    reaped = []
    for execution in self.live():
      if execution.state is State.RUNNING and not execution.lease_left_s:
        reason = f"no call for {execution.lease:g} s, its lease"
        code = "lease_expired"
      elif now - execution.created > self.limits.max_seconds:
        reason = f"older than {self.limits.max_seconds:g} s"
        code = "too_old"
      elif execution.gym_is_lost:
        execution.end(State.FAILED, "its process has ended", "worker_died")
        reaped.append(execution)
        continue
      else:
        continue
      execution.end(State.EXPIRED, reason, code)
      reaped.append(execution)
    return reaped

  async def close(self) -> None:
    """Ends all executions; waits for their gyms up to the close deadline."""
    self._closed = True
    waiting = list(self._all.values())
    for execution in waiting:
      execution.end(State.TERMINATED, "the server has ended", "server_ended")
    for task in self._starts:
      task.cancel()
    if waiting:
      await asyncio.wait(
        [asyncio.ensure_future(e.closed.wait()) for e in waiting],
        timeout=self.limits.close,
      )
