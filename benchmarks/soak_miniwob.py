"""Plays `miniwob` for thousands of episodes and counts what is left behind.

  python benchmarks/soak_miniwob.py                      # a minute
  python benchmarks/soak_miniwob.py --episodes 10000 --kills 20

All tasks in turn, many at a time, random actions, some episodes given up in the
middle. `--kills` renderers are killed on the way: their episodes fail, and no
other does. Every so often a row: memory of this process and of the browser,
open files, tabs, timers. The exit status is 1 when an episode hangs, when one
fails that should not, when tabs or files are left at the end, or when memory
went on growing in the second half by more than `--growth` MB.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import gc
import json
import os
import pathlib
import random
import signal
import sys
import time

from cua_gyms import miniwob
from cua_gyms.chromium import devtools
from tunix.rl.multi_turn.core import gui_action

_HANG_S = 180.0
_Action, _Kind = gui_action.GuiAction, gui_action.GuiActionKind


def _memory_mb(pids: list[int]) -> float:
  total = 0
  for pid in pids:
    try:
      text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text("ascii")
    except OSError:
      continue
    total += sum(
      int(line.split()[1])
      for line in text.splitlines()
      if line.startswith("Pss:")
    )
  return total / 1024


def _group(leader: int) -> list[int]:
  pids = []
  for name in os.listdir("/proc"):
    try:
      if name.isdigit() and os.getpgid(int(name)) == leader:
        pids.append(int(name))
    except ProcessLookupError:
      pass
  return pids


def _renderers(leader: int) -> list[int]:
  pids = []
  for pid in _group(leader):
    try:
      words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
      continue
    if b"--type=renderer" in words:
      pids.append(pid)
  return pids


class Soak:
  """The episodes and what is counted of them."""

  def __init__(self, args: argparse.Namespace):
    self._args = args
    self._tasks = miniwob.MiniWobTasks()
    self._browser = miniwob.Browser(max_pages=args.parallel)
    self._families = miniwob.families()
    self._next = 0
    self.done = 0
    self.errors: collections.Counter[str] = collections.Counter()
    self.unexpected: list[str] = []
    self.killed = 0
    self.rows: list[dict[str, float]] = []

  async def play(self) -> None:
    workers = [
      asyncio.create_task(self._work(i)) for i in range(self._args.parallel)
    ]
    killer = asyncio.create_task(self._kill())
    try:
      await asyncio.gather(*workers)
    finally:
      killer.cancel()
      for worker in workers:
        worker.cancel()
    self._look()
    await self._browser.close()

  async def _work(self, number: int) -> None:
    rng = random.Random(number)
    gym = miniwob.MiniWobGym(browser=self._browser)
    while self._next < self._args.episodes:
      index = self._next
      self._next += 1
      family = self._families[index % len(self._families)]
      task = self._tasks.train_task(family, index)
      try:
        async with asyncio.timeout(_HANG_S):
          await self._episode(gym, task, rng)
      except devtools.DevToolsError as error:
        self.errors[type(error).__name__] += 1
        crashed = isinstance(error, devtools.PageCrashed)
        if not crashed or sum(self.errors.values()) > 2 * self.killed:
          self.unexpected.append(f"{task.task_id}: {error}")
      except TimeoutError:
        self.unexpected.append(f"{task.task_id}: hung for {_HANG_S:g} s")
      self.done += 1
      if self.done % self._args.every == 0:
        self._look()
    await gym.close()

  async def _episode(self, gym, task, rng) -> None:
    await gym.start(task)
    turns = rng.randrange(1, 6)
    for _ in range(turns):
      x, y = rng.randrange(160), rng.randrange(50, 210)
      action = rng.choice(
        (
          _Action(_Kind.CLICK, x=x, y=y),
          _Action(_Kind.CLICK, x=x, y=y),
          _Action(_Kind.TYPE, text="ab 1"),
          _Action(_Kind.SCROLL, x=x, y=y, dy=40.0),
          _Action(_Kind.DRAG, x=x, y=y, x2=80, y2=120),
        )
      )
      if (await gym.act(action)).done:
        break
    if rng.random() < 0.9:
      await gym.evaluate()
    if rng.random() < 0.2:
      await gym.close()  # The next episode gets the tab.

  async def _kill(self) -> None:
    while self.killed < self._args.kills:
      at = (self.killed + 1) * self._args.episodes / (self._args.kills + 1)
      while self.done < at:
        await asyncio.sleep(0.05)
      victims = _renderers(self._browser.pid) if self._browser.pid else []
      if victims:
        self.killed += 1
        os.kill(random.Random(self.killed).choice(victims), signal.SIGKILL)

  def _look(self) -> None:
    gc.collect()
    row = {
      "episodes": self.done,
      "python_mb": round(_memory_mb([os.getpid()]), 1),
      "browser_mb": round(_memory_mb(_group(self._browser.pid or -1)), 1),
      "files": len(os.listdir("/proc/self/fd")),
      "tabs": len(self._browser._pages),  # pylint: disable=protected-access
      "tasks": len(asyncio.all_tasks()),
      "errors": dict(self.errors),
      "killed": self.killed,
    }
    self.rows.append(row)
    print(json.dumps(row), flush=True)


def main() -> int:
  """Returns the exit status."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--episodes", type=int, default=400)
  parser.add_argument("--parallel", type=int, default=16)
  parser.add_argument("--kills", type=int, default=2)
  parser.add_argument("--every", type=int, default=100)
  parser.add_argument("--growth", type=float, default=100.0, metavar="MB")
  args = parser.parse_args()
  files = len(os.listdir("/proc/self/fd"))
  soak = Soak(args)
  began = time.perf_counter()
  loop = asyncio.new_event_loop()
  loop.run_until_complete(soak.play())
  loop.close()
  took = time.perf_counter() - began
  problems = list(soak.unexpected)
  if len(os.listdir("/proc/self/fd")) > files:
    problems.append(f"{len(os.listdir('/proc/self/fd')) - files} files left")
  half = soak.rows[len(soak.rows) // 2 :]
  for name in ("python_mb", "browser_mb"):
    grown = half[-1][name] - half[0][name]
    if grown > args.growth:
      problems.append(f"{name} grew by {grown:.0f} MB in the second half")
  print(
    f"{soak.done} episodes in {took:.0f} s, {soak.killed} renderers killed,"
    f" errors {dict(soak.errors)}"
  )
  for problem in problems[:20]:
    print("problem:", problem)
  return 1 if problems else 0


if __name__ == "__main__":
  sys.exit(main())
