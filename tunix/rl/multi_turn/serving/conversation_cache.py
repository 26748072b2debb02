"""Conversations that a later request may go on with by naming an answer.

Promises: memory is bounded: the least recently used are forgotten first; what
was said in a session is not found outside of it, or in another one.

Images are held by reference only. One event loop.
"""

from __future__ import annotations

import collections
from typing import Any, Sequence

from tunix.rl.multi_turn.serving import errors
from tunix.rl.multi_turn.serving import requests


class Remembered:
  """Messages by the answer that they end with."""

  def __init__(self, max_answers: int = 4096, max_characters: int = 64 << 20):
    """Args:

      max_answers: kept at a time.
      max_characters: of their messages, counted anew for each answer, though
        the answers of one conversation share what they hold.
    """
    self._max_answers = max_answers
    self._max_characters = max_characters
    self._characters = 0
    self._kept: collections.OrderedDict[
        str, tuple[str | None, tuple[requests.Message, ...], int]
    ] = collections.OrderedDict()

  def put(
      self,
      answer_id: str,
      session: str | None,
      messages: Sequence[requests.Message],
  ) -> None:
    """Keeps `messages`, the answer being the last, for `session` only."""
    self._forget(answer_id)
    size = sum(map(_characters, messages))
    self._kept[answer_id] = session, tuple(messages), size
    self._characters += size
    while (
        len(self._kept) > self._max_answers
        or self._characters > self._max_characters
    ):
      self._forget(next(iter(self._kept)))

  def get(
      self, answer_id: str, session: str | None
  ) -> tuple[requests.Message, ...]:
    """Messages up to and with the answer.

    Raises:
      ApiError: it is not known, or not to this session.
    """
    owner, messages, _ = self._kept.get(answer_id, (None, None, 0))
    if messages is None or owner != session:
      raise errors.ApiError(
          404,
          f"no response {answer_id!r} is kept here, or not any more; send its"
          " input and output items again",
          code="previous_response_not_found",
          param="previous_response_id",
      )
    self._kept.move_to_end(answer_id)
    return messages

  def drop_session(self, session: str) -> None:
    for answer_id, (owner, *_) in list(self._kept.items()):
      if owner == session:
        self._forget(answer_id)

  def _forget(self, answer_id: str) -> None:
    _, _, size = self._kept.pop(answer_id, (None, (), 0))
    self._characters -= size


def _characters(message: Any) -> int:
  """Of all its texts; 64 more for what holds them."""
  if isinstance(message, str):
    return 64 + len(message)
  if isinstance(message, dict):
    return 64 + sum(map(_characters, message.values()))
  if isinstance(message, (list, tuple)):
    return 64 + sum(map(_characters, message))
  return 64
