"""Failed calls are repeated, or not, by their kind."""

import asyncio
import contextlib
import random

import httpx
import pytest
import scripted_http
import tenacity
from tunix.rl.multi_turn.net import http

PASSES = tenacity.retry_if_exception(
  lambda error: isinstance(error, http.CallError) and error.status != 400
)


def failing(*statuses, pause=None):
  """Fails with these statuses in turn, then returns the number of calls."""
  calls = []

  async def attempt():
    calls.append(len(calls))
    if len(calls) <= len(statuses):
      error = http.CallError("no", statuses[len(calls) - 1])
      error.retry_after_s = pause
      raise error
    return len(calls)

  return calls, attempt


def run(policy, attempt, **more):
  async def main():
    return await policy.run(attempt, **more)

  return asyncio.run(main())


def test_a_call_that_may_pass_is_made_as_often_as_there_are_tries():
  policy = http.RetryPolicy(3, retry=PASSES)
  assert run(policy, failing(0, 500)[1]) == 3
  calls, attempt = failing(500, 0, 503, 500)
  with pytest.raises(http.CallError) as raised:
    run(policy, attempt)
  assert raised.value.status == 503 and len(calls) == 3


@pytest.mark.parametrize(
  "policy", [http.RetryPolicy(3, retry=PASSES), http.RetryPolicy()]
)
def test_a_refusal_is_not_repeated(policy):
  calls, attempt = failing(400)
  with pytest.raises(http.CallError):
    run(policy, attempt)
  assert len(calls) == 1


def test_waiting_for_a_full_server_is_no_failed_try():
  policy = http.RetryPolicy(2, retry=PASSES)
  assert run(policy, failing(*[429] * 9, 500, pause=0.0)[1]) == 11


def test_a_full_server_is_not_asked_beyond_the_deadline():
  async def main():
    calls, attempt = failing(*[429] * 99, pause=5.0)
    due = asyncio.get_running_loop().time() + 1.0
    with pytest.raises(http.CallError) as raised:
      await http.RetryPolicy(jitter=0.5).run(attempt, due=due)
    assert raised.value.full and len(calls) == 1

  asyncio.run(main())


def test_other_errors_and_cancellations_go_through():
  async def broken():
    raise KeyError("x")

  with pytest.raises(KeyError):
    run(http.RetryPolicy(3, retry=PASSES), broken)

  async def main():
    policy = http.RetryPolicy(3, tenacity.wait_fixed(60), PASSES)
    task = asyncio.create_task(policy.run(failing(500)[1]))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task

  asyncio.run(main())


@pytest.mark.parametrize("status", [200, 401, 500])
async def test_a_server_that_echoes_a_credential_puts_it_into_no_error(status):
  secret = "sk-the-key-of-the-tests"

  def echo(method, path, body):
    return status, f"<html>you sent Bearer {secret}</html>".encode()

  with scripted_http.scripted(echo) as (url, server):
    client = http.Http(headers={"authorization": f"Bearer {secret}"})
    with pytest.raises(http.CallError) as caught:
      await client.ask("GET", url, 10)
    await client.aclose()
  assert server.requests[0][3]["authorization"] == f"Bearer {secret}"
  assert secret not in str(caught.value) and "***" in str(caught.value)
  assert str(status) in caught.value.summary
  assert "html" not in caught.value.summary


async def test_calls_that_are_cancelled_leave_no_connection_open():
  rng, sent = random.Random(0), {}

  async def serve(reader, writer):
    sent[writer] = 0
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
      while True:
        await reader.readuntil(b"\r\n\r\n")
        sent[writer] += 1
        await asyncio.sleep(rng.random() * 0.004)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
    del sent[writer]
    writer.close()

  server = await asyncio.start_server(serve, "127.0.0.1", 0)
  port = server.sockets[0].getsockname()[1]
  client = httpx.AsyncClient(timeout=30, trust_env=False)
  cut = 0

  async def calls():
    nonlocal cut
    for _ in range(200):
      request = client.build_request("GET", f"http://127.0.0.1:{port}/")
      call = asyncio.create_task(http.send(client, request))
      await asyncio.wait({call}, timeout=rng.random() / 100)
      if call.done():
        await call.result().aclose()
        continue
      cut += 1
      call.cancel()
      await asyncio.wait({call})

  await asyncio.gather(*(calls() for _ in range(8)))
  assert cut > 100
  for _ in range(200):
    unused = [writer for writer, count in sent.items() if not count]
    if not unused:
      break
    await asyncio.sleep(0.05)
  assert not unused, f"{len(unused)} connections after {cut} calls"
  await client.aclose()
  server.close()
