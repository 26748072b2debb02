"""Screenshots on their way: before what shows them, once, and to the pixel."""

import io
import re
import time

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import monitor_server
import numpy as np
from PIL import Image
import pytest
from tunix.rl.multi_turn import images as images_lib
from tunix.rl.multi_turn import serving
from tunix.rl.multi_turn.monitor import app as app_lib
from tunix.rl.multi_turn.monitor.client import ingest_client
from tunix.rl.multi_turn.monitor.client import png
from tunix.rl.multi_turn.monitor.client import sender as sender_lib
from tunix.rl.multi_turn.monitor.client import spool as spool_lib

DEAD = "http://127.0.0.1:9"  # Nobody listens there.


@pytest.fixture
def server(tmp_path):
  with monitor_server.sqlite_server(tmp_path / "server") as found:
    yield found


def client_of(url, folder):
  return ingest_client.IngestClient(
      url, timeout_seconds=10, spool_dir=folder, target="the monitor"
  )


def shown(count, seed=0):
  """Parts of a batch, each with a screenshot that it names."""
  rng = np.random.default_rng(seed)
  for n in range(count):
    pixels = rng.integers(0, 256, (8, 9, 3), np.uint8)
    sha = images_lib.hash_pixels(pixels)
    task = {"task_id": f"t{n}", "description": f"sha256:{sha}"}
    yield sender_lib.Made({"tasks": [task]}, {sha: png.encode(pixels)})


class Front:
  """The server, and what it has not got of what it is told of."""

  def __init__(self, server):
    self.server = server
    self.early = set()
    self.told = set()
    self.refuse = False

  async def __call__(self, scope, receive, send):
    if scope["type"] == "lifespan":
      return  # The server's own is under way.
    path = scope["path"]
    if self.refuse and path.startswith("/api/v1/screenshots"):
      await send({"type": "http.response.start", "status": 503, "headers": []})
      await send({"type": "http.response.body", "body": b"{}"})
      return
    if path != "/api/ingest/batch":
      await self.server.app.asgi(scope, receive, send)
      return
    messages = []
    while not messages or messages[-1].get("more_body"):
      messages.append(await receive())
    body = b"".join(message["body"] for message in messages)
    named = set(re.findall(r"sha256:(\w{64})", body.decode()))
    rows = self.server.rows("monitor_screenshot", order=1)
    self.early |= named - {row["sha256"] for row in rows}
    self.told |= named

    async def again():
      return messages.pop(0) if messages else await receive()

    await self.server.app.asgi(scope, again, send)


def test_a_screenshot_is_there_before_what_shows_it(server, tmp_path):
  front = Front(server)
  with serving.LoopbackServer(front) as url:
    waited = client_of(DEAD, tmp_path / "spool")
    for made in shown(350):  # More than are asked for at once.
      waited.sender.put(made)
    assert waited.flush() and not waited.close(0.1)
    with client_of(url.url, tmp_path / "spool") as client:
      for made in shown(150, seed=1):
        client.sender.put(made)
        client.flush()
      assert client.drain(30)
    deadline = time.monotonic() + 60
    while list((tmp_path / "spool").glob("*.spool")):  # Left by the first.
      with client_of(url.url, tmp_path / "spool") as client:
        time.sleep(0.2)
        assert client.drain(30) and time.monotonic() < deadline
  assert len(front.told) == 500 and not front.early


def test_words_do_not_wait_for_a_disk_that_takes_no_pictures(server, tmp_path):
  front = Front(server)
  front.refuse = True
  with serving.LoopbackServer(front) as url:
    with client_of(url.url, tmp_path / "spool") as client:
      for made in shown(3):
        client.sender.put(made)
      assert not client.drain(2)
      assert len(server.rows("task", order="task_id")) == 3
      assert client.sender.spool.counts()["image"] == 3
      front.refuse = False
      assert client.drain(30)
  assert len(server.rows("monitor_screenshot", order=1)) == 3


def test_images_of_a_spool_come_with_their_entries(tmp_path):
  spool = spool_lib.Spool(tmp_path / "a.spool", "t")
  spool.append([b"1", b"2"], {"a": b".", "b": b"."})
  spool.append([], {"c": b"."})
  spool.append([], {"d": b"."})
  spool.append([b"3"], {"b": b".", "e": b"."})
  spool.append([b"4"], {})
  spool.append([b"5"], {"f": b"."})
  of = [spool.images(through) for through in range(6)]
  assert of[:3] == [[], ["a", "b"], ["a", "b"]]
  assert of[3:] == [[*"abcde"], [*"abcde"], [*"abcdef"]]
  assert spool.images(5, most=2) == ["a", "b"]
  spool.remove_images(spool.images())
  spool.remove_through(5)
  spool.append([b"6"], {"a": b"."})  # Numbers are not used again.
  assert (spool.images(5), spool.images(6)) == ([], ["a"])
  spool.close()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 1000))
def test_a_png_has_the_pixels(width, height, seed):
  rng = np.random.default_rng(seed)
  pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
  with Image.open(io.BytesIO(png.encode(pixels))) as image:
    assert np.array_equal(np.asarray(image.convert("RGB")), pixels)


def test_screenshots_are_sent_once_each(server, tmp_path):
  pixels = np.full((8, 9, 3), 7, np.uint8)
  sha = images_lib.hash_pixels(pixels)
  with client_of(server.url, tmp_path / "spool") as client:
    for _ in range(3):
      client.sender.put(sender_lib.Made({}, {sha: png.encode(pixels)}))
      assert client.drain(20)
    client.sender.put(sender_lib.Made({}, {"0" * 64: png.encode(pixels)}))
    assert client.drain(20)
    assert client.sender.counters["dead_letters"] == 1
  (row,) = server.rows("monitor_screenshot", order="sha256")
  assert (row["sha256"], row["width"], row["height"]) == (sha, 9, 8)


def test_many_screenshots_are_few_requests(server, tmp_path):
  rng = np.random.default_rng(0)
  images = {}
  for n in range(30):  # Noise, 120 kB each: some nine to a request.
    pixels = rng.integers(0, 256, (200, 200, 3), np.uint8)
    sha = images_lib.hash_pixels(pixels)
    images[sha] = png.encode(pixels) if n != 4 else png.encode(pixels[1:])
  with client_of(server.url, tmp_path / "spool") as client:
    client.sender.put(sender_lib.Made({}, images))
    assert client.drain(20)
    assert client.sender.counters["dead_letters"] == 1
    assert client.sender.spool.counts()["image"] == 0
  bad = list(images)[4]
  stored = {row["sha256"] for row in server.rows("monitor_screenshot", order=1)}
  assert stored == set(images) - {bad}
  for sha in stored:
    assert server.http.get(f"/api/v1/screenshots/{sha}").content == images[sha]


def test_a_screenshot_larger_than_the_server_takes_holds_up_none(tmp_path):
  rng = np.random.default_rng(0)
  images = {}
  for size in (8, 100, 9):
    pixels = rng.integers(0, 256, (size, size, 3), np.uint8)
    images[images_lib.hash_pixels(pixels)] = png.encode(pixels)
  limits = app_lib.Limits(screenshot=20_000)
  with monitor_server.sqlite_server(tmp_path / "s", limits=limits) as server:
    with client_of(server.url, tmp_path / "spool") as client:
      client.sender.put(sender_lib.Made({}, images))
      assert client.drain(20)
      assert client.sender.counters["dead_letters"] == 1
    stored = {r["sha256"] for r in server.rows("monitor_screenshot", order=1)}
    assert stored == {list(images)[0], list(images)[2]}
