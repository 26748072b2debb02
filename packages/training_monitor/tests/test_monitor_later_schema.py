"""The later schema of other monitors: accepted, stored, read, as views."""

import json

import monitor_server
import pytest
import sqlalchemy as sa
from training_monitor.maintenance import run_files
from training_monitor.maintenance import runs as runs_lib
from training_monitor.schema import database
from training_monitor.schema import later_views
from training_monitor.schema import tables
from training_monitor.schema import triggers
from training_monitor.server import access

base, episode, joined = (
  monitor_server.base,
  monitor_server.episode,
  monitor_server.joined,
)
CALLS = {"turns": [{"n": 1}]}


def later(name="r1", **rollout):
  """An episode as a client of that schema sends it; `env_id`, no step."""
  body = episode(name, **{"step_id": None, "group_id": "G", **rollout})
  for n, turn in enumerate(body["turns"], 1):
    turn |= {
      "model_response": f"answer {n}",
      "thinking": "hm, <b>",
      "turn_time": n,
      "action_json": {"n": n},
    }
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
  })  # fmt: skip
  start = base()
  start["steps"][0] |= {"avg_turn_time": 2.5, "estimated_total_time": "soon"}
  start["groups"] = [
    {
      "client_id": "G",
      "step_id": "S",
      "group_num": 4,
      "task_id": "open-door",
      "num_envs": 8,
    },
    {"client_id": "H", "eval_id": "E", "group": 4},
  ]
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
  ]})["groups"]  # fmt: skip
  assert [one["id"] for one in unnamed[:2]] == [
    one["id"] for one in first["groups"]
  ]
  assert unnamed[2]["id"] == unnamed[3]["id"]
  reply = server.post({"training_id": "T", "rollouts": [
      {"rollout_id": "r2", "task_id": "open-door", "model_path": "m",
       "step_id": "S", "group_num": 7, "group_id": first["groups"][0]["id"]},
      {"rollout_id": "r3", "task_id": "open-door", "model_path": "m",
       "step_id": "S", "group_id": "of another monitor"},
  ]})  # fmt: skip
  (fault,) = reply["ignored"]
  assert fault["field"] == "group_id" and "group 7" in fault["kept"]
  assert server.get("/api/v1/rollouts/r2")["group_id"] is None
  alone = server.get("/api/v1/rollouts/r3")
  assert alone["raw"]["group_id"] == "of another monitor"
  assert alone["group"] is None and alone["group_id"] is None
  for wrong in (
    {"group_num": 1},
    {"step_id": "S", "eval_id": "E", "group_num": 1},
  ):
    refused = server.post({"training_id": "T", "groups": [wrong]}, 400)
    assert refused["errors"][0]["field"] == "groups[0].step_id"
  assert (
    "group_num"
    in server.post({"training_id": "T", "groups": [{"step_id": "S"}]}, 400)[
      "detail"
    ]
  )


def test_views_have_the_tables_columns_and_the_later_ones(server):
  sent(server, status="completed")
  server.post({"training_id": "T", "steps": [{
      "client_id": "S2", "step": 2, "progress_percent": 25,
      "start_time": "2026-01-01T00:00:00Z", "end_time": "2026-01-01T00:01:00Z",
  }]})  # fmt: skip
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
  assert (
    server.http.get("/api/v1/groups/1", headers=headers_).status_code == 404
  )
  answer = server.http.post(
    "/api/ingest/batch",
    headers=headers_,
    json=joined(base(run_name="theirs"), episode("t1", group_id=1)),
  )
  assert answer.status_code == 200
  assert server.rows("rollout", where="rollout_id = 't1'")[0]["group"] is None
  path, files = tmp_path / "run.jsonl", tmp_path / "files"
  run_files.export(server.engine, files, path, "run")

  def shown():
    made_anew = ("id", "created_at", "updated_at")
    rows = [
      {
        k: v
        for k, v in row.items()
        if k not in made_anew and not (k.endswith("_id") and type(v) is int)
      }
      for name in ("rollout", "group")
      for row in view(server, name)
    ]
    return sorted(rows, key=str)

  before = shown()
  runs_lib.delete(server.engine, 1)
  assert server.rows("monitor_group") == []
  run_files.import_(server.engine, files, path)
  assert shown() == before


# --- raw SQL of that schema ---------------------------------------------------

# View -> the columns that its tables lack, with a value to write.
WRITTEN = {
    "group": {
        "batch": 2, "status": "running", "progress_percent": 12.5,
        "current_phase": "rollout", "status_message": "on it",
        "error_message": "none", "start_time": "2026-01-02 03:04:05",
        "end_time": "2026-01-02 04:04:05", "num_rollouts": 8,
        "completed_rollouts": 5, "reward_mean": 0.25, "reward_std": 0.5,
        "success_count": 3, "metrics_json": '{"kl": 0.1}',
        "avg_turn_time": 1.5, "estimated_total_time": 60.0,
        "estimated_remaining_time": 20.0,
    },
    "monitor_later_rollout": {
        "group_num": 6, "trajectory_data_json": '{"turns": []}',
        "avg_turn_time": 2.5,
    },
    "monitor_later_turn": {
        "model_response": "<tool_call>", "thinking": "hm", "text": "then",
        "screen_before": "a.png", "screen_after": "b.png",
        "action_json": '{"n": 1}', "model_specific_input_json": "[]",
        "avg_turn_time": 0.5,
    },
    "monitor_later_action": {
        "action_name": "tap", "args": '{"x": 1}', "call_id": "c-1",
        "json": "{}",
    },
    "monitor_later_task": {"instruction": "Open it."},
    "monitor_later_validation": {"screenshot_uri": "c.png"},
    **{f"monitor_later_{kind}": {
        "avg_turn_time": 1.25, "estimated_total_time": 90.0,
        "estimated_remaining_time": 30.0,
    } for kind in ("training", "baseline", "eval", "step")},
}  # fmt: skip
# What a first row needs beside those columns, in an order in which it may.
NEEDED = {
    "monitor_later_training": {
        "run_name": "r", "log_path": "", "model_name": "m"},
    "monitor_later_task": {"task_id": "t", "name": "t", "description": "t"},
    "monitor_later_baseline": {"training_id": 1, "model_path": "m"},
    "monitor_later_eval": {"training_id": 1, "step": 1, "model_path": "m"},
    "monitor_later_step": {"training_id": 1, "step": 1},
    "group": {"step_id": 1, "source_type": "step", "group_num": 4},
    "monitor_later_environment": {"env_type": "linux", "config_json": "{}"},
    "monitor_later_rollout": {
        "source_type": "step", "step_id": 1, "rollout_id": "u", "task_id": 1,
        "model_path": "m", "env_id": 1, "is_eval": 0},
    "monitor_later_turn": {"rollout_id": 1, "turn": 1},
    "monitor_later_action": {"turn_id": 1},
    "monitor_later_validation": {"rollout_id": 1, "success": 1},
}  # fmt: skip


def run(connection, statement, **values):
  result = connection.execute(sa.text(statement), values)
  return result.mappings().all() if result.returns_rows else result.rowcount


def insert(connection, view, **values):
  names = ", ".join(f'"{name}"' for name in values)
  places = ", ".join(f":{name}" for name in values)
  run(connection, f'INSERT INTO "{view}" ({names}) VALUES ({places})', **values)


def plain(row):
  return {k: str(v) if hasattr(v, "year") else v for k, v in row.items()}


@pytest.fixture(name="rows")
def _rows(engine):
  """A connection to one row of each view, written without later columns."""
  with database.writing(engine) as connection:
    for view, values in NEEDED.items():
      insert(connection, view, **values)
    yield connection


@pytest.mark.parametrize("view", WRITTEN)
def test_a_views_later_columns_are_inserted_updated_and_taken_back(rows, view):
  values = WRITTEN[view]
  (first,) = run(rows, f'SELECT * FROM "{view}"')
  assert set(values) < set(first)
  sets = ", ".join(f'"{name}" = :{name}' for name in values)
  run(rows, f'UPDATE "{view}" SET {sets} WHERE id = 1', **values)
  (changed,) = run(rows, f'SELECT * FROM "{view}"')
  assert plain(changed).items() >= values.items()
  # The rest of the row is as it was, but for its time.
  same = (
    set(first)
    - set(values)
    - {"updated_at", "group", "group_id", "tool_name", "tool_args"}
  )
  assert {k: changed[k] for k in same} == {k: first[k] for k in same}
  empty = ", ".join(f'"{name}" = NULL' for name in values)
  run(rows, f'UPDATE "{view}" SET {empty} WHERE id = 1')
  (again,) = run(rows, f'SELECT * FROM "{view}"')
  assert {k: again[k] for k in values} == {k: first[k] for k in values}
  # A row that has them from the start.
  run(rows, "DELETE FROM monitor_later_environment")
  children = list(NEEDED)[list(NEEDED).index(view) :]
  for child in reversed(children):
    run(rows, f'DELETE FROM "{child}"')
  assert run(rows, "SELECT * FROM monitor_raw_value") == []
  insert(
    rows,
    view,
    id=7,
    **{k: v for k, v in NEEDED[view].items() if k != "env_id"} | values,
  )
  (new,) = run(rows, f'SELECT * FROM "{view}"')
  assert new["id"] == 7 and plain(new).items() >= values.items()


def test_a_rollout_takes_its_group_and_the_environment_that_waited(rows):
  (rollout,) = run(rows, "SELECT * FROM monitor_later_rollout")
  assert rollout["env_id"] == 1 and rollout["status"] == "pending"
  (environment,) = run(rows, "SELECT * FROM environment")
  assert environment["rollout_id"] == 1 and environment["env_type"] == "linux"
  assert run(rows, "SELECT * FROM monitor_pending_environment") == []
  run(
    rows,
    "UPDATE monitor_later_rollout SET group_id = 1, reward = 0.5,"
    " status = 'running'",
  )
  (rollout,) = run(rows, "SELECT * FROM monitor_later_rollout")
  assert rollout["group"] == rollout["group_num"] == 4
  assert rollout["group_id"] == 1
  (group,) = run(rows, 'SELECT * FROM "group"')
  assert (group["num_rollouts"], group["reward_mean"]) == (1, 0.5)
  assert (group["status"], group["source_type"]) == ("running", "step")
  run(
    rows,
    "UPDATE monitor_later_rollout SET status = 'completed', task_success = 1",
  )
  (group,) = run(rows, 'SELECT * FROM "group"')
  assert (group["status"], group["success_count"]) == ("completed", 1)
  assert group["progress_percent"] == 100.0
  words = [
    h["new_status"]
    for h in run(
      rows,
      "SELECT new_status FROM status_history WHERE entity_type ="
      " 'rollout' ORDER BY id",
    )
  ]
  assert words == ["pending", "running", "completed"]


def test_an_environment_that_waits_can_change_and_keeps_its_id(rows):
  insert(rows, "monitor_later_environment", env_type="android")
  insert(rows, "monitor_later_environment", env_type="linux")
  waiting = run(
    rows,
    "SELECT * FROM monitor_later_environment WHERE"
    " rollout_id IS NULL ORDER BY id",
  )
  assert [e["id"] for e in waiting] == [2, 3]
  assert {e["status"] for e in waiting} == {"pending"}
  run(
    rows,
    "UPDATE monitor_later_environment SET status = 'running', gbox_id ="
    " 'g' WHERE id = 2",
  )
  run(rows, "DELETE FROM monitor_later_environment WHERE id = 3")
  needed = NEEDED["monitor_later_rollout"] | {"rollout_id": "v", "env_id": 2}
  insert(rows, "monitor_later_rollout", **needed)
  (environment,) = run(rows, "SELECT * FROM environment WHERE id = 2")
  assert (environment["status"], environment["gbox_id"]) == ("running", "g")
  assert (
    run(rows, "SELECT count(*) AS n FROM monitor_later_environment")[0]["n"]
    == 2
  )


@pytest.mark.parametrize("statement, says", [
    ("UPDATE monitor_later_rollout SET env_id = 99", "env_id"),
    ("INSERT INTO \"group\" (eval_id, source_type, group_num) VALUES (1,"
     " 'step', 9)", "source_type"),
    ("INSERT INTO \"group\" (group_num) VALUES (9)", "one_source"),
    ("UPDATE monitor_later_rollout SET status = 'no word'", "status"),
])  # fmt: skip
def test_rules_hold_for_writers_of_views(rows, statement, says):
  with pytest.raises((sa.exc.IntegrityError, sa.exc.InternalError)) as error:
    with rows.begin_nested():
      rows.exec_driver_sql(statement)
  assert says in str(error.value)


def test_what_views_were_given_is_what_the_api_shows(server):
  sent(server)
  with database.writing(server.engine) as connection:
    run(connection, "UPDATE monitor_later_turn SET thinking = 'of SQL'")
    run(connection, "UPDATE \"group\" SET status = 'failed' WHERE id = 1")
    insert(connection, "monitor_later_environment", env_type="linux")
  first = server.get("/api/v1/rollouts/r1/turns")["items"][0]
  assert first["thinking"] == "of SQL"
  assert server.get("/api/v1/groups/1")["raw"]["status"] == "failed"
  # A client's environment does not get the id of the one that waits.
  reply = server.post({"environments": [{"client_id": "x", "env_type": "web"}]})
  assert reply["environments"][0]["id"] == 3


def test_names_of_rows_deleted_by_sql_are_names_of_new_rows(server):
  sent(server)
  body = {"validations": [{"client_id": "r1:validation", "success": False,
                           "rollout_id": "r1", "expected_result": {"a": 1}}],
          "environments": [{"client_id": "waits", "env_type": "web",
                            "name": "kept raw"}]}  # fmt: skip
  first = server.post(body)
  with database.writing(server.engine) as connection:
    for view in ("monitor_later_validation", "monitor_later_action"):
      run(connection, f"DELETE FROM {view}")
    run(connection, "DELETE FROM obs")  # Of a table itself.
    run(connection, "DELETE FROM monitor_later_turn WHERE turn = 2")
    run(
      connection,
      "DELETE FROM monitor_later_environment WHERE id = :id",
      id=first["environments"][0]["id"],
    )
  where = "kind IN ('action', 'obs', 'validation') OR field = 'name'"
  assert server.rows("monitor_raw_value", order="field", where=where) == []
  again = server.post(body)
  assert again["environments"][0]["id"] > first["environments"][0]["id"]
  assert again["validations"][0]["id"] > first["validations"][0]["id"]
  assert len(server.rows("validation")) == 1
  # The deleted parent of an item is unknown, and a new one is made.
  lost = {"actions": [{"client_id": "a", "turn_id": "r1:turn:2"}]}
  assert "no turn has this client id" in server.post(lost, 400)["detail"]
  server.post(
    lost
    | {"turns": [{"client_id": "r1:turn:2", "turn": 2, "rollout_id": "r1"}]}
  )
  assert server.post(body) == again


def test_a_deleted_rollout_leaves_no_history_and_its_name_is_free(server):
  sent(server)
  with database.writing(server.engine) as connection:
    for view in ("validation", "action"):
      run(connection, f"DELETE FROM monitor_later_{view}")
    run(connection, "DELETE FROM obs")
    for view in ("turn", "environment", "rollout"):
      run(connection, f"DELETE FROM monitor_later_{view}")
  where = "entity_type IN ('rollout', 'environment')"
  assert server.rows("status_history", where=where) == []
  reply = sent(server)
  assert len(server.rows("rollout")) == len(reply["rollouts"]) == 1
  assert len(server.rows("turn")) == 2


def test_an_insert_that_is_ignored_changes_no_row(tmp_path):
  engine = database.connect(tmp_path / "m.db")
  database.upgrade(engine)
  with database.writing(engine) as connection:
    insert(
      connection, "monitor_later_training", **NEEDED["monitor_later_training"]
    )
    for step in (1, 2, 3):
      insert(connection, "monitor_later_step", training_id=1, step=step)
    before = run(connection, "SELECT * FROM monitor_later_step ORDER BY id")
    run(
      connection,
      "INSERT OR IGNORE INTO monitor_later_step (training_id,"
      " step, avg_turn_time) VALUES (1, 1, 9.5)",
    )
    run(
      connection,
      "UPDATE OR IGNORE monitor_later_step SET step = 2,"
      " avg_turn_time = 7.5 WHERE step = 3",
    )
    after = run(connection, "SELECT * FROM monitor_later_step ORDER BY id")
    assert after == before
    assert run(connection, "SELECT * FROM monitor_raw_value") == []
    run(
      connection,
      "INSERT OR IGNORE INTO monitor_later_step (training_id,"
      " step, avg_turn_time) VALUES (1, 4, 9.5)",
    )
    (new,) = run(connection, "SELECT * FROM monitor_later_step WHERE step = 4")
    assert (new["step"], new["avg_turn_time"]) == (4, 9.5)
  engine.dispose()


def test_numbers_of_a_client_beyond_all_measure_leave_the_views_readable(
  server,
):
  sent(server)
  server.post({"training_id": "T", "groups": [
      {"client_id": "G", "batch": 9e99, "num_rollouts": "2.5",
       "success_count": 7, "reward_mean": 9e99},
  ], "steps": [{
      "client_id": "S", "progress_percent": 1e-300,
      "start_time": "2026-01-01T00:00:00Z",
  }]})  # fmt: skip
  (group,) = view(server, "group", "id = 1")
  assert group["batch"] is None and group["num_rollouts"] == 1
  assert (group["success_count"], group["reward_mean"]) == (7, 9e99)
  (step,) = view(server, "step")
  assert step["estimated_total_time"] is None


def test_a_waiting_environment_gets_the_rollout_that_an_update_names(rows):
  insert(
    rows,
    "monitor_later_rollout",
    **(NEEDED["monitor_later_rollout"] | {"rollout_id": "v", "env_id": None}),
  )
  insert(rows, "monitor_later_environment", env_type="android", gbox_id="g")
  run(rows, "UPDATE monitor_later_environment SET rollout_id = 2 WHERE id = 2")
  assert run(rows, "SELECT * FROM monitor_pending_environment") == []
  (environment,) = run(rows, "SELECT * FROM environment WHERE id = 2")
  assert (environment["rollout_id"], environment["gbox_id"]) == (2, "g")
  assert environment["status"] == "pending" and environment["created_at"]


@pytest.mark.parametrize("kind", ["VIEW", "TABLE"])
def test_a_group_of_another_program_is_left_alone(target, kind):
  engine = database.connect(target)
  with database.writing(engine) as connection:
    triggers.drop(connection)
    if "group" in sa.inspect(connection).get_view_names():
      later_views.drop(connection)
    run(connection, "DELETE FROM monitor_meta WHERE key = 'triggers'")
    run(connection, f'CREATE {kind} "group" AS SELECT 7 AS n')
  with pytest.raises(database.DatabaseError, match="'group'"):
    database.upgrade(engine)
  with database.reading(engine) as connection:
    assert run(connection, 'SELECT * FROM "group"') == [{"n": 7}]
  engine.dispose()
