"""Speed of TinyVL on this machine: training step, prefill, decode, patchify.

    JAX_PLATFORMS=cpu python benchmarks/bench_policy.py [--size tiny]

Prints one line a measurement: the best wall and CPU time of several calls
after warm-up. On a busy machine only the CPU time, summed over cores, means
something.
A training step here is the forward and backward pass of a mean log-prob over
all tokens, without the optimiser.
"""

from __future__ import annotations

import argparse
import time

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import host_memory
from tunix.rl.multi_turn.policy.checkpoints import checkpoint


def best_seconds(call, repeats=5):
  """(wall, CPU) seconds of the best of `repeats` calls."""
  jax.block_until_ready(call())
  wall, cpu = [], []
  for _ in range(repeats):
    start, start_cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    wall.append(time.perf_counter() - start)
    cpu.append(time.process_time() - start_cpu)
  return np.array([min(wall), min(cpu)])


def make_inputs(processor, config, rows, length, images, width, height, rng):
  """Rows of random text, each with `images` screenshots at its start."""
  pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
  image = processor.patchify(pixels)
  count = image.num_tokens
  # Two screenshots may not fit a short row: share them over the rows.
  tokens = rng.integers(0, 246, (rows, length)).astype(np.int32)
  index = np.full((rows, length), -1, np.int32)
  per_row = min(images, length // count)
  total = rows * images
  for row in range(rows):
    for i in range(per_row):
      at = slice(i * count, (i + 1) * count)
      tokens[row, at] = config.image_token_id
      index[row, at] = (row * images + i) * count + np.arange(count)
  positions = np.broadcast_to(
    np.arange(length, dtype=np.int32)[None, :, None], (rows, length, 3)
  )
  return base.PolicyInputs(
    tokens=tokens,
    positions=np.ascontiguousarray(positions),
    segment_ids=np.ones((rows, length), np.int32),
    vision_index=index,
    patches=np.tile(image.patches, (total, 1))[None],
    patch_segments=np.repeat(np.arange(1, total + 1, dtype=np.int32), count)[
      None
    ],
    patch_positions=np.tile(image.positions, (total, 1))[None],
  )


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--size", default="tiny")
  parser.add_argument("--dtype", default="float32")
  parser.add_argument("--rows", type=int, default=32)
  parser.add_argument("--length", type=int, default=256)
  parser.add_argument("--images", type=int, default=2)
  parser.add_argument("--width", type=int, default=224)
  parser.add_argument("--height", type=int, default=160)
  parser.add_argument("--slots", type=int, default=64)
  parser.add_argument("--cache", type=int, default=384)
  parser.add_argument("--untuned", action="store_true", help="plain malloc")
  parser.add_argument("--parts", action="store_true", help="time the parts")
  args = parser.parse_args()
  if not args.untuned:
    host_memory.tune()
  model, processor, _ = checkpoint.create_policy(
    args.size, compute_dtype=args.dtype
  )
  config = model.config
  graph, state = nnx.split(model)
  rng = np.random.default_rng(0)
  inputs = make_inputs(
    processor,
    config,
    args.rows,
    args.length,
    args.images,
    args.width,
    args.height,
    rng,
  )
  inputs = jax.device_put(inputs)
  count = sum(x.size for x in jax.tree.leaves(state))
  print(f"{args.size}: {count / 1e6:.2f}M parameters, {args.dtype}")
  print(
    f"{args.rows} rows x {args.length} tokens, {inputs.patches.shape[1]}"
    " vision tokens"
  )

  def report(name, seconds, items=None, unit="tokens"):
    wall, cpu = seconds * 1e3
    rate = f", {items / wall * 1e3:,.0f} {unit}/s" if items else ""
    print(f"{name:30s} {wall:8.1f} ms, CPU {cpu:8.1f} ms{rate}", flush=True)

  def loss(state, inputs):
    model = nnx.merge(graph, state)
    hidden = model(inputs)

    @jax.checkpoint
    def chunk(hidden, targets):
      logits = model.logits(hidden)
      picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
      return jnp.sum(picked - jax.nn.logsumexp(logits, -1))

    total = 0.0
    for i in range(0, hidden.shape[0], 4):
      total += chunk(hidden[i : i + 4, :-1], inputs.tokens[i : i + 4, 1:])
    return -total / inputs.tokens.size

  def vision_only(state, inputs):
    return nnx.merge(graph, state).encode_images(
      inputs.patches, inputs.patch_segments, inputs.patch_positions
    )

  tokens = args.rows * args.length
  forward = jax.jit(lambda s, i: nnx.merge(graph, s)(i))
  report("forward", best_seconds(lambda: forward(state, inputs)), tokens)
  step = jax.jit(jax.value_and_grad(loss))
  report(
    "forward + backward", best_seconds(lambda: step(state, inputs)), tokens
  )
  encode = jax.jit(vision_only)
  cells = inputs.patches.shape[1]
  report("  vision forward", best_seconds(lambda: encode(state, inputs)), cells)
  vision_grad = jax.jit(jax.grad(lambda s, i: jnp.sum(vision_only(s, i) ** 2)))
  report(
    "  vision forward + backward",
    best_seconds(lambda: vision_grad(state, inputs)),
    cells,
  )
  if args.parts:

    def body(state, inputs):
      return jnp.mean(nnx.merge(graph, state)(inputs) ** 2)

    grad = jax.jit(jax.grad(body))
    report("  without logits", best_seconds(lambda: grad(state, inputs)))
    stem = jax.jit(
      jax.grad(lambda s, i: jnp.sum(nnx.merge(graph, s).stem(i.patches) ** 2))
    )
    report(
      "  stem forward + backward", best_seconds(lambda: stem(state, inputs))
    )

  slots, length = args.slots, args.cache
  starts = jnp.full((slots,), length // 2, jnp.int32)
  ones = jnp.ones((slots,), jnp.int32)

  def run_extend(new, steps):
    cache = nnx.merge(graph, state).init_cache(slots, length)
    tokens = jnp.zeros((slots, new), jnp.int32)

    def fn(state, cache, starts):
      model = nnx.merge(graph, state)

      def body(carry, _):
        cache, starts = carry
        positions = jnp.broadcast_to(
          (starts[:, None] + jnp.arange(new))[..., None], (slots, new, 3)
        )
        hidden, cache = model.extend(
          tokens, positions, starts, ones * new, cache
        )
        logits = model.logits(hidden[:, -1])
        return (cache, starts + (new == 1)), jnp.argmax(logits, -1)

      (cache, _), out = jax.lax.scan(body, (cache, starts), None, length=steps)
      return cache, out

    fn = jax.jit(fn, donate_argnums=1)
    holder = [cache]

    def call():
      holder[0], out = fn(state, holder[0], starts)
      return out

    return best_seconds(call) / steps

  report(f"decode step B={slots} C={length}", run_extend(1, 16), slots)
  new = 160
  report(
    f"prefill B={slots} T={new} C={length}", run_extend(new, 1), slots * new
  )
  pixels = rng.integers(0, 256, (args.height, args.width, 3), dtype=np.uint8)
  seconds = best_seconds(
    lambda: [processor.patchify(pixels) for _ in range(100)]
  )
  report("patchify one screenshot", seconds / 100)


if __name__ == "__main__":
  main()
