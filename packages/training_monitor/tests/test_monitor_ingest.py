"""Batches over HTTP, into both databases."""

import collections
import concurrent.futures
import json
import random
import sqlite3

import monitor_server
import pytest
import sqlalchemy as sa
from training_monitor import app as app_lib
from training_monitor.schema import progress
from training_monitor.server.batches import apply

base, episode, joined = (
  monitor_server.base,
  monitor_server.episode,
  monitor_server.joined,
)
PARTS = (
    "training", "baseline", "eval", "task", "step", "rollout", "turn",
    "action", "obs", "validation", "environment", "status_history",
)  # fmt: skip


PARTED = [
  base(),
  episode("a"),
  {"training": {"status": "running"}},
  {"turns": None},
  episode("b", turns=3),
]


def test_parts_are_one_body(server):
  server.post({"parts": PARTED})
  (training,) = server.rows("training")
  assert (training["run_name"], training["status"]) == ("run", "running")
  assert [r["rollout_id"] for r in server.rows("rollout")] == ["a", "b"]
  assert len(server.rows("turn")) == 5
  before = everything(server)
  server.post(joined(*PARTED[:2], {"training": base()["training"]}))
  server.post({"parts": [episode("b", turns=3)]})  # Applied once.
  after = everything(server)
  assert {k: len(v) for k, v in after.items()} == {
    k: len(v) for k, v in before.items()
  }


@pytest.mark.parametrize(
    "body, field, says",
    [
        ({"parts": [], "turns": []}, "turns", "stands beside parts"),
        ({"parts": {}}, "parts", "array of objects"),
        ({"parts": [{}, []]}, "parts[1]", "give an object"),
        ({"parts": [{"turn": []}]}, "parts[0].turn", "turns"),
        ({"parts": [{"delivery": {}}]}, "parts[0].delivery", "no such field"),
        ({"parts": [{"turns": []}, {"turns": 3}]}, "parts[1].turns", "own"),
        ({"parts": [{"turns": 3}, {"turns": []}]}, "parts[1].turns", "own"),
        ({"parts": [{"training_id": 1}, {"training_id": 2}]},
         "parts[1].training_id", "own"),
        ({"parts": [{"training": {"client_id": "T", "status": "running"}},
                    {"training": {"client_id": "T", "status": "failed"}}]},
         "parts[1].training.status", "has 'running'"),
    ],
)  # fmt: skip
def test_parts_that_are_not_one_body_are_refused(lite, body, field, says):
  reply = lite.post(body, status=400)
  assert field in [e["field"] for e in reply["errors"]], reply
  assert says in reply["detail"], reply
  assert not lite.rows("training")


def everything(server):
  return {part: server.rows(part) for part in PARTS}


def without_times(rows):
  times = ("updated_at", "last_heartbeat", "changed_at", "created_at")
  return {
    part: [{k: v for k, v in row.items() if k not in times} for row in same]
    for part, same in rows.items()
  }


# --- E01: a batch -----------------------------------------------------------


def test_a_batch_is_stored_and_answered_with_ids(server):
  reply = server.post(joined(base(), episode("r1", status="running")))
  assert isinstance(reply["training_id"], int)
  for kind in (
    "tasks",
    "steps",
    "evals",
    "baselines",
    "rollouts",
    "turns",
    "environments",
    "actions",
    "observations",
    "validations",
  ):
    for pair in reply[kind]:
      assert set(pair) == {"client_id", "id"} and isinstance(pair["id"], int)
  assert [p["client_id"] for p in reply["turns"]] == ["r1:turn:1", "r1:turn:2"]
  (rollout,) = server.rows("rollout")
  assert rollout["id"] == reply["rollouts"][0]["id"]
  assert rollout["step_id"] == reply["steps"][0]["id"]
  assert rollout["source_type"] == "step" and rollout["is_eval"] == 0
  actions = server.rows("action")
  assert [json.loads(a["tokens"]) for a in actions] == [[5, 6, 7]] * 2
  assert [a["num_tokens"] for a in actions] == [3, 3]


def test_a_batch_sent_again_changes_nothing_and_has_the_same_answer(server):
  body = joined(base(status="running"), episode("r1", status="running"))
  first = server.post(body)
  before = without_times(everything(server))
  assert server.post(body) == first
  assert without_times(everything(server)) == before


def test_a_known_client_id_is_changed_and_null_changes_nothing(server):
  server.post(joined(base(), episode("r1", status="running", reward=0.5)))
  server.post(
    {"rollouts": [{"client_id": "r1", "reward": None, "num_turns": 2}]}
  )
  (rollout,) = server.rows("rollout")
  assert (rollout["reward"], rollout["num_turns"]) == (0.5, 2)


def test_the_keys_of_the_tables_identify_as_well(server):
  """A step by its number, a run by its name, a turn by its number."""
  first = server.post({"training": {"run_name": "a"}, "steps": [{"step": 3}]})
  again = server.post(
    {
      "training": {"run_name": "a", "status": "running"},
      "steps": [{"step": 3, "loss": 0.5}],
    }
  )
  assert again["training_id"] == first["training_id"]
  assert again["steps"][0]["id"] == first["steps"][0]["id"]
  assert server.rows("step")[0]["loss"] == 0.5


def test_items_without_a_name_are_known_by_what_they_say(server):
  """As recorders send actions that the answer to got lost."""
  ids = server.post(joined(base(), episode("r1")))
  turn = ids["turns"][0]["id"]
  body = {
    "actions": [
      {"turn_id": turn, "action_type": "key"},
      {"turn_id": turn, "action_type": "key"},
      {"turn_id": turn, "action_type": "type"},
    ]
  }
  first = server.post(body)
  assert server.post(body) == first
  assert len(server.rows("action")) == 2 + 3


def test_another_run_of_the_same_name_is_another_run(server):
  one = server.post({"training": {"client_id": "A", "run_name": "x"}})
  two = server.post({"training": {"client_id": "B", "run_name": "x"}})
  assert one["training_id"] != two["training_id"]
  assert [t["run_name"] for t in server.rows("training")] == ["x", "x-2"]
  assert server.get(f"/api/v1/trainings/{two['training_id']}")["raw"] == {
    "run_name": "x"
  }


def test_a_run_of_a_taken_name_is_resumed_with_its_number(server):
  """Its directory was deleted once, and the database has both."""
  server.post({"training": {"client_id": "A", "run_name": "x"}})
  two = server.post({"training": {"client_id": "B", "run_name": "x"}})
  again = server.post(
    {
      "training": {"client_id": "B", "run_name": "x", "status": "running"},
      "steps": [{"step": 1, "loss": 0.5}],
    }
  )
  assert again["training_id"] == two["training_id"]
  runs = {t["run_name"]: t["status"] for t in server.rows("training")}
  assert set(runs) == {"x", "x-2"} and runs["x-2"] == "running"
  server.post({"training": {"client_id": "A", "run_name": "y"}})
  assert {t["run_name"] for t in server.rows("training")} == {"y", "x-2"}


def test_what_a_training_does_not_say_has_a_default(server):
  reply = server.post({"training": {"client_id": "A"}})
  server.post(
    {
      "training_id": reply["training_id"],
      "training": {"training_id": reply["training_id"], "status": "completed"},
    }
  )
  (training,) = server.rows("training")
  assert training["run_name"] == "A"
  assert (training["log_path"], training["model_name"]) == ("", "")
  assert (training["status"], training["progress_percent"]) == (
    "completed",
    100.0,
  )


# --- E02: what others say ---------------------------------------------------


def test_the_sequence_of_a_recorder_that_knows_no_better(server):
  """Environments first, None for unknown values, other words and fields."""
  training = server.post({"training": {
      "run_name": "cua", "status": "running", "current_phase": "rollout",
  }})["training_id"]  # fmt: skip
  step = server.post({"training_id": training, "steps": [{
      "client_id": f"step-{training}-1-0", "training_id": training, "step": 1,
      "status": "running", "current_phase": "rollout",
  }]})["steps"][0]["id"]  # fmt: skip
  task = server.post({"tasks": [{
      "client_id": "t-1", "task_id": "t-1", "name": "Wifi",
      "description": "Turn it on", "source_type": "gym",
      "validation_type": "genv_graphql",
  }]})["tasks"][0]["id"]  # fmt: skip
  env_body = {"environments": [{
      "client_id": "u:env", "env_type": "android", "status": "created",
      "box_type": "android", "creation_time": "2026-01-01T10:00:00",
  }]}  # fmt: skip
  env = server.post(env_body)["environments"][0]["id"]
  assert server.rows("environment") == []  # It has no rollout yet.
  rollout_body = {"rollouts": [{
      "client_id": "u", "rollout_id": "u", "source_type": "step",
      "step_id": step, "eval_id": None, "baseline_id": None, "env_id": env,
      "task_id": task, "model_path": "m", "is_eval": False, "batch": 0,
      "group_num": 3, "env_index": 1, "group_id": None, "max_turns": 20,
      "status": "running", "current_phase": "env_creation",
  }]}  # fmt: skip
  rollout = server.post(rollout_body)["rollouts"][0]["id"]
  (environment,) = server.rows("environment")
  assert (environment["id"], environment["rollout_id"]) == (env, rollout)
  assert environment["status"] == "running"
  assert str(environment["creation_time"]).startswith("2026-01-01 10:00:00")
  turn = server.post({"turns": [{
      "client_id": "u:turn:1", "rollout_id": rollout, "turn": 1,
      "start_time": "2026-01-01T10:00:01",
  }]})["turns"][0]["id"]  # fmt: skip
  server.post({"actions": [{
      "turn_id": turn, "action_type": "tap", "action_name": "tap",
      "action_args": {"point": [1, 2]}, "action_call_id": "c1",
      "action_json": {"name": "tap"},
  }]})  # fmt: skip
  for kind in ("screenshot_before", "screenshot_after", "model_input"):
    server.post({"observations": [{
        "turn_id": turn, "obs_type": kind, "screenshot_uri": f"https://x/{kind}",
        "model_input": [{"role": "user"}] if kind == "model_input" else None,
    }]})  # fmt: skip
  server.post({"turns": [{
      "client_id": "u:turn:1", "rollout_id": rollout, "turn": 1,
      "turn_time": 2.5, "reward": 0.0, "episode_done": True,
      "metrics_json": '{"model": 1.5}', "model_response": "I tap",
  }]})  # fmt: skip
  server.post({"validations": [{
      "rollout_id": rollout, "success": True, "details_json": {"score": 1},
      "screenshot_uri": None,
  }]})  # fmt: skip
  rollout_body["rollouts"][0] |= {"status": "completed", "summary_json": {}}
  server.post(rollout_body)
  server.post(
    {
      "environments": [
        {"client_id": "u:env", "env_type": "android", "status": "terminated"}
      ]
    }
  )

  stored = server.get(f"/api/v1/rollouts/{rollout}")
  assert stored["status"] == "completed" and stored["group"] == 3
  assert stored["progress_percent"] == 100
  assert stored["environment"]["status"] == "terminated"
  assert stored["validations"][0]["success"] == 1
  one = server.get(f"/api/rollouts/u/turns/{turn}")
  assert [o["obs_type"] for o in one["observations"]] == [
    "screenshot",
    "screenshot",
    "multimodal",
  ]
  assert [o["raw"]["obs_type"] for o in one["observations"]] == [
    "screenshot_before",
    "screenshot_after",
    "model_input",
  ]
  assert one["raw"] == {"model_response": "I tap"}
  (action,) = one["actions"]
  assert action["tool_name"] == "tap"
  assert action["tool_args"] == {"point": [1, 2]}
  assert action["raw"]["action_call_id"] == "c1"
  assert server.get(f"/api/v1/steps/{step}")["raw"] == {
    "status": "running",
    "current_phase": "rollout",
  }
  history = server.get(f"/api/v1/environments/{env}/history")["items"]
  assert [
    (h["old_status"], h["new_status"], h["metadata_json"]) for h in history
  ] == [
    (None, "running", {"raw_status": "created"}),
    ("running", "terminated", None),
  ]


def test_numbers_that_json_has_not_are_null_and_kept(server):
  server.post(joined(base(), {"steps": [
      {"client_id": "N", "step": 2, "loss": "NaN", "kl_divergence": 0.5},
  ]}))  # fmt: skip
  step = server.rows("step")[1]
  assert (step["loss"], step["kl_divergence"]) == (None, 0.5)
  assert server.get(f"/api/v1/steps/{step['id']}")["raw"]["loss"] == "NaN"


def test_text_comes_back_as_it_was_sent_but_for_nul(server):
  text = "\u202eevil </script> \U0001f600 %s ? :x \\ ' \" \0 \x1b[31m"
  server.post(
    joined(
      base(status_message=text),
      {"tasks": [{"task_id": "x", "description": text, "tags": ["a\0", text]}]},
    )
  )
  shown = text.replace("\0", "\u2400")
  assert server.rows("training")[0]["status_message"] == shown
  task = server.get(f"/api/v1/tasks/{server.rows('task')[1]['id']}")
  assert task["description"] == shown
  assert task["tags"] == ["a\u2400", shown]


# --- bad input --------------------------------------------------------------

BAD = [
    ({"training": {"status": "runing"}}, "training.status", "give one of"),
    ({"training": {"seed": "seven"}}, "training.seed", "whole number"),
    ({"training": {"seed": 2**63}}, "training.seed", "64 bits"),
    ({"training": {"seed": True}}, "training.seed", "whole number"),
    ({"training": {"learning_rate": "big"}}, "training.learning_rate",
     "give a number"),
    ({"training": {"progress_percent": 101}}, "training.progress_percent",
     "0 to 100"),
    ({"training": {"start_time": "today"}}, "training.start_time",
     "ISO 8601"),
    ({"training": {"start_time": -5}}, "training.start_time", "since 1970"),
    ({"training": {"config_json": "{"}}, "training.config_json", "not JSON"),
    ({"training": []}, "training", "object"),
    ({"training": {"run_name": "x" * 501}}, "training.run_name", "1 to 500"),
    ({"rollouts": [{"rollout_id": ""}]}, "rollouts[0].rollout_id", "1 to 500"),
    ({"rollout": []}, "rollout", "rollouts"),
    ({"rollouts": {}}, "rollouts", "array"),
    ({"rollouts": [3]}, "rollouts[0]", "object"),
    ({"rollouts": [{"rollout_id": "q", "step_id": "S", "eval_id": "E",
                    "task_id": "open-door"}]},
     "rollouts[0].source_type", "exactly one"),
    ({"rollouts": [{"rollout_id": "q", "task_id": "open-door"}]},
     "rollouts[0].source_type", "exactly one"),
    ({"rollouts": [{"rollout_id": "q", "source_type": "eval",
                    "step_id": "S", "task_id": "open-door"}]},
     "rollouts[0].source_type", "exactly one"),
    ({"rollouts": [{"rollout_id": "q", "step_id": "S"}]},
     "rollouts[0].task_id", "needs it"),
    ({"rollouts": [{"rollout_id": "q", "step_id": 999, "task_id": "x"}]},
     "rollouts[0].step_id", "no step"),
    ({"rollouts": [{"rollout_id": "q", "step_id": "S", "task_id": "none"}]},
     "rollouts[0].task_id", "no task"),
    ({"rollouts": [{"step_id": "S", "task_id": "open-door"}]},
     "rollouts[0].rollout_id", "needs it"),
    ({"turns": [{"turn": 1}]}, "turns[0].rollout_id", "needs it"),
    ({"turns": [{"rollout_id": "r1"}]}, "turns[0].turn", "needs it"),
    ({"validations": [{"rollout_id": "r1"}]}, "validations[0].success",
     "needs it"),
    ({"tasks": [{"name": "x"}]}, "tasks[0].task_id", "needs it"),
    ({"tasks": [{"client_id": ""}]}, "tasks[0].client_id", "1 to 500"),
    ({"steps": [{"id": 77, "loss": 1.0}]}, "steps[0].id", "no step"),
    ({"delivery": {"spool": "x"}}, "delivery", "spool"),
]  # fmt: skip


def test_bad_input_is_named_and_nothing_is_stored(lite):
  lite.post(joined(base(), episode("r1")))
  before = everything(lite)
  for bad, field, says in BAD:
    reply = lite.post(bad, status=400)
    assert field in [e["field"] for e in reply["errors"]], bad
    assert says in reply["detail"] and field in reply["detail"], bad
    assert everything(lite) == before, bad


NUMBERED = {"delivery": {"spool": "s", "first": 1, "last": 1}}


def test_bad_input_beside_good_is_left_out_and_named(lite):
  lite.post(joined(base(), episode("r1")))
  for number, (bad, field, says) in enumerate(BAD[:-1]):
    good = {"tasks": [{"task_id": f"good {number}"}]}
    body = joined(good, bad)
    moved = field.replace("tasks[0]", "tasks[1]")
    # The sender of numbered batches keeps what is refused; it can send the
    # items apart.
    if "[" in field and "1 to 500" not in says:
      refused = lite.post(joined(body, NUMBERED), status=400)
      assert moved in [e["field"] for e in refused["errors"]], bad
    reply = lite.post(body)
    (named,) = [e for e in reply["ignored"] if e["field"] == moved]
    assert says in named["message"] and named["kept"] == "nothing", bad
    assert [t["client_id"] for t in reply["tasks"]] == [f"good {number}"]
  assert len(lite.rows("task")) == 1 + len(BAD[:-1])
  assert len(lite.rows("rollout")) == len(lite.rows("training")) == 1


def test_a_value_that_its_column_cannot_have_stays_as_a_raw_value(server):
  body = joined(base(seed="seven", learning_rate="1e-5"), episode("r1"))
  body["steps"][0] |= {"rollout_progress": {"done": 1}, "loss": "low"}
  body["rollouts"][0] |= {"num_turns": "12", "reward": [1], "errors": "none"}
  body["turns"][0] |= {"episode_done": 2, "turn": 1.0}
  body["actions"][0] |= {"tokens": [1, 2], "logprobs": [-1.0]}
  body["actions"][1] |= {"tokens": [1], "num_tokens": 4, "logprobs": {"a": 1}}
  body["validations"][0] |= {"expected_result": {"door": "open"}}
  body["observations"][0] |= {"text_content": 5}
  reply = server.post(body)
  named = {e["field"]: e for e in reply["ignored"]}
  assert set(named) == {
    "training.seed",
    "steps[0].rollout_progress",
    "steps[0].loss",
    "rollouts[0].reward",
    "rollouts[0].errors",
    "turns[0].episode_done",
    "actions[0].logprobs",
    "actions[1].tokens",
  }
  assert {e["kept"] for e in named.values()} == {"a raw value"}
  assert named["actions[0].logprobs"]["times"] == 2
  (run,), (step,) = server.rows("training"), server.rows("step")
  assert (run["seed"], run["learning_rate"]) == (None, 1e-5)
  assert step["loss"] is None and step["rollout_progress"] is None
  rollout = server.get("/api/v1/rollouts/r1")
  assert rollout["num_turns"] == 12 and rollout["reward"] is None
  assert rollout["raw"] | {"reward": "[1]", "errors": "none"} == rollout["raw"]
  first, second = server.rows("action")
  assert json.loads(first["tokens"]) == [1, 2] and first["logprobs"] is None
  assert second["tokens"] is None and second["num_tokens"] == 4
  (validation,) = server.rows("validation")
  assert json.loads(validation["expected_result"]) == {"door": "open"}
  assert server.rows("obs")[0]["text_content"] == "5"


def test_what_refers_to_an_item_that_is_left_out_is_left_out_too(server):
  server.post(base())
  bad = episode("bad", step_id="no such step")
  reply = server.post(joined(bad, episode("good")))
  assert [r["client_id"] for r in reply["rollouts"]] == ["good"]
  assert {t["client_id"] for t in reply["turns"]} == {
    "good:turn:1",
    "good:turn:2",
  }
  named = collections.Counter(e["kind"] for e in reply["ignored"])
  assert named == {
    "rollout": 1,
    "environment": 1,
    "turn": 2,
    "action": 2,
    "obs": 2,
    "validation": 1,
  }
  assert "no such step" in reply["ignored"][0]["value"]
  assert len(server.rows("rollout")) == len(server.rows("environment")) == 1
  # Once it can be stored, all of it can.
  bad["rollouts"][0]["step_id"] = "S"
  assert "ignored" not in server.post(bad)
  assert len(server.rows("turn")) == 4
  # Very many are counted.
  many = joined(
    {"tasks": [{"task_id": "t"}]},
    {"turns": [{"turn": n, "rollout_id": "nowhere"} for n in range(1000)]},
  )
  ignored = server.post(many)["ignored"]
  assert len(ignored) == 100 and ignored[-1]["times"] == 901
  # A change of a row that it cannot have leaves the row.
  moved = {"rollout_id": "good", "eval_id": "E", "num_turns": 3}
  reply = server.post({"rollouts": [moved], "tasks": [{"task_id": "u"}]})
  assert "exactly one" in reply["ignored"][0]["message"]
  assert server.get("/api/v1/rollouts/good")["num_turns"] is None


def test_a_refused_change_is_neither_reported_nor_half_stored(server):
  server.post(joined(base(), episode("r1")))
  moved = {"client_id": "r1", "source_type": "eval", "reward": [1], "odd": 1}
  refused = server.post({"rollouts": [moved]}, 400)
  assert "exactly one" in refused["detail"]
  reply = server.post({"rollouts": [moved], "tasks": [{"task_id": "u"}]})
  assert reply["rollouts"] == [] and len(reply["tasks"]) == 1
  (entry,) = reply["ignored"]  # One of the item, none of its fields.
  assert entry["kept"] == "nothing" and "exactly one" in entry["message"]
  raw = server.rows(
    "monitor_raw_value", order="field", where="kind = 'rollout'"
  )
  assert raw == []


def test_an_item_that_is_left_out_is_never_said_to_be_kept(lite):
  for item, field in (
    ({"odd": 1, "client_id": 7}, "tasks[0].client_id"),
    ({"odd": 1, "prerequisites": {}}, "tasks[0].prerequisites"),
    ({"odd": 1, "name": "no task_id"}, "tasks[0].task_id"),
  ):
    body = {"tasks": [item], "training": {"run_name": "r"}}
    (entry,) = lite.post(body)["ignored"]
    assert entry["field"] == field and entry["kept"] == "nothing"
  assert lite.rows("task") == []
  assert lite.rows("monitor_raw_value", order="field") == []


def test_values_left_out_beyond_those_named_are_counted(lite):
  odd = {f"odd_{n}": n for n in range(30)}
  body = {
    "tasks": [{"task_id": "t", **odd}],
    **{f"no_{n}": [] for n in "ab"},
    "training": {"run_name": "r", "x" * 201: 1, "y" * 202: 2},
  }
  ignored = lite.post(body)["ignored"]
  lost = [e for e in ignored if e["kept"] == "nothing"]
  assert [e["field"][-3:] for e in lost] == ["o_a", "o_b", "xxx", "yyy"]
  assert sum(e.get("times", 1) for e in ignored) == 34
  assert len(ignored) == 21 and ignored[-1]["times"] == 14
  # A lost value has its entry, even if it comes last.
  late = {"tasks": [{"task_id": "t", **odd, "z" * 201: 1}]}
  ignored = lite.post(late)["ignored"]
  (last,) = [e for e in ignored if e["kept"] == "nothing"]
  assert last["field"].endswith("zzz")
  assert sum(e.get("times", 1) for e in ignored) == 31


def test_all_faults_are_told_at_once(lite):
  reply = lite.post(
    {"training": {"status": "x", "seed": "y", "lora_rank": []}}, status=400
  )
  assert len(reply["errors"]) == 3
  assert "and 2 more" in reply["detail"]


def test_bodies_that_are_none(lite):
  send = lambda data, **headers: lite.http.post(
    "/api/ingest/batch", content=data, headers=headers
  )
  assert send(b"{").status_code == 400
  assert send(b"[]").status_code == 400
  assert send(b'{"training": {"learning_rate": nan}}').status_code == 400
  assert send(b"\xff\xfe").status_code == 400
  # Beyond every number, beside what only Python's reader takes.
  huge = b'{"x": "\\ud800", "training": {"seed": 1' + b"0" * 400 + b"}}"
  assert send(huge).status_code == 400
  deep = b"[" * 1000 + b"]" * 1000
  for path in ("/api/ingest/batch", "/api/v1/screenshots/missing"):
    for body in (
      deep,
      b'{"turn": "\\ud800", "\\ud800": 1, "label": 18446744073709551616}',
      b'{"add": ["\\ud800"], "remove": 1' + b"0" * 400 + b"}",
    ):
      answer = lite.http.post(path, content=body)
      assert answer.status_code in (400, 404), (path, answer.text)
  assert send(b"x", **{"content-encoding": "gzip"}).status_code == 415
  assert send(b"{}").json() == {}
  assert "is not served here" in lite.http.get("/nowhere").json()["detail"]
  assert lite.http.get("/api/ingest/batch").status_code == 405


def test_a_body_beyond_the_limit_is_refused_whether_announced_or_not(tmp_path):
  limits = app_lib.IngestLimits(batch=1000)
  with monitor_server.sqlite_server(tmp_path, limits=limits) as server:
    body = b'{"training": {"run_name": "' + b"x" * 2000 + b'"}}'
    send = lambda content: server.http.post(
      "/api/ingest/batch", content=content
    )
    assert send(body).status_code == 413
    assert send(iter([body[:500], body[500:]])).status_code == 413
    assert server.rows("training") == []


# --- statuses and progress --------------------------------------------------


def test_an_end_stays_an_end_and_the_reply_says_so(server):
  server.post(joined(base(), episode("r1", status="completed", reward=1.0)))
  reply = server.post(
    {"rollouts": [{"client_id": "r1", "status": "running", "reward": 0.5}]}
  )
  assert reply["ignored"] == [
    {
      "kind": "rollout",
      "client_id": "r1",
      "field": "status",
      "value": "running",
      "kept": "completed",
    }
  ]
  (rollout,) = server.rows("rollout")
  assert (rollout["status"], rollout["reward"]) == ("completed", 0.5)


def test_statuses_of_one_batch_are_all_in_the_history(server):
  states = ("pending", "env_creation", "running", "running", "completed")
  rollouts = [
    {"rollout_id": "r", "task_id": "open-door", "step_id": "S", "status": s}
    for s in states
  ]
  server.post(joined(base(), {"rollouts": rollouts}))
  statuses = [
    h["new_status"]
    for h in server.rows("status_history")
    if h["entity_type"] == "rollout"
  ]
  assert statuses == ["pending", "env_creation", "running", "completed"]


def test_progress_follows_the_formulas_and_what_is_said_wins(server):
  server.post(joined(base(total_steps=12, current_step=3), episode("r1")))
  assert server.rows("training")[0]["progress_percent"] == 25
  change = lambda **f: server.post({"rollouts": [{"client_id": "r1", **f}]})
  percent = lambda: server.rows("rollout")[0]["progress_percent"]
  change(max_turns=20)
  assert percent() == 0
  change(current_turn=5, status="running")
  assert percent() == 25
  change(progress_percent=40)
  assert percent() == 40
  change(reward=0.5)  # Has nothing to do with it.
  assert percent() == 40
  change(status="completed")  # Early.
  assert percent() == 100


def test_a_step_goes_from_0_to_100_and_never_back(server):
  percents = []
  server.post(base())
  for change in (
    {"status": "rollout_running"},
    {"rollout_progress": {"completed_envs": 4, "total_envs": 8}},
    {"rollout_progress": {"completed_envs": 2, "total_envs": 8}},  # Late.
    {"status": "training"},
    {"training_progress": {"completed_substeps": 1, "total_substeps": 2}},
    {"status": "completed"},
    {"rollout_progress": {"completed_envs": 4, "total_envs": 8}},
  ):
    server.post({"steps": [{"client_id": "S", **change}]})
    percents.append(server.rows("step")[0]["progress_percent"])
  assert percents == [0, 25, 25, 50, 75, 100, 100]


def test_the_formulas_divide_by_nothing_that_is_zero():
  for none in (None, 0):
    assert progress.share("running", 3, none) == 0
    assert progress.step("pending", {"total_envs": none}, None) == 0
  assert progress.share("running", 30, 20) == 100
  groups = {"completed_groups": 1, "total_groups": 2, "total_envs": 0}
  assert progress.step("rollout_running", groups, None) == 25


# --- aggregates -------------------------------------------------------------


def test_an_evaluation_agrees_with_its_rollouts(server):
  server.post(base())
  chance = random.Random(3)
  by_name = {}
  for _ in range(40):
    name = f"r{chance.randrange(12)}"
    say = by_name.setdefault(name, {"status": "running"})
    if say["status"] == "running":
      say["status"] = chance.choice(("running", "completed", "failed"))
    say["task_success"] = chance.random() < 0.5
    say["reward"] = round(chance.random(), 3)
    say["num_turns"] = chance.randrange(1, 9)
    server.post(
      {
        "rollouts": [
          {"rollout_id": name, "task_id": "open-door", "eval_id": "E", **say}
        ]
      }
    )
    valid = [t for t in by_name.values() if t["status"] == "completed"]
    (eval_row,) = server.rows("eval")
    assert eval_row["completed_tasks"] == sum(
      t["status"] != "running" for t in by_name.values()
    )
    assert eval_row["successful_tasks"] == sum(t["task_success"] for t in valid)
    if valid:
      for column, key in (
        ("success_rate", "task_success"),
        ("avg_reward", "reward"),
        ("avg_turns", "num_turns"),
      ):
        mean = sum(t[key] for t in valid) / len(valid)
        assert eval_row[column] == pytest.approx(mean)
    assert eval_row["progress_percent"] == min(
      100, 25 * eval_row["completed_tasks"]
    )


def test_a_rollout_that_goes_elsewhere_counts_there(server):
  server.post(joined(base(), {"evals": [{"client_id": "F", "step": 9}]}))
  server.post({"rollouts": [{
      "rollout_id": "r", "task_id": "open-door", "eval_id": "E",
      "status": "completed", "task_success": True,
  }]})  # fmt: skip
  first, second = server.rows("eval")
  assert (first["success_rate"], second["success_rate"]) == (1.0, None)
  server.post({"rollouts": [{"client_id": "r", "eval_id": "F"}]})
  first, second = server.rows("eval")
  assert (first["success_rate"], second["success_rate"]) == (None, 1.0)
  assert (first["completed_tasks"], second["completed_tasks"]) == (0, 1)


# --- deliveries -------------------------------------------------------------


def test_entries_of_a_spool_are_applied_once(server):
  server.post(joined(base(), episode("r1")))
  send = lambda first, last, status=200: server.post({
      "delivery": {"spool": "s", "first": first, "last": last,
                   "health": {"dropped": 0}},
      "training": {"client_id": "T", "current_step": last},
  }, status)  # fmt: skip
  assert send(1, 4)["applied_to"] == 4
  assert send(1, 4) == {"duplicate": True, "applied_to": 4}
  assert send(2, 3) == {"duplicate": True, "applied_to": 4}
  assert send(3, 6, status=409)["applied_to"] == 4
  assert server.rows("training")[0]["current_step"] == 4
  assert send(5, 6)["applied_to"] == 6
  assert server.rows("training")[0]["current_step"] == 6
  (client,) = server.get("/api/v1/clients")["items"]
  assert (client["spool"], client["last_seq"]) == ("s", 6)
  assert client["health_json"] == {"dropped": 0}


def test_many_clients_at_once_lose_and_repeat_nothing(server):
  server.post(base())
  bodies = [episode(f"r{n}", status="completed") for n in range(60)]
  random.Random(1).shuffle(bodies)
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    replies = list(pool.map(server.post, bodies + bodies[:20]))
  assert len(replies) == 80
  counts = {part: len(server.rows(part)) for part in PARTS}
  assert counts["rollout"] == counts["environment"] == 60
  assert counts["turn"] == counts["action"] == counts["obs"] == 120
  assert server.app.writer.commits < 81 + 1


def test_a_batch_that_nobody_thought_of_fails_alone(server, monkeypatch):
  server.post(base())
  real = apply._Work.apply  # pylint: disable=protected-access

  def fail(self, batch):
    reply = real(self, batch)
    if any(i.client_id == "bad" for i in batch.items.get("rollout", ())):
      raise KeyError("a bug")
    return reply

  monkeypatch.setattr(apply._Work, "apply", fail)
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    names = [f"r{n}" for n in range(10)] + ["bad"]
    replies = list(
      pool.map(
        lambda n: server.http.post("/api/ingest/batch", json=episode(n)), names
      )
    )
  assert [r.status_code for r in replies] == [200] * 10 + [422]
  assert "a bug" in replies[-1].json()["detail"]
  stored = {r["rollout_id"] for r in server.rows("rollout")}
  assert stored == {f"r{n}" for n in range(10)}


# --- when the disk does not -------------------------------------------------


def test_a_full_disk_acknowledges_nothing_and_recovers(tmp_path):
  with monitor_server.sqlite_server(tmp_path) as server:
    server.post(base())

    def limit(pages):
      server.engine.dispose()

      def set_up(connection, record):
        del record
        connection.execute(f"PRAGMA max_page_count={pages}").fetchall()

      sa.event.listen(server.engine, "connect", set_up)

    with server.engine.connect() as connection:
      pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
    limit(pages + 5)
    stored, refused = [], []
    for n in range(30):
      body = episode(f"r{n}", status="completed", status_message="x" * 2000)
      reply = server.http.post("/api/ingest/batch", json=body)
      (stored if reply.status_code == 200 else refused).append((n, reply))
    assert refused and all(r.status_code == 503 for _, r in refused)
    assert "full" in refused[0][1].json()["detail"]
    assert float(refused[0][1].headers["retry-after"]) > 0
    names = {r["rollout_id"] for r in server.rows("rollout")}
    assert names == {f"r{n}" for n, _ in stored}
    limit(1 << 30)
    for n, _ in refused:
      server.post(episode(f"r{n}", status="completed"))
    assert len(server.rows("rollout")) == 30
    assert len(server.rows("turn")) == 60
  check = sqlite3.connect(tmp_path / "m.db")
  assert check.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
  assert check.execute("PRAGMA foreign_key_check").fetchall() == []
  check.close()
