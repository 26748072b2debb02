"""Creates, loads and saves TinyVL policies and their directories.

A directory holds config.json, model.safetensors and the tokenizer's files.

Loading is strict: a missing, extra or misshapen tensor is an error that names
it. With a mesh each tensor goes straight to its shards.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from tunix.rl.multi_turn.core import arguments
from tunix.rl.multi_turn.core import durable
from tunix.rl.multi_turn.policy import random_keys
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.policy.checkpoints import tensor_files
from tunix.rl.multi_turn.policy.models.tiny_vl import tiny_vl
from tunix.rl.multi_turn.policy.models.tiny_vl import vision_inputs

MODEL_TYPE = policy_files.TINY
Loaded = tuple[
  tiny_vl.TinyVL, vision_inputs.TinyVLProcessor, tokenizers.Tokenizer
]


def create(
  size: str = "tiny",
  seed: int = 0,
  tokenizer: str | pathlib.Path = "tiny_vl",
  mesh: jax.sharding.Mesh | None = None,
  screen: tuple[int, int] | None = None,
  **changes: Any,
) -> Loaded:
  """Returns a policy with fresh weights; see `checkpoint.create_policy`."""
  del screen  # Attention within an image has a fixed reach here.
  encoder = policy_files.load_tokenizer(tokenizer)
  config = tiny_vl.config_for(encoder, size, **changes)
  model = tiny_vl.TinyVL(config, random_keys.Keys(seed))
  if mesh is not None:
    sharding.shard_model(model, mesh)
  return model, vision_inputs.TinyVLProcessor(config.max_cells), encoder


def create_like(
  directory: pathlib.Path,
  seed: int,
  mesh: jax.sharding.Mesh | None = None,
  screen: tuple[int, int] | None = None,
  **changes: Any,
) -> Loaded:
  """Returns a policy of a directory's sizes with fresh weights."""
  fields = dataclasses.asdict(load_config(directory)) | changes
  for name in ("vocab_size", "number_start"):  # Decided by the tokenizer.
    fields.pop(name)
  return create("tiny", seed, directory, mesh, screen, **fields)


def load(
  directory: pathlib.Path,
  mesh: jax.sharding.Mesh | None = None,
  screen: tuple[int, int] | None = None,
  **changes: Any,
) -> Loaded:
  """Returns the policy of a directory; see `checkpoint.load_policy`."""
  del screen
  config = load_config(directory, **changes)
  weights = policy_files.file_of(directory, "model.safetensors")
  with tensor_files.opened(weights) as file:
    tensors = {key: file.get_tensor(key) for key in file.keys()}
  model = nnx.eval_shape(lambda: tiny_vl.TinyVL(config, random_keys.Keys()))
  _fill(model, tensors, mesh, str(weights))
  processor = vision_inputs.TinyVLProcessor(config.max_cells)
  return model, processor, policy_files.load_tokenizer(directory)


def save(
  directory: pathlib.Path,
  model: tiny_vl.TinyVL,
  tokenizer: str | pathlib.Path = "tiny_vl",
  dtype: str = "float32",
) -> None:
  """Writes a policy directory; see `checkpoint.save_policy`."""
  if dtype not in ("float32", "float16"):
    raise ValueError(f"dtype must be 'float32' or 'float16', got {dtype!r}")
  policy_files.copy_tokenizer(tokenizer, directory)
  tensors = {
    name: np.asarray(value, dtype)
    for name, value in policy_files.named_parameters(model).items()
  }
  tensor_files.save(directory / "model.safetensors", tensors)
  config = {"model_type": MODEL_TYPE, **dataclasses.asdict(model.config)}
  # Last: a directory with a config.json has its weights.
  durable.write_bytes(
    directory / "config.json", tensor_files.json_bytes(config)
  )


def load_config(
  directory: pathlib.Path, **changes: Any
) -> tiny_vl.TinyVLConfig:
  """Returns the config of a policy directory, with `changes` applied."""
  file = policy_files.file_of(directory, "config.json")
  raw = tensor_files.read_json(file)
  if raw.pop("model_type", None) != MODEL_TYPE:
    raise ValueError(f"{file} is not the config of a {MODEL_TYPE} policy")
  takes = arguments.takes(tiny_vl.TinyVLConfig)
  for _, text in takes.wrong(changes, "TinyVL"):
    raise ValueError(text)
  for _, text in takes.wrong(raw, "TinyVL"):
    raise ValueError(f"{file}: {text}")
  return tiny_vl.TinyVLConfig(**(raw | changes))


def check(directory: pathlib.Path, model: tiny_vl.TinyVL) -> None:
  """Refuses a directory whose tensors do not fit `model`; reads none.

  Raises:
    ValueError: naming the first tensor that differs.
  """
  weights = policy_files.file_of(directory, "model.safetensors")
  if difference := policy_files.misfit(weights, model):
    raise ValueError(f"weights of another architecture ({difference})")


def _fill(
  model: nnx.Module,
  tensors: dict[str, np.ndarray],
  mesh: jax.sharding.Mesh | None,
  source: str,
) -> None:
  """Replaces the abstract parameters of `model`, strictly."""
  parameters = {
    ".".join(map(str, path)): (path, v)
    for path, v in policy_files.parameters(model)
  }
  missing = sorted(set(parameters) - set(tensors))
  extra = sorted(set(tensors) - set(parameters))
  if missing or extra:
    raise ValueError(
      f"{source} does not fit the config: missing tensors {missing[:5]},"
      f" unexpected tensors {extra[:5]}"
    )
  for name, (_, variable) in parameters.items():
    if tensors[name].shape != variable.shape:
      raise ValueError(
        f"{source}: tensor {name!r} has shape {tensors[name].shape}, the"
        f" config needs {variable.shape}"
      )
  filled = []
  for name, (path, variable) in parameters.items():
    value: Any = tensors[name].astype(np.float32)
    if mesh is None:
      value = jnp.asarray(value)
    else:
      value = sharding.put(value, sharding.parameter_sharding(variable, mesh))
    filled.append((path, variable.replace(value)))
  nnx.update(model, nnx.from_flat_state(filled))
