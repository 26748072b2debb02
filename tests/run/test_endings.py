"""A run that taught its policy nothing, or was cut short, says so."""

import breaking_gym
import small_runs
import tunix.rl.multi_turn as mt

ENDS = ("warm_start.source=none", "warm_start.steps=0", "run.name=x")


def test_equal_rewards_and_a_spent_budget_are_said(tmp_path, capsys):
  status = small_runs.run_train(
    tmp_path,
    small_runs.ONE_LAYER,
    *ENDS,
    "reward=zero",
    "steps=500",
    "time_budget_s=0.5",
    "eval.episodes_per_task=1",
  )
  assert status == 0
  summary = small_runs.summary_of(tmp_path / "x")
  assert summary["status"] == "completed" and 0 < summary["step"] < 500
  spent, nothing = summary["notes"]
  assert spent.startswith("run.time_budget_s=0.5 ended training after ")
  assert "of learner.steps=500 updates" in spent
  assert nothing.startswith("completed without an update: the episodes of each")
  err = capsys.readouterr().err
  assert f"warning: {spent}\n" in err and f"warning: {nothing}\n" in err
  page = (tmp_path / "x" / "report.html").read_text()
  assert spent in page and nothing in page
  assert nothing in repr(mt.load(tmp_path / "x"))


def test_a_run_whose_episodes_were_all_invalid_says_so(tmp_path):
  breaking_gym.mend()
  status = small_runs.run_train(
      tmp_path, small_runs.ONE_LAYER, *ENDS, "gym=breaking_gym:GYM",
      "tasks=[t]", "steps=2", "collect.max_requeues=0", "eval.every=0",
      "eval.episodes_per_task=1",
  )  # fmt: skip
  assert status == 0
  summary = small_runs.summary_of(tmp_path / "x")
  (note,) = summary["notes"]
  assert note.startswith("completed without an update: no group of valid")
  assert summary["step"] == 0
