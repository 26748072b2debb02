"""Published sizes of families whose config.json the product reads.

And the parameters of all published sizes, counted in their files; of Qwen3.5
without the head that drafts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix.rl.multi_turn.policy.layers import rope_scaling
from tunix.rl.multi_turn.policy.models.qwen import qwen_shapes
from tunix.rl.multi_turn.policy.models.qwen import qwen_sizes

QwenVLConfig = qwen_shapes.QwenVLConfig
TextConfig = qwen_shapes.TextConfig
VisionConfig = qwen_shapes.VisionConfig

_size = qwen_sizes.another_size
_QWEN3 = qwen_sizes.SIZES["Qwen3-VL-8B"]
_QWEN2_5 = qwen_sizes.SIZES["Qwen2.5-VL-7B"]
_WIDE_TOWER = {"intermediate_size": 3456}


def _experts(
  count: int, chosen: int, hidden: int, shared: int
) -> dict[str, int]:
  return {
    "num_experts": count,
    "num_experts_per_tok": chosen,
    "moe_intermediate_size": hidden,
    "shared_expert_intermediate_size": shared,
  }


_QWEN2 = dataclasses.replace(
  _QWEN2_5,
  family="qwen2_vl",
  vision=dataclasses.replace(
    _QWEN2_5.vision,
    intermediate_size=5120,
    window_size=0,
    fullatt_block_indexes=(),
  ),
)


def _qwen3_5(
  decoder: tuple[int, int, int, int, int], linear_heads: int, **experts: Any
) -> QwenVLConfig:
  return QwenVLConfig(
    family="qwen3_5_moe" if experts else "qwen3_5",
    vision=dataclasses.replace(
      _QWEN3.vision, out_hidden_size=decoder[0], deepstack_visual_indexes=()
    ),
    text=TextConfig(
      *(248320, *decoder),
      head_dim=256,
      rope_theta=1e7,
      mrope_section=(11, 11, 10),
      partial_rotary_factor=0.25,
      full_attention_layers=tuple(range(3, decoder[2], 4)),
      linear_num_key_heads=16,
      linear_num_value_heads=linear_heads,
      linear_key_head_dim=128,
      linear_value_head_dim=128,
      linear_conv_kernel_dim=4,
      **experts,
    ),
    image_token_id=248056,
    video_token_id=248057,
    vision_start_token_id=248053,
    vision_end_token_id=248054,
  )


def _opencua(base: QwenVLConfig) -> QwenVLConfig:
  """Returns OpenCUA on a size of Qwen2.5-VL."""
  return dataclasses.replace(
    base,
    family="opencua",
    text=dataclasses.replace(
      base.text, mrope_section=(64, 0, 0), rms_norm_eps=1e-5
    ),
    image_token_id=151664,
    video_token_id=151664,
    vision_start_token_id=151661,
    vision_end_token_id=151663,
  )


# --- GLM-V: from the config.json of zai-org/<name> --------------------------

_GLM = QwenVLConfig(
  family="glm4v",
  vision=VisionConfig(
    depth=24,
    hidden_size=1536,
    intermediate_size=13696,
    num_heads=12,
    out_hidden_size=4096,
    patch_size=14,
    num_position_embeddings=576,
    rms_norm_eps=1e-5,
  ),
  text=TextConfig(
    *(151552, 4096, 13696, 40, 32, 2),
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    mrope_section=(8, 12, 12),
    partial_rotary_factor=0.5,
  ),
  image_token_id=151343,
  video_token_id=151344,
  vision_start_token_id=151339,
  vision_end_token_id=151340,
)

# --- Gemma 3 ----------------------------------------------------------------


def _gemma3(
  decoder: tuple[int, int, int, int, int], head_dim: int, scalar: float
) -> QwenVLConfig:
  """Returns a size whose scores are divided by the root of `scalar`."""
  return QwenVLConfig(
    family="gemma3",
    vision=VisionConfig(
      depth=27,
      hidden_size=1152,
      intermediate_size=4304,
      num_heads=16,
      out_hidden_size=decoder[0],
      patch_size=14,
      spatial_merge_size=4,
      num_position_embeddings=64**2,
    ),
    text=TextConfig(
      *(262208, *decoder),
      head_dim=head_dim,
      rope_theta=1e6,
      mrope_section=(head_dim // 2, 0, 0),
      rope_scaling=rope_scaling.RopeScaling("linear", 8.0),
      full_attention_layers=tuple(range(5, decoder[2], 6)),
      sliding_window=1024,
      local_rope_theta=1e4,
      query_pre_attn_scalar=scalar,
    ),
    tie_word_embeddings=True,
    image_token_id=262144,
    video_token_id=262144,
    vision_start_token_id=255999,
    vision_end_token_id=256000,
  )


# --- SmolVLM, Idefics3 --------------------------------------------------------


def _smolvlm(
  decoder: tuple[int, int, int, int, int],
  rope_theta: float = 1e5,
  **changes: Any,
) -> QwenVLConfig:
  """Returns a size on SigLIP's base tower; `changes` to its configuration."""
  return dataclasses.replace(
    QwenVLConfig(
      family="smolvlm",
      vision=VisionConfig(
        depth=12,
        hidden_size=768,
        intermediate_size=3072,
        num_heads=12,
        out_hidden_size=decoder[0],
        patch_size=16,
        spatial_merge_size=4,
        num_position_embeddings=32**2,
        tile_size=512,
      ),
      text=TextConfig(
        *(49280, *decoder),
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=rope_theta,
        mrope_section=(32, 0, 0),
      ),
      image_token_id=49190,
      video_token_id=49190,
      vision_start_token_id=49190,
      vision_end_token_id=49190,
    ),
    **changes,
  )


def _so400m(width: int, tile: int, merge: int) -> VisionConfig:
  """Returns SigLIP's larger tower."""
  return VisionConfig(
    depth=27,
    hidden_size=1152,
    intermediate_size=4304,
    num_heads=16,
    out_hidden_size=width,
    patch_size=14,
    spatial_merge_size=merge,
    num_position_embeddings=(tile // 14) ** 2,
    tile_size=tile,
  )


_LLAMA3 = rope_scaling.RopeScaling("llama3", 8.0, 8192)

SIZES: dict[str, QwenVLConfig] = qwen_sizes.SIZES | {
  "SmolVLM2-256M": _smolvlm((576, 1536, 30, 9, 3)),
  "SmolVLM2-500M": _smolvlm((960, 2560, 32, 15, 5)),
  "SmolVLM2-2.2B": _smolvlm(
    (2048, 8192, 24, 32, 32), 1.3e5, vision=_so400m(2048, 384, 3)
  ),
  "Idefics3-8B": _smolvlm(
    (4096, 14336, 32, 32, 8),
    family="idefics3",
    vision=_so400m(4096, 364, 2),
    text=TextConfig(
      *(128259, 4096, 14336, 32, 32, 8),
      head_dim=128,
      rms_norm_eps=1e-5,
      rope_theta=5e5,
      mrope_section=(64, 0, 0),
      rope_scaling=_LLAMA3,
    ),
    image_token_id=128257,
    video_token_id=128257,
    vision_start_token_id=128257,
    vision_end_token_id=128257,
  ),
  "Qwen3.5-9B": _qwen3_5((4096, 12288, 32, 16, 4), 32),
  "Qwen3.5-27B": _qwen3_5((5120, 17408, 64, 24, 4), 48),
  "Qwen3.5-35B-A3B": _qwen3_5(
    (2048, 0, 40, 16, 2), 32, **_experts(256, 8, 512, 512)
  ),
  "Qwen2-VL-2B": _size(
    _QWEN2,
    (1536, 8960, 28, 12, 2),
    text={"vocab_size": 151936},
    tie_word_embeddings=True,
  ),
  "Qwen2-VL-7B": _QWEN2,
  "Qwen2-VL-72B": _size(_QWEN2, (8192, 29568, 80, 64, 8)),
  "GLM-4.5V": _size(
    _GLM,
    (4096, 10944, 46, 96, 8),
    {"intermediate_size": 10944},
    {**_experts(128, 8, 1408, 1408), "mlp_only_layers": (0,)},
    family="glm4v_moe",
    image_token_id=151363,
    video_token_id=151364,
  ),
  "GLM-4.1V-9B": _GLM,
  "Gemma-3-4B": _gemma3((2560, 10240, 34, 8, 4), 256, 256.0),
  "Gemma-3-12B": _gemma3((3840, 15360, 48, 16, 8), 256, 256.0),
  "Gemma-3-27B": _gemma3((5376, 21504, 62, 32, 16), 128, 168.0),
  "OpenCUA-7B": _opencua(_QWEN2_5),
  "OpenCUA-32B": _opencua(
    _size(_QWEN2_5, (5120, 27648, 64, 40, 8), _WIDE_TOWER)
  ),
}
"""All published sizes."""

PUBLISHED = {
  "Qwen3-VL-2B": 2_127_532_032,
  "Qwen3-VL-4B": 4_437_815_808,
  "Qwen3-VL-8B": 8_767_123_696,
  "Qwen3-VL-32B": 33_357_390_064,
  "Qwen3-VL-30B-A3B": 31_070_754_032,
  "Qwen3-VL-235B-A22B": 235_670_022_896,
  "Qwen2.5-VL-3B": 3_754_622_976,
  "Qwen2.5-VL-7B": 8_292_166_656,
  "Qwen2.5-VL-32B": 33_452_718_336,
  "Qwen2.5-VL-72B": 73_410_777_344,
  "Qwen3.5-9B": 9_409_813_744,
  "Qwen3.5-27B": 27_356_728_560,
  "Qwen3.5-35B-A3B": 35_107_181_936,
  "Qwen2-VL-2B": 2_208_985_600,
  "Qwen2-VL-7B": 8_291_375_616,
  "Qwen2-VL-72B": 73_405_560_320,
  "OpenCUA-7B": 8_292_166_656,
  "OpenCUA-32B": 33_452_718_336,
  "GLM-4.1V-9B": 10_292_777_472,
  "GLM-4.5V": 107_710_933_120,
  "SmolVLM2-256M": 256_484_928,
  "SmolVLM2-500M": 507_482_304,
  "SmolVLM2-2.2B": 2_246_784_880,
  "Idefics3-8B": 8_462_086_384,
  "Gemma-3-4B": 4_300_079_472,
  "Gemma-3-12B": 12_187_325_040,
  "Gemma-3-27B": 27_432_406_640,
}
