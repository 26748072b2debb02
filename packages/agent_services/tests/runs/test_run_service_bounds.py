"""Bounds of one request to the run service, and of the text of a reason."""

import asyncio
import threading

from agent_services.run_service import app as app_lib
from agent_services.runs import client as client_lib
import httpx
import pytest
import run_services
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.environments.gyms import gym_registry as gyms

TASK = gyms.get("desktop").make_tasks((), {}).train_task("click-button", 0, 0)
KEY = "sk-the-key-of-the-model"


def body(model_url, width=128, height=96, **changes):
  return {
    "agent": "tool",
    "maxSteps": 2,
    "model": {"baseUrl": model_url, "name": "m", "apiKey": KEY},
    "env": {
      "type": "gym",
      "gym": "desktop",
      "task": TASK.to_json(),
      "width": width,
      "height": height,
    },
    **changes,
  }


def hangs():
  return run_services.scripted(lambda *_: asyncio.sleep(20, (200, {})))


@pytest.mark.parametrize(
  "change, words",
  [
    ({"width": 10**6, "height": 10**6}, "env.width must be <= 8192, got"),
    ({"width": 8192, "height": 8192}, "and a screen has at most 32000000"),
    ({"settings": {"width": 10**6}}, "env.settings.width=1000000 is not"),
    ({"settings": {"time_decay": 7}}, "env.settings.time_decay=7 must be"),
    ({"task": {"x": 2**64}}, "env.task: must hold whole numbers of 64"),
    ({"task": {"x": [[]] * 20_000}}, "must hold at most 10000 values"),
    ({"task": TASK.to_json() | {"params": 1e308}}, "params must be an obj"),
  ],
)
async def test_a_number_beyond_its_bound_is_refused_by_its_field(change, words):
  request = body("http://127.0.0.1:1")
  request["env"] |= change
  with run_services.serving(client_settings=("time_decay",)) as (url, _):
    async with httpx.AsyncClient() as http:
      answer = await http.post(f"{url}/runs", json=request)
  assert answer.status_code == 422 and words in answer.text, answer.text


@pytest.mark.parametrize("key", ["a\nSECRET", "SECRET\xe9", "SECRET" * 700, 7])
async def test_a_key_that_no_header_holds_is_refused_unquoted(key):
  request = body("http://127.0.0.1:1")
  request["model"]["apiKey"] = key
  with run_services.serving() as (url, app):
    async with httpx.AsyncClient() as http:
      answer = await http.post(f"{url}/runs", json=request)
      assert not app.runs
  assert answer.status_code == 422 and "SECRET" not in answer.text
  assert "model.apiKey: must be up to 4096 printable ASCII" in answer.text


async def test_the_screens_of_all_runs_are_bounded_together():
  limits = app_lib.RunLimits(max_megapixels=2)
  with hangs() as (model, _), run_services.serving(limits=limits) as (url, app):
    async with httpx.AsyncClient(timeout=30) as http:
      large = body(model, 1280, 1000)
      too_large = await http.post(f"{url}/runs", json=body(model, 2000, 2000))
      assert too_large.status_code == 422
      assert "max_megapixels=2" in too_large.text
      first = await http.post(f"{url}/runs", json=large)
      assert first.status_code == 200
      second = await http.post(f"{url}/runs", json=large)
      assert second.status_code == 429 and second.headers["retry-after"]
      assert "1280000 more exceed max_megapixels=2" in second.text
      # A small one still fits, and a large one once the first has ended.
      small = await http.post(f"{url}/runs", json=body(model))
      assert small.status_code == 200
      run = first.json()["runId"]
      await http.post(f"{url}/runs/{run}/cancel")
      again = await http.post(f"{url}/runs", json=large)
      assert again.status_code == 200
      assert app.playing == 2


async def test_the_records_of_all_runs_are_bounded_together():
  limits = app_lib.RunLimits(record_memory=1)
  move = run_services.call(action="mouse_move", coordinate=[500, 500])
  reply = run_services.completion(move) | {"extra": "x" * 700_000}
  with (
    run_services.scripted(lambda *_: (200, reply)) as (model, _),
    run_services.serving(limits=limits) as (url, app),
  ):
    runs = client_lib.RunServiceClient(url, poll_s=0.02)
    first = await runs.start(body(model, maxSteps=1))
    [_ async for _ in runs.follow(first, 30)]
    assert (await runs.status(first))[0] == "completed"
    # The first is forgotten for the second, whose second reply has no room.
    second = await runs.start(body(model))
    [_ async for _ in runs.follow(second, 30)]
    status, reason = await runs.status(second)
    assert status == "failed" and "record_memory=1 MiB" in reason
    assert first not in app.runs
    await runs.aclose()


async def test_health_is_answered_while_large_screens_are_drawn(monkeypatch):
  answered = threading.Event()
  began = threading.Semaphore(0)
  draw = desktop.DesktopGym.start_sync

  def draw_until_answered(self, task):
    began.release()
    assert answered.wait(30), "the screen was drawn on the event loop"
    return draw(self, task)

  monkeypatch.setattr(desktop.DesktopGym, "start_sync", draw_until_answered)
  with hangs() as (model, _), run_services.serving() as (url, app):
    async with httpx.AsyncClient(timeout=60) as http:
      for _ in range(3):
        answer = await http.post(f"{url}/runs", json=body(model, 1600, 1200))
        assert answer.status_code == 200
        assert await asyncio.to_thread(began.acquire, timeout=30)
      assert (await http.get(f"{url}/health")).json()["playing"] == 3
      answered.set()
      for run in app.runs.values():
        async with asyncio.timeout(60):
          while not any(e["type"] == "model_call" for e in run.events):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("status", [200, 400, 401, 500])
@pytest.mark.parametrize("as_json", [True, False])
async def test_a_server_that_echoes_the_key_puts_it_into_no_record(
  status, as_json, caplog
):
  error = {"code": "context_length_exceeded", "message": f"no {KEY}"}
  content = {"error": error} if as_json else f"you sent {KEY}".encode()
  with (
    run_services.scripted(lambda *_: (status, content)) as (model, server),
    run_services.serving() as (url, _),
  ):
    runs = client_lib.RunServiceClient(url, poll_s=0.02)
    run = await runs.start(body(model))
    events = [e async for e in runs.follow(run, 30)]
    ended, reason = await runs.status(run)
    await runs.aclose()
  assert server.requests[0][3]["authorization"] == f"Bearer {KEY}"
  if status == 200 and as_json:  # A reply is recorded whole.
    events = [e for e in events if e["type"] != "model_output"]
  assert KEY not in str(events) and KEY not in reason
  assert KEY not in caplog.text
  if ended == "failed":
    assert reason.startswith("ModelError: ")
    assert str(status) in reason or (status == 200 and as_json)
    assert f"run {run}: " in caplog.text
