"""The loop that feeds a queue from a rollout function."""

import argparse
import asyncio
import json
import types

import numpy as np
import pytest
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.run.recorded_data import feeding
from tunix.rl.multi_turn.run.recorded_data import function_loop
from tunix.rl.multi_turn.run.recorded_data import reader as reader_lib
from tunix.rl.multi_turn.trajectory_collector import agent_rollout
from tunix.rl.multi_turn.trajectory_collector import completion_checks
from tunix.rl.multi_turn.trajectory_collector import sampling_rule
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import (
  samples as samples_lib,
)
from tunix.rl.queue import admission
from tunix.rl.queue import group_queue

pytestmark = pytest.mark.timeout(120)
BANNED = 90
SIZE, MEMBERS = 2, 2


def rollout(rollout_id, bad=(), useless=(), **more):
  """Samples of a rollout; groups of `bad` have a token that is banned."""
  return [
    agent_rollout.Sample(
      name,
      f"{name}-{n}",
      [1, 2, BANNED if name in bad else 3],
      0 if name in useless else 2,
      float(n),
      [] if name in useless else [1, 1],
      **{"rollout_log_probs": [-1.0, -2.0], **more},
    )
    for name in (f"r{rollout_id}.{group}" for group in range(SIZE))
    for n in range(MEMBERS)
  ]


def loop_of(function, num_rollout=2, reported=None, rule=None):
  queue = group_queue.GroupQueue(SIZE, admission.QueueConfig(max_staleness=4))
  loop = function_loop.FunctionLoop(
    function,
    argparse.Namespace(
      num_rollout=num_rollout,
      rollout_batch_size=SIZE,
      n_samples_per_prompt=MEMBERS,
    ),
    str,
    reader_lib.EpisodeReader(
      None,
      None,
      images_lib.ImageStore(),
      parser="hermes",
      vocabulary=completion_checks.Vocabulary(100, frozenset({BANNED})),
      rule=rule,
    ),
    queue,
    min_valid=1,
    observers=types.SimpleNamespace(
      on_event=([] if reported is None else reported).append
    ),
  )
  return loop, queue


async def names_of(loop, queue, count):
  """Instance ids of groups that the running loop has queued."""
  running = asyncio.ensure_future(loop.run())
  names = []
  try:
    for _ in range(count):
      group = await asyncio.to_thread(queue.get, 10)
      names.append(feeding.instance_of(group))
  finally:
    queue.close()
    loop.stop()
    await asyncio.gather(running, return_exceptions=True)
  return names


async def test_a_sample_of_another_sampling_is_masked_and_counted():
  """Its metadata has the item's parameters, as `make_samples` writes them."""

  def function(args, rollout_id, data_buffer):
    del args, data_buffer
    samples = rollout(rollout_id)
    item = {"uid": "u", "instance_id": samples[0].index, "messages": [],
            "reward": 0.0, "extra_info": {}, "tokens": [1, 2, 3],
            "loss_mask": [0, 1, 1], "logprobs": [None, -1.0, -2.0],
            "sampling_params": {"temperature": 0.4}}  # fmt: skip
    (samples[0],) = samples_lib.make_samples(item, None)
    return samples

  loop, queue = loop_of(
    function, num_rollout=1, rule=sampling_rule.SamplingRule()
  )
  running = asyncio.ensure_future(loop.run())
  groups = [await asyncio.to_thread(queue.get, 10) for _ in range(SIZE)]
  loop.stop()
  await asyncio.gather(running, return_exceptions=True)
  assert [[t.untrained_tokens for t in g] for g in groups] == [[2, 0], [0, 0]]
  assert [[t.num_sampled for t in g] for g in groups] == [[0, 2], [2, 2]]


def saved(loop):
  return json.loads(json.dumps(loop.state_dict()))


@pytest.mark.parametrize("kind", ["bad", "useless"])
def test_a_resumed_run_makes_up_for_a_group_dropped_before(kind):
  calls = []

  def function(args, rollout_id, data_buffer):
    calls.append(rollout_id)
    return rollout(rollout_id, **{kind: {"r0.1"}})

  reported = []
  loop, queue = loop_of(function, num_rollout=1, reported=reported)
  # The group is dropped, and the first group of the rollout in its place comes.
  names = asyncio.run(names_of(loop, queue, 2))
  assert names == ["r0.0", "r1.0"]
  (fault,) = [e for e in reported if isinstance(e, events.Fault)]
  assert "instance 'r0.1" in str(fault) and loop.over == ""
  state = saved(loop)
  assert state["dropped"] == 1
  trained = [
    index
    for index, items in state["queued"]
    if items[0]["instance_id"] in names
  ]
  # Two groups were trained on, and one is left: the second update needs r2.0.
  again, queue = loop_of(function, num_rollout=2)
  again.load_state_dict(state, consumed=trained)
  names = asyncio.run(names_of(again, queue, 2))
  assert names == ["r1.1", "r2.0"] and calls == [0, 1, 2]


def test_a_setting_that_lets_data_be_used_is_still_an_error():
  loop, queue = loop_of(lambda *_: rollout(0, rollout_log_probs=None))
  with pytest.raises(reader_lib.SettingError, match="missing_logprobs"):
    asyncio.run(asyncio.wait_for(loop.run(), 30))
  with pytest.raises(group_queue.QueueFailed):
    queue.get(timeout=5)


def test_a_run_of_bad_groups_ends():
  def function(args, rollout_id, data_buffer):
    return rollout(rollout_id, bad={f"r{rollout_id}.{n}" for n in range(SIZE)})

  loop, _ = loop_of(function)
  with pytest.raises(ValueError, match="32 groups .* in a row .* 90"):
    asyncio.run(asyncio.wait_for(loop.run(), 60))


def test_values_of_numpy_are_trained_on_and_kept():
  def function(args, rollout_id, data_buffer):
    samples = rollout(rollout_id)
    for sample in samples:
      sample.prompt = [{"role": "user", "content": sample.prompt}]
      sample.reward = np.float32(sample.reward)
      sample.tokens = np.array(sample.tokens)
      sample.loss_mask = np.array(sample.loss_mask)
      sample.rollout_log_probs = np.array(sample.rollout_log_probs, np.float32)
      sample.weight_versions = np.array([0, 0])
      sample.metadata = {"score": np.float32(0.5)}
    data_buffer.add_samples(samples)
    return samples

  loop, queue = loop_of(function)
  names = asyncio.run(names_of(loop, queue, 3))
  assert names == ["r0.0", "r0.1", "r1.0"]
  state = saved(loop)
  (index, items), *_ = state["queued"]
  assert index == 0 and items[0]["sequences"][0]["logprobs"] == [
    None,
    -1.0,
    -2.0,
  ]
  assert items[0]["extra_info"] == {"score": 0.5}
  assert items[0]["uid"] == "[{'role': 'user', 'content': 'r0.0-0'}]"
  assert state["data_buffer"]["groups"][0][0]["tokens"] == [1, 2, 3]


def test_metadata_that_is_no_json_names_its_sample():
  loop, _ = loop_of(lambda *_: rollout(0, metadata={"of": {1, 2}}))
  with pytest.raises(ValueError, match="sample 'r0.0-0' of 'r0.0'.*set"):
    asyncio.run(asyncio.wait_for(loop.run(), 30))
