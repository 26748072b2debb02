"""Attacks of a hostile client on a server's connections and bodies."""

import contextlib
import json
import socket
import time

try:
  from tunix.rl.multi_turn.net import request_bodies
except ImportError:  # The package training_monitor is tested alone.
  from training_monitor.net import request_bodies

MOST = 24
LIMITS = request_bodies.ConnectionLimits(
  max_connections=MOST, max_client_connections=MOST, body_memory=1
)
"""Of a server that is to be attacked: little of everything."""


class Server:
  """A server under attack: its port, and a path that takes bodies."""

  def __init__(self, url, path, most, refused=()):
    """`most`: bytes of a body; `refused`: header lines of a wrong token."""
    self.address = ("127.0.0.1", int(url.rpartition(":")[2].strip("/")))
    self.path, self.most = path, most
    self._headers = [f"POST {path} HTTP/1.1", "Host: localhost", *refused]

  def connect(self, sent=b""):
    line = socket.create_connection(self.address, timeout=20)
    line.sendall(sent)
    return line

  def head(self, *lines):
    return "\r\n".join([*self._headers, *lines, "", ""]).encode()

  def health(self):
    """Its answer to a client that has nothing to do with an attack."""
    with self.connect(
      b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    ) as line:
      return status(line)

  def post(self, size):
    """(status, body) of a request with a body of this size."""
    with self.connect(self.head(f"Content-Length: {size}")) as line:
      line.sendall(b" " * size)
      return answer(line)


def status(line):
  """Of the next answer; 0: the server hung up without one."""
  with contextlib.suppress(ConnectionError):
    first = line.makefile("rb").readline()
    return int(first.split()[1]) if first else 0
  return 0


def answer(line):
  """(status, JSON) of the next answer."""
  file = line.makefile("rb")
  found, length = int(file.readline().split()[1]), 0
  while header := file.readline().strip().lower():
    if header.startswith(b"content-length:"):
      length = int(header.partition(b":")[2])
  return found, json.loads(file.read(length))


@contextlib.contextmanager
def held(server, count, sent):
  """`count` connections that have sent this and stay."""
  with contextlib.ExitStack() as stack:
    lines = []
    for _ in range(count):
      lines.append(stack.enter_context(server.connect(sent)))
      time.sleep(0.002)  # In this order, at the server, too.
    yield lines


class Withstands:
  """Tests of a server under attack, which the fixture `server` starts."""

  def test_half_heads_are_displaced(self, server):
    begun = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "
    with held(server, 3 * MOST, begun) as lines:
      assert [server.health() for _ in range(5)] == [200] * 5
      assert [status(line) for line in lines[:MOST]] == [408] * MOST
      lines[-1].sendall(b"y\r\n\r\n")  # Slow, and honest.
      assert status(lines[-1]) == 200

  def test_bodies_that_do_not_come_hold_no_place(self, server):
    head = server.head("Content-Length: 100000")
    with held(server, 2 * MOST, head + b" ") as lines:
      assert [server.health() for _ in range(5)] == [200] * 5
      late, refused = lines[-1], server.connect(head)
      code, body = answer(refused)
      refused.close()
      assert code == 429 and "connections" in json.dumps(body)
      assert status(late) == 429
      assert server.post(10)[0] == 429
    deadline = time.monotonic() + 20
    while server.post(10)[0] == 429:  # Until it has seen that they have gone.
      assert time.monotonic() < deadline

  def test_large_bodies_are_refused_unread(self, server):
    with server.connect(
      server.head(f"Content-Length: {server.most + 1}")
    ) as line:
      code, body = answer(line)  # Nothing of the body is sent.
      assert code == 413 and f"{server.most:,}" in json.dumps(body)
    with server.connect(server.head(f"Content-Length: {10**30}")) as line:
      assert status(line) in (400, 413)

  def test_chunks_are_counted(self, server):
    """A body of unknown length, and one whose chunks are dust."""
    part = b"10000\r\n" + b" " * 65536 + b"\r\n"
    with server.connect(server.head("Transfer-Encoding: chunked")) as line:
      with contextlib.suppress(ConnectionError):
        for _ in range((LIMITS.body_memory << 4) + 40):
          line.sendall(part)
      assert status(line) in (413, 429, 0)
    with server.connect(server.head("Transfer-Encoding: chunked")) as line:
      with contextlib.suppress(ConnectionError):
        for _ in range(200):
          line.sendall(b"1\r\n \r\n" * 4096)
      assert status(line) == 0
    assert server.health() == 200

  def test_bodies_wait_for_memory(self, server):
    """Two bodies that do not fit together are read one after the other."""
    size = 700_000
    with server.connect(server.head(f"Content-Length: {size}")) as first:
      first.sendall(b" " * (size - 1))
      with server.connect(server.head(f"Content-Length: {size}")) as second:
        second.sendall(b" " * 100)
        time.sleep(0.1)
        assert server.health() == 200
        first.sendall(b" ")
        assert status(first) not in (0, 408, 429)
        second.sendall(b" " * (size - 100))
        assert status(second) not in (0, 408, 429)
    with server.connect(server.head(f"Content-Length: {2 << 20}")) as line:
      assert status(line) == 413  # It would never fit.


def strangers_hold_nothing(server):
  """Without the token, a body is not asked for."""
  with held(server, 3 * MOST, server.head("Content-Length: 900000")) as lines:
    assert {status(line) for line in lines[-MOST // 2 :]} == {401}
    assert server.health() == 200
