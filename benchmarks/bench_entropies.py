"""Measures what returning each token's entropy costs a decode step.

Two engines of one policy sample the same requests, one that returns entropies
and one that does not, in turn, so that other load on the machine meets both.
The ratio is of the medians; on a busy machine take more rounds.

    python benchmarks/bench_entropies.py --rounds 20
    python benchmarks/bench_entropies.py --policy qwen3_vl_tiny --rows 32
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics

import numpy as np
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.policy import host_memory
from tunix.rl.multi_turn.policy.checkpoints import checkpoint


def parse_args() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument(
    "--policy", default="tiny_vl", help="directory or shipped name"
  )
  parser.add_argument("--rows", type=int, default=16)
  parser.add_argument("--prompt", type=int, default=128)
  parser.add_argument("--sampled", type=int, default=64)
  parser.add_argument("--rounds", type=int, default=10)
  return parser.parse_args()


def make_engine(
  loaded, args: argparse.Namespace, entropies: bool
) -> engine_lib.RolloutEngine:
  model, processor, _ = loaded
  engine = engine_lib.RolloutEngine(
    model,
    processor,
    images_lib.ImageStore(),
    engine_config.EngineConfig(
      slots=args.rows,
      context_length=args.prompt + args.sampled,
      decode_rows=(args.rows,),
      window_buckets=(args.prompt + args.sampled,),
      admission_wait_s=0.05,  # All rows begin together.
      entropies=entropies,
    ),
    image_sizes=((64, 64),),
    banned_token_ids=model.config.banned_token_ids,
  )
  engine.warm_up()
  return engine


async def play(engine: engine_lib.RolloutEngine, args, number: int) -> None:
  rng = np.random.default_rng(number)

  async def one(row: int) -> None:
    name = f"{number}/{row}"
    completion = await engine.generate(
      policy_client.TokenPrompt(
        rng.integers(1100, 1400, args.prompt).astype(np.int32)
      ),
      policy_client.SamplingParams(max_new_tokens=args.sampled, seed=row),
      session=name,
    )
    assert len(completion.tokens) == args.sampled
    await engine.release(name)

  await asyncio.gather(*(one(row) for row in range(args.rows)))


def step_seconds(engine: engine_lib.RolloutEngine, args, number: int) -> float:
  """Of a decode step, over a round of requests."""
  before = engine.stats()
  asyncio.run(asyncio.wait_for(play(engine, args, number), 600))
  after = engine.stats()
  assert after["compiles_after_warm_up"] == 0
  return (after["seconds_decode"] - before["seconds_decode"]) / (
    after["decode_steps"] - before["decode_steps"]
  )


def main() -> None:
  args = parse_args()
  host_memory.tune()
  loaded = checkpoint.load_policy(args.policy)
  engines = {
    entropies: make_engine(loaded, args, entropies)
    for entropies in (False, True)
  }
  seconds: dict[bool, list[float]] = {False: [], True: []}
  for engine in engines.values():
    step_seconds(engine, args, 0)  # Caches warm.
  for number in range(1, args.rounds + 1):
    # The order alternates, so that neither engine always runs second.
    for entropies in (False, True) if number % 2 else (True, False):
      seconds[entropies].append(step_seconds(engines[entropies], args, number))
  for engine in engines.values():
    engine.close()
  without_s, with_s = (statistics.median(seconds[k]) for k in (False, True))
  pairs = sorted(b / a for a, b in zip(seconds[False], seconds[True]))
  print(
    json.dumps(
      {
        "policy": args.policy,
        "rows": args.rows,
        "step_ms_without": round(1e3 * without_s, 4),
        "step_ms_with": round(1e3 * with_s, 4),
        "ratio": round(with_s / without_s, 4),
        "ratio_of_pairs_quartiles": [
          round(pairs[len(pairs) * q // 4], 4) for q in (1, 2, 3)
        ],
        "least_ms": [round(1e3 * min(seconds[k]), 4) for k in (False, True)],
      }
    )
  )


if __name__ == "__main__":
  main()
