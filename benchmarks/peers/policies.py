"""Policies with random weights that benchmarks measure, by size.

`tiny` and `small` are Qwen3-VL of 2.3 and 48.6 million parameters, for CPUs.
`2b` has the published shape of Qwen3-VL-2B. `smollm2_135m` is no vision
policy, and has real weights.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.models.qwen import qwen_checkpoint
from tunix.rl.multi_turn.policy.models.qwen import qwen_config

TEXT = "smollm2_135m"
SIZES = ("tiny", "small", "2b", TEXT)


def config_of(size: str, **changes: Any) -> Any:
  """Returns the configuration of a size.

  Args:
    size: One of `SIZES`, or a small family such as "qwen2_5_vl_tiny".
    **changes: Fields of `QwenVLConfig` that differ.
  """
  if size == TEXT:
    return checkpoint.load_config(size, **changes)
  if size == "2b":
    return dataclasses.replace(qwen_config.SIZES["Qwen3-VL-2B"], **changes)
  family = "qwen3_vl_tiny" if size in SIZES else size
  config = qwen_checkpoint.small_config(family, **changes)
  if size != "small":
    return config
  text = dataclasses.replace(
    config.text,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    mrope_section=(12, 10, 10),
  )
  vision = dataclasses.replace(
    config.vision,
    depth=7,
    hidden_size=384,
    intermediate_size=1536,
    num_heads=6,
    out_hidden_size=512,
    deepstack_visual_indexes=(2, 4),
  )
  return dataclasses.replace(config, text=text, vision=vision)


def make_policy(size: str, **changes: Any) -> tuple[Any, Any]:
  """Returns a model and its processor.

  Args:
    size: One of `SIZES`.
    **changes: Fields of `QwenVLConfig` that differ.
  """
  if size == TEXT:
    return checkpoint.load_policy(size, **changes)[:2]
  config = config_of(size, **changes)
  processor = qwen_checkpoint.processor_of(config)
  return qwen_checkpoint.random_model(config), processor
