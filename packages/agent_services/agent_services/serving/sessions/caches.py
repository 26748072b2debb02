"""Caches answers and conversations that later requests refer to.

`SessionCache` is a session's part beside its interactions: answers, so that a
repeated request gets the one that exists or is being sampled, and the client's
caches, so that a turn finds the one before it. `ConversationCache` holds the
conversations that a request continues by naming an answer.

Promises: memory is bounded: the least recently used conversations go first; a
session's conversations are found in that session only.

Images are held by reference only. One event loop.
"""

from __future__ import annotations

import asyncio
import collections
from typing import Any, Sequence

from agent_services.serving import answers
from agent_services.serving import errors
from agent_services.serving import requests


class SessionCache:
  """A session's answers by their bodies, and its caches in the client.

  Attributes:
    by_body: hash of a body -> the task of its answer. One task serves all
      requests with that body, and is cancelled when none of them is left. An
      answer that is not an interaction of the session is kept for the last few
      bodies only.
    count: Number of requests, for their seeds.
    closed: Whether the session has ended, so that no cache is held.
  """

  _KEPT = 8  # Caches a session may hold; an engine evicts idle ones anyway.
  _UNSTORED = 64  # Answers that only a repeated request asks for.

  def __init__(self, session_id: str):
    self.by_body: dict[str, asyncio.Task[answers.SampledAnswer]] = {}
    self._unstored: collections.OrderedDict[str, None] = (
      collections.OrderedDict()
    )
    self._waiting: collections.Counter[asyncio.Task[Any]] = (
      collections.Counter()
    )
    self.count = 0
    self.closed = False
    self._id = session_id
    self._made = 0
    self._cache_of: dict[str, str] = {}  # Interaction -> the client's session.
    self._idle: collections.OrderedDict[str, None] = collections.OrderedDict()

  async def wait_for(
    self, task: asyncio.Task[answers.SampledAnswer], key: str
  ) -> answers.SampledAnswer:
    self._waiting[task] += 1
    try:
      return await asyncio.shield(task)
    except asyncio.CancelledError:
      if self.closed and task.cancelled():
        raise errors.ApiError(
          409, "the session was ended", code="session_ended"
        ) from None
      raise
    finally:
      self._waiting[task] -= 1
      if not self._waiting[task]:
        del self._waiting[task]
        if not task.done():
          # At once: a new request must not wait for a cancelled task.
          if self.by_body.get(key) is task:
            del self.by_body[key]
          task.cancel()
          await asyncio.wait({task})  # Its slot is free when this returns.

  def ended(
    self, key: str, task: asyncio.Task[answers.SampledAnswer], stored: bool
  ) -> None:
    """Forgets a request that failed, so that a repetition is a new one, and
    later the answer that is not `stored` as an interaction."""
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
    """Returns the client's session with `parent`'s tokens, or a new one."""
    name = self._cache_of.get(parent) if parent else None
    if name is not None and name in self._idle:
      del self._idle[name]
      return name
    self._made += 1
    return f"{self._id}/{self._made}"

  def give_back(self, name: str, interaction: str | None) -> list[str]:
    """Ends the use of a client's session; returns those to release."""
    if interaction is not None:
      self._cache_of[interaction] = name
    self._idle[name] = None
    evicted = []
    while len(self._idle) > (0 if self.closed else self._KEPT):
      evicted.append(self._idle.popitem(last=False)[0])
    return evicted

  def close(self) -> list[str]:
    """Cancels all requests; returns the client's sessions to release."""
    self.closed = True
    for task in list(self._waiting):
      task.cancel()
    return list(self._idle)


Answered = tuple[requests.SamplingRequest, answers.SampledAnswer]


class ConversationCache:
  """Messages by the answer that they end with."""

  def __init__(self, max_answers: int = 4096, max_characters: int = 64 << 20):
    """Args:

    max_answers: Largest number of answers.
    max_characters: Largest number of characters of their messages, counted
      anew for each answer, though the answers of one conversation share their
      contents.
    """
    self._max_answers = max_answers
    self._max_characters = max_characters
    self._characters = 0
    self._kept: collections.OrderedDict[
      str, tuple[str | None, tuple[requests.Message, ...], int, Answered]
    ] = collections.OrderedDict()

  def put(
    self,
    answer_id: str,
    session: str | None,
    messages: Sequence[requests.Message],
    answered: Answered,
  ) -> None:
    """Keeps an answer for `session` only.

    Args:
      answer_id: Id of the answer.
      session: Id of the session that the request belongs to; None for none.
      messages: Messages of the conversation, the answer being the last.
      answered: The request, without its messages, and the answer.
    """
    self._forget(answer_id)
    size = sum(map(_characters, messages))
    self._kept[answer_id] = session, tuple(messages), size, answered
    self._characters += size
    while (
      len(self._kept) > self._max_answers
      or self._characters > self._max_characters
    ):
      self._forget(next(iter(self._kept)))

  def get(
    self, answer_id: str, session: str | None
  ) -> tuple[requests.Message, ...]:
    """Returns the messages up to the answer, the answer included.

    Raises:
      ApiError: The answer is unknown, or another session's.
    """
    return self._own(
      answer_id,
      session,
      "; send its input and output items again",
      code="previous_response_not_found",
      param="previous_response_id",
    )[1]

  def answer(self, answer_id: str, session: str | None) -> Answered:
    """Returns the request, without its messages, and its answer.

    Raises:
      ApiError: The answer is unknown, or another session's.
    """
    return self._own(answer_id, session, "", code="response_not_found")[3]

  def _own(
    self, answer_id: str, session: str | None, advice: str, **fields: str
  ) -> Any:
    entry = self._kept.get(answer_id)
    if entry is None or entry[0] != session:
      raise errors.ApiError(
        404,
        f"no response {answer_id!r} is kept here any more{advice}",
        **fields,  # type: ignore[arg-type]
      )
    self._kept.move_to_end(answer_id)
    return entry

  def drop_session(self, session: str) -> None:
    for answer_id, (owner, *_) in list(self._kept.items()):
      if owner == session:
        self._forget(answer_id)

  def _forget(self, answer_id: str) -> None:
    entry = self._kept.pop(answer_id, None)
    self._characters -= entry[2] if entry else 0


def _characters(message: object) -> int:
  """Returns the number of characters of a message, and 64 for each value."""
  if isinstance(message, str):
    return 64 + len(message)
  if isinstance(message, dict):
    return 64 + sum(map(_characters, message.values()))
  if isinstance(message, (list, tuple)):
    return 64 + sum(map(_characters, message))
  return 64
