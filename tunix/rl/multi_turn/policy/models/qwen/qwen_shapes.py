"""Declares the sizes of the published vision-language policies.

`qwen_config` reads and writes them as config.json, whose field names they
have; `qwen_sizes` has those of published checkpoints.

Does not: import JAX.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping, Sequence

from tunix.rl.multi_turn.policy.checkpoints import config_checks
from tunix.rl.multi_turn.policy.layers import rope_scaling
from tunix.rl.multi_turn.policy.models.qwen import qwen_defaults
from tunix.rl.multi_turn.policy.models.qwen import qwen_families

FAMILIES = tuple(qwen_families.VISION_LANGUAGE)

DECODER_FIELDS = (
  "vocab_size",
  "hidden_size",
  "intermediate_size",
  "num_hidden_layers",
  "num_attention_heads",
  "num_key_value_heads",
  "rms_norm_eps",
)
"""Fields of `TextConfig` that every family's config.json has by that name."""


@dataclasses.dataclass(frozen=True)
class VisionConfig:
  """The vision tower.

  Attributes:
    depth: blocks.
    hidden_size: width.
    intermediate_size: hidden units of a block's MLP.
    num_heads: attention heads.
    out_hidden_size: width of a vision token, the decoder's.
    patch_size: pixels of a patch's side.
    spatial_merge_size: patches of a side that become one vision token.
    num_position_embeddings: learned positions, a square (Qwen3-VL, Qwen3.5,
      GLM-4.1V; Gemma 3 and SmolVLM, whose images and tiles have as many
      patches); 0 = none.
    tile_size: Pixels of a tile's side, of which those beyond the last whole
      patch are not seen (SmolVLM); 0 = images are not tiles.
    rms_norm_eps: Epsilon of its norms (GLM-4.1V, Gemma 3, SmolVLM), 1e-6 in the
      other families.
    deepstack_visual_indexes: blocks whose output is also merged and added
      after the first decoder layers (Qwen3-VL).
    image_mean: Mean of each channel, a fraction of 255, subtracted from pixels;
      given by the processor's files. () = the family's published one.
    image_std: Standard deviation of each channel, by which they are divided.
    window_size: pixels of a side of an attention window (Qwen2.5-VL).
    fullatt_block_indexes: blocks without windows (Qwen2.5-VL).
  """

  depth: int
  hidden_size: int
  intermediate_size: int
  num_heads: int
  out_hidden_size: int
  patch_size: int = 16
  spatial_merge_size: int = 2
  num_position_embeddings: int = 0
  tile_size: int = 0
  rms_norm_eps: float = 1e-6
  deepstack_visual_indexes: tuple[int, ...] = ()
  image_mean: tuple[float, ...] = ()
  image_std: tuple[float, ...] = ()
  window_size: int = 0
  fullatt_block_indexes: tuple[int, ...] = ()

  @property
  def head_dim(self) -> int:
    return self.hidden_size // self.num_heads

  @property
  def patches_per_token(self) -> int:
    return self.spatial_merge_size**2


@dataclasses.dataclass(frozen=True)
class TextConfig:
  """The decoder.

  Attributes:
    num_experts: 0 = a dense MLP in every layer.
    num_experts_per_tok: experts a token goes through.
    moe_intermediate_size: hidden units of an expert.
    mlp_only_layers: layers with a dense MLP although there are experts; with
      GLM-4.5V the first ones.
    decoder_sparse_step: every how many layers there are experts.
    mrope_section: frequencies of a head for the axes time, height, width.
    rope_scaling: Scaling of the rotary positions; None = plain.
    partial_rotary_factor: share of a head that is rotated, its beginning.
    shared_expert_intermediate_size: hidden units of the expert that every token
      goes through, beside the chosen ones; 0 = none.
    expert_groups: Groups of equally many experts; a token's experts are of its
      best groups (GLM-4.5V).
    chosen_groups: groups that a token's experts are of.
    routed_scaling_factor: Factor of the chosen experts' weights (GLM-4.5V).
    full_attention_layers: layers of full attention where the others are linear
      (Qwen3.5) or see a window (Gemma 3); None = all layers are full.
    sliding_window: tokens that a layer with a window sees, its own among them;
      0 = no layer has one.
    local_rope_theta: base of such a layer's rotary positions, which are plain.
    query_pre_attn_scalar: scores are divided by its root; 0 = head_dim.
    linear_num_key_heads: Key heads of a linear layer.
    linear_num_value_heads: Value heads of a linear layer, a multiple of the key
      heads.
    linear_key_head_dim: width of a linear layer's query and key heads.
    linear_value_head_dim: width of its value heads.
    linear_conv_kernel_dim: tokens that its convolution sees.
  """

  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_hidden_layers: int
  num_attention_heads: int
  num_key_value_heads: int
  head_dim: int = 128
  rms_norm_eps: float = 1e-6
  rope_theta: float = 5e6
  mrope_section: tuple[int, int, int] = (24, 20, 20)
  rope_scaling: rope_scaling.RopeScaling | None = None
  num_experts: int = 0
  num_experts_per_tok: int = 0
  moe_intermediate_size: int = 0
  mlp_only_layers: tuple[int, ...] = ()
  decoder_sparse_step: int = 1
  partial_rotary_factor: float = 1.0
  shared_expert_intermediate_size: int = 0
  expert_groups: int = 1
  chosen_groups: int = 1
  routed_scaling_factor: float = 1.0
  full_attention_layers: tuple[int, ...] | None = None
  sliding_window: int = 0
  local_rope_theta: float = 0.0
  query_pre_attn_scalar: float = 0.0
  linear_num_key_heads: int = 0
  linear_num_value_heads: int = 0
  linear_key_head_dim: int = 0
  linear_value_head_dim: int = 0
  linear_conv_kernel_dim: int = 0

  @property
  def rotary_dim(self) -> int:
    """Width of a head's rotated beginning."""
    return int(self.head_dim * self.partial_rotary_factor)

  def is_linear(self, layer: int) -> bool:
    """Returns whether a layer's attention is linear."""
    return not self.sliding_window and self._is_partial(layer)

  def window(self, layer: int) -> int:
    """Returns the tokens that a layer sees, its own included; 0 = all."""
    partial = self.sliding_window and self._is_partial(layer)
    return self.sliding_window if partial else 0

  def _is_partial(self, layer: int) -> bool:
    full = self.full_attention_layers
    return full is not None and layer not in full

  def is_sparse(self, layer: int) -> bool:
    """Returns whether a layer's MLP is a mixture of experts."""
    return (
      self.num_experts > 0
      and layer not in self.mlp_only_layers
      and (layer + 1) % self.decoder_sparse_step == 0
    )


@dataclasses.dataclass(frozen=True)
class QwenVLConfig:
  """A policy of one of the `FAMILIES`.

  Attributes:
    family: `model_type` of the checkpoint.
    vision: the tower.
    text: the decoder.
    tie_word_embeddings: the output matrix is the embedding.
    image_token_id: placeholder of a vision token.
    video_token_id: never to be sampled either.
    vision_start_token_id: begins an image in the prompt.
    vision_end_token_id: ends it.
    compute_dtype: Type of activations; sums are taken in float32.
    param_dtype: Type of the model's weights; the learner trains float32 masters
      of bfloat16 ones.
    remat: recomputed by the backward pass, see `config_checks.REMATS`; "auto"
      is "block" until a run chooses (`run_memory.settle_remat`).
    scan_layers: one loop over stacked layers, which compiles faster; unrolled
      layers run faster on a CPU.
    vision_tensor_parallel: split the tower within a layer too; else it is
      only sharded for storage.
    max_image_patches: an image of more patches is refused by the learner and,
      where its size is known, when the policy is loaded. 0 = no limit.
    min_pixels, max_pixels: limits of a resized image's area, as the processor
      that belongs to the model keeps them; 0 = not known.
  """

  family: str
  vision: VisionConfig
  text: TextConfig
  tie_word_embeddings: bool = False
  image_token_id: int = 151655
  video_token_id: int = 151656
  vision_start_token_id: int = 151652
  vision_end_token_id: int = 151653
  compute_dtype: str = "float32"
  param_dtype: str = "float32"
  remat: str = "block"
  scan_layers: bool = False
  vision_tensor_parallel: bool = False
  max_image_patches: int = 0
  min_pixels: int = 0
  max_pixels: int = 0

  def __post_init__(self):
    if self.family not in FAMILIES:
      raise ValueError(
        f"family must be one of {', '.join(FAMILIES)}, got {self.family!r}"
      )
    config_checks.check_dtypes(self.compute_dtype, self.param_dtype)
    config_checks.check_remat(self.remat)
    text, vision = self.text, self.vision
    mean, std = qwen_defaults.IMAGE_STATISTICS[self.traits.tower]
    vision = dataclasses.replace(
      vision,
      image_mean=vision.image_mean or mean,
      image_std=vision.image_std or std,
    )
    object.__setattr__(self, "vision", vision)
    for name, value in (
      ("text.num_attention_heads", text.num_attention_heads),
      ("vision.num_heads", vision.num_heads),
    ):
      if value < 1:
        raise ValueError(f"{name} must be >= 1, got {value}")
    if self.max_image_patches < 0:
      raise ValueError(
        f"max_image_patches must be >= 0, got {self.max_image_patches}"
      )
    if text.num_attention_heads % text.num_key_value_heads:
      raise ValueError(
        f"text.num_attention_heads={text.num_attention_heads} is not a"
        f" multiple of num_key_value_heads={text.num_key_value_heads}"
      )
    if text.linear_num_key_heads and (
      text.linear_num_value_heads % text.linear_num_key_heads
    ):
      raise ValueError(
        f"text.linear_num_value_heads={text.linear_num_value_heads} is not a"
        f" multiple of linear_num_key_heads={text.linear_num_key_heads}"
      )
    if text.num_experts:
      _check_groups(text)
    if sum(text.mrope_section) != text.rotary_dim // 2:
      raise ValueError(
        f"text.mrope_section={text.mrope_section} must add up to half of"
        f" head_dim={text.head_dim}"
        + f" * {text.partial_rotary_factor:g}"
        * (text.rotary_dim != text.head_dim)
      )
    if vision.hidden_size % vision.num_heads or vision.head_dim % 4:
      raise ValueError(
        f"vision.hidden_size={vision.hidden_size} gives"
        f" {vision.num_heads} heads of {vision.head_dim}, which must be a"
        " multiple of 4"
      )
    if vision.out_hidden_size != text.hidden_size:
      raise ValueError(
        f"vision.out_hidden_size={vision.out_hidden_size} must equal"
        f" text.hidden_size={text.hidden_size}"
      )
    if (
      self.traits.tower == "qwen2"
      and vision.intermediate_size % vision.hidden_size
    ):
      raise ValueError(
        f"vision.intermediate_size={vision.intermediate_size} must be a"
        f" multiple of the tower's width {vision.hidden_size}: config.json"
        " has their ratio, mlp_ratio"
      )
    side = round(vision.num_position_embeddings**0.5)
    if side * side != vision.num_position_embeddings:
      raise ValueError(
        f"vision.num_position_embeddings={vision.num_position_embeddings}"
        " is not a square"
      )
    if self.traits.mutual_images:
      self._check_mutual_images()
    if self.traits.tower == "idefics3" and (
      not side
      or side % vision.spatial_merge_size
      or vision.tile_size // vision.patch_size != side
    ):
      raise ValueError(
        f"vision.tile_size={vision.tile_size} (image_size) in patches of"
        f" {vision.patch_size} must give a side of {side} patches, and"
        f" spatial_merge_size={vision.spatial_merge_size} (scale_factor)"
        " divide it"
      )
    deepest = (*vision.deepstack_visual_indexes, -1)
    if max(deepest) >= vision.depth or (
      len(vision.deepstack_visual_indexes) > text.num_hidden_layers
    ):
      raise ValueError(
        "vision.deepstack_visual_indexes="
        f"{vision.deepstack_visual_indexes} do not fit {vision.depth} blocks"
        f" and {text.num_hidden_layers} decoder layers"
      )

  def _check_mutual_images(self) -> None:
    """Raises a ValueError where a window could part an image's tokens."""
    vision, window = self.vision, self.text.sliding_window
    side = round(vision.num_position_embeddings**0.5)
    merge = vision.spatial_merge_size
    if not side or side % merge:
      raise ValueError(
        f"vision.spatial_merge_size={merge} must divide the {side} patches of"
        " an image's side"
      )
    if 0 < window < self.whole_image_tokens:
      raise ValueError(
        f"text.sliding_window={window} is less than an image's"
        f" {self.whole_image_tokens} tokens (mm_tokens_per_image), which see"
        " each other in every layer"
      )

  @property
  def whole_image_tokens(self) -> int:
    """Tokens of an image that a decoder must compute at once, as they see each
    other; 0 = images may be computed in parts."""
    if not self.traits.mutual_images:
      return 0
    vision = self.vision
    return vision.num_position_embeddings // vision.patches_per_token

  @property
  def vocab_size(self) -> int:
    return self.text.vocab_size

  @property
  def banned_token_ids(self) -> tuple[int, ...]:
    """Placeholders, which no sampler may draw."""
    return (self.image_token_id, self.video_token_id)

  @property
  def traits(self) -> qwen_families.Family:
    """The parts in which the family differs from others."""
    return qwen_families.VISION_LANGUAGE[self.family]


def _check_groups(text: TextConfig) -> None:
  """Raises a ValueError for groups that experts cannot be chosen of."""
  groups, chosen = text.expert_groups, text.chosen_groups
  size = text.num_experts // max(groups, 1)
  if groups < 1 or text.num_experts % groups:
    raise ValueError(
      f"text.expert_groups={groups} (n_group) must divide the"
      f" {text.num_experts} experts"
    )
  if groups > 1 and size < 2:
    raise ValueError(
      f"text.expert_groups={groups} (n_group) leaves {size} expert a group;"
      " a group is judged by its best two"
    )
  if not 1 <= chosen <= groups or chosen * size < text.num_experts_per_tok:
    raise ValueError(
      f"text.chosen_groups={chosen} (topk_group) of {groups} hold"
      f" {max(chosen, 0) * size} experts; num_experts_per_tok is"
      f" {text.num_experts_per_tok}"
    )


RUN_FIELDS = (
  "compute_dtype",
  "param_dtype",
  "remat",
  "scan_layers",
  "vision_tensor_parallel",
  "max_image_patches",
  "min_pixels",
  "max_pixels",
)
"""Fields that may differ from a checkpoint's file: those of running it."""


def check_changes(
  family: str, changes: Mapping[str, Any], fields: Sequence[str] = RUN_FIELDS
) -> None:
  """Raises ValueError for a change that a policy of the family does not take.

  Args:
    family: Name in the message.
    changes: Fields of the configuration that are to differ.
    fields: The ones that may.
  """
  unknown = sorted(set(changes) - set(fields))
  if unknown:
    raise ValueError(
      f"{unknown[0]!r} cannot be changed in a {family} policy; change one of:"
      f" {', '.join(fields)}"
    )
  if "remat" in changes:
    config_checks.check_remat(changes["remat"])
