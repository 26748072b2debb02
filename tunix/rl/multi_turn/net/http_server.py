"""Serves HTTP: addresses, tokens, routes that always answer, bounded servers.

A server binds the loopback interface by default; any other address needs a
token. Without a token it answers only to Host headers that name this machine,
so a web page in a browser on this machine cannot read from it. `config` makes
any of them hold its clients to `ConnectionLimits`. `LoopbackServer` runs an
ASGI application in a thread, for clients of the same machine: agents that a run
trains on, notebooks, tests.

Promises: once `LoopbackServer.start` returns, the server answers; once `close`
returns, its thread has ended or its deadline is over.

Does not import a serving package before one is needed.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import ipaddress
import os
import pathlib
import socket
import threading
import time
from typing import Any, Awaitable, Callable, Mapping
from urllib import parse

import pydantic

from ..core import settings as settings_lib
from . import json_models
from . import request_bodies

_START_S = 30.0
_ACCEPTED = 16
_DEFER_S = 1
"""Seconds that the kernel keeps a connection that has sent nothing."""


# --- addresses and tokens -----------------------------------------------------


def listen(host: str, port: int, backlog: int | None = None) -> socket.socket:
  """Binds the address, before anything slow begins.

  Args:
    host: name or address.
    port: 0 chooses a free one.
    backlog: connections that may wait for the server; None: clients cannot
      connect before the server starts.

  Raises:
    ValueError: the address is taken or invalid.
  """
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  # With the protocol named, asyncio sets TCP_NODELAY: else an answer of two
  # parts waits 40 ms for the client to acknowledge the first.
  listening = _Listening(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
  listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  try:
    if hasattr(socket, "TCP_DEFER_ACCEPT"):  # Linux.
      # A connection is accepted once its request has arrived, so a client
      # that sends at once is not displaced in a flood of connections.
      listening.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _DEFER_S
      )
    listening.bind((host, port))
    if backlog is not None:
      # Until a socket listens, another process can bind the port, too.
      listening.listen(backlog)
  except (OSError, OverflowError) as error:
    listening.close()
    raise ValueError(
      f"cannot listen at --host={host} --port={port}: {error}; choose"
      " another port (0: any free one)"
    ) from None
  return listening


class _Listening(socket.socket):
  """A listening socket that accepts a few connections at a time.

  asyncio accepts as many as wait before it tells any protocol, so a flood of
  them would reach the limit of open files before a limit of connections could
  displace any.
  """

  _accepted = 0

  def accept(self) -> tuple[socket.socket, Any]:
    if self._accepted >= _ACCEPTED:
      self._accepted = 0
      raise BlockingIOError  # asyncio tries again in its next round.
    try:
      accepted = super().accept()
    except OSError:
      self._accepted = 0
      raise
    self._accepted += 1
    return accepted


def url_of(host: str, listening: socket.socket) -> str:
  """The URL of a socket that `listen` returned for this host."""
  name = f"[{host}]" if ":" in host else host
  return f"http://{name}:{listening.getsockname()[1]}"


def reached_at(scope: Mapping[str, Any]) -> str:
  """Returns the URL at which a request reached this server.

  The connection's, as the Host header is whatever the client writes.

  Args:
    scope: ASGI scope of the request.
  """
  host, port = scope["server"]
  name = f"[{host}]" if ":" in host else host
  return f"{scope['scheme']}://{name}" + (f":{port}" if port else "")


def is_loopback(host: str) -> bool:
  """Whether a name or address is this machine's loopback interface."""
  try:
    return host == "localhost" or ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False


def names_loopback(host: str) -> bool:
  """Whether a Host header names the loopback interface, at any port.

  True for an empty one as well: browsers always send the header.
  """
  try:
    return not host or is_loopback(parse.urlsplit(f"//{host}").hostname or "")
  except ValueError:
    return False


def cross_site(headers: Mapping[str, str], has_token: bool) -> str:
  """Why a request may be another site's page at work; "" if it is not.

  A page of another site, open in a browser on this machine, can make the
  browser send requests here, with its `Origin`. By DNS rebinding it becomes a
  page of a host name that resolves to this machine, so without a token the
  `Host` must be a name of the loopback interface.

  Args:
    headers: Of the request.
    has_token: Whether the server asks for a token.
  """
  if "origin" in headers:
    return (
      f"a request of a web page (Origin: {headers['origin'][:80]!r}) is not"
      " answered; call from a program"
    )
  host = headers.get("host", "")
  if not has_token and not names_loopback(host):
    return (
      "without a token this server answers at names of its own machine only,"
      f" not Host: {host[:80]!r}; call 127.0.0.1, or start it with a token"
    )
  return ""


def token(file: pathlib.Path | None, host: str, variable: str) -> str:
  """The token of `file`, else of the environment variable; "" for none.

  Raises:
    ValueError: an empty file, or no token where the address needs one.
    OSError: the file cannot be read.
  """
  text = os.environ.get(variable, "")
  if file is not None:
    text = file.read_text(encoding="utf-8").strip()
    if not text:
      raise ValueError(f"--token-file={file} is empty; write the token to it")
  if not text and not is_loopback(host):
    raise ValueError(
      f"--host={host} is reachable from other machines, which needs a token:"
      f" give --token-file, set {variable}, or leave --host at 127.0.0.1"
    )
  return text


def bearer_of(headers: Mapping[str, str]) -> str:
  """Returns the secret of an Authorization header; "" without one."""
  kind, _, secret = headers.get("authorization", "").partition(" ")
  return secret.strip() if kind.lower() == "bearer" else ""


def is_token(presented: str, secret: str) -> bool:
  """Whether a client presents the server's token, in constant time."""
  return hmac.compare_digest(
    presented.encode("latin-1", "replace"), secret.encode()
  )


# --- events -------------------------------------------------------------------

_BREAKS = {
  character.encode(): b"\\u%04x" % ord(character)
  for character in "\x85\u2028\u2029"
}


def event_data(written: bytes) -> bytes:
  """JSON text as one line of a stream of events.

  JSON escapes ASCII line breaks; this escapes Unicode's, at which much-used
  clients (httpx's `aiter_lines`) end a line, too.
  """
  for raw, escaped in _BREAKS.items():
    if raw in written:  # Within a string: the rest of JSON is ASCII.
      written = written.replace(raw, escaped)
  return written


# --- routes -------------------------------------------------------------------


def guarded(
  handler: Callable[[Any], Awaitable[Any]],
  failed: Callable[[Exception], Any],
  done: Callable[[Any, Any, float], None],
) -> Callable[[Any], Awaitable[Any]]:
  """A route's handler that always answers.

  Args:
    handler: turns a request into a response.
    failed: turns an exception of the handler into a response; a
      `ClientDisconnect` too, though that response reaches no client.
    done: receives request, response and seconds.
  """

  async def run(request: Any) -> Any:
    started = time.monotonic()
    try:
      response = await handler(request)
    except asyncio.CancelledError:
      raise
    except Exception as error:  # pylint: disable=broad-except
      response = failed(error)
    done(request, response, time.monotonic() - started)
    return response

  return run


async def unless_gone(request: Any, work: Awaitable[Any]) -> Any:
  """Awaits `work`, which is cancelled when the client disconnects.

  Args:
    request: Starlette's, its body read.
    work: The answer's making.

  Raises:
    ClientDisconnect: Starlette's.
  """
  from starlette import requests  # pylint: disable=g-import-not-at-top

  task = asyncio.ensure_future(work)

  async def gone() -> None:
    # After the body, the next message is the end of the connection.
    while (await request.receive())["type"] != "http.disconnect":
      pass

  watch = asyncio.ensure_future(gone())
  try:
    await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
      raise requests.ClientDisconnect
    return task.result()
  finally:
    for pending in (task, watch):
      pending.cancel()
    await asyncio.gather(task, watch, return_exceptions=True)


# --- servers ------------------------------------------------------------------


def config(
  asgi: Any,
  limits: request_bodies.ConnectionLimits = request_bodies.ConnectionLimits(),
  **options: Any,
) -> Any:
  """uvicorn's configuration of a server whose clients are held to `limits`.

  Args:
    asgi: the application.
    limits: Limits of connections and bodies.
    **options: Options of `uvicorn.Config`, instead of the defaults here.

  Raises:
    ImportError: uvicorn is not installed.
  """
  try:
    import uvicorn  # pylint: disable=g-import-not-at-top
  except ImportError as error:
    raise ImportError(
      "serving needs uvicorn; pip install 'tunix-multi-turn[serve]'"
    ) from error
  from . import connections  # pylint: disable=g-import-not-at-top

  guard = request_bodies.BodyGuard(asgi, limits)
  chosen: dict[str, Any] = dict(
    http=connections.protocol(limits, guard.relieve),
    interface="asgi3",
    # The limits are held in rounds of asyncio's own loop.
    loop="asyncio",
    log_level="warning",
    timeout_keep_alive=limits.idle_timeout,
    timeout_graceful_shutdown=5,
  )
  return uvicorn.Config(guard, **{**chosen, **options})


def add_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
  """Adds an option for each of `ConnectionLimits` to a server's command.

  Args:
    parser: Parser of the command.
    **defaults: Defaults of fields whose own one does not fit this server.
  """
  group = parser.add_argument_group("limits of connections")
  for field in settings_lib.fields(request_bodies.ConnectionLimits):
    group.add_argument(
      f"--{field.name.replace('_', '-')}",
      type=field.type,
      default=defaults.get(field.name, field.default),
      metavar={"s": "S", "MiB": "MIB"}.get(field.unit, "N"),
      help=field.doc,
    )


def limits_of(args: argparse.Namespace) -> request_bodies.ConnectionLimits:
  """The limits that options from `add_options` describe.

  Raises:
    ValueError: naming the first wrong option.
  """
  values = {
    field.name: getattr(args, field.name)
    for field in settings_lib.fields(request_bodies.ConnectionLimits)
  }
  try:
    return request_bodies.ConnectionLimits(**values)
  except pydantic.ValidationError as error:
    name, _, wrong = json_models.problem(error).partition(" ")
    raise ValueError(f"--{name.replace('_', '-')} {wrong}") from None


# --- a server in a thread -----------------------------------------------------


class LoopbackServer:
  """An ASGI application served by a thread; a context manager."""

  def __init__(
    self,
    asgi: Callable[..., Awaitable[None]],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    limits: request_bodies.ConnectionLimits = (
      request_bodies.ConnectionLimits()
    ),
  ):
    """Args:

      asgi: the application.
      host: an address of this machine.
      port: 0 chooses a free one.
      limits: Limits of its connections.

    Raises:
      ImportError: uvicorn is not installed.
      ValueError: the address is taken.
    """
    # The program around it configures logging.
    settings = config(asgi, limits, log_config=None)
    import uvicorn  # pylint: disable=g-import-not-at-top

    self._socket = listen(host, port)
    self.port: int = self._socket.getsockname()[1]
    self.url = url_of(host, self._socket)
    self._server = uvicorn.Server(settings)
    self._thread = threading.Thread(
      target=self._server.run,
      kwargs={"sockets": [self._socket]},
      name="tunix-loopback",
      daemon=True,
    )

  def start(self) -> LoopbackServer:
    """Starts the thread and waits until the server answers.

    Raises:
      TimeoutError: the server did not start.
    """
    self._thread.start()
    deadline = time.monotonic() + _START_S
    while not self._server.started:
      if not self._thread.is_alive() or time.monotonic() > deadline:
        self.close()
        raise TimeoutError(
          f"the server at {self.url} did not start within {_START_S:g} s"
        )
      time.sleep(0.005)
    return self

  def close(self, timeout_s: float = 15.0) -> None:
    """Ends running requests and the thread. Idempotent."""
    self._server.should_exit = True
    if self._thread.ident is not None:
      self._thread.join(timeout_s)
    self._socket.close()

  def __enter__(self) -> LoopbackServer:
    return self.start()

  def __exit__(self, *exc_info: Any) -> None:
    self.close()
