"""Tags of runs and the pinned baseline: through ingest and forms."""

import monitor_server
from training_monitor.server import access

base = monitor_server.base


def run(server, name, **training):
  """The id of a run."""
  return server.post(
    {"training": {"client_id": name, "run_name": name, **training}}
  )["training_id"]


def tags(server, id_, status=303, add=(), remove=""):
  """The tags of a run after a change; the page where it is refused."""
  reply = form(server, f"/runs/{id_}/tags", add=",".join(add), remove=remove)
  assert reply.status_code == status, reply.text
  if status != 303:
    return reply.text
  return server.get(f"/api/v1/trainings/{id_}")["tags"]


def form(server, path, **data):
  """Posts a form as this server's page does."""
  own = {"origin": server.url}
  return server.http.post(path, data=data, headers=own, follow_redirects=False)


def listed(server, path="/api/v1/trainings", **params):
  return [t["run_name"] for t in server.get(path, **params)["items"]]


def test_what_a_client_tags_a_run_with_is_there_once(server):
  id_ = run(server, "r", tags=["lr sweep", " baseline ", "u\u0308"])
  training = server.get(f"/api/v1/trainings/{id_}")
  assert training["tags"] == ["baseline", "lr sweep", "\u00fc"]
  assert training["pinned"] is False
  run(server, "r", tags=["lr sweep", "later"])  # A start again.
  run(server, "r")  # One that says nothing of them.
  assert server.get(f"/api/v1/trainings/{id_}")["tags"] == [
    "baseline",
    "later",
    "lr sweep",
    "\u00fc",
  ]
  for wrong, says in (
    (["x" * 51], "50 characters"),
    ("x", "list"),
    ([1], "text"),
    (["a\u202eb"], "not seen"),
    ([""], "1 to 50"),
    (["t"] * 51, "most 50"),
  ):
    reply = server.post(
      {"training": {"client_id": "w", "run_name": "w", "tags": wrong}}
    )
    (left_out,) = reply["ignored"]
    assert left_out["field"] == "training.tags"
    assert says in left_out["message"]
    assert not server.get(f"/api/v1/trainings/{reply['training_id']}")["tags"]


def test_tags_are_changed_and_filter(server):
  first, second = run(server, "a", tags=["x"]), run(server, "b")
  assert tags(server, second, add=["x", "y"]) == ["x", "y"]
  before = server.get(f"/api/v1/trainings/{second}")["updated_at"]
  assert tags(server, second, add=["x"], remove="z") == ["x", "y"]
  assert server.get(f"/api/v1/trainings/{second}")["updated_at"] == before
  assert listed(server, tag="x") == ["b", "a"]
  assert listed(server, tag=["x", "y"]) == ["b"]
  assert listed(server, tag="nobody's") == []
  assert tags(server, second, remove="x") == ["y"]
  many = [f"t{n}" for n in range(50)]
  assert "take some away" in tags(server, second, 400, add=many)
  assert tags(server, second, add=many, remove="y") == sorted(many)
  tags(server, 99, 404, add=["x"])
  assert server.get(f"/api/v1/trainings/{first}")["tags"] == ["x"]


def test_one_run_of_a_project_is_its_baseline(server):
  first, second = run(server, "a"), run(server, "b")
  pin = lambda id_, pinned="1": (
    form(server, f"/runs/{id_}/pin", pinned=pinned).status_code
  )
  pinned = lambda: [
    t["run_name"]
    for t in server.get("/api/v1/trainings")["items"]
    if t["pinned"]
  ]
  assert (pin(first), pin(first), pinned()) == (303, 303, ["a"])
  page = server.http.get("/").text
  assert page.index(f'href="/runs/{first}"') < page.index(
    f'href="/runs/{second}"'
  )
  assert pin(second) == 303 and pinned() == ["b"]
  assert pin(first, "0") == 303 and pinned() == ["b"]  # It was none.
  assert pin(second, "0") == 303 and pinned() == []
  assert pin(99) == 404


def test_another_project_has_its_own(tmp_path):
  with monitor_server.sqlite_server(tmp_path, token="tm_secret") as server:
    id_ = run(server, "a", tags=["x"])
    form(server, f"/runs/{id_}/pin", pinned="1")
    other = access.make_token(server.engine, "other", ("ingest", "read"))
    server.http.headers["authorization"] = f"Bearer {other}"
    tags(server, id_, 404, add=["y"])
    assert form(server, f"/runs/{id_}/pin", pinned="1").status_code == 404
    own_run = run(server, "mine")
    assert form(server, f"/runs/{own_run}/pin", pinned="1").status_code == 303
    curves = f"/api/v1/trainings/{own_run}/curves?names=loss"
    assert server.http.get(curves).status_code == 200
    assert server.http.get(f"/runs/{own_run}?against={id_}").status_code == 404


def test_forms_need_this_servers_page_and_a_token_that_may_send(tmp_path):
  with monitor_server.sqlite_server(tmp_path, token="tm_secret") as server:
    id_ = run(server, "a", tags=["x"])
    reading = access.make_token(server.engine, "default", ("read",))
    own = {"origin": server.url}

    def send(path, data, token="tm_secret", **headers):
      return server.http.post(
        f"/runs/{id_}/{path}",
        data=data,
        follow_redirects=False,
        headers={
          "authorization": "",
          "cookie": f"{access.COOKIE}={token}",
          **headers,
        },
      )

    answer = send("tags", {"add": "y, z", "next": "/runs/1?smooth=1"}, **own)
    assert answer.status_code == 303
    assert answer.headers["location"] == "/runs/1?smooth=1"
    training = lambda: server.get(f"/api/v1/trainings/{id_}")
    assert training()["tags"] == ["x", "y", "z"]
    for headers in (
      {},
      {"origin": "http://evil.example"},
      {"origin": "null"},
      {"origin": server.url.replace("127.0.0.1", "localhost")},
      {**own, "sec-fetch-site": "same-site"},
      {**own, "sec-fetch-site": "cross-site"},
    ):
      for path, data in (("tags", {"add": "w"}), ("pin", {"pinned": "1"})):
        assert send(path, data, **headers).status_code == 403, headers
    refused = send("tags", {"add": "w"}, reading, **own)
    assert refused.status_code == 403 and "scope ingest" in refused.text
    nobody = send("pin", {"pinned": "1"}, "tm_wrong", **own)
    assert nobody.headers["location"] == "/login"
    assert send("tags", {"add": "x" * 51}, **own).status_code == 400
    assert send("pin", {"pinned": "2"}, **own).status_code == 400
    assert training()["tags"] == ["x", "y", "z"] and not training()["pinned"]
    away = send("pin", {"pinned": "1", "next": "//evil.example/"}, **own)
    assert away.headers["location"] == "/" and training()["pinned"]
    assert send("tags", {"remove": "y"}, **own).status_code == 303
    assert training()["tags"] == ["x", "z"]
    # Who may only look sees them, and no form.
    page = lambda token: (
      server.http.get(
        f"/runs/{id_}",
        headers={"authorization": "", "cookie": f"{access.COOKIE}={token}"},
      ).text
    )
    assert '/tags"' in page("tm_secret")
    assert '/tags"' not in page(reading) and "x</a>" in page(reading)


def test_another_run_is_drawn_beside_this_one(server):
  ids = []
  for name, steps, offset in (("a", 6, 1.0), ("b", 4, 0.25)):
    body = base(client_id=name, run_name=name)
    body["steps"] = [
        {"client_id": f"{name}{n}", "step": n,
         "metrics_json": {"kl": n + offset, "engine_busy": offset / 2,
                          "time": 100.0 * n, **({"own": 1.0} if name == "a"
                                                else {})}}
        for n in range(1, steps + 1) if (name, n) != ("b", 2)
    ]  # fmt: skip
    body["evals"] = [{"client_id": f"{name}-e", "step": 4, "total_tasks": 2}]
    parts = [
      monitor_server.episode(
        f"{name}-{n}",
        turns=1,
        eval_id=f"{name}-e",
        status="completed",
        task_success=n < (2 if name == "a" else 1),
        temperature=1.0,
      )
      for n in range(2)
    ]
    del body["baselines"]
    ids.append(server.post(monitor_server.joined(body, *parts))["training_id"])
  first, second = ids
  page = server.http.get(f"/runs/{first}?against={second}").text
  assert '"baseline": true' in page.replace("&#34;", '"')
  assert server.http.get(f"/runs/{first}?against={first}").status_code == 400
