"""Sizes of the published Qwen3-VL and Qwen2.5-VL checkpoints, by name.

A family's first size is written out; the others name what differs from it.
Checkpoints of other families bring theirs in config.json.

Does not: import JAX.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

from tunix.rl.multi_turn.policy.models.qwen import qwen_shapes

QwenVLConfig = qwen_shapes.QwenVLConfig
TextConfig = qwen_shapes.TextConfig
VisionConfig = qwen_shapes.VisionConfig

_DECODER = (
  "hidden_size",
  "intermediate_size",
  "num_hidden_layers",
  "num_attention_heads",
  "num_key_value_heads",
)
"""Fields of a decoder that differ between all sizes of a family."""


def another_size(
  base: QwenVLConfig,
  decoder: tuple[int, int, int, int, int],
  vision: Mapping[str, Any] | None = None,
  text: Mapping[str, Any] | None = None,
  **fields: Any,
) -> QwenVLConfig:
  """Returns another size of the family of `base`.

  Args:
    base: A size of the family.
    decoder: Values of `_DECODER`.
    vision: Fields of the tower that differ besides the width of its tokens.
    text: Further fields of the decoder that differ.
    **fields: Fields of the configuration that differ.
  """
  sizes: dict[str, Any] = dict(zip(_DECODER, decoder))
  return dataclasses.replace(
    base,
    vision=dataclasses.replace(
      base.vision, out_hidden_size=decoder[0], **(vision or {})
    ),
    text=dataclasses.replace(base.text, **sizes, **(text or {})),
    **fields,
  )


def _experts(count: int, chosen: int, hidden: int) -> dict[str, int]:
  return {
    "num_experts": count,
    "num_experts_per_tok": chosen,
    "moe_intermediate_size": hidden,
  }


# --- Qwen: from the config.json of Qwen/<name>-Instruct ---------------------

_QWEN3 = QwenVLConfig(
  family="qwen3_vl",
  vision=VisionConfig(
    depth=27,
    hidden_size=1152,
    intermediate_size=4304,
    num_heads=16,
    out_hidden_size=4096,
    num_position_embeddings=2304,
    deepstack_visual_indexes=(8, 16, 24),
  ),
  text=TextConfig(151936, 4096, 12288, 36, 32, 8),
)
_SMALL_TOWER = {
  "depth": 24,
  "hidden_size": 1024,
  "intermediate_size": 4096,
  "deepstack_visual_indexes": (5, 11, 17),
}
_MOE: dict[str, Any] = {"family": "qwen3_vl_moe"}

_QWEN2_5 = QwenVLConfig(
  family="qwen2_5_vl",
  vision=VisionConfig(
    depth=32,
    hidden_size=1280,
    intermediate_size=3420,
    num_heads=16,
    out_hidden_size=3584,
    patch_size=14,
    window_size=112,
    fullatt_block_indexes=(7, 15, 23, 31),
  ),
  text=TextConfig(
    *(152064, 3584, 18944, 28, 28, 4),
    rope_theta=1e6,
    mrope_section=(16, 24, 24),
  ),
)
_WIDE_TOWER = {"intermediate_size": 3456}

SIZES: dict[str, QwenVLConfig] = {
  "Qwen3-VL-2B": another_size(
    _QWEN3, (2048, 6144, 28, 16, 8), _SMALL_TOWER, tie_word_embeddings=True
  ),
  "Qwen3-VL-4B": another_size(
    _QWEN3, (2560, 9728, 36, 32, 8), _SMALL_TOWER, tie_word_embeddings=True
  ),
  "Qwen3-VL-8B": _QWEN3,
  "Qwen3-VL-32B": another_size(_QWEN3, (5120, 25600, 64, 64, 8)),
  "Qwen3-VL-30B-A3B": another_size(
    _QWEN3, (2048, 6144, 48, 32, 4), text=_experts(128, 8, 768), **_MOE
  ),
  "Qwen3-VL-235B-A22B": another_size(
    _QWEN3, (4096, 12288, 94, 64, 4), text=_experts(128, 8, 1536), **_MOE
  ),
  "Qwen2.5-VL-3B": another_size(
    _QWEN2_5,
    (2048, 11008, 36, 16, 2),
    text={"vocab_size": 151936},
    tie_word_embeddings=True,
  ),
  "Qwen2.5-VL-7B": _QWEN2_5,
  "Qwen2.5-VL-32B": another_size(
    _QWEN2_5, (5120, 27648, 64, 40, 8), _WIDE_TOWER
  ),
  "Qwen2.5-VL-72B": another_size(
    _QWEN2_5, (8192, 29568, 80, 64, 8), _WIDE_TOWER
  ),
}
