"""Rows of episodes while they run, and of episodes that end badly."""

import errno
import json

import monitor_server
import observed_run
import pytest
import synthetic_run
from trainer_core import events
from trainer_core import trajectory as trajectory_lib
from training_monitor.client import event_codec
from training_monitor.client import spool as spool_lib
from training_monitor.client.rows import live_turns

NAMES = dict(group_id="train-000001", task_id="t")


def rollouts(lite):
  return {r["rollout_id"].rpartition("/")[2]: r for r in lite.rows("rollout")}


def begun(lite, tmp_path, store, **options):
  """Returns the event log of a begun episode, and the episode."""
  log = observed_run.observed(lite, tmp_path / "spool", store)
  log.on_event(events.RunStarted("run", {}))
  log.on_event(events.EpisodeStarted("train-000001.0", **NAMES))
  episode = synthetic_run.episode(store, **options)
  episode.trajectory_id = "train-000001.0"
  return log, episode


def test_what_runs_is_seen_running(lite, tmp_path, store):
  log, _ = begun(lite, tmp_path, store)
  log.on_event(events.TurnFinished("train-000001.0", 0, {"model": 0.1}))
  # No later event and no request makes the row appear.
  name = "train-000001.0"
  monitor_server.wait_for(
    lambda: rollouts(lite).get(name, {}).get("current_turn") == 1
  )
  assert rollouts(lite)[name]["status"] == "running"
  (environment,) = lite.rows("environment")
  assert environment["status"] == "running"
  log.on_event(events.TurnFinished("train-000001.0", 1, {"model": 0.1}))
  monitor_server.wait_for(
    lambda: rollouts(lite)["train-000001.0"]["current_turn"] == 2
  )
  assert log.close()


def test_what_still_runs_at_the_end_is_told(lite, tmp_path, store):
  log, _ = begun(lite, tmp_path, store)
  assert log.drain(60)
  assert set(rollouts(lite)) == {"train-000001.0"}
  log.on_event(events.EpisodeStarted("train-000001.1", **NAMES))
  assert log.close()
  assert set(rollouts(lite)) == {"train-000001.0", "train-000001.1"}


@pytest.mark.parametrize("outcome", ["dropped", "accepted", "learned"])
def test_an_episode_whose_end_was_dropped_is_known_to_its_group(
  lite, tmp_path, store, outcome
):
  log, episode = begun(lite, tmp_path, store)
  group = trajectory_lib.TrajectoryGroup("train-000001", "t", (episode,))
  if outcome == "learned":
    log.on_event(events.StepFinished(1, 1, {"loss": 0.5}, (group,)))
  else:
    log.on_event(events.GroupFinished(group, outcome, "why"))
  assert log.close() and not log.counters["dead_letters"]
  row = rollouts(lite)["train-000001.0"]
  assert row["batch"] == (1 if outcome == "learned" else None)
  dropped = outcome == "dropped"
  assert row["status_message"] == ("group dropped: why" if dropped else None)


def test_what_happened_counts_once_however_often_the_disk_fails(
  lite, tmp_path, store, monkeypatch
):
  log = observed_run.observed(lite, tmp_path / "spool", store)
  append, failures = spool_lib.Spool.append, []

  def fails_at_first(self, *arguments):
    if len(failures) < 2:
      failures.append(arguments)
      raise OSError(errno.EIO, "the disk fails")
    return append(self, *arguments)

  episode = synthetic_run.episode(store)
  episode.trajectory_id = "train-000001.0"
  log.on_event(events.RunStarted("run", {}))
  assert log.drain(60)
  monkeypatch.setattr(spool_lib.Spool, "append", fails_at_first)
  log.on_event(events.EpisodeStarted("train-000001.0", **NAMES))
  log.on_event(events.TurnFinished("train-000001.0", 0, {"model": 0.1}))
  log.on_event(events.Fault("step", "E", "once", "train-000001.0"))
  monitor_server.wait_for(lambda: len(failures) == 2)
  log.on_event(events.EpisodeFinished(episode, **NAMES))
  assert log.close()
  row = rollouts(lite)["train-000001.0"]
  assert [e["message"] for e in json.loads(row["errors"])] == ["once"]
  assert row["runtime_errors"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("bad, lost", [("value", 0), ("not to be made", 1)])
def test_an_end_that_cannot_be_told_takes_nothing_else_with_it(
  lite, tmp_path, store, bad, lost
):
  log, episode = begun(lite, tmp_path, store)
  if bad == "value":  # It is left out, and the rest of its row stored.
    episode.task = {"max_turns": "many"}
  else:
    episode.steps[-1].info["evaluation"] = "fine"
  log.on_event(events.EpisodeFinished(episode, **NAMES))
  group = trajectory_lib.TrajectoryGroup("train-000001", "t", (episode,))
  log.on_event(events.GroupFinished(group, "accepted"))
  log.on_event(events.StepFinished(1, 1, {"loss": 0.5}, (group,)))
  assert log.close()
  counters = log.counters
  assert counters["dead_letters"] + counters["failed"] == lost
  (step,) = lite.rows("step")
  assert step["loss"] == 0.5 and step["status"] == "completed"
  row = rollouts(lite)["train-000001.0"]
  assert row["batch"] == 1 and row["max_turns"] is None
  assert (row["status"] == "env_creation") == bool(lost), row["status"]


def as_recorded(event):
  """An event as the uploader gets it."""
  return event_codec.load(event_codec.dump(event))


def test_a_long_turn_is_shown_while_its_episode_runs(lite, tmp_path, store):
  """With its screens, text and action; the end adds tokens, and no row."""
  log, episode = begun(lite, tmp_path, store, turns=3)
  finished = [
    events.TurnFinished(
      episode.trajectory_id, n, {"model": 0.6, "env": 0.4}, step
    )
    for n, step in enumerate(episode.steps)
  ]
  log.on_event(as_recorded(finished[0]))
  monitor_server.wait_for(lambda: len(lite.rows("obs")) == 2)
  (turn,) = lite.rows("turn")
  step = episode.steps[0]
  metrics = json.loads(turn["metrics_json"])
  assert metrics["model_response"] == step.model_response
  first = live_turns.first_image(step)
  after = live_turns.image_of(step.observation)
  assert [o["screenshot_uri"] for o in lite.rows("obs")] == [
    f"sha256:{first.sha256}",
    f"sha256:{after.sha256}",
  ]
  stored = lambda: {
    s["sha256"] for s in lite.rows("monitor_screenshot", order="sha256")
  }
  monitor_server.wait_for(lambda: stored() == {first.sha256, after.sha256})
  rollout = lite.rows("rollout")[0]
  assert rollout["status"] == "running"
  page = lite.http.get(f"/rollouts/{rollout['id']}").text
  assert f"/api/v1/screenshots/{first.sha256}" in page
  assert all(a["tokens"] is None for a in lite.rows("action"))
  for event in finished[1:]:
    log.on_event(as_recorded(event))
  log.on_event(as_recorded(events.EpisodeFinished(episode, **NAMES)))
  assert log.drain(60)
  assert len(lite.rows("turn")) == episode.num_turns
  shown = lite.rows("obs")
  assert len(shown) == 2 * episode.num_turns
  # In the order of the film strip, before and after, also for the server.
  assert [o["obs_type"] for o in shown[:2]] == ["screenshot"] * 2
  assert shown[1]["screenshot_uri"] == shown[2]["screenshot_uri"]
  actions = lite.rows("action")
  assert len(actions) == sum(
    max(1, len(s.info.get("gui_actions", ()))) for s in episode.steps
  )
  assert json.loads(actions[0]["tokens"])
  assert log.close()


def test_what_is_sent_of_a_running_turn_is_bounded(store):
  episode = synthetic_run.episode(store)
  step = episode.steps[0]
  step.chat_completions = [
    *step.chat_completions,
    {"role": "user", "content": "x" * 1_000_000},
  ]
  step.thought = step.model_response = "y" * 1_000_000
  event = lambda n, seconds: events.TurnFinished(
    "e", n, {"model": seconds}, step
  )
  assert len(event_codec.dump(event(5, 1.0))) < 100_000
  assert as_recorded(event(5, 1.0)).step.chat_completions == []
  # A short turn comes with the episode's end, and costs as little as before.
  assert as_recorded(event(0, 0.1)).step is None
  assert len(event_codec.dump(event(0, 0.1))) < 200
