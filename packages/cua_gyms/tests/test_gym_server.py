"""The gym server's protocol: real HTTP, real gyms, and gyms that misbehave."""

import asyncio
import base64
import contextlib
import dataclasses
import json
import logging
import math
import os
import pathlib
import socket
import subprocess
import sys
import time

from cua_gyms import applications
from cua_gyms.gym_server import __main__ as command
from cua_gyms.gym_server import catalog
from cua_gyms.gym_server import executions
from cua_gyms.gym_server import store as store_lib
import gym_servers
import httpx
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments import wire
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.net import request_bodies

Naughty = gym_servers.NaughtyGym


@pytest.fixture(scope="module", name="server")
def _server():
  with gym_servers.serving(
    gym_servers.desktop(client_settings=("width", "height"))
  ) as server:
    yield server


@pytest.fixture(name="http")
def _http(server):
  url, app = server
  with httpx.Client(base_url=url + "/api/v1/desktop", timeout=30) as client:
    yield client
    for execution in app.store.live():  # What this test left.
      client.post(f"/executions/{execution.id}/terminate")


def create(http, task="click-button-train-0", **body):
  reply = http.post(f"/tasks/{task}", json=body)
  assert reply.status_code == 200, reply.text
  return reply.json()


# --- tasks --------------------------------------------------------------------


def test_tasks_are_found_by_id_name_number_and_numeric_prefix(http):
  for identifier in ("002", "2", "002-whatever", "click-button-train-1"):
    assert http.get(f"/tasks/{identifier}").json()["number"] == "002"
  for identifier in ("nothing", "000", "9999", "click-button@test:0:0", "%2f"):
    reply = http.get(f"/tasks/{identifier}")
    assert reply.status_code == 404, identifier
    assert reply.json()["code"] == "unknown_task"
    assert identifier.replace("%2f", "/") in reply.json()["detail"]


def test_an_instance_beyond_the_list_is_the_gyms_own_task(http):
  full = http.get("/tasks/enter-text@eval:123456:7").json()
  task = desktop.DesktopTasks().eval_task("enter-text", 123456, 7)
  assert full["task_id"] == task.task_id
  assert full["instruction"] == task.instruction


def test_training_and_held_out_tasks_of_the_list_do_not_meet(http):
  seeds = {
    split: {
      t["env_config"]["seed"]
      for t in http.get(
        "/tasks", params={"split": split, "full": "true"}
      ).json()["tasks"]
    }
    for split in ("train", "eval")
  }
  assert seeds["train"] and seeds["eval"]
  assert not seeds["train"] & seeds["eval"]


# --- the life of an execution -------------------------------------------------


def test_create_step_screenshot_evaluate_terminate(http, server):
  created = create(http, options={"observe": True})
  assert created["box_id"] == created["execution_id"]
  assert created["env_build"]["stages"][0]["name"] == "create_execution"
  own = desktop.DesktopGym()
  task = desktop.DesktopTasks().train_task("click-button", 0, 0)
  observation = own.start_sync(task)
  shown = wire.observation_from_json(created["observation"])
  np.testing.assert_array_equal(shown.screenshot, observation.screenshot)
  assert shown.instruction == observation.instruction
  at = f"/executions/{created['execution_id']}"
  png = http.get(at + "/screenshot")
  assert png.headers["content-type"] == "image/png"
  pixels = wire.from_png(png.content)
  np.testing.assert_array_equal(pixels, observation.screenshot)
  action = desktop.oracle_action(own)
  stepped = http.post(at + "/step", json={"action": action.to_json()}).json()
  expected = own.act_sync(action)
  assert stepped["step"] == 1 and stepped["observation"]["done"]
  np.testing.assert_array_equal(
    wire.observation_from_json(stepped["observation"]).screenshot,
    expected.screenshot,
  )
  verdict = http.post(at + "/evaluate").json()
  assert verdict["success"] is True
  assert verdict["result"]["score"] == 1.0
  assert verdict["result"]["validators"] == [
    {"id": "state", "type": "state", "pass": True, "score": 1.0, "weight": 1.0}
  ]
  assert http.get(at).json()["status"] == "running"
  for _ in range(2):
    assert http.post(at + "/terminate").json()["status"] == "terminated"
  assert server[1].store.open == 0
  for path in ("/step", "/evaluate", "/heartbeat"):
    reply = http.post(at + path, json={"action": {"kind": "wait"}})
    assert (reply.status_code, reply.json()["code"]) == (410, "terminated")


def test_genvs_own_actions_mean_fractions_of_the_screen(http):
  own = desktop.DesktopGym()
  own.start_sync(desktop.DesktopTasks().train_task("click-button", 0, 0))
  click = desktop.oracle_action(own)
  at = f"/executions/{create(http)['execution_id']}"
  tap = {
    "name": "tap",
    "args": {"x_norm": click.x / 128, "y_norm": click.y / 96},
  }
  reply = http.post(at + "/step", json={"action": tap, "screenshot": False})
  assert reply.json()["observation"]["done"]
  assert "screenshot" not in reply.json()["observation"]
  assert http.post(at + "/evaluate").json()["success"]


def test_a_step_that_is_sent_again_is_made_once(http):
  at = f"/executions/{create(http)['execution_id']}"
  wait = {"action": {"kind": "wait"}, "step": 1}
  first = http.post(at + "/step", json=wait).json()
  assert http.post(at + "/step", json=wait).json() == first
  assert http.get(at).json()["steps"] == 1
  move = {"kind": "move", "x": 1, "y": 1}
  for body in (
    {"action": move, "step": 1},  # Another action under that number.
    {"action": move, "step": 3},  # One is missing.
  ):
    reply = http.post(at + "/step", json=body)
    assert reply.json()["code"] == "step_out_of_order", body
  assert http.get(at).json()["steps"] == 1


def test_a_create_that_is_sent_again_is_one_execution(http, server):
  headers = {"idempotency-key": "mine"}
  body = {"options": {"lease_s": 30}}
  task = "/tasks/click-button-train-0"
  send = lambda: http.post(task, json=body, headers=headers).json()
  created = [send() for _ in range(3)]
  assert len({m["execution_id"] for m in created}) == 1
  assert [m["replayed"] for m in created] == [False, True, True]
  assert server[1].store.open == 1
  other = http.post("/tasks/enter-text-train-0", json=body, headers=headers)
  assert other.json()["code"] == "key_reused"
  http.post(f"/executions/{created[0]['execution_id']}/terminate")
  again = http.post(task, json=body, headers=headers)
  assert (again.status_code, again.json()["code"]) == (410, "terminated")


def test_an_execution_can_be_ended_by_the_key_of_its_create(http, server):
  http.post("/tasks/001", headers={"idempotency-key": "lost"})
  assert server[1].store.open == 1
  assert http.post("/executions/key:lost/terminate").status_code == 200
  assert server[1].store.open == 0
  assert http.post("/executions/key:never/terminate").status_code == 404


def test_clients_set_what_the_server_allows_and_nothing_else(http):
  created = create(http, options={"gym": {"width": 160}})
  assert created["screen"] == {"width": 160, "height": 96}
  for gym in ({"time_decay": 0.5}, {"width": 10**9}, {"height": "tall"}):
    reply = http.post("/tasks/001", json={"options": {"gym": gym}})
    assert reply.status_code == 422, gym
    assert f"options.gym.{next(iter(gym))}" in reply.json()["detail"]


@pytest.mark.parametrize(
  "body, words",
  [
    ({}, "action is missing"),
    ({"action": {"kind": "press"}}, "action"),
    ({"action": {"kind": "click", "x": 1}}, "needs 'y'"),
    ({"action": {"kind": "click", "x": "1", "y": 2}}, "action.x"),
    (
      {"action": {"kind": "click", "x": 1e300, "y": 2}},
      "action.x must be <= 1e+06",
    ),
    ({"action": {"kind": "type", "text": 5}}, "action.text"),
    ({"action": {"kind": "key", "keys": "ab"}}, "action.keys"),
    ({"action": {"kind": "wait", "color": 1}}, "takes no 'color'"),
    ({"action": {"name": "tap", "args": {"x_norm": 2}}}, "action.x_norm"),
    ({"action": {"name": "pinch"}}, "action.name"),
    ({"action": {"kind": "wait"}, "step": 0}, "step must be"),
  ],
)
def test_what_is_no_action_is_refused_by_its_field(http, body, words):
  at = f"/executions/{create(http)['execution_id']}"
  reply = http.post(at + "/step", json=body)
  assert reply.status_code == 422
  assert words in reply.json()["detail"]
  assert http.get(at).json()["steps"] == 0


@pytest.mark.parametrize(
  "content, status",
  [
    (b"{", 400),
    (b'{"action": NaN}', 400),
    (b"[" * 100_000, 400),
    (b"1" * 5000, 400),
    (b"[]", 422),
    (b"\xff\xfe", 400),
    (b" " * (5 << 20), 413),
    (b'{"action": {"kind": "type", "text": "\\ud800"}}', 400),
    (b'{"\\udBFF": 1}', 400),
  ],
)
def test_what_is_no_request_is_refused(http, content, status):
  at = f"/executions/{create(http)['execution_id']}"
  reply = http.post(at + "/step", content=content)
  assert reply.status_code == status
  assert set(reply.json()) == {"detail", "code"}


def test_text_beyond_the_first_plane_is_no_half_of_a_pair(http):
  at = f"/executions/{create(http)['execution_id']}"
  body = b'{"action": {"kind": "type", "text": "\\ud83d\\ude00"}}'
  assert http.post(at + "/step", content=body).status_code == 200
  # In names, too, that an error would quote.
  reply = http.post("/tasks/001", content=b'{"options":{"gym":{"\\ud800":1}}}')
  assert reply.status_code == 400 and "ud800" in reply.json()["detail"]


def test_a_body_that_drips_is_given_up():
  limits = request_bodies.ConnectionLimits(body_timeout=0.2)
  with gym_servers.serving(connections=limits) as (at, _):
    url = httpx.URL(at)
    with socket.create_connection((url.host, url.port), 20) as client:
      client.sendall(
        b"POST /api/v1/desktop/tasks/001 HTTP/1.1\r\nhost: localhost\r\n"
        b"content-length: 100\r\n\r\n{"
      )
      # Until the connection is closed: head and body may come one by one.
      reply = b"".join(iter(lambda: client.recv(4096), b""))
      assert reply.startswith(b"HTTP/1.1 408 ") and b"too_slow" in reply


def test_addresses_that_are_not_served_have_the_same_shape(server):
  url, _ = server
  for path, method, status in (
    ("/nothing", "GET", 404),
    ("/api/v1/desktop/tasks", "DELETE", 405),
    ("/api/v1/other/tasks", "GET", 404),
    ("/api/v1/desktop/executions/none", "GET", 404),
    ("/api/v1/gyms", "POST", 405),
  ):
    reply = httpx.request(method, url + path)
    assert reply.status_code == status, path
    assert set(reply.json()) == {"detail", "code"}


def test_validators_have_weights():
  with gym_servers.serving(gym_servers.naughty("answers")) as (url, _):
    with httpx.Client(base_url=url + "/api/v1/naughty") as http:
      for answer, score in ((" BLUE ", 0.25 / 4 + 3 / 4), ("red", 0.25 / 4)):
        created = create(http, "naughty/answers/0")
        at = f"/executions/{created['execution_id']}"
        # The answer's two names, in the two places that clients write it.
        body = {"answer_text": answer}
        if answer == "red":
          body = {"execution_data": {"answer": answer}}
        result = http.post(at + "/evaluate", json=body).json()["result"]
        assert result["score"] == pytest.approx(score)
        assert [v["weight"] for v in result["validators"]] == [1, 3]
        assert not result["success"]  # The state does not pass.


# --- tokens -------------------------------------------------------------------


def test_without_a_token_it_answers_to_names_of_its_own_only():
  """A page of a name that was made to lead here could read else."""
  with gym_servers.serving() as (url, _):
    ask = lambda host: httpx.get(url + "/api/v1/gyms", headers={"host": host})
    port = url.rpartition(":")[2]
    for host in (f"evil.example:{port}", "10.0.0.1", "127.0.0.1.evil.example"):
      refused = ask(host)
      assert refused.status_code == 403
      assert refused.json()["code"] == "cross_site"
      assert "127.0.0.1" in refused.json()["detail"]
    for host in (f"localhost:{port}", "127.0.0.1", f"[::1]:{port}"):
      assert ask(host).status_code == 200


def test_a_token_is_asked_for_everywhere_but_health():
  with gym_servers.serving(token="s3cret") as (url, _):
    assert httpx.get(url + "/health").status_code == 200
    for path in ("/api/v1/gyms", "/metrics", "/openapi.json"):
      for header in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "s3cret"},
      ):
        assert httpx.get(url + path, headers=header).status_code == 401
      good = {"authorization": "Bearer s3cret"}
      assert httpx.get(url + path, headers=good).status_code == 200


@pytest.mark.parametrize(
  "arguments, words",
  [
    (["desktop", "--host", "0.0.0.0"], "needs a token"),
    (["nogym"], "nogym"),
    (["desktop", "--families", "click-buton"], "click-buton"),
    (["desktop", "--settings", "[1]"], "--settings"),
    (["desktop", "--capacity", "0"], "capacity must be >= 1, got 0"),
    (["gymnasium"], "families"),
    (["nowhere.yaml"], "nowhere.yaml"),
    (["desktop", "desktop"], "two gyms"),
    (["desktop", "--train-tasks", "0", "--eval-tasks", "0"], "no task"),
    (["desktop", "--settings", "{width: -5}"], "width=-5"),
    (["desktop", "--settings", "{width: many}"], "width='many'"),
    (["desktop", "--client-settings", "colour"], "'colour' is no setting"),
    (["desktop", "--seed", "9" * 30], "seed must be <"),
    (["desktop", "--body-memory", "0"], "--body-memory must be >= 1"),
    (["desktop", "--import", "no.such"], "--import=no.such"),
    (["desktop", "--token-file", "/no/where"], "/no/where: No such file"),
  ],
)
def test_the_command_says_what_is_wrong(arguments, words, capsys, monkeypatch):
  monkeypatch.delenv(command.TOKEN_VARIABLE, raising=False)
  assert command.main([*arguments, "--port", "0"]) == 2
  assert words in capsys.readouterr().err


@pytest.mark.parametrize(
  "text, words",
  [
    ("- gym: desktop\n\tfamilies: [a]\n", "line 2: found character"),
    ("- {gym: desktop, families: 5}", "families must be a list, got 5"),
    ("- {gym: desktop, train_tasks: many}", "train_tasks must be a whole"),
    ("- {gym: desktop, train_tasks: -3}", "train_tasks must be >= 0"),
    ("- {gym: desktop, settings: {width: -5}}", "width=-5"),
    ("- {gym: desktop, settings: [1]}", "settings must be an object"),
    ("- {gym: 5}", "gym_id must be a string"),
    ("- {gym: desktop, 5: 3}", "takes no 5"),
    ("- desktop", "must be an object with 'gym'"),
    ("gym: desktop", "must hold a list of gyms"),
    ("[]", "at least one gym"),
    ("\udcff\udcfe", "is no text in UTF-8"),
    ("[" * 5000, "gyms.yaml"),
  ],
)
def test_a_wrong_file_is_one_clear_message(text, words, tmp_path, capsys):
  listed = tmp_path / "gyms.yaml"
  listed.write_bytes(text.encode("utf-8", "surrogateescape"))
  assert command.main([str(listed), "--port", "0"]) == 2
  output = capsys.readouterr().err
  assert words in output and output.count("\n") == 1
  assert "Traceback" not in output


@pytest.mark.parametrize(
  "text", ["raise SystemExit(3)", "def (:", "1 / 0", "import no.such"]
)
def test_a_module_that_fails_is_named(text, tmp_path, capsys, monkeypatch):
  (tmp_path / "failing_gyms.py").write_text(text)
  monkeypatch.syspath_prepend(str(tmp_path))
  arguments = ["desktop", "--port", "0", "--import", "failing_gyms"]
  assert command.main(arguments) == 2
  assert "error: --import=failing_gyms: " in capsys.readouterr().err


def test_the_command_serves_what_a_file_lists(tmp_path):
  listed = tmp_path / "gyms.yaml"
  listed.write_text(
    "- {gym: desktop, gym_id: big, settings: {width: 256, height: 192},"
    " families: [open-icon], train_tasks: 1, eval_tasks: 1}\n"
    "- {gym: gymnasium, families: [FrozenLake-v1], train_tasks: 1}\n"
  )
  process = subprocess.Popen(
      [sys.executable, "-m", "tunix_multi_turn", "environments.gym_server",
       str(listed), "--port", "0"],
      cwd=pathlib.Path(__file__).parents[3],
      stdout=subprocess.PIPE, text=True, env={**os.environ},
  )  # fmt: skip
  try:
    url = process.stdout.readline().split()[-1]
    gyms = httpx.get(url + "/api/v1/gyms", timeout=30).json()["gyms"]
    assert [g["gym_id"] for g in gyms] == ["big", "gymnasium"]
    for task, size in (
      ("big/tasks/001", (256, 192)),
      ("gymnasium/tasks/001", None),
    ):
      created = httpx.post(f"{url}/api/v1/{task}", timeout=30).json()
      assert created["status"] == "running"
      if size:
        assert tuple(created["screen"].values()) == size
  finally:
    process.terminate()
    assert process.wait(20) in (0, -15)
    process.stdout.close()


# --- misbehaving gyms ---------------------------------------------------------


@contextlib.contextmanager
def serving_naughty(lease):
  families = (
      "ok", "fail-start", "hang-start", "slow-start", "fail-step",
      "hang-step", "garbage-step", "stubborn-step", "nan-score", "fail-close",
      "tree-step",
  )  # fmt: skip
  Naughty.open_now = Naughty.closed = Naughty.starts = 0
  Naughty.closed_while_busy = 0
  with gym_servers.serving(
    gym_servers.naughty(*families),
    gym_servers.desktop(),
    start=3.0,
    step=2.0,
    evaluate=2.0,
    close=1.0,
    lease=lease,
  ) as server:
    yield server


@pytest.fixture(name="naughty")
def _naughty():
  with serving_naughty(lease=30.0) as server:
    yield server


@pytest.mark.parametrize(
  "family, at, status, code",
  [
    ("fail-start", "create", 502, "gym_error"),
    ("hang-start", "create", 504, "deadline"),
    ("fail-step", "step", 502, "gym_error"),
    ("hang-step", "step", 504, "deadline"),
    ("garbage-step", "step", 502, "gym_error"),
    ("tree-step", "step", 502, "gym_error"),
    ("stubborn-step", "step", 504, "deadline"),
    ("nan-score", "evaluate", 502, "gym_error"),
  ],
)
async def test_a_gym_that_fails_ends_its_execution_and_no_other(
  naughty, family, at, status, code
):
  url, app = naughty
  async with httpx.AsyncClient(base_url=url + "/api/v1", timeout=30) as http:
    other = (await http.post("/desktop/tasks/001")).json()["execution_id"]
    reply = await http.post(f"/naughty/tasks/{family}-train-0")
    if at != "create":
      assert reply.status_code == 200
      where = f"/naughty/executions/{reply.json()['execution_id']}"
      body = {"action": {"kind": "wait"}}
      reply = await http.post(f"{where}/{at}", json=body)
    assert (reply.status_code, reply.json()["code"]) == (status, code)
    if at != "create":
      again = await http.post(f"{where}/{at}", json=body)
      assert (again.status_code, again.json()["code"]) == (410, code)
      assert (await http.get(where)).json()["status"] == "failed"
    # A thread that is stuck comes back, and its gym is closed then.
    await gym_servers.until(lambda: app.store.open == 1)
    await gym_servers.until(lambda: Naughty.open_now == 0)
    assert Naughty.closed_while_busy == 0
    stepped = await http.post(
      f"/desktop/executions/{other}/step", json={"action": {"kind": "wait"}}
    )
    assert stepped.status_code == 200


async def test_terminate_does_not_wait_for_a_call_that_hangs(naughty):
  url, app = naughty
  async with httpx.AsyncClient(
    base_url=url + "/api/v1/naughty", timeout=30
  ) as http:
    created = (await http.post("/tasks/slow-start-train-0")).json()
    at = f"/executions/{created['execution_id']}"
    ended = await http.post(at + "/terminate")
    assert ended.json()["status"] == "terminated"
    # One that is still starting, known by its key only.
    starting = asyncio.ensure_future(
      http.post("/tasks/hang-start-train-0", headers={"idempotency-key": "k"})
    )
    await gym_servers.until(lambda: app.store.open == 1)
    assert (await http.post("/executions/key:k/terminate")).status_code == 200
    reply = await starting
    assert (reply.status_code, reply.json()["code"]) == (410, "terminated")
    await gym_servers.until(lambda: app.store.open == 0)
  assert Naughty.open_now == 0


async def test_a_gym_that_will_not_close_gives_its_place_back(naughty):
  url, app = naughty
  async with httpx.AsyncClient(
    base_url=url + "/api/v1/naughty", timeout=30
  ) as http:
    created = (await http.post("/tasks/fail-close-train-0")).json()
    await http.post(f"/executions/{created['execution_id']}/terminate")
    assert app.store.open == 0


async def test_executions_of_a_client_that_vanished_are_closed():
  with serving_naughty(lease=2.0) as (url, app):
    async with httpx.AsyncClient(base_url=url + "/api/v1", timeout=30) as http:
      for _ in range(5):
        await http.post("/naughty/tasks/ok-train-0")
      renewed = (await http.post("/desktop/tasks/001")).json()["execution_id"]
      assert app.store.open == 6
      began = time.monotonic()
      while app.store.open > 1:
        assert time.monotonic() - began < 20
        await http.post(f"/desktop/executions/{renewed}/heartbeat")
        await asyncio.sleep(0.1)
      assert Naughty.open_now == 0 and Naughty.closed == 5
      metrics = (await http.get("/metrics".join([url, ""]))).text
      assert 'gym_executions_ended_total{code="lease_expired"} 5.0' in metrics
      assert "gym_executions_open 1" in metrics
      alive = await http.get(f"/desktop/executions/{renewed}")
      assert alive.json()["status"] == "running"


async def test_a_full_server_says_when_to_come_again():
  with gym_servers.serving(capacity=3) as (url, app):
    async with httpx.AsyncClient(
      base_url=url + "/api/v1/desktop", timeout=30
    ) as http:
      replies = await asyncio.gather(
        *(http.post("/tasks/001") for _ in range(8))
      )
      assert sorted(r.status_code for r in replies) == [200] * 3 + [429] * 5
      full = next(r for r in replies if r.status_code == 429)
      assert int(full.headers["retry-after"]) >= 1
      assert full.json()["code"] == "no_capacity"
      created = next(r for r in replies if r.status_code == 200).json()
      await http.post(f"/executions/{created['execution_id']}/terminate")
      assert (await http.post("/tasks/001")).status_code == 200
      assert app.store.open == 3


async def test_parallel_creates_under_one_key_all_return_one_execution(naughty):
  url, app = naughty
  async with httpx.AsyncClient(
    base_url=url + "/api/v1/naughty", timeout=30
  ) as http:
    replies = await asyncio.gather(
      *(
        http.post(
          "/tasks/slow-start-train-0", headers={"idempotency-key": "one"}
        )
        for _ in range(16)
      )
    )
  assert len({r.json()["execution_id"] for r in replies}) == 1
  assert sum(not r.json()["replayed"] for r in replies) == 1
  assert Naughty.starts == 1 and app.store.open == 1


async def test_a_key_outlives_an_earlier_create_that_failed():
  limits = executions.ExecutionLimits(remembered=1)
  store = store_lib.ExecutionStore(limits)

  class Still:
    def start(self, task):
      return base.Observation(screenshot=np.zeros((4, 4, 3), np.uint8))

    def close(self):
      pass

  def fails():
    raise OSError("no display")

  def create(make_gym, key=""):
    task = base.Task("t", "t")
    return store.create("gym", task, {}, make_gym, key=key)

  with pytest.raises(applications.ServiceError, match="no display"):
    await create(fails, "k")
  first, _ = await create(Still, "k")
  other, _ = await create(Still)
  await store.terminate(other)
  while store.open > 1:
    await asyncio.sleep(0.01)
  # Only the newest ended execution is remembered: not the one that failed.
  assert await create(Still, "k") == (first, True)
  await store.close()


def test_a_server_that_ends_closes_what_it_holds():
  Naughty.open_now = 0
  with gym_servers.serving(gym_servers.naughty("ok")) as (url, app):
    for _ in range(3):
      httpx.post(url + "/api/v1/naughty/tasks/ok-train-0")
    assert Naughty.open_now == 3
  assert Naughty.open_now == 0 and app.store.open == 0


# --- states -------------------------------------------------------------------


def test_states_have_no_way_back():
  ends = {s for s, then in executions.TRANSITIONS.items() if not then}
  assert {s.value for s in ends} == {"terminated", "failed", "expired"}
  assert all(
    executions.State.CREATING not in then
    for then in executions.TRANSITIONS.values()
  )


@pytest.mark.parametrize(
  "name", [f.name for f in dataclasses.fields(executions.ExecutionLimits)]
)
def test_limits_that_cannot_be_are_refused(name):
  with pytest.raises(ValueError, match=name):
    executions.ExecutionLimits(**{name: 0})


# --- fuzzing ------------------------------------------------------------------

JSON = st.recursive(
  st.none()
  | st.booleans()
  | st.integers()
  | st.text(max_size=20)
  | st.floats(allow_nan=False, allow_infinity=False),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=8), inner, max_size=3)
  ),
  max_leaves=8,
)
FIELD = st.sampled_from([
    "kind", "x", "y", "x2", "y2", "dx", "text", "keys", "duration", "button",
    "count", "success", "name", "args",
])  # fmt: skip
ACTION = st.one_of(
  JSON,
  st.fixed_dictionaries(
    {"kind": st.sampled_from([k.value for k in wire.Kind])},
    optional={
      "x": st.floats(-1e6, 1e6),
      "y": st.floats(-1e6, 1e6),
      "x2": st.floats(-1e6, 1e6),
      "y2": st.floats(-1e6, 1e6),
      "text": st.text(max_size=30),
      "dy": st.floats(-1e6, 1e6),
      "keys": st.lists(st.text(max_size=5), max_size=3),
      "count": st.integers(0, 4),
      "duration": st.floats(0, 10),
    },
  ),
  st.dictionaries(FIELD, JSON, max_size=5),
)


@hypothesis.settings(
  max_examples=150,
  deadline=None,
  suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(
  action=ACTION, step=st.none() | JSON, options=JSON, evaluation=JSON
)
def test_no_request_makes_the_server_fail(
  server, action, step, options, evaluation
):
  url, app = server
  with httpx.Client(base_url=url + "/api/v1/desktop", timeout=30) as http:
    response = http.post("/tasks/001", json={"options": options})
    assert response.status_code in (200, 422), response.text
    if response.status_code == 200:
      at = f"/executions/{response.json()['execution_id']}"
    else:
      at = f"/executions/{create(http)['execution_id']}"
    for path, body in (
      ("/step", {"action": action, "step": step}),
      ("/evaluate", evaluation),
      ("/evaluate", {"answer_text": evaluation, "facts": options}),
    ):
      reply = http.post(at + path, json=body)
      assert reply.status_code < 500, (path, body, reply.text)
      if reply.status_code >= 400:
        assert set(reply.json()) == {"detail", "code"}
    http.post(at + "/terminate")
  assert app.store.open == 0


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
  pixels=st.tuples(st.integers(1, 40), st.integers(1, 40)).flatmap(
    lambda size: st.binary(
      min_size=size[0] * size[1] * 3, max_size=size[0] * size[1] * 3
    ).map(lambda b: np.frombuffer(b, np.uint8).reshape(*size, 3))
  )
)
def test_screenshots_arrive_as_they_left(pixels):
  data = json.loads(json.dumps(wire.screenshot_to_json(pixels)))
  np.testing.assert_array_equal(wire.screenshot_from_json(data), pixels)
  uri = (
    "data:image/png;base64," + base64.b64encode(wire.to_png(pixels)).decode()
  )
  np.testing.assert_array_equal(wire.screenshot_from_json(uri), pixels)


class OddGym(gym_servers.NaughtyGym):
  """Says what a page or a program may say, and UTF-8 or JSON cannot."""

  ODD = "half a pair: \ud83d"

  async def start(self, task):
    self.family = task.family
    return self._seen()

  def act(self, action):
    if self.family == "odd-error":
      raise ValueError(self.ODD)
    return self._seen()

  async def evaluate(self):
    deep = {1.5: math.nan, "text": self.ODD, "array": np.zeros(2)}
    for _ in range(5000):
      deep = [deep]
    return base.Evaluation(0.5, False, {"deep": deep, self.ODD: {2**70}})

  async def close(self):
    pass

  def _seen(self):
    return base.Observation(
      np.zeros((8, 8, 3), np.uint8), instruction=self.ODD, text=self.ODD
    )


def test_what_a_gym_says_can_be_answered(request):
  """An odd text or detail fails no call, of this execution or another."""
  # A worker of the tests cannot send the log, which has the text, either.
  logging.disable()
  request.addfinalizer(lambda: logging.disable(logging.NOTSET))
  if "odd" not in gyms.names():
    gyms.register(
      "odd", gyms.GymSpec(make=OddGym, tasks=gym_servers.NaughtyTasks)
    )
  served = catalog.ServedGym(
    gym_id="odd",
    gym="odd",
    families=("odd", "odd-error"),
    train_tasks=1,
    eval_tasks=0,
  )
  with (
    gym_servers.serving(served) as (url, _),
    httpx.Client(base_url=f"{url}/api/v1/odd", verify=False) as http,
  ):
    ids = {}
    for family in ("odd", "odd-error"):
      answer = http.post(
        f"/tasks/naughty/{family}/0", json={"options": {"observe": True}}
      )
      assert answer.json()["observation"]["text"] == "half a pair: ?"
      ids[family] = answer.json()["execution_id"]
    wait = {"action": {"kind": "wait"}, "step": 1}
    for family, status in (("odd", 200), ("odd-error", 502)):
      answer = http.post(f"/executions/{ids[family]}/step", json=wait)
      assert answer.status_code == status
    verdict = http.post(f"/executions/{ids['odd']}/evaluate", json={})
    details = verdict.json()["result"]["details"]
    assert details["half a pair: ?"] == [2**70]
    assert json.dumps(details["deep"]).count("[") == 99
    over = http.post(f"/executions/{ids['odd-error']}/evaluate", json={})
    assert over.status_code == 410 and over.json()["code"] == "gym_error"
    assert "half a pair: ?" in over.json()["detail"]
    for execution in ids.values():
      assert http.get(f"/executions/{execution}").status_code == 200
    assert http.get("/executions").status_code == 200


def test_the_screens_of_all_executions_are_bounded_together():
  spec = gym_servers.desktop(client_settings=("width", "height"))
  with (
    gym_servers.serving(spec, max_megapixels=2) as (url, _),
    httpx.Client(base_url=url + "/api/v1/desktop", timeout=30) as client,
  ):

    def asked(width, height):
      gym = {"width": width, "height": height}
      return client.post(
        "/tasks/click-button-train-0", json={"options": {"gym": gym}}
      )

    for size, fault in (
      ((8192, 8192), "a screen has at most 32000000"),
      ((2000, 2000), "all executions have max_megapixels=2"),
      ((10**6, 96), "options.gym.width=1000000 must be in [1, 8192]"),
    ):
      refused = asked(*size)
      assert refused.status_code == 422 and fault in refused.text
    first = asked(1280, 1000)
    assert first.status_code == 200
    full = asked(1280, 1000)
    assert full.status_code == 429 and full.json()["code"] == "no_capacity"
    assert full.headers["retry-after"] and "max_megapixels=2" in full.text
    one = first.json()["execution_id"]
    client.post(f"/executions/{one}/terminate")
    assert asked(1280, 1000).status_code == 200


def test_a_client_may_choose_no_number_without_bounds(request):
  def unbounded(stock: int = 1):
    del stock
    return Naughty()

  spec = gyms.GymSpec(make=unbounded, tasks=desktop.DesktopTasks)
  gyms.register("unbounded", spec)
  request.addfinalizer(lambda: gyms.unregister("unbounded"))
  with pytest.raises(ValueError, match="client_settings='stock' is a number"):
    catalog.Catalog(
      catalog.ServedGym(gym_id="x", gym="unbounded", client_settings=("stock",))
    )
