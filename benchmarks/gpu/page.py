"""Gathers the results of `run.sh` into gpu.json and gpu.md.

    python benchmarks/gpu/page.py OUT
    python benchmarks/gpu/page.py --device FILE

The second form writes what the device and its software are. A part without a
result is named as missing; nothing is filled in.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import pathlib
import platform
import sys
from typing import Any

PEAKS = {"H100": 989e12, "H200": 989e12}
"""Part of a device's name -> its dense bfloat16 FLOP/s, by its data sheet."""
PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "transformers")


def describe() -> dict[str, Any]:
  """Returns name, memory and software of the first device."""
  import jax  # pylint: disable=g-import-not-at-top

  device = jax.local_devices()[0]
  stats = device.memory_stats() or {}
  versions = {}
  for name in PACKAGES:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      versions[name] = "-"
  return {
    "device": device.device_kind,
    "platform": device.platform,
    "memory_gib": round(stats.get("bytes_limit", 0) / 2**30, 1),
    "python": platform.python_version(),
    "versions": versions,
    "date": datetime.date.today().isoformat(),
  }


def gather(folder: pathlib.Path) -> dict[str, Any]:
  """Returns each part's result by its name; None for a missing one."""
  results: dict[str, Any] = {}
  for name in (
    "device",
    "correctness",
    "quickstart",
    "learner_ours",
    "learner_torch",
  ):
    file = folder / f"{name}.json"
    text = file.read_text() if file.exists() else ""
    results[name] = json.loads(text) if text else None
  engines = sorted(
    folder.glob("engine_*.json"), key=lambda p: int(p.stem.split("_")[1])
  )
  results["engine"] = {
    p.stem.split("_")[1]: json.loads(p.read_text()) for p in engines
  }
  results["kernels"] = {
    p.stem.partition("_")[2]: json.loads(p.read_text())
    for p in sorted(folder.glob("kernels_*.json"))
  }
  return results


def page(results: dict[str, Any]) -> str:
  """Returns the page as Markdown."""
  device = results["device"] or {"device": "unknown device", "date": ""}
  versions = ", ".join(
    f"{k} {v}" for k, v in device.get("versions", {}).items()
  )
  lines = [
    f"# Measured on one {device['device']}",
    "",
    f"Made on {device['date']} by `benchmarks/gpu/run.sh`. {versions}.",
    "",
    "## Correctness",
    "",
  ]
  if checks := results["correctness"]:
    lines += ["Largest difference to the CPU:", "", "| | |", "|---|---|"]
    lines += [f"| {k} | {v:.1e} |" for k, v in checks["gaps"].items()]
  else:
    lines.append("No result.")
  lines += ["", "## A run", ""]
  run = results["quickstart"] or {}
  if run.get("status") == "completed":
    before, after = run["eval"]["warm_start"], run["eval"]["final"]
    lines.append(
      f"{run['step']} updates of the quickstart: held-out success"
      f" {_success(before)} before, {_success(after)} after."
    )
  else:
    lines.append("No result.")
  lines += ["", "## The learner", ""]
  sides = {"ours": results["learner_ours"], "torch": results["learner_torch"]}
  lines += [
    "| | tokens/s | s an update | MFU | peak memory, MB |",
    "|---|---|---|---|---|",
  ]
  for name, report in sides.items():
    if report is None:
      lines.append(f"| {name} | no result | | | |")
      continue
    row = report[name]
    mfu = _mfu(row, device["device"])
    lines.append(
      f"| {name} | {row['tokens_per_s']} | {row['wall_s']} | {mfu} |"
      f" {row['device_peak_mb']} |"
    )
  if all(sides.values()):
    scores = [report[name]["scores"] for name, report in sides.items()]
    gap = max(abs(a - b) for a, b in zip(*scores))
    lines += ["", f"Largest difference of both sides' log-probs: {gap:.1e}."]
  lines += [
    "",
    "## The engine",
    "",
    "| batch | tokens/s | ms a step | bound, ms | share of it |",
    "|---|---|---|---|---|",
  ]
  for batch, report in results["engine"].items():
    best = max(report["tried"], key=lambda tried: tried["fraction"])
    lines.append(
      f"| {batch} | {best['tokens_per_second']:.0f} | {best['step_ms']:.2f}"
      f" | {report['bound']['bound_ms']:.2f} | {best['fraction']:.0%} |"
    )
  if not results["engine"]:
    lines.append("| no result | | | | |")
  for name, trace in results["kernels"].items():
    busy = f"{trace['busy_ms']:.0f} ms busy of {trace['span_ms']:.0f}."
    lines += ["", f"## Longest kernels: {name.replace('_', ', batch ')}", "",
              busy, "", "| kernel | ms | calls | share |",
              "|---|---|---|---|"]  # fmt: skip
    lines += [
      f"| `{k['name'][:60]}` | {k['ms']:.1f} | {k['calls']} |"
      f" {k['share']:.0%} |"
      for k in trace["kernels"][:10]
    ]
  return "\n".join(lines) + "\n"


def _success(evaluation: dict[str, Any]) -> str:
  return f"{evaluation['sampled']['success_rate']:.3f}"


def _mfu(row: dict[str, Any], device: str) -> str:
  """Returns the share of the data sheet's FLOP/s, without recomputation."""
  peak = next((p for name, p in PEAKS.items() if name in device), 0)
  if not peak:
    return ""
  return f"{row['model_gflop'] * 1e9 / row['wall_s'] / peak:.0%}"


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("out", nargs="?", type=pathlib.Path)
  parser.add_argument("--device", type=pathlib.Path, metavar="FILE")
  args = parser.parse_args()
  if args.device:
    args.device.write_text(json.dumps(describe(), indent=2))
    return 0
  if args.out is None:
    parser.error("name the folder of results, or --device FILE")
  results = gather(args.out)
  text = page(results)
  for side in ("ours", "torch"):
    if report := results[f"learner_{side}"]:
      report[side].pop("scores", None)
  (args.out / "gpu.json").write_text(json.dumps(results, indent=2))
  (args.out / "gpu.md").write_text(text)
  print(text)
  return 0


if __name__ == "__main__":
  sys.exit(main())
