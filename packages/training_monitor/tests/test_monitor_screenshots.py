"""Screenshots on their way: before what shows them, once, and to the pixel."""

import io
import os
import re
import signal
import time

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import monitor_server
import numpy as np
from PIL import Image
import pytest
import synthetic_run
from trainer_core import events
from trainer_core import images as images_lib
from trainer_core import monitor_settings as settings_lib
from training_monitor import app as app_lib
from training_monitor.client import event_log
from training_monitor.client import ingest_client
from training_monitor.client import spool as spool_lib
from training_monitor.client import spool_reader
from training_monitor.maintenance import pruning
from training_monitor.net import http_server

DEAD = "http://127.0.0.1:9"  # No server listens there.
BATCH, IMAGES = "/api/ingest/batch", "/api/v1/screenshots"


@pytest.fixture
def server(tmp_path):
  with monitor_server.sqlite_server(tmp_path / "server") as running:
    yield running


def client_of(url, folder):
  return monitor_server.client_of(url, folder, target="the monitor")


def log_of(url, folder, store, **settings):
  return event_log.EventLog(
    event_log.RunSpec(
      url=url, spool_dir=str(folder), name="a", training_id="T"
    ),
    settings_lib.MonitorConfig(**{"close_timeout_s": 60.0} | settings),
    images=store,
  )


def shown(count, seed=0):
  """Parts of a batch, each with a screenshot that it names."""
  rng = np.random.default_rng(seed)
  for n in range(count):
    pixels = rng.integers(0, 256, (8, 9, 3), np.uint8)
    sha = images_lib.hash_pixels(pixels)
    task = {"task_id": f"t{n}", "description": f"sha256:{sha}"}
    file = spool_reader.encode_png(pixels)
    yield {"tasks": [task]}, {sha: file}


class Front:
  """A server that refuses some paths, and records screenshots it lacked.

  Attributes:
    refused: paths that begin so are answered with 503.
    hangs: these are not answered.
    asked: paths, in order.
    told: screenshots that were named.
    early: those that were not there then.
  """

  def __init__(self, server, refused="-", hangs="-"):
    self.server = server
    self.refused = refused
    self.hangs = hangs
    self.asked = []
    self.early = set()
    self.told = set()

  async def __call__(self, scope, receive, send):
    if scope["type"] == "lifespan":
      return  # The server's own is under way.
    path = scope["path"]
    self.asked.append(path)
    if path.startswith(self.hangs):
      while (await receive())["type"] != "http.disconnect":
        pass
      return
    if path.startswith(self.refused):
      await send({"type": "http.response.start", "status": 503, "headers": []})
      await send({"type": "http.response.body", "body": b"{}"})
      return
    if path != BATCH:
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
  with http_server.LoopbackServer(front) as url:
    waited = client_of(DEAD, tmp_path / "spool")
    for item in shown(350):  # More than are asked for at once.
      waited.sender.put(*item)
    assert waited.flush() and not waited.close(0.1)
    with client_of(url.url, tmp_path / "spool") as client:
      for item in shown(150, seed=1):
        client.sender.put(*item)
        client.flush()
      assert client.drain(30)
    deadline = time.monotonic() + 60
    while list((tmp_path / "spool").glob("*.spool")):  # Left by the first.
      with client_of(url.url, tmp_path / "spool") as client:
        time.sleep(0.2)
        assert client.drain(30) and time.monotonic() < deadline
  assert len(front.told) == 500 and not front.early


@pytest.mark.slow
def test_words_do_not_wait_for_a_disk_that_takes_no_pictures(server, tmp_path):
  front = Front(server, refused=IMAGES)
  with http_server.LoopbackServer(front) as url:
    with client_of(url.url, tmp_path / "spool") as client:
      for item in shown(1600):
        client.sender.put(*item)
      assert client.flush(60)
      deadline = time.monotonic() + 30
      while client.sender.counts()["entry"]:
        time.sleep(0.05)
        assert time.monotonic() < deadline
      assert len(server.rows("task", order="task_id")) == 1600
      assert client.sender.counts()["image"] == 1600
      # Asked for now and then, not with each batch.
      assert front.asked.count(f"{IMAGES}/missing") < front.asked.count(BATCH)
      front.refused = "-"
      assert client.drain(30)
  assert len(server.rows("monitor_screenshot", order=1)) == 1600


def test_words_do_not_wait_for_pictures_of_others(server, tmp_path):
  """Screenshots sent after their entries, and screenshots of no entry."""
  front = Front(server, refused=IMAGES)
  (word,) = shown(1, seed=1)
  with http_server.LoopbackServer(front) as url:
    with client_of(url.url, tmp_path / "spool") as client:
      for item in shown(800):
        client.sender.put(*item)
      assert client.flush(60)
      while client.sender.counts()["entry"]:
        time.sleep(0.01)
      front.refused = "-"
      while client.sender.counts()["image"] == 800:
        time.sleep(0.01)
      before = len(front.asked)
      client.sender.put(*word)
      assert client.flush()
      while client.sender.counts()["entry"]:
        time.sleep(0.001)
      assert len(front.asked) - before < 8
      assert client.drain(30)
  assert len(server.rows("monitor_screenshot", order=1)) == 801


def test_a_picture_is_kept_until_its_words_have_gone(server, tmp_path):
  front = Front(server, refused=BATCH)
  with http_server.LoopbackServer(front) as url:
    with client_of(url.url, tmp_path / "spool") as client:
      for item in shown(3):
        client.sender.put(*item)
      while len(server.rows("monitor_screenshot", order=1)) < 3:
        time.sleep(0.01)
      pruning.prune(
        server.engine, server.app._files, pruning.Criteria(), grace_s=-1.0
      )
      assert not server.rows("monitor_screenshot", order=1)
      front.refused = "-"
      assert client.drain(30)
  assert len(server.rows("monitor_screenshot", order=1)) == 3
  assert front.early == set()


@pytest.mark.parametrize("hangs", [BATCH, IMAGES])
def test_a_server_that_hangs_is_left_at_once(server, tmp_path, hangs):
  front = Front(server)
  with http_server.LoopbackServer(front) as url:
    client = client_of(url.url, tmp_path / "spool")
    client.sender.put(*next(shown(1)))  # The connection is one that was used.
    assert client.drain(20)
    front.hangs = hangs
    client.sender.put(*next(shown(1, seed=1)))
    before = len(front.asked)
    while not [p for p in front.asked[before:] if p.startswith(hangs)]:
      time.sleep(0.01)
    began = time.monotonic()
    assert not client.close(0.2)
    assert time.monotonic() - began < 4
    # The spool's lock is free.
    assert not spool_lib.is_owned(client.sender.spool.path)
    assert client.sender.counts()["entry"] == 1


def test_a_picture_that_had_no_room_is_brought_again(server, tmp_path):
  store = images_lib.ImageStore()
  rng = np.random.default_rng(0)
  pixels = [rng.integers(0, 256, (80, 80, 3), np.uint8) for _ in range(4)]
  refs = [store.put(image) for image in pixels]
  front = Front(server, refused="/")
  with http_server.LoopbackServer(front) as url:
    log = log_of(
      url.url, tmp_path / "spool", store, spool_mb=60_000 / (1 << 20)
    )

    def tell(number):
      episode = synthetic_run.showing(refs[number % 4], number=number)
      log.on_event(events.EpisodeFinished(episode, "g", "t"))
      assert log._writer.flush(20)

    log.on_event(events.RunStarted("run", {}))
    for number in range(4):
      tell(number)
    assert 0 < log.counters["dropped_images"] < 4
    front.refused = "-"
    assert log.drain(60)
    for number in range(4, 8):
      tell(number)
    assert log.close()
  assert {r["sha256"] for r in server.rows("monitor_screenshot", order=1)} == {
    ref.sha256 for ref in refs
  }


def test_pictures_that_wait_become_smaller(tmp_path):
  """Pixels as the policy saw them are encoded while no server answers."""
  store = images_lib.ImageStore()
  refs = [store.put(np.full((400, 400, 3), n, np.uint8)) for n in range(20)]
  log = log_of(DEAD, tmp_path, store, close_timeout_s=0.1)
  episode = synthetic_run.showing(*refs)
  log.on_event(events.EpisodeFinished(episode, "g", "t"))
  assert log._writer.flush(20)
  folder = log._spool.path / spool_lib.IMAGES
  deadline = time.monotonic() + 60
  while (
    {path.suffix for path in folder.iterdir()} != {spool_lib.PNG}
    or log._spool.bytes > 100_000  # Of 9.6 million.
  ):
    time.sleep(0.05)
    assert time.monotonic() < deadline
  assert spool_lib.images(log._spool.path) == {ref.sha256 for ref in refs}
  assert not log.close()


def test_pixels_that_the_disk_has_lost_are_brought_again(server, tmp_path):
  store = images_lib.ImageStore()
  rng = np.random.default_rng(0)
  ref = store.put(rng.integers(0, 256, (80, 80, 3), np.uint8))
  front = Front(server, refused="/")
  with http_server.LoopbackServer(front) as url:
    log = log_of(url.url, tmp_path / "spool", store)
    os.kill(log.pid, signal.SIGSTOP)
    log.on_event(events.RunStarted("run", {}))
    log.on_event(
      events.EpisodeFinished(synthetic_run.showing(ref, number=0), "g", "t")
    )
    assert log._writer.flush(20)
    (path,) = (log._spool.path / spool_lib.IMAGES).iterdir()
    path.write_bytes(path.read_bytes()[:1000] + bytes(18_208))
    os.kill(log.pid, signal.SIGCONT)
    front.refused = "-"
    assert log.drain(60)
    assert not server.rows("monitor_screenshot", order=1)
    log.on_event(
      events.EpisodeFinished(synthetic_run.showing(ref, number=1), "g", "t")
    )
    assert log.close()
  (row,) = server.rows("monitor_screenshot", order=1)
  assert row["sha256"] == ref.sha256 and log.counters["images_missing"] == 1


def test_an_orphan_that_cannot_be_read_holds_up_no_other(server, tmp_path):
  folder = tmp_path / "spool"
  for n, item in enumerate(shown(2)):
    orphan = ingest_client.IngestClient(
      DEAD,
      timeout_seconds=10,
      spool_dir=folder,
      target="the monitor",
      name=f"{n}",
    )
    orphan.sender.put(*item)
    assert orphan.flush() and not orphan.close(0.1)
  (folder / "0.spool" / spool_lib.HEADER).write_text('{"id": "00"}')
  with client_of(server.url, folder):
    deadline = time.monotonic() + 20
    while not server.rows("task", order="task_id"):
      time.sleep(0.05)
      assert time.monotonic() < deadline
  orphan = {path.name for path in folder.iterdir()}
  assert orphan == {f"0{spool_lib.SUFFIX}{spool_lib.DAMAGED}"}


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 1000))
def test_a_png_has_the_pixels(width, height, seed):
  rng = np.random.default_rng(seed)
  pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
  with Image.open(io.BytesIO(spool_reader.encode_png(pixels))) as image:
    assert np.array_equal(np.asarray(image.convert("RGB")), pixels)


def test_screenshots_are_sent_once_each(server, tmp_path):
  pixels = np.full((8, 9, 3), 7, np.uint8)
  sha = images_lib.hash_pixels(pixels)
  with client_of(server.url, tmp_path / "spool") as client:
    for _ in range(3):
      file = spool_reader.encode_png(pixels)
      client.sender.put({}, {sha: file})
      assert client.drain(20)
      assert client.sender.counts()["image"] == 0
    wrong = {"0" * 64: spool_reader.encode_png(pixels)}
    client.sender.put({}, wrong)
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
    images[sha] = spool_reader.encode_png(pixels if n != 4 else pixels[1:])
  with client_of(server.url, tmp_path / "spool") as client:
    client.sender.put({}, images)
    assert client.drain(20)
    assert client.sender.counters["dead_letters"] == 1
    assert client.sender.counts()["image"] == 0
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
    images[images_lib.hash_pixels(pixels)] = spool_reader.encode_png(pixels)
  limits = app_lib.IngestLimits(screenshot=20_000)
  with monitor_server.sqlite_server(tmp_path / "s", limits=limits) as server:
    with client_of(server.url, tmp_path / "spool") as client:
      client.sender.put({}, images)
      assert client.drain(20)
      assert client.sender.counters["dead_letters"] == 1
    stored = {r["sha256"] for r in server.rows("monitor_screenshot", order=1)}
    assert stored == {list(images)[0], list(images)[2]}
