"""Bodies in memory, in time, and in turn."""

import asyncio

import pytest
from starlette import requests as starlette_requests
from tunix.rl.multi_turn.net import request_bodies

MIB = 1 << 20


def scope(length=None):
  headers = [(b"host", b"localhost")]
  headers.append(
    (b"transfer-encoding", b"chunked")
    if length is None
    else (b"content-length", b"%d" % length)
  )
  return {"type": "http", "method": "POST", "path": "/", "headers": headers}


class Client:
  """Sends the given parts; `held` are bytes granted while it was read."""

  def __init__(self, guard_limits, app=None):
    self.release = asyncio.Event()
    self.guard = request_bodies.BodyGuard(app or self._app, guard_limits)
    self.ended = []

  async def _app(self, scope_, receive, send):
    more, size = True, 0
    while more:
      message = await receive()
      size += len(message["body"])
      more = message["more_body"]
    await self.release.wait()
    self.ended.append(size)

  def sends(self, *parts, wait=None):
    messages = [
      {"type": "http.request", "body": b" " * size, "more_body": True}
      for size in parts
    ]
    if wait is None:
      messages[-1]["more_body"] = False

    async def receive():
      if not messages:
        await asyncio.sleep(wait)
      return messages.pop(0)

    length = sum(parts) + (10 * MIB if wait else 0)

    async def nothing(message):
      del message

    return asyncio.create_task(self.guard(scope(length), receive, nothing))


def limits(**changes):
  return request_bodies.ConnectionLimits(**changes)


async def test_bodies_beyond_memory_wait_in_order_and_all_is_given_back():
  client = Client(limits(body_memory=3))
  tasks = [client.sends(2 * MIB), client.sends(2 * MIB + 1), client.sends(9000)]
  await asyncio.sleep(0.05)
  assert client.guard.held == 2 * MIB  # The small one passes uncounted.
  client.release.set()
  await asyncio.gather(*tasks)
  assert client.guard.held == 0
  assert client.ended[-1] == 2 * MIB + 1 and len(client.ended) == 3


async def test_a_body_that_finds_no_memory_in_time_is_asked_to_come_again():
  client = Client(limits(body_memory=1, body_timeout=0.1))
  first = client.sends(MIB)
  await asyncio.sleep(0.01)
  with pytest.raises(request_bodies.BodyRefused) as caught:
    await client.sends(MIB)
  assert caught.value.status == 429 and caught.value.retry_after_s
  client.release.set()
  await first
  assert client.guard.held == 0


async def test_requests_that_hold_memory_do_not_wait_for_more():
  async def app(scope_, receive, send):
    del send
    await receive()
    request = starlette_requests.Request(scope_)
    await request_bodies.hold(request, MIB)
    await asyncio.sleep(0.01)  # Until the other has its first, too.
    await request_bodies.hold(request, MIB)

  client = Client(limits(body_memory=2), app)
  answers = await asyncio.wait_for(
    asyncio.gather(
      client.sends(9000), client.sends(9000), return_exceptions=True
    ),
    5.0,
  )
  (refused,) = [a for a in answers if a is not None]
  assert refused.status == 429 and client.guard.held == 0


async def test_slow_bodies_give_way_only_to_others(monkeypatch):
  monkeypatch.setattr(request_bodies, "_GRACE_S", 0.1)
  monkeypatch.setattr(request_bodies, "_LOOK_S", 0.05)
  client = Client(limits(body_memory=16))
  client.release.set()
  slow = client.sends(1000, wait=60)
  await asyncio.sleep(0.3)
  assert not slow.done() and client.guard.held == 10 * MIB + 1000
  await client.sends(8 * MIB)
  with pytest.raises(request_bodies.BodyRefused, match="slowly") as caught:
    await slow
  assert caught.value.status == 408 and client.guard.held == 0


async def test_a_client_that_goes_while_it_waits_leaves_nothing():
  client = Client(limits(body_memory=1))
  first = client.sends(MIB)
  await asyncio.sleep(0.01)
  waiting = [client.sends(MIB) for _ in range(3)]
  await asyncio.sleep(0.01)
  for task in waiting[:2]:
    task.cancel()
  await asyncio.gather(*waiting[:2], return_exceptions=True)
  client.release.set()
  await asyncio.gather(first, waiting[2])
  assert client.guard.held == 0 and client.ended == [MIB, MIB]


async def test_large_bodies_are_handed_out_one_a_turn():
  """Between two that are parsed, the loop does everything else once."""
  order = []

  async def app(scope_, receive, send):
    await receive()
    order.append("body")

  client = Client(limits(body_memory=64), app)
  tasks = [client.sends(4 * MIB) for _ in range(5)]

  async def others():
    while not all(t.done() for t in tasks):
      order.append("others")
      await asyncio.sleep(0)

  await asyncio.gather(others(), *tasks)
  joined = "".join(o[0] for o in order)
  assert "bb" not in joined and joined.count("b") == 5
