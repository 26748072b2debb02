"""Questions, streams, screenshots, tokens and the command."""

import hashlib
import io
import os
import random
import re
import threading

import fresh_interpreter
import httpx
import monitor_server
from PIL import Image
import pytest
from training_monitor import serve
from training_monitor.schema import database
from training_monitor.schema import tables
from training_monitor.server import access

base, episode, joined = (
  monitor_server.base,
  monitor_server.episode,
  monitor_server.joined,
)


# --- every question ---------------------------------------------------------


def filled(server):
  """A server with a run; its ids by kind."""
  sha, image = monitor_server.screenshot()
  put = server.http.put(f"/api/v1/screenshots/{sha}", content=image)
  assert put.json() == {"sha256": sha, "stored": True}
  one = episode("r1", status="completed", reward=1.0, task_success=True,
                group=0, env_index=0)  # fmt: skip
  one["observations"][0]["screenshot_uri"] = f"sha256:{sha}"
  one["observations"][0]["model_input"] = [{"role": "user"}]
  reply = server.post(
    joined(
      base(status="running"),
      one,
      episode("r2", status="failed", group=0, env_index=1),
      episode("r3", eval_id="E", status="completed", task_success=False),
      episode("r4", baseline_id="B", status="running"),
    )
  )
  ids = {
    kind: {p["client_id"]: p["id"] for p in pairs}
    for kind, pairs in reply.items()
    if isinstance(pairs, list)
  }
  return {**ids, "training": reply["training_id"], "sha": sha, "image": image}


def test_every_question_is_answered(server):
  ids = filled(server)
  t, s = ids["training"], ids["steps"]["S"]
  e, b = ids["evals"]["E"], ids["baselines"]["B"]
  turn = ids["turns"]["r1:turn:1"]
  obs = ids["observations"]["r1:obs:1"]
  get = server.get
  assert [r["id"] for r in get("/api/v1/trainings")["items"]] == [t]
  assert get(f"/api/v1/trainings/{t}")["run_name"] == "run"
  rollout = get("/api/v1/rollouts/r1")
  assert rollout == get(f"/api/v1/rollouts/{rollout['id']}")
  assert rollout["training_id"] == t
  assert rollout["task"]["task_id"] == "open-door"
  assert [x["turn"] for x in rollout["turns"]] == [1, 2]
  # The envelopes that pages of other monitors read.
  assert [r["id"] for r in get("/api/trainings")["trainings"]] == [t]
  assert get(f"/api/trainings/{t}")["training"]["run_name"] == "run"
  old = get("/api/rollouts/r1")
  assert {"rollout", "task", "validation", "environment", "turns"} <= set(old)
  assert old["rollout"]["id"] == rollout["id"]
  assert old["task"] == rollout["task"]
  assert old["validation"] == rollout["validations"][-1]
  assert old["turns"][0]["actions"][0]["tokens"] == [5, 6, 7]
  answer = server.http.get(f"/{t}?project_id=1", follow_redirects=False)
  assert answer.headers["location"] == f"/runs/{t}"
  for prefix in ("/api", "/api/v1"):
    one = get(f"{prefix}/rollouts/r1/turns/{turn}")
    assert one["actions"][0]["tokens"] == [5, 6, 7]
    assert one["observations"][0]["text_content"] == "a door"
  line = get(f"/api/trainings/{t}/timeline")["timeline"]
  assert sorted((x["type"], x["display_name"]) for x in line) == [
    ("baseline", "baseline"),
    ("eval", "Evaluation at step 0"),
    ("step", "Step 1"),
  ]
  for kind, id_, names in (
    ("step", s, ["r1", "r2"]),
    ("eval", e, ["r3"]),
    ("baseline", b, ["r4"]),
  ):
    rollout = get(f"/api/timeline/{kind}/{id_}")
    assert rollout["item"]["id"] == id_ and rollout["item"]["type"] == kind
    assert [r["rollout_id"] for r in rollout["rollouts"]] == names
    assert get(f"/api/v1/{kind}s/{id_}")["training_id"] == t
    assert get(f"/api/v1/trainings/{t}/{kind}s")["items"][0]["id"] == id_
    rollouts = get("/api/v1/rollouts", **{f"{kind}_id": id_})["items"]
    assert sorted(r["rollout_id"] for r in rollouts) == names
    assert len(get(f"/api/v1/{kind}s/{id_}/history")["items"]) == 1
  assert len(get("/api/v1/rollouts", training_id=t)["items"]) == 4
  assert len(get("/api/v1/rollouts?status=failed")["items"]) == 1
  assert len(get("/api/v1/rollouts", success=1)["items"]) == 1
  assert len(get("/api/v1/rollouts/r1/turns")["items"]) == 2
  assert get(f"/api/rollouts/r1/model-input/{turn}") == {
    "model_input": [[{"role": "user"}]]
  }
  assert get("/api/rollouts/r1/validation-override")["final"]["success"] == 1
  (task,) = get("/api/v1/tasks")["items"]
  assert get(f"/api/v1/tasks/{task['id']}")["description"] == "Open the door."
  history = get(f"/api/v1/trainings/{t}/history")["items"]
  assert [h["new_status"] for h in history] == ["running"]
  for path in (
    f"/api/v1/screenshots/{ids['sha']}",
    f"/api/screenshots/{ids['sha']}",
    f"/api/rollouts/r1/screenshot/{obs}",
  ):
    image = server.http.get(path)
    assert image.content == ids["image"]
    assert image.headers["content-type"] == "image/png"
    assert "immutable" in image.headers["cache-control"]
  health = get("/health")
  assert health["status"] == "ok" and health["batches"] >= 1


def test_times_are_utc_and_say_so(server):
  server.post(base(start_time="2026-03-01T12:00:00+02:00"))
  training = server.get("/api/v1/trainings")["items"][0]
  assert training["start_time"] == "2026-03-01T10:00:00.000000Z"


@pytest.mark.parametrize(
  "path, status, says",
  [
    ("/api/v1/trainings/99", 404, "no training 99"),
    ("/api/v1/trainings/99/steps", 404, "no training 99"),
    ("/api/v1/steps/99", 404, "no step 99"),
    ("/api/v1/rollouts/99", 404, "no rollout 99"),
    ("/api/v1/rollouts/r1/turns/99", 404, "no turn 99"),
    ("/api/v1/trainings?limit=0", 400, "1 to 500"),
    ("/api/v1/trainings?limit=x", 400, "a number"),
    ("/api/v1/trainings?limit=501", 400, "1 to 500"),
    ("/api/v1/trainings?after=%21", 400, "`next`"),
    ("/api/v1/trainings?status=x", 400, "give one of"),
    ("/api/v1/rollouts?success=2", 400, "0 or 1"),
    ("/api/v1/rollouts?step_id=99999999999999999999", 400, "a number"),
    (f"/api/v1/trainings/{10**30}", 404, "there is no"),
    ("/api/v1/screenshots/xyz", 400, "hexadecimal"),
    (f"/api/v1/screenshots/{'0' * 64}", 404, "no screenshot"),
    ("/api/rollouts/r1/screenshot/99", 404, "no observation"),
    ("/api/rollouts/r1/model-input/99", 404, "no turn"),
    ("/api/videos?path=../m.db", 404, "no video"),
    ("/api/videos?path=/etc/passwd", 404, "no video"),
    ("/api/videos?path=%00", 404, "no video"),
    ("/api/v1/rollouts/%00", 404, "no rollout"),
    ("/api/v1/events?after=x", 400, "a number"),
  ],
)
def test_questions_that_have_no_answer(lite_filled, path, status, says):
  assert says in lite_filled.get(path, status)["detail"]


@pytest.fixture(scope="module")
def lite_filled(tmp_path_factory):
  with monitor_server.sqlite_server(tmp_path_factory.mktemp("m")) as running:
    filled(running)
    yield running


def test_videos_are_served_in_ranges(lite, tmp_path):
  folder = tmp_path / "files" / "videos"
  folder.mkdir(parents=True)
  (folder / "a.mp4").write_bytes(bytes(range(100)))
  (folder / "a.txt").write_text("no video")
  reply = lite.http.get(
    "/api/videos", params={"path": "a.mp4"}, headers={"range": "bytes=10-19"}
  )
  assert reply.status_code == 206
  assert reply.content == bytes(range(10, 20))
  assert lite.http.get("/api/videos?path=a.txt").status_code == 404


# --- pages ------------------------------------------------------------------


def test_pages_hold_everything_once_whatever_is_added_meanwhile(server):
  server.post(base())
  names = [f"r{n}" for n in range(23)]
  add = lambda own: server.post(
    {
      "rollouts": [
        {"rollout_id": n, "step_id": "S", "task_id": "open-door"} for n in own
      ]
    }
  )
  add(names)
  listed, after, pages = [], None, 0
  while True:
    page = server.get(
      "/api/v1/rollouts", limit=5, **({"after": after} if after else {})
    )
    assert len(page["items"]) <= 5
    listed += [r["rollout_id"] for r in page["items"]]
    pages += 1
    add([f"new{pages}"])  # Newer than every later change.
    after = page["next"]
    if after is None:
      break
  assert listed == names[::-1] and pages == 5


def test_steps_come_in_the_order_of_their_numbers(server):
  numbers = random.Random(0).sample(range(100), 12)
  reply = server.post(
    {"training": {"run_name": "x"}, "steps": [{"step": n} for n in numbers]}
  )
  path = f"/api/v1/trainings/{reply['training_id']}/steps"
  first = server.get(path, limit=7)
  second = server.get(path, limit=7, after=first["next"])
  steps = [s["step"] for s in first["items"] + second["items"]]
  assert steps == sorted(numbers) and second["next"] is None


# --- live -------------------------------------------------------------------


def listen(server, count, headers=None, **params):
  """The first events of a stream, as (id, name, data)."""
  events = []
  with server.http.stream(
    "GET", "/api/v1/events", params=params, headers=headers, timeout=20
  ) as reply:
    assert reply.headers["content-type"].startswith("text/event-stream")
    event = {}
    for line in reply.iter_lines():
      name, _, value = line.partition(": ")
      if not line and "data" in event:
        events.append((int(event["id"]), event["event"], event["data"]))
        event = {}
        if len(events) == count:
          return events
      elif value:
        event[name] = value
  return events


def test_a_listener_hears_changes_and_begins_again_where_it_stopped(server):
  server.post(base())
  heard = []
  thread = threading.Thread(
    target=lambda: heard.extend(listen(server, 4, after=0))
  )
  thread.start()
  server.post(episode("r1"))
  thread.join(20)
  assert [name for _, name, _ in heard] == ["change"] * 4
  assert '"kind":"training"' in heard[0][2]
  # The rest, as a browser asks for it.
  later = listen(server, 1, headers={"last-event-id": str(heard[-1][0])})
  assert later[0][0] > heard[-1][0] and '"kind":"rollout"' in later[0][2]
  everything = listen(server, 5, after=0)
  assert everything == heard + later


def test_a_listener_that_was_away_too_long_is_told_to_load_again(lite):
  lite.post(base())
  (event,) = listen(lite, 1, headers={"last-event-id": "999999"})
  assert event[1] == "reset"


# --- screenshots ------------------------------------------------------------


def test_a_screenshot_is_stored_once_by_its_pixels_or_its_bytes(lite):
  sha, image = monitor_server.screenshot(1)
  put = lambda sha, data: lite.http.put(
    f"/api/v1/screenshots/{sha}", content=data
  )
  ask = lambda *shas: lite.http.post(
    "/api/v1/screenshots/missing", json={"sha256": shas}
  ).json()
  assert ask(sha, sha) == {"missing": [sha]}
  assert put(sha, image).json()["stored"]
  assert not put(sha, image).json()["stored"]
  assert ask(sha) == {"missing": []}
  file = io.BytesIO()
  Image.new("RGB", (8, 8), "red").save(file, "JPEG")
  digest = hashlib.sha256(file.getvalue()).hexdigest()
  assert put(digest, file.getvalue()).json()["stored"]
  reply = lite.http.get(f"/api/v1/screenshots/{digest}")
  assert reply.headers["content-type"] == "image/jpeg"
  assert reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
  "data, says",
  [
    (b"", "not a whole PNG"),
    (b"<svg onload=alert(1)>", "not a whole PNG"),
    (monitor_server.screenshot(2)[1], "neither the bytes nor"),
    (monitor_server.screenshot(1)[1][:-30], "not a whole PNG"),
  ],
)
def test_what_is_not_that_screenshot_is_refused(lite_filled, data, says):
  sha, _ = monitor_server.screenshot(1)
  reply = lite_filled.http.put(f"/api/v1/screenshots/{sha}", content=data)
  assert reply.status_code == 400 and says in reply.json()["detail"]
  assert lite_filled.http.get(f"/api/v1/screenshots/{sha}").status_code == 404


# --- tokens -----------------------------------------------------------------


@pytest.fixture
def projects(target, tmp_path):
  """A guarded server, and a client for each kind of token."""
  with monitor_server.MonitorServer(
    target, tmp_path / "files", token="owner"
  ) as server:
    make = lambda project, *scopes: httpx.Client(
      base_url=server.url,
      timeout=30,
      verify=False,
      headers={
        "authorization": "Bearer "
        + access.make_token(server.engine, project, scopes)
      },
    )
    clients = {
      "a": make("A", "ingest", "read"),
      "b": make("B", "ingest", "read"),
      "reads": make("A", "read"),
      "sends": make("A", "ingest"),
      "nobody": httpx.Client(base_url=server.url, timeout=30, verify=False),
      "liar": httpx.Client(
        base_url=server.url,
        headers={"authorization": "Bearer wrong"},
        verify=False,
      ),
    }
    yield server, clients
    for client in clients.values():
      client.close()


def test_tokens_open_what_their_scopes_say(projects):
  _, who = projects
  send = lambda name: who[name].post("/api/ingest/batch", json=base())
  look = lambda name: who[name].get("/api/v1/trainings")
  for name, may_send, may_look in (
    ("a", 200, 200),
    ("sends", 200, 403),
    ("reads", 403, 200),
    ("nobody", 401, 401),
    ("liar", 401, 401),
  ):
    assert send(name).status_code == may_send, name
    assert look(name).status_code == may_look, name
  assert "Bearer" in send("nobody").headers["www-authenticate"]
  assert "monitor token" in send("liar").json()["detail"]
  assert "scope ingest" in send("reads").json()["detail"]
  assert who["nobody"].get("/health").status_code == 200


def test_a_project_neither_sees_nor_touches_another_ones_runs(projects):
  server, who = projects
  post = lambda name, body: who[name].post("/api/ingest/batch", json=body)
  first = post("a", joined(base(), episode("r1"))).json()
  step, rollout = first["steps"][0]["id"], first["rollouts"][0]["id"]
  turn = first["turns"][0]["id"]
  assert who["b"].get("/api/v1/trainings").json()["items"] == []
  assert who["b"].get("/api/v1/rollouts").json()["items"] == []
  for path in (
    f"trainings/{first['training_id']}",
    f"steps/{step}",
    f"rollouts/{rollout}",
    "rollouts/r1",
    f"rollouts/{rollout}/turns/{turn}",
    f"trainings/{first['training_id']}/steps",
    f"rollouts/{rollout}/history",
    f"tasks/{first['tasks'][0]['id']}",
  ):
    assert who["a"].get(f"/api/v1/{path}").status_code == 200, path
    assert who["b"].get(f"/api/v1/{path}").status_code == 404, path
  before = server.rows("rollout")
  for body in (
    {"rollouts": [{"rollout_id": "x", "step_id": step, "task_id": 1}]},
    {"rollouts": [{"rollout_id": "r1", "status": "failed"}]},
    {"rollouts": [{"id": rollout, "reward": 9.0}]},
    {"turns": [{"rollout_id": rollout, "turn": 7}]},
    {"actions": [{"turn_id": turn}]},
    {"training": {"training_id": first["training_id"], "seed": 1}},
    {"training_id": first["training_id"], "steps": [{"step": 9}]},
    {
      "environments": [
        {"client_id": "e", "rollout_id": rollout, "env_type": "linux"}
      ]
    },
  ):
    reply = post("b", body)
    assert reply.status_code == 400, (body, reply.text)
  assert server.rows("rollout") == before
  # The same client ids are other things in another project.
  second = post("b", base()).json()
  assert second["training_id"] != first["training_id"]


def test_the_database_holds_no_token(projects):
  server, who = projects
  token = who["a"].headers["authorization"].removeprefix("Bearer ")
  stored = str(server.rows("monitor_token"))
  assert token not in stored
  assert hashlib.sha256(token.encode()).hexdigest() in stored


def test_a_server_without_tokens_answers_no_page_of_another_site(lite):
  ask = lambda **h: lite.http.get("/api/v1/trainings", headers=h).status_code
  assert ask() == 200
  assert ask(origin=lite.url) == 200
  assert ask(origin="https://evil.example") == 403
  assert ask(host="evil.example") == 403
  assert ask(host="localhost:80") == 200


# --- the document -----------------------------------------------------------


def test_the_document_names_every_route_and_resolves(lite):
  document = lite.get("/api/v1/openapi.json")
  assert document["openapi"].startswith("3.1")
  named = {
    (method.upper(), path)
    for path, methods in document["paths"].items()
    for method in methods
  }
  routes = {
    (method, re.sub(r":\w+}", "}", route.path))
    for route in lite.app.asgi.routes
    if route.path.startswith(("/api/", "/health"))  # The rest is pages.
    for method in route.methods - {"HEAD"}
  }
  assert named == routes
  operations = [
    o["operationId"] for p in document["paths"].values() for o in p.values()
  ]
  assert len(set(operations)) == len(operations)
  schemas = document["components"]["schemas"]
  for name in re.findall(r"#/components/schemas/(\w+)", str(document)):
    assert name in schemas
  assert set(schemas["rollout"]["properties"]) == {
    c.name for c in tables.rollout.c
  }


# --- the command ------------------------------------------------------------


def run(*args):
  env = {k: v for k, v in os.environ.items() if k != serve.TOKEN_VARIABLE}
  return fresh_interpreter.run_module(
    "training_monitor", *args, timeout=60, env=env
  )


@pytest.mark.parametrize(
  "args, says",
  [
    (("serve", "--host", "0.0.0.0"), "can be reached by others"),
    (("serve", "--database", "mysql://x/y"), "PostgreSQL"),
    (("serve", "--database", "postgresql://x/y"), "--files"),
    (("serve", "--max-body-mb", "0"), "give 1 or more"),
    (("token", "--scopes", "everything"), "ingest, read"),
    (("token", "--project", "a/b"), "letters"),
  ],
)
def test_commands_that_cannot_be(tmp_path, capsys, monkeypatch, args, says):
  monkeypatch.chdir(tmp_path)
  monkeypatch.delenv(serve.TOKEN_VARIABLE, raising=False)
  assert serve.main(args) == 2
  assert says in capsys.readouterr().err


def test_a_token_made_by_the_command_opens_the_server(tmp_path):
  path = str(tmp_path / "m.db")
  result = run("token", "--database", path, "--project", "P")
  assert result.returncode == 0, result.stderr
  token = result.stdout.strip()
  engine = database.connect(path)
  principal = access.Access(engine).check(
    {"authorization": f"Bearer {token}"}, "read"
  )
  assert principal.scopes == {"ingest", "read"}
  engine.dispose()


def test_the_server_ends_when_its_input_does(tmp_path):
  result = run(
    "serve", "--database", str(tmp_path / "m.db"), "--port", "0", "--until-eof"
  )
  assert result.returncode == 0, result.stderr
  assert "http://127.0.0.1:" in result.stdout


def test_a_taken_port_is_named(tmp_path, capsys, lite):
  port = lite.url.rpartition(":")[2]
  assert (
    serve.main(["serve", "--database", str(tmp_path / "n.db"), "--port", port])
    == 2
  )
  assert "choose another port" in " ".join(capsys.readouterr().err.split())
