"""What the server keeps of a session beside its interactions.

Answers, so that a repeated request gets the one that is there or on its way;
and the client's caches, so that a turn finds the one before it.
"""

from __future__ import annotations

import asyncio
import collections
from typing import Any

from tunix.rl.multi_turn.serving import answers
from tunix.rl.multi_turn.serving import errors


class Turns:
  """What is kept of a session beside its interactions.

  Attributes:
    by_body: hash of a body -> its answer, there or on its way. It is sampled
      for all who ask, and cancelled when none of them is left. Those that are
      no interaction of the session are kept for the last few bodies only.
    count: requests so far, for their seeds.
    closed: no cache is kept any more.
  """

  _KEPT = 8  # Caches a session may hold; an engine evicts idle ones anyway.
  _UNSTORED = 64  # Answers that nothing but a repeated request asks for.

  def __init__(self, session_id: str):
    self.by_body: dict[str, asyncio.Task[answers.Answer]] = {}
    self._unstored: collections.OrderedDict[str, None] = (
        collections.OrderedDict()
    )
    self._asking: collections.Counter[asyncio.Task[Any]] = collections.Counter()
    self.count = 0
    self.closed = False
    self._id = session_id
    self._made = 0
    self._cache_of: dict[str, str] = {}  # Interaction -> the client's session.
    self._idle: collections.OrderedDict[str, None] = collections.OrderedDict()

  async def wait_for(
      self, task: asyncio.Task[answers.Answer], key: str
  ) -> answers.Answer:
    self._asking[task] += 1
    try:
      return await asyncio.shield(task)
    except asyncio.CancelledError:
      if self.closed and task.cancelled():
        raise errors.ApiError(
            409, "the session was ended", code="session_ended"
        ) from None
      raise
    finally:
      self._asking[task] -= 1
      if not self._asking[task]:
        del self._asking[task]
        if not task.done():
          # Gone at once: who asks now must not wait for what is cancelled.
          if self.by_body.get(key) is task:
            del self.by_body[key]
          task.cancel()
          await asyncio.wait({task})  # Its slot is free when this returns.

  def ended(
      self, key: str, task: asyncio.Task[answers.Answer], stored: bool
  ) -> None:
    """A request that failed is a new one when it is repeated; an answer that is
    not `stored` as an interaction is kept for a while."""
    failed = task.cancelled() or task.exception() is not None
    if self.by_body.get(key) is not task:
      return
    if failed:
      del self.by_body[key]
    elif not stored:
      self._unstored[key] = None
      if len(self._unstored) > self._UNSTORED:
        del self.by_body[self._unstored.popitem(last=False)[0]]

  def take_cache(self, parent: str | None) -> str:
    """The client's session that holds `parent`'s tokens, or a new one."""
    name = self._cache_of.get(parent) if parent else None
    if name in self._idle:
      del self._idle[name]
      return name
    self._made += 1
    return f"{self._id}/{self._made}"

  def give_back(self, name: str, interaction: str | None) -> list[str]:
    """Ends the use of a client's session; returns those to release."""
    if interaction is not None:
      self._cache_of[interaction] = name
    self._idle[name] = None
    gone = []
    while len(self._idle) > (0 if self.closed else self._KEPT):
      gone.append(self._idle.popitem(last=False)[0])
    return gone

  def close(self) -> list[str]:
    """Ends all of it; returns the client's sessions to release."""
    self.closed = True
    for task in list(self._asking):
      task.cancel()
    return list(self._idle)
