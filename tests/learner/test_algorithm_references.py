"""Every objective, correction and aggregation against a reference in torch.

The reference is written from the papers, sequence by sequence, without packing,
buffers or padding; its gradient is torch's own. The learner's side is a real
packed batch of two buffers: several turns and sequences an episode, members of
several groups, episodes that a limit ended and members that are invalid.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner import config as config_lib
from tunix.rl.multi_turn.learner import logprobs
from tunix.rl.multi_turn.learner import update
from tunix.rl.multi_turn.learner.algorithms import advantages
from tunix.rl.multi_turn.learner.algorithms import aggregation
from tunix.rl.multi_turn.learner.algorithms import objectives
from tunix.rl.multi_turn.learner.algorithms import parts
from tunix.rl.multi_turn.learner.batches import examples as example_lib
from tunix.rl.multi_turn.learner.batches import packing

from tests.learner import learner_cases

STATUS = trajectory.TrajectoryStatus
SHAPE = packing.BatchShape(
  rows=4, row_length=24, buffers=2, patches=64, targets=48
)


# --- the reference ------------------------------------------------------------


def reference_loss(config, episodes):
  """Loss of a step, float64: a list of episodes, each a list of sequences.

  A sequence is {new, proximal, sampled, reference, entropy, advantage}, each
  float64 [T] of its sampled tokens; `new` carries the gradient.
  """
  sequences = [s for episode in episodes for s in episode]
  tokens = sum(len(s["new"]) for s in sequences)
  total = torch.zeros((), dtype=torch.float64)
  for episode in episodes:
    episode_tokens = sum(len(s["new"]) for s in episode)
    for s in episode:
      losses = _token_losses(config, s)
      scale = {
        "token_mean": 1 / tokens,
        "sequence_mean": 1 / (len(sequences) * len(losses)),
        "episode_mean": 1 / (len(episodes) * episode_tokens),
        "constant": 1 / (len(episodes) * (config.loss_length or 1)),
      }[config.loss_aggregation]
      total = total + scale * losses.sum()
  return total


def _token_losses(c, s):
  new, advantage = s["new"], s["advantage"]
  behaviour = (s["proximal"] - s["sampled"]).exp()
  kind, _, level = c.importance.partition("_")
  if level == "sequence":
    behaviour = behaviour.prod().expand(len(new))
  elif level == "geometric":
    behaviour = behaviour.log().mean().exp().expand(len(new))
  anchor = s["sampled"] if kind == "none" else s["proximal"]
  if kind == "none":
    weight = torch.ones_like(new)
  elif kind == "tis":
    weight = behaviour.clamp(max=c.tis_cap)
  elif kind == "mis":
    inside = (behaviour >= c.mis_low) & (behaviour <= c.tis_cap)
    weight = behaviour * inside
  else:
    weight = behaviour
  if c.veto and (s["proximal"] - s["sampled"]).exp().min() < c.veto:
    weight = torch.zeros_like(new)
  if c.distill_coef:
    # The reverse KL's sampled term, whose gradient is by the score function.
    advantage = advantage + c.distill_coef * (s["teacher"] - anchor)
  ratio = (new - anchor).exp()
  if c.objective == "gspo":
    ratio = (new - anchor).mean().exp().expand(len(new))
  elif c.objective == "gspo_token":
    sequence_ratio = (new - anchor).mean().exp().detach()
    ratio = sequence_ratio * (new - new.detach()).exp()
  low, high = 1 - c.clip_low, 1 + c.clip_high
  if c.objective in ("grpo", "gspo", "gspo_token"):
    gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    if c.dual_clip:
      gain = torch.where(
        advantage < 0, torch.maximum(gain, c.dual_clip * advantage), gain
      )
    loss = -gain
  elif c.objective == "cispo":
    loss = -ratio.detach().clamp(low, high) * advantage * new
  elif c.objective == "policy_gradient":
    loss = -advantage * new
  elif c.objective == "sapo":
    tau = torch.where(
      advantage > 0,
      torch.full_like(new, c.sapo_tau_pos),
      torch.full_like(new, c.sapo_tau_neg),
    )
    loss = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantage
  loss = weight * loss
  if c.kl_coef:
    difference = s["reference"] - new
    price = {
      "k1": -difference,
      "k2": difference**2 / 2,
      "k3": difference.exp() - 1 - difference,
    }[c.kl_estimator]
    loss = loss + c.kl_coef * price
  return loss - c.entropy_coef * s["entropy"]


# --- the learner's side -------------------------------------------------------


def _groups(case):
  """Two groups: unequal numbers of turns, a truncated and an invalid member."""
  prompt = [("text", case.text(4)), ("image", case.image())]
  make = lambda reward, turns, **kw: case.episode(prompt, reward, turns, **kw)
  return [
    trajectory.TrajectoryGroup(
      "a",
      "t",
      (
        make(1.0, 3),
        make(0.0, 1, status=STATUS.MAX_TURNS),
        make(0.4, 2),
        make(1.0, 2, status=STATUS.ENV_ERROR),
      ),
    ),
    trajectory.TrajectoryGroup("b", "t", (make(0.0, 2), make(0.7, 3))),
  ]


@pytest.fixture(scope="module", name="packed")
def _packed():
  """(examples, batches) with turn-level advantages, in two buffers each."""
  case = learner_cases.Case(seed=3)
  per_group, _ = example_lib.from_groups(
    _groups(case),
    advantages.ESTIMATORS.get("turn_returns"),
    advantages.AdvantageOptions(gamma=0.9),
  )
  examples = [e for group in per_group for e in group]
  # Advantages that differ within a sequence.
  rng = np.random.default_rng(5)
  examples = [
    dataclasses.replace(
      e, advantages=rng.normal(size=len(e.sequence)) * e.sequence.loss_mask
    )
    for e in examples
  ]
  learner = case.learner()
  learner.shape = SHAPE
  plan = learner._minibatches.packer.plan(examples, SHAPE)

  def fill(weights_N):
    return learner._minibatches.packer.fill(plan, examples, weights_N)

  return examples, fill


def _values(examples, seed):
  """Random log-probs of each sequence's sampled tokens."""
  rng = np.random.default_rng(seed)
  out = []
  for e in examples:
    size = e.sequence.num_sampled
    sampled = -np.abs(rng.normal(size=size)) - 0.1
    proximal = sampled + 0.3 * rng.normal(size=size)
    out.append(
      {
        "sampled": sampled,
        "proximal": proximal,
        "new": proximal + 0.3 * rng.normal(size=size),
        "reference": sampled + 0.5 * rng.normal(size=size),
        "teacher": sampled + 0.8 * rng.normal(size=size),
        "entropy": np.abs(rng.normal(size=size)),
        "advantage": e.advantages[e.sequence.loss_mask].astype(np.float64),
      }
    )
  return out


def _spread(batch, values, name, fill=-7.0):
  """float32[S, M] of one of the values, another number where padding is."""
  mask, number = np.asarray(batch.mask), np.asarray(batch.sequences)
  out = np.full(mask.shape, fill, np.float32)
  for i in np.unique(number[mask]):
    out[mask & (number == i)] = values[i][name]
  return jnp.asarray(out)


def _programs(config, steps_per_update=2):
  learner = config_lib.LearnerConfig(
    groups_per_step=2, minibatches=steps_per_update
  )
  programs = object.__new__(update.UpdatePrograms)  # Nothing is compiled.
  programs._algorithm = parts.Algorithm.of(config)
  programs._config = learner
  return programs


def _compare(config, packed, seed=0, values=None):
  examples, fill = packed
  values = values or _values(examples, seed)
  episodes: dict[int, list] = {}
  leaves = []
  for e, v in zip(examples, values):
    tensors = {k: torch.tensor(x, dtype=torch.float64) for k, x in v.items()}
    tensors["new"].requires_grad_(True)
    leaves.append(tensors["new"])
    episodes.setdefault(e.episode, []).append(tensors)
  want = reference_loss(config, list(episodes.values()))
  want.backward()
  algorithm = parts.Algorithm.of(config)
  weights = algorithm.aggregate(
    aggregation.StepTokens(
      np.array([e.sequence.num_sampled for e in examples]),
      np.array([e.episode for e in examples]),
      config.loss_length or 1,
    )
  )
  programs = _programs(config)
  got, numbers = 0.0, set()

  @jax.value_and_grad
  def slope(lp, entropy, batch, extra):
    scores = logprobs.TokenScores(lp, entropy, jnp.zeros_like(lp))
    return programs.loss_of_scores(scores, batch, extra)[0]

  for batch in fill(weights):
    batch = dataclasses.replace(
      batch,
      logprobs=_spread(batch, values, "sampled"),
      advantages=_spread(batch, values, "advantage"),
    )
    extra = update.Extra(
      _spread(batch, values, "proximal"),
      _spread(batch, values, "reference"),
      teacher=_spread(batch, values, "teacher"),
    )
    entropy = _spread(batch, values, "entropy")

    value, grad = slope(_spread(batch, values, "new"), entropy, batch, extra)
    got += float(value)
    mask, number = np.asarray(batch.mask), np.asarray(batch.sequences)
    assert not np.any(np.asarray(grad)[~mask])
    for i in np.unique(number[mask]):
      numbers.add(int(i))
      np.testing.assert_allclose(
        np.asarray(grad)[mask & (number == i)],
        leaves[i].grad.numpy(),
        rtol=2e-4,
        atol=2e-6,
      )
  assert numbers == set(range(len(examples)))
  assert got == pytest.approx(want.item(), rel=2e-5, abs=2e-6)
  return values


OBJECTIVES = ("grpo", "gspo", "gspo_token", "cispo", "policy_gradient", "sapo")
CORRECTIONS = (
  "none",
  "decoupled",
  "tis",
  "tis_sequence",
  "mis",
  "mis_sequence",
  "mis_geometric",
)


def test_the_batch_is_what_the_module_says(packed):
  examples, fill = packed
  batches = fill(np.ones(len(examples)))
  assert any((np.asarray(b.sequences) >= 0).any(axis=1).all() for b in batches)
  assert len({e.episode for e in examples}) == 5  # The sixth is invalid.
  assert len(examples) == 3 + 1 + 2 + 2 + 3
  assert [e.truncated for e in examples].count(True) == 1
  # Those of a whole buffer are in test_buffer_objectives.
  assert set(OBJECTIVES) == set(objectives.OBJECTIVES) - {
    "behaviour_cloning",
    "clip_cov",
    "kl_cov",
  }


@pytest.mark.parametrize(
  "objective, importance",
  [(name, "none") for name in OBJECTIVES]
  + [("grpo", name) for name in CORRECTIONS[1:]]
  + [("gspo", "mis_geometric"), ("cispo", "tis_sequence")],
)
def test_loss_and_gradient_equal_torch(packed, objective, importance):
  config = config_lib.AlgorithmConfig(
    objective=objective,
    importance=importance,
    clip_low=0.1,
    clip_high=0.15,
    tis_cap=1.3,
    mis_low=0.8,
  )
  _compare(config, packed, seed=len(objective) + len(importance))


@pytest.mark.parametrize(
  "aggregation, estimator",
  [
    ("token_mean", "k2"),
    ("sequence_mean", "k3"),
    ("episode_mean", "k2"),
    ("constant", "k3"),
  ],
)
def test_aggregation_kl_and_entropy_equal_torch(packed, aggregation, estimator):
  config = config_lib.AlgorithmConfig(
    objective="gspo",
    loss_aggregation=aggregation,
    loss_length=77,
    kl_coef=0.2,
    kl_estimator=estimator,
    entropy_coef=0.03,
  )
  _compare(config, packed)


@pytest.mark.parametrize(
  "objective, importance", [("policy_gradient", "none"), ("grpo", "tis")]
)
def test_distillation_equals_torch(packed, objective, importance):
  config = config_lib.AlgorithmConfig(
    objective=objective, importance=importance, distill_coef=0.7, teacher="some"
  )
  _compare(config, packed)


def _slope(programs, lp, batch, proximal):
  """(loss, its gradient) of log-probs."""

  @jax.value_and_grad
  def loss(lp):
    scores = logprobs.TokenScores(lp, jnp.zeros_like(lp), jnp.zeros_like(lp))
    extra = update.Extra(proximal, proximal)
    return programs.loss_of_scores(scores, batch, extra)[0]

  return loss(lp)


@pytest.mark.parametrize("objective", ["grpo", "gspo", "gspo_token"])
def test_the_dual_clip_equals_torch(packed, objective):
  examples, _ = packed
  values = _values(examples, 4)
  for v in values:  # Ratios beyond it.
    v["new"] = v["new"] + 1.2
  config = config_lib.AlgorithmConfig(objective=objective, dual_clip=1.5)
  plain = config_lib.AlgorithmConfig(objective=objective)
  _compare(config, packed, values=values)
  _compare(plain, packed, values=values)


def test_the_veto_drops_whole_sequences(packed):
  examples, _ = packed
  values = _values(examples, 6)
  values[2]["sampled"][-1] = values[2]["proximal"][-1] + 10.0
  for importance in ("tis", "mis_geometric"):
    config = config_lib.AlgorithmConfig(
      importance=importance, tis_cap=50.0, veto=1e-3
    )
    _compare(config, packed, values=values)


def test_padding_may_hold_anything(packed):
  """Padding behind the last token enters no sum over a sequence."""
  examples, fill = packed
  values = _values(examples, 0)
  for objective in OBJECTIVES:
    config = config_lib.AlgorithmConfig(
      objective=objective, importance="mis_sequence", tis_cap=2.0
    )
    programs = _programs(config)
    for batch in fill(np.ones(len(examples))):
      losses = []
      for junk in (0.0, -1e30):
        lp, sampled, proximal = (
          _spread(batch, values, name, junk)
          for name in ("new", "sampled", "proximal")
        )
        here = dataclasses.replace(batch, logprobs=sampled)

        losses.append(_slope(programs, lp, here, proximal))
      mask = np.asarray(batch.mask)
      (a, da), (b, db) = losses
      assert float(a) == float(b)
      np.testing.assert_array_equal(np.asarray(da)[mask], np.asarray(db)[mask])
      assert np.isfinite(np.asarray(db)).all()


def test_a_users_objective_sees_one_buffer(packed):
  """`TokenBatch` and readings are [M], and a sum in it is of one buffer."""
  examples, fill = packed
  shapes = []

  def mine(tokens, options):
    del options
    shapes.append(
      {
        f.name: getattr(tokens, f.name).shape
        for f in dataclasses.fields(tokens)
      }
    )
    real = tokens.sequences >= 0
    mean = jnp.sum(jnp.where(real, tokens.logprobs, 0)) / jnp.sum(real)
    return tokens.logprobs - mean, {"mine": tokens.advantages}

  objectives.OBJECTIVES.register("mine", objectives.Objective(mine))
  try:
    programs = _programs(config_lib.AlgorithmConfig(objective="mine"))
  finally:
    objectives.OBJECTIVES.unregister("mine")
  values = _values(examples, 2)
  for batch in fill(np.ones(len(examples))):
    lp = _spread(batch, values, "new")
    scores = logprobs.TokenScores(lp, jnp.zeros_like(lp), jnp.zeros_like(lp))
    loss, sums = programs.loss_of_scores(scores, batch, update.Extra(lp, lp))
    # Every buffer is centred by its own mean.
    assert float(loss) == pytest.approx(0.0, abs=1e-4)
    assert "mine" in sums.total
  assert shapes
  for shape in shapes:
    assert set(shape.values()) == {(SHAPE.targets,)}


# --- the whole update ---------------------------------------------------------


def test_parameters_get_the_references_gradient(case):
  """GSPO with a masked correction, through the model and its real packing.

  The reference's gradient of each log-prob, put into a loss that is linear in
  the log-probs, has the same gradient of the parameters.
  """

  def linear(tokens, options):
    del options
    return tokens.advantages * tokens.logprobs, {}

  objectives.OBJECTIVES.register("linear", objectives.Objective(linear))
  try:
    straight = case.learner(objective="linear")
  finally:
    objectives.OBJECTIVES.unregister("linear")
  settings = dict(
    objective="gspo",
    clip_low=0.05,
    clip_high=0.08,
    importance="mis_geometric",
    tis_cap=1.4,
    mis_low=0.6,
    loss_aggregation="sequence_mean",
  )
  learner = case.learner(**settings)
  per_group, _ = example_lib.from_groups(
    _groups(case), advantages.dr_grpo, advantages.AdvantageOptions()
  )
  examples = [e for group in per_group for e in group]
  logprobs = learner.sequence_logprobs([e.sequence for e in examples])
  rng = np.random.default_rng(0)
  near = []
  for e, lp in zip(examples, logprobs):
    sequence = e.sequence
    noise = 0.2 * rng.normal(size=len(lp))
    sampled = np.where(sequence.loss_mask, np.minimum(lp + noise, 0), 0)
    near.append(
      dataclasses.replace(
        e, sequence=dataclasses.replace(sequence, logprobs=sampled)
      )
    )
  got, sums, _ = learner_cases.gradients(learner, near)
  config = config_lib.AlgorithmConfig(**settings)
  episodes: dict[int, list] = {}
  leaves = []
  for e, lp in zip(near, logprobs):
    mask = e.sequence.loss_mask
    new = torch.tensor(lp[mask], dtype=torch.float64, requires_grad=True)
    leaves.append(new)
    episodes.setdefault(e.episode, []).append(
      {
        "new": new,
        "proximal": new.detach(),
        "sampled": torch.tensor(e.sequence.logprobs[mask]).double(),
        "advantage": torch.tensor(e.advantages[mask]).double(),
        "entropy": torch.zeros_like(new),
      }
    )
  want = reference_loss(config, list(episodes.values()))
  want.backward()
  assert float(sums.loss) == pytest.approx(want.item(), rel=1e-4, abs=1e-6)
  sloped = []
  for e, leaf in zip(near, leaves):
    slope = np.zeros(len(e.sequence), np.float32)
    slope[e.sequence.loss_mask] = leaf.grad.numpy()
    sloped.append(dataclasses.replace(e, advantages=slope))
  with_gradient = [e for e in sloped if e.has_gradient]
  expected, _, _ = learner_cases.gradients(
    straight, sloped, np.ones(len(with_gradient))
  )
  scale = max(float(np.abs(x).max()) for x in expected.values())
  assert scale > 0
  assert learner_cases.largest_difference(got, expected) <= 2e-4 * scale
