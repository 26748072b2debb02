"""OpenEnv's protocol, both ends of it, over real sockets."""

import asyncio
import contextlib
import json

from cua_gyms.openenv import actions as openenv_actions
from cua_gyms.openenv import gym as openenv
from cua_gyms.openenv import tasks as openenv_tasks
import gym_servers
import httpx
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import desktop
from websockets.asyncio import client as ws_client
from websockets.asyncio import server as ws_server

GuiAction = gui_action.GuiAction
WAIT = GuiAction("wait")


@pytest.fixture(scope="module", name="server")
def _server():
  with gym_servers.serving(lease=60.0, capacity=64) as server:
    yield server


def gym(url, gym_id="desktop", **settings):
  return openenv.OpenEnvGym(f"{url}/openenv/{gym_id}", **settings)


def task(name="enter-text", number=0, /, **reset):
  reset = reset or {"task": f"{name}@train:{number}:0"}
  return base.Task("t", name, params={"openenv": reset})


@contextlib.asynccontextmanager
async def answering(*answers):
  """A server that gives these answers, and then closes; and what it got."""
  got, queue = [], list(answers)

  async def serve(socket):
    async for text in socket:
      got.append(json.loads(text))
      if not queue:
        return
      answer = queue.pop(0)
      if answer is None:
        await asyncio.sleep(1.5)
      await socket.send(
        answer if isinstance(answer, str) else json.dumps(answer)
      )

  async with ws_server.serve(serve, "127.0.0.1", 0) as served:
    port = served.sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}", got


def seen(reward=None, ended=False, **observation):
  observation = observation or {"screenshot": [[[1, 2, 3]] * 4] * 2}
  data = {"observation": observation, "reward": reward, "done": ended}
  return {"type": "observation", "data": data}


# --- episodes -----------------------------------------------------------------


async def test_a_task_is_played_in_a_session_of_its_own(server):
  url, app = server
  own, tasks = desktop.DesktopGym(), desktop.DesktopTasks()
  expected = own.start_sync(tasks.train_task("enter-text", 0, 0))
  far = gym(url)
  shown = await far.start(task())
  assert (shown.screenshot == expected.screenshot).all()
  assert shown.instruction == expected.instruction
  assert app.store.open == 1 and app.openenv.sessions == 1
  while (action := desktop.oracle_action(own)) is not None:
    expected, shown = own.act_sync(action), await far.act(action)
    assert (shown.screenshot == expected.screenshot).all()
    assert shown.done == expected.done
  verdict = await far.evaluate()
  assert verdict.success and verdict.score == 1.0
  assert verdict.details == dict(own.evaluate_sync().details)
  await far.close()
  await far.close()
  await gym_servers.until(lambda: not app.store.open)
  assert app.openenv.sessions == 0


async def test_an_episode_that_is_cut_is_judged_as_it_stands(server):
  url, _ = server
  far = gym(url)
  await far.start(task())
  await far.act(WAIT)
  verdict = await far.evaluate()
  # The gym was not told: it counts the one turn that the policy took.
  assert not verdict.success and verdict.details["turns"] == 1
  with pytest.raises(openenv.OpenEnvError, match="reset begins another"):
    await far.act(WAIT)
  await far.close()


async def test_a_client_that_vanishes_leaves_no_execution(server):
  url, app = server
  where = f"ws{url[4:]}/openenv/desktop/ws"
  socket = await ws_client.connect(where, proxy=None)
  await socket.send('{"type": "reset"}')
  await socket.recv()
  assert app.store.open == 1
  socket.transport.abort()
  await gym_servers.until(lambda: not app.store.open)


async def test_who_goes_in_the_middle_of_a_start_or_a_step_leaves_nothing():
  with gym_servers.serving(gym_servers.naughty("hang-start", "hang-step")) as (
    url,
    app,
  ):
    for family in ("hang-start", "hang-step"):
      far = gym(url, "naughty", timeouts={"start": 0.5, "step": 0.5})
      with pytest.raises(openenv.OpenEnvUnavailableError, match="answer"):
        await far.start(task(family=family, seed=0))
        await far.act(WAIT)
      await far.close()
      await gym_servers.until(lambda: not app.store.open)
      assert app.openenv.sessions == 0


async def test_a_gym_that_fails_fails_its_episode_and_the_session_goes_on():
  with gym_servers.serving(
    gym_servers.naughty("fail-step", "fail-start", "fine")
  ) as (url, app):
    far = gym(url, "naughty")
    await far.start(task(family="fail-step", seed=0))
    with pytest.raises(openenv.OpenEnvError, match="the window is gone") as why:
      await far.act(WAIT)
    assert (why.value.code, why.value.cause) == ("EXECUTION_ERROR", "gym_error")
    with pytest.raises(openenv.OpenEnvError, match="no screen"):
      await far.start(task(family="fail-start", seed=0))
    await far.start(task(family="fine", seed=0))
    assert (await far.evaluate()).score == 0.25
    await far.close()
    await gym_servers.until(lambda: not app.store.open)


async def test_an_episode_that_nobody_plays_on_is_closed_and_says_so(server):
  url, app = server
  far = gym(url, reset={"lease_s": 0.2})
  await far.start(task())
  await gym_servers.until(lambda: not app.store.open)
  with pytest.raises(openenv.OpenEnvSessionLostError) as caught:
    await far.act(WAIT)
  assert caught.value.cause == "lease_expired"
  await far.close()


async def test_a_full_server_is_waited_for():
  with gym_servers.serving(capacity=1, retry_after=0.1) as (url, app):
    first, second = gym(url), gym(url)
    await first.start(task())
    refused = gym(url, timeouts={"start": 1.5})
    with pytest.raises(openenv.OpenEnvCapacityError, match="are taken"):
      await refused.start(task())
    waiting = asyncio.ensure_future(second.start(task()))
    await asyncio.sleep(0.2)
    await first.close()
    assert (await waiting).screenshot.any()
    await second.close()
    assert app.openenv.sessions <= 1


async def test_sessions_run_beside_each_other(server):
  url, app = server
  gyms = [gym(url) for _ in range(32)]
  shown = await asyncio.gather(
    *(g.start(task("click-button", i)) for i, g in enumerate(gyms))
  )
  assert app.store.open == 32
  await asyncio.gather(*(g.act(WAIT) for g in gyms))
  own = desktop.DesktopGym()
  for i in (0, 13, 31):
    expected = own.start_sync(
      desktop.DesktopTasks().train_task("click-button", i, 0)
    )
    assert (shown[i].screenshot == expected.screenshot).all()
  await asyncio.gather(*(g.close() for g in gyms))
  await gym_servers.until(lambda: not app.store.open)


async def test_the_token_is_asked_for_and_web_pages_are_refused(tmp_path):
  file = tmp_path / "token"
  file.write_text("s3cret")
  with gym_servers.serving(token="s3cret") as (url, _):
    far = gym(url, token_file=str(file))
    await far.start(task())
    await far.close()
    with pytest.raises(openenv.OpenEnvRequestError, match="401.*token"):
      await gym(url).start(task())
    with pytest.raises(Exception, match="403"):
      await ws_client.connect(
        f"ws{url[4:]}/openenv/desktop/ws",
        proxy=None,
        origin="http://evil.example",
      )
    page = httpx.post(
      url + "/api/v1/desktop/tasks/001",
      headers={"origin": "http://evil.example"},
    )
    assert (page.status_code, page.json()["code"]) == (403, "cross_site")
    assert httpx.get(url + "/openenv/desktop/health").json() == {
      "status": "healthy"
    }
    assert httpx.get(url + "/openenv/desktop/schema").status_code == 401


# --- what a reset and a step may hold -----------------------------------------


@pytest.mark.parametrize(
  "reset, words",
  [
    ({"tsk": "x"}, "takes no 'tsk'"),
    ({"task": "nothing"}, "nothing"),
    ({"task": 3}, "task must be a string"),
    ({"task": "001", "seed": 1}, "task and seed both choose"),
    ({"index": 0}, "split=None"),
    ({"split": "train", "index": 10**6}, "index must be"),
    ({"split": "test"}, "split='test'"),
    ({"seed": -1}, "seed must be"),
    ({"seed": True}, "seed must be"),
    ({"family": "cats"}, "family='cats'"),
    ({"episode_id": ""}, "episode_id"),
    ({"seed": 1, "lease_s": "x"}, "lease_s"),
    ({"seed": 1, "gym": {"width": 99}}, "options.gym.width"),
  ],
)
async def test_what_is_no_reset_is_refused_by_its_field(server, reset, words):
  url, _ = server
  far = gym(url)
  with pytest.raises(openenv.OpenEnvRequestError, match=words):
    await far.start(task(**reset))
  await far.close()


async def test_a_task_is_chosen_by_seed_or_place_or_name(server):
  url, app = server
  far = gym(url)
  by_name = await far.start(task("click-button", 5))
  by_seed = await far.start(task(family="click-button", seed=5))
  assert (by_name.screenshot == by_seed.screenshot).all()
  entry = [
    e
    for e in app._catalogs["desktop"].entries  # pylint: disable=protected-access
    if e.split == "eval"
  ][1]
  await far.start(task(split="eval", index=1, episode_id="mine"))
  state = await far._session.ask("state", None, 10)  # pylint: disable=protected-access
  assert state["task_id"] == entry.task.task_id
  assert (state["episode_id"], state["step_count"]) == ("mine", 0)
  assert state["done"] is False and state["evaluation"] is None
  await far.start(base.Task("t", "click-button", seed=3))
  await far.close()


_JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=6), inner, max_size=3)
  ),
  max_leaves=6,
)
_WORDS = ["reset", "step", "state", "mcp", 3, None]
_KEYS = ["kind", "x", "y", "text", "seed", "task", "index", "gym", "metadata"]


async def test_no_message_makes_the_server_fail(server):
  """Each is answered, by what OpenEnv's clients know."""
  url, _ = server
  messages = []

  @hypothesis.settings(
    max_examples=60, derandomize=True, database=None, deadline=None
  )
  @hypothesis.given(
    st.one_of(
      st.text(max_size=20),
      st.fixed_dictionaries(
        {
          "type": st.sampled_from(_WORDS),
          "data": st.dictionaries(st.sampled_from(_KEYS), _JSON) | _JSON,
        }
      ).map(json.dumps),
    )
  )
  def collect(text):
    messages.append(text)

  collect()
  where = f"ws{url[4:]}/openenv/desktop/ws"
  async with ws_client.connect(where, proxy=None) as socket:
    for text in messages:
      await socket.send(text)
      reply = json.loads(await asyncio.wait_for(socket.recv(), 20))
      assert reply["type"] in ("observation", "state", "error"), text
      assert reply["data"].get("cause") != "internal_error", (text, reply)
    await socket.send("[" * 100)
    assert json.loads(await socket.recv())["data"]["code"] == "INVALID_JSON"
    await socket.send('{"type": "reset", "data": {"seed": 1}}')
    assert json.loads(await socket.recv())["type"] == "observation"


def test_the_http_side_answers_as_openenvs_servers_do(server):
  url, app = server
  with httpx.Client(base_url=url + "/openenv/desktop", timeout=30) as http:
    assert http.get("/metadata").json()["name"] == "desktop"
    assert http.get("/list_environments").json() == ["desktop"]
    assert http.get("/state").json() == {"episode_id": None, "step_count": 0}
    schema = http.get("/schema").json()
    assert {"action", "observation", "state"} <= set(schema)
    first = http.post("/reset", json={"seed": 1}).json()
    assert first["observation"]["screenshot"]["width"] == 128
    assert app.store.open == 0
    step = http.post("/step", json={"action": {"kind": "wait"}})
    assert step.status_code == 409 and "/ws" in step.json()["detail"]
    assert http.post("/Desktop/num_tasks", json={"split": "eval"}).json() == {
      "num_tasks": 8
    }
    row = http.post("/desktop/task", json={"split": "eval", "index": 2}).json()
    rows = http.post(
      "/desktop/task_range", json={"split": "eval", "start": 2, "stop": 4}
    ).json()["tasks"]
    assert rows[0] == row["task"] and len(rows) == 2
    bad = http.post("/desktop/task", json={"split": "eval", "index": 99})
    assert bad.status_code == 422 and "index" in bad.json()["detail"]
    assert http.get("/other/splits").status_code == 404
    assert http.get(url + "/openenv/nowhere/metadata").status_code == 404


# --- tasks of a server --------------------------------------------------------


async def test_a_run_draws_the_tasks_that_the_server_lists(server):
  url, _ = server
  options = {"base_url": f"{url}/openenv/desktop"}
  ask = lambda families: asyncio.to_thread(
    gyms.get("openenv").make_tasks, families, options
  )
  task_set = await ask(())
  assert set(task_set.families()) == set(gym_servers.FAMILIES)
  train = {task_set.train_task("enter-text", i, 0).task_id for i in range(32)}
  held_out = {task_set.eval_task("enter-text", i).task_id for i in range(8)}
  assert len(train) == 16 and len(held_out) == 4 and not train & held_out
  far = gym(url)
  one = task_set.eval_task("enter-text", 1)
  shown = await far.start(one)
  assert shown.instruction
  await far.close()
  with pytest.raises(ValueError, match="enter-text"):
    await ask(("enter-txt",))


def test_seeds_of_a_server_without_tasks_do_not_meet():
  tasks = openenv_tasks.SeededTasks("browser")
  train = {tasks.train_task("browser", i, 1).seed for i in range(200)}
  held_out = {tasks.eval_task("browser", i, 1).seed for i in range(200)}
  assert len(train) == 200 and not train & held_out


# --- third-party servers ------------------------------------------------------


async def test_pictures_come_in_several_forms():
  flat = {"screen": list(range(24)), "screen_shape": [2, 4, 3]}
  for fields, observation, pixel in (
    ({}, {"screenshot": [[[1, 2, 3, 255]] * 4] * 2}, [1, 2, 3]),
    ({"screenshot": "a.b"}, {"a": {"b": [[7, 8]] * 2}}, [7, 7, 7]),
    ({"screenshot": "screen", "shape": "screen_shape"}, flat, [0, 1, 2]),
  ):
    async with answering(seen(**observation)) as (url, got):
      far = openenv.OpenEnvGym(url, fields=fields, reset={"level": 2})
      shown = await far.start(base.Task("t", "f", seed=4))
      assert shown.screenshot[0, 0].tolist() == pixel
      assert shown.screenshot.dtype == np.uint8
      assert got == [{"type": "reset", "data": {"level": 2, "seed": 4}}]
      await far.close()


async def test_the_score_of_another_server_is_made_of_its_rewards():
  answers = [seen(), seen(0.5), seen(0.25, True)]
  for settings, score, success in (
    ({}, 0.75, False),
    ({"score": "last"}, 0.25, False),
    ({"success_at": 0.7}, 0.75, True),
  ):
    async with answering(*answers) as (url, got):
      far = openenv.OpenEnvGym(url, actions="browsergym", **settings)
      await far.start(base.Task("t", "f"))
      await far.act(GuiAction("click", x=1, y=0))
      last = await far.act(GuiAction("type", text='it\'s "me"\n'))
      assert last.done
      verdict = await far.evaluate()
      assert (verdict.score, verdict.success) == (score, success)
      assert [m["data"]["action_str"] for m in got[1:]] == [
        "mouse_click(1, 0, 'left')",
        "keyboard_type('it\\'s \"me\"\\n')",
      ]
      await far.close()


async def test_what_an_environment_has_not_is_told_and_not_sent():
  async with answering(seen()) as (url, got):
    far = openenv.OpenEnvGym(url, actions="browsergym")
    await far.start(base.Task("t", "f"))
    reply = await far.act(GuiAction("open_app", text="maps"))
    assert reply.text.startswith("Error") and not reply.done
    assert (await far.act(GuiAction("terminate", success=True))).done
    assert len(got) == 1
    with pytest.raises(openenv.OpenEnvError, match="no reward"):
      await far.evaluate()
    await far.close()


@pytest.mark.parametrize(
    "answer, kind, words",
    [
        ("no json", openenv.OpenEnvError, "no OpenEnv message"),
        ({"type": "observation", "data": {}}, openenv.OpenEnvError,
         "without an observation"),
        (seen(text="x"), openenv.OpenEnvError, "no 'screenshot'.*text"),
        (seen(screenshot="!"), openenv.OpenEnvError, "base64"),
        (seen(screenshot=[[1, 2], [3]]), openenv.OpenEnvError, "screenshot"),
        (seen(screenshot=[[[1, 2, 999]]]), openenv.OpenEnvError, "0 to 255"),
        (seen(screenshot=[1, 2, 3]), openenv.OpenEnvError, "fields.shape"),
        (seen(reward="x"), openenv.OpenEnvError, "reward must be.*'x'"),
        ({"type": "error", "data": {"message": "m", "code": "SESSION_ERROR"}},
         openenv.OpenEnvSessionLostError, "m"),
        ({"type": "error", "data": {"message": "m", "code": "VALIDATION_ERROR",
                                    "errors": ["why"]}},
         openenv.OpenEnvRequestError, "why"),
        (None, openenv.OpenEnvUnavailableError, "did not answer 'reset'"),
    ],
)  # fmt: skip
async def test_a_wrong_answer_is_a_typed_error(answer, kind, words):
  start_s = 1.0 if answer is None else 20
  async with answering(answer) as (url, _):
    far = openenv.OpenEnvGym(url, timeouts={"start": start_s, "close": 0.2})
    with pytest.raises(kind, match=words) as caught:
      await far.start(base.Task("t", "f"))
    assert type(caught.value) is kind
    await far.close()


async def test_a_session_that_is_closed_and_nobody_there_are_said():
  async with answering(seen()) as (url, _):
    far = openenv.OpenEnvGym(url)
    await far.start(base.Task("t", "f"))
    with pytest.raises(openenv.OpenEnvSessionLostError, match="closed"):
      await far.act(WAIT)
    await far.close()
  with pytest.raises(openenv.OpenEnvUnavailableError, match="OpenEnv server"):
    await openenv.OpenEnvGym(url).start(base.Task("t", "f"))


async def test_a_screen_of_another_size_is_refused_with_the_setting(server):
  url, _ = server
  far = gym(url, width=200, height=100)
  with pytest.raises(openenv.OpenEnvError, match="gym.width=128"):
    await far.start(task())
  await far.close()


@pytest.mark.parametrize(
  "action, words",
  [
    (GuiAction("click", x=1, y=2, count=2), "mouse_dblclick(1, 2, 'left')"),
    (GuiAction("key", keys=("ctrl", "a")), "keyboard_press('Control+a')"),
    (GuiAction("scroll", dy=30), "scroll(0.0, 30)"),
    (
      GuiAction("drag", x=1, y=2, x2=3, y2=4),
      "mouse_drag_and_drop(1, 2, 3, 4)",
    ),
    (GuiAction("wait", duration=0.5), "noop(500)"),
    (GuiAction("answer", text="4"), "send_msg_to_user('4')"),
    (GuiAction("system_button", text="back"), "go_back()"),
  ],
)
def test_actions_in_browsergyms_words(action, words):
  assert openenv_actions.browsergym(action) == {"action_str": words}
