"""Reads and writes config.json of the vision-language checkpoints.

Field names follow the checkpoints' own `config.json`. `from_hf` and `to_hf`
are inverse for every field that the policies read; `hf_checkpoint` keeps other
fields of a checkpoint (initialisation, dropout, generation defaults) and writes
the original file back.

Promises: a field that a file leaves out has the default of transformers' class
(see `qwen_defaults`). A configuration that the models here would compute
wrongly (another activation, a kind of scaled rotary embeddings that is not in
`rope_scaling`, sliding windows in the decoder, weights of 8 bits) is refused by
name.

Does not: import JAX. Gives the names of `qwen_shapes` and `qwen_sizes` too.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

from tunix.rl.multi_turn.policy.checkpoints import config_checks
from tunix.rl.multi_turn.policy.layers import rope_scaling
from tunix.rl.multi_turn.policy.models.gemma3 import gemma3_config
from tunix.rl.multi_turn.policy.models.qwen import qwen_defaults
from tunix.rl.multi_turn.policy.models.qwen import qwen_families
from tunix.rl.multi_turn.policy.models.qwen import qwen_shapes
from tunix.rl.multi_turn.policy.models.qwen import qwen_sizes

FAMILIES = qwen_shapes.FAMILIES
RUN_FIELDS = qwen_shapes.RUN_FIELDS
QwenVLConfig = qwen_shapes.QwenVLConfig
TextConfig = qwen_shapes.TextConfig
VisionConfig = qwen_shapes.VisionConfig
SIZES = qwen_sizes.SIZES


def from_hf(raw: Mapping[str, Any], **changes: Any) -> QwenVLConfig:
  """Returns the configuration of a checkpoint's `config.json`.

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
  if qwen_families.VISION_LANGUAGE[family].tower == "siglip":
    sizes = gemma3_config.read(raw, text, vision)
  else:
    _check(family, text, vision)
    sizes = {
      "vision": (
        _tiles(vision, raw, text["hidden_size"])
        if qwen_families.VISION_LANGUAGE[family].tower == "idefics3"
        else _vision(vision, family)
      ),
      "text": _text(text, raw, family),
    }
  config = QwenVLConfig(
    family=family,
    **(sizes | qwen_defaults.image_tokens(raw, family)),
    tie_word_embeddings=bool(_tied(raw, text, family)),
  )
  unknown = sorted(set(changes) - set(RUN_FIELDS))
  if unknown:
    raise ValueError(
      f"{unknown[0]!r} of a checkpoint cannot be changed; change one of:"
      f" {', '.join(RUN_FIELDS)}"
    )
  return dataclasses.replace(config, **changes)


def _tied(raw: Mapping[str, Any], text: Mapping[str, Any], family: str) -> Any:
  """Returns whether the output matrix is the embedding.

  Where a decoder is a class of its own, its own section decides.
  """
  traits = qwen_families.VISION_LANGUAGE[family]
  section = text if family == "opencua" else raw
  return section.get("tie_word_embeddings", traits.tied)


def _sections(
  raw: Mapping[str, Any], family: str
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns the decoder's fields and the tower's, with defaults.

  Raises:
    ValueError: a section is not there as a whole.
  """
  text: Any = raw.get("text_config")
  vision: Any = raw.get("vision_config")
  traits = qwen_families.VISION_LANGUAGE[family]
  if not text and not traits.own_head_dim and "hidden_size" in raw:
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
  act = vision["hidden_act"]
  expected = qwen_defaults.VISION[family]["hidden_act"]
  refuse(act != expected, f"vision hidden_act={act!r}, {family} has {expected}")
  refuse(
    bool(text.get("use_sliding_window")),
    "use_sliding_window=true, the decoder has no windows here",
  )
  traits = qwen_families.VISION_LANGUAGE[family]
  kinds = ["full_attention", "linear_attention"][: 1 + traits.linear]
  layer_types = text.get("layer_types") or ()
  unknown = sorted(set(layer_types) - set(kinds))
  refuse(
    bool(unknown),
    f"layer_types holds {unknown}, only {' and '.join(kinds)} is known",
  )
  layers = text["num_hidden_layers"]
  refuse(
    traits.linear and bool(layer_types) and len(layer_types) != layers,
    f"layer_types names {len(layer_types)} layers, num_hidden_layers is"
    f" {layers}",
  )
  refuse(
    traits.linear and text.get("attn_output_gate") is False,
    f"attn_output_gate=false, {family} has gates",
  )
  for name in ("attention_bias", "mlp_bias"):
    refuse(
      not traits.qkv_bias and bool(text.get(name)),
      f"{name}=true, {family} has none",
    )
  kind = text.get("model_type", traits.text_type)
  refuse(
    traits.tower == "idefics3" and kind != traits.text_type,
    f"text_config.model_type={kind!r}, only {traits.text_type} is computed"
    f" in {family}",
  )
  refuse(
    traits.sigmoid_router and text.get("attention_bias") is False,
    f"attention_bias=false, q, k and v of {family} have one",
  )
  refuse(
    traits.sigmoid_router and bool(text.get("use_qk_norm")),
    f"use_qk_norm=true, {family} has no such norms",
  )
  refuse(
    traits.tower == "glm4v" and bool(vision.get("attention_bias")),
    f"vision attention_bias=true, {family} has none",
  )
  for name, want in (
    ("temporal_patch_size", 2),
    ("in_channels", 3),
    ("num_channels", 3),
  ):
    got = vision.get(name, vision.get("in_chans", want) if want == 3 else want)
    refuse(got != want, f"vision {name}={got}, only {want} is known")


_TOWER = ("depth", "num_heads", "patch_size", "spatial_merge_size")
_WIDTHS = ("hidden_size", "intermediate_size", "out_hidden_size")


def _vision(vision: Mapping[str, Any], family: str) -> VisionConfig:
  """Returns the tower."""
  tower = qwen_families.VISION_LANGUAGE[family].tower
  sizes = {name: vision[name] for name in _TOWER}
  if tower == "qwen2":  # Names its width otherwise than the later ones.
    width = vision["embed_dim"]
    return VisionConfig(
      hidden_size=width,
      intermediate_size=int(width * vision["mlp_ratio"]),
      out_hidden_size=vision["hidden_size"],
      **sizes,
    )
  sizes |= {name: vision[name] for name in _WIDTHS}
  if tower == "glm4v":
    side = vision["image_size"]
    side = side[0] if isinstance(side, (list, tuple)) else side
    return VisionConfig(
      num_position_embeddings=(side // vision["patch_size"]) ** 2,
      rms_norm_eps=vision["rms_norm_eps"],
      **sizes,
    )
  if tower == "qwen2_5":
    return VisionConfig(
      window_size=vision["window_size"],
      fullatt_block_indexes=tuple(vision["fullatt_block_indexes"]),
      **sizes,
    )
  return VisionConfig(
    num_position_embeddings=vision["num_position_embeddings"],
    deepstack_visual_indexes=tuple(
      vision.get("deepstack_visual_indexes") or ()
    ),
    **sizes,
  )


# Of a SigLIP tower: ours -> its section's.
_SIGLIP = {
  "depth": "num_hidden_layers",
  "hidden_size": "hidden_size",
  "intermediate_size": "intermediate_size",
  "num_heads": "num_attention_heads",
  "patch_size": "patch_size",
  "rms_norm_eps": "layer_norm_eps",
  "tile_size": "image_size",
}


def _tiles(
  vision: Mapping[str, Any], raw: Mapping[str, Any], width: int
) -> VisionConfig:
  """Returns the tower of SmolVLM and Idefics3."""
  image, patch = vision["image_size"], vision["patch_size"]
  config_checks.refuse(
    not isinstance(image, int) or not isinstance(patch, int),
    f"vision image_size={image}, patch_size={patch}, tiles are squares here:"
    " give one number each",
  )
  return VisionConfig(
    **{own: vision[name] for own, name in _SIGLIP.items()},
    out_hidden_size=width,
    spatial_merge_size=raw.get("scale_factor", qwen_defaults.SCALE_FACTOR),
    num_position_embeddings=(image // patch) ** 2,
  )


def _text(
  text: Mapping[str, Any], raw: Mapping[str, Any], family: str
) -> TextConfig:
  """Returns the decoder."""
  sizes = {name: text[name] for name in qwen_shapes.DECODER_FIELDS}
  sizes["num_key_value_heads"] = (
    text["num_key_value_heads"] or text["num_attention_heads"]
  )
  if family == "qwen3_5_moe":  # Every layer is sparse.
    sizes["intermediate_size"] = 0
  return TextConfig(
    **sizes,
    head_dim=_head_dim(text, family),
    **_rope(text, raw, family),
    **_experts(text, family),
    **_linear(text, family),
  )


def _head_dim(text: Mapping[str, Any], family: str) -> int:
  return (
    text.get("head_dim")
    or qwen_defaults.TEXT[family].get("head_dim")
    or text["hidden_size"] // text["num_attention_heads"]
  )


def _rope(
  text: Mapping[str, Any], raw: Mapping[str, Any], family: str
) -> dict[str, Any]:
  """Reads the fields of rotary positions, as any transformers writes them."""
  rope = dict(
    text.get("rope_parameters")
    or text.get("rope_scaling")
    or raw.get("rope_scaling")
    or {}
  )
  theta = rope.get("rope_theta", text.get("rope_theta"))
  if theta is None:
    theta = qwen_defaults.rope_theta(family)
  traits = qwen_families.VISION_LANGUAGE[family]
  if traits.flat_positions:
    section = (_head_dim(text, family) // 2, 0, 0)
  else:
    section = rope.get("mrope_section", qwen_defaults.MROPE_SECTION[family])
  longest = text["max_position_embeddings"]
  partial = {}
  if traits.partial_rotary:
    share = rope.pop("partial_rotary_factor", None)
    share = text.get("partial_rotary_factor") if share is None else share
    if share is None:
      share = qwen_defaults.PARTIAL_ROTARY_FACTOR[family]
    partial = {"partial_rotary_factor": float(share)}
  return partial | {
    "rope_theta": float(theta),
    "mrope_section": tuple(section),
    "rope_scaling": rope_scaling.read(rope, longest),
  }


_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_SHARED_EXPERT = "shared_expert_intermediate_size"


def _experts(text: Mapping[str, Any], family: str) -> dict[str, Any]:
  traits = qwen_families.VISION_LANGUAGE[family]
  if not traits.experts:
    return {}
  if traits.linear:
    return {name: text[name] for name in (*_EXPERTS, _SHARED_EXPERT)}
  config_checks.refuse(
    text.get("norm_topk_prob", True) is False,
    "norm_topk_prob=false, routing weights always add up to 1 here",
  )
  if traits.sigmoid_router:
    return _grouped_experts(text)
  count = text.get("num_experts", text.get("num_local_experts"))
  count = qwen_defaults.NUM_EXPERTS if count is None else count
  return {
    "num_experts": count,
    **{name: text[name] for name in _EXPERTS[1:]},
    "mlp_only_layers": tuple(text.get("mlp_only_layers") or ()),
    "decoder_sparse_step": text["decoder_sparse_step"],
  }


def _grouped_experts(text: Mapping[str, Any]) -> dict[str, Any]:
  """Fields of experts that are chosen of groups, by GLM-4.5V's names."""
  hidden = text["moe_intermediate_size"]
  # transformers reads either name.
  count = text.get("num_local_experts", text["n_routed_experts"])
  return {
    "num_experts": count,
    "num_experts_per_tok": text["num_experts_per_tok"],
    "moe_intermediate_size": hidden,
    "shared_expert_intermediate_size": hidden * text["n_shared_experts"],
    "mlp_only_layers": tuple(
      range(min(text["first_k_dense_replace"], text["num_hidden_layers"]))
    ),
    "expert_groups": text["n_group"],
    "chosen_groups": text["topk_group"],
    "routed_scaling_factor": float(text["routed_scaling_factor"]),
  }


def _grouped_experts_to_hf(text: TextConfig) -> dict[str, Any]:
  hidden = text.moe_intermediate_size
  return {
    "n_routed_experts": text.num_experts,
    "num_experts_per_tok": text.num_experts_per_tok,
    "moe_intermediate_size": hidden,
    "n_shared_experts": text.shared_expert_intermediate_size // hidden,
    "first_k_dense_replace": len(text.mlp_only_layers),
    "n_group": text.expert_groups,
    "topk_group": text.chosen_groups,
    "routed_scaling_factor": text.routed_scaling_factor,
    "norm_topk_prob": True,
    "attention_bias": True,
  }


_LINEAR = (
  "linear_conv_kernel_dim",
  "linear_key_head_dim",
  "linear_value_head_dim",
  "linear_num_key_heads",
  "linear_num_value_heads",
)


def _linear(text: Mapping[str, Any], family: str) -> dict[str, Any]:
  """Fields of layers of linear attention."""
  if not qwen_families.VISION_LANGUAGE[family].linear:
    return {}
  kinds = text.get("layer_types")
  if not kinds:
    every = text["full_attention_interval"]
    kinds = [
      "linear_attention" if (i + 1) % every else "full_attention"
      for i in range(text["num_hidden_layers"])
    ]
  full = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
  return {"full_attention_layers": full} | {
    name: text[name] for name in _LINEAR
  }


def _linear_to_hf(text: TextConfig) -> dict[str, Any]:
  return {name: getattr(text, name) for name in _LINEAR} | {
    "layer_types": [
      "linear_attention" if text.is_linear(i) else "full_attention"
      for i in range(text.num_hidden_layers)
    ],
    "attn_output_gate": True,
  }


def to_hf(config: QwenVLConfig) -> dict[str, Any]:
  """Returns a `config.json` that `transformers` builds the same model from."""
  family, text, traits = config.family, config.text, config.traits
  if traits.tower == "siglip":
    return gemma3_config.to_hf(config)
  text_config: dict[str, Any] = {
    "model_type": traits.text_type or f"{family}_text",
    **{name: getattr(text, name) for name in qwen_shapes.DECODER_FIELDS},
    "hidden_act": "silu",
    "max_position_embeddings": qwen_defaults.POSITIONS,
    "tie_word_embeddings": config.tie_word_embeddings,
    "rope_parameters": {"rope_type": "default", "rope_theta": text.rope_theta},
  }
  if not traits.flat_positions:
    text_config["rope_parameters"]["mrope_section"] = list(text.mrope_section)
  if traits.own_head_dim:
    text_config["head_dim"] = text.head_dim
  if traits.interleaved:
    text_config["rope_parameters"]["mrope_interleaved"] = True
  if text.rope_scaling is not None:
    text_config["rope_parameters"] |= text.rope_scaling.to_hf()
  if traits.partial_rotary:
    rope = text_config["rope_parameters"]
    rope["partial_rotary_factor"] = text.partial_rotary_factor
  if traits.linear:
    text_config |= _linear_to_hf(text)
  if traits.linear and text.num_experts:
    del text_config["intermediate_size"]
    text_config |= {
      name: getattr(text, name) for name in (*_EXPERTS, _SHARED_EXPERT)
    }
  elif traits.sigmoid_router:
    text_config |= _grouped_experts_to_hf(text)
  elif text.num_experts:
    text_config |= {
      **{name: getattr(text, name) for name in _EXPERTS},
      "mlp_only_layers": list(text.mlp_only_layers),
      "decoder_sparse_step": text.decoder_sparse_step,
      "norm_topk_prob": True,
    }
  tiles = {}
  if traits.tower == "idefics3":
    # transformers' own padding is outside of most vocabularies.
    tiles = {
      "scale_factor": config.vision.spatial_merge_size,
      "pad_token_id": None,
    }
  return {
    "architectures": [traits.architecture],
    "model_type": family,
    "tie_word_embeddings": config.tie_word_embeddings,
    **tiles,
    **qwen_defaults.image_tokens_to_hf(config),
    "text_config": text_config,
    "vision_config": _vision_to_hf(config),
  }


def _vision_to_hf(config: QwenVLConfig) -> dict[str, Any]:
  family, vision, tower = config.family, config.vision, config.traits.tower
  if tower == "idefics3":
    return {
      "model_type": f"{family}_vision",
      **{name: getattr(vision, own) for own, name in _SIGLIP.items()},
      "num_channels": 3,
      "hidden_act": qwen_defaults.VISION[family]["hidden_act"],
    }
  fields: dict[str, Any] = {
    "model_type": f"{family}_vision",
    **{name: getattr(vision, name) for name in _TOWER},
    "temporal_patch_size": 2,
    "in_channels": 3,
    "hidden_act": qwen_defaults.VISION[family]["hidden_act"],
  }
  if tower == "qwen2":
    return fields | {
      "embed_dim": vision.hidden_size,
      "hidden_size": vision.out_hidden_size,
      "mlp_ratio": vision.intermediate_size // vision.hidden_size,
    }
  fields |= {name: getattr(vision, name) for name in _WIDTHS}
  if tower == "glm4v":
    side = round(vision.num_position_embeddings**0.5)
    return fields | {
      "image_size": side * vision.patch_size,
      "rms_norm_eps": vision.rms_norm_eps,
      "attention_bias": False,
    }
  if tower == "qwen2_5":
    return fields | {
      "window_size": vision.window_size,
      "fullatt_block_indexes": list(vision.fullatt_block_indexes),
    }
  fields["num_position_embeddings"] = vision.num_position_embeddings
  if config.traits.deepstack:
    fields["deepstack_visual_indexes"] = list(vision.deepstack_visual_indexes)
  return fields
