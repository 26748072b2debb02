"""A policy directory: config.json, model.safetensors, tokenizer files.

Loading is strict: a missing, extra or misshapen tensor is an error that names
it. With a mesh each tensor goes straight to its shards.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from safetensors import numpy as safetensors_numpy
import tokenizers
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy import tiny_vl
from tunix.rl.multi_turn.policy import vision_inputs

DATA = pathlib.Path(__file__).parent / "data"
MODEL_TYPE = "tunix_tiny_vl"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)

Loaded = tuple[
    tiny_vl.TinyVL, vision_inputs.TinyVLProcessor, tokenizers.Tokenizer
]


def create_policy(
    size: str = "tiny",
    seed: int = 0,
    tokenizer: str | pathlib.Path = "tiny_vl",
    mesh: jax.sharding.Mesh | None = None,
    **changes: Any,
) -> Loaded:
  """A policy with fresh weights.

  Args:
    size: a key of `tiny_vl.SIZES`.
    seed: of the weights.
    tokenizer: a directory with the tokenizer's files, or a shipped name.
    mesh: where to put the weights; None is the default device.
    **changes: config fields that differ from the size's.

  Returns:
    (model, processor, tokenizer).
  """
  encoder = load_tokenizer(tokenizer)
  config = tiny_vl.config_for(encoder, size, **changes)
  model = tiny_vl.TinyVL(config, nnx.Rngs(seed))
  if mesh is not None:
    sharding.shard_model(model, mesh)
  return model, vision_inputs.TinyVLProcessor(config.max_cells), encoder


def load_policy(
    path: str | pathlib.Path,
    mesh: jax.sharding.Mesh | None = None,
    **changes: Any,
) -> Loaded:
  """Loads a policy directory or a shipped policy by name ("tiny_vl").

  Args:
    path: directory, or name.
    mesh: where to put the weights; None is the default device.
    **changes: config fields to override (compute_dtype, vision_window).

  Returns:
    (model, processor, tokenizer).

  Raises:
    FileNotFoundError: the directory or a file of it is missing.
    ValueError: a tensor is missing, extra or has the wrong shape.
  """
  directory = resolve(path)
  config = load_config(directory, **changes)
  weights = _file(directory, "model.safetensors")
  tensors = safetensors_numpy.load_file(weights)
  model = nnx.eval_shape(lambda: tiny_vl.TinyVL(config, nnx.Rngs(0)))
  _fill(model, tensors, mesh, str(weights))
  processor = vision_inputs.TinyVLProcessor(config.max_cells)
  return model, processor, load_tokenizer(directory)


def save_policy(
    path: str | pathlib.Path,
    model: tiny_vl.TinyVL,
    tokenizer: str | pathlib.Path = "tiny_vl",
    dtype: str = "float32",
) -> pathlib.Path:
  """Writes a policy directory.

  Args:
    path: directory, made if absent; its policy files are replaced.
    model: fully addressable weights.
    tokenizer: directory or shipped name whose tokenizer files are copied.
    dtype: "float32" or "float16", of the stored tensors.

  Returns:
    The directory.
  """
  if dtype not in ("float32", "float16"):
    raise ValueError(f"dtype must be 'float32' or 'float16', got {dtype!r}")
  directory = pathlib.Path(path)
  directory.mkdir(parents=True, exist_ok=True)
  source = resolve(tokenizer)
  if source.resolve() != directory.resolve():
    for name in TOKENIZER_FILES:
      shutil.copyfile(_file(source, name), directory / name)
  config = {"model_type": MODEL_TYPE, **dataclasses.asdict(model.config)}
  (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
  tensors = {
      name: np.asarray(value, dtype)
      for name, value in named_parameters(model).items()
  }
  partial = directory / "model.safetensors.part"
  safetensors_numpy.save_file(tensors, partial)
  partial.replace(directory / "model.safetensors")
  return directory


def load_config(
    path: str | pathlib.Path, **changes: Any
) -> tiny_vl.TinyVLConfig:
  """The config of a policy directory, with `changes` applied."""
  file = _file(resolve(path), "config.json")
  raw = json.loads(file.read_text())
  if raw.pop("model_type", None) != MODEL_TYPE:
    raise ValueError(f"{file} is not the config of a {MODEL_TYPE} policy")
  known = {f.name for f in dataclasses.fields(tiny_vl.TinyVLConfig)}
  unknown = sorted((set(raw) | set(changes)) - known)
  if unknown:
    raise ValueError(f"unknown config field {unknown[0]!r} for {file}")
  return tiny_vl.TinyVLConfig(**(raw | changes))


def load_tokenizer(path: str | pathlib.Path) -> tokenizers.Tokenizer:
  """The tokenizer of a policy directory or shipped name."""
  return tokenizers.Tokenizer.from_file(
      str(_file(resolve(path), "tokenizer.json"))
  )


def resolve(path: str | pathlib.Path) -> pathlib.Path:
  """The directory that `path`, a directory or a shipped name, stands for."""
  directory = pathlib.Path(path).expanduser()
  if directory.is_dir():
    return directory
  if (DATA / str(path)).is_dir():
    return DATA / str(path)
  shipped = sorted(p.name for p in DATA.iterdir() if p.is_dir())
  raise FileNotFoundError(
      f"{str(path)!r} is neither a policy directory nor one of the shipped"
      f" policies {shipped}"
  )


def named_parameters(model: nnx.Module) -> dict[str, jax.Array]:
  """Parameter name ("blocks.0.q") to array."""
  return {
      ".".join(map(str, path)): variable[...]
      for path, variable in _parameters(model)
  }


def _parameters(model: nnx.Module):
  state = nnx.state(model, nnx.Param)
  return sorted(
      nnx.to_flat_state(state), key=lambda item: tuple(map(str, item[0]))
  )


def _fill(
    model: nnx.Module,
    tensors: dict[str, np.ndarray],
    mesh: jax.sharding.Mesh | None,
    source: str,
) -> None:
  """Replaces the abstract parameters of `model`, strictly."""
  parameters = {
      ".".join(map(str, path)): (path, v) for path, v in _parameters(model)
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
    value = tensors[name].astype(np.float32)
    if mesh is None:
      value = jnp.asarray(value)
    else:
      value = jax.device_put(
          value, sharding.parameter_sharding(variable, mesh)
      )
    filled.append((path, variable.replace(value)))
  nnx.update(model, nnx.from_flat_state(filled))


def _file(directory: pathlib.Path, name: str) -> pathlib.Path:
  file = directory / name
  if not file.is_file():
    raise FileNotFoundError(f"{directory} has no {name}")
  return file
