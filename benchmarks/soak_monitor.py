"""kill -9 of the monitor's server and of trainers, under load, many times.

    python benchmarks/soak_monitor.py [kills=100]

Prints what was acknowledged, lost, stored twice and stored in part, and what
SQLite's integrity check says. Exits with 1 unless all of it is clean.
"""

import pathlib
import sys
import tempfile
import time

sys.path.insert(
    0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "helpers")
)
import monitor_kills  # noqa: E402


def main() -> int:
  options = dict(a.split("=", 1) for a in sys.argv[1:] if "=" in a)
  kills = int(options.get("kills", 100))
  clean = True
  for what, soak in (
      ("server", monitor_kills.kill_server),
      ("trainer", monitor_kills.kill_trainer),
  ):
    with tempfile.TemporaryDirectory() as folder:
      began = time.monotonic()
      found = soak(folder, kills)
      clean &= found.clean
      print(
          f"{what}: {found.kills} kills in {time.monotonic() - began:.0f} s,"
          f" {found.acknowledged} episodes acknowledged, {found.stored} stored,"
          f" {len(found.lost)} lost, {len(found.repeated)} twice,"
          f" {len(found.partial)} in part, integrity {found.integrity}",
          flush=True,
      )
  return 0 if clean else 1


if __name__ == "__main__":
  sys.exit(main())
