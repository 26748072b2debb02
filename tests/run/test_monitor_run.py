"""A training run told to the monitor: the database is the events."""

import json
import os
import pathlib
import signal
import sqlite3
import subprocess
import sys
import time

import fresh_interpreter
import httpx
import monitor_server
import observed_run
import pytest
import small_runs
import synthetic_run
import told_run
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.run import monitor as monitor_lib

pytestmark = pytest.mark.timeout(400)
Status = trajectory_lib.TrajectoryStatus
SMALL = (
  *small_runs.SMALL,
  small_runs.ONE_LAYER,
  "warm_start.source=none",
  "steps=2",
  "eval.every=1",
)


@pytest.fixture
def server(tmp_path):
  with monitor_server.sqlite_server(tmp_path / "server") as running:
    yield running


def test_an_invented_run_with_every_failure_is_told_whole(server, tmp_path):
  store = images_lib.ImageStore()
  log = told_run.Log()
  event_log = observed_run.observed(server, tmp_path / "spool", store)
  observers = events.Observers([log, event_log])
  observed_run.play(observers.on_event, store)
  assert event_log.close() and not observers.failures
  counters = event_log.counters
  assert not counters["dead_letters"] and not counters["failed"]
  told_run.compare(server, log)
  (training,) = server.rows("training")
  assert training["status"] == "completed"
  assert json.loads(training["config_json"]) == {"a": 1}
  history = [
    h["new_status"]
    for h in server.rows("status_history")
    if h["entity_type"] == "training"
  ]
  assert history == ["initializing", "running", "completed"]
  cancelled = [r for r in server.rows("rollout") if r["status"] == "cancelled"]
  failed = [r for r in server.rows("rollout") if r["status"] == "failed"]
  assert cancelled and failed
  assert all(r["runtime_errors"] == 1 for r in failed)
  assert all(
    json.loads(r["errors"])[0]["kind"] == "EnvStepError" for r in failed
  )


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_training(server, tmp_path):
  store = images_lib.ImageStore()
  for session, status in enumerate(("failed", "completed")):
    event_log = observed_run.observed(
      server, tmp_path / "spool", store, session=session
    )
    event_log.on_event(events.RunStarted("run", {}))
    common = dict(group_id="train-000001", task_id="t", split="train")
    episode = synthetic_run.episode(store)
    episode.trajectory_id = "train-000001.0"  # The same name both times.
    event_log.on_event(
      events.EpisodeStarted(trajectory_id="train-000001.0", **common)
    )
    event_log.on_event(events.EpisodeFinished(episode, **common))
    error = "broke" if not session else None
    event_log.on_event(events.RunFinished(status, error))
    assert event_log.close()
  (training,) = server.rows("training")
  assert training["status"] == "completed"
  history = [
    h["new_status"]
    for h in server.rows("status_history")
    if h["entity_type"] == "training"
  ]
  assert history == [
    "initializing",
    "running",
    "failed",
    "initializing",
    "running",
    "completed",
  ]
  assert len(server.rows("rollout")) == 2
  assert len(server.rows("step")) == 1


@pytest.mark.slow
def test_a_training_run_is_told_whole(server, tmp_path, monkeypatch):
  """The command as a user runs it; the database equals the event log."""
  log = told_run.Log()
  attach = train.Run.attach_observers

  def attach_both(self, resume_step):
    attach(self, resume_step)
    self.observers.add(log)

  monkeypatch.setattr(train.Run, "attach_observers", attach_both)
  monkeypatch.delenv("WANDB_API_KEY", raising=False)
  monkeypatch.setenv("NETRC", str(tmp_path / "none"))
  status = train.main(
    [
      f"run.dir={tmp_path / 'runs'}",
      "name=a",
      f"monitor.url={server.url}",
      "monitor.close_timeout_s=60",
      "tracking.tensorboard=true",
      "tracking.wandb=online",
      *SMALL,
    ]
  )
  assert status == 0  # The missing login gives one warning.
  (board,) = (tmp_path / "runs" / "a" / "tensorboard").iterdir()
  assert b"train/reward_mean" in board.read_bytes()
  episodes = log.of(events.EpisodeFinished)
  sequences = [s for e in episodes for s in e.trajectory.sequences]
  assert sequences and all(s.entropies is not None for s in sequences)
  readings = log.of(events.StepFinished)[-1].metrics
  assert readings["episodes_busy"] > 0 and 0 <= readings["overlap"] <= 1
  assert readings["turn_seconds_model"] > readings["turn_seconds_env"] > 0
  told_run.compare(server, log)
  (training,) = server.rows("training")
  assert training["run_name"] == "a" and training["status"] == "completed"
  assert training["wandb_name"] == "a"
  assert training["current_step"] == training["total_steps"] == 2
  assert json.loads(training["config_json"])["learner"]["steps"] == 2
  for task in server.rows("task"):
    assert task["description"] and task["app_name"]
  evals = server.rows("eval")
  assert [e["step"] for e in evals] == [1, 2]
  assert list((tmp_path / "runs" / "monitor_spool").iterdir()) == []


def test_a_run_without_a_monitor_imports_nothing_of_it(tmp_path):
  program = (
    "import sys\n"
    "from tunix.rl.multi_turn import train\n"
    "bad = [m for m in sys.modules\n"
    "       if m.startswith('training_monitor') or m == 'sqlalchemy']\n"
    "assert not bad, bad"
  )
  result = fresh_interpreter.run(program)
  assert result.returncode == 0, result.stderr


# --- the embedded server ----------------------------------------------------


def alive(pid):
  stat = pathlib.Path(f"/proc/{pid}/stat")
  return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_the_embedded_server_ends_with_its_owner_however_that_ends(tmp_path):
  program = (
    "import pathlib, sys, time\n"
    "from tunix.rl.multi_turn.run import monitor\n"
    "s = monitor.EmbeddedServer(pathlib.Path(sys.argv[1]))\n"
    "print(s.pid, s.url, flush=True)\n"
    "time.sleep(100)\n"
  )
  owner = subprocess.Popen(
    [sys.executable, "-c", program, str(tmp_path / "m.db")],
    stdout=subprocess.PIPE,
    text=True,
  )
  pid, url = owner.stdout.readline().split()
  with httpx.Client(timeout=60, verify=False) as http:
    assert http.get(f"{url}/health").status_code == 200
    assert "<html" in http.get(url).text
  mapped = pathlib.Path(f"/proc/{pid}/maps").read_text()
  assert "sqlite" in mapped and "jaxlib" not in mapped
  # Ctrl-C is not for it, and it has the CPU that its owner leaves: of that
  # niceness decides, in all its threads, only within one session.
  assert os.getpgid(int(pid)) == int(pid)
  assert os.getsid(int(pid)) == os.getsid(owner.pid)
  nice = [
    (p / "stat").read_text().rpartition(")")[2].split()[16]
    for p in pathlib.Path(f"/proc/{pid}/task").iterdir()
  ]
  assert len(nice) > 2 and set(nice) == {"19"}, nice
  owner.kill()
  owner.wait(10)
  owner.stdout.close()
  deadline = time.monotonic() + 20
  while alive(int(pid)) and time.monotonic() < deadline:
    time.sleep(0.1)
  assert not alive(int(pid))


@pytest.mark.slow
def test_an_embedded_server_that_cannot_start_says_why(tmp_path):
  (tmp_path / "m.db").write_text("this is no database, it is a diary" * 100)
  with pytest.raises(config_lib.ConfigError, match="read .*m.log"):
    monitor_lib.EmbeddedServer(tmp_path / "m.db")
  assert "not a database" in (tmp_path / "m.log").read_text()


@pytest.mark.slow
def test_a_run_with_its_own_monitor(tmp_path, capsys):
  """The run leaves the database and nothing else: no process, no spool."""
  config = config_lib.load_config(
    [f"run.dir={tmp_path}", "name=a", "monitor.embedded=true", *SMALL]
  )
  store = images_lib.ImageStore()
  monitor = monitor_lib.RunMonitor(config, store)
  observed_run.play(monitor.observer.on_event, store, steps=2)
  pid = monitor.server.pid
  monitor.close()
  assert not alive(pid)
  assert f"serve --database {tmp_path}/monitor.db" in capsys.readouterr().err
  database = sqlite3.connect(tmp_path / "monitor.db")
  ask = lambda sql: database.execute(sql).fetchall()
  assert ask("SELECT run_name, status FROM training") == [("run", "completed")]
  assert ask("SELECT count(*) FROM rollout") == [(16,)]
  assert ask("PRAGMA integrity_check") == [("ok",)]
  database.close()
  assert os.listdir(tmp_path / "monitor_spool") == []


@pytest.mark.parametrize(
  "overrides, says",
  [
    (["monitor.url=http://x", "monitor.embedded=true"], "one of them"),
    (["monitor.url=localhost:80"], "http://host:port"),
    (["monitor.database=x.db"], "embedded server"),
    (["monitor.spool_mb=0"], "spool_mb"),
  ],
)
def test_settings_that_cannot_be(overrides, says):
  with pytest.raises(config_lib.ConfigError, match=says):
    config_lib.load_config([*SMALL, *overrides])


@pytest.mark.slow
def test_who_ends_all_processes_of_a_job_does_not_end_a_runs_server(tmp_path):
  server = monitor_lib.EmbeddedServer(tmp_path / "monitor.db")
  try:
    os.kill(server.pid, signal.SIGTERM)
    with httpx.Client(timeout=60, verify=False) as http:
      for _ in range(20):
        assert http.get(f"{server.url}/health").status_code == 200
        time.sleep(0.05)
  finally:
    server.close()
  assert not pathlib.Path(f"/proc/{server.pid}").exists()
