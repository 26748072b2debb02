"""Failures seen in other multi-turn stacks, each with a test that catches it.

The others stand with what they concern: the engine, groups, the queue, faults,
tool parsers, models and learners.
"""

import asyncio
import dataclasses
import json
import threading

import collector_fakes as fakes
import numpy as np
import pytest
import threaded_loop
from tunix.rl.multi_turn import tools
from tunix.rl.multi_turn import trajectory_collector as tc
from tunix.rl.multi_turn.agents import ToolAgent
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.environments import ToolEnvironment
from tunix.rl.multi_turn.rewards import RewardOutput
from tunix.rl.queue import group_queue

Status = trajectory_lib.TrajectoryStatus


def pair(task):
  return fakes.ListAgent(), fakes.ScriptEnv((0.0, 1.0))


def model(script=None, **kwargs):
  client = fakes.TokenClient(
    script or (lambda turn, sampling: [80, 81, fakes.EOT]), **kwargs
  )
  return tc.PolicyModel(client, fakes.CharRenderer()), client


def test_trainer_and_collector_on_one_loop_do_not_wait_for_each_other():
  """Deadlock: the loop blocked on a lock that waited for all rollouts."""
  policy, client = model()
  queue = group_queue.GroupQueue(2, group_queue.QueueConfig(max_staleness=1))
  collector = tc.GroupCollector(
    pair, policy, tc.CollectConfig(group_size=3, min_valid=2, concurrency=1)
  )
  loop = threaded_loop.ThreadedLoop(collector, tc.TaskSampler(range(3)), queue)

  async def main():
    collecting = asyncio.ensure_future(loop.run())
    for step in range(5):
      assert len((await queue.lease(timeout=30)).groups) == 2
      client.version = step + 1
      queue.set_version(step + 1)
    loop.stop()
    await collecting

  asyncio.run(asyncio.wait_for(main(), 60))


def test_a_blocking_model_does_not_block_other_episodes():
  """The same, seen from a blocking client: the loop goes on."""
  go_on = threading.Event()
  started = []

  def blocking(messages):
    started.append(1)
    # Returns only when all episodes have come as far as this.
    assert go_on.wait(20)
    return "x"

  async def main():
    collector = tc.GroupCollector(
      pair, blocking, tc.CollectConfig(group_size=8, min_valid=2)
    )
    collecting = asyncio.ensure_future(collector.collect("t"))
    while len(started) < 8:
      await asyncio.sleep(0.005)
    go_on.set()
    return await collecting

  group = asyncio.run(asyncio.wait_for(main(), 60))
  assert [t.status for t in group] == [Status.SUCCEEDED] * 8


def test_finish_and_a_registry_reward():
  """`finish` crashed; a RewardOutput broke the computation of returns."""
  env = ToolEnvironment(
    {"question": "2 + 2"},
    {},
    lambda task, action: RewardOutput(
      float(action == "4"), {"judge": "strict"}
    ),
  )
  reply = (
    '<tool_call>\n{"name": "finish", "arguments": {"response": "4"}}\n'
    "</tool_call>"
  )
  result = asyncio.run(
    tc.TrajectoryCollectEngine(
      ToolAgent(), env, lambda messages: reply, gamma=0.9
    ).collect()
  )
  assert result.error is None
  assert result.status is Status.SUCCEEDED
  assert (result.reward, result.steps[0].mc_return) == (1.0, 1.0)


def test_messages_are_shared_between_the_steps_of_an_episode():
  """Agents copied all messages, screenshots too, in every turn."""
  image = trajectory_lib.ImageRef("0" * 64, 32, 32)

  class Env(fakes.ScriptEnv):
    async def step(self, action):
      _, reward, done, info = await super().step(action)
      return {"screenshot": image, "text": "seen"}, reward, done, info

  policy, _ = model()
  turns = 30
  result = asyncio.run(
    tc.TrajectoryCollectEngine(
      ToolAgent(on_parse_error="retry"),
      Env((0.0,) * turns),
      policy,
      max_steps=turns,
    ).collect()
  )
  assert len(result.steps) == turns
  objects = {id(m) for step in result.steps for m in step.chat_completions}
  assert len(objects) <= 2 * turns + 1
  # And so is what is written: linear in the turns, not quadratic.
  sizes = [
    len(str(step["chat_completions"])) for step in result.to_json()["steps"]
  ]
  assert max(sizes[1:]) < 3 * min(sizes[1:])


def test_completions_without_a_version_or_log_prob_are_refused():
  class Client(fakes.TokenClient):
    async def generate(self, prompt, sampling, *, session):
      return policy_client.Completion(
        [80, fakes.EOT], [-1.0, 0.5], [0, 0], policy_client.FinishReason.STOP
      )

  policy = tc.PolicyModel(Client(None), fakes.CharRenderer())
  result = asyncio.run(tc.TrajectoryCollectEngine(*pair("t"), policy).collect())
  assert result.status is Status.MODEL_ERROR
  assert "log-prob" in result.error


@pytest.mark.parametrize("keeps", ["the whole call", "half of the call"])
def test_a_reply_cut_at_its_length_runs_the_calls_that_are_whole(keeps):
  """docs/decisions.md, "A reply that was cut off"; real tools and grammar."""
  call = json.dumps({"name": "calculator", "arguments": {"expression": "6*7"}})
  text = f"<tool_call>\n{call}\n</tool_call>"
  length = len(text) + 3 if keeps == "the whole call" else len(text) // 2
  endless = [ord(c) + 10 for c in text + " and on and on"]
  end = [ord(c) + 10 for c in "42"] + [fakes.EOT]

  class Client(fakes.TokenClient):
    async def generate(self, prompt, sampling, *, session):
      completion = await super().generate(prompt, sampling, session=session)
      return dataclasses.replace(
        completion, logprobs=np.full(len(completion.tokens), -1.0)
      )

  client = Client(lambda turn, _: end if turn else endless)
  policy = tc.PolicyModel(
    client,
    fakes.CharRenderer(),
    policy_client.SamplingParams(max_new_tokens=length),
  )
  task = {"question": "6*7=?", "ground_truth": "42"}
  tool_map = {"calculator": tools.CalculatorTool}
  result = asyncio.run(
    tc.TrajectoryCollectEngine(
      ToolAgent(tool_map=tool_map, on_parse_error="retry"),
      ToolEnvironment(task, tool_map, reward_fn="exact_match"),
      policy,
    ).collect()
  )
  assert result.status.is_policy_outcome, result.error
  first = result.steps[0]
  assert first.info["response_truncated"]
  (sequence, *_) = result.sequences
  assert (sequence.loss_mask & (sequence.turn_ids == 0)).sum() == length
  shown = "".join(chr(t - 10) for t in client.prompts[1] if t > 10)
  if keeps == "the whole call":
    assert [c.name for c in first.action.tool_calls] == ["calculator"]
    assert "returned result: 42" in shown
  else:
    assert not first.action.tool_calls and "returned result" not in shown
