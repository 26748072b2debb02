"""Our gym server's OpenEnv side against the package openenv's own server.

Both serve an environment that does nothing and shows the same screenshot of
128x96; one client, on raw WebSockets, plays the same messages on both, in turns
(A B A B …), so that a busy machine is busy for both. Measured: sessions that
are opened and reset, and steps, with several sessions at a time; the server's
own CPU time for each step.

    make openenv
    python benchmarks/bench_openenv_server.py --json openenv_server.json

Without `.venv-openenv` (or $OPENENV_PYTHON) it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import time
from typing import Any, Iterator

import numpy as np
import psutil
from tunix.rl.multi_turn.environments import wire
from websockets.asyncio import client

HERE = pathlib.Path(__file__).resolve().parent
PYTHON = pathlib.Path(
  os.environ.get("OPENENV_PYTHON", HERE.parent / ".venv-openenv/bin/python")
)
STEP = json.dumps({"type": "step", "data": {"kind": "wait", "duration": 0.1}})
RESET = json.dumps({"type": "reset", "data": {"seed": 1}})


def parse_args() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--sessions", type=int, default=32)
  parser.add_argument("--steps", type=int, default=100, help="of each")
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--json", type=pathlib.Path, default=None)
  return parser.parse_args()


@contextlib.contextmanager
def ours(sessions: int) -> Iterator[tuple[str, psutil.Process]]:
  server = subprocess.Popen(
      [
          sys.executable, "-m", "tunix.rl.multi_turn.environments.gym_server",
          "blank", "--import", "blank_gym", "--port", "0",
          "--capacity", str(sessions),
      ],
      stdout=subprocess.PIPE, text=True,
      env={**os.environ, "PYTHONPATH": str(HERE / "peers")},
  )  # fmt: skip
  try:
    url = server.stdout.readline().split()[-1]
    yield f"ws{url[4:]}/openenv/blank/ws", psutil.Process(server.pid)
  finally:
    server.terminate()
    end(server)


def end(server: subprocess.Popen) -> None:
  try:
    server.wait(20)
  except subprocess.TimeoutExpired:
    server.kill()
    server.wait()


@contextlib.contextmanager
def theirs(sessions: int) -> Iterator[tuple[str, psutil.Process]]:
  shot = wire.screenshot_to_json(np.zeros((96, 128, 3), np.uint8))
  with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
  server = subprocess.Popen(
      [PYTHON, HERE / "peers/openenv_blank.py", str(port), str(sessions),
       json.dumps(shot)],
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
  )  # fmt: skip
  try:
    if server.stdout.readline().strip() != "ready":
      raise RuntimeError("the server of openenv did not start")
    due = time.monotonic() + 60
    while time.monotonic() < due:
      with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1).close()
        break
      time.sleep(0.1)
    yield f"ws://127.0.0.1:{port}/ws", psutil.Process(server.pid)
  finally:
    server.stdin.close()
    end(server)


async def play(
  url: str, process: psutil.Process, sessions: int, steps: int
) -> dict[str, float]:
  """One round: sessions are opened together, then all of them step."""
  took: list[float] = []

  async def ask(one: client.ClientConnection, text: str) -> None:
    async with asyncio.timeout(60):
      await one.send(text)
      reply = json.loads(await one.recv())
    if reply["type"] != "observation":
      raise RuntimeError(f"{url}: {str(reply)[:300]}")

  async def open_one() -> client.ClientConnection:
    one = await client.connect(
      url, compression=None, ping_interval=None, open_timeout=60
    )
    await ask(one, RESET)
    return one

  async def walk(one: client.ClientConnection) -> None:
    for _ in range(steps):
      began = time.perf_counter()
      await ask(one, STEP)
      took.append(time.perf_counter() - began)

  began = time.perf_counter()
  all_of_them = await asyncio.gather(*(open_one() for _ in range(sessions)))
  opened = time.perf_counter() - began
  cpu = sum(process.cpu_times()[:2])
  began = time.perf_counter()
  await asyncio.gather(*map(walk, all_of_them))
  total = time.perf_counter() - began
  cpu = sum(process.cpu_times()[:2]) - cpu
  await asyncio.gather(*(one.close() for one in all_of_them))
  p50, p99 = np.quantile(took, [0.5, 0.99]) * 1000
  return {
    "opened_per_s": sessions / opened,
    "steps_per_s": len(took) / total,
    "p50_ms": float(p50),
    "p99_ms": float(p99),
    "server_cpu_us_per_step": cpu / len(took) * 1e6,
  }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
  rounds: dict[str, list[dict[str, float]]] = {"ours": [], "openenv": []}
  with ours(args.sessions) as one, theirs(args.sessions) as other:
    servers = {"ours": one, "openenv": other}
    for url, process in servers.values():  # Warm.
      await play(url, process, 2, 5)
    for _ in range(args.rounds):
      for name, (url, process) in servers.items():
        rounds[name].append(await play(url, process, args.sessions, args.steps))
  out: dict[str, Any] = {
    name: {
      key: round(statistics.median(r[key] for r in measurements), 2)
      for key in measurements[0]
    }
    for name, measurements in rounds.items()
  }
  out["ratios"] = {  # Of each pair of rounds, and their median.
    key: round(
      statistics.median(
        a[key] / b[key] for a, b in zip(rounds["ours"], rounds["openenv"])
      ),
      2,
    )
    for key in rounds["ours"][0]
  }
  return {"sessions": args.sessions, "rounds": args.rounds, **out}


def main() -> None:
  args = parse_args()
  if not PYTHON.exists():
    sys.exit(f"no {PYTHON}: make openenv")
  text = json.dumps(asyncio.run(measure(args)), indent=1)
  print(text)
  if args.json is not None:
    args.json.write_text(text + "\n")


if __name__ == "__main__":
  main()
