"""Measures how many executions a gym server makes, holds and steps.

Clients and server are two processes, over the loopback interface. Measured:

* creates in bursts of 64, each terminated again: all are answered;
* 200 executions open at once, and steps of all of them together;
* the same steps in-process, for the price of the way there;
* what is left after everything was terminated: executions, threads, open
  files and memory of the server.

    python benchmarks/bench_gym_server.py --json gym_server.json
    python benchmarks/bench_gym_server.py --workers 2 --screen 1280x720
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

from cua_gyms import genv
import httpx
import numpy as np
import psutil
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import desktop

FAMILY = "enter-text"
MOVE = [gui_action.GuiAction("move", x=5 + i, y=9) for i in range(64)]


def parse_args() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--creates", type=int, default=1000)
  parser.add_argument("--burst", type=int, default=64)
  parser.add_argument("--open", type=int, default=200)
  parser.add_argument("--steps", type=int, default=10, help="of each")
  parser.add_argument("--screen", default="128x96")
  parser.add_argument("--workers", type=int, default=0)
  parser.add_argument("--json", type=pathlib.Path, default=None)
  return parser.parse_args()


def task(index: int) -> base.Task:
  name = f"{FAMILY}@train:{index}:0"
  return base.Task(name, FAMILY, params={"genv": {"identifier": name}})


def quantiles(seconds: list[float]) -> dict[str, float]:
  p50, p99 = np.quantile(seconds, [0.5, 0.99]) * 1000
  return {"p50_ms": round(float(p50), 2), "p99_ms": round(float(p99), 2)}


async def measure(args: argparse.Namespace, url: str) -> dict[str, Any]:
  out: dict[str, Any] = {}

  # Creates in bursts.
  seconds: list[float] = []
  ids: set[str] = set()

  async def make(index: int) -> None:
    gym = genv.GenvGym(url, "desktop")
    began = time.perf_counter()
    await gym.start(task(index))
    seconds.append(time.perf_counter() - began)
    ids.add(gym.execution_id)
    await gym.close()

  began = time.perf_counter()
  for first in range(0, args.creates, args.burst):
    last = min(first + args.burst, args.creates)
    await asyncio.gather(*(make(i) for i in range(first, last)))
  total = time.perf_counter() - began
  out["creates"] = {
    "asked": args.creates,
    "answered": len(ids),
    "burst": args.burst,
    "per_s": round(args.creates / total, 1),
    **quantiles(seconds),
  }

  # Many at once.
  gyms = [genv.GenvGym(url, "desktop") for _ in range(args.open)]
  began = time.perf_counter()
  await asyncio.gather(*(g.start(task(i)) for i, g in enumerate(gyms)))
  opened = time.perf_counter() - began
  async with httpx.AsyncClient() as http:
    executions = (await http.get(url + "/health")).json()["executions"]
  steps: list[float] = []

  async def walk(gym: genv.GenvGym) -> None:
    for i in range(args.steps):
      at = time.perf_counter()
      await gym.act(MOVE[i % len(MOVE)])
      steps.append(time.perf_counter() - at)

  began = time.perf_counter()
  await asyncio.gather(*map(walk, gyms))
  total = time.perf_counter() - began
  out["open"] = {
    "asked": args.open,
    "held": executions,
    "opened_in_s": round(opened, 2),
    "steps": len(steps),
    "steps_per_s": round(len(steps) / total, 1),
    **quantiles(steps),
  }
  one = []
  for i in range(200):
    at = time.perf_counter()
    await gyms[0].act(MOVE[i % len(MOVE)])
    one.append(time.perf_counter() - at)
  out["one_at_a_time"] = {
    "steps_per_s": round(len(one) / sum(one), 1),
    **quantiles(one),
  }
  await asyncio.gather(*(g.close() for g in gyms))
  return out


def in_process(args: argparse.Namespace) -> dict[str, float]:
  width, height = map(int, args.screen.split("x"))
  gym = desktop.DesktopGym(width, height)
  gym.start_sync(desktop.DesktopTasks().train_task(FAMILY, 0, 0))
  count = 2000
  began = time.perf_counter()
  for i in range(count):
    gym.act_sync(MOVE[i % len(MOVE)])
  total = time.perf_counter() - began
  return {"steps_per_s": round(count / total, 1)}


def facts(process: psutil.Process) -> dict[str, float]:
  return {
    "threads": process.num_threads(),
    "files": process.num_fds(),
    "rss_mib": round(process.memory_info().rss / (1 << 20), 1),
  }


def main() -> None:
  args = parse_args()
  width, height = map(int, args.screen.split("x"))
  server = subprocess.Popen(
      [
          sys.executable, "-m", "tunix.rl.multi_turn.environments.gym_server",
          "desktop", "--port", "0", "--workers", str(args.workers),
          "--families", FAMILY,
          "--settings", f"{{width: {width}, height: {height}}}",
      ],
      stdout=subprocess.PIPE,
      text=True,
  )  # fmt: skip
  try:
    url = server.stdout.readline().split()[-1]
    process = psutil.Process(server.pid)
    asyncio.run(  # Warm: code, connections, workers.
      measure(
        argparse.Namespace(
          **{**vars(args), "creates": 64, "open": 8, "steps": 2}
        ),
        url,
      )
    )
    time.sleep(1.0)
    before = facts(process)
    out = asyncio.run(measure(args, url))
    time.sleep(1.0)
    executions = httpx.get(url + "/health").json()["executions"]
    out |= {
      "screen": args.screen,
      "workers": args.workers,
      "in_process": in_process(args),
      "server_before": before,
      "server_after": {"executions": executions, **facts(process)},
    }
  finally:
    server.terminate()
    server.wait(20)
  text = json.dumps(out, indent=1)
  print(text)
  if args.json is not None:
    args.json.write_text(text + "\n")


if __name__ == "__main__":
  main()
