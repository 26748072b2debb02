"""Times updates of 16 episodes of 28 turns, by `learner.tree`.

    python benchmarks/bench_long_horizon.py
    python benchmarks/bench_long_horizon.py --window 3      # newest screenshots

Runs train with the shipped `tiny_vl` on a gym of drawn screens without an end,
with the tree of prefixes and without, in turns; the figures are medians of the
updates after each run's first, which compiles.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import zlib

from tunix.rl.multi_turn.environments import gyms
from tunix.rl.multi_turn.environments.gyms import base
from tunix.rl.multi_turn.environments.gyms import desktop

GROUPS, MEMBERS, TURNS = 2, 8, 28


class EndlessGym(desktop.DesktopGym):
  """Shows another screen after each action; rewards hash the actions."""

  def start_sync(self, task):
    self._screen, self._hash = task.seed, 0
    first = self.random_scene(self._screen)
    return dataclasses.replace(first, instruction="Look around.")

  def act_sync(self, action):
    self._screen += 1
    self._hash = zlib.crc32(repr(action).encode(), self._hash)
    return self.random_scene(self._screen)

  def evaluate_sync(self):
    return base.Evaluation(self._hash % 100 / 99, False, {})


class EndlessTasks(desktop.DesktopTasks):
  """Tasks that the run's `environment.max_turns` alone bounds."""

  def task(self, *args, **options):
    return dataclasses.replace(super().task(*args, **options), max_turns=None)


GYM = gyms.GymSpec(
  doc="screens without an end",
  make=EndlessGym,
  tasks=EndlessTasks,
  set_by_run=desktop.GYM.set_by_run,
)


def measure(tree: str, updates: int, window: int, folder: str) -> list[dict]:
  """Returns the metrics of a run's updates after its first.

  Each has the run's peak memory as well, `peak_gb`.
  """
  settings = [
    "gym=bench_long_horizon:GYM", "tasks=[click-button]", "warm_start.steps=0",
    f"environment.max_turns={TURNS}", "agent.on_parse_error=retry",
    f"agent.max_images={window}", "engine.context_length=4096",
    "learner.row_length=8192", "learner.rows=1", f"learner.tree={tree}",
    f"learner.groups_per_step={GROUPS}", f"collect.group_size={MEMBERS}",
    f"collect.concurrency={GROUPS * MEMBERS}", "queue.max_staleness=0",
    "eval.on=false", "checkpoint.every=0", "report.progress=none",
    f"steps={updates + 1}", f"run.dir={folder}", f"name={tree}",
  ]  # fmt: skip
  here = str(pathlib.Path(__file__).parent)
  paths = filter(None, [here, os.environ.get("PYTHONPATH")])
  process = subprocess.Popen(
    [sys.executable, "-m", "tunix.rl.multi_turn.train", *settings],
    stdout=sys.stderr,
    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
  )
  _, status, used = os.wait4(process.pid, 0)
  process.returncode = os.waitstatus_to_exitcode(status)
  if process.returncode:
    raise subprocess.CalledProcessError(process.returncode, process.args)
  peak = {"peak_gb": used.ru_maxrss * 1024 / 1e9}
  lines = pathlib.Path(folder, tree, "metrics.jsonl").read_text().splitlines()
  return [{**json.loads(line), **peak} for line in lines[1:]]


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--updates", type=int, default=3)
  parser.add_argument("--rounds", type=int, default=1)
  parser.add_argument("--window", type=int, default=0, help="0: all")
  parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
  args = parser.parse_args()
  readings: dict[str, list[dict]] = {"auto": [], "false": []}
  for _ in range(args.rounds):
    for tree, updates in readings.items():
      with tempfile.TemporaryDirectory() as folder:
        updates += measure(tree, args.updates, args.window, folder)
  report = {}
  for tree, updates in readings.items():
    of = lambda key, updates=updates: statistics.median(
      m.get(key, 0.0) for m in updates
    )
    report[tree] = {
      "episodes_per_hour": 3600 * GROUPS * MEMBERS / of("seconds_total"),
      "learner_s": of("seconds_learn"),
      "tokens": of("tokens"),
      "computed_tokens": of("tokens") - of("shared_tokens"),
      "prefill_per_unique_token": of("prefill_per_unique_token"),
      "peak_gb": of("peak_gb"),
    }
    print(f"learner.tree={tree}: {report[tree]}")
  if args.json:
    args.json.write_text(json.dumps(report))


if __name__ == "__main__":
  main()
