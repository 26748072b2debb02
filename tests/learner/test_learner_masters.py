"""bfloat16 parameters are trained on float32 masters."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tunix.rl.multi_turn.learner import checkpoint
from tunix.rl.multi_turn.policy import lora
from tunix.rl.multi_turn.policy.checkpoints import (
  checkpoint as policy_checkpoint,
)
from tunix.rl.multi_turn.policy.models.qwen import qwen_checkpoint
from tunix.rl.multi_turn.policy.models.qwen import qwen_config

from tests.learner import learner_cases

RATE, STEPS = 1e-6, 3
SETTINGS = dict(
  learning_rate=RATE, patches=128, advantage="dr_grpo", grad_clip=0.0
)


def small(param_dtype):
  """qwen3_vl_tiny of one layer and two blocks, with the same weights."""
  config = policy_checkpoint.load_config("qwen3_vl_tiny")
  config = dataclasses.replace(
    config,
    param_dtype=param_dtype,
    text=dataclasses.replace(config.text, num_hidden_layers=1),
    vision=dataclasses.replace(
      config.vision, depth=2, deepstack_visual_indexes=(0,)
    ),
  )
  model = qwen_checkpoint.random_model(
    dataclasses.replace(config, param_dtype="bfloat16")
  )
  if param_dtype != "bfloat16":
    wide = qwen_checkpoint.random_model(config)
    nnx.update(
      wide, jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(model))
    )
    model = wide
  return model, qwen_checkpoint.processor_of(config)


def arrays(params):
  return {k: np.asarray(v, np.float32) for k, v in params.items()}


def published(learner):
  flat = nnx.to_flat_state(learner.policy_state())
  return {".".join(map(str, path)): value[...] for path, value in flat}


class Pair:
  """The same data, model and settings in bfloat16 and in float32."""

  def __init__(self):
    self.half = learner_cases.Case(own=small("bfloat16"))
    self.groups = [self.half.groups(2, 3) for _ in range(2 * STEPS)]
    self.full = learner_cases.Case(own=small("float32"))
    self.full.store = self.half.store

  def learners(self, **more):
    return tuple(
      case.learner(**SETTINGS | more) for case in (self.half, self.full)
    )


@pytest.fixture(scope="module")
def pair():
  return Pair()


@pytest.fixture(scope="module")
def trained(pair):
  """(learners, their weights before, readings of each step)."""
  learners = pair.learners()
  before = [arrays(x.parameters()) for x in learners]
  readings = [
    [x.update(groups) for groups in pair.groups[:STEPS]] for x in learners
  ]
  return learners, before, readings


@pytest.mark.slow
def test_the_gradient_is_that_of_float32_up_to_its_rounding(pair):
  examples = learner_cases.examples_of(pair.groups[0])
  half, full = (
    learner_cases.gradients(x, examples)[:2] for x in pair.learners()
  )
  # Both begin with the same weights, and compute in float32.
  assert float(half[1].loss) == float(full[1].loss)
  for name, want in full[0].items():
    assert half[0][name].dtype == np.float32
    # A tied table's gradient is a sum of two rounded ones.
    scale = np.abs(want).max()
    np.testing.assert_allclose(
      half[0][name], want, rtol=2.0**-8, atol=2.0**-9 * scale, err_msg=name
    )


def test_every_master_moves_that_would_in_float32(trained):
  (half, full), (before, _), _ = trained
  moved = still = lost = 0
  after, expected = arrays(half.parameters()), arrays(full.parameters())
  for name, start in before.items():
    assert half.parameters()[name].dtype == jnp.float32
    moves = expected[name] != start
    moved += np.sum(after[name][moves] != start[moves])
    still += np.sum(after[name][moves] == start[moves])
    # Where the weights themselves would be stepped, in bfloat16.
    stepped = (
      (start + RATE * np.sign(expected[name] - start))
      .astype(jnp.bfloat16)
      .astype(np.float32)
    )
    lost += np.sum(stepped[moves] == start[moves])
  assert moved / (moved + still) > 0.9999
  assert lost / (moved + still) > 0.9  # The loss that masters are for.


def test_what_acts_is_the_rounded_master(trained):
  (half, _), _, _ = trained
  acting, masters = published(half), half.parameters()
  assert set(acting) == set(masters)
  for name, value in acting.items():
    assert value.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
      np.asarray(value, np.float32),
      np.asarray(masters[name].astype(jnp.bfloat16), np.float32),
    )
  module = half.policy()
  assert {x.dtype for x in jax.tree.leaves(nnx.state(module, nnx.Param))} == {
    jnp.dtype(jnp.bfloat16)
  }


def test_training_follows_float32_within_bfloat16s_rounding(trained):
  (half, full), (before, _), (got, want) = trained
  for a, b in zip(got, want, strict=True):
    assert a["loss"] == pytest.approx(b["loss"], abs=1e-3)
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=2e-2)
  a, b = arrays(half.parameters()), arrays(full.parameters())
  acting = published(half)
  agree, steps = 0.0, 0.0
  for name, start in before.items():
    # An Adam step is at most about the rate, whatever the gradient.
    assert np.abs(a[name] - b[name]).max() < 2.1 * RATE * STEPS
    rounding = 2.0**-9 * np.abs(b[name]) + 2.1 * RATE * STEPS
    assert (
      np.abs(np.asarray(acting[name], np.float32) - b[name]) <= rounding
    ).all()
    half_move, full_move = a[name] - start, b[name] - start
    agree += float(np.sum(half_move * full_move))
    steps += float(np.sum(full_move * full_move))
  assert agree / steps > 0.98


def test_moments_are_float32(trained):
  (half, _), _, _ = trained
  for leaf in jax.tree.leaves(half.arrays()["optimizer"]):
    assert leaf.dtype in (jnp.float32, jnp.int32)


@pytest.mark.slow
def test_a_resumed_run_has_the_masters_to_the_bit(pair, tmp_path):
  straight, _ = pair.learners()
  for groups in pair.groups:
    straight.update(groups)
  first, _ = pair.learners()
  for groups in pair.groups[:STEPS]:
    first.update(groups)
  with checkpoint.LearnerCheckpoints(tmp_path) as checkpoints:
    checkpoints.save(first)
    second, other = pair.learners()
    checkpoints.restore(second)
    for groups in pair.groups[STEPS:]:
      second.update(groups)
    assert (
      learner_cases.largest_difference(
        second.parameters(), straight.parameters()
      )
      == 0
    )
    for name, value in published(second).items():
      np.testing.assert_array_equal(
        np.asarray(value, np.float32),
        np.asarray(published(straight)[name], np.float32),
      )
    # Masters are what a float32 run has: one may go on as the other.
    checkpoints.restore(other)


def test_a_checkpoint_without_masters_is_refused(pair, tmp_path):
  learner, _ = pair.learners()
  with checkpoint.LearnerCheckpoints(tmp_path) as checkpoints:
    masters = learner._params
    learner._params = learner._programs.publish(masters)
    checkpoints.save(learner)
    checkpoints.wait()
    learner._params = masters
    with pytest.raises(ValueError, match="float32.* which this learner train"):
      checkpoints.restore(learner)


@pytest.mark.slow
def test_an_adapter_is_trained_as_before(pair):
  model, processor = small("bfloat16")
  lora.add(model, rank=2)
  case = learner_cases.Case(own=(model, processor))
  learner = case.learner(**SETTINGS)
  learner.update(case.groups(2, 3))
  dtypes = {k: v.dtype for k, v in published(learner).items()}
  adapter = {k for k in dtypes if "lora_" in k}
  assert adapter == set(learner.parameters())
  assert {dtypes[k] for k in adapter} == {jnp.dtype(jnp.float32)}
  assert {dtypes[k] for k in dtypes.keys() - adapter} == {
    jnp.dtype(jnp.bfloat16)
  }


@pytest.mark.parametrize("field", ["param_dtype", "compute_dtype"])
@pytest.mark.parametrize("dtype", ["float16", "int8", "float8_e4m3fn"])
def test_a_type_that_would_not_train_is_refused(field, dtype):
  with pytest.raises(ValueError, match=f"{field}='{dtype}' must be one of"):
    dataclasses.replace(qwen_config.SIZES["Qwen3-VL-2B"], **{field: dtype})
  with pytest.raises(ValueError, match=f"{field}='{dtype}' must be one of"):
    policy_checkpoint.load_policy("qwen3_vl_tiny", **{field: dtype})
