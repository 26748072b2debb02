"""The later schema of other monitors: accepted, stored, read, as views."""

import json

import monitor_databases
import monitor_server
import pytest
import sqlalchemy as sa
from training_monitor.maintenance import exporting
from training_monitor.maintenance import importing
from training_monitor.maintenance import runs as runs_lib
from training_monitor.schema import database
from training_monitor.schema import later_views
from training_monitor.schema import tables
from training_monitor.server import access

base, episode, joined = (
    monitor_server.base, monitor_server.episode, monitor_server.joined,
)  # pyformat: disable
CALLS = {"turns": [{"n": 1}]}


def later(name="r1", **rollout):
  """An episode as a client of that schema sends it; `env_id`, no step."""
  body = episode(name, **{"step_id": None, "group_id": "G", **rollout})
  for n, turn in enumerate(body["turns"], 1):
    turn |= {"model_response": f"answer {n}", "thinking": "hm, <b>",
             "turn_time": n, "action_json": {"n": n}}
  body["actions"][0] |= {"call_id": "c-1"}
  body["rollouts"][0] |= {"trajectory_data_json": json.dumps(CALLS)}
  del body["environments"][0]["rollout_id"]
  body["rollouts"][0]["env_id"] = body["environments"][0]["client_id"]
  return body


def sent(server, **more):
  server.post(joined(
      {"training": {"client_id": "T", "run_name": "run", "status": "running",
                    "estimated_remaining_time": 120.5}},
  ) | {
      "environments": [{"client_id": "r1:env", "env_type": "linux"}]
  })  # pyformat: disable
  start = base()
  start["steps"][0] |= {"avg_turn_time": 2.5, "estimated_total_time": "soon"}
  start["groups"] = [
      {"client_id": "G", "step_id": "S", "group_num": 4,
       "task_id": "open-door", "num_envs": 8},
      {"client_id": "H", "eval_id": "E", "group": 4},
  ]  # pyformat: disable
  return server.post(joined(start, later(**more)))


def view(server, table, where="1 = 1"):
  return server.rows(f"{later_views.PREFIX}{table}", where=where)


def test_a_client_of_the_later_schema_gets_back_what_it_sent(server):
  reply = sent(server)
  named = {one["field"].rpartition(".")[2] for one in reply["ignored"]}
  assert named == {"num_envs"}  # Kept, as any unknown one.
  (group, other) = reply["groups"]
  rollout = server.get("/api/v1/rollouts/r1")
  assert rollout["source_type"] == "step" and rollout["group"] == 4
  assert rollout["group_id"] == group["id"] and rollout["group_num"] == 4
  assert rollout["env_id"] == rollout["environment"]["id"]
  assert rollout["trajectory_data_json"] == CALLS
  assert rollout["avg_turn_time"] == 1.5
  one = server.get(f"/api/v1/groups/{group['id']}")
  assert (one["group_num"], one["raw"]["num_envs"]) == (4, "8")
  assert one["step_id"] == rollout["step_id"] and one["task_id"]
  assert server.get(f"/api/v1/groups/{other['id']}")["eval_id"]
  server.get("/api/v1/groups/99", 404)
  first, second = server.get("/api/v1/rollouts/r1/turns")["items"]
  assert first["model_response"] == "answer 1"
  assert first["thinking"] == "hm, <b>"
  assert second["action_json"] == {"n": 2} and second["avg_turn_time"] == 2.0
  assert first["actions"][0]["call_id"] == "c-1"
  assert first["actions"][0]["args"] == {"x": 1, "y": 2}
  run = server.get("/api/v1/trainings/1")
  assert run["estimated_remaining_time"] == 120.5
  step = server.get("/api/v1/trainings/1/steps")["items"][0]
  legacy = server.get(f"/api/timeline/step/{step['id']}")["item"]
  assert legacy["avg_turn_time"] == 2.5
  assert legacy["estimated_total_time"] is None  # "soon" is no number.
  assert legacy["raw"]["estimated_total_time"] == "soon"
  older_answer = server.get("/api/rollouts/r1")
  assert older_answer["task"]["instruction"] == "Open the door."
  assert older_answer["turns"][0]["model_response"] == "answer 1"


def test_a_group_is_known_again_and_a_rollouts_own_number_stands(server):
  first = sent(server)
  again = sent(server)
  assert again["groups"] == first["groups"]
  unnamed = server.post({"training_id": "T", "groups": [
      {"step_id": "S", "group_num": 4}, {"eval_id": "E", "group_num": 4},
      {"step_id": "S", "group_num": 5}, {"step_id": "S", "group_num": 5},
  ]})["groups"]  # pyformat: disable
  assert [one["id"] for one in unnamed[:2]] == [
      one["id"] for one in first["groups"]
  ]
  assert unnamed[2]["id"] == unnamed[3]["id"]
  reply = server.post({"training_id": "T", "rollouts": [
      {"rollout_id": "r2", "task_id": "open-door", "model_path": "m",
       "step_id": "S", "group_num": 7, "group_id": first["groups"][0]["id"]},
      {"rollout_id": "r3", "task_id": "open-door", "model_path": "m",
       "step_id": "S", "group_id": "of another monitor"},
  ]})  # pyformat: disable
  (fault,) = reply["ignored"]
  assert fault["field"] == "group_id" and "group 7" in fault["kept"]
  assert server.get("/api/v1/rollouts/r2")["group_id"] is None
  alone = server.get("/api/v1/rollouts/r3")
  assert alone["raw"]["group_id"] == "of another monitor"
  assert alone["group"] is None and alone["group_id"] is None
  for wrong in ({"group_num": 1}, {"step_id": "S", "eval_id": "E",
                                   "group_num": 1}):
    refused = server.post({"training_id": "T", "groups": [wrong]}, 400)
    assert refused["errors"][0]["field"] == "groups[0].step_id"
  assert "group_num" in server.post(
      {"training_id": "T", "groups": [{"step_id": "S"}]}, 400)["detail"]


def test_views_have_the_tables_columns_and_the_later_ones(server):
  sent(server, status="completed")
  server.post({"training_id": "T", "steps": [{
      "client_id": "S2", "step": 2, "progress_percent": 25,
      "start_time": "2026-01-01T00:00:00Z", "end_time": "2026-01-01T00:01:00Z",
  }]})  # pyformat: disable
  inspector = sa.inspect(server.engine)
  for table, names in later_views.ADDED.items():
    listed = inspector.get_columns(f"monitor_later_{table}")
    columns = [c["name"] for c in listed]
    own = [c.name for c in tables.metadata.tables[table].c]
    assert columns == [*own, *names], table
    assert len(view(server, table)) == len(server.rows(table)), table
  (rollout,) = view(server, "rollout")
  (group, _) = view(server, "group")
  assert rollout["group_id"] == group["id"] and group["num_rollouts"] == 1
  assert group["source_type"] == "step"
  step = view(server, "step", "step = 2")[0]
  assert step["estimated_total_time"] == pytest.approx(240, abs=0.01)
  assert step["estimated_remaining_time"] == pytest.approx(180, abs=0.01)
  assert view(server, "training")[0]["avg_turn_time"] is None  # Of step 2.
  with database.writing(server.engine) as connection:  # Of a raw writer.
    connection.exec_driver_sql("UPDATE turn SET metrics_json = '{no json'")
  assert view(server, "turn")[0]["model_response"] == "answer 1"


def test_what_the_own_recorder_wrote_is_there_too(server):
  body = joined(base(), episode("r1", group=3))
  body["turns"][0]["metrics_json"] = {"thought": "T", "model_response": "R"}
  body["observations"][0]["screenshot_uri"] = "https://s.example/1.png"
  server.post(body)
  first = server.get("/api/v1/rollouts/r1/turns")["items"][0]
  assert (first["thinking"], first["model_response"]) == ("T", "R")
  assert first["screen_before"] == "https://s.example/1.png"
  rollout = server.get("/api/v1/rollouts/r1")
  assert rollout["group_num"] == 3 and rollout["group_id"] is None


def test_groups_belong_to_a_project_and_go_with_their_run(
    server, tmp_path, monkeypatch
):
  monkeypatch.setattr(access, "_ASKED_S", 0.0)
  sent(server)
  token = access.make_token(server.engine, "other", ("ingest", "read"))
  headers_ = {"authorization": f"Bearer {token}"}
  assert server.http.get(
      "/api/v1/groups/1", headers=headers_
  ).status_code == 404
  answer = server.http.post("/api/ingest/batch", headers=headers_, json=joined(
      base(run_name="theirs"), episode("t1", group_id=1)
  ))  # pyformat: disable
  assert answer.status_code == 200
  assert server.rows("rollout", where="rollout_id = 't1'")[0]["group"] is None
  path, files = tmp_path / "a.zip", tmp_path / "files"
  exporting.export(server.engine, files, path, quiet=True)
  before = view(server, "rollout"), view(server, "group")
  runs_lib.delete(server.engine, 1)
  assert server.rows("monitor_group") == []
  importing.import_(server.engine, files, path, quiet=True)
  assert (view(server, "rollout"), view(server, "group")) == before


def test_an_earlier_schema_gets_the_tables(engine):
  monitor_databases.make_older(engine, "0008")
  assert "monitor_group" not in sa.inspect(engine).get_table_names()
  database.upgrade(engine)
  assert "monitor_later_group" in sa.inspect(engine).get_view_names()
