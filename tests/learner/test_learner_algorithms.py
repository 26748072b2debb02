"""Formulas against hand-computed values, closed forms and upstream."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tunix.rl import algo_core
from tunix.rl import common
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner import config as config_lib
from tunix.rl.multi_turn.learner import optimizer
from tunix.rl.multi_turn.learner.algorithms import advantages
from tunix.rl.multi_turn.learner.algorithms import aggregation
from tunix.rl.multi_turn.learner.algorithms import kl
from tunix.rl.multi_turn.learner.algorithms import objectives
from tunix.rl.multi_turn.learner.algorithms import parts
from tunix.rl.multi_turn.learner.batches import examples

OPTIONS = advantages.AdvantageOptions()


def _group(totals, turns=None):
  turns = turns or [[t] for t in totals]
  return advantages.GroupRewards(
    np.array(totals, float), tuple(np.array(t, float) for t in turns)
  )


# --- advantages -------------------------------------------------------------


def test_grpo_by_hand():
  group = _group([1, 0, 0, 1], [[0, 1], [0], [0, 0], [1]])
  got = advantages.grpo(group, OPTIONS)
  # mean 1/2, sample std sqrt(1/3).
  unit = 0.5 / (np.sqrt(1 / 3) + 1e-6)
  want = [[unit, unit], [-unit], [-unit, -unit], [unit]]
  for g, w in zip(got, want, strict=True):
    np.testing.assert_allclose(g, w, rtol=1e-12)


@pytest.mark.parametrize(
  "name, upstream",
  [
    ("grpo", algo_core.compute_advantages),
    ("dr_grpo", algo_core.compute_drgrpo_advantages),
    ("rloo", algo_core.compute_rloo_advantages),
  ],
)
def test_advantages_equal_upstream(name, upstream):
  rewards = np.random.default_rng(0).normal(size=(5, 8))
  want = np.asarray(upstream(rewards.reshape(-1).astype(np.float32), 8))
  estimator = advantages.ESTIMATORS.get(name)
  got = [v[0] for row in rewards for v in estimator(_group(row), OPTIONS)]
  np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "turn_returns"])
def test_equal_rewards_and_single_members_get_zero(name):
  estimator = advantages.ESTIMATORS.get(name)
  for group in (_group([0.7] * 4), _group([3.0])):
    for values in estimator(group, OPTIONS):
      assert not np.any(values)


def test_turn_returns_discount_by_turn():
  np.testing.assert_allclose(
    advantages.discounted_returns(np.array([1.0, 0.0, 2.0]), 0.5),
    [1.5, 1.0, 2.0],
  )
  group = _group([1.0, 0.0], [[0.0, 1.0], [0.0]])
  got = advantages.turn_returns(group, advantages.AdvantageOptions(gamma=0.5))
  pooled = np.array([0.5, 1.0, 0.0])
  want = (pooled - 0.5) / (pooled.std(ddof=1) + 1e-6)
  np.testing.assert_allclose(np.concatenate(got), want, rtol=1e-12)


def test_not_finite_rewards_are_refused():
  with pytest.raises(ValueError, match="not finite"):
    _group([1.0, float("nan")])


def test_turn_rewards_cover_turns_without_a_step_and_the_final_reward():
  sequence = trajectory.TokenSequence(
    [1, 2, 3], [False, True, True], [0, -1, -1], [-1, 0, 0], [0, 0, 2]
  )
  episode = trajectory.Trajectory(
    steps=[trajectory.Step(reward=0.25)],
    reward=1.0,
    status=trajectory.TrajectoryStatus.PARSE_ERROR,
    sequences=[sequence],
  )
  np.testing.assert_array_equal(examples.turn_rewards(episode), [0.25, 0, 0.75])


# --- aggregation ------------------------------------------------------------


@pytest.mark.parametrize("name", aggregation.AGGREGATORS.names())
def test_a_rewritten_history_gives_an_episode_no_more_weight(name):
  """Unless each sequence is to count: episode 0 as 1, then as 3 sequences."""

  def weight(*tokens):
    step = aggregation.StepTokens(
      np.array([*tokens, 6]), np.array([0] * len(tokens) + [1]), 32
    )
    weights = aggregation.AGGREGATORS.get(name)(step)
    return np.sum((weights * step.tokens_N)[:-1])

  grows = weight(2, 5, 5) > weight(12) * (1 + 1e-9)
  assert grows == (name == "sequence_mean")


# --- KL ---------------------------------------------------------------------


def _policies(seed=0, size=7):
  rng = np.random.default_rng(seed)
  return jnp.array(rng.normal(size=size)), jnp.array(rng.normal(size=size))


@pytest.mark.parametrize(
  "name, method", [("k1", "kl"), ("k2", "mse_kl"), ("k3", "low_var_kl")]
)
def test_kl_equals_upstream(name, method):
  rng = np.random.default_rng(1)
  p, q = jnp.array(-rng.random((2, 50)) * 4)
  np.testing.assert_allclose(
    kl.ESTIMATORS.get(name)(p, q),
    common.compute_kl_divergence(p, q, method=method),
    atol=1e-6,
  )


def test_kl_expectations_over_all_tokens():
  p_logits, q_logits = _policies()
  p, q = jax.nn.log_softmax(p_logits), jax.nn.log_softmax(q_logits)
  exact = float(jnp.sum(jnp.exp(p) * (p - q)))
  for name in ("k1", "k3"):
    mean = float(jnp.sum(jnp.exp(p) * kl.ESTIMATORS.get(name)(p, q)))
    assert mean == pytest.approx(exact, abs=1e-6)
  assert np.all(np.asarray(kl.k3(p, q)) >= 0)


def test_kl_gradients_are_what_the_docstring_says():
  p_logits, q_logits = _policies(2)
  q = jax.nn.log_softmax(q_logits)
  frozen = jnp.exp(jax.nn.log_softmax(p_logits))  # Tokens are drawn from it.

  def surrogate(logits, estimator):
    return jnp.sum(frozen * estimator(jax.nn.log_softmax(logits), q))

  def reverse(logits):
    p = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(p) * (p - q))

  def forward(logits):
    return jnp.sum(jnp.exp(q) * (q - jax.nn.log_softmax(logits)))

  grad = jax.grad(surrogate)
  np.testing.assert_allclose(grad(p_logits, kl.k1), 0, atol=1e-6)
  np.testing.assert_allclose(
    grad(p_logits, kl.k2), jax.grad(reverse)(p_logits), atol=1e-6
  )
  np.testing.assert_allclose(
    grad(p_logits, kl.k3), jax.grad(forward)(p_logits), atol=1e-6
  )


# --- objectives -------------------------------------------------------------


def _tokens(ratio, advantage, weight=1.0):
  ratio = jnp.atleast_1d(jnp.asarray(ratio, jnp.float32))
  anchor = jnp.full(ratio.shape, -2.0)
  return objectives.TokenBatch(
    logprobs=anchor + jnp.log(ratio),
    anchor=anchor,
    weight=jnp.full(ratio.shape, weight),
    advantages=jnp.broadcast_to(jnp.float32(advantage), ratio.shape),
    sequences=jnp.zeros(ratio.shape, jnp.int32),
  )


@pytest.mark.parametrize(
  "ratio, advantage, loss, slope",
  [
    # slope = d loss / d log-prob = -ratio * A inside the clip, else 0.
    (1.0, 2.0, -2.0, -2.0),
    (1.2, 1.0, -1.2, -1.2),
    (1.5, 1.0, -1.28, 0.0),  # Clipped high.
    (1.5, -1.0, 1.5, 1.5),  # The pessimistic side is never clipped.
    (0.5, 1.0, -0.5, -0.5),
    (0.5, -1.0, 0.8, 0.0),  # Clipped low.
    (0.9, -2.0, 1.8, 1.8),
  ],
)
def test_clipped_objective(ratio, advantage, loss, slope):
  options = objectives.ObjectiveOptions(0.2, 0.28)
  tokens = _tokens(ratio, advantage, weight=3.0)
  got, readings = objectives.clipped(tokens, options)
  np.testing.assert_allclose(got, [3 * loss], rtol=1e-5)
  assert float(readings["clip_fraction"][0]) == (slope == 0.0)
  high = float(readings["clip_fraction_high"][0])
  assert high == (ratio > 1.28 and slope == 0.0)

  def value(lp):
    return objectives.clipped(
      dataclasses.replace(tokens, logprobs=lp), options
    )[0].sum()

  np.testing.assert_allclose(
    jax.grad(value)(tokens.logprobs), [3 * slope], rtol=1e-5
  )


def test_ratios_cannot_overflow():
  tokens = _tokens(1.0, -1.0)
  tokens = dataclasses.replace(tokens, logprobs=jnp.array([500.0]))
  loss, _ = objectives.clipped(tokens, objectives.ObjectiveOptions())
  assert np.isfinite(np.asarray(loss)).all()


def test_behaviour_cloning_is_the_negative_log_likelihood():
  tokens = _tokens([0.5, 2.0], 0.0)
  loss, _ = objectives.behaviour_cloning(tokens, objectives.ObjectiveOptions())
  np.testing.assert_array_equal(loss, -tokens.logprobs)


# --- configuration and schedule ---------------------------------------------


@pytest.mark.parametrize(
  "fields, message",
  [
    (dict(schedule="cosine", steps=4, warmup_steps=4), "warmup_steps=4"),
    (dict(warmup_steps=5, steps=4), "warmup_steps=5"),
    (dict(overlong="cut"), "overlong"),
    (dict(optimizer="sgd"), "muon"),
    (dict(rows=0), "rows"),
    (dict(groups_per_step=8, minibatches=3), "minibatches=3"),
  ],
)
def test_the_learners_settings_refuse(fields, message):
  with pytest.raises(ValueError, match=message):
    config_lib.LearnerConfig(**fields)


@pytest.mark.parametrize(
  "fields, message",
  [
    (dict(clip_low=1.5), "clip_low"),
    (dict(tis_cap=0.5), "tis_cap"),
    (dict(kl_estimator="k1", kl_coef=0.1), "k2 or k3"),
  ],
)
def test_the_algorithms_settings_refuse(fields, message):
  with pytest.raises(ValueError, match=message):
    config_lib.AlgorithmConfig(**fields)


@pytest.mark.parametrize(
  "fields, message",
  [
    (dict(advantage="grop"), "grpo"),
    (dict(objective="ppo"), "objective"),
    (dict(importance="iis"), "tis"),
    (dict(kl_estimator="k9"), "KL estimator"),
    (dict(loss_aggregation="mean"), "token_mean"),
  ],
)
def test_an_algorithms_unknown_parts_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    parts.Algorithm.of(config_lib.AlgorithmConfig(**fields))


def test_a_part_may_be_given_by_its_path():
  module = "tunix.rl.multi_turn.learner.algorithms.advantages"
  config = config_lib.AlgorithmConfig(advantage=f"{module}:dr_grpo")
  assert parts.Algorithm.of(config).estimate is advantages.dr_grpo


@pytest.mark.parametrize(
  "fields, message",
  [
    (dict(temperature=0.0), "temperature"),
    (dict(top_p=0.9), "tis"),
    (dict(top_k=5), "tis"),
  ],
)
def test_sampling_that_cannot_be_learned_from_is_refused(fields, message):
  algorithm = parts.Algorithm.of(config_lib.AlgorithmConfig())
  with pytest.raises(ValueError, match=message):
    algorithm.check_sampling(policy_client.SamplingParams(**fields))


def test_truncated_sampling_is_accepted_with_correction():
  config = config_lib.AlgorithmConfig(importance="tis")
  parts.Algorithm.of(config).check_sampling(
    policy_client.SamplingParams(top_p=0.9)
  )


def test_the_schedule_ends_with_the_last_optimizer_step():
  config = config_lib.LearnerConfig(
    steps=5, groups_per_step=8, minibatches=2, epochs=3
  )
  assert config.optimizer_steps == 30
  assert config_lib.LearnerConfig(steps=0).optimizer_steps == 1


def test_schedules():
  def rates(**fields):
    schedule = optimizer.make_schedule(
      config_lib.LearnerConfig(learning_rate=1.0, **fields)
    )
    return [float(schedule(i)) for i in range(7)]

  assert rates() == [1.0] * 7
  np.testing.assert_allclose(
    rates(warmup_steps=4), [0.25, 0.5, 0.75, 1, 1, 1, 1], rtol=1e-6
  )
  np.testing.assert_allclose(
    rates(schedule="linear", warmup_steps=2, steps=6),
    [0.5, 1, 1, 0.75, 0.5, 0.25, 0],
    atol=1e-6,
  )
  cosine = [0.5 * (1 + np.cos(np.pi * i / 6)) for i in range(7)]
  np.testing.assert_allclose(
    rates(schedule="cosine", steps=6), cosine, atol=1e-6
  )
