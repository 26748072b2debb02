"""The run service: its protocol, over gyms of its own and a gym server's."""

import asyncio
import base64
import json
import pathlib
import subprocess
import sys
import urllib.parse

from agent_services.run_service import __main__ as command
from agent_services.run_service import app as app_lib
from agent_services.runs import client as client_lib
from cua_gyms.genv import execution
from cua_gyms.genv import genv_client
import gym_servers
import httpx
import pytest
import run_services
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.environments.gyms import gym_registry as gyms

DESKTOP = gyms.get("desktop").make_tasks((), {})
TERMINATE = run_services.call(action="terminate", status="success")
MOVE = run_services.call(action="mouse_move", coordinate=[500, 500])


def says(*texts, **fields):
  """A model server's answers: the texts in turn, the last one for ever."""
  count = 0

  def answer(method, path, body):
    nonlocal count
    if path.endswith("/models"):
      return 200, {"data": [{"id": "tiny"}]}
    assert method == "POST" and path.endswith("/chat/completions"), path
    text = texts[min(count, len(texts) - 1)]
    count += 1
    return 200, run_services.completion(text, **fields)

  return answer


def body(model_url, **changes):
  task = DESKTOP.train_task("click-button", 0, 0)
  return {
    "task": "Click the button.",
    "agent": "tool",
    "maxSteps": 3,
    "model": {"baseUrl": model_url, "name": "m", "provider": "openai"},
    "env": {
      "type": "gym",
      "gym": "desktop",
      "task": task.to_json(),
      "width": 128,
      "height": 96,
    },
    **changes,
  }


async def played(url, request, seconds=30.0, **options):
  """(status, reason, events) of a run."""
  runs = client_lib.RunServiceClient(url, poll_s=0.02, **options)
  try:
    run_id = await runs.start(request)
    events = [e async for e in runs.follow(run_id, seconds)]
    status, reason = await runs.status(run_id)
    return status, reason, events
  finally:
    await runs.aclose()


def kinds(events):
  return [e["type"] for e in events]


async def test_a_run_s_events_are_in_order_and_hold_the_whole_reply():
  reply = run_services.completion(MOVE) | {"extra": {"nested": [1, None]}}
  replies = [reply, run_services.completion(TERMINATE)]
  answer = lambda *_: (200, replies.pop(0))
  with (
    run_services.scripted(answer) as (model, server),
    run_services.serving() as (url, _),
  ):
    status, reason, events = await played(url, body(model))
    assert (status, reason) == ("completed", "finished")
    assert kinds(events) == [
        "step_start", "model_call", "model_output", "action_executed",
        "step_end",
        "step_start", "model_call", "model_output", "action_executed",
        "step_end", "run_end",
    ]  # fmt: skip
    assert events[2]["modelOutput"] == reply
    assert [e["step"] for e in events] == [1] * 5 + [2] * 6
    times = [e["tsMs"] for e in events]
    assert times == sorted(set(times))
    executed = events[3]
    assert executed["action"]["name"] == "move"
    assert executed["action"]["args"]["point"] == {"x": 64.0, "y": 48.0}
    names = [s["name"] for s in executed["action"]["obs"]["screenshots"]]
    assert names == ["screenshot_before", "screenshot_after"]
    assert events[-1]["ok"] and "evaluation" in events[-1]
    first, second = (json.loads(r[-1]) for r in server.requests)
    assert first["logprobs"] and first["return_token_ids"]
    assert "top_logprobs" not in first
    assert second["messages"][: len(first["messages"])] == first["messages"]


@pytest.mark.parametrize("form", ["url", "base64"])
async def test_log_probs_are_asked_for_by_setting_and_change_no_event(form):
  events_by_setting = {}
  for asked_for in (True, False):
    with (
      run_services.scripted(says(MOVE, TERMINATE)) as (model, server),
      run_services.serving() as (url, _),
    ):
      request = body(model, images=form)
      request["model"]["logprobs"] = asked_for
      request["model"]["topLogprobs"] = 1
      _, _, events = await played(url, request)
      events_by_setting[asked_for] = kinds(events)
      sent = json.loads(server.requests[0][-1])
      assert ("logprobs" in sent) == ("top_logprobs" in sent) == asked_for
  assert events_by_setting[True] == events_by_setting[False]


@pytest.mark.parametrize(
  "agent, space", [("qwen3-vl", "pc"), ("mai-ui", "mobile")]
)
async def test_each_agent_asks_for_log_probs(agent, space):
  with (
    run_services.scripted(says("no action at all")) as (model, server),
    run_services.serving() as (url, _),
  ):
    request = body(model, agent=agent, standardActionSpace=space, maxSteps=1)
    request["model"] |= {"logprobs": True, "topLogprobs": 1}
    await played(url, request)
  sent = json.loads(server.requests[0][-1])
  assert sent["logprobs"] is True and sent["top_logprobs"] == 1


async def test_a_server_without_log_probs_still_works():
  with (
    run_services.scripted(
      says(TERMINATE, ids=None, logprobs=None, prompt=None)
    ) as (model, _),
    run_services.serving() as (url, _),
  ):
    status, reason, _ = await played(url, body(model))
  assert (status, reason) == ("completed", "finished")


async def test_events_hold_addresses_of_screenshots_and_no_base64():
  with (
    run_services.scripted(says(MOVE, TERMINATE)) as (model, server),
    run_services.serving() as (url, app),
  ):
    request = body(model)
    request["model"]["images"] = "url"
    _, _, events = await played(url, request)
    assert "base64" not in json.dumps(events)
    sent = json.loads(server.requests[0][-1])
    (part,) = [
      p for p in sent["messages"][-1]["content"] if p["type"] == "image_url"
    ]
    address = part["image_url"]["url"]
    assert address.startswith(f"{url}/images/")
    async with httpx.AsyncClient() as http:
      answer = await http.get(address)
      assert answer.status_code == 200
      assert answer.headers["content-type"] == "image/png"
      assert images_lib.decode(answer.content).shape == (96, 128, 3)
      # Another content, another signature, or later: refused.
      name = urllib.parse.urlsplit(address).path.rpartition("/")[2]
      for wrong in (
        address.replace(name, "0" * 64),
        address[:-1] + ("0" if address[-1] != "0" else "1"),
        address.replace("expires=", "expires=9"),
        f"{url}/images/{name}",
      ):
        assert (await http.get(wrong)).status_code == 403, wrong
      app.urls._clock = lambda: 1e11
      late = await http.get(address)
      assert late.status_code == 403 and "expired" in late.json()["detail"]


async def test_events_with_base64_need_no_network_to_read():
  with (
    run_services.scripted(says(TERMINATE)) as (model, _),
    run_services.serving() as (url, _),
  ):
    _, _, events = await played(url, body(model, images="base64"))
  (call,) = [e for e in events if e["type"] == "model_call"]
  text = json.dumps(call)
  data = text.partition("data:image/png;base64,")[2].partition('"')[0]
  assert images_lib.decode(base64.b64decode(data)).shape == (96, 128, 3)


async def test_an_execution_of_a_gym_server_is_played_and_left_to_its_owner():
  with (
    gym_servers.serving() as (gym_url, gym_app),
    run_services.scripted(says(MOVE, TERMINATE)) as (model, _),
    run_services.serving() as (url, _),
  ):
    genv = genv_client.GenvClient(gym_url, "desktop")
    context = await execution.start_genv_execution("click-button-train-0", genv)
    status, _, events = await played(url, body(model, env=context.agent_env()))
    assert status == "completed"
    assert "evaluation" not in events[-1]
    reward, success, _ = await execution.evaluate_execution(context, genv)
    assert 0.0 <= reward <= 1.0 and success in (True, False)
    assert await execution.terminate_execution(context, genv)
    await genv.aclose()


async def test_the_other_ways_to_read_a_run():
  with (
    run_services.scripted(says(MOVE, TERMINATE)) as (model, _),
    run_services.serving() as (url, _),
  ):
    runs = client_lib.RunServiceClient(url, poll_s=0.02)
    run_id = await runs.start(body(model))
    events = [e async for e in runs.follow(run_id, 30.0)]
    steps = await runs.steps(run_id)
    assert [s["actions"][0]["name"] for s in steps] == ["move", "terminate"]
    assert steps[0]["messages"][-1]["callId"] == "__step_message_image__"
    assert await runs.step(run_id, 1) == steps[1]
    assert await runs.step(run_id, 2) is None
    trajectory = await runs.trajectory(run_id)
    assert [t["step"] for t in trajectory] == [0, 1]
    tokens = await runs.tokens(run_id)
    assert tokens[0]["token_ids"] == [5, 6]
    assert tokens[0]["logprobs"] == [-0.5, -0.25]
    # From inclusive, to exclusive; ISO-8601 or milliseconds.
    for first, last in (
      (events[2]["ts"], events[5]["ts"]),
      (events[2]["tsMs"], events[5]["tsMs"]),
    ):
      assert await runs.events(run_id, first, last) == events[2:5]
    assert await runs.events("nobody") == []
    with pytest.raises(client_lib.RunServiceError, match="unknown_run"):
      await runs.status("nobody")
    with pytest.raises(client_lib.RunServiceError, match="ISO-8601"):
      await runs.events(run_id, "yesterday")
    assert await client_lib.model_name(model, 5.0) == "tiny"
    await runs.aclose()


@pytest.mark.parametrize(
  "answer, reason",
  [
    (lambda *_: (500, {"error": "no"}), "the answer has status 500"),
    (lambda *_: (200, b"<html>"), "of status 200, cannot be used"),
    (lambda *_: (200, {"choices": []}), "it is no chat completion"),
    (lambda *_: asyncio.sleep(2, (200, {})), "timeout"),
  ],
  ids=["500", "html", "empty", "hang"],
)
async def test_a_model_server_that_fails_ends_the_run_with_a_reason(
  answer, reason
):
  with (
    run_services.scripted(answer) as (model, _),
    run_services.serving() as (url, app),
  ):
    status, why, events = await played(url, body(model, maxRunTimeSec=0.5))
    assert status == "failed" and reason in why, why
    assert kinds(events)[-2:] == ["error", "run_end"]
    assert not events[-1]["ok"]
    assert not app.playing


@pytest.mark.parametrize(
  "value, recorded",
  [
    ("NaN", False),
    ("-1e400", False),
    (r'"\ud800"', False),
    ("[" * 300 + "]" * 300, False),
    ("[" * 190 + "]" * 190, True),
    (r'"\u0000\u2028"', True),
    (str(2**64), True),
  ],
)
async def test_what_a_run_records_can_be_read(value, recorded):
  """An answer of the model that cannot be written again ends the run."""
  raw = json.dumps(run_services.completion(TERMINATE))
  raw = f'{raw[:-1]}, "mine": {value}}}'.encode()
  with (
    run_services.scripted(lambda *_: (200, raw)) as (model, _),
    run_services.serving() as (url, _),
  ):
    runs = client_lib.RunServiceClient(url, poll_s=0.02)
    run_id = await runs.start(body(model))
    events = [e async for e in runs.follow(run_id, 30.0)]
    status, reason = await runs.status(run_id)
    await runs.trajectory(run_id), await runs.steps(run_id)
    await runs.tokens(run_id)
    await runs.aclose()
  replies = [e["modelOutput"] for e in events if e["type"] == "model_output"]
  assert status == ("completed" if recorded else "failed"), reason
  if recorded:
    assert replies == [json.loads(raw)]
  else:
    assert not replies and "cannot be written again" in reason


async def test_a_prompt_that_does_not_fit_is_the_policy_s_outcome():
  error = {"error": {"code": "context_length_exceeded", "message": "x"}}
  with (
    run_services.scripted(lambda *_: (400, error)) as (model, _),
    run_services.serving() as (url, _),
  ):
    status, reason, _ = await played(url, body(model))
  assert (status, reason) == ("completed", "context_limit")


async def test_the_last_step_and_text_without_a_call_end_a_run():
  with run_services.serving() as (url, _):
    with run_services.scripted(says(MOVE)) as (model, _):
      status, reason, events = await played(url, body(model))
      assert (status, reason) == ("completed", "max_steps")
      assert kinds(events).count("step_end") == 3
    with run_services.scripted(says("I cannot.")) as (model, _):
      status, reason, _ = await played(url, body(model))
      assert (status, reason) == ("completed", "parse_error")


@pytest.mark.parametrize(
  "change, words",
  [
    ({"maxSteps": 0}, "maxSteps must be >= 1"),
    ({"agent": "gpt"}, "agent='gpt'"),
    ({"model": {"name": "m"}}, "model.baseUrl"),
    ({"surprise": 1}, "surprise"),
    ({"env": {"type": "moon"}}, "env.type='moon' must be one of genv, gym"),
    ({"env": {"type": "gym", "gym": "xdesktop"}}, "not played here"),
    ({"env": {"type": "genv"}}, "env.gymBaseUrl"),
    ({"agentConfig": {"parser": "os:system"}}, "agentConfig.parser"),
    ({"agentConfig": {"parser": "nonsense"}}, "agentConfig.parser"),
  ],
)
async def test_a_wrong_request_is_refused_by_its_field(change, words):
  with run_services.serving() as (url, app):
    async with httpx.AsyncClient() as http:
      answer = await http.post(
        f"{url}/runs", json=body("http://127.0.0.1:1/v1", **change)
      )
      assert answer.status_code == 422, answer.text
      assert words in answer.json()["detail"], answer.text
      assert not app.runs


async def test_runs_are_bounded_and_can_be_ended():
  with (
    run_services.scripted(lambda *_: asyncio.sleep(2, (200, {}))) as (model, _),
    run_services.serving(limits=app_lib.RunLimits(max_runs=1)) as (url, app),
  ):
    async with httpx.AsyncClient() as http:
      first = (await http.post(f"{url}/runs", json=body(model))).json()
      full = await http.post(f"{url}/runs", json=body(model))
      assert full.status_code == 429 and full.headers["retry-after"]
      ended = await http.post(f"{url}/runs/{first['runId']}/cancel")
      assert ended.json()["status"] == "failed"
      assert ended.json()["reason"] == "cancelled"
      assert not app.playing


async def test_strangers_are_refused():
  with run_services.serving(token="secret") as (url, _):
    async with httpx.AsyncClient() as http:
      assert (await http.get(f"{url}/runs/x")).status_code == 401
      headers = {"authorization": "Bearer secret"}
      reply = await http.get(f"{url}/runs/x", headers=headers)
      assert reply.status_code == 404
      page = {**headers, "origin": "http://evil.example"}
      assert (await http.get(f"{url}/runs/x", headers=page)).status_code == 403
  with run_services.serving() as (url, _):
    async with httpx.AsyncClient() as http:
      rebound = {"host": "evil.example"}
      answer = await http.get(f"{url}/runs/x", headers=rebound)
      assert answer.status_code == 403


@pytest.mark.parametrize(
  "argv, words",
  [
    (["--host", "0.0.0.0"], "needs a token"),
    (["--gyms", "moon"], "moon"),
    (["--max-runs", "0"], "max_runs"),
  ],
)
def test_the_command_refuses_what_cannot_be(argv, words, capsys, monkeypatch):
  monkeypatch.delenv(command.TOKEN_VARIABLE, raising=False)
  assert command.main([*argv, "--port", "0"]) == 2
  output = capsys.readouterr().err
  assert output.startswith("error: ") and words in output


async def test_a_gym_that_is_missing_or_breaks_ends_the_run_with_a_reason():
  with (
    run_services.scripted(says(MOVE)) as (model, _),
    run_services.serving() as (url, app),
    gym_servers.serving() as (gym_url, _),
  ):
    for env in (
        {"type": "genv", "gymBaseUrl": "http://127.0.0.1:1",
         "gymId": "desktop", "executionId": "x"},
        {"type": "genv", "gymBaseUrl": gym_url, "gymId": "desktop",
         "executionId": "nobody"},
    ):  # fmt: skip
      status, reason, events = await played(
        url, body(model, env=env, maxRunTimeSec=3.0)
      )
      assert status == "failed" and reason, reason
      assert kinds(events) == ["error", "run_end"]
    assert not app.playing


def test_the_service_needs_no_jax():
  """As the light launcher starts it."""
  program = (
    "import tunix_multi_turn; tunix_multi_turn.light()\n"
    "from agent_services.run_service import app\n"
    "app.App()\n"
    "import sys; assert 'jax' not in sys.modules\n"
  )
  process = subprocess.run(
    [sys.executable, "-c", program],
    cwd=pathlib.Path(__file__).resolve().parents[4],
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert process.returncode == 0, process.stderr
