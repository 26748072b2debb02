"""The documented command of path A: a gym server, a run service, a learner."""

import contextlib
import shlex
import sqlite3

import documented_commands
import gym_servers
import pytest
import run_services
import small_runs
from tunix.rl.multi_turn import train

pytestmark = pytest.mark.timeout(400)
FAMILIES = ("click-button", "close-dialog", "open-icon")
SMALL = (
    "collect.group_size=4", "collect.min_valid=2",
    "learner.groups_per_step=2", "learner.rows=2", "learner.patches=0",
    "learner.targets=0", "engine.slots=4", "collect.concurrency=8",
    "run_service.poll_s=0.05", "report.progress=none",
)  # fmt: skip
"""Sizes; everything else is as documented."""


def documented():
  """The settings of the page's command for a gym server that judges."""
  (words,) = (
    one.words()
    for one in documented_commands.everywhere()
    if one.where.startswith("docs/run_service.md") and "gym=genv" in one.text
  )
  (settings,) = (w[5:] for w in words if w.startswith("ARGS="))
  return shlex.split(settings)


@contextlib.contextmanager
def peers(max_runs=64):
  """Overrides that put the servers' addresses into the documented command."""
  limits = run_services.app_lib.RunLimits(max_runs=max_runs)
  with (
    gym_servers.serving(gym_servers.desktop(families=FAMILIES)) as (gym, _),
    run_services.serving(limits=limits) as (service, _),
  ):
    yield f"gym.options.base_url={gym}", f"run_service.base_url={service}"


def run(tmp_path, addresses, *overrides):
  return train.main(
    [*documented(), *addresses, *SMALL, f"run.dir={tmp_path}", *overrides]
  )


def compare_rows(database):
  """The monitor has of path A what it has of any other path."""
  with contextlib.closing(sqlite3.connect(database)) as connection:
    one = lambda sql: connection.execute(sql).fetchall()
    played = one("SELECT count(*) FROM rollout WHERE status = 'completed'")[0][
      0
    ]
    assert played >= 16
    assert one("SELECT DISTINCT env_type, box_type FROM environment") == [
      ("linux", "linux")
    ]
    assert one("SELECT box_type FROM training") == [("linux",)]
    assert one("SELECT count(validation_time) FROM rollout")[0][0] >= played
    judged = one("SELECT actual_result, execution_time FROM validation")
    assert len(judged) >= played
    assert all(float(result) >= 0 and s > 0 for result, s in judged)
    tools = one(
      "SELECT DISTINCT tool_name FROM action"
      " WHERE action_type NOT IN ('parse_error', 'text', 'invalid')"
    )
    assert tools == [("computer_use",)]
    texts = one(
      "SELECT text_content FROM obs JOIN turn ON turn.id = obs.turn_id"
      " WHERE turn = 1 AND obs_type LIKE '%screenshot%'"
      " AND model_input_json IS NOT NULL"
    )
    assert texts and all(text for (text,) in texts)
    assert one("SELECT count(checkpoint_path) FROM step")[0][0] >= 1


@pytest.mark.slow
def test_the_documented_command_trains(tmp_path):
  """Also with a service that is full: it asks to wait, and is waited for."""
  with peers(max_runs=5) as addresses:
    status = run(
        tmp_path, addresses, "name=a", "steps=2", "eval.on=false",
        "learner.skip_zero_advantage=false", "algorithm.entropy_coef=0.01",
        "monitor.embedded=true", f"monitor.database={tmp_path / 'a.db'}",
        "monitor.close_timeout_s=60",
    )  # fmt: skip
  assert status == 0
  steps = small_runs.metrics_of(tmp_path / "a")
  assert [s["step"] for s in steps] == [1, 2]
  for step in steps:
    assert step["grad_norm"] > 0 and step["logprob_gap_max"] < 1e-3
    assert step["fallback_turns"] == 0 and step["episode_tokens_mean"] > 5
  # The shipped policy can do it: its own prompt is the one that is written.
  assert sum(s["success_rate"] for s in steps) > 0
  assert not small_runs.summary_of(tmp_path / "a").get("faults")
  compare_rows(tmp_path / "a.db")


def test_a_prompt_that_does_not_fit_ends_the_run_before_its_first_episode(
  tmp_path, capsys
):
  with peers() as addresses:
    assert run(tmp_path, addresses, "name=b", "run_service.agent=qwen3-vl") == 1
  errors = capsys.readouterr().err
  assert "does not fit engine.context_length=512" in errors
  assert "run_service.agent=compact" in errors
  assert "maximum context length is 512 tokens, and the prompt has 8" in errors
  assert "/sessions/" not in errors  # A key of a session.
  directory = tmp_path / "b"
  assert not (directory / "traceback.txt").exists()
  assert small_runs.summary_of(directory)["status"] == "failed"
  assert not (directory / "metrics.jsonl").read_text()
  written = directory / "trajectories.jsonl"
  assert not written.exists() or not written.read_text()


def test_a_service_that_is_not_there_ends_the_run_at_once(tmp_path, capsys):
  with peers() as (gym, _):
    with run_services.serving() as (url, _):
      pass
    assert run(tmp_path, (gym, f"run_service.base_url={url}"), "name=c") == 1
  errors = capsys.readouterr().err
  assert "does not play task" in errors and url in errors
