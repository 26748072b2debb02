"""kill -9 under load, and whether anything acknowledged is gone or twice."""

import collections
import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import random
import signal
import threading
import time
import unittest.mock

import monitor_databases
import monitor_server
import nursery
import observed_run
from trainer_core import images as images_lib
from training_monitor.client import event_log
from training_monitor.client import ingest_client
from training_monitor.client import spool as spool_lib
from training_monitor.schema import database as database_lib

TURNS = 3
SEGMENT = 20_000
"""Bytes of a segment of a run's log here, so that there are many."""


@dataclasses.dataclass
class Outcome:
  """Result of a soak."""

  kills: int
  acknowledged: int
  stored: int
  lost: list[str]
  repeated: list[str]
  partial: list[str]
  integrity: str

  @property
  def clean(self) -> bool:
    return not (self.lost or self.repeated or self.partial) and (
      self.integrity == "ok"
    )


def inspect(target, acknowledged, kills, observations=TURNS) -> Outcome:
  """Compares a database with what was acknowledged.

  Args:
    target: the database.
    acknowledged: names of rollouts.
    kills: how many there were.
    observations: Number of observations of a rollout.
  """
  engine = database_lib.connect(target)
  with database_lib.reading(engine) as db:
    outcome = _inspect(db, acknowledged, kills, observations)
  engine.dispose()
  return outcome


def _inspect(db, acknowledged, kills, observations) -> Outcome:
  ask = lambda query: {name: count for name, count in db.exec_driver_sql(query)}
  counts = ask(
    "SELECT rollout_id, count(*) FROM rollout WHERE status = 'completed'"
    " GROUP BY 1"
  )
  query_of = "SELECT r.rollout_id, count(*) FROM rollout r JOIN {} GROUP BY 1"
  partial, repeated = [], [n for n, c in counts.items() if c > 1]
  turn = "turn t ON t.rollout_id = r.id"
  for joined, each in (
    (turn, TURNS),
    (f"{turn} JOIN action a ON a.turn_id = t.id", TURNS),
    (f"{turn} JOIN obs o ON o.turn_id = t.id", observations),
  ):
    by_name = ask(query_of.format(joined))
    partial += [n for n in counts if by_name.get(n, 0) < each]
    repeated += [n for n in counts if by_name.get(n, 0) > each]
  # Of a rollout's statuses each is entered once.
  repeated += ask(
    "SELECT entity_id, count(*) FROM status_history WHERE entity_type ="
    " 'rollout' GROUP BY entity_id, new_status HAVING count(*) > 1"
  )
  integrity = "ok"  # PostgreSQL keeps its own.
  if db.dialect.name == "sqlite":
    integrity = db.exec_driver_sql("PRAGMA integrity_check").scalar()
    if db.exec_driver_sql("PRAGMA foreign_key_check").fetchall():
      integrity = "foreign keys do not hold"
  lost = [n for n in acknowledged if n not in counts]
  return Outcome(
    kills, len(acknowledged), len(counts), lost, repeated, partial, integrity
  )


# --- the server -------------------------------------------------------------

SERVER = """
import logging
logging.disable()  # It is all trouble, and meant.
from training_monitor import serve
def run(given):
  serve.main(["serve", "--database", given[0], "--files", given[1], "--port",
              given[2]])
"""


def kill_server(folder, kills, seed=0, target=None) -> Outcome:
  """A server that dies again and again under two kinds of clients.

  Args:
    folder: Folder of every file.
    kills: how often.
    seed: Seed of the times of the kills.
    target: its database; None is a SQLite file in the folder.
  """
  folder = pathlib.Path(folder)
  chance = random.Random(seed)
  database, port = target or folder / "m.db", nursery.free_port()
  with nursery.Nursery(SERVER) as server:
    serve = (database, folder / "files", port)
    server.start(*serve)
    with _load(folder, port) as acknowledged:
      for _ in range(kills):
        _more(acknowledged, server=None)
        time.sleep(chance.uniform(0.0, 0.5))
        server.end()
        server.start(*serve)
    server.end(signal.SIGTERM)
  return inspect(database, acknowledged, kills)


def kill_postgres(folder, kills, postgres, how, seed=0) -> Outcome:
  """A PostgreSQL that dies again and again under a server that must not.

  Args:
    folder: Folder of every file.
    kills: how often.
    postgres: a `monitor_databases.Postgres`, durable.
    how: "backend": SIGKILL to one of the processes that serve the monitor,
      which makes PostgreSQL recover as from a crash; "immediate": all of it
      is stopped so, and started again.
    seed: Seed of the times of the kills.
  """
  folder = pathlib.Path(folder)
  chance = random.Random(seed)
  database = monitor_databases.empty_database(postgres)
  port = nursery.free_port()
  name = database.partition("@/")[2].partition("?")[0]
  with nursery.Nursery(SERVER) as server:
    server.start(database, folder / "files", port)
    with _load(folder, port) as acknowledged:
      for _ in range(kills):
        _more(acknowledged, server)
        time.sleep(chance.uniform(0.0, 0.5))
        if how == "immediate":
          postgres.stop("immediate")
          postgres.start()
        else:
          while not (backends := postgres.backends(name)):
            time.sleep(0.01)
          with contextlib.suppress(ProcessLookupError):
            os.kill(chance.choice(backends), signal.SIGKILL)
          postgres.wait()
      _more(acknowledged, server)
    server.end(signal.SIGTERM)
  return inspect(database, acknowledged, kills)


def _more(acknowledged, server, seconds=120.0) -> None:
  """Waits until something more is acknowledged: it works again."""
  before, deadline = len(acknowledged), time.monotonic() + seconds
  while len(acknowledged) == before:
    assert server is None or server.alive, "the monitor's server has died"
    assert time.monotonic() < deadline, "nothing is acknowledged any more"
    time.sleep(0.01)


@contextlib.contextmanager
def _load(folder, port):
  """Runs two kinds of clients; yields the growing list of acknowledged names.
  At the end every acknowledged item is delivered."""
  acknowledged: list[str] = []
  finished = threading.Event()

  def plain(number):
    """Posts until answered, as any program would."""
    count = 0
    while not finished.is_set():
      name = f"plain-{number}-{count}"
      body = json.dumps(monitor_server.episode(name, TURNS, status="completed"))
      try:
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        line.request("POST", "/api/ingest/batch", body)
        reply = line.getresponse()
        reply.read()
        line.close()
      except (OSError, http.client.HTTPException):
        time.sleep(0.02)
        continue
      if reply.status == 200:
        acknowledged.append(name)
        count += 1

  def spooled():
    """Posts through the spool, which never loses patience."""
    count = 0
    while not finished.is_set():
      name = f"spooled-{count}"
      client.sender.put(monitor_server.episode(name, TURNS, status="completed"))
      count += 1
      if client.flush(30):
        acknowledged.extend(f"spooled-{n}" for n in range(flushed[0], count))
        flushed[0] = count
      time.sleep(0.005)

  flushed = [0]
  url = f"http://127.0.0.1:{port}"
  with ingest_client.IngestClient(
    url, spool_dir=folder / "spool", timeout_seconds=10
  ) as client:
    client.sender.put(monitor_server.base())
    assert client.drain(30)
    threads = [threading.Thread(target=plain, args=(n,)) for n in range(2)]
    threads.append(threading.Thread(target=spooled))
    for thread in threads:
      thread.start()
    try:
      yield acknowledged
    finally:
      finished.set()
      for thread in threads:
        thread.join()
    assert client.drain(300), client.sender.health()


# --- the trainer ------------------------------------------------------------

_TRAINER = f"""
import monitor_server
from training_monitor.client import ingest_client
def run(given):
  url, folder, name = given
  client = ingest_client.IngestClient(
      url, spool_dir=folder, timeout_seconds=10)
  client.sender.put(monitor_server.base())
  n = 0
  while True:
    client.sender.put(monitor_server.episode(
        f"{{name}}-{{n}}", {TURNS}, status="completed"))
    if client.flush(30):
      print(f"{{name}}-{{n}}", flush=True)
    n += 1
"""


def kill_trainer(folder, kills, seed=0, target=None) -> Outcome:
  """Trainers that die again and again, each delivering what the last left.

  Args:
    folder: Folder of every file.
    kills: how often.
    seed: Seed of the times of the kills.
    target: the server's database; None is a SQLite file in the folder.
  """
  folder = pathlib.Path(folder)
  chance = random.Random(seed)
  acknowledged: list[str] = []
  database = target or folder / "m.db"
  with monitor_server.MonitorServer(database, folder / "files") as server:
    with nursery.Nursery(_TRAINER) as trainer:
      for number in range(kills):
        delivered, first = trainer.start(
          server.url, folder / "spool", f"trainer-{number}"
        )
        acknowledged += [*delivered, first]
        time.sleep(chance.uniform(0.0, 0.4))
        trainer.end()
      acknowledged += trainer.rest()
    with ingest_client.IngestClient(
      server.url, spool_dir=folder / "spool"
    ) as client:
      deadline = time.monotonic() + 60
      while time.monotonic() < deadline:
        client.drain(5)
        if len(list((folder / "spool").glob("*.spool"))) == 1:
          break
        time.sleep(0.1)
  return inspect(database, acknowledged, kills)


# --- a run with its uploader --------------------------------------------------

_RUN = f"""
import pathlib, time
import observed_run, synthetic_run
from trainer_core import events
from trainer_core import images
from trainer_core import monitor_settings as settings
from training_monitor.client import event_log
from training_monitor.client import spool
def run(given):
  spool._MOST_SEGMENT = {SEGMENT}
  url, folder, session = given[0], given[1], int(given[2])
  store = images.ImageStore()
  log = event_log.EventLog(
      event_log.RunSpec(
          url=url, spool_dir=folder, name=f"run-{{session}}", session=session,
          **observed_run.FACTS),
      settings.MonitorConfig(close_timeout_s=60.0),
      images=store)
  print(log.pid, flush=True)
  log.on_event(events.RunStarted("run", {{}}))
  n = 0
  while True:
    n += 1
    episode = synthetic_run.episode(
        store, seed=1000 * session + n, turns={TURNS})
    episode.trajectory_id = f"train-{{n:06d}}.0"
    common = dict(group_id=f"train-{{n:06d}}", task_id="t")
    log.on_event(events.EpisodeStarted(episode.trajectory_id, **common))
    for turn in range({TURNS}):
      log.on_event(events.TurnFinished(
          episode.trajectory_id, turn, {{"model": 0.6}}, episode.steps[turn]))
    log.on_event(events.EpisodeFinished(episode, **common))
    while log.readings()["waiting"]:
      time.sleep(0.002)
    name = f"T/{{session}}/train/{{episode.trajectory_id}}"
    print(f"{{log.pid}} {{name}}", flush=True)
"""


def kill_run(folder, kills, seed=0, target=None) -> Outcome:
  """Runs of which the trainer, the uploader or both are killed.

  Each uploader may go on after its trainer; the next run delivers the rest.

  Args:
    folder: Folder of every file.
    kills: how often.
    seed: Seed of the times and the victims of the kills.
    target: the server's database; None is a SQLite file in the folder.
  """
  folder = pathlib.Path(folder)
  chance = random.Random(seed)
  names: list[str] = []
  uploaders: set[int] = set()
  database = target or folder / "m.db"
  spools = folder / "spool"
  with monitor_server.MonitorServer(database, folder / "files") as server:
    with nursery.Nursery(_RUN) as trainer:
      killed = 0
      while killed < kills:
        delivered, uploader = trainer.start(server.url, spools, len(names))
        names += delivered
        uploaders.add(int(uploader))
        time.sleep(chance.uniform(0.1, 1.0))
        whom = chance.choice(("trainer", "uploader", "both"))
        if whom != "trainer":
          with contextlib.suppress(ProcessLookupError):
            os.kill(int(uploader), signal.SIGKILL)
          killed += 1
        if whom == "uploader":  # It is replaced, and that one killed, too.
          time.sleep(chance.uniform(0.2, 1.5))
        trainer.end()
        killed += 1
        names.append("")  # The next one has another session.
      names += trainer.rest()
    lines = [line.split() for line in names if " " in line]
    acknowledged = [name for _, name in lines]
    _deliver(server.url, spools)
    uploaders |= {int(pid) for pid, _ in lines}
    assert not nursery.outliving(uploaders), "uploaders outlive their runs"
    shown = {
      row["screenshot_uri"].removeprefix("sha256:")
      for row in server.rows("obs", where="screenshot_uri IS NOT NULL")
    }
    stored = {
      row["sha256"] for row in server.rows("monitor_screenshot", order=1)
    }
  outcome = inspect(database, acknowledged, killed, observations=2 * TURNS)
  outcome.lost += sorted(shown - stored)
  return outcome


def _deliver(url, spools, seconds=120.0) -> None:
  """The next run there, which ends once it has delivered what was left."""
  spec = event_log.RunSpec(
    url=url, spool_dir=str(spools), name="last", session=1 << 20,
    **observed_run.FACTS,
  )  # fmt: skip
  log = event_log.EventLog(spec)
  deadline = time.monotonic() + seconds
  while [path.name for path in spools.glob("*.spool")] != ["last.spool"]:
    if time.monotonic() > deadline:
      break
    # Uploaders of killed trainers have their spools until they end.
    time.sleep(0.2)
    if not log.drain(10):
      break
    log.close()
    log = event_log.EventLog(spec)
  log.close()


def kill_uploader(folder, kills, seed=0) -> list[str]:
  """A run whose uploader dies again and again.

  Returns:
    What its database lacks or has twice, beside one of a run left in peace.
  """
  folder = pathlib.Path(folder)
  chance = random.Random(seed)
  tables = {}
  with unittest.mock.patch.object(spool_lib, "_MOST_SEGMENT", SEGMENT):
    for name in ("peace", "kills"):
      (folder / name).mkdir()
      num_kills = kills if name == "kills" else 0
      tables[name] = _played(folder / name, num_kills, chance)
  return [
    f"{table}: {len(tables['kills'][table])} rows are not those"
    f" {len(tables['peace'][table])} of a run left in peace"
    for table in _COMPARED
    if _bare(tables["kills"][table]) != _bare(tables["peace"][table])
  ]


def _played(folder, kills, chance) -> dict[str, list[dict]]:
  """The tables of a run whose uploader is killed so often."""
  store, emitted = images_lib.ImageStore(), []
  observed_run.play(emitted.append, store)
  at = chance.sample(range(1, len(emitted)), kills)
  with monitor_server.sqlite_server(folder / "server") as server:
    log = observed_run.observed(server, folder / "spool", store)
    killed = 0
    for number, event in enumerate(emitted):
      # Times are the same in all runs.
      log.on_event(dataclasses.replace(event, time=1e9 + number))
      if number in at:
        deadline = time.monotonic() + 60
        while log.pid == killed:
          assert time.monotonic() < deadline
          time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.5))
        killed = log.pid
        os.kill(killed, signal.SIGKILL)
    assert log.close(), log.counters
    assert not +log.counters - collections.Counter(
      sent=1 << 30, retries=1 << 30, images_missing=0
    ), log.counters
    rows = {table: server.rows(table, order=1) for table in _COMPARED}
    # Beside each change is what else its batch did, however that was cut.
    rows["status_history"] = [
      {
        k: row[k]
        for k in ("entity_type", "entity_id", "old_status", "new_status")
      }
      for row in rows["status_history"]
    ]
    return rows


_COMPARED = (
    "training", "step", "baseline", "eval", "task", "validator", "rollout",
    "environment", "turn", "action", "obs", "validation", "status_history",
    "monitor_screenshot",
)  # fmt: skip
_OF_SERVER = (
  "created_at",
  "updated_at",
  "changed_at",
  "last_heartbeat",
  "heartbeat",
)


def _bare(rows):
  """Rows without the times at which the server received them, in any order."""
  return sorted(
    repr({k: v for k, v in row.items() if k not in _OF_SERVER}) for row in rows
  )
