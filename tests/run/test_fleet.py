"""Collectors in other processes: what keeps them, and what they are lent."""

import ast
import asyncio
import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest
import queue_groups
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.commands import collect
from tunix.rl.multi_turn.config import run_sections
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.run.fleet import collector as collector_lib
from tunix.rl.multi_turn.run.fleet import service
from tunix.rl.multi_turn.run.rollout_hosts import leases
from tunix.rl.multi_turn.run.rollout_hosts import lending
from tunix.rl.multi_turn.run.rollout_hosts import messages
from tunix.rl.multi_turn.run.rollout_hosts import player
from tunix.rl.multi_turn.run.rollout_hosts import server as server_lib

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Clock:
  now = 0.0

  def __call__(self):
    return self.now


# --- who collects is nothing to the learner -----------------------------------


@pytest.mark.slow
def test_one_module_imports_ray():
  collected = set()
  for path in [
    *(ROOT / "tunix").rglob("*.py"),
    *ROOT.glob("tunix_*/*.py"),
    *ROOT.glob("packages/*/*/**/*.py"),
  ]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
      names = []
      if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
      elif isinstance(node, ast.ImportFrom):
        names = [node.module or ""]
      if any(name.split(".")[0] == "ray" for name in names):
        collected.add(path.name)
  assert collected == {"ray_cluster.py"}


def test_a_collector_imports_no_jax_and_no_ray():
  program = (
    "import sys; from tunix_multi_turn import collector_actor as a;"
    "import tunix_multi_turn; tunix_multi_turn.light();"
    "from tunix.rl.multi_turn.commands import collect;"
    "from tunix.rl.multi_turn.environments.gyms.desktop import desktop_gym;"
    "print({'jax', 'flax', 'ray', 'tunix.rl.multi_turn.run.models'}"
    " & set(sys.modules))"
  )
  process = subprocess.run(
    [sys.executable, "-c", program],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert process.stdout.strip() == "set()", process.stderr


def test_without_ray_one_line_names_the_extra(monkeypatch):
  real = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util,
    "find_spec",
    lambda name, *a: None if name == "ray" else real(name, *a),
  )
  with pytest.raises(config_lib.ConfigError) as caught:
    service.RayLauncher(run_sections.FleetConfig(via="ray"), {}, 1.0)
  (problem,) = caught.value.problems
  assert "pip install 'tunix-multi-turn[ray]'" in problem


@pytest.mark.parametrize(
  "arguments, word",
  [
    (("fleet=ray", "rollout.via=hosts"), "rollout.via=hosts"),
    (("fleet=join", "engine.lockstep=true"), "engine.lockstep=true"),
    (("fleet=join", "eval.beside=true", "eval.every=1"), "eval.beside"),
    (
      ("fleet=join", "queue.max_staleness=2", "collect.part_size=2"),
      "collect.part_size=2",
    ),
    (
      ("fleet=join", "queue.max_staleness=1", "queue.admission=finished"),
      "queue.admission=finished",
    ),
    (
      ("fleet=join", "queue.max_staleness=1", "queue.admission=recent"),
      "queue.admission=recent",
    ),
    (("fleet=join", "fleet.address=auto"), "fleet.via=ray"),
    (("fleet=ray", "fleet.address=10.0.0.1"), "host:port"),
    (("fleet=ray", "fleet.address=ray://h:10001"), "rollout.host"),
    (("fleet=ray", "fleet.resources={phone: 0}"), "resources.phone=0"),
    (("fleet=ray", "fleet.collectors=0"), "collectors"),
    (("fleet=cluster",), "local"),
    (
      ("fleet=ray", "sampling.top_k=5", "algorithm.keep_sampling_mask=true"),
      "keep_sampling_mask",
    ),
  ],
)
def test_settings_that_do_not_go_together_are_refused(arguments, word):
  with pytest.raises(config_lib.ConfigError) as caught:
    config_lib.load_config(list(arguments))
  assert any(word in problem for problem in caught.value.problems)


def test_an_evaluation_plays_in_its_own_process(tmp_path):
  config = config_lib.load_config(
    ["fleet=ray", f"run.dir={tmp_path}", "name=r"]
  )
  config.run_dir.mkdir()
  (config.run_dir / "config.yaml").write_text(config.to_yaml())
  result = config_lib.load_evaluation([f"run={config.run_dir}"])
  assert not result.fleet.away
  with pytest.raises(config_lib.ConfigError, match="in its own process"):
    config_lib.load_evaluation([f"run={config.run_dir}", "fleet=join"])


@pytest.mark.parametrize(
  "arguments, episodes",
  [
    (("fleet=ray", "collect.concurrency=64"), 16),
    (("fleet=ray", "collect.concurrency=8", "group_size=6"), 6),
    (("fleet=join", "collect.concurrency=64"), 64),
    (("fleet=join", "fleet.episodes=3"), 3),
  ],
)
def test_episodes_of_a_collector(arguments, episodes):
  config = config_lib.load_config(list(arguments))
  assert service.episodes_of_one(config) == episodes
  assert not config.lockstep


# --- leases that count once ---------------------------------------------------


def test_a_group_of_a_former_holder_is_refused():
  clock = Clock()
  book = leases.LeaseBook(10, clock, exclusive=True)
  lease = book.lend({"index": 0})
  assert book.take("a") is lease and lease.lent == 1
  book.lose("a")
  assert not book.finish(lease.number, "a", "too late")
  assert book.take("b") is lease and lease.lent == 2
  assert not book.finish(lease.number, "a", "too late")
  assert book.finish(lease.number, "b", "in time")
  assert lease.result.result(0) == "in time"
  assert book.finished == {"b": 1} and book.counts["refused"] == 2


def test_a_book_that_failed_fails_what_is_lent_later():
  book = leases.LeaseBook(10)
  first = book.lend({})
  book.fail(RuntimeError("no collectors"))
  for lease in (first, book.lend({})):
    with pytest.raises(RuntimeError, match="no collectors"):
      lease.result.result(0)
  assert book.take("a") is None
  book.withdraw(first)


def test_what_is_lent_again_is_cleaned_first_and_who_leaves_gives_back():
  book = leases.LeaseBook(1000, exclusive=True)
  cleaned = []

  async def relent(lease):
    cleaned.append(lease.number)

  images = images_lib.ImageStore()
  server = server_lib.RolloutServer(
    book,
    images,
    {},
    needs_weights=False,
    relent=relent,
    host="127.0.0.1",
    port=0,
  )
  address = {"url": server.url, "token": server.token}
  group = queue_groups.group("train-000000", 2)

  async def scene():
    first, second = (
      player.Learner(lambda: address, "here", 20.0, n) for n in "ab"
    )
    try:
      lease = book.lend({"index": 0})
      assert (await first.ask("/lease"))["number"] == lease.number
      assert cleaned == []
      assert await first.ask("/beat", leases=[], stats={}, leaving=True) == {}
      assert (await second.ask("/lease"))["number"] == lease.number
      assert cleaned == [lease.number]
      written = messages.write_group(group, images)
      leases_of = {}
      for name, link in (("a", first), ("b", second)):
        leases_of[name] = await link.ask(
          f"/leases/{lease.number}", collected=written, faults=[]
        )
      assert leases_of == {"a": {"taken": False}, "b": {"taken": True}}
      assert lease.result.result(0)[0].to_json() == group.to_json()
    finally:
      await first.aclose()
      await second.aclose()

  server.start()
  try:
    asyncio.run(asyncio.wait_for(scene(), 30))
  finally:
    for name in "ab":
      book.lose(name)
    server.close()


def test_a_run_of_rollout_hosts_takes_no_collectors():
  config = config_lib.load_config(["rollout.via=hosts"])
  server = server_lib.RolloutServer(
    leases.LeaseBook(10),
    images_lib.ImageStore(),
    lending.settings_of(config),
    host="127.0.0.1",
    port=0,
  )
  address = {"url": server.url, "token": server.token, "policy": server.url}
  with server_started(server):
    data = json.loads(
      collector_lib.collect(json.dumps(address), "c", patience_s=5.0)
    )
  assert data["collected"] == 0 and "fleet=join" in data["error"]


class server_started:  # pylint: disable=invalid-name
  """Starts and ends a server."""

  def __init__(self, server):
    self._server = server

  def __enter__(self):
    self._server.start()

  def __exit__(self, *exc_info):
    self._server.close()


# --- the supervisor -----------------------------------------------------------


class Processes:
  """A launcher whose collectors end when the test says so."""

  def __init__(self):
    self.started, self.gone, self.homeless = [], {}, set()

  def start(self, name):
    self.started.append(name)

  def ended(self):
    exits, self.gone = self.gone, {}
    return exits

  def waiting(self):
    return self.homeless

  def room(self):
    return "each claims 4 CPU, and the cluster's 1 nodes have 2 CPU"

  def end(self, name, reason="killed"):
    self.gone[name] = reason


def supervised(**settings):
  clock, processes = Clock(), Processes()
  book = leases.LeaseBook(30, clock, exclusive=True)
  config = run_sections.FleetConfig(via="ray", **settings)
  return (
    service.Supervisor(processes, book, config, clock),
    processes,
    book,
    clock,
  )


def test_pauses_double_until_a_group_is_delivered():
  fleet, processes, book, clock = supervised(
    collectors=1, restarts=100, backoff_s=1.0
  )
  fleet.step()
  pauses = []

  def pause():
    """Ends the newest collector; the time until there is another."""
    count, before = len(processes.started), clock.now
    processes.end(processes.started[-1])
    fleet.step()
    while len(processes.started) == count:
      clock.now += 0.5
      fleet.step()
    pauses.append(clock.now - before)

  for _ in range(8):
    pause()
  assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
  lease = book.lend({})
  assert book.take(processes.started[-1]) is lease
  assert book.finish(lease.number, processes.started[-1], "a group")
  pauses.clear()
  pause()
  pause()
  assert pauses == [1, 1]
  assert len(set(processes.started)) == len(processes.started)


def test_a_dead_collectors_groups_go_to_others_at_once():
  fleet, processes, book, _ = supervised(collectors=2)
  fleet.step()
  first, second = processes.started
  lease = book.lend({})
  assert book.take(first) is lease
  processes.end(first)
  fleet.step()
  assert fleet.running == 1
  assert book.take(second) is lease


def test_one_that_never_delivers_is_given_up_and_all_end_the_run():
  fleet, processes, book, clock = supervised(
    collectors=2, restarts=2, backoff_s=0.5
  )
  lease = book.lend({})
  for _ in range(200):
    fleet.step()
    for name in processes.started:
      if name.startswith("collector-0"):
        processes.end(name, "no display")
    clock.now += 0.5
  assert sum(n.startswith("collector-0") for n in processes.started) == 3
  assert fleet.running == 1 and not lease.result.done()
  for _ in range(200):
    for name in processes.started:
      processes.end(name, "no display")
    fleet.step()
    clock.now += 0.5
  with pytest.raises(service.FleetFailed, match="no display"):
    lease.result.result(0)


def test_collectors_that_joined_keep_a_run_alive():
  fleet, processes, book, clock = supervised(collectors=1, restarts=0)
  book.beat("joined", [], {})
  lease = book.lend({})
  for _ in range(3):
    fleet.step()
    for name in processes.started:
      processes.end(name)
    clock.now += 1.0
  assert not lease.result.done()
  book.lose("joined")
  fleet.step()
  with pytest.raises(service.FleetFailed):
    lease.result.result(0)


def test_a_run_whose_actors_find_no_room_ends_with_what_there_is():
  fleet, processes, book, clock = supervised(collectors=2, place_s=10)
  lease = book.lend({})
  fleet.step()
  processes.homeless = set(processes.started)
  clock.now += 10
  fleet.step()
  assert not lease.result.done()
  clock.now += 1
  fleet.step()
  with pytest.raises(service.FleetFailed) as failed:
    lease.result.result(0)
  text = str(failed.value)
  assert "2 of 2 collectors have waited for a node for fleet.place_s=10" in text
  assert "each claims 4 CPU, and the cluster's 1 nodes have 2 CPU" in text
  assert "fleet.cpus" in text


def test_actors_without_room_are_reported_once_and_others_go_on(caplog):
  fleet, processes, book, clock = supervised(collectors=2, place_s=10)
  fleet.step()
  processes.homeless = {processes.started[1]}
  book.beat(processes.started[0], [], {})
  lease = book.lend({})
  for _ in range(5):
    clock.now += 6
    fleet.step()
  warned = [r for r in caplog.records if "waited for a node" in r.getMessage()]
  assert len(warned) == 1 and "1 of 2" in warned[0].getMessage()
  assert not lease.result.done()


# --- leases that come again ---------------------------------------------------


class Slow(player.GroupPlayer):
  """Plays the second time only; the first takes a while to end."""

  def __init__(self, learner):
    super().__init__(learner)
    self.log, self.begun = [], asyncio.Event()
    self._images = images_lib.ImageStore()

  async def _play(self, order, faults):
    self.log.append("begins")
    if self.begun.is_set():
      return queue_groups.group("train-000000", 2)
    self.begun.set()
    try:
      await asyncio.Event().wait()
    finally:
      await asyncio.sleep(0.3)
      self.log.append("its gyms are closed")

  async def serve(self):
    await self._serve(100)


def test_a_lease_that_is_lent_again_is_begun_when_the_former_play_has_ended():
  book = leases.LeaseBook(1000, exclusive=True)
  server = server_lib.RolloutServer(
    book,
    images_lib.ImageStore(),
    {},
    needs_weights=False,
    host="127.0.0.1",
    port=0,
  )
  address = {"url": server.url, "token": server.token}
  order = {"samples": None, "mode": "train", "group_size": 2}

  async def scene():
    learner = player.Learner(lambda: address, "here", 20.0, "a")
    slow = Slow(learner)
    serving = asyncio.ensure_future(slow.serve())
    lease = book.lend(order)
    await slow.begun.wait()
    book.lose("a")  # It was silent for too long, and comes back.
    group, _ = await asyncio.wrap_future(lease.result)
    assert slow.log == ["begins", "its gyms are closed", "begins"]
    assert group.group_id == "train-000000" and lease.lent == 2
    server.ended = True
    await serving
    await learner.aclose()

  server.start()
  try:
    asyncio.run(asyncio.wait_for(scene(), 30))
  finally:
    book.lose("a")
    server.close()


# --- the command --------------------------------------------------------------


@pytest.mark.parametrize(
  "words, status, word",
  [
    ([], 2, "$TUNIX_FLEET_URL"),
    (["runs/none", "--patience", "0"], 1, "no learner"),
    (["runs/none", "gym.options"], 2, "section.key=value"),
  ],
)
def test_the_command_ends_with_one_line(
  words, status, word, monkeypatch, capsys, tmp_path
):
  monkeypatch.chdir(tmp_path)
  monkeypatch.delenv("TUNIX_FLEET_URL", raising=False)
  assert collect.main(words) == status
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ") and word in line


def test_an_address_of_the_environment(monkeypatch, capsys):
  monkeypatch.setenv("TUNIX_FLEET_URL", "http://127.0.0.1:9/fleet")
  monkeypatch.setenv("TUNIX_FLEET_TOKEN", "t")
  words = ["gym.options={a: 1}", "--patience", "0"]
  assert collect.main(words) == 1
  assert "$TUNIX_FLEET_URL=http://127.0.0.1:9/fleet" in capsys.readouterr().err
