"""Equal up to rounding, and never up to a size."""

import math
import random

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
from tunix.rl.multi_turn.core import reward_equality

all_equal = reward_equality.all_equal
PARTS = st.lists(
  st.one_of(
    st.integers(-100, 100).map(lambda n: n / 100),
    st.floats(-1e12, 1e12),
    st.floats(-1e-300, 1e-300),
  ),
  min_size=1,
  max_size=12,
)


@pytest.mark.parametrize(
  "rewards, magnitudes, equal",
  [
    ([0.1 + 0.2, 0.3, 0.2 + 0.1, 0.3], None, True),
    ([1e-9] * 4 + [0.0] * 4, None, False),
    ([5e-324, 0.0], None, False),
    ([1e12, 1e12 - 1], None, False),
    ([0.3, 0.3 + 1e-13], None, False),
    ([1.0], None, True),
    ([], None, True),
    # What is left of .1 + .2 - .3, beside nothing.
    ([0.1 + 0.2 - 0.3, 0.0], None, False),
    ([0.1 + 0.2 - 0.3, 0.0], [0.6, 0.0], True),
    # One member's large parts are no tolerance for the others.
    ([0.0, 1e-3, 2e-3], [2e12, 1e-3, 2e-3], False),
  ],
)
def test_values(rewards, magnitudes, equal):
  assert all_equal(rewards, magnitudes) == equal
  assert all_equal(rewards[::-1], magnitudes and magnitudes[::-1]) == equal


@hypothesis.given(parts=PARTS, seed=st.integers(0, 2**32))
def test_the_same_parts_in_any_order_and_grouping_are_equal(parts, seed):
  rng = random.Random(seed)
  rewards, magnitudes = [], []
  for _ in range(5):
    order = rng.sample(parts, len(parts))
    turns = []
    for part in order:  # Some environments add parts up themselves.
      if turns and rng.random() < 0.5:
        turns[-1] += part
      else:
        turns.append(part)
    rewards.append(rng.choice([sum, math.fsum, np.sum])(turns))
    # A member that has one sum as its reward does not know its parts.
    magnitudes.append(sum(map(abs, order)))
  assert all_equal(rewards, magnitudes)


@hypothesis.given(
  rewards=st.lists(st.floats(-1e12, 1e12), min_size=2, max_size=6),
  power=st.integers(-200, 200),
)
def test_only_relative_differences_count(rewards, power):
  scaled = [r * 2.0**power for r in rewards]
  hypothesis.assume(all(r == s / 2.0**power for r, s in zip(rewards, scaled)))
  # The smallest normal number is where tolerances lose their bits.
  hypothesis.assume(all(abs(x) > 1e-280 or x == 0 for x in scaled + rewards))
  assert all_equal(scaled) == all_equal(rewards)
  low, high = min(rewards), max(rewards)
  if high - low > 1e-13 * max(abs(low), abs(high)):
    assert not all_equal(rewards)


def test_bounds_are_passed_by_more_than_rounding():
  assert not reward_equality.exceeds(0.1 + 0.2, 0.3)
  assert not reward_equality.exceeds(0.1 + 0.2 - 0.3, 0.0, 0.6)
  assert reward_equality.exceeds(1e-9, 0.0)
  reached = reward_equality.reaches(np.array([0.1 + 0.7, 0.79]), 0.8)
  assert 0.1 + 0.7 < 0.8 and reached.tolist() == [True, False]


def test_a_total_of_rounding_is_nothing():
  assert math.fsum([0.1, 0.2, -0.3]) > 0
  assert reward_equality.total([0.1, 0.2, -0.3]) == 0
  assert reward_equality.total([0.1, 0.2]) == 0.1 + 0.2
  assert reward_equality.total(iter([1e-9, 0.0])) == 1e-9
