"""Hostile third-party servers, and clients that withstand them.

Each of the clients is led to servers that redirect, drip, stop in the middle,
send too much or something else: it must raise its own kind of error, in time,
and never do an action twice.
"""

import asyncio
import base64
import contextlib
import dataclasses
import gzip
import io
import json
import logging
import threading
import time
import zlib

from cua_gyms import genv
from cua_gyms import machines
from cua_gyms.android_world import android_world_gym as android_world
from cua_gyms.gbox import gbox_gym as gbox
from cua_gyms.openenv import openenv_gym as openenv
from cua_gyms.osworld import osworld_gym as osworld
import numpy as np
from PIL import Image
import pytest
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments import options
from tunix.rl.multi_turn.environments import wire
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.net import http as http_lib
from websockets.asyncio import server as ws_server

GuiAction = gui_action.GuiAction
SECONDS = 2.0
CLICK = GuiAction("click", x=1, y=1)


class Server:
  """Answers bytes; `log` has the (method, path) of each request.

  Args:
    answer: `(path, writer) -> bytes | None`, maybe async.
  """

  def __init__(self, answer):
    self._answer = answer
    self.log = []
    self.open = 0

  async def serve(self, reader, writer):
    self.open += 1
    try:
      while line := await reader.readline():
        method, path, _ = line.decode().split()
        size = 0
        while (header := await reader.readline()) not in (b"\r\n", b""):
          name, _, value = header.decode().partition(":")
          size = int(value) if name.lower() == "content-length" else size
        await reader.readexactly(size)
        self.log.append((method, path))
        answer = self._answer(path, writer)
        answer = await answer if asyncio.iscoroutine(answer) else answer
        if answer is None:
          return
        writer.write(answer)
        await writer.drain()
    except (
      ConnectionError,
      asyncio.IncompleteReadError,
      asyncio.CancelledError,
    ):
      pass  # The client has gone, or the test is over.
    finally:
      self.open -= 1
      writer.close()


@contextlib.asynccontextmanager
async def serving(answer):
  server = Server(answer)
  listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
  port = listening.sockets[0].getsockname()[1]
  try:
    yield f"http://127.0.0.1:{port}", server
  finally:
    listening.close()


def http(body=b"{}", status="200 OK", kind="application/json", **headers):
  lines = [f"HTTP/1.1 {status}", f"content-type: {kind}"]
  headers.setdefault("content-length", len(body))
  lines += [f"{k.replace('_', '-')}: {v}" for k, v in headers.items()]
  return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def png(width=8, height=6):
  return wire.to_png(np.zeros((height, width, 3), np.uint8))


def bomb(width=60_000, height=60_000):
  """A PNG of 10 GB in less than 100 bytes."""
  data = bytearray(png())
  data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
  data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
  return bytes(data)


def make_gbox(url, seconds=SECONDS, close_s=0.2):
  return gbox.GboxGym(
    base_url=url, call_s=seconds, create_s=seconds, close_s=close_s, settle_s=0
  )


def make_osworld(url):
  return osworld.OSWorldGym(
    url, reset="none", call_s=SECONDS, start_s=0.05, settle_s=0
  )


def make_android(url, seconds=SECONDS, close_s=0.2):
  return android_world.AndroidWorldGym(
    url, call_s=seconds, start_s=seconds, close_s=close_s
  )


def make_genv(url, seconds=SECONDS, close_s=0.2):
  quick = {
    kind: dataclasses.replace(policy, tries=1)
    for kind, policy in genv.RETRIES.items()
  }
  limits = dict.fromkeys(("tasks", "create", "step"), seconds)
  timeouts = genv.Timeouts(**limits, terminate=close_s)
  client = genv.GenvClient(url, "g", timeouts=timeouts, retries=quick)
  return genv.GenvGym(client=client)


TASK = base.Task(
  "t",
  "f",
  params={
    "evaluate": {"command": "true"},
    "android_world": {"task_type": "a", "task_idx": 0},
    "osworld": {"config": [], "evaluator": {"func": "infeasible"}},
  },
)
CLIENTS = {
  "gbox": (make_gbox, gbox.GboxError),
  "osworld": (make_osworld, osworld.OSWorldError),
  "android_world": (make_android, android_world.AndroidWorldError),
  "genv": (make_genv, genv.GenvError),
}


async def drip(path, writer):
  del path
  writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
  while True:  # A byte now and then keeps any timeout of reads from passing.
    writer.write(b" ")
    await writer.drain()
    await asyncio.sleep(0.05)


def cut(path, writer):
  del path
  writer.write(http(b"{", content_length=50))


ANSWERS = {
  "a redirect": (
    lambda p, w: http(b"{}", "307 Moved", location="http://127.0.0.1:9/"),
    "redirect",
  ),
  "a redirect that says done": (
    lambda p, w: http(b"{}", "302 Found", location="/login"),
    "redirect",
  ),
  "drips": (drip, "did not answer"),
  "cut": (cut, "failed|did not answer"),
  "no http": (lambda p, w: b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "failed"),
  "html": (lambda p, w: http(b"<html>", kind="text/html"), "JSON"),
  "a list": (lambda p, w: http(b"[]"), "object"),
  "a number": (lambda p, w: http(b"NaN"), "object"),
  "too deep": (lambda p, w: http(b"[" * 100_000), "JSON"),
  "no text": (lambda p, w: http(b"\xff\xfe{\x00}"), "object|JSON"),
  "zipped": (
    lambda p, w: http(gzip.compress(b"{}"), content_encoding="gzip"),
    "content-encoding 'gzip'",
  ),
  "nothing": (lambda p, w: http(b""), "object|JSON"),
  "a failure without end": (
    lambda p, w: http(b"x" * 200_000, "500 Error"),
    "500 xxx",
  ),
}


@pytest.mark.parametrize("name", CLIENTS)
async def test_what_is_no_answer_is_the_clients_own_error_in_time(name, caplog):
  caplog.set_level(logging.ERROR)
  make, kind = CLIENTS[name]
  for what, (answer, words) in ANSWERS.items():
    async with serving(answer) as (url, server):
      gym = make(url)
      began = time.monotonic()
      with pytest.raises(kind, match=words):
        await gym.start(TASK)
      await gym.close()
      assert time.monotonic() - began < 30, what
      assert len(server.log) <= 4, what
  # A machine that failed is not kept.
  assert await machines.take(["http://127.0.0.1:9"], 0.0)
  machines.give_back("http://127.0.0.1:9")


async def test_an_answer_beyond_the_limit_is_not_kept():
  sent = 0

  async def flood(path, writer):
    nonlocal sent
    del path
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n")
    while True:
      writer.write(b" " * 65536)
      sent += 65536
      await writer.drain()

  async with serving(flood) as (url, _):
    calls = http_lib.Http()
    with pytest.raises(http_lib.CallError, match="more than 1000000 bytes"):
      await calls.call("GET", url, 10.0, limit=1_000_000)
    await calls.aclose()
    assert sent < 50_000_000  # What the sockets' buffers take, at most.


@pytest.mark.parametrize(
  "picture, words",
  [
    (bomb(), "60000x60000|exceeds limit"),
    (bomb(9000, 9000), "9000x9000 pixels, more than"),
    (png()[:40], "not a picture"),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture"),
    (b"", "not a picture"),
  ],
  ids=["bomb", "large", "truncated", "postscript", "empty"],
)
async def test_a_picture_too_large_or_none_is_refused_before_it_is_decoded(
  picture, words, monkeypatch
):
  def never(*_):
    raise AssertionError("it was decoded")

  if b"IEND" in picture:
    monkeypatch.setattr(Image.Image, "convert", never)
  text = base64.b64encode(picture).decode()
  shot = json.dumps({"uri": text}).encode()

  def as_gbox(path, writer):
    del writer
    return http(shot if "screenshot" in path else b'{"id": "b"}')

  def as_osworld(path, writer):
    del writer
    if "screenshot" in path:
      return http(picture, kind="image/png")
    return http(b'{"width": 8, "height": 6}')

  def as_genv(path, writer):
    del path, writer
    observation = {"screenshot": {"data": text}}
    created = {"execution_id": "x", "observation": observation}
    return http(json.dumps(created).encode())

  for name, answer in (
    ("gbox", as_gbox),
    ("osworld", as_osworld),
    ("genv", as_genv),
  ):
    make, kind = CLIENTS[name]
    async with serving(answer) as (url, _):
      gym = make(url)
      with pytest.raises(kind, match=words):
        await gym.start(TASK)
      await gym.close()


def test_pictures_come_in_the_formats_that_servers_send():
  for name in ("PNG", "JPEG", "WEBP"):
    out = io.BytesIO()
    Image.new("RGB", (5, 4), (9, 9, 9)).save(out, name)
    assert wire.from_png(out.getvalue()).shape == (4, 5, 3)


# --- an action is done once ---------------------------------------------------


def _playing(broken):
  """Each protocol up to an action; what it answers to that is `broken`."""
  shot = json.dumps({"uri": base64.b64encode(png()).decode()}).encode()
  pixels = json.dumps({"pixels": [[[0, 0, 0]] * 8] * 6}).encode()

  def answer(path, writer):
    if "/actions/click" in path or path in ("/execute", "/execute_action"):
      return broken(path, writer)
    if path == "/screenshot":
      return http(png())
    if path.startswith("/screenshot"):
      return http(pixels)
    if "screenshot" in path:
      return http(shot)
    return http(
      b'{"id": "b", "width": 8, "height": 6, "goal": "g", "status": "running"}'
    )

  return answer


@pytest.mark.parametrize("name", ["gbox", "osworld", "android_world"])
@pytest.mark.parametrize(
  "broken",
  [
    lambda p, w: None,  # Done, and the connection lost.
    cut,
    lambda p, w: http(b"{}", "503 Busy", retry_after=0),
    lambda p, w: http(b"{}", "308 Moved", location=p),
  ],
  ids=["lost", "cut", "busy", "redirect"],
)
async def test_a_click_whose_answer_is_lost_is_not_done_again(name, broken):
  make, kind = CLIENTS[name]
  async with serving(_playing(broken)) as (url, server):
    gym = make(url)
    await gym.start(TASK)
    clicks = lambda: [
      p for _, p in server.log if "click" in p or "execute" in p
    ]
    with pytest.raises(kind):
      await gym.act(CLICK)
    assert len(clicks()) == 1
    await gym.close()
    async with asyncio.timeout(5):
      while server.open:  # No connection is left.
        await asyncio.sleep(0.01)


# --- what is given up leaves nothing ------------------------------------------


async def test_a_box_that_nobody_waits_for_is_terminated_when_it_comes():
  may_come = asyncio.Event()

  async def answer(path, writer):
    del writer
    if path.endswith("/linux"):
      await may_come.wait()
      return http(b'{"id": "late", "status": "running"}')
    return http(b"")

  async with serving(answer) as (url, server):
    gym = gbox.GboxGym(base_url=url)
    starting = asyncio.ensure_future(gym.start(TASK))
    async with asyncio.timeout(20):
      while not server.log:
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
      await starting
    await gym.close()
    assert len(server.log) == 1
    may_come.set()
    async with asyncio.timeout(10):
      while server.open or len(server.log) < 2:
        await asyncio.sleep(0.01)
    assert server.log[1][1] == "/boxes/late/terminate"


@pytest.mark.parametrize("name", ["gbox", "android_world", "genv"])
async def test_a_close_that_is_given_up_still_ends_what_it_holds(name):
  """Gives up before the first byte is sent, and during the answer."""
  ends = {
    "gbox": "terminate",
    "android_world": "tear_down",
    "genv": "terminate",
  }[name]
  answering = _playing(cut)
  shot = {"screenshot": {"data": base64.b64encode(png()).decode()}}
  created = {"execution_id": "x", "observation": shot}
  ended = 0
  arrived, may_end = asyncio.Event(), asyncio.Event()

  async def answer(path, writer):
    nonlocal ended
    if ends in path:
      arrived.set()
      await may_end.wait()
      ended += 1
    if name == "genv":
      return http(json.dumps(created).encode())
    return answering(path, writer)

  make = CLIENTS[name][0]
  for i, given_up in enumerate(("before the first byte", "answered")):
    arrived.clear()
    may_end.clear()
    async with serving(answer) as (url, server):
      gym = make(url, seconds=30.0, close_s=30.0)  # Given up, not run out.
      await gym.start(TASK)
      closing = asyncio.ensure_future(gym.close())
      await asyncio.sleep(0)
      if given_up == "answered":
        await asyncio.wait_for(arrived.wait(), 20)
      closing.cancel()
      with pytest.raises(asyncio.CancelledError):
        await closing
      if name == "android_world":  # It is not another's before it is done.
        assert await machines.take([url], 0.0) is None
      may_end.set()
      async with asyncio.timeout(10):
        while ended == i or server.open:
          await asyncio.sleep(0.01)
      if name == "android_world":
        assert await machines.take([url], 5.0) == url
        machines.give_back(url)
      await gym.close()
      assert ended == i + 1


async def test_a_machine_whose_reset_still_runs_is_nobodys():
  free = threading.Event()
  async with serving(lambda p, w: http()) as (url, _):

    def reset(where):
      del where
      free.wait(30)

    gym = osworld.OSWorldGym(url, reset=reset, start_s=0.1)
    with pytest.raises(TimeoutError, match="reset"):
      await gym.start(TASK)
    await gym.close()
    assert await machines.take([url], 0.0) is None
    free.set()
    assert await machines.take([url], 10.0) == url
    machines.give_back(url)


# --- OpenEnv's sessions -------------------------------------------------------

SEEN = {
  "type": "observation",
  "data": {"observation": {"screenshot": [[[1, 2, 3]] * 4] * 2}},
}


@contextlib.asynccontextmanager
async def sessions(answers):
  """`answers(message)` returns every message that is sent after it."""

  async def serve(socket):
    async for text in socket:
      for answer in answers(json.loads(text)):
        await socket.send(json.dumps(answer))

  async with ws_server.serve(serve, "127.0.0.1", 0) as served:
    port = served.sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"


async def test_an_answer_that_nobody_asked_for_is_not_taken_for_another():
  async with sessions(lambda m: [SEEN, SEEN]) as url:
    gym = openenv.OpenEnvGym(url)
    await gym.start(base.Task("t", "f"))
    await asyncio.sleep(0.2)
    with pytest.raises(openenv.OpenEnvError, match="before 'step' was asked"):
      await gym.act(CLICK)
    with pytest.raises(openenv.OpenEnvSessionLostError):
      await gym.act(CLICK)
    await gym.close()
  state = {"type": "state", "data": {}}
  async with sessions(lambda m: [state]) as url:
    gym = openenv.OpenEnvGym(url)
    with pytest.raises(openenv.OpenEnvError, match="'state', not 'observat"):
      await gym.start(base.Task("t", "f"))
    await gym.close()


async def test_a_session_is_not_led_to_another_server():
  """Nor is the token that it was opened with."""
  async with sessions(lambda m: [SEEN]) as other:
    redirect = http(b"", "302 Found", location=f"ws{other[4:]}/ws")
    async with serving(lambda p, w: redirect) as (url, _):
      gym = openenv.OpenEnvGym(url)
      with pytest.raises(openenv.OpenEnvRequestError, match="redirect"):
        await gym.start(base.Task("t", "f"))
      await gym.close()


@pytest.mark.parametrize(
  "picture", [[[[10**30, 0, 0]]], [[["x", 0, 0]]], [], 7]
)
async def test_numbers_that_are_no_picture_are_refused(picture):
  data = {"observation": {"screenshot": picture}}
  async with sessions(lambda m: [{**SEEN, "data": data}]) as url:
    gym = openenv.OpenEnvGym(url)
    with pytest.raises(openenv.OpenEnvError, match="screenshot"):
      await gym.start(base.Task("t", "f"))
    await gym.close()


# --- settings -----------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "http://h:99999", "http://[::1", "http://u:p@h/", "http://h/?a=b",
        "file:///etc/passwd", "http://h/\n", "h:80", "http://h#x", 5,
    ],
)  # fmt: skip
def test_addresses_that_cannot_be_are_refused_by_every_client(url):
  for make, name in (
    (lambda u: gbox.GboxGym(base_url=u), "base_url"),
    (lambda u: osworld.OSWorldGym(u, reset="none"), "machines"),
    (android_world.AndroidWorldGym, "machines"),
    (lambda u: genv.GenvGym(u), "base_url"),
    (lambda u: openenv.OpenEnvGym(u), "base_url"),
  ):
    with pytest.raises(ValueError, match=name):
      make([url] if name == "machines" else url)


@pytest.mark.parametrize(
  "value", [0, -1, float("nan"), float("inf"), True, "5", None, 10**400]
)
def test_deadlines_that_cannot_be_are_refused_by_their_name(value):
  with pytest.raises(ValueError, match="call_s="):
    options.check_seconds({"call_s": value})
  for make in (
    lambda: gbox.GboxGym(call_s=value),
    lambda: osworld.OSWorldGym(reset="none", call_s=value),
    lambda: android_world.AndroidWorldGym(call_s=value),
    lambda: genv.GenvGym(timeouts={"step": value}),
    lambda: openenv.OpenEnvGym(timeouts={"step": value}),
  ):
    with pytest.raises(ValueError, match=r"call_s=|timeouts\.step="):
      make()
