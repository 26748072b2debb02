"""kill -9 of each process. benchmarks/soak_monitor.py does it more often."""

import monitor_kills
import nursery
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_server_that_is_killed_keeps_what_it_acknowledged(tmp_path):
  outcome = monitor_kills.kill_server(tmp_path, kills=nursery.kills(4))
  print(outcome)
  assert outcome.clean, outcome
  assert outcome.acknowledged > 10


def test_a_trainer_that_is_killed_loses_nothing_that_was_durable(tmp_path):
  outcome = monitor_kills.kill_trainer(tmp_path, kills=nursery.kills(4))
  print(outcome)
  assert outcome.clean, outcome
  assert outcome.acknowledged > 10


def test_runs_and_uploaders_that_are_killed_lose_nothing_recorded(tmp_path):
  outcome = monitor_kills.kill_run(tmp_path, kills=nursery.kills(6))
  print(outcome)
  assert outcome.clean, outcome
  assert outcome.acknowledged > 10


def test_rows_made_again_by_another_uploader_are_the_same(tmp_path):
  assert monitor_kills.kill_uploader(tmp_path, kills=nursery.kills(6)) == []
