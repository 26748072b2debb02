"""Checkpoints as `transformers` writes and reads them.

A directory with `config.json`, one or several safetensors files and the
tokenizer's files. A parameter's path is its key in the file, but for prefixes
that differ between families and versions, and for matrices, which the files
hold transposed.

Promises: each device reads its own slice of each tensor, and no tensor is ever
whole in host memory unless a device needs it whole; a missing, extra or
misshapen tensor is an error that names it; what was loaded and saved again in
the same dtype is equal to the bit. Does not know optimizers (see
`learner.checkpoint`) or adapters (see `lora`).
"""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any, Iterator, Mapping, Sequence

from flax import nnx
import jax
import ml_dtypes
import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy
from tunix.rl.multi_turn.policy import qwen_config
from tunix.rl.multi_turn.policy import qwen_vl
from tunix.rl.multi_turn.policy import sharding

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = ("float32", "bfloat16", "float16")
MAX_FILE_BYTES = 5 << 30

# What belongs to a checkpoint besides weights; copied as it is.
_COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "chat_template.json", "special_tokens_map.json",
    "added_tokens.json", "preprocessor_config.json", "generation_config.json",
    "video_preprocessor_config.json", "processor_config.json",
)  # pyformat: disable

# Other spellings of a key, for reading: of Qwen2.5-VL before transformers
# 4.52, which is what the published files hold.
_OLD_PREFIXES = (
    ("model.language_model.", "model."),
    ("model.visual.", "visual."),
)


# --- names -----------------------------------------------------------------


class Tensor:
  """One parameter of the model and where the checkpoint has it.

  Attributes:
    path: of the parameter in the module.
    keys: in the file; several for stacked layers, in their order.
    shape: in the file, of each key.
    transposed: the last two axes are swapped in the module.
    either_way: experts' matrices, which transformers 5 holds the other way
      round than the published files; both are read, the published written.
  """

  def __init__(self, path: tuple[Any, ...], variable: nnx.Variable):
    metadata = variable.get_metadata()
    self.path = path
    self.variable = variable
    self.transposed = bool(metadata.get("transposed"))
    self.either_way = "experts" in path
    self.stacked = bool(metadata.get("stacked"))
    shape = tuple(variable.shape)
    names = [str(part) for part in path]
    prefix = "" if names[0] == "lm_head" else "model."
    if self.stacked:
      at = names.index("layers") + 1
      self.keys = tuple(
          prefix + ".".join([*names[:at], str(i), *names[at:]])
          for i in range(shape[0])
      )
      shape = shape[1:]
    else:
      self.keys = (prefix + ".".join(names),)
    if self.transposed:
      shape = (*shape[:-2], shape[-1], shape[-2])
    self.shape = shape


def tensors_of(model: nnx.Module) -> list[Tensor]:
  """Every parameter of a published checkpoint; adapters are left out."""
  flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
  found = [
      Tensor(path, variable)
      for path, variable in flat
      if not str(path[-1]).startswith("lora_")
  ]
  return sorted(found, key=lambda tensor: tensor.keys)


class _Files:
  """The tensors of a directory, read slice by slice."""

  def __init__(self, directory: pathlib.Path):
    self.directory = directory
    index = directory / INDEX
    if index.is_file():
      listed = json.loads(index.read_text())["weight_map"]
      names = sorted(set(listed.values()))
    elif (directory / SINGLE).is_file():
      names = [SINGLE]
    else:
      raise FileNotFoundError(
          f"{directory} has neither {SINGLE} nor {INDEX}; give the directory"
          " of a checkpoint in safetensors format"
      )
    self._open = {}
    for name in names:
      if not (directory / name).is_file():
        raise FileNotFoundError(
            f"{directory} lacks {name}, which {INDEX} lists"
        )
      file = safetensors.safe_open(str(directory / name), "numpy")
      for key in file.keys():
        self._open[key] = file

  @property
  def keys(self) -> set[str]:
    return set(self._open)

  def shape(self, key: str) -> tuple[int, ...]:
    return tuple(self._open[key].get_slice(key).get_shape())

  def dtype(self, key: str) -> str:
    return self._open[key].get_slice(key).get_dtype()

  def read(self, key: str, index: tuple[slice, ...] = ()) -> np.ndarray:
    part = self._open[key].get_slice(key)
    return part[index or ...]


def _resolve_keys(
    tensors: Sequence[Tensor], files: _Files, tied: bool
) -> dict[str, str]:
  """Our key -> the file's, strictly.

  Raises:
    ValueError: naming the tensors that are missing, extra or misshapen.
  """
  there = files.keys
  names: dict[str, str] = {}
  problems = []
  missing = []
  for tensor in tensors:
    for key in tensor.keys:
      spelled = [key]
      for new, old in _OLD_PREFIXES:
        if key.startswith(new):
          spelled.append(old + key[len(new) :])
      found = next((k for k in spelled if k in there), None)
      if found is None:
        missing.append(key)
        continue
      names[key] = found
      shape = files.shape(found)
      swapped = (*tensor.shape[:-2], *reversed(tensor.shape[-2:]))
      if tensor.either_way and shape == swapped != tensor.shape:
        tensor.transposed = True
        continue
      if shape != tensor.shape:
        problems.append(
            f"tensor {found} has shape {list(shape)}, config.json needs"
            f" {list(tensor.shape)}"
        )
  extra = sorted(there - set(names.values()))
  if tied:  # Some exporters write the tied matrix twice.
    extra = [key for key in extra if key != "lm_head.weight"]
  for what, keys in (("missing", missing), ("unexpected", extra)):
    if keys:
      more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
      problems.append(f"{what} tensors {', '.join(keys[:5])}{more}")
  if problems:
    raise ValueError(
        f"{files.directory} does not fit its config.json: "
        + "; ".join(problems[:5])
    )
  return names


# --- loading ---------------------------------------------------------------


def load_model(
    directory: str | pathlib.Path,
    mesh: jax.sharding.Mesh | None = None,
    **changes: Any,
) -> qwen_vl.QwenVL:
  """A policy with the weights of a checkpoint directory.

  Args:
    directory: with config.json and safetensors files.
    mesh: where the weights lie; None is the default device.
    **changes: run-time fields of `QwenVLConfig`: compute_dtype, param_dtype,
      remat, ….

  Raises:
    FileNotFoundError: the directory or a file of it is missing.
    ValueError: another architecture, or tensors that do not fit.
  """
  directory = pathlib.Path(directory).expanduser()
  config = load_config(directory, **changes)
  model = abstract_model(config, mesh)
  tensors = tensors_of(model)
  files = _Files(directory)
  names = _resolve_keys(tensors, files, config.tie_word_embeddings)
  filled = []
  for tensor in tensors:
    place = (
        jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        if mesh is None
        else sharding.parameter_sharding(tensor.variable, mesh)
    )
    value = _read_sharded(tensor, files, names, place, config.param_dtype)
    filled.append((tensor.path, tensor.variable.replace(value)))
  nnx.update(model, nnx.from_flat_state(filled))
  return model


def check(directory: str | pathlib.Path, model: qwen_vl.QwenVL) -> None:
  """Whether a directory's tensors fit `model`; reads none of them.

  Raises:
    FileNotFoundError: a file is missing.
    ValueError: naming the tensors that do not fit.
  """
  files = _Files(pathlib.Path(directory).expanduser())
  _resolve_keys(tensors_of(model), files, model.config.tie_word_embeddings)


def abstract_model(
    config: qwen_config.QwenVLConfig, mesh: jax.sharding.Mesh | None = None
) -> qwen_vl.QwenVL:
  """The policy with shapes in place of weights."""
  return nnx.eval_shape(lambda: qwen_vl.QwenVL(config, nnx.Rngs(0), mesh))


def load_config(
    directory: str | pathlib.Path, **changes: Any
) -> qwen_config.QwenVLConfig:
  """The configuration of a checkpoint directory."""
  file = pathlib.Path(directory).expanduser() / "config.json"
  if not file.is_file():
    raise FileNotFoundError(f"{file.parent} has no config.json")
  return qwen_config.from_hf(json.loads(file.read_text()), **changes)


def _read_sharded(
    tensor: Tensor,
    files: _Files,
    names: Mapping[str, str],
    place: jax.sharding.Sharding,
    dtype: str,
) -> jax.Array:
  """The parameter, each device's part read from the file by itself."""
  shape = tuple(tensor.variable.shape)
  target = np.dtype(getattr(ml_dtypes, dtype, dtype))
  # Copies of a part on several devices are read once.
  kept: dict[Any, np.ndarray] = {}

  def part(index: tuple[slice, ...]) -> np.ndarray:
    spans = tuple(s.indices(n)[:2] for s, n in zip(index, shape))
    if spans not in kept:
      kept.clear()
      kept[spans] = read(spans)
    return kept[spans]

  def read(spans) -> np.ndarray:
    layers = range(1)
    if tensor.stacked:
      layers, spans = range(*spans[0]), spans[1:]
    if tensor.transposed:
      spans = (*spans[:-2], spans[-1], spans[-2])
    where = tuple(slice(*span) for span in spans)
    found = []
    for i in layers:
      value = files.read(names[tensor.keys[i]], where).astype(target)
      found.append(value.swapaxes(-1, -2) if tensor.transposed else value)
    return np.stack(found) if tensor.stacked else found[0]

  return jax.make_array_from_callback(shape, place, part)


# --- saving ----------------------------------------------------------------


def save_model(
    directory: str | pathlib.Path,
    model: qwen_vl.QwenVL,
    source: str | pathlib.Path | None = None,
    dtype: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> pathlib.Path:
  """Writes a checkpoint that `transformers` loads.

  Args:
    directory: made if absent; weights and config.json in it are replaced.
    model: adapters must have been merged (`lora.merge`).
    source: directory whose config.json, tokenizer and processor files are
      copied; None writes a config.json of what the model knows.
    dtype: of the stored tensors; None = as the parameters are.
    max_file_bytes: larger models are split into several files and an index.

  Raises:
    ValueError: an unknown dtype, or an adapter that is not merged.
  """
  if dtype is not None and dtype not in DTYPES:
    raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
  flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
  if any(str(path[-1]).startswith("lora_") for path, _ in flat):
    raise ValueError(
        "the model has a LoRA adapter; merge it first (lora.merge) or save the"
        " adapter alone (lora.save)"
    )
  directory = pathlib.Path(directory).expanduser()
  directory.mkdir(parents=True, exist_ok=True)
  config = qwen_config.to_hf(model.config)
  if source is not None:
    source = pathlib.Path(source).expanduser()
    config = json.loads((source / "config.json").read_text())
    if source.resolve() != directory.resolve():
      for name in _COMPANIONS:
        if (source / name).is_file():
          shutil.copyfile(source / name, directory / name)
  stored = dtype or model.config.param_dtype
  config = {**config, "dtype": stored}
  config.pop("torch_dtype", None)
  _replace_text(directory / "config.json", json.dumps(config, indent=2) + "\n")

  sizes = {
      key: int(np.prod(t.shape)) * np.dtype(_numpy(stored)).itemsize
      for t in tensors_of(model)
      for key in t.keys
  }
  files = _split(sizes, max_file_bytes)
  old = {p.name for p in directory.glob("model*.safetensors")}
  values = _values(model, _numpy(stored))
  chunks: dict[str, dict[str, np.ndarray]] = {}
  left = {name: len(keys) for name, keys in files.items()}
  home = {key: name for name, keys in files.items() for key in keys}
  for key, value in values:
    chunks.setdefault(home[key], {})[key] = value
    left[home[key]] -= 1
    if not left[home[key]]:  # Complete: written and forgotten.
      name = home[key]
      partial = directory / f"{name}.part"
      safetensors_numpy.save_file(
          chunks.pop(name), partial, metadata={"format": "pt"}
      )
      partial.replace(directory / name)
  for name in old - set(files):
    (directory / name).unlink()
  index = directory / INDEX
  if len(files) > 1:
    listing = {
        "metadata": {"total_size": sum(sizes.values())},
        "weight_map": dict(sorted(home.items())),
    }
    _replace_text(index, json.dumps(listing, indent=2) + "\n")
  elif index.exists():
    index.unlink()
  return directory


def _values(
    model: qwen_vl.QwenVL, dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
  """(key, array as in the file), one tensor in memory at a time."""
  for tensor in tensors_of(model):
    array = tensor.variable[...]
    for i, key in enumerate(tensor.keys):
      value = np.asarray(jax.device_get(array[i] if tensor.stacked else array))
      if tensor.transposed:
        value = value.swapaxes(-1, -2)
      yield key, np.ascontiguousarray(value.astype(dtype))


def _split(sizes: Mapping[str, int], most: int) -> dict[str, list[str]]:
  """File name -> keys, in order, none above `most` bytes if it can be."""
  groups: list[list[str]] = [[]]
  used = 0
  for key, size in sizes.items():
    if groups[-1] and used + size > most:
      groups.append([])
      used = 0
    groups[-1].append(key)
    used += size
  if len(groups) == 1:
    return {SINGLE: groups[0]}
  total = len(groups)
  return {
      f"model-{i:05d}-of-{total:05d}.safetensors": keys
      for i, keys in enumerate(groups, 1)
  }


def _numpy(dtype: str) -> np.dtype:
  return np.dtype(getattr(ml_dtypes, dtype, dtype))


def _replace_text(path: pathlib.Path, text: str) -> None:
  partial = path.with_name(path.name + ".part")
  partial.write_text(text, encoding="utf-8")
  partial.replace(path)
