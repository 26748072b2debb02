"""What is told of an episode while it runs, and what only when it has ended."""

import json
import sqlite3
import time

import monitor_server
import observed_run
import pytest
import synthetic_run
import told_run
from tunix.rl.multi_turn import events
from tunix.rl.multi_turn import images as images_lib
from tunix.rl.multi_turn import trajectory as trajectory_lib
from tunix.rl.multi_turn.monitor.client import observer as observer_lib
from tunix.rl.multi_turn.monitor.client import spool as spool_lib

STORED = (
    "training", "task", "baseline", "eval", "step", "rollout", "environment",
    "turn", "action", "obs", "validation",
)  # pyformat: disable
LATER = {"created_at", "updated_at", "last_heartbeat"}
NAMES = dict(group_id="train-000001", task_id="t")


@pytest.fixture
def server(tmp_path):
  with monitor_server.sqlite_server(tmp_path / "server") as found:
    yield found


@pytest.fixture
def store():
  return images_lib.ImageStore()


def rollouts(server):
  return {
      r["rollout_id"].rpartition("/")[2]: r for r in server.rows("rollout")
  }


def until(holds):
  deadline = time.monotonic() + 60
  while not holds():
    assert time.monotonic() < deadline
    time.sleep(0.02)


def history(server, kind):
  found = {}
  for row in server.rows("status_history"):
    if row["entity_type"] == kind:
      found.setdefault(row["entity_id"], []).append(row["new_status"])
  return found


def test_told_as_a_whole_is_told_in_pieces(tmp_path, store, monkeypatch):
  """The same rows, and of each the same last status, either way."""
  log = told_run.Log()
  observed_run.play(log.on_event, store)
  episodes = len(log.of(events.EpisodeFinished))
  found, statuses = [], []
  for way, held_s in (("whole", 1e9), ("pieces", 0.0)):
    monkeypatch.setattr(observer_lib, "_HELD_S", held_s)
    with monitor_server.sqlite_server(tmp_path / way) as server:
      told = observed_run.observed(server, tmp_path / f"{way} spool", store)
      for event in log.events:
        told.on_event(event)
        if way == "pieces" and isinstance(event, events.EpisodeStarted):
          assert told.client.flush(60)
      assert told.close()
      assert not told.client.sender.counters["dead_letters"]
      told_run.compare(server, log)
      found.append({
          table: [
              {k: v for k, v in row.items() if k not in LATER}
              for row in server.rows(table)
          ]
          for table in STORED
      })
      statuses.append(history(server, "rollout"))
  whole, pieces = statuses
  assert found[0] == found[1]
  assert len(whole) == len(pieces) == episodes
  assert all(len(told) == 1 for told in whole.values())
  assert all(
      told[0] == "env_creation" and told[-1:] == whole[id_]
      for id_, told in pieces.items()
  )


def test_what_runs_for_longer_is_seen_running(
    server, tmp_path, store, monkeypatch
):
  monkeypatch.setattr(observer_lib, "_HELD_S", 0.2)
  told = observed_run.observed(server, tmp_path / "spool", store)
  told.on_event(events.RunStarted("run", {}))
  told.on_event(events.EpisodeStarted("train-000001.0", **NAMES))
  told.on_event(events.TurnFinished("train-000001.0", 0, {"model": 0.1}))
  # Nothing more happens, and nobody asks.
  until(lambda: rollouts(server))
  (row,) = rollouts(server).values()
  assert row["status"] == "running" and row["current_turn"] == 1
  (environment,) = server.rows("environment")
  assert environment["status"] == "running"
  told.on_event(events.TurnFinished("train-000001.0", 1, {"model": 0.1}))
  until(lambda: rollouts(server)["train-000001.0"]["current_turn"] == 2)
  assert told.close()


def test_what_still_runs_at_the_end_is_told(server, tmp_path, store):
  told = observed_run.observed(server, tmp_path / "spool", store)
  told.on_event(events.RunStarted("run", {}))
  told.on_event(events.EpisodeStarted("train-000001.0", **NAMES))
  assert told.client.drain(60)
  assert set(rollouts(server)) == {"train-000001.0"}
  told.on_event(events.EpisodeStarted("train-000001.1", **NAMES))
  assert told.close()
  assert set(rollouts(server)) == {"train-000001.0", "train-000001.1"}


@pytest.mark.parametrize("outcome", ["dropped", "accepted", "learned"])
def test_an_episode_whose_end_was_dropped_is_known_to_its_group(
    server, tmp_path, store, outcome
):
  told = observed_run.observed(server, tmp_path / "spool", store)
  told.on_event(events.RunStarted("run", {}))
  told.on_event(events.EpisodeStarted("train-000001.0", **NAMES))
  episode = synthetic_run.episode(store)
  episode.trajectory_id = "train-000001.0"
  group = trajectory_lib.TrajectoryGroup("train-000001", "t", (episode,))
  if outcome == "learned":
    told.on_event(events.StepFinished(1, 1, {"loss": 0.5}, (group,)))
  else:
    told.on_event(events.GroupFinished(group, outcome, "why"))
  assert told.close() and not told.client.sender.counters["dead_letters"]
  row = rollouts(server)["train-000001.0"]
  assert row["batch"] == (1 if outcome == "learned" else None)
  dropped = outcome == "dropped"
  assert row["status_message"] == ("group dropped: why" if dropped else None)


def test_what_happened_counts_once_however_often_the_disk_fails(
    server, tmp_path, store, monkeypatch
):
  told = observed_run.observed(server, tmp_path / "spool", store)
  append, failures = spool_lib.Spool.append, []

  def fails_at_first(self, *given):
    if len(failures) < 2:
      failures.append(given)
      raise sqlite3.OperationalError("disk I/O error")
    return append(self, *given)

  episode = synthetic_run.episode(store)
  episode.trajectory_id = "train-000001.0"
  told.on_event(events.RunStarted("run", {}))
  assert told.client.flush(60)
  monkeypatch.setattr(spool_lib.Spool, "append", fails_at_first)
  told.on_event(events.EpisodeStarted("train-000001.0", **NAMES))
  told.on_event(events.TurnFinished("train-000001.0", 0, {"model": 0.1}))
  told.on_event(events.Fault("step", "E", "once", "train-000001.0"))
  until(lambda: len(failures) == 2)
  told.on_event(events.EpisodeFinished(episode, **NAMES))
  assert told.close()
  row = rollouts(server)["train-000001.0"]
  assert [e["message"] for e in json.loads(row["errors"])] == ["once"]
  assert row["runtime_errors"] == 1


def test_a_beginning_comes_before_what_follows_it(
    server, tmp_path, store, monkeypatch
):
  """What becomes due while more waits."""
  monkeypatch.setattr(observer_lib, "_HELD_S", 0.0)
  told = observed_run.observed(server, tmp_path / "spool", store)
  told.on_event(events.RunStarted("run", {}))
  for number in range(4):
    name = f"train-{number:06d}.0"
    told.on_event(events.EpisodeStarted(name, **NAMES))
    until(lambda name=name: f"train/{name}" in told._names)
    told.on_event(events.TurnFinished(name, 0, {"model": 0.1}))
  assert told.close() and not told.client.sender.counters["dead_letters"]
  assert {r["status"] for r in rollouts(server).values()} == {"running"}


def test_what_begins_as_the_run_ends_is_told(
    server, tmp_path, store, monkeypatch
):
  """Between the last flush and the end."""
  told = observed_run.observed(server, tmp_path / "spool", store)
  told.on_event(events.RunStarted("run", {}))
  assert told.client.flush(60)
  told.on_event(events.EpisodeStarted("train-000001.0", **NAMES))
  until(lambda: told._held)
  monkeypatch.setattr(told.client.sender, "flush", lambda timeout_s: True)
  assert told.close()
  assert set(rollouts(server)) == {"train-000001.0"}
