"""Holds the values that a checkpoint's files may leave out.

A field that is not in config.json has the default of transformers' class for
its family; mean and deviation of images, without a processor's file, those of
the published checkpoints.

Promises: the defaults are those of transformers 5.12.1.

Does not: import JAX or transformers.
"""

from __future__ import annotations

from typing import Any, Mapping, TYPE_CHECKING

if TYPE_CHECKING:
  from tunix.rl.multi_turn.policy.models.qwen import qwen_text_config


_HALF = (0.5, 0.5, 0.5)
_CLIP = (
  (0.48145466, 0.4578275, 0.40821073),
  (0.26862954, 0.26130258, 0.27577711),
)

POSITIONS = 262144
"""`max_position_embeddings` of a policy that was made here: rotary positions
have no end, and servers refuse longer contexts. That of Qwen3-VL."""

IMAGE_STATISTICS = {
  "qwen2": _CLIP,
  "qwen2_5": _CLIP,
  "qwen3": (_HALF, _HALF),
  "glm4v": _CLIP,
  "siglip": (_HALF, _HALF),
  "idefics3": (_HALF, _HALF),
}
"""Mean and standard deviation of the published processors, by tower."""


def _tower(
  depth: int,
  width: int,
  hidden: int,
  heads: int,
  out: int,
  patch: int,
  act: str,
  **more: Any,
) -> dict[str, Any]:
  """Returns a tower's section by Qwen's and GLM-V's names."""
  return {
    "depth": depth,
    "hidden_size": width,
    "intermediate_size": hidden,
    "num_heads": heads,
    "out_hidden_size": out,
    "patch_size": patch,
    "spatial_merge_size": 2,
    "hidden_act": act,
  } | more


def _siglip(
  width: int, hidden: int, layers: int, heads: int, image: int, patch: int
) -> dict[str, Any]:
  """Returns a tower's section by SigLIP's names."""
  return {
    "hidden_size": width,
    "intermediate_size": hidden,
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "image_size": image,
    "patch_size": patch,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
  }


def _decoder(
  vocabulary: int,
  width: int,
  hidden: int,
  layers: int,
  heads: int,
  kv_heads: int | None,
  eps: float = 1e-6,
  positions: int = 32768,
  **more: Any,
) -> dict[str, Any]:
  """Returns a decoder's section; `kv_heads` None stands for all heads."""
  return {
    "vocab_size": vocabulary,
    "hidden_size": width,
    "intermediate_size": hidden,
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "num_key_value_heads": kv_heads,
    "rms_norm_eps": eps,
    "max_position_embeddings": positions,
    "hidden_act": "silu",
  } | more


_QWEN3_TOWER = _tower(
    27, 1152, 4304, 16, 3584, 16, "gelu_pytorch_tanh",
    num_position_embeddings=2304, deepstack_visual_indexes=(8, 16, 24),
)  # fmt: skip
_QWEN3_5_TOWER = {**_QWEN3_TOWER, "deepstack_visual_indexes": ()}
_QWEN2_5_TOWER = _tower(
    32, 3584, 3420, 16, 3584, 14, "silu",
    window_size=112, fullatt_block_indexes=(7, 15, 23, 31),
)  # fmt: skip
_GLM_TOWER = _tower(
  24, 1536, 13696, 12, 4096, 14, "silu", image_size=336, rms_norm_eps=1e-5
)
_IDEFICS3_TOWER = _siglip(1152, 3072, 12, 16, 224, 32)

VISION: Mapping[str, Mapping[str, Any]] = {
  "qwen3_vl": _QWEN3_TOWER,
  "qwen3_vl_moe": _QWEN3_TOWER,
  "qwen3_5": _QWEN3_5_TOWER,
  "qwen3_5_moe": _QWEN3_5_TOWER,
  "qwen2_5_vl": _QWEN2_5_TOWER,
  "opencua": _QWEN2_5_TOWER,
  "glm4v": _GLM_TOWER,
  "glm4v_moe": _GLM_TOWER,
  "qwen2_vl": {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,  # Of a vision token.
    "mlp_ratio": 4,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "hidden_act": "quick_gelu",
  },
  "gemma3": _siglip(768, 3072, 12, 12, 224, 16),
  "smolvlm": _IDEFICS3_TOWER,
  "idefics3": _IDEFICS3_TOWER,
}
"""Of `vision_config`, by family."""

_QWEN_TEXT = _decoder(151936, 4096, 22016, 32, 32, 32)
_QWEN2_VL_TEXT = _decoder(152064, 8192, 29568, 80, 64, 8, 1e-5)
_LINEAR = {
  "head_dim": 256,
  "full_attention_interval": 4,
  "linear_conv_kernel_dim": 4,
  "linear_key_head_dim": 128,
  "linear_value_head_dim": 128,
  "linear_num_key_heads": 16,
  "linear_num_value_heads": 32,
}
_GEMMA3_TEXT = _decoder(
    262208, 2304, 9216, 26, 8, 4, positions=131072,
    head_dim=256, query_pre_attn_scalar=256, sliding_window=4096,
)  # fmt: skip
_GEMMA3_TEXT["hidden_activation"] = "gelu_pytorch_tanh"
del _GEMMA3_TEXT["hidden_act"]
_LLAMA = _decoder(32000, 4096, 11008, 32, 32, None, positions=2048)

TEXT: Mapping[str, Mapping[str, Any]] = {
    "qwen3_vl": _QWEN_TEXT | {
        "head_dim": 128, "max_position_embeddings": 128000
    },
    "qwen3_vl_moe": _decoder(
        151936, 2048, 5632, 24, 16, 16, positions=128000,
        num_experts_per_tok=4, moe_intermediate_size=1408,
        decoder_sparse_step=1,
    ),
    "qwen3_5": _decoder(248320, 4096, 12288, 32, 16, 4, **_LINEAR),
    # Every layer is sparse.
    "qwen3_5_moe": _decoder(
        248320, 2048, 0, 40, 16, 2, **_LINEAR, num_experts=256,
        num_experts_per_tok=8, moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "qwen2_5_vl": _QWEN2_VL_TEXT,
    "qwen2_vl": _QWEN2_VL_TEXT,
    "opencua": _QWEN_TEXT,
    "glm4v": _decoder(151552, 4096, 13696, 40, 32, 2, 1e-5),
    "glm4v_moe": _decoder(
        151424, 4096, 10944, 46, 96, 8, 1e-5, 65536,
        moe_intermediate_size=1408, num_experts_per_tok=8, n_shared_experts=1,
        n_routed_experts=128, routed_scaling_factor=1.0, n_group=1,
        topk_group=1, first_k_dense_replace=1,
    ),
    "gemma3": _GEMMA3_TEXT,
    "gemma3_text": _GEMMA3_TEXT,
    "qwen3": {**_QWEN_TEXT, "head_dim": 128},
    "qwen2": _QWEN_TEXT,
    "llama": _LLAMA,
    "smolvlm": _LLAMA,
    "idefics3": _LLAMA,
}  # fmt: skip
"""Of `text_config`, or of a text model's config.json, by family."""

NUM_EXPERTS = 60
"""Of qwen3_vl_moe: under two names, so not in `TEXT`."""

_ROPE_THETA = {
  "qwen3_vl": 5e5,
  "qwen3_vl_moe": 5e5,
  "qwen2_5_vl": 1e6,
  "qwen2_vl": 1e6,
}
MROPE_SECTION = {
  "qwen3_vl": (24, 20, 20),
  "qwen3_vl_moe": (24, 20, 20),
  "qwen3_5": (11, 11, 10),
  "qwen3_5_moe": (11, 11, 10),
  "qwen2_5_vl": (16, 24, 24),
  "qwen2_vl": (16, 24, 24),
  "glm4v": (8, 12, 12),
  "glm4v_moe": (8, 12, 12),
}

PARTIAL_ROTARY_FACTOR = {
  "qwen3_5": 0.25,
  "qwen3_5_moe": 0.25,
  "glm4v": 1.0,
  "glm4v_moe": 0.5,
}
"""Of families in which config.json sets it."""

IMAGE_TOKENS = (
  "image_token_id",
  "video_token_id",
  "vision_start_token_id",
  "vision_end_token_id",
)
"""Fields of a configuration."""
_IDS = (151655, 151656, 151652, 151653)
IMAGE_TOKEN_IDS = {
  "qwen3_5": (248056, 248057, 248053, 248054),
  "qwen3_5_moe": (248056, 248057, 248053, 248054),
  # It takes no video.
  "opencua": (151664, 151664, 151661, 151663),
  "glm4v": (151343, 151344, 151339, 151340),
  "glm4v_moe": (151363, 151364, 151339, 151340),
  "gemma3": (262144, 262144, 255999, 256000),
  # Its config.json has the first alone, and nothing reads the others.
  "smolvlm": (128257, None, None, None),
  "idefics3": (128257, None, None, None),
}
SCALE_FACTOR = 2
"""Of smolvlm and idefics3: patches of a vision token's side."""
_GLM_NAMES = (
  "image_token_id",
  "video_token_id",
  "image_start_token_id",
  "image_end_token_id",
)
_NAMES: Mapping[str, tuple[str, ...]] = {
  "opencua": ("media_placeholder_token_id", "", "", ""),
  "glm4v": _GLM_NAMES,
  "glm4v_moe": _GLM_NAMES,
  "gemma3": ("image_token_index", "", "boi_token_index", "eoi_token_index"),
  "smolvlm": ("image_token_id", "", "", ""),
  "idefics3": ("image_token_id", "", "", ""),
}
"""The fields' names in config.json; "" = it has none, and the id is fixed."""


def rope_theta(family: str) -> float:
  """Returns the base of a family's rotary frequencies."""
  return _ROPE_THETA.get(family, 1e4)


def image_tokens(raw: Mapping[str, Any], family: str) -> dict[str, int]:
  """`IMAGE_TOKENS` and their ids, by config.json's content."""
  ids = dict(zip(IMAGE_TOKENS, IMAGE_TOKEN_IDS.get(family, _IDS)))
  names = _NAMES.get(family, IMAGE_TOKENS)
  tokens: dict[str, Any] = {
    field: raw.get(name, ids[field]) if name else ids[field]
    for field, name in zip(IMAGE_TOKENS, names)
  }
  if not names[1]:
    tokens["video_token_id"] = tokens["image_token_id"]
  return {
    field: tokens["image_token_id"] if token is None else token
    for field, token in tokens.items()
  }


def image_tokens_to_hf(config: qwen_text_config.AnyConfig) -> dict[str, int]:
  """Returns the fields of config.json that `image_tokens` reads."""
  names = _NAMES.get(config.family, IMAGE_TOKENS)
  return {
    name: getattr(config, field)
    for field, name in zip(IMAGE_TOKENS, names)
    if name
  }


def filled(
  fields: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns `fields`, completed from `defaults`."""
  return {**defaults, **fields}
