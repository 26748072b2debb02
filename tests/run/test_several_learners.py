"""Players of a run in which several processes learn; no JAX processes here."""

import asyncio
import contextlib
import json
import socket
import threading

from flax import nnx
import jax
import numpy as np
import peer_threads
import pytest
import queue_groups
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.engine import device_state
from tunix.rl.multi_turn.net import peers as peers_lib
from tunix.rl.multi_turn.policy.checkpoints import tensor_files
from tunix.rl.multi_turn.run import models
from tunix.rl.multi_turn.run.multiprocess import processes as processes_lib
from tunix.rl.multi_turn.run.rollout_hosts import leases
from tunix.rl.multi_turn.run.rollout_hosts import lending
from tunix.rl.multi_turn.run.rollout_hosts import player
from tunix.rl.multi_turn.run.rollout_hosts import remote
from tunix.rl.multi_turn.run.rollout_hosts import server as server_lib
from tunix.rl.multi_turn.run.rollout_hosts import weights as weights_lib

ORDER = {"samples": None, "mode": "train", "group_size": 2}


class Player(player.GroupPlayer):
  """Plays a group in no time, or when it may."""

  def __init__(self, directory, learners=2, group_size=2):
    super().__init__(player.Learner.of_directory(directory, 20.0, "a"))
    self._learners += [
      player.Learner.of_directory(directory, 20.0, "a", i)
      for i in range(1, learners)
    ]
    self._config = config_lib.load_config(
      [
        f"collect.group_size={group_size}",
        f"collect.min_valid={group_size}",
        f"learner.rows={group_size}",
      ]
    )
    self._images = images_lib.ImageStore()
    self.may = asyncio.Event()
    self.may.set()
    self.playing = self.most = 0

  def _numbers(self):
    return {"tokens": 7.0}

  async def _play(self, order, faults):
    self.playing += 1
    self.most = max(self.most, self.playing)
    await self.may.wait()
    await asyncio.sleep(0.01)
    self.playing -= 1
    return queue_groups.group(order["name"], 2, 2)

  async def serve(self, most=100):
    await self._serve(most)

  async def aclose(self):
    await self._abandon()
    for learner in self._learners:
      await learner.aclose()


class Learners:
  """Servers as those of processes that learn, each with a book."""

  def __init__(self, directory, count=2):
    self.books = [leases.LeaseBook(1000) for _ in range(count)]
    self.servers = [
      server_lib.RolloutServer(
        book,
        images_lib.ImageStore(),
        {},
        needs_weights=False,
        host="127.0.0.1",
        port=0,
      )
      for book in self.books
    ]
    self.addresses = [{"url": s.url, "token": s.token} for s in self.servers]
    lending.write_address(directory, *self.addresses)

  def lend(self, index, name):
    return self.books[index].lend({**ORDER, "name": name})

  def __enter__(self):
    for server in self.servers:
      server.start()
    return self

  def __exit__(self, *exc_info):
    for book, server in zip(self.books, self.servers):
      book.lose("a")
      server.close()


def play(scene):
  asyncio.run(asyncio.wait_for(scene(), 30))


async def group_of(lease):
  group, _ = await asyncio.wrap_future(lease.result)
  return group.group_id


@contextlib.asynccontextmanager
async def serving(one, most=100):
  task = asyncio.ensure_future(one.serve(most))
  try:
    yield task
  finally:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await one.aclose()


def test_groups_of_every_learner_are_played_and_return_to_their_own(tmp_path):
  with Learners(tmp_path) as learners:

    async def scene():
      one = Player(tmp_path)
      async with serving(one):
        lent = [learners.lend(i % 2, f"{i}") for i in range(8)]
        names = await asyncio.gather(*map(group_of, lent))
        assert names == [f"{i}" for i in range(8)]
        # The latter has nothing to lend any more; the former is asked on.
        for i in range(8, 12):
          assert await group_of(learners.lend(0, f"{i}")) == f"{i}"
        # What one engine did counts once.
        while not learners.books[0].stats():
          await asyncio.sleep(0.01)
        assert [b.stats() for b in learners.books] == [{"tokens": 7.0}, {}]
        assert [b.hosts() for b in learners.books] == [["a"], ["a"]]

    play(scene)
  assert [b.counts["finished"] for b in learners.books] == [8, 4]


def test_no_more_groups_are_borrowed_than_episodes_find_room(tmp_path):
  with Learners(tmp_path, 3) as learners:

    async def scene():
      one = Player(tmp_path, 3)
      one.may.clear()
      async with serving(one, most=4):
        lent = [learners.lend(i % 3, f"{i}") for i in range(9)]
        while one.playing < 2:
          await asyncio.sleep(0.01)
        await asyncio.sleep(1.2)  # Twice what one of several is asked for.
        assert one.playing == 2
        assert sum(b.counts["lent"] for b in learners.books) == 2
        one.may.set()
        await asyncio.gather(*map(group_of, lent))
        assert one.most == 2

    play(scene)


def test_a_learner_that_does_not_answer_holds_up_no_other_s_groups(tmp_path):
  with (
    Learners(tmp_path, 1) as learners,
    socket.create_server(("127.0.0.1", 0)) as silent,
  ):
    url = f"http://127.0.0.1:{silent.getsockname()[1]}"
    lending.write_address(
      tmp_path, *learners.addresses, {"url": url, "token": "x"}
    )

    async def scene():
      one = Player(tmp_path)
      async with serving(one):
        for i in range(4):
          assert await group_of(learners.lend(0, f"{i}")) == f"{i}"

    play(scene)


def test_the_end_of_any_learner_is_the_run_s(tmp_path):
  with Learners(tmp_path) as learners:

    async def scene():
      one = Player(tmp_path)
      async with serving(one) as task:
        assert await group_of(learners.lend(1, "g")) == "g"
        learners.servers[1].ended = True
        await task

    play(scene)


def test_learners_that_are_no_more_are_not_waited_for(tmp_path):
  with Learners(tmp_path) as learners:

    async def scene():
      one = Player(tmp_path)
      async with serving(one) as task:
        assert await group_of(learners.lend(1, "g")) == "g"
        lending.write_address(tmp_path, learners.addresses[0])
        with pytest.raises(player.Moved):
          await task

    play(scene)


# --- the learners' side -------------------------------------------------------


def hosts_config(tmp_path, *arguments):
  return config_lib.load_config(
    ["rollout.via=hosts", "name=r", f"run.dir={tmp_path}", *arguments]
  )


def test_learners_publish_one_file_under_one_number(tmp_path):
  values = np.arange(6, dtype=np.float32)
  engines = {}
  weights = tmp_path / "weights"
  weights.mkdir()
  (weights / "1795000000000000.safetensors").touch()  # Of a killed learner.

  def work(peers):
    engine = remote.HostsEngine(
      hosts_config(tmp_path), images_lib.ImageStore(), tmp_path, peers
    )
    engines[peers.index] = engine
    engine.warm_up()
    serials = [engine.serial]
    for version in (0, 3):
      state = nnx.State({"w": nnx.Param(values + version)})
      assert engine.update_weights(version, state).result(0) == version
      serials.append(engine.serial)
    return serials

  try:
    first, second = peer_threads.run_all(2, work)
    assert first == second and first == sorted(set(first))
    assert {int(p.stem) for p in weights.iterdir()} == set(first[1:])
    data = json.loads((tmp_path / "rollout.json").read_text())
    assert (tmp_path / "rollout.json").stat().st_mode & 0o777 == 0o600
    assert len({a["url"] for a in data["learners"]}) == 2
    assert player.addresses(tmp_path) == data["learners"]
    assert [engines[i].engines for i in range(2)] == [1, 0]
    assert {k: data[k] for k in ("url", "token")} == data["learners"][0]

    async def scene():
      learner = player.Learner.of_directory(tmp_path, 5.0)
      other = player.Learner.of_directory(tmp_path, 5.0, "b", 1)
      beat = dict(leases=[], stats={})
      assert (await learner.ask("/beat", **beat))["serial"] == first[-1]
      assert (await other.ask("/beat", **beat))["serial"] == 0
      raw = await learner.call("GET", f"/weights/{first[-1]}")
      (tmp_path / "got.safetensors").write_bytes(raw)
      await learner.aclose()
      await other.aclose()

    play(scene)
    with tensor_files.opened(tmp_path / "got.safetensors") as tensors:
      np.testing.assert_array_equal(tensors.get_tensor("w"), values + 3)
  finally:
    for engine in engines.values():
      engine.close()
  assert not (tmp_path / "rollout.json").exists()
  assert not list(weights.iterdir())


def test_hosts_of_processes_that_part_wait_for_the_run_to_resume(tmp_path):
  begun = threading.Barrier(2)

  def work(peers):
    engine = remote.HostsEngine(
      hosts_config(tmp_path), images_lib.ImageStore(), tmp_path, peers
    )
    engine.warm_up()
    begun.wait(20)
    if peers.index:
      peers.part(MemoryError("no room"))
    else:
      with pytest.raises(peers_lib.PeerEnded):
        peers.gather("step", 1)
    ended = []
    engine.book.beat("a", [], {})
    engine._server.end = lambda: ended.append(1)
    engine.close()
    return ended

  assert peer_threads.run_all(2, work) == [[], []]
  assert len(player.addresses(tmp_path)) == 2


def test_each_process_has_an_address_of_its_own(tmp_path):
  def check(*arguments):
    def work(peers):
      own = arguments[peers.index]
      processes_lib.check(peers, hosts_config(tmp_path, *own))
      return "ok"

    return peer_threads.run_all(2, work)

  hosts = [f"rollout.host=10.0.0.{i}" for i in range(2)]
  urls = [f"rollout.public_url=http://h{i}" for i in range(2)]
  assert check(*zip(hosts, urls)) == ["ok", "ok"]
  (error, _) = check(("rollout.silence_s=4",), ("rollout.silence_s=5",))
  assert "rollout.silence_s=5.0 (process 0: 4.0)" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["same", "int8"])
def test_an_engine_s_weights_are_those_that_it_would_have_rounded_itself(
  weights, tmp_path
):
  config = hosts_config(
    tmp_path,
    "policy=qwen3_vl_tiny",
    "policy.config.compute_dtype=bfloat16",
    f"engine.weights={weights}",
    "algorithm.importance=tis",
  )
  images = images_lib.ImageStore()
  policy = models.make_policy(config, None, "")
  engine = models.make_engine(config, policy, images, directory=tmp_path)
  try:
    state = nnx.state(policy.model, nnx.Param)
    engine.update_weights(1, state)
    (file,) = (tmp_path / "weights").iterdir()
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    if weights == "same":
      assert file.stat().st_size < 0.6 * size
    with tensor_files.opened(file) as tensors:
      values = {k: tensors.get_tensor(k) for k in tensors.keys()}
  finally:
    engine.close()
  of_host = device_state.DeviceState(
    policy.model,
    policy.processor,
    pages=4,
    page_size=16,
    vision_tokens=64,
    weights=weights,
  )
  sent = of_host.prepare(weights_lib.state_like(policy.model, values))
  for got, want in zip(sent, of_host.prepare(state), strict=True):
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)
