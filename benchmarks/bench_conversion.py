"""Measures how fast trajectories become packed arrays, by their length.

    python benchmarks/bench_conversion.py [--tokens 4096 16384 65536]

Each trajectory has 1,000 turns (or --turns), half of the tokens sampled. Stages
are timed apart, best of a few:

    pack     trajectories to examples with advantages, to packed arrays
    items    JSON items of a rollout buffer to packed arrays
    text     JSON to the same, parsing included

Prints tokens per second for each stage; linear means that they do not fall
with the length.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from typing import Any, Callable

import numpy as np
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory as trajectory_lib
from tunix.rl.multi_turn.learner.algorithms import advantages
from tunix.rl.multi_turn.learner.batches import batching
from tunix.rl.multi_turn.learner.batches import examples as example_lib
from tunix.rl.multi_turn.learner.batches import packing
from tunix.rl.multi_turn.trajectory_collector import records

MEMBERS = 4


class TextProcessor:
  """Host side of a policy without images: positions are counted."""

  patches_per_token = 0
  patch_bytes = 0
  position_axes = 3

  def positions(
    self, tokens: np.ndarray, images: Any, start: int = 0
  ) -> np.ndarray:
    del images
    here = np.arange(start, len(tokens), dtype=np.int32)
    return np.repeat(here[:, None], 3, axis=1)


def trajectory(
  name: str, tokens: int, turns: int, rng: np.random.Generator
) -> trajectory_lib.Trajectory:
  """An episode of one sequence; each turn a prompt and as many samples."""
  each = tokens // turns
  turn_ids = np.repeat(np.arange(turns, dtype=np.int32), each)
  mask = np.tile(np.arange(each) >= each // 2, turns)
  length = len(mask)
  steps = [
    trajectory_lib.Step(reward=0.0, done=k + 1 == turns) for k in range(turns)
  ]
  return trajectory_lib.Trajectory(
    steps=steps,
    reward=float(rng.integers(0, 2)),
    status=trajectory_lib.TrajectoryStatus.SUCCEEDED,
    trajectory_id=name,
    sequences=[
      trajectory_lib.TokenSequence(
        rng.integers(5, 30_000, length),
        mask,
        np.where(mask, -1.0, 0.0),
        np.where(mask, 3, -1),
        turn_ids,
      )
    ],
  )


def packed(
  groups: list[trajectory_lib.TrajectoryGroup], row_length: int
) -> list[batching.Batch]:
  per_group, _ = example_lib.from_groups(
    groups, advantages.ESTIMATORS.get("grpo"), advantages.AdvantageOptions()
  )
  examples = [e for group in per_group for e in group]
  packer = batching.Packer(TextProcessor(), images_lib.ImageStore())
  shape = packing.BatchShape(MEMBERS, row_length, 1, 0, MEMBERS * row_length)
  plan = packer.plan(examples, shape)
  return list(packer.fill(plan, examples, np.ones(len(examples))))


def best(work: Callable[[], Any], seconds: float = 2.0) -> float:
  """Least CPU seconds of several calls; other work does not count."""
  timings, until = [], time.process_time() + seconds
  while len(timings) < 3 or (time.process_time() < until and len(timings) < 50):
    started = time.process_time()
    work()
    timings.append(time.process_time() - started)
  return min(timings)


def measure(tokens: int, turns: int) -> dict[str, float]:
  """Tokens per second of each stage."""
  rng = np.random.default_rng(0)
  group = trajectory_lib.TrajectoryGroup(
    "g",
    "t",
    tuple(trajectory(f"m{i}", tokens, turns, rng) for i in range(MEMBERS)),
  )
  total = sum(len(t.sequences[0]) for t in group)
  row = packing.used_length(group.trajectories[0].sequences[0]) + 8
  items = records.write_group(group)
  for item in items:
    del item["trajectory"]  # As generators elsewhere write them.
  text = [json.dumps(item) for item in items]

  def from_items() -> Any:
    return packed([records.read_group(items)], row)

  def from_text() -> Any:
    return packed([records.read_group([json.loads(t) for t in text])], row)

  return {
    "pack": total / best(lambda: packed([group], row)),
    "items": total / best(from_items),
    "text": total / best(from_text),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument(
    "--tokens", type=int, nargs="+", default=[4000, 16_000, 48_000, 64_000]
  )
  parser.add_argument("--turns", type=int, default=1000)
  parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
  args = parser.parse_args()
  report = {}
  print("tokens  turns  pack M/s  items M/s  text M/s")
  for tokens in args.tokens:
    speeds = report[str(tokens)] = measure(tokens, args.turns)
    print(
      f"{tokens:6d} {args.turns:6d}"
      + "".join(f" {speeds[k] / 1e6:9.2f}" for k in ("pack", "items", "text")),
      flush=True,
    )
  if args.json:
    args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
  main()
