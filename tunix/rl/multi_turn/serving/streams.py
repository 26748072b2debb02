"""Writes the server-sent events of an answer that is being sampled.

Promises: a comment is sent every few seconds in which no event is, whatever is
sampled meanwhile; a failure becomes an event, as a stream that is merely cut
looks complete to clients.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any, AsyncIterator, Callable, Iterator, Mapping, Protocol

import numpy as np
import pydantic
from tunix.rl.multi_turn.core import http_server
from tunix.rl.multi_turn.serving import answers
from tunix.rl.multi_turn.serving import bodies
from tunix.rl.multi_turn.serving import errors
from tunix.rl.multi_turn.serving import requests

KEEP_ALIVE_S = 10.0

News = "asyncio.Queue[tuple[int, np.ndarray] | None]"
"""(number of the choice, int32[S] new tokens), and None at the end."""

NOTHING = 0, np.zeros(0, np.int32)
"""News without a token."""


class EventWriter(Protocol):
  """Makes an endpoint's events."""

  last: bytes

  def start(self) -> Iterator[dict[str, Any]]:
    """Events before anything was sampled."""

  def tokens(self, index: int, tokens: np.ndarray) -> Iterator[dict[str, Any]]:
    """Events of a choice's new tokens."""

  def finish(self, answer: answers.SampledAnswer) -> Iterator[dict[str, Any]]:
    """Events with the rest of the answer."""

  def failed(self, error: errors.ApiError) -> Iterator[dict[str, Any]]:
    """Events in place of `finish`."""


@dataclasses.dataclass(frozen=True)
class Endpoint:
  """An endpoint that samples.

  Attributes:
    path: below the API's root, "chat/completions".
    prefix: of answers' ids.
    body: model of its bodies.
    read: checks a body.
    whole: the JSON object of an answer that is not streamed.
    stream: (request, answer id, seconds of creation, decoder) -> its events.
  """

  path: str
  prefix: str
  body: type[pydantic.BaseModel]
  read: Callable[
      [Mapping[str, Any], requests.RequestLimits], requests.SamplingRequest
  ]
  whole: Callable[
      [requests.SamplingRequest, answers.SampledAnswer, answers.TokenDecoder],
      dict[str, Any],
  ]
  stream: Callable[
      [requests.SamplingRequest, str, int, answers.TokenDecoder], EventWriter
  ]


async def write(
    writer: EventWriter,
    task: asyncio.Task[answers.SampledAnswer],
    news: News,
    first: tuple[int, np.ndarray] | None,
    as_api: Callable[[Exception], errors.ApiError],
) -> AsyncIterator[bytes]:
  """Yields the body of a stream.

  Args:
    writer: the endpoint's.
    task: samples; cancelled when the client has gone.
    news: the tokens that it samples.
    first: taken from `news` already.
    as_api: the error that a client receives for a failure.
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
        # Counted from the last event, not from the last token: a call's tokens
        # are sent at the end only.
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
    task.cancel()  # Does nothing unless the client has gone.


def encode(data: dict[str, Any]) -> bytes:
  """One event, named by its type where it has one."""
  name = f"event: {data['type']}\n" if isinstance(data.get("type"), str) else ""
  text = http_server.event_data(bodies.write_json(data))
  return b"%sdata: %s\n\n" % (name.encode(), text)


class ChoiceStream:
  """Base of the `EventWriter`s of chat completions and completions.

  Attributes:
    kind: of an event's object.
  """

  last = b"data: [DONE]\n\n"
  kind: str

  def __init__(
      self,
      asked: requests.SamplingRequest,
      answer_id: str,
      created: int,
      decoder: answers.TokenDecoder,
  ):
    self._asked = asked
    self._head = {
        "id": answer_id,
        "object": self.kind,
        "created": created,
        "model": asked.model,
    }
    self._decoder = decoder
    self._texts = [
        answers.TextStream(decoder, asked.stop) for _ in range(asked.choices)
    ]

  def start(self) -> Iterator[dict[str, Any]]:
    return iter(())

  def tokens(self, index: int, tokens: np.ndarray) -> Iterator[dict[str, Any]]:
    if self._asked.parse_tools:  # Content and calls are separated at the end.
      return
    if new := self._texts[index].feed(tokens):
      yield self._chunk(index, self._new(new))

  def finish(self, answer: answers.SampledAnswer) -> Iterator[dict[str, Any]]:
    for i in range(self._asked.choices):
      yield from self._ending(answer, i)
    if self._asked.include_usage:
      yield {**self._head, "choices": [], "usage": answers.usage(answer)}

  def failed(self, error: errors.ApiError) -> Iterator[dict[str, Any]]:
    yield error.body()

  def _new(self, text: str) -> dict[str, Any]:
    """The field with new text."""
    raise NotImplementedError

  def _ending(
      self, answer: answers.SampledAnswer, index: int
  ) -> Iterator[dict[str, Any]]:
    """A choice's last events."""
    raise NotImplementedError

  def _chunk(
      self, index: int, new: Mapping[str, Any], **ending: Any
  ) -> dict[str, Any]:
    choice = {
        "index": index,
        **new,
        "finish_reason": None,
        "logprobs": None,
        **ending,
    }
    return {**self._head, "choices": [choice]}
