"""Builds published policies with the processor and tokenizer of each.

Joins weights (`hf_checkpoint`), processor (`qwen_vl_inputs`, or `text_inputs`
of a text policy) and the tokenizer's files; callers use `checkpoint`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib
from typing import Any

from flax import nnx
import jax
import tokenizers
from tunix.rl.multi_turn.policy import random_keys
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy import text_inputs
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy.checkpoints import image_settings
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.policy.checkpoints import tensor_files
from tunix.rl.multi_turn.policy.models.gemma3 import gemma3_inputs
from tunix.rl.multi_turn.policy.models.qwen import qwen_config
from tunix.rl.multi_turn.policy.models.qwen import qwen_families
from tunix.rl.multi_turn.policy.models.qwen import qwen_shapes
from tunix.rl.multi_turn.policy.models.qwen import qwen_text
from tunix.rl.multi_turn.policy.models.qwen import qwen_text_config
from tunix.rl.multi_turn.policy.models.qwen import qwen_vl_inputs
from tunix.rl.multi_turn.policy.models.smolvlm import smolvlm_inputs

FAMILIES = qwen_config.FAMILIES
TEXT_FAMILIES = qwen_text_config.FAMILIES

AnyConfig = qwen_text_config.AnyConfig
Processor = qwen_vl_inputs.QwenVLProcessor | text_inputs.TextProcessor
Loaded = tuple[qwen_text.QwenText, Processor, tokenizers.Tokenizer]

_PIXELS = ("min_pixels", "max_pixels")
_BUDGET = "image_budget"

SMALL = (
  "qwen3_vl_tiny",
  "qwen3_5_tiny",
  "qwen2_5_vl_tiny",
  "qwen2_vl_tiny",
  "smolvlm_tiny",
)
SMALL_TILED = ("smolvlm_tiny",)
"""Of these, the ones with a tokenizer of their own: images are tiles."""
SMALL_TEXT = ("qwen3_text_tiny",)
"""Architectures of the published models at sizes that a CPU can train."""

_OWN_IMAGES: dict[str, Any] = {
  "siglip": gemma3_inputs,
  "idefics3": smolvlm_inputs,
}
"""Tower -> the module of its processor, where that is not Qwen-VL's."""

_PLACEHOLDERS = ("<|image_pad|>", "<|video_pad|>")


def _small_config(name: str, tokenizer: tokenizers.Tokenizer) -> AnyConfig:
  def find(token: str) -> int:
    number = tokenizer.token_to_id(token)
    if number is None:
      raise ValueError(f"the tokenizer has no token {token!r}")
    return number

  sizes = dict(
    vocab_size=tokenizer.get_vocab_size(),
    hidden_size=160,
    intermediate_size=320,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    rope_theta=10_000.0,
  )
  if name in SMALL_TEXT:
    return qwen_text_config.QwenTextConfig(
      family="qwen3",
      text=qwen_config.TextConfig(
        **sizes, head_dim=40, mrope_section=qwen_text_config.plain_rotary(40)
      ),
      tie_word_embeddings=True,
      banned_token_ids=_banned(tokenizer),
      remat="none",
    )
  family = name.removesuffix("_tiny")
  traits = qwen_families.VISION_LANGUAGE[family]
  tower: Any = {
    "qwen2": {},
    "qwen2_5": {"window_size": 64, "fullatt_block_indexes": (1, 3)},
    "qwen3": {"num_position_embeddings": 256},
    # Tiles of 8 x 8 patches and 2 x 2 vision tokens.
    "idefics3": {
      "num_position_embeddings": 64,
      "tile_size": 64,
      "spatial_merge_size": 4,
    },
  }[traits.tower]
  if traits.deepstack:
    tower |= {"deepstack_visual_indexes": (1, 2)}
  text: dict[str, Any] = {"head_dim": 40, "mrope_section": (8, 6, 6)}
  tokens = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
  }
  if traits.flat_positions:
    text |= {"mrope_section": qwen_text_config.plain_rotary(40)}
    tokens = dict.fromkeys(tokens, "<image>")
  if traits.linear:
    text = {
      "head_dim": 48,
      "partial_rotary_factor": 0.5,
      "mrope_section": (4, 4, 4),
      "full_attention_layers": (3,),
      "linear_num_key_heads": 2,
      "linear_num_value_heads": 4,
      "linear_key_head_dim": 32,
      "linear_value_head_dim": 32,
      "linear_conv_kernel_dim": 4,
    }
  ids: dict[str, Any] = {field: find(token) for field, token in tokens.items()}
  return qwen_config.QwenVLConfig(
    family=family,
    vision=qwen_config.VisionConfig(
      depth=4,
      hidden_size=96,
      intermediate_size=192,
      num_heads=4,
      out_hidden_size=sizes["hidden_size"],
      patch_size=8,
      **tower,
    ),
    text=qwen_config.TextConfig(**sizes, **text),
    tie_word_embeddings=True,
    **ids,
    remat="none",
  )


def small_config(
  name: str, tokenizer: str | pathlib.Path = "tiny_vl", **changes: Any
) -> Any:
  """Returns the config of one of `SMALL` or `SMALL_TEXT` for a tokenizer."""
  encoder = policy_files.load_tokenizer(tokenizer)
  return dataclasses.replace(_small_config(name, encoder), **changes)


def create(
  size: str,
  seed: int = 0,
  tokenizer: str | pathlib.Path = "tiny_vl",
  mesh: jax.sharding.Mesh | None = None,
  screen: tuple[int, int] | None = None,
  **changes: Any,
) -> Loaded:
  """Creates a small policy; see `checkpoint.create_policy`."""
  encoder = policy_files.load_tokenizer(tokenizer)
  config, pixels = _apply(_small_config(size, encoder), changes)
  if isinstance(config, qwen_text_config.QwenTextConfig):
    text = text_inputs.TextProcessor(size)
    return _fresh(config, text, encoder, seed, mesh)
  processor = _processor(_default_settings(config), config, pixels)
  config = _fit(config, processor, screen)
  return _fresh(config, processor, encoder, seed, mesh)


def create_like(
  directory: pathlib.Path,
  seed: int,
  mesh: jax.sharding.Mesh | None = None,
  screen: tuple[int, int] | None = None,
  **changes: Any,
) -> Loaded:
  """Returns a policy of a directory's sizes with fresh weights."""
  encoder = policy_files.load_tokenizer(directory)
  config, processor = _read(directory, encoder, screen, changes)
  return _fresh(config, processor, encoder, seed, mesh)


def load(
  directory: pathlib.Path,
  mesh: jax.sharding.Mesh | None = None,
  screen: tuple[int, int] | None = None,
  **changes: Any,
) -> Loaded:
  """Returns the policy of a directory; see `checkpoint.load_policy`.

  Beside the run-time fields of `QwenVLConfig`, among them `min_pixels` and
  `max_pixels` of the host side, `image_budget` can be given: (pixels, images)
  of a whole trajectory, see `qwen_vl_inputs.pixel_budget`.
  """
  tensor_files.Reader(directory)  # Missing weights before a missing tokenizer.
  encoder = policy_files.load_tokenizer(directory)
  config, processor = _read(directory, encoder, screen, changes)
  fields = qwen_text_config.run_fields(config)
  model = hf_checkpoint.load_model(
    directory, mesh, **{name: getattr(config, name) for name in fields}
  )
  return model, processor, encoder


def save(
  directory: pathlib.Path,
  model: qwen_text.QwenText,
  tokenizer: str | pathlib.Path,
  dtype: str = "float32",
  untied: bool = False,
) -> None:
  """Writes a checkpoint; `tokenizer` may be the one it was loaded from.

  The processor's file holds the limits of an image's area that the model ran
  with, so that it sees the same pixels elsewhere.
  """
  hf_checkpoint.save_policy(directory, model, tokenizer, dtype, untied)
  if isinstance(model.config, qwen_text_config.QwenTextConfig):
    return
  config, vision = model.config, model.config.vision
  read = image_settings.read(directory, config.family)
  values = dict(read.values if read else _default_settings(config).values)
  values |= {"image_mean": vision.image_mean, "image_std": vision.image_std}
  limits = {k: getattr(config, k) for k in _PIXELS if k in values}
  values |= {k: limit for k, limit in limits.items() if limit}
  image_settings.write(directory, values, config.family)
  if config.traits.tower == "idefics3":
    tile = processor_of(config, directory)
    assert isinstance(tile, smolvlm_inputs.SmolVLMProcessor)
    image_settings.write_length(directory, tile.tile_tokens, config.family)


def load_config(directory: pathlib.Path, **changes: Any) -> AnyConfig:
  """Returns the config of a policy directory, with `changes` applied."""
  return _apply(_config_of(directory), changes)[0]


def check(directory: pathlib.Path, model: qwen_text.QwenText) -> None:
  """Refuses a directory whose tensors do not fit `model`; reads none."""
  hf_checkpoint.check(directory, model)


def processor_of(
  config: qwen_config.QwenVLConfig, directory: pathlib.Path | None = None
) -> qwen_vl_inputs.QwenVLProcessor:
  """Returns the processor of a config, or of a directory that has one."""
  settings = _default_settings(config)
  if directory is not None:
    settings = _settings_of(directory, config)
  return _processor(settings, config, {})


# --- pieces -------------------------------------------------------------------


def _config_of(
  directory: pathlib.Path, encoder: tokenizers.Tokenizer | None = None
) -> AnyConfig:
  """Returns a directory's config; a text policy's has the tokenizer's bans."""
  config = hf_checkpoint.load_config(directory)
  if isinstance(config, qwen_text_config.QwenTextConfig):
    encoder = encoder or policy_files.load_tokenizer(directory)
    _check_vocabulary(config, encoder)
    return dataclasses.replace(config, banned_token_ids=_banned(encoder))
  return config


def _banned(encoder: tokenizers.Tokenizer) -> tuple[int, ...]:
  """Placeholders that the tokenizer has: without an image they mean nothing."""
  ids = (encoder.token_to_id(token) for token in _PLACEHOLDERS)
  return tuple(token for token in ids if token is not None)


def _check_vocabulary(config: AnyConfig, encoder: tokenizers.Tokenizer) -> None:
  if encoder.get_vocab_size() > config.vocab_size:
    raise ValueError(
      f"the tokenizer has {encoder.get_vocab_size()} tokens, the model's"
      f" vocabulary {config.vocab_size}; give the model's own tokenizer"
    )


def _apply(
  config: AnyConfig, changes: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
  """Returns the config with run-time fields changed, and the pixel limits."""
  fields: tuple[str, ...] = qwen_config.RUN_FIELDS
  limits: tuple[str, ...] = (*_PIXELS, _BUDGET)
  if isinstance(config, qwen_text_config.QwenTextConfig):
    fields, limits = qwen_text_config.RUN_FIELDS, ()
  pixels = {k: changes[k] for k in limits if k in changes}
  chosen = {k: v for k, v in changes.items() if k not in pixels}
  qwen_shapes.check_changes(config.family, chosen, fields)
  return dataclasses.replace(config, **chosen), pixels


def _read(
  directory: pathlib.Path,
  encoder: tokenizers.Tokenizer,
  screen: tuple[int, int] | None,
  changes: dict[str, Any],
) -> tuple[AnyConfig, Processor]:
  """Returns a directory's config, changed, and its processor; logs images'."""
  config, pixels = _apply(_config_of(directory, encoder), changes)
  if isinstance(config, qwen_text_config.QwenTextConfig):
    return config, text_inputs.TextProcessor(str(directory))
  processor = _processor(_settings_of(directory, config), config, pixels)
  logging.getLogger(__name__).info(
    "images of %s: %s", directory, processor.describe()
  )
  return _fit(config, processor, screen), processor


def _default_settings(
  config: qwen_config.QwenVLConfig,
) -> image_settings.ImageSettings:
  """Settings in place of missing files: the published checkpoints'."""
  if config.traits.tower in _OWN_IMAGES:
    return _OWN_IMAGES[config.traits.tower].default_settings(config)
  values = dict(
    {"qwen3": qwen_vl_inputs.QWEN3_VL, "glm4v": qwen_vl_inputs.GLM_4_1V}.get(
      config.traits.tower, qwen_vl_inputs.QWEN2_5_VL
    )
  )
  vision, source = config.vision, "the published checkpoints' settings"
  if values["patch_size"] != vision.patch_size:  # One of our small ones.
    factor = vision.patch_size * vision.spatial_merge_size
    values |= {
      "patch_size": vision.patch_size,
      "min_pixels": factor**2,
      "max_pixels": (64 * factor) ** 2,
    }
    source = "limits that follow from the patch size"
  values["merge_size"] = vision.spatial_merge_size
  return image_settings.ImageSettings(values, f"no processor file: {source}")


def _settings_of(
  directory: pathlib.Path, config: qwen_config.QwenVLConfig
) -> image_settings.ImageSettings:
  # `load_config` has held them against the model's sizes.
  read = image_settings.read(directory, config.family)
  return read or _default_settings(config)


def _processor(
  settings: image_settings.ImageSettings,
  config: qwen_config.QwenVLConfig,
  pixels: dict[str, Any],
) -> qwen_vl_inputs.QwenVLProcessor:
  limits = {k: v for k, v in pixels.items() if k != _BUDGET}
  if config.traits.tower in _OWN_IMAGES:
    return _OWN_IMAGES[config.traits.tower].processor(
      settings, config, limits, pixels.get(_BUDGET)
    )
  make = functools.partial(
    qwen_vl_inputs.QwenVLProcessor.from_preprocessor_config,
    settings.values,
    image_token_id=config.image_token_id,
    source=settings.source,
    flat_positions=config.traits.flat_positions,
    lift_sides=config.traits.tower == "glm4v",
  )
  processor = make(**limits)
  if _BUDGET in pixels:
    most = qwen_vl_inputs.pixel_budget(
      *(processor.max_pixels, *pixels[_BUDGET], processor.factor)
    )
    least = processor.min_pixels
    if 4 * least > most:  # Near each other, sides round up past the limit.
      least = processor.factor**2
    processor = make(min_pixels=least, max_pixels=most)
  return processor


def _fit(
  config: qwen_config.QwenVLConfig,
  processor: qwen_vl_inputs.QwenVLProcessor,
  screen: tuple[int, int] | None,
) -> qwen_config.QwenVLConfig:
  """Returns the configuration with its processor's limits of an image's area.

  Raises:
    ValueError: the limit of an image's patches excludes every screenshot.
  """
  limit = config.max_image_patches
  if limit and screen is not None:
    rows, columns = processor.grid(*screen)
    if rows * columns > limit:
      raise ValueError(
        f"max_image_patches={limit}: a screenshot of"
        f" {screen[0]}x{screen[1]} has {rows * columns} patches; raise it"
        " (0 = no limit), or lower max_pixels"
      )
  return dataclasses.replace(
    config, min_pixels=processor.min_pixels, max_pixels=processor.max_pixels
  )


def _fresh(
  config: AnyConfig,
  processor: Processor,
  encoder: tokenizers.Tokenizer,
  seed: int,
  mesh: jax.sharding.Mesh | None,
) -> Loaded:
  _check_vocabulary(config, encoder)
  return random_model(config, seed, mesh), processor, encoder


def random_model(
  config: qwen_text_config.AnyConfig,
  seed: int = 0,
  mesh: jax.sharding.Mesh | None = None,
) -> qwen_text.QwenText:
  """Fresh weights, made where they shall lie: none is ever whole elsewhere."""
  kind = hf_checkpoint.model_class(config)
  if mesh is None:
    return kind(config, random_keys.Keys(seed))
  abstract = hf_checkpoint.abstract_model(config, mesh)
  graph, state = nnx.split(abstract)
  place = jax.tree.map(
    lambda v: v.replace(sharding.parameter_sharding(v, mesh)),
    state,
    is_leaf=lambda v: isinstance(v, nnx.Variable),
  )

  def build() -> nnx.State:
    return nnx.state(kind(config, random_keys.Keys(seed), mesh))

  return nnx.merge(graph, jax.jit(build, out_shardings=place)())
