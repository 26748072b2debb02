"""Reports a policy's sizes, tokens and memory, before anything is trained.

    python -m tunix.rl.multi_turn.commands.inspect_policy Qwen3-VL-8B \\
        --mesh fsdp=16
    python -m tunix.rl.multi_turn.commands.inspect_policy ~/checkpoints/ui-agent
    python -m tunix.rl.multi_turn.commands.inspect_policy tiny_vl --forward

A published size needs no files: its weights are shapes. `describe` returns the
report as a dict. `--forward` samples once on a picture and a prompt, and ranks
the next tokens.

Does not: download anything, or run a published size, which needs the directory
of a checkpoint. `plan` predicts the memory of a whole run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import sys
from typing import Any, Sequence

import jax.numpy as jnp
import numpy as np
from PIL import Image
from tunix.rl.multi_turn import commands
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.parser.renderer import choice
from tunix.rl.multi_turn.planning import policy_facts
from tunix.rl.multi_turn.planning import update_memory
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import by_name
from tunix.rl.multi_turn.policy import memory_limits
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.policy.models.qwen import qwen_config

SCREENS = ((1280, 720), (1920, 1080), (1024, 768), (360, 640))
PROMPT = "What is on the screen?"
human = memory_limits.human
_TEXT_TOKENS = 2000
"""Tokens of a sequence beside its screenshots."""
_TARGETS = 4096
"""Sampled tokens of a sequence that a plan counts with, at most."""
_RANKED = 5


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
  mesh: dict[str, int] | None = None,
) -> dict[str, Any]:
  """The report without the forward pass.

  Args:
    policy: The policy.
    screen: (width, height) of screenshots, pixels; None = `usual_screen`.
    images: Screenshots of a sequence.
    mesh: Sizes of the axes for the memory plan; one device unless given.

  Raises:
    ValueError: A screenshot or mesh that the policy cannot have.
  """
  if images < 0:
    raise ValueError(f"--images={images} must be a whole number >= 0")
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
  compute = model.config.compute_dtype
  per_token = 2 * sizes.full_layers * sizes.kv_heads * sizes.head_dim
  per_token *= jnp.dtype(compute).itemsize
  length = images * shot["tokens"] + _TEXT_TOKENS
  axes = dict.fromkeys(sharding.AXES, 1) | (mesh or {})
  plan = update_memory.plan(
    model,
    update_memory.abstract_mesh(**axes),
    update_memory.Work(
      row_length=length,
      patches=images * shot["patches"],
      targets=min(_TARGETS, length),
    ),
  )
  return {
    "name": policy.name,
    "sizes": policy_facts.sizes_of(model),
    "parameters": policy_facts.parameters_by_part(model),
    "files": policy_facts.stored_bytes(policy.directory),
    "screens": [policy_facts.screenshot(processor, *s) for s in screens],
    "images": (base.optional(processor, "describe") or str)(),
    "sequence": {
      "images": images,
      "tokens": length,
      "kv_bytes_per_token": per_token,
      "kv_bytes": per_token * length,
    },
    "memory": {"mesh": axes, "bytes": plan.as_dict()},
  }


# --- how it is printed --------------------------------------------------------


def text_of(report: dict[str, Any]) -> str:
  """The report as a table."""
  sequence = report["sequence"]
  words = lambda entries: [
    (key.replace("_", " "), str(value)) for key, value in entries.items()
  ]
  blocks: dict[str, list[tuple[str, str]]] = {
    report["name"]: words(report["sizes"]),
    "parameters": [(k, f"{v:,}") for k, v in report["parameters"].items()],
    "files": [(dtype, human(size)) for dtype, size in report["files"].items()],
    "screenshots": [
      (
        s["screen"],
        s.get("refused") or f"{s['tokens']} tokens, at {s['resized']}",
      )
      for s in report["screens"]
    ],
    "sequence": [
      (
        "length",
        f"{sequence['tokens']:,} tokens, {sequence['images']} screenshots",
      ),
      (
        "KV cache",
        f"{human(sequence['kv_bytes'])},"
        f" {human(sequence['kv_bytes_per_token'])} a token",
      ),
    ],
    "memory of a device that learns from one such sequence": [
      (
        "mesh",
        ", ".join(f"{k}={v}" for k, v in report["memory"]["mesh"].items()),
      ),
      *words({k: human(v) for k, v in report["memory"]["bytes"].items()}),
    ],
  }
  if "forward" in report:
    blocks["next token"] = [
      (repr(one["token"]), f"{one['probability']:.4f}")
      for one in report["forward"]["top"]
    ]
    if report["forward"]["random_weights"]:
      blocks["next token"].append(("weights", "random: these mean nothing"))
  width = max(len(name) for rows in blocks.values() for name, _ in rows)
  return "\n\n".join(
    "\n".join([title, *(f"  {k.ljust(width)}  {v}" for k, v in rows)])
    for title, rows in blocks.items()
    if rows
  )


# --- one forward pass ---------------------------------------------------------


def forward(
  name: str,
  screen: tuple[int, int],
  picture: pathlib.Path | None = None,
  prompt: str = PROMPT,
) -> dict[str, Any]:
  """Samples one token with the engine; returns the likeliest.

  Args:
    name: Built-in policy or directory.
    screen: (width, height) of the grey picture that is shown without a file.
    picture: A picture's file.
    prompt: The user's words.

  Raises:
    ValueError: It has no weights here, or cannot take the picture.
    OSError: The picture cannot be read.
  """
  if name not in by_name.BUILT_IN and not pathlib.Path(name).exists():
    raise ValueError(
      f"{name} is a size: its weights and tokenizer are not here. Give the"
      f" directory of a checkpoint, or one of {', '.join(by_name.BUILT_IN)}"
    )
  named = by_name.resolve(name)
  random = name in by_name.BUILT_IN and name not in by_name.SHIPPED
  image = Image.new("RGB", screen, (127, 127, 127))
  if picture is not None:
    try:
      image = Image.open(picture.expanduser()).convert("RGB")
    except OSError as error:
      raise OSError(
        f"--image={picture}: {error}; give a picture's file"
      ) from None
  if random:
    model, processor, tokenizer = named.create(0, None, image.size)
  else:
    model, processor, tokenizer = named.load(named.weights, None, image.size)
  sees = bool(processor.patches_per_token)
  if picture is not None and not sees:
    raise ValueError(f"--image={picture}: {name} reads text only; leave it out")
  renderer = choice.make_renderer(
    tokenizer,
    base.layout_of(processor),
    policy_files.chat_template(named.tokenizer),
  )
  store = images_lib.ImageStore()
  content: list[dict[str, Any]] = [{"type": "text", "text": prompt}]
  if sees:
    ref = store.put(np.asarray(image))
    content.insert(0, {"type": "image", "image": ref})
  tokens = renderer.render([{"role": "user", "content": content}])
  engine = engine_lib.RolloutEngine(
    model,
    processor,
    store,
    engine_config.EngineConfig(
      slots=1, context_length=len(tokens) + 64, decode_steps_per_call=1
    ),
    image_sizes=(image.size,) if sees else (),
    banned_token_ids=model.config.banned_token_ids,
  )
  sampling = policy_client.SamplingParams(
    max_new_tokens=1, top_logprobs=_RANKED
  )
  try:
    sampled = asyncio.run(engine.generate(tokens, sampling, session="inspect"))
  finally:
    engine.close()
  ids, logprobs = sampled.top_tokens, sampled.top_logprobs
  assert ids is not None and logprobs is not None  # They were asked for.
  return {
    "tokens": len(tokens),
    "image_tokens": sum(span.num_tokens for span in tokens.images),
    "random_weights": random,
    "top": [
      {"token": renderer.decode([int(i)]), "probability": float(np.exp(chance))}
      for i, chance in zip(ids[0], logprobs[0])
    ],
  }


# --- the command --------------------------------------------------------------


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


def parser() -> argparse.ArgumentParser:
  module = "tunix.rl.multi_turn.commands.inspect_policy"
  out = argparse.ArgumentParser(
    prog=f"python -m {module}", description=commands.COMMANDS[module]
  )
  add = out.add_argument
  add(
    "policy",
    help="a directory, a built-in (%s), or a published size (%s)"
    % (", ".join(policy_facts.BUILT_IN), ", ".join(qwen_config.SIZES)),
  )
  add(
    "--screen",
    type=_screen,
    metavar="WxH",
    help="size of a screenshot in pixels (1280x720, or 360x640 where that is"
    " too large)",
  )
  add("--images", type=int, default=16, help="screenshots a sequence (16)")
  add(
    "--mesh",
    type=_mesh,
    default={},
    metavar="fsdp=8,sequence=2,tensor=1",
    help="devices that training memory is planned for (one)",
  )
  add("--forward", action="store_true", help="run it once")
  add(
    "--image",
    type=pathlib.Path,
    metavar="FILE",
    help="picture for --forward (a grey one)",
  )
  add("--prompt", default=PROMPT, help="prompt for --forward (%(default)r)")
  add("--json", action="store_true", help="print one JSON object")
  return out


def main(arguments: Sequence[str] | None = None) -> int:
  args = parser().parse_args(arguments)
  try:
    policy = policy_facts.find(args.policy)
    report = describe(policy, args.screen, args.images, args.mesh)
    if args.forward:
      screen = args.screen or usual_screen(policy.processor)
      report["forward"] = forward(args.policy, screen, args.image, args.prompt)
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  print(json.dumps(report, indent=2) if args.json else text_of(report))
  return 0


if __name__ == "__main__":
  sys.exit(main())
