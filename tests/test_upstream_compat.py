"""Upstream's own agents and environments run in our engine, unchanged."""

import asyncio
import json
import queue as std_queue

import pytest
from tunix.rl.agentic.agents import agent_types
from tunix.rl.agentic.agents import model_agent
from tunix.rl.agentic.agents import tool_agent
from tunix.rl.agentic.environments import base_environment
from tunix.rl.agentic.environments import task_environment
from tunix.rl.agentic.environments import tool_environment
from tunix.rl.agentic.rewards import reward
from tunix.rl.agentic.tools import calculator_tool
from tunix.rl.multi_turn import trajectory_collector as tc
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.queue import data_queue
from tunix.rl.queue import group_queue

pytestmark = pytest.mark.peer("tunix")
Status = trajectory_lib.TrajectoryStatus

CALL = (
  '<tool_call>\n{"name": "calculator", "arguments": {"a": 6, "b": 7,'
  ' "op": "*"}}\n</tool_call>'
)


def collect(agent, env, replies, **kwargs):
  replies = iter(replies)
  prompts = []

  async def model(messages):
    prompts.append([dict(m) for m in messages])
    return next(replies)

  engine = tc.TrajectoryCollectEngine(agent, env, model, **kwargs)
  return asyncio.run(engine.collect()), prompts


def test_model_agent_in_a_task_environment():
  """A registry reward: a RewardOutput comes back as the step's reward."""
  env = task_environment.TaskEnvironment(
    {"question": "2 + 2 = ?", "ground_truth": "4"},
    reward_fn=reward.get_reward_fn("exact_match"),
  )
  result, prompts = collect(model_agent.ModelAgent("Answer."), env, ["4"])
  assert isinstance(result, trajectory_lib.Trajectory)
  assert prompts[0] == [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": "2 + 2 = ?"},
  ]
  assert result.status is Status.SUCCEEDED
  assert result.reward == 1.0
  assert result.steps[0].mc_return == 1.0
  assert result.steps[0].info["reward_metadata"] == {"exact_match": 1.0}
  assert result.task == {"question": "2 + 2 = ?", "ground_truth": "4"}


def test_tool_agent_in_a_tool_environment():
  tools = {"calculator": calculator_tool.CalculatorTool}
  env = tool_environment.ToolEnvironment(
    {"question": "6 * 7 = ?"},
    tool_map=tools,
    reward_fn=lambda task, action: 1.0 if "42" in str(action) else 0.0,
    max_steps=5,
  )
  agent = tool_agent.ToolAgent("Use tools.", "qwen", tools)
  # Upstream's `finish` crashes on its own JSON arguments when it reads them,
  # so the last step is what upstream's environment can end: its step limit.
  result, prompts = collect(agent, env, [CALL] * 3, max_steps=3, gamma=0.5)
  assert result.status is Status.MAX_TURNS
  assert len(result.steps) == 3
  outputs = prompts[1][-1]
  assert outputs["role"] == "tool"
  assert "42" in outputs["content"]
  assert len(prompts[2]) == 6
  step = result.steps[0]
  assert isinstance(step, trajectory_lib.Step)
  assert step.model_response == CALL
  (call,) = step.action.action
  assert call["function"]["name"] == "calculator"
  # Ours is plain data and can be written.
  text = json.dumps(result.to_json())
  again = trajectory_lib.Trajectory.from_json(json.loads(text))
  assert again.steps[1].model_response == CALL


def test_a_crash_inside_upstreams_tool_environment_is_data():
  """Its `finish` call raises; that is one episode's outcome, not a crash."""
  tools = {"calculator": calculator_tool.CalculatorTool}
  env = tool_environment.ToolEnvironment(
    {"question": "?"},
    tool_map=tools,
    reward_fn=reward.get_reward_fn("exact_match"),
  )
  agent = tool_agent.ToolAgent("", "qwen", tools)
  finish = (
    '<tool_call>\n{"name": "finish", "arguments": {"response": "4"}}\n'
    "</tool_call>"
  )
  result, _ = collect(agent, env, [finish])
  assert result.status is Status.ENV_ERROR
  assert result.error.startswith("EnvStepError: AttributeError")
  assert not result.is_trainable


class Counting(base_environment.BaseTaskEnv):
  """A user's environment as upstream's guide has it; expects raw payloads."""

  closed = False

  def _initial_observation(self):
    return {"question": "count"}

  def _step_impl(self, action):
    assert isinstance(action, str), action
    return base_environment.EnvStepResult(
      observation=f"got {action}", reward=0.5, done=False, info={}
    )

  def final_reward_fn(self):
    return 2.0

  def close(self):
    self.closed = True


def test_template_environments_with_their_own_final_reward():
  env = Counting({}, max_steps=2)
  result, prompts = collect(
    model_agent.ModelAgent(""), env, ["one", "two"], gamma=0.5
  )
  assert env.closed
  assert prompts[1][-1] == {"role": "user", "content": "got one"}
  assert [s.reward for s in result.steps] == [0.5, 2.5]
  assert [s.mc_return for s in result.steps] == [1.75, 2.5]
  assert result.reward == 3.0


def test_an_agent_that_returns_no_action():
  class Silent(model_agent.ModelAgent):
    def update_from_model(self, response, **kwargs):
      super().update_from_model(response, **kwargs)
      return agent_types.Action(action=None)

  class Env(Counting):
    def _step_impl(self, action):
      assert action == []  # As upstream's engine has it.
      return base_environment.EnvStepResult({}, 1.0, True, {})

  result, _ = collect(Silent(""), Env({}), ["x"])
  assert result.status is Status.SUCCEEDED


def test_upstream_agents_give_token_exact_sequences():
  """With a PolicyModel: their message lists extend, so nothing is redone."""
  import numpy as np  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.core import policy_client  # pylint: disable=g-import-not-at-top

  end = 1

  class Renderer:
    stop_token_ids = (end,)
    image_token_id = None

    def render(self, messages, add_generation_prompt=True):
      return self.bridge(messages, last_sampled_is_eot=True)

    def bridge(self, new_messages, *, last_sampled_is_eot):
      text = "".join(f"<{m['role']}>{m['content']}" for m in new_messages)
      return policy_client.TokenPrompt([ord(c) + 2 for c in text + "<a>"])

    def decode(self, ids):
      return "".join(chr(i - 2) for i in ids)

  class Client:
    prompts = []

    async def generate(self, prompt, sampling, *, session):
      self.prompts.append(prompt.tokens.tolist())
      return policy_client.Completion(
        [67, end], [-1, -1], [0, 0], policy_client.FinishReason.STOP
      )

    async def release(self, session):
      pass

  client = Client()
  engine = tc.TrajectoryCollectEngine(
    model_agent.ModelAgent("s"),
    Counting({}, max_steps=3),
    tc.PolicyModel(client, Renderer()),
  )
  result = asyncio.run(engine.collect())
  (sequence,) = result.sequences
  assert sequence.num_sampled == 6
  assert len(client.prompts) == 3
  for before, after in zip(client.prompts, client.prompts[1:]):
    assert after[: len(before) + 2] == before + [67, end]
  assert np.array_equal(sequence.tokens[:-2], client.prompts[-1])


def test_the_queue_is_upstreams():
  assert issubclass(group_queue.GroupQueue, data_queue.AbstractDataQueue)
  queue = group_queue.GroupQueue(1)
  with pytest.raises(std_queue.Empty):
    queue.get(block=False)
