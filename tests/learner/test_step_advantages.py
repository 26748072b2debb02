"""Advantages against references written straight from the papers' sums."""

import dataclasses
import itertools

import hypothesis
from hypothesis import strategies as st
import numpy as np
import peer_threads
import pytest
from tunix.rl import algo_core
from tunix.rl.multi_turn.core import images
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner import config as config_lib
from tunix.rl.multi_turn.learner.algorithms import advantages
from tunix.rl.multi_turn.learner.algorithms import kl
from tunix.rl.multi_turn.learner.algorithms import parts
from tunix.rl.multi_turn.learner.algorithms import presets
from tunix.rl.multi_turn.learner.batches import anchors
from tunix.rl.multi_turn.learner.batches import examples
from tunix.rl.multi_turn.learner.batches import reward_prices

from tests.learner import learner_cases

STATUS = trajectory.TrajectoryStatus


def _rewards(rng, members=5, name="g", states=False):
  turns = [rng.normal(size=rng.integers(1, 5)) for _ in range(members)]
  return advantages.GroupRewards(
    np.array([t.sum() for t in turns]),
    tuple(turns),
    tokens=tuple(rng.integers(1, 9, len(t)) for t in turns),
    states=tuple(tuple(f"s{rng.integers(3)}" for _ in t) for t in turns)
    if states
    else (),
    group_id=name,
  )


def _step(seed=0, groups=3):
  rng = np.random.default_rng(seed)
  return [
    _rewards(rng, int(rng.integers(2, 6)), f"g{i}") for i in range(groups)
  ]


def _estimate(name, groups, **options):
  return advantages.of_step(
    advantages.ESTIMATORS.get(name),
    groups,
    advantages.AdvantageOptions(**options),
  )


def _by_token(groups, per_group):
  """One number a sampled token of the step, in order."""
  return np.array(
    [
      value
      for group, members in zip(groups, per_group)
      for tokens, values in zip(group.tokens, members)
      for count, value in zip(tokens, values)
      for _ in range(count)
    ]
  )


# --- of a step ----------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1.0, 0.7])
def test_reinforce_pp_whitens_the_returns_of_all_tokens(gamma):
  groups = _step(1)
  got = _by_token(groups, _estimate("reinforce_pp", groups, gamma=gamma))
  returns = _by_token(
    groups,
    [
      [
        [
          sum(gamma ** (j - k) * t[j] for j in range(k, len(t)))
          for k in range(len(t))
        ]
        for t in g.turns
      ]
      for g in groups
    ],
  )
  want = (returns - returns.mean()) / (returns.std() + 1e-6)
  np.testing.assert_allclose(got, want, rtol=1e-9)
  assert got.mean() == pytest.approx(0, abs=1e-9)
  assert got.std() == pytest.approx(1, abs=1e-5)


def test_reinforce_pp_baseline_centres_groups_first():
  groups = _step(2)
  got = _by_token(groups, _estimate("reinforce_pp_baseline", groups))
  centred = _by_token(
    groups,
    [
      [[r - g.total_N.mean()] * len(t) for r, t in zip(g.total_N, g.turns)]
      for g in groups
    ],
  )
  want = (centred - centred.mean()) / (centred.std() + 1e-6)
  np.testing.assert_allclose(got, want, rtol=1e-9)


def test_gpg_scales_for_the_groups_without_a_gradient():
  rng = np.random.default_rng(3)
  varied = [_rewards(rng, 4), _rewards(rng, 4)]
  flat = advantages.GroupRewards(
    np.ones(4), tuple(np.array([1.0]) for _ in range(4))
  )
  got = _estimate("gpg", [varied[0], flat, varied[1]])
  plain = [_estimate("dr_grpo", [g])[0] for g in varied]
  for members, same in zip((got[0], got[2]), plain):
    for values, want in zip(members, same):
      np.testing.assert_allclose(values, want * 12 / 8, rtol=1e-12)
  assert not np.any(np.concatenate(got[1]))


@pytest.mark.parametrize(
  "name", ["reinforce_pp", "reinforce_pp_baseline", "gpg"]
)
def test_a_step_of_equal_rewards_has_no_advantage(name):
  group = advantages.GroupRewards(
    np.full(3, 0.7),
    tuple(np.array([0.7]) for _ in range(3)),
    tokens=tuple(np.array([4]) for _ in range(3)),
  )
  for members in _estimate(name, [group, group]):
    assert not np.any(np.concatenate(members))
  assert _estimate(name, []) == []


def test_without_token_counts_it_says_what_is_missing():
  group = advantages.GroupRewards(np.arange(2.0), (np.zeros(1), np.ones(1)))
  for name in ("reinforce_pp", "opo"):
    with pytest.raises(ValueError, match="GroupRewards.tokens"):
      _estimate(name, [group])
  with pytest.raises(ValueError, match="GroupRewards.states"):
    _estimate("gigpo", [group])


def test_processes_together_get_the_advantages_of_one():
  groups = _step(groups=5)
  estimator = advantages.ESTIMATORS.get("reinforce_pp")
  options = advantages.AdvantageOptions()
  alone = advantages.of_step(estimator, groups, options)
  own = [groups[:1], groups[1:4], groups[4:]]

  def work(peers):
    shared = advantages.over_processes(estimator, peers)
    return advantages.of_step(shared, own[peers.index], options)

  together = peer_threads.run_all(3, work)
  assert [len(results) for results in together] == [1, 3, 1]
  for got, want in zip(itertools.chain(*together), alone, strict=True):
    for own_turns, turns in zip(got, want, strict=True):
      np.testing.assert_array_equal(own_turns, turns)


def test_an_estimator_must_return_what_there_is():
  wrong = advantages.StepEstimator(lambda groups, options: [])
  with pytest.raises(ValueError, match="0 groups of 3"):
    advantages.of_step(wrong, _step(), advantages.AdvantageOptions())

  def short(group, options):
    del options
    return tuple(np.zeros(1) for _ in group.turns)

  with pytest.raises(ValueError, match="'g0'.*shapes"):
    advantages.of_step(short, _step(), advantages.AdvantageOptions())


# --- of a group ---------------------------------------------------------------


def test_opos_baseline_has_the_least_weighted_variance():
  (group,) = _step(4, 1)
  got = [v[0] for v in _estimate("opo", [group])[0]]
  lengths = np.array([t.sum() for t in group.tokens], float)
  baseline = group.total_N[0] - got[0]
  np.testing.assert_allclose(group.total_N - baseline, got, rtol=1e-9)

  def variance(b):
    return (lengths * (group.total_N - b) ** 2).sum()

  for other in (baseline - 1e-3, baseline + 1e-3, group.total_N.mean()):
    assert variance(baseline) < variance(other)


@hypothesis.given(
  rewards=st.lists(
    st.sampled_from([0.0, 1.0, 0.25, -2.0, 3.5]), min_size=2, max_size=7
  ),
  k=st.integers(1, 9),
)
def test_pass_at_k_sums_over_all_sets_of_k(rewards, k):
  group = advantages.GroupRewards(
    np.array(rewards), tuple(np.array([r]) for r in rewards)
  )
  got = [v[0] for v in _estimate("pass_at_k", [group], pass_k=k)[0]]
  n = len(rewards)
  k = min(k, n)
  want = np.zeros(n)
  sets = list(itertools.combinations(range(n), k))
  for chosen in sets:
    for i in chosen:
      further = [rewards[j] for j in chosen if j != i]
      if further:
        want[i] += max(rewards[j] for j in chosen) - max(further)
  if k == 1:
    want = (
      np.array([r - (sum(rewards) - r) / (n - 1) for r in rewards])
      if n > 1
      else want
    )
  else:
    want *= n / len(sets)
  np.testing.assert_allclose(got, want, atol=1e-9)


def test_pass_at_ks_gradient_is_that_of_the_expected_maximum():
  """A policy over three answers; all outcomes of four samples are summed."""
  values, k, n = np.array([0.0, 0.4, 1.0]), 2, 4
  logits = np.array([0.3, -0.2, 0.1])
  p = np.exp(logits) / np.exp(logits).sum()

  def best(p):
    return sum(
      np.prod(p[list(drawn)]) * values[list(drawn)].max()
      for drawn in itertools.product(range(3), repeat=k)
    )

  step = 1e-6
  want = []
  for i in range(3):
    moved = [logits + sign * step * np.eye(3)[i] for sign in (1, -1)]
    moved = [np.exp(x) / np.exp(x).sum() for x in moved]
    want.append((best(moved[0]) - best(moved[1])) / (2 * step))
  got = np.zeros(3)
  for drawn in itertools.product(range(3), repeat=n):
    rewards = values[list(drawn)]
    group = advantages.GroupRewards(
      rewards, tuple(np.array([r]) for r in rewards)
    )
    (members,) = _estimate("pass_at_k", [group], pass_k=k)
    for answer, advantage in zip(drawn, members):
      slope = np.eye(3)[answer] - p  # Of log p(answer) in the logits.
      got += np.prod(p[list(drawn)]) * advantage[0] * slope / n
  np.testing.assert_allclose(got, want, atol=1e-8)


@pytest.mark.parametrize("gamma, weight", [(0.95, 1.0), (0.5, 0.3)])
def test_gigpo_by_the_papers_sums(gamma, weight):
  rng = np.random.default_rng(8)
  group = _rewards(rng, 6, states=True)
  (got,) = _estimate("gigpo", [group], gamma=gamma, step_weight=weight)
  places = [
    (i, k, state)
    for i, member in enumerate(group.states)
    for k, state in enumerate(member)
  ]
  returns = {
    (i, k): sum(
      gamma ** (j - k) * group.turns[i][j]
      for j in range(k, len(group.turns[i]))
    )
    for i, k, _ in places
  }
  r = group.total_N
  assert len({s for _, _, s in places}) > 1
  for i, k, state in places:
    pool = np.array([returns[a, b] for a, b, s in places if s == state])
    step = 0.0
    if len(pool) > 1:
      step = (returns[i, k] - pool.mean()) / (pool.std(ddof=1) + 1e-6)
    episode = (r[i] - r.mean()) / (r.std(ddof=1) + 1e-6)
    assert got[i][k] == pytest.approx(episode + weight * step, rel=1e-9)


@pytest.mark.parametrize("history, alpha", [(0, 1.0), (1, 0.0), (2, 1.5)])
def test_hgpo_by_its_sums(history, alpha):
  rng = np.random.default_rng(11)
  group = _rewards(rng, 8, states=True)
  gamma, weight = 0.9, 0.7
  options = {"gamma": gamma, "step_weight": weight}
  (got,) = _estimate(
    "hgpo", [group], history=history, history_alpha=alpha, **options
  )
  (gigpo,) = _estimate("gigpo", [group], **options)
  turns = [(i, k) for i, m in enumerate(group.states) for k in range(len(m))]
  returns = {
    (i, k): sum(gamma**n * r for n, r in enumerate(group.turns[i][k:]))
    for i, k in turns
  }
  r = group.total_N
  depths_met = set()
  for i, k in turns:
    parts, weights = [], []
    for depth in range(history + 1):
      own = group.states[i][max(0, k - depth) : k + 1]
      pool = np.array([
          returns[a, b] for a, b in turns
          if group.states[a][max(0, b - depth) : b + 1] == own
      ])  # fmt: skip
      if len(pool) > 1:
        depths_met.add(depth)
        scaled = (returns[i, k] - pool.mean()) / (pool.std(ddof=1) + 1e-6)
        parts.append((depth + 1) ** alpha * scaled)
        weights.append((depth + 1) ** alpha)
    step = sum(parts) / sum(weights) if weights else 0.0
    episode = (r[i] - r.mean()) / (r.std(ddof=1) + 1e-6)
    assert got[i][k] == pytest.approx(episode + weight * step, rel=1e-9)
    if not history:
      assert got[i][k] == gigpo[i][k]
  assert depths_met == set(range(history + 1))


def _with_parts(rng, members, name):
  """A group whose rewards are 1 x success + 0.1 x format - 0.5 x length."""
  weights = {"success": 1.0, "format": 0.1, "length": -0.5}
  parts = {
    "success": rng.integers(0, 2, members).astype(float),
    "format": rng.integers(0, 2, members).astype(float),
    "length": np.full(members, 3.0),  # Equal in all: teaches nothing.
  }
  total = sum(weights[k] * v for k, v in parts.items())
  return advantages.GroupRewards(
    total,
    tuple(np.array([0.0, r]) for r in total),
    tokens=tuple(np.array([2, 3]) for _ in total),
    parts=parts,
    part_weights=weights,
    group_id=name,
  )


def test_gdpo_by_the_papers_sums():
  rng = np.random.default_rng(11)
  groups = [_with_parts(rng, n, f"g{n}") for n in (4, 6, 5)]
  got = _estimate("gdpo", groups)
  sums = []
  for group in groups:
    of_group = np.zeros(len(group.total_N))
    for name, values in group.parts.items():
      if np.ptp(values):
        scaled = (values - values.mean()) / (values.std(ddof=1) + 1e-6)
        of_group += group.part_weights[name] * scaled
    sums.append(of_group)
  every = np.concatenate(sums)
  assert every.mean() == pytest.approx(0, abs=1e-12)
  for of_group, members in zip(sums, got):
    for want, values in zip(of_group / (every.std(ddof=1) + 1e-6), members):
      np.testing.assert_allclose(values, [want, want], rtol=1e-9)


def test_gdpo_tells_episodes_of_equal_totals_apart():
  """The case that the paper begins with: grpo of the sum sees no difference."""
  parts = {"a": np.array([1.0, 0, 0, 0]), "b": np.array([0, 1.0, 1.0, 0])}
  total = parts["a"] + parts["b"]
  group = advantages.GroupRewards(
    total,
    tuple(np.array([r]) for r in total),
    parts=parts,
    part_weights={"a": 1.0, "b": 1.0},
    group_id="g",
  )
  (one,) = _estimate("grpo", [group])
  assert one[0] == one[1]
  (other,) = _estimate("gdpo", [group])
  assert other[0] > other[1] > other[3] and other[1] == other[2]


def test_gdpo_without_parts_names_the_fix_and_equal_parts_have_no_advantage():
  rng = np.random.default_rng(1)
  with pytest.raises(ValueError, match="environment.reward as a mapping"):
    _estimate("gdpo", [_rewards(rng)])
  group = _with_parts(rng, 3, "g")
  even = dataclasses.replace(
    group, total_N=np.zeros(3), parts={k: np.ones(3) for k in group.parts}
  )
  (members,) = _estimate("gdpo", [even])
  assert not np.any(np.concatenate(members))
  with pytest.raises(ValueError, match="with a weight"):
    dataclasses.replace(group, part_weights={})


def test_gdpo_learns_from_a_step_in_which_a_group_has_no_parts():
  """A limit of turns or context ended all its members, unjudged."""
  rng = np.random.default_rng(2)
  group = _with_parts(rng, 4, "g")
  ended = advantages.GroupRewards(
    np.zeros(2), tuple(np.zeros(2) for _ in range(2)), group_id="ended"
  )
  (alone,) = _estimate("gdpo", [group])
  one, none = _estimate("gdpo", [group, ended])
  assert np.any(np.concatenate(one)) and not np.any(np.concatenate(none))
  np.testing.assert_array_equal(
    np.sign(np.concatenate(one)), np.sign(np.concatenate(alone))
  )
  (none,) = _estimate("gdpo", [ended])  # Nothing differs in the whole step.
  assert not np.any(np.concatenate(none))


def test_gdpo_counts_what_no_part_accounts_for():
  """As a KL price: it tells equal parts apart, and a small one stays small."""
  part = {"success": np.array([1.0, 1.0, 0.0, 0.0])}
  price = np.array([0.0, -0.1, 0.0, -0.1])

  def first_turns(success):
    total = success + price
    group = advantages.GroupRewards(
      total,
      tuple(np.array([r]) for r in total),
      parts={"success": success},
      part_weights={"success": 1.0},
    )
    (members,) = _estimate("gdpo", [group], std_eps=0.0)
    return np.concatenate(members)

  got = first_turns(part["success"])
  assert got[0] > got[1] > got[2] > got[3]
  std = np.std(part["success"], ddof=1), np.std(part["success"] + price, ddof=1)
  want = (part["success"] - 0.5) / std[0] + (price + 0.05) / std[1]
  np.testing.assert_allclose(got, want / want.std(ddof=1), rtol=1e-9)
  got = first_turns(np.ones(4))
  np.testing.assert_allclose(got, (price + 0.05) / price.std(ddof=1))


def test_gdpo_learns_the_price_of_length(case):
  group = case.group([1.0, 1.0])
  for member in group.trajectories:
    member.steps[-1].info = {
      "reward_metadata": {"success": {"reward": 1.0, "weight": 1.0}}
    }
  longer = group.trajectories[0].trajectory_id
  turns = len(examples.turn_rewards(group.trajectories[0]))
  got = examples.turn_advantages(
    [group],
    advantages.ESTIMATORS.get("gdpo"),
    advantages.AdvantageOptions(),
    extra={longer: np.full(turns, -0.1)},
  )
  shorter = got[group.trajectories[1].trajectory_id]
  assert np.all(got[longer] < 0) and np.all(shorter > 0)


@pytest.mark.parametrize(
  "metadata",
  [
    {"judge": {"reward": float("nan")}},
    {"judge": {"reward": 10**400}},
    {"judge": {"reward": True}},
    {"judge": {"reward": 1.0, "weight": None}},
    {"judge": {"reward": 1.0, "weight": "high"}},
    {"judge": {"reward": 1.0, "weight": float("inf")}},
  ],
)
def test_metadata_that_only_looks_like_parts_is_left_alone(case, metadata):
  group = case.group([1.0, 0.0])
  real = {"success": {"reward": 1.0, "weight": 2.0}}
  group.trajectories[0].steps[-1].info = {"reward_metadata": metadata | real}
  got = examples.group_rewards(group, with_parts=True)
  assert set(got.parts) == {"success"} and got.part_weights == {"success": 2.0}
  assert examples.group_rewards(group).parts == {}


def test_a_groups_parts_are_those_of_its_reward(case):
  """As `environment.reward` writes them; a part that is absent adds nothing."""
  group = case.group([1.0, 0.1])
  for member, parts_ in zip(
    group.trajectories,
    ({"success": (1.0, 1.0), "format": (0.0, 0.1)}, {"format": (1.0, 0.1)}),
  ):
    member.steps[-1].info = {
      "final_reward": {
        "parts": {
          name: {"reward": value, "weight": weight, "why": "…"}
          for name, (value, weight) in parts_.items()
        }
      }
    }
  rewards = examples.group_rewards(group, with_parts=True)
  assert {k: v.tolist() for k, v in rewards.parts.items()} == {
    "success": [1.0, 0.0],
    "format": [0.0, 1.0],
  }
  assert rewards.part_weights == {"success": 1.0, "format": 0.1}


# --- states behind a clock ----------------------------------------------------


def _screens(store, count=3):
  """Screenshots that differ in a clock alone, and one that differs in more."""
  rng = np.random.default_rng(0)
  pixels = rng.integers(0, 256, (40, 60, 3), dtype=np.uint8)
  with_clock = []
  for _ in range(count):
    shot = pixels.copy()
    shot[0:4, 50:60] = rng.integers(0, 256, (4, 10, 3))
    with_clock.append(store.put(shot))
  other = pixels.copy()
  other[20:30, 20:30] = 255
  return with_clock, store.put(other)


def test_a_masked_clock_makes_no_new_state():
  store = images.ImageStore()
  shots, other = _screens(store)
  assert len({image.sha256 for image in shots}) == 3
  clock = (50 / 60, 0.0, 1.0, 0.1)
  look = anchors.Looks(store, clock)
  assert len({look(image) for image in shots}) == 1
  assert look(other) != look(shots[0])
  # Half of the clock in sight is another state each time.
  assert len({anchors.Looks(store, (0.9, 0, 1, 0.1))(i) for i in shots}) == 3
  coarse = anchors.Looks(store, clock, cells=8)
  assert len({coarse(image) for image in shots}) == 1
  assert coarse(other) != coarse(shots[0])
  # A caret of a few pixels changes a cell's brightness by little.
  pixels = np.full((64, 64, 3), 124, np.uint8)
  blink = pixels.copy()
  blink[32:36, 36] = 0
  pair = [store.put(pixels), store.put(blink)]
  assert look(pair[0]) != look(pair[1])
  assert coarse(pair[0]) == coarse(pair[1])


def test_gigpo_compares_turns_behind_the_clock(case):
  shots, _ = _screens(case.store, 2)
  group = case.group([1.0, 0.0])
  for member, shot in zip(group.trajectories, shots):
    member.steps[0].observation = {"screenshot": shot, "text": "go on"}
  exact = examples.group_rewards(group, with_states=True)
  assert exact.states[0][1] != exact.states[1][1]
  config = config_lib.AlgorithmConfig(
    advantage="gigpo", gigpo_mask=(50 / 60, 0.0, 1.0, 0.1)
  )
  look = anchors.look_of(config, case.store)
  masked = examples.group_rewards(group, with_states=True, look=look)
  assert masked.states[0][1] == masked.states[1][1]
  assert anchors.look_of(config_lib.AlgorithmConfig(), case.store) is None


@pytest.mark.parametrize(
  "mask", [(0.1, 0.2, 0.3), (0.5, 0.0, 0.5, 1.0), (0.0, 0.0, 1.5, 1.0)]
)
def test_a_wrong_mask_is_refused(mask):
  with pytest.raises(ValueError, match="gigpo_mask.*left < right"):
    config_lib.AlgorithmConfig(advantage="gigpo", gigpo_mask=mask)
  with pytest.raises(ValueError, match="advantage=grpo does not"):
    config_lib.AlgorithmConfig(gigpo_cells=8)


# --- steps by entropy ---------------------------------------------------------


@pytest.mark.parametrize("recorded", [True, False])
def test_the_turns_of_highest_entropy_are_trained_on(case, recorded):
  group = case.group([1.0, 0.0, 0.5], turns=4)
  means = {}
  members = []
  for member in group.trajectories:
    sequences = []
    for sequence in member.sequences:
      mask = sequence.loss_mask
      entropies = np.where(mask, case.rng.random(len(mask)), 0)
      if recorded:
        sequence = dataclasses.replace(
          sequence, entropies=entropies.astype(np.float32)
        )
      sequences.append(sequence)
      values = sequence.entropies if recorded else -sequence.logprobs
      key = member.trajectory_id, int(sequence.turn_ids[0])
      means[key] = float(np.mean(values[mask]))
    members.append(dataclasses.replace(member, sequences=sequences))
  group = dataclasses.replace(group, trajectories=tuple(members))
  (built,), stats = examples.from_groups(
    [group],
    advantages.dr_grpo,
    advantages.AdvantageOptions(),
    entropy_share=0.7,
  )
  trained = {
    (e.trajectory_id, int(turn))
    for e in built
    for turn in e.sequence.turn_ids[e.sequence.loss_mask]
  }
  want = sorted(means, key=lambda key: -means[key])[:9]  # Of 12, rounded up.
  assert trained == set(want)
  reasons = examples.left_out([group], [], stats.low_entropy)
  assert {
    (name, turn): reason
    for name, of_turns in reasons.items()
    for turn, reason in enumerate(of_turns[:4])
  } == {key: "" if key in trained else "low_entropy" for key in means}
  (every,), _ = examples.from_groups(
    [group], advantages.dr_grpo, advantages.AdvantageOptions()
  )
  assert len(every) == 12


def test_the_learner_tells_which_turns_have_too_little_entropy(case):
  group = case.group([1.0, 0.0], turns=2)
  learner = case.learner(entropy_share=0.5, advantage="dr_grpo")
  learner.update([group])
  reasons = [r for of_one in learner.left_out.values() for r in of_one]
  assert reasons.count("low_entropy") == 2
  assert set(reasons) == {"", "low_entropy"}


def test_a_function_of_google_tunix_is_taken_by_its_path():
  rewards = np.array([0.0, 1.0, 0.5, 0.25])
  group = advantages.GroupRewards(
    rewards, tuple(np.array([r, 0.0]) for r in rewards)
  )
  for function, name in (
    ("compute_rloo_advantages", "rloo"),
    ("compute_drgrpo_advantages", "dr_grpo"),
  ):
    config = config_lib.AlgorithmConfig(
      advantage=f"tunix.rl.algo_core:{function}"
    )
    estimator = parts.Algorithm.of(config).estimate
    (got,) = advantages.of_step(
      estimator, [group], advantages.AdvantageOptions()
    )
    (want,) = _estimate(name, [group])
    np.testing.assert_allclose(
      np.concatenate(got), np.concatenate(want), atol=1e-6
    )
  assert advantages.adapted(advantages.grpo) is advantages.grpo
  assert callable(algo_core.compute_rloo_advantages)


# --- what the registry carries ------------------------------------------------


def test_a_groups_rewards_carry_tokens_states_and_ids(case):
  store = images.ImageStore()
  shot = store.put(np.zeros((4, 4, 3), np.uint8))
  other = store.put(np.ones((4, 4, 3), np.uint8))
  prompt = [("text", case.text(3))]
  members = [case.episode(prompt, 1.0, 3), case.episode(prompt, 0.0, 3)]
  for member, shown in zip(members, ((shot, other), (other, shot))):
    for step, image in zip(member.steps, shown):
      step.observation = {"screenshot": image, "text": ""}
  broken = case.episode(prompt, 0.0, 1, status=STATUS.ENV_ERROR)
  group = trajectory.TrajectoryGroup("g", "task", (*members, broken))
  rewards = examples.group_rewards(group, with_states=True)
  assert rewards.group_id == "g" and rewards.task_id == "task"
  assert rewards.episode_ids == tuple(m.trajectory_id for m in members)
  for member, tokens in zip(members, rewards.tokens):
    assert tokens.tolist() == [s.num_sampled for s in member.sequences]
  (a0, a1, a2), (b0, b1, b2) = rewards.states
  assert a0 == b0 == "start" and a1 == b2 and a2 == b1 and a1 != a2
  assert examples.group_rewards(group).states == ()


def test_a_turn_without_a_record_has_no_state(case):
  episode = case.episode([("text", case.text(3))], 0.0, 3)
  del episode.steps[1:]
  states = examples.turn_states(episode, 3)
  assert states[0] == "start" and len(states[1]) == 64 and states[2] == ""


# --- prices of length and KL --------------------------------------------------


def test_soft_overlong_is_dapos_equation_13():
  lengths = np.array([0, 80, 81, 90, 100, 101, 500])
  got = reward_prices.soft_overlong(lengths, 100, 20)
  np.testing.assert_allclose(got, [0, 0, -0.05, -0.5, -1, -1, -1], atol=1e-12)


def test_a_long_episode_pays_at_its_last_turn(case):
  group = case.group([1.0, 1.0, 0.0])
  tokens = [m.num_sampled for m in group]
  algorithm = parts.Algorithm.of(
    config_lib.AlgorithmConfig(overlong_tokens=4, overlong_cache=3)
  )
  prices, readings = reward_prices.of_groups(
    [group], algorithm, 0.0, 64, lambda sequences: pytest.fail("no KL")
  )
  want = [-min(max((t - 1) / 3, 0), 1) for t in tokens]
  for member, price in zip(group, want):
    got = prices[member.trajectory_id]
    np.testing.assert_allclose(got, [0.0, price], atol=1e-12)
  assert readings["overlong_price"] == pytest.approx(-np.mean(want))
  rewards = examples.group_rewards(group, extra=prices)
  np.testing.assert_allclose(rewards.total_N, np.array([1.0, 1.0, 0.0]) + want)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_reward_by_hand(case, estimator):
  group = case.group([1.0, 0.0], turns=3)
  algorithm = parts.Algorithm.of(
    config_lib.AlgorithmConfig(
      kl_coef=0.5, kl_in="reward", kl_estimator=estimator
    )
  )
  rng = np.random.default_rng(0)
  references = {}

  def score(sequences):
    for s in sequences:
      references[id(s)] = s.logprobs + 0.3 * rng.normal(size=len(s))
    return [references[id(s)] for s in sequences]

  prices, readings = reward_prices.of_groups([group], algorithm, 0.2, 64, score)
  total = count = 0.0
  for member in group:
    for turn, sequence in enumerate(member.sequences):
      mask = sequence.loss_mask
      d = (references[id(sequence)] - sequence.logprobs)[mask]
      d = d.astype(np.float64)
      nats = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - 1 - d}[estimator]
      assert prices[member.trajectory_id][turn] == pytest.approx(
        -0.2 * nats.sum(), rel=1e-4, abs=1e-6
      )
      total, count = total + nats.sum(), count + len(nats)
  assert readings["kl"] == pytest.approx(total / count, rel=1e-4)


@pytest.mark.slow
def test_kl_in_the_reward_changes_the_update_and_not_its_statistics(case):
  other, _ = learner_cases.policy(1)
  group = case.group([1.0, 1.0, 1.0])
  learner = case.learner(
    reference=other, kl_coef=0.5, kl_in="reward", kl_estimator="k1"
  )
  metrics = learner.update([group])
  # Without the price, equal rewards would leave nothing to learn from.
  assert metrics["zero_advantage_groups"] == 0
  assert metrics["reward_mean"] == 1.0 and metrics["reward_std"] == 0.0
  assert np.isfinite(metrics["kl"]) and metrics["grad_norm"] > 0
  sequences = [s for m in group for s in m.sequences]
  scorer = case.learner(model=other)
  reference = scorer.sequence_logprobs(sequences)
  want = np.concatenate(
    [(s.logprobs - r)[s.loss_mask] for s, r in zip(sequences, reference)]
  ).mean()
  assert metrics["kl"] == pytest.approx(want, rel=1e-4)


def test_the_coefficient_follows_the_target():
  assert kl.adapted_coef(0.1, 2.0, 1.0) == pytest.approx(0.1 * 1.02)
  assert kl.adapted_coef(0.1, 0.0, 1.0) == pytest.approx(0.1 * 0.98)
  assert kl.adapted_coef(0.1, 1.1, 1.0) == pytest.approx(0.1 * 1.01)
  assert kl.adapted_coef(0.1, 1.0, 1.0) == 0.1


@pytest.mark.slow
def test_an_adapted_coefficient_is_used_and_kept(case):
  other, _ = learner_cases.policy(1)
  settings = dict(
    model=other,
    reference=case.model,
    kl_coef=0.5,
    kl_target=1e-3,
    skip_zero_advantage=False,
  )
  learner = case.learner(**settings)
  groups = [case.group([1.0, 1.0, 1.0])]  # Nothing but the KL acts.
  compiles = None
  coefs = []
  for _ in range(3):
    metrics = learner.update(groups)
    coefs.append(metrics["kl_coef"])
    want = metrics["kl_coef"] * metrics["kl"] + metrics["policy_loss"]
    assert metrics["loss"] == pytest.approx(want, rel=1e-4)
    compiles = compiles or learner.compiles
  assert learner.compiles == compiles
  np.testing.assert_allclose(coefs, 0.5 * 1.02 ** np.arange(3), rtol=1e-9)
  again = case.learner(**settings)
  again.load(learner.arrays(), learner.progress())
  assert again.kl_coef == learner.kl_coef == pytest.approx(0.5 * 1.02**3)


# --- what is left out ---------------------------------------------------------


@pytest.mark.parametrize(
  "status, cut, want",
  [
    (STATUS.SUCCEEDED, False, False),
    (STATUS.FAILED, False, False),
    (STATUS.MAX_TURNS, False, True),
    (STATUS.CONTEXT_LIMIT, False, True),
    (STATUS.PARSE_ERROR, True, True),
  ],
)
def test_what_counts_as_truncated(case, status, cut, want):
  episode = case.episode([("text", case.text(3))], 0.0, status=status)
  if cut:
    episode.steps[-1].info["response_truncated"] = True
  assert examples.was_truncated(episode) is want


def test_truncated_episodes_keep_their_reward_and_leave_the_loss(case):
  prompt = [("text", case.text(3))]
  won = case.episode(prompt, 1.0)
  lost = case.episode(prompt, 0.0)
  cut = case.episode(prompt, 0.0, status=STATUS.MAX_TURNS)
  group = trajectory.TrajectoryGroup("g", "t", (won, lost, cut))
  learner = case.learner(filter_truncated=True, advantage="dr_grpo")
  metrics = learner.update([group])
  assert learner.left_out[cut.trajectory_id] == ("truncated",) * 2
  assert learner.left_out[won.trajectory_id] == ("", "")
  assert metrics["sampled_tokens"] == won.num_sampled + lost.num_sampled
  assert learner.advantages[won.trajectory_id][0] == pytest.approx(2 / 3)
  # The mean of the loss is over the tokens that are left.
  both = trajectory.TrajectoryGroup("g", "t", (won, lost))
  alone = case.learner(advantage="dr_grpo")
  same = alone.update([both])
  assert same["sampled_tokens"] == metrics["sampled_tokens"]


# --- every preset, through the whole learner ----------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", presets.PRESETS.names())
def test_each_preset_updates_the_policy_and_compiles_once(case, name):
  fields: dict[str, dict] = {"algorithm": {}, "learner": {}, "collect": {}}
  for key, value in presets.get(name).settings.items():
    section, field = key.split(".")
    fields[section][field] = value
  settings = {**fields["algorithm"], **fields["learner"]}
  settings.pop("dynamic_sampling", None)  # The loop's.
  teacher = {"teacher": case.model} if name == "distill" else {}
  learner = case.learner(
    reference=case.model,
    **teacher,
    groups_per_step=4,
    gamma=fields["collect"].get("gamma", 1.0),
    **settings,
  )
  before = learner.parameters()
  compiles = None
  for _ in range(2):
    groups = case.groups(4, 4)
    cut = case.episode([("text", case.text(3))], 0.2, status=STATUS.MAX_TURNS)
    broken = case.episode([("text", case.text(3))], 0, status=STATUS.ENV_ERROR)
    groups[0] = trajectory.TrajectoryGroup(
      "g0", "task", (*groups[0], cut, broken)
    )
    if name == "remax":
      greedy = case.episode([("text", case.text(3))], 0.5)
      groups = [dataclasses.replace(g, extra=greedy) for g in groups]
    if name == "gdpo":
      for member in (m for group in groups for m in group):
        part = {"reward": member.reward, "weight": 1.0}
        member.steps[-1].info["reward_metadata"] = {"whole": part}
    metrics = learner.update(groups)
    compiles = compiles or learner.compiles
    assert np.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0
    assert metrics["skipped_steps"] == 0
    assert broken.trajectory_id not in learner.advantages
  assert learner.compiles == compiles
  assert learner_cases.largest_difference(before, learner.parameters()) > 0
