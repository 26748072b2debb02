"""Sizes of published vision-language checkpoints, by name.

Does not: import JAX.
"""

from __future__ import annotations

import dataclasses

from tunix.rl.multi_turn.policy import qwen_shapes
from tunix.rl.multi_turn.policy import rope_scaling

QwenVLConfig = qwen_shapes.QwenVLConfig
TextConfig = qwen_shapes.TextConfig
VisionConfig = qwen_shapes.VisionConfig


def _qwen3(
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    kv_heads: int,
    tied: bool,
    large_tower: bool = True,
    **experts: int,
) -> QwenVLConfig:
  tower = (27, 1152, 4304, (8, 16, 24)) if large_tower else (
      24, 1024, 4096, (5, 11, 17)
  )  # pyformat: disable
  return QwenVLConfig(
      family="qwen3_vl_moe" if experts else "qwen3_vl",
      vision=VisionConfig(
          depth=tower[0],
          hidden_size=tower[1],
          intermediate_size=tower[2],
          num_heads=16,
          out_hidden_size=hidden,
          num_position_embeddings=2304,
          deepstack_visual_indexes=tower[3],
      ),
      text=TextConfig(
          vocab_size=151936,
          hidden_size=hidden,
          intermediate_size=mlp,
          num_hidden_layers=layers,
          num_attention_heads=heads,
          num_key_value_heads=kv_heads,
          **experts,
      ),
      tie_word_embeddings=tied,
  )


def _qwen25(
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    kv_heads: int,
    tied: bool,
    vocab: int,
    vision_mlp: int = 3420,
) -> QwenVLConfig:
  return QwenVLConfig(
      family="qwen2_5_vl",
      vision=VisionConfig(
          depth=32,
          hidden_size=1280,
          intermediate_size=vision_mlp,
          num_heads=16,
          out_hidden_size=hidden,
          patch_size=14,
          window_size=112,
          fullatt_block_indexes=(7, 15, 23, 31),
      ),
      text=TextConfig(
          vocab_size=vocab,
          hidden_size=hidden,
          intermediate_size=mlp,
          num_hidden_layers=layers,
          num_attention_heads=heads,
          num_key_value_heads=kv_heads,
          rope_theta=1e6,
          mrope_section=(16, 24, 24),
      ),
      tie_word_embeddings=tied,
  )


def _opencua(base: QwenVLConfig) -> QwenVLConfig:
  """OpenCUA on a size of Qwen2.5-VL."""
  text = dataclasses.replace(
      base.text, mrope_section=(64, 0, 0), rms_norm_eps=1e-5
  )
  return dataclasses.replace(
      base,
      family="opencua",
      text=text,
      image_token_id=151664,
      video_token_id=151664,
      vision_start_token_id=151661,
      vision_end_token_id=151663,
  )


def _qwen2(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int
) -> QwenVLConfig:
  return QwenVLConfig(
      family="qwen2_vl",
      vision=VisionConfig(
          depth=32,
          hidden_size=1280,
          intermediate_size=5120,
          num_heads=16,
          out_hidden_size=hidden,
          patch_size=14,
      ),
      text=TextConfig(
          vocab_size=vocab,
          hidden_size=hidden,
          intermediate_size=mlp,
          num_hidden_layers=layers,
          num_attention_heads=heads,
          num_key_value_heads=kv_heads,
          rope_theta=1e6,
          mrope_section=(16, 24, 24),
      ),
      tie_word_embeddings=hidden == 1536,
  )


def _qwen3_5(
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    kv_heads: int,
    linear_heads: int,
    **experts: int,
) -> QwenVLConfig:
  return QwenVLConfig(
      family="qwen3_5_moe" if experts else "qwen3_5",
      vision=VisionConfig(
          depth=27,
          hidden_size=1152,
          intermediate_size=4304,
          num_heads=16,
          out_hidden_size=hidden,
          num_position_embeddings=2304,
      ),
      text=TextConfig(
          vocab_size=248320,
          hidden_size=hidden,
          intermediate_size=mlp,
          num_hidden_layers=layers,
          num_attention_heads=heads,
          num_key_value_heads=kv_heads,
          head_dim=256,
          rope_theta=1e7,
          mrope_section=(11, 11, 10),
          partial_rotary_factor=0.25,
          full_attention_layers=tuple(range(3, layers, 4)),
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


# From the config.json of Qwen/<name>-Instruct.
def _gemma3(
    width: int,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scalar: int,
) -> QwenVLConfig:
  return QwenVLConfig(
      family="gemma3",
      vision=VisionConfig(
          depth=27,
          hidden_size=1152,
          intermediate_size=4304,
          num_heads=16,
          out_hidden_size=width,
          patch_size=14,
          spatial_merge_size=4,
          num_position_embeddings=64**2,
      ),
      text=TextConfig(
          vocab_size=262208,
          hidden_size=width,
          intermediate_size=hidden,
          num_hidden_layers=layers,
          num_attention_heads=heads,
          num_key_value_heads=kv_heads,
          head_dim=head_dim,
          rope_theta=1e6,
          mrope_section=(head_dim // 2, 0, 0),
          rope_scaling=rope_scaling.RopeScaling("linear", 8.0),
          full_attention_layers=tuple(range(5, layers, 6)),
          sliding_window=1024,
          local_rope_theta=1e4,
          query_pre_attn_scalar=float(scalar),
      ),
      tie_word_embeddings=True,
      image_token_id=262144,
      video_token_id=262144,
      vision_start_token_id=255999,
      vision_end_token_id=256000,
  )


SIZES: dict[str, QwenVLConfig] = {
    "Qwen3-VL-2B": _qwen3(2048, 6144, 28, 16, 8, True, large_tower=False),
    "Qwen3-VL-4B": _qwen3(2560, 9728, 36, 32, 8, True, large_tower=False),
    "Qwen3-VL-8B": _qwen3(4096, 12288, 36, 32, 8, False),
    "Qwen3-VL-32B": _qwen3(5120, 25600, 64, 64, 8, False),
    "Qwen3-VL-30B-A3B": _qwen3(
        2048, 6144, 48, 32, 4, False,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    ),
    "Qwen3-VL-235B-A22B": _qwen3(
        4096, 12288, 94, 64, 4, False,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536,
    ),
    "Qwen3.5-9B": _qwen3_5(4096, 12288, 32, 16, 4, 32),
    "Qwen3.5-27B": _qwen3_5(5120, 17408, 64, 24, 4, 48),
    "Qwen3.5-35B-A3B": _qwen3_5(
        2048, 0, 40, 16, 2, 32,
        num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "Qwen2.5-VL-3B": _qwen25(2048, 11008, 36, 16, 2, True, 151936),
    "Qwen2.5-VL-7B": _qwen25(3584, 18944, 28, 28, 4, False, 152064),
    "Qwen2.5-VL-32B": _qwen25(
        5120, 27648, 64, 40, 8, False, 152064, vision_mlp=3456
    ),
    "Qwen2.5-VL-72B": _qwen25(
        8192, 29568, 80, 64, 8, False, 152064, vision_mlp=3456
    ),
    "Qwen2-VL-2B": _qwen2(1536, 8960, 28, 12, 2, 151936),
    "Qwen2-VL-7B": _qwen2(3584, 18944, 28, 28, 4, 152064),
    "Qwen2-VL-72B": _qwen2(8192, 29568, 80, 64, 8, 152064),
    # From the config.json of zai-org/GLM-4.5V.
    "GLM-4.5V": QwenVLConfig(
        family="glm4v_moe",
        vision=VisionConfig(
            depth=24,
            hidden_size=1536,
            intermediate_size=10944,
            num_heads=12,
            out_hidden_size=4096,
            patch_size=14,
            num_position_embeddings=576,
            rms_norm_eps=1e-5,
        ),
        text=TextConfig(
            vocab_size=151552,
            hidden_size=4096,
            intermediate_size=10944,
            num_hidden_layers=46,
            num_attention_heads=96,
            num_key_value_heads=8,
            rms_norm_eps=1e-5,
            rope_theta=1e4,
            mrope_section=(8, 12, 12),
            partial_rotary_factor=0.5,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=1408,
            mlp_only_layers=(0,),
        ),
        image_token_id=151363,
        video_token_id=151364,
        vision_start_token_id=151339,
        vision_end_token_id=151340,
    ),
    "GLM-4.1V-9B": QwenVLConfig(
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
            vocab_size=151552,
            hidden_size=4096,
            intermediate_size=13696,
            num_hidden_layers=40,
            num_attention_heads=32,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            rope_theta=1e4,
            mrope_section=(8, 12, 12),
            partial_rotary_factor=0.5,
        ),
        image_token_id=151343,
        video_token_id=151344,
        vision_start_token_id=151339,
        vision_end_token_id=151340,
    ),
}  # pyformat: disable
for _name, _size in (
    # Width, hidden units, layers, heads, KV heads, their width, and what scores
    # are divided by the root of.
    ("Gemma-3-4B", (2560, 10240, 34, 8, 4, 256, 256)),
    ("Gemma-3-12B", (3840, 15360, 48, 16, 8, 256, 256)),
    ("Gemma-3-27B", (5376, 21504, 62, 32, 16, 128, 168)),
):
  SIZES[_name] = _gemma3(*_size)
SIZES["OpenCUA-7B"] = _opencua(SIZES["Qwen2.5-VL-7B"])
SIZES["OpenCUA-32B"] = _opencua(SIZES["Qwen2.5-VL-32B"])
