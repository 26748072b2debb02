"""Trains with a rollout host behind a slow, lossy or broken network.

The learner and a rollout host (`rollout.via=hosts`) run in two network
namespaces (tests/helpers/lossy_link.py), staleness 0, with the same seeds:

  direct                     no delay, no loss
  1ms, 10ms                  each way
  10ms-loss, 10ms-loss-bbr   10 ms and 1 % loss each way; TCP's cubic, or BBR
  cut                        10 ms; no packet passes for 30 s in the middle

Printed for each: seconds of an update (median, longest), of them the learner's
wait, bytes both ways, and whether rewards and losses equal the first path's.

  python benchmarks/bench_network.py                 # about 10 minutes
  python benchmarks/bench_network.py --steps 6 --paths direct cut
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import lossy_link  # noqa: E402

CUT_S = 30.0
PATHS = {
  "direct": lossy_link.NetworkPath(),
  "1ms": lossy_link.NetworkPath(0.001),
  "10ms": lossy_link.NetworkPath(0.010),
  "10ms-loss": lossy_link.NetworkPath(0.010, 0.01),
  "10ms-loss-bbr": lossy_link.NetworkPath(0.010, 0.01, "bbr"),
  "cut": lossy_link.NetworkPath(0.010),
}


def measure(
  name: str, folder: pathlib.Path, steps: int, settings: Sequence[str]
) -> dict[str, Any]:
  """Trains once over `PATHS[name]`; returns its figures."""
  run = folder / name
  arguments = [
    "-m", "tunix.rl.multi_turn.train", f"name={name}", f"run.dir={folder}",
    "rollout.via=hosts", f"rollout.host={lossy_link.ENDS[0]}",
    "rollout.silence_s=10", "queue.max_staleness=0", f"steps={steps}",
    "eval.on=false", "checkpoint.every=0", *settings,
  ]  # fmt: skip
  began = time.monotonic()
  with lossy_link.Link(PATHS[name]) as link:
    log = folder / f"{name}-learner.log"
    learner = link.start(0, *arguments, log=log)
    # The host sees the learner's address only, so that weights travel.
    far = folder / f"{name}-far"
    far.mkdir()
    (far / "rollout.json").symlink_to(run.absolute() / "rollout.json")
    command = ("-m", "tunix.rl.multi_turn.commands.rollout", str(far))
    host = link.start(1, *command, log=folder / f"{name}-host.log")
    try:
      metrics = run / "metrics.jsonl"
      to_cut = name == "cut"
      while learner.poll() is None:
        if time.monotonic() - began > 1800:
          raise TimeoutError(f"{name}: no end within 1,800 s; see {folder}")
        if to_cut and len(_rows(metrics)) >= steps // 2:
          link.cut(CUT_S)
          to_cut = False
        time.sleep(0.2)
      if learner.returncode:
        raise RuntimeError(f"{name}: see {log}")
      host.wait(60)
      to_host, back = link.bytes
    finally:
      learner.kill()
      host.kill()
  rows = _rows(metrics)
  later = rows[1:]  # The first update compiles.
  return {
    "path": name,
    "update_s": statistics.median(row["time/step"] for row in later),
    "wait_s": statistics.median(row["time/wait"] for row in later),
    "longest_s": max(row["time/step"] for row in later),
    "to_host_mb": to_host / 1e6,
    "back_mb": back / 1e6,
    "curve": [(row["reward_mean"], row["loss"]) for row in rows],
  }


def _rows(metrics: pathlib.Path) -> list[dict[str, float]]:
  if not metrics.exists():
    return []
  return [json.loads(line) for line in metrics.read_text().splitlines()]


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument("--steps", type=int, default=8)
  parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
  parser.add_argument("--folder", type=pathlib.Path, default=None)
  parser.add_argument("settings", nargs="*", help="more settings of the run")
  args = parser.parse_args()
  if not lossy_link.available():
    print("error: needs root, ip (apt-get install iproute2) and /dev/net/tun")
    return 2
  folder = args.folder or pathlib.Path(tempfile.mkdtemp("-network"))
  folder.mkdir(parents=True, exist_ok=True)
  results = []
  print("| path | update, s | longest | wait | to host, MB | back | curve |")
  print("|---|---|---|---|---|---|---|")
  for name in args.paths:
    row = measure(name, folder, args.steps, args.settings)
    results.append(row)
    same = "equal" if row["curve"] == results[0]["curve"] else "DIFFERS"
    print(
      f"| {name} | {row['update_s']:.2f} | {row['longest_s']:.1f} |"
      f" {row['wait_s']:.2f} | {row['to_host_mb']:.1f} |"
      f" {row['back_mb']:.1f} | {same} |",
      flush=True,
    )
  (folder / "network.json").write_text(json.dumps(results, indent=1))
  return 0


if __name__ == "__main__":
  sys.exit(main())
