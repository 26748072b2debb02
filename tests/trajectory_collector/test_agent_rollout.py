"""The trainer side of the rollout buffer's protocol, against a peer of it."""

import argparse
import asyncio
import json
import re
import threading
import types

import buffer_peer
import buffer_services
import chat_server
import pytest
import tokenizers
from tunix.rl.multi_turn.trajectory_collector import agent_rollout
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import (
  __main__ as command,
)
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import arguments
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import (
  assign_instance_id,
)
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import client
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import rollout
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import samples

MODULE = "test_agent_rollout"


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
  parser = arguments.add_arguments(argparse.ArgumentParser())
  args = parser.parse_args([
      "--agent-rollout-buffer-url", url, "--prompt-data", str(tasks),
      "--remote-engine-url", "http://127.0.0.1:1/v1", "--num-epoch", "1",
      "--rollout-batch-size", "2", "--n-samples-per-prompt", "4",
      "--fetch-interval-s", "0.01", *more,
  ])  # pyformat: disable
  args.tokenizer = tokenizer
  return args


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
    if len(peer.payloads) > 1:
      skipped = peer.payloads[1]["skip_instance_ids"]
      assert first <= set(skipped) and all(isinstance(i, str) for i in skipped)


def test_the_service_of_this_package_and_its_own_generator_are_read(
    tasks, tokenizer, tmp_path
):
  with (
      chat_server.serving() as (engine, _),
      buffer_services.Running(tmp_path / "buffer") as running,
  ):
    args = _args(
        running.url, tasks, tokenizer, "--remote-engine-url", engine,
        "--rollout-num-process", "4",
    )  # pyformat: disable
    buffer = agent_rollout.DataBuffer(args)
    found = _generate(args, 0, buffer)
  assert len(found) == 8
  assert all(float(s.metadata["timestamp"]) > 1e9 for s in found)


DOCUMENTED = {
    "num_process": "100",
    "num_epoch": "3",
    "remote_engine_url": "http://e/v1",
    "remote_buffer_url": "http://b",
    "task_type": "math",
    "input_file": "t.jsonl",
    "num_repeat_per_sample": "8",
    "max_tokens": "8192",
    "sampling_params": {"max_tokens": 8192, "temperature": 1.0, "top_p": 1.0},
    "tokenizer_path": "",
    "skip_instance_ids": [],
}


@pytest.mark.parametrize("key", sorted(DOCUMENTED))
def test_the_start_payload_has_the_documented_keys_and_defaults(key):
  parser = arguments.add_arguments(argparse.ArgumentParser())
  args = parser.parse_args(
      ["--prompt-data", "t.jsonl", "--remote-engine-url", "http://e/v1"]
  )
  args.my_own = {"depth": 3}
  args.rollout_buffer_token = "hush"
  payload = client.start_payload("http://b", args, {})
  assert payload[key] == DOCUMENTED[key]
  # All of the trainer's arguments come along, but no secret.
  assert payload["my_own"] == {"depth": 3}
  assert "hush" not in json.dumps(payload)


@pytest.mark.parametrize(
    "option, value, key, sent",
    [
        ("--rollout-num-process", "7", "num_process", "7"),
        ("--num-epoch", "2", "num_epoch", "2"),
        ("--rollout-task-type", "desktop", "task_type", "desktop"),
        ("--n-samples-per-prompt", "3", "num_repeat_per_sample", "3"),
        ("--rollout-max-response-len", "9", "max_tokens", "9"),
        ("--hf-checkpoint", "/m", "tokenizer_path", "/m"),
    ],
)
def test_an_argument_reaches_the_payload(option, value, key, sent):
  args = _args("http://b", "t.jsonl", None, option, value)
  assert client.start_payload("http://b", args, None)[key] == sent


@pytest.mark.parametrize("name", ["prompt_data", "remote_engine_url"])
def test_an_argument_that_the_service_needs_is_named(name):
  args = _args("http://127.0.0.1:1", "t.jsonl")
  setattr(args, name, "")
  option = "--" + name.replace("_", "-")
  with pytest.raises(ValueError, match=option):
    # At once: no try of it could succeed.
    _generate(args, 0, agent_rollout.DataBuffer(args))


def test_ids_of_all_rollouts_are_flattened_as_text():
  metadata = {"0": ["a", 3], "1": [["b"], "a"], "note": ["x"]}
  # "a" was finished in two passes.
  assert client.flat_ids(metadata) == ["a", "3", "b", "a"]


def test_evaluation_is_refused():
  with pytest.raises(NotImplementedError, match="evaluation"):
    asyncio.run(
        agent_rollout.generate_agent_rollout(
            argparse.Namespace(), 0, agent_rollout.DataBuffer(), evaluation=True
        )
    )


# --- errors ----------------------------------------------------------------


def test_an_unreachable_service_is_a_client_error():
  with pytest.raises(agent_rollout.ClientError, match="127.0.0.1:9"):
    asyncio.run(agent_rollout.get_rollout_data("http://127.0.0.1:9"))
  with pytest.raises(agent_rollout.ClientError, match="start_rollout"):
    agent_rollout.start_rollout(
        "http://127.0.0.1:9", _args("", "t.jsonl"), {}
    )


def test_a_service_without_a_ready_group_is_a_timeout():
  with buffer_peer.BufferPeer() as peer:
    with pytest.raises(TimeoutError, match="no group ready within 0.1 s"):
      asyncio.run(agent_rollout.get_rollout_data(peer.url, timeout=0.1))
    assert peer.reads > 1


@pytest.mark.parametrize(
    "key", ["uid", "instance_id", "messages", "reward", "extra_info"]
)
def test_an_item_without_a_required_key_is_a_value_error(key):
  item = {
      "uid": "u", "instance_id": "i", "messages": [], "reward": 1,
      "extra_info": {},
  }  # pyformat: disable
  del item[key]
  with pytest.raises(ValueError, match=f"item 0: the item lacks {key}"):
    client.parse({"success": True, "data": {"data": [item]}})


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
    client.parse(answer)


def test_items_may_be_wrapped_and_data_a_plain_list():
  item = {
      "uid": "u", "instance_id": 4, "messages": [], "reward": 1,
      "extra_info": {},
  }  # pyformat: disable
  found = client.parse({"success": True, "data": [{"data": item}]})
  assert found.items == [item] and found.meta_info == {}


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
def test_a_limit_that_makes_no_sense_is_refused(value, capsys):
  with pytest.raises(SystemExit):
    _args("", "", None, "--fetch-trajectory-retry-times", value)
  assert "retry" in capsys.readouterr().err


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
  assert sample.tokens == masked.token_ids
  assert sample.response_length == masked.response_length
  assert sample.loss_mask == masked.response_mask
  assert sample.metadata["text_only"] and sample.rollout_log_probs is None
  assert sample.metadata["raw_reward"] == 1.0
  # The first trained token to the end: multi-turn, the question between is 0.
  assert 0 in sample.loss_mask and sample.loss_mask[0] == 1


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
  args = _args("http://b", "t.jsonl", None, "--n-samples-per-prompt", "1")
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
      "http://b", "t.jsonl", None, "--n-samples-per-prompt", "1",
      "--fetch-trajectory-retry-times", "1",
  )  # pyformat: disable
  buffer = agent_rollout.DataBuffer(args)
  with pytest.raises(agent_rollout.ClientError, match="it is gone"):
    _generate(args, 0, buffer)
  assert len(buffer) == 1 and buffer.metadata["0"] == ["a", "dropped"]
  assert [s.prompt for s in _generate(args, 0, buffer)] == ["a0", "b0"]
  assert buffer.metadata["0"] == ["a", "dropped", "b"]


def last_in(args, rollout_id, buffer, num_samples):
  """A filter of one's own."""
  taken = buffer[-num_samples:]
  del buffer[-num_samples:]
  return taken


def _plain(index, reward):
  return samples.Sample(str(index), f"u{index}", [1], 1, reward, [1])


def test_a_filter_by_its_path_chooses_the_samples():
  args = argparse.Namespace(buffer_filter_path=f"{MODULE}.last_in")
  buffer = agent_rollout.DataBuffer(args)
  buffer.add_samples(_plain(i, 0) for i in range(5))
  assert [s.index for s in buffer.get_samples(2)] == ["3", "4"]
  assert len(buffer) == 3
  for path in ("nowhere.at_all", f"{MODULE}.missing", f"{MODULE}.MODULE"):
    with pytest.raises(ValueError, match="--buffer-filter-path"):
      agent_rollout.DataBuffer(argparse.Namespace(buffer_filter_path=path))


def test_rewards_have_mean_zero_in_each_group_unless_left_alone():
  found = [_plain("a", 1), _plain("b", 4), _plain("a", 0), _plain("b", 4)]
  args = argparse.Namespace(disable_rewards_normalization=False)
  rewards = samples.rewards_of(args, found)
  assert rewards[0] == pytest.approx(1, abs=1e-4) == -rewards[2]
  assert rewards[1] == rewards[3] == 0
  args.disable_rewards_normalization = True
  assert samples.rewards_of(args, found) == [1, 4, 0, 4]


def test_columns_are_in_the_natural_order_of_indices():
  found = [_plain(i, 0) for i in ("math_10", "math_2", "9", "b")]
  columns = samples.train_data(argparse.Namespace(), found)
  assert columns["sample_indices"] == ["9", "b", "math_2", "math_10"]


# --- logs -------------------------------------------------------------------


def test_statistics_are_weighed_by_samples_and_named_rollout():
  found = rollout.raw_info([
      {"total_samples": 1, "avg_reward": 0.0},
      {"total_samples": 3, "avg_reward": 1.0},
  ])
  assert found == {
      "rollout/no_filter/total_samples": 4,
      "rollout/no_filter/avg_reward": 0.75,
  }
  assert rollout.raw_info([]) == {"rollout/no_filter/total_samples": 0}
  agent_rollout.log_raw_info(argparse.Namespace(), [], 0)


def test_the_statistics_go_to_wandb_where_it_is_open(monkeypatch):
  logged = []
  fake = types.ModuleType("wandb")
  fake.run, fake.log = object(), logged.append
  monkeypatch.setitem(__import__("sys").modules, "wandb", fake)
  args = argparse.Namespace(use_wandb=True)
  agent_rollout.log_raw_info(args, [{"total_samples": 2}], 7)
  assert logged == [
      {"rollout/no_filter/total_samples": 2, "rollout/step": 7}
  ]


# --- commands ---------------------------------------------------------------


def test_ids_are_unique_and_those_that_are_there_stay(tmp_path, capsys):
  source = tmp_path / "t.jsonl"
  source.write_text(
      '{"q": 1}\n\n{"q": 2, "instance_id": "math_0"}\n{"q": 3}\n'
      '{"q": 4, "instance_id": 17}\n'
  )
  assert assign_instance_id.main(["--input_path", str(source)]) == 0
  rows = [
      json.loads(line)
      for line in (tmp_path / "t_processed.jsonl").read_text().splitlines()
  ]
  assert [r["q"] for r in rows] == [1, 2, 3, 4]
  assert [r["instance_id"] for r in rows] == ["math_1", "math_0", "math_2", 17]
  target = tmp_path / "o.jsonl"
  arguments_ = ["--input_path", str(source), "--output_path", str(target)]
  assert assign_instance_id.main([*arguments_, "--task_type", "gui"]) == 0
  assert json.loads(target.read_text().splitlines()[0])["instance_id"] == (
      "gui_0"
  )
  assert "4 tasks in" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, problem",
    [
        ("{}\n[1]\n", "line 2: no JSON object"),
        ("{}\n\n{\n", "line 3: no JSON"),
        ('{"instance_id": 1.5}\n', "line 1: instance_id=1.5"),
        ('{"instance_id": "a"}\n{"instance_id": "a"}\n', "line 2: .*line 1"),
    ],
)
def test_a_bad_line_is_named(text, problem, tmp_path, capsys):
  source = tmp_path / "t.jsonl"
  source.write_text(text)
  assert assign_instance_id.main(["--input_path", str(source)]) == 1
  error = capsys.readouterr().err
  assert "Traceback" not in error
  assert re.search(problem, error)


def test_a_task_without_an_id_is_refused_with_its_line():
  with pytest.raises(ValueError, match="line 2: no instance_id"):
    assign_instance_id.check_ids(['{"instance_id": "a"}', "{}"], "f")


def test_the_command_collects_into_a_file_and_goes_on(
    tasks, tmp_path, capsys
):
  save = tmp_path / "samples.jsonl"

  def exact(payload, write, stop):
    for name, _ in buffer_peer.tasks_of(payload):
      for n in range(int(payload["num_repeat_per_sample"])):
        write(_item(name, f"{name}-{n}", tokens=[1, 2], loss_mask=[0, 1]))

  with buffer_peer.BufferPeer({"math": exact}) as peer:
    common = [
        "--agent-rollout-buffer-url", peer.url, "--prompt-data", str(tasks),
        "--remote-engine-url", "http://127.0.0.1:1/v1", "--num-epoch", "1",
        "--rollout-batch-size", "2", "--n-samples-per-prompt", "2",
        "--fetch-interval-s", "0.01", "--save", str(save),
    ]  # pyformat: disable
    assert command.main([*common, "--num-rollout", "1"]) == 0
    assert command.main([*common, "--num-rollout", "3"]) == 0
    lines = [json.loads(line) for line in save.read_text().splitlines()]
    assert [line["rollout_id"] for line in lines] == [0] * 4 + [1] * 4 + [2] * 4
    uids = [line["prompt"] for line in lines]
    assert len(set(uids)) == 12
  assert "samples in" in capsys.readouterr().out
  bad = [*common, "--rollout-function-path", "no.such.function"]
  assert command.main(bad) == 1
  assert "--rollout-function-path no.such.function" in capsys.readouterr().err
