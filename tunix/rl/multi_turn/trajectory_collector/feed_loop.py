"""The loop that fills a run's queue, whatever door its groups come by.

A door is a subclass, which says where groups come from: `CollectLoop` plays
them, those of `run.recorded_data` lease them from a rollout buffer, get them of
a rollout function, or read them from files.

Promises: a group is begun only when the queue admits it, and not during a hold;
the consumer never waits for a loop that has ended: a crash reaches it through
`queue.fail`, the end of the groups through `queue.close`; `stop` is clean; the
state that a resumed run needs is JSON.

Does not: know how a group is trained on.
"""

from __future__ import annotations

import asyncio
import collections
import threading
from typing import Any, Callable, Iterable, Sequence

from tunix.rl.queue import group_queue


class FeedLoop:
  """See the module docstring. `await run()`.

  Attributes:
    over: Why no more groups will be begun; "" while there may be.
    counts: What became of the groups, among them `accepted`.
  """

  def __init__(self, queue: group_queue.GroupQueue):
    self.over = ""
    self.counts: collections.Counter[str] = collections.Counter()
    self._queue = queue
    self._lock = threading.Lock()
    self._loop: asyncio.AbstractEventLoop | None = None
    self._feeder: asyncio.Task[None] | None = None
    self._running: set[asyncio.Task[None]] = set()
    self._changed = asyncio.Event()
    self._held = False
    self._released = asyncio.Event()
    self._crash: BaseException | None = None
    self._stopping = False

  # --- of a subclass ----------------------------------------------------------

  async def _feed(self) -> None:
    """Begins groups until no more will come; those of `_running` go on."""
    raise NotImplementedError

  def state_dict(self) -> dict[str, Any]:
    """JSON from which a resumed run goes on."""
    raise NotImplementedError

  def finish(self) -> None:
    """Waits for what follows the last checkpoint, with a deadline."""

  # --- running ----------------------------------------------------------------

  async def run(self) -> None:
    """Feeds the queue until the groups end, `stop`, or the queue's close.

    Raises:
      Exception: the loop's crash; the queue's consumer gets it too.
    """
    self._loop = asyncio.get_running_loop()
    feeder = self._feeder = asyncio.ensure_future(self._feed())
    feeder.add_done_callback(self._ended_one)
    if self._stopping:
      feeder.cancel()
    try:
      await self._watch(feeder)
    except BaseException as e:
      self._stop_now()
      await asyncio.gather(feeder, *self._running, return_exceptions=True)
      if isinstance(e, (group_queue.QueueClosed, asyncio.CancelledError)):
        self._queue.close()
        if isinstance(e, asyncio.CancelledError):
          raise
      else:
        self._queue.fail(e)
        raise
    else:
      self._queue.close()

  def stop(self) -> None:
    """Begins no more groups. Thread-safe, returns at once.

    Groups under way are cancelled, and stay in `state_dict` as unfinished.
    """
    self._stopping = True
    self._post(self._stop_now)

  def hold(self) -> None:
    """Begins no group until `release`; those begun finish. Thread-safe."""
    self._held = True

  def release(self) -> None:
    """Ends `hold`. Thread-safe, idempotent."""
    self._held = False
    self._post(self._released.set)

  def _post(self, callback: Callable[[], object]) -> None:
    """Calls back on the loop, if it runs. Thread-safe."""
    if self._loop is not None:
      try:
        self._loop.call_soon_threadsafe(callback)
      except RuntimeError:  # The loop has ended already.
        pass

  def _stop_now(self) -> None:
    for task in filter(None, (self._feeder, *self._running)):
      task.cancel()

  async def _watch(self, feeder: asyncio.Task[None]) -> None:
    """Waits for the feeder and every group; the first failure goes through."""
    while self._running or not feeder.done():
      await self._changed.wait()
      self._changed.clear()
      if self._crash is not None:
        raise self._crash
    if feeder.cancelled() and not self._stopping:
      raise asyncio.CancelledError("the loop's feeder was cancelled")

  def _ended_one(self, task: asyncio.Task[None]) -> None:
    self._running.discard(task)
    if not task.cancelled() and task.exception() is not None:
      self._crash = self._crash or task.exception()
    self._changed.set()

  # --- admission --------------------------------------------------------------

  async def _admit(
    self, indices: Sequence[int | None]
  ) -> list[group_queue.Ticket]:
    """Tickets of a group's parts, as of the end of a hold.

    Args:
      indices: See `GroupQueue.acquire_parts_async`.
    """
    tickets = await self._queue.acquire_parts_async(indices)
    try:
      while self._held:
        while self._held:
          self._released.clear()
          await self._released.wait()
        tickets = [self._queue.refresh_start(t) for t in tickets]
    except BaseException:
      self._release(tickets)
      raise
    return tickets

  def _release(self, tickets: Iterable[group_queue.Ticket]) -> bool:
    """Releases tickets of which some may have been put or released.

    Returns:
      Whether it released one.
    """
    released = False
    for ticket in tickets:
      try:
        self._queue.release_start(ticket)
        released = True
      except ValueError:
        pass  # Put, or its put was under way and has been completed.
    return released
