"""Episodes through a server: what goes over the wire, what is left there."""

import asyncio
import contextlib

import numpy as np
import openai
import pytest
import small_server
from starlette import responses
from tunix.rl.multi_turn.agents import tool_agent
from tunix.rl.multi_turn.clients import agent_session
from tunix.rl.multi_turn.clients import openai_client
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments import tool_environment
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.parser.tool_parser import base as parser_base
from tunix.rl.multi_turn.tools import tool_base as tools_base
from tunix.rl.multi_turn.trajectory_collector import episode as collector_lib
from tunix.rl.multi_turn.trajectory_collector import model_calls

pytestmark = pytest.mark.timeout(300)
SAMPLING = policy_client.SamplingParams(max_new_tokens=4)
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module", name="served")
def _served():
  with small_server.SmallServer() as served:
    yield served


@contextlib.asynccontextmanager
async def connected(served, play=None, url=None):
  connection = agent_session.AgentConnection(
    url or served.url, small_server.MODEL, served.images, play=play
  )
  try:
    yield connection
  finally:
    await connection.aclose()


def held(served):
  return len(served.app._service.store)


async def call(fn, *args, inline=False):
  del inline
  return await fn(*args)


# --- tool outputs -------------------------------------------------------------


class Adds(tools_base.BaseTool):
  """Adds."""

  @property
  def json(self):
    return {"type": "function", "function": {"name": "add", "parameters": {}}}

  def forward(self, **numbers):
    return trajectory.ToolOutput("add", output=sum(numbers.values()))


class AlwaysCalls(parser_base.ToolParser):
  """Takes whatever was sampled for two calls."""

  def parse_result(self, model_response):
    del model_response
    return parser_base.ParseResult(
      calls=tuple(trajectory.ToolCall("add", {"a": 1, "b": b}) for b in (1, 2))
    )

  def get_tool_prompt(self, tools_schema=None):
    return "add"

  def format(self, calls, thought=None):
    return "add"


async def episode(model):
  return await collector_lib.TrajectoryCollectEngine(
    tool_agent.ToolAgent(parser_name=AlwaysCalls, tool_map={"add": Adds}),
    tool_environment.ToolEnvironment("q", {"add": Adds}, max_steps=3),
    model,
    max_steps=3,
    seed=11,
  ).collect()


async def test_tool_outputs_go_through_the_server(served):
  inside = model_calls.PolicyModel(
    served.engine, served.renderer, SAMPLING, runs_inline=True
  )
  shown = []

  async def plays(client, model, computer, **options):
    messages = [{"role": "system", "content": "add"}, await computer.reset()]
    while True:
      answer = await client.chat.completions.create(
        model=model, messages=messages, **options
      )
      text = answer.choices[0].message.content
      observation = await computer.act(text)
      if observation is None:
        return
      shown.append(observation)
      messages += [{"role": "assistant", "content": text}, observation]

  async with connected(served) as connection:
    got = await episode(connection.model(SAMPLING))
  async with connected(served, plays) as connection:
    played = await episode(connection.model(SAMPLING))
  want = await episode(inside)
  assert not got.error and got.status is want.status
  assert got.num_turns == want.num_turns == 3
  assert "result: 3" in want.steps[-1].chat_completions[-2]["content"]
  assert len(got.sequences) == len(want.sequences) == 1
  (one,), (other,) = got.sequences, want.sequences
  assert one.tokens.tolist() == other.tokens.tolist()
  assert one.loss_mask.tolist() == other.loss_mask.tolist()
  assert one.turn_ids.tolist() == other.turn_ids.tolist()
  np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
  # An agent with a loop of its own gets them as one message.
  assert not played.error and played.num_turns == 3
  assert len(shown) == 2 and "tool_call_id" not in shown[0]
  assert "result: 2" in str(shown[0]) and "result: 3" in str(shown[0])
  assert not held(served)


# --- sessions -----------------------------------------------------------------


class Losing:
  """A server that loses answers to one path, but does what it is asked."""

  def __init__(self, asgi, path, lost, status=None):
    self.asgi = asgi
    self.path = path
    self.lost = lost  # Which, counted from 1.
    self.status = status
    self.asked = 0

  async def __call__(self, scope, receive, send):
    if scope["type"] != "http":
      return  # It has begun, and goes on.
    if scope["path"] != self.path:
      await self.asgi(scope, receive, send)
      return
    self.asked += 1
    if self.asked not in self.lost:
      await self.asgi(scope, receive, send)
      return
    if self.status is not None:  # Or refuses.
      answer = responses.JSONResponse({"error": {}}, self.status)
      await answer(scope, receive, send)
      return

    async def lost(message):
      del message

    await self.asgi(scope, receive, lost)
    raise ConnectionResetError  # Which is answered with a 500.


@contextlib.contextmanager
def losing(served, path, lost=(1,), **options):
  asgi = Losing(served.app.asgi, path, lost, **options)
  with http_server.LoopbackServer(asgi) as server:
    yield asgi, server.url


async def played(connection, name="e"):
  """A session of one answer, released."""
  session = connection.model(SAMPLING).new_session(name, 1)
  try:
    await session.reply(HELLO, 0, call)
  finally:
    for held_name in session.sessions():
      await session.release(held_name)
  return session


@pytest.mark.parametrize("lost", [(1,), (1, 2), (2,), (1, 3)], ids=str)
async def test_tokens_survive_lost_answers(served, lost):
  with losing(served, "/export_trajectories", lost) as (asgi, url):
    async with connected(served, url=url) as connection:
      session = await played(connection)
  assert session.build()[0].num_sampled
  assert asgi.asked == len(lost) + 2  # Fetched, and dropped.
  assert not held(served)


async def test_tokens_that_cannot_be_had_leave_no_session(served):
  with losing(served, "/export_trajectories", status=400) as (_, url):
    async with connected(served, url=url) as connection:
      with pytest.raises(openai.BadRequestError):
        await played(connection)
  assert not held(served)


async def test_a_start_whose_answer_is_lost_is_repeated_and_makes_one(served):
  path = "/rl/start_session"
  with losing(served, path) as (asgi, url):
    async with connected(served, url=url) as connection:
      assert (await played(connection)).build()
    assert asgi.asked == 2 and not held(served)
    client = openai_client.OpenAIClient(
      f"{url}/v1", small_server.MODEL, served.images
    )
    asgi.lost = (3,)
    await client.generate(served.prompt(), served.sampling(), session="s")
    assert asgi.asked == 4 and held(served) == 1
    await client.release("s")
    await client.aclose()
  assert not held(served)
  with losing(served, path, status=429) as (asgi, url):
    async with connected(served, url=url) as connection:
      assert (await played(connection)).build()
  assert asgi.asked == 2 and not held(served)


@pytest.mark.parametrize("via", ["proxy", "client"])
async def test_who_goes_away_while_it_opens_leaves_no_session(served, via):
  for number in range(12):
    async with connected(served) as connection:
      client = openai_client.OpenAIClient(
        f"{served.url}/v1", small_server.MODEL, served.images
      )
      if via == "proxy":
        session = connection.model(SAMPLING).new_session("e", 1)
        asking = session.reply(HELLO, 0, call)
      else:
        asking = client.generate(
          served.prompt(), served.sampling(), session="s"
        )
      task = asyncio.ensure_future(asking)
      await asyncio.sleep(0.0006 * number)
      task.cancel()
      await asyncio.gather(task, return_exceptions=True)
      if via == "proxy":
        for name in session.sessions():
          await session.release(name)
      await client.aclose()
    # All of it was waited for.
    assert not held(served)


async def test_a_release_that_is_cancelled_drops_its_session(served):
  async with connected(served) as connection:
    session = connection.model(SAMPLING).new_session("e", 1)
    await session.reply(HELLO, 0, call)
    (name,) = session.sessions()
    task = asyncio.ensure_future(session.release(name))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
  assert not held(served)


# --- third-party agents -------------------------------------------------------


async def test_an_agent_that_will_not_end_loses_nothing(served, monkeypatch):
  monkeypatch.setattr(agent_session, "_GRACE_S", 0.05)
  freed = asyncio.Event()

  async def stubborn(client, model, computer, **options):
    answer = await client.chat.completions.create(
      model=model, messages=[await computer.reset()], **options
    )
    await computer.act(answer.choices[0].message.content)
    while not freed.is_set():
      try:
        await asyncio.sleep(60)
      except asyncio.CancelledError:
        pass

  async with connected(served, stubborn) as connection:
    session = connection.model(SAMPLING).new_session("a", 1)
    await session.reply(HELLO, 0, call)
    assert held(served) == 1
    (name,) = session.sessions()
    async with asyncio.timeout(10):
      # Told by who tears down the episode.
      with pytest.raises(RuntimeError, match="after it was cancelled"):
        await session.release(name)
    assert session.build()[0].num_sampled
    assert not held(served)
    (abandoned,) = agent_session._LEFT
    freed.set()
    abandoned.cancel()
    await asyncio.wait({abandoned}, timeout=5)
    assert abandoned.done() and not agent_session._LEFT


async def test_an_observation_answers_the_act_it_came_of(served):
  log = []

  async def impatient(client, model, computer, **options):
    del client, model, options
    log.append((await computer.reset())["content"])
    try:
      await asyncio.wait_for(computer.act("A"), 0.05)
    except TimeoutError:
      log.append("timeout")
    try:
      await computer.act("too early")
    except RuntimeError as error:
      log.append(str(error)[:14])
    await asyncio.sleep(0.3)  # By then it is done.
    log.append((await computer.reset())["content"])
    log.append((await computer.act("B"))["content"])
    log.append(await computer.act("C"))

  async with connected(served, impatient) as connection:
    session = connection.model(SAMPLING).new_session("a", 1)
    messages = [{"role": "user", "content": "seen 0"}]
    for turn, text in enumerate("ABC"):
      reply = await session.reply(messages, turn, call)
      assert reply.text == text
      if not turn:
        await asyncio.sleep(0.15)
      messages = messages + [
        {"role": "assistant", "content": text},
        {"role": "user", "content": f"seen {turn + 1}"},
      ]
    for name in session.sessions():
      await session.release(name)
  assert log == [
    "seen 0",
    "timeout",
    "act was called",
    "seen 0",
    "seen 2",
    None,
  ]
  assert not held(served)


def test_areals_client_names_its_session_by_the_key_alone(running):
  """The calls of areal 1.0.4's OpenAIProxyClient, in its order and form."""
  admin = {"Authorization": "Bearer areal-admin-key"}
  body = {"task_id": "t", "api_key": None}
  started = running.post("/rl/start_session", body, **admin).json()
  own = {"Authorization": f"Bearer {started['api_key']}"}
  request = {
    "model": "default",
    "max_tokens": 4,
    "seed": 2,
    "messages": [{"role": "user", "content": "go"}],
  }
  chat = running.post("/chat/completions", request, **own).json()
  answer = running.post(
    "/responses", {"model": "default", "input": "go"}, **own
  ).json()
  for reward, id_ in ((0.25, chat["id"]), (1.0, None)):
    reply = running.post(
      "/rl/set_reward", {"interaction_id": id_, "reward": reward}, **own
    )
    assert reply.json() == {"message": "success"}
  assert running.post("/rl/end_session", **own).status_code == 200
  exported = running.post(
    "/export_trajectories",
    {
      "session_id": started["session_id"],
      "discount": 0.0,
      "style": "individual",
    },
    **admin,
  ).json()["interactions"]
  assert [one["reward"] for one in exported.values()] == [0.25, 1.0]
  assert next(iter(exported)) == chat["id"] and len(exported) == 2
  assert answer["object"] == "response"


@pytest.mark.parametrize("path", ["/rl/set_reward", "/rl/end_session"])
def test_a_session_that_is_not_named_is_asked_for(running, path):
  answer = running.post(path, {"reward": 1.0})
  assert answer.status_code == 401
  assert "name a session" in answer.json()["error"]["message"]
