"""Listening sockets, options of limits, and what a server counts."""

import argparse
import asyncio
import socket
import time

import httpx
import pytest
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.net import request_bodies


async def test_an_answer_of_two_parts_does_not_wait_between_them():
  nodelay = asyncio.get_running_loop().create_future()

  def connected(reader, writer):
    line = writer.get_extra_info("socket")
    nodelay.set_result(line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
    writer.close()

  listening = http_server.listen("127.0.0.1", 0)
  async with await asyncio.start_server(connected, sock=listening):
    _, writer = await asyncio.open_connection(*listening.getsockname())
    writer.write(b"x")
    assert await nodelay
    writer.close()


def test_a_few_connections_are_accepted_at_a_time():
  """So that a flood reaches limits before it reaches the last open file."""
  with http_server.listen("127.0.0.1", 0, backlog=100) as listening:
    lines = []
    for _ in range(40):
      line = socket.create_connection(listening.getsockname(), 20)
      line.sendall(b"x")
      lines.append(line)
    listening.setblocking(False)
    bursts = [0]
    due = time.monotonic() + 20
    while sum(bursts) < 40 and time.monotonic() < due:
      try:
        lines.append(listening.accept()[0])
        bursts[-1] += 1
      except BlockingIOError:
        bursts.append(0)
    assert sum(bursts) == 40 and max(bursts) <= 16
    for line in lines:
      line.close()


def parsed(*argv, **defaults):
  parser = argparse.ArgumentParser()
  http_server.add_options(parser, **defaults)
  return http_server.limits_of(parser.parse_args(argv))


def test_every_limit_is_an_option_of_a_servers_command():
  assert parsed() == request_bodies.ConnectionLimits()
  assert parsed(body_memory=7).body_memory == 7
  assert parsed("--body-memory", "9", body_memory=7).body_memory == 9
  assert parsed("--head-timeout", "0.5").head_timeout == 0.5
  with pytest.raises(ValueError, match="--head-timeout must be > 0, got -1"):
    parsed("--head-timeout", "-1")


def test_no_connection_is_counted_after_its_end():
  async def app(scope, receive, send):
    await receive()
    status = 404 if scope["path"] == "/lost" else 200
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b"x"})

  with http_server.LoopbackServer(app) as server:
    pool = server._server.config.http_protocol_class.pool
    with httpx.Client(base_url=server.url, verify=False) as http:
      for _ in range(3):
        assert http.get("/").text == "x"
        assert http.post("/lost", content=b"y" * 300_000).status_code == 404
      due = time.monotonic() + 20  # The rest of the last body is read first.
      while not any(pool.idle.values()) and time.monotonic() < due:
        time.sleep(0.01)
      assert pool.open == 1 and sum(map(len, pool.idle.values())) == 1
      with socket.create_connection(("127.0.0.1", server.port), 20) as line:
        line.sendall(b"GET / HTTP/1.1\r\nnonsense\r\n\r\n")
        assert line.recv(100).startswith(b"HTTP/1.1 400")
    due = time.monotonic() + 20
    while pool.open and time.monotonic() < due:
      time.sleep(0.01)
    assert not (pool.open or pool.busy or pool.num_fresh)
    assert not (pool.held or pool.busy_of or pool.fresh or pool.idle)
