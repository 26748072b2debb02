"""Sums a trace's device time by kernel.

    python benchmarks/gpu/kernels.py FOLDER --json FILE [--top 25]

FOLDER is what `jax.profiler.trace` wrote. Prints each kernel's milliseconds,
calls and share of the device's busy time, the longest first; a trace without a
GPU is summed over the CPU's threads.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import re
import sys
from typing import Any

from jax.profiler import ProfileData


def _events(trace: ProfileData) -> list[Any]:
  """Returns the kernels of the GPU, or the events of the CPU's threads."""
  planes = [p for p in trace.planes if p.name.startswith("/device:GPU")]
  if planes:
    lines = [
      line for p in planes for line in p.lines if line.name.startswith("Stream")
    ]
  else:
    planes = [p for p in trace.planes if p.name == "/host:CPU"]
    lines = [line for p in planes for line in p.lines if "XLA" in line.name]
  return [event for line in lines for event in line.events]


def summary(folder: pathlib.Path, top: int) -> dict[str, Any]:
  """Returns busy time and span in ms, and the longest kernels."""
  (file,) = folder.rglob("*.xplane.pb")
  seconds: dict[str, float] = collections.defaultdict(float)
  calls: dict[str, int] = collections.defaultdict(int)
  example: dict[str, str] = {}
  start, end = float("inf"), 0.0
  for event in _events(ProfileData.from_file(str(file))):
    # Fusions of the same kind in different layers are one kernel.
    name = re.sub(r"[._]?\d+$", "", event.name)
    seconds[name] += event.duration_ns / 1e6
    calls[name] += 1
    if name not in example:
      stats = dict(event.stats)
      example[name] = str(stats.get("name") or stats.get("hlo_op") or "")
    start = min(start, event.start_ns)
    end = max(end, event.start_ns + event.duration_ns)
  busy = sum(seconds.values())
  longest = sorted(seconds, key=lambda name: -seconds[name])[:top]
  return {
    "busy_ms": round(busy, 2),
    "span_ms": round(max(0.0, end - start) / 1e6, 2),
    "kernels": [
      {
        "name": name[:120],
        "ms": round(seconds[name], 3),
        "calls": calls[name],
        "share": round(seconds[name] / busy, 4),
        "example": example[name][-160:],
      }
      for name in longest
    ],
  }


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--json", type=pathlib.Path)
  parser.add_argument("--top", type=int, default=25)
  args = parser.parse_args()
  report = summary(args.folder, args.top)
  if args.json:
    args.json.write_text(json.dumps(report, indent=2))
  print(f"{report['busy_ms']} ms busy in {report['span_ms']} ms")
  for kernel in report["kernels"]:
    print(
      f"{kernel['ms']:10.2f} ms {kernel['share']:6.1%} {kernel['calls']:6}"
      f"  {kernel['name'][:70]}  {kernel['example'][-60:]}"
    )
  return 0


if __name__ == "__main__":
  sys.exit(main())
