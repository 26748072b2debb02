"""Speed and soundness of the `xdesktop` gym.

  python benchmarks/bench_xdesktop.py
  python benchmarks/bench_xdesktop.py --only latency --displays 1,8
  python benchmarks/bench_xdesktop.py --only tasks --instances 3
  python benchmarks/bench_xdesktop.py --only resets --resets 500

latency: p50 and p99 of a screenshot, of input alone, and of a step (an action,
the wait until the desktop is at rest, a screenshot), on several desktops in
parallel. The peer of the screenshot is the core protocol's GetImage, which
sends the pixels through the socket, on the same display, alternating with it;
of input, one `xdotool` process an action, where xdotool is installed.

tasks: for each family, how often its oracle solves it, how often doing nothing
does, turns and seconds.

resets: starts that many episodes one after the other and counts processes,
files, sockets, shared memory and descriptors before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable

from cua_gyms import xdesktop
from cua_gyms.sandbox import rooms
from cua_gyms.sandbox import sandbox_errors
from cua_gyms.xdesktop import scripted_actions
import numpy as np
from tunix.rl.multi_turn.core import gui_action
import xcffib
from xcffib import xproto

Action, Kind = gui_action.GuiAction, gui_action.GuiActionKind
TASKS = xdesktop.XDesktopTasks()
_ROUNDS = 100


def _ms(seconds: list[float]) -> str:
  p50, p99 = np.quantile(seconds, (0.5, 0.99)) * 1e3
  return f"p50 {p50:7.2f} ms  p99 {p99:7.2f} ms  n={len(seconds)}"


def _timed(call: Callable[[], Any]) -> float:
  began = time.perf_counter()
  call()
  return time.perf_counter() - began


# --- latency ------------------------------------------------------------------


def _over_the_socket(display: Any) -> np.ndarray:
  """The same picture by the core protocol."""
  c = display._connection  # pylint: disable=protected-access
  size = display.width * display.height * 4
  request = c.core.GetImage(
    xproto.ImageFormat.ZPixmap,
    display._root,
    0,
    0,
    display.width,
    display.height,
    0xFFFFFFFF,
  )
  # Not `reply()`: xcffib would make each byte a Python number.
  reply = c.wait_for_reply(request.sequence)
  data = np.frombuffer(xcffib.ffi.buffer(reply.cdata, 32 + size), np.uint8)
  bgrx = data[32:].reshape(display.height, display.width, 4)
  pixels = np.empty((display.height, display.width, 3), np.uint8)
  for channel in range(3):
    pixels[..., channel] = bgrx[..., 2 - channel]
  return pixels


def _raw(gym: xdesktop.XDesktopGym) -> None:
  """Screenshot and input of one display, against their peers."""
  display = gym.desktop.display
  shared, socket = [], []
  np.testing.assert_array_equal(
    display.screenshot(False), _over_the_socket(display)
  )
  for _ in range(_ROUNDS):
    shared.append(_timed(lambda: display.screenshot(False)))
    socket.append(_timed(lambda: _over_the_socket(display)))
  ratio = statistics.median(socket) / statistics.median(shared)
  print(f"  screenshot, MIT-SHM            {_ms(shared)}")
  print(f"  peer: GetImage over the socket {_ms(socket)}  = {ratio:.1f}x")
  with_pointer = [_timed(display.screenshot) for _ in range(_ROUNDS)]
  print(f"  screenshot with the pointer    {_ms(with_pointer)}")
  clicks, peer = [], []
  xdotool = shutil.which("xdotool")
  room = gym.desktop.room
  environment = {
    "DISPLAY": f":{gym.desktop._number}",  # pylint: disable=protected-access
    "XAUTHORITY": str(room.tmp / ".Xauthority"),
    "PATH": os.environ.get("PATH", ""),
  }
  for i in range(_ROUNDS):
    clicks.append(_timed(lambda i=i: display.click(600 + 40 * (i % 9), 700)))
    if xdotool and i % 5 == 0:
      command = [xdotool, "mousemove", "900", "700", "click", "1"]
      peer.append(
        _timed(
          lambda command=command: subprocess.run(
            command,
            env=environment,
            check=True,
            timeout=10,
            capture_output=True,
          )
        )
      )
  print(f"  a click, XTEST                 {_ms(clicks)}")
  if peer:
    ratio = statistics.median(peer) / statistics.median(clicks)
    print(f"  peer: xdotool                  {_ms(peer)}  = {ratio:.0f}x")
  else:
    print("  peer: xdotool is not installed")


async def _steps(
  gym: xdesktop.XDesktopGym, number: int, end: float
) -> tuple[list[float], list[float]]:
  """Seconds of starts and of steps, until `end`."""
  rng = np.random.default_rng(number)
  names = ("editor-append-line", "terminal-make-folders", "files-rename")
  starts, steps = [], []
  while time.perf_counter() < end or not steps:
    task = TASKS.train_task(names[number % len(names)], len(starts), number)
    began = time.perf_counter()
    await gym.start(task)
    starts.append(time.perf_counter() - began)
    for turn in range(20):
      if turn % 3 == 2:
        action = Action(Kind.TYPE, text="abc")
      else:
        x, y = rng.integers((100, 100), (700, 480))
        action = Action(Kind.CLICK, x=float(x), y=float(y))
      began = time.perf_counter()
      await gym.act(action)
      steps.append(time.perf_counter() - began)
  return starts, steps


async def _latency(args: argparse.Namespace) -> None:
  # The peers know displays by number, which those in namespaces have not.
  gym = xdesktop.XDesktopGym(
    isolation="processes", launch_s=args.launch_s, call_s=120.0
  )
  try:
    await gym.start(TASKS.train_task("terminal-make-folders", 0))
    print("one display of 1024x768:")
    _raw(gym)
  finally:
    await gym.close()
  for count in args.displays:
    gyms = [_gym(args) for _ in range(count)]
    try:
      began = time.perf_counter()
      timings = await asyncio.gather(
        *(_steps(gym, i, began + args.seconds) for i, gym in enumerate(gyms))
      )
      spent = time.perf_counter() - began
      steps = [s for _, part in timings for s in part]
      starts = [s for part, _ in timings for s in part]
      print(f"{count} desktops in parallel: {len(steps) / spent:.0f} steps/s")
      print(f"  a step, at rest after          {_ms(steps)}")
      print(f"  a start                        {_ms(starts)}")
    finally:
      for gym in gyms:
        await gym.close()


# --- tasks --------------------------------------------------------------------


async def _tasks(args: argparse.Namespace) -> int:
  """Prints the table; returns how many episodes did not go as they should."""
  wrong = 0
  gym = _gym(args)
  print(f"{'family':24} {'oracle':>7} {'no-op':>7} {'turns':>7} {'seconds':>8}")
  try:
    for family in args.families or TASKS.families():
      solved = idle = 0
      turns, seconds = [], []
      for index in range(args.instances):
        task = TASKS.eval_task(family, index)
        began = time.perf_counter()
        try:
          await gym.start(task)
          for _ in range(args.idle_turns):
            await gym.act(Action(Kind.WAIT, duration=0.0))
          idle += (await gym.evaluate()).success
          action_count = 0
          while (action := await xdesktop.oracle_action(gym)) is not None:
            await gym.act(action)
            action_count += 1
          verdict = await gym.evaluate()
        except (
          sandbox_errors.DesktopError,
          scripted_actions.Unsolvable,
          TimeoutError,
        ) as error:
          print(f"  {task.task_id}: {type(error).__name__}: {error}")
          wrong += 1
          continue
        if not verdict.success:
          print(f"  {task.task_id}: {verdict.details['reason']}")
        solved += verdict.success and action_count <= task.max_turns
        turns.append(action_count)
        seconds.append(time.perf_counter() - began)
      n = args.instances
      wrong += (n - solved) + idle
      print(
        f"{family:24} {f'{solved}/{n}':>7} {f'{idle}/{n}':>7}"
        f" {max(turns, default=0):7d}"
        f" {statistics.median(seconds or [0]):8.2f}",
        flush=True,
      )
  finally:
    await gym.close()
  return wrong


# --- resets -------------------------------------------------------------------


def _counted(directory: pathlib.Path, names: set[str]) -> dict[str, int]:
  """Counts what desktops in the named rooms could leave behind."""
  processes = 0
  for entry in pathlib.Path("/proc").iterdir():
    if entry.name.isdigit():
      try:
        environ = (entry / "environ").read_bytes().decode(errors="replace")
      except OSError:
        continue  # Ended since, or of another user.
      mark = re.search(rf"{rooms.MARK}=({rooms.PREFIX}\w+)", environ)
      processes += bool(mark) and mark[1] in names
  return {
    "processes": processes,
    "files": sum(1 for _ in directory.rglob("*")),
    "displays": len(list(pathlib.Path("/tmp").glob(".X*-lock"))),
    "sockets": len(list(pathlib.Path("/tmp").glob(".X11-unix/*"))),
    "descriptors": len(os.listdir("/proc/self/fd")),
    "memory maps": sum(
      "xdesktop-screenshot" in line
      for line in pathlib.Path("/proc/self/maps").read_text().splitlines()
    ),
  }


async def _resets(args: argparse.Namespace) -> int:
  families = TASKS.families()
  with tempfile.TemporaryDirectory(prefix="xd-") as directory:
    path = pathlib.Path(directory)
    gyms = [_gym(args, directory=directory) for _ in range(args.parallel)]
    # The first makes what stays: threads and their like.
    await gyms[0].start(TASKS.train_task(families[0], 0))
    await gyms[0].close()
    names: set[str] = set()
    before = _counted(path, names)
    seconds: list[float] = []
    lost: list[str] = []
    numbers = iter(range(args.resets))

    async def reset(gym: xdesktop.XDesktopGym) -> None:
      for number in numbers:
        if time.perf_counter() - start > args.at_most_s:
          return
        task = TASKS.train_task(families[number % len(families)], number)
        began = time.perf_counter()
        try:
          await gym.start(task)
          names.add(gym.desktop.room.path.name)
          await gym.act(Action(Kind.CLICK, x=300, y=300))
        except (sandbox_errors.DesktopError, TimeoutError) as error:
          lost.append(f"{task.task_id}: {type(error).__name__}: {error}")
          continue
        seconds.append(time.perf_counter() - began)
        if len(seconds) % 50 == 0:
          print(f"  {len(seconds)} resets", flush=True)

    start = time.perf_counter()
    await asyncio.gather(*map(reset, gyms))
    spent = time.perf_counter() - start
    for gym in gyms:
      await gym.close()
    after = _counted(path, names)
  print(
    f"{len(seconds)} resets, {args.parallel} at a time, in {spent:.0f} s;"
    f" lost: {len(lost)}; {_ms(seconds)}"
  )
  for text in lost[:10]:
    print(f"  {text}")
  wrong = len(lost)
  for name, count in before.items():
    note = "" if after[name] <= count else "   <- left behind"
    wrong += bool(note)
    print(f"  {name:12} before {count:4d}, after {after[name]:4d}{note}")
  return wrong


def _gym(args: argparse.Namespace, **settings: Any) -> xdesktop.XDesktopGym:
  return xdesktop.XDesktopGym(
    isolation=args.isolation, launch_s=args.launch_s, call_s=120.0, **settings
  )


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  add = parser.add_argument
  add("--only", choices=("latency", "tasks", "resets"))
  add("--displays", default="1,8", help="numbers of desktops in parallel")
  add("--seconds", type=float, default=10.0, help="of each number of them")
  add("--instances", type=int, default=1, help="of each family")
  add("--families", default="", help="A,B: those of the table (all)")
  add("--idle-turns", type=int, default=2)
  add("--resets", type=int, default=20)
  add("--at-most-s", type=float, default=3600.0, help="of the resets")
  add("--parallel", type=int, default=2, help="desktops of the soak")
  add("--isolation", default="auto")
  add("--launch-s", type=float, default=60.0)
  args = parser.parse_args()
  args.displays = [int(n) for n in args.displays.split(",")]
  args.families = [name for name in args.families.split(",") if name]
  if xdesktop.missing():
    print(f"skipped: no {', '.join(xdesktop.missing())} (sudo make desktop)")
    return 0
  wrong = 0
  if args.only in (None, "latency"):
    asyncio.run(_latency(args))
  if args.only in (None, "tasks"):
    wrong += asyncio.run(_tasks(args))
  if args.only in (None, "resets"):
    wrong += asyncio.run(_resets(args))
  return int(wrong > 0)


if __name__ == "__main__":
  sys.exit(main())
