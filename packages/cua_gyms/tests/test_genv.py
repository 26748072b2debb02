"""The client of gym servers: retries, deadlines, names; equal episodes."""

import asyncio
import contextlib
import dataclasses
import random

from cua_gyms import genv
from cua_gyms.genv import execution
from cua_gyms.genv import tasks as genv_tasks
from cua_gyms.openenv import gym as openenv
import gym_servers
import pytest
from starlette import applications
from starlette import requests as starlette_requests
from starlette import responses
from starlette import routing
import tenacity
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.environments import cua_env
from tunix.rl.multi_turn.environments import wire
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import desktop
from tunix.rl.multi_turn.environments.task_sources import cua_task
from tunix.rl.multi_turn.net import http as http_lib
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.tools import screenshot

QUICK = {
  kind: dataclasses.replace(
    genv.RETRIES[kind], tries=3, wait=tenacity.wait_fixed(0.01)
  )
  for kind in ("tasks", "create", "step")
}


class Flaky:
  """A gym server of which each answer is written down beforehand.

  Attributes:
    log: (method, path, headers, body) of each request.
  """

  def __init__(self, *answers):
    self._answers = list(answers)
    self.log = []

  async def answer(self, request: starlette_requests.Request):
    body = await request.body()
    self.log.append((request.method, request.url.path, request.headers, body))
    answer = self._answers.pop(0) if self._answers else {}
    if answer == "hang":
      await asyncio.sleep(1)  # A server that ends waits for it.
    if callable(answer) and not isinstance(answer, responses.Response):
      answer = answer()
    if isinstance(answer, responses.Response):
      return answer
    status, data = answer if isinstance(answer, tuple) else (200, answer)
    return responses.JSONResponse(data, status)


@contextlib.asynccontextmanager
async def flaky(*answers, **timeouts):
  server = Flaky(*answers)
  routes = [
    routing.Route("/{rest:path}", server.answer, methods=["GET", "POST"])
  ]
  with http_server.LoopbackServer(applications.Starlette(routes=routes)) as at:
    client = genv.GenvClient(
      at.url, "g", retries=QUICK, timeouts=genv.Timeouts(**timeouts)
    )
    try:
      yield client, server
    finally:
      await client.aclose()


# --- tries --------------------------------------------------------------------


async def test_a_create_is_tried_three_times_under_one_key():
  answers = [(500, {"detail": "a"}), (503, {}), {"execution_id": "x"}]
  async with flaky(*answers) as (client, server):
    assert (await client.create("t"))["execution_id"] == "x"
    keys = {headers["idempotency-key"] for _, _, headers, _ in server.log}
    assert len(server.log) == 3 and len(keys) == 1
  async with flaky(*[(500, {"detail": "broken"})] * 5) as (client, server):
    with pytest.raises(genv.GenvError, match="500 broken"):
      await client.create("t")
    assert len(server.log) == 3


async def test_being_full_is_waited_for_and_is_no_failed_try():
  full = lambda: responses.JSONResponse(
    {"detail": "full"}, 429, {"retry-after": "0.01"}
  )
  async with flaky(*[full] * 6, {"execution_id": "x"}) as (client, server):
    assert (await client.create("t"))["execution_id"] == "x"
    assert len(server.log) == 7
  async with flaky(*[full] * 500, create=0.5) as (client, _):
    with pytest.raises((genv.GenvCapacityError, genv.GenvUnavailableError)):
      await client.create("t")


@pytest.mark.parametrize(
  "call, kind",
  [
    (lambda c: c.list_tasks(), "tasks"),
    (lambda c: c.create("t"), "create"),
    (lambda c: c.evaluate("x"), "evaluate"),
    (lambda c: c.step("x", gui_action.GuiAction("wait"), 1), "step"),
  ],
)
async def test_a_server_that_hangs_is_given_up_in_time(call, kind):
  async with flaky("hang", "hang", **{kind: 0.3}) as (client, _):
    with pytest.raises(genv.GenvUnavailableError, match=f"timeouts.{kind}"):
      await call(client)


async def test_terminate_never_raises_and_never_hangs():
  async with flaky("hang", terminate=0.3) as (client, _):
    assert await client.terminate("x") is False
  async with flaky((404, {"detail": "gone"})) as (client, _):
    assert await client.terminate("x") is True
  client = genv.GenvClient("http://127.0.0.1:9", "g", retries=QUICK)
  assert await client.terminate("x") is False
  await client.aclose()


async def test_an_evaluation_is_not_tried_again():
  async with flaky((500, {"detail": "no"}), {}) as (client, server):
    with pytest.raises(genv.GenvError):
      await client.evaluate("x")
    assert len(server.log) == 1


async def test_nobody_there_says_so():
  client = genv.GenvClient("http://127.0.0.1:9", "g", retries=QUICK)
  with pytest.raises(genv.GenvUnavailableError, match="127.0.0.1:9"):
    await client.create("t")
  await client.aclose()


async def test_a_refusal_is_not_tried_again_and_says_why():
  async with flaky((422, {"detail": "options.gym.x"})) as (client, server):
    with pytest.raises(genv.GenvRequestError, match="options.gym.x"):
      await client.create("t")
    assert len(server.log) == 1
  async with flaky((401, {"detail": "token"})) as (client, server):
    with pytest.raises(genv.GenvRequestError, match="token"):
      await client.list_tasks()
  page = responses.HTMLResponse("<html>")
  async with flaky(page) as (client, _):
    with pytest.raises(genv.GenvError, match="is that a gym server"):
      await client.list_tasks()
  async with flaky({"no": "id"}) as (client, _):
    with pytest.raises(genv.GenvError, match="without an execution_id"):
      await client.create("t")


# --- names --------------------------------------------------------------------

SHAPES = {
    "summary": [
        {"task_id": "a", "name": "open settings"},
        {"task_id": "b", "name": "close"},
    ],
    "meta": {"tasks": [
        {"meta": {"id": "a", "number": "011", "name": "open settings",
                  "displayName": "Open", "description": "Open it."}},
        {"meta": {"id": "b", "number": "012", "name": "close"}},
    ]},
    "flat": {"tasks": [
        {"seed_id": "a", "task_number": "011", "task_name": "open settings",
         "display_name": "Open", "tags": ["x"], "instruction": "Open it.",
         "description": "d", "env_config": {}, "evaluation": {}},
        {"seed_id": "b", "task_number": "012", "task_name": "close"},
    ]},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
async def test_tasks_are_read_in_each_shape_and_found_by_name(shape):
  for name in (
    "a",
    "open settings",
    *(() if shape == "summary" else ("011", "11", "11-whatever")),
  ):
    async with flaky(SHAPES[shape]) as (client, _):
      assert (await client.resolve(name)).id == "a", name
  for name in ("", "open", "013", "aa", "0"):
    async with flaky(SHAPES[shape]) as (client, _):
      with pytest.raises(genv.GenvUnknownTaskError, match="no task is called"):
        await client.resolve(name)


async def test_a_summary_is_completed_by_its_task():
  full = {"task_id": "b", "description": "Do b.", "evaluation": {"x": 1}}
  row = {"task_id": "a", "name": "n", "description": "Do a."}
  async with flaky([row, {"task_id": "b", "name": "B"}], full) as (
    client,
    server,
  ):
    tasks = await client.list_tasks(full=True)
  assert [t.description for t in tasks] == ["Do a.", "Do b."]
  assert tasks[1].name == "B"
  assert [path for _, path, _, _ in server.log][1:] == ["/api/v1/g/tasks/b"]


def test_two_tasks_of_one_name_are_not_guessed_between():
  tasks = [cua_task.CUATask("a", "same"), cua_task.CUATask("b", "same")]
  with pytest.raises(cua_task.UnknownTaskError, match="2 tasks are called"):
    cua_task.resolve("same", tasks)
  assert cua_task.resolve("b", tasks).id == "b"


@pytest.mark.parametrize(
  "row, words",
  [
    ({}, "names no task"),
    ([], "must be an object"),
    ({"tasks": [{"task_id": "a"}]}, "write a row for each"),
    ({"task_id": "a", "tags": "x"}, "tags must be a list"),
    ({"task_id": "a", "max_steps": 0}, "max_steps"),
    ({"task_id": "a", "split": "test"}, "split='test'"),
    ({"task_id": ["a"]}, "task_id must be a string"),
  ],
)
def test_a_row_that_is_no_task_is_refused_by_its_field(row, words):
  with pytest.raises(ValueError, match=words):
    cua_task.CUATask.from_row(row, where="x.jsonl, line 3")


# --- verdicts -----------------------------------------------------------------


@pytest.mark.parametrize(
    "reply, expected",
    [
        ({"result": {"score": 0.0, "validators": [{"score": 1}]},
          "reward": 1.0, "success": True}, (0.0, True)),
        ({"result": {"validators": [{"score": 1.0, "weight": 3},
                                    {"score": 0.0, "weight": 1}]}},
         (0.75, False)),
        ({"result": {"validators": [{"pass": True}]}}, (1.0, True)),
        ({"reward": 0.5, "success": False}, (0.5, False)),
        ({"score": 0}, (0.0, False)),
        ({"success": True}, (1.0, True)),
        ({"success": False, "result": None}, (0.0, False)),
    ],
)  # fmt: skip
def test_the_reward_of_a_verdict(reply, expected):
  assert wire.reward_of(reply) == expected


@pytest.mark.parametrize(
  "reply", [{}, [], {"result": {"score": "1"}}, {"score": float("nan")}]
)
def test_what_is_no_verdict_is_no_reward_of_zero(reply):
  with pytest.raises(wire.WireError):
    wire.reward_of(reply)


# --- executions for others ----------------------------------------------------


class _Env:
  def __init__(self, task):
    self.task = task


async def test_an_execution_is_started_by_any_form_of_a_task():
  with gym_servers.serving() as (url, app):
    client = genv.GenvClient(url, "desktop")
    listed = (await client.list_tasks())[1]
    row = listed.to_row()
    contexts = []
    for form in (listed, row, listed.to_task(), _Env(listed.to_task()),
                 listed.id, listed.name, "2"):  # fmt: skip
      context = await genv.start_genv_execution(form, client)
      contexts.append(context.task_identifier)
      assert context.agent_env() == {
        "type": "genv",
        "gymBaseUrl": url,
        "gymId": "desktop",
        "executionId": context.execution_id,
      }
      assert context.box_id == context.execution_id
      assert context.env_build["status"] == "completed"
      reward, success, _ = await genv.evaluate_execution(
        context, client, {"answer": "done", "task_completed": True}
      )
      assert (reward, success) == (0.0, False)
      assert await genv.terminate_execution(context, client)
    assert set(contexts) == {listed.id}
    with pytest.raises(genv.GenvUnknownTaskError):
      await genv.start_genv_execution({"task_id": "none"}, client)
    assert app.store.open == 0
    await client.aclose()


def test_the_box_has_many_names():
  for reply in (
    {"boxId": "b"},
    {"device": {"device_serial": "b"}},
    {"box": {"id": "b"}},
    {"env_id": "b"},
  ):
    assert execution.box_id_of(reply) == "b"
  assert execution.box_id_of({"execution_id": "x"}) == ""


# --- the gym ------------------------------------------------------------------


class _Policy:
  """Knows a task by heart, and errs now and then; a function of its seed."""

  def __init__(self, task, seed):
    self._shadow = desktop.DesktopGym()
    self._shadow.start_sync(task)
    self._random = random.Random(seed)

  def __call__(self):
    action = desktop.oracle_action(self._shadow)
    if action is None or self._random.random() < 0.3:
      action = gui_action.GuiAction(
        "click", x=self._random.uniform(0, 127), y=self._random.uniform(0, 95)
      )
    self._shadow.act_sync(action)
    return action


async def _episode(gym, shown, task, seed):
  """Everything that a policy sees of an episode, and its reward."""
  env = cua_env.CUAEnv(
    gym, screenshot.ScreenshotTool(images.ImageStore()), shown, max_steps=6
  )
  policy = _Policy(task, seed)
  observation, _ = await env.reset()
  shots = [(observation["screenshot"].sha256, observation.get("instruction"))]
  ended = False
  while not ended:
    observation, reward, ended, info = await env.step(policy())
    shots.append((
        observation["screenshot"].sha256, observation.get("text"), reward,
        ended, info.get("status"), info["gui_actions"],
    ))  # fmt: skip
  await env.close()
  return shots


@pytest.mark.slow
async def test_the_same_policy_has_the_same_episodes_behind_a_server():
  families = ("click-button", "enter-text", "close-dialog", "open-icon")
  ends = set()
  with gym_servers.serving(gym_servers.desktop(families=families)) as (
    url,
    app,
  ):
    for family in families:
      for split in ("train", "eval"):
        for index in range(4):
          tasks = desktop.DesktopTasks()
          draw = tasks.train_task if split == "train" else tasks.eval_task
          task = draw(family, index, 3)
          inside = await _episode(desktop.DesktopGym(), task, task, index)
          behind = await _episode(
            gym_servers.gym(url),
            gym_servers.instance(family, index, split, 3),
            task,
            index,
          )
          # The server tells the instruction that the task has not.
          assert behind == inside
          ends.add(inside[-1][4])
    assert app.store.open == 0
  assert {"succeeded", "failed"} <= ends


async def test_an_episode_is_these_calls_and_no_others():
  calls = []
  with gym_servers.serving() as (url, app):
    del app
    gym = gym_servers.gym(url)
    calls_of = gym._client._http  # pylint: disable=protected-access
    once = calls_of._exchange  # pylint: disable=protected-access

    async def noted(method, url, **request):
      calls.append(url.rsplit("/", 1)[1].partition("%")[0])
      return await once(method, url, **request)

    calls_of._exchange = noted  # pylint: disable=protected-access
    env = cua_env.CUAEnv(
      gym,
      screenshot.ScreenshotTool(images.ImageStore()),
      gym_servers.instance("enter-text", 0),
      max_steps=2,
    )
    await env.reset()
    ended = False
    while not ended:
      *_, ended, _ = await env.step(gui_action.GuiAction("wait"))
    await env.close()
    await env.close()
  assert calls == ["enter-text", "step", "step", "evaluate", "terminate"]


async def test_an_action_whose_answer_was_lost_is_made_once():
  with gym_servers.serving() as (url, app):
    gym = gym_servers.gym(url)
    await gym.start(gym_servers.instance("enter-text", 0))
    calls_of = gym._client._http  # pylint: disable=protected-access
    once, lost = calls_of._exchange, []  # pylint: disable=protected-access

    async def unlucky(method, url, **request):
      answer = await once(method, url, **request)
      if url.endswith("/step") and not lost:
        lost.append(url)
        raise http_lib.CallError("the connection broke")
      return answer

    calls_of._exchange = unlucky  # pylint: disable=protected-access
    await gym.act(gui_action.GuiAction("type", text="a"))
    assert lost and app.store.live()[0].steps == 1
    await gym.act(gui_action.GuiAction("type", text="b"))
    assert app.store.live()[0].steps == 2
    await gym.close()
    assert app.store.open == 0


async def test_an_action_that_cannot_be_is_told_and_no_failure_of_the_gym():
  """Else a policy could leave an episode that goes badly."""
  with gym_servers.serving() as (url, app):
    gyms = [
      gym_servers.gym(url),
      openenv.OpenEnvGym(url + "/openenv/desktop", width=128, height=96),
    ]
    for gym, task in (
      (gyms[0], gym_servers.instance("enter-text", 0)),
      (gyms[1], base.Task("t", "f", params={"openenv": {"seed": 1}})),
    ):
      observation = await gym.start(task)
      reply = await gym.act(gui_action.GuiAction("wait", duration=1e9))
      assert reply.text.startswith("Error: action.duration") and not reply.done
      assert (reply.screenshot == observation.screenshot).all()
      after = await gym.act(gui_action.GuiAction("move", x=1, y=1))
      assert not after.text
    assert [e.steps for e in app.store.live()] == [1, 1]
    for gym in gyms:
      await gym.close()


async def test_a_start_that_was_given_up_leaves_nothing():
  with gym_servers.serving(
    gym_servers.naughty("slow-start", "hang-start"), start=5.0
  ) as (url, app):
    for family in ("slow-start", "hang-start"):
      gym = gym_servers.gym(url, "naughty")
      starting = asyncio.ensure_future(
        gym.start(base.Task(f"naughty/{family}/0", family))
      )
      await gym_servers.until(lambda: app.store.open == 1)
      starting.cancel()
      with pytest.raises(asyncio.CancelledError):
        await starting
      assert app.store.open == 1
      await gym.close()
      await gym_servers.until(lambda: app.store.open == 0)


async def test_a_screen_of_another_size_is_refused_with_the_setting():
  with gym_servers.serving() as (url, app):
    gym = gym_servers.gym(url, width=256, height=192)
    with pytest.raises(genv.GenvError, match="gym.width=128 gym.height=96"):
      await gym.start(gym_servers.instance("enter-text", 0))
    await gym.close()
    assert app.store.open == 0


async def test_an_execution_that_the_server_ended_is_a_typed_error():
  with gym_servers.serving(lease=0.2) as (url, app):
    gym = gym_servers.gym(url)
    await gym.start(gym_servers.instance("enter-text", 0))
    await gym_servers.until(lambda: app.store.open == 0)
    with pytest.raises(genv.GenvExecutionLostError) as caught:
      await gym.act(gui_action.GuiAction("wait"))
    assert caught.value.code == "lease_expired"
    await gym.close()


async def test_a_server_without_steps_says_what_is_missing():
  async with flaky({"execution_id": "x"}, (404, {"detail": "Not Found"})) as (
    client,
    _,
  ):
    gym = genv.GenvGym(client=client)
    with pytest.raises(genv.GenvError, match="no step-level API"):
      await gym.start(base.Task("t", "t"))


async def test_the_token_is_sent(tmp_path):
  file = tmp_path / "token"
  file.write_text("s3cret\n")
  with gym_servers.serving(token="s3cret") as (url, _):
    gym = gym_servers.gym(url, token_file=str(file))
    await gym.start(gym_servers.instance("enter-text", 0))
    await gym.close()
    gym = gym_servers.gym(url)
    with pytest.raises(genv.GenvRequestError, match="401"):
      await gym.start(gym_servers.instance("enter-text", 0))
    await gym.close()


# --- many ---------------------------------------------------------------------


@pytest.mark.slow
async def test_two_hundred_executions_are_open_at_once():
  with gym_servers.serving(capacity=200) as (url, app):
    gyms = [gym_servers.gym(url) for _ in range(200)]
    observations = await asyncio.gather(
      *(
        g.start(gym_servers.instance("click-button", i))
        for i, g in enumerate(gyms)
      )
    )
    assert len({g.execution_id for g in gyms}) == 200 == app.store.open
    extra = gym_servers.gym(url, timeouts={"create": 0.3})
    with pytest.raises(genv.GenvError) as caught:
      await extra.start(gym_servers.instance("click-button", 0))
    assert caught.value.status in (0, 429)
    await asyncio.gather(
      *(g.act(gui_action.GuiAction("move", x=1, y=1)) for g in gyms)
    )
    own = desktop.DesktopGym()
    for i in range(0, 200, 37):  # Each has its own task.
      expected = own.start_sync(
        desktop.DesktopTasks().train_task("click-button", i, 0)
      )
      assert (observations[i].screenshot == expected.screenshot).all()
    await asyncio.gather(*(g.close() for g in gyms))
    assert app.store.open == 0


@pytest.mark.slow
async def test_creates_in_bursts_of_64_are_all_answered():
  """Through a server with room for 48: the rest waits for its turn."""
  with gym_servers.serving(capacity=48, retry_after=0.1) as (url, app):

    async def play(i):
      gym = gym_servers.gym(url)
      await gym.start(gym_servers.instance("click-button", i))
      identity = gym.execution_id
      await gym.close()
      return identity

    replies = []
    for burst in range(3):
      numbers = range(burst * 64, burst * 64 + 64)
      replies += await asyncio.gather(*map(play, numbers))
    assert len(set(replies)) == 192
    assert app.store.open == 0


def test_a_task_keeps_its_place_through_json():
  task = gym_servers.instance("click-button", 5)
  assert base.Task.from_json(task.to_json()) == task
  assert dataclasses.replace(task, seed=1) != task


def test_a_server_that_is_not_there_says_how_to_start_one(monkeypatch):
  def quick(settings):
    where = settings["base_url"], settings["gym_id"]
    return genv.GenvClient(*where, retries=QUICK)

  monkeypatch.setattr(genv_tasks.gym_lib, "make_client", quick)
  for ask in (genv_tasks.server_tasks, genv_tasks.list_tasks):
    with pytest.raises(genv.GenvError) as refused:
      ask(base_url="http://127.0.0.1:9", gym_id="big")
    message = str(refused.value)
    assert "no gym server answers at http://127.0.0.1:9" in message
    assert "environments.gym_server big --port 9" in message
    assert "gym.options.base_url" in message
