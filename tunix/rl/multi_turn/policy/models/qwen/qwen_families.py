"""Names the families of published models and the parts in which they differ.

A family is a `model_type` of config.json. Decoder, towers, checkpoints and
configurations read a family's traits here instead of comparing names. A new
family also needs its defaults, in `qwen_defaults`.

Does not: import JAX.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Mapping


@dataclasses.dataclass(frozen=True)
class Family:
  """Traits of a family.

  Attributes:
    architecture: class of transformers that loads a checkpoint.
    tower: kind of vision tower; "" = none. qwen2: layer norms, full attention.
      qwen2_5: RMS norms, windows. qwen3: learned positions. glm4v: learned
      positions, RMS norms, a convolution that merges. siglip: images of one
      size, learned positions, means of patches. idefics3: the same on tiles,
      whose squares of patches lie side by side before a matrix.
    deepstack: whether deeper blocks' vision tokens reach the first layers.
    qkv_bias: whether q, k and v have a bias.
    qk_norm: whether q and k have a norm.
    interleaved: whether the rotary axes take turns among a head's frequencies;
      else each has a run of them.
    flat_positions: whether a vision token counts as one position, like a word.
    partial_rotary: whether config.json sets the share of a head that is
      rotated; else it is all.
    rotary_pairs: whether neighbours turn together; else a head's halves.
    sandwich: whether attention and MLP have a norm behind them as well.
    fused_mlp: whether gate and up are one matrix.
    own_head_dim: whether config.json sets the heads' width; else it is
      hidden_size / num_attention_heads.
    experts: whether MLPs may be mixtures of experts.
    sigmoid_router: whether experts are chosen by sigmoids and a correction, of
      the best groups, and the shared expert has no gate; config.json names the
      first layers that are dense.
    experts_apart: whether files hold experts one by one.
    linear: whether layers of linear attention stand beside full ones, whose
      output is gated.
    windows: whether layers that see a window of earlier tokens, with rotary
      positions of another base, stand beside full ones.
    mutual_images: whether the vision tokens of an image see each other in the
      decoder, later ones too.
    offset_norms: whether norms multiply by 1 + weight.
    text_type: `model_type` of text_config; "" = the family's with "_text".
    tied: whether the output matrix is the embedding where config.json does not
      decide it.
    prefixes: (ours, the checkpoint's) beginnings of a parameter's key.
    module_prefixes: (ours, transformers') beginnings of a module's name, by
      which an adapter's file names it; None = as `prefixes`.
  """

  architecture: str
  tower: Literal[
    "", "qwen2", "qwen2_5", "qwen3", "glm4v", "siglip", "idefics3"
  ] = ""
  deepstack: bool = False
  qkv_bias: bool = False
  qk_norm: bool = False
  interleaved: bool = False
  flat_positions: bool = False
  partial_rotary: bool = False
  rotary_pairs: bool = False
  sandwich: bool = False
  fused_mlp: bool = False
  own_head_dim: bool = False
  experts: bool = False
  sigmoid_router: bool = False
  experts_apart: bool = False
  linear: bool = False
  windows: bool = False
  mutual_images: bool = False
  offset_norms: bool = False
  text_type: str = ""
  tied: bool = False
  prefixes: tuple[tuple[str, str], ...] = ()
  module_prefixes: tuple[tuple[str, str], ...] | None = None

  @property
  def modules(self) -> tuple[tuple[str, str], ...]:
    """(ours, transformers') beginnings of a module's name."""
    prefixes = self.module_prefixes
    return self.prefixes if prefixes is None else prefixes


_IDEFICS3: dict[str, Any] = dict(
  tower="idefics3",
  own_head_dim=True,
  flat_positions=True,
  text_type="llama",
  prefixes=(
    ("model.visual.projector.", "model.connector."),
    ("model.visual.", "model.vision_model."),
    ("model.language_model.", "model.text_model."),
  ),
)
_QWEN3: dict[str, Any] = dict(
  tower="qwen3", qk_norm=True, interleaved=True, own_head_dim=True
)

VISION_LANGUAGE: Mapping[str, Family] = {
  "qwen3_vl": Family(
    "Qwen3VLForConditionalGeneration", deepstack=True, **_QWEN3
  ),
  "qwen3_vl_moe": Family(
    "Qwen3VLMoeForConditionalGeneration", deepstack=True, experts=True, **_QWEN3
  ),
  "qwen3_5": Family(
    "Qwen3_5ForConditionalGeneration",
    linear=True,
    offset_norms=True,
    partial_rotary=True,
    **_QWEN3,
  ),
  "qwen3_5_moe": Family(
    "Qwen3_5MoeForConditionalGeneration",
    linear=True,
    offset_norms=True,
    partial_rotary=True,
    experts=True,
    **_QWEN3,
  ),
  "qwen2_5_vl": Family(
    "Qwen2_5_VLForConditionalGeneration", tower="qwen2_5", qkv_bias=True
  ),
  "qwen2_vl": Family(
    "Qwen2VLForConditionalGeneration", tower="qwen2", qkv_bias=True
  ),
  "opencua": Family(
    "OpenCUAForConditionalGeneration",
    tower="qwen2_5",
    qkv_bias=True,
    flat_positions=True,
    text_type="qwen2",
    prefixes=(
      ("model.visual.", "vision_tower."),
      ("model.language_model.", "language_model.model."),
      ("lm_head.", "language_model.lm_head."),
    ),
  ),
  "glm4v": Family(
    "Glm4vForConditionalGeneration",
    tower="glm4v",
    qkv_bias=True,
    partial_rotary=True,
    rotary_pairs=True,
    sandwich=True,
    fused_mlp=True,
  ),
  "glm4v_moe": Family(
    "Glm4vMoeForConditionalGeneration",
    tower="glm4v",
    qkv_bias=True,
    partial_rotary=True,
    own_head_dim=True,
    experts=True,
    sigmoid_router=True,
    experts_apart=True,
  ),
  "gemma3": Family(
    "Gemma3ForConditionalGeneration",
    tower="siglip",
    qk_norm=True,
    own_head_dim=True,
    flat_positions=True,
    windows=True,
    mutual_images=True,
    offset_norms=True,
    tied=True,
    prefixes=(
      ("model.visual.projector.", "multi_modal_projector."),
      ("model.visual.", "vision_tower.vision_model."),
      ("model.language_model.", "language_model.model."),
      ("lm_head.", "language_model.lm_head."),
    ),
    module_prefixes=(
      ("model.visual.projector.", "model.multi_modal_projector."),
      ("model.visual.", "model.vision_tower."),
    ),
  ),
  "smolvlm": Family("SmolVLMForConditionalGeneration", **_IDEFICS3),
  "idefics3": Family("Idefics3ForConditionalGeneration", **_IDEFICS3),
}
"""`model_type` -> traits, with a vision tower."""

TEXT: Mapping[str, Family] = {
  "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, own_head_dim=True),
  "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
  "llama": Family("LlamaForCausalLM", own_head_dim=True),
  "gemma3_text": Family(
    "Gemma3ForCausalLM",
    qk_norm=True,
    own_head_dim=True,
    windows=True,
    offset_norms=True,
    tied=True,
  ),
}
"""`model_type` -> traits, text only."""
