"""Low-rank adapters: train two thin matrices instead of each weight.

With an adapter a `layers.Linear` gives x W + scale (x A) B, with A [in, r], B
[r, out] and scale = alpha / r. The adapter's matrices are `layers.LoRAParam`s,
which is how an optimizer tells them from the base weights.

`save` and `load` speak PEFT's file format, so an adapter trained here runs
wherever PEFT's do, and the other way round.

Promises: a fresh adapter changes nothing, to the bit (B is zero); taking an
adapter off gives back the base weights themselves; what was saved and loaded
again is equal to the bit; a file that asks for what is not computed here (DoRA,
rsLoRA, ranks of their own, …) is refused by name.

Does not: adapt embeddings, the output matrix or the experts of a mixture;
drop out; hold several adapters at a time. Axis names: r = rank.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import pathlib
import re
from typing import Any, Iterator, Mapping, Sequence
import zlib

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from safetensors import numpy as safetensors_numpy
from tunix.rl.multi_turn.policy import hf_checkpoint
from tunix.rl.multi_turn.policy import int8
from tunix.rl.multi_turn.policy import layers
from tunix.rl.multi_turn.policy import qwen_text
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy import tensor_files

TARGETS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
)  # pyformat: disable
"""Every matrix of a dense decoder layer."""

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_EXPERTS = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "experts")
_PARTS = {"lora_a": "lora_A", "lora_b": "lora_B"}

# Fields of PEFT's LoraConfig that change what is computed, and the values with
# which they do not. Others (dropout, who wrote it, …) make no difference.
_NEUTRAL = {
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None, {}),
    # Others (PiSSA, LoftQ, …) change the base weights as well.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}  # pyformat: disable


class _Layer:
  """A `Linear` of the model.

  Attributes:
    linear: the module.
    names: of it in the checkpoint, as `transformers` calls modules; several
      for stacked layers, in their order.
  """

  def __init__(self, path: tuple[Any, ...], linear: layers.Linear):
    self.linear = linear
    tensor = hf_checkpoint.Tensor((*path, "weight"), linear.weight)
    self.stacked = tensor.stacked
    self.names = tuple(key.removesuffix(".weight") for key in tensor.keys)
    self.vision = path[0] == "visual"

  @property
  def sizes(self) -> tuple[int, int]:
    """(in, out)."""
    return tuple(self.linear.weight.shape[-2:])

  def matches(self, target: str) -> bool:
    return any(_ends_with(name, target) for name in self.names)


def _layers(model: nnx.Module) -> list[_Layer]:
  return [
      _Layer(path, node)
      for path, node in nnx.iter_graph(model)
      if isinstance(node, layers.Linear)
  ]


def _adapted(model: nnx.Module) -> list[_Layer]:
  return [a for a in _layers(model) if a.linear.lora_a is not None]


def _need_adapter(model: nnx.Module) -> list[_Layer]:
  found = _adapted(model)
  if not found:
    raise ValueError("the model has no LoRA adapter; lora.add or lora.load one")
  return found


def _need_none(model: nnx.Module) -> None:
  if has_adapter(model):
    raise ValueError(
        "the model has a LoRA adapter already; lora.merge or lora.remove it"
        " first"
    )


def _ends_with(name: str, target: str) -> bool:
  """PEFT's rule of what a target means."""
  return name == target or name.endswith(f".{target}")


# --- on and off ------------------------------------------------------------


def add(
    model: qwen_text.QwenText,
    rank: int = 16,
    alpha: float = 32.0,
    targets: Sequence[str] = TARGETS,
    seed: int = 0,
    vision: bool = False,
) -> None:
  """Gives the model a fresh adapter, in place; what it computes stays equal.

  A is drawn as PEFT draws it: Kaiming-uniform with a = sqrt(5), which is
  uniform within +-1 / sqrt(in). B is zero. Both are float32 and lie on the
  mesh that the weights lie on. The numbers depend on the seed and the layer
  only, not on the mesh or on whether layers are stacked.

  Args:
    model: the policy.
    rank: r.
    alpha: the adapter's product is multiplied by alpha / rank.
    targets: names of `Linear`s, or ends of their paths ("self_attn.q_proj").
      In a mixture of experts, names of an MLP adapt its dense layers only.
    seed: of A.
    vision: adapt the vision tower as well; its names differ between families.

  Raises:
    ValueError: rank < 1, an adapter is there already, or a target is found
      nowhere; names what comes nearest.
  """
  if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
    raise ValueError(f"rank must be an int >= 1, got {rank!r}")
  _need_none(model)
  if isinstance(targets, str) or not targets:
    raise ValueError(
        f"targets must be a list of names, got {targets!r}; for example"
        f" {list(TARGETS)}"
    )
  everything = _layers(model)
  layers_ = [a for a in everything if vision or not a.vision]
  _check_targets(model, everything, layers_, targets, vision)
  for layer in layers_:
    if any(layer.matches(target) for target in targets):
      wide, out = layer.sizes
      bound = 1.0 / math.sqrt(wide)
      a = np.stack([
          np.random.default_rng([seed, zlib.crc32(name.encode())])
          .uniform(-bound, bound, (wide, rank))
          .astype(np.float32)
          for name in layer.names
      ])
      b = np.zeros((len(layer.names), rank, out), np.float32)
      _attach(layer, a, b, alpha / rank)


def _check_targets(
    model: nnx.Module,
    everything: Sequence[_Layer],
    allowed: Sequence[_Layer],
    targets: Sequence[str],
    vision: bool,
) -> None:
  sparse = model.config.text.num_experts > 0
  known = sorted({a.names[0].rsplit(".", 1)[-1] for a in allowed})
  lost = [t for t in targets if not any(a.matches(t) for a in allowed)]
  experts = [t for t in lost if sparse and t.split(".")[-1] in _EXPERTS]
  if len(experts) == len(targets):
    raise ValueError(
        f"targets {', '.join(experts)} are matrices of experts, which are not"
        f" adapted; choose among {', '.join(known)}"
    )
  for target in lost:
    if target in experts:
      continue
    if any(a.matches(target) for a in everything):
      raise ValueError(
          f"target {target!r} is in the vision tower only; pass vision=True to"
          " adapt it"
      )
    near = difflib.get_close_matches(target, known, 1, 0.0)
    raise ValueError(
        f"target {target!r} matches no linear layer; did you mean {near[0]!r}?"
        f" There are {', '.join(known)}"
    )
  tower = [a for a in allowed if a.vision]
  if vision and not any(a.matches(t) for a in tower for t in targets):
    names = sorted({a.names[0].rsplit(".", 1)[-1] for a in tower})
    raise ValueError(
        f"vision=True, but no target is in the tower; add some of"
        f" {', '.join(names)} to targets"
    )


def _attach(layer: _Layer, a: np.ndarray, b: np.ndarray, scale: float) -> None:
  """Sets an adapter: a [names, in, r], b [names, r, out]."""
  linear = layer.linear
  metadata = linear.weight.get_metadata()
  *lead, into, out = metadata["axes"]
  place = getattr(linear.weight.get_value(), "sharding", None)

  def param(value: np.ndarray, ends: tuple[Any, Any]) -> layers.LoRAParam:
    value = value if layer.stacked else value[0]
    made = layers.LoRAParam(
        jax.ShapeDtypeStruct(value.shape, value.dtype),
        axes=(*lead, *ends),
        transposed=True,
        stacked=layer.stacked,
    )
    if isinstance(place, jax.sharding.NamedSharding):
      value = jax.device_put(
          value, sharding.parameter_sharding(made, place.mesh)
      )
    made.set_value(jnp.asarray(value))
    return made

  linear.lora_a = param(a, (into, None))
  linear.lora_b = param(b, (None, out))
  linear.lora_scale = float(scale)


def has_adapter(model: nnx.Module) -> bool:
  """Whether any layer has an adapter."""
  return bool(_adapted(model))


def remove(model: nnx.Module) -> None:
  """Takes the adapter off and forgets it, in place.

  Raises:
    ValueError: there is none.
  """
  for layer in _need_adapter(model):
    _detach(layer.linear)


def _detach(linear: layers.Linear) -> None:
  linear.lora_a = nnx.data(None)
  linear.lora_b = nnx.data(None)
  linear.lora_scale = 0.0


@contextlib.contextmanager
def disabled(model: nnx.Module) -> Iterator[None]:
  """The model is its base within the block, in place and without copies.

  Raises:
    ValueError: there is no adapter.
  """
  found = [
      (a.linear, a.linear.lora_a, a.linear.lora_b, a.linear.lora_scale)
      for a in _need_adapter(model)
  ]
  for linear, *_ in found:
    _detach(linear)
  try:
    yield
  finally:
    for linear, a, b, scale in found:
      linear.lora_a, linear.lora_b, linear.lora_scale = a, b, scale


def reference(model: nnx.Module) -> Any:
  """A second module that computes the base: a KL reference.

  It has the model's structure, so that the same compiled programs run it, and
  the same arrays in memory, which nobody may donate; only B is replaced, by
  zeros.

  Raises:
    ValueError: there is no adapter.
  """
  _need_adapter(model)
  base = nnx.merge(*nnx.split(model), copy=True)
  for layer in _adapted(base):
    b = layer.linear.lora_b
    b.set_value(jnp.zeros_like(b.get_value()))
  return base


def merge(model: nnx.Module) -> None:
  """Adds the adapter to the weights, in place, and takes it off.

  The sum is taken in float32 and rounded to the weights' dtype. Exact up to
  that; with bfloat16 weights small adapters are partly lost.

  Raises:
    ValueError: there is no adapter, or the weights are rounded to int8.
  """
  int8.refuse(model)
  for layer in _need_adapter(model):
    linear = layer.linear
    weight = linear.weight.get_value()
    merged = _merged(
        weight,
        linear.lora_a.get_value(),
        linear.lora_b.get_value(),
        np.float32(linear.lora_scale),
    )
    if isinstance(weight.sharding, jax.sharding.NamedSharding):
      merged = jax.device_put(merged, weight.sharding)
    # A variable of its own: views of the base may share the old one.
    linear.weight = linear.weight.replace(merged)
    _detach(linear)


@jax.jit
def _merged(
    weight: jax.Array, a: jax.Array, b: jax.Array, scale: jax.Array
) -> jax.Array:
  def one(weight, a, b):
    change = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    wide = weight.astype(jnp.float32) + scale * change.astype(jnp.float32)
    return wide.astype(weight.dtype)

  if weight.ndim == 2:
    return one(weight, a, b)
  # Layer by layer, so that no float32 copy of all layers is made.
  return jax.lax.map(lambda args: one(*args), (weight, a, b))


# --- files -----------------------------------------------------------------


def save(
    directory: str | pathlib.Path,
    model: qwen_text.QwenText,
    base_model_name: str = "",
) -> pathlib.Path:
  """Writes the adapter alone, as PEFT does.

  Args:
    directory: made if absent; an adapter in it is replaced.
    model: with an adapter.
    base_model_name: what the adapter belongs to, a name or directory.

  Returns:
    The directory.

  Raises:
    ValueError: there is no adapter, or layers of it differ in rank or scale.
  """
  found = _need_adapter(model)
  kinds = {(a.linear.lora_a.shape[-1], a.linear.lora_scale) for a in found}
  if len(kinds) > 1:
    raise ValueError(
        f"layers differ in (rank, scale): {sorted(kinds)}; one adapter has one"
    )
  ((rank, scale),) = kinds
  tensors = {}
  for layer in found:
    for part, theirs in _PARTS.items():
      value = np.asarray(getattr(layer.linear, part).get_value())
      value = value if layer.stacked else value[None]
      for name, one in zip(layer.names, value):
        key = f"{_PREFIX}{name}.{theirs}.weight"
        tensors[key] = np.ascontiguousarray(one.T)
  config = {
      "peft_type": "LORA",
      "task_type": "CAUSAL_LM",
      "base_model_name_or_path": base_model_name,
      "r": rank,
      "lora_alpha": _alpha(scale, rank),
      "target_modules": _target_modules(model, found),
      "lora_dropout": 0.0,
      "bias": "none",
      "fan_in_fan_out": False,
      "inference_mode": True,
      "init_lora_weights": True,
      "layers_to_transform": None,
      "modules_to_save": None,
      "rank_pattern": {},
      "alpha_pattern": {},
      "use_dora": False,
      "use_rslora": False,
  }
  directory = pathlib.Path(directory).expanduser()
  directory.mkdir(parents=True, exist_ok=True)
  weights, text = (
      tensor_files.part(directory / name) for name in (WEIGHTS, CONFIG)
  )
  safetensors_numpy.save_file(tensors, weights, metadata={"format": "pt"})
  text.write_bytes(tensor_files.json_bytes(config))
  for part in (weights, text):  # Both are whole before one takes its place.
    part.replace(part.with_suffix(""))
  return directory


def _alpha(scale: float, rank: int) -> float | int:
  """The number that gives `scale` again when divided by `rank`."""
  exact = scale * rank
  near = round(exact, 6)
  alpha = near if near / rank == scale else exact
  return int(alpha) if alpha == int(alpha) else alpha


def _target_modules(
    model: nnx.Module, found: Sequence[_Layer]
) -> list[str]:
  """Short names if they mean just these layers, else the layers' own.

  PEFT would put (idle) adapters on whatever else a name fits: on a tower whose
  MLP is called as the decoder's, on a convolution.
  """
  names = {name for layer in found for name in layer.names}
  short = sorted({name.rsplit(".", 1)[-1] for name in names})
  modules = {
      key.rpartition(".")[0]
      for tensor in hf_checkpoint.tensors_of(model)
      for key in tensor.keys
  }
  meant = {m for m in modules if any(_ends_with(m, s) for s in short)}
  return short if meant == names else sorted(names)


def load(directory: str | pathlib.Path, model: qwen_text.QwenText) -> None:
  """Gives the model an adapter from PEFT's files, in place.

  Of any dtype there; float32 here, on the mesh that the weights lie on.

  Args:
    directory: with adapter_config.json and adapter_model.safetensors.
    model: without an adapter.

  Raises:
    FileNotFoundError: a file is missing.
    ValueError: another kind of adapter, tensors that are missing, extra or
      misshapen, or the model has an adapter already.
  """
  _need_none(model)
  directory = pathlib.Path(directory).expanduser()
  for name in (CONFIG, WEIGHTS):
    if not (directory / name).is_file():
      raise FileNotFoundError(
          f"{directory} has no {name}; give a directory that lora.save or"
          " PEFT's save_pretrained (with safe_serialization) has written"
      )
  config = _read_config(directory / CONFIG)
  with tensor_files.opened(directory / WEIGHTS) as file:
    tensors = {key: file.get_tensor(key) for key in file.keys()}
  rank = config["r"]
  problems, adapters = [], []
  for layer in _layers(model):
    wide, out = layer.sizes
    want = {"lora_A": (rank, wide), "lora_B": (out, rank)}
    values: dict[str, list[np.ndarray]] = {part: [] for part in want}
    meant = [n for n in layer.names if _is_target(n, config)]
    for name in layer.names:
      for part, shape in want.items():
        key = _find(tensors, f"{name}.{part}.weight")
        if key is None:
          continue
        value = tensors.pop(key)
        if name not in meant:  # PEFT would leave it out.
          problems.append(
              f"tensor {key} is of a layer that target_modules does not name"
          )
        if value.shape == shape:
          values[part].append(value.astype(np.float32).T)
        else:
          problems.append(
              f"tensor {key} has shape {list(value.shape)}, r={rank} and the"
              f" model need {list(shape)}"
          )
          values[part].append(np.zeros(shape, np.float32).T)
    counts = {len(v) for v in values.values()}
    if counts == {0} and not meant:
      continue
    if counts != {len(layer.names)}:
      problems.append(
          f"tensors of {layer.names[0]} are missing"
          + (" in some of the layers" if counts != {0} else "")
      )
      continue
    adapters.append((layer, *(np.stack(v) for v in values.values())))
  if tensors:
    some = ", ".join(sorted(tensors)[:5])
    problems.append(f"{len(tensors)} tensors fit no linear layer: {some}")
  if not adapters and not problems:
    problems.append("it holds no tensor")
  if problems:
    raise ValueError(
        f"{directory} does not fit the model: {'; '.join(problems[:5])}; was it"
        f" trained on {config.get('base_model_name_or_path')!r}?"
    )
  for layer, a, b in adapters:
    _attach(layer, a, b, config["lora_alpha"] / rank)


def _find(tensors: Mapping[str, Any], key: str) -> str | None:
  spelled = (_PREFIX + k for k in hf_checkpoint.spellings(key))
  return next((k for k in spelled if k in tensors), None)


def _read_config(file: pathlib.Path) -> dict[str, Any]:
  """adapter_config.json, of what can be computed here.

  Raises:
    ValueError: names the field that asks for more.
  """
  config = tensor_files.read_json(file)
  if config.get("peft_type") != "LORA":
    raise ValueError(
        f"{file} says peft_type={config.get('peft_type')!r}; only LORA adapters"
        " can be loaded"
    )
  for field, neutral in _NEUTRAL.items():
    value = config.get(field)
    if not any(n == value and type(n) is type(value) for n in neutral):
      raise ValueError(
          f"{file} says {field}={value!r}, which is not computed here; merge"
          " the adapter into its base with PEFT and load the result"
      )
  rank, alpha = config.get("r"), config.get("lora_alpha")
  if not isinstance(rank, int) or rank < 1:
    raise ValueError(f"{file} says r={rank!r}; it must be an int >= 1")
  if not isinstance(alpha, (int, float)):
    raise ValueError(f"{file} says lora_alpha={alpha!r}; it must be a number")
  return config


def _is_target(name: str, config: Mapping[str, Any]) -> bool:
  """Whether the file must hold a layer's tensors, by PEFT's rules."""

  def fits(rule: Any) -> bool:
    for spelled in hf_checkpoint.spellings(name):
      if isinstance(rule, str):
        if re.fullmatch(rule, spelled):
          return True
      elif any(_ends_with(spelled, target) for target in rule or ()):
        return True
    return False

  rule = config.get("target_modules")
  if rule == "all-linear":
    return not fits(config.get("exclude_modules"))
  return fits(rule) and not fits(config.get("exclude_modules"))
