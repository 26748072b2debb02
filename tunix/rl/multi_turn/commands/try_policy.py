"""Runs a policy once on a picture and a prompt; ranks its next tokens.

Promises: a policy that does not fit this host's memory is refused with the
figures before anything is allocated; `random_weights` marks a result of random
weights; probabilities are those that samplers draw from: placeholders have
none.
"""

from __future__ import annotations

import os
import pathlib
import time
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
from PIL import ImageDraw
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.planning import policy_facts
from tunix.rl.multi_turn.planning import update_memory
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.models.smolvlm import smolvlm_inputs

PROMPT = "What is on the screen?"
_IMAGE = "<|image_pad|>"
_NO_IMAGE = "<|vision_start|><|vision_end|>"
_CHAT = (
  "<|im_start|>user\n<|vision_start|>{image}<|vision_end|>{prompt}<|im_end|>"
  "\n<|im_start|>assistant\n"
)


def run(
  policy: policy_facts.Found,
  screen: tuple[int, int],
  image: pathlib.Path | None = None,
  prompt: str = PROMPT,
) -> dict[str, Any]:
  """One forward pass on the default device.

  Args:
    policy: The policy.
    screen: (width, height) of the generated picture.
    image: a picture file instead of that.
    prompt: the user's words.

  Raises:
    ValueError: it does not fit this host, has no tokenizer here, or cannot
      take the picture or the prompt.
    OSError: the picture cannot be read.
  """
  pixels, count, size = None, 0, None
  if policy.processor.patches_per_token:
    pixels = picture(*screen) if image is None else _read(image)
    size = (pixels.shape[1], pixels.shape[0])
    count = policy.processor.num_image_tokens(*size)
  elif image is not None:
    raise ValueError(
      f"--image={image}: {policy.name} reads text only; leave it out"
    )
  if policy.directory is None and policy.name not in checkpoint.SMALL:
    raise ValueError(
      f"{policy.name} is a size: its weights and tokenizer are not here. Give"
      f" the directory of a checkpoint, or one of"
      f" {', '.join(policy_facts.BUILT_IN)}"
    )
  if isinstance(policy.processor, smolvlm_inputs.SmolVLMProcessor):
    raise ValueError(
      f"--forward of {policy.name}: its pictures are tiles with text between"
      " them, which this prompt has not; evaluate it instead (tunix-mt"
      " evaluate)"
    )
  need = needed_bytes(policy, count)
  have = free_bytes()
  if need > have:
    raise ValueError(
      f"--forward of {policy.name} needs about {policy_facts.human(need)},"
      f" this host has {policy_facts.human(have)} free; use a larger host, a"
      " smaller policy, or --param-dtype bfloat16"
    )
  random = policy.directory is None
  model, processor, encoder = _load(policy, size)
  inputs = make_inputs(processor, encoder, model.config, pixels, prompt)
  chances, compile_seconds, seconds = _next_tokens(model, inputs)
  best = np.argsort(-chances, kind="stable")[:5]
  return {
    "picture": "none" if size is None else str(image or "generated"),
    "size": "" if size is None else "{}x{}".format(*size),
    "tokens": int(inputs.tokens.shape[1]),
    "image_tokens": count,
    "compile_seconds": round(compile_seconds, 3),
    "seconds": round(seconds, 3),
    "random_weights": random,
    "top": [
      {
        "id": int(i),
        "token": encoder.decode([int(i)], skip_special_tokens=False),
        "probability": float(chances[i]),
      }
      for i in best
    ],
  }


def _load(
  policy: policy_facts.Found, screen: tuple[int, int] | None
) -> checkpoint.Loaded:
  """The policy with weights: its directory's, or random ones."""
  config = policy.model.config
  change: dict[str, Any] = {"compute_dtype": config.compute_dtype}
  if hasattr(config, "param_dtype"):
    change["param_dtype"] = config.param_dtype
  if policy.directory is not None:
    return checkpoint.load_policy(policy.directory, screen=screen, **change)
  return checkpoint.create_policy(policy.name, screen=screen, **change)


def _next_tokens(
  model: base.Policy, inputs: base.PolicyInputs
) -> tuple[np.ndarray, float, float]:
  """float64[V] probabilities, seconds of compiling, seconds of the pass."""
  graph, state = nnx.split(model)

  @jax.jit
  def forward(state: object, inputs: base.PolicyInputs) -> jax.Array:
    policy = nnx.merge(graph, state)
    return policy.logits(policy(inputs)[:, -1:])[0, 0]

  seconds = []
  for _ in range(2):  # The first call compiles.
    started = time.perf_counter()
    logits = np.array(forward(state, inputs), np.float64)
    seconds.append(time.perf_counter() - started)
  logits[list(model.config.banned_token_ids)] = -np.inf
  chances = np.exp(logits - logits.max())
  return chances / chances.sum(), seconds[0] - seconds[1], seconds[1]


def rows_of(result: dict[str, Any]) -> list[tuple[str, str]]:
  """The result as lines of a table."""
  rows = [
      ("picture", f"{result['picture']}, {result['size']}".rstrip(", ")),
      ("tokens", f"{result['tokens']}, of which the picture's are"
       f" {result['image_tokens']}"),
      ("time", f"{result['seconds']:.3f} s after"
       f" {result['compile_seconds']:.1f} s of compiling"),
  ]  # fmt: skip
  if result["random_weights"]:
    rows.append(("weights", "random: the next tokens mean nothing"))
  return rows + [
    (f"next {i}", f"{t['probability']:.4f}  {t['token']!r} ({t['id']})")
    for i, t in enumerate(result["top"], 1)
  ]


def make_inputs(
  processor: base.Processor,
  encoder: Any,
  config: Any,
  pixels: np.ndarray | None,
  prompt: str,
) -> base.PolicyInputs:
  """One row: a user's turn of a picture (or none) and words, then the answer.

  Raises:
    ValueError: the prompt holds a placeholder.
  """
  if _IMAGE in prompt:
    raise ValueError(
      f"--prompt must not hold {_IMAGE}; the picture has its own"
    )
  if pixels is None:
    text = _CHAT.format(image="", prompt=prompt).replace(_NO_IMAGE, "")
    tokens = np.array(encoder.encode(text, add_special_tokens=False).ids)
    return _inputs_of_text(processor, tokens)
  image = processor.patchify(pixels)
  text = _CHAT.format(image=_IMAGE * image.num_tokens, prompt=prompt)
  tokens = np.array(encoder.encode(text, add_special_tokens=False).ids)
  places = np.flatnonzero(tokens == config.image_token_id)
  if len(places) != image.num_tokens:
    raise ValueError(
      f"the tokenizer gives {len(places)} placeholders for"
      f" {image.num_tokens}; it does not belong to this config"
    )
  height, width, _ = pixels.shape
  span = trajectory.ImageSpan(
    image=trajectory.ImageRef(sha256="0" * 64, width=width, height=height),
    offset=int(places[0]),
    num_tokens=image.num_tokens,
  )
  index = np.full(len(tokens), -1, np.int32)
  index[places] = np.arange(image.num_tokens)
  return base.PolicyInputs(
    tokens=tokens[None].astype(np.int32),
    positions=processor.positions(tokens, [span])[None],
    segment_ids=np.ones((1, len(tokens)), np.int32),
    vision_index=index[None],
    patches=image.patches[None],
    patch_segments=np.ones((1, len(image.patches)), np.int32),
    patch_positions=image.positions[None],
  )


def _inputs_of_text(
  processor: base.Processor, tokens: np.ndarray
) -> base.PolicyInputs:
  nothing = (1, 0)
  return base.PolicyInputs(
    tokens=tokens[None].astype(np.int32),
    positions=processor.positions(tokens, [])[None],
    segment_ids=np.ones((1, len(tokens)), np.int32),
    vision_index=np.full((1, len(tokens)), -1, np.int32),
    patches=np.zeros((*nothing, processor.patch_bytes), np.uint8),
    patch_segments=np.zeros(nothing, np.int32),
    patch_positions=np.zeros((*nothing, processor.position_axes), np.int32),
  )


def picture(width: int, height: int) -> np.ndarray:
  """uint8[H, W, 3]: a window with a button and two lines of text."""
  image = Image.new("RGB", (width, height), (40, 90, 150))
  draw = ImageDraw.Draw(image)
  left, top = width // 8, height // 8
  right, bottom = width - left, height - top
  draw.rectangle((left, top, right, bottom), (245, 245, 245), (20, 20, 20))
  bar = top + max((bottom - top) // 8, 1)
  draw.rectangle((left, top, right, bar), (70, 70, 80))
  draw.text((left + 4, top + 2), "Settings", (255, 255, 255))
  draw.text((left + 4, bar + 4), "Save changes?", (0, 0, 0))
  middle = (left + right) // 2
  draw.rectangle(
    (middle, (bar + bottom) // 2, right - 2, bottom - 2), (60, 160, 80)
  )
  draw.text((middle + 4, (bar + bottom) // 2 + 2), "OK", (255, 255, 255))
  return np.asarray(image)


def _read(file: pathlib.Path) -> np.ndarray:
  try:
    with Image.open(file.expanduser()) as image:
      return np.asarray(image.convert("RGB"))
  except OSError as error:
    raise OSError(f"--image={file}: {error}; give a picture's file") from None


def needed_bytes(policy: policy_facts.Found, image_tokens: int) -> int:
  """Weights, and the activations of the largest layer and a block's scores."""
  model = policy.model
  mesh = update_memory.abstract_mesh()
  patches = image_tokens * policy.processor.patches_per_token
  tokens = image_tokens + 512
  part = update_memory.plan(
    model,
    mesh,
    update_memory.Work(row_length=tokens, patches=patches, targets=1),
    remat="block",
  )
  sizes = update_memory.Sizes.of(model.config)
  scores = 4 * (patches**2 + sizes.heads * tokens * 1024) * 2
  return (
    part.parameters
    + part.layer_peak
    + part.vision_peak
    + min(scores, 1 << 31)
    + jnp.dtype(model.config.compute_dtype).itemsize * tokens * sizes.width
  )


def free_bytes() -> int:
  """Memory that a new process could have on this host."""
  try:
    with open("/proc/meminfo", encoding="ascii") as file:
      for line in file:
        if line.startswith("MemAvailable:"):
          return int(line.split()[1]) * 1024
  except OSError:
    pass
  return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
