"""The event log, its codec, and the uploader process."""

import dataclasses
import json
import logging
import os
import pathlib
import signal
import time

import fresh_interpreter
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import monitor_server
import msgpack
import numpy as np
import pytest
import synthetic_run
from trainer_core import events
from trainer_core import images as images_lib
from trainer_core import monitor_settings as settings_lib
from trainer_core import trajectory as trajectory_lib
from training_monitor.client import event_codec
from training_monitor.client import event_log
from training_monitor.client import event_types
from training_monitor.client import uploader

Config = settings_lib.MonitorConfig
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(name="server")
def _server(tmp_path):
  with monitor_server.sqlite_server(tmp_path / "server") as server:
    yield server


wait_for = monitor_server.wait_for


def run(url, folder):
  return event_log.RunSpec(
    url=url,
    spool_dir=str(folder),
    name="a",
    training_id="T",
    training={"total_steps": 9, "group_size": 2, "groups_per_batch": 1},
  )


def alive(pid):
  stat = pathlib.Path(f"/proc/{pid}/stat")
  return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def start(log):
  log.on_event(events.RunStarted("run", {"lr": float("nan")}))


def play(log, *numbers):
  for n in numbers:
    log.on_event(events.EpisodeStarted(f"g-{n}.0", f"g-{n}", "t"))


def deliver(server, folder):
  """Delivers the spools that ended runs left, as the next run does."""
  next_run = dataclasses.replace(run(server.url, folder), name="next")
  log = event_log.EventLog(next_run)
  try:
    wait_for(lambda: [p.name for p in folder.glob("*.*")] == ["next.spool"])
  finally:
    assert log.close()
  assert not list(folder.glob("*.*"))


def names(server):
  return {
    row["rollout_id"].rpartition("/")[2] for row in server.rows("rollout")
  }


# --- events as bytes ----------------------------------------------------------

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    | st.just("\ud800 lone") | st.just({"$type": "ImageRef"})
    | st.builds(trajectory_lib.ImageRef, st.just("a" * 64), st.just(2),
                st.integers(1, 9))
    | st.builds(trajectory_lib.ToolCall, st.just("f"), st.just({"x": 1})),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text() | st.integers(-5, 5), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip


def same(a, b):
  """Equality in which NaN is NaN; `b` may hold lists and carried types."""
  if isinstance(a, float) and a != a:
    return isinstance(b, float) and b != b
  if isinstance(a, dict):
    return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
  if isinstance(a, (list, tuple)):
    return len(a) == len(b) and all(map(same, a, b))
  if dataclasses.is_dataclass(a):
    return event_types.is_a(a, type(b)) and same(vars(a), vars(b))
  return type(a) is type(b) and a == b


@settings(max_examples=200, deadline=None)
@given(PLAIN)
def test_what_an_event_holds_comes_back(value):
  event = events.RunStarted("é", {"value": value}, time=5.0)
  back = event_codec.load(event_codec.dump(event))
  assert event_types.is_a(event, type(back)) and back.time == 5.0
  assert back.run_name == "é" and same(value, back.config["value"])


def test_an_episode_comes_back():
  store = images_lib.ImageStore()
  for turns in range(5):
    episode = synthetic_run.episode(store, seed=turns, turns=turns)
    event = events.EpisodeFinished(episode, "g", "t", "eval")
    back = event_codec.load(event_codec.dump(event)).trajectory
    assert back.to_json() == episode.to_json()
    assert same(
      [s.chat_completions for s in episode.steps],
      [s.chat_completions for s in back.steps],
    )


def test_what_is_of_no_plain_kind_becomes_the_nearest():

  class Word(str):
    pass

  @dataclasses.dataclass
  class Own:
    x: int

  config = {
      "path": pathlib.Path("/a"), "word": Word("w"), "own": Own(3),
      "status": trajectory_lib.TrajectoryStatus.FAILED, "tuple": (1, 2),
      "number": np.float32(0.5), "array": np.arange(3), "bytes": b"\xff",
      "large": 1 << 200, "texts": np.array(["a"]), "flag": np.bool_(True),
  }  # fmt: skip
  back = event_codec.load(
    event_codec.dump(events.RunStarted("r", config))
  ).config
  assert np.array_equal(back.pop("array"), [0, 1, 2])
  assert back == {
      "path": "/a", "word": "w", "own": {"x": 3}, "status": "failed",
      "tuple": [1, 2], "number": 0.5, "bytes": b"\xff", "large": 1 << 200,
      "texts": ["a"], "flag": True,
  }  # fmt: skip


@pytest.mark.parametrize(
  "data",
  [
    b"",
    b"\xc1",
    msgpack.packb(1),
    msgpack.packb({"a": 1}),
    msgpack.packb(msgpack.ExtType(9, b"")),
    msgpack.packb([msgpack.ExtType(1, bytes([99]))]),
    msgpack.packb([msgpack.ExtType(1, bytes([0])), 1]),
    msgpack.packb([msgpack.ExtType(1, bytes([4])), *"123456"]),
    msgpack.packb([msgpack.ExtType(1, bytes([18])), 1, b"", []]),
    msgpack.packb([msgpack.ExtType(1, bytes([18])), 1 << 63, b"", []]),
    msgpack.packb(
      msgpack.ExtType(2, msgpack.packb(["(1 2)f4,i4", [1], b"1234"]))
    ),
    msgpack.packb(
      msgpack.ExtType(2, msgpack.packb(["M8[2s/0]", [1], b"12345678"]))
    ),
    msgpack.packb([msgpack.ExtType(1, bytes([1, 2])), "completed"]),
    msgpack.packb(msgpack.ExtType(1, bytes([1]))),
    msgpack.packb(msgpack.ExtType(1, b"")),
  ],
)
def test_what_is_no_event_is_refused(data):
  with pytest.raises(ValueError):
    event_codec.load(data)


# --- the process --------------------------------------------------------------


def test_what_cannot_be_is_said_at_once(tmp_path):
  with pytest.raises(ValueError, match="http://host:port"):
    event_log.EventLog(run("nowhere", tmp_path))
  (tmp_path / "file").write_text("")
  with pytest.raises(OSError, match="file"):
    event_log.EventLog(run("http://127.0.0.1:9", tmp_path / "file"))


def test_who_starts_it_by_hand_is_told_what_it_is():
  ran = fresh_interpreter.run_module("training_monitor", "uploader")
  assert ran.returncode == 2
  assert "monitor.url" in json.loads(ran.stdout)["error"]


def test_what_is_logged_there_may_hold_anything(capfd):
  record = logging.LogRecord("a", 30, "", 0, "odd: \ud800 %s", ("x",), None)
  uploader._LogForwarder().emit(record)
  assert json.loads(capfd.readouterr().out) == {"log": "odd: ? x", "level": 30}


def test_the_process_is_small_and_stands_back(server, tmp_path):
  log = event_log.EventLog(run(server.url, tmp_path))
  mapped = pathlib.Path(f"/proc/{log.pid}/maps").read_text()
  assert "numpy" in mapped
  assert "sqlite" not in mapped and "jaxlib" not in mapped
  assert os.getsid(log.pid) == os.getsid(0)
  assert os.getpgid(log.pid) == log.pid  # Ctrl-C is not for it.
  assert os.getpriority(os.PRIO_PROCESS, log.pid) == event_log.NICENESS
  start(log)
  play(log, 1)
  assert log.drain(20) and names(server) == {"g-1.0"}
  play(log, 2)
  assert log.close() and not alive(log.pid)
  assert log.close()
  assert names(server) == {"g-1.0", "g-2.0"}
  assert list(tmp_path.glob("*.spool")) == []


def test_an_uploader_that_is_killed_is_replaced(server, tmp_path, caplog):
  log = event_log.EventLog(run(server.url, tmp_path))
  start(log)
  log.on_event(events.StepFinished(4, 4, {}))
  log.on_event(events.WeightsPublished(4, 0.1))
  play(log, 1)
  assert log.drain(20)
  first = log.pid
  os.kill(first, signal.SIGKILL)
  wait_for(lambda: not alive(first))
  play(log, 2)
  wait_for(lambda: log.pid != first)
  play(log, 4)
  assert log.drain(20)
  assert names(server) == {"g-1.0", "g-2.0", "g-4.0"}
  (row,) = [r for r in server.rows("rollout") if "g-4.0" in r["rollout_id"]]
  steps = {r["id"]: r["step"] for r in server.rows("step")}
  assert steps[row["step_id"]] == 5 and row["model_path"] == "@4"
  assert log.close()
  assert "restarted" in caplog.text


@pytest.mark.slow
def test_measurements_go_on_in_another_uploader(server, tmp_path):
  log = event_log.EventLog(run(server.url, tmp_path))
  start(log)
  log.on_event(events.EvalStarted("step_4", "sampled", 2, 4))
  assert log.drain(60)
  first = log.pid
  os.kill(first, signal.SIGKILL)
  log.on_event(events.EpisodeStarted("g-2.0", "g-2", "t", "eval"))
  log.on_event(events.EvalFinished("step_4", {"success_rate": 0.5}))
  log.on_event(events.EpisodeStarted("g-3.0", "g-3", "t"))
  assert log.close()
  (measured,) = server.rows("eval")
  assert (measured["step"], measured["status"]) == (4, "completed")
  sources = {
    row["rollout_id"].rpartition("/")[2]: row["source_type"]
    for row in server.rows("rollout")
  }
  assert sources["g-2.0"] == "eval" and sources["g-3.0"] == "step"


@pytest.mark.slow
def test_what_waits_at_the_end_is_told_by_another_uploader(server, tmp_path):
  log = event_log.EventLog(
    run(server.url, tmp_path), Config(close_timeout_s=60.0)
  )
  start(log)
  assert log.drain(60)
  first = log.pid
  os.kill(first, signal.SIGKILL)
  wait_for(lambda: not alive(first))
  play(log, 1, 2)
  log.on_event(events.RunFinished("completed"))
  assert log.close()
  assert names(server) == {"g-1.0", "g-2.0"}
  (training,) = server.rows("training")
  assert training["status"] == "completed"
  assert not alive(log.pid)


def test_who_ends_all_processes_of_a_job_does_not_end_this_one(
  server, tmp_path
):
  log = event_log.EventLog(run(server.url, tmp_path))
  start(log)
  play(log, *range(100))
  for number in (signal.SIGTERM, signal.SIGINT):
    os.kill(log.pid, number)
  first = log.pid
  play(log, *range(100, 200))
  log.on_event(events.RunFinished("interrupted"))
  assert log.close() and log.pid == first and not log.dropped
  assert len(names(server)) == 200
  (training,) = server.rows("training")
  assert training["status"] == "paused"


@pytest.mark.slow
def test_an_uploader_that_hangs_holds_up_nothing(server, tmp_path, monkeypatch):
  monkeypatch.setattr(event_log, "_GRACE_S", 1.0)
  store = images_lib.ImageStore()
  log = event_log.EventLog(
    run(server.url, tmp_path),
    Config(close_timeout_s=0.5, max_pending=10_000),
    images=store,
  )
  start(log)
  assert log.drain(20)
  os.kill(log.pid, signal.SIGSTOP)
  rng = np.random.default_rng(0)
  took = []
  for n in range(6000):
    began = time.perf_counter()
    if n < 40:
      pixels = rng.integers(0, 256, (200, 300, 3), np.uint8)
      episode = synthetic_run.showing(store.put(pixels), number=n)
      log.on_event(events.EpisodeFinished(episode, "g", "t"))
    else:
      play(log, n)
    took.append(time.perf_counter() - began)
  # A machine may stall; who waits for the uploader would wait for ever.
  assert sorted(took)[-4] < 0.5 and max(took) < 10
  wait_for(lambda: not log.readings()["waiting"])
  began = time.monotonic()
  assert not log.close()
  assert time.monotonic() - began < 8
  wait_for(lambda: not alive(log.pid))
  # Nothing is lost by it: the next run there sends what it has left.
  assert not log.dropped
  deliver(server, tmp_path)
  assert len(server.rows("rollout")) == 6000
  assert len(server.rows("monitor_screenshot", order=1)) == 40


def test_an_event_that_cannot_be_told_ends_nothing(server, tmp_path):
  log = event_log.EventLog(
    run(server.url, tmp_path), images=images_lib.ImageStore()
  )
  start(log)
  deep = {}
  for _ in range(5000):
    deep = {"in": deep}
  log.on_event(events.RunStarted("run", deep))
  log.on_event(
    events.EpisodeFinished(
      trajectory_lib.Trajectory(
        steps=[trajectory_lib.Step(chat_completions=[None])],
        status=trajectory_lib.TrajectoryStatus.FAILED,
      ),
      "g",
      "t",
    )
  )
  play(log, 1)
  assert log.close()
  assert names(server) >= {"g-1.0"}


def test_screenshots_come_with_the_episodes_that_show_them(server, tmp_path):
  store = images_lib.ImageStore()
  log = event_log.EventLog(run(server.url, tmp_path), images=store)
  start(log)
  rng = np.random.default_rng(0)
  pixels = [rng.integers(0, 256, (20, 30, 3), np.uint8) for _ in range(3)]
  for n, image in enumerate([*pixels, pixels[0]]):
    episode = synthetic_run.showing(store.put(image), number=n)
    log.on_event(events.EpisodeFinished(episode, f"s-{n}", "t"))
  absent = trajectory_lib.ImageRef("0" * 64, 3, 3)
  episode = synthetic_run.showing(absent, number=9)
  log.on_event(events.EpisodeFinished(episode, "s-9", "t"))
  assert log.close()
  assert {r["sha256"] for r in server.rows("monitor_screenshot", order=1)} == {
    images_lib.hash_pixels(p) for p in pixels
  }
  assert len(server.rows("rollout")) == 5


@pytest.mark.slow
def test_pixels_come_no_faster_than_they_can_be_kept(server, tmp_path):
  """An episode of 300 MB of pixels, more than the uploader holds at once."""
  store = images_lib.ImageStore()
  log = event_log.EventLog(
    run(server.url, tmp_path), Config(close_timeout_s=100.0), images=store
  )
  start(log)
  refs = [
    store.put(np.full((640, 1024, 3), (n, 7, 9), np.uint8)) for n in range(150)
  ]
  log.on_event(events.EpisodeFinished(synthetic_run.showing(*refs), "s-0", "t"))
  assert log.close()
  assert len(server.rows("monitor_screenshot", order=1)) == 150


def test_a_screenshot_that_was_lost_is_brought_again(server, tmp_path):
  store = images_lib.ImageStore()
  log = event_log.EventLog(
    run(server.url, tmp_path), Config(spool_mb=60_000 / (1 << 20)), images=store
  )
  start(log)
  rng = np.random.default_rng(0)
  refs = [
    store.put(rng.integers(0, 256, size, np.uint8))
    for size in ((200, 200, 3), (20, 20, 3))
  ]
  for number in range(2):  # The first one never has room.
    for n, ref in enumerate(refs):
      episode = synthetic_run.showing(ref, number=2 * number + n)
      log.on_event(events.EpisodeFinished(episode, "g", "t"))
      assert log.drain(60)
    wait_for(lambda: refs[0].sha256 not in log._known_images)
    assert refs[1].sha256 in log._known_images
  assert log.close()
  (row,) = server.rows("monitor_screenshot", order=1)
  assert row["sha256"] == refs[1].sha256


@pytest.mark.slow
def test_a_trainer_that_is_killed_has_told_everything(server, tmp_path):
  program = (
    "import json, os, signal, sys\n"
    "from training_monitor.core import events\n"
    "from training_monitor.client import event_log\n"
    "run = event_log.RunSpec(**json.loads(sys.argv[1]))\n"
    "r = event_log.EventLog(run)\n"
    "print(r.pid, flush=True)\n"
    "r.on_event(events.RunStarted('run', {}))\n"
    "for n in range(1000):\n"
    "  r.on_event(events.EpisodeStarted(f'g-{n}.0', 'g', 't'))\n"
    "while r.readings()['waiting']: pass\n"
    "os.kill(os.getpid(), signal.SIGKILL)\n"
  )
  trainer = fresh_interpreter.run(
    program, json.dumps(dataclasses.asdict(run(server.url, tmp_path)))
  )
  assert trainer.returncode == -signal.SIGKILL
  pid = int(trainer.stdout)
  wait_for(lambda: not alive(pid), 40)
  assert len(names(server)) == 1000
  assert list(tmp_path.glob("*.spool")) == []
