"""Saves and loads LoRA adapters in PEFT's file format.

An adapter trained here runs wherever PEFT's do, and the other way round.

Promises: an adapter saved and loaded again is equal to the bit; a file that
asks for more than is computed here (DoRA, rsLoRA, ranks of their own, …) is
refused by name; both files are whole before one takes its place.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any, Mapping, Sequence

from flax import nnx
import numpy as np
from safetensors import numpy as safetensors_numpy
from tunix.rl.multi_turn.policy import lora
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy.checkpoints import tensor_files
from tunix.rl.multi_turn.policy.models.qwen import qwen_text

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_PARTS = {"lora_a": "lora_A", "lora_b": "lora_B"}

# Fields of PEFT's LoraConfig that change the computation, and the values with
# which they do not. Others (dropout, author, …) make no difference.
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
}


def save(
  directory: str | pathlib.Path,
  model: qwen_text.QwenText,
  base_model_name: str = "",
) -> pathlib.Path:
  """Writes the adapter alone, as PEFT does.

  Args:
    directory: made if absent; an adapter in it is replaced.
    model: Model with an adapter.
    base_model_name: name or directory of the adapter's base.

  Returns:
    The directory.

  Raises:
    ValueError: there is no adapter, or layers of it differ in rank or scale.
  """
  adapters = lora.need_adapter(model)
  kinds = {(a.linear.lora_a.shape[-1], a.linear.lora_scale) for a in adapters}
  if len(kinds) > 1:
    raise ValueError(
      f"layers differ in (rank, scale): {sorted(kinds)}; one adapter has one"
    )
  ((rank, scale),) = kinds
  tensors = {}
  for layer in adapters:
    for part, peft_part in _PARTS.items():
      value = np.asarray(getattr(layer.linear, part).get_value())
      value = value.reshape(-1, *value.shape[-2:])
      for name, one in zip(layer.names, value):
        key = f"{_PREFIX}{name}.{peft_part}.weight"
        tensors[key] = np.ascontiguousarray(one.T)
  config = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base_model_name,
    "r": rank,
    "lora_alpha": _alpha(scale, rank),
    "target_modules": _target_modules(model, adapters),
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
  for file in (weights, text):  # Both are whole before one takes its place.
    file.replace(file.with_suffix(""))
  return directory


def _alpha(scale: float, rank: int) -> float | int:
  """Returns the number that gives `scale` again when divided by `rank`."""
  exact = scale * rank
  near = round(exact, 6)
  alpha = near if near / rank == scale else exact
  return int(alpha) if alpha == int(alpha) else alpha


def _target_modules(
  model: nnx.Module, adapters: Sequence[lora.Layer]
) -> list[str]:
  """Short names if they mean just these layers, else the layers' own.

  PEFT would put (idle) adapters on all modules that a name fits: on a tower
  whose MLP is named as the decoder's, on a convolution.
  """
  names = {name for layer in adapters for name in layer.names}
  short = sorted({name.rsplit(".", 1)[-1] for name in names})
  modules = {
    key.rpartition(".")[0]
    for tensor in hf_checkpoint.tensors_of(model)
    for key in tensor.keys
  }
  modules |= {name for layer in lora.linears(model) for name in layer.names}
  matches = {m for m in modules if any(lora.ends_with(m, s) for s in short)}
  return short if matches == names else sorted(names)


def load(directory: str | pathlib.Path, model: qwen_text.QwenText) -> None:
  """Gives the model an adapter from PEFT's files, in place.

  Of any dtype there; float32 here, on the mesh that the weights lie on.

  Args:
    directory: Directory with adapter_config.json and adapter_model.safetensors.
    model: without an adapter.

  Raises:
    FileNotFoundError: a file is missing.
    ValueError: another kind of adapter, tensors that are missing, extra or
      misshapen, or the model has an adapter already.
  """
  lora.need_none(model)
  directory = pathlib.Path(directory).expanduser()
  for name in (CONFIG, WEIGHTS):
    if not (directory / name).is_file():
      raise FileNotFoundError(
        f"{directory} has no {name}; give a directory that lora_files.save or"
        " PEFT's save_pretrained (with safe_serialization) has written"
      )
  config = _read_config(directory / CONFIG)
  with tensor_files.opened(directory / WEIGHTS) as file:
    tensors = {key: file.get_tensor(key) for key in file.keys()}
  problems: list[str] = []
  adapters = []
  for layer in lora.linears(model):
    matrices = _take(layer, tensors, config, problems)
    if matrices is not None:
      adapters.append((layer, *matrices))
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
    lora.attach(layer, a, b, config["lora_alpha"] / config["r"])


def _take(
  layer: lora.Layer,
  tensors: dict[str, np.ndarray],
  config: Mapping[str, Any],
  problems: list[str],
) -> tuple[np.ndarray, np.ndarray] | None:
  """Takes a layer's A [names, in, r] and B [names, r, out] out of `tensors`.

  None where the file adapts no such layer, or after adding to `problems`.
  """
  rank = config["r"]
  wide, out = layer.sizes
  want = {"lora_A": (rank, wide), "lora_B": (out, rank)}
  values: dict[str, list[np.ndarray]] = {part: [] for part in want}
  targets = [n for n in layer.names if _is_target(n, config)]
  for name in layer.names:
    for part, shape in want.items():
      key = _find(tensors, f"{name}.{part}.weight")
      if key is None:
        continue
      value = tensors.pop(key)
      if name not in targets:  # PEFT would leave it out.
        problems.append(
          f"tensor {key} is of a layer that target_modules does not name"
        )
      if value.shape != shape:
        problems.append(
          f"tensor {key} has shape {list(value.shape)}, r={rank} and the"
          f" model need {list(shape)}"
        )
        value = np.zeros(shape, np.float32)
      values[part].append(value.astype(np.float32).T)
  counts = {len(v) for v in values.values()}
  if counts == {0} and not targets:
    return None
  if counts != {len(layer.names)}:
    problems.append(
      f"tensors of {layer.names[0]} are missing"
      + (" in some of the layers" if counts != {0} else "")
    )
    return None
  a, b = (np.stack(v) for v in values.values())
  return a, b


def _find(tensors: Mapping[str, Any], key: str) -> str | None:
  spelled = (_PREFIX + k for k in hf_checkpoint.spellings(key))
  return next((k for k in spelled if k in tensors), None)


def _read_config(file: pathlib.Path) -> dict[str, Any]:
  """adapter_config.json, if it can be computed here.

  Raises:
    ValueError: names the field that asks for more.
  """
  config = tensor_files.read_json(file)
  if config.get("peft_type") != "LORA":
    raise ValueError(
      f"{file} holds peft_type={config.get('peft_type')!r}; only LORA"
      " adapters can be loaded"
    )
  for field, neutral in _NEUTRAL.items():
    value = config.get(field)
    if not any(n == value and type(n) is type(value) for n in neutral):
      raise ValueError(
        f"{file} holds {field}={value!r}, which is not computed here; merge"
        " the adapter into its base with PEFT and load the result"
      )
  rank, alpha = config.get("r"), config.get("lora_alpha")
  if not isinstance(rank, int) or rank < 1:
    raise ValueError(f"{file} holds r={rank!r}; it must be an int >= 1")
  if not isinstance(alpha, (int, float)):
    raise ValueError(f"{file} holds lora_alpha={alpha!r}; it must be a number")
  return config


def _is_target(name: str, config: Mapping[str, Any]) -> bool:
  """Returns whether the file must hold a layer's tensors, by PEFT's rules."""

  def fits(rule: Any) -> bool:
    for spelled in hf_checkpoint.spellings(name):
      if isinstance(rule, str):
        if re.fullmatch(rule, spelled):
          return True
      elif any(lora.ends_with(spelled, target) for target in rule or ()):
        return True
    return False

  rule = config.get("target_modules")
  if rule == "all-linear":
    return not fits(config.get("exclude_modules"))
  return fits(rule) and not fits(config.get("exclude_modules"))
