"""Reads and writes the sections of Gemma 3's config.json.

Promises: both spellings are read, that of the published files (one
`rope_scaling`, `sliding_window_pattern`) and that of transformers 5
(`rope_parameters` of each kind of layer, `layer_types`). What the model here
would compute wrongly is refused by its field.

Does not: import JAX, or fill in defaults (see `qwen_defaults`).
"""

from __future__ import annotations

from typing import Any, Mapping

from tunix.rl.multi_turn.policy.checkpoints import config_checks
from tunix.rl.multi_turn.policy.layers import rope_scaling
from tunix.rl.multi_turn.policy.models.qwen import qwen_defaults
from tunix.rl.multi_turn.policy.models.qwen import qwen_shapes

FULL, SLIDING = "full_attention", "sliding_attention"

_ACT = "gelu_pytorch_tanh"
_THETA = {FULL: 1e6, SLIDING: 1e4}
_OLD_THETA = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}
_EVERY = 6  # Layers from one of full attention to the next.
_TOKENS = 256  # Of an image.


def read(
  raw: Mapping[str, Any], text: Mapping[str, Any], vision: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the fields `vision` and `text` of a `QwenVLConfig`.

  Args:
    raw: the file's content.
    text: its text_config, with defaults.
    vision: its vision_config, with defaults.

  Raises:
    ValueError: a field that asks for more than is computed here.
  """
  _check_vision(vision)
  return {
    "vision": _vision(vision, raw, text["hidden_size"]),
    "text": read_text(text),
  }


def _check_vision(vision: Mapping[str, Any]) -> None:
  refuse = config_checks.refuse
  act = vision["hidden_act"]
  refuse(act != _ACT, f"vision hidden_act={act!r}, only {_ACT} is known")
  channels = vision.get("num_channels", 3)
  refuse(channels != 3, f"vision num_channels={channels}, only 3 is known")
  refuse(
    bool(vision.get("vision_use_head", False)),
    "vision_use_head=true, Gemma 3 has no pooling head",
  )


def _check_text(text: Mapping[str, Any]) -> None:
  refuse = config_checks.refuse
  act = text["hidden_activation"]
  refuse(act != _ACT, f"text hidden_activation={act!r}, only {_ACT} is known")
  for name in ("attn_logit_softcapping", "final_logit_softcapping"):
    refuse(
      text.get(name) is not None,
      f"{name}={text.get(name)}, logits and scores are not capped here, nor"
      " in Gemma 3 as published",
    )
  for name, why in (
    ("attention_bias", "its projections have none here"),
    ("use_bidirectional_attention", "words see earlier ones only here"),
  ):
    refuse(bool(text.get(name)), f"{name}=true, {why}")


def _vision(
  vision: Mapping[str, Any], raw: Mapping[str, Any], width: int
) -> qwen_shapes.VisionConfig:
  image, patch = vision["image_size"], vision["patch_size"]
  config_checks.refuse(
    not isinstance(image, int) or not isinstance(patch, int),
    f"vision image_size={image}, patch_size={patch}, images are squares here:"
    " give one number each",
  )
  config_checks.refuse(
    image % patch != 0,
    f"vision image_size={image} is no multiple of patch_size={patch}",
  )
  tokens = raw.get("mm_tokens_per_image", _TOKENS)
  side, across = image // patch, round(tokens**0.5)
  config_checks.refuse(
    across < 1 or across**2 != tokens or side % across != 0,
    f"mm_tokens_per_image={tokens} must be a square whose side divides the"
    f" {side} patches of vision image_size={image}",
  )
  return qwen_shapes.VisionConfig(
    depth=vision["num_hidden_layers"],
    hidden_size=vision["hidden_size"],
    intermediate_size=vision["intermediate_size"],
    num_heads=vision["num_attention_heads"],
    out_hidden_size=width,
    patch_size=patch,
    spatial_merge_size=side // across,
    num_position_embeddings=side**2,
    rms_norm_eps=vision["layer_norm_eps"],
  )


def read_text(text: Mapping[str, Any]) -> qwen_shapes.TextConfig:
  """Returns the decoder of a text_config or a text model's file.

  Raises:
    ValueError: a field that asks for more than is computed here.
  """
  _check_text(text)
  layers, head_dim = text["num_hidden_layers"], text["head_dim"]
  kinds = text.get("layer_types")
  if not kinds:
    every = text.get("sliding_window_pattern") or _EVERY
    kinds = [SLIDING if (i + 1) % every else FULL for i in range(layers)]
  unknown = sorted(set(kinds) - {FULL, SLIDING})
  config_checks.refuse(
    bool(unknown),
    f"layer_types holds {unknown}, only {SLIDING} and {FULL} is known",
  )
  config_checks.refuse(
    len(kinds) != layers,
    f"layer_types names {len(kinds)} layers, num_hidden_layers is {layers}",
  )
  window = text["sliding_window"]
  config_checks.refuse(
    not isinstance(window, int) or window < 1,
    f"sliding_window={window}, a number of tokens is needed",
  )
  rope = {kind: _rope(text, kind) for kind in (FULL, SLIDING)}
  longest = text["max_position_embeddings"]
  config_checks.refuse(
    rope_scaling.read(rope[SLIDING], longest) is not None,
    f"rope_parameters of {SLIDING} layers are scaled, which are plain here",
  )
  return qwen_shapes.TextConfig(
    **{name: text[name] for name in qwen_shapes.DECODER_FIELDS},
    head_dim=head_dim,
    rope_theta=float(rope[FULL]["rope_theta"]),
    mrope_section=(head_dim // 2, 0, 0),
    rope_scaling=rope_scaling.read(rope[FULL], longest),
    full_attention_layers=tuple(
      i for i, kind in enumerate(kinds) if kind == FULL
    ),
    sliding_window=window,
    local_rope_theta=float(rope[SLIDING]["rope_theta"]),
    query_pre_attn_scalar=float(text["query_pre_attn_scalar"]),
  )


def _rope(text: Mapping[str, Any], kind: str) -> dict[str, Any]:
  """A kind of layers' rotary positions; the old `rope_scaling` is of full
  ones."""
  rope = dict((text.get("rope_parameters") or {}).get(kind) or {})
  if kind == FULL:
    rope |= text.get("rope_scaling") or {}
  rope.pop("truncate", None)  # transformers reads none of a kind of layers.
  theta = text.get(_OLD_THETA[kind])
  rope.setdefault("rope_theta", _THETA[kind] if theta is None else theta)
  return rope


def to_hf(config: qwen_shapes.QwenVLConfig) -> dict[str, Any]:
  """Returns a `config.json` that `transformers` builds the same model from."""
  vision = config.vision
  side = round(vision.num_position_embeddings**0.5)
  return {
    "architectures": [config.traits.architecture],
    "model_type": config.family,
    "tie_word_embeddings": config.tie_word_embeddings,
    "mm_tokens_per_image": config.whole_image_tokens,
    **qwen_defaults.image_tokens_to_hf(config),
    "text_config": text_to_hf(config),
    "vision_config": {
      "model_type": "siglip_vision_model",
      "hidden_size": vision.hidden_size,
      "intermediate_size": vision.intermediate_size,
      "num_hidden_layers": vision.depth,
      "num_attention_heads": vision.num_heads,
      "num_channels": 3,
      "image_size": side * vision.patch_size,
      "patch_size": vision.patch_size,
      "layer_norm_eps": vision.rms_norm_eps,
      "hidden_act": _ACT,
      "vision_use_head": False,
    },
  }


def text_to_hf(config: Any) -> dict[str, Any]:
  """Returns the decoder's section, or the file of a text model."""
  text = config.text
  full: dict[str, Any] = {"rope_type": "default", "rope_theta": text.rope_theta}
  scaled = text.rope_scaling.to_hf() if text.rope_scaling else {}
  scalar = text.query_pre_attn_scalar or text.head_dim
  return {
    "model_type": "gemma3_text",
    **{name: getattr(text, name) for name in qwen_shapes.DECODER_FIELDS},
    "head_dim": text.head_dim,
    "hidden_activation": _ACT,
    "max_position_embeddings": qwen_defaults.POSITIONS,
    "query_pre_attn_scalar": int(scalar) if scalar % 1 == 0 else scalar,
    "sliding_window": text.sliding_window,
    "layer_types": [
      SLIDING if text.window(i) else FULL for i in range(text.num_hidden_layers)
    ],
    "rope_parameters": {
      FULL: full | scaled,
      SLIDING: {"rope_type": "default", "rope_theta": text.local_rope_theta},
    },
    "tie_word_embeddings": config.tie_word_embeddings,
  }
