"""Declares sizes of Qwen2.5-VL and Qwen3-VL; reads and writes config.json.

Field names follow the checkpoints' own `config.json`. `from_hf` and `to_hf`
are inverse for every field that the policies read; `hf_checkpoint` keeps other
fields of a checkpoint (initialisation, dropout, generation defaults) and writes
the original file back.

Promises: a field that a file leaves out has the default of transformers' class
(see `qwen_defaults`). A configuration that the models here would compute
wrongly (another activation, a kind of scaled rotary embeddings that is not in
`rope_scaling`, sliding windows in the decoder, weights of 8 bits) is refused by
name.

Does not: import JAX.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

from tunix.rl.multi_turn.policy import config_checks
from tunix.rl.multi_turn.policy import qwen_defaults
from tunix.rl.multi_turn.policy import rope_scaling

FAMILIES = ("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl")

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
    num_position_embeddings: learned positions, a square (Qwen3-VL); 0 = none.
    deepstack_visual_indexes: blocks whose output is also merged and added
      after the first decoder layers (Qwen3-VL).
    image_mean: of each channel, a fraction of 255, subtracted from pixels;
      given by the processor's files. () = the family's published one.
    image_std: likewise, by which they are divided.
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
    mlp_only_layers: layers with a dense MLP although there are experts.
    decoder_sparse_step: every how many layers there are experts.
    mrope_section: frequencies of a head for the axes time, height, width.
    rope_scaling: of the rotary positions; None = plain.
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

  def is_sparse(self, layer: int) -> bool:
    """Whether a layer's MLP is a mixture of experts."""
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
    compute_dtype: of activations; sums are taken in float32.
    param_dtype: of the model's weights; the learner trains float32 masters of
      bfloat16 ones.
    remat: recomputed by the backward pass: "none", "block" (all of a
      layer) or "dots" (all but the results of matrix products).
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
    if self.remat not in ("none", "block", "dots"):
      raise ValueError(
          f"remat must be none, block or dots, got {self.remat!r}"
      )
    text, vision = self.text, self.vision
    mean, std = qwen_defaults.IMAGE_STATISTICS[self.family]
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
    if sum(text.mrope_section) != text.head_dim // 2:
      raise ValueError(
          f"text.mrope_section={text.mrope_section} must add up to half of"
          f" head_dim={text.head_dim}"
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
    side = round(vision.num_position_embeddings**0.5)
    if side * side != vision.num_position_embeddings:
      raise ValueError(
          f"vision.num_position_embeddings={vision.num_position_embeddings}"
          " is not a square"
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

  @property
  def vocab_size(self) -> int:
    return self.text.vocab_size

  @property
  def banned_token_ids(self) -> tuple[int, ...]:
    """Placeholders, which no sampler may draw."""
    return (self.image_token_id, self.video_token_id)

  @property
  def is_qwen3(self) -> bool:
    return self.family != "qwen2_5_vl"


# --- config.json -----------------------------------------------------------

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


def from_hf(raw: Mapping[str, Any], **changes: Any) -> QwenVLConfig:
  """The configuration of a checkpoint's `config.json`.

  Args:
    raw: the file's content.
    **changes: fields of `QwenVLConfig` that differ from the file's.

  Raises:
    ValueError: another model, or one that would be computed wrongly; the
      message names the field.
  """
  family = raw.get("model_type")
  if family not in FAMILIES:
    raise ValueError(
        f"model_type={family!r} is none of {', '.join(FAMILIES)}; other"
        " architectures have no policy here"
    )
  config_checks.refuse_quantized(raw)
  text, vision = _sections(raw, family)
  _check(family, text, vision)
  config = QwenVLConfig(
      family=family,
      vision=_vision(vision, family),
      text=_text(text, raw, family),
      tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
      image_token_id=raw.get("image_token_id", 151655),
      video_token_id=raw.get("video_token_id", 151656),
      vision_start_token_id=raw.get("vision_start_token_id", 151652),
      vision_end_token_id=raw.get("vision_end_token_id", 151653),
  )
  unknown = sorted(set(changes) - set(RUN_FIELDS))
  if unknown:
    raise ValueError(
        f"{unknown[0]!r} of a checkpoint cannot be changed; change one of:"
        f" {', '.join(RUN_FIELDS)}"
    )
  return dataclasses.replace(config, **changes)


def _sections(
    raw: Mapping[str, Any], family: str
) -> tuple[dict[str, Any], dict[str, Any]]:
  """The decoder's fields and the tower's, with defaults.

  Raises:
    ValueError: a section is not there as a whole.
  """
  text, vision = raw.get("text_config"), raw.get("vision_config")
  if not text and family == "qwen2_5_vl" and "hidden_size" in raw:
    text = raw  # Before transformers 4.52 its fields were at the top.
  for name, section in (("text_config", text), ("vision_config", vision)):
    if not isinstance(section, Mapping) or not section:
      raise ValueError(
          f"config.json of {family} lacks {name!r}; copy or download the whole"
          " file again"
      )
  defaults = qwen_defaults.TEXT[family], qwen_defaults.VISION[family]
  return (
      qwen_defaults.filled(text, defaults[0]),
      qwen_defaults.filled(vision, defaults[1]),
  )


def _check(
    family: str, text: Mapping[str, Any], vision: Mapping[str, Any]
) -> None:
  """Refuses fields that ask for more than is computed here."""
  refuse = config_checks.refuse
  refuse(
      text["hidden_act"] != "silu",
      f"text hidden_act={text['hidden_act']!r}, only silu is known",
  )
  act, known = vision["hidden_act"], qwen_defaults.VISION[family]["hidden_act"]
  refuse(act != known, f"vision hidden_act={act!r}, {family} has {known}")
  refuse(
      bool(text.get("use_sliding_window")),
      "use_sliding_window=true, the decoder has no windows here",
  )
  kinds = sorted(set(text.get("layer_types") or ()) - {"full_attention"})
  refuse(
      bool(kinds), f"layer_types holds {kinds}, only full_attention is known"
  )
  refuse(
      family != "qwen2_5_vl" and bool(text.get("attention_bias")),
      "attention_bias=true, Qwen3-VL has none",
  )
  for name, want in (("temporal_patch_size", 2), ("in_channels", 3)):
    got = vision.get(name, vision.get("in_chans", want) if want == 3 else want)
    refuse(got != want, f"vision {name}={got}, only {want} is known")


def _vision(vision: Mapping[str, Any], family: str) -> VisionConfig:
  """The tower."""
  qwen2 = family == "qwen2_5_vl"
  return VisionConfig(
      depth=vision["depth"],
      hidden_size=vision["hidden_size"],
      intermediate_size=vision["intermediate_size"],
      num_heads=vision["num_heads"],
      out_hidden_size=vision["out_hidden_size"],
      patch_size=vision["patch_size"],
      spatial_merge_size=vision["spatial_merge_size"],
      num_position_embeddings=(
          0 if qwen2 else vision["num_position_embeddings"]
      ),
      deepstack_visual_indexes=(
          () if qwen2 else tuple(vision["deepstack_visual_indexes"])
      ),
      window_size=vision["window_size"] if qwen2 else 0,
      fullatt_block_indexes=(
          tuple(vision["fullatt_block_indexes"]) if qwen2 else ()
      ),
  )


def _text(
    text: Mapping[str, Any], raw: Mapping[str, Any], family: str
) -> TextConfig:
  """The decoder."""
  heads, hidden = text["num_attention_heads"], text["hidden_size"]
  return TextConfig(
      vocab_size=text["vocab_size"],
      hidden_size=hidden,
      intermediate_size=text["intermediate_size"],
      num_hidden_layers=text["num_hidden_layers"],
      num_attention_heads=heads,
      num_key_value_heads=text["num_key_value_heads"] or heads,
      head_dim=text.get("head_dim")
      or qwen_defaults.TEXT[family].get("head_dim")
      or hidden // heads,
      rms_norm_eps=text["rms_norm_eps"],
      **_rope(text, raw, family),
      **_experts(text, family),
  )


def _rope(
    text: Mapping[str, Any], raw: Mapping[str, Any], family: str
) -> dict[str, Any]:
  """Fields of rotary positions, whichever transformers wrote the file."""
  rope = dict(
      text.get("rope_parameters")
      or text.get("rope_scaling")
      or raw.get("rope_scaling")
      or {}
  )
  theta = rope.get("rope_theta", text.get("rope_theta"))
  if theta is None:
    theta = qwen_defaults.ROPE_THETA[family]
  section = rope.get("mrope_section", qwen_defaults.MROPE_SECTION[family])
  longest = text["max_position_embeddings"]
  return {
      "rope_theta": float(theta),
      "mrope_section": tuple(section),
      "rope_scaling": rope_scaling.read(rope, longest),
  }


def _experts(text: Mapping[str, Any], family: str) -> dict[str, Any]:
  if family != "qwen3_vl_moe":
    return {}
  count = text.get("num_experts", text.get("num_local_experts"))
  count = qwen_defaults.NUM_EXPERTS if count is None else count
  config_checks.refuse(
      text.get("norm_topk_prob", True) is False,
      "norm_topk_prob=false, routing weights always add up to 1 here",
  )
  return {
      "num_experts": count,
      "num_experts_per_tok": text["num_experts_per_tok"],
      "moe_intermediate_size": text["moe_intermediate_size"],
      "mlp_only_layers": tuple(text.get("mlp_only_layers") or ()),
      "decoder_sparse_step": text["decoder_sparse_step"],
  }


def to_hf(config: QwenVLConfig) -> dict[str, Any]:
  """A `config.json` that `transformers` builds the same model from."""
  family, vision, text = config.family, config.vision, config.text
  qwen2 = family == "qwen2_5_vl"
  architecture = {
      "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
      "qwen3_vl": "Qwen3VLForConditionalGeneration",
      "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
  }[family]
  vision_config: dict[str, Any] = {
      "model_type": f"{family}_vision",
      "depth": vision.depth,
      "hidden_size": vision.hidden_size,
      "intermediate_size": vision.intermediate_size,
      "num_heads": vision.num_heads,
      "out_hidden_size": vision.out_hidden_size,
      "patch_size": vision.patch_size,
      "spatial_merge_size": vision.spatial_merge_size,
      "temporal_patch_size": 2,
      "in_channels": 3,
      "hidden_act": qwen_defaults.VISION[family]["hidden_act"],
  }
  if qwen2:
    vision_config |= {
        "window_size": vision.window_size,
        "fullatt_block_indexes": list(vision.fullatt_block_indexes),
    }
  else:
    vision_config |= {
        "num_position_embeddings": vision.num_position_embeddings,
        "deepstack_visual_indexes": list(vision.deepstack_visual_indexes),
    }
  text_config: dict[str, Any] = {
      "model_type": f"{family}_text",
      "vocab_size": text.vocab_size,
      "hidden_size": text.hidden_size,
      "intermediate_size": text.intermediate_size,
      "num_hidden_layers": text.num_hidden_layers,
      "num_attention_heads": text.num_attention_heads,
      "num_key_value_heads": text.num_key_value_heads,
      "rms_norm_eps": text.rms_norm_eps,
      "hidden_act": "silu",
      "tie_word_embeddings": config.tie_word_embeddings,
      "rope_parameters": {
          "rope_type": "default",
          "rope_theta": text.rope_theta,
          "mrope_section": list(text.mrope_section),
      },
  }
  if not qwen2:
    text_config["head_dim"] = text.head_dim
    text_config["rope_parameters"]["mrope_interleaved"] = True
  if text.rope_scaling is not None:
    text_config["rope_parameters"] |= text.rope_scaling.to_hf()
  if text.num_experts:
    text_config |= {
        "num_experts": text.num_experts,
        "num_experts_per_tok": text.num_experts_per_tok,
        "moe_intermediate_size": text.moe_intermediate_size,
        "mlp_only_layers": list(text.mlp_only_layers),
        "decoder_sparse_step": text.decoder_sparse_step,
        "norm_topk_prob": True,
    }
  return {
      "architectures": [architecture],
      "model_type": family,
      "tie_word_embeddings": config.tie_word_embeddings,
      "image_token_id": config.image_token_id,
      "video_token_id": config.video_token_id,
      "vision_start_token_id": config.vision_start_token_id,
      "vision_end_token_id": config.vision_end_token_id,
      "text_config": text_config,
      "vision_config": vision_config,
  }


# --- published sizes -------------------------------------------------------


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


# From the config.json of Qwen/<name>-Instruct.
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
    "Qwen2.5-VL-3B": _qwen25(2048, 11008, 36, 16, 2, True, 151936),
    "Qwen2.5-VL-7B": _qwen25(3584, 18944, 28, 28, 4, False, 152064),
    "Qwen2.5-VL-32B": _qwen25(
        5120, 27648, 64, 40, 8, False, 152064, vision_mlp=3456
    ),
    "Qwen2.5-VL-72B": _qwen25(
        8192, 29568, 80, 64, 8, False, 152064, vision_mlp=3456
    ),
}  # pyformat: disable
