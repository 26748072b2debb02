"""Sessions over HTTP, as AReaL calls them: started, rewarded, ended, exported.

Promises: putting an export together holds up nobody: it is done in one thread
for all of them, a sequence at a time, and sent as it is done; a client that
reads slowly holds up itself. An export that drops its session ends it first:
nothing is answered or rewarded that is not in it. The session is forgotten once
all of it was sent; when the connection breaks before, it can be exported again.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
from typing import Any, AsyncIterator, Callable, Iterator

import numpy as np
import orjson
from starlette import requests as starlette_requests
from starlette import responses as starlette_responses
from tunix.rl.multi_turn.serving import errors
from tunix.rl.multi_turn.serving import exports
from tunix.rl.multi_turn.serving import fields
from tunix.rl.multi_turn.serving import service as service_lib

Request = starlette_requests.Request
Response = starlette_responses.Response

_LONGEST_NAME = 256  # Characters of a request's name.
_AT_ONCE = 4096  # Numbers that are encoded without letting others go on.


class SessionRoutes:
  """The handlers of these routes."""

  def __init__(
      self,
      service: service_lib.Service,
      read_object: Callable[[Request], Any],
      check_own: Callable[[Request, str | None], None],
  ):
    """Args:

      service: holds the sessions.
      read_object: the JSON object of a request.
      check_own: refuses a session's key where another session is meant, or
        none is.
    """
    self._service = service
    self._read = read_object
    self._check_own = check_own
    self._going: collections.Counter[str] = collections.Counter()
    self._thread = concurrent.futures.ThreadPoolExecutor(1, "tunix-export")

  def close(self) -> None:
    self._thread.shutdown(wait=False, cancel_futures=True)

  async def start(self, request: Request) -> Response:
    self._check_own(request, None)
    body = await self._read(request)
    fields.refuse_others(body, {"task_id"})
    task = body.get("task_id")
    task = "" if task in (None, "") else fields.string(body, "task_id")
    name = request.headers.get("idempotency-key", "")
    if len(name) > _LONGEST_NAME:
      raise errors.invalid(
          "Idempotency-Key",
          f"Idempotency-Key has {len(name)} characters, at most"
          f" {_LONGEST_NAME} are taken",
      )
    session = self._service.start(task, name)
    base = str(request.base_url).rstrip("/")
    return starlette_responses.JSONResponse({
        "session_id": session.id,
        "api_key": session.key,
        "base_url": f"{base}/sessions/{session.id}/v1",
    })

  async def set_reward(self, request: Request) -> Response:
    body = await self._read(request)
    fields.refuse_others(body, {"reward", "interaction_id"})
    reward = body.get("reward")
    if not isinstance(reward, (int, float)) or isinstance(reward, bool) or (
        not abs(reward) < 1e30
    ):
      raise errors.invalid(
          "reward", f"reward must be a number, got {fields.shown(reward)}"
      )
    name = body.get("interaction_id")
    if name is not None:
      name = fields.string(body, "interaction_id")
    session = request.state.session
    if self._going[session.id]:
      raise errors.ApiError(
          409,
          "the session is being exported and dropped; set rewards before that",
          code="session_ended",
      )
    with service_lib.told():
      session.set_reward(name, float(reward))
    return starlette_responses.JSONResponse({"message": "success"})

  async def end(self, request: Request) -> Response:
    session = request.state.session
    with service_lib.told():
      session.end()
    await self._service.forget(session.id)
    return starlette_responses.JSONResponse({"message": "success"})

  async def export(self, request: Request) -> Response:
    body = await self._read(request)
    fields.refuse_others(body, {"session_id", "style", "discount", "drop"})
    name = fields.string(body, "session_id")
    self._check_own(request, name)
    session = self._service.session(name)
    style = body.get("style", "individual")
    if style not in exports.STYLES:
      raise errors.invalid(
          "style",
          f"style must be one of {', '.join(exports.STYLES)}, got"
          f" {fields.shown(style)}",
      )
    discount = body.get("discount", 1.0)
    if discount is None:
      raise errors.invalid(
          "discount", "discount must be a number in [0, 1], got None"
      )
    discount = fields.number(body, "discount", 1.0, 0.0, 1.0)
    drop = fields.flag(body, "drop")
    if drop:
      # What is still on its way is told so, and is not in the export.
      session.end()
      await self._service.forget(name)
      sent = self._dropping(session, style, discount)
    else:
      with service_lib.told():
        sent = self._sent(session.exporter(style, discount))
    return starlette_responses.StreamingResponse(
        sent, media_type="application/json"
    )

  async def _sent(self, found: exports.Exporter) -> AsyncIterator[bytes]:
    pieces = _encoded(found)
    loop = asyncio.get_running_loop()
    while piece := await loop.run_in_executor(self._thread, next, pieces, b""):
      yield piece

  async def _dropping(
      self, session: Any, style: str, discount: float
  ) -> AsyncIterator[bytes]:
    """The body; the session, ended, is dropped once all of it was taken."""
    self._going[session.id] += 1
    try:
      async for piece in self._sent(session.exporter(style, discount)):
        yield piece
      await self._service.drop(session.id)
    finally:
      self._going[session.id] -= 1
      if not self._going[session.id]:
        del self._going[session.id]


def _encoded(found: exports.Exporter) -> Iterator[bytes]:
  """The JSON text of an export, a sequence at a time."""
  separator = b'{"interactions": {'
  for one in found:
    # AReaL's arrays as lists; images are told by reference, beside them.
    row = exports.to_tensor_dict(one, lambda spans: {})
    tensors = b", ".join(
        b"%s: %s" % (orjson.dumps(k), _array(v))
        for k, v in row.items()
        if isinstance(v, np.ndarray)
    )
    about = orjson.dumps({
        "interaction_id": one.id,
        "reward": one.reward,
        "images": [
            {
                "sha256": span.image.sha256,
                "width": span.image.width,
                "height": span.image.height,
                "offset": span.offset,
                "num_tokens": span.num_tokens,
            }
            for span in one.sequence.images
        ],
    })
    # Beside the tensors, all of which every row of AReaL's batches must have.
    known = b'"turn_ids": ' + _array(one.sequence.turn_ids)
    if one.sequence.entropies is not None:
      known += b', "entropies": ' + _array(one.sequence.entropies)
    yield b'%s%s: %s, %s, "tensor_dict": {%s}}' % (
        separator,
        orjson.dumps(one.id),
        about[:-1],
        known,
        tensors,
    )
    separator = b", "
  yield b"}}" if separator == b", " else b'{"interactions": {}}'


def _array(values: np.ndarray) -> bytes:
  """JSON of float or integer numbers of one or two axes."""
  if values.ndim > 1:
    return b"[%s]" % b", ".join(map(_array, values))
  if values.dtype == np.float32:
    values = values.astype(np.float64)  # All digits, as answers tell them.
  parts = (
      orjson.dumps(
          np.ascontiguousarray(values[i : i + _AT_ONCE]),
          option=orjson.OPT_SERIALIZE_NUMPY,
      )[1:-1]
      for i in range(0, len(values), _AT_ONCE)
  )
  return b"[%s]" % b", ".join(parts)
