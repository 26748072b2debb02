"""Several processes that learn, and hosts beside them that roll out."""

import json
import time

import forced_devices
from pods import ARGUMENTS
from pods import check_equal
from pods import metrics_of
from pods import Pod
import pytest
import trials

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
all_of_them = pytest.mark.skipif(
  trials.share() < 1, reason="minutes: make test-all runs it"
)
HOSTS = ("rollout.via=hosts", "rollout.silence_s=5")


class Hosts:
  """Rollout hosts of a run, each a process with a device of its own."""

  def __init__(self, run, count=2):
    self.logs = [run.parent / f"host{i}.log" for i in range(count)]
    self.processes = [
      forced_devices.start(
        "-m",
        "tunix.rl.multi_turn.commands.rollout",
        run,
        "--patience=300",
        devices=1,
        output=log.open("w"),
      )
      for log in self.logs
    ]

  def __enter__(self):
    return self

  def __exit__(self, *exc_info):
    for process in self.processes:
      process.kill()

  def ended(self, index):
    """Waits for a host's end; the groups that it collected."""
    text = lambda: self.logs[index].read_text()[-3000:]
    assert self.processes[index].wait(60) == 0, text()
    line = text().splitlines()[-1]
    assert line.endswith("groups were collected here"), text()
    return int(line.split()[-5])


def test_deaths_of_a_host_and_a_learner_change_nothing(one, tmp_path):
  run = tmp_path / "r"
  with Hosts(run) as hosts:
    pod = Pod(tmp_path, 2, *ARGUMENTS, *HOSTS, f"run.dir={tmp_path}")
    pod.wait_for(run / "checkpoints" / "1")
    addresses = json.loads((run / "rollout.json").read_text())["learners"]
    assert len({address["url"] for address in addresses}) == 2
    hosts.processes[0].kill()
    pod.wait_for(run / "checkpoints" / "2")
    pod.processes[1].kill()
    started = time.monotonic()
    assert pod.wait(120)[0] != 0
    assert time.monotonic() - started < 100
    again = Pod(tmp_path / "again", 2, f"resume={run}")
    assert again.wait() == [0, 0], again.said()
    assert hosts.ended(1) > 0
  check_equal(run, one)
  assert not (run / "rollout.json").exists()
  # Process 0 alone publishes what all have.
  assert not (run / "processes" / "1" / "weights").exists()


@all_of_them
@pytest.mark.parametrize("before, after", [(1, 2), (2, 1)])
def test_hosts_serve_a_run_that_resumes_with_other_learners(
  before, after, one, tmp_path
):
  run = tmp_path / "r"
  with Hosts(run) as hosts:
    pod = Pod(tmp_path, before, *ARGUMENTS, *HOSTS, f"run.dir={tmp_path}")
    pod.wait_for(run / "checkpoints" / "1")
    for process in pod.processes:
      process.kill()
    pod.wait(60)
    again = Pod(tmp_path / "again", after, f"resume={run}")
    assert again.wait() == [0] * after, again.said()
    assert hosts.ended(0) + hosts.ended(1) > 0
  check_equal(run, one)


@all_of_them
def test_hosts_keep_the_bound_of_staleness(tmp_path):
  run = tmp_path / "r"
  with Hosts(run) as hosts:
    pod = Pod(
        tmp_path, 2, *ARGUMENTS, *HOSTS, f"run.dir={tmp_path}",
        "queue.max_staleness=1", "warm_start.steps=0", "eval.every=0",
        "steps=5",
    )  # fmt: skip
    assert pod.wait() == [0, 0], pod.said()
    assert hosts.ended(0) + hosts.ended(1) >= 20
  metrics = metrics_of(run)
  assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5]
  assert all(m["groups"] == 4 for m in metrics)
  assert max(m["staleness_max"] for m in metrics) <= 1
