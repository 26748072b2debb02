"""A frozen vision tower, a reference on the host, a teacher, sampling masks."""

import asyncio
import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trials
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.learner import config as config_lib
from tunix.rl.multi_turn.learner import frozen as frozen_lib
from tunix.rl.multi_turn.learner import logprobs
from tunix.rl.multi_turn.learner.batches import examples as example_lib
from tunix.rl.multi_turn.policy import lora
from tunix.rl.multi_turn.policy.models.qwen import qwen_vl

from tests.learner import learner_cases
from tests.policy import qwen_sharding_script

# --- the vision tower ---------------------------------------------------------


def test_a_frozen_tower_stays_and_the_rest_learns_as_it_would(case):
  groups = case.groups()
  free, frozen = case.learner(), case.learner(freeze_vision=True)
  tower = case.model.vision_modules
  of_tower = lambda name: name.split(".")[0] in tower
  assert {k for k in free._params if not of_tower(k)} == set(frozen._params)
  assert set(frozen._frozen) == {k for k in free._params if of_tower(k)}
  examples = learner_cases.examples_of(groups)
  expected, _, _ = learner_cases.gradients(free, examples)
  got, _, _ = learner_cases.gradients(frozen, examples)
  assert any(np.abs(expected[k]).max() > 0 for k in expected if of_tower(k))
  for name, value in got.items():
    np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-6)
  before = {k: np.asarray(v) for k, v in frozen._frozen.items()}
  frozen.update(groups)
  state = frozen._split.frozen_of(frozen.policy())
  for name, value in before.items():
    np.testing.assert_array_equal(np.asarray(state[name]), value)
  moments = jax.tree.leaves(frozen.arrays()["optimizer"])
  everything = jax.tree.leaves(free.arrays()["optimizer"])
  assert sum(x.size for x in moments) < sum(x.size for x in everything)


@pytest.mark.parametrize("rank", trials.by_default([], [0, 2], unlike=[2]))
def test_a_routers_correction_stays_whatever_trains(rank):
  """The correction has no gradient; weight decay must not move it either."""
  config, processor = qwen_sharding_script.small("glm4v_moe")
  model = qwen_vl.QwenVL(config, nnx.Rngs(0))
  correction = model.decoder.layers[1].mlp.gate.e_score_correction_bias
  correction.set_value(jnp.array([0.3, -0.2, 0.1, 0.0]))
  if rank:
    lora.add(model, rank=rank)
  case = learner_cases.Case(own=(model, processor))
  learner = case.learner(
    patches=128, weight_decay=0.5, learning_rate=0.1, warmup_steps=0
  )
  (name,) = (k for k in learner._frozen if k.endswith("correction_bias"))
  before = {k: np.asarray(v) for k, v in learner._params.items()}
  learner.update(case.groups())
  moved = [k for k, v in before.items() if (learner._params[k] != v).any()]
  assert moved
  now = learner._split.frozen_of(learner.policy())[name]
  np.testing.assert_array_equal(now, correction[...])


def test_a_policy_without_a_tower_has_none_to_freeze(case):

  class Blind:
    pass

  with pytest.raises(ValueError, match="Blind names no vision_modules"):
    frozen_lib.modules(Blind(), config_lib.LearnerConfig(freeze_vision=True))


# --- the reference ------------------------------------------------------------


@pytest.mark.slow
def test_a_reference_on_the_host_is_the_same_reference(case):
  groups = case.groups()
  reference, _ = learner_cases.policy(7)
  settings = dict(kl_coef=0.1, skip_zero_advantage=False, reference=reference)
  here = case.learner(**settings)
  there = case.learner(**settings, reference_on="host")
  kinds = lambda: {
    x.sharding.memory_kind for x in there._reference._kept.values()
  }
  assert kinds() == {"pinned_host"}
  a, b = here.update(groups), there.update(groups)
  assert a["kl"] == b["kl"] > 0
  assert a["loss"] == b["loss"]
  assert kinds() == {"pinned_host"}


# --- the teacher --------------------------------------------------------------


def kl_of(case, learner, teacher, sequences):
  """Mean over sampled positions of KL(policy || teacher), from all logits."""
  total = []
  for sequence in sequences:
    example = example_lib.Example(sequence, np.zeros(len(sequence)))
    packed = learner._minibatches.pack([example], np.ones(1))
    batch = packed.batches[0]
    rows = []
    for model in (learner.policy(), teacher):
      hidden = logprobs.gather_hidden(model(batch.inputs), batch.index)
      logits = np.array(model.logits(hidden)[0], np.float64)
      logits[:, list(case.model.config.banned_token_ids)] = -1e30
      logits -= logits.max(-1, keepdims=True)
      rows.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
    p, q = rows
    kl = (np.exp(p) * (p - q)).sum(-1)
    total.append(kl[np.asarray(batch.mask)[0]])
  return float(np.concatenate(total).mean())


def test_distilled_log_probs_move_to_the_teachers(case):
  """The advantage is the teacher's log-prob less the sampled one, exactly."""
  teacher, _ = learner_cases.policy(7)
  learner = case.learner(
    teacher=teacher,
    advantage="none",
    objective="policy_gradient",
    distill_coef=1.0,
    skip_zero_advantage=False,
    learning_rate=1e-3,
  )
  groups = case.groups()
  sequences = [s for g in groups for m in g for s in m.sequences]
  plain = case.learner(model=teacher)
  expected = plain.sequence_logprobs(sequences)
  minibatch = learner_cases.pack(learner, groups)
  minibatch.set("teacher", learner._teacher.score)
  for batch, extra in zip(minibatch.batches, minibatch.extras):
    mask, number = np.asarray(batch.mask), np.asarray(batch.sequences)
    examples = learner_cases.examples_of(groups)
    for i in np.unique(number[mask]):
      sequence = examples[i].sequence
      at = next(k for k, s in enumerate(sequences) if s is sequence)
      np.testing.assert_allclose(
        np.asarray(extra.teacher)[mask & (number == i)],
        expected[at][sequence.loss_mask],
        atol=2e-5,
      )
  metrics = learner.update(groups)
  assert metrics["optimizer_steps"] == 1  # Rewards have no part in it.
  assert "teacher_kl" in metrics


@pytest.mark.slow
def test_on_policy_samples_bring_the_policy_to_its_teacher(case):
  """Tokens drawn from the policy's own distribution: the true KL falls."""
  teacher, _ = learner_cases.policy(7)
  learner = case.learner(
    teacher=teacher,
    advantage="none",
    objective="policy_gradient",
    distill_coef=1.0,
    skip_zero_advantage=False,
    learning_rate=3e-3,
  )
  rng = np.random.default_rng(0)
  prompt = [("text", case.text(4)), ("image", case.image())]

  def drawn():
    """One token after the prompt, from the policy: real samples."""
    model = learner.policy()
    probe = case.sequence([*prompt, ("sampled", case.text(1))])
    packed = learner._minibatches.pack(
      [example_lib.Example(probe, np.zeros(len(probe)))], np.ones(1)
    )
    batch = packed.batches[0]
    hidden = logprobs.gather_hidden(model(batch.inputs), batch.index)
    logits = np.array(model.logits(hidden)[0, 0], np.float64)
    logits[list(case.model.config.banned_token_ids)] = -1e30
    p = np.exp(logits - logits.max())
    p /= p.sum()
    out = []
    for token in rng.choice(len(p), 16, p=p):
      one = case.sequence([*prompt, ("sampled", [token])])
      lp = np.where(one.loss_mask, np.log(p[token]), 0)
      out.append(dataclasses.replace(one, logprobs=lp))
    return out

  before = kl_of(case, learner, teacher, drawn()[:1])
  for _ in range(12):
    sequences = drawn()
    learner.update(
      [
        trajectory.TrajectoryGroup(
          "g",
          "t",
          tuple(
            trajectory.Trajectory(
              task="t",
              steps=[trajectory.Step()],
              status=trajectory.TrajectoryStatus.FAILED,
              sequences=[s],
            )
            for s in sequences
          ),
        )
      ]
    )
  after = kl_of(case, learner, teacher, drawn()[:1])
  assert after < 0.8 * before


def test_a_teacher_is_needed_and_needs_the_tokens(case):
  with pytest.raises(ValueError, match="needs a teacher"):
    case.learner(distill_coef=1.0, teacher=None)


# --- sampling masks -----------------------------------------------------------


def test_scores_over_a_support_equal_float64_numpy():
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(2, 7, 50)) * 4
  targets = rng.integers(0, 50, (2, 7))
  support = np.full((2, 7, 6), -1, np.int32)
  in_support = np.zeros((2, 7, 50), bool)
  for i, j in np.ndindex(2, 7):
    size = int(rng.integers(0, 6))
    if j == 3:
      size = 0  # Nothing was truncated.
    drawn = rng.choice(50, size, replace=False)
    row = np.unique(np.append(drawn, targets[i, j])) if size else drawn
    support[i, j, : len(row)] = row
    in_support[i, j, row] = True
  in_support[~in_support.any(-1)] = True
  got = logprobs.score(
    jnp.asarray(logits, jnp.float32), targets, 0.7, None, support
  )
  scaled = np.where(in_support, logits / 0.7, -np.inf)
  scaled -= scaled.max(-1, keepdims=True)
  p = np.exp(scaled) / np.exp(scaled).sum(-1, keepdims=True)
  chosen = np.take_along_axis(p, targets[..., None], -1)[..., 0]
  entropy = -np.sum(np.where(p > 0, p * np.log(np.maximum(p, 1e-300)), 0), -1)
  np.testing.assert_allclose(got.logprobs, np.log(chosen), atol=1e-5)
  np.testing.assert_allclose(got.entropy, entropy, atol=1e-5)


def test_gradients_over_a_support_are_finite_and_zero_outside():
  logits = jnp.asarray(np.random.default_rng(1).normal(size=(1, 3, 20)) * 60)
  support = np.array([[[1, 5, -1], [7, -1, -1], [-1, -1, -1]]], np.int32)
  targets = np.array([[5, 7, 2]])
  for chunked in (logits, logits - 500.0):
    grad = np.asarray(
      jax.grad(
        lambda x: logprobs.score(x, targets, 1.0, None, support).logprobs.sum()
      )(chunked)
    )
    assert np.isfinite(grad).all()
    outside = np.ones(20, bool)
    outside[[1, 5]] = False
    assert not grad[0, 0, outside].any()
    np.testing.assert_allclose(grad[0, 1], 0, atol=1e-6)  # It was certain.


def test_chunks_of_a_support_change_nothing():
  rng = np.random.default_rng(2)
  hidden = jnp.asarray(rng.normal(size=(2, 11, 8)), jnp.float32)
  kernel = jnp.asarray(rng.normal(size=(8, 30)), jnp.float32)
  targets = jnp.asarray(rng.integers(0, 30, (2, 11)), jnp.int32)
  support = np.concatenate(
    [np.asarray(targets)[..., None], rng.integers(0, 30, (2, 11, 4))], -1
  )

  class Head:
    def logits(self, hidden):
      return hidden @ kernel

  at_once, parts = (
    logprobs.token_scores(
      Head(), hidden, targets, chunk=chunk, support_SMK=support
    )
    for chunk in (64, 4)
  )
  np.testing.assert_allclose(at_once.logprobs, parts.logprobs, atol=1e-6)
  np.testing.assert_allclose(at_once.entropy, parts.entropy, atol=1e-6)


@pytest.mark.slow
def test_truncated_rollouts_are_on_policy_in_the_learner(case):
  """top-k and top-p in the engine: the ratio of learner to sampler is 1."""
  sampling = dict(temperature=0.9, top_k=20, top_p=0.8)
  learner = case.learner(keep_sampling_mask=True, **sampling)
  plain = case.learner(temperature=0.9)

  async def play(engine, i):
    prompt = case.text(5)
    completion = await engine.generate(
      policy_client.TokenPrompt(prompt),
      policy_client.SamplingParams(
        max_new_tokens=8, seed=i, top_logprobs=20, **sampling
      ),
      session=f"s{i}",
    )
    completion = completion.with_support()
    size = len(completion.tokens)
    mask = np.arange(5 + size) >= 5
    grown = lambda values, fill: np.append(np.full(5, fill), values)
    return trajectory.TokenSequence(
      tokens=np.append(prompt, completion.tokens),
      loss_mask=mask,
      logprobs=grown(completion.logprobs, 0.0),
      versions=grown(completion.versions, -1),
      turn_ids=np.zeros(5 + size),
      support=np.pad(completion.support, ((5, 0), (0, 0)), constant_values=-1),
    )

  async def play_all(engine):
    return await asyncio.wait_for(
      asyncio.gather(*(play(engine, i) for i in range(4))), 240
    )

  with engine_lib.RolloutEngine(
    case.model,
    case.processor,
    case.store,
    engine_config.EngineConfig(
      slots=4,
      context_length=64,
      prefill_rows=(4,),
      prefill_buckets=(16,),
      image_buckets=(1,),
    ),
    image_sizes=((32, 32),),
    banned_token_ids=case.model.config.banned_token_ids,
  ) as engine:
    sequences = asyncio.run(play_all(engine))
  truncated = learner.sequence_logprobs(sequences)
  untruncated = plain.sequence_logprobs(sequences)
  for sequence, got, plain_logprobs in zip(
    sequences, truncated, untruncated, strict=True
  ):
    np.testing.assert_allclose(got, sequence.logprobs, atol=1e-4)
    again = trajectory.TokenSequence.from_json(sequence.to_json())
    assert again == sequence
    # Without the mask they are of another distribution.
    lower = (plain_logprobs - sequence.logprobs)[sequence.loss_mask]
    assert lower.max() < -1e-3
  group = trajectory.TrajectoryGroup(
    "g",
    "t",
    tuple(
      trajectory.Trajectory(
        task="t",
        steps=[trajectory.Step()],
        reward=float(i % 2),
        status=trajectory.TrajectoryStatus.FAILED,
        sequences=[s],
      )
      for i, s in enumerate(sequences)
    ),
  )
  metrics = learner.update([group])
  assert metrics["ratio_max"] == pytest.approx(1, abs=2e-4)
  assert metrics["ratio_min"] == pytest.approx(1, abs=2e-4)


def test_a_sequence_without_a_mask_is_refused(case):
  learner = case.learner(keep_sampling_mask=True, top_k=4)
  with pytest.raises(ValueError, match="has no sampling mask"):
    learner.update(case.groups())


@pytest.mark.parametrize(
  "settings, message",
  [
    (dict(keep_sampling_mask=True), "0 < top_k <= 20"),
    (dict(keep_sampling_mask=True, top_k=21), "top_k=21"),
    (dict(top_p=0.9), "keep_sampling_mask=True"),
  ],
)
def test_sampling_that_cannot_be_reproduced_is_refused(case, settings, message):
  with pytest.raises(ValueError, match=message):
    case.learner(**settings)
