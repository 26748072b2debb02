"""Runs a SOCKS5 proxy on the loopback interface that allows few hosts.

All of a browser context's connections go through one: pages, scripts, images,
web sockets, workers, redirects, whatever opens them. It resolves no name and
opens no connection that `Hosts` does not allow, which it answers "not allowed
by ruleset" (RFC 1928).

A name means the addresses that it had when it was first asked for: a site whose
name comes to mean another machine (DNS rebinding) does not take the browser
there. A name never means a link-local address, where clouds keep credentials,
nor, when it has a public address, one of this machine or its network.

Promises: bounds on connections and on how long each takes to open; `close`
ends all of them.

Does not inspect traffic, and is not meant for other clients than its
browser: any program that reaches the port reaches the allowed hosts.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ipaddress
import socket
from typing import Iterable

from cua_gyms.browser import hosts as hosts_lib

_OPEN_S = 15.0
_MAX_CONNECTIONS = 256
_CHUNK = 1 << 16
_REPORTED = 32
_MAX_NAMES = 4096
_OK, _NOT_ALLOWED, _UNREACHABLE, _BAD_COMMAND = 0, 2, 4, 7


class FilteringProxy:
  """A SOCKS5 proxy to the allowed hosts. Belongs to the loop that opens it.

  Attributes:
    port: it listens on at 127.0.0.1, 0 before `open`.
    blocked: "host:port" -> how often a connection to it was refused, for the
      first few of them.
  """

  def __init__(self, allowed: hosts_lib.Hosts):
    self.port = 0
    self.blocked: collections.Counter[str] = collections.Counter()
    self._allowed = allowed
    self._addresses: dict[str, list[str]] = {}
    self._server: asyncio.Server | None = None
    self._tasks: set[asyncio.Task] = set()

  async def open(self) -> None:
    """Listens on a free port. Raises OSError: none is free."""
    self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
    self.port = self._server.sockets[0].getsockname()[1]

  def close(self) -> None:
    """Ends all connections. Idempotent; does not wait."""
    if self._server is not None:
      self._server.close()
      self._server = None
    for task in self._tasks:
      task.cancel()

  def note(self, where: str) -> None:
    """Counts a refusal."""
    if where in self.blocked or len(self.blocked) < _REPORTED:
      self.blocked[where] += 1

  async def _serve(self, reader, writer) -> None:
    task = asyncio.current_task()
    assert task is not None
    self._tasks.add(task)
    upstream = None
    try:
      if len(self._tasks) > _MAX_CONNECTIONS or self._server is None:
        return
      async with asyncio.timeout(_OPEN_S):
        upstream = await self._negotiate(reader, writer)
      if upstream is not None:
        await self._pump_both(reader, writer, *upstream)
    except (OSError, EOFError, TimeoutError, UnicodeDecodeError):
      pass  # Of one connection: the browser sees that it ended.
    except asyncio.CancelledError:
      pass  # By `close`; a stream's callback would log it.
    finally:
      self._tasks.discard(task)
      for one in (writer, upstream[1] if upstream else None):
        if one is not None:
          with contextlib.suppress(OSError, RuntimeError):
            one.close()

  async def _negotiate(self, reader, writer):
    """Streams to the host that the browser asks for; None when refused."""
    version, count = await reader.readexactly(2)
    if version != 5:
      return None
    methods = await reader.readexactly(count)
    writer.write(b"\x05\x00" if 0 in methods else b"\x05\xff")
    if 0 not in methods:
      return None
    version, command, _, kind = await reader.readexactly(4)
    if kind == 3:
      (length,) = await reader.readexactly(1)
      host = (await reader.readexactly(length)).decode("ascii")
    elif kind in (1, 4):
      packed = await reader.readexactly(4 if kind == 1 else 16)
      host = ipaddress.ip_address(packed).compressed
    else:
      return None
    port = int.from_bytes(await reader.readexactly(2), "big")
    if version != 5 or command != 1:
      self._reply(writer, _BAD_COMMAND)
      return None
    if not self._allowed.allow(host, port):
      self.note(f"{host}:{port}")
      self._reply(writer, _NOT_ALLOWED)
      return None
    try:
      addresses = await self._lookup(hosts_lib.normal(host), port)
      if not addresses:
        self.note(f"{host}:{port}")
        self._reply(writer, _NOT_ALLOWED)
        return None
      upstream = await _connect(addresses, port)
    except (OSError, UnicodeError):
      self._reply(writer, _UNREACHABLE)
      return None
    self._reply(writer, _OK)
    return upstream

  async def _lookup(self, host: str, port: int) -> list[str]:
    """Resolves a host once, to its allowed addresses."""
    try:
      return [ipaddress.ip_address(host).compressed]
    except ValueError:
      pass
    if host not in self._addresses:
      if len(self._addresses) >= _MAX_NAMES:
        return []
      infos = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM
      )
      # Of two concurrent look-ups, both use the first result.
      self._addresses.setdefault(host, may_mean(str(i[4][0]) for i in infos))
    return self._addresses[host]

  def _reply(self, writer, code: int) -> None:
    writer.write(bytes((5, code, 0, 1, 0, 0, 0, 0, 0, 0)))

  async def _pump_both(self, reader, writer, up_reader, up_writer) -> None:
    pumps = [
      asyncio.ensure_future(_pump(reader, up_writer)),
      asyncio.ensure_future(_pump(up_reader, writer)),
    ]
    try:
      await asyncio.gather(*pumps)
    finally:
      for pump in pumps:
        pump.cancel()


def may_mean(addresses: Iterable[str]) -> list[str]:
  """Filters the addresses that a name may mean; see the module docstring."""
  plain: list[str] = []
  public: list[str] = []
  for text in addresses:
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
      address = address.ipv4_mapped or address
    if (
      address.is_link_local or address.is_multicast or (address.is_unspecified)
    ):
      continue
    (public if address.is_global else plain).append(address.compressed)
  return list(dict.fromkeys(public or plain))


async def _connect(addresses: list[str], port: int):
  """Connects to the first address that answers."""
  for i, address in enumerate(addresses):
    try:
      return await asyncio.open_connection(address, port)
    except OSError:
      if i + 1 == len(addresses):
        raise


async def _pump(reader, writer) -> None:
  while data := await reader.read(_CHUNK):
    writer.write(data)
    await writer.drain()
  if writer.can_write_eof():
    writer.write_eof()
