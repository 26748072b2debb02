"""Whether a monitor's database is the events of a run, row by row."""

import datetime
import json

import pytest
from trainer_core import events
from trainer_core import trajectory as trajectory_lib

Status = trajectory_lib.TrajectoryStatus


class Log:
  """An observer that keeps everything, the independent witness."""

  def __init__(self):
    self.events = []

  def on_event(self, event):
    self.events.append(event)

  def of(self, kind):
    return [e for e in self.events if isinstance(e, kind)]


def sampled(episode):
  """Turn -> (ids, log-probs, entropies, prompt), one token at a time."""
  found = {}
  for sequence in episode.sequences:
    for i, mask in enumerate(sequence.loss_mask):
      ids, logprobs, entropies, prompt = found.setdefault(
        int(sequence.turn_ids[i]), ([], [], [], [])
      )
      token = int(sequence.tokens[i])
      if not mask:
        prompt.append(token)
        continue
      ids.append(token)
      logprobs.append(float(sequence.logprobs[i]))
      if sequence.entropies is not None:
        entropies.append(sequence.entropies[i])
  return found


def compare(server, log):
  """Every episode, step and measurement of the log, in the database."""
  episodes = log.of(events.EpisodeFinished)
  rollouts = server.rows("rollout")
  assert len(rollouts) == len(episodes) == len(log.of(events.EpisodeStarted))
  assert len({r["rollout_id"] for r in rollouts}) == len(rollouts)
  learned = {
    id(t): step.step
    for step in log.of(events.StepFinished)
    for group in step.groups
    for t in group.trajectories
  }
  weighed = {
    id(t): list(step.advantages[t.trajectory_id])
    for step in log.of(events.StepFinished)
    for group in step.groups
    for t in group.trajectories
    if t.trajectory_id in step.advantages
  }
  assert weighed
  left_out = {
    id(t): list(step.left_out[t.trajectory_id])
    for step in log.of(events.StepFinished)
    for group in step.groups
    for t in group.trajectories
  }
  # Episodes that began at the same place come in the order of their end.
  left = {}
  for row in rollouts:
    left.setdefault(row["rollout_id"].rpartition("/")[2], []).append(row)
  known = {
    s["sha256"] for s in server.rows("monitor_screenshot", "sha256", "sha256")
  }
  place = None
  for event in log.events:
    if isinstance(event, events.EvalStarted):
      place = event
    if not isinstance(event, events.EpisodeFinished):
      continue
    episode = event.trajectory
    row = left[episode.trajectory_id].pop(0)
    assert row["reward"] == episode.reward
    assert row["num_turns"] == episode.num_turns == row["current_turn"]
    assert row["status_message"] == episode.status.value
    assert row["error_message"] == episode.error
    assert row["task_success"] == int(episode.status is Status.SUCCEEDED)
    assert row["batch"] == learned.get(id(episode))
    summary = json.loads(row["summary_json"])
    assert summary["trajectory_status"] == episode.status.value
    assert summary.get("advantages") == weighed.get(id(episode))
    assert summary.get("left_out") == left_out.get(id(episode))
    if "advantages" in summary:
      mean = sum(summary["advantages"]) / len(summary["advantages"])
      assert summary["advantage"] == pytest.approx(mean)
    if event.split == "eval":
      kind = "baseline" if place.name in ("initial", "warm_start") else "eval"
      assert row["source_type"] == kind
      assert row["is_eval"] == 1
    else:
      assert row["source_type"] == "step" and row["is_eval"] == 0
    times = [
      row[k]
      for k in (
        "start_time",
        "env_creation_time",
        "agent_init_time",
        "task_start_time",
        "task_end_time",
        "validation_time",
        "end_time",
      )
      if row[k]
    ]
    assert times == sorted(times)
    compare_stages(row, episode)
    compare_figures(row, episode)
    compare_verdict(server, row, episode)
    compare_turns(server, row, episode, known)
  assert not any(left.values())
  steps = server.rows("step")
  finished = log.of(events.StepFinished)
  assert [s["step"] for s in steps] == [e.step for e in finished]
  for row, event in zip(steps, finished):
    assert row["status"] == "completed" and row["progress_percent"] == 100
    assert row["loss"] == event.metrics.get("loss")
    assert row["policy_gradient_norm"] == event.metrics.get("grad_norm")
    saved = [e for e in log.of(events.CheckpointSaved) if e.step == row["step"]]
    assert row["checkpoint_path"] == (saved[-1].path if saved else None)
    told = json.loads(row["metrics_json"])
    assert told == {k: float(v) for k, v in event.metrics.items()}
  assert log.of(events.CheckpointSaved)
  ready = {e.trajectory_id for e in log.of(events.EnvironmentReady)}
  stated = {
    h["entity_id"]
    for h in server.rows("status_history")
    if (h["entity_type"], h["new_status"]) == ("rollout", "agent_init")
  }
  assert ready and stated == {
    r["id"] for r in rollouts if r["rollout_id"].rpartition("/")[2] in ready
  }
  played = {e.task_id for e in episodes if e.split == "eval"}
  for row in server.rows("baseline") + server.rows("eval"):
    assert 0 <= row["current_task_index"] < max(len(played), 2)
  told = {}
  for row in server.rows("baseline") + server.rows("eval"):
    assert row["status"] == "completed"
    told |= json.loads(row["metrics_json"])
  assert told == {
    e.name: json.loads(json.dumps(e.results))
    for e in log.of(events.EvalFinished)
  }


def compare_stages(row, episode):
  """Every stage that was measured has a time of its own."""
  for metric, column in (
    ("seconds_reset", "env_creation_time"),
    ("seconds_agent_init", "agent_init_time"),
  ):
    assert (row[column] is None) == (metric not in episode.metrics), column
  judged = "seconds_evaluate" in episode.metrics and episode.num_turns
  assert (row["validation_time"] is None) == (not judged)
  if "seconds_reset" in episode.metrics:
    spent = seconds(row["start_time"], row["env_creation_time"])
    assert spent == pytest.approx(episode.metrics["seconds_reset"], abs=2e-6)


def compare_figures(row, episode):
  """Checks the columns of actions, claims and successes."""
  actions = [
    a for step in episode.steps for a in step.info.get("gui_actions", ())
  ]
  assert row["num_total_actions"] == len(actions)
  claims = [a for a in actions if a["kind"] in ("answer", "terminate")]
  assert row["attempted_completion"] == int(bool(claims))
  claimed = int(claims[-1].get("success") is not False) if claims else None
  assert row["agent_reported_success"] == claimed
  assert row["ran_out_of_turns"] == int(episode.status is Status.MAX_TURNS)
  decided = episode.status in (Status.SUCCEEDED, Status.FAILED)
  assert row["task_completed"] == int(decided)
  ended = episode.num_turns if decided else None
  assert row["turn_task_completed"] == ended
  won = [
    n
    for n, step in enumerate(episode.steps, 1)
    if step.info.get("success") or step.reward > 0
  ]
  assert row["turn_first_success"] == (won[0] if won else None)


def seconds(start, end):
  read = lambda text: datetime.datetime.fromisoformat(str(text))
  return (read(end) - read(start)).total_seconds()


def compare_verdict(server, row, episode):
  """One validation of each verdict, with what it asked and found."""
  info = episode.steps[-1].info if episode.steps else {}
  with server.engine.connect() as connection:
    found = [
      dict(r._mapping)
      for r in connection.exec_driver_sql(
        "SELECT v.*, w.validator_type, w.validation_method, w.task_id"
        " FROM validation v JOIN validator w ON w.id = v.validator_id"
        f" WHERE v.rollout_id = {row['id']}"
      )
    ]
  if "success" not in info:
    assert not [v for v in found if v["error_message"] is None]
    return
  (verdict,) = found
  assert verdict["success"] == int(info["success"])
  assert verdict["task_id"] == row["task_id"]
  assert verdict["execution_time"] == episode.metrics["seconds_evaluate"]
  assert verdict["validation_query"] and verdict["expected_result"]
  assert verdict["validator_type"] and verdict["validation_method"]
  assert row["validation_passed"] == int(info["success"])


def compare_turns(server, row, episode, known):
  where = f"rollout_id = {row['id']}"
  with server.engine.connect() as connection:
    ask = lambda sql: [
      dict(r._mapping) for r in connection.exec_driver_sql(sql)
    ]
    turns = ask(f"SELECT * FROM turn WHERE {where} ORDER BY turn")
    (environment,) = ask(f"SELECT * FROM environment WHERE {where}")
    inside = f"turn_id IN (SELECT id FROM turn WHERE {where})"
    actions = ask(f"SELECT * FROM action WHERE {inside} ORDER BY id")
    seen = ask(f"SELECT * FROM obs WHERE {inside} ORDER BY id")
  assert json.loads(environment["config_json"])["gym"]
  assert environment["status"] == (
    "error" if episode.status is Status.ENV_ERROR else "terminated"
  )
  assert [t["turn"] for t in turns] == list(range(1, episode.num_turns + 1))
  tokens = sampled(episode)
  for index, (turn, step) in enumerate(zip(turns, episode.steps)):
    assert turn["reward"] == step.reward
    assert turn["episode_done"] == int(step.done)
    told = json.loads(turn["metrics_json"])
    assert told["model_response"] == step.model_response
    assert told["thought"] == step.thought
    done = [a for a in actions if a["turn_id"] == turn["id"]]
    wanted = [a["kind"] for a in step.info.get("gui_actions", ())]
    assert [a["action_type"] for a in done][: len(wanted)] == wanted
    ids, logprobs, entropies, prompt = tokens.get(index, ([],) * 4)
    if ids:
      assert told["entropies"] == (
        [float(str(e)) for e in entropies] if entropies else None
      )
      runs = told["prompt_tokens"]
      assert [i for i, n in runs for _ in range(n)] == prompt
      assert all(a != b for (a, _), (b, _) in zip(runs, runs[1:]))
      assert json.loads(done[0]["tokens"]) == ids
      assert json.loads(done[0]["logprobs"]) == logprobs
      assert done[0]["num_tokens"] == len(ids)
    shown = [o for o in seen if o["turn_id"] == turn["id"]]
    assert len(shown) == 2
    after = step.observation["screenshot"].sha256
    assert shown[1]["screenshot_uri"] == f"sha256:{after}"
    assert shown[0]["screenshot_uri"].removeprefix("sha256:") in known
    if not index and isinstance(episode.task, dict):
      assert episode.task["instruction"] in shown[0]["text_content"]
    assert after in known
