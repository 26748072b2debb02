"""The scorer computes what an engine computes with the same files."""

import re

from flax import nnx
import numpy as np
import pytest
from tunix.rl.multi_turn.clients import disk_weights
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner import reference
from tunix.rl.multi_turn.policy import lora
from tunix.rl.multi_turn.policy.checkpoints import checkpoint


@pytest.fixture(scope="module", name="policy")
def _policy():
  return checkpoint.create_policy("qwen3_vl_tiny", seed=3)


def adapted(policy):
  """A policy with an adapter that bfloat16 would round apart."""
  model = nnx.clone(policy[0])
  lora.add(model, rank=2, alpha=4.0, seed=0)
  rng = np.random.default_rng(0)
  for layer in lora.need_adapter(model):
    part = layer.linear.lora_b
    noise = rng.normal(size=part.get_value().shape) * 0.3
    part.set_value(noise.astype(np.float32))
  return model


def scorer_of(model, policy, **options):
  return reference.Scorer(
    model, policy[1], images_lib.ImageStore(), row_length=128, **options
  )


def sequence(length=24):
  mask = np.arange(length) >= 4
  return trajectory.TokenSequence(
    tokens=np.arange(100, 100 + length),
    loss_mask=mask,
    logprobs=np.zeros(length),
    versions=np.where(mask, 0, -1),
    turn_ids=np.zeros(length),
  )


@pytest.mark.slow
def test_an_adapter_is_merged_before_it_is_rounded(policy, tmp_path):
  """As in the files that an engine reads."""
  model = adapted(policy)
  disk_weights.policy_saver(model, dtype="bfloat16")(tmp_path, model)
  read = checkpoint.load_policy(tmp_path)[0]
  (want,) = scorer_of(read, policy)(read, [sequence()])
  score = scorer_of(model, policy, stored="bfloat16", merged=True)
  for _ in range(2):
    (got,) = score(nnx.state(model), [sequence()])
    np.testing.assert_allclose(got, want, atol=1e-5)
  assert score._score.compiles == 1
  apart = scorer_of(model, policy, stored="bfloat16")
  (other,) = apart(nnx.state(model), [sequence()])
  assert np.abs(other - want).mean() > 1e-3


def test_matrix_products_have_the_precision_of_their_type(policy):
  score = scorer_of(policy[0], policy)
  texts = []
  real = score._score.lower

  def lower(*args):
    texts.append(real(*args).as_text())
    return real(*args)

  score._score.lower = lower
  score(policy[0], [sequence()])
  products = re.findall(r"stablehlo\.dot_general.*", texts[0])
  assert products
  assert all("HIGHEST" in product for product in products), products
