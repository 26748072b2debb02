"""Serves rollout buffers over HTTP.

    POST /start_rollout       starts a generator
    POST /stop_rollout        ends it
    POST /buffer/write        stores an item, or several
    POST /get_rollout_data    reads whole groups
    POST /buffer/read         the same, waits for them
    POST /buffer/ack          a lease's items were taken over
    POST /buffer/release      a lease's items are to be read again
    POST /buffer/known        which of some uids were written
    GET  /buffer/peek, /buffer/stats, /buffers
    GET  /, /health, /metrics

A path with the prefix /b/{name} is that buffer's; else the key `buffer` of the
body names it, or of the query. docs/rollout_buffer.md describes the protocol.

Promises: every request is answered, a failure as `{"detail", "code"}`; a write
is on the disk when it is answered; a full buffer answers 429 with Retry-After;
bodies are bounded; groups whose answer cannot be sent are given back; without a
token only requests to a loopback host name are answered, and never a web
page's.

Does not decide what is read (`buffers` does).
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Callable, Mapping

from cua_gyms import applications
import orjson
import prometheus_client
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.net import json_models
from tunix.rl.multi_turn.net import request_bodies

from agent_services.rollout_buffer import buffers
from agent_services.rollout_buffer import items
from agent_services.rollout_buffer import requests
from agent_services.rollout_buffer import service as service_lib
from agent_services.rollout_buffer import store

_LOG = logging.getLogger(__name__)
_SMALL = 8 << 20
_INLINE = 256 << 10
"""Larger bodies are parsed in a thread."""
_MOST_NODES = 2_000_000
"""Lists and objects of a body."""
_NODE = 8
"""Values that take the memory of a list or an object."""
_COMMIT_S = 60.0
_POLL_S = 0.1
_DEFAULT_WAIT_S = 10.0
_CHUNK = 1 << 20
_WRITTEN = "Data has been successfully written to buffer"

Request = applications.Request
Response = applications.Response
_Error = applications.ServiceError


class App(applications.Application):
  """The ASGI application of a service, in the attribute `asgi`."""

  def __init__(self, service: service_lib.Service, *, token: str = ""):
    """Args:

    service: the buffers; closed when the application ends.
    token: Bearer token of clients; "" asks for none.
    """
    self._service = service
    self._limits = service.limits
    self._token = token
    self._metrics = applications.Metrics(
      "buffer", (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
    )
    self._items = prometheus_client.Counter(
      "buffer_items",
      "Items, by what became of them.",
      ("buffer", "fate"),
      registry=self._metrics.registry,
    )
    post, get = applications.POST, applications.GET
    of_buffer: list[applications.Route] = [
      ("/buffer/write", self._write, post),
      ("/get_rollout_data", self._get_rollout_data, post),
      ("/buffer/read", self._read, post),
      ("/start_rollout", self._start, post),
      ("/stop_rollout", self._stop, post),
      ("/buffer/ack", self._ack, post),
      ("/buffer/release", self._release, post),
      ("/buffer/known", self._known, post),
      ("/buffer/peek", self._peek, get),
      ("/buffer/stats", self._stats, get),
    ]
    self._serve(
      [
        *of_buffer,
        *((f"/b/{{buffer}}{path}", run, how) for path, run, how in of_buffer),
        ("/buffers", self._list, get),
        ("/", self._root, get),
        ("/health", self._health, get),
        ("/metrics", self._show_metrics, get),
      ]
    )

  # --- around every request ---------------------------------------------------

  async def _close(self) -> None:
    await asyncio.to_thread(self._service.close)

  async def _sweep(self) -> None:
    try:
      await asyncio.to_thread(self._service.sweep)
    except Exception:  # pylint: disable=broad-except
      _LOG.exception("groups that are overdue were not dropped")

  def _done(
    self, route: str, request: Request, response: Response, seconds: float
  ) -> None:
    del request
    self._metrics.count(route, response, seconds)

  def _authorize(self, request: Request, route: str) -> None:
    applications.authorize(
      request.headers,
      http_server.bearer_of(request.headers),
      self._token,
      public=route in ("/", "/health"),
    )

  async def _object(self, request: Request) -> dict[str, Any]:
    """The body's object; an empty body is {}."""
    raw = await request_bodies.read(request, _SMALL)
    if not raw.strip():
      return {}
    value = await _parsed(applications.parse_json, raw)
    return applications.check_object(value)

  def _refusal(self, error: Exception) -> _Error | None:
    if isinstance(error, (buffers.BufferFull, store.StoreFull)):
      return _Error(429, str(error), "full", 2.0)
    if isinstance(error, (store.StoreError, TimeoutError)):
      return _Error(503, f"{error}" or "the disk takes too long", "disk", 5.0)
    if isinstance(error, buffers.LeaseUsed):
      return _Error(409, str(error), "lease_used")
    if isinstance(error, buffers.UnknownLease):
      return _Error(404, error.args[0], "unknown_lease")
    if isinstance(error, service_lib.UnknownTaskType):
      return _Error(404, str(error), "unknown_task_type")
    if isinstance(error, service_lib.TooManyBuffers):
      return _Error(429, str(error), "too_many_buffers", 60.0)
    if isinstance(error, KeyError):
      return _Error(404, str(error.args[0]), "unknown_buffer")
    if isinstance(error, ValueError):
      return _Error(422, str(error), "invalid_request")
    return super()._refusal(error)

  def _name(self, request: Request, data: Mapping[str, Any]) -> str:
    named = request.path_params.get("buffer")
    if named is None:
      named = data.get("buffer", request.query_params.get("buffer"))
    return items.buffer_name(named)

  def _found(self, request: Request, data: Mapping[str, Any]) -> buffers.Buffer:
    return self._service.buffer(self._name(request, data), make=False)

  # --- rollouts ---------------------------------------------------------------

  async def _start(self, request: Request) -> Response:
    payload = await self._object(request)
    name = self._name(request, payload)
    if not self._service.url:
      self._service.url = http_server.reached_at(request.scope)
    await asyncio.to_thread(self._service.start, name, payload)
    return _json({"message": "Rollout started"})

  async def _stop(self, request: Request) -> Response:
    name = self._name(request, await self._object(request))
    ran = await asyncio.to_thread(self._service.stop, name)
    message = "Rollout stopped" if ran else "No rollout was running"
    return _json({"message": message})

  # --- writing ----------------------------------------------------------------

  async def _write(self, request: Request) -> Response:
    raw = await request_bodies.read(request, self._limits.item_mib << 20)
    try:
      named = request.path_params.get("buffer")
      if named is None and request.query_params:
        named = request.query_params.get("buffer")
      of_path = items.buffer_name(named) if named is not None else None
      written = await _parsed(items.read, raw, of_path)
      if len({item.buffer for item in written}) > 1:
        raise items.ItemError(
          "the items of one body go to one buffer; send a body for each"
        )
    except items.ItemError as error:
      # The status that clients of the protocol know; the code tells it from a
      # failure of the service.
      raise _Error(500, f"Write failed: {error}", "invalid_item") from None
    try:
      fresh = await self._stored(written)
    except store.UidConflict as error:
      raise _Error(409, f"Write failed: {error}", "uid_conflict") from None
    name = written[0].buffer
    self._items.labels(name, "written").inc(fresh)
    if fresh < len(written):
      self._items.labels(name, "repeated").inc(len(written) - fresh)
    if "return=minimal" in request.headers.get("prefer", ""):
      shown = b""
    else:
      shown = b",".join(item.body for item in written)
    return Response(
      b'{"success":true,"message":"%s","data":{"data":[%s],'
      b'"meta_info":"write to buffer"},"new":%d}'
      % (_WRITTEN.encode(), shown, fresh),
      media_type="application/json",
    )

  async def _stored(self, written: list[items.Item]) -> int:
    """Stores items; returns the number of new ones."""
    name = written[0].buffer
    try:
      buffer = self._service.buffer(name, make=False)
    except KeyError:
      buffer = await asyncio.to_thread(self._service.buffer, name)
    with buffer.reserving(written):
      future = asyncio.wrap_future(
        self._service.store.put(buffer.id, written, buffer.stored)
      )
      # Not cancelled with the request: it is stored all the same.
      seqs = await asyncio.wait_for(asyncio.shield(future), _COMMIT_S)
      return len(seqs) - seqs.count(None)

  # --- reading ----------------------------------------------------------------

  async def _get_rollout_data(self, request: Request) -> Response:
    data = await self._object(request)
    buffer = self._found(request, data)
    fields = self._reading(data)
    return await asyncio.to_thread(self._answer, buffer, fields, True)

  def _answer(
    self, buffer: buffers.Buffer, fields: requests.Read, of_rollout: bool
  ) -> Response:
    """The answer to a read; blocks."""
    size = fields.batch_size
    buffer.allow(fields.allowed_items)
    result = buffer.read(
      size,
      lease_s=fields.lease_s,
      lease=fields.lease or "",
      exact=of_rollout and size > 0,
      clear=of_rollout,
    )
    if result.count:
      self._items.labels(buffer.name, "read").inc(result.count)
      return _Delivery(buffer, result)
    success = False
    if of_rollout and result.short and size > 0:
      message = (
        f"Not enough data. Requested {size} items but only"
        f" {result.available} available."
      )
    elif of_rollout:
      message = "No data available to read"
    elif fields.wait:
      message = "Timeout waiting, no data available to read"
    else:
      success, message = True, "Successfully read 0 items"
    return Response(
      _read_body(success, message, result), media_type="application/json"
    )

  def _reading(self, data: Mapping[str, Any]) -> requests.Read:
    fields = json_models.validate(requests.Read, data)
    fields.check(self._limits)
    return fields

  async def _read(self, request: Request) -> Response:
    data = await self._object(request)
    buffer = self._found(request, data)
    fields = self._reading(data)
    buffer.allow(fields.allowed_items)
    waits = _DEFAULT_WAIT_S if fields.timeout is None else fields.timeout
    due = time.monotonic() + (waits if fields.wait else 0.0)
    while time.monotonic() < due:
      ready = await asyncio.to_thread(buffer.available)
      if ready >= max(1, fields.batch_size) or await request.is_disconnected():
        break
      await asyncio.sleep(min(_POLL_S, max(0.0, due - time.monotonic())))
    return await asyncio.to_thread(self._answer, buffer, fields, False)

  async def _ack(self, request: Request) -> Response:
    return await self._ended(
      request, buffers.Buffer.acknowledge, "Acknowledged"
    )

  async def _release(self, request: Request) -> Response:
    return await self._ended(request, buffers.Buffer.release, "Released")

  async def _ended(
    self, request: Request, end: Callable[..., int], verb: str
  ) -> Response:
    data = await self._object(request)
    buffer = self._found(request, data)
    lease = json_models.validate(requests.Lease, data).lease
    count = await asyncio.to_thread(end, buffer, lease)
    return _json({"success": True, "message": f"{verb} {count} items"})

  async def _known(self, request: Request) -> Response:
    data = await self._object(request)
    texts = json_models.validate(requests.Known, data).uids
    buffer = await asyncio.to_thread(
      self._service.buffer, self._name(request, data)
    )
    known_uids = await asyncio.to_thread(self._service.known, buffer, texts)
    return _json({"known": known_uids})

  async def _peek(self, request: Request) -> Response:
    data = {**request.query_params, **await self._object(request)}
    buffer = self._found(request, data)
    count = json_models.validate(requests.Peek, data).batch_size
    bodies = await asyncio.to_thread(buffer.peek, min(count, 1000))
    return _json(
      {
        "success": True,
        "message": f"Successfully previewed {len(bodies)} items",
        "data": {
          "data": [orjson.Fragment(item) for item in bodies],
          "meta_info": {},
        },
      }
    )

  # --- about the service ------------------------------------------------------

  async def _stats(self, request: Request) -> Response:
    data = {**request.query_params, **await self._object(request)}
    name = self._name(request, data)
    figures = await asyncio.to_thread(self._service.stats, name)
    return _json(
      {
        "success": True,
        "message": "Buffer stats retrieved successfully",
        "data": {"data": [figures], "meta_info": {}},
      }
    )

  async def _list(self, request: Request) -> Response:
    del request
    return _json({"buffers": self._service.names})

  async def _root(self, request: Request) -> Response:
    del request
    return _json({"message": "Rollout Buffer Server is running"})

  async def _health(self, request: Request) -> Response:
    del request
    return _json({"status": "ok", "waiting": self._service.store.waiting_bytes})

  async def _show_metrics(self, request: Request) -> Response:
    del request
    store_of_items = self._service.store
    lines = []
    gauges = {
      "buffer_waiting_bytes": store_of_items.waiting_bytes,
      "buffer_commits": store_of_items.commits,
      "buffer_commit_failures": store_of_items.failures,
    }
    for name, value in gauges.items():
      lines.append(f"# TYPE {name} gauge\n{name} {value}\n")
    every = {
      name: self._service.buffer(name, make=False).counts()
      for name in self._service.names
    }
    for gauge in ("items", "bytes", "waiting_groups", "leases"):
      lines.append(f"# TYPE buffer_held_{gauge} gauge\n")
      lines += [
        f'buffer_held_{gauge}{{buffer="{name}"}} {counts[gauge]}\n'
        for name, counts in every.items()
      ]
    return self._metrics.page(lines)


async def _parsed(read: Callable[..., Any], raw: bytes, *args: Any) -> Any:
  """Parses a body.

  Raises:
    BodyRefused: parsed, it would take too much memory.
  """

  def bounded() -> Any:
    nodes = raw.count(b"[") + raw.count(b"{")
    if raw.count(b",") + _NODE * nodes > _NODE * _MOST_NODES:
      raise request_bodies.BodyRefused(
        413,
        f"the body holds more than {_MOST_NODES:,} lists and objects, or"
        f" {_NODE * _MOST_NODES:,} values, by its brackets and commas; send"
        " it in several",
        "too_large",
      )
    return read(raw, *args)

  if len(raw) <= _INLINE:
    return bounded()
  return await asyncio.to_thread(bounded)


def _read_body(success: bool, message: str, result: buffers.Read) -> bytes:
  return orjson.dumps(
    {
      "success": success,
      "message": message,
      "data": orjson.Fragment(result.data),
    }
  )


class _Delivery(Response):
  """The answer to a read of items.

  The last byte is held back until all other bytes were sent and, of a final
  read, the groups are acknowledged. If the client hangs up, the disk fails or
  the service ends before that, the groups are given back: no client can read an
  answer without its end.
  """

  def __init__(self, buffer: buffers.Buffer, result: buffers.Read):
    super().__init__(
      _read_body(True, f"Successfully read {result.count} items", result),
      media_type="application/json",
    )
    self._buffer = buffer
    self._result = result

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    sent = False
    try:
      await send(
        {
          "type": "http.response.start",
          "status": self.status_code,
          "headers": self.raw_headers,
        }
      )
      end = len(self.body) - 1
      for start in range(0, end, _CHUNK):
        part = self.body[start : min(start + _CHUNK, end)]
        await send(_part(part, more=True))
      if await Request(scope, receive).is_disconnected():
        return
      if self._result.final:
        await asyncio.to_thread(self._buffer.acknowledge, self._result.lease)
      sent = True
      await send(_part(self.body[end:], more=False))
    except (buffers.UnknownLease, store.StoreError, TimeoutError) as error:
      _LOG.warning("an answer to a read is broken off: %s", error)
    finally:
      if not sent:
        await asyncio.shield(asyncio.to_thread(self._give_back))

  def _give_back(self) -> None:
    try:
      self._buffer.release(self._result.lease, self._result.delivery)
    except buffers.UnknownLease:
      pass  # It was over already, or a later answer has the groups.
    except (store.StoreError, TimeoutError) as error:
      _LOG.warning("groups return when their lease is over: %s", error)


def _part(body: bytes | memoryview, more: bool) -> dict[str, Any]:
  return {"type": "http.response.body", "body": bytes(body), "more_body": more}


def _json(
  data: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
  return Response(
    orjson.dumps(data), status, headers, media_type="application/json"
  )
