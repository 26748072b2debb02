"""Bounds what requests to a server may cost: connections, seconds, bytes.

`ConnectionLimits` are a server's limits; `net.connections` keeps those of
connections and heads, `BodyGuard` those of bodies, in front of any ASGI
application. An application reads a body with `read`.

Promises: no byte of a body is asked for before the application wants it, so
never for a request that it refuses by its headers; the bodies of all running
requests together, and what they `hold` besides, take no more memory than the
limit, and one that does not fit waits for its turn, or is refused with 429
where its request holds memory already; a body that is late is
refused with 408, one that is too large with 413 before it is read; a sender
that is slow gives way when others wait. One large body a turn of the event loop
is handed out, so that parsing many of them does not stop the server from
answering in between.

Does not import a serving package.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import time
from typing import Any, AsyncIterator, Awaitable, Callable, MutableMapping

from ..core import settings as settings_lib

_setting = settings_lib.setting
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Asgi = Callable[[Scope, Receive, Any], Awaitable[None]]

_SMALL = 16 << 10
"""Bytes that pass uncounted: fewer than a connection's own buffers."""
_LARGE = 256 << 10
"""Bytes of a body whose parsing is felt by others."""
_STEP = 1 << 20
"""Bytes by which the count of a body of unknown length grows."""
_GRACE_S = 5.0
_LEAST_RATE = 64 << 10
"""Where others wait, a body gives way that is older than the grace and came in
at fewer bytes a second."""
_LOOK_S = 0.5
_REFUSED_S = 1.0  # Pause that a refused client is asked for.
_HOLD = "tunix.hold"
"""Key of a scope's function that counts more memory for the request."""


@settings_lib.settings
class ConnectionLimits:
  """Limits of a server's clients. Defaults fit a pod of collectors."""

  max_connections: int = _setting(
    default=0,
    doc="Connections at a time, at most 4096 by default; 0: as the limit of"
    " open files allows. When all are taken, a new one displaces the one that"
    " has waited longest for a request.",
    unit="connections",
    ge=0,
  )
  max_client_connections: int = _setting(
    default=1024,
    doc="Connections of one address at a time, and three quarters of all at"
    " most. Beyond it, an address displaces its own.",
    unit="connections",
    ge=1,
  )
  head_timeout: float = _setting(
    default=30.0,
    doc="Deadline of a request's head, or of a connection without one.",
    unit="s",
    gt=0,
  )
  body_timeout: float = _setting(
    default=60.0,
    doc="Deadline of a request's body, its wait for memory included.",
    unit="s",
    gt=0,
  )
  stall_timeout: float = _setting(
    default=60.0,
    doc="A client must read some of a pending answer this often.",
    unit="s",
    gt=0,
  )
  idle_timeout: float = _setting(
    default=300.0,
    doc="A connection is closed after this long without a request.",
    unit="s",
    gt=0,
  )
  body_memory: int = _setting(
    default=1024,
    doc="Memory for the bodies of all running requests; others wait.",
    unit="MiB",
    ge=1,
  )


class BodyRefused(Exception):
  """A body that is not read to its end.

  Attributes:
    status: 408, 413 or 429.
    message: the fault, and the fix.
    code: short, stable, for programs.
    retry_after_s: Seconds until the request may succeed; None: never.
  """

  def __init__(
    self,
    status: int,
    message: str,
    code: str,
    retry_after_s: float | None = None,
  ):
    super().__init__(message)
    self.status = status
    self.message = message
    self.code = code
    self.retry_after_s = retry_after_s


async def read(request: Any, most: int, what: str = "the body") -> bytes:
  """The body of a Starlette request.

  Args:
    request: Request with the body.
    most: Largest size, bytes.
    what: names the body in errors.

  Raises:
    BodyRefused: it is larger, late, or finds no memory.
    ClientDisconnect: Starlette's.
  """
  too_large = BodyRefused(
    413, f"{what} has more than {most:,} bytes; send fewer", "too_large"
  )
  # Of a head with a length, before any of the body is asked for.
  if (_declared(request.scope) or 0) > most:
    raise too_large
  parts, size = [], 0
  async for part in request.stream():
    size += len(part)
    if size > most:
      raise too_large
    parts.append(part)
  return b"".join(parts)


async def hold(request: Any, size: int) -> None:
  """Counts `size` more bytes with the request's body, until it is answered.

  Waits until they are free, where the request holds nothing yet. Requests that
  kept memory while they waited for more would wait on one another. Counts
  nothing without a `BodyGuard`.

  Raises:
    BodyRefused: They are not free, or more than there are for all.
  """
  if _HOLD in request.scope:
    await request.scope[_HOLD](size)


def _declared(scope: Scope) -> int | None:
  """Bytes of a request's body by its head; None: chunked."""
  size = 0
  for name, value in scope["headers"]:
    if name == b"transfer-encoding":
      return None
    if name == b"content-length" and value.isdigit():
      # More digits than any size has are not read.
      size = int(value[:18]) if len(value) <= 18 else 10**18
  return size


class _Body:
  """A request's body on its way."""

  def __init__(self, timeout_s: float):
    self.began = time.monotonic()
    self.due = asyncio.get_running_loop().time() + timeout_s
    self.held = 0
    self.waits = False  # For its first memory beside the body.
    self.received = 0
    self.done = False
    self.gives_way = False
    self.late = False
    self.scope: asyncio.Timeout | None = None

  @contextlib.asynccontextmanager
  async def deadline(self) -> AsyncIterator[None]:
    async with asyncio.timeout_at(self.due) as self.scope:
      try:
        yield
      finally:
        self.scope = None

  @property
  def slow(self) -> bool:
    age = time.monotonic() - self.began
    return age > _GRACE_S and self.received < age * _LEAST_RATE

  def give_way(self) -> None:
    self.gives_way = True
    self.due = 0.0
    if self.scope is not None:
      self.scope.reschedule(0.0)


class BodyGuard:
  """An ASGI application in front of which bodies are bounded."""

  def __init__(self, app: Asgi, limits: ConnectionLimits = ConnectionLimits()):
    self._app = app
    self._limits = limits
    self._free = self._total = limits.body_memory << 20
    self._waiting: collections.deque[tuple[int, asyncio.Future[None]]] = (
      collections.deque()
    )
    self._receiving: set[_Body] = set()
    self._turn: asyncio.Lock | None = None
    self._looked = 0.0

  @property
  def held(self) -> int:
    """Bytes that running requests hold, or have been granted."""
    return self._total - self._free

  async def __call__(self, scope: Scope, receive: Receive, send: Any) -> None:
    declared = _declared(scope) if scope["type"] == "http" else 0
    if declared == 0:
      await self._app(scope, receive, send)
      return
    body: _Body | None = None

    async def bounded() -> MutableMapping[str, Any]:
      nonlocal body
      if body is not None and body.done:
        return await receive()  # Waits for the end of the connection.
      if body is None:
        body = _Body(self._limits.body_timeout)
      return await self._receive(body, declared, receive)

    async def closing(message: MutableMapping[str, Any]) -> None:
      late = body is not None and body.late
      if late and message["type"] == "http.response.start":
        # Its sender has had its time.
        more = (b"connection", b"close")
        message = {**message, "headers": [*message.get("headers", ()), more]}
      await send(message)

    async def hold_more(size: int) -> None:
      assert body is not None, "more than a body that was never read"
      if (body.held or body.waits) and self._full(size):
        self.relieve()
        raise self._no_memory()
      body.waits = True
      try:
        async with asyncio.timeout(self._limits.body_timeout):
          await self._reserve(body, size)
      except TimeoutError:
        raise self._no_memory() from None
      finally:
        body.waits = False

    try:
      await self._app({**scope, _HOLD: hold_more}, bounded, closing)
    finally:
      if body is not None:
        self._receiving.discard(body)
        self._release(body)

  async def _receive(
    self, body: _Body, declared: int | None, receive: Receive
  ) -> MutableMapping[str, Any]:
    try:
      async with body.deadline():
        if not body.held and declared is not None and declared > _SMALL:
          await self._reserve(body, declared)
        self._receiving.add(body)
        message = await receive()
    except TimeoutError:
      body.late = True
      waited = body not in self._receiving
      self._receiving.discard(body)
      self._release(body)
      if body.gives_way:
        raise BodyRefused(
          408,
          "the body came slowly while others waited; send it again",
          "too_slow",
          _REFUSED_S,
        ) from None
      if waited:
        raise self._no_memory() from None
      raise BodyRefused(
        408,
        f"the body did not arrive within {self._limits.body_timeout:g} s;"
        " send it again",
        "too_slow",
      ) from None
    body.received += len(message.get("body", b""))
    if declared is None:
      self._grow(body)
    if not message.get("more_body"):
      body.done = True
      self._receiving.discard(body)
      if body.received > _LARGE:
        await self._take_turn()
    return message

  # --- memory -----------------------------------------------------------------

  def _no_memory(self) -> BodyRefused:
    return BodyRefused(
      429,
      f"the bodies of running requests take all of {self._total >> 20} MiB;"
      " send this one again later",
      "no_memory",
      _REFUSED_S,
    )

  def _full(self, size: int) -> bool:
    """Whether `size` bytes must wait; not where they exceed the total."""
    return size <= self._total and bool(self._waiting or size > self._free)

  async def _reserve(self, body: _Body, size: int) -> None:
    """Waits until `size` bytes are free; first come, first served."""
    if size > self._total:
      raise BodyRefused(
        413,
        f"the request takes {size:,} bytes, more than the {self._total:,} for"
        " all requests; send fewer",
        "too_large",
      )
    if self._full(size):
      granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
      entry = (size, granted)
      self._waiting.append(entry)
      try:
        while not granted.done():
          self.relieve()
          await asyncio.wait([granted], timeout=_LOOK_S)
      finally:
        if granted.done():
          body.held += size
        else:
          self._waiting.remove(entry)
          self._grant()
    else:
      self._free -= size
      body.held += size

  def _grow(self, body: _Body) -> None:
    """Counts a body of unknown length as it comes."""
    if body.received <= max(body.held, _SMALL):
      return
    more = -(-body.received // _STEP) * _STEP - body.held
    if more > self._free:
      self.relieve()
      raise self._no_memory()
    self._free -= more
    body.held += more

  def _release(self, body: _Body) -> None:
    self._free += body.held
    body.held = 0
    self._grant()

  def _grant(self) -> None:
    while self._waiting and self._waiting[0][0] <= self._free:
      size, granted = self._waiting.popleft()
      self._free -= size
      granted.set_result(None)

  def relieve(self) -> None:
    """Ends the bodies that come slowly, as others need their place."""
    now = time.monotonic()
    if now - self._looked < _LOOK_S:
      return
    self._looked = now
    for body in [b for b in self._receiving if b.slow]:
      body.give_way()

  async def _take_turn(self) -> None:
    if self._turn is None:
      self._turn = asyncio.Lock()
    async with self._turn:
      await asyncio.sleep(0)


def public(scope: Scope) -> bool:
  """Whether a request asks for a server's health, which is always answered."""
  return scope["method"] == "GET" and scope["path"].endswith("/health")


def refusal(status: int, message: str, code: str) -> bytes:
  """JSON of an answer that no application gives, as any client reads it."""
  error = {"message": message, "type": "server_error", "param": None}
  return json.dumps(
    {"detail": message, "code": code, "error": {**error, "code": code}}
  ).encode()
