"""A run trains an adapter, whose files name the base that it was trained on.

peft itself loads both and must get the policy that the run saved.
"""

import json

import numpy as np
import pytest
import small_runs
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.policy import lora
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.checkpoints import lora_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RUN = (
  "name=q",
  "policy.lora_rank=4",
  "warm_start.source=none",
  "warm_start.batch_size=4",
  # Nothing succeeds yet, so it is the entropy that is learned from.
  "algorithm.entropy_coef=0.1",
  "learner.skip_zero_advantage=false",
  "learner.learning_rate=0.01",
  "eval.on=false",
)


def policy_of(directory):
  import torch  # pylint: disable=g-import-not-at-top
  import transformers  # pylint: disable=g-import-not-at-top

  return transformers.AutoModelForImageTextToText.from_pretrained(
    directory, dtype=torch.float32
  )


def gap(base, policy):
  """Largest difference of base + adapter from the saved policy."""
  import peft  # pylint: disable=g-import-not-at-top

  adapted = peft.PeftModel.from_pretrained(policy_of(base), policy / "adapter")
  merged = adapted.merge_and_unload().state_dict()
  trained = policy_of(policy).state_dict()
  assert merged.keys() == trained.keys()
  return max(
    float((merged[name] - trained[name]).abs().max()) for name in trained
  )


def base_of(policy):
  config = json.loads((policy / "adapter" / "adapter_config.json").read_text())
  return config["base_model_name_or_path"]


def test_a_qwen_policy_trains_an_adapter_saves_it_and_goes_on(tmp_path):
  model, _, _ = checkpoint.create_policy("qwen3_vl_tiny", seed=7)
  original = checkpoint.save_policy(tmp_path / "original", model)
  assert small_runs.run_train(
      tmp_path, *RUN, f"policy={original}", "warm_start.steps=1", "steps=2"
  ) == 0  # fmt: skip
  directory = tmp_path / "q"
  for metrics in small_runs.metrics_of(directory):
    assert metrics["logprob_gap_max"] < 1e-4
    assert metrics["optimizer_steps"] == metrics["step"]
  base, _, _ = checkpoint.load_policy(directory / "warm_start")
  merged, _, _ = checkpoint.load_policy(directory / "policy")
  old = checkpoint.named_parameters(base)
  new = checkpoint.named_parameters(merged)
  changed = {n for n in old if not np.array_equal(old[n], new[n])}
  assert changed
  assert {n.split(".")[-2] for n in changed} <= set(lora.TARGETS)
  lora_files.load(directory / "policy" / "adapter", base)
  lora.merge(base)
  again = checkpoint.named_parameters(base)
  for name, value in new.items():
    np.testing.assert_allclose(again[name], value, atol=1e-6, err_msg=name)
  policy = directory / "policy"
  assert base_of(policy) == str(directory / "warm_start")
  assert gap(base_of(policy), policy) < 1e-6
  # Not the checkpoint that the run began with.
  assert gap(original, policy) > 1e-3
  assert train.main([f"resume={directory}", "steps=3"]) == 0
  assert [m["step"] for m in small_runs.metrics_of(directory)] == [1, 2, 3]


def test_the_base_of_random_weights_is_saved_beside_the_adapter(tmp_path):
  settings = ("policy=qwen3_vl_tiny", "warm_start.steps=0", "steps=1")
  assert small_runs.run_train(tmp_path, *RUN, *settings) == 0
  policy = tmp_path / "q" / "policy"
  assert base_of(policy) == str(policy / "base")
  assert gap(base_of(policy), policy) < 1e-6
