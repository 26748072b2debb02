"""Requests of a run that starts a rollout buffer's generator."""

import types

from agent_services.rollout_buffer import requests
import pytest
import small_runs
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.config.data_sections import OWN_FUNCTION
from tunix.rl.multi_turn.run.recorded_data import sources

COMMON = (
  *small_runs.SMALL,
  small_runs.NANO,
  "rollout.via=buffer",
  "buffer.url=http://127.0.0.1:1",
  "buffer.input_file=tasks.jsonl",
)


def payload_of(*overrides, image=None):
  run = types.SimpleNamespace(
    config=config_lib.load_config([*COMMON, *overrides]),
    policy_server=("http://127.0.0.1:2/v1", "key"),
    policy=types.SimpleNamespace(
      renderer=types.SimpleNamespace(image_token_id=image), tokenizer=None
    ),
    tokenizer_path="",
  )
  return sources.start_payload(run, ["a"])


def test_groups_come_with_the_rewards_that_episodes_got():
  request = requests.rollout(payload_of())
  assert request.rules.raw and request.rules.group_size == 4
  request = requests.rollout(payload_of("buffer.normalized=true"))
  assert not request.rules.raw


def test_generators_get_the_id_of_images_and_no_secret():
  payload = payload_of(image=7)
  assert payload["image_token_id"] == 7
  assert not {"rollout_buffer_token", "image_token_id"} & payload_of().keys()
  assert payload["remote_engine_key"] == "key"


def test_groups_are_not_replaced_where_a_function_makes_rollouts():
  more = ("learner.dynamic_sampling=2", "algorithm.advantage=grpo")
  payload_of(*more)
  with pytest.raises(config_lib.ConfigError) as error:
    payload_of(*more, f"buffer.function={OWN_FUNCTION}")
  assert "set learner.dynamic_sampling=0" in str(error.value)


@pytest.mark.parametrize("value", ["", "null"])
def test_an_empty_value_chooses_nothing(value):
  config = config_lib.load_config([f"buffer.url={value}"])
  assert config.rollout.via == "in_process"
  config = config_lib.load_config([f"buffer.loss_mask_type={value}"])
  assert config.buffer.missing_logprobs == "refuse"


def test_rewards_are_not_normalised_twice():
  with pytest.raises(config_lib.ConfigError) as error:
    payload_of("buffer.normalized=true", "algorithm.advantage=grpo")
  assert "algorithm.advantage=grpo compares them again" in str(error.value)
  with pytest.raises(config_lib.ConfigError, match="buffer.normalized=true or"):
    payload_of("buffer.options={group_rules: normalized}")


def test_generators_get_every_rule_of_sampling():
  assert payload_of("sampling.max_new_tokens=9")["sampling_params"] == {
    "max_tokens": 9,
    "temperature": 1.0,
    "top_p": 1.0,
  }
  truncated = (
    "sampling.top_k=8",
    "sampling.min_p=0.1",
    "sampling.max_new_tokens=9",
    "algorithm.keep_sampling_mask=true",
  )
  assert payload_of(*truncated)["sampling_params"] == {
    "max_tokens": 9,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 8,
    "min_p": 0.1,
  }
