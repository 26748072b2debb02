"""Unmodified clients of other programs: everything they send is kept."""

import base64
import concurrent.futures
import hashlib
import io
import json
import time

import monitor_server
import numpy as np
from PIL import Image
import pytest
from training_monitor.server import access
from training_monitor.server import ingest

base, episode, joined = (
  monitor_server.base,
  monitor_server.episode,
  monitor_server.joined,
)


def sent(server, text, status=200):
  reply = server.http.post(
    "/api/ingest/batch",
    content=text,
    headers={"content-type": "application/json"},
  )
  assert reply.status_code == status, reply.text
  return reply.json()


def test_fields_of_no_known_name_are_kept_and_named(server):
  body = joined(base(experiment_name="sweep"), episode("r1"))
  body["rollouts"][0] |= {"gbox_run_id": "g-1", "gbox_base_url": {"a": [1]}}
  body["environments"][0] |= {"region": "eu\0", "reward": 3}
  reply = server.post(body)
  named = {
    (one["kind"], one["field"].rpartition(".")[2]) for one in reply["ignored"]
  }
  assert named == {
    ("training", "experiment_name"),
    ("rollout", "gbox_run_id"),
    ("rollout", "gbox_base_url"),
    ("environment", "region"),
    ("environment", "reward"),
  }
  assert all(one["kept"] == "a raw value" for one in reply["ignored"])
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
    "score": float("inf"),
    "thought": "half \ud83d a pair",
    "whole": "\U0001f600",
    "many": 10**40,
  }
  text = json.dumps(body)
  assert "NaN" in text and "-Infinity" in text and "\\ud83d" in text
  sent(server, text)
  (rollout,) = server.rows("rollout")
  (step,) = server.rows("step")
  assert rollout["reward"] is None and step["loss"] is None
  metrics = json.loads(server.rows("turn")[0]["metrics_json"])
  assert metrics == {
    "score": "Infinity",
    "thought": "half \ufffd a pair",
    "whole": "\U0001f600",
    "many": 1e40,
  }
  assert server.get("/api/v1/rollouts/r1")["raw"]["reward"] == "NaN"


@pytest.mark.parametrize("text", [
    b"{", b'{"training": nan}', b"\xff\xfe", b'{"a": ' + b"9" * 5000 + b"}",
    b"[" * 100_000 + b"NaN",
])  # fmt: skip
def test_what_is_no_json_is_refused(lite, text):
  assert "not JSON" in sent(lite, text, 400)["detail"]


def test_a_steps_rollout_without_a_step_is_put_under_the_newest(server):
  server.post(base())
  server.post(
    {"training": {"client_id": "T"}, "steps": [{"client_id": "S2", "step": 2}]}
  )
  reply = server.post({
      "training": {"client_id": "T"},
      "rollouts": [{"rollout_id": "r1", "task_id": "open-door",
                    "source_type": "step", "model_path": "m"}],
  })  # fmt: skip
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
    (fault,) = lite.post(body)["ignored"]
    assert fault["field"] == "observations[0].screenshot_uri"
    assert fault["kept"] == "nothing"
    assert lite.rows("obs")[0]["screenshot_uri"] == f"sha256:{sha}"


def test_screenshots_in_other_formats_and_wrapped_base64_are_stored(lite):
  pixels = np.full((12, 16, 3), (200, 30, 90), np.uint8)

  def written(kind, **options):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return base64.encodebytes(file.getvalue()).decode()  # Lines of 76.

  body = joined(base(), episode("r1", turns=4))
  gif, bmp, png, jpeg = body["observations"]
  gif["screenshot_uri"] = f"data:image/gif;base64,{written('GIF')}"
  bmp["screenshot_uri"] = f"data:image/x-ms-bmp;base64,{written('BMP')}"
  png["screenshot_uri"] = f"data:image/png;base64,{written('PNG')}"
  # A recorder that always says "png".
  jpeg["screenshot_uri"] = f"data:image/png;base64,{written('JPEG')}"
  assert "\n" in gif["screenshot_uri"]
  assert "ignored" not in lite.post(body)
  kinds = []
  for row in lite.rows("obs"):
    sha = row["screenshot_uri"].removeprefix("sha256:")
    shown = lite.http.get(f"/api/v1/screenshots/{sha}")
    kinds.append(shown.headers["content-type"])
    with Image.open(io.BytesIO(shown.content)) as image:
      decoded = np.asarray(image.convert("RGB")).astype(int)
    assert np.abs(decoded - pixels).max() < 8
  assert kinds == ["image/png"] * 3 + ["image/jpeg"]


def test_screenshots_that_cannot_be_read_are_all_counted(lite):
  body = joined(base(), episode("r1", turns=150))
  for one in body["observations"]:
    one["screenshot_uri"] = "data:"
  ignored = lite.post(body)["ignored"]
  assert len(ignored) == 100 and ignored[-1]["times"] == 51
  assert len(lite.rows("obs")) == 150


def test_few_data_uris_are_decoded_at_once(lite, monkeypatch):
  running, most = [], []

  def decode(data):
    running.append(data)
    most.append(len(running))
    time.sleep(0.05)
    running.pop()
    return data

  monkeypatch.setattr(ingest, "_as_stored", decode)
  lite.post(base())
  bodies = []
  for n in range(12):
    body = joined(base(), episode(f"r{n}", turns=1))
    image = base64.b64encode(monitor_server.screenshot(n)[1]).decode()
    uri = "data:image/png;base64," + image
    body["observations"][0]["screenshot_uri"] = uri
    bodies.append(body)
  with concurrent.futures.ThreadPoolExecutor(12) as pool:
    list(pool.map(lite.post, bodies))
  assert len(most) == 12 and max(most) <= ingest._MOST_DECODING


def test_nothing_of_a_batch_is_lost_for_one_odd_value(server):
  body = joined(base(), episode("r1", status="completed"))
  body["steps"][0]["metrics_json"] = json.dumps(
    {"kl": float("nan"), "loss": 0.5, "top": float("inf")}
  )
  body["rollouts"][0] |= {
    "task_success": "true",
    "task_completed": "1",
    "validation_passed": 1.0,
    "ran_out_of_turns": "False",
    "attempted_completion": 0.0,
    "num_total_actions": float("nan"),
  }
  body["groups_of_mine"] = [{"n": 1}]
  body["rollout"] = [{"rollout_id": "r1"}]
  body["observations"][0]["screenshot_uri"] = "data:image/gif;base64,AAAA"
  reply = sent(server, json.dumps(body))
  named = {e["field"]: e for e in reply["ignored"]}
  assert set(named) == {
    "groups_of_mine",
    "rollout",
    "rollouts[0].num_total_actions",
    "observations[0].screenshot_uri",
  }
  assert "did you mean 'rollouts'?" in named["rollout"]["message"]
  (rollout,), (step,) = server.rows("rollout"), server.rows("step")
  flags = (
    "task_success",
    "task_completed",
    "validation_passed",
    "ran_out_of_turns",
    "attempted_completion",
  )
  assert [rollout[name] for name in flags] == [1, 1, 1, 0, 0]
  assert json.loads(step["metrics_json"]) == {
    "kl": "NaN",
    "loss": 0.5,
    "top": "Infinity",
  }
  assert len(server.rows("turn")) == len(server.rows("obs")) == 2
  assert server.http.get("/runs/1").status_code == 200
  # The rollout of a run without a step: the tasks beside it are stored.
  reply = server.post(
    {
      "training": {"client_id": "U", "run_name": "other"},
      "tasks": [{"task_id": "new"}],
      "rollouts": [
        {"rollout_id": "r2", "task_id": "new", "source_type": "step"}
      ],
    }
  )
  (fault,) = reply["ignored"]
  assert fault["field"] == "rollouts[0].source_type" and reply["tasks"]


def test_an_unknown_success_is_no_failure(lite):
  lite.post(
    joined(
      base(),
      episode("r1", status="completed", reward=0.5),
      episode("r2", status="completed", task_success=False, reward=0.0),
    )
  )
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
    assert (
      server.http.get("/api/v1/trainings", headers=headers).status_code == 200
    )
