"""Creates, loads and saves policies of every architecture.

The rest of the project gets a model here, with the host side and the tokenizer
that belong to it. `model_type` in a directory's config.json names its
architecture: TinyVL, or a published family of `qwen_families`.

Loading is strict: a missing, extra or misshapen tensor is an error that names
it. With a mesh each tensor goes straight to its shards.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import tokenizers
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import random_keys
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.policy.checkpoints import tensor_files
from tunix.rl.multi_turn.policy.models.qwen import qwen_checkpoint
from tunix.rl.multi_turn.policy.models.qwen import qwen_config
from tunix.rl.multi_turn.policy.models.qwen import qwen_text
from tunix.rl.multi_turn.policy.models.tiny_vl import tiny_vl
from tunix.rl.multi_turn.policy.models.tiny_vl import tiny_vl_checkpoint

Loaded = tuple[Any, base.Processor, tokenizers.Tokenizer]
"""(model, processor, tokenizer); the model is a `base.Policy`."""

SMALL = (*qwen_checkpoint.SMALL, *qwen_checkpoint.SMALL_TEXT)
"""Published architectures at sizes for a CPU, by name."""

resolve = policy_files.resolve
load_tokenizer = policy_files.load_tokenizer
named_parameters = policy_files.named_parameters


def tokenizer_of(size: str) -> str:
  """Returns the shipped name of a size's tokenizer."""
  return size if size in qwen_checkpoint.SMALL_TILED else "tiny_vl"


def create_policy(
  size: str = "tiny",
  seed: int = 0,
  tokenizer: str | pathlib.Path = "",
  mesh: jax.sharding.Mesh | None = None,
  screen: tuple[int, int] | None = None,
  **changes: Any,
) -> Loaded:
  """Creates a policy with fresh weights.

  Args:
    size: A key of `tiny_vl.SIZES`, or of `SMALL`.
    seed: Seed of the weights.
    tokenizer: A directory with the tokenizer's files, or a shipped name; "" is
      that of the size.
    mesh: Mesh to put the weights on; None is the default device.
    screen: (width, height) of the largest screenshot, if known: refused where
      it has more patches than max_image_patches.
    **changes: config fields that differ from the size's.

  Raises:
    ValueError: no such size, or a field it does not have.
  """
  for family, sizes in (
    (tiny_vl_checkpoint, tiny_vl.SIZES),
    (qwen_checkpoint, SMALL),
  ):
    if size in sizes:
      tokenizer = tokenizer or tokenizer_of(size)
      return family.create(size, seed, tokenizer, mesh, screen, **changes)
  raise ValueError(
    f"no policy is called {size!r}; known:"
    f" {', '.join([*tiny_vl.SIZES, *SMALL])}"
  )


def create_like(
  path: str | pathlib.Path,
  seed: int = 0,
  mesh: jax.sharding.Mesh | None = None,
  screen: tuple[int, int] | None = None,
  **changes: Any,
) -> Loaded:
  """Creates a policy of a directory's architecture with fresh weights."""
  directory = resolve(path)
  return _family(directory).create_like(
    directory, seed, mesh, screen, **changes
  )


def load_policy(
  path: str | pathlib.Path,
  mesh: jax.sharding.Mesh | None = None,
  screen: tuple[int, int] | None = None,
  **changes: Any,
) -> Loaded:
  """Loads a policy directory or a shipped policy by name ("tiny_vl").

  Args:
    path: directory, or name.
    mesh: Mesh to put the weights on; None is the default device.
    screen: (width, height) of the largest screenshot, if known: refused where
      it has more patches than max_image_patches.
    **changes: config fields to override (compute_dtype, …).

  Raises:
    FileNotFoundError: the directory or a file of it is missing.
    ValueError: a tensor is missing, extra or has the wrong shape.
  """
  directory = resolve(path)
  return _family(directory).load(directory, mesh, screen, **changes)


def save_policy(
  path: str | pathlib.Path,
  model: Any,
  tokenizer: str | pathlib.Path = "",
  dtype: str = "float32",
  untied: bool = False,
) -> pathlib.Path:
  """Writes a policy directory.

  Args:
    path: directory, made if absent; its policy files are replaced.
    model: the policy.
    tokenizer: directory or shipped name whose tokenizer files are copied; "" is
      that of the small policies of the family.
    dtype: Type of the stored tensors: "float32", or "float16" (TinyVL), or
      "bfloat16" (Qwen).
    untied: writes a tied embedding twice, for readers that take the output
      matrix only under its own name. TinyVL has none.

  Returns:
    The directory.
  """
  directory = pathlib.Path(path)
  directory.mkdir(parents=True, exist_ok=True)
  family = base.optional(model.config, "family")
  tokenizer = tokenizer or tokenizer_of(f"{family}_tiny")
  if isinstance(model, qwen_text.QwenText):
    qwen_checkpoint.save(directory, model, tokenizer, dtype, untied)
  else:
    tiny_vl_checkpoint.save(directory, model, tokenizer, dtype)
  return directory


def load_config(path: str | pathlib.Path, **changes: Any) -> Any:
  """Returns the config of a policy directory, with `changes` applied."""
  directory = resolve(path)
  return _family(directory).load_config(directory, **changes)


def parameter_bytes(
  size_or_path: str | pathlib.Path, **changes: Any
) -> int | None:
  """Returns the bytes of a policy's parameters, without making or reading them.

  Args:
    size_or_path: a key of `tiny_vl.SIZES`, a directory or a shipped name.
    **changes: config fields that differ.

  Returns:
    The bytes of all devices together; None where only making it would tell.

  Raises:
    ValueError, OSError: no such policy, or fields that it does not have.
  """
  if size_or_path in tiny_vl.SIZES:
    encoder = load_tokenizer("tiny_vl")
    config = tiny_vl.config_for(encoder, str(size_or_path), **changes)
    model = nnx.eval_shape(lambda: tiny_vl.TinyVL(config, random_keys.Keys()))
    return sum(
      math.prod(variable.shape) * jnp.dtype(variable.dtype).itemsize
      for _, variable in policy_files.parameters(model)
    )
  if size_or_path in SMALL:
    return None  # A few megabytes.
  directory = resolve(size_or_path)
  config = load_config(directory, **changes)
  wide = jnp.dtype(base.optional(config, "param_dtype")).itemsize
  shapes = tensor_files.Reader(directory).shapes
  return wide * sum(map(math.prod, shapes.values()))


def check(path: str | pathlib.Path, model: Any, **changes: Any) -> None:
  """Refuses weights that cannot take the place of `model`'s; reads none.

  Raises:
    FileNotFoundError: the directory or a file of it is missing.
    ValueError: they are of another architecture; names the difference.
  """
  directory = resolve(path)
  family = _family(directory)
  stored = family.load_config(directory, **changes)
  load_tokenizer(directory)
  old, new = dataclasses.asdict(stored), dataclasses.asdict(model.config)
  differing = [
    name
    for name in {**old, **new}
    if name not in (*qwen_config.RUN_FIELDS, "banned_token_ids")
    and old.get(name) != new.get(name)
  ]
  if differing:
    name = differing[0]
    raise ValueError(
      f"weights of another architecture ({name} is"
      f" {old.get(name, 'absent')} there, {new.get(name, 'absent')} here)"
    )
  family.check(directory, model)


def _family(directory: pathlib.Path) -> Any:
  if policy_files.family_of(directory) == policy_files.TINY:
    return tiny_vl_checkpoint
  return qwen_checkpoint
