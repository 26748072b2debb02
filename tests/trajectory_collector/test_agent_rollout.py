"""The trainer side of the rollout buffer's protocol, against a peer of it."""

import argparse
import asyncio
import json
import threading
import time
import types

import buffer_peer
import buffer_services
import chat_server
import pytest
import rollout_args
import tokenizers
from tunix.rl.multi_turn.trajectory_collector import agent_rollout
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import client
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import rollout
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import samples

MODULE = "test_agent_rollout"
ALONE = (
  "--n-samples-per-prompt",
  "1",
  "collect.min_valid=1",
  "--disable-rewards-normalization",
)
"""Groups of one, which nothing can be compared in."""


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
  monkeypatch.setattr(client, "POLL_S", 0.01)
  monkeypatch.setattr(rollout, "POLL_S", 0.01)


@pytest.fixture(name="tokenizer", scope="module")
def _tokenizer():
  words = ["<|im_start|>", "<|im_end|>", "[UNK]", *map(chr, range(32, 127))]
  made = tokenizers.Tokenizer(
    tokenizers.models.BPE({w: i for i, w in enumerate(words)}, [])
  )
  made.add_special_tokens(words[:2])
  return made


@pytest.fixture(name="tasks")
def _tasks(tmp_path):
  path = tmp_path / "tasks.jsonl"
  rows = [
    {
      "instance_id": f"math_{i}",
      "prompt": [{"role": "user", "content": f"{i}+1"}],
      "answer": i + 1,
    }
    for i in range(12)
  ]
  path.write_text("".join(json.dumps(r) + "\n" for r in rows))
  return path


def _args(url, tasks, tokenizer=None, *more):
  return rollout_args.make(
      url, "--prompt-data", str(tasks), "--num-epoch", "1",
      "buffer.poll_s=0.01", *more, tokenizer=tokenizer,
  )  # fmt: skip


def _generate(args, rollout_id, buffer):
  return asyncio.run(
    agent_rollout.generate_agent_rollout(args, rollout_id, buffer)
  )


# --- the protocol ---------------------------------------------------------


def test_three_rounds_start_once_and_take_whole_groups(tasks, tokenizer):
  with buffer_peer.BufferPeer() as peer:
    args = _args(peer.url, tasks, tokenizer)
    buffer = agent_rollout.DataBuffer(args)
    seen = []
    for rollout_id in range(3):
      found = _generate(args, rollout_id, buffer)
      assert len(found) == 8
      groups = {s.index for s in found}
      assert len(groups) == 2
      seen += sorted(groups)
    assert len(peer.payloads) == 1
    assert len(set(seen)) == 6


def test_a_resumed_trainer_lets_the_service_skip_what_was_trained_on(
  tasks, tokenizer
):
  with buffer_peer.BufferPeer() as peer:
    args = _args(peer.url, tasks, tokenizer)
    buffer = agent_rollout.DataBuffer(args)
    first = {s.index for s in _generate(args, 0, buffer)}
    kept = json.loads(json.dumps(buffer.state_dict()))
    assert first <= set(kept["metadata"]["0"])
    again = agent_rollout.DataBuffer(args)
    again.load_state_dict(kept)
    later = []
    while True:
      if not len(again) and set(client.flat_ids(again.metadata)) == {
        f"math_{i}" for i in range(12)
      }:
        break
      later += [s.index for s in _generate(args, 1, again)]
    assert not first & set(later)
    _, second = peer.payloads
    skipped = second["skip_instance_ids"]
    assert first <= set(skipped) and all(isinstance(i, str) for i in skipped)


@pytest.mark.slow
def test_the_service_of_this_package_and_its_own_generator_are_read(
  tasks, tokenizer, tmp_path
):
  with (
    chat_server.serving() as (engine, _),
    buffer_services.Running(tmp_path / "buffer") as running,
  ):
    args = _args(running.url, tasks, tokenizer, "--rollout-num-process", "4")
    args.remote_engine_url = engine
    args.start_options = {**args.start_options, "model": "adder"}
    buffer = agent_rollout.DataBuffer(args)
    found = _generate(args, 0, buffer)
  assert len(found) == 8
  assert all(float(s.metadata["timestamp"]) > 1e9 for s in found)


@pytest.mark.slow
def test_generation_goes_on_while_the_trainer_trains(
  tasks, tokenizer, tmp_path
):
  training = threading.Event()
  with (
    chat_server.serving() as (engine, server),
    buffer_services.Running(tmp_path / "buffer") as running,
  ):
    complete = server.complete

    def answer(body):
      if server.answered > 8:  # Of the second round.
        training.wait(30)
      return complete(body)

    server.complete = answer
    args = _args(running.url, tasks, tokenizer, "--rollout-num-process", "4")
    args.remote_engine_url = engine
    args.start_options = {**args.start_options, "model": "adder"}
    buffer = agent_rollout.DataBuffer(args)
    assert len(_generate(args, 0, buffer)) == 8
    reads = running.stats()["reads"]
    training.set()  # No reader is left after this point.
    due = time.monotonic() + 30
    while running.stats()["total_written"] < 48:
      assert time.monotonic() < due
      time.sleep(0.05)
    assert running.stats()["reads"] == reads


def _exact(name, uid):
  return _item(name, uid, tokens=[1, 2], loss_mask=[0, 1])


def test_an_empty_data_buffer_does_not_start_the_service_again(monkeypatch):
  starts, numbers = [], iter(range(100))

  async def as_many_as_needed(api_base_url):
    return [_exact(f"i{n}", f"u{n}") for n, _ in zip(numbers, "ab")], {}

  monkeypatch.setattr(client, "get_rollout_data", as_many_as_needed)
  monkeypatch.setattr(client, "start_rollout", lambda *a: starts.append(a))
  args = _args("http://b", "t.jsonl", None, *ALONE)
  buffer = agent_rollout.DataBuffer(args)
  for rollout_id in range(3):
    assert len(_generate(args, rollout_id, buffer)) == 2
    assert not len(buffer)
  assert len(starts) == 1


def test_it_reads_at_fixed_intervals_until_there_is_enough(monkeypatch):
  monkeypatch.undo()  # The protocol's pauses, of a clock that does not run.
  pauses = []
  answers = [
    [_exact("a", f"a{n}") for n in range(3)],
    agent_rollout.ClientError("it is away"),
    [_exact("b", f"b{n}") for n in range(3)],
    [_exact("c", f"c{n}") for n in range(3)],
  ]

  async def some(api_base_url):
    answer = answers.pop(0)
    if isinstance(answer, Exception):
      raise answer
    return answer, {}

  async def sleep(seconds):
    pauses.append(seconds)

  clock = types.SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread)
  monkeypatch.setattr(rollout, "asyncio", clock)
  monkeypatch.setattr(client, "get_rollout_data", some)
  monkeypatch.setattr(client, "start_rollout", lambda *a: {})
  args = _args("http://b", "t.jsonl", None, "--rollout-batch-size", "3")
  args.fetch_interval_s = 5
  buffer = agent_rollout.DataBuffer(args)
  assert len(_generate(args, 0, buffer)) == 9
  # Before each of three reads, and after the error.
  assert pauses == [5.0] * 4 and not answers and not len(buffer)


# --- errors ----------------------------------------------------------------


def test_an_unreachable_service_is_a_client_error():
  with pytest.raises(agent_rollout.ClientError, match="127.0.0.1:9"):
    asyncio.run(agent_rollout.get_rollout_data("http://127.0.0.1:9"))
  with pytest.raises(agent_rollout.ClientError, match="start_rollout"):
    agent_rollout.start_rollout(
      "http://127.0.0.1:9", _args("http://b", "t.jsonl"), {}
    )


def test_a_service_without_a_ready_group_is_a_timeout():
  with buffer_peer.BufferPeer() as peer:
    with pytest.raises(TimeoutError, match="no group ready within 1 s"):
      asyncio.run(agent_rollout.get_rollout_data(peer.url, timeout=1))
    assert peer.reads > 1


@pytest.mark.parametrize(
  "key", ["uid", "instance_id", "messages", "reward", "extra_info"]
)
def test_an_item_without_a_required_key_is_a_value_error(key):
  item = {
    "uid": "u",
    "instance_id": "i",
    "messages": [],
    "reward": 1,
    "extra_info": {},
  }
  del item[key]
  with pytest.raises(ValueError, match=f"item 0: {key} is missing"):
    client.check(client.unpack({"success": True, "data": {"data": [item]}}))


def test_groups_beside_one_that_cannot_be_used_are_delivered():
  exact = dict(tokens=[1, 2], loss_mask=[0, 1])

  def some(payload, write, stop):
    for name in ("a", "b", "c"):
      for n in range(4):
        bad = {"logprobs": [None, 0.5]} if (name, n) == ("b", 2) else {}
        item = _item(name, f"{name}{n}", **exact)
        write({**item, **bad})

  with buffer_peer.BufferPeer({"math": some}) as peer:
    args = _args(peer.url, "t.jsonl")
    found = _generate(args, 0, agent_rollout.DataBuffer(args))
  assert {s.index for s in found} == {"a", "c"} and len(found) == 8


@pytest.mark.parametrize(
  "answer, problem",
  [
    ({"message": "hi"}, "no field success"),
    ({"success": True, "data": "x"}, "data must be a list"),
    ({"success": True, "data": {"data": None}}, "data must be a list"),
    (
      {"success": True, "data": {"data": [], "meta_info": 3}},
      "meta_info must be",
    ),
  ],
)
def test_an_answer_of_another_protocol_is_a_value_error(answer, problem):
  with pytest.raises(ValueError, match=problem):
    client.check(client.unpack(answer))


def test_items_may_be_wrapped_and_data_a_plain_list():
  item = {
    "uid": "u",
    "instance_id": 4,
    "messages": [],
    "reward": 1,
    "extra_info": {},
  }
  found = client.unpack({"success": True, "data": [{"data": item}]})
  assert found.items == [item] and found.meta_info == {}


def test_an_empty_success_is_nothing_ready():
  for data in ([], {"data": [], "meta_info": {"total_samples": 0}}):
    assert client.unpack({"success": True, "data": data}) is None


def test_num_takes_some_or_all(tasks):
  with buffer_peer.BufferPeer() as peer:
    agent_rollout.start_rollout(peer.url, _args(peer.url, tasks), {})
    for thread in peer._threads:
      thread.join(10)
    data, meta = asyncio.run(agent_rollout.get_rollout_data(peer.url, 4))
    assert len(data) == 4 == meta["total_samples"]
    data, meta = asyncio.run(agent_rollout.get_rollout_data(peer.url, 8000))
    assert len(data) == 44 and meta["num_groups"] == 11
    with pytest.raises(ValueError, match="num must be >= 1"):
      asyncio.run(agent_rollout.get_rollout_data(peer.url, 0))


def test_num_counts_items_of_this_package_s_service(buffer):
  for name in "abc":
    buffer.write(*buffer_services.group(name))
  read = agent_rollout.get_rollout_data
  with pytest.raises(TimeoutError, match="no group ready"):
    asyncio.run(read(buffer.url, 13, 0.3))  # More than there is.
  data, meta = asyncio.run(read(buffer.url, 4))
  assert {i["instance_id"] for i in data} == {"a"} and len(data) == 4
  assert meta["finished_groups"] == ["a"]
  data, _ = asyncio.run(read(buffer.url))
  assert [i["instance_id"] for i in data] == ["b"] * 4 + ["c"] * 4


@pytest.mark.parametrize("limit, ends", [("2", True), ("-1", False)])
def test_errors_count_against_the_limit_and_minus_one_is_none(
  limit, ends, tasks, tokenizer
):
  with buffer_peer.BufferPeer() as peer:
    args = _args(
      peer.url, tasks, tokenizer, "--fetch-trajectory-retry-times", limit
    )
    peer.failing = 5
    buffer = agent_rollout.DataBuffer(args)
    if ends:
      with pytest.raises(agent_rollout.ClientError, match="it fails as"):
        _generate(args, 0, buffer)
      assert peer.failing == 3
    else:
      assert len(_generate(args, 0, buffer)) == 8
      assert not peer.failing


@pytest.mark.parametrize("value", ["0", "-2", "x"])
def test_a_limit_that_makes_no_sense_is_refused(value):
  with pytest.raises(ValueError, match="^--fetch-trajectory-retry-times: "):
    _args("http://b", "t.jsonl", None, "--fetch-trajectory-retry-times", value)


def test_a_token_is_sent(tasks):
  with buffer_peer.BufferPeer(token="abc") as peer:
    args = _args(peer.url, tasks)
    with pytest.raises(agent_rollout.ClientError, match="401"):
      agent_rollout.start_rollout(peer.url, args, {})
    args.rollout_buffer_token = "abc"
    assert agent_rollout.start_rollout(peer.url, args, {}) == {
      "message": "Rollout started"
    }


def test_waiting_does_not_block_the_event_loop(tasks, tokenizer):
  held = threading.Event()

  def late(payload, write, stop):
    held.wait(20)
    buffer_peer.arithmetic(payload, write, stop)

  async def both(args, buffer):
    work = asyncio.ensure_future(
      agent_rollout.generate_agent_rollout(args, 0, buffer)
    )
    ticks = 0
    while ticks < 20:
      await asyncio.sleep(0.01)
      ticks += 1
    assert not work.done()
    held.set()
    return await work

  with buffer_peer.BufferPeer({"math": late}) as peer:
    args = _args(peer.url, tasks, tokenizer)
    assert len(asyncio.run(both(args, agent_rollout.DataBuffer(args)))) == 8


# --- samples ---------------------------------------------------------------


def _item(name="math_1", uid="u", reward=1.0, timestamp=0.0, **more):
  return {
    "uid": uid,
    "instance_id": name,
    "messages": [
      {"role": "user", "content": "hi"},
      {"role": "assistant", "content": "a"},
      {"role": "user", "content": "go"},
      {"role": "assistant", "content": "bc"},
    ],
    "reward": reward,
    "extra_info": {"timestamp": timestamp, "finish_reason": "stop"},
  } | more


def test_text_becomes_tokens_by_the_mask_generator_and_is_flagged(tokenizer):
  generator = samples.loss_mask_lib.make("qwen3", tokenizer)
  (sample,) = samples.make_samples(_item(), generator)
  masked = samples.loss_mask_lib.masked_tokens(generator, _item()["messages"])
  assert (sample.index, sample.prompt) == ("math_1", "u")
  assert sample.tokens == masked.token_ids
  assert sample.response_length == masked.response_length
  assert sample.loss_mask == masked.response_mask
  assert sample.metadata["text_only"] and sample.rollout_log_probs is None
  assert sample.metadata["raw_reward"] == 1.0
  # The first trained token to the end: multi-turn, the question between is 0.
  assert 0 in sample.loss_mask and sample.loss_mask[0] == 1


class LengthsOnly(samples.loss_mask_lib.MultiTurnLossMaskGenerator):
  """A mask generator of one's own: a token for each message."""

  def get_loss_mask(self, messages):
    mask = [int(m["role"] == "assistant") for m in messages]
    return [len(m["content"]) for m in messages], mask


def test_the_mask_generator_is_the_one_of_the_option(monkeypatch, tokenizer):

  async def one(api_base_url):
    return [_item()], {}

  monkeypatch.setattr(client, "get_rollout_data", one)
  monkeypatch.setattr(client, "start_rollout", lambda *a: {})
  common = (*ALONE, "--rollout-batch-size", "1")

  def samples_by(kind):
    args = _args(
      "http://b", "t.jsonl", tokenizer, *common, "--loss-mask-type", kind
    )
    return _generate(args, 0, agent_rollout.DataBuffer(args))

  (sample,) = samples_by(f"{MODULE}:LengthsOnly")
  assert (sample.tokens, sample.loss_mask) == ([2, 1, 2, 2], [1, 0, 1])
  with pytest.raises(ValueError, match="qwen2"):
    samples_by("qwen2")


def test_a_token_exact_item_keeps_its_tokens_and_log_probs():
  item = _item(
    tokens=[5, 6, 7, 8],
    loss_mask=[0, 1, 0, 1],
    logprobs=[None, -0.5, None, -0.25],
    versions=[None, 3, None, 4],
    raw_reward=0.25,
    extra_info={"finish_reason": "length"},
  )
  (sample,) = samples.make_samples(item, None)
  assert sample.tokens == [5, 6, 7, 8] and sample.response_length == 3
  assert sample.loss_mask == [1, 0, 1]
  assert sample.rollout_log_probs == [-0.5, None, -0.25]
  assert sample.weight_versions == [3, None, 4]
  assert sample.truncated and sample.metadata["raw_reward"] == 0.25
  assert "text_only" not in sample.metadata


def test_nothing_trained_is_an_empty_mask_not_the_whole_sequence():
  item = _item(tokens=[5, 6], loss_mask=[0, 0])
  (sample,) = samples.make_samples(item, None)
  assert sample.response_length == 0 and sample.loss_mask == []


def test_the_newest_groups_come_first_and_the_others_are_kept(monkeypatch):
  exact = dict(tokens=[1, 2], loss_mask=[0, 1])
  items = [
    _item("a", "a0", timestamp=5, **exact),
    _item("b", "b0", timestamp=1, **exact),
    _item("a", "a1", timestamp=2, **exact),
    _item("c", "c0", timestamp=9, **exact),
    _item("b", "b1", timestamp=1, **exact),
    _item("c", "c1", timestamp=3, **exact),
  ]

  async def all_at_once(api_base_url):
    return items, {"total_samples": 6, "avg_reward": 1.0}

  monkeypatch.setattr(client, "get_rollout_data", all_at_once)
  monkeypatch.setattr(client, "start_rollout", lambda *a: {})
  args = _args("http://b", "t.jsonl", None, *ALONE, "--rollout-batch-size", "1")
  buffer = agent_rollout.DataBuffer(args)
  found = _generate(args, 0, buffer)
  assert [s.prompt for s in found] == ["c0", "c1"]
  # What was delivered is not lost, and is taken without another read.
  monkeypatch.setattr(client, "get_rollout_data", None)
  assert [s.prompt for s in _generate(args, 1, buffer)] == ["a0", "a1"]
  assert [s.prompt for s in _generate(args, 2, buffer)] == ["b0", "b1"]
  assert buffer.metadata["0"] == ["a", "b", "c"]


def test_what_a_read_delivered_stays_when_a_later_read_fails(monkeypatch):
  exact = dict(tokens=[1, 2], loss_mask=[0, 1])
  answers = [
    ([_item("a", "a0", **exact)], {"finished_groups": ["a", "dropped"]}),
    agent_rollout.ClientError("it is gone"),
    ([_item("b", "b0", **exact)], {}),
  ]

  async def one_at_a_time(api_base_url):
    answer = answers.pop(0)
    if isinstance(answer, Exception):
      raise answer
    return answer

  monkeypatch.setattr(client, "get_rollout_data", one_at_a_time)
  monkeypatch.setattr(client, "start_rollout", lambda *a: {})
  args = _args(
    "http://b", "t.jsonl", None, *ALONE, "--fetch-trajectory-retry-times", "1"
  )
  buffer = agent_rollout.DataBuffer(args)
  with pytest.raises(agent_rollout.ClientError, match="it is gone"):
    _generate(args, 0, buffer)
  assert len(buffer) == 1 and buffer.metadata["0"] == ["a", "dropped"]
  assert [s.prompt for s in _generate(args, 0, buffer)] == ["a0", "b0"]
  assert buffer.metadata["0"] == ["a", "dropped", "b"]


def last_in(args, rollout_id, buffer, num_groups):
  """A filter of one's own."""
  newest = buffer[-num_groups:]
  del buffer[-num_groups:]
  return newest


def _plain(index, reward):
  return samples.Sample(str(index), f"u{index}", [1], 1, reward, [1])


def test_a_filter_by_its_path_chooses_the_groups():
  args = argparse.Namespace(buffer_filter_path=f"{MODULE}.last_in")
  buffer = agent_rollout.DataBuffer(args)
  buffer.add_samples(_plain(i, 0) for i in range(5))
  chosen = buffer.get_samples(2)
  assert [[s.index for s in group] for group in chosen] == [["3"], ["4"]]
  assert len(buffer) == 3
  for path in ("nowhere.at_all", f"{MODULE}.missing", f"{MODULE}.MODULE"):
    with pytest.raises(ValueError, match="--buffer-filter-path"):
      agent_rollout.DataBuffer(argparse.Namespace(buffer_filter_path=path))


def good_ones(args, rollout_id, buffer, num_groups):
  """Leaves out groups without a success, for good."""
  del args, rollout_id
  groups = [group for group in buffer if any(s.reward for s in group)]
  buffer[:] = groups[num_groups:]
  return groups[:num_groups]


def test_more_is_read_where_the_filter_drops_groups(monkeypatch):
  answers = [
      ([_item(n, f"{n}{i}", tokens=[1, 2], loss_mask=[0, 1],
              reward=float(n == "b")) for i in range(4)], {})
      for n in "abcb"
  ]  # fmt: skip

  stored = []

  async def one_at_a_time(api_base_url):
    stored.append(
      [group[0]["index"] for group in data_buffer.state_dict()["groups"]]
    )
    return answers.pop(0)

  monkeypatch.setattr(client, "get_rollout_data", one_at_a_time)
  monkeypatch.setattr(client, "start_rollout", lambda *a: {})
  args = _args(
    "http://b", "t.jsonl", None, "--buffer-filter-path", f"{MODULE}.good_ones"
  )
  data_buffer = agent_rollout.DataBuffer(args)
  chosen = _generate(args, 0, data_buffer)
  # A checkpoint during a read has what the filter has chosen before.
  assert stored == [[], ["a"], ["b"], ["b"]]
  assert {s.index for s in chosen} == {"b"} and len(chosen) == 8


def test_episodes_of_several_sequences_stay_together():
  first, second, third = (_plain("a", 1.0) for _ in range(3))
  second.sequence = 1
  groups = samples.groups_of([first, second, third, _plain("b", 0)], 2)
  assert [len(group) for group in groups] == [3, 1]
  items = samples.items_of(groups[0])
  assert [len(item["sequences"]) for item in items] == [2, 1]


@pytest.mark.parametrize(
  "sample, problem",
  [
    (object(), "object has no index"),
    (samples.Sample("a", "u", [1], 1, 0.0, [1, 1]), "2 values.* 1 of 1 tokens"),
  ],
)
def test_what_is_no_sample_is_named(sample, problem):
  with pytest.raises(ValueError, match=problem):
    samples.items_of([sample])


def test_the_natural_order_of_indices():
  names = ["math_10", "math_2", "9", "b"]
  assert sorted(names, key=samples.natural_key) == [
    "9",
    "b",
    "math_2",
    "math_10",
  ]
