"""Options, signatures and commands of the rollout buffer's trainer side."""

import argparse
import asyncio
import inspect
import json
import re
import types

import pytest
import rollout_args
from tunix.rl.multi_turn.trajectory_collector import agent_rollout
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import (
  assign_instance_id,
)
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import client
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import rollout


def _args(**more):
  values = {
    "prompt_data": "t.jsonl",
    "remote_engine_url": "http://e/v1",
    "n_samples_per_prompt": 8,
    "rollout_max_response_len": 8192,
  }
  return argparse.Namespace(**{**values, **more})


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
  args = _args()
  args.my_own = {"depth": 3}
  args.rollout_buffer_token = "hush"
  payload = client.start_payload("http://b", args, {})
  assert payload[key] == DOCUMENTED[key]
  # All of the trainer's arguments come along, but no secret.
  assert payload["my_own"] == {"depth": 3}
  assert "hush" not in json.dumps(payload)


def _sampling(**changed):
  return {"max_tokens": 24, "temperature": 1.0, "top_p": 1.0, **changed}


@pytest.mark.parametrize(
  "option, value, key, sent",
  [
    ("--rollout-num-process", "7", "num_process", "7"),
    ("--num-epoch", "2", "num_epoch", "2"),
    ("--rollout-task-type", "desktop", "task_type", "desktop"),
    ("--n-samples-per-prompt", "3", "num_repeat_per_sample", "3"),
    ("--rollout-max-response-len", "9", "max_tokens", "9"),
    ("--prompt-data", "q.jsonl", "input_file", "q.jsonl"),
    ("--disable-rewards-normalization", "", "group_rules", "normalized"),
    (
      "--rollout-temperature",
      "0.5",
      "sampling_params",
      _sampling(temperature=0.5),
    ),
    (
      "--rollout-max-response-len",
      "9",
      "sampling_params",
      _sampling(max_tokens=9),
    ),
  ],
)
def test_a_flag_of_the_command_reaches_the_payload(option, value, key, sent):
  flags = {
    "--prompt-data": "t.jsonl",
    "--rollout-max-response-len": "24",
    option: value,
  }
  args = rollout_args.make(
    "http://b", *(word for pair in flags.items() for word in pair if word)
  )
  assert client.start_payload("http://b", args, None)[key] == sent


@pytest.mark.parametrize(
  "function, parameters",
  [
    (
      agent_rollout.generate_agent_rollout,
      {
        "args": None,
        "rollout_id": None,
        "data_buffer": None,
        "evaluation": False,
      },
    ),
    (
      agent_rollout.get_rollout_data,
      {"api_base_url": None, "num": None, "timeout": 100.0},
    ),
    (
      agent_rollout.start_rollout,
      {"api_base_url": None, "args": None, "metadata": None},
    ),
    (
      agent_rollout.log_raw_info,
      {"args": None, "all_meta_info": None, "rollout_id": None},
    ),
  ],
)
def test_functions_have_the_documented_signatures(function, parameters):
  found = {
    name: None if p.default is p.empty else p.default
    for name, p in inspect.signature(function).parameters.items()
    if p.kind is p.POSITIONAL_OR_KEYWORD
  }
  assert found == parameters and list(found) == list(parameters)
  waits = function.__name__ in ("generate_agent_rollout", "get_rollout_data")
  assert inspect.iscoroutinefunction(function) == waits


@pytest.mark.parametrize("name", ["prompt_data", "remote_engine_url"])
def test_an_argument_that_the_service_needs_is_named(name):
  args = _args(agent_rollout_buffer_url="http://127.0.0.1:1")
  setattr(args, name, "")
  option = "--" + name.replace("_", "-")
  with pytest.raises(ValueError, match=option):
    # At once: no try of it could succeed.
    asyncio.run(
      agent_rollout.generate_agent_rollout(
        args, 0, agent_rollout.DataBuffer(args)
      )
    )


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


# --- logs -------------------------------------------------------------------


def test_statistics_are_weighed_by_samples_and_named_rollout():
  found = rollout.raw_info(
    [
      {"total_samples": 1, "avg_reward": 0.0},
      {"total_samples": 3, "avg_reward": 1.0},
    ]
  )
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
  assert logged == [{"rollout/no_filter/total_samples": 2, "rollout/step": 7}]


# --- commands -----------------------------------------------------------------


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
