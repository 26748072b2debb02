"""Names the Qwen families and the parts in which they differ.

A family is a `model_type` of config.json. Decoder, towers, checkpoints and
configurations read a family's traits here instead of comparing names.

Does not: import JAX.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, Mapping


@dataclasses.dataclass(frozen=True)
class Family:
  """Traits of a family.

  Attributes:
    architecture: class of transformers that loads a checkpoint.
    tower: kind of vision tower; "" = none. qwen2: layer norms, full attention.
      qwen2_5: RMS norms, windows. qwen3: learned positions.
    deepstack: whether deeper blocks' vision tokens reach the first layers.
    qkv_bias: whether q, k and v have a bias.
    qk_norm: whether q and k have a norm.
    interleaved: whether the rotary axes take turns among a head's frequencies;
      else each has a run of them.
    own_head_dim: whether config.json sets the heads' width; else it is
      hidden_size / num_attention_heads.
    experts: whether MLPs may be mixtures of experts.
    linear: whether layers of linear attention stand beside full ones, whose
      output is gated and whose heads are rotated in part; norms multiply by 1 +
      weight.
  """

  architecture: str
  tower: Literal["", "qwen2", "qwen2_5", "qwen3"] = ""
  deepstack: bool = False
  qkv_bias: bool = False
  qk_norm: bool = False
  interleaved: bool = False
  own_head_dim: bool = False
  experts: bool = False
  linear: bool = False


_QWEN3 = dict(
    tower="qwen3", qk_norm=True, interleaved=True, own_head_dim=True
)  # pyformat: disable

VISION_LANGUAGE: Mapping[str, Family] = {
    "qwen3_vl": Family(
        "Qwen3VLForConditionalGeneration", deepstack=True, **_QWEN3
    ),
    "qwen3_vl_moe": Family(
        "Qwen3VLMoeForConditionalGeneration",
        deepstack=True,
        experts=True,
        **_QWEN3,
    ),
    "qwen3_5": Family(
        "Qwen3_5ForConditionalGeneration", linear=True, **_QWEN3
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeForConditionalGeneration",
        linear=True,
        experts=True,
        **_QWEN3,
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLForConditionalGeneration", tower="qwen2_5", qkv_bias=True
    ),
    "qwen2_vl": Family(
        "Qwen2VLForConditionalGeneration", tower="qwen2", qkv_bias=True
    ),
}
"""`model_type` -> traits, with a vision tower."""

TEXT: Mapping[str, Family] = {
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, own_head_dim=True),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
}
"""`model_type` -> traits, text only."""
