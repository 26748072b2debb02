"""Speed of the `miniwob` gym: steps and resets a second, latency, memory.

Random clicks on a mix of tasks, all gyms in one process on one event loop, one
browser. Run it on an idle machine:

  python benchmarks/bench_miniwob.py --pages 1,8,16 --seconds 6

With --selenium it also runs the `miniwob` package's own environment, if
selenium, chromedriver and the package's dependencies are installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time

from tunix.rl.multi_turn import gui_action
from tunix.rl.multi_turn.environments.gyms import miniwob

FAMILIES = (
    "click-test-2", "click-button", "click-dialog", "enter-text",
    "click-checkboxes", "click-color", "click-shape", "use-slider",
)  # pyformat: disable


def memory_mb(pid: int) -> float:
  """Proportional set size of a process group's members, in MB."""
  total = 0
  for name in os.listdir("/proc"):
    if not name.isdigit():
      continue
    try:
      if os.getpgid(int(name)) != pid:
        continue
      with open(f"/proc/{name}/smaps_rollup", encoding="ascii") as file:
        for line in file:
          if line.startswith("Pss:"):
            total += int(line.split()[1])
    except (OSError, ProcessLookupError):
      continue
  return total / 1024


def percentile(values: list[float], part: float) -> float:
  values = sorted(values)
  return values[min(len(values) - 1, int(part * len(values)))]


async def measure(
    pages: int, seconds: float, families: tuple[str, ...], **settings
) -> dict[str, float]:
  """One row of the table; times in milliseconds."""
  tasks = miniwob.MiniWobTasks()
  browser = miniwob.Browser(max_pages=pages)
  steps: list[float] = []
  starts: list[float] = []
  gyms = [
      miniwob.MiniWobGym(browser=browser, **settings) for _ in range(pages)
  ]
  for i, gym in enumerate(gyms):  # Opening the tabs is not what is measured.
    await gym.start(tasks.task(families[i % len(families)], 0))

  async def play(gym: miniwob.MiniWobGym, number: int, end: float) -> None:
    rng = random.Random(number)
    episode = 0
    family = families[number % len(families)]
    while time.perf_counter() < end:
      began = time.perf_counter()
      await gym.start(tasks.train_task(family, episode, number))
      starts.append(time.perf_counter() - began)
      episode += 1
      for _ in range(4):
        action = gui_action.GuiAction(
            gui_action.GuiActionKind.CLICK,
            x=rng.randrange(160),
            y=rng.randrange(50, 210),
        )
        began = time.perf_counter()
        observation = await gym.act(action)
        steps.append(time.perf_counter() - began)
        if observation.done:
          break

  began = time.perf_counter()
  cpu = time.process_time()
  await asyncio.gather(
      *(play(g, i, began + seconds) for i, g in enumerate(gyms))
  )
  took = time.perf_counter() - began
  cpu = time.process_time() - cpu
  memory = memory_mb(browser.pid)
  for gym in gyms:
    await gym.close()
  await browser.close()
  operations = len(steps) + len(starts)
  return {
      "pages": pages,
      "steps_per_s": round(len(steps) / took, 1),
      "resets_per_s": round(len(starts) / took, 1),
      "step_p50_ms": round(1e3 * percentile(steps, 0.5), 1),
      "step_p99_ms": round(1e3 * percentile(steps, 0.99), 1),
      "reset_p50_ms": round(1e3 * percentile(starts, 0.5), 1),
      "python_ms_per_op": round(1e3 * cpu / operations, 2),
      "browser_mb": round(memory),
  }


def selenium_row(seconds: float) -> dict[str, float] | str:
  """The `miniwob` package's own environment, one page."""
  try:
    import gymnasium  # pylint: disable=g-import-not-at-top
    import miniwob as package  # pylint: disable=g-import-not-at-top
    from miniwob.action import ActionTypes  # pylint: disable=g-import-not-at-top

    gymnasium.register_envs(package)
    environment = gymnasium.make("miniwob/click-test-2-v1")
    environment.reset(seed=0)
  except Exception as error:  # pylint: disable=broad-except
    return f"not available: {type(error).__name__}: {str(error)[:200]}"
  rng = random.Random(0)
  steps, starts = [], []
  end = time.perf_counter() + seconds
  while time.perf_counter() < end:
    began = time.perf_counter()
    environment.reset(seed=len(starts))
    starts.append(time.perf_counter() - began)
    for _ in range(4):
      action = environment.unwrapped.create_action(
          ActionTypes.CLICK_COORDS,
          coords=[rng.randrange(160), rng.randrange(50, 210)],
      )
      began = time.perf_counter()
      _, _, done, _, _ = environment.step(action)
      steps.append(time.perf_counter() - began)
      if done:
        break
  environment.close()
  return {
      "steps_per_s": round(len(steps) / seconds, 1),
      "resets_per_s": round(len(starts) / seconds, 1),
      "step_p50_ms": round(1e3 * percentile(steps, 0.5), 1),
      "step_p99_ms": round(1e3 * percentile(steps, 0.99), 1),
      "reset_p50_ms": round(1e3 * percentile(starts, 0.5), 1),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--pages", default="1,8,16")
  parser.add_argument("--seconds", type=float, default=6.0)
  parser.add_argument("--families", default=",".join(FAMILIES))
  parser.add_argument("--always-load", action="store_true")
  parser.add_argument("--no-final-screenshot", action="store_true")
  parser.add_argument("--selenium", action="store_true")
  args = parser.parse_args()
  print("load", os.getloadavg(), "cores", os.cpu_count())
  for pages in map(int, args.pages.split(",")):
    row = asyncio.run(
        measure(
            pages,
            args.seconds,
            tuple(args.families.split(",")),
            quick_restart=not args.always_load,
            final_screenshot=not args.no_final_screenshot,
        )
    )
    print(json.dumps(row), flush=True)
  if args.selenium:
    print("selenium", json.dumps(selenium_row(args.seconds)))


if __name__ == "__main__":
  main()
