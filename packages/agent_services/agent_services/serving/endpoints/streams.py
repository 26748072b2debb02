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
from tunix.rl.multi_turn.net import http_server

from agent_services.serving import answers
from agent_services.serving import bodies
from agent_services.serving import errors
from agent_services.serving import requests

KEEP_ALIVE_S = 10.0

News = asyncio.Queue[tuple[int, np.ndarray] | None]
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
    path: Path below the API's root, "chat/completions".
    prefix: Prefix of answers' ids.
    body: Model of its bodies.
    read: Checks a body.
    to_json: Returns the JSON object of an answer that is not streamed.
    stream: Returns the writer of events for (request, answer id, seconds of
      creation, decoder).
  """

  path: str
  prefix: str
  body: type[pydantic.BaseModel]
  read: Callable[
    [Mapping[str, Any], requests.RequestLimits], requests.SamplingRequest
  ]
  to_json: Callable[
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
    writer: Event writer of the endpoint.
    task: Task that samples; cancelled when the client has gone.
    news: Queue of the tokens that the task samples.
    first: First item of `news`, taken already.
    as_api: Returns the error that a client receives for a failure.
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
        remaining = max(0.0, sent + KEEP_ALIVE_S - time.monotonic())
        try:
          item = await asyncio.wait_for(news.get(), remaining)
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
  """Returns one event, named by its type where it has one."""
  name = f"event: {data['type']}\n" if isinstance(data.get("type"), str) else ""
  text = http_server.event_data(bodies.write_json(data))
  return b"%sdata: %s\n\n" % (name.encode(), text)


class _Stream:
  """Base of the `EventWriter`s: the request, and the text of each choice."""

  def __init__(
    self,
    request: requests.SamplingRequest,
    answer_id: str,
    created: int,
    decoder: answers.TokenDecoder,
  ):
    self._request = request
    self._id = answer_id
    self._created = created
    self._decoder = decoder
    self._texts = [
      answers.TextStream(decoder, request.stop) for _ in range(request.choices)
    ]

  def tokens(self, index: int, tokens: np.ndarray) -> Iterator[dict[str, Any]]:
    if self._request.parse_tools:  # Text and calls are separated at the end.
      return
    if new := self._texts[index].feed(tokens):
      yield from self._news(index, new)

  def _news(self, index: int, text: str) -> Iterator[dict[str, Any]]:
    """Events of new text."""
    raise NotImplementedError


class AnswerStream(_Stream):
  """Base of the `EventWriter`s of endpoints with one choice.

  Its text is an item of the answer, which begins with the first text.
  """

  last = b""
  _begun = False  # The item of text.

  def _news(self, index: int, text: str) -> Iterator[dict[str, Any]]:
    del index
    yield from self._delta(text)

  def _delta(self, text: str) -> Iterator[dict[str, Any]]:
    if not self._begun:
      self._begun = True
      yield from self._begin()
    if text:
      yield self._new(text)

  def _begin(self) -> Iterator[dict[str, Any]]:
    """Events before the first text."""
    raise NotImplementedError

  def _new(self, text: str) -> dict[str, Any]:
    """Returns the event of new text."""
    raise NotImplementedError


class ChoiceStream(_Stream):
  """Base of the `EventWriter`s of chat completions and completions.

  Attributes:
    kind: Value of an event's `object`.
  """

  last = b"data: [DONE]\n\n"
  kind: str

  @property
  def _head(self) -> dict[str, Any]:
    return {
      "id": self._id,
      "object": self.kind,
      "created": self._created,
      "model": self._request.model,
    }

  def start(self) -> Iterator[dict[str, Any]]:
    return iter(())

  def _news(self, index: int, text: str) -> Iterator[dict[str, Any]]:
    yield self._chunk(index, self._new(text))

  def finish(self, answer: answers.SampledAnswer) -> Iterator[dict[str, Any]]:
    for i in range(self._request.choices):
      yield from self._ending(answer, i)
    if self._request.include_usage:
      yield {**self._head, "choices": [], "usage": answers.usage(answer)}

  def failed(self, error: errors.ApiError) -> Iterator[dict[str, Any]]:
    yield error.body()

  def _new(self, text: str) -> dict[str, Any]:
    """Returns the field with new text."""
    raise NotImplementedError

  def _ending(
    self, answer: answers.SampledAnswer, index: int
  ) -> Iterator[dict[str, Any]]:
    """Returns a choice's last events."""
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
