"""One run of several processes, as the command starts them on several hosts."""

import http.server
import os
import pathlib
import signal
import threading
import time

import forced_devices
import numpy as np
from pods import ARGUMENTS
from pods import check_equal
from pods import CLOSE
from pods import metrics_of
from pods import Pod
import pytest
from safetensors import numpy
import small_runs
import trials

all_of_them = pytest.mark.skipif(
  trials.share() < 1, reason="two minutes: make test-all runs it"
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ROOT = str(forced_devices.ROOT)
HELPERS = str(forced_devices.ROOT / "tests" / "helpers")
CHILDREN = os.path.join(HELPERS, "children")


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


# test_pod_hosts.py kills process 1 of a run whose hosts play the episodes.
@all_of_them
@pytest.mark.parametrize("victim", (0, 1))
def test_a_process_that_is_killed_ends_the_others_and_the_run_resumes(
  victim, one, tmp_path
):
  pod = Pod(tmp_path, 2, *ARGUMENTS, f"run.dir={tmp_path}")
  run = tmp_path / "r"
  pod.wait_for(run / "checkpoints" / "1")
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
  pod.wait_for(run / "checkpoints" / "1")
  os.kill(pod.processes[1].pid, signal.SIGTERM)
  assert pod.wait(300) == [130, 130], pod.said()
  assert "resume with:" in pod.logs[0].read_text()
  again = Pod(tmp_path / "again", 2, f"resume={run}")
  assert again.wait() == [0, 0], again.said()
  check_equal(run, one)


@all_of_them
def test_asynchronous_collection_keeps_the_bound(tmp_path):
  pod = Pod(
    tmp_path,
    2,
    *ARGUMENTS,
    f"run.dir={tmp_path}",
    "queue.max_staleness=1",
    "warm_start.steps=0",
    "eval.every=0",
  )
  assert pod.wait() == [0, 0], pod.said()
  metrics = metrics_of(tmp_path / "r")
  assert [m["step"] for m in metrics] == [1, 2, 3]
  assert max(m["staleness_max"] for m in metrics) <= 1


def test_who_waits_in_vain_is_told_so(tmp_path):
  address = forced_devices.free_address()
  log = tmp_path / "log"
  for index in (0, 1):  # Each is alone.
    process = forced_devices.start(
      "-m",
      "tunix.rl.multi_turn.train",
      f"run.dir={tmp_path}",
      f"processes.coordinator={address}",
      "processes.count=2",
      f"processes.index={index}",
      "processes.join_s=3",
      devices=1,
      output=log.open("w"),
    )
    assert process.wait(100) == 2
    (line,) = (l for l in log.read_text().splitlines() if "error" in l)
    assert line.startswith(f"error: processes.coordinator={address}: not all")


def test_what_does_not_fit_together_is_said_in_one_line(tmp_path):
  pod = Pod(
    tmp_path, 2, *ARGUMENTS, f"run.dir={tmp_path}", "mesh.data=1", "mesh.fsdp=1"
  )
  assert pod.wait(200) == [2, 2], pod.said()
  for log in pod.logs:
    text = log.read_text()
    assert "2 processes have 4; set mesh.fsdp=4" in text.replace("\n", " ")
    assert "Traceback" not in text


@all_of_them
@pytest.mark.parametrize("before, after", [(2, 1), (1, 2), (4, 2)])
def test_a_run_resumes_with_another_number_of_processes(
  before, after, one, tmp_path
):
  pod = Pod(tmp_path, before, *ARGUMENTS, f"run.dir={tmp_path}", "steps=1")
  assert pod.wait() == [0] * before, pod.said()
  run = tmp_path / "r"
  again = Pod(tmp_path / "again", after, f"resume={run}", "steps=3")
  assert again.wait() == [0] * after, again.said()
  check_equal(run, one)


@all_of_them
def test_an_adapter_over_processes_is_that_of_one(tmp_path):
  arguments = [a for a in ARGUMENTS if a != small_runs.ONE_LAYER] + [
    "policy=qwen3_vl_tiny",
    "policy.lora_rank=4",
    "warm_start.steps=0",
    "eval.every=0",
    "eval.episodes_per_task=1",
    "eval.modes=[greedy]",
  ]
  alone = Pod(
    tmp_path / "one", 1, *arguments, f"run.dir={tmp_path}/one", "steps=2"
  )
  assert alone.wait() == [0], alone.said()
  pod = Pod(tmp_path / "two", 2, *arguments, f"run.dir={tmp_path}", "steps=1")
  assert pod.wait() == [0, 0], pod.said()
  run, one = tmp_path / "r", tmp_path / "one" / "r"
  begun = tensors(run / "policy" / "adapter" / "adapter_model.safetensors")
  again = Pod(tmp_path / "again", 2, f"resume={run}", "steps=2")
  assert again.wait() == [0, 0], again.said()
  for got, expected in zip(metrics_of(run), metrics_of(one), strict=True):
    for name in CLOSE:
      assert got[name] == pytest.approx(expected[name], abs=1e-5), name
  for file in ("adapter/adapter_model.safetensors", "model.safetensors"):
    own, other = (tensors(r / "policy" / file) for r in (run, one))
    assert own.keys() == other.keys()
    for name, value in other.items():
      np.testing.assert_allclose(own[name], value, atol=1e-6, err_msg=name)
  trained = tensors(run / "policy" / "adapter" / "adapter_model.safetensors")
  assert any((trained[name] != begun[name]).any() for name in begun)


def tensors(file: pathlib.Path) -> dict[str, np.ndarray]:
  return {k: v.astype(np.float32) for k, v in numpy.load_file(file).items()}


@all_of_them
@pytest.mark.parametrize("how", ("signal", "metadata"))
def test_a_notice_at_any_host_saves_on_all(how, one, tmp_path):
  notice = threading.Event()

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):  # pylint: disable=invalid-name
      self.send_response(200)
      self.end_headers()
      preempted = notice.is_set() and self.path.endswith("/preempted")
      self.wfile.write(b"TRUE" if preempted else b"FALSE")

    def log_message(self, *_):
      pass

  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host = f"127.0.0.1:{server.server_address[1]}"
    pod = Pod(
      tmp_path,
      2,
      *ARGUMENTS,
      f"run.dir={tmp_path}",
      environment={1: {"GCE_METADATA_HOST": host}},
    )
    run = tmp_path / "r"
    pod.wait_for(run / "checkpoints" / "1")
    if how == "signal":
      os.kill(pod.processes[1].pid, signal.SIGUSR1)
      time.sleep(0.5)
      os.kill(pod.processes[1].pid, signal.SIGTERM)  # As SLURM does next.
    else:
      notice.set()
    # Nothing is stopped that has ended before.
    assert set(pod.wait(300)) <= {130, 0}, pod.said()
    server.shutdown()
  again = Pod(tmp_path / "again", 2, f"resume={run}")
  assert again.wait() == [0, 0], again.said()
  check_equal(run, one)


@all_of_them
def test_a_host_that_sleeps_changes_nothing(one, tmp_path):
  pod = Pod(
    tmp_path, 2, *ARGUMENTS, f"run.dir={tmp_path}", "processes.heartbeat_s=100"
  )
  run = tmp_path / "r"
  pod.wait_for(run / "checkpoints" / "1")
  os.kill(pod.processes[1].pid, signal.SIGSTOP)
  time.sleep(30)
  os.kill(pod.processes[1].pid, signal.SIGCONT)
  assert pod.wait(300) == [0, 0], pod.said()
  check_equal(run, one)


@all_of_them
def test_stuck_gyms_of_a_host_leave_the_updates_to_the_others(tmp_path):
  stuck = tmp_path / "stuck"
  pod = Pod(
      tmp_path, 2, *ARGUMENTS, f"run.dir={tmp_path}", "eval.every=0", "steps=6",
      "run.imports=[pod_faults]", "processes.share_s=4", "checkpoint.keep=9",
      environment={
          i: {"PYTHONPATH": os.pathsep.join((HELPERS, ROOT, CHILDREN)),
              **({"POD_FAULT": "gym", "POD_STUCK": str(stuck)} if i else {})}
          for i in range(2)
      },
  )  # fmt: skip
  checkpoints = tmp_path / "r" / "checkpoints"
  pod.wait_for(checkpoints / "1")
  stuck.touch()
  pod.wait_for(checkpoints / "4")
  stuck.unlink()
  assert pod.wait(300) == [0, 0], pod.said()
  metrics = metrics_of(tmp_path / "r")
  assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5, 6]
  assert all(m["groups"] == 4 for m in metrics)
  assert max(m["dealt_groups"] for m in metrics) == 2


@all_of_them
@pytest.mark.parametrize("victim", (0, 1))
def test_who_fails_in_an_update_ends_the_others_at_once(victim, tmp_path):
  pod = Pod(
      tmp_path, 2, *ARGUMENTS, f"run.dir={tmp_path}",
      "run.imports=[pod_faults]", "processes.heartbeat_s=100",
      "warm_start.steps=0", "eval.episodes_per_task=1",
      environment={
          i: {"PYTHONPATH": os.pathsep.join((HELPERS, ROOT, CHILDREN)),
              **({"POD_FAULT": "update"} if i == victim else {})}
          for i in range(2)
      },
  )  # fmt: skip
  run = tmp_path / "r"
  pod.wait_for(run / "checkpoints" / "1")
  started = time.monotonic()
  assert pod.wait(90) == [1, 1], pod.said()
  assert time.monotonic() - started < 60  # Not the heartbeat's 100 s.
  reason = f"error: process {victim} failed: MemoryError: RESOURCE_EXHAUSTED"
  assert reason in pod.logs[1 - victim].read_text()


COUNTED_GYM = """
import os

import numpy as np
from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments.gyms import base


class Gym:

  def start(self, task):
    with open(os.environ["STARTS"], "a") as file:
      file.write(f"{os.getpid()}\\n")
    raise RuntimeError("no screen")

  def close(self):
    pass


class Tasks:

  def train_task(self, family, index, seed):
    return base.Task(f"{family}/{index}", family, "Click.")

  eval_task = train_task


SPEC = gyms.GymSpec(make=Gym, tasks=Tasks)
"""


def test_a_gym_of_the_user_s_is_tried_by_the_first_process_only(tmp_path):
  (tmp_path / "counted_gym.py").write_text(COUNTED_GYM)
  own = {
    "STARTS": str(tmp_path / "starts"),
    "PYTHONPATH": os.pathsep.join([ROOT, HELPERS, CHILDREN, str(tmp_path)]),
  }
  pod = Pod(
    tmp_path / "pod",
    2,
    *ARGUMENTS,
    f"run.dir={tmp_path}",
    "gym=counted_gym:SPEC",
    "tasks=[t]",
    "warm_start.steps=0",
    environment={0: own, 1: own},
  )
  assert all(pod.wait())
  assert "no screen" in pod.logs[0].read_text()
  starts = (tmp_path / "starts").read_text().split()
  assert starts == [str(pod.processes[0].pid)], pod.said()
