"""Several attempts at a task: estimators, intervals, comparisons."""

import itertools
import math
import random

from hypothesis import given
from hypothesis import strategies as st
import pytest
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.core.statistics import comparison
from tunix.rl.multi_turn.core.statistics import evaluation_figures
from tunix.rl.multi_turn.core.statistics import pass_at_k
from tunix.rl.multi_turn.core.statistics import success_rates

Status = trajectory.TrajectoryStatus


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_estimators_are_means_over_all_choices(attempts, data):
  k = data.draw(st.integers(1, len(attempts)))
  chosen = list(itertools.combinations(attempts, k))
  n, wins = len(attempts), sum(attempts)
  assert pass_at_k.pass_at_k(n, wins, k) == pytest.approx(
    sum(map(any, chosen)) / len(chosen)
  )
  assert pass_at_k.pass_hat_k(n, wins, k) == pytest.approx(
    sum(map(all, chosen)) / len(chosen)
  )


def test_the_estimate_of_the_paper_as_a_product():
  """Chen et al. compute 1 - prod(1 - k / i) for i in n - c + 1 … n."""
  for n, wins, k in ((200, 13, 10), (100, 1, 100), (64, 63, 2), (10, 0, 5)):
    failure = math.prod(1 - k / i for i in range(n - wins + 1, n + 1))
    expected = 1.0 if n - wins < k else 1.0 - failure
    assert pass_at_k.pass_at_k(n, wins, k) == pytest.approx(expected)


def test_ks_are_powers_of_two_and_the_largest():
  assert pass_at_k.ks_of(1) == [1]
  assert pass_at_k.ks_of(2) == [1, 2]
  assert pass_at_k.ks_of(6) == [1, 2, 4, 6]
  assert pass_at_k.ks_of(8) == [1, 2, 4, 8]


def result(task, success, status=None, mode="sampled"):
  status = status or (Status.SUCCEEDED if success else Status.FAILED)
  return success_rates.EpisodeResult(
    "f", mode, status, success, float(success), 1, task
  )


def test_one_attempt_each_has_the_plain_interval():
  results = [result(f"t{i}", i < 3) for i in range(10)]
  summary = success_rates.summarise(results)
  assert summary["interval"] == list(success_rates.wilson_interval(3, 10))
  assert "pass_at_k" not in summary


def test_attempts_that_agree_count_as_one_trial():
  results = [result(f"t{i}", i < 3) for i in range(10) for _ in range(8)]
  summary = success_rates.summarise(results)
  low, high = success_rates.wilson_interval(3, 10)
  assert summary["interval"] == pytest.approx([low, high], abs=0.02)
  assert summary["pass_at_k"]["8"]["rate"] == 0.3


def test_the_interval_covers_the_rate_of_clustered_attempts():
  """95 % of intervals hold the true rate, whatever tasks differ by."""
  draw, covered, plain, trials = random.Random(0), 0, 0, 400
  for _ in range(trials):
    rates = [draw.betavariate(0.6, 0.6) for _ in range(40)]
    attempts = [(sum(draw.random() < p for _ in range(8)), 8) for p in rates]
    n = success_rates.effective_trials(attempts)
    rate = sum(wins for wins, _ in attempts) / 320
    low, high = success_rates.wilson_interval(rate * n, n)
    covered += low <= 0.5 <= high
    low, high = success_rates.wilson_interval(rate * 320, 320)
    plain += low <= 0.5 <= high
  assert covered / trials > 0.92 > 0.75 > plain / trials


def test_broken_attempts_are_no_attempts():
  results = [
    result("a", True),
    result("a", False),
    result("a", False, Status.TIMEOUT),
    result("b", False),
    result("b", False, Status.ENV_ERROR),
  ]
  summary = success_rates.summarise(results)
  assert summary["invalid"] == 2 and summary["tasks"] == 2
  assert summary["pass_at_k"]["2"] == {
    "rate": 1.0,
    "tasks": 1,
    "interval": list(success_rates.wilson_interval(1, 1)),
  }


def test_figures_are_named_by_mode_and_k():
  results = [
    result("a", True),
    result("a", False),
    result("b", False),
    result("b", False),
    result("a", True, mode="greedy"),
    result("b", True, mode="greedy"),
  ]
  summary = success_rates.summarise(results, ("sampled", "greedy"))
  value = lambda metric: evaluation_figures.value_of(metric, summary)
  assert value("success_rate") == 0.25
  assert value("greedy.success_rate") == 1.0
  assert value("pass_at_2") == value("sampled.pass_at_2") == 0.5
  assert value("pass_hat_2") == 0.0
  problem = evaluation_figures.problem
  assert not problem("pass_at_2", ("sampled", "greedy"), 2)
  assert "K in [1, 2, 4]" in problem("pass_at_3", ("sampled",), 4)
  assert "K in []" in problem("pass_at_1", ("sampled",), 1)
  assert "no greedy" in problem("greedy.success_rate", ("sampled",), 1)
  assert "must be" in problem("accuracy", ("sampled",), 1)


def outcome(index, success, valid=True, mode="sampled"):
  return {
    "mode": mode,
    "index": index,
    "task_id": f"t{index}",
    "family": "f",
    "success": success,
    "valid": valid,
  }


def test_a_comparison_pairs_tasks():
  own = [outcome(i, i < 8) for i in range(10)] + [outcome(10, True)]
  other = [outcome(i, i in (0, 1, 9)) for i in range(10)]
  other += [outcome(10, True, valid=False)]
  figures = comparison.compare(own, other)["sampled"]
  assert (figures["better"], figures["worse"], figures["equal"]) == (6, 1, 3)
  assert figures["difference"] == pytest.approx(0.5)
  assert figures["unpaired"] == 1
  # Of 7 changes at most 1 for worse: 2 * (1 + 7) / 2^7.
  assert figures["p"] == pytest.approx(0.125)
  assert {t["task_id"] for t in figures["changed"]} == {
      "t2", "t3", "t4", "t5", "t6", "t7", "t9"
  }  # fmt: skip
  squares = 6 * 0.5**2 + 1.5**2 + 3 * 0.5**2
  half = 1.96 * math.sqrt(squares / 9 / 10)
  assert figures["interval"] == pytest.approx([0.5 - half, 0.5 + half])


def test_nothing_in_common_is_no_comparison():
  with pytest.raises(ValueError, match="no task in common"):
    comparison.compare([outcome(0, True)], [outcome(1, True)])


@pytest.mark.parametrize(
  "better, worse, p",
  [(0, 0, 1.0), (5, 0, 0.0625), (3, 3, 1.0), (1, 8, 0.0390625)],
)
def test_the_sign_test(better, worse, p):
  assert comparison.sign_test(better, worse) == p
