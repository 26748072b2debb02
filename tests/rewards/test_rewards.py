"""Rewards by name: what a function may be and what must come out."""

import asyncio

import numpy as np
import pytest
from tunix.rl.multi_turn import rewards
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.rewards import reward_registry

TASK = {"question": "What is 3 * (4 + 5)?", "ground_truth": "27"}


def both(fn, task=None, action="", info=None):
  """The sync and the async way, which must agree."""
  out = rewards.evaluate(fn, task or TASK, action, info)
  assert out == asyncio.run(
    rewards.evaluate_async(fn, task or TASK, action, info)
  )
  return out


class TestRewardOutput:
  def test_is_a_float_with_metadata(self):
    out = rewards.RewardOutput(np.float32(0.5), {"a": 1})
    assert type(out.reward) is float and float(out) == 0.5
    assert rewards.RewardOutput(1).metadata == {}

  @pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), "1", None, [1], np.nan]
  )
  def test_is_finite(self, bad):
    with pytest.raises(ValueError, match="finite number"):
      rewards.RewardOutput(bad)


class TestRegistry:
  def test_register_look_up_and_refuse_duplicates(self):
    @rewards.register("mine")
    def mine(task, action):
      return 1.0

    try:
      assert rewards.get_reward_fn("mine") is mine
      with pytest.raises(ValueError, match="already registered"):
        rewards.register("mine")(lambda task, action: 0.0)
      assert rewards.get_reward_fn("mine") is mine
    finally:
      assert rewards.unregister("mine")
    assert not rewards.unregister("mine")

  def test_unknown_name_names_the_nearest(self):
    with pytest.raises(ValueError, match="did you mean 'exact_match'"):
      rewards.get_reward_fn("exact_mach")


class TestKindsOfFunctions:
  def test_float_output_and_upstream_output(self):
    class Upstream:
      reward, metadata = 0.25, {"m": 1}

    assert both(lambda t, a: 0.25).reward == 0.25
    assert both(lambda t, a: rewards.RewardOutput(0.25)).reward == 0.25
    assert both(lambda t, a: Upstream()).metadata == {"m": 1}

  def test_async_function(self):
    async def fn(task, action):
      await asyncio.sleep(0)
      return 0.75

    assert both(fn).reward == 0.75

  def test_callable_object(self):
    class Judge:
      def __call__(self, task, action):
        return len(action)

    assert both(Judge(), action="abc").reward == 3.0

  def test_info_is_given_to_who_asks(self):
    assert both(lambda task, action, info: info["n"], info={"n": 2}).reward == 2

  @pytest.mark.parametrize("bad", [float("nan"), None, "good"])
  def test_no_number_is_an_error_that_names_the_function(self, bad):
    def judge(task, action):
      return bad

    with pytest.raises(ValueError, match="reward function 'judge'"):
      rewards.evaluate(judge, TASK, "")

  def test_hung_function_ends_at_its_deadline(self):
    async def hang(task, action):
      await asyncio.Event().wait()

    with pytest.raises(concurrency.DeadlineExceeded, match="'hang'"):
      asyncio.run(rewards.evaluate_async(hang, TASK, "", timeout=0.05))


class TestFunctions:
  @pytest.mark.parametrize(
    "answer, reward", [("27", 1), (" 27\n", 1), ("27.0", 0), ("", 0)]
  )
  def test_exact_match(self, answer, reward):
    assert both("exact_match", action=answer).reward == reward

  @pytest.mark.parametrize(
    "answer, reward",
    [("27.0", 1), ("so it is 27.", 1), ("27 or 28", 0), ("none", 0)],
  )
  def test_numeric_match(self, answer, reward):
    assert both("numeric_match", action=answer).reward == reward

  @pytest.mark.parametrize(
    "question, answer, reward",
    [
      ("What is 3 * (4 + 5)?", "27", 1),
      ("What is 3 * (4 + 5)?", "26", 0),
      ("1+1=?", "The answer is 2", 1),
      ("Take 10 / 4.", "2.5", 1),
    ],
  )
  def test_calculate(self, question, answer, reward):
    assert both("calculate", {"question": question}, answer).reward == reward

  def test_calculate_needs_arithmetic(self):
    with pytest.raises(ValueError, match="no arithmetic"):
      rewards.evaluate("calculate", {"question": "Who?"}, "2")

  def test_success_comes_from_the_environment(self):
    assert both("success", info={"success": True}).reward == 1.0
    assert both("success", info={}).reward == 0.0

  def test_missing_truth_is_an_error(self):
    with pytest.raises(ValueError, match="no 'ground_truth'"):
      rewards.evaluate("exact_match", {"question": "?"}, "2")

  def test_weighted_sum(self):
    fn = rewards.combine_rewards({"exact_match": 0.5, "numeric_match": 2.0})
    assert both(fn, action="27.0").reward == 2.0
    assert both(fn, action="27").reward == 2.5

    def boasts(task, action):
      return rewards.RewardOutput(1.0, {"reward": 9.0, "weight": None, "a": 1})

    fn = reward_registry.combine_parts({"boasts": (boasts, 0.5)})
    assert both(fn).metadata == {
      "boasts": {"reward": 1.0, "weight": 0.5, "a": 1}
    }
    with pytest.raises(ValueError, match="unknown reward"):
      rewards.combine_rewards({"nope": 1.0})
