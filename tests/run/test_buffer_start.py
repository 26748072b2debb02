"""What a run asks of a rollout buffer when it starts its generator."""

import types

import pytest
import small_runs
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.run.recorded_data import sources
from tunix.rl.multi_turn.trajectory_collector.buffer_service import requests

COMMON = (
    *small_runs.SMALL, small_runs.NANO, "rollout.via=buffer",
    "buffer.url=http://127.0.0.1:1", "buffer.input_file=tasks.jsonl",
)  # pyformat: disable


def payload_of(*overrides):
  run = types.SimpleNamespace(
      config=config_lib.load_config([*COMMON, *overrides]),
      policy_server=("http://127.0.0.1:2/v1", "key"),
      policy=types.SimpleNamespace(
          renderer=types.SimpleNamespace(image_token_id=None), tokenizer=None
      ),
      tokenizer_path="",
  )
  return sources.start_payload(run, ["a"])


def test_groups_come_with_the_rewards_that_episodes_got():
  request = requests.rollout(payload_of())
  assert request.rules.raw and request.rules.group_size == 4
  request = requests.rollout(payload_of("buffer.normalized=true"))
  assert not request.rules.raw


def test_rewards_are_not_normalised_twice():
  with pytest.raises(config_lib.ConfigError) as error:
    payload_of("buffer.normalized=true", "algorithm.advantage=grpo")
  assert "algorithm.advantage=grpo compares them again" in str(error.value)
  with pytest.raises(config_lib.ConfigError, match="buffer.normalized=true or"):
    payload_of("buffer.options={group_rules: normalized}")


def test_generators_get_every_rule_of_sampling():
  assert payload_of("sampling.max_new_tokens=9")["sampling_params"] == {
      "max_tokens": 9, "temperature": 1.0, "top_p": 1.0
  }  # pyformat: disable
  truncated = (
      "sampling.top_k=8", "sampling.min_p=0.1", "sampling.max_new_tokens=9",
      "algorithm.keep_sampling_mask=true",
  )  # pyformat: disable
  assert payload_of(*truncated)["sampling_params"] == {
      "max_tokens": 9, "temperature": 1.0, "top_p": 1.0, "top_k": 8,
      "min_p": 0.1,
  }  # pyformat: disable
