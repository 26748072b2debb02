"""Sends requests to the server over one connection, each with a deadline.

On the standard library, not on `net.http`: the uploader starts with every run,
and importing httpx would take longer than the rest of its start.
"""

from __future__ import annotations

import functools
from http import client
import socket
import time
from typing import Any
from urllib import parse

import orjson

_MAX_REPLY = 64 << 20


class TransportError(Exception):
  """A request that was not answered with 200.

  Attributes:
    status: HTTP status; 0 without an answer.
    retry_after_s: the server's Retry-After, or None.
    body: the reply's JSON object, {} if it is none.
  """

  def __init__(
    self,
    message: str,
    status: int = 0,
    retry_after_s: float | None = None,
    body: dict[str, Any] | None = None,
  ):
    super().__init__(message)
    self.status = status
    self.retry_after_s = retry_after_s
    self.body = body or {}


class Transport:
  """Speaks to one server. For one thread."""

  def __init__(self, base_url: str, token: str, timeout_s: float):
    """Args:

      base_url: http(s)://host[:port][/prefix].
      token: Token of the project, "" for none.
      timeout_s: Deadline of each request, from its beginning to its end.

    Raises:
      ValueError: `base_url` is not a URL, or the token cannot be one.
    """
    url = parse.urlsplit(base_url)
    try:
      port = url.port
    except ValueError:
      port = -1
    if url.scheme not in ("http", "https") or not url.hostname or port == -1:
      raise ValueError(
        f"monitor URL {base_url!r}: give http://host:port or https://host"
      )
    if token and not (token.isascii() and token.isprintable()):
      raise ValueError(
        "the token has characters that no token has; copy it again"
      )
    if timeout_s <= 0:
      raise ValueError(f"timeout_s={timeout_s}: give more than 0")
    kind = {"http": client.HTTPConnection, "https": client.HTTPSConnection}
    self._connect = functools.partial(kind[url.scheme], url.hostname, port)
    self._server = url.netloc
    self._prefix = url.path.rstrip("/")
    self._token = token
    self._timeout = timeout_s
    self._connection: client.HTTPConnection | None = None
    self._closed = False

  def post(
    self, path: str, body: bytes, media_type: str = "application/json"
  ) -> dict[str, Any]:
    """Returns the reply's JSON.

    Raises:
      TransportError: no answer in time, or another than 200.
    """
    headers = {
      "content-type": media_type,
      "user-agent": "tunix-multi-turn-monitor/1",
    }
    if self._token:
      headers["authorization"] = f"Bearer {self._token}"
    deadline = time.monotonic() + self._timeout
    try:
      response, data = self._exchange(path, body, headers, deadline)
    except (OSError, client.HTTPException, AttributeError) as error:
      # AttributeError: closed by another thread in the middle of it.
      self._disconnect()
      raise TransportError(
        f"{self._server}: {type(error).__name__}: {error}"
      ) from None
    if response.will_close:
      self._disconnect()
    try:
      reply = orjson.loads(data)
    except orjson.JSONDecodeError:
      reply = {}
    if not isinstance(reply, dict):
      reply = {}
    if response.status == 200:
      return reply
    detail = reply.get("detail") or response.reason
    raise TransportError(
      f"{self._server} answered {response.status}: {detail}",
      response.status,
      _seconds(response.headers.get("retry-after")),
      reply,
    )

  def close(self) -> None:
    """Ends the request under way, from another thread, and those to come."""
    self._closed = True
    self._disconnect()

  def _disconnect(self) -> None:
    connection, self._connection = self._connection, None
    if connection is not None:
      if connection.sock is not None:
        try:
          connection.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
          pass
      connection.close()

  def _exchange(
    self, path: str, body: bytes, headers: dict[str, str], deadline: float
  ) -> tuple[client.HTTPResponse, bytes]:
    """Sends a request; returns the response and its body. Raises OSError."""
    if self._closed:
      raise OSError("the client is closing")
    remaining_s = max(0.01, deadline - time.monotonic())
    connection = self._connection
    fresh = connection is None
    if connection is None:
      connection = self._connection = self._connect(timeout=remaining_s)
      connection.connect()
      connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sock.settimeout(remaining_s)
    try:
      connection.request("POST", self._prefix + path, body, headers)
      response = connection.getresponse()
    except (client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
      # The server ends idle connections. A batch sent twice is applied once.
      self._disconnect()
      if fresh:
        raise
      return self._exchange(path, body, headers, deadline)
    return response, self._read(connection, response, deadline)

  def _read(
    self,
    connection: client.HTTPConnection,
    response: client.HTTPResponse,
    deadline: float,
  ) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
      remaining_s = deadline - time.monotonic()
      if remaining_s <= 0:
        raise TimeoutError(f"no whole answer within {self._timeout:g} s")
      if connection.sock is not None:
        connection.sock.settimeout(remaining_s)
      part = response.read1(1 << 16)
      if not part:
        response.close()  # Frees the connection for the next request.
        return b"".join(parts)
      size += len(part)
      if size > _MAX_REPLY:
        raise OSError("the answer is too long")
      parts.append(part)


def _seconds(value: str | None) -> float | None:
  try:
    return None if value is None else max(0.0, min(3600.0, float(value)))
  except ValueError:
    return None
