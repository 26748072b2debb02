"""An episode with stateful tools: created first, released once, rewarded."""

import pytest
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.environments import tool_request_env
from tunix.rl.multi_turn.tools import calculator
from tunix.rl.multi_turn.tools import gsm8k_tool
from tunix.rl.multi_turn.tools import request as request_lib
from tunix.rl.multi_turn.tools import stateful

State = request_lib.RequestState
ROW = {
  "task_id": "t",
  "question": "What is 5 + 3?",
  "tools_kwargs": {"box": {"create_kwargs": {"ground_truth": "8"}}},
}


class Box(gsm8k_tool.Gsm8kTool):
  """Counts what is open."""

  def __init__(self):
    super().__init__()
    self.log = []

  async def create(self, *args, **kwargs):
    self.log.append("create")
    return await super().create(*args, **kwargs)

  async def release(self, instance_id, **kwargs):
    self.log.append("release")
    await super().release(instance_id, **kwargs)


def made(row=None, max_steps=3):
  box = Box()
  adapter = stateful.StatefulToolAdapter(box, name="box")
  env = tool_request_env.ToolRequestEnvironment(
    row or ROW, {"box": adapter}, max_steps
  )
  return env, box


def call(answer, call_id="c1"):
  return trajectory.Action(
    [trajectory.ToolCall("box", {"answer": answer}, call_id)]
  )


async def test_calls_then_an_answer():
  env, box = made()
  observation, info = await env.reset()
  assert observation == {"question": "What is 5 + 3?"}
  assert info["task"]["task_id"] == "t" and box.log == ["create"]
  observation, reward, ended, _ = await env.step(call("7"))
  assert observation == {"tool_outputs": {"c1": "The answer is wrong."}}
  assert (reward, ended) == (0.0, False)
  await env.step(call("8", "c2"))
  _, reward, ended, info = await env.step(trajectory.Action("It is 8."))
  assert (reward, ended, info["success"]) == (1.0, True, True)
  assert info["call_rewards"] == [0.0, 1.0]
  assert info["finish_reason"] == "stop" and box.log == ["create", "release"]
  assert env.request.state is State.COMPLETED
  await env.close()
  assert box.log == ["create", "release"]


async def test_the_last_turn_ends_with_what_the_tools_are_worth():
  env, box = made(max_steps=1)
  await env.reset()
  _, reward, ended, info = await env.step(call("8"))
  assert (reward, ended, info["status"]) == (1.0, True, "max_turns")
  assert box.log == ["create", "release"]


async def test_an_episode_that_is_broken_off_releases_and_can_be_reset():
  env, box = made()
  await env.reset()
  await env.close()
  assert env.request.state is State.FAILED
  await env.reset()
  await env.close()
  assert box.log == ["create", "release"] * 2
  with pytest.raises(RuntimeError, match="call reset first"):
    await env.step("8")


async def test_a_creation_that_fails_and_bad_arguments_are_named():
  env, _ = made({**ROW, "tools_kwargs": {}})
  with pytest.raises(ValueError, match="ground_truth"):
    await env.reset()
  env, _ = made({**ROW, "tools_kwargs": {"bax": {}}})
  with pytest.raises(ValueError, match="did you mean 'box'"):
    await env.reset()
  with pytest.raises(ValueError, match="'calc' is not a stateful tool"):
    tool_request_env.ToolRequestEnvironment(
      ROW, {"calc": calculator.CalculatorTool}
    )
