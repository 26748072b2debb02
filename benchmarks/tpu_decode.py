"""Compiles the rollout's two steps for TPUs that are not here.

    make tpu-decode
    make tpu-decode ARGS='--model Qwen3-VL-8B --topology v5p:2x2x1'

As `tpu_compile`, for what the engine runs: `prefill` appends a chunk of tokens
to sequences whose keys and values lie in pages, `decode` appends one token to
each and samples the next. Says what a device would hold and send, and whether
the ragged paged attention kernel is in the program; the exit status is 1 if it
is not, or if a program does not fit.
"""

from __future__ import annotations

import argparse

import tpu_compile  # Beside this file; first, as it sets JAX's platform.

# isort: split
from flax import nnx  # noqa: E402
import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from tunix.rl.multi_turn.engine import sampler  # noqa: E402
from tunix.rl.multi_turn.policy import hf_checkpoint  # noqa: E402
from tunix.rl.multi_turn.policy import kernels  # noqa: E402
from tunix.rl.multi_turn.policy import qwen_config  # noqa: E402
from tunix.rl.multi_turn.policy import sharding  # noqa: E402

KERNEL = "ragged_paged_attention"


def programs_of(model, args, mesh):
  """Name -> (program, arguments as shapes)."""
  graph, state = nnx.split(model)
  one = sharding.replicated(mesh)

  def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=one)

  cache = jax.eval_shape(
      lambda s: nnx.merge(graph, s).init_pages(args.pages, args.page_size),
      state,
  )
  axes = model._page_axes  # pylint: disable=protected-access
  place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
  cache = jax.ShapeDtypeStruct(cache.shape, cache.dtype, sharding=place)
  i32, f32 = jnp.int32, jnp.float32
  width = args.context // args.page_size

  def prefill(state, cache, tokens, positions, starts, lengths, table):
    _, cache = nnx.merge(graph, state).extend_pages(
        tokens, positions, starts, lengths, cache, table
    )
    return cache

  def decode(
      state, cache, tokens, positions, starts, lengths, table, keys, heat
  ):
    model = nnx.merge(graph, state)
    hidden, cache = model.extend_pages(
        tokens, positions, starts, lengths, cache, table
    )
    none = jnp.zeros(args.rows, i32)
    drawn = sampler.sample(
        model.logits(hidden[:, 0]),
        jnp.zeros(model.config.vocab_size, bool),
        keys,
        starts,
        heat,
        none,
        jnp.ones(args.rows, f32),
        jnp.zeros(args.rows, f32),
        jnp.bool_(False),
    )
    return cache, drawn

  def call(rows, tokens):
    return (
        state,
        cache,
        array(i32, rows, tokens),
        array(i32, rows, tokens, 3),
        array(i32, rows),
        array(i32, rows),
        array(i32, rows, width),
    )

  jit = lambda f: jax.jit(f, donate_argnums=1)
  return {
      "prefill": (jit(prefill), call(args.prefill_rows, args.chunk)),
      "decode": (
          jit(decode),
          (
              *call(args.rows, 1),
              array(jnp.uint32, args.rows, 2),
              array(f32, args.rows),
          ),
      ),
  }


def main():
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add("--model", choices=qwen_config.SIZES, default="Qwen3-VL-4B")
  add("--topology", default="v5e:2x2", help="v5e:2x2, v5p:2x2x1, v6e:2x2, …")
  add("--fsdp", type=int, default=1)
  add("--tensor", type=int, default=-1, help="-1: what is left")
  add("--rows", type=int, default=64, help="sequences of a decode step")
  add("--prefill-rows", type=int, default=4)
  add("--chunk", type=int, default=256, help="tokens a row of a prefill")
  add("--context", type=int, default=32768, help="tokens a sequence may have")
  add("--pages", type=int, default=4096)
  add("--page-size", type=int, default=64, help="tokens of a page")
  args = parser.parse_args()
  args.param_dtype, args.remat, args.image_patches = "bfloat16", "none", 3520
  args.layers = args.blocks = 0
  args.dump = ""
  topology = topologies.get_topology_desc(args.topology, platform="tpu")
  devices = len(topology.devices)
  if args.tensor == -1:
    args.tensor = devices // args.fsdp
  mesh = sharding.make_mesh(1, args.fsdp, args.tensor, topology.devices)
  model = hf_checkpoint.abstract_model(tpu_compile.config_of(args), mesh)
  with kernels.compile_for("tpu"):
    assert model.reads_pages, "the kernel does not take this model's heads"
  status = 0
  gib = tpu_compile.GIB
  for name, (program, arguments) in programs_of(model, args, mesh).items():
    print(f"### {args.model}, {args.topology}, `{name}`\n")
    # Kernels ask which TPU they are for.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      with kernels.compile_for("tpu"):
        text = program.lower(*arguments).as_text()
      held = KERNEL in text
      try:
        found = tpu_compile.compile_program(name, program, arguments, args)
      except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
          raise
        print(f"{error}\n")
        status = 1
        continue
    status |= not held
    used = found["memory"]
    print(
        f"mesh {dict(mesh.shape)}; compiled in {found['compile_seconds']} s;"
        f" paged attention kernel: {'yes' if held else 'NO'}\n\n"
        "| GiB a device | |\n|---|---|"
    )
    for part in ("arguments", "outputs", "temporary"):
      print(f"| {part} | {used[part] / gib:.2f} |")
    print("\n| collective | count | largest |\n|---|---|---|")
    for kind, (count, size, _) in found["collectives"].items():
      print(f"| {kind} | {count} | {size / (1 << 20):.1f} MiB |")
    print(flush=True)
  raise SystemExit(status)


if __name__ == "__main__":
  main()
