"""Advantages are finite, whatever rewards a group may hold."""

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
from tunix.rl.multi_turn.core import reward_range
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.learner.algorithms import advantages
from tunix.rl.multi_turn.learner.algorithms import gae
from tunix.rl.multi_turn.learner.batches import examples

MAX = reward_range.MAX_REWARD
TINY = np.finfo(np.float64).smallest_subnormal
REWARDS = st.one_of(
  st.sampled_from(
    [0.0, -0.0, 1.0, MAX, -MAX, TINY, -TINY, 1e-162, 1e-320, 1 + 2**-52]
  ),
  st.floats(-MAX, MAX),
  st.floats(-1e-300, 1e-300),
)


def member(name, rewards):
  """An episode of which a token was sampled in every turn."""
  n = len(rewards)
  mask = np.array([False] + [True] * n)
  sequence = trajectory.TokenSequence(
    tokens=[5] * (n + 1),
    loss_mask=mask,
    logprobs=np.where(mask, -0.5, 0.0),
    versions=np.where(mask, 0, -1),
    turn_ids=[0, *range(n)],
  )
  total = {"reward": sum(rewards), "weight": 1.0}  # Its one part, for gdpo.
  steps = [trajectory.Step(reward=r) for r in rewards]
  steps[-1].info["reward_metadata"] = {"whole": total}
  return trajectory.Trajectory(
    steps=steps,
    reward=sum(rewards),
    status=trajectory.TrajectoryStatus.SUCCEEDED,
    sequences=[sequence],
    trajectory_id=name,
  )


# Of tokens with a value head: see test_ppo.
OF_TURNS = [
  name
  for name in advantages.ESTIMATORS.names()
  if not isinstance(advantages.ESTIMATORS.get(name), gae.TokenEstimator)
]


@pytest.mark.parametrize("name", OF_TURNS)
@hypothesis.settings(max_examples=400, deadline=None)
@hypothesis.given(
  rewards=st.lists(st.lists(REWARDS, min_size=1, max_size=4), max_size=5),
  gamma=st.sampled_from([0.0, 0.3, 1.0]),
  std_eps=st.sampled_from([0.0, 1e-6]),
)
def test_advantages_are_finite(name, rewards, gamma, std_eps):
  hypothesis.assume(rewards)
  hypothesis.assume(all(abs(sum(r)) <= MAX for r in rewards))
  group = trajectory.TrajectoryGroup(
    "g",
    "t",
    [member(str(i), r) for i, r in enumerate(rewards)],
    extra=member("greedy", rewards[0]),
  )
  options = advantages.AdvantageOptions(std_eps=std_eps, gamma=gamma)
  with np.errstate(over="raise", invalid="raise", divide="raise"):
    (built,), stats = examples.from_groups(
      [group], advantages.ESTIMATORS.get(name), options
    )
  assert len(built) == len(rewards)  # Each checks that it is finite.
  assert np.isfinite(stats.reward_mean) and np.isfinite(stats.reward_std)


CENTRED = ("grpo", "dr_grpo", "rloo", "turn_returns")


@pytest.mark.parametrize("name", CENTRED)
@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(
  amounts=st.lists(
    st.lists(st.integers(-100, 100), min_size=1, max_size=6),
    min_size=2,
    max_size=5,
  ),
  unit=st.sampled_from([1e-9, 0.1, 0.01, 1 / 3, 1e9]),
  offset=st.sampled_from([0, 10**6, 10**12]),
  std_eps=st.sampled_from([0.0, 1e-6]),
)
def test_advantages_are_zero_or_centred(name, amounts, unit, offset, std_eps):
  """Of one turn each, whose reward was added up in parts."""
  wholes = [offset + sum(parts) for parts in amounts]
  hypothesis.assume(all(abs(w) * unit <= MAX for w in wholes))
  rewards = [unit * offset + sum(n * unit for n in p) for p in amounts]
  sizes = [unit * (offset + sum(map(abs, p))) for p in amounts]
  group = advantages.GroupRewards(
    np.array(rewards), tuple(np.array([r]) for r in rewards)
  )
  (values,) = advantages.of_step(
    advantages.ESTIMATORS.get(name),
    [group],
    advantages.AdvantageOptions(std_eps=std_eps),
  )
  flat = np.concatenate(values)
  if len(set(wholes)) == 1:
    # What the parts were is known to the turns alone.
    hypothesis.assume(abs(rewards[0]) > 0.1 * max(sizes))
    assert not flat.any()
    return
  assert abs(flat.sum()) <= 1e-9 * np.abs(flat).sum()
  if max(wholes) - min(wholes) > 1e-12 * max(map(abs, wholes)):
    assert flat.any() and np.all(np.diff(flat[np.argsort(wholes)]) >= -1e-6)


@pytest.mark.parametrize(
  "reward, message",
  [
    (float("nan"), "must be a finite number, got nan"),
    (float("-inf"), "must be a finite number, got -inf"),
    (1e308, r"1e\+308 is larger than 1e\+12; scale the rewards"),
    (10**400, "one of 1329 bits"),
    ("much", "could not convert"),
    (None, "float"),
  ],
)
def test_a_group_with_an_unusable_reward_cannot_be_built(reward, message):
  bad = member("bad-1", [0.0, 1.0])
  bad.steps[1].reward = reward
  with pytest.raises(ValueError, match=rf"'g', episode 'bad-1': .*{message}"):
    trajectory.TrajectoryGroup("g", "t", [member("a", [0.0]), bad])
  # Of an episode that is left out of all statistics, it does no harm.
  bad.status = trajectory.TrajectoryStatus.ENV_ERROR
  trajectory.TrajectoryGroup("g", "t", [member("a", [0.0]), bad])


def test_a_group_of_two_huge_rewards_is_not_estimated():
  with pytest.raises(ValueError, match="not finite or beyond"):
    advantages.GroupRewards(
      np.array([1e308, -1e308]), (np.array([1e308]), np.array([-1e308]))
    )
