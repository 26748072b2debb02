"""Builds Qwen text policies with the processor and tokenizer of each.

The counterpart of `qwen_checkpoint` for models without a tower: weights come
from `hf_checkpoint`, the tokenizer from its files. callers use `checkpoint`.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import tokenizers
from tunix.rl.multi_turn.policy import hf_checkpoint
from tunix.rl.multi_turn.policy import policy_files
from tunix.rl.multi_turn.policy import qwen_checkpoint
from tunix.rl.multi_turn.policy import qwen_config
from tunix.rl.multi_turn.policy import qwen_text
from tunix.rl.multi_turn.policy import qwen_text_config
from tunix.rl.multi_turn.policy import text_inputs

FAMILIES = qwen_text_config.FAMILIES
SMALL = ("qwen3_text_tiny",)
"""The published architecture at a size that a CPU can train."""

_PLACEHOLDERS = ("<|image_pad|>", "<|video_pad|>")


Loaded = tuple[
    qwen_text.QwenText, text_inputs.TextProcessor, tokenizers.Tokenizer
]


def small_config(
    name: str, tokenizer: str | pathlib.Path = "tiny_vl", **changes: Any
) -> qwen_text_config.QwenTextConfig:
  """The config of one of `SMALL` for a tokenizer."""
  encoder = policy_files.load_tokenizer(tokenizer)
  return _changed(_small_config(name, encoder), changes)


def _small_config(
    name: str, encoder: tokenizers.Tokenizer
) -> qwen_text_config.QwenTextConfig:
  if name not in SMALL:
    raise ValueError(
        f"no text policy is called {name!r}; known: {', '.join(SMALL)}"
    )
  return qwen_text_config.QwenTextConfig(
      family="qwen3",
      text=qwen_config.TextConfig(
          vocab_size=encoder.get_vocab_size(),
          hidden_size=160,
          intermediate_size=320,
          num_hidden_layers=4,
          num_attention_heads=4,
          num_key_value_heads=2,
          head_dim=40,
          rope_theta=10_000.0,
          mrope_section=qwen_text_config.plain_rotary(40),
      ),
      tie_word_embeddings=True,
      banned_token_ids=_banned(encoder),
      remat="none",
  )


def create(
    size: str,
    seed: int = 0,
    tokenizer: str | pathlib.Path = "tiny_vl",
    mesh: jax.sharding.Mesh | None = None,
    screen: tuple[int, int] | None = None,
    **changes: Any,
) -> Loaded:
  """A small policy with fresh weights; see `checkpoint.create_policy`."""
  del screen  # There is none to see.
  encoder = policy_files.load_tokenizer(tokenizer)
  config = _changed(_small_config(size, encoder), changes)
  return _fresh(config, size, encoder, seed, mesh)


def create_like(
    directory: pathlib.Path,
    seed: int,
    mesh: jax.sharding.Mesh | None = None,
    screen: tuple[int, int] | None = None,
    **changes: Any,
) -> Loaded:
  """A policy of a directory's sizes with fresh weights."""
  del screen
  encoder = policy_files.load_tokenizer(directory)
  config = _config_of(directory, encoder, changes)
  return _fresh(config, str(directory), encoder, seed, mesh)


def load(
    directory: pathlib.Path,
    mesh: jax.sharding.Mesh | None = None,
    screen: tuple[int, int] | None = None,
    **changes: Any,
) -> Loaded:
  """The policy of a directory; see `checkpoint.load_policy`."""
  del screen
  encoder = policy_files.load_tokenizer(directory)
  config = _config_of(directory, encoder, changes)
  fields = qwen_text_config.run_fields(config)
  model = hf_checkpoint.load_model(
      directory, mesh, **{name: getattr(config, name) for name in fields}
  )
  return model, text_inputs.TextProcessor(str(directory)), encoder


def save(
    directory: pathlib.Path,
    model: qwen_text.QwenText,
    tokenizer: str | pathlib.Path,
    dtype: str = "float32",
    untied: bool = False,
) -> None:
  """Writes a checkpoint; `tokenizer` may be the one it was loaded from."""
  hf_checkpoint.save_policy(directory, model, tokenizer, dtype, untied)


def load_config(
    directory: pathlib.Path, **changes: Any
) -> qwen_text_config.QwenTextConfig:
  """The config of a policy directory, with `changes` applied."""
  encoder = policy_files.load_tokenizer(directory)
  return _config_of(directory, encoder, changes)


def check(directory: pathlib.Path, model: qwen_text.QwenText) -> None:
  """Refuses a directory whose tensors do not fit `model`; reads none."""
  hf_checkpoint.check(directory, model)


# --- pieces -------------------------------------------------------------------


def _config_of(
    directory: pathlib.Path,
    encoder: tokenizers.Tokenizer,
    changes: dict[str, Any],
) -> qwen_text_config.QwenTextConfig:
  config = hf_checkpoint.load_config(
      directory, banned_token_ids=_banned(encoder)
  )
  _check_vocabulary(config, encoder)
  return _changed(config, changes)


def _changed(
    config: qwen_text_config.QwenTextConfig, changes: dict[str, Any]
) -> qwen_text_config.QwenTextConfig:
  unknown = sorted(set(changes) - set(qwen_text_config.RUN_FIELDS))
  if unknown:
    raise ValueError(
        f"{unknown[0]!r} cannot be changed in a {config.family} text policy;"
        f" change one of: {', '.join(qwen_text_config.RUN_FIELDS)}"
    )
  return dataclasses.replace(config, **changes)


def _banned(encoder: tokenizers.Tokenizer) -> tuple[int, ...]:
  """Placeholders that the tokenizer has: without an image they mean nothing."""
  ids = (encoder.token_to_id(token) for token in _PLACEHOLDERS)
  return tuple(token for token in ids if token is not None)


def _check_vocabulary(
    config: qwen_text_config.QwenTextConfig, encoder: tokenizers.Tokenizer
) -> None:
  if encoder.get_vocab_size() > config.vocab_size:
    raise ValueError(
        f"the tokenizer has {encoder.get_vocab_size()} tokens, the model's"
        f" vocabulary {config.vocab_size}; give the model's own tokenizer"
    )


def _fresh(
    config: qwen_text_config.QwenTextConfig,
    name: str,
    encoder: tokenizers.Tokenizer,
    seed: int,
    mesh: jax.sharding.Mesh | None,
) -> Loaded:
  model = qwen_checkpoint.random_model(config, seed, mesh)
  return model, text_inputs.TextProcessor(name), encoder
