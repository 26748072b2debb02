"""An episode's rows: its stages, verdict, errors and task."""

import dataclasses
import json

import monitor_server
import observed_run
import pytest
import synthetic_run
import told_run
from trainer_core import events
from trainer_core import trajectory as trajectory_lib

TASKS = "tunix.rl.multi_turn.environments.task_sources.cua_task"
Status = trajectory_lib.TrajectoryStatus
COMMON = dict(group_id="g-1", task_id="click-button/0", split="train")


@pytest.fixture
def server(tmp_path):
  with monitor_server.sqlite_server(tmp_path / "server") as running:
    yield running


def tell(server, folder, store, *emitted, **options):
  observer = observed_run.observed(server, folder, store, **options)
  for event in (events.RunStarted("run", {}), *emitted):
    observer.on_event(event)
  assert observer.close()
  counters = observer.counters
  assert not counters["dead_letters"] and not counters["failed"]


def played(store, at, name="g-1.0", turns=2, evaluation=True, **metrics):
  """Events of an episode from `at` to ten seconds later."""
  episode = synthetic_run.episode(store, turns=turns)
  episode.trajectory_id = name
  episode.metrics = metrics
  if evaluation:
    episode.steps[-1].info |= {
      "success": True,
      "evaluation": {"score": 0.75, "success": True},
    }
  turn = [
    events.TurnFinished(
      name, n, {"model": 1.0, "env": 0.5}, time=at + 5 + 1.5 * n
    )
    for n in range(turns)
  ]
  return [
    events.EpisodeStarted(trajectory_id=name, **COMMON, time=at),
    *turn,
    events.EpisodeFinished(episode, **COMMON, time=at + 10),
  ]


def stages(row):
  return [
      told_run.seconds(row["start_time"], row[name])
      for name in ("env_creation_time", "agent_init_time", "task_start_time",
                   "task_end_time", "validation_time", "end_time")
  ]  # fmt: skip


def test_each_stage_has_the_time_that_it_took(server, tmp_path, store):
  spent = dict(seconds_reset=2.0, seconds_agent_init=0.25, seconds_evaluate=0.4)
  tell(
    server,
    tmp_path / "s",
    store,
    *played(store, 1e9, **spent),
    *played(store, 1e9, "g-1.1", evaluation=False, **spent),
  )
  inside, after = server.rows("rollout")
  # The gym's verdict is part of the last turn, another one follows it.
  assert stages(inside) == pytest.approx([2, 2.25, 3.5, 6.1, 6.5, 10])
  assert stages(after) == pytest.approx([2, 2.25, 3.5, 6.5, 6.9, 10])


def test_what_was_not_measured_is_empty_and_no_copy(server, tmp_path, store):
  tell(server, tmp_path / "s", store, *played(store, 1e9, evaluation=False))
  (row,) = server.rows("rollout")
  assert row["env_creation_time"] is row["agent_init_time"] is None
  assert row["validation_time"] is None and row["task_end_time"]


def test_a_verdict_names_its_validator_and_one_that_failed_says_why(
  server, tmp_path, store
):
  broken = synthetic_run.episode(store, status=Status.TIMEOUT)
  broken.trajectory_id = "g-1.1"
  tell(
    server,
    tmp_path / "s",
    store,
    *played(store, 1e9, seconds_evaluate=0.4),
    events.EpisodeStarted(trajectory_id="g-1.1", **COMMON),
    events.Fault("reward", "RewardTimeout", "no reward within 3 s", "g-1.1"),
    events.EpisodeFinished(broken, **COMMON),
    task_source="desktop",
    trajectories="/runs/a/trajectories.jsonl",
  )
  (validator,) = server.rows("validator")
  assert validator["validation_method"] == "desktop.evaluate"
  good, bad = server.rows("validation")
  assert good["validator_id"] == bad["validator_id"] == validator["id"]
  assert (good["success"], good["execution_time"]) == (1, 0.4)
  assert good["actual_result"] == "0.75" and good["error_message"] is None
  assert bad["success"] == 0
  assert bad["error_message"] == "RewardTimeout: no reward within 3 s"
  (environment, _) = server.rows("environment")
  assert json.loads(environment["config_json"]) == {"gym": "desktop"}
  assert {r["trajectory_path"] for r in server.rows("rollout")} == {
    "/runs/a/trajectories.jsonl"
  }
  page = server.http.get(f"/rollouts/{good['rollout_id']}").text
  assert "<b>desktop</b>" in page


def test_wrong_calls_are_counted_by_kind_and_not_by_words(
  server, tmp_path, store
):
  emitted = played(store, 1e9, turns=4)
  steps = emitted[-1].trajectory.steps
  for step, kinds in zip(
    steps,
    (["tool_name"], ["tool_arguments", "tool_arguments"], ["no_call"], []),
  ):
    step.info |= {
      # A word like "unknown" means nothing by itself, in no language.
      "invalid_actions": ["unbekannt: unknown key" for _ in kinds],
      "invalid_kinds": kinds,
    }
  tell(server, tmp_path / "s", store, *emitted)
  (row,) = server.rows("rollout")
  assert row["tool_name_errors"] == 1 and row["tool_arg_errors"] == 2
  assert row["parse_errors"] == 1


def test_a_summary_is_a_turn_without_a_gesture(server, tmp_path, store):
  emitted = played(store, 1e9, turns=3)
  steps = emitted[-1].trajectory.steps
  # As an agent records it: the screen is as before, and nothing was done.
  steps[1] = dataclasses.replace(
    steps[1],
    action=trajectory_lib.Action([]),
    observation=steps[0].observation,
    model_response="Price is 7.",
    info={"summary": True},
  )
  tell(server, tmp_path / "s", store, *emitted)
  (row,) = server.rows("rollout")
  assert row["num_turns"] == 3 and row["num_total_actions"] == 2
  assert row["parse_errors"] == row["tool_arg_errors"] == 0
  kinds = [action["action_type"] for action in server.rows("action")]
  assert kinds == ["click", "summary", "drag"]
  page = server.http.get(f"/rollouts/{row['id']}?turn=2").text
  assert ">summary</b>" in page and "Price is 7." in page
  assert "The screen did not change." not in page


CLICK, DONE = {"kind": "click", "x": 1.0, "y": 2.0}, {"kind": "terminate"}
ENDS = {
    # Actions of each turn, status, reward of each turn -> the six columns.
    "it says yes, the validator no": (
        [[CLICK, CLICK], [{**DONE, "success": True}]], Status.FAILED, [0, 0],
        dict(num_total_actions=3, turn_first_success=None,
             turn_task_completed=2, ran_out_of_turns=0, attempted_completion=1,
             agent_reported_success=1),
    ),
    "it gives up": (
        [[{**DONE, "success": False}]], Status.FAILED, [0],
        dict(num_total_actions=1, turn_first_success=None,
             turn_task_completed=1, ran_out_of_turns=0, attempted_completion=1,
             agent_reported_success=0),
    ),
    "it wins before it says so": (
        [[CLICK], [CLICK], [{"kind": "answer", "text": "7"}]],
        Status.SUCCEEDED, [0, 0.5, 1],
        dict(num_total_actions=3, turn_first_success=2,
             turn_task_completed=3, ran_out_of_turns=0, attempted_completion=1,
             agent_reported_success=1),
    ),
    "its turns are over": (
        [[CLICK], []], Status.MAX_TURNS, [0, 0],
        dict(num_total_actions=1, turn_first_success=None,
             turn_task_completed=None, ran_out_of_turns=1,
             attempted_completion=0, agent_reported_success=None),
    ),
}  # fmt: skip


def test_an_episode_has_its_exact_counts_and_claims(server, tmp_path, store):
  log = []
  for number, (actions, status, rewards, _) in enumerate(ENDS.values()):
    one = played(store, 1e9 + 20 * number, f"g-1.{number}", len(actions), False)
    ended = one[-1].trajectory
    ended.status = status
    for step, kinds, reward in zip(ended.steps, actions, rewards, strict=True):
      step.info, step.reward = {"gui_actions": kinds}, float(reward)
    log += one
  tell(server, tmp_path / "s", store, *log)
  rows = server.rows("rollout")
  for row, (what, (*_, expected)) in zip(rows, ENDS.items(), strict=True):
    assert {name: row[name] for name in expected} == expected, what


def test_tasks_of_a_list_come_before_its_episodes(server, tmp_path, store):
  cua_task = pytest.importorskip(TASKS, reason="needs the framework")
  listed = [
      cua_task.CUATask(
          "click-button/0", name="Door", description="Open the door.",
          difficulty="hard", category="app", validation_type="state",
          validation_query="door.open", expected_result=True, max_steps=7,
          tags=("doors",), prerequisites=("a key",), family="doors",
          split="train",
      ),
      cua_task.CUATask("other", difficulty="7", category="zoo"),
  ]  # fmt: skip
  event = events.TasksListed(tuple(t.to_record() for t in listed))
  tell(server, tmp_path / "s", store, event, event,
       *played(store, 1e9, seconds_evaluate=0.1))  # fmt: skip
  door, other = server.rows("task")
  assert (door["difficulty"], door["category"]) == ("hard", "app")
  assert door["expected_result"] == "true" and door["max_steps"] == 7
  assert json.loads(door["prerequisites"]) == ["a key"]
  # An episode of it has less to say, and takes nothing away.
  assert door["description"] == "Open the door."
  assert json.loads(door["tags"]) == ["doors", "train"]
  # Words that the table does not have are tags.
  assert other["difficulty"] is None
  assert json.loads(other["tags"]) == ["7", "zoo"]
  assert len(server.rows("validator")) == 2
  (verdict,) = server.rows("validation")
  assert verdict["validation_query"] == "door.open"
  assert verdict["expected_result"] == "true"


def test_a_step_says_when_its_update_is_made(server, tmp_path, store):
  observer = observed_run.observed(server, tmp_path / "s", store)
  observer.on_event(events.RunStarted("run", {}))
  for event in played(store, 1e9):
    observer.on_event(event)
  observer.on_event(events.UpdateStarted(1, time=1e9 + 20))
  # A group that comes in meanwhile takes nothing back.
  group = trajectory_lib.TrajectoryGroup(
    "g-2", "t", (synthetic_run.episode(store),)
  )
  observer.on_event(events.GroupFinished(group, "accepted"))
  assert observer.drain(30)
  (step,) = server.rows("step")
  assert step["status"] == "training" and step["current_phase"] == "training"
  (training,) = server.rows("training")
  assert training["current_phase"] == "training"
  observer.on_event(events.StepFinished(1, 1, {}, time=1e9 + 23))
  assert observer.close()
  (step,) = server.rows("step")
  assert step["status"] == "completed"
  assert told_run.seconds(
    step["training_start_time"], step["training_end_time"]
  ) == pytest.approx(3.0)


def test_a_list_of_tasks_has_every_one_of_them():
  cua_task = pytest.importorskip(TASKS, reason="needs the framework")
  names = {f.name for f in dataclasses.fields(cua_task.CUATask)}
  record = cua_task.CUATask("a").to_record()
  assert {"difficulty", "category", "expected_result"} <= names & set(record)
