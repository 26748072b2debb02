"""The monitor under everything that can fail, for long.

    python benchmarks/soak_monitor.py [kills=100] [only=server,network,...]

- server, trainer: kill -9 of either, under load.
- run: kill -9 of a run's trainer, of its uploader, or of both.
- uploader: kill -9 of a run's uploader; its rows must be those of a run that
  is left in peace.
- postgres: the same on PostgreSQL, where that is installed; then kill -9 of
  one of its own processes, and `pg_ctl stop -m immediate` of all of it, a
  fifth as often each.
- network: 5 % of the requests lost, repeated, reordered, refused or cut off.
- disk: every sync of the database and of a spool fails once, and three times
  in a row; each also as a crash.
- full: a disk that is full again and again: a file system of its own where
  the user is root, else a limit of the process.
- clock: a wall clock that jumps by a day, either way.

Each prints what it found. Exits with 1 unless nothing that was acknowledged is
lost, nothing is stored twice or in part, and the integrity check is clean.
"""

import contextlib
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
for folder in ("packages/training_monitor/tests/helpers", "tests/helpers"):
  sys.path.insert(0, str(ROOT / folder))
import monitor_databases  # noqa: E402
import monitor_faults  # noqa: E402
import monitor_kills  # noqa: E402
import monitor_network  # noqa: E402


class Skipped(Exception):
  """Not possible here; says why."""


def _kills(outcome: monitor_kills.Outcome) -> tuple[bool, str]:
  return outcome.clean, (
    f"{outcome.kills} kills, {outcome.acknowledged} episodes acknowledged,"
    f" {outcome.stored} stored, {len(outcome.lost)} lost,"
    f" {len(outcome.repeated)} twice, {len(outcome.partial)} in part,"
    f" integrity {outcome.integrity}"
  )


def server(folder: pathlib.Path, kills: int) -> tuple[bool, str]:
  return _kills(monitor_kills.kill_server(folder, kills))


def trainer(folder: pathlib.Path, kills: int) -> tuple[bool, str]:
  return _kills(monitor_kills.kill_trainer(folder, kills))


def run(folder: pathlib.Path, kills: int) -> tuple[bool, str]:
  return _kills(monitor_kills.kill_run(folder, kills))


def uploader(folder: pathlib.Path, kills: int) -> tuple[bool, str]:
  wrong = monitor_kills.kill_uploader(folder, kills)
  return not wrong, f"{kills} kills, {wrong or 'every row is the same'}"


def postgres(folder: pathlib.Path, kills: int) -> tuple[bool, str]:
  try:
    with monitor_databases.postgres_server(durable=True) as url:
      rounds = {
        "server": lambda own: monitor_kills.kill_server(
          own, kills, target=monitor_databases.empty_database(url)
        ),
        "trainer": lambda own: monitor_kills.kill_trainer(
          own, kills, target=monitor_databases.empty_database(url)
        ),
        "backend": lambda own: monitor_kills.kill_postgres(
          own, max(1, kills // 5), url, "backend"
        ),
        "immediate": lambda own: monitor_kills.kill_postgres(
          own, max(1, kills // 5), url, "immediate"
        ),
      }
      clean, texts = True, []
      for name, run in rounds.items():
        (folder / name).mkdir()
        good, text = _kills(run(folder / name))
        clean &= good
        print(f"postgres, {name}: {text}", flush=True)
        texts.append(f"{name} {'clean' if good else 'NOT CLEAN'}")
      return clean, ", ".join(texts)
  except monitor_databases.NoPostgres as reason:
    raise Skipped(reason) from None


def network(folder: pathlib.Path, kills: int) -> tuple[bool, str]:
  report = monitor_network.soak(folder, episodes=20 * kills, share=0.05)
  return not report["wrong"], str(report)


def _faults(
  folder: pathlib.Path, scenario: str, **options: int
) -> tuple[bool, str]:
  try:
    library = monitor_faults.build(folder)
  except monitor_faults.NoCompiler as reason:
    raise Skipped(reason) from None
  report = monitor_faults.run(
    library, scenario, folder / scenario, timeout_s=3600, **options
  )
  return not report["wrong"], str(report)


def disk(folder: pathlib.Path, kills: int) -> tuple[bool, str]:
  del kills  # There are as many as there are syncs.
  parts = [
    _faults(folder / f"{times}{scenario}", scenario, times=times)
    for scenario in ("sync_server", "sync_spool")
    for times in (1, 3)
    if (folder / f"{times}{scenario}").mkdir() is None
  ]
  return all(good for good, _ in parts), "; ".join(text for _, text in parts)


def full(folder: pathlib.Path, kills: int) -> tuple[bool, str]:
  with contextlib.ExitStack() as stack:
    small = folder / "small"
    small.mkdir()
    if os.getuid() == 0:
      mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(small)],
        capture_output=True,
        timeout=30,
        check=False,
      )
      if mounted.returncode == 0:
        stack.callback(
          subprocess.run, ["umount", "-l", str(small)], timeout=30, check=False
        )
        good, text = _faults(small, "full_for_real", rounds=max(2, kills // 20))
        return good, f"tmpfs of 6 MB: {text}"
    return _faults(small, "full", rounds=max(2, kills // 10))


def clock(folder: pathlib.Path, kills: int) -> tuple[bool, str]:
  return _faults(folder, "clock", episodes=kills)


SOAKS = {
  f.__name__: f
  for f in (
    server,
    trainer,
    run,
    uploader,
    postgres,
    network,
    disk,
    full,
    clock,
  )
}


def main() -> int:
  options = dict(a.split("=", 1) for a in sys.argv[1:] if "=" in a)
  kills = int(options.get("kills", 100))
  chosen = options.get("only", ",".join(SOAKS)).split(",")
  unknown = sorted(set(chosen) - set(SOAKS))
  if unknown:
    print(f"error: only={unknown[0]}: give some of {', '.join(SOAKS)}")
    return 2
  logging.disable()  # It is all trouble, and meant.
  clean = True
  for name in chosen:
    with tempfile.TemporaryDirectory() as folder:
      began = time.monotonic()
      try:
        good, text = SOAKS[name](pathlib.Path(folder), kills)
      except Skipped as reason:
        print(f"{name}: skipped, {reason}", flush=True)
        continue
      clean &= good
      seconds = time.monotonic() - began
      verdict = "clean" if good else "NOT CLEAN"
      print(f"{name}: {verdict} in {seconds:.0f} s, {text}", flush=True)
  return 0 if clean else 1


if __name__ == "__main__":
  sys.exit(main())
