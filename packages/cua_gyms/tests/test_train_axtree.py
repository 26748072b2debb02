"""A text policy that reads pages as trees: cloned, trained and evaluated."""

import json

import browsers
import pytest
import small_runs
from tunix.rl.multi_turn import train

pytestmark = [*browsers.needed(), pytest.mark.slow, pytest.mark.timeout(900)]
TEXT = (
  "policy=qwen3_text_tiny",
  "gym=miniwob",
  "gym.observation=axtree",
  "tasks=[click-button, enter-text]",
  "eval.families=[click-dialog]",
  "eval.modes=[sampled]",
  "engine.context_length=1024",
  "learner.row_length=1024",
  "learner.rows=1",
  "learner.steps=1",
  "learner.skip_zero_advantage=false",
  "algorithm.entropy_coef=0.01",
  "sampling.max_new_tokens=16",
  "engine.slots=4",
  "collect.concurrency=4",
)


def test_a_text_policy_learns_from_pages_by_their_trees(tmp_path):
  assert small_runs.run_train(
      tmp_path, "name=a", *TEXT, "warm_start.steps=2",
      "warm_start.batch_size=2", "warm_start.demonstrations=4",
  ) == 0  # fmt: skip
  (metrics,) = small_runs.metrics_of(tmp_path / "a")
  assert metrics["logprob_gap_max"] < 1e-3
  lines = (tmp_path / "a" / "trajectories.jsonl").read_text().splitlines()
  episodes = [json.loads(line) for line in lines]
  assert {e["family"] for e in episodes if e["split"] == "eval"} == {
    "click-dialog"
  }
  for episode in episodes:
    system, user = episode["steps"][0]["chat_completions"]["new"][:2]
    assert "click(bid" in system["content"]
    assert episode["task"]["instruction"] in user["content"]
    assert "\n\t[1] " in user["content"]
    assert "RootWebArea" in user["content"]


def test_the_tree_and_the_screenshot_together(tmp_path):
  own = ("policy", "gym.obs", "engine.context", "learner.row_")
  settings = [s for s in (*small_runs.SMALL, *TEXT) if not s.startswith(own)]
  assert train.main([
      f"run.dir={tmp_path}", "name=b", *settings,
      small_runs.ONE_LAYER, "gym.observation=both", "warm_start.source=none",
      "eval.on=false", "environment.max_turns=2",
  ]) == 0  # fmt: skip
  (metrics,) = small_runs.metrics_of(tmp_path / "b")
  assert metrics["logprob_gap_max"] < 1e-3
