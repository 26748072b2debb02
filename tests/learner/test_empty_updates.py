"""A step in which no token has weight moves nothing, to the bit."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.learner import learner_cases

# Decay and schedule move weights and counts without a gradient.
MOVING = dict(
  weight_decay=0.1, schedule="linear", steps=10, skip_zero_advantage=False
)


def state_of(learner):
  """Parameters, moments and counts of the optimizer, copied."""
  return jax.tree.map(np.array, learner.arrays())


def differences(before, learner):
  """Names of the arrays of a learner that are not what they were."""
  pairs = zip(
    jax.tree_util.tree_leaves_with_path(before),
    jax.tree.leaves(state_of(learner)),
    strict=True,
  )
  return [
    jax.tree_util.keystr(path)
    for (path, old), new in pairs
    if not np.array_equal(old, new)
  ]


def with_logprobs(groups, logprobs):
  """The groups as if their tokens were sampled with other log-probs.

  Args:
    groups: Of an update.
    logprobs: Sequence -> float32[T].
  """
  return [
    dataclasses.replace(
      group,
      trajectories=tuple(
        dataclasses.replace(
          member,
          sequences=[
            dataclasses.replace(
              s, logprobs=np.where(s.loss_mask, logprobs(s), 0.0)
            )
            for s in member.sequences
          ],
        )
        for member in group
      ),
    )
    for group in groups
  ]


def on_policy(learner, groups):
  return with_logprobs(
    groups, lambda s: np.minimum(learner.sequence_logprobs([s])[0], 0)
  )


def certain(groups):
  """Tokens that the sampler was sure of, and the learner is not."""
  return with_logprobs(groups, lambda s: np.full(len(s), -1e-3, np.float32))


def equal(case, count=2):
  return [case.group([0.7] * 3, f"even{i}") for i in range(count)]


def empty_batches(case, learner, veto):
  """Groups without weight: by equal rewards, and by their log-probs."""
  return {
    "equal": equal(case),
    "vetoed" if veto else "outside": certain(case.groups(2, 3)),
    "equal up to rounding": [
      case.group([0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2], "even")
    ],
  }


@pytest.mark.parametrize(
  "optimizer, algorithm",
  [
    ("adamw", dict(importance="mis", mis_low=0.5)),
    pytest.param(
      "muon", dict(veto=0.5, importance="tis"), marks=pytest.mark.slow
    ),
  ],
)
def test_nothing_moves_without_weight(case, optimizer, algorithm):
  learner = case.learner(optimizer=optimizer, **MOVING, **algorithm)
  learner.update(on_policy(learner, case.groups(2, 3)))
  assert learner.counters.optimizer_steps == 1
  compiles = learner.compiles
  cases = empty_batches(case, learner, "veto" in algorithm)
  for number, (name, groups) in enumerate(cases.items(), 1):
    before = state_of(learner)
    metrics = learner.update(groups)
    assert differences(before, learner) == [], name
    assert metrics["empty_updates"] == number, name
    assert metrics["optimizer_steps"] == 1 and metrics["skipped_steps"] == 0
    assert metrics["grad_norm"] == metrics["loss"] == 0
    assert learner.version == 1 + number
  before = state_of(learner)
  learner.update(on_policy(learner, case.groups(2, 3)))
  assert len(differences(before, learner)) > 10
  assert learner.counters.optimizer_steps == 2
  assert learner.compiles == compiles


def test_one_empty_minibatch_of_an_epoch_is_left_out(case):
  """And so is a micro-batch: weight is added up as gradients are."""
  fields = dict(minibatches=2, epochs=2, rows=1, row_length=24)
  learner = case.learner(**MOVING, **fields)
  groups = [*case.groups(1, 6), *equal(case, 1)]
  metrics = learner.update(groups)
  assert metrics["micro_batches"] > 4
  assert metrics["optimizer_steps"] == 2 and metrics["empty_updates"] == 0
  alone = case.learner(**MOVING, **fields | dict(minibatches=1, epochs=2))
  # Weights are those of its minibatch: the other one changes nothing.
  alone.update(groups[:1])
  assert (
    learner_cases.largest_difference(learner.parameters(), alone.parameters())
    < 1e-6
  )
  before = state_of(learner)
  metrics = learner.update(equal(case))
  assert differences(before, learner) == []
  assert metrics["optimizer_steps"] == 2 and metrics["empty_updates"] == 1


@pytest.mark.slow
def test_a_kl_term_is_weight(case):
  """Vetoed tokens leave the policy's term, and stay in the others."""
  learner = case.learner(
    veto=0.5, importance="tis", kl_coef=0.5, reference=case.model, **MOVING
  )
  groups = certain(case.groups(2, 3))
  # At the reference itself the KL has no slope, and has weight.
  for step in range(1, 3):
    metrics = learner.update(groups)
    assert metrics["importance_weight"] == 0
    assert metrics["optimizer_steps"] == step
    assert metrics["empty_updates"] == 0


@pytest.mark.slow
def test_an_entropy_term_is_weight(case):
  learner = case.learner(entropy_coef=0.1, **MOVING)
  before = state_of(learner)
  assert learner.update(equal(case))["optimizer_steps"] == 1
  assert differences(before, learner)


@pytest.mark.slow
def test_a_value_loss_is_weight(case):
  learner = case.learner(advantage="gae", value_learning_rate=1e-2, **MOVING)
  metrics = learner.update(equal(case))
  assert metrics["optimizer_steps"] == 1 and metrics["empty_updates"] == 0


@pytest.mark.slow
def test_clipped_tokens_have_weight(case):
  """Every ratio is beyond its clip: the step is made, as PPO's authors do."""
  learner = case.learner(
    **MOVING | dict(weight_decay=0.0), clip_low=0.01, clip_high=0.01
  )
  learner.update(on_policy(learner, case.groups(2, 3)))
  group = case.group([1.0, 0.0])
  high, low = group.trajectories
  (high,) = with_logprobs(
    [dataclasses.replace(group, trajectories=(high,))],
    lambda s: np.full(len(s), -20.0, np.float32),
  )[0].trajectories
  (low,) = certain([dataclasses.replace(group, trajectories=(low,))])[
    0
  ].trajectories
  group = dataclasses.replace(group, trajectories=(high, low))
  before = state_of(learner)
  metrics = learner.update([group])
  assert metrics["clip_fraction"] == 1 and metrics["grad_norm"] == 0
  assert metrics["optimizer_steps"] == 2 and metrics["empty_updates"] == 0
  assert differences(before, learner)


def test_demonstrations_have_weight(case):
  learner = case.learner(objective="behaviour_cloning")
  sequences = [s for m in case.group([1.0]) for s in m.sequences]
  metrics = learner.update_on_sequences(sequences)
  assert metrics["optimizer_steps"] == 1 and metrics["empty_updates"] == 0
