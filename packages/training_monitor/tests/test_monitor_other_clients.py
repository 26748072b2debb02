"""Unmodified clients of other programs: everything they send is kept."""

import base64
import hashlib
import json

import monitor_server
import pytest
from training_monitor.server import access

base, episode, joined = (
    monitor_server.base, monitor_server.episode, monitor_server.joined,
)  # pyformat: disable


def sent(server, text, status=200):
  reply = server.http.post(
      "/api/ingest/batch", content=text,
      headers={"content-type": "application/json"},
  )  # pyformat: disable
  assert reply.status_code == status, reply.text
  return reply.json()


def test_fields_of_no_known_name_are_kept_and_named(server):
  body = joined(base(experiment_name="sweep"), episode("r1"))
  body["rollouts"][0] |= {"gbox_run_id": "g-1", "gbox_base_url": {"a": [1]}}
  body["environments"][0] |= {"region": "eu\0", "reward": 3}
  reply = server.post(body)
  named = {(one["kind"], one["field"].rpartition(".")[2])
           for one in reply["ignored"]}
  assert named == {
      ("training", "experiment_name"), ("rollout", "gbox_run_id"),
      ("rollout", "gbox_base_url"), ("environment", "region"),
      ("environment", "reward"),
  }  # pyformat: disable
  assert all("kept as a raw value" in one["message"]
             for one in reply["ignored"])
  rollout = server.get("/api/v1/rollouts/r1")
  assert rollout["raw"]["gbox_run_id"] == "g-1"
  assert json.loads(rollout["raw"]["gbox_base_url"]) == {"a": [1]}
  run = server.get(f"/api/v1/trainings/{reply['training_id']}")
  assert run["raw"]["experiment_name"] == "sweep"
  # Each once, however many items have it; and the run goes on.
  many = joined(*(episode(f"m{n}", gbox_run_id=str(n)) for n in range(50)))
  assert len(server.post(many)["ignored"]) == 1
  assert len(server.rows("rollout")) == 51


def test_the_json_of_pythons_own_writer_is_read(server):
  body = joined(base(), episode("r1", reward=float("nan")))
  body["steps"][0]["loss"] = float("-inf")
  body["turns"][0]["metrics_json"] = {
      "score": float("inf"), "thought": "half \ud83d a pair",
      "whole": "\U0001f600", "many": 10**40,
  }  # pyformat: disable
  text = json.dumps(body)
  assert "NaN" in text and "-Infinity" in text and "\\ud83d" in text
  sent(server, text)
  (rollout,) = server.rows("rollout")
  (step,) = server.rows("step")
  assert rollout["reward"] is None and step["loss"] is None
  metrics = json.loads(server.rows("turn")[0]["metrics_json"])
  assert metrics == {
      "score": "Infinity", "thought": "half \ufffd a pair",
      "whole": "\U0001f600", "many": 1e40,
  }  # pyformat: disable
  assert server.get("/api/v1/rollouts/r1")["raw"]["reward"] == "NaN"


@pytest.mark.parametrize("text", [
    b"{", b'{"training": nan}', b"\xff\xfe", b'{"a": ' + b"9" * 5000 + b"}",
    b"[" * 100_000 + b"NaN",
])  # pyformat: disable
def test_what_is_no_json_is_refused(lite, text):
  assert "not JSON" in sent(lite, text, 400)["detail"]


def test_a_steps_rollout_without_a_step_is_put_under_the_newest(server):
  server.post(base())
  server.post({"training": {"client_id": "T"},
               "steps": [{"client_id": "S2", "step": 2}]})
  reply = server.post({
      "training": {"client_id": "T"},
      "rollouts": [{"rollout_id": "r1", "task_id": "open-door",
                    "source_type": "step", "model_path": "m"}],
  })  # pyformat: disable
  (rollout,) = server.rows("rollout")
  (step,) = server.rows("step", where="step = 2")
  assert rollout["step_id"] == step["id"]
  assert reply["ignored"][0]["kept"] == "step 2, the run's newest"


def test_a_screenshot_in_a_data_uri_becomes_a_stored_one(lite):
  _, image = monitor_server.screenshot(1)
  uri = "data:image/png;base64," + base64.b64encode(image).decode()
  body = joined(base(), episode("r1", status="completed"))
  body["observations"][0]["screenshot_uri"] = uri
  body["observations"][1]["screenshot_uri"] = "https://shots.example/1.png"
  lite.post(body)
  sha = hashlib.sha256(image).hexdigest()
  first, second = lite.rows("obs", "screenshot_uri")
  assert first["screenshot_uri"] == f"sha256:{sha}"
  assert second["screenshot_uri"] == "https://shots.example/1.png"
  assert lite.http.get(f"/api/v1/screenshots/{sha}").content == image
  rollout = lite.rows("rollout")[0]["id"]
  page = lite.http.get(f"/rollouts/{rollout}").text
  assert f'src="/api/v1/screenshots/{sha}"' in page
  assert "data:image" not in page
  elsewhere = lite.http.get(f"/rollouts/{rollout}?turn=2").text
  assert 'href="https://shots.example/1.png"' in elsewhere
  assert "No screenshot was recorded" not in elsewhere
  for wrong in ("data:image/png;base64,AAAA", "data:text/html,<b>", "data:"):
    body["observations"][0]["screenshot_uri"] = wrong
    reply = lite.post(body, 400)
    assert "observations[0].screenshot_uri" in json.dumps(reply)


def test_an_unknown_success_is_no_failure(lite):
  lite.post(joined(
      base(), episode("r1", status="completed", reward=0.5),
      episode("r2", status="completed", task_success=False, reward=0.0),
  ))  # pyformat: disable
  first, second = lite.rows("rollout")
  assert first["task_success"] is None and second["task_success"] == 0
  page = lite.http.get(f"/rollouts/{first['id']}").text
  assert "success unknown" in page
  for label in ("failure", "failed"):  # The pages' label of it, too.
    text = lite.http.get(f"/rollouts?outcome={label}").text
    assert f'href="/rollouts/{second["id"]}"' in text
    assert f'href="/rollouts/{first["id"]}"' not in text
    assert lite.http.get(f"/runs/1/steps/1?outcome={label}").status_code == 200


def test_a_first_token_guards_an_open_server_at_once(tmp_path, monkeypatch):
  monkeypatch.setattr(access, "_ASKED_S", 0.0)
  with monitor_server.sqlite_server(tmp_path) as server:
    assert server.http.get("/").status_code == 200
    token = access.make_token(server.engine, "cua", ("read",))
    answer = server.http.get("/", follow_redirects=False)
    assert answer.headers["location"].startswith("/login")
    assert server.http.get("/api/v1/trainings").status_code == 401
    headers = {"authorization": f"Bearer {token}"}
    assert server.http.get(
        "/api/v1/trainings", headers=headers
    ).status_code == 200
