"""Speed of the desktop gym on one core: act + screenshot, resets, scenes.

Every step is a click at a random place, after which the picture is drawn anew
(the few that a dialog blocks reuse the last one). Time is process CPU time.
Run: python benchmarks/bench_desktop.py [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import time

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments.gyms import desktop

SIZES = ((128, 96), (160, 112), (224, 160), (640, 480), (1280, 720))
REQUIRED = {(128, 96): 2000, (224, 160): 500}  # steps a second


def measure(width: int, height: int, steps: int) -> dict[str, float]:
  """Steps/s, episode starts/s and random scenes/s at one size."""
  rng = random.Random(0)
  gym = desktop.DesktopGym(width, height)
  tasks = desktop.DesktopTasks()
  names = desktop.families()
  starts = act_time = start_time = 0.0
  step_count = 0
  slowest = {name: [0.0, 0] for name in names}
  while step_count < steps:
    name = names[int(starts) % len(names)]
    task = tasks.train_task(name, int(starts), difficulty=int(starts) % 3)
    begin = time.process_time()
    gym.start_sync(task)
    start_time += time.process_time() - begin
    starts += 1
    actions = [
      gui_action.GuiAction(
        "click", x=rng.randrange(width), y=rng.randrange(height)
      )
      for _ in range(5)
    ]
    begin = time.process_time()
    for action in actions:
      observation = gym.act_sync(action)
      step_count += 1
      slowest[name][1] += 1
      if observation.done:
        break
    spent = time.process_time() - begin
    act_time += spent
    slowest[name][0] += spent
  begin = time.process_time()
  for seed in range(200):
    gym.random_scene(seed)
    gym.referring_expressions()
  scene_time = (time.process_time() - begin) / 200
  per_family = {n: count / max(t, 1e-9) for n, (t, count) in slowest.items()}
  worst = min(per_family, key=per_family.get)
  return {
    "width": width,
    "height": height,
    "steps_per_s": step_count / act_time,
    "starts_per_s": starts / start_time,
    "scenes_per_s": 1 / scene_time,
    "slowest_family": worst,
    "slowest_steps_per_s": per_family[worst],
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--steps", type=int, default=4000)
  parser.add_argument("--json", action="store_true")
  args = parser.parse_args()
  measure(128, 96, 500)  # fills the caches of text and masks
  for size in SIZES:
    row = measure(*size, args.steps)
    if args.json:
      print(json.dumps(row))
      continue
    need = REQUIRED.get(size)
    verdict = (
      ""
      if need is None
      else (
        f"  (at least {need}:"
        f" {'met' if row['steps_per_s'] >= need else 'MISSED'})"
      )
    )
    print(
      f"{size[0]}x{size[1]}: {row['steps_per_s']:.0f} steps/s,"
      f" slowest {row['slowest_family']}"
      f" {row['slowest_steps_per_s']:.0f}; {row['starts_per_s']:.0f}"
      f" starts/s; {row['scenes_per_s']:.0f} scenes/s{verdict}"
    )


if __name__ == "__main__":
  main()
