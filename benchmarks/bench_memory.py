"""Success on a task that outlasts the context, by what the agent remembers.

    python benchmarks/bench_memory.py --seeds 5
    python benchmarks/bench_memory.py --histories window summary --seeds 1

`recall-place` of the desktop gym shows a place in turn 2 and needs it in turn
14; a context of 640 tokens holds about six turns. The histories: `full` keeps
all turns in a context of twice the size, `window` the newest five screenshots
and a line for each older turn, `summary` what the policy wrote itself.

For each history the shipped `tiny_vl` clones demonstrations (`ROUNDS`); in a
quarter of them the demonstrator's summaries leave the place out. GRPO continues
from there with each seed. The table has, over the seeds, the success on
held-out tasks before GRPO (summaries as they were demonstrated) and after it
(summaries trained by their episodes' rewards), with 95 % intervals. One of four
places is right by chance.

A run that has ended is not made again, and one that was cut off resumes.
Settings of train may follow `--`, for all runs; give another `--out` then.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
from typing import Any, Iterator, Mapping, Sequence

import pooled_rate

CONTEXT = 640
COMMON = (
  "tasks=[recall-place]",
  "collect.group_size=8",
  "collect.min_valid=4",
  "learner.groups_per_step=4",
  "learner.learning_rate=2e-4",
  "eval.episodes_per_task=40",
  "eval.modes=[sampled]",
  "checkpoint.every=7",
  "report.progress=none",
)
CLONING = (
  "warm_start.batch_size=8",
  "warm_start.learning_rate=1e-3",
  "steps=0",
)
ROUNDS = {"full": (500,), "window": (70,), "summary": (500, 500)}
"""Updates of each round of cloning, with a cosine schedule each."""
HISTORIES: Mapping[str, tuple[int, tuple[str, ...]]] = {
  "full": (2 * CONTEXT, ()),
  "window": (CONTEXT, ("agent.max_images=5", "agent.list_dropped_turns=true")),
  "summary": (
    CONTEXT,
    (
      "agent.history=summary",
      "agent.summary_at=400",
      "agent.summary_tokens=16",
      "agent.summary_prompt='Sum up.'",
    ),
  ),
}
"""Name -> (tokens of its context, settings of its agent)."""


def evaluations(directory: pathlib.Path) -> dict[str, Any]:
  """The evaluations of a run that has ended; {} of another."""
  path = directory / "summary.json"
  summary = json.loads(path.read_text()) if path.exists() else {}
  return summary["eval"] if summary.get("status") == "completed" else {}


def play(
  directory: pathlib.Path, history: str, settings: Sequence[str]
) -> None:
  """Trains one run, or resumes it."""
  context, of_agent = HISTORIES[history]
  own = [
    f"run.dir={directory.parent}",
    f"name={directory.name}",
    f"engine.context_length={context}",
    f"learner.row_length={context}",
    *of_agent,
    *COMMON,
    *settings,
  ]
  if (directory / "config.yaml").exists():
    own = [f"resume={directory}"]
  command = [sys.executable, "-m", "tunix.rl.multi_turn.train", *own]
  subprocess.run(command, check=True, stdout=sys.stderr)


def table(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
  """Rows of Markdown, a history each."""
  yield "| history | seeds | cloned [95 %] | after GRPO [95 %] |"
  yield "|---|---|---|---|"
  for history, runs in results.items():
    rates = [
      pooled_rate.text((r[n]["successes"], r[n]["episodes"]) for r in runs)
      for n in ("warm_start", "final")
    ]
    yield f"| {history} | {len(runs)} | {' | '.join(rates)} |"


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--histories", nargs="+", default=list(HISTORIES))
  parser.add_argument("--seeds", type=int, default=5)
  parser.add_argument("--steps", type=int, default=14, help="updates of GRPO")
  parser.add_argument(
    "--out", type=pathlib.Path, default=pathlib.Path("runs/bench_memory")
  )
  parser.add_argument("settings", nargs="*", help="after --: settings of train")
  args = parser.parse_args()
  results: dict[str, list[Any]] = {}
  for history in args.histories:
    if history not in HISTORIES:
      parser.error(f"--histories {history}: choose from {', '.join(HISTORIES)}")
    origin: tuple[str, ...] = ()
    for number, steps in enumerate(ROUNDS[history]):
      cloned = args.out / f"{history}-cloned{number}"
      if not evaluations(cloned):
        own = (f"warm_start.steps={steps}", f"seed={number}", *origin)
        play(cloned, history, (*CLONING, *own, *args.settings))
      origin = (f"policy={cloned}/warm_start", "warm_start.source=none")
    for seed in range(args.seeds):
      directory = args.out / f"{history}-{seed}"
      if not evaluations(directory):
        own = (*origin, f"seed={seed}", f"steps={args.steps}")
        play(directory, history, (*own, *args.settings))
      results.setdefault(history, []).append(evaluations(directory))
  print("\n".join(table(results)))


if __name__ == "__main__":
  main()
