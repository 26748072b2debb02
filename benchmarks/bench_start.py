"""Seconds from the command to the first update of a new run.

Each round is a process of its own with an empty cache of compiled programs,
then one that finds what the first left there. The first update is the first
line of `metrics.jsonl`; importing, building, compiling and the first
evaluation come before it, cloning does not (the default policy has weights).

    python benchmarks/bench_start.py [--rounds 3] [--json FILE] [override ...]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

LIMIT = 600.0  # s, of a start.


def start(folder: pathlib.Path, name: str, overrides: list[str]) -> float:
  """Seconds until a run has updated once; the run ends with it.

  Raises:
    SystemExit: it ended before, or took longer than `LIMIT`.
  """
  began = time.perf_counter()
  argv = [
      sys.executable, "-m", "tunix.rl.multi_turn.train", f"run.dir={folder}",
      f"name={name}", "steps=1", "report.progress=none",
      f"run.compile_cache={folder / 'programs'}", *overrides,
  ]  # fmt: skip
  metrics = folder / name / "metrics.jsonl"
  with subprocess.Popen(
    argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
  ) as process:
    try:
      while time.perf_counter() - began < LIMIT:
        if metrics.is_file() and metrics.stat().st_size:
          return time.perf_counter() - began
        if process.poll() is not None:
          raise SystemExit(f"the run ended: {process.communicate()[1][-2000:]}")
        time.sleep(0.05)
      raise SystemExit(f"no update within {LIMIT:.0f} s")
    finally:
      process.kill()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
  parser.add_argument("overrides", nargs="*", help="of the configuration")
  args = parser.parse_args()
  times: dict[str, list[float]] = {"cold": [], "warm": []}
  for number in range(args.rounds):
    with tempfile.TemporaryDirectory() as name:
      for kind, seconds in times.items():
        seconds.append(start(pathlib.Path(name), kind, args.overrides))
        print(f"round {number + 1}, {kind}: {seconds[-1]:.1f} s", flush=True)
  report = {kind: statistics.median(of) for kind, of in times.items()}
  print(", ".join(f"{kind} {s:.1f} s" for kind, s in report.items()))
  if args.json:
    args.json.write_text(json.dumps(report | {"rounds": times}, indent=2))


if __name__ == "__main__":
  main()
