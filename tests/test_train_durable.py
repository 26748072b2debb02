"""A crash loses no accepted group, with no setting for it."""

import contextlib
import pathlib
import sqlite3
import subprocess
import sys
import time

import pytest
import small_runs
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.trajectory_collector import groups

COMMON = (small_runs.ONE_LAYER, "warm_start.source=none", "eval.on=false")


def stored(directory: pathlib.Path) -> dict[int, tuple[str, int]]:
  """Index -> (group id, whether it is done) of a run's queue."""
  with contextlib.closing(
    sqlite3.connect(f"file:{directory / 'queue.db'}?mode=ro", uri=True)
  ) as db:
    rows = db.execute("SELECT idx, group_id, done FROM groups").fetchall()
  return {index: (name, trained) for index, name, trained in rows}


@pytest.mark.slow
def test_the_queue_is_durable_by_default(tmp_path):
  assert small_runs.run_train(tmp_path, *COMMON, "name=a", "steps=2") == 0
  directory = tmp_path / "a"
  rows = stored(directory)
  trained = {index for index, (_, is_done) in rows.items() if is_done}
  assert trained >= set(range(4))
  assert (
    small_runs.run_train(tmp_path, *COMMON, "name=b", "steps=1", "queue.path=")
    == 0
  )
  assert not (tmp_path / "b" / "queue.db").exists()


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_a_killed_run_of_default_settings_loses_no_group(tmp_path, monkeypatch):
  directory = tmp_path / "k"
  arguments = [
    *small_runs.directory_of(tmp_path, ()),
    *small_runs.SMALL,
    *COMMON,
    "name=k",
    "steps=100000",
  ]
  process = subprocess.Popen(
    [sys.executable, "-m", "tunix.rl.multi_turn.train", *arguments],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  deadline = time.monotonic() + 200
  before: dict[int, tuple[str, int]] = {}
  while len(before) < 5 and process.poll() is None:
    assert time.monotonic() < deadline
    with contextlib.suppress(sqlite3.OperationalError):
      before = stored(directory)
    time.sleep(0.05)
  process.kill()
  output, _ = process.communicate(timeout=60)
  assert len(before) >= 5, output
  before = stored(directory)

  collected = []
  collect = groups.GroupCollector.collect

  async def spied(self, task, *, index=0, **kwargs):
    if self._split == "train":  # pylint: disable=protected-access
      collected.append(index)
    return await collect(self, task, index=index, **kwargs)

  monkeypatch.setattr(groups.GroupCollector, "collect", spied)
  steps = len(before) // 2 + 2
  assert train.main([f"resume={directory}", f"steps={steps}"]) == 0
  assert not set(collected) & before.keys()
  after = stored(directory)
  assert set(after) == set(range(len(after)))
  assert all(after[i][0] == name for i, (name, _) in before.items())
  assert all(after[i][1] for i in range(2 * steps))
  lines = small_runs.metrics_of(directory)
  for name in ("step", "version"):
    assert [m[name] for m in lines] == list(range(1, steps + 1))
