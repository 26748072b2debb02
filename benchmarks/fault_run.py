"""Kills, starves, damages and doubles training runs; nothing may be lost.

SIGKILL at random moments of cloning, evaluation, training and saving, with
staleness 0 and 2; SIGTERM and Ctrl-C once and twice; two resumptions at once; a
wall clock that jumps; disks of several sizes that fill up; cut, emptied and
bit-flipped files of every kind that a resumption reads. Each is resumed to its
end and compared with an undisturbed run; `tests/helpers/fault_runs.py` lists
the checks. Prints a table; exits with 1 if a check failed.

  python benchmarks/fault_run.py --kills 50          # of each stage: 2 hours
  python benchmarks/fault_run.py --kills 2 --disks 3 --damages 10

Faults come in random order; Ctrl-C ends with the table of the faults so far.

The clock needs a C compiler, the disks a Linux that lets this user mount a
tmpfs in a namespace of its own; without them those are left out, and said.
"""

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
HELPERS = ROOT / "tests" / "helpers"
MONITOR_HELPERS = ROOT / "packages" / "training_monitor" / "tests" / "helpers"
sys.path[:0] = [str(HELPERS), str(MONITOR_HELPERS)]

import fault_runs  # noqa: E402
import monitor_faults  # noqa: E402


def _count(fault: dict, table: dict[str, collections.Counter]) -> None:
  """Adds one fault to the table; prints it if a check failed."""
  what = fault["what"]
  if what == "kill":
    what = f"kill in {fault['how'][0]}, staleness {fault['how'][1]}"
  row = table.setdefault(what, collections.Counter())
  row["runs"] += 1
  row["kills"] += fault.get("kills", 0)
  row["seconds"] += fault["seconds"]
  if "failed" in fault:
    row["failed"] += 1
    print(f"FAILED {json.dumps(fault)}", flush=True)


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  for name, default in fault_runs.NUMBERS.items():
    parser.add_argument(f"--{name}", type=int, default=default)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--folder", type=pathlib.Path, default=None)
  arguments = vars(parser.parse_args())
  folder = arguments.pop("folder") or pathlib.Path(tempfile.mkdtemp("-faults"))
  env = {**os.environ, "JAX_PLATFORMS": "cpu"}
  env.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
  env.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
  try:
    library = monitor_faults.build(folder)
    env |= {"LD_PRELOAD": str(library), fault_runs.LIBRARY: str(library)}
  except monitor_faults.NoCompiler as error:
    print(f"no clock jumps: {error}")
  if not fault_runs.can_mount():
    print("no disks: this user cannot mount one (unshare -m fails)")
  options = [f"--{name}={value}" for name, value in arguments.items()]
  process = subprocess.Popen(
    [sys.executable, str(HELPERS / "fault_runs.py"), str(folder), *options],
    stdout=subprocess.PIPE,
    text=True,
    env=env,
  )
  table: dict[str, collections.Counter] = {}
  stopped = False
  try:
    for line in process.stdout:
      _count(json.loads(line), table)
      count = sum(row["runs"] for row in table.values())
      print(f"\r{count} faults", end="", file=sys.stderr, flush=True)
  except KeyboardInterrupt:
    print("\nstopped; a part, drawn at random:")
    stopped = True
    process.kill()
  code = process.wait()
  print(f"{'fault':36} {'runs':>5} {'kills':>6} {'failed':>7} {'seconds':>8}")
  for what, row in table.items():
    print(
      f"{what:36} {row['runs']:5} {row['kills']:6} {row['failed']:7}"
      f" {row['seconds']:8.0f}"
    )
  failed = sum(row["failed"] for row in table.values())
  return 1 if failed or (code and not stopped) else 0


if __name__ == "__main__":
  sys.exit(main())
