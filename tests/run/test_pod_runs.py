"""One run of several processes, as the command starts them on several hosts."""

import json
import os
import pathlib
import signal
import time

import forced_devices
import pytest
import small_runs
import trials

all_of_them = pytest.mark.skipif(
    trials.share() < 1, reason="two minutes: make test-all runs it"
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
DEVICES = 4
ARGUMENTS = (
    *small_runs.SMALL, small_runs.NANO, "name=r", "seed=3",
    "learner.groups_per_step=4", "learner.rows=4", "mesh.data=2", "mesh.fsdp=2",
    "warm_start.source=none", "warm_start.steps=2", "warm_start.batch_size=4",
    "steps=3", "checkpoint.every=1", "eval.every=2", "eval.modes=[sampled]",
    "queue.max_staleness=0", "learner.adam_eps=1e-3",
    # Nothing succeeds yet, so it is the entropy that is learned from.
    "algorithm.entropy_coef=0.1", "learner.skip_zero_advantage=false",
)  # pyformat: disable
SAME = (
    "groups", "episodes", "reward_mean", "turns_mean", "completion_tokens",
    "sampled_tokens", "tokens", "optimizer_steps", "staleness_max",
)  # pyformat: disable
CLOSE = ("loss", "grad_norm", "entropy", "logprob", "sampler_kl")


class Pod:
  """Processes of one run; each has its part of the devices."""

  def __init__(self, folder: pathlib.Path, count: int, *arguments: str):
    folder.mkdir(exist_ok=True)
    address = forced_devices.free_address()
    self.logs = [folder / f"{i}.log" for i in range(count)]
    self.processes = [
        forced_devices.start(
            "-m", "tunix.rl.multi_turn.train", *arguments,
            *(
                (f"processes.coordinator={address}", f"processes.count={count}",
                 f"processes.index={i}", "processes.heartbeat_s=10",
                 "processes.join_s=120")
                if count > 1 else ()
            ),
            devices=DEVICES // count, output=log.open("w"),
        )
        for i, log in enumerate(self.logs)
    ]  # pyformat: disable

  def wait(self, seconds=600) -> list[int]:
    due = time.monotonic() + seconds
    try:
      return [p.wait(max(1, due - time.monotonic())) for p in self.processes]
    finally:
      for process in self.processes:
        process.kill()

  def said(self) -> str:
    return "\n".join(log.read_text()[-3000:] for log in self.logs)


def metrics_of(run: pathlib.Path) -> list[dict]:
  lines = (run / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
  folder = tmp_path_factory.mktemp("one")
  pod = Pod(folder, 1, *ARGUMENTS, f"run.dir={folder}")
  assert pod.wait() == [0], pod.said()
  return folder / "r"


def check_equal(run: pathlib.Path, one: pathlib.Path) -> None:
  found, want = metrics_of(run), metrics_of(one)
  assert [m["step"] for m in found] == [1, 2, 3]
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
    assert ours["eval"][name] == of_modes, name


@pytest.mark.parametrize("count", (2, 4) if trials.share() == 1 else (2,))
def test_a_pod_s_run_equals_that_of_one_process(count, one, tmp_path):
  pod = Pod(tmp_path, count, *ARGUMENTS, f"run.dir={tmp_path}")
  assert pod.wait() == [0] * count, pod.said()
  run = tmp_path / "r"
  check_equal(run, one)
  for i in range(1, count):
    own = run / "processes" / str(i)
    assert (own / "trajectories.jsonl").stat().st_size
    assert not (own / "metrics.jsonl").exists()
  assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["2", "3"]


@pytest.mark.parametrize("victim", (0, 1) if trials.share() == 1 else (1,))
def test_a_process_that_is_killed_ends_the_others_and_the_run_resumes(
    victim, one, tmp_path
):
  pod = Pod(tmp_path, 2, *ARGUMENTS, f"run.dir={tmp_path}")
  run = tmp_path / "r"
  due = time.monotonic() + 400
  while not (run / "checkpoints" / "1").is_dir():
    assert time.monotonic() < due, pod.said()
    time.sleep(0.1)
  pod.processes[victim].kill()
  started = time.monotonic()
  statuses = pod.wait(120)
  assert statuses[1 - victim] != 0
  assert time.monotonic() - started < 100
  again = Pod(tmp_path / "again", 2, f"resume={run}")
  assert again.wait() == [0, 0], again.said()
  check_equal(run, one)


@all_of_them
def test_one_that_is_asked_to_stop_stops_all_and_the_run_resumes(one, tmp_path):
  pod = Pod(tmp_path, 2, *ARGUMENTS, f"run.dir={tmp_path}")
  run = tmp_path / "r"
  due = time.monotonic() + 400
  while not (run / "checkpoints" / "1").is_dir():
    assert time.monotonic() < due, pod.said()
    time.sleep(0.1)
  os.kill(pod.processes[1].pid, signal.SIGTERM)
  assert pod.wait(300) == [130, 130], pod.said()
  assert "resume with:" in pod.logs[0].read_text()
  again = Pod(tmp_path / "again", 2, f"resume={run}")
  assert again.wait() == [0, 0], again.said()
  check_equal(run, one)


@all_of_them
def test_asynchronous_collection_keeps_the_bound(tmp_path):
  pod = Pod(
      tmp_path, 2, *ARGUMENTS, f"run.dir={tmp_path}", "queue.max_staleness=1",
      "warm_start.steps=0", "eval.every=0",
  )  # pyformat: disable
  assert pod.wait() == [0, 0], pod.said()
  found = metrics_of(tmp_path / "r")
  assert [m["step"] for m in found] == [1, 2, 3]
  assert max(m["staleness_max"] for m in found) <= 1


def test_who_waits_in_vain_is_told_so(tmp_path):
  address = forced_devices.free_address()
  log = tmp_path / "log"
  for index in (0, 1):  # Each is alone.
    process = forced_devices.start(
        "-m", "tunix.rl.multi_turn.train", f"run.dir={tmp_path}",
        f"processes.coordinator={address}", "processes.count=2",
        f"processes.index={index}", "processes.join_s=3",
        devices=1, output=log.open("w"),
    )  # pyformat: disable
    assert process.wait(100) == 2
    (line,) = (l for l in log.read_text().splitlines() if "error" in l)
    assert line.startswith(f"error: processes.coordinator={address}: not all")


def test_what_does_not_fit_together_is_said_in_one_line(tmp_path):
  pod = Pod(
      tmp_path, 2, *ARGUMENTS, f"run.dir={tmp_path}", "mesh.data=1",
      "mesh.fsdp=1",
  )  # pyformat: disable
  assert pod.wait(200) == [2, 2], pod.said()
  for log in pod.logs:
    text = log.read_text()
    assert "2 processes have 4; set mesh.fsdp=4" in text.replace("\n", " ")
    assert "Traceback" not in text


