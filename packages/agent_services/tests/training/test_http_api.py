"""docs/http_api.md is what the services serve, and their answers are so.

The page's routes, and the parameters and bodies of services with an OpenAPI
document, are compared with what the script makes; what it says by hand of
answers and of access with the services themselves.
"""

import pathlib
import re
import sys

import buffer_services
import gym_servers
import httpx
import pytest
import rollout_server
import run_services
from tunix.rl.multi_turn.environments.gyms import desktop

ROOT = pathlib.Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "scripts"))
import http_reference  # noqa: E402


def test_the_page_is_up_to_date():
  written = (ROOT / "docs" / "http_api.md").read_text("utf-8")
  assert written == http_reference.page(), "run: make docs"


def test_a_route_that_is_not_described_is_an_error():
  with pytest.raises(ValueError, match="describe .*'/new'.*take out .*'/old'"):
    http_reference.agree("x", {("GET", "/new")}, [("GET", "/old")])


def rows(section):
  """{(method, path): cells} of a section's first table."""
  page = (ROOT / "docs" / "http_api.md").read_text("utf-8")
  text = page.partition(f"## {section}\n")[2].partition("\n## ")[0]
  text = text.partition("\nObjects")[0]
  matches = re.findall(r"^\| `(\w+) (\S+)` \|(.*)\|$", text, re.M)
  return {
    (method, path): [cell.strip() for cell in remaining.split(" | ")]
    for method, path, remaining in matches
  }


def fields(cell):
  """The fields of an answer: those before the colon that explains one."""
  return set(re.findall(r"`(\w+)`", cell.partition(":")[0]))


def test_answers_of_the_buffer(tmp_path):
  table = rows("Rollout buffer")
  requests = {
    "/start_rollout": {"task_type": "external", "num_repeat_per_sample": 2},
    "/buffer/write": [
      buffer_services.item(f"e{i}", "t", float(i)) for i in range(2)
    ],
    "/buffer/known": {"uids": ["e0", "nothing"]},
    "/buffer/peek": None,
    "/get_rollout_data": {"lease_s": 60},
    "/buffer/stats": None,
    "/buffers": None,
    "/": None,
    "/health": None,
  }
  with buffer_services.Running(tmp_path) as running:
    for path, body in requests.items():
      method = "GET" if body is None else "POST"
      answer = running.client.request(method, path, json=body)
      assert answer.status_code == 200, (path, answer.text)
      result = answer.json()
      assert set(result) == fields(table[method, path][2]), path
      if path == "/get_rollout_data":
        assert set(result["data"]) == {"data", "meta_info", "lease", "groups"}
        lease = {"lease": result["data"]["lease"]}
    for path in ("/buffer/release", "/buffer/read", "/buffer/ack"):
      body = {"lease_s": 60} if path == "/buffer/read" else lease
      result = running.client.post(path, json=body).json()
      assert set(result) == fields(table["POST", path][2]), path
      if path == "/buffer/read":
        lease = {"lease": result["data"]["lease"]}
    result = running.client.post("/stop_rollout", json={}).json()
    assert set(result) == fields(table["POST", "/stop_rollout"][2])


def test_answers_of_the_run_service():
  table = rows("Run service")
  task = desktop.DesktopTasks(("click-button",)).train_task("click-button", 0)
  model = {"baseUrl": "http://127.0.0.1:9/v1", "name": "m"}
  body = {"model": model, "task": "Go.", "maxRunTimeSec": 20.0, "env": {
      "type": "gym", "gym": "desktop", "task": task.to_json(),
      "width": 128, "height": 96,
  }}  # fmt: skip
  with (
    run_services.serving() as (url, _),
    httpx.Client(base_url=url, timeout=30, trust_env=False) as client,
  ):
    started = client.post("/runs", json=body)
    assert started.status_code == 200, started.text
    run = started.json()["runId"]
    for (method, path), cells in table.items():
      if path in ("/images/{name}", "/runs/{run}/steps/{index}"):
        continue
      answer = client.request(
        method,
        path.replace("{run}", run),
        json=body if path == "/runs" else None,
      )
      assert answer.status_code == 200, (path, answer.text)
      assert set(answer.json()) == fields(cells[2]), path
    wrong = client.get("/runs/none")
    assert set(wrong.json()) == {"detail", "code"}


def test_answers_of_the_policy_servers_sessions():
  table = rows("Policy server")
  with rollout_server.Running() as server:
    session = rollout_server.start(server)
    assert set(session) == fields(table["POST", "/rl/start_session"][-1])
    client = server.client(key=session["api_key"])
    rollout_server.ask(client, [rollout_server.screenshot()])
    path = "/sessions/{session}/rl/"
    for name, body in (("set_reward", {"reward": 1.0}), ("end_session", {})):
      place = path.replace("{session}", session["session_id"]) + name
      answer = server.post(place, body)
      assert answer.status_code == 200, answer.text
      assert set(answer.json()) == fields(table["POST", path + name][-1])
    for place, body in (
      ("/grant_capacity", {}),
      ("/export_trajectories", {"session_id": session["session_id"]}),
    ):
      answer = server.post(place, body)
      assert set(answer.json()) == fields(table["POST", place][-1]), place


def test_health_and_little_else_needs_no_token(tmp_path):
  with (
    gym_servers.serving(token="secret") as (gym, _),
    run_services.serving(token="secret") as (runs, _),
    buffer_services.Running(tmp_path, token="secret") as buffer,
  ):
    for url, closed in (
      (gym, "/api/v1/gyms"),
      (runs, "/runs/x"),
      (buffer.url, "/buffers"),
    ):
      with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
        assert client.get("/health").status_code == 200, url
        assert client.get(closed).status_code == 401, url
        names = {"authorization": "Bearer secret"}
        assert client.get(closed, headers=names).status_code in (200, 404)
    assert httpx.get(f"{buffer.url}/", trust_env=False).status_code == 200
