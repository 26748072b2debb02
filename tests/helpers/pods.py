"""Runs of several processes, as the command starts them on several hosts."""

import json
import pathlib
import time

import forced_devices
import pytest
import small_runs

DEVICES = 4
ARGUMENTS = (
    *small_runs.SMALL, small_runs.ONE_LAYER, "name=r", "seed=3",
    "learner.groups_per_step=4", "learner.rows=4", "mesh.data=2", "mesh.fsdp=2",
    "warm_start.source=none", "warm_start.steps=2", "warm_start.batch_size=4",
    "steps=3", "checkpoint.every=1", "eval.every=2", "eval.modes=[sampled]",
    "queue.max_staleness=0", "learner.adam_eps=1e-3",
    # Nothing succeeds yet, so it is the entropy that is learned from.
    "algorithm.entropy_coef=0.1", "learner.skip_zero_advantage=false",
)  # fmt: skip
SAME = (
    "groups", "episodes", "reward_mean", "turns_mean", "completion_tokens",
    "sampled_tokens", "tokens", "optimizer_steps", "staleness_max",
)  # fmt: skip
CLOSE = ("loss", "grad_norm", "entropy", "logprob", "sampler_kl")


class Pod:
  """Processes of one run; each has its part of the devices."""

  def __init__(
    self, folder: pathlib.Path, count: int, *arguments: str, environment=None
  ):
    """`environment` has more variables of a process, by its index."""
    folder.mkdir(exist_ok=True)
    address = forced_devices.free_address()
    self.logs = [folder / f"{i}.log" for i in range(count)]
    self.processes = [
        forced_devices.start(
            "-m", "tunix.rl.multi_turn.train",
            *(
                (f"processes.coordinator={address}", f"processes.count={count}",
                 f"processes.index={i}", "processes.heartbeat_s=10",
                 "processes.join_s=120")
                if count > 1 else ()
            ),
            *arguments,
            devices=DEVICES // count, output=log.open("w"),
            environment=(environment or {}).get(i),
        )
        for i, log in enumerate(self.logs)
    ]  # fmt: skip

  def wait(self, seconds=600) -> list[int]:
    due = time.monotonic() + seconds
    try:
      return [p.wait(max(1, due - time.monotonic())) for p in self.processes]
    finally:
      for process in self.processes:
        process.kill()

  def wait_for(self, path: pathlib.Path, seconds=400) -> None:
    """Until something is at `path`."""
    due = time.monotonic() + seconds
    while not path.exists():
      assert time.monotonic() < due, self.said()
      time.sleep(0.1)

  def said(self) -> str:
    return "\n".join(log.read_text()[-3000:] for log in self.logs)


def metrics_of(run: pathlib.Path) -> list[dict]:
  lines = (run / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def check_equal(run: pathlib.Path, one: pathlib.Path) -> None:
  found, want = metrics_of(run), metrics_of(one)
  assert [m["step"] for m in found] == list(range(1, len(want) + 1))
  for got, expected in zip(found, want, strict=True):
    for name in SAME:
      assert got[name] == expected[name], name
    for name in CLOSE:
      assert got[name] == pytest.approx(expected[name], abs=1e-5), name
  ours, theirs = (
    json.loads((r / "summary.json").read_text()) for r in (run, one)
  )
  for key in ("status", "step", "episodes", "groups", "faults"):
    assert ours[key] == theirs[key], key
  for name, of_modes in theirs["eval"].items():
    for key in of_modes.keys() - {"seconds", "seconds_waited"}:
      assert ours["eval"][name][key] == of_modes[key], (name, key)
