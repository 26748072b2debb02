"""A learner, and hosts that only roll out; here threads of one process."""

import asyncio
import concurrent.futures
import dataclasses
import json
import threading
import time

import forced_devices
import numpy as np
import pytest
import queue_groups
import small_runs
import trials
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.commands import rollout
from tunix.rl.multi_turn.core import events
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.environments.gyms import base as gym_base
from tunix.rl.multi_turn.net import http
from tunix.rl.multi_turn.run.rollout_hosts import leases
from tunix.rl.multi_turn.run.rollout_hosts import lending
from tunix.rl.multi_turn.run.rollout_hosts import messages
from tunix.rl.multi_turn.run.rollout_hosts import player as player_lib
from tunix.rl.multi_turn.run.rollout_hosts import remote
from tunix.rl.multi_turn.run.rollout_hosts import server as server_lib

ARGUMENTS = (
    small_runs.NANO, "seed=3", "warm_start.source=none", "steps=2",
    "learner.adam_eps=1e-3", "algorithm.entropy_coef=0.1",
    "learner.skip_zero_advantage=false", "eval.modes=[sampled, greedy]",
    "eval.attempts=2", "eval.episodes_per_task=1",
)  # fmt: skip


class Host:
  """A rollout host in a thread; `terminate` ends it as SIGTERM does."""

  def __init__(self, directory, pool):
    self.host = rollout.RolloutHost(directory, {}, patience_s=120)
    self._loop, self._task = None, None
    self._begun = threading.Event()
    self.ended = pool.submit(self._main)

  def _main(self):
    async def work():
      self._loop = asyncio.get_running_loop()
      self._task = asyncio.current_task()
      self._begun.set()
      await self.host.run()

    asyncio.run(work())

  def terminate(self):
    assert self._begun.wait(20)
    self._loop.call_soon_threadsafe(self._task.cancel)


def same(record, want):
  assert [m["step"] for m in record] == [m["step"] for m in want]
  for got, expected in zip(record, want):
    for name in ("groups", "episodes", "reward_mean", "sampled_tokens"):
      assert got[name] == expected[name], name
    for name in ("loss", "grad_norm", "entropy", "logprob"):
      assert got[name] == pytest.approx(expected[name], abs=1e-5), name
    assert got["staleness_max"] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_with_two_rollout_hosts_equals_one_that_rolls_out_itself(
  tmp_path,
):
  assert small_runs.run_train(tmp_path, "name=own", *ARGUMENTS) == 0
  run = tmp_path / "r"
  with concurrent.futures.ThreadPoolExecutor(3) as pool:
    # One starts before the run, and leaves in the midst of it: its groups are
    # lent again at once. The other sees the learner's address only, not its
    # weights.
    far = tmp_path / "far"
    far.mkdir()
    (far / "rollout.json").symlink_to(run / "rollout.json")
    first, second = Host(run, pool), Host(far, pool)

    def leave():
      file = run / "metrics.jsonl"
      due = time.monotonic() + 300
      while not (file.exists() and file.read_text()):
        if time.monotonic() > due or first.ended.done():
          return
        time.sleep(0.02)
      first.terminate()

    leaver = threading.Thread(target=leave)
    leaver.start()
    status = small_runs.run_train(
      tmp_path, "name=r", "rollout.via=hosts", "rollout.silence_s=900",
      *ARGUMENTS,
    )  # fmt: skip
    leaver.join()
    second.ended.result(60)
    assert (
      first.ended.exception(60) is None
      or first.ended.cancelled()
      or (isinstance(first.ended.exception(), asyncio.CancelledError))
    )
  assert status == 0
  same(*(small_runs.metrics_of(tmp_path / name) for name in ("r", "own")))
  assert second.host.collected > 0
  own, other = (small_runs.summary_of(tmp_path / n) for n in ("r", "own"))
  for key in ("episodes", "groups"):
    assert own[key] == other[key], key
  assert own["eval"] and own["eval"].keys() == other["eval"].keys()
  for name, figures in own["eval"].items():
    want = other["eval"][name]
    # Other seconds, the same episodes with the same weights.
    assert {**figures, "seconds": 0} == {**want, "seconds": 0}, name
  assert not (run / "rollout.json").exists()
  assert list((run / "images").glob("*.png"))


# --- answers to hosts ---------------------------------------------------------


def sent_to_hosts(config):
  settings = lending.settings_of(config)
  return json.loads(json.dumps(settings))


@pytest.mark.parametrize(
  "arguments",
  [
    ("algorithm.advantage=remax", "collect.group_size=1"),
    ("algorithm=ppo", "collect.group_size=1"),
    ("algorithm.advantage=reinforce_pp", "collect.group_size=1"),
    ("sampling.top_p=0.9", "algorithm.importance=tis"),
    ("engine.weights=int8", "algorithm.importance=tis"),
    ("sampling.top_k=5", "algorithm.keep_sampling_mask=true"),
    ("algorithm.kl_coef=0.01", "learner.skip_zero_advantage=false"),
    ("queue.max_staleness=3", "learner.publish_every=2"),
    ("learner.dynamic_sampling=2", "learner.rows=8", "mesh.fsdp=8"),
  ],
)
def test_a_host_takes_every_run_that_the_learner_takes(arguments, tmp_path):
  alone = "collect.group_size=1" in arguments
  config = config_lib.load_config(
    ["rollout.via=hosts", f"collect.min_valid={1 if alone else 2}", *arguments]
  )
  sent = sent_to_hosts(config)
  own = {"mesh.fsdp": "3", "mesh.sequence": "5", "engine.slots": "32"}
  for overrides in ({}, own):
    result = player_lib.config_of(sent, overrides, tmp_path)
    for name in ("algorithm", "sampling", "collect", "agent", "policy"):
      assert getattr(result, name) == getattr(config, name), name
  assert (result.mesh.fsdp, result.mesh.sequence) == (3, 5)
  assert result.engine.slots == 32


def test_settings_of_a_host_that_are_wrong_are_one_line(tmp_path):
  sent = sent_to_hosts(config_lib.load_config([]))
  for key in ("engine.slots.x", "engine.slot", "mesh.fsdp"):
    with pytest.raises(config_lib.ConfigError) as caught:
      player_lib.config_of(sent, {key: "many"}, tmp_path)
    (problem,) = caught.value.problems
    assert key in problem


def test_a_run_with_hosts_is_evaluated_without_them(tmp_path):
  config = config_lib.load_config(
    ["rollout.via=hosts", f"run.dir={tmp_path}", "name=r"]
  )
  run = config.run_dir
  run.mkdir()
  (run / "config.yaml").write_text(config.to_yaml())
  result = config_lib.load_evaluation([f"run={run}"])
  assert result.rollout.via == "in_process"
  with pytest.raises(config_lib.ConfigError, match="an evaluation has none"):
    config_lib.load_evaluation([f"run={run}", "rollout.via=hosts"])


def test_a_lent_group_has_its_samples_and_its_greedy_episode(tmp_path):
  config = config_lib.load_config(
    ["rollout.via=hosts", "algorithm.advantage=remax", f"run.dir={tmp_path}"]
  )
  images = images_lib.ImageStore()
  engine = remote.HostsEngine(config, images, tmp_path)
  events_ = []

  class Observer:
    def on_event(self, event):
      events_.append(event)

  collector = lending.RemoteCollector(
    engine, "sampled", None, None, observers=Observer()
  )
  group, _ = seen_group(images)
  greedy = dataclasses.replace(group.trajectories[0], trajectory_id="greedy")
  group = dataclasses.replace(group, extra=greedy)

  async def lend():
    task = gym_base.Task(task_id="t", instruction="do", family="click-color")
    request = asyncio.ensure_future(collector.collect(task, samples=iter([2])))
    while (lease := engine.book.take("a")) is None:
      await asyncio.sleep(0.01)
    engine.book.finish(lease.number, "a", (group, []))
    return lease, await request

  try:
    lease, arrived = asyncio.run(asyncio.wait_for(lend(), 20))
  finally:
    engine.close()
  assert arrived is group and lease.order["samples"] == [2]
  assert json.dumps(lease.order)
  ended = [e for e in events_ if isinstance(e, events.EpisodeFinished)]
  assert [e.trajectory for e in ended] == [*group, greedy]


# --- leases -------------------------------------------------------------------


class Clock:
  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now


def test_a_silent_host_loses_its_groups_to_others():
  clock = Clock()
  book = leases.LeaseBook(silence_s=10, clock=clock)
  lent = [book.lend({"index": i}) for i in range(3)]
  assert book.take("a") is lent[0] and book.take("b") is lent[1]
  clock.now = 9.0
  assert book.beat("b", [lent[1].number], {"decode_tokens": 5.0}) == []
  clock.now = 11.0
  assert book.beat("b", [lent[1].number], {"decode_tokens": 7.0}) == []
  assert book.hosts() == ["b"]
  assert book.take("b") is lent[0]  # Before the one that no host had.
  # The dead one comes back: its group does not count twice.
  assert book.beat("a", [lent[0].number], {}) == [lent[0].number]
  assert book.finish(lent[0].number, "b", "of b")
  assert not book.finish(lent[0].number, "a", "of a")
  assert lent[0].result.result(0) == "of b"
  assert book.take("a") is lent[2]
  assert book.counts["taken back"] == 1 and book.counts["finished"] == 1
  assert book.stats() == {"decode_tokens": 7.0}


def test_the_first_group_counts_whoever_has_it_now():
  clock = Clock()
  book = leases.LeaseBook(silence_s=10, clock=clock)
  lease = book.lend({})
  book.take("a")
  clock.now = 20.0
  book.beat("b", [], {})  # Hears nothing of a, which then delivers.
  assert book.finish(lease.number, "a", "late and welcome")
  assert book.take("b") is None


def test_a_lease_that_was_lost_on_its_way_is_lent_again():
  clock = Clock()
  book = leases.LeaseBook(silence_s=10, clock=clock)
  lease = book.lend({})
  assert book.take("a") is lease
  for clock.now in (5.0, 9.0):
    book.beat("a", [], {})
    assert book.take("a") is None
  clock.now = 12.0
  book.beat("a", [], {})
  assert book.take("a") is lease


def test_what_is_withdrawn_is_named_to_its_host():
  book = leases.LeaseBook(silence_s=10)
  waiting, lent = book.lend({}), book.lend({})
  book.withdraw(waiting)
  assert book.take("a") is lent
  book.withdraw(lent)
  assert book.beat("a", [lent.number], {}) == [lent.number]
  assert not book.finish(lent.number, "a", None) and book.take("a") is None


# --- messages and the server --------------------------------------------------


def seen_group(images):
  group = queue_groups.group("train-000007", 3)
  (member,) = group.trajectories
  ref = images.put(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
  member.steps = [trajectory_lib.Step(observation={"image": ref})]
  return group, ref


def test_a_group_travels_with_its_screenshots_and_damage_is_refused():
  here, there = images_lib.ImageStore(), images_lib.ImageStore()
  group, ref = seen_group(here)
  data = json.loads(json.dumps(messages.write_group(group, here)))
  assert messages.read_group(data, there).to_json() == group.to_json()
  assert (there.get(ref) == here.get(ref)).all()
  other = messages.write_group(group, here)
  name = next(iter(other["images"]))
  other["images"]["0" * 64] = other["images"].pop(name)
  with pytest.raises(ValueError, match="is another one"):
    messages.read_group(other, images_lib.ImageStore())


def test_the_server_needs_its_token_and_refuses_nonsense_in_a_line(tmp_path):
  book = leases.LeaseBook(silence_s=10)
  images = images_lib.ImageStore()
  server = server_lib.RolloutServer(
    book, images, {"a": 1}, host="127.0.0.1", port=0
  )
  server.start()
  weights = tmp_path / "1.safetensors"
  weights.write_bytes(b"weights")
  before = server.serial
  server.publish(4, weights)
  serial = server.serial
  assert serial > before
  lease = book.lend({"index": 2})
  group, _ = seen_group(images)

  async def ask(method, path, token=None, **request):
    client = http.Http()
    try:
      return await client.call(
        method,
        server.url + path,
        20.0,
        headers={"Authorization": f"Bearer {token or server.token}"},
        **request,
      )
    finally:
      await client.aclose()

  def refused(status, *args, **kwargs):
    with pytest.raises(http.CallError) as caught:
      asyncio.run(ask(*args, **kwargs))
    assert caught.value.status == status
    return str(caught.value)

  try:
    for path in ("/run", f"/weights/{serial}"):
      refused(401, "GET", path, token="guess")
    assert json.loads(asyncio.run(ask("GET", "/run"))) == {"a": 1}
    assert asyncio.run(ask("GET", f"/weights/{serial}")) == b"weights"
    refused(404, "GET", f"/weights/{before}")
    for body in ([], {"host": 3}, {"host": "a"}, {"host": "a", "stats": []}):
      assert "malformed" in refused(400, "POST", "/beat", body=body)
    host = {"host": "a"}
    data = json.loads(asyncio.run(ask("POST", "/lease", body=host)))
    assert data == {"number": lease.number, "order": {"index": 2}}
    path = f"/leases/{lease.number}"
    broken = {**host, "faults": [], "collected": {"images": {}, "group": 1}}
    refused(400, "POST", path, body=broken)
    assert not lease.result.done()  # Nonsense harms no lease.
    result = {
      **host,
      "faults": [["step", "TimeoutError", "slow", "x"]],
      "collected": messages.write_group(group, images),
    }
    assert json.loads(asyncio.run(ask("POST", path, body=result)))["taken"]
    arrived, faults = lease.result.result(5)
    assert arrived.to_json() == group.to_json()
    assert faults == [("step", "TimeoutError", "slow", "x")]
  finally:
    server.close()


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(
  trials.share() < 1, reason="some minutes: make test-all runs it"
)
def test_processes_roll_out_for_a_learner_that_is_killed_and_resumes(tmp_path):
  """One learner with two devices, two hosts with one each; two deaths."""
  run = tmp_path / "r"
  common = (
    *small_runs.SMALL,
    *ARGUMENTS,
    f"run.dir={tmp_path}",
    "mesh.fsdp=2",
    "steps=4",
    "checkpoint.every=1",
  )

  def start(name, devices, *arguments):
    log = (tmp_path / f"{name}.log").open("w")
    return forced_devices.start(*arguments, devices=devices, output=log)

  def wait_for(path):
    due = time.monotonic() + 400
    while not path.exists():
      assert time.monotonic() < due, path
      time.sleep(0.1)

  train = ("-m", "tunix.rl.multi_turn.train")
  own = start("own", 2, *train, *common, "name=own")
  assert own.wait(600) == 0
  hosts = [
    start(f"host{i}", 1, "-m", "tunix.rl.multi_turn.commands.rollout", run)
    for i in range(2)
  ]
  started = [*hosts]
  try:
    learner = start(
      "learner",
      2,
      *train,
      *common,
      "name=r",
      "rollout.via=hosts",
      "rollout.silence_s=5",
    )
    started.append(learner)
    wait_for(run / "checkpoints" / "1")
    hosts[0].kill()
    wait_for(run / "checkpoints" / "2")
    learner.kill()
    learner.wait(20)
    again = start("again", 2, *train, f"resume={run}")
    started.append(again)
    log = tmp_path / "again.log"
    assert again.wait(600) == 0, log.read_text()[-3000:]
    assert hosts[1].wait(60) == 0
    assert "groups were collected here" in (tmp_path / "host1.log").read_text()
  finally:
    for process in started:
      process.kill()
  same(*(small_runs.metrics_of(tmp_path / name) for name in ("r", "own")))


def test_no_learner_is_one_line(tmp_path, capsys):
  assert rollout.main([str(tmp_path), "--patience=0.1"]) == 1
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: no learner for 0.1 s at")
  assert rollout.main([str(tmp_path), "fsdp"]) == 2
  assert "section.key=value" in capsys.readouterr().err
