"""The client against a real server, and against what can happen to it."""

import datetime
import errno
import json
import logging
import threading
import time

import documented_code
import fresh_interpreter
import monitor_network
import monitor_server
import numpy as np
import pytest
from training_monitor.client import http_rollout_recorder
from training_monitor.client import ingest_client
from training_monitor.client import monitor_context as context
from training_monitor.client import monitor_training_hooks as hooks
from training_monitor.client import spool as spool_lib
from training_monitor.client import transport
from training_monitor.client.rows import turn_rows
from training_monitor.client.rows import turn_tokens
from training_monitor.core import monitor_settings as settings_lib
from training_monitor.core import trajectory
from training_monitor.net import http_server

Config = settings_lib.MonitorConfig
SMALL = Config(spool_mb=20_000 / (1 << 20))
client_of = monitor_server.client_of
DEAD = "http://127.0.0.1:9"  # No server listens there.


@pytest.fixture
def server(tmp_path):
  with monitor_server.sqlite_server(tmp_path / "server") as running:
    yield running


def tell(client, episodes=3, start=0):
  """A run through the client's methods."""
  training = client.post_training(run_name="run", status="running")
  step = client.post_step({"training_id": training, "step": 1}, "S")
  client.post_task({"task_id": "open-door"})
  for n in range(start, start + episodes):
    name = client.post_rollout(
      {
        "rollout_id": f"r{n}",
        "step_id": step,
        "task_id": "open-door",
        "status": "running",
      }
    )
    turn = client.post_turn({"rollout_id": name, "turn": 1}, f"r{n}:turn:1")
    client.post_action({"turn_id": turn, "tokens": [1], "logprobs": [-0.5]})
    client.post_observation({"turn_id": turn, "text_content": f"{n}"})
    client.post_rollout({"status": "completed", "reward": n}, name)
  return training


def check(server, episodes=3):
  rollouts = server.rows("rollout", order="reward")
  assert [(r["rollout_id"], r["reward"], r["status"]) for r in rollouts] == [
    (f"r{n}", float(n), "completed") for n in range(episodes)
  ]
  for table in ("turn", "action", "obs"):
    assert len(server.rows(table)) == episodes


# --- the ordinary way -------------------------------------------------------


def test_what_is_posted_arrives_and_ids_serve_before_it_has(server, tmp_path):
  with client_of(server.url, tmp_path / "spool") as client:
    tell(client)
    assert client.drain(20)
  check(server)
  assert list((tmp_path / "spool").iterdir()) == []  # Nothing waits.


def test_an_observation_s_tree_is_in_its_row():
  step = trajectory.Step(
    observation={"axtree": "[1] button 'OK'", "text": "It is gone."}
  )
  rows = turn_rows.of_turn(
    "r", 0, step, (0.0, 1.0, {}), None, turn_tokens.NONE, None
  )
  after = rows["observations"][-1]
  assert after["text_content"] == "[1] button 'OK'\nIt is gone."


def test_statuses_that_follow_each_other_closely_are_all_seen(server, tmp_path):
  with client_of(server.url, tmp_path / "spool") as client:
    for status in ("initializing", "running", "completed"):
      client.post_training({"run_name": "x", "status": status})
    assert client.drain(20)
  assert [h["new_status"] for h in server.rows("status_history")] == [
    "initializing",
    "running",
    "completed",
  ]


def test_record_maps_local_numbers_and_skips_orphans(server, tmp_path):
  with client_of(server.url, tmp_path / "spool") as client:
    client.record_training(1, {"run_name": "x"})
    client.record_step(7, {"training_id": 1, "step": 1})
    client.record_task(3, {"task_id": "t"})
    client.record_rollout(9, {"rollout_id": "u", "step_id": 7, "task_id": 3})
    client.record_turn(11, {"rollout_id": 9, "turn": 1})
    assert client.record_action(1, {"turn_id": 11, "action_type": "key"})
    assert client.record_turn(12, {"rollout_id": 10, "turn": 1}) is None
    assert client.record_action(2, {"turn_id": 12}) is None
    client.record_rollout(9, {"reward": 1.0})
    assert client.drain(20)
    assert client.sender.counters["skipped"] == 2
  assert len(server.rows("action")) == len(server.rows("turn")) == 1
  assert server.rows("rollout")[0]["reward"] == 1.0


def test_values_that_json_has_not(server, tmp_path):
  with client_of(server.url, tmp_path / "spool") as client:
    training = client.post_training({
        "run_name": "odd \ud800 \0", "learning_rate": float("nan"),
        "temperature": np.float32(0.5), "batch_size": np.int64(7),
        "config_json": {
            "huge": 1 << 70, "array": np.array([1.0, np.inf]), 5: {"t": (1,)},
            "when": datetime.datetime(2026, 1, 1),
        },
    })  # fmt: skip
    client.post_step({"training_id": training, "step": 1, "loss": float("inf")})
    assert client.drain(20)
    assert not client.sender.counters["dead_letters"]
  (row,) = server.rows("training")
  assert (row["learning_rate"], row["temperature"]) == (None, 0.5)
  assert row["batch_size"] == 7
  config = json.loads(row["config_json"])
  assert config["array"] == [1.0, "Infinity"] and config["5"] == {"t": [1]}
  assert server.rows("step")[0]["loss"] is None


# --- what can happen --------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_lost_repeated_and_refused_requests_leave_the_same_database(
  server, tmp_path, seed
):
  troubled = monitor_network.Troubled(server.app.asgi, seed)

  async def no_lifespan(scope, receive, send):
    if scope["type"] == "lifespan":
      return  # The server's own is under way.
    await troubled(scope, receive, send)

  with http_server.LoopbackServer(no_lifespan) as front:
    with client_of(front.url, tmp_path / "spool") as client:
      sent = 0
      while sent < 40 or not all(troubled.seen.values()):
        tell(client, 1, sent)
        sent += 1
        client.flush()
        time.sleep(0.02)
        assert sent < 400
      assert client.drain(60)
      assert not client.sender.counters["dead_letters"]
  check(server, sent)


def test_without_a_server_everything_waits_for_the_next_start(server, tmp_path):
  folder = tmp_path / "spool"
  client = client_of(DEAD, folder, target="the monitor")
  tell(client)
  assert client.flush()
  assert not client.close(0.2)
  assert server.rows("training") == []
  other = client_of(server.url, folder, target="another monitor")
  assert other.drain(10) and other.close()
  assert server.rows("training") == []  # Not meant for that one.
  with client_of(server.url, folder, target="the monitor") as client:
    deadline = time.monotonic() + 20
    while len(server.rows("rollout")) < 3 and time.monotonic() < deadline:
      time.sleep(0.05)
    client.drain(10)
  check(server)
  assert list(folder.iterdir()) == []


def test_items_of_a_program_that_closes_without_time_are_in_the_spool(tmp_path):
  client = client_of(DEAD, tmp_path / "spool")
  for n in range(2000):
    client.post_task({"task_id": f"t{n}"})
  assert not client.close(0.0)
  assert client.sender.counts()["entry"] == 2000


def test_a_spool_in_use_is_left_to_its_owner(tmp_path):
  claimed = lambda: list(
    spool_lib.claim_orphans(tmp_path, "t", tmp_path / "own.spool")
  )
  first = spool_lib.Spool(tmp_path / "a.spool", "t")
  first.append([(spool_lib.PART, b"{}")])
  with pytest.raises(BlockingIOError):
    spool_lib.Spool(tmp_path / "a.spool", "t")
  assert claimed() == []
  first.close()
  ((path, header, lock),) = claimed()
  assert (path, header) == (first.path, first.header)
  assert claimed() == []  # The lock is held.
  lock.release()


def test_a_fork_does_not_keep_a_spool_from_the_next_owner(tmp_path):
  program = (
    "import os, signal, sys, time\n"
    "from training_monitor.client import spool\n"
    "first = spool.Spool(sys.argv[1], 't')\n"
    "child = os.fork()\n"
    "if not child:\n"
    "  time.sleep(60)\n"
    "assert spool.is_owned(first.path)\n"
    "first.close()\n"
    "deadline = time.monotonic() + 20  # Until the child has run.\n"
    "while spool.is_owned(first.path) and time.monotonic() < deadline:\n"
    "  time.sleep(0.01)\n"
    "print(spool.is_owned(first.path))\n"
    "os.kill(child, signal.SIGKILL)\n"
  )
  result = fresh_interpreter.run(program, tmp_path / "a.spool")
  assert (result.stdout, result.returncode) == ("False\n", 0), result.stderr


def test_what_the_server_refuses_is_put_aside_and_holds_up_nothing(
  server, tmp_path
):
  folder = tmp_path / "spool"
  with client_of(server.url, folder) as client:
    client.post_turn({"rollout_id": "nobody", "turn": 1})
    client.post_turn({"rollout_id": "no one", "turn": 1})
    tell(client)
    assert client.drain(20)
    assert client.sender.counters["dead_letters"] == 2
    dead = spool_lib.dead(client.sender.spool.path)
    reasons = [reason for _, _, reason in dead]
    assert "nobody" in reasons[0] and "no one" in reasons[1]
  check(server)
  assert len(list(folder.glob("*.spool"))) == 1  # A person may look into it.


def test_an_answer_from_something_else_is_none(tmp_path):
  """A portal that says 200 to everything must not swallow a run."""

  async def portal(scope, receive, send):
    if scope["type"] == "http":
      await send({"type": "http.response.start", "status": 200})
      await send({"type": "http.response.body", "body": b"<html>welcome"})

  with http_server.LoopbackServer(portal) as front:
    client = client_of(front.url, tmp_path / "spool")
    tell(client)
    assert client.flush()
    time.sleep(0.3)
    assert not client.close(0.2)
    assert client.sender.counters["sent"] == 0
  assert client.sender.counters["undelivered"] > 0


def test_a_server_that_never_answers_does_not_hold_up_the_end(tmp_path):
  stop = threading.Event()

  async def silent(scope, receive, send):
    del receive, send
    if scope["type"] == "http":
      import asyncio  # pylint: disable=g-import-not-at-top

      while not stop.is_set():
        await asyncio.sleep(0.05)

  with http_server.LoopbackServer(silent) as front:
    client = client_of(front.url, tmp_path / "spool")
    tell(client)
    assert client.flush()
    began = time.monotonic()
    assert not client.close(0.3)
    assert time.monotonic() - began < 8  # Not the ten of a request.
    stop.set()


def test_memory_is_bounded_and_drops_are_counted(tmp_path, monkeypatch):
  client = client_of(DEAD, tmp_path / "spool", config=Config(max_pending=10))
  gate = threading.Event()
  monkeypatch.setattr(
    client.sender.spool,
    "append",
    lambda records: (gate.wait(20), len(records))[1],
  )
  client.post_task({"task_id": "first"})
  while client.sender._writer._pending:
    time.sleep(0.01)
  references = [client.post_task({"task_id": f"t{n}"}) for n in range(50)]
  gate.set()
  accepted = [t for t in references if t is not None]
  assert len(accepted) == 10
  assert client.sender.counters["dropped_memory"] == 50 - len(accepted)
  client.close(0.1)


def test_the_disk_is_bounded_and_drops_are_counted(tmp_path):
  client = client_of(DEAD, tmp_path / "spool", config=SMALL)
  for n in range(40):
    client.post_task({"task_id": f"t{n}", "description": "x" * 1000})
    client.flush()
  assert client.sender.counters["dropped_disk"] > 10
  assert client.sender.spool.bytes <= 20_000
  client.close(0.1)


def test_images_stop_before_the_space_is_gone(tmp_path):
  client = client_of(DEAD, tmp_path / "spool", config=SMALL)
  for n in range(10):
    client.sender.put({"tasks": [{"task_id": f"t{n}"}]}, {f"{n}": b"x" * 4000})
    client.flush()
  counts = client.sender.counts()
  assert counts["entry"] == 10 and counts["image"] < 5
  assert client.sender.counters["dropped_images"] == 10 - counts["image"]
  client.close(0.1)


def test_a_disk_that_fails_for_a_while_loses_nothing(
  server, tmp_path, monkeypatch
):
  failing = {"left": 3}
  real = spool_lib.Spool.append

  def append(self, records):
    if failing["left"]:
      failing["left"] -= 1
      raise OSError(errno.EIO, "the disk fails")
    return real(self, records)

  monkeypatch.setattr(spool_lib.Spool, "append", append)
  with client_of(server.url, tmp_path / "spool") as client:
    tell(client)
    assert client.drain(20)
    assert client.sender.counters["spool_failures"] == 3
  check(server)


def test_something_that_cannot_be_told_is_counted(server, tmp_path):
  class Fails:
    def tolist(self):
      raise RuntimeError("no")

  with client_of(server.url, tmp_path / "spool") as client:
    client.post_task({"task_id": Fails()}, "t")
    tell(client)
    assert client.drain(20)
    assert client.sender.counters["failed"] == 1
  check(server)


def test_a_wrong_token_is_no_reason_to_throw_anything_away(tmp_path):
  with monitor_server.sqlite_server(tmp_path / "s", token="right") as server:
    client = ingest_client.IngestClient(
      server.url, "wrong", spool_dir=tmp_path / "spool"
    )
    tell(client)
    assert client.flush()
    time.sleep(0.3)
    assert not client.close(0.2)
    assert client.sender.counters["dead_letters"] == 0
    with ingest_client.IngestClient(
      server.url, "right", spool_dir=tmp_path / "spool"
    ) as client:
      client.drain(10)
      deadline = time.monotonic() + 10
      while len(server.rows("rollout")) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    check(server)


@pytest.mark.parametrize(
  "url, says",
  [
    ("", "give http"),
    ("ftp://x", "give http"),
    ("http://", "give http"),
    ("http://x:99999", "give http"),
  ],
)
def test_urls_that_are_none(tmp_path, url, says):
  with pytest.raises(ValueError, match=says):
    client_of(url, tmp_path)


def test_a_token_that_cannot_be_sent_is_refused_at_once(tmp_path):
  for token in ("tm_\u2026", "a\nb"):
    with pytest.raises(ValueError, match="copy it again"):
      ingest_client.IngestClient(DEAD, token, spool_dir=tmp_path)


def test_a_request_has_one_deadline_for_all_of_it():
  """Also when the answer comes a byte at a time."""

  async def dripping(scope, receive, send):
    import asyncio  # pylint: disable=g-import-not-at-top

    if scope["type"] == "http":
      await send({"type": "http.response.start", "status": 200})
      for _ in range(100):
        await send(
          {"type": "http.response.body", "body": b" ", "more_body": True}
        )
        await asyncio.sleep(0.05)

  with http_server.LoopbackServer(dripping) as front:
    line = transport.Transport(front.url, "", 0.5)
    began = time.monotonic()
    with pytest.raises(transport.TransportError, match="TimeoutError"):
      line.post("/x", b"{}")
    assert time.monotonic() - began < 4
    line.close()


# --- recorder, hooks, context -----------------------------------------------


def test_a_recorder_tells_an_episode(server, tmp_path):
  with client_of(server.url, tmp_path / "spool") as client:
    training = client.post_training(run_name="x", status="running")
    step = client.post_step({"training_id": training, "step": 1})
    recorder = http_rollout_recorder.HttpRolloutRecorder(
      client, "u-1", training, "step", "m", step_id=step
    )
    assert recorder.start_rollout(
        "t-1", "Turn on wifi", "m", "android", "step", step_id=step,
        group_num=2, env_index=1, max_turns=10,
    )  # fmt: skip
    recorder.update_environment(gbox_id="box-7", status="running")
    for turn in (1, 2):
      recorder.start_turn(turn)
      recorder.record_observation(
        turn, obs_type="screenshot_before", screenshot_uri="https://x/1"
      )
      recorder.record_action(
        turn, action={"name": "tap", "args": {"point": [1, 2]}, "callId": "c"}
      )
      recorder.record_action(turn, action_type="tap")
      recorder.end_turn(
        turn,
        turn_time=1.5,
        reward=0.0,
        episode_done=turn == 2,
        metrics={"model": 1.0},
      )
    recorder.record_validation(success=None)
    recorder.record_validation(success=True, details_json={"score": 1.0})
    recorder.update_environment(status="terminated")
    recorder.complete_rollout(reward=1.0, task_success=True, num_turns=2)
    assert client.drain(20)
    assert not client.sender.counters["dead_letters"]
  rollout = server.get("/api/v1/rollouts/u-1")
  assert rollout["status"] == "completed" and rollout["group"] == 2
  assert rollout["environment"]["gbox_id"] == "box-7"
  # What was not said of it again is as it was.
  assert rollout["environment"]["env_type"] == "android"
  assert rollout["environment"]["status"] == "terminated"
  assert [t["turn_time"] for t in rollout["turns"]] == [1.5, 1.5]
  assert len(rollout["validations"]) == 1
  assert len(server.rows("action")) == 4
  assert [
    h["new_status"]
    for h in server.rows("status_history")
    if h["entity_type"] == "rollout"
  ] == ["env_creation", "running", "completed"]


def test_a_recorder_without_monitor_or_source_records_nothing(tmp_path):
  Recorder = http_rollout_recorder.HttpRolloutRecorder
  start = ("t", "", "m", "linux", "step")
  recorder = Recorder(None, "u", None, "step", "m")
  assert not recorder.start_rollout(*start, step_id=1)
  recorder.start_turn(1)
  recorder.record_action(1, "key")
  recorder.record_validation(success=True)
  recorder.complete_rollout()
  client = client_of(DEAD, tmp_path / "spool")
  recorder = Recorder(client, "u", 1, "step", "m")
  assert not recorder.start_rollout(*start)
  recorder.complete_rollout()
  assert client.sender.health()["pending"] == 0
  client.close(0.1)


def test_the_life_of_a_training_through_the_hooks(server, tmp_path):
  with client_of(server.url, tmp_path / "spool") as client:
    context.set_ingest_client(client)
    training = client.post_training(
      run_name="x", status="running", current_phase="rollout", total_steps=2
    )
    context.set_training_id(training)
    client.post_task({"task_id": "t"})
    client.post_task({"task_id": "t"})
    hooks.create_baseline_via_monitor("m")
    steps = []
    for number in (1, 2):
      steps.append(hooks.record_step_before_rollout(number, "m"))
      assert context.get_step_id() == steps[-1]
      hooks.record_step_after_rollout(number)
      hooks.record_step_before_training(number)
      hooks.record_step_after_training(
        number, metrics={"loss": 0.5, "tokens": 7.0, "kl_loss": 0.1}
      )
    hooks.create_eval_via_monitor(2, "m")
    assert context.get_eval_id() and context.get_baseline_id()
    client.post_training(
      training_id=training, status="failed", error_message="step 2 broke"
    )
    context.clear_monitor_context()
    assert client.drain(20)
  assert context.get_training_id() is None and context.get_step_id() is None
  assert hooks.record_step_before_rollout(3) is None  # No monitor.
  (row,) = server.rows("training")
  assert (row["status"], row["error_message"]) == ("failed", "step 2 broke")
  stored_steps = server.rows("step")
  assert [(s["step"], s["status"], s["loss"]) for s in stored_steps] == [
    (1, "completed", 0.5),
    (2, "completed", 0.5),
  ]
  assert stored_steps[0]["num_tokens"] == 7
  assert len(server.rows("task")) == len(server.rows("baseline")) == 1
  assert server.rows("eval")[0]["step"] == 2


def test_the_code_in_the_documentation_runs(server, tmp_path, monkeypatch):
  monkeypatch.setenv(ingest_client.SPOOL_VARIABLE, str(tmp_path / "spool"))
  documented_code.run(
    "docs/monitor.md", replace={"http://127.0.0.1:8765": server.url}
  )
  rollout = server.get("/api/v1/rollouts/an-id-of-its-own")
  assert rollout["status"] == "completed" and rollout["task_success"] == 1
  documented_code.run(
    "packages/training_monitor/README.md",
    replace={"http://127.0.0.1:8765": server.url},
  )
  assert "my-run" in [t["run_name"] for t in server.rows("training")]
  (body,) = documented_code.blocks("docs/monitor.md", "json")
  assert set(server.post(json.loads(body.text))) > {"rollouts", "turns"}


def test_what_the_server_did_not_keep_is_a_warning(caplog):
  caplog.set_level(logging.INFO)
  ingest_client._log_ignored(
    {
      "ignored": [
        {"field": "a", "kept": "nothing"},
        {"field": "b", "kept": "pending"},
      ]
    }
  )
  levels = [r.levelname for r in caplog.records if "ignored" in r.message]
  assert levels == ["WARNING", "INFO"]
