"""A run whose engine has devices of its own (`mesh.engine`)."""

import json

import forced_devices
import pytest
import small_runs

pytestmark = pytest.mark.slow
ARGUMENTS = (
    *small_runs.SMALL, small_runs.ONE_LAYER, "seed=3", "steps=3",
    "warm_start.source=none", "eval.on=false", "checkpoint.every=2",
    "algorithm.entropy_coef=0.1", "learner.skip_zero_advantage=false",
    "queue.max_staleness=0",
)  # fmt: skip


def _train(folder, devices, *arguments):
  forced_devices.run(
    *("-m", "tunix.rl.multi_turn.train", *ARGUMENTS, f"run.dir={folder}"),
    *("name=r", *arguments),
    devices=devices,
  )
  text = (folder / "r" / "metrics.jsonl").read_text()
  return [json.loads(line) for line in text.splitlines()]


def test_the_run_is_that_of_shared_devices(tmp_path):
  shared = _train(tmp_path / "shared", 2, "mesh.fsdp=2")
  apart = _train(tmp_path / "apart", 3, "mesh.fsdp=2", "mesh.engine=1")
  for one, other in zip(shared, apart, strict=True):
    for name in ("reward_mean", "completion_tokens", "staleness_max"):
      assert one[name] == other[name], name
    for name in ("loss", "entropy", "logprob", "sampler_kl"):
      assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize(
  "arguments, words",
  [
    (["mesh.engine=1", "rollout.via=hosts"], "leave it out with rollout.via"),
    (["mesh.engine=3", "mesh.fsdp=2"], "mesh.engine = 3, but JAX sees 1"),
  ],
)
def test_devices_that_are_not_there_are_refused(
  arguments, words, tmp_path, capsys
):
  assert small_runs.run_train(tmp_path, *arguments, "learner.rows=4") == 2
  assert words in capsys.readouterr().err
