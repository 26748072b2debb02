"""PPO: advantages, value loss and the update with a value head."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner import checkpoint
from tunix.rl.multi_turn.learner import config as config_lib
from tunix.rl.multi_turn.learner import critic
from tunix.rl.multi_turn.learner import logprobs
from tunix.rl.multi_turn.learner import readings
from tunix.rl.multi_turn.learner import update
from tunix.rl.multi_turn.learner.algorithms import gae
from tunix.rl.multi_turn.learner.algorithms import parts
from tunix.rl.multi_turn.learner.batches import examples as example_lib
from tunix.rl.multi_turn.planning import compiled_update
from tunix.rl.multi_turn.policy import lora

from tests.learner import learner_cases

STATUS = trajectory.TrajectoryStatus
PPO = dict(advantage="gae", skip_zero_advantage=False)


# --- the estimator ------------------------------------------------------------


def weighted_deltas(rewards, turns, values, last, gamma, lam, token_lam):
  """A_t as the explicit double sum over later deltas, in turns of tokens."""
  n = len(turns)
  ends = [t + 1 == n or turns[t + 1] != turns[t] for t in range(n)]
  reward = [rewards[turns[t]] if ends[t] else 0.0 for t in range(n)]
  following = [*values[1:], last]
  discounts = [gamma if end else 1.0 for end in ends]
  decays = [d * (lam if e else token_lam) for d, e in zip(discounts, ends)]
  delta = [
    reward[t] + discounts[t] * following[t] - values[t] for t in range(n)
  ]
  return np.array(
    [
      sum(np.prod(decays[t:u]) * delta[u] for u in range(t, n))
      for t in range(n)
    ]
  )


@pytest.mark.parametrize("lam, token_lam", [(0.95, 1), (0.7, 0.9), (1, 1)])
def test_advantages_are_the_double_sum(lam, token_lam):
  rng = np.random.default_rng(0)
  turns = np.repeat(np.arange(4), [3, 1, 5, 2])
  rewards, values = rng.normal(size=4), rng.normal(size=len(turns))
  got, targets = gae.generalized_advantages(
    gae.EpisodeValues(rewards, turns, values, 0.7),
    gae.GaeOptions(0.9, lam, token_lam),
  )
  want = weighted_deltas(rewards, turns, values, 0.7, 0.9, lam, token_lam)
  np.testing.assert_allclose(got, want, rtol=1e-12)
  np.testing.assert_allclose(targets, got + values)


def test_with_both_lambdas_one_targets_are_discounted_returns():
  turns = np.array([0, 0, 1, 2, 2])
  _, targets = gae.generalized_advantages(
    gae.EpisodeValues(np.array([1.0, 0, 4]), turns, np.arange(5.0)),
    gae.GaeOptions(0.5, 1.0, 1.0),
  )
  # gamma acts between turns alone: 1 + .5 (0 + .5 x 4), 0 + .5 x 4, 4.
  np.testing.assert_allclose(targets, [2, 2, 2, 4, 4])


def test_lambda_zero_is_the_one_step_error():
  turns, values = np.array([0, 0, 1]), np.array([1.0, 2.0, 5.0])
  got, _ = gae.generalized_advantages(
    gae.EpisodeValues(np.array([3.0, 7.0]), turns, values, 10.0),
    gae.GaeOptions(0.5, 0.0, 0.0),
  )
  np.testing.assert_allclose(got, [2 - 1, 3 + 0.5 * 5 - 2, 7 + 0.5 * 10 - 5])


def test_a_turn_without_a_token_keeps_its_reward():
  turns = np.array([1, 1, 3])
  _, targets = gae.generalized_advantages(
    gae.EpisodeValues(np.array([1.0, 2.0, 4.0, 8.0]), turns, np.zeros(3)),
    gae.GaeOptions(1.0, 1.0, 1.0),
  )
  np.testing.assert_allclose(targets, [15, 14, 8])


@pytest.mark.parametrize(
  "turns, values, message",
  [
    ([0, 1], [0.0], "1 values"),
    ([1, 0], [0.0, 0.0], "decrease"),
    ([0, 2], [0.0, 0.0], "rewards of 2 turns"),
  ],
)
def test_an_episode_that_cannot_be_is_refused(turns, values, message):
  with pytest.raises(ValueError, match=message):
    gae.EpisodeValues(np.zeros(2), np.array(turns), np.array(values))


# --- the loss -----------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_value_loss_and_gradient_equal_torch(clip):
  rng = np.random.default_rng(1)
  new, old, target = rng.normal(size=(3, 64))
  old = new + 0.3 * rng.normal(size=64)
  t_new = torch.tensor(new, requires_grad=True)
  t_old, t_target = torch.tensor(old), torch.tensor(target)
  plain = (t_new - t_target) ** 2
  want = 0.5 * plain
  if clip:
    clipped = t_old + (t_new - t_old).clamp(-clip, clip)
    want = 0.5 * torch.maximum(plain, (clipped - t_target) ** 2)
  want.sum().backward()
  as32 = lambda x: jnp.asarray(x, jnp.float32)
  loss = lambda v: jnp.sum(
    critic.value_loss(v, as32(old), as32(target), clip)[0]
  )
  got, grad = jax.value_and_grad(loss)(as32(new))
  assert float(got) == pytest.approx(want.sum().item(), rel=1e-5)
  np.testing.assert_allclose(grad, t_new.grad.numpy(), rtol=1e-4, atol=1e-5)


def groups_of(case):
  """Two groups: several sequences an episode, cut short, and invalid."""
  prompt = [("text", case.text(4)), ("image", case.image())]
  make = lambda reward, turns, **kw: case.episode(prompt, reward, turns, **kw)
  group = trajectory.TrajectoryGroup
  return [
    group(
      "a",
      "t",
      (
        make(1.0, 3),
        make(0.0, 1, status=STATUS.MAX_TURNS),
        make(1.0, 2, status=STATUS.ENV_ERROR),
      ),
    ),
    group("b", "t", (make(0.0, 2), make(0.7, 3))),
  ]


def with_head(learner, seed=0):
  """Gives the learner's head weights that are not 0."""
  rng = np.random.default_rng(seed)
  for name in critic.NAMES:
    old = learner._params[name]
    learner._params[name] = jax.device_put(
      0.3 * rng.normal(size=old.shape).astype(np.float32), old.sharding
    )
  return learner


def hidden_of(learner, sequence):
  """float32[T, D] of one sequence, in a row of its own."""
  example = example_lib.Example(sequence, np.zeros(len(sequence)))
  minibatch = learner._minibatches.pack([example], np.ones(1))
  batch = minibatch.batches[0]
  model = learner.policy()
  return logprobs.gather_hidden(model(batch.inputs), batch.index)[0]


def test_values_advantages_and_targets_are_those_of_the_reference(case):
  learner = with_head(
    case.learner(**PPO, gae_lambda=0.8, gamma=0.9, gae_bootstrap=True)
  )
  groups = groups_of(case)
  advantages_of, _ = critic.of_groups(
    groups,
    learner.algorithm,
    learner.gamma,
    64,
    lambda sequences: learner._scored(
      learner._programs.value, learner._acting(), sequences
    ),
  )
  weight = np.asarray(learner._params[critic.WEIGHT], np.float64)
  bias = float(learner._params[critic.BIAS])
  flat_got, flat_want, ids = [], [], []
  members = [m for g in groups for m in g.valid]
  assert len(members) == 4
  for member in members:
    values, turns = [], []
    for sequence in member.sequences:
      hidden = np.asarray(hidden_of(learner, sequence), np.float64)
      values.extend((hidden[: sequence.num_sampled] @ weight) + bias)
      turns.extend(sequence.turn_ids[sequence.loss_mask])
    last = 0.0
    if member.status is STATUS.MAX_TURNS:
      longer = critic._with_end(member.sequences[-1])
      hidden = np.asarray(hidden_of(learner, longer), np.float64)
      last = hidden[longer.num_sampled - 1] @ weight + bias
      assert last != values[-1]
    rewards = example_lib.turn_rewards(member)
    want = weighted_deltas(rewards, turns, values, last, 0.9, 0.8, 1.0)
    got = advantages_of[member.trajectory_id].per_sequence
    streams = [got[i][1] for i in range(len(member.sequences))]
    masks = [s.loss_mask for s in member.sequences]
    for name, expected in (
      (critic.VALUES, np.array(values)),
      (critic.TARGETS, want + values),
    ):
      joined = np.concatenate([s[name][m] for s, m in zip(streams, masks)])
      np.testing.assert_allclose(joined, expected, rtol=1e-4, atol=1e-4)
    flat_got.extend(np.concatenate([got[i][0][m] for i, m in enumerate(masks)]))
    flat_want.extend(want)
    ids.append(member.trajectory_id)
  want = np.array(flat_want)
  np.testing.assert_allclose(
    flat_got, (want - want.mean()) / (want.std() + 1e-6), rtol=1e-3, atol=1e-4
  )
  assert set(advantages_of) == set(ids)


def test_loss_and_gradient_of_head_and_trunk_equal_torch(case):
  """The step's gradient of the head, and of the trunk by linearity."""
  learner = with_head(case.learner(**PPO, value_clip=0.1, value_coef=0.7))
  groups = groups_of(case)
  per_group, _ = learner._examples(groups, {}, {}, readings.Clock())
  examples = [e for group in per_group for e in group]
  # Values moved since, so that the clip holds for some.
  rng = np.random.default_rng(3)
  examples = [
    dataclasses.replace(
      e,
      streams={
        critic.VALUES: (
          e.streams[critic.VALUES] + 0.3 * rng.normal(size=len(e.sequence))
        ).astype(np.float32),
        critic.TARGETS: e.streams[critic.TARGETS],
      },
    )
    for e in examples
  ]
  grads, sums, _ = learner_cases.gradients(learner, examples)
  tokens = sum(e.sequence.num_sampled for e in examples)
  weight = torch.tensor(
    np.asarray(learner._params[critic.WEIGHT]), dtype=torch.float64
  ).requires_grad_(True)
  bias = torch.tensor(
    float(learner._params[critic.BIAS]), dtype=torch.float64
  ).requires_grad_(True)
  losses = []
  for e in examples:
    mask = e.sequence.loss_mask
    hidden = np.asarray(hidden_of(learner, e.sequence), np.float64)
    new = torch.tensor(hidden[: mask.sum()]) @ weight + bias
    old = torch.tensor(e.streams[critic.VALUES][mask]).double()
    target = torch.tensor(e.streams[critic.TARGETS][mask]).double()
    clipped = old + (new - old).clamp(-0.1, 0.1)
    losses.append(
      0.5 * torch.maximum((new - target) ** 2, (clipped - target) ** 2)
    )
  value_loss = torch.cat(losses).sum() / tokens
  (0.7 * value_loss).backward()
  assert float(sums.total["value_loss"]) / tokens == pytest.approx(
    value_loss.item(), rel=1e-4
  )
  np.testing.assert_allclose(
    grads[critic.WEIGHT], weight.grad.numpy(), rtol=1e-3, atol=1e-5
  )
  assert float(grads[critic.BIAS]) == pytest.approx(bias.grad.item(), rel=1e-3)
  # Without the value loss the trunk's gradient is that of the same advantages.
  alone = case.learner()
  plain, _, _ = learner_cases.gradients(
    alone, [dataclasses.replace(e, streams={}) for e in examples]
  )
  zero = [dataclasses.replace(e, advantages=0 * e.advantages) for e in examples]
  value_only, _, _ = learner_cases.gradients(learner, zero)
  assert max(np.abs(value_only[k]).max() for k in plain) > 1e-4
  both = {k: plain[k] + value_only[k] for k in plain}
  got = {k: grads[k] for k in plain}
  scale = max(np.abs(x).max() for x in got.values())
  assert learner_cases.largest_difference(got, both) <= 1e-4 * scale


# --- the update ---------------------------------------------------------------


def test_an_update_trains_policy_and_head_and_reports_the_critic(case):
  learner = case.learner(**PPO, minibatches=2, epochs=2, groups_per_step=2)
  before = {k: np.asarray(v) for k, v in learner.arrays()["params"].items()}
  metrics = learner.update(groups_of(case))
  after = learner.arrays()["params"]
  assert metrics["optimizer_steps"] == 4
  assert np.any(np.asarray(after[critic.WEIGHT]))
  assert any(
    np.any(np.asarray(after[k]) != before[k])
    for k in before
    if k not in critic.NAMES
  )
  for name in ("value_loss", "explained_variance", "value_target_mean"):
    assert np.isfinite(metrics[name]), name
  assert metrics["zero_advantage_groups"] == 0
  assert len(learner.advantages) == 4
  assert learner.compiles["value"] == 1


@pytest.mark.slow
def test_the_head_is_in_checkpoints_and_not_in_the_policy(case, tmp_path):
  learner = case.learner(**PPO)
  learner.update(groups_of(case))
  flat = str(jax.tree_util.tree_flatten_with_path(learner.policy_state())[0])
  assert "value_head" not in flat
  assert not set(critic.NAMES) & set(learner.parameters())
  with checkpoint.LearnerCheckpoints(tmp_path, background=False) as saved:
    saved.save(learner)
    again = case.learner(**PPO)
    saved.restore(again)
    np.testing.assert_array_equal(
      again.arrays()["params"][critic.WEIGHT],
      learner.arrays()["params"][critic.WEIGHT],
    )
    groups = groups_of(case)
    assert again.update(groups)["loss"] == learner.update(groups)["loss"]
    with pytest.raises(ValueError):
      saved.restore(case.learner())  # Without a head.


@pytest.mark.slow
def test_the_head_learns_alone_while_it_warms_up(case):
  learner = case.learner(**PPO, value_warmup=1, weight_decay=0.1)
  before = {k: np.asarray(v) for k, v in learner.arrays()["params"].items()}
  moments = jax.tree.map(np.asarray, learner.arrays()["optimizer"])
  learner.update(groups_of(case))
  after = learner.arrays()["params"]
  for name, value in before.items():
    same = np.array_equal(np.asarray(after[name]), value)
    assert same == (name not in critic.NAMES), name
  policy = learner.arrays()["optimizer"].inner_states["policy"]
  for old, new in zip(
    jax.tree.leaves(moments.inner_states["policy"]), jax.tree.leaves(policy)
  ):
    np.testing.assert_array_equal(old, np.asarray(new))
  learner.update(groups_of(case))
  after = learner.arrays()["params"]
  moved = [k for k in before if np.any(np.asarray(after[k]) != before[k])]
  assert len(moved) > len(before) // 2


def test_equal_rewards_are_reported_as_groups_without_a_gradient(case):
  """A value head's error is no sign that the tasks teach something."""
  learner = case.learner(**PPO)
  failed = [case.group([0.0, 0.0], "a"), case.group([0.0], "b")]
  metrics = learner.update(failed)
  assert metrics["zero_advantage_groups"] == 2
  metrics = learner.update([case.group([0.0], "a"), case.group([1.0], "b")])
  assert metrics["zero_advantage_groups"] == 0


@pytest.mark.slow
def test_the_value_predicts_the_reward_after_some_updates(case):
  """One prompt is worth 1, another 0: the head tells them apart."""
  learner = case.learner(**PPO, value_learning_rate=0.05, learning_rate=1e-3)
  make = lambda prompt, reward: trajectory.TrajectoryGroup(
    f"g{reward}",
    "t",
    tuple(case.episode(prompt, reward, turns=1) for _ in range(3)),
  )
  good, bad = ([("text", case.text(6)), ("image", case.image())] for _ in "ab")
  explained = [
    learner.update([make(good, 1.0), make(bad, 0.0)])["explained_variance"]
    for _ in range(25)
  ]
  assert abs(explained[0]) < 1e-6  # A head of zeros explains nothing.
  assert np.mean(explained[-5:]) > 0.5


def test_nothing_of_a_critic_is_there_without_one(case):
  learner = case.learner()
  assert not set(critic.NAMES) & set(learner.arrays()["params"])
  assert parts.Algorithm.of(
    config_lib.AlgorithmConfig(advantage="gae")
  ).has_critic
  assert not parts.Algorithm.of(
    config_lib.AlgorithmConfig(advantage="gae", objective="behaviour_cloning")
  ).has_critic
  assert update.Extra(0, 0).teacher is None


@pytest.mark.slow
def test_the_memory_of_an_update_is_compiled_with_its_extras(case):
  """Value head, sampling mask, teacher and frozen tower, from shapes alone."""
  learner = case.learner(rows=2, row_length=64)
  sampling = policy_client.SamplingParams(top_k=20)
  settings = [
    (config_lib.AlgorithmConfig(), False),
    (
      config_lib.AlgorithmConfig(
        advantage="gae",
        keep_sampling_mask=True,
        teacher="any",
        distill_coef=1.0,
      ),
      True,
    ),
  ]
  sizes = [
    compiled_update.activations(
      case.model,
      case.processor,
      dataclasses.replace(learner.config, freeze_vision=freeze),
      algorithm,
      sampling=sampling,
    )
    for algorithm, freeze in settings
  ]
  assert all(size > 0 for size in sizes)


@pytest.mark.slow
@pytest.mark.parametrize("rank, dtype", [(0, "bfloat16"), (2, "float32")])
def test_a_qwen_policy_and_its_adapter_learn_with_a_value_head(
  rank, dtype, tmp_path
):
  from tests.learner import test_learner_masters as masters

  model, processor = masters.small(dtype)
  if rank:
    lora.add(model, rank=rank)
  case = learner_cases.Case(own=(model, processor))
  settings = dict(patches=128, grad_clip=0.5, learning_rate=1e-3)
  learner = case.learner(**PPO, **settings)
  before = learner.parameters()
  assert all("lora_" in name for name in before) == bool(rank)
  for _ in range(2):
    metrics = learner.update(groups_of(case))
  assert np.isfinite(metrics["value_loss"]) and metrics["optimizer_steps"] == 2
  after = learner.parameters()
  assert any(np.any(np.asarray(after[k] != before[k])) for k in before)
  with checkpoint.LearnerCheckpoints(tmp_path, background=False) as saved:
    saved.save(learner)
    again = case.learner(**PPO, **settings)
    saved.restore(again)
  groups = groups_of(case)
  assert again.update(groups)["loss"] == learner.update(groups)["loss"]


# --- learning -----------------------------------------------------------------


def distributions(learner, sequences):
  """float64[S, V] of each sequence's sampled places, by the policy itself."""
  examples = [
    example_lib.Example(s, np.zeros(len(s)), episode=i)
    for i, s in enumerate(sequences)
  ]
  packed = learner._minibatches.pack(examples, np.ones(len(examples)))
  model = learner.policy()
  banned = list(model.config.banned_token_ids)
  rows_of = {}
  for batch in packed.batches:
    hidden = logprobs.gather_hidden(model(batch.inputs), batch.index)
    logits = np.array(model.logits(hidden), np.float64)
    logits[..., banned] = -np.inf
    logits -= logits.max(-1, keepdims=True)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    mask, number = np.asarray(batch.mask), np.asarray(batch.sequences)
    for i in np.unique(number[mask]):
      rows_of[i] = p[mask & (number == i)]
  return [rows_of[i] for i in range(len(sequences))]


@pytest.mark.slow
def test_ppo_learns_a_task_whose_reward_comes_a_turn_later(case):
  """Two turns, sampled from the policy; the first token decides the reward of
  the second turn. Groups of one: nothing but the value head is a baseline."""
  learner = case.learner(
    **PPO,
    gamma=0.95,
    learning_rate=1e-2,
    value_learning_rate=2e-2,
    minibatches=2,
    epochs=2,
    groups_per_step=16,
  )
  rng = np.random.default_rng(0)
  prompt = [("text", case.text(4)), ("image", case.image())]
  bridge = ("text", case.text(2))
  embedding = np.asarray(case.model.embedding[...])
  good = embedding @ rng.normal(size=embedding.shape[1]) > 0

  def draw(rows):
    return [int(rng.choice(len(p), p=p)) for p in rows]

  def sequence(first, second, lps=(0.0, 0.0)):
    built = case.sequence(
      [*prompt, ("sampled", [first]), bridge, ("sampled", [second])]
    )
    lp = np.zeros(len(built))
    lp[built.loss_mask] = lps
    turns = np.zeros(len(built), int)
    turns[-3:] = 1
    return dataclasses.replace(built, logprobs=lp, turn_ids=turns)

  def play(count):
    any_token = int(case.ids[0])
    ((p, _),) = distributions(learner, [sequence(any_token, any_token)])
    firsts = draw([p] * count)
    rows = distributions(learner, [sequence(t, any_token) for t in firsts])
    seconds = draw([row[1] for row in rows])
    out = []
    for i, (first, second, row) in enumerate(zip(firsts, seconds, rows)):
      won = float(good[first])
      lps = np.log([row[0][first], row[1][second]])
      out.append(
        trajectory.TrajectoryGroup(
          f"g{i}",
          "t",
          (
            trajectory.Trajectory(
              task="t",
              steps=[trajectory.Step(), trajectory.Step(reward=won)],
              reward=won,
              status=STATUS.SUCCEEDED if won else STATUS.FAILED,
              sequences=[sequence(first, second, lps)],
            ),
          ),
        )
      )
    return out, float(p[good].sum())

  chances = []
  for _ in range(10):
    groups, chance = play(16)
    chances.append(chance)
    metrics = learner.update(groups)
  assert 0.3 < chances[0] < 0.7
  assert chances[-1] > 0.9
  assert metrics["ratio_max"] < 20


@pytest.mark.slow
def test_what_stale_turns_earned_is_not_the_first_fresh_tokens(case):
  """The rewards of turns that left the loss were their tokens' own."""
  learner = case.learner(**PPO, gae_lambda=1.0, gae_normalise=False)
  (group,) = case.groups(1, size=1, turns=3)
  (member,) = group
  steps = [
    dataclasses.replace(step, reward=reward)
    for step, reward in zip(member.steps, (4.0, 2.0, 1.0), strict=True)
  ]
  sequences = [
    dataclasses.replace(
      s, versions=np.where(s.loss_mask, np.minimum(s.turn_ids, 1), -1)
    )
    for s in member.sequences
  ]
  member = dataclasses.replace(
    member, steps=steps, reward=7.0, sequences=sequences
  )

  def targets(one):
    advantages_of, _ = critic.of_groups(
      [dataclasses.replace(group, trajectories=(one,))],
      learner.algorithm,
      1.0,
      64,
      lambda scored: [np.zeros(len(s)) for s in scored],
    )
    per_sequence = advantages_of[one.trajectory_id].per_sequence
    # At the first token of each turn, where another turn's reward would be.
    first = {}
    for i, (_, streams) in sorted(per_sequence.items()):
      s, target = one.sequences[i], streams[critic.TARGETS]
      for at in np.flatnonzero(s.loss_mask):
        first.setdefault(int(s.turn_ids[at]), float(target[at]))
    return first

  complete = targets(member)
  assert complete == pytest.approx({0: 7.0, 1: 3.0, 2: 1.0})
  # Turn 0 is of version 0.
  assert targets(member.trimmed(1)) == pytest.approx({1: 3.0, 2: 1.0})
