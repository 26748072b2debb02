"""A gym that raises SystemExit and its like costs a run episodes, no more."""

import itertools

import pytest
import small_runs
from tunix.rl.multi_turn.environments.gyms import desktop

EXITS = (SystemExit, KeyboardInterrupt, GeneratorExit)


@pytest.mark.slow
def test_a_gym_that_leaves_costs_episodes_only(tmp_path, monkeypatch):
  calls, start = itertools.count(), desktop.DesktopGym.start

  async def leaves(self, task):
    number = next(calls)
    if number % 5 == 4:
      raise EXITS[number // 5 % 3]("out of the blue")
    return await start(self, task)

  monkeypatch.setattr(desktop.DesktopGym, "start", leaves)
  status = small_runs.run_train(
    tmp_path,
    small_runs.ONE_LAYER,
    "name=x",
    "warm_start.source=none",
    "steps=2",
    "environment.max_turns=1",
    "eval.episodes_per_task=1",
  )
  assert status == 0
  summary = small_runs.summary_of(tmp_path / "x")
  assert summary["status"] == "completed" and summary["step"] == 2
  assert summary["faults"]["reset/EnvResetError"] >= 3
