"""Runs whose episodes other processes play, held to one that plays its own."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest
import small_runs
import trials

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LEARNS = (
    "seed=3", "steps=10", "collect.group_size=8", "learner.groups_per_step=4",
    "learner.rows=8", "engine.slots=16", "collect.concurrency=32",
    "eval.episodes_per_task=5", "eval.modes=[sampled]",
    "report.episodes=100000", "rollout.silence_s=10",
)  # fmt: skip
if trials.share() < 1:  # Enough to join and leave by, not to learn from.
  LEARNS += (
    "steps=8",
    "collect.group_size=4",
    "learner.groups_per_step=2",
    "eval.episodes_per_task=2",
  )


def train(tmp_path, *arguments):
  assert small_runs.run_train(tmp_path, *LEARNS, *arguments) == 0


@pytest.fixture(scope="module", name="own")
def _own(tmp_path_factory):
  """A run that plays its own episodes."""
  folder = tmp_path_factory.mktemp("own")
  train(folder, "name=own")
  return folder / "own"


def episodes_of(run):
  """Every episode of a run by name, without its seconds."""
  collected = {}
  for line in (run / "trajectories.jsonl").read_text().splitlines():
    row = json.loads(line)
    name = row["split"], row.get("mode"), row["version"], row["trajectory_id"]
    if row["split"] == "eval":  # One evaluation after another has them.
      name = *name, row["time"]
    assert name not in collected, f"{name} was played twice"
    collected[name] = [
      row["status"],
      row["reward"],
      row["task"],
      [
        [s[k] for k in ("tokens", "loss_mask", "versions", "turn_ids")]
        for s in row["sequences"]
      ],
      [s["logprobs"] for s in row["sequences"]],
    ]
  return {k: v for k, v in collected.items() if k[0] == "train"}


def same(run, own):
  """The same episodes, each once, and the same curve."""
  episodes, want = episodes_of(run), episodes_of(own)
  assert episodes.keys() == want.keys()
  for name, episode in episodes.items():
    assert episode[:4] == want[name][:4], name
    for result, value in zip(episode[4], want[name][4]):
      assert result == pytest.approx(value, abs=1e-4), name
  for got, expected in zip(*map(small_runs.metrics_of, (run, own))):
    for key in ("step", "groups", "episodes", "reward_mean", "sampled_tokens"):
      assert got[key] == expected[key], key
    for key in ("loss", "grad_norm", "entropy", "logprob"):
      # An update whose groups have no gradient has none of them.
      assert got.get(key) == pytest.approx(expected.get(key), abs=1e-4), key
    assert got["staleness_max"] == 0
  assert any("loss" in line for line in small_runs.metrics_of(own))
  result, value = map(small_runs.summary_of, (run, own))
  for key in ("episodes", "groups"):
    assert result[key] == value[key], key
  for name, evaluation in result["eval"].items():
    other = value["eval"][name]
    assert {**evaluation, "seconds": 0} == {**other, "seconds": 0}, name


class Killer(threading.Thread):
  """Ends a collector again and again, the oldest first."""

  def __init__(self, cluster, every_s):
    super().__init__(daemon=True)
    self._cluster, self._every_s = cluster, every_s
    self.stop = threading.Event()
    self.killed, self.nodes, self.most = [], set(), 0

  def run(self):
    while not self.stop.wait(self._every_s):
      collectors = self._cluster.collectors()
      self.nodes |= {node for _, node in collectors}
      self.most = max(self.most, len(collectors))
      if collectors:
        os.kill(collectors[0][0], signal.SIGKILL)
        self.killed.append(collectors[0][0])


@pytest.mark.skipif(
  trials.share() < 1, reason="some minutes: make test-all runs it"
)
def test_a_fleet_whose_actors_are_killed_learns_as_one_process_does(
  tmp_path, own
):
  pytest.importorskip("ray")
  import ray_clusters  # pylint: disable=g-import-not-at-top

  with ray_clusters.two_nodes() as cluster:
    killer = Killer(cluster, 4.0)
    killer.start()
    train(
      tmp_path,
      "name=r",
      "fleet=ray",
      "fleet.collectors=4",
      "fleet.address=auto",
      "fleet.resources={desk: 1}",
      "fleet.backoff_s=0.5",
    )
    killer.stop.set()
    killer.join(30)
    assert not cluster.collectors()  # They end with the run.
  run = tmp_path / "r"
  same(run, own)
  assert len(set(killer.killed)) >= 3 and killer.most == 4
  assert killer.nodes == {"desks"}  # Where their resource is.
  assert not (run / "rollout.json").exists()
  rates = [m["reward_mean"] for m in small_runs.metrics_of(run)]
  assert sum(rates[5:]) > sum(rates[:5])


def collector(run, tmp_path, name, *arguments):
  environment = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ["PYTHONPATH"])),
  }
  with open(tmp_path / name, "wb") as log:
    return subprocess.Popen(
        [
            sys.executable, "-m", "tunix_multi_turn", "commands.collect",
            str(run), "--episodes", "8", *arguments,
        ],
        env=environment, stdout=log, stderr=log,
    )  # fmt: skip


def test_collectors_join_and_leave_by_hand(tmp_path, own):
  run = tmp_path / "r"
  metrics = run / "metrics.jsonl"
  stopped = threading.Event()
  # One starts before the run.
  members = [collector(run, tmp_path, "first")]

  def after(steps):
    while not stopped.wait(0.05):
      if metrics.exists() and metrics.read_text().count("\n") >= steps:
        return True
    return False

  def come_and_go():
    if after(2):
      members.append(collector(run, tmp_path, "second"))
    if after(4):
      members[0].kill()
      members.append(collector(run, tmp_path, "third"))
    if after(6):
      members[1].terminate()

  thread = threading.Thread(target=come_and_go)
  thread.start()
  try:
    train(tmp_path, "name=r", "fleet=join")
  finally:
    stopped.set()
    thread.join(30)
    first, second, third = [m.wait(60) for m in members]
  same(run, own)
  assert (first, second, third) == (-signal.SIGKILL, 0, 0)
  assert "groups were collected here" in (tmp_path / "third").read_text()


def test_a_fleet_that_cannot_collect_ends_the_run_with_a_line(
  tmp_path, capsys, monkeypatch
):
  pytest.importorskip("ray")
  # The collectors' processes do not find the module, this one does.
  (tmp_path / "only_here.py").write_text("")
  monkeypatch.syspath_prepend(tmp_path)
  status = small_runs.run_train(
      tmp_path, "name=r", "fleet=ray", "fleet.collectors=1",
      "fleet.restarts=1", "fleet.backoff_s=0.1", "steps=1", small_runs.NANO,
      "warm_start.source=none", "run.imports=[only_here]",
  )  # fmt: skip
  assert status == 1
  error = capsys.readouterr().err
  assert "all 1 collectors were given up" in error and "only_here" in error


def test_there_is_no_such_cluster(tmp_path, capsys):
  pytest.importorskip("ray")
  started = time.monotonic()
  status = small_runs.run_train(
    tmp_path,
    "name=r",
    "fleet=ray",
    "fleet.address=127.0.0.1:9",
    "steps=0",
    "rollout.public_url=http://127.0.0.1:8100",
    small_runs.NANO,
    "warm_start.source=none",
  )
  assert status == 2 and time.monotonic() - started < 90
  error = capsys.readouterr().err
  assert "fleet.address='127.0.0.1:9'" in error
  assert not (tmp_path / "r" / "rollout.json").exists()
