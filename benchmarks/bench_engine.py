"""Turns a second of the rollout engine, with TinyVL on random weights.

Plays `episodes` concurrent episodes of `turns` turns; a turn adds a screenshot
and some text (`--fresh` starts a new session each turn instead, as an agent
that rewrites its history does) and samples exactly `sampled` tokens. Prints
what the engine did, where its time went, and the bounds that this machine's
matmul and memory speeds set. What is played before the clock starts shares no
token and no pixel with what is measured.

  python benchmarks/bench_engine.py --episodes 64 --turns 6
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.policy.models.tiny_vl import tiny_vl
from tunix.rl.multi_turn.policy.models.tiny_vl import vision_inputs

IMAGE_TOKEN = 5


def parse_args() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--episodes", type=int, default=64)
  parser.add_argument("--slots", type=int, default=64)
  parser.add_argument("--turns", type=int, default=6)
  parser.add_argument("--sampled", type=int, default=8)
  parser.add_argument("--text", type=int, default=92)
  parser.add_argument("--context", type=int, default=512)
  parser.add_argument("--steps", type=int, default=8)
  parser.add_argument("--rows", type=int, nargs="*", default=None)
  parser.add_argument("--prefill-rows", type=int, nargs="*", default=None)
  parser.add_argument("--tokens", type=int, nargs="*", default=None)
  parser.add_argument("--windows", type=int, nargs="*", default=None)
  parser.add_argument("--images", type=int, nargs="*", default=None)
  parser.add_argument("--size", default="tiny", choices=tiny_vl.SIZES)
  parser.add_argument("--vocab", type=int, default=3072)
  parser.add_argument("--top-p", type=float, default=1.0)
  parser.add_argument("--lockstep", action="store_true")
  parser.add_argument("--fresh", action="store_true")
  parser.add_argument("--screen", type=int, nargs=2, default=(128, 96))
  return parser.parse_args()


def machine_bounds() -> tuple[float, float]:
  """(float32 matmul FLOP/s, bytes/s of a large reduction)."""
  a = jnp.ones((1024, 1024), jnp.float32)
  big = jnp.ones((32 << 20,), jnp.float32)
  matmul = jax.jit(lambda a: a @ a)
  total = jax.jit(jnp.sum)
  best_matmul = best_read = float("inf")
  for _ in range(8):
    started = time.perf_counter()
    matmul(a).block_until_ready()
    middle = time.perf_counter()
    total(big).block_until_ready()
    best_matmul = min(best_matmul, middle - started)
    best_read = min(best_read, time.perf_counter() - middle)
  return 2 * 1024**3 / best_matmul, big.nbytes / best_read


async def episode(engine, store, args, index: int, lot: int) -> None:
  rng = np.random.default_rng((lot, index))
  width, height = args.screen
  count = vision_inputs.TinyVLProcessor().num_image_tokens(width, height)
  tokens = np.zeros(0, np.int32)
  spans: tuple[trajectory.ImageSpan, ...] = ()
  sampling = policy_client.SamplingParams(
    max_new_tokens=args.sampled, top_p=args.top_p
  )
  for turn in range(args.turns):
    session = f"e{index}"
    text = args.text
    if args.fresh:
      session += f".{turn}"
      tokens, spans = tokens[:0], ()
    elif turn:
      text = args.text // 8
    # The members of a group of 8 start from one screenshot.
    picture = np.random.default_rng(
      (lot, index // 8, 0) if turn == 0 else (lot, index, turn)
    )
    pixels = picture.integers(0, 255, (height, width, 3), dtype=np.uint8)
    image = store.put(pixels)
    spans += (trajectory.ImageSpan(image, len(tokens), count),)
    tokens = np.concatenate(
      [tokens, np.full(count, IMAGE_TOKEN), rng.integers(6, 1000, text)]
    )
    completion = await engine.generate(
      policy_client.TokenPrompt(tokens, spans), sampling, session=session
    )
    tokens = np.concatenate([tokens, completion.tokens])
    if args.fresh and turn + 1 < args.turns:
      engine.open_session(f"e{index}.{turn + 1}")
      await engine.release(session)
  await engine.release(session)


def main() -> None:
  args = parse_args()
  flops, bandwidth = machine_bounds()
  config = tiny_vl.TinyVLConfig(
    vocab_size=args.vocab,
    number_start=1000,
    image_token_id=IMAGE_TOKEN,
    pad_token_id=0,
    banned_token_ids=(0, IMAGE_TOKEN),
    **tiny_vl.SIZES[args.size],
  )
  model = tiny_vl.TinyVL(config, nnx.Rngs(0))
  parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model)))
  store = images_lib.ImageStore()
  options = {
    "decode_rows": args.rows,
    "prefill_rows": args.prefill_rows,
    "prefill_buckets": args.tokens,
    "window_buckets": args.windows,
    "image_buckets": args.images,
  }
  engine = engine_lib.RolloutEngine(
    model,
    vision_inputs.TinyVLProcessor(),
    store,
    engine_config.EngineConfig(
      slots=args.slots,
      context_length=args.context,
      decode_steps_per_call=args.steps,
      lockstep="true" if args.lockstep else "false",
      share_prefixes="true",
      **{k: v for k, v in options.items() if v is not None},
    ),
    image_sizes=[tuple(args.screen)],
    banned_token_ids=config.banned_token_ids,
  )
  with engine:
    warm_up = engine.warm_up()

    async def play(lot: int) -> None:
      for i in range(args.episodes):
        engine.open_session(f"e{i}.0" if args.fresh else f"e{i}")
      await asyncio.gather(
        *(episode(engine, store, args, i, lot) for i in range(args.episodes))
      )

    turns, args.turns = args.turns, 1
    asyncio.run(play(0))  # First executions touch memory for the first time.
    args.turns = turns
    before = engine.stats()
    started, worked = time.perf_counter(), time.process_time()
    asyncio.run(play(1))
    seconds = time.perf_counter() - started
    worked = time.process_time() - worked
    after = engine.stats()
  counts = {k: after[k] - before[k] for k in after}
  turns = args.episodes * args.turns
  cache = (
    2 * 4 * config.layers * config.kv_heads * config.head_dim
  )  # Bytes a token.
  least = {
    "prefill": 2 * parameters * counts["prefilled_tokens"] / flops,
    "decode_matmul": 2 * parameters * counts["decode_tokens"] / flops,
    "decode_cache_read": (
      counts["decode_places"] * args.context / 2 * cache / bandwidth
    ),
  }
  report = {
    "parameters": parameters,
    "warm_up_seconds": round(warm_up, 1),
    "variants": after["compile_count"],
    "turns_per_second": round(turns / seconds, 1),
    "sampled_tokens_per_second": round(counts["decode_tokens"] / seconds),
    "prefilled_tokens_per_second": round(counts["prefilled_tokens"] / seconds),
    "seconds": round(seconds, 3),
    "cpu_seconds": round(worked, 3),
    "prefilled_tokens": counts["prefilled_tokens"],
    "prefilled_per_unique_token": round(
      counts["prefilled_tokens"] / max(1, counts["unique_prompt_tokens"]), 3
    ),
    "share": {
      name: round(counts[f"seconds_{name}"] / seconds, 3)
      for name in ("vision", "prefill", "decode", "host", "idle")
    },
    "decode_step_ms": round(
      1e3 * counts["seconds_decode"] / max(1, counts["decode_steps"]), 2
    ),
    "useful_prefill": round(
      counts["prefilled_tokens"] / max(1, counts["prefill_places"]), 3
    ),
    "useful_decode": round(
      counts["decode_tokens"] / max(1, counts["decode_places"]), 3
    ),
    "images_encoded": counts["images_encoded"],
    "vision_cache_hits": counts["vision_cache_hits"],
    "compiles_after_warm_up": after["compiles_after_warm_up"],
    "machine_gflops": round(flops / 1e9),
    "machine_gbytes": round(bandwidth / 1e9, 1),
    "least_seconds": {k: round(v, 3) for k, v in least.items()},
  }
  print(json.dumps(report, indent=2))


if __name__ == "__main__":
  main()
