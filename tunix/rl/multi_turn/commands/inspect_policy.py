"""Reports a policy's sizes, tokens and memory, before anything is trained.

    python -m tunix.rl.multi_turn.commands.inspect_policy Qwen3-VL-8B \\
        --mesh fsdp=16
    python -m tunix.rl.multi_turn.commands.inspect_policy ~/checkpoints/ui-agent
    python -m tunix.rl.multi_turn.commands.inspect_policy tiny_vl --forward

A published size needs no files: its weights are shapes. `describe` returns the
report as a dict. `--forward` runs the policy once on a picture and a prompt,
see `try_policy`.

Does not: download anything, or run a published size, which needs the directory
of a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any, Sequence

import jax.numpy as jnp
from tunix.rl.multi_turn import commands
from tunix.rl.multi_turn.commands import try_policy
from tunix.rl.multi_turn.planning import policy_facts
from tunix.rl.multi_turn.planning import update_memory
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.models.qwen import qwen_config

SCREENS = ((1280, 720), (1920, 1080), (1024, 768), (360, 640))
_DTYPES = ("float32", "bfloat16")
human = policy_facts.human
_TARGETS = 4096
"""Sampled tokens of a sequence that a plan counts with, at most."""

_EXAMPLES = """\
examples:
  %(prog)s Qwen3-VL-8B --images 32 --mesh data=1,fsdp=16,tensor=1
  %(prog)s Qwen3-VL-30B-A3B --remat dots --lora 16 --json
  %(prog)s qwen3_vl_tiny --screen 360x640 --forward
  %(prog)s /path/to/checkpoint --forward --image shot.png --prompt "Log in."
"""


def usual_screen(processor: base.Processor) -> tuple[int, int]:
  """The first of `SCREENS` that the policy takes."""
  for screen in SCREENS:
    if "refused" not in policy_facts.screenshot(processor, *screen):
      return screen
  return SCREENS[-1]


def describe(
  policy: policy_facts.Found,
  screen: tuple[int, int] | None = None,
  images: int = 16,
  text_tokens: int = 2000,
  mesh: dict[str, int] | None = None,
  remat: str | None = None,
  lora_rank: int = 0,
) -> dict[str, Any]:
  """The report without the forward pass.

  Args:
    policy: The policy.
    screen: (width, height) of screenshots, pixels; None = `usual_screen`.
    images: screenshots of a sequence.
    text_tokens: its other tokens.
    mesh: sizes of the axes for the memory plan; one device unless given.
    remat, lora_rank: see `update_memory.plan`.

  Raises:
    ValueError: a screenshot, mesh or adapter that the policy cannot have.
  """
  model, processor = policy.model, policy.processor
  sizes = update_memory.Sizes.of(model.config)
  if processor.patches_per_token:
    screen = screen or usual_screen(processor)
    shot = policy_facts.screenshot(processor, *screen)
    if "refused" in shot:
      raise ValueError(shot["refused"])
    screens = [tuple(screen), *(s for s in SCREENS if s != tuple(screen))]
  else:  # A text policy has no screenshots.
    images, screens, shot = 0, [], {"tokens": 0, "patches": 0}
  parameters = policy_facts.parameters_by_part(model)
  compute = model.config.compute_dtype
  text = base.optional(model.config, "text")
  linear = sum(map(text.is_linear, range(sizes.layers))) if text else 0
  per_token = (
    2
    * (sizes.layers - linear)
    * sizes.kv_heads
    * sizes.head_dim
    * jnp.dtype(compute).itemsize
  )
  length = images * shot["tokens"] + text_tokens
  axes = dict.fromkeys(sharding.AXES, 1) | (mesh or {})
  plan = update_memory.plan(
    model,
    update_memory.abstract_mesh(**axes),
    update_memory.Work(
      row_length=max(length, 1),
      patches=images * shot["patches"],
      targets=min(_TARGETS, max(length, 1)),
    ),
    remat=remat,
    lora_rank=lora_rank,
  )
  return {
    "name": policy.name,
    "sizes": policy_facts.sizes_of(model),
    "parameters": parameters,
    "checkpoint_bytes": {
      "float32": 4 * parameters["total"],
      "bfloat16": 2 * parameters["total"],
    },
    "files": policy_facts.stored_bytes(policy.directory),
    "screens": [policy_facts.screenshot(processor, *s) for s in screens],
    "images": (base.optional(processor, "describe") or str)(),
    "sequence": {
      "images": images,
      "text_tokens": text_tokens,
      "tokens": length,
      "kv_bytes_per_token": per_token,
      "kv_bytes": per_token * length,
      "kv_dtype": compute,
    },
    "memory": {
      "mesh": axes,
      "lora_rank": lora_rank,
      "remat": remat or base.optional(model.config, "remat") or "none",
      "param_dtype": base.optional(model.config, "param_dtype"),
      "compute_dtype": compute,
      "bytes": plan.as_dict(),
    },
  }


# --- how it is printed --------------------------------------------------------


def text_of(report: dict[str, Any]) -> str:
  """The report as a table."""
  sizes, sequence = report["sizes"], report["sequence"]
  memory = report["memory"]
  blocks: list[tuple[str, list[tuple[str, str]]]] = [
      (report["name"], [(k.replace("_", " "), str(v)) for k, v in
                        sizes.items()]),
      ("parameters", [
          (k, f"{v:,}") for k, v in report["parameters"].items()
      ]),
      ("checkpoint", [
          (f"{where}{dtype}", human(size))
          for where, figures in (
              ("as ", report["checkpoint_bytes"]),
              ("files hold ", report["files"]),
          )
          for dtype, size in figures.items()
      ]),
      ("screenshots", [
          (s["screen"], "larger than this policy takes" if "refused" in s
           else
           f"{s['tokens']} tokens, seen at {s['resized']}")
          for s in report["screens"]
      ] + [("images", report["images"])] * bool(report["images"])),
      ("sequence", [
          ("length", f"{sequence['tokens']:,} tokens:"
           + (f" {sequence['images']} screenshots of"
              f" {report['screens'][0]['screen']} and"
              if report["screens"] else "")
           + f" {sequence['text_tokens']} of text"),
          ("KV cache", f"{human(sequence['kv_bytes_per_token'])} a token,"
           f" {human(sequence['kv_bytes'])} in {sequence['kv_dtype']}"),
      ]),
      ("training memory a device", [
          ("mesh", ", ".join(f"{k}={v}" for k, v in memory["mesh"].items())),
          ("row", "one such sequence a batch shard"),
          ("trained", f"LoRA of rank {memory['lora_rank']}"
           if memory["lora_rank"] else "all parameters"),
          ("dtypes", f"parameters {memory['param_dtype']}, activations"
           f" {memory['compute_dtype']}, remat {memory['remat']}"),
          *((k.replace("_", " "), human(v)) for k, v in
            memory["bytes"].items()),
      ]),
  ]  # fmt: skip
  if "forward" in report:
    blocks.append(("forward pass", try_policy.rows_of(report["forward"])))
  width = max(len(name) for _, rows in blocks for name, _ in rows)
  return "\n\n".join(
    title + "\n" + "\n".join(f"  {k.ljust(width)}  {v}" for k, v in rows)
    for title, rows in blocks
  )


def _screen(text: str) -> tuple[int, int]:
  parts = text.lower().split("x")
  if len(parts) != 2 or not all(p.isdigit() and int(p) for p in parts):
    raise argparse.ArgumentTypeError(
      f"{text!r} is not a size; write WIDTHxHEIGHT, for example 1280x720"
    )
  return int(parts[0]), int(parts[1])


def _mesh(text: str) -> dict[str, int]:
  mesh = {}
  for part in text.split(","):
    name, _, size = part.strip().partition("=")
    if name not in sharding.AXES or not (size.isdigit() and int(size)):
      raise argparse.ArgumentTypeError(
        f"{part!r} is not a mesh axis; write"
        " data=1,fsdp=8,sequence=2,tensor=1 (sizes >= 1; others are 1)"
      )
    mesh[name] = int(size)
  return mesh


def _count(text: str) -> int:
  if not text.isdigit():
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 0")
  return int(text)


def parser() -> argparse.ArgumentParser:
  out = argparse.ArgumentParser(
    prog="python -m tunix.rl.multi_turn.commands.inspect_policy",
    description=commands.COMMANDS[
      "tunix.rl.multi_turn.commands.inspect_policy"
    ],
    epilog=_EXAMPLES,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  out.add_argument(
    "policy",
    help="a directory, a built-in (%s), or a published size (%s)"
    % (", ".join(policy_facts.BUILT_IN), ", ".join(qwen_config.SIZES)),
  )
  add = out.add_argument
  add(
    "--screen",
    type=_screen,
    metavar="WxH",
    help="size of a screenshot in pixels (1280x720, or 360x640 where that is"
    " too large)",
  )
  add("--images", type=_count, default=16, help="screenshots a sequence (16)")
  add(
    "--text-tokens",
    type=_count,
    default=2000,
    help="other tokens of the sequence (2000)",
  )
  add(
    "--mesh",
    type=_mesh,
    default={},
    metavar="fsdp=8,sequence=2,tensor=1",
    help="devices that training memory is planned for (one)",
  )
  add(
    "--dtype",
    choices=_DTYPES,
    help="of activations and KV cache (bfloat16 of a published size, else"
    " as its config)",
  )
  add(
    "--param-dtype",
    choices=_DTYPES,
    help="of weights and gradients (as its config: float32)",
  )
  add(
    "--remat",
    choices=update_memory.REMAT,
    help="what the backward pass computes again (as its config)",
  )
  add(
    "--lora",
    type=_count,
    default=0,
    metavar="RANK",
    help="train an adapter of this rank (0: all parameters)",
  )
  add("--forward", action="store_true", help="run it once")
  add(
    "--image",
    type=pathlib.Path,
    metavar="FILE",
    help="picture for --forward (a generated one)",
  )
  add(
    "--prompt",
    default=try_policy.PROMPT,
    help="prompt for --forward (%(default)r)",
  )
  add("--json", action="store_true", help="print one JSON object")
  return out


def main(arguments: Sequence[str] | None = None) -> int:
  options = parser()
  args = options.parse_args(arguments)
  try:
    policy = policy_facts.find(args.policy, args.dtype, args.param_dtype)
    report = describe(
      policy,
      args.screen,
      args.images,
      args.text_tokens,
      args.mesh,
      args.remat,
      args.lora,
    )
    if args.forward:
      report["forward"] = try_policy.run(
        policy,
        args.screen or usual_screen(policy.processor),
        args.image,
        args.prompt,
      )
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  print(json.dumps(report, indent=2) if args.json else text_of(report))
  return 0


if __name__ == "__main__":
  sys.exit(main())
