"""Loads and saves checkpoints in the format of `transformers`.

A checkpoint is a directory with `config.json`, one or several safetensors files
and the tokenizer's files. A parameter's path is its key in the file, but for
prefixes that differ between families and versions, and for matrices, which the
files hold transposed.

Promises: each device reads its own slice of each tensor, and host memory holds
one device's slice at a time (beside pages of the mapped file, which are
released with it); saving holds one tensor. A missing, extra or misshapen
tensor is an error that names it. Weights loaded and saved again in the same
dtype are equal to the bit. Until all of a new checkpoint is written the one
that it replaces stays unchanged; several files are then renamed one by one,
which is not atomic.

Does not: know optimizers (see `learner.checkpoint`) or adapters (see
`lora_files`), or save a model whose devices belong to several processes.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
from typing import Any, Mapping, Sequence

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.policy import int8
from tunix.rl.multi_turn.policy import random_keys
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.checkpoints import checkpoint_names
from tunix.rl.multi_turn.policy.checkpoints import checkpoint_views
from tunix.rl.multi_turn.policy.checkpoints import image_settings
from tunix.rl.multi_turn.policy.checkpoints import policy_files
from tunix.rl.multi_turn.policy.checkpoints import tensor_files
from tunix.rl.multi_turn.policy.models.gemma3 import gemma3
from tunix.rl.multi_turn.policy.models.qwen import qwen_config
from tunix.rl.multi_turn.policy.models.qwen import qwen_text
from tunix.rl.multi_turn.policy.models.qwen import qwen_text_config
from tunix.rl.multi_turn.policy.models.qwen import qwen_vl

INDEX, SINGLE = tensor_files.INDEX, tensor_files.SINGLE
DTYPES = tuple(tensor_files.DTYPES)
"""Types of stored tensors."""
MAX_FILE_BYTES = 5 << 30

# Files of a checkpoint besides weights; copied unchanged.
_COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "chat_template.json", "special_tokens_map.json",
    "added_tokens.json", "preprocessor_config.json", "generation_config.json",
    "video_preprocessor_config.json", "processor_config.json",
    # OpenCUA's classes, which its config.json names, and their tokenizer.
    "tiktoken.model", "configuration_opencua.py", "modeling_opencua.py",
    "processing_opencua.py", "tokenization_opencua.py",
)  # fmt: skip

# Qwen3.5's head that drafts several tokens: neither trained nor saved.
_DRAFT = "mtp."

Tensor = checkpoint_names.Tensor
tensors_of = checkpoint_names.tensors_of
spellings = checkpoint_names.spellings

_WEIGHT_FILE = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.part)?")


# --- loading ---------------------------------------------------------------


def _resolve_keys(
  tensors: Sequence[Tensor],
  files: checkpoint_views.Tensors,
  config: qwen_text_config.AnyConfig,
) -> dict[str, str]:
  """Our key -> the file's, strictly; turns experts as the files have them.

  Raises:
    ValueError: naming the tensors that are missing, extra or misshapen.
  """
  names: dict[str, str] = {}
  missing = []
  for tensor in tensors:
    for key in tensor.keys:
      name = next((k for k in spellings(key) if k in files.shapes), None)
      if name is None:
        missing.append(key)
      else:
        names[key] = name
  problems = []
  _orient(tensors, files, names)
  for tensor in tensors:
    for key in tensor.keys:
      name = names.get(key)
      if name is None:
        continue
      if files.shapes[name] != tensor.shape:
        problems.append(
          f"tensor {name} has shape {list(files.shapes[name])}, config.json"
          f" needs {list(tensor.shape)}"
        )
      if files.dtypes[name] not in tensor_files.READABLE:
        problems.append(
          f"tensor {name} has dtype {files.dtypes[name]}, only"
          f" {', '.join(tensor_files.READABLE)} can be read; dequantize a"
          " quantized checkpoint first"
        )
  extra = sorted(files.shapes.keys() - set(names.values()))
  if config.tie_word_embeddings:  # Some exporters write the matrix twice.
    extra = [key for key in extra if not key.endswith("lm_head.weight")]
  if config.traits.linear:
    extra = [key for key in extra if not key.startswith(_DRAFT)]
  counted = []
  for problem, keys in (("missing", missing), ("unexpected", extra)):
    if keys:
      more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
      counted.append(f"{problem} tensors {', '.join(keys[:5])}{more}")
  if problems or counted:
    raise ValueError(
      f"{files.directory} does not fit its config.json: "
      + "; ".join([*counted, *problems[:5]])
      + "; config.json and safetensors files must be of one checkpoint"
    )
  return names


def _orient(
  tensors: Sequence[Tensor],
  files: checkpoint_views.Tensors,
  names: Mapping[str, str],
) -> None:
  """Sets which way round the files hold the experts' matrices.

  The published files hold [experts, in, out], as the module; transformers 5
  saves [experts, out, in]. A square matrix does not reveal its layout, but
  never are both matrices of an expert square, and a checkpoint has one layout.
  """
  experts = [t for t in tensors if t.either_way]
  for tensor in experts:
    name = names.get(tensor.keys[0])
    if name is None or tensor.square:
      continue
    swapped = (*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2])
    if files.shapes[name] == swapped:
      for other in experts:
        other.transposed = True
    return


def load_model(
  directory: str | pathlib.Path,
  mesh: jax.sharding.Mesh | None = None,
  **changes: Any,
) -> qwen_text.QwenText:
  """Returns a policy with the weights of a checkpoint directory.

  Args:
    directory: Directory with config.json and safetensors files.
    mesh: Mesh that the weights lie on; None is the default device.
    **changes: run-time fields of the config: compute_dtype, param_dtype,
      remat, ….

  Raises:
    FileNotFoundError: the directory or a file of it is missing.
    ValueError: another architecture, tensors that do not fit, a damaged file.
  """
  directory = pathlib.Path(directory).expanduser()
  config = load_config(directory, **changes)
  model = abstract_model(config, mesh)
  tensors = tensors_of(model)
  files = _files(directory)
  names = _resolve_keys(tensors, files, config)
  filled = []
  for tensor in tensors:
    value = _read_placed(tensor, files, names, mesh)
    filled.append((tensor.path, tensor.variable.replace(value)))
  nnx.update(model, nnx.from_flat_state(filled))
  return model


def check(directory: str | pathlib.Path, model: qwen_text.QwenText) -> None:
  """Whether a directory's tensors fit `model`; reads none of them.

  Raises:
    FileNotFoundError: a file is missing.
    ValueError: naming the tensors that do not fit.
  """
  files = _files(pathlib.Path(directory).expanduser())
  _resolve_keys(tensors_of(model), files, model.config)


def _files(directory: pathlib.Path) -> checkpoint_views.Tensors:
  return checkpoint_views.views_of(tensor_files.Reader(directory))


def model_class(config: qwen_text_config.AnyConfig) -> type:
  """Returns the policy class of a config."""
  if isinstance(config, qwen_text_config.QwenTextConfig):
    return gemma3.Gemma3Text if config.traits.windows else qwen_text.QwenText
  return gemma3.Gemma3 if config.traits.windows else qwen_vl.QwenVL


def abstract_model(
  config: qwen_text_config.AnyConfig, mesh: jax.sharding.Mesh | None = None
) -> qwen_text.QwenText:
  """Returns the policy with shapes in place of weights."""
  kind = model_class(config)
  return nnx.eval_shape(lambda: kind(config, random_keys.Keys(), mesh))


def load_config(
  directory: str | pathlib.Path, **changes: Any
) -> qwen_text_config.AnyConfig:
  """Returns the configuration of a checkpoint directory.

  Raises:
    FileNotFoundError: no config.json.
    ValueError: another architecture, or one that would be computed wrongly.
  """
  file = pathlib.Path(directory).expanduser() / "config.json"
  if not file.is_file():
    raise FileNotFoundError(
      f"{file.parent} has no config.json; give the directory of a whole"
      " checkpoint"
    )
  raw = tensor_files.read_json(file)
  family = raw.get("model_type")
  if family in qwen_text_config.FAMILIES:
    return qwen_text_config.from_hf(raw, **changes)
  if family in qwen_config.FAMILIES:
    config = qwen_config.from_hf(raw, **changes)
    images = image_settings.read(file.parent, family)
    return _with_statistics(config, images)
  raise ValueError(
    f"{file} holds model_type={family!r}; give a checkpoint of one of"
    f" {', '.join((*qwen_config.FAMILIES, *qwen_text_config.FAMILIES))}"
  )


def _with_statistics(
  config: qwen_config.QwenVLConfig, images: image_settings.ImageSettings | None
) -> qwen_config.QwenVLConfig:
  """Returns the config with the mean and deviation of its images."""
  if images is None:
    return config
  vision = config.vision
  side = round(vision.num_position_embeddings**0.5) * vision.patch_size
  image_settings.check_model(
    images,
    vision.patch_size,
    vision.spatial_merge_size,
    vision.tile_size or side,
  )
  statistics: dict[str, Any] = {
    name: tuple(float(v) for v in images.values[name])
    for name in ("image_mean", "image_std")
  }
  return dataclasses.replace(
    config, vision=dataclasses.replace(vision, **statistics)
  )


def _read_placed(
  tensor: Tensor,
  files: checkpoint_views.Tensors,
  names: Mapping[str, str],
  mesh: jax.sharding.Mesh | None,
) -> jax.Array:
  """Returns the parameter on its devices; one part at a time in host memory."""
  shape = tuple(tensor.variable.shape)
  read = functools.partial(
    _read_part, tensor, files, names, np.dtype(tensor.variable.dtype)
  )
  if mesh is None:  # Left uncommitted, as a fresh model's parameters are.
    return jax.device_put(read([(0, n) for n in shape]))
  place: Any = sharding.parameter_sharding(tensor.variable, mesh)
  # Copies of a part on several devices are read once.
  users: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
  for device, index in place.addressable_devices_indices_map(shape).items():
    spans = tuple(s.indices(n)[:2] for s, n in zip(index, shape))
    users.setdefault(spans, []).append(device)
  arrays = []
  for spans, devices in users.items():
    part = read(spans)
    copies = [jax.device_put(part, device) for device in devices]
    # Else parts would wait in host memory for their transfer.
    arrays += jax.block_until_ready(copies)
  return jax.make_array_from_single_device_arrays(shape, place, arrays)


def _read_part(
  tensor: Tensor,
  files: checkpoint_views.Tensors,
  names: Mapping[str, str],
  dtype: np.dtype,
  spans: Sequence[tuple[int, int]],
) -> np.ndarray:
  """Returns the part of a parameter between the spans of its axes.

  A transposed one is a view: the transfer to the device turns it, which is
  several times faster than numpy.
  """
  layers = range(*spans[0]) if tensor.stacked else range(1)
  where = [slice(*span) for span in spans[int(tensor.stacked) :]]
  if tensor.transposed:
    where[-2:] = where[:-3:-1]
  read = lambda i: files.read(names[tensor.keys[i]], tuple(where))
  if tensor.stacked:
    size = tuple(s.stop - s.start for s in where)
    part = np.empty((len(layers), *size), dtype)
    for row, i in zip(part, layers):
      row[...] = read(i)
  else:
    part = read(0).astype(dtype, copy=False)
  return part.swapaxes(-1, -2) if tensor.transposed else part


# --- saving ----------------------------------------------------------------


def save_model(
  directory: str | pathlib.Path,
  model: qwen_text.QwenText,
  source: str | pathlib.Path | None = None,
  dtype: str | None = None,
  max_file_bytes: int = MAX_FILE_BYTES,
  untied: bool = False,
) -> pathlib.Path:
  """Writes a checkpoint that `transformers` loads.

  Until everything is written, into files called `*.part`, an older checkpoint
  in the directory stays unchanged.

  Args:
    directory: made if absent; weights and config.json in it are replaced.
    model: on one device or on a mesh; adapters must have been merged
      (`lora.merge`).
    source: directory whose config.json, tokenizer and processor files are
      copied; None writes a config.json from the model's configuration.
    dtype: Type of the stored tensors; None = that of the parameters.
    max_file_bytes: larger models are split into several files and an index.
    untied: writes a tied embedding a second time, as the output matrix, and
      says in config.json that the two are not tied.

  Raises:
    ValueError: an unknown dtype, an adapter that is not merged, or the config
      of another model.
  """
  int8.refuse(model)
  stored = dtype or model.config.param_dtype
  if stored not in DTYPES:
    raise ValueError(
      f"dtype must be one of {', '.join(DTYPES)}, got {stored!r}"
    )
  flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
  if any(str(path[-1]).startswith("lora_") for path, _ in flat):
    raise ValueError(
      "the model has a LoRA adapter; merge it first (lora.merge) or save the"
      " adapter alone (lora_files.save)"
    )
  directory = pathlib.Path(directory).expanduser()
  config = _config_json(model, source, stored)
  directory.mkdir(parents=True, exist_ok=True)
  tensors = tensors_of(model)
  experts = [t for t in tensors if t.either_way]
  traits = model.config.traits
  if any(t.square for t in experts) or traits.linear or traits.experts_apart:
    # transformers 5 reads an ambiguous tensor as its own layout, in which
    # Qwen3.5 is published; so are experts one by one.
    for tensor in experts:
      tensor.transposed = True
  # By key, so that stacked layers are written as a list of them is.
  where = checkpoint_names.pieces_of(tensors, traits.experts_apart)
  if untied and model.config.tie_word_embeddings:
    embedding = next(k for k in where if k.endswith("embed_tokens.weight"))
    where[_output_key(model.config)] = where[embedding]
    config = _untied(config)
  shapes = {key: where[key].shape for key in sorted(where)}
  kinds = {k: "float32" if where[k].tensor.fixed else stored for k in shapes}
  sizes = {k: tensor_files.num_bytes(s, kinds[k]) for k, s in shapes.items()}
  files = tensor_files.split(sizes, max_file_bytes)
  texts = {
    "config.json": tensor_files.json_bytes(config),
    **_companions(source, directory),
  }
  if len(files) > 1:
    home = {key: name for name, keys in files.items() for key in keys}
    texts[INDEX] = tensor_files.json_bytes(
      {"metadata": {"total_size": sum(sizes.values())}, "weight_map": home}
    )
  part = lambda name: tensor_files.part(directory / name)
  try:
    for name, keys in files.items():
      tensor_files.write(
        part(name),
        {key: shapes[key] for key in keys},
        kinds,
        lambda key: _on_host(where[key], kinds[key]),
      )
    for name, text in texts.items():
      part(name).write_bytes(text)
  except BaseException:
    for name in [*files, *texts]:
      part(name).unlink(missing_ok=True)
    raise
  _take_place(directory, list(files), list(texts))
  return directory


def save_policy(
  directory: pathlib.Path,
  model: qwen_text.QwenText,
  tokenizer: str | pathlib.Path,
  dtype: str,
  untied: bool = False,
) -> None:
  """Writes a checkpoint, its tokenizer's files and what ends a completion.

  Args:
    directory: made if absent.
    model: see `save_model`.
    tokenizer: a policy directory or a shipped name. Of the same family, its
      config.json is kept as well.
    dtype: Type of the stored tensors.
    untied: see `save_model`.
  """
  source = policy_files.resolve(tokenizer)
  same = (source / "config.json").is_file() and (
    policy_files.model_type(source) == model.config.family
  )
  policy_files.copy_tokenizer(source, directory)
  save_model(
    directory,
    model,
    source=source if same else None,
    dtype=dtype,
    untied=untied,
  )
  policy_files.write_generation(directory)


def _companions(
  source: str | pathlib.Path | None, directory: pathlib.Path
) -> dict[str, bytes]:
  """Tokenizer and processor files of `source`; {} if that is `directory`."""
  if source is None:
    return {}
  source = pathlib.Path(source).expanduser()
  if source.resolve() == directory.resolve():
    return {}
  return {
    name: (source / name).read_bytes()
    for name in _COMPANIONS
    if (source / name).is_file()
  }


def _take_place(
  directory: pathlib.Path, files: Sequence[str], texts: Sequence[str]
) -> None:
  """Puts a checkpoint's `*.part` files in the place of an older one's."""
  # The index makes several files a checkpoint: it comes after them.
  for name in [*files, *texts]:
    tensor_files.part(directory / name).replace(directory / name)
  if len(files) == 1:
    (directory / INDEX).unlink(missing_ok=True)
  for old in directory.iterdir():
    if _WEIGHT_FILE.fullmatch(old.name) and old.name not in files:
      old.unlink()


def _config_json(
  model: qwen_text.QwenText, source: str | pathlib.Path | None, stored: str
) -> dict[str, Any]:
  """Returns the content of config.json: the source's own, or the model's.

  Raises:
    ValueError: the source's is of another model.
  """
  if source is None:
    config = _to_hf(model.config)
  else:
    source_config = load_config(source)
    decided = qwen_text_config.run_fields(source_config)
    for field in dataclasses.fields(source_config):
      if field.name in decided:
        continue
      got, want = (
        getattr(c, field.name, "absent") for c in (source_config, model.config)
      )
      if got != want:
        raise ValueError(
          f"config.json in {source} is of another model: {field.name} is"
          f" {got} there, {want} here; give source=None or the directory the"
          " model was loaded from"
        )
    file = pathlib.Path(source).expanduser() / "config.json"
    config = tensor_files.read_json(file)
  config = {**config, "dtype": stored}
  config.pop("torch_dtype", None)
  for part in ("text_config", "vision_config"):
    if part in config:  # Files of transformers 4 hold it there as well.
      config[part] = {
        k: stored if k in ("dtype", "torch_dtype") else v
        for k, v in config[part].items()
      }
  return config


def _output_key(config: qwen_text_config.AnyConfig) -> str:
  """Returns the key that the output matrix of an untied policy has."""
  untied = dataclasses.replace(config, tie_word_embeddings=False)
  keys = [k for t in tensors_of(abstract_model(untied)) for k in t.keys]
  return next(key for key in keys if key.endswith("lm_head.weight"))


def _untied(config: dict[str, Any]) -> dict[str, Any]:
  """Returns config.json's content for separate input and output matrices."""
  config = {**config, "tie_word_embeddings": False}
  if "text_config" in config:
    config["text_config"] = {
      **config["text_config"],
      "tie_word_embeddings": False,
    }
  return config


def _to_hf(config: qwen_text_config.AnyConfig) -> dict[str, Any]:
  if isinstance(config, qwen_text_config.QwenTextConfig):
    return qwen_text_config.to_hf(config)
  return qwen_config.to_hf(config)


def _on_host(piece: checkpoint_names.Piece, dtype: str) -> np.ndarray:
  """Returns a tensor as the file has it."""
  tensor = piece.tensor
  value = _as_stored(
    tensor.variable[...],
    np.int32(piece.layer),
    np.int32(piece.expert or 0),
    stacked=tensor.stacked,
    one=piece.expert is not None,
    half=piece.half,
    transposed=tensor.transposed,
    dtype=dtype,
  )
  return np.ascontiguousarray(value)


@functools.partial(
  jax.jit, static_argnames=("stacked", "one", "half", "transposed", "dtype")
)
def _as_stored(
  array: jax.Array,
  layer: jax.Array,
  expert: jax.Array,
  stacked: bool,
  one: bool,
  half: int | None,
  transposed: bool,
  dtype: str,
) -> jax.Array:
  """Makes a file's tensor on its device, which is quicker than in numpy.

  Always a copy: an array on several devices keeps the host's copy of it, and
  saving would leave the whole model on the host.
  """
  if stacked:
    array = jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)
  if one:
    array = jax.lax.dynamic_index_in_dim(array, expert, keepdims=False)
  if half is not None:
    array = jnp.split(array, 2, axis=-1)[half]
  if transposed:
    array = array.swapaxes(-1, -2)
  return jnp.array(array, dtype, copy=True)
