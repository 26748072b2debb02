"""Wilson intervals against published values, and what a summary promises."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st
import pytest
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.core.statistics import success_rates

Status = trajectory.TrajectoryStatus


def _result(family="click", mode="greedy", success=True, status=None, **kw):
  status = status or (Status.SUCCEEDED if success else Status.FAILED)
  return success_rates.EpisodeResult(family, mode, status, success, **kw)


@pytest.mark.parametrize(
  "successes, n, low, high",
  [
    # Newcombe 1998, table I, method 3 (score without correction).
    (81, 263, 0.2553, 0.3662),
    (15, 148, 0.0624, 0.1605),
    (0, 20, 0.0, 0.1611),
    (1, 29, 0.0061, 0.1718),
  ],
)
def test_wilson_equals_published_values(successes, n, low, high):
  got = success_rates.wilson_interval(successes, n, z=1.959964)
  assert got == pytest.approx((low, high), abs=5e-5)


@given(
  st.integers(1, 2000).flatmap(
    lambda n: st.tuples(st.integers(0, n), st.just(n))
  )
)
def test_wilson_bounds_solve_the_score_equation(case):
  successes, n = case
  rate, z = successes / n, 1.96
  low, high = success_rates.wilson_interval(successes, n, z)
  assert 0 <= low <= rate <= high <= 1
  for bound in (low, high):
    if 0 < bound < 1:
      score = (rate - bound) / math.sqrt(bound * (1 - bound) / n)
      assert abs(score) == pytest.approx(z, rel=1e-6)
  mirrored = success_rates.wilson_interval(n - successes, n, z)
  assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_wilson_of_nothing_knows_nothing_and_nonsense_is_refused():
  assert success_rates.wilson_interval(0, 0) == (0.0, 1.0)
  for successes, n in ((3, 2), (-1, 2), (0, -1)):
    with pytest.raises(ValueError, match="successes"):
      success_rates.wilson_interval(successes, n)


def test_summary_has_rates_a_task_a_mode_and_a_headline():
  results = [
    _result("click", success=True, turns=1, reward=1.0),
    _result("click", success=False, turns=3),
    _result("type", success=True, turns=2, reward=1.0),
    _result("type", mode="sampled", success=False, turns=4),
  ]
  summary = success_rates.summarise(results)
  assert summary["headline"] == "greedy"
  assert summary["success_rate"] == pytest.approx(2 / 3)
  assert summary["interval"] == list(success_rates.wilson_interval(2, 3))
  assert summary["episodes"] == 3
  assert summary["by_task"]["click"]["success_rate"] == 0.5
  assert summary["by_task"]["click"]["mean_turns"] == 2
  assert summary["greedy"]["by_task"] == summary["by_task"]
  assert summary["sampled"]["success_rate"] == 0
  assert list(summary["sampled"]["by_task"]) == ["type"]
  assert json.loads(json.dumps(summary)) == summary


def test_broken_infrastructure_is_counted_but_is_no_failure_of_the_policy():
  results = [_result(success=True)] + [
    _result(success=False, status=s)
    for s in (Status.ENV_ERROR, Status.TIMEOUT, Status.MODEL_ERROR)
  ]
  summary = success_rates.summarise(results)
  assert (summary["success_rate"], summary["episodes"]) == (1.0, 1)
  assert summary["invalid"] == 3
  assert summary["statuses"] == {
    "env_error": 1,
    "model_error": 1,
    "succeeded": 1,
    "timeout": 1,
  }


def test_without_a_valid_episode_there_is_no_rate():
  summary = success_rates.summarise(
    [_result(success=False, status=Status.ENV_ERROR)]
  )
  assert summary["success_rate"] is None
  assert summary["interval"] == [0.0, 1.0]
  assert success_rates.format_table({"final": summary}).splitlines()[-1] == (
    "all    -"
  )


def test_from_trajectory_takes_the_status_for_the_verdict():
  episode = trajectory.Trajectory(
    status=Status.MAX_TURNS, reward=0.5, steps=[trajectory.Step()] * 3
  )
  result = success_rates.EpisodeResult.from_trajectory(episode, "f", "sampled")
  assert (result.success, result.is_valid) == (False, True)
  assert (result.reward, result.turns) == (0.5, 3)


@pytest.mark.parametrize(
  "kwargs, message",
  [
    ({"mode": "best"}, "mode must be one of greedy, sampled"),
    ({"status": Status.RUNNING, "success": False}, "still runs"),
    ({"status": Status.ENV_ERROR, "success": True}, "cannot have succeed"),
  ],
)
def test_impossible_results_cannot_be_built(kwargs, message):
  with pytest.raises(ValueError, match=message):
    _result(**kwargs)


def test_empty_and_unlisted_modes_are_refused():
  with pytest.raises(ValueError, match="no evaluation results"):
    success_rates.summarise([])
  with pytest.raises(ValueError, match="only \\['greedy'\\]"):
    success_rates.summarise([_result(mode="sampled")], modes=["greedy"])


def test_the_table_puts_evaluations_side_by_side():
  before = success_rates.summarise([_result(success=False)] * 4)
  after = success_rates.summarise([_result(success=True)] * 4)
  lines = success_rates.format_table({"initial": before, "final": after})
  head, click, total = lines.splitlines()
  assert head.split() == ["task", "initial", "final"]
  assert "0.000 [0.00, 0.49] n=4" in click
  assert "1.000 [0.51, 1.00] n=4" in total
  summaries = {"initial": before, "warm_start": before, "final": after}
  wide = success_rates.format_table(summaries, 100)
  assert wide == success_rates.format_table(summaries)
  narrow = success_rates.format_table(summaries, 70).splitlines()
  assert max(map(len, narrow)) <= 70 < max(map(len, wide.splitlines()))
  assert narrow[-1].split() == ["episodes", "4", "4", "4"]
