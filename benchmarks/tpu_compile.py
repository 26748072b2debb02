"""Compiles the real training step for TPUs that are not here.

    make tpu-compile
    make tpu-compile ARGS='--model Qwen3-VL-8B --topology v5p:4x4x4'

XLA's TPU compiler runs on any x86 Linux. It is given the learner's own two
programs, `accumulate` (forward and backward pass of a micro-batch) and `apply`
(the optimizer step), with shapes in place of arrays, and says what a device
would hold, what it would send, and whether it fits. Nothing is executed: there
is no speed here.

Prints memory a device beside what `learner.memory_plan` predicts, collectives
by kind, and whether the embedding or the logits are ever gathered whole; the
exit status is 1 if they are, or if a program does not fit its device.
Compiling takes minutes and a few GB of memory.

Takes libtpu from `.venv-tpu`, where `make tpu-compile` puts it, or from
TPU_LIBRARY_PATH. Not timed, and not part of `make bench`.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import os
import pathlib
import re
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
_LIBRARY = pathlib.Path(__file__).parents[1] / ".venv-tpu/libtpu/libtpu.so"
if _LIBRARY.is_file():
  os.environ.setdefault("TPU_LIBRARY_PATH", str(_LIBRARY))

import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from tunix.rl.multi_turn.learner import batching  # noqa: E402
from tunix.rl.multi_turn.learner import config as config_lib  # noqa: E402
from tunix.rl.multi_turn.learner import logprobs  # noqa: E402
from tunix.rl.multi_turn.learner import memory_plan  # noqa: E402
from tunix.rl.multi_turn.learner import update  # noqa: E402
from tunix.rl.multi_turn.learner.algorithms import parts  # noqa: E402
from tunix.rl.multi_turn.policy import base  # noqa: E402
from tunix.rl.multi_turn.policy import hf_checkpoint  # noqa: E402
from tunix.rl.multi_turn.policy import kernels  # noqa: E402
from tunix.rl.multi_turn.policy import qwen_config  # noqa: E402
from tunix.rl.multi_turn.policy import sharding  # noqa: E402

GIB = 1 << 30
_KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all",
    "collective-permute",
)  # pyformat: disable
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4,
          "s32": 4, "u32": 4, "s16": 2, "u16": 2, "s64": 8, "u64": 8}


def abstract_batch(config, args, mesh):
  """`batching.Batch` of shapes that lie on the mesh."""
  place = sharding.batch_sharding(mesh)
  s = sharding.batch_shards(mesh)
  b, t, m = s * args.rows, args.row_length, args.targets
  p = args.images * args.rows * args.image_patches
  f = 3 * config.vision.patch_size**2

  def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

  i32, f32 = jnp.int32, jnp.float32
  inputs = base.PolicyInputs(
      tokens=array(i32, b, t),
      positions=array(i32, b, t, 3),
      segment_ids=array(i32, b, t),
      vision_index=array(i32, b, t),
      patches=array(jnp.uint8, s, p, f),
      patch_segments=array(i32, s, p),
      patch_positions=array(i32, s, p, 4),
      image_patches=args.image_patches,
  )
  ints = ("index", "targets", "versions", "sequences", "groups")
  floats = ("logprobs", "advantages", "weights")
  return batching.Batch(
      inputs=inputs,
      mask=array(jnp.bool_, s, m),
      **{name: array(i32, s, m) for name in ints},
      **{name: array(f32, s, m) for name in floats},
  )


def programs_of(model, args, mesh):
  """The learner's programs and their arguments, as shapes."""
  config = model.config
  split = update.SplitModel(model)
  placement = update.Placement.of(split, model, mesh)
  learner = config_lib.LearnerConfig(
      row_length=args.row_length, logit_chunk=args.logit_chunk
  )
  programs = update.UpdatePrograms(
      split,
      learner,
      parts.Algorithm.of(config_lib.AlgorithmConfig()),
      logprobs.banned_mask(config.vocab_size, config.banned_token_ids),
      placement,
  )

  def placed(shape, place):
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)

  params = {
      name: placed(shape, placement.params[name])
      for name, shape in zip(split.names, split.shapes)
  }
  batch = abstract_batch(config, args, mesh)
  extra = update.Extra(batch.logprobs, batch.logprobs)
  _, sums = jax.eval_shape(programs.loss, params, {}, batch, extra)
  one = placement.replicated
  sums = jax.tree.map(lambda x: placed(x, one), sums)
  state = jax.eval_shape(programs.init_optimizer, params)
  state = jax.tree.map(placed, state, programs.optimizer_placement)
  return {
      "accumulate": (
          programs.accumulate, (params, params, sums, {}, batch, extra)
      ),
      "apply": (programs.apply, (params, state, params)),
  }


def collectives(text):
  """Kind -> (count, largest result in bytes, its elements) of HLO text."""
  found = collections.defaultdict(lambda: [0, 0, 0])
  pattern = re.compile(
      r"= (.*?) (" + "|".join(_KINDS) + r")(-start)?\("
  )
  for line in text.splitlines():
    match = pattern.search(line)
    if match is None:
      continue
    entry = found[match.group(2)]
    entry[0] += 1
    for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", match.group(1)):
      if dtype in _BYTES:
        count = math.prod(int(n) for n in shape.split(",") if n)
        entry[1] = max(entry[1], count * _BYTES[dtype])
        entry[2] = max(entry[2], count)
  return {k: tuple(v) for k, v in sorted(found.items())}


def memory(compiled):
  """Bytes a device: arguments, outputs that reuse none of them, temporary.

  `peak` is the most that is alive at a time, arguments included; the compiler
  takes more temporary memory than that, as its heap has gaps.
  """
  found = compiled.memory_analysis()
  return {
      "arguments": found.argument_size_in_bytes,
      "outputs": found.output_size_in_bytes - found.alias_size_in_bytes,
      "temporary": found.temp_size_in_bytes,
      "peak": found.peak_memory_in_bytes,
      "code": found.generated_code_size_in_bytes,
  }


def config_of(args):
  """The published size, as it would be trained."""
  config = dataclasses.replace(
      qwen_config.SIZES[args.model],
      compute_dtype="bfloat16",
      param_dtype=args.param_dtype,
      remat=args.remat,
      scan_layers=True,
  )
  text, vision = config.text, config.vision
  if args.layers:
    text = dataclasses.replace(text, num_hidden_layers=args.layers)
  if args.blocks:
    deep = vision.deepstack_visual_indexes
    deep = tuple(range(min(len(deep), args.blocks)))
    vision = dataclasses.replace(
        vision, depth=args.blocks, deepstack_visual_indexes=deep
    )
  return dataclasses.replace(config, text=text, vision=vision)


def compile_program(name, program, arguments, args):
  """Compiles one program for the TPU; figures, and the text of its HLO."""
  started = time.perf_counter()
  with kernels.compile_for("tpu"):
    lowered = program.lower(*arguments)
  traced = time.perf_counter() - started
  started = time.perf_counter()
  compiled = lowered.compile()
  seconds = time.perf_counter() - started
  text = compiled.as_text()
  if args.dump:
    pathlib.Path(f"{args.dump}.{name}.hlo").write_text(text)
  return {
      "trace_seconds": round(traced, 1),
      "compile_seconds": round(seconds, 1),
      "memory": memory(compiled),
      "collectives": collectives(text),
  }


def measure(args):
  """Compiles what `args` names; the report as a dict."""
  config = config_of(args)
  topology = topologies.get_topology_desc(args.topology, platform="tpu")
  mesh = sharding.make_mesh(
      args.data,
      args.fsdp,
      args.tensor,
      topology.devices,
      sequence=args.sequence,
  )
  model = hf_checkpoint.abstract_model(config, mesh)
  plan = memory_plan.plan(
      model,
      mesh,
      memory_plan.Work(
          row_length=args.row_length,
          rows=args.rows,
          patches=args.rows * args.images * args.image_patches,
          targets=args.targets,
          logit_chunk=args.logit_chunk,
      ),
  )
  programs = programs_of(model, args, mesh)
  if args.program != "both":
    programs = {args.program: programs[args.program]}
  vocabulary, width = config.vocab_size, config.text.hidden_size
  whole = min(
      vocabulary * width,
      # Of the rows of a data shard; a device holds its vocabulary's part.
      args.logit_chunk * vocabulary * mesh.shape["fsdp"],
  )
  report = {
      "model": args.model,
      "topology": args.topology,
      "mesh": dict(mesh.shape),
      "devices": mesh.size,
      "plan": plan.as_dict(),
      "whole_elements": whole,
      "programs": {},
  }
  for name, (program, arguments) in programs.items():
    try:
      found = compile_program(name, program, arguments, args)
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error):
        raise
      # The figure that the compiler gives is of temporary memory alone.
      report["programs"][name] = {"refused": str(error)}
      planned = plan.accumulate if name == "accumulate" else plan.total
      print(
          f"### {args.model}, {args.topology}, `{name}`\n\n{error}\n"
          f"Planned: {planned / GIB:.2f} GiB in all.\n",
          flush=True,
      )
      continue
    gathered = found["collectives"].get("all-gather", (0, 0, 0))[2]
    found["gathers_whole"] = gathered >= whole
    report["programs"][name] = found
    print(table(report, name), flush=True)
  return report


def table(report, name):
  """A program's figures as Markdown."""
  plan, found = report["plan"], report["programs"][name]
  used = found["memory"]
  rows = {
      "accumulate": {
          "arguments": plan["parameters"] + plan["gradients"] + plan["batch"],
          "temporary": (
              plan["new_gradients"]
              + plan["cast"]
              + plan["activations"]
              + plan["heap_gaps"]
          ),
      },
      "apply": {
          "arguments": (
              plan["parameters"] + plan["gradients"] + plan["optimizer"]
          ),
          "temporary": 0,
      },
  }[name]
  rows |= {"outputs": 0}
  rows["total"] = sum(rows.values())
  used = used | {"total": sum(used[k] for k in rows if k != "total")}
  lines = [
      f"### {report['model']}, {report['topology']}, `{name}`",
      "",
      "mesh " + ", ".join(f"{k}={v}" for k, v in report["mesh"].items())
      + f"; traced in {found['trace_seconds']} s, compiled in"
      f" {found['compile_seconds']} s",
      "",
      "| GiB a device | compiled | planned | |",
      "|---|---|---|---|",
  ]
  rows["peak"] = rows["total"]
  if name == "accumulate":
    rows["peak"] -= plan["heap_gaps"]
  for row in ("arguments", "outputs", "temporary", "total", "peak"):
    real, planned = used[row] / GIB, rows[row] / GIB
    off = f"{planned / real - 1:+.0%}" if real > 0.01 else ""
    lines.append(f"| {row} | {real:.2f} | {planned:.2f} | {off} |")
  lines += ["", "| collective | count | largest |", "|---|---|---|"]
  for kind, (count, size, _) in found["collectives"].items():
    lines.append(f"| {kind} | {count} | {size / (1 << 20):.1f} MiB |")
  verdict = "gathered whole" if found["gathers_whole"] else "never whole"
  return "\n".join([*lines, "", f"Embedding and logits: {verdict}.", ""])


# What is compiled when no model is named.
CASES = (
    dict(model="Qwen3-VL-4B", topology="v5e:4x4", fsdp=4, sequence=4),
    dict(model="Qwen3-VL-8B", topology="v5p:4x4x4"),
)


def main():
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add("--model", choices=qwen_config.SIZES, help="default: CASES")
  add("--topology", help="v5e:4x4, v5p:4x4x4, v6e:16x16, tpu7x:2x2x2, …")
  add("--data", type=int, default=1)
  add("--fsdp", type=int, default=-1, help="-1: what is left")
  add("--sequence", type=int, default=1)
  add("--tensor", type=int, default=1)
  add("--rows", type=int, default=1, help="rows a batch shard")
  add("--row-length", type=int, default=32768, help="tokens")
  add("--images", type=int, default=8, help="screenshots a row")
  add("--image-patches", type=int, default=3520, help="1280x704: 3520")
  add("--targets", type=int, default=4096, help="sampled tokens a shard")
  add("--logit-chunk", type=int, default=256)
  add("--remat", default="block", choices=memory_plan.REMAT)
  add("--param-dtype", default="float32", choices=("float32", "bfloat16"))
  add("--layers", type=int, default=0, help="fewer decoder layers")
  add("--blocks", type=int, default=0, help="fewer vision blocks")
  add("--program", default="both", choices=("both", "accumulate", "apply"))
  add("--dump", default="", help="write the HLO to DUMP.<program>.hlo")
  add("--json", default="", help="append the report to this file")
  args = parser.parse_args()
  cases = [vars(args)]
  if args.model is None:
    cases = [vars(args) | case for case in CASES]
  status = 0
  for case in cases:
    case = argparse.Namespace(**case)
    case.topology = case.topology or "v5e:4x4"
    report = measure(case)
    status |= any(
        "refused" in p or p["gathers_whole"]
        for p in report["programs"].values()
    )
    if args.json:
      with open(args.json, "a", encoding="utf-8") as file:
        file.write(json.dumps(report) + "\n")
  raise SystemExit(status)


if __name__ == "__main__":
  main()
