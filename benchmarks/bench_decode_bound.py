"""Compares decoding with what this machine could do; says what is in between.

Samples with `batch` sequences at a time and holds the time of a step to a
bound: every weight and every cached key and value is read once at the measured
memory bandwidth, or the step's products are computed at the measured matmul
rate, whichever takes longer. Then the step is taken apart: the policy's own
`extend`, `logits` and the sampler in loops of their own, one part left out at
a time; what the engine's calls take beyond that is pages, dispatch and host.

Several settings of the engine are tried; the best one is taken apart.

    python benchmarks/bench_decode_bound.py --json decode.json
    python benchmarks/bench_decode_bound.py --size small --prompt 700
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import pathlib
import time
from typing import Any, Callable

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
from peers import policies
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.engine import sampler
from tunix.rl.multi_turn.policy import host_memory
from tunix.rl.multi_turn.policy.layers import kernels

TARGET = 0.6


def parse_args() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--batch", type=int, default=32)
  parser.add_argument("--prompt", type=int, default=384)
  parser.add_argument("--sampled", type=int, default=96)
  parser.add_argument("--context", type=int, default=1024)
  parser.add_argument("--size", default="tiny", choices=policies.SIZES)
  parser.add_argument("--dtype", default="float32")
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument(
    "--brief", action="store_true", help="one setting, without its parts"
  )
  parser.add_argument(
    "--profile",
    type=pathlib.Path,
    metavar="FOLDER",
    help="trace one more round; gpu/kernels.py reads it",
  )
  parser.add_argument("--json", type=pathlib.Path, default=None)
  return parser.parse_args()


def best(call: Callable[[], Any], repeats: int = 7) -> float:
  """Seconds of the fastest of several calls, after one that compiles."""
  jax.block_until_ready(call())
  times = []
  for _ in range(repeats):
    started = time.perf_counter()
    jax.block_until_ready(call())
    times.append(time.perf_counter() - started)
  return min(times)


# --- the machine -------------------------------------------------------------


def machine(dtype: str) -> dict[str, float]:
  """Rates in 1/s: FLOPs of a large product, bytes read from memory."""
  # Several in one program, so that dispatch is no part of the time; rows, so
  # that all cores read; larger than any cache.
  times, n = (1, 2048) if jax.default_backend() == "cpu" else (20, 8192)
  a = jnp.ones((n, n), dtype) / n
  big = jnp.ones((64, times << 21), jnp.float32)

  @jax.jit
  def products(a):
    multiply = lambda _, x: jnp.dot(x, a).astype(dtype)
    return lax.fori_loop(0, times, multiply, a)

  total = jax.jit(lambda x: jnp.sum(x, axis=1))
  return {
    "matmul_flops": times * 2 * n**3 / best(lambda: products(a)),
    "bytes_read": big.nbytes / best(lambda: total(big)),
  }


def bound(args, model, rates) -> dict[str, float]:
  """Milliseconds that a step of the whole batch takes at least."""
  text = model.config.text
  decoder = jax.tree.leaves(nnx.state(model.decoder, nnx.Param))
  weights = sum(x.size for x in decoder)
  table = text.vocab_size * text.hidden_size
  # A tied table is the head; another embedding is looked up, not multiplied.
  multiplied = weights if model.config.tie_word_embeddings else weights - table
  if model.lm_head is not None:
    multiplied += table
  length = args.prompt + args.sampled / 2
  itemsize = jnp.dtype(args.dtype).itemsize
  cache_token = (
    2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
  )
  weight_bytes = multiplied * itemsize  # The engine's copy.
  cache_bytes = args.batch * length * cache_token * itemsize
  heads = text.num_attention_heads * text.head_dim
  attention = 4 * text.num_hidden_layers * heads * length * args.batch
  products = 2 * multiplied * args.batch
  memory = (weight_bytes + cache_bytes) / rates["bytes_read"]
  compute = (products + attention) / rates["matmul_flops"]
  return {
    "weight_megabytes": weight_bytes / 1e6,
    "cache_megabytes": cache_bytes / 1e6,
    "megaflops": (products + attention) / 1e6,
    "memory_ms": 1e3 * memory,
    "compute_ms": 1e3 * compute,
    "bound_ms": 1e3 * max(memory, compute),
  }


# --- the engine --------------------------------------------------------------


def run_engine(args, model, processor, options) -> dict[str, float]:
  """Milliseconds of a step of the whole batch, by the engine's clocks."""
  engine = engine_lib.RolloutEngine(
    model,
    processor,
    images_lib.ImageStore(),
    engine_config.EngineConfig(
      slots=args.batch,
      context_length=args.context,
      patch_buckets=(64,),
      **options,
    ),
    banned_token_ids=model.config.banned_token_ids,
  )
  rounds = []
  with engine:
    engine.warm_up()
    for round_ in range(args.rounds + 1):
      rounds.append(asyncio.run(_round(args, engine, round_)))
    if args.profile:
      with jax.profiler.trace(str(args.profile)):
        asyncio.run(_round(args, engine, args.rounds + 1))
  # The first touches memory for the first time.
  return min(rounds[1:], key=lambda f: f["step_ms"])


async def _round(args, engine, round_: int) -> dict[str, float]:
  rng = np.random.default_rng(round_)
  prompts = rng.integers(300, 1300, (args.batch, args.prompt))
  names = [f"{round_}.{i}" for i in range(args.batch)]
  one = policy_client.SamplingParams(max_new_tokens=1)
  generate = lambda sampling: asyncio.gather(
    *(
      engine.generate(policy_client.TokenPrompt(prompt), sampling, session=name)
      for prompt, name in zip(prompts, names)
    )
  )
  await generate(one)  # All prompts are cached now: what follows is decoding.
  before = engine.stats()
  started = time.perf_counter()
  await generate(policy_client.SamplingParams(max_new_tokens=args.sampled))
  seconds = time.perf_counter() - started
  after = engine.stats()
  for name in names:
    await engine.release(name)
  counts = {k: after[k] - before[k] for k in after}
  assert counts["decode_tokens"] == args.batch * args.sampled
  steps = args.sampled
  return {
    "step_ms": 1e3 * seconds / steps,
    "decode_ms": 1e3 * counts["seconds_decode"] / steps,
    "host_ms": 1e3 * counts["seconds_host"] / steps,
    "tokens_per_second": counts["decode_tokens"] / seconds,
    "calls": counts["decode_calls"],
    "call_rows": counts["decode_places"] / max(1, counts["decode_steps"]),
  }


# --- the parts of a step -----------------------------------------------------


def parts(args, model, rows: int, steps: int, window: int) -> dict[str, float]:
  """Milliseconds a step of the whole batch, in calls of `rows` rows."""
  config, text = model.config, model.config.text
  graph, state = nnx.split(model)
  calls = args.batch / rows
  starts = jnp.full((rows,), args.prompt, jnp.int32)
  ones = jnp.ones((rows,), jnp.int32)
  banned = (
    jnp.zeros((text.vocab_size,), bool)
    .at[jnp.array(config.banned_token_ids, int)]
    .set(True)
  )
  keys = jnp.arange(2 * rows, dtype=jnp.uint32).reshape(rows, 2)

  def loop(
    length: int, logits: bool = True, sample: bool = True
  ) -> Callable[[], Any]:
    """K steps as the engine's, with parts left out."""
    cache = model.init_cache(rows, length)
    first = jnp.minimum(starts, length - steps - 1)

    @functools.partial(jax.jit, donate_argnums=1)
    def run(state, cache, token):
      policy = nnx.merge(graph, state)

      def body(i, carry):
        token, cache, total = carry
        place = jnp.broadcast_to((first + i)[:, None, None], (rows, 1, 3))
        hidden, cache = policy.extend(
          token[:, None], place, first + i, ones, cache
        )
        if not logits:
          return token, cache, total + hidden.sum()
        scores = policy.logits(hidden[:, 0])
        if not sample:
          return token, cache, total + scores.sum()
        token, logprob = sampler.sample(
            scores, banned, keys, starts + i,
            jnp.ones(rows), jnp.zeros(rows, jnp.int32), jnp.ones(rows),
            jnp.zeros(rows), jnp.bool_(False),
        )[:2]  # fmt: skip
        return token, cache, total + logprob.sum()

      return lax.fori_loop(0, steps, body, (token, cache, jnp.float32(0)))

    token = jnp.full((rows,), 300, jnp.int32)
    cache_box = [cache]

    def call():
      out, cache_box[0], total = run(state, cache_box[0], token)
      return out, total

    return call

  def attention(length: int) -> Callable[[], Any]:
    """The cache's reads of all layers, nothing else of them."""
    cache = jax.tree.map(
      lambda x: (x + 0.01).astype(args.dtype), model.init_cache(rows, length)
    )
    mask = jnp.arange(length) <= starts[:, None, None]
    shape = (rows, 1, text.num_attention_heads, text.head_dim)
    q = jnp.ones(shape, args.dtype)

    @jax.jit
    def run(cache, q):
      def body(i, q):
        for k, v in cache:
          q = kernels.attend_cached(q, k, v, mask)
        return q

      return lax.fori_loop(0, steps, body, q)

    return lambda: run(cache, q)

  milli = lambda call: 1e3 * calls * best(call) / steps
  full = milli(loop(window))
  unsampled = milli(loop(window, sample=False))
  headless = milli(loop(window, logits=False))
  short = milli(loop(steps + 8, logits=False))
  # As many arguments as a decode call, and nothing to do.
  cache = model.init_cache(rows, 8)
  empty = jax.jit(lambda state, cache: cache, donate_argnums=1)
  cache_box = [cache]

  def nothing():
    cache_box[0] = empty(state, cache_box[0])
    return cache_box[0]

  return {
    "whole loop": full,
    "sampling": full - unsampled,
    "head": unsampled - headless,
    "attention and cache writes": headless - short,
    "  of which attention": milli(attention(window)),
    "projections, norms, MLP": short,
    "dispatch": milli(nothing),
  }


def main() -> None:
  args = parse_args()
  host_memory.tune()
  model, processor = policies.make_policy(args.size, compute_dtype=args.dtype)
  parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model)))
  rates = machine(args.dtype)
  print(
    f"{parameters / 1e6:.1f}M parameters, {args.dtype}:"
    f" {rates['matmul_flops'] / 1e9:.0f} GFLOP/s,"
    f" {rates['bytes_read'] / 1e9:.1f} GB/s"
  )
  least = bound(args, model, rates)
  print(
    f"a step of {args.batch}: {least['weight_megabytes']:.1f} MB of weights,"
    f" {least['cache_megabytes']:.1f} MB of cache,"
    f" {least['megaflops']:.0f} MFLOP; at least {least['memory_ms']:.2f} ms"
    f" by memory, {least['compute_ms']:.2f} ms by products"
  )
  window = args.prompt + args.sampled + 32
  tried = [
    {},
    {"decode_rows": (args.batch,)},
    {"decode_rows": (8,)},
    {"decode_steps_per_call": 16},
    {"decode_rows": (args.batch,), "decode_steps_per_call": 32},
    {"decode_steps_per_call": 32, "window_buckets": (window,)},
    {
      "decode_rows": (args.batch,),
      "decode_steps_per_call": 32,
      "window_buckets": (window,),
    },
  ]
  if args.brief:
    tried = tried[-1:]
  results = []
  for options in tried:
    got = run_engine(args, model, processor, options)
    share = least["bound_ms"] / got["step_ms"]
    results.append({"options": options, "fraction": share, **got})
    label = ", ".join(f"{k}={v}" for k, v in options.items()) or "as it comes"
    print(
      f"{got['step_ms']:7.2f} ms a step {got['tokens_per_second']:7.0f}"
      f" tokens/s {share:5.0%} of the bound: {label}",
      flush=True,
    )
  top = max(results, key=lambda r: r["fraction"])
  report = {
    "parameters": parameters,
    "machine": rates,
    "bound": least,
    "tried": results,
  }
  if args.brief:
    _write(args, report)
    return
  options = top["options"]
  rows = round(top["call_rows"])
  steps = options.get("decode_steps_per_call", 8)
  end = args.prompt + args.sampled + steps
  fits = [
    w for w in options.get("window_buckets", (args.context // 2,)) if w >= end
  ]
  parts_ms = parts(args, model, rows, steps, min(fits, default=args.context))
  parts_ms["pages of the cache, calls"] = (
    top["decode_ms"] - parts_ms["whole loop"]
  )
  parts_ms["host"] = top["host_ms"]
  parts_ms["engine's loop"] = top["step_ms"] - top["decode_ms"] - top["host_ms"]
  print(f"\nthe best one, {rows} rows a call, a step of all in ms:")
  for name, value in parts_ms.items():
    print(f"  {name:28}{value:8.3f} {value / top['step_ms']:6.0%}")
  print(f"fraction of the bound {top['fraction']:.0%}, target >= {TARGET:.0%}")
  _write(args, report | {"parts_ms": parts_ms})


def _write(args: argparse.Namespace, report: dict[str, Any]) -> None:
  if args.json:
    report["arguments"] = {k: str(v) for k, v in vars(args).items()}
    args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
  main()
