"""The base that an adapter names is the one that it was trained on.

peft itself loads both and must get the policy that the run saved.
"""

import json

import pytest
import small_runs
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

RUN = (
  "name=q",
  "policy.lora_rank=4",
  "warm_start.batch_size=4",
  "steps=1",
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


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cloned", [True, False])
def test_peft_gets_the_trained_policy_from_the_base_that_is_named(
  tmp_path, cloned
):
  original = tmp_path / "original"
  if cloned:
    model, _, _ = checkpoint.create_policy("qwen3_vl_tiny", seed=7)
    checkpoint.save_policy(original, model)
    settings = (f"policy={original}", "warm_start.steps=1")
  else:
    settings = ("policy=qwen3_vl_tiny", "warm_start.steps=0")
  status = small_runs.run_train(
    tmp_path, *RUN, "warm_start.source=none", *settings
  )
  assert status == 0
  policy = tmp_path / "q" / "policy"
  config = json.loads((policy / "adapter" / "adapter_config.json").read_text())
  base = config["base_model_name_or_path"]
  inside = tmp_path / "q" / "warm_start" if cloned else policy / "base"
  assert base == str(inside)
  assert gap(base, policy) < 1e-6
  if cloned:  # Not the checkpoint that the run began with.
    assert gap(original, policy) > 1e-3
