"""kill -9 under load, and whether anything acknowledged is gone or twice."""

import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import monitor_databases
import monitor_server
from tunix.rl.multi_turn.monitor.client import ingest_client
from tunix.rl.multi_turn.monitor.schema import database as database_lib

TURNS = 3


@dataclasses.dataclass
class Outcome:
  """What a soak found."""

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


def inspect(target, acknowledged, kills) -> Outcome:
  """Compares a database with what was acknowledged."""
  engine = database_lib.connect(target)
  with database_lib.reading(engine) as db:
    found = _inspect(db, acknowledged, kills)
  engine.dispose()
  return found


def _inspect(db, acknowledged, kills) -> Outcome:
  ask = lambda query: {
      name: count for name, count in db.exec_driver_sql(query)
  }
  counts = ask("SELECT rollout_id, count(*) FROM rollout GROUP BY 1")
  whole = "SELECT r.rollout_id, count(*) FROM rollout r JOIN {} GROUP BY 1"
  partial, repeated = [], [n for n, c in counts.items() if c > 1]
  for joined in (
      "turn t ON t.rollout_id = r.id",
      "turn t ON t.rollout_id = r.id JOIN action a ON a.turn_id = t.id",
      "turn t ON t.rollout_id = r.id JOIN obs o ON o.turn_id = t.id",
  ):
    found = ask(whole.format(joined))
    partial += [n for n in counts if found.get(n, 0) < TURNS]
    repeated += [n for n in counts if found.get(n, 0) > TURNS]
  integrity = "ok"  # PostgreSQL keeps its own.
  if db.dialect.name == "sqlite":
    integrity = db.exec_driver_sql("PRAGMA integrity_check").scalar()
    if db.exec_driver_sql("PRAGMA foreign_key_check").fetchall():
      integrity = "foreign keys do not hold"
  lost = [n for n in acknowledged if n not in counts]
  return Outcome(
      kills, len(acknowledged), len(counts), lost, repeated, partial, integrity
  )


# --- processes --------------------------------------------------------------

_MOTHER = """
import os, signal, sys
sys.path.insert(0, {helpers!r})
{program}
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The dead need no wait.
for line in sys.stdin:
  if os.fork():
    continue
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  print("pid", os.getpid(), flush=True)
  run(line[:-1].split("|"))
  os._exit(0)
"""


class Nursery:
  """Processes of one program, each a fork of one that has imported it all.

  So a soak kills work and not imports. One lives at a time; each is a process
  like any other, and dies alone.
  """

  def __init__(self, program: str):
    """`program` defines run(arguments), which prints whole lines."""
    self._mother = subprocess.Popen(
        [
            sys.executable, "-c",
            _MOTHER.format(
                helpers=str(pathlib.Path(__file__).parent), program=program
            ),
        ],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # pyformat: disable
    self._pid = 0

  def start(self, *arguments) -> tuple[list[str], str]:
    """Starts one.

    Returns:
      (What the one before it had still said, the first line of this one.)
    """
    self._mother.stdin.write("|".join(map(str, arguments)) + "\n")
    self._mother.stdin.flush()
    left = []
    while not (line := self._line()).startswith("pid "):
      left.append(line)
    self._pid = int(line.split()[1])
    return left, self._line()

  def _line(self) -> str:
    line = self._mother.stdout.readline()
    assert line, "the program has failed; its stderr says how"
    return line.strip()

  @property
  def pid(self) -> int:
    return self._pid

  @property
  def alive(self) -> bool:
    try:
      os.kill(self._pid, 0)
    except ProcessLookupError:
      return False
    return True

  def end(self, number=signal.SIGKILL, seconds=60.0) -> None:
    """Sends the signal and waits for the end."""
    os.kill(self._pid, number)
    deadline = time.monotonic() + seconds
    while self.alive:
      assert time.monotonic() < deadline, f"it outlives signal {number}"
      time.sleep(0.002)

  def rest(self) -> list[str]:
    """What the last one, dead now, had still said; ends all of it."""
    self._mother.stdin.close()
    return self._mother.stdout.read().split("\n")[:-1]

  def __enter__(self):
    return self

  def __exit__(self, *exc_info):
    if self._pid and self.alive:
      self.end()
    self._mother.stdin.close()
    self._mother.kill()  # It has nothing to put in order.
    self._mother.wait(60)
    self._mother.stdout.close()


# --- the server -------------------------------------------------------------

SERVER = """
import logging
logging.disable()  # It is all trouble, and meant.
from tunix.rl.multi_turn.monitor import serve
def run(given):
  serve.main(["serve", "--database", given[0], "--files", given[1], "--port",
              given[2]])
"""


def _free_port():
  with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    return found.getsockname()[1]


def kill_server(folder, kills, seed=0, target=None) -> Outcome:
  """A server that dies again and again under two kinds of clients.

  Args:
    folder: for everything.
    kills: how often.
    seed: of when.
    target: its database; None is a SQLite file in the folder.
  """
  folder = pathlib.Path(folder)
  chance = random.Random(seed)
  database, port = target or folder / "m.db", _free_port()
  with Nursery(SERVER) as server:
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
    folder: for everything.
    kills: how often.
    postgres: a `monitor_databases.Postgres`, durable.
    how: "backend": SIGKILL to one of the processes that serve the monitor,
      which makes PostgreSQL recover as from a crash; "immediate": all of it
      is stopped so, and started again.
    seed: of when.
  """
  folder = pathlib.Path(folder)
  chance = random.Random(seed)
  database, port = monitor_databases.empty_database(postgres), _free_port()
  name = database.partition("@/")[2].partition("?")[0]
  with Nursery(SERVER) as server:
    server.start(database, folder / "files", port)
    with _load(folder, port) as acknowledged:
      for _ in range(kills):
        _more(acknowledged, server)
        time.sleep(chance.uniform(0.0, 0.5))
        if how == "immediate":
          postgres.stop("immediate")
          postgres.start()
        else:
          while not (found := postgres.backends(name)):
            time.sleep(0.01)
          with contextlib.suppress(ProcessLookupError):
            os.kill(chance.choice(found), signal.SIGKILL)
          postgres.wait()
      _more(acknowledged, server)
    server.end(signal.SIGTERM)
  return inspect(database, acknowledged, kills)


def _more(acknowledged, server, seconds=120.0) -> None:
  """Waits until something more is acknowledged: it works again."""
  known, deadline = len(acknowledged), time.monotonic() + seconds
  while len(acknowledged) == known:
    assert server is None or server.alive, "the monitor's server has died"
    assert time.monotonic() < deadline, "nothing is acknowledged any more"
    time.sleep(0.01)


@contextlib.contextmanager
def _load(folder, port):
  """Two kinds of clients; yields the growing list of what they were told is
  stored. When it ends, all that was told is delivered."""
  acknowledged: list[str] = []
  done = threading.Event()

  def plain(number):
    """Posts until answered, as any program would."""
    count = 0
    while not done.is_set():
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
    while not done.is_set():
      name = f"spooled-{count}"
      client.sender.put(
          monitor_server.episode(name, TURNS, status="completed")
      )
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
      done.set()
      for thread in threads:
        thread.join()
    assert client.drain(300), client.sender.health()


# --- the trainer ------------------------------------------------------------

_TRAINER = f"""
import monitor_server
from tunix.rl.multi_turn.monitor.client import ingest_client
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
    folder: for everything.
    kills: how often.
    seed: of when.
    target: the server's database; None is a SQLite file in the folder.
  """
  folder = pathlib.Path(folder)
  chance = random.Random(seed)
  acknowledged: list[str] = []
  database = target or folder / "m.db"
  with monitor_server.MonitorServer(database, folder / "files") as server:
    with Nursery(_TRAINER) as trainer:
      for number in range(kills):
        left, first = trainer.start(
            server.url, folder / "spool", f"trainer-{number}"
        )
        acknowledged += [*left, first]
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
