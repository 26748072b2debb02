"""Speed of the `miniwob` gym: steps and resets a second, latency, memory.

Random clicks on a mix of tasks, episodes of at most 4 steps; a step is an
action and the screenshot after it. All gyms in one process on one event loop,
one browser. Run it on an idle machine:

  python benchmarks/bench_miniwob.py --pages 1,8,16 --seconds 6

Against others on the same tasks and seeds, in one run, by turns; each of their
episodes is in a process of its own, as they need:

  python benchmarks/bench_miniwob.py --pages 16 --rounds 3 \
      --peers selenium browsergym

The peers are the environment of the `miniwob` package itself, which drives
Chromium with selenium, and BrowserGym. They need, for the first,
`apt-get install chromium chromium-driver`, and for the second a virtual
environment of its own, as it pins an old playwright:

  python -m venv .venv-browsergym
  .venv-browsergym/bin/pip install browsergym-miniwob==0.14.3

With `--in-turn` the families come round in groups of eight episodes, each of
which takes a tab and gives it back, as a run's do; `--spare` is how many tabs
wait for each in use:

  python benchmarks/bench_miniwob.py --pages 32 --in-turn --spare 0 --seconds 20

`cpu_ms_per_step` is the processor time of all processes of an environment for
each step with its share of resets: what bounds steps a second where all cores
are busy, and what other work on the machine changes least.

A peer that is not there is left out, with the reason. How the goals that a
peer was given agree with ours for the same seeds is reported as well: all of
them with selenium, few with BrowserGym, which draws the page's seed from its
own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from cua_gyms import miniwob
from cua_gyms.miniwob import miniwob_tasks
from tunix.rl.multi_turn.core import gui_action

FAMILIES = (
    "click-test-2", "click-button", "click-dialog", "enter-text",
    "click-checkboxes", "click-color", "click-shape", "use-slider",
)  # fmt: skip
_WORKER = pathlib.Path(__file__).with_name("peers") / "miniwob_peer.py"
_READY_S = 180.0
_GROUP = 8
_SETTLING_S = 15.0


def memory_mb(members) -> float:
  """Proportional set size of the processes that `members(pid)` is true for."""
  total = 0
  for name in os.listdir("/proc"):
    if not name.isdigit():
      continue
    try:
      if not members(int(name)):
        continue
      with open(f"/proc/{name}/smaps_rollup", encoding="ascii") as file:
        for line in file:
          if line.startswith("Pss:"):
            total += int(line.split()[1])
    except (OSError, ProcessLookupError):
      continue
  return total / 1024


def cpu_s(members) -> float:
  """Processor seconds that such processes, and children they saw end, took."""
  total = 0
  for name in os.listdir("/proc"):
    try:
      if not name.isdigit() or not members(int(name)):
        continue
      with open(f"/proc/{name}/stat", encoding="ascii") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    except (OSError, ProcessLookupError):
      continue
    total += sum(map(int, fields[11:15]))
  return total / os.sysconf("SC_CLK_TCK")


def percentile(values: list[float], part: float) -> float:
  values = sorted(values)
  if not values:
    return math.nan
  return values[min(len(values) - 1, int(part * len(values)))]


@dataclasses.dataclass
class Times:
  """Measured seconds of each step and start.

  Each player ends with its episode, not at the same time as the others, so
  rates are sums of the players' own.
  """

  steps: list[float] = dataclasses.field(default_factory=list)
  starts: list[float] = dataclasses.field(default_factory=list)
  steps_per_s: float = 0.0
  starts_per_s: float = 0.0
  memory_mb: float = 0.0
  cpu_s: float = 0.0

  def player(self, steps: list[float], starts: list[float], took: float):
    """Adds what one player did, beside the others."""
    self.steps += steps
    self.starts += starts
    self.steps_per_s += len(steps) / took
    self.starts_per_s += len(starts) / took

  @classmethod
  def of_rounds(cls, rounds: list[Times]) -> Times:
    """All of them, with their mean rates."""
    return cls(
      [s for one in rounds for s in one.steps],
      [s for one in rounds for s in one.starts],
      sum(one.steps_per_s for one in rounds) / len(rounds),
      sum(one.starts_per_s for one in rounds) / len(rounds),
      max(one.memory_mb for one in rounds),
      sum(one.cpu_s for one in rounds),
    )

  def row(self, name: str, pages: int) -> dict[str, Any]:
    """One row of the table; times in milliseconds."""
    return {
      "environment": name,
      "episodes": pages,
      "steps_per_s": round(self.steps_per_s, 2),
      "resets_per_s": round(self.starts_per_s, 2),
      "step_p50_ms": round(1e3 * percentile(self.steps, 0.5), 1),
      "step_p99_ms": round(1e3 * percentile(self.steps, 0.99), 1),
      "reset_p50_ms": round(1e3 * percentile(self.starts, 0.5), 1),
      "mb_per_episode": round(self.memory_mb / pages, 1),
      "cpu_ms_per_step": round(1e3 * self.cpu_s / len(self.steps), 1),
    }


class Ours:
  """The `miniwob` gym: episodes on one event loop, one browser."""

  name = "tunix miniwob"

  def __init__(
    self,
    pages: int,
    families: tuple[str, ...],
    settings,
    *,
    in_turn: bool = False,
    spare: int = 0,
  ):
    self._pages = pages
    self._families = families
    self._settings = settings
    self._in_turn = in_turn
    self._spare = spare
    self._begun = 0
    self._tasks = miniwob.MiniWobTasks()
    self._episode = [0] * pages

  async def open(self) -> None:
    """Opening the tabs is not what is measured."""
    self._browser = miniwob.Browser(
      max_pages=self._pages, spare=self._spare, idle_s=3600
    )
    self._gyms = [
      miniwob.MiniWobGym(browser=self._browser, **self._settings)
      for _ in range(self._pages)
    ]
    for number, gym in enumerate(self._gyms):
      await gym.start(self._tasks.task(self._family(number), 0))
    if self._in_turn:
      for gym in self._gyms:
        await gym.close()
      await self.play(_SETTLING_S)  # Until the spare tabs are open.

  def _family(self, number: int) -> str:
    if self._in_turn:
      number = self._begun // _GROUP
      self._begun += 1
    return self._families[number % len(self._families)]

  async def play(self, seconds: float) -> Times:
    times = Times()
    leader, own = self._browser.pid, os.getpid()

    def ours(pid: int) -> bool:
      return pid == own or os.getpgid(pid) == leader

    cpu = cpu_s(ours)
    end = time.perf_counter() + seconds
    await asyncio.gather(
      *(self._play(number, times, end) for number in range(self._pages))
    )
    times.cpu_s = cpu_s(ours) - cpu
    times.memory_mb = memory_mb(lambda pid: os.getpgid(pid) == leader)
    return times

  async def _play(self, number: int, times: Times, end: float) -> None:
    gym, rng = self._gyms[number], random.Random(number)
    steps: list[float] = []
    starts: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() < end:
      at = time.perf_counter()
      seed = 1000 * number + self._episode[number]
      await gym.start(self._tasks.task(self._family(number), seed))
      starts.append(time.perf_counter() - at)
      self._episode[number] += 1
      for _ in range(4):
        action = gui_action.GuiAction(
          gui_action.GuiActionKind.CLICK,
          x=rng.randrange(160),
          y=rng.randrange(50, 210),
        )
        at = time.perf_counter()
        observation = await gym.act(action)
        steps.append(time.perf_counter() - at)
        if observation.done:
          break
      if self._in_turn:
        await gym.close()
    times.player(steps, starts, time.perf_counter() - began)

  async def close(self) -> None:
    for gym in self._gyms:
      await gym.close()
    await self._browser.close()


class Peer:
  """Another environment, each episode in a process of its own.

  Attributes:
    goals: family -> seed -> what its instance asked.
  """

  def __init__(
    self, name: str, python: str, pages: int, families: tuple[str, ...]
  ):
    self.name = name
    self.goals: dict[str, dict[str, str]] = {}
    self._command = [python, str(_WORKER), name]
    self._families = [families[i % len(families)] for i in range(pages)]
    self._workers: list[subprocess.Popen] = []

  async def open(self) -> None:
    """Raises RuntimeError: it does not start; with its last words."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome") or ""
    environment = os.environ | {
      "PEER_CHROMIUM": chromium,
      "MINIWOB_URL": miniwob_tasks.pages_directory().as_uri() + "/",
    }
    driver = shutil.which("chromedriver")
    if chromium and driver:
      environment["MINIWOB_CHROME_BINARY"] = chromium
      environment["MINIWOB_CHROMEDRIVER"] = driver
    for number, family in enumerate(self._families):
      self._workers.append(
        subprocess.Popen(
          [*self._command, family, str(number)],
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          stderr=subprocess.PIPE,
          text=True,
          env=environment,
          start_new_session=True,
        )
      )
    for worker in self._workers:
      if await asyncio.to_thread(_line, worker) != "ready":
        raise RuntimeError(_last_words(worker))

  async def play(self, seconds: float) -> Times:
    """Raises RuntimeError: a process has ended; with its last words."""
    sessions = {worker.pid for worker in self._workers}
    cpu = cpu_s(lambda pid: os.getsid(pid) in sessions)
    for worker in self._workers:
      worker.stdin.write(f"{seconds}\n")
      worker.stdin.flush()
    times = Times()
    for worker in self._workers:
      text = await asyncio.to_thread(_line, worker)
      if not text:
        raise RuntimeError(_last_words(worker))
      one = json.loads(text)
      times.player(one["steps"], one["starts"], one["took"])
      self.goals.setdefault(one["family"], {}).update(one["goals"])
    times.cpu_s = cpu_s(lambda pid: os.getsid(pid) in sessions) - cpu
    times.memory_mb = memory_mb(lambda pid: os.getsid(pid) in sessions)
    return times

  async def close(self) -> None:
    for worker in self._workers:
      with contextlib.suppress(OSError):
        worker.stdin.close()
    end = time.monotonic() + 20
    for worker in self._workers:
      with contextlib.suppress(subprocess.TimeoutExpired):
        await asyncio.to_thread(worker.wait, max(0.1, end - time.monotonic()))
      with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)


def _line(worker: subprocess.Popen) -> str:
  """The next line of a worker that begins as ours do, "" at its end."""
  # One that hangs is killed, which ends its output.
  timer = threading.Timer(_READY_S, worker.kill)
  timer.start()
  try:
    for line in worker.stdout:
      if line.startswith(("ready", "{")):
        return line.strip()
    return ""
  finally:
    timer.cancel()


def _last_words(worker: subprocess.Popen) -> str:
  worker.kill()
  return worker.stderr.read().strip()[-300:].replace("\n", " | ")


async def agreement(goals: dict[str, dict[str, str]]) -> str:
  """Returns how many of a peer's goals equal this gym's, for the same seeds."""
  tasks = miniwob.MiniWobTasks()
  browser = miniwob.Browser()
  gym = miniwob.MiniWobGym(browser=browser)
  same = count = 0
  for family, of_seed in goals.items():
    for seed, goal in list(of_seed.items())[:8]:
      observation = await gym.start(tasks.task(family, int(seed)))
      same += observation.instruction.strip() == goal.strip()
      count += 1
  await gym.close()
  await browser.close()
  return f"{same} of {count} goals are the same"


async def compare(
  pages: int, args: argparse.Namespace, families: tuple[str, ...]
) -> list[dict[str, Any]]:
  """Rows of all, and how many times a peer's steps a second ours are.

  All are open at the same time and play in turn, `args.rounds` times: what
  else the machine does meets all of them.
  """
  settings = {
    "quick_restart": not args.always_load,
    "final_screenshot": not args.no_final_screenshot,
  }
  playing: list[Any] = [
    Ours(pages, families, settings, in_turn=args.in_turn, spare=args.spare)
  ]
  for name in args.peers:
    own = {"browsergym": args.browsergym_python}
    python = own.get(name, sys.executable)
    playing.append(Peer(name, python, pages, families))
  rounds: dict[str, list[Times]] = {}
  for one in list(playing):
    try:
      await one.open()
    except (OSError, RuntimeError) as error:
      print(f"{one.name}: not available: {error}")
      playing.remove(one)
      await one.close()
  try:
    for _ in range(args.rounds):
      for one in playing:
        rounds.setdefault(one.name, []).append(await one.play(args.seconds))
  finally:
    for one in playing:
      await one.close()
  rows = [
    Times.of_rounds(rounds[one.name]).row(one.name, pages) for one in playing
  ]
  for row in rows:
    print(json.dumps(row), flush=True)
  cpu = {
    name: sum(one.cpu_s for one in of) / sum(len(one.steps) for one in of)
    for name, of in rounds.items()
  }
  for one in playing[1:]:
    ratios = sorted(
      own_times.steps_per_s / peer_times.steps_per_s
      for own_times, peer_times in zip(rounds[Ours.name], rounds[one.name])
    )
    text = ", ".join(f"{ratio:.1f}" for ratio in ratios)
    print(
      f"  times the steps a second of {one.name}, by round: {text};"
      f" median {ratios[len(ratios) // 2]:.1f}"
    )
    print(
      f"  {cpu[one.name] / cpu[Ours.name]:.1f} times less processor time a"
      f" step than {one.name}"
    )
    print(f"  {one.name}: {await agreement(one.goals)}", flush=True)
  return rows


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--pages", default="1,8,16")
  parser.add_argument("--seconds", type=float, default=6.0)
  parser.add_argument("--rounds", type=int, default=1)
  parser.add_argument("--families", default=",".join(FAMILIES))
  parser.add_argument("--always-load", action="store_true")
  parser.add_argument("--no-final-screenshot", action="store_true")
  parser.add_argument("--in-turn", action="store_true")
  parser.add_argument("--spare", type=int, default=2)
  parser.add_argument(
    "--peers",
    nargs="*",
    default=[],
    choices=("selenium", "browsergym"),
    help="to compare with",
  )
  parser.add_argument(
    "--browsergym-python", default=".venv-browsergym/bin/python"
  )
  parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
  args = parser.parse_args()
  print("load", os.getloadavg(), "cores", os.cpu_count())
  rows = []
  for pages in map(int, args.pages.split(",")):
    rows += asyncio.run(compare(pages, args, tuple(args.families.split(","))))
  if args.json:
    args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
  main()
