"""Serves sessions over HTTP with AReaL's calls: start, reward, end, export.

Promises: one thread puts all exports together and sends one sequence at a time,
so that neither an export nor a slow reader delays other requests. An export
that drops its session ends it first: it holds every answer and reward that was
accepted. The session is dropped once all of it was sent; if the connection
breaks before, it can be exported again. Arrays are lists of numbers, or what
AReaL's `deserialize_value` reads as torch tensors: the same numbers.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import concurrent.futures
import dataclasses
import logging
from typing import Annotated, Any, AsyncIterator, Callable, Iterator, Literal

import numpy as np
import orjson
import pydantic
from starlette import requests as starlette_requests
from starlette import responses as starlette_responses

from agent_services.serving import bodies
from agent_services.serving import errors
from agent_services.serving import service as service_lib
from agent_services.serving.sessions import interactions
from agent_services.serving.sessions import session_sampling

Request = starlette_requests.Request
Response = starlette_responses.Response
Writer = Callable[[np.ndarray], bytes]

_LOG = logging.getLogger(__name__)
_LONGEST_NAME = 256  # Characters of a request's name.
_AT_ONCE = 4096  # Numbers encoded in one call, which holds the GIL.
_MAX_REWARD = 1e30

ARRAYS = ("lists", "tensors")
"""How an export writes arrays: as lists, or as AReaL's serialised tensors."""


class SamplingFields(bodies.Body):
  """The distribution of a session's trainable tokens."""

  temperature: Annotated[float, bodies.Range(0.0, 100.0)] | None = None
  top_p: Annotated[float, bodies.Range(0.0, 1.0, above=True)] | None = None
  top_k: Annotated[int, bodies.Range(-1, 1 << 30)] | None = None
  min_p: Annotated[float, bodies.Range(0.0, 1.0)] | None = None


class StartBody(bodies.Body):
  """A body of `/rl/start_session`."""

  task_id: Annotated[
    str,
    pydantic.Field(max_length=bodies.MAX_NAME),
    bodies.Must(f"must be a string of up to {bodies.MAX_NAME} characters"),
  ] = ""
  sampling: SamplingFields | None = None
  other_sampling: (
    Annotated[
      Literal["mask", "refuse", "train"],
      bodies.Must("must be one of mask, refuse, train"),
    ]
    | None
  ) = None

  def session_sampling(
    self, default: session_sampling.SessionSampling
  ) -> session_sampling.SessionSampling:
    """Returns the session's sampling; the server's fills fields left out."""
    changes: dict[str, Any] = {}
    if self.sampling is not None:
      changes = self.sampling.model_dump(exclude_none=True)
    if "top_k" in changes:
      changes["top_k"] = max(0, changes["top_k"])
    if self.other_sampling is not None:
      changes["other"] = self.other_sampling
    return dataclasses.replace(default, **changes)


class RewardBody(bodies.Body):
  """A body of `/sessions/{id}/rl/set_reward`; None is the last answer's."""

  reward: Annotated[
    float,
    pydantic.Field(gt=-_MAX_REWARD, lt=_MAX_REWARD),
    bodies.Must("must be a number"),
  ]
  interaction_id: bodies.Name | None = None


class ExportBody(bodies.Body):
  """A body of `/export_trajectories`."""

  KEEPS_NULL = frozenset({"style", "discount", "arrays"})

  session_id: bodies.Name
  style: Annotated[
    Literal["individual", "concat"],
    bodies.Must("must be one of individual, concat"),
  ] = "individual"
  discount: Annotated[float, bodies.Range(0.0, 1.0)] = 1.0
  drop: bodies.Flag = False
  arrays: Annotated[
    Literal["", "lists", "tensors"],
    bodies.Must("must be one of lists, tensors"),
  ] = ""


class SessionRoutes:
  """Handles the routes of sessions."""

  def __init__(
    self,
    service: service_lib.Service,
    read_object: Callable[[Request], Any],
    check_own: Callable[[Request, str | None], None],
    arrays: str = "lists",
  ):
    """Args:

      service: Service with the sessions.
      read_object: Reads the JSON object of a request.
      check_own: Refuses a session's key where the request is about another
        session, or about none.
      arrays: One of `ARRAYS`, where a request for an export names none.

    Raises:
      ValueError: `arrays` is another.
    """
    if arrays not in ARRAYS:
      raise ValueError(
        f"arrays must be one of {', '.join(ARRAYS)}; got {arrays!r}"
      )
    self._arrays = arrays
    self._service = service
    self._read = read_object
    self._check_own = check_own
    self._dropped: collections.Counter[str] = collections.Counter()
    self._thread = concurrent.futures.ThreadPoolExecutor(1, "tunix-export")

  def close(self) -> None:
    self._thread.shutdown(wait=False, cancel_futures=True)

  async def start(self, request: Request) -> Response:
    self._check_own(request, None)
    fields = bodies.parse(StartBody, await self._read(request))
    name = request.headers.get("idempotency-key", "")
    if len(name) > _LONGEST_NAME:
      raise errors.invalid(
        "Idempotency-Key",
        f"Idempotency-Key has {len(name)} characters, at most"
        f" {_LONGEST_NAME} are accepted",
      )
    sampling = fields.session_sampling(self._service.store.sampling)
    session = self._service.start(fields.task_id, name, sampling)
    base = str(request.base_url).rstrip("/")
    return starlette_responses.JSONResponse(
      {
        "session_id": session.id,
        "api_key": session.key,
        "base_url": f"{base}/sessions/{session.id}/v1",
        "sampling": session.sampling.fields,
        "other_sampling": session.sampling.other,
      }
    )

  async def grant_capacity(self, request: Request) -> Response:
    """Accepts AReaL's capacity grants; this server ignores them and answers
    with the number of sessions that may still start."""
    self._check_own(request, None)
    free = self._service.store.free
    return starlette_responses.JSONResponse({"capacity": free})

  async def set_reward(self, request: Request) -> Response:
    session = _named(request)
    fields = bodies.parse(RewardBody, await self._read(request))
    if self._dropped[session.id]:
      raise errors.ApiError(
        409,
        "the session is being exported and dropped; set rewards before that",
        code="session_ended",
      )
    with service_lib.api_errors():
      session.set_reward(fields.interaction_id, fields.reward)
    return starlette_responses.JSONResponse({"message": "success"})

  async def end(self, request: Request) -> Response:
    session = _named(request)
    with service_lib.api_errors():
      session.end()
    await self._service.forget(session.id)
    return starlette_responses.JSONResponse({"message": "success"})

  async def export(self, request: Request) -> Response:
    fields = bodies.parse(ExportBody, await self._read(request))
    self._check_own(request, fields.session_id)
    session = self._service.session(fields.session_id)
    reasons = {i.untrained for i in session.interactions}
    if reasons and "" not in reasons:
      _LOG.error(
        "session %s of task %r: none of its sampled tokens is trainable: %s;"
        " leave these fields out of the requests, or name the sampling at the"
        " session's start",
        session.id,
        session.task_id,
        "; ".join(sorted(reasons)),
      )
    chosen = fields.arrays or self._arrays
    write = _tensor if chosen == "tensors" else _array
    if fields.drop:
      # Requests in flight are refused, and are not in the export.
      session.end()
      await self._service.forget(session.id)
      sent = self._dropping(session, fields.style, fields.discount, write)
    else:
      with service_lib.api_errors():
        sent = self._sent(
          session.exporter(fields.style, fields.discount), write
        )
    return starlette_responses.StreamingResponse(
      sent, media_type="application/json"
    )

  async def _sent(
    self, exporter: interactions.Exporter, write: Writer
  ) -> AsyncIterator[bytes]:
    pieces = _encoded(exporter, write)
    loop = asyncio.get_running_loop()
    while piece := await loop.run_in_executor(self._thread, next, pieces, b""):
      yield piece

  async def _dropping(
    self, session: Any, style: str, discount: float, write: Writer
  ) -> AsyncIterator[bytes]:
    """Yields the body; the ended session is dropped once all of it was read."""
    self._dropped[session.id] += 1
    try:
      async for piece in self._sent(session.exporter(style, discount), write):
        yield piece
      await self._service.drop(session.id)
    finally:
      self._dropped[session.id] -= 1
      if not self._dropped[session.id]:
        del self._dropped[session.id]


def _encoded(
  exporter: interactions.Exporter, write: Writer | None = None
) -> Iterator[bytes]:
  """Yields the JSON text of an export, a sequence at a time."""
  write = write or _array
  separator = b'{"interactions": {'
  for one in exporter:
    # AReaL's arrays; images by reference, beside them.
    row = interactions.to_tensor_dict(one, lambda spans: {})
    tensors = b", ".join(
      b"%s: %s" % (orjson.dumps(k), write(v))
      for k, v in row.items()
      if isinstance(v, np.ndarray)
    )
    about = orjson.dumps(
      {
        "interaction_id": one.id,
        "reward": one.reward,
        "untrained_tokens": one.untrained_tokens,
        "sampling": [
          {
            "interaction_id": i.id,
            "turn_id": i.index,
            **i.sampling,
            "untrained": i.untrained,
          }
          for i in one.new
        ],
        "images": [
          {
            "sha256": span.image.sha256,
            "width": span.image.width,
            "height": span.image.height,
            "offset": span.offset,
            "num_tokens": span.num_tokens,
            **({"row": span.row} if span.row else {}),
          }
          for span in one.sequence.images
        ],
      }
    )
    # Beside the tensors: every row of AReaL's batches must have the same keys.
    more_arrays = b'"turn_ids": ' + _array(one.sequence.turn_ids)
    if one.sequence.entropies is not None:
      more_arrays += b', "entropies": ' + _array(one.sequence.entropies)
    yield b'%s%s: %s, %s, "tensor_dict": {%s}}' % (
      separator,
      orjson.dumps(one.id),
      about[:-1],
      more_arrays,
      tensors,
    )
    separator = b", "
  yield b"}}" if separator == b", " else b'{"interactions": {}}'


def _array(values: np.ndarray) -> bytes:
  """JSON of float or integer numbers of one or two axes."""
  if values.ndim > 1:
    return b"[%s]" % b", ".join(map(_array, values))
  if values.dtype == np.float32:
    values = values.astype(np.float64)  # All digits, as in answers.
  parts = (
    orjson.dumps(
      np.ascontiguousarray(values[i : i + _AT_ONCE]),
      option=orjson.OPT_SERIALIZE_NUMPY,
    )[1:-1]
    for i in range(0, len(values), _AT_ONCE)
  )
  return b"[%s]" % b", ".join(parts)


def _tensor(values: np.ndarray) -> bytes:
  """Returns an array as AReaL's `SerializedTensor`."""
  data = base64.b64encode(np.ascontiguousarray(values).data)
  return orjson.dumps(
    {
      "type": "tensor",
      "data": data.decode("ascii"),
      "shape": list(values.shape),
      "dtype": f"torch.{values.dtype.name}",
    }
  )


def _named(request: Request) -> Any:
  """Returns the session that the request's path or key names."""
  if request.state.session is None:
    raise errors.ApiError(
      401,
      "name a session: by its api_key as Authorization: Bearer, or in the"
      " path, /sessions/{id}/rl/…",
      code="unknown_session",
    )
  return request.state.session
