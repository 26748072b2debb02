"""A disk, a clock and a network that fail. benchmarks/soak_monitor.py: longer.

The database must end up as the log of what was told, with nothing lost that
was acknowledged, nothing twice, and SQLite's integrity check clean.
"""

import monitor_faults
import pytest

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
  try:
    return monitor_faults.build(tmp_path_factory.mktemp("faults"))
  except monitor_faults.NoCompiler as reason:
    pytest.skip(str(reason))


def test_every_sync_of_the_database_may_fail(library, tmp_path):
  result = monitor_faults.run(library, "sync_server", tmp_path)
  assert result["wrong"] == []
  assert min(result["syncs"], result["failures"]) > monitor_faults.BATCHES


def test_every_sync_of_a_spool_may_fail(library, tmp_path):
  result = monitor_faults.run(library, "sync_spool", tmp_path)
  assert result["wrong"] == []
  assert result["syncs"] >= 7 and result["failures"] >= 6


def test_a_full_disk_is_waited_for_on_both_sides(library, tmp_path):
  result = monitor_faults.run(library, "full", tmp_path)
  assert result["wrong"] == []
  assert result["failed_commits"] + result["spool_failures"] > 0
  assert result["refused"] > 0


def test_a_clock_that_jumps_by_a_day_confuses_nothing(library, tmp_path):
  result = monitor_faults.run(library, "clock", tmp_path)
  assert result["wrong"] == []
