"""Measures the throughput of the Training Monitor's server.

The server, a process of its own on SQLite with full synchronisation, takes
batches of episodes of 31 rows and 45 kB (--turns 7) from several connections.
Every answer means a durable commit. Figures are episodes a second of wall time
and of the server's CPU time; target 800 a CPU second. The bound is what SQLite
alone takes for the same rows, from a program that has them ready and does
nothing else: the server's statements again, a commit a batch, without the index
of words. With --postgres the same on a PostgreSQL of its own (Debian: apt-get
install postgresql) with its defaults, durable too; the last line compares the
two, same work, same run.

    python benchmarks/bench_monitor.py [--episodes 4000] [--per-batch 8]
        [--turns 7] [--postgres]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time

import orjson
from training_monitor.schema import database as database_lib
from training_monitor.server import access
from training_monitor.server import sql as sql_lib
from training_monitor.server import writer
from training_monitor.server.batches import apply
from training_monitor.server.batches import items
from training_monitor.server.batches import references

ROOT = pathlib.Path(__file__).resolve().parents[1]
for folder in ("packages/training_monitor/tests/helpers", "tests/helpers"):
  sys.path.insert(0, str(ROOT / folder))
import monitor_databases  # noqa: E402

TURNS = 7
TARGET = 800  # Episodes a second of the server's CPU time.


class Server:
  """`monitor serve` in a process of its own, on SQLite or by a URL."""

  def __init__(self, folder: pathlib.Path, database: str = ""):
    self._process = subprocess.Popen(
        [
            sys.executable, "-m", "tunix.rl.multi_turn.monitor", "serve",
            "--database", database or str(folder / "m.db"), "--files",
            str(folder / "files"), "--port", "0", "--until-eof",
        ],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    line = self._process.stdout.readline()
    self.url = line[line.index("http") :].strip()

  def cpu_seconds(self) -> float:
    stat = pathlib.Path(f"/proc/{self._process.pid}/stat").read_text()
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

  def close(self) -> None:
    self._process.stdin.close()
    self._process.wait(60)
    self._process.stdout.close()


# --- server -----------------------------------------------------------------


START = orjson.dumps(
  {
    "training": {"client_id": "T", "run_name": "run"},
    "steps": [{"client_id": "S", "step": 1}],
    "tasks": [{"task_id": "t"}],
  }
)


def body(first: int, count: int, turns: int = TURNS) -> bytes:
  """A batch of episodes of 31 rows and 45 kB each, with seven turns."""
  # Of words, some of them rare, as an index of them has its work with both.
  text = " ".join(f"word{7919 * n % 5000}" for n in range(160))
  batch: dict[str, list] = {k: [] for k in (
      "rollouts", "environments", "turns", "actions", "observations",
      "validations",
  )}  # fmt: skip
  logprobs = [-0.123456] * 100
  for number in range(first, first + count):
    name = f"rollout-{number}"
    now = time.time()
    batch["rollouts"].append({
        "rollout_id": name, "step_id": "S", "task_id": "t",
        "status": "completed", "max_turns": 20, "current_turn": turns,
        "num_turns": turns, "reward": 1.0, "task_success": True,
        "model_path": "m", "start_time": now, "end_time": now,
    })  # fmt: skip
    batch["environments"].append(
      {
        "client_id": f"{name}:env",
        "rollout_id": name,
        "env_type": "linux",
        "status": "terminated",
      }
    )
    for turn in range(turns):
      key = f"{name}:turn:{turn}"
      batch["turns"].append({
          "client_id": key, "rollout_id": name, "turn": turn,
          "start_time": now, "turn_time": 0.5, "reward": 0.0,
          "metrics_json": {"thought": text, "seconds": {"model": 0.5}},
      })  # fmt: skip
      batch["actions"].append(
        {
          "client_id": f"{key}:action",
          "turn_id": key,
          "action_type": "click",
          "tool_name": "computer_use",
          "tool_args": {"x": 1, "y": 2},
          "tokens": list(range(1000, 1100)),
          "logprobs": logprobs,
        }
      )
      for when in ("before", "after"):
        batch["observations"].append(
          {
            "client_id": f"{key}:{when}",
            "turn_id": key,
            "obs_type": "screenshot",
            "screenshot_uri": "sha256:" + "0" * 64,
            "text_content": text,
          }
        )
    batch["validations"].append(
      {"client_id": f"{name}:v", "rollout_id": name, "success": True}
    )
  return orjson.dumps(batch)


def load(server: Server, bodies: list[bytes], connections: int):
  """(wall seconds, CPU seconds of the server) for these batches."""
  host = server.url.removeprefix("http://")

  def post(own):
    line = http.client.HTTPConnection(host, timeout=60)
    for one in own:
      line.request("POST", "/api/ingest/batch", one)
      reply = line.getresponse()
      answer = reply.read()
      assert reply.status == 200, answer
    line.close()

  post([START])
  threads = [
    threading.Thread(target=post, args=(bodies[n::connections],))
    for n in range(connections)
  ]
  began, cpu = time.perf_counter(), server.cpu_seconds()
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return time.perf_counter() - began, server.cpu_seconds() - cpu


class _Recorded(sql_lib.Sql):
  """Keeps the statements that write, each with its rows."""

  def __init__(self, connection, written: list):
    super().__init__(connection)
    self._written = written

  def run(self, statement, values=()):
    self._written.append((statement, [tuple(values)]))
    return super().run(statement, values)

  def many(self, statement, rows):
    if rows:
      self._written.append((statement, [tuple(row) for row in rows]))
    super().many(statement, rows)


def sqlite_alone(bodies: list[bytes]) -> float:
  """Returns SQLite's CPU seconds for the statements of the batches."""
  with tempfile.TemporaryDirectory() as folder:
    engine = database_lib.connect(f"{folder}/a.db")
    database_lib.upgrade(engine)
    access.Access(engine)
    shared, batches = references.CommittedIds(), []
    for one in [START, *bodies]:
      batches.append([])
      with database_lib.writing(engine) as connection:
        sql = _Recorded(connection, batches[-1])
        transaction = apply.Transaction(sql, shared, writer.now())
        transaction.apply(items.read(one), 1)
        transaction.finish()
        sql.close()
      transaction.committed()
    engine.dispose()
    engine = database_lib.connect(f"{folder}/b.db")
    database_lib.upgrade(engine)
    access.Access(engine)
    engine.dispose()
    line = sqlite3.connect(f"{folder}/b.db", isolation_level=None)
    for pragma in ("synchronous=FULL", "foreign_keys=ON", "cache_size=-65536"):
      line.execute(f"PRAGMA {pragma}")
    cpu = 0.0
    for number, batch in enumerate(batches):
      if number == 1:
        cpu = time.thread_time()
      line.execute("BEGIN IMMEDIATE")
      for statement, rows in batch:
        line.executemany(statement, rows)
      line.execute("COMMIT")
    cpu = time.thread_time() - cpu
    line.close()
  return cpu


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--episodes", type=int, default=2000)
  parser.add_argument("--per-batch", type=int, default=8)
  parser.add_argument("--turns", type=int, default=TURNS)
  parser.add_argument("--connections", type=int, default=4)
  parser.add_argument("--postgres", action="store_true")
  parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
  args = parser.parse_args()
  good, report = True, []
  with contextlib.ExitStack() as stack:
    databases = {"SQLite": lambda: ""}
    if args.postgres:
      url = stack.enter_context(monitor_databases.postgres_server(durable=True))
      databases["PostgreSQL"] = lambda: monitor_databases.empty_database(url)
    for per_batch in (1, args.per_batch):
      rates = {
        name: measure_server(name, make(), per_batch, args)
        for name, make in databases.items()
      }
      good &= rates["SQLite"][1] >= TARGET
      report += [
        {
          "database": name,
          "per_batch": per_batch,
          "episodes_per_s": wall,
          "episodes_per_cpu_s": cpu,
        }
        for name, (wall, cpu) in rates.items()
      ]
      if args.postgres:
        wall, cpu = (
          rates["PostgreSQL"][i] / rates["SQLite"][i] for i in (0, 1)
        )
        print(
          f"PostgreSQL / SQLite, {per_batch} episodes a batch: {wall:.2f} of"
          f" the episodes/s, {cpu:.2f} of those a CPU second of the server",
          flush=True,
        )
  if args.json:
    args.json.write_text(json.dumps(report, indent=2) + "\n")
  return 0 if good else 1


def measure_server(
  name: str, database: str, per_batch: int, args: argparse.Namespace
) -> tuple[float, float]:
  """Episodes a second of wall time, and of the server's CPU time."""
  bodies = [
    body(n, per_batch, args.turns) for n in range(0, args.episodes, per_batch)
  ]
  episodes = len(bodies) * per_batch
  with tempfile.TemporaryDirectory() as folder:
    server = Server(pathlib.Path(folder), database)
    wall, cpu = load(server, bodies, args.connections)
    server.close()
  rate = episodes / cpu
  print(
    f"server, {name}, {per_batch} episodes a batch of"
    f" {len(bodies[0]) / 1000:.0f} kB: {episodes / wall:.0f} durable"
    f" episodes/s, {rate:.0f} a CPU second ({1e3 * cpu / episodes:.2f} ms"
    " each)",
    flush=True,
  )
  if not database:
    alone = sqlite_alone(bodies)
    print(
      f"  SQLite alone: {episodes / alone:.0f} a CPU second"
      f" ({1e3 * alone / episodes:.2f} ms each)",
      flush=True,
    )
  return episodes / wall, rate


if __name__ == "__main__":
  sys.exit(main())
