"""Episodes through a server: what goes over the wire, and what is left there."""

import asyncio
import contextlib

import numpy as np
import pytest
import small_server
from tunix.rl.multi_turn import policy_client
from tunix.rl.multi_turn import trajectory
from tunix.rl.multi_turn.agents import tool_agent
from tunix.rl.multi_turn.environments import tool_environment
from tunix.rl.multi_turn.parser.tool_parser import base as parser_base
from tunix.rl.multi_turn.rollout import agent_session
from tunix.rl.multi_turn.rollout import proxy
from tunix.rl.multi_turn.tools import base as tools_base
from tunix.rl.multi_turn.trajectory_collector import engine as collector_lib
from tunix.rl.multi_turn.trajectory_collector import model_calls

pytestmark = pytest.mark.timeout(300)
SAMPLING = policy_client.SamplingParams(max_new_tokens=4)
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module", name="served")
def _served():
  with small_server.SmallServer() as served:
    yield served


@contextlib.asynccontextmanager
async def connected(served, play=None):
  made = agent_session.AgentConnection(
      served.url, small_server.MODEL, served.images, play=play
  )
  try:
    yield made
  finally:
    await made.aclose()


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
        calls=tuple(
            trajectory.ToolCall("add", {"a": 1, "b": b}) for b in (1, 2)
        )
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
      seen = await computer.act(text)
      if seen is None:
        return
      shown.append(seen)
      messages += [{"role": "assistant", "content": text}, seen]

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


# --- agents of somebody else's ------------------------------------------------


async def test_an_agent_that_will_not_end_loses_nothing(served, monkeypatch):
  monkeypatch.setattr(agent_session, "_GRACE_S", 0.05)
  freed = asyncio.Event()

  async def stubborn(client, model, computer, **options):
    answer = await client.chat.completions.create(
        model=model, messages=[await computer.reset()], **options
    )
    while not freed.is_set():
      try:
        await computer.act(answer.choices[0].message.content)
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
    (left,) = agent_session._LEFT
    freed.set()
    left.cancel()
    await asyncio.wait({left}, timeout=5)
    assert left.done() and not agent_session._LEFT
