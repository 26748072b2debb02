"""Success and samples that each algorithm's preset needs on one small task.

    python benchmarks/bench_presets.py --seeds 5
    python benchmarks/bench_presets.py --presets grpo ppo --seeds 1

Every preset trains the shipped `tiny_vl` on families of the desktop gym, with
equal sizes; the table has, over the seeds, the success rate on held-out tasks
at the start and at the end, and the training episodes until the mean of three
updates' success reached `--goal`, those of replaced groups and greedy ones
among them. A run that has ended is not made again: the
result of each is a line of `--out`/results.jsonl, and a run that was cut off
resumes from its checkpoint. Each run has `--limit-s` seconds.

Settings of train may follow `--`, for all runs; compare only results of the
same ones: they are a part of each result, and others are kept apart.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import signal
import statistics
import subprocess
import sys
import time
from typing import Any, Iterator, Sequence

import pooled_rate
from tunix.rl.multi_turn.learner.algorithms import presets

COMMON = (
  "tasks=[click-color,enter-text]",
  "learner.groups_per_step=8",
  "learner.learning_rate=3e-4",
  "collect.group_size=8",
  "eval.every=0",
  "eval.episodes_per_task=40",
  "eval.modes=[sampled]",
  "checkpoint.every=10",
  "report.progress=none",
)
MEAN_OF = 3  # Updates.
STOP_S = 60.0


def results_of(path: pathlib.Path) -> list[dict[str, Any]]:
  if not path.exists():
    return []
  return [json.loads(line) for line in path.read_text().splitlines() if line]


def samples_to(metrics: Sequence[dict[str, Any]], goal: float) -> int | None:
  """Training episodes until the mean of `MEAN_OF` updates reached the goal."""
  episodes = 0
  for i, m in enumerate(metrics):
    episodes += int(m["episodes"])
    last = metrics[max(0, i - MEAN_OF + 1) : i + 1]
    recent = [x["success_rate"] for x in last]
    if len(recent) == MEAN_OF and statistics.fmean(recent) >= goal:
      return episodes
  return None


def samples_of(preset: str, m: dict[str, Any]) -> int:
  """Episodes played for an update: also of groups that were replaced, and the
  greedy one beside each group."""
  settings = presets.get(preset).settings
  a_group = m["episodes"] / max(m["groups"], 1)
  if settings.get("algorithm.advantage") == "remax":
    a_group += 1
  return round(a_group * (m["groups"] + m.get("replaced_groups", 0.0)))


def command(
  directory: pathlib.Path,
  name: str,
  seed: int,
  steps: int,
  settings: Sequence[str],
) -> list[str]:
  """The command that starts or resumes a run."""
  train = [sys.executable, "-m", "tunix.rl.multi_turn.train"]
  if (directory / "config.yaml").exists():
    return [*train, f"resume={directory}"]
  return [
    *train,
    f"algorithm={name}",
    f"run.dir={directory.parent}",
    f"name={directory.name}",
    f"seed={seed}",
    f"steps={steps}",
    *COMMON,
    *settings,
  ]


def run_once(
  directory: pathlib.Path,
  name: str,
  seed: int,
  steps: int,
  limit_s: float,
  settings: Sequence[str],
) -> dict[str, Any]:
  """Trains one preset with one seed; its result."""
  directory.parent.mkdir(parents=True, exist_ok=True)
  started = time.monotonic()
  ended = "finished"
  log = directory.parent / f"{directory.name}.log"
  with log.open("ab") as file:
    process = subprocess.Popen(
      command(directory, name, seed, steps, settings),
      stdout=file,
      stderr=subprocess.STDOUT,
    )
    try:
      if process.wait(limit_s):
        ended = f"status {process.returncode}, see {log}"
    except subprocess.TimeoutExpired:
      ended = f"cut off after {limit_s:g} s"
      process.send_signal(signal.SIGINT)  # It saves, and resumes another time.
      try:
        process.wait(STOP_S)
      except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    except BaseException:
      process.send_signal(signal.SIGINT)
      process.wait(STOP_S)
      raise
  result: dict[str, Any] = {
    "preset": name,
    "seed": seed,
    "steps": steps,
    "ended": ended,
    "settings": [*COMMON, *settings],
    "seconds": round(time.monotonic() - started, 1),
  }
  curve = directory / "metrics.jsonl"
  if curve.exists():
    metrics = [json.loads(line) for line in curve.read_text().splitlines()]
    result["updates"] = len(metrics)
    result["curve"] = [
      [samples_of(name, m), m["success_rate"]] for m in metrics
    ]
    result["episodes"] = sum(samples for samples, _ in result["curve"])
  summary = directory / "summary.json"
  if summary.exists():
    evaluations = json.loads(summary.read_text()).get("eval") or {}
    for at in ("start", "warm_start", "final"):
      if at in evaluations:
        one = evaluations[at]
        result[at] = [one["successes"], one["episodes"]]
  return result


def table(results: Sequence[dict[str, Any]], goal: float) -> Iterator[str]:
  """Rows of Markdown, a preset each."""
  yield (
    "| preset | seeds | success at the start | success at the end [95 %] |"
    f" episodes to {goal:.2f} | minutes a run |"
  )
  yield "|---|---|---|---|---|---|"
  for name in dict.fromkeys(r["preset"] for r in results):
    runs = [r for r in results if r["preset"] == name and "curve" in r]
    if not runs:
      continue
    reached = [
      samples_to(
        [{"episodes": e, "success_rate": s} for e, s in r["curve"]], goal
      )
      for r in runs
    ]
    sample_counts = sorted(x for x in reached if x is not None)
    needed = f"{statistics.median(sample_counts):.0f}" if sample_counts else "–"
    if len(sample_counts) < len(runs):
      needed += f" ({len(sample_counts)} of {len(runs)})"
    minutes = statistics.fmean(r["seconds"] for r in runs) / 60
    yield (
      f"| {name} | {len(runs)} | {_rate(runs, ('warm_start', 'start'))} |"
      f" {_rate(runs, ('final',))} | {needed} | {minutes:.1f} |"
    )


def _rate(results: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
  """Pooled success of the first of the evaluations that a run has."""
  counts = [
    next(r[n] for n in names if n in r)
    for r in results
    if any(n in r for n in names)
  ]
  return pooled_rate.text(counts)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  names = [n for n in presets.PRESETS.names() if n != "distill"]
  parser.add_argument("--presets", nargs="+", default=names, metavar="NAME")
  parser.add_argument("--seeds", type=int, default=5)
  parser.add_argument("--steps", type=int, default=30, help="updates of a run")
  parser.add_argument("--goal", type=float, default=0.8)
  parser.add_argument("--limit-s", type=float, default=1800.0)
  parser.add_argument(
    "--out", type=pathlib.Path, default=pathlib.Path("runs/bench_presets")
  )
  parser.add_argument("settings", nargs="*", help="after --: settings of train")
  args = parser.parse_args()
  for name in args.presets:
    try:
      presets.get(name)
    except (ValueError, ImportError) as error:
      parser.error(str(error))
  args.out.mkdir(parents=True, exist_ok=True)
  path = args.out / "results.jsonl"
  settings = [*COMMON, *args.settings]
  for seed in range(args.seeds):
    for name in args.presets:
      before = [
        r
        for r in results_of(path)
        if (r["preset"], r["seed"], r["steps"], r["settings"])
        == (name, seed, args.steps, settings)
      ]
      if any(r["ended"] == "finished" for r in before):
        continue
      directory = args.out / f"{name.replace(':', '_')}-{seed}"
      result = run_once(
        directory, name, seed, args.steps, args.limit_s, args.settings
      )
      if before:  # It was cut off.
        result["seconds"] = round(result["seconds"] + before[-1]["seconds"], 1)
      with path.open("a") as file:
        file.write(json.dumps(result) + "\n")
      print(f"{name} seed {seed}: {result['ended']}", file=sys.stderr)
  newest = {
    (r["preset"], r["seed"]): r
    for r in results_of(path)
    if r["steps"] == args.steps and r["settings"] == settings
  }
  chosen = [r for r in newest.values() if r["preset"] in args.presets]
  print("\n".join(table(chosen, args.goal)))


if __name__ == "__main__":
  main()
