"""What is told of episodes while they run, and of those that end badly."""

import json
import sqlite3
import time

import observed_run
import pytest
import synthetic_run
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.monitor.client import spool as spool_lib

NAMES = dict(group_id="train-000001", task_id="t")


@pytest.fixture
def store():
  return images_lib.ImageStore()


def rollouts(lite):
  return {
      r["rollout_id"].rpartition("/")[2]: r for r in lite.rows("rollout")
  }


def begun(lite, tmp_path, store):
  """Who tells of an episode that has begun, and the episode."""
  told = observed_run.observed(lite, tmp_path / "spool", store)
  told.on_event(events.RunStarted("run", {}))
  told.on_event(events.EpisodeStarted("train-000001.0", **NAMES))
  episode = synthetic_run.episode(store)
  episode.trajectory_id = "train-000001.0"
  return told, episode


def until(holds):
  deadline = time.monotonic() + 60
  while not holds():
    assert time.monotonic() < deadline
    time.sleep(0.02)


def test_what_runs_is_seen_running(lite, tmp_path, store):
  told, _ = begun(lite, tmp_path, store)
  told.on_event(events.TurnFinished("train-000001.0", 0, {"model": 0.1}))
  # Nothing more happens, and nobody asks.
  name = "train-000001.0"
  until(lambda: rollouts(lite).get(name, {}).get("current_turn") == 1)
  assert rollouts(lite)[name]["status"] == "running"
  (environment,) = lite.rows("environment")
  assert environment["status"] == "running"
  told.on_event(events.TurnFinished("train-000001.0", 1, {"model": 0.1}))
  until(lambda: rollouts(lite)["train-000001.0"]["current_turn"] == 2)
  assert told.close()


def test_what_still_runs_at_the_end_is_told(lite, tmp_path, store):
  told, _ = begun(lite, tmp_path, store)
  assert told.client.drain(60)
  assert set(rollouts(lite)) == {"train-000001.0"}
  told.on_event(events.EpisodeStarted("train-000001.1", **NAMES))
  assert told.close()
  assert set(rollouts(lite)) == {"train-000001.0", "train-000001.1"}


@pytest.mark.parametrize("outcome", ["dropped", "accepted", "learned"])
def test_an_episode_whose_end_was_dropped_is_known_to_its_group(
    lite, tmp_path, store, outcome
):
  told, episode = begun(lite, tmp_path, store)
  group = trajectory_lib.TrajectoryGroup("train-000001", "t", (episode,))
  if outcome == "learned":
    told.on_event(events.StepFinished(1, 1, {"loss": 0.5}, (group,)))
  else:
    told.on_event(events.GroupFinished(group, outcome, "why"))
  assert told.close() and not told.client.sender.counters["dead_letters"]
  row = rollouts(lite)["train-000001.0"]
  assert row["batch"] == (1 if outcome == "learned" else None)
  dropped = outcome == "dropped"
  assert row["status_message"] == ("group dropped: why" if dropped else None)


def test_what_happened_counts_once_however_often_the_disk_fails(
    lite, tmp_path, store, monkeypatch
):
  told = observed_run.observed(lite, tmp_path / "spool", store)
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
  row = rollouts(lite)["train-000001.0"]
  assert [e["message"] for e in json.loads(row["errors"])] == ["once"]
  assert row["runtime_errors"] == 1


@pytest.mark.parametrize("bad", ["refused", "not to be made"])
def test_an_end_that_cannot_be_told_takes_nothing_else_with_it(
    lite, tmp_path, store, bad
):
  told, episode = begun(lite, tmp_path, store)
  if bad == "refused":
    episode.task = {"max_turns": "20"}
  else:
    episode.steps[-1].info["evaluation"] = "fine"
  told.on_event(events.EpisodeFinished(episode, **NAMES))
  group = trajectory_lib.TrajectoryGroup("train-000001", "t", (episode,))
  told.on_event(events.GroupFinished(group, "accepted"))
  told.on_event(events.StepFinished(1, 1, {"loss": 0.5}, (group,)))
  assert told.close()
  counters = told.client.sender.counters
  assert counters["dead_letters"] + counters["failed"] == 1
  (step,) = lite.rows("step")
  assert step["loss"] == 0.5 and step["status"] == "completed"
  row = rollouts(lite)["train-000001.0"]
  assert row["batch"] == 1 and row["status"] == "env_creation"
