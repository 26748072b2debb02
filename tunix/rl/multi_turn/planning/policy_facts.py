"""Finds a policy of any kind by name, and counts its parameters by part.

Does not: allocate weights (a model is its shapes here), or read more of a
directory than config.json and the headers of safetensors files.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any

from flax import nnx
import safetensors
from tunix.rl.multi_turn.planning import update_memory
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import by_name
from tunix.rl.multi_turn.policy import random_keys
from tunix.rl.multi_turn.policy import text_inputs
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.policy.models.qwen import qwen_checkpoint
from tunix.rl.multi_turn.policy.models.qwen import qwen_config
from tunix.rl.multi_turn.policy.models.qwen import qwen_text
from tunix.rl.multi_turn.policy.models.qwen import qwen_text_config
from tunix.rl.multi_turn.policy.models.tiny_vl import tiny_vl
from tunix.rl.multi_turn.policy.models.tiny_vl import vision_inputs

BUILT_IN = tuple(by_name.BUILT_IN)


Model = qwen_text.QwenText | tiny_vl.TinyVL


@dataclasses.dataclass(frozen=True)
class Found:
  """A policy that a name stands for.

  Attributes:
    name: Published or shipped name, or the directory.
    model: Module with shapes in place of weights.
    processor: its host side.
    directory: Directory of its files; None without any.
  """

  name: str
  model: Model
  processor: Any
  directory: pathlib.Path | None


def find(name: str) -> Found:
  """The policy of a published name, a built-in or a directory.

  Upper and lower case of published names are alike; activations of a published
  size are bfloat16.

  Raises:
    FileNotFoundError, ValueError: nothing of that name, or a directory that
      holds no policy.
  """
  published = {key.lower(): key for key in qwen_config.SIZES}
  key = published.get(name.lower().removesuffix("-instruct"))
  directory = None
  if key is not None:
    name = key
    # Stacked layers are made in a fraction of the time.
    config = dataclasses.replace(
      qwen_config.SIZES[key], compute_dtype="bfloat16", scan_layers=True
    )
  elif (
    name in checkpoint.SMALL
    and not (policy_files.DATA / name / "config.json").is_file()
  ):
    config = qwen_checkpoint.small_config(name, checkpoint.tokenizer_of(name))
  else:
    directory = _directory(name)
    config = checkpoint.load_config(directory)
  if isinstance(config, qwen_text_config.QwenTextConfig):
    model: Model = hf_checkpoint.abstract_model(config)
    processor: Any = text_inputs.TextProcessor(name)
  elif isinstance(config, qwen_config.QwenVLConfig):
    model = hf_checkpoint.abstract_model(config)
    processor = qwen_checkpoint.processor_of(config, directory)
  else:
    model = nnx.eval_shape(lambda: tiny_vl.TinyVL(config, random_keys.Keys()))
    processor = vision_inputs.TinyVLProcessor(config.max_cells)
  return Found(name, model, processor, directory)


def _directory(name: str) -> pathlib.Path:
  try:
    return policy_files.resolve(name)
  except FileNotFoundError:
    raise FileNotFoundError(
      f"{name!r} is no directory, no built-in policy"
      f" ({', '.join(BUILT_IN)}) and no published size"
      f" ({', '.join(qwen_config.SIZES)}); give one of these"
    ) from None


def parameters_by_part(model: Model) -> dict[str, int]:
  """Part -> parameters; "total", and "active" ones a text token goes through.

  A tied head is the embedding and counts once.
  """
  parts = dict.fromkeys(
    ("vision tower", "mergers", "embedding", "decoder layers", "head"), 0
  )
  idle = 0
  text = base.optional(model.config, "text")
  for path, variable in policy_files.parameters(model):
    count = math.prod(variable.shape)
    parts[_part(path)] += count
    if "experts" in path:
      idle += count - count * text.num_experts_per_tok // text.num_experts
  total = sum(parts.values())
  vision = parts["vision tower"] + parts["mergers"]
  return parts | {"total": total, "active": total - idle - vision}


def _part(path: tuple[Any, ...]) -> str:
  first, second = str(path[0]), str(path[1]) if len(path) > 1 else ""
  if first == "stem" and second in ("norm", "up", "down"):
    return "mergers"
  if first == "visual" and ("merger" in second or second == "projector"):
    return "mergers"
  if first in ("visual", "stem", "vision_blocks", "vision_norm"):
    return "vision tower"
  if (
    first == "embedding"
    or second == "embed_tokens"
    or first in ("axis_x", "axis_y", "axis_number")
  ):
    return "embedding"
  return "head" if first in ("lm_head", "axis_gate") else "decoder layers"


def sizes_of(model: Model) -> dict[str, Any]:
  """Family, layers, widths and heads."""
  config: Any = model.config
  sizes = update_memory.Sizes.of(config)
  qwen, vision = hasattr(config, "text"), base.optional(config, "vision")
  facts = {
    "family": config.family if qwen else "tiny_vl",
    "layers": sizes.layers,
    "width": sizes.width,
    "heads": sizes.heads,
    "kv_heads": sizes.kv_heads,
    "head_dim": sizes.head_dim,
    "mlp": config.text.intermediate_size if qwen else config.mlp,
    "vocabulary": sizes.vocabulary,
    "tied_head": config.tie_word_embeddings if qwen else True,
  }
  if vision is not None or not qwen:
    facts |= {
      "vision_blocks": sizes.blocks,
      "vision_width": sizes.vision_width,
      "vision_heads": vision.num_heads if qwen else config.vision_heads,
      "vision_mlp": sizes.vision_mlp,
      "patch": vision.patch_size if qwen else vision_inputs.CELL,
    }
  if qwen and config.text.num_experts:
    facts |= {
      "experts": config.text.num_experts,
      "experts_per_token": config.text.num_experts_per_tok,
      "expert_mlp": config.text.moe_intermediate_size,
    }
  return facts


def screenshot(
  processor: base.Processor, width: int, height: int
) -> dict[str, Any]:
  """Tokens of a screenshot, and the size that the policy sees it at."""
  resize = base.optional(processor, "image_size") or (lambda w, h: (w, h))
  try:
    resized = resize(width, height)
    tokens = processor.num_image_tokens(width, height)
  except ValueError as error:
    return {"screen": f"{width}x{height}", "refused": str(error)}
  return {
    "screen": f"{width}x{height}",
    "resized": "{}x{}".format(*resized),
    "tokens": tokens,
    "patches": tokens * processor.patches_per_token,
  }


def stored_bytes(directory: pathlib.Path | None) -> dict[str, int]:
  """Dtype -> bytes of a directory's safetensors files."""
  size_of: dict[str, int] = {}
  width = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
  for file in sorted(directory.glob("*.safetensors")) if directory else ():
    with safetensors.safe_open(str(file), "numpy") as opened:
      for key in opened.keys():
        part = opened.get_slice(key)
        size = width.get(part.get_dtype(), 1) * math.prod(part.get_shape())
        size_of[part.get_dtype()] = size_of.get(part.get_dtype(), 0) + size
  return size_of
