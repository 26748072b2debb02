"""Server-sent events of an answer that is being sampled.

Promises: while nothing else is sent a comment is, every few seconds, whatever
is sampled meanwhile; a failure becomes an event, as a stream that is merely
cut looks to clients like one that is complete.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, AsyncIterator, Callable, Iterator, Protocol

import numpy as np
from tunix.rl.multi_turn.core import http_server
from tunix.rl.multi_turn.serving import answers
from tunix.rl.multi_turn.serving import errors
from tunix.rl.multi_turn.serving import fields

KEEP_ALIVE_S = 10.0

News = "asyncio.Queue[tuple[int, np.ndarray] | None]"
"""(number of the choice, int32[S] new tokens), and None at the end."""


NOTHING = 0, np.zeros(0, np.int32)
"""News that there are none."""


class Writer(Protocol):
  """An endpoint's events."""

  last: bytes

  def start(self) -> Iterator[dict[str, Any]]:
    """Before anything was sampled."""

  def tokens(self, index: int, tokens: np.ndarray) -> Iterator[dict[str, Any]]:
    """Of new tokens of a choice."""

  def finish(self, answer: answers.Answer) -> Iterator[dict[str, Any]]:
    """Of what the other events have not told."""

  def failed(self, error: errors.ApiError) -> Iterator[dict[str, Any]]:
    """In place of `finish`."""


async def write(
    writer: Writer,
    task: asyncio.Task[answers.Answer],
    news: News,
    first: tuple[int, np.ndarray] | None,
    as_api: Callable[[Exception], errors.ApiError],
) -> AsyncIterator[bytes]:
  """The body of a stream.

  Args:
    writer: the endpoint's.
    task: samples; cancelled when nobody reads any more.
    news: what it has sampled.
    first: taken from `news` already.
    as_api: what a client is told of a failure.
  """
  try:
    for event in writer.start():
      yield encode(event)
    sent = time.monotonic()
    item = first
    while item is not None:
      for event in writer.tokens(*item):
        yield encode(event)
        sent = time.monotonic()
      while True:
        # Counted from what was sent, not from what was sampled: a call's
        # tokens, say, are told at the end only.
        left = max(0.0, sent + KEEP_ALIVE_S - time.monotonic())
        try:
          item = await asyncio.wait_for(news.get(), left)
          break
        except asyncio.TimeoutError:
          yield b": still sampling\n\n"
          sent = time.monotonic()
    try:
      answer = task.result()
    except Exception as error:  # pylint: disable=broad-except
      for event in writer.failed(as_api(error)):
        yield encode(event)
      return
    for event in writer.finish(answer):
      yield encode(event)
    if writer.last:
      yield writer.last
  finally:
    task.cancel()  # A client that has gone; else it is done.


def encode(data: dict[str, Any]) -> bytes:
  """One event. Those that have a type are named by it."""
  name = f"event: {data['type']}\n" if isinstance(data.get("type"), str) else ""
  told = http_server.event_data(fields.written(data))
  return b"%sdata: %s\n\n" % (name.encode(), told)
