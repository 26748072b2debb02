"""Bounds the connections of a server: how many, whose, and how slow.

`protocol` is a class for uvicorn's `http`; `http_server.config` builds a server
with it. It is HTTP/1.1 by h11, which bounds the size of a head as well (16
KiB).

A connection is *new* until what it has sent has been read once. From then on it
*waits* (for a head, or between two requests) or is *busy* (with a request, from
the end of its head to the end of the answer). When there are too many, the one
that has waited longest is displaced, of the address that has most of them. A
share is kept for those that wait, so that a head is always read; a request
beyond the rest is refused with 429, except one for the server's health.

Promises: a client that sends a head too slowly, or does not read its answer, is
disconnected after a while; connections never reach the process's limit of open
files; /health is answered whatever the others hold; a body that the application
does not ask for stays with its sender.

Does not: bound bodies (`request_bodies`) or requests (applications do).
"""

from __future__ import annotations

import asyncio
import collections
import ipaddress
import resource
from typing import Any, Callable

import h11
from uvicorn.protocols.http import h11_impl

from . import request_bodies

ConnectionLimits = request_bodies.ConnectionLimits

_KEPT_FILES = 128
"""Of the files that a process may open, for databases, images and threads."""
_MOST_FILES = 16_384
_MOST = 4096
_LINGER_S = 5.0
"""Seconds that a client has to end a body that its answer did not wait for."""
_READ = 64 << 10
"""Bytes read at a time: parsing one connection's must not stop the others."""
_FINE_CHUNKS = 128
_FINEST = 256
"""A body is given up that has more chunks in one read, of fewer bytes on
average: each costs as much to parse as a large one."""
_ROUNDS = 4
"""Of the event loop, from a new connection to the first read of it."""
_MOST_NEW = 72
"""Connections beyond the limit while they are new: 16 a round, see
`http_server.listen`."""


def raise_open_files() -> None:
  """Lets this process open as many files as it may; for a server's command."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  most = _MOST_FILES if hard == resource.RLIM_INFINITY else hard
  if soft != resource.RLIM_INFINITY and soft < min(most, _MOST_FILES):
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, _MOST_FILES), hard))


def most_connections(limits: ConnectionLimits) -> int:
  """Connections at a time, in this process."""
  if limits.max_connections:
    return limits.max_connections
  soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  if soft == resource.RLIM_INFINITY:
    return _MOST
  return min(_MOST, max(16, soft - max(_KEPT_FILES, soft // 4)))


class _Pool:
  """A server's connections by address and state."""

  def __init__(self, limits: ConnectionLimits, relieve: Callable[[], None]):
    self.limits = limits
    self.relieve = relieve
    self.most = most_connections(limits)
    self.reserve = max(2, min(256, self.most // 4))
    self.of_client = max(
      1, min(limits.max_client_connections, self.most * 3 // 4)
    )
    self.open = self.busy = self.num_fresh = 0
    self.held: collections.Counter[str] = collections.Counter()
    self.busy_of: collections.Counter[str] = collections.Counter()
    # By address, oldest first: those without a request yet, and the idle.
    self.fresh: dict[str, dict[Any, None]] = {}
    self.idle: dict[str, dict[Any, None]] = {}

  def admit(self, one: Any) -> bool:
    """Counts a new connection; False: there is no room for it."""
    if self.open >= self.most + _MOST_NEW:
      return False
    self.open += 1
    self.held[one.who] += 1
    one.state = "new"
    return True

  def trim(self, one: Any) -> None:
    """Displaces a connection where `one` makes them too many."""
    if self.open > self.most:
      victim = self._victim()
    elif self.held[one.who] > self.of_client:
      own = [_oldest(pool, one.who) for pool in (self.fresh, self.idle)]
      count = len(self.fresh.get(one.who, ())) + len(self.idle.get(one.who, ()))
      victim = (own[0] or own[1]) if count > self.reserve else None
    else:
      victim = None
    if victim is not None:
      victim.displace()

  def _victim(self) -> Any:
    pools = [self.fresh, self.idle]
    if self.num_fresh <= self.reserve:
      pools.reverse()
    for pool in pools:
      if pool:
        return _oldest(pool, max(pool, key=lambda who: len(pool[who])))
    return None

  def full_for(self, who: str) -> bool:
    """Whether a further request of this address is one too many."""
    return (
      self.busy >= self.most - self.reserve
      or self.busy_of[who] >= self.of_client
    )

  def set_state(self, one: Any, state: str) -> None:
    """`state`: "new", "fresh", "idle", "busy", or "" once it is closed."""
    if one.state == state:
      return
    if one.state == "busy":
      self.busy -= 1
      _less(self.busy_of, one.who)
    elif one.state in ("fresh", "idle"):
      pool = getattr(self, one.state)
      del pool[one.who][one]
      if not pool[one.who]:
        del pool[one.who]
      self.num_fresh -= one.state == "fresh"
    one.state = state
    if state == "busy":
      self.busy += 1
      self.busy_of[one.who] += 1
    elif state:
      getattr(self, state).setdefault(one.who, {})[one] = None
      self.num_fresh += state == "fresh"

  def remove(self, one: Any) -> None:
    if one.state:
      self.set_state(one, "")
      self.open -= 1
      _less(self.held, one.who)


def _less(counter: collections.Counter[str], who: str) -> None:
  counter[who] -= 1
  if not counter[who]:
    del counter[who]


def _oldest(pool: dict[str, dict[Any, None]], who: str) -> Any:
  return next(iter(pool.get(who, ())), None)


class _Answering:
  """The transport as a request's answer uses it."""

  def __init__(self, transport: Any, end: Callable[[], None]):
    self.write = transport.write
    self.is_closing = transport.is_closing
    self.close = end


def _who(client: tuple[str, int] | None) -> str:
  """The address that counts as one client: of IPv6, its network of 64 bits."""
  host = client[0] if client else ""
  if ":" not in host:
    return host
  try:
    address = ipaddress.IPv6Address(host.partition("%")[0])
  except ValueError:
    return host
  if address.ipv4_mapped:
    return str(address.ipv4_mapped)
  return str(ipaddress.IPv6Network((address, 64), strict=False))


async def _refuse(scope: object, receive: object, send: Any) -> None:
  """The application of requests beyond the limit."""
  del scope, receive
  await send(
    {
      "type": "http.response.start",
      "status": 429,
      "headers": [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(_FULL)),
        (b"retry-after", b"1"),
        (b"connection", b"close"),
      ],
    }
  )
  await send({"type": "http.response.body", "body": _FULL})


_FULL = request_bodies.refusal(
  429,
  "the server answers as many requests as it has connections for; repeat"
  " this one later",
  "too_many_connections",
)


def _raw(status: bytes, text: str, code: str) -> bytes:
  body = request_bodies.refusal(int(status[:3]), text, code)
  retry = b"" if status.startswith(b"400") else b"retry-after: 1\r\n"
  return (
    b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"%sconnection: close\r\n\r\n%s"
  ) % (status, len(body), retry, body)


_NO_ROOM = _raw(
  b"503 Service Unavailable",
  "the server has no connection left; connect again later",
  "too_many_connections",
)
_LATE = _raw(
  b"408 Request Timeout",
  "the head of the request came too slowly; send it again",
  "too_slow",
)
_NO_SOCKET = _raw(
  b"400 Bad Request",
  "a request for a WebSocket has no body, at most 128 headers, and lines of"
  " at most 8 KiB",
  "invalid_head",
)


def protocol(
  limits: ConnectionLimits = ConnectionLimits(),
  relieve: Callable[[], None] = lambda: None,
) -> type[asyncio.Protocol]:
  """A protocol class for uvicorn's `http`, with these limits.

  Args:
    limits: Limits of the connections of all its instances together.
    relieve: called when requests are refused for want of connections; may end
      those that last for no good reason.
  """
  pool = _Pool(limits, relieve)

  class Guarded(h11_impl.H11Protocol):
    """One connection; `pool` counts all of them."""

    pool: _Pool
    who = ""
    state = ""

    def __init__(self, *args: Any, **kwargs: Any):
      super().__init__(*args, **kwargs)
      self._served = self.app
      self._head: asyncio.TimerHandle | None = None
      self._stall: asyncio.TimerHandle | None = None
      self._heard = self._upgraded = self._lingers = self._ended = False

    # --- from the transport ---------------------------------------------------

    def connection_made(self, transport: Any) -> None:
      super().connection_made(transport)
      self.who = _who(self.client)
      if hasattr(transport, "max_size"):  # asyncio's.
        transport.max_size = _READ
      if pool.admit(self):
        self._await_head()
        self._next_round(_ROUNDS)
      else:
        transport.write(_NO_ROOM)
        transport.close()

    def _next_round(self, remaining: int) -> None:
      """Keeps a connection new until a read of it was possible."""
      if remaining:
        self.loop.call_soon(self._next_round, remaining - 1)
      elif self.state:
        if self.state == "new":
          pool.set_state(self, "fresh")
        pool.trim(self)

    def data_received(self, data: bytes) -> None:
      if self._ended or self.transport.is_closing():
        return  # Displaced, or answered and closed.
      self._heard = True
      if self._too_fine(data):
        self.transport.abort()
        return
      super().data_received(data)
      self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
      pool.remove(self)
      self._head = _cancelled(self._head)
      self._stall = _cancelled(self._stall)
      self._unset_keepalive_if_required()
      super().connection_lost(exc)

    # --- requests -------------------------------------------------------------

    def handle_events(self) -> None:
      full = pool.full_for(self.who)
      self.app = self._health_only if full else self._served
      before = self.cycle
      super().handle_events()
      if self.cycle is before or not self._answering():
        return
      answering: Any = _Answering(self.transport, self.end)
      self.cycle.transport = answering
      if self.cycle.more_body:
        # `receive` goes on reading, once the application asks for the body.
        self.flow.pause_reading()
      if full and not request_bodies.public(dict(self.scope)):
        pool.relieve()
      pool.set_state(self, "busy")

    async def _health_only(self, scope: Any, receive: Any, send: Any) -> None:
      answer = self._served if request_bodies.public(scope) else _refuse
      await answer(scope, receive, send)

    def on_response_complete(self) -> None:
      if not self.transport.is_closing():
        pool.set_state(self, "idle")
      if self._ended:
        return
      super().on_response_complete()
      self._await_head()

    def end(self) -> None:
      """Closes the connection once the client has had its answer.

      To close at once, with some of a body unread, would reset the connection,
      and the answer could be lost.
      """
      if self._ended or self.transport.is_closing():
        return
      if self.conn.their_state is not h11.SEND_BODY:
        self.transport.close()
        return
      self._ended = True
      try:
        self.transport.write_eof()
      except OSError:  # The client has closed the connection itself.
        self.transport.abort()
        return
      self.flow.resume_reading()
      self._head = _cancelled(self._head)
      self._head = self.loop.call_later(_LINGER_S, self.transport.abort)

    def handle_websocket_upgrade(self, event: Any) -> None:
      if pool.full_for(self.who):
        self.transport.write(_NO_ROOM)
        self.transport.close()
        return
      super().handle_websocket_upgrade(event)
      self._upgraded = True
      self._head = _cancelled(self._head)
      pool.set_state(self, "busy")
      # The socket's own protocol hears of its end from now on.
      successor: Any = self.transport.get_protocol()
      lost = successor.connection_lost

      def connection_lost(exc: Exception | None) -> None:
        pool.remove(self)
        lost(exc)

      successor.connection_lost = connection_lost
      if not getattr(successor, "handshake_initiated", True):
        # Its parser wants more or has given up, and says neither.
        self.transport.write(_NO_SOCKET)
        self.transport.close()

    def _answering(self) -> bool:
      return self.cycle is not None and not self.cycle.response_complete

    def _too_fine(self, data: bytes) -> bool:
      """Whether these are chunks that cost more than they hold.

      Estimated by line breaks, of which each chunk has two.
      """
      chunks = data.count(b"\r\n") // 2
      if chunks <= _FINE_CHUNKS or chunks * _FINEST < len(data):
        return False
      if self.conn.their_state is h11.SEND_BODY:
        return any(name == b"transfer-encoding" for name, _ in self.headers)
      head, _, body = data.lower().partition(b"\r\n\r\n")
      return b"transfer-encoding" in head and body.count(b"\r\n") > chunks

    # --- deadlines ------------------------------------------------------------

    def displace(self) -> None:
      """Gives this connection, which waits, to another one."""
      begun = self.state == "fresh" and self._heard
      pool.remove(self)
      self._hang_up(begun)

    def _late(self) -> None:
      self._hang_up(begun=self._heard)

    def _hang_up(self, begun: bool) -> None:
      if begun and not self._answering():
        self.transport.write(_LATE)
        self.transport.close()
      self.transport.abort()

    def _await_head(self) -> None:
      """Times a head that has begun, or a connection that has said nothing.

      Between requests uvicorn's own timer runs.
      """
      if self._upgraded or self._ended:
        return
      lingered = self._lingers
      self._lingers = (
        not self._answering() and self.conn.their_state is h11.SEND_BODY
      )
      if self._lingers:
        self._unset_keepalive_if_required()
      elif lingered and self.conn.their_state is h11.IDLE:
        self.timeout_keep_alive_task = self.loop.call_later(
          self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
      if self._answering() or self.timeout_keep_alive_task is not None:
        self._head = _cancelled(self._head)
      elif self._head is None:
        seconds = _LINGER_S if self._lingers else limits.head_timeout
        self._head = self.loop.call_later(seconds, self._late)

    def pause_writing(self) -> None:
      super().pause_writing()
      self._stall = _cancelled(self._stall)
      self._stall = self.loop.call_later(limits.stall_timeout, self._look)

    def _look(self, before: int | None = None) -> None:
      """Gives up a client that has taken nothing since the last look."""
      waiting = self.transport.get_write_buffer_size()
      if before is not None and waiting >= before:
        self.transport.abort()
      else:
        self._stall = self.loop.call_later(
          limits.stall_timeout, self._look, waiting
        )

    def resume_writing(self) -> None:
      self._stall = _cancelled(self._stall)
      super().resume_writing()

  Guarded.pool = pool
  return Guarded


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
  """None, with which to replace the timer."""
  if timer is not None:
    timer.cancel()
  return None
