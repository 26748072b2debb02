"""Algorithms that need more of a run than rewards: end to end, and resumed."""

import sqlite3

import pytest
import small_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NEW = (
  small_runs.ONE_LAYER,
  "warm_start.source=none",
  "eval.on=false",
  "seed=1",
  "name=r",
)


def train(tmp_path, *overrides):
  assert small_runs.run_train(tmp_path, *NEW, *overrides) == 0
  return small_runs.metrics_of(tmp_path / "r")


def test_ppo_resumes_with_its_value_head(tmp_path):
  settings = (
    "algorithm=ppo",
    "learner.minibatches=2",
    "algorithm.value_warmup=1",
  )
  once = train(tmp_path, *settings, "steps=2", "checkpoint.every=1")
  resumed = tmp_path / "r"
  assert (
    small_runs.run_train(
      tmp_path, f"resume={resumed}", "checkpoint.resume_from=1"
    )
    == 0
  )
  parts = small_runs.metrics_of(resumed)
  assert parts[1]["time"] > once[1]["time"]  # It was trained again.
  for name in ("value_loss", "value_mean", "loss", "reward_mean"):
    assert parts[1][name] == once[1][name], name
  weights = resumed / "policy" / "model.safetensors"
  header = weights.read_bytes()[: 1 << 16]
  assert b"value_head" not in header


def test_remax_plays_greedy_episodes_that_are_not_counted(tmp_path):
  (metrics,) = train(tmp_path, "algorithm=remax", "steps=1")
  assert metrics["episodes"] == 8  # Two groups of four.
  assert metrics["reward_mean"] == metrics["success_rate"]


def test_a_truncated_rollout_is_on_policy_with_its_mask(tmp_path):
  (metrics,) = train(
    tmp_path,
    "algorithm.keep_sampling_mask=true",
    "sampling.top_k=20",
    "sampling.top_p=0.9",
    "learner.skip_zero_advantage=false",
    "steps=1",
  )
  assert metrics["ratio_max"] == pytest.approx(1, abs=1e-3)
  assert metrics["ratio_min"] == pytest.approx(1, abs=1e-3)


def test_success_replay_keeps_a_file_and_reports(tmp_path):
  metrics = train(
    tmp_path, "learner.success_replay=2", "algorithm.importance=tis", "steps=2"
  )
  assert all("borrowed_episodes" in m for m in metrics)
  database = sqlite3.connect(tmp_path / "r" / "replay.db")
  with database:
    database.execute("SELECT count(*) FROM groups")
  database.close()
