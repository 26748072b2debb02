"""One update: the right gradient whatever the packing, and the bookkeeping."""

import dataclasses

import jax
import numpy as np
import pytest
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner.batches import examples as example_lib

from tests.learner import learner_cases

gradients = learner_cases.gradients
largest_difference = learner_cases.largest_difference


def _close(a, b, tolerance):
  scale = max(float(np.abs(x).max()) for x in a.values())
  assert scale > 0
  assert largest_difference(a, b) <= tolerance * scale


# --- the gradient -----------------------------------------------------------


@pytest.mark.slow
def test_packing_sharing_and_accumulation_do_not_change_the_gradient(case):
  examples = learner_cases.examples_of(case.groups(4, 4))
  shared = case.learner(tree="true")
  want, sums, few = gradients(shared, examples)
  apart = case.learner(tree="false")
  got, apart_sums, more = gradients(apart, examples)
  assert 1 < few.batches <= more.batches
  assert few.row_tokens < more.row_tokens == few.sequence_tokens
  np.testing.assert_allclose(sums.loss, apart_sums.loss, atol=1e-6)
  _close(want, got, 1e-4)
  # A sequence a row and everything in one batch.
  unpacked = case.learner(
    tree="false", rows=32, row_length=20, patches=128, targets=128
  )
  got, big_sums, one = gradients(unpacked, examples)
  assert one.batches == 1
  np.testing.assert_allclose(sums.loss, big_sums.loss, atol=1e-6)
  _close(want, got, 1e-4)


def _on_policy(learner, examples):
  sequences = [e.sequence for e in examples]
  logprobs = learner.sequence_logprobs(sequences)
  return [
    dataclasses.replace(
      e, sequence=dataclasses.replace(s, logprobs=np.minimum(lp, 0))
    )
    for e, s, lp in zip(examples, sequences, logprobs, strict=True)
  ]


def test_on_policy_gradient_is_the_policy_gradient(case):
  """At ratio 1: -sum w A grad log p, which cloning gives with weights w A."""
  learner = case.learner()
  examples = _on_policy(learner, learner_cases.examples_of(case.groups(2, 3)))
  got, sums, _ = gradients(learner, examples)
  assert float(sums.most["ratio_max"]) == pytest.approx(1, abs=1e-5)
  cloner = case.learner(objective="behaviour_cloning")
  tokens = sum(e.sequence.num_sampled for e in examples)
  scale = [e.advantages[e.sequence.loss_mask][0] / tokens for e in examples]
  want, _, _ = gradients(cloner, examples, np.array(scale))
  _close(want, got, 1e-4)


def test_gradient_equals_finite_differences(case):
  learner = case.learner()
  examples = learner_cases.examples_of(case.groups(1, 3))
  # Near the policy, so that some tokens are inside the clip.
  examples = _on_policy(learner, examples)
  grads, _, _ = gradients(learner, examples)
  weighed, weights = learner._minibatches.weigh(examples)
  packed = learner._minibatches.pack(weighed, weights)
  programs = learner._programs
  loss = jax.jit(lambda p, b, x: programs.loss(p, {}, b, x)[0])
  rng = np.random.default_rng(0)
  for name in ("blocks.0.q", "stem.conv2", "embedding", "axis_gate"):
    direction = rng.normal(size=grads[name].shape).astype(np.float32)
    direction /= np.linalg.norm(direction)
    step = 2e-2
    values = []
    for sign in (1, -1):
      params = learner.parameters()
      params[name] = params[name] + sign * step * direction
      values.append(
        sum(
          float(loss(params, b, x))
          for b, x in zip(packed.batches, packed.extras)
        )
      )
    want = (values[0] - values[1]) / (2 * step)
    got = float(np.sum(grads[name] * direction))
    assert got == pytest.approx(want, rel=0.05, abs=2e-4), name


def test_skipping_zero_advantages_changes_nothing_but_the_work(case):
  groups = case.groups(1, 3) + [case.group([1.0, 1.0, 1.0], "solved")]
  examples = learner_cases.examples_of(groups)
  for aggregation in ("token_mean", "sequence_mean", "constant"):
    skip = case.learner(loss_aggregation=aggregation)
    want, _, few = gradients(skip, examples)
    keep = case.learner(loss_aggregation=aggregation, skip_zero_advantage=False)
    got, _, more = gradients(keep, examples)
    assert few.targets < more.targets
    _close(want, got, 1e-5)


def test_sequences_without_a_sampled_token_change_nothing(case):
  """Of an agent's rewritten history, or with all tokens too old."""
  group = case.group([1.0, 0.0, 0.3])
  first, *members = group.trajectories
  silent = case.sequence([("text", case.text(5)), ("image", case.image())])
  stale = case.sequence(
    [("text", case.text(3)), ("sampled", case.text(4))], turn=1
  ).trimmed(1)
  more = dataclasses.replace(first, sequences=[silent, *first.sequences, stale])
  plain, padded = case.learner(), case.learner()
  want = plain.update([group])
  got = padded.update(
    [dataclasses.replace(group, trajectories=(more, *members))]
  )
  assert want["loss"] == got["loss"]
  assert want["sequences"] == got["sequences"]
  assert largest_difference(plain.parameters(), padded.parameters()) == 0


def test_a_step_is_adamw_on_the_clipped_gradient(case):
  learner = case.learner(advantage="dr_grpo")
  groups = case.groups(2, 3)
  grads, _, _ = gradients(learner, learner_cases.examples_of(groups))
  before = learner.parameters()
  metrics = learner.update(groups)
  norm = np.linalg.norm(
    np.concatenate([g.ravel().astype(np.float64) for g in grads.values()])
  )
  assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
  after = learner.parameters()
  for name, grad in grads.items():
    g = grad / max(norm, 1.0)
    # First Adam step: both moments are corrected to g and g^2.
    want = -1e-2 * g / (np.abs(g) + 1e-8)
    moved = np.asarray(after[name]) - np.asarray(before[name])
    clear = np.abs(g) > 1e-5
    np.testing.assert_allclose(moved[clear], want[clear], rtol=2e-3, atol=1e-6)


def test_muon_orthogonalises_matrices_and_leaves_the_rest_to_adam(case):
  learner = case.learner(
    advantage="dr_grpo", optimizer="muon", muon_learning_rate=0.1
  )
  before = learner.parameters()
  groups = case.groups(4, 4)
  grads, _, _ = gradients(learner, learner_cases.examples_of(groups))
  learner.update(groups)
  after = learner.parameters()
  moved = {k: np.asarray(after[k]) - np.asarray(before[k]) for k in after}
  # Newton-Schulz brings the leading singular values to about one another.
  steep = np.linalg.svd(grads["blocks.0.out"], compute_uv=False)
  flat = np.linalg.svd(moved["blocks.0.out"], compute_uv=False)
  assert steep[0] > 3 * steep[3]
  assert flat[0] < 2 * flat[3]
  # Adam's first step is as large as its learning rate, whatever the gradient.
  for name in ("norm", "embedding"):
    largest = np.abs(moved[name]).max()
    assert largest == pytest.approx(1e-2, rel=0.02)


# --- several steps an update, corrections, penalties ------------------------


def test_epochs_and_minibatches(case):
  learner = case.learner(minibatches=2, epochs=2)
  groups = case.groups(4, 3)
  compiles = None
  for update in range(1, 3):
    metrics = learner.update(groups)
    assert learner.counters.optimizer_steps == 4 * update
    assert learner.version == update
    compiles = compiles or learner.compiles
  assert learner.compiles == compiles
  assert metrics["ratio_max"] != pytest.approx(1, abs=1e-3)


def test_truncated_importance_weights(case):
  learner = case.learner(importance="tis", tis_cap=1.5, minibatches=2)
  groups = case.groups(2, 3)
  examples = learner_cases.examples_of(groups)
  logprobs = learner.sequence_logprobs([e.sequence for e in examples])
  ratio = np.concatenate(
    [
      np.exp(lp - e.sequence.logprobs)[e.sequence.loss_mask]
      for lp, e in zip(logprobs, examples)
    ]
  )
  metrics = learner.update(groups)
  # Both minibatches are compared with the weights the update began with; a
  # mean over minibatches of unequal size differs a little from the overall.
  group_of = np.concatenate(
    [np.full(e.sequence.num_sampled, e.group) for e in examples]
  )
  weight = np.minimum(ratio, 1.5)
  want = np.mean([weight[group_of == g].mean() for g in (0, 1)])
  assert metrics["importance_weight"] == pytest.approx(want, rel=1e-3)


def test_kl_and_entropy_enter_the_loss_and_kl_pulls_back(case):
  other, _ = learner_cases.policy(1)
  learner = case.learner(
    model=other, reference=case.model, kl_coef=0.5, entropy_coef=0.01
  )
  # Equal rewards: nothing but the penalties acts.
  groups = [case.group([1.0, 1.0, 1.0])]
  first = learner.update(groups)
  assert first["kl"] > 0
  want = first["policy_loss"] + 0.5 * first["kl"] - 0.01 * first["entropy"]
  assert first["loss"] == pytest.approx(want, rel=1e-4)
  for _ in range(8):
    last = learner.update(groups)
  assert last["kl"] < 0.5 * first["kl"]


def test_kl_of_the_reference_itself_is_zero(case):
  learner = case.learner(reference=case.model, kl_coef=0.5, entropy_coef=0.01)
  metrics = learner.update(case.groups(1, 3))
  assert metrics["kl"] == pytest.approx(0, abs=1e-6)
  with pytest.raises(ValueError, match="reference"):
    case.learner(kl_coef=0.1)


# --- bookkeeping ------------------------------------------------------------


def test_published_weights_outlive_updates_in_place(case):
  learner = case.learner()
  published = learner.policy_state()
  before = [np.array(x) for x in jax.tree.leaves(published)]
  inner = list(learner._params.values())
  published_params = learner._split.params_of(case.model)
  copies = {name: np.array(x) for name, x in published_params.items()}
  learner.update(case.groups())
  assert all(x.is_deleted() for x in inner), "parameters were not donated"
  for old, now in zip(before, jax.tree.leaves(published), strict=True):
    np.testing.assert_array_equal(old, now)
  assert largest_difference(copies, published_params) == 0
  assert (
    largest_difference(
      dict(enumerate(before)),
      dict(enumerate(jax.tree.leaves(learner.policy_state()))),
    )
    > 0
  )


def test_not_finite_gradients_make_no_step(case):
  learner = case.learner()
  groups = case.groups()
  learner.update(groups)
  arrays = learner.arrays()
  good = arrays["params"]["norm"]
  arrays["params"]["norm"] = jax.device_put(
    np.full(good.shape, np.nan, np.float32), good.sharding
  )
  before = {k: np.array(v) for k, v in learner.parameters().items()}
  moments = [np.array(x) for x in jax.tree.leaves(arrays["optimizer"])]
  metrics = learner.update(groups)
  assert metrics["skipped_steps"] == 1 and metrics["optimizer_steps"] == 1
  assert learner.version == 2
  for name, value in learner.parameters().items():
    np.testing.assert_array_equal(before[name], value)
  for old, now in zip(
    moments, jax.tree.leaves(learner.arrays()["optimizer"]), strict=True
  ):
    np.testing.assert_array_equal(old, now)


def test_equal_learners_stay_equal_to_the_bit(case):
  groups = [case.groups(2, 3) for _ in range(3)]
  a, b = case.learner(), case.learner()
  for batch in groups:
    x, y = a.update(batch), b.update(batch)
    assert x["loss"] == y["loss"] and x["grad_norm"] == y["grad_norm"]
  assert largest_difference(a.parameters(), b.parameters()) == 0


def test_no_recompilation_whatever_comes(case):
  learner = case.learner()
  learner.update(case.groups(1, 2, turns=1))
  compiles = learner.compiles
  for count, size, turns in ((4, 4, 2), (1, 2, 3), (2, 8, 1)):
    learner.update(case.groups(count, size, turns))
  assert learner.compiles == compiles


def test_automatic_shape_is_kept(case):
  learner = case.learner(patches=0, targets=0)
  assert learner.shape is None
  learner_cases.pack(learner, case.groups(1, 2))
  shape = learner.shape
  learner_cases.pack(learner, case.groups(4, 6))
  assert learner.shape == shape


@pytest.mark.slow
def test_an_easy_first_batch_does_not_keep_full_rows_out(case):
  learner = case.learner(patches=0, targets=0)
  learner.update([case.group([1.0, 0.0], turns=1)])
  parts = []
  for _ in range(5):  # 20 vision tokens, 39 sampled ones: more than before.
    parts += [("image", case.image()), ("sampled", case.text(8))]
  full = case.sequence([("text", case.text(4)), *parts])
  plan = learner._minibatches.packer.plan(
    example_lib.from_sequences([full]), learner.shape
  )
  assert plan.stats.patches == 20 and plan.stats.targets == 40
  compiles = learner.compiles
  demanding = [
    trajectory.Trajectory(
      steps=[trajectory.Step()],
      reward=reward,
      status=trajectory.TrajectoryStatus.SUCCEEDED,
      sequences=[full],
    )
    for reward in (0.0, 1.0)
  ]
  learner.update([trajectory.TrajectoryGroup("g", "t", tuple(demanding))])
  assert learner.compiles == compiles


def test_nothing_to_learn_still_advances_the_version(case):
  learner = case.learner()
  before = learner.parameters()
  broken = trajectory.TrajectoryGroup(
    "broken",
    "t",
    (
      case.episode(
        [("text", case.text(3))],
        1.0,
        turns=1,
        status=trajectory.TrajectoryStatus.ENV_ERROR,
      ),
    ),
  )
  metrics = learner.update([case.group([1.0, 1.0]), broken])
  assert learner.version == 1
  assert metrics["empty_updates"] == 1
  # What was not measured is absent, so that a gap in a curve is a gap.
  for name in ("loss", "grad_norm", "learning_rate", "packing_efficiency"):
    assert name not in metrics
  assert metrics["zero_advantage_groups"] == 2
  assert metrics["valid_episodes"] == 2 and metrics["episodes"] == 3
  assert largest_difference(before, learner.parameters()) == 0


def test_metrics_tell_staleness_and_tokens(case):
  learner = case.learner()
  learner.update(case.groups(1, 2))
  learner.update(case.groups(1, 2))
  old, new = case.groups(1, 2, version=0), case.groups(1, 2, version=2)
  metrics = learner.update(old + new)
  assert metrics["staleness_max"] == 2
  assert 0 < metrics["staleness_mean"] < 2
  assert metrics["sampled_tokens"] == metrics["completion_tokens"]
  sequences = [s for g in old + new for t in g for s in t.sequences]
  assert metrics["sampled_tokens"] == sum(s.num_sampled for s in sequences)
  assert metrics["shared_tokens"] > 0
  assert 0 < metrics["packing_efficiency"] <= 1
  assert 0 < metrics["patch_efficiency"] <= 1


def test_long_sequences_are_refused_or_counted(case):
  long = case.sequence([("text", case.text(90)), ("sampled", case.text(3))])
  short = case.sequence([("text", case.text(9)), ("sampled", case.text(3))])
  cloner = case.learner(objective="behaviour_cloning")
  with pytest.raises(ValueError, match="row_length=64"):
    cloner.update_on_sequences([short, long])
  cloner = case.learner(objective="behaviour_cloning", overlong="drop")
  metrics = cloner.update_on_sequences([short, long])
  assert metrics["dropped_sequences"] == 1 and metrics["sequences"] == 1


def test_it_says_of_every_turn_whether_it_was_trained_on(case):
  """Told tokens are the targets of the batches, counted by the packer."""
  learner = case.learner(overlong="drop")
  status = trajectory.TrajectoryStatus
  prompt = [("text", case.text(3))]
  make = lambda reward, **kw: case.episode(prompt, reward, **kw)
  won, lost = make(1.0), make(0.0)
  broken = make(0.0, status=status.ENV_ERROR)
  long = make(1.0)
  long.sequences[1] = case.sequence(
    [("text", case.text(90)), ("sampled", case.text(3))], turn=1
  )
  alike = [make(1.0), make(1.0, turns=3)]
  metrics = learner.update(
    [
      trajectory.TrajectoryGroup("a", "t", (won, lost, broken, long)),
      trajectory.TrajectoryGroup("b", "t", alike),
    ]
  )
  assert learner.left_out == {
    won.trajectory_id: ("", ""),
    lost.trajectory_id: ("", ""),
    broken.trajectory_id: ("invalid", "invalid"),
    long.trajectory_id: ("", "too_long"),
    alike[0].trajectory_id: ("zero_advantage",) * 2,
    alike[1].trajectory_id: ("zero_advantage",) * 3,
  }
  trained = sum(
    int((sequence.loss_mask & (sequence.turn_ids == turn)).sum())
    for episode in (won, lost, broken, long, *alike)
    for sequence in episode.sequences
    for turn, reason in enumerate(learner.left_out[episode.trajectory_id])
    if not reason
  )
  assert metrics["sampled_tokens"] == trained > 0
  # Who wants zero advantages in the loss, for its other terms, has them there.
  learner = case.learner(overlong="drop", skip_zero_advantage=False)
  learner.update([trajectory.TrajectoryGroup("b", "t", alike)])
  assert set().union(*learner.left_out.values()) == {""}


def test_misuse_is_refused(case):
  learner = case.learner()
  with pytest.raises(ValueError, match="behaviour_cloning"):
    learner.update_on_sequences(
      [case.sequence([("text", case.text(2)), ("sampled", case.text(1))])]
    )
  with pytest.raises(ValueError, match="at least one group"):
    learner.update([])


# --- it learns --------------------------------------------------------------


def test_behaviour_cloning_learns_demonstrations_by_heart(case):
  learner = case.learner(objective="behaviour_cloning")
  demonstrations = []
  for _ in range(4):
    parts = [("text", case.text(3)), ("image", case.image())]
    parts.append(("sampled", case.text(3)))
    parts += [("text", case.text(2)), ("sampled", case.text(2))]
    demonstrations.append(case.sequence(parts, logprob=0.0))
  for _ in range(60):
    metrics = learner.update_on_sequences(demonstrations)
  assert metrics["loss"] < 0.1 and metrics["top_token"] == 1.0


def test_grpo_learns_what_is_rewarded(case):
  """A bandit over some tokens: half of them pay 1. On policy throughout."""
  learner = case.learner()
  prompt = case.text(4)
  arms = case.ids[:40]
  pays = np.arange(len(arms)) < 20
  probe = [case.sequence([("text", prompt), ("sampled", [t])]) for t in arms]
  rng = np.random.default_rng(0)
  success = []
  for _ in range(25):
    scored = learner.sequence_logprobs(probe)
    logprobs = np.array([lp[len(prompt)] for lp in scored])
    p = np.exp(logprobs) / np.exp(logprobs).sum()
    success.append(p[pays].sum())
    members = tuple(
      trajectory.Trajectory(
        steps=[trajectory.Step()],
        reward=float(pays[i]),
        status=trajectory.TrajectoryStatus.SUCCEEDED,
        sequences=[dataclasses.replace(probe[i], logprobs=scored[i])],
      )
      for i in rng.choice(len(arms), 16, p=p)
    )
    learner.update([trajectory.TrajectoryGroup("g", "t", members)])
  assert success[0] < 0.65 and success[-1] > 0.95


def test_examples_with_turn_advantages(case):
  episode = case.episode([("text", case.text(3))], 1.0, turns=2)
  episode.steps[1].reward = 1.0
  group = trajectory.TrajectoryGroup(
    "g", "t", (episode, case.episode([("text", case.text(3))], 0.0, turns=2))
  )
  learner = case.learner(advantage="turn_returns", gamma=0.5)
  metrics = learner.update([group])
  assert metrics["zero_advantage_groups"] == 0
  (examples,), _ = example_lib.from_groups(
    [group],
    learner_cases.advantages.ESTIMATORS.get("turn_returns"),
    learner_cases.advantages.AdvantageOptions(gamma=0.5),
  )
  first, second = examples[0].advantages.max(), examples[1].advantages.max()
  assert 0 < first < second  # Returns 0.5 and 1.
