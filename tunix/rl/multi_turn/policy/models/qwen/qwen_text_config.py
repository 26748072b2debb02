"""Declares sizes of text models; reads and writes their config.json.

The decoder is that of the vision-language models (`qwen_config.TextConfig`)
without a tower. Field names follow the checkpoints' own `config.json`;
`from_hf` and `to_hf` are inverse for everything the policy reads.

Promises: a field that a file leaves out has the default of transformers' class
(see `qwen_defaults`). A configuration that the decoder would compute wrongly
(another activation, a kind of scaled rotary positions that is not in
`rope_scaling`, sliding windows, experts, weights of 8 bits) is refused by the
name of its field.

Does not: import JAX.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

from tunix.rl.multi_turn.policy.checkpoints import config_checks
from tunix.rl.multi_turn.policy.layers import rope_scaling
from tunix.rl.multi_turn.policy.models.gemma3 import gemma3_config
from tunix.rl.multi_turn.policy.models.qwen import qwen_config
from tunix.rl.multi_turn.policy.models.qwen import qwen_defaults
from tunix.rl.multi_turn.policy.models.qwen import qwen_families
from tunix.rl.multi_turn.policy.models.qwen import qwen_shapes

FAMILIES = tuple(qwen_families.TEXT)

RUN_FIELDS = ("compute_dtype", "param_dtype", "remat", "scan_layers")
"""Fields that may differ from a checkpoint's file: they affect running only."""


@dataclasses.dataclass(frozen=True)
class QwenTextConfig:
  """A text policy of one of the `FAMILIES`.

  Attributes:
    family: `model_type` of the checkpoint; Qwen2.5's is qwen2.
    text: the decoder.
    tie_word_embeddings: the output matrix is the embedding.
    banned_token_ids: tokens that no sampler may draw: the tokenizer's image
      and video placeholders. Not in config.json.
    compute_dtype: Type of activations; sums are taken in float32.
    param_dtype: Type of the model's weights; the learner trains float32 masters
      of bfloat16 ones.
    remat: recomputed by the backward pass, see `config_checks.REMATS`; "auto"
      is "block" until a run chooses (`run_memory.settle_remat`).
    scan_layers: one loop over stacked layers, which compiles faster; unrolled
      layers run faster on a CPU.
  """

  family: str
  text: qwen_config.TextConfig
  tie_word_embeddings: bool = False
  banned_token_ids: tuple[int, ...] = ()
  compute_dtype: str = "float32"
  param_dtype: str = "float32"
  remat: str = "block"
  scan_layers: bool = False

  def __post_init__(self):
    if self.family not in FAMILIES:
      raise ValueError(
        f"family must be one of {', '.join(FAMILIES)}, got {self.family!r}"
      )
    config_checks.check_dtypes(self.compute_dtype, self.param_dtype)
    config_checks.check_remat(self.remat)
    text = self.text
    for name in ("num_attention_heads", "num_key_value_heads"):
      if getattr(text, name) < 1:
        raise ValueError(f"{name} must be >= 1, got {getattr(text, name)}")
    if text.num_attention_heads % text.num_key_value_heads:
      raise ValueError(
        f"num_attention_heads={text.num_attention_heads} is not a multiple"
        f" of num_key_value_heads={text.num_key_value_heads}"
      )
    if text.head_dim % 2:
      raise ValueError(
        f"head_dim={text.head_dim} must be even: rotary positions turn pairs"
      )

  @property
  def vocab_size(self) -> int:
    return self.text.vocab_size

  @property
  def traits(self) -> qwen_families.Family:
    """The parts in which the family differs from others."""
    return qwen_families.TEXT[self.family]


AnyConfig = qwen_config.QwenVLConfig | QwenTextConfig
"""Configs that `qwen_decoder` reads its sizes from."""


def run_fields(config: AnyConfig) -> tuple[str, ...]:
  """Returns the fields of a config that its file does not decide."""
  if isinstance(config, QwenTextConfig):
    return (*RUN_FIELDS, "banned_token_ids")
  return qwen_config.RUN_FIELDS


def from_hf(raw: Mapping[str, Any], **changes: Any) -> QwenTextConfig:
  """Returns the configuration of a checkpoint's `config.json`.

  Args:
    raw: the file's content.
    **changes: `RUN_FIELDS` or banned_token_ids.

  Raises:
    ValueError: another model, or one that would be computed wrongly; the
      message names the field.
  """
  family = raw.get("model_type")
  if family not in FAMILIES:
    raise ValueError(
      f"model_type={family!r} is none of {', '.join(FAMILIES)}; other"
      " architectures have no text policy here"
    )
  config_checks.refuse_quantized(raw)
  traits = qwen_families.TEXT[family]
  raw = qwen_defaults.filled(raw, qwen_defaults.TEXT[family])
  text = gemma3_config.read_text(raw) if traits.windows else _text(raw)
  unknown = sorted(set(changes) - {*RUN_FIELDS, "banned_token_ids"})
  if unknown:
    raise ValueError(
      f"{unknown[0]!r} of a checkpoint cannot be changed; change one of:"
      f" {', '.join(RUN_FIELDS)}"
    )
  return QwenTextConfig(
    family=family,
    text=text,
    tie_word_embeddings=bool(raw.get("tie_word_embeddings", traits.tied)),
    **changes,
  )


def _text(raw: Mapping[str, Any]) -> qwen_config.TextConfig:
  """Returns the decoder of a file with defaults.

  Raises:
    ValueError: a field that asks for more than is computed here.
  """
  traits = qwen_families.TEXT[raw["model_type"]]
  refuse = config_checks.refuse
  act = raw["hidden_act"]
  refuse(act != "silu", f"hidden_act={act!r}, only silu is known")
  refuse(
    bool(raw.get("use_sliding_window")),
    "use_sliding_window=true, the decoder has no windows here",
  )
  kinds = sorted(set(raw.get("layer_types") or ()) - {"full_attention"})
  refuse(
    bool(kinds), f"layer_types holds {kinds}, only full_attention is known"
  )
  for name in ("attention_bias", "mlp_bias"):
    refuse(
      not traits.qkv_bias and bool(raw.get(name)),
      f"{name}=true, projections of {raw['model_type']} have none here",
    )
  heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
  head_dim = raw.get("head_dim") or (128 if traits.qk_norm else hidden // heads)
  refuse(
    not traits.own_head_dim and head_dim * heads != hidden,
    f"head_dim={head_dim}, qwen2's is hidden_size / num_attention_heads ="
    f" {hidden} / {heads}",
  )
  sizes = {name: raw[name] for name in qwen_shapes.DECODER_FIELDS}
  sizes["num_key_value_heads"] = raw["num_key_value_heads"] or heads
  return qwen_config.TextConfig(
    **sizes,
    head_dim=head_dim,
    rope_theta=_rope_theta(raw),
    mrope_section=plain_rotary(head_dim),
    rope_scaling=rope_scaling.read(_rope(raw), raw["max_position_embeddings"]),
  )


def plain_rotary(head_dim: int) -> tuple[int, int, int]:
  """Returns the `mrope_section` of positions with one axis."""
  return (head_dim // 2, 0, 0)


def _rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
  return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _rope_theta(raw: Mapping[str, Any]) -> float:
  """Returns the base of the rotary frequencies, in either spelling."""
  rope = _rope(raw)
  values = {
    float(value)
    for value in (raw.get("rope_theta"), rope.get("rope_theta"))
    if value is not None
  }
  if not values:
    return qwen_defaults.rope_theta(raw["model_type"])
  config_checks.refuse(
    len(values) > 1,
    f"rope_theta={raw.get('rope_theta')} but rope_parameters.rope_theta="
    f"{rope.get('rope_theta')}",
  )
  return values.pop()


def to_hf(config: QwenTextConfig) -> dict[str, Any]:
  """Returns a `config.json` that `transformers` builds the same model from."""
  text = config.text
  architecture = {"architectures": [config.traits.architecture]}
  if config.traits.windows:
    return architecture | gemma3_config.text_to_hf(config)
  raw: dict[str, Any] = {
    **architecture,
    "model_type": config.family,
    **{name: getattr(text, name) for name in qwen_shapes.DECODER_FIELDS},
    "hidden_act": "silu",
    "max_position_embeddings": qwen_defaults.POSITIONS,
    "tie_word_embeddings": config.tie_word_embeddings,
    "use_sliding_window": False,
    # Twice: transformers 4 and what builds on it reads the first only.
    "rope_theta": text.rope_theta,
    "rope_parameters": {"rope_type": "default", "rope_theta": text.rope_theta},
  }
  if text.rope_scaling is not None:
    raw["rope_parameters"] |= text.rope_scaling.to_hf()
    # Of transformers 4, beside rope_theta.
    raw["rope_scaling"] = text.rope_scaling.to_hf()
  if config.traits.own_head_dim:
    raw |= {"head_dim": text.head_dim, "attention_bias": False}
  return raw
