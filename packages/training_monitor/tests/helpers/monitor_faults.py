"""The monitor on a machine that fails: its disk, its room, its clock.

Each scenario runs in a process of its own, with `system_faults.c` loaded
before everything else, and prints what it found as JSON:

    python monitor_faults.py <scenario> <folder> [key=value ...]

A disk fails at the n-th sync, for every n: once as a failure that passes, and
once as one in which the machine dies, too, and the next process continues from
the bytes on the disk.
"""

import collections
import ctypes
import functools
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time

import fresh_interpreter

LIBRARY = "MONITOR_FAULTS"
BATCHES = 4
DAY = 86400


class NoCompiler(Exception):
  """There is no C compiler here."""


def build(folder) -> pathlib.Path:
  """The library. Raises `NoCompiler`."""
  compiler = shutil.which("cc") or shutil.which("gcc")
  if compiler is None or sys.platform != "linux":
    raise NoCompiler("no C compiler (Debian: apt-get install gcc libc6-dev)")
  out = pathlib.Path(folder) / "system_faults.so"
  source = pathlib.Path(__file__).with_name("system_faults.c")
  result = subprocess.run(
    [compiler, "-shared", "-fPIC", "-O1", "-o", str(out), str(source), "-ldl"],
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  if result.returncode:
    raise NoCompiler(f"the C compiler cannot: {result.stderr[-300:]}")
  return out


def run(library, scenario, folder, timeout_s=240, **options) -> dict:
  """Runs a scenario; returns its result."""
  program = (
    "import runpy, sys\n"
    f"sys.path[:0] = {[p for p in sys.path if p.endswith('helpers')]!r}\n"
    f"runpy.run_path({__file__!r}, run_name='__main__')\n"
  )
  result = fresh_interpreter.run(
    program,
    scenario,
    folder,
    *(f"{k}={v}" for k, v in options.items()),
    timeout=timeout_s,
    env={**os.environ, LIBRARY: str(library)},
    preload=str(library),
  )
  assert result.returncode == 0, result.stderr[-3000:]
  return json.loads(result.stdout.splitlines()[-1])


def _faults():
  """The library that is loaded already."""
  library = ctypes.CDLL(os.environ[LIBRARY])
  library.fault_path.argtypes = [ctypes.c_char_p]
  library.fault_sync.argtypes = [ctypes.c_long, ctypes.c_long]
  library.fault_syncs.restype = ctypes.c_long
  library.fault_clock.argtypes = [ctypes.c_longlong]
  return library


# --- the database ----------------------------------------------------------


def check(path, names, turns=2) -> list[str]:
  """Lists the faults of a database that should hold the episodes once."""
  db = sqlite3.connect(path)
  wrong = []
  if db.execute("PRAGMA integrity_check").fetchall() != [("ok",)]:
    wrong.append("integrity")
  if db.execute("PRAGMA foreign_key_check").fetchall():
    wrong.append("foreign keys")
  stored = [r[0] for r in db.execute("SELECT rollout_id FROM rollout")]
  if sorted(stored) != sorted(names):
    wrong.append(f"rollouts {sorted(stored)} are not {sorted(names)}")
  for table in ("turn", "action", "obs"):
    count = db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    if count != turns * len(names):
      wrong.append(f"{count} rows of {table}")
  history = db.execute(
    "SELECT entity_id, count(*) FROM status_history WHERE entity_type ="
    " 'rollout' GROUP BY 1 HAVING count(*) != 1"
  ).fetchall()
  if history:
    wrong.append(f"histories {history}")
  db.close()
  return wrong


# --- the server's database ----------------------------------------------------


def _bodies(count=BATCHES):
  import monitor_server  # pylint: disable=g-import-not-at-top

  names = [f"r{n}" for n in range(count)]
  bodies = []
  for n, name in enumerate(names):
    body = monitor_server.episode(name, status="completed")
    if not n:
      body = monitor_server.joined(monitor_server.base(), body)
    body["delivery"] = {"spool": "x", "first": n + 1, "last": n + 1}
    bodies.append(json.dumps(body).encode())
  return names, bodies


class _Server:
  """The part of a server that writes, on a copy of an empty database."""

  def __init__(self, path):
    from training_monitor.schema import database  # pylint: disable=g-import-not-at-top
    from training_monitor.server import access  # pylint: disable=g-import-not-at-top
    from training_monitor.server import errors  # pylint: disable=g-import-not-at-top
    from training_monitor.server import writer  # pylint: disable=g-import-not-at-top
    from training_monitor.server.batches import items  # pylint: disable=g-import-not-at-top

    self._read, self._error = items.read, errors.ApiError
    self.engine = database.connect(path)
    database.upgrade(self.engine)
    with database.writing(self.engine) as connection:
      self.project = access.project_id(connection, "default")
    self.writer = writer.Writer(self.engine)

  def post(self, body) -> bool:
    """Whether it was acknowledged; only a 503 is no surprise."""
    try:
      self.writer.submit(self._read(body), self.project).result(30)
    except self._error as error:
      if error.status == 409 and "applied_to" in error.extra:
        return True
      assert error.status == 503, error
      return False
    return True

  def close(self):
    self.writer.close()
    self.engine.dispose()


def _copy(path, folder):
  """Copies the files that a machine would have after dying now."""
  folder.mkdir(parents=True)
  for suffix in ("", "-wal"):  # The shared memory does not survive.
    source = path.with_name(path.name + suffix)
    if source.exists():
      shutil.copy(source, folder / source.name)
  return folder / path.name


def sync_server(folder, times=1) -> dict:
  """Every sync of the server's database fails, each in its turn."""
  faults = _faults()
  names, bodies = _bodies()
  template = folder / "template" / "m.db"
  template.parent.mkdir(parents=True)
  _Server(template).close()
  wrong, failures, at = [], 0, 0
  while True:
    at += 1
    here = folder / f"{at}"
    path = _copy(template, here)
    faults.fault_path(b"/m.db")
    faults.fault_sync(at, times)
    crashed = None
    server = None
    while server is None:
      try:
        server = _Server(path)
      except Exception:  # pylint: disable=broad-except
        failures += 1  # A server that does not start is started again.
    acknowledged = []
    for name, body in zip(names, bodies):
      while not server.post(body):
        failures += 1
        if crashed is None:
          crashed = _copy(path, here / "crashed"), list(acknowledged)
      acknowledged.append(name)
    server.close()
    syncs = faults.fault_syncs()
    faults.fault_sync(0, 0)
    wrong += [f"sync {at}: {w}" for w in check(path, names)]
    if crashed is not None:
      path, there = crashed
      db = sqlite3.connect(path)
      stored = {r[0] for r in db.execute("SELECT rollout_id FROM rollout")}
      db.close()
      if not stored >= set(there):
        wrong.append(f"sync {at}, crash: {set(there) - stored} lost")
      server = _Server(path)
      for body in bodies:  # The client knows no better.
        assert server.post(body)
      server.close()
      wrong += [f"sync {at}, crash: {w}" for w in check(path, names)]
    shutil.rmtree(here)
    if at > syncs:
      return {"wrong": wrong, "syncs": at - 1, "failures": failures}


# --- the client's spool -------------------------------------------------------


def sync_spool(folder, times=1) -> dict:
  """Every sync of a spool fails, each in its turn."""
  import msgpack  # pylint: disable=g-import-not-at-top
  from training_monitor.client import spool as spool_lib  # pylint: disable=g-import-not-at-top
  from training_monitor.client import spool_reader  # pylint: disable=g-import-not-at-top

  faults = _faults()
  bodies = [b"%d" % n * 100 for n in range(6)]
  spool_lib._MOST_SEGMENT = 300  # pylint: disable=protected-access
  spool_lib._LEAST_SEGMENT = 300  # pylint: disable=protected-access
  wrong, failures, at = [], 0, 0
  crashed, appended = None, []

  def insist(call):
    nonlocal failures, crashed
    while True:
      try:
        return call()
      except OSError:
        failures += 1
        if crashed is None and appended:
          crashed = here / "crashed" / "x.spool", list(appended)
          shutil.copytree(path, crashed[0])

  def reader_of(spool):
    return spool_reader.SpoolReader(
      spool.path,
      spool.header,
      ended=lambda: False,
      counters=counters,
      complain=lambda what, message: None,
    )

  def bodies_of(reader):
    return [entry.body for entry in insist(lambda: reader.entries(1 << 20))]

  while True:
    at += 1
    here = folder / f"{at}"
    path = here / "x.spool"
    faults.fault_path(b"x.spool")
    faults.fault_sync(at, times)
    crashed, appended = None, []
    counters = collections.Counter()
    spool = insist(functools.partial(spool_lib.Spool, path, "http://x"))
    for n, body in enumerate(bodies):
      insist(functools.partial(spool.keep_image, f"{n:064d}", body))
      record = msgpack.packb([[f"{n:064d}"], body])
      insist(functools.partial(spool.append, [(spool_lib.PART, record)]))
      insist(spool.sync)
      appended.append(body)
    # Two are delivered; the rest waits for another process.
    reader = reader_of(spool)
    if bodies_of(reader) != bodies:
      wrong.append(f"sync {at}: not everything is read")
    insist(functools.partial(reader.remove_through, 2))
    failures += counters["spool_failures"]
    reader.close()
    syncs = faults.fault_syncs()
    faults.fault_sync(0, 0)
    again = reader_of(spool)
    stored = bodies_of(again)
    if stored != bodies[2:]:
      wrong.append(f"sync {at}: {stored}")
    if len(spool_lib.images(path)) != len(bodies):
      wrong.append(f"sync {at}: not all images")
    again.close()
    spool.close()
    if crashed is not None:
      path, there = crashed
      after = spool_lib.Spool(path, "http://x")
      stored = bodies_of(reader_of(after))
      # The kept records are present once; a failed one may follow them.
      if len(set(stored)) != len(stored) or (
        stored[: len(there)] != there and stored != bodies[2:]
      ):
        wrong.append(f"sync {at}, crash: {stored} for {there}")
      after.close()
    shutil.rmtree(here)
    if at > syncs:
      return {"wrong": wrong, "syncs": at - 1, "failures": failures}


# --- no room ------------------------------------------------------------------


def full(folder, rounds=2) -> dict:
  """A disk that is full for a while, under server and client."""
  import monitor_server  # pylint: disable=g-import-not-at-top
  from training_monitor.client import ingest_client  # pylint: disable=g-import-not-at-top

  signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
  names, refused = [], 0
  with monitor_server.sqlite_server(folder / "server") as server:
    with ingest_client.IngestClient(
      server.url, spool_dir=folder / "spool", timeout_seconds=10
    ) as client:
      client.sender.put(monitor_server.base())
      assert client.drain(30)
      for round_ in range(rounds):
        # Everything that the process writes: WAL, spool, screenshots.
        room = 40_000 + 30_000 * round_
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, unlimited[1]))
        sha, image = monitor_server.screenshot(round_, (300, 200))
        reply = server.http.put(f"/api/v1/screenshots/{sha}", content=image)
        refused += reply.status_code == 503
        names += _put_long(client, round_, 12)
        time.sleep(1.0)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert client.drain(60), client.sender.health()
        reply = server.http.put(f"/api/v1/screenshots/{sha}", content=image)
        assert reply.status_code == 200, reply.text
      counters = dict(client.sender.counters)
    failed = server.app.writer.failures
  partial = [p.name for p in (folder / "server").rglob("*.part")]
  wrong = check(folder / "server" / "m.db", names)
  if partial:
    wrong.append(f"{partial} left behind")
  wrong += _losses(counters)
  return {
    "wrong": wrong,
    "refused": refused,
    "failed_commits": failed,
    "spool_failures": counters.get("spool_failures", 0),
  }


def _put_long(client, round_, count):
  """Sends episodes of 20 kB; returns their names."""
  import monitor_server  # pylint: disable=g-import-not-at-top

  names = [f"r{round_}-{n}" for n in range(count)]
  for name in names:
    client.sender.put(
      monitor_server.episode(
        name, status="completed", status_message="x" * 20_000
      )
    )
  return names


def _losses(counters):
  """Names each counter of a client that has lost something."""
  kinds = ("dead_letters", "dropped_disk", "dropped_memory", "failed")
  return [f"{kind}: {counters[kind]}" for kind in kinds if counters.get(kind)]


def full_for_real(folder, rounds=2) -> dict:
  """`folder` is a file system of its own, and another program fills it."""
  import monitor_server  # pylint: disable=g-import-not-at-top
  from training_monitor.client import ingest_client  # pylint: disable=g-import-not-at-top

  names, stuck = [], 0
  with monitor_server.sqlite_server(folder / "server") as server:
    with ingest_client.IngestClient(
      server.url, spool_dir=folder / "spool", timeout_seconds=10
    ) as client:
      client.sender.put(monitor_server.base())
      assert client.drain(30)
      for round_ in range(rounds):
        with open(folder / "filler", "wb", buffering=0) as filler:
          try:
            while filler.write(bytes(4096)):
              pass
          except OSError:
            pass
        names += _put_long(client, round_, 4)
        time.sleep(1.0)
        stuck += not client.flush(0.1)
        (folder / "filler").unlink()
        assert client.drain(60), client.sender.health()
      counters = dict(client.sender.counters)
  wrong = check(folder / "server" / "m.db", names)
  wrong += _losses(counters)
  return {"wrong": wrong, "rounds": rounds, "stuck": stuck}


# --- a clock that jumps -------------------------------------------------------


def clock(folder, episodes=12, seed=0) -> dict:
  """A run under a wall clock that jumps by a day, either way."""
  import monitor_server  # pylint: disable=g-import-not-at-top
  import observed_run  # pylint: disable=g-import-not-at-top
  import synthetic_run  # pylint: disable=g-import-not-at-top
  from training_monitor.core import events  # pylint: disable=g-import-not-at-top
  from training_monitor.core import images as images_lib  # pylint: disable=g-import-not-at-top

  faults, chance = _faults(), random.Random(seed)
  store, wrong, logged = images_lib.ImageStore(), [], []
  before = time.time()
  faults.fault_clock(DAY)
  if not DAY - 60 < time.time() - before < DAY + 60:
    return {"wrong": ["the clock does not jump"]}
  with monitor_server.sqlite_server(folder / "server") as server:
    log = observed_run.observed(
      server, folder / "spool", store, total_steps=episodes
    )

    def tell(event, *args, **fields):
      faults.fault_clock(chance.choice((-DAY, 0, DAY)))
      log.on_event(event(*args, time=time.time(), **fields))

    tell(events.RunStarted, "run", {})
    for n in range(1, episodes + 1):
      name = f"train-{n:06d}.0"
      episode = synthetic_run.episode(store, seed=n, turns=2)
      episode.trajectory_id = name
      common = dict(group_id=name[:-2], task_id="t", split="train")
      tell(events.EpisodeStarted, trajectory_id=name, **common)
      for turn in range(2):
        tell(events.TurnFinished, name, turn, {"model": 0.01})
      tell(events.EpisodeFinished, episode, **common)
      tell(events.WeightsPublished, n, 0.1)
      tell(events.StepFinished, n, n, {"loss": 0.1})
      tell(events.Progress, "collecting", n, None)
      logged.append(f"collecting: {n}")
      assert log.drain(60)
      message = server.rows("training")[0]["status_message"]
      # Every second one a second at most: the step's own is as good.
      if message not in (logged[-1], f"step {n}"):
        wrong.append(f"the message is {message}")
    tell(events.RunFinished, "completed")
    if not log.close():
      wrong.append("it was not closed in time")
    faults.fault_clock(0)
    messages = {r["status_message"] for r in server.rows("training")}
    if messages != {"completed"}:
      wrong.append(f"messages {messages}")
    history = [
      r["new_status"]
      for r in server.rows("status_history")
      if r["entity_type"] == "training"
    ]
    if history != ["initializing", "running", "completed"]:
      wrong.append(f"history {history}")
    if [s["step"] for s in server.rows("step")] != [*range(1, episodes + 1)]:
      wrong.append("the steps are others")
    rollouts = server.rows("rollout")
    if len(rollouts) != episodes:
      wrong.append(f"{len(rollouts)} rollouts")
    for row in rollouts:
      times = [
        row[k]
        for k in ("start_time", "task_start_time", "task_end_time", "end_time")
        if row[k]
      ]
      if times != sorted(times) or row["rollout_time"] < 0:
        wrong.append(f"times of {row['rollout_id']}: {times}")
    changes = server.rows("monitor_change")
    if [c["id"] for c in changes] != sorted(c["id"] for c in changes):
      wrong.append("changes are out of order")
  return {"wrong": wrong, "episodes": episodes}


def main() -> int:
  scenario, folder = sys.argv[1], pathlib.Path(sys.argv[2])
  options = {k: int(v) for k, _, v in (a.partition("=") for a in sys.argv[3:])}
  folder.mkdir(parents=True, exist_ok=True)
  call = {
    "sync_server": sync_server,
    "sync_spool": sync_spool,
    "full": full,
    "full_for_real": full_for_real,
    "clock": clock,
  }[scenario]
  print(json.dumps(call(folder, **options)))
  return 0


if __name__ == "__main__":
  sys.exit(main())
