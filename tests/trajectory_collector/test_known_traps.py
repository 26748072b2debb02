"""Failures seen in other multi-turn stacks, each with a test that catches it.

The ones that concern tool parsers, models and learners stand with those.
"""

import asyncio
import dataclasses
import json
import queue as std_queue
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


def test_members_of_a_group_are_sampled_with_different_seeds():
  """Without any seed in the settings, all members were identical."""
  policy, client = model()
  collector = tc.GroupCollector(
    pair, policy, tc.CollectConfig(group_size=6, min_valid=2)
  )
  asyncio.run(collector.collect("t"))
  seeds = [sampling.seed for _, sampling in client.requests]
  assert None not in seeds
  assert len(set(seeds)) == len(seeds) == 12


def test_the_end_of_turn_token_is_part_of_the_next_context():
  """EOS dropped: the second context equalled the training prefix in 0 %."""
  policy, client = model()
  result = asyncio.run(tc.TrajectoryCollectEngine(*pair("t"), policy).collect())
  (sequence,) = result.sequences
  second = len(client.prompts[1])
  assert np.array_equal(sequence.tokens[:second], client.prompts[1])
  first = len(client.prompts[0])
  assert client.prompts[1][first + 2] == fakes.EOT
  assert sequence.loss_mask[first : first + 3].all()


def test_a_slow_consumer_gets_every_ready_group():
  """A clearing flag outranked ready groups: 1 of 10 was delivered."""
  policy, _ = model()
  queue = group_queue.GroupQueue(10)
  collector = tc.GroupCollector(
    pair, policy, tc.CollectConfig(group_size=2, min_valid=2)
  )
  loop = threaded_loop.ThreadedLoop(
    collector, tc.TaskSampler(range(10), epochs=1), queue
  )
  loop.start()
  assert loop.join(30)  # It has ended before anything is consumed.
  got = 0
  while True:
    try:
      queue.get(timeout=5)
    except group_queue.QueueClosed:
      break
    got += 1
  assert got == 10


def test_an_over_long_response_is_kept_and_trainable():
  """The whole turn was lost and its mask 0."""
  policy, _ = model(lambda turn, sampling: [80] * 500)
  result = asyncio.run(tc.TrajectoryCollectEngine(*pair("t"), policy).collect())
  assert result.num_sampled == 2 * policy.sampling.max_new_tokens
  assert result.is_trainable


def test_one_exception_in_a_step_does_not_end_training():
  count = iter(range(1000))

  def sometimes(task):
    agent, env = pair(task)
    if next(count) % 5 == 0:
      env.faults = {"step": "raise"}
    return agent, env

  policy, client = model()
  queue = group_queue.GroupQueue(2)
  collector = tc.GroupCollector(
    sometimes, policy, tc.CollectConfig(group_size=4, min_valid=2)
  )
  loop = threaded_loop.ThreadedLoop(collector, tc.TaskSampler(range(4)), queue)
  loop.start()
  for step in range(4):
    for group in queue.get_batch(timeout=30):
      assert len(group) == 4 and len(group.valid) >= 3
    client.version = step + 1
    queue.set_version(step + 1)
  loop.stop()
  assert loop.join(20)
  assert loop.counts["episodes_env_error"] >= 4


def test_prompt_and_budget_over_the_context_length_is_an_outcome():
  policy, _ = model(limit=30)
  result = asyncio.run(tc.TrajectoryCollectEngine(*pair("t"), policy).collect())
  assert result.status is Status.CONTEXT_LIMIT


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


def test_a_model_call_that_hangs_has_a_deadline():
  async def hang(messages):
    await asyncio.sleep(3600)

  agent, env = pair("t")
  result = asyncio.run(
    tc.TrajectoryCollectEngine(
      agent, env, hang, deadlines=tc.Deadlines(model=0.05)
    ).collect()
  )
  assert result.status is Status.TIMEOUT
  assert env.closed == 1


def test_reward_functions_see_every_turn():
  """They saw the first assistant turn only."""
  texts = []
  replies = iter(["one", "two"])
  agent, env = pair("t")
  asyncio.run(
    tc.TrajectoryCollectEngine(
      agent,
      env,
      lambda messages: next(replies),
      lambda trajectory: len(
        texts.extend(s.model_response for s in trajectory.steps) or ""
      ),
    ).collect()
  )
  assert texts == ["one", "two"]


def test_the_queue_is_bounded():
  queue = group_queue.GroupQueue(2)
  policy, _ = model()
  collector = tc.GroupCollector(
    pair, policy, tc.CollectConfig(group_size=2, min_valid=2)
  )
  group = asyncio.run(collector.collect("t"))
  queue.put(group)
  queue.put(group)
  with pytest.raises(std_queue.Full):
    queue.put(group, timeout=0.01)


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


def test_a_group_without_enough_members_is_not_statistics():
  """Broken environments entered the group statistics as reward 0."""
  count = iter(range(100))

  def mostly_broken(task):
    agent, env = pair(task)
    if next(count) % 4:
      env.faults = {"reset": "raise"}
    return agent, env

  policy, _ = model()
  queue = group_queue.GroupQueue(1)
  collector = tc.GroupCollector(
    mostly_broken,
    policy,
    tc.CollectConfig(group_size=4, min_valid=2, max_requeues=1),
  )
  loop = threaded_loop.ThreadedLoop(collector, iter(["a"]), queue, backoff=0)
  asyncio.run(loop.run())
  with pytest.raises(group_queue.QueueClosed):
    queue.get()
  assert loop.counts["given_up"] == 1


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
