"""Holds the values that a checkpoint's files may leave out.

A field that is not in config.json has the default of transformers' class for
its family; mean and deviation of images, without a processor's file, those of
the published checkpoints.

Promises: the defaults are those of transformers 5.12.1.

Does not: import JAX or transformers.
"""

from __future__ import annotations

from typing import Any, Mapping

_HALF = (0.5, 0.5, 0.5)

IMAGE_STATISTICS = {
    "qwen3_vl": (_HALF, _HALF),
    "qwen3_vl_moe": (_HALF, _HALF),
    "qwen2_5_vl": (
        (0.48145466, 0.4578275, 0.40821073),
        (0.26862954, 0.26130258, 0.27577711),
    ),
}
"""Mean and standard deviation of the published checkpoints' processors."""

_QWEN3_TOWER = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
    "hidden_act": "gelu_pytorch_tanh",
}

VISION: Mapping[str, Mapping[str, Any]] = {
    "qwen3_vl": _QWEN3_TOWER,
    "qwen3_vl_moe": _QWEN3_TOWER,
    "qwen2_5_vl": {
        "depth": 32,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": (7, 15, 23, 31),
        "hidden_act": "silu",
    },
}
"""Of `vision_config`, by family."""

_QWEN_TEXT = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
}

TEXT: Mapping[str, Mapping[str, Any]] = {
    "qwen3_vl": {
        **_QWEN_TEXT, "head_dim": 128, "max_position_embeddings": 128000
    },
    "qwen3_vl_moe": {
        **_QWEN_TEXT,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "decoder_sparse_step": 1,
        "max_position_embeddings": 128000,
    },
    "qwen2_5_vl": {
        **_QWEN_TEXT,
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
    },
    "qwen3": {**_QWEN_TEXT, "head_dim": 128},
    "qwen2": _QWEN_TEXT,
}
"""Of `text_config`, or of a text model's config.json, by family."""

NUM_EXPERTS = 60
"""Of qwen3_vl_moe: under two names, so not in `TEXT`."""

ROPE_THETA = {
    "qwen3_vl": 5e5,
    "qwen3_vl_moe": 5e5,
    "qwen2_5_vl": 1e6,
    "qwen3": 1e4,
    "qwen2": 1e4,
}
MROPE_SECTION = {
    "qwen3_vl": (24, 20, 20),
    "qwen3_vl_moe": (24, 20, 20),
    "qwen2_5_vl": (16, 24, 24),
}


def filled(
    given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
  """`given` and the defaults of fields that are not in it."""
  return {**defaults, **given}
