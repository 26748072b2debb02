"""Puts a low-rank adapter on a policy: two thin matrices for each weight.

With an adapter a `layers.Linear` gives x W + scale (x A) B, with A [in, r], B
[r, out] and scale = alpha / r; so does each expert of a mixture, for its gate,
up and down matrices. The adapter's matrices are `layers.LoRAParam`s, by which
an optimizer distinguishes them from the base weights.

Promises: a fresh adapter changes nothing, to the bit (B is zero); taking an
adapter off gives back the base weights themselves.

Does not: adapt embeddings or the output matrix; drop out; hold several
adapters at a time; read or write files (see `lora_files`). Axis names: r =
rank.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any, Iterator, Sequence
import zlib

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.policy import int8
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.checkpoints import hf_checkpoint
from tunix.rl.multi_turn.policy.layers import decoder_layers as layers
from tunix.rl.multi_turn.policy.layers import experts as experts_lib
from tunix.rl.multi_turn.policy.models.qwen import qwen_text

TARGETS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
)  # fmt: skip
"""Every matrix of a dense decoder layer with full attention."""

FUSED_TARGETS = ("gate_up_proj",)
"""In the place of gate_proj and up_proj, where they are one matrix."""

LINEAR_TARGETS = ("in_proj_qkv", "in_proj_z", "out_proj")
"""The wide matrices of a layer with linear attention."""

_EXPERTS = (*experts_lib.PARTS, "gate_up_proj", "experts")


class Layer:
  """A `Linear` of the model.

  Attributes:
    linear: the module, or the adapter of all experts' matrices of a kind.
    owner: the module that has the weight, and its attribute.
    names: its modules in the checkpoint, as `transformers` names them; several
      for stacked layers, in their order, and for experts.
    lead: the leading dimensions of its matrices.
    columns: Columns of the weight that are its own; None = all.
    vision: whether it is in the tower.
    expert: whether it is of experts.
  """

  vision = expert = False
  columns: slice | None = None

  def __init__(
    self,
    path: tuple[Any, ...],
    linear: layers.Linear,
    prefixes: Sequence[tuple[str, str]] = (),
  ):
    self.linear: Any = linear
    self.owner: tuple[Any, str] = linear, "weight"
    tensor = hf_checkpoint.Tensor((*path, "weight"), linear.weight, prefixes)
    self.stacked = tensor.stacked
    self.names = tuple(key.removesuffix(".weight") for key in tensor.keys)
    self.lead = tuple(linear.weight.shape[:-2])
    self.vision = path[0] == "visual"

  @property
  def weight(self) -> nnx.Param:
    """The parameter that it is added to, or to columns of."""
    module, name = self.owner
    return getattr(module, name)

  @property
  def sizes(self) -> tuple[int, int]:
    """(in, out)."""
    wide, out = self.weight.shape[-2:]
    if self.columns is not None:
      out = len(range(*self.columns.indices(out)))
    return wide, out

  def matches(self, target: str) -> bool:
    return any(ends_with(name, target) for name in self.names)


class ExpertLayer(Layer):
  """One of `experts.PARTS` of all experts of a layer."""

  expert = True

  def __init__(
    self,
    path: tuple[Any, ...],
    experts: experts_lib.Experts,
    part: str,
    prefixes: Sequence[tuple[str, str]],
  ):
    self.linear = getattr(experts, part + "_lora")
    name = "down_proj" if part == "down_proj" else "gate_up_proj"
    self.owner = experts, name
    tensor = hf_checkpoint.Tensor((*path, name), self.weight, prefixes)
    self.stacked = tensor.stacked
    self.lead = tuple(self.weight.shape[:-2])
    homes = [key.removesuffix(f".{name}") for key in tensor.keys]
    self.names = tuple(
      f"{home}.{i}.{part}" for home in homes for i in range(self.lead[-1])
    )
    if name == "gate_up_proj":  # Side by side on the last axis.
      half = self.weight.shape[-1] // 2
      first = part == "gate_proj"
      self.columns = slice(0, half) if first else slice(half, 2 * half)


def linears(model: Any) -> list[Layer]:
  """Returns each `Linear` of the model and each kind of experts' matrices."""
  prefixes = model.config.traits.modules
  matches: list[Layer] = []
  for path, node in nnx.iter_graph(model):
    if isinstance(node, layers.Linear):
      matches.append(Layer(path, node, prefixes))
    elif isinstance(node, experts_lib.Experts):
      matches += [
        ExpertLayer(path, node, part, prefixes) for part in experts_lib.PARTS
      ]
  return matches


def adapted(model: nnx.Module) -> list[Layer]:
  """Returns the layers of `linears` that have an adapter."""
  return [a for a in linears(model) if a.linear.lora_a is not None]


def need_adapter(model: nnx.Module) -> list[Layer]:
  """`adapted`, or a ValueError if there is none."""
  adapters = adapted(model)
  if not adapters:
    raise ValueError(
      "the model has no LoRA adapter; lora.add or lora_files.load one"
    )
  return adapters


def need_none(model: nnx.Module) -> None:
  """Raises ValueError if the model has an adapter."""
  if has_adapter(model):
    raise ValueError(
      "the model has a LoRA adapter already; lora.merge or lora.remove it first"
    )


def ends_with(name: str, target: str) -> bool:
  """Returns whether a target means a module, by PEFT's rule."""
  return name == target or name.endswith(f".{target}")


# --- on and off ------------------------------------------------------------


def add(
  model: qwen_text.QwenText,
  rank: int = 16,
  alpha: float = 32.0,
  targets: Sequence[str] | None = None,
  seed: int = 0,
  vision: bool = False,
  experts: bool = False,
) -> None:
  """Gives the model a fresh adapter, in place; its outputs stay equal.

  A is drawn as PEFT draws it: Kaiming-uniform with a = sqrt(5), which is
  uniform within +-1 / sqrt(in). B is zero. Both are float32 and lie on the
  mesh that the weights lie on. The numbers depend on the seed and the layer
  only, not on the mesh or on whether layers are stacked.

  Args:
    model: the policy.
    rank: r.
    alpha: the adapter's product is multiplied by alpha / rank.
    targets: names of `Linear`s, or ends of their paths ("self_attn.q_proj");
      None = `default_targets`.
    seed: Seed of A.
    vision: adapt the vision tower as well; its names differ between families.
    experts: adapt the experts of a mixture as well, each with matrices of its
      own; else names of an MLP mean dense layers and the shared expert only.

  Raises:
    ValueError: rank < 1, the model has an adapter already, or no layer has the
      name of a target; names the nearest one.
  """
  if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
    raise ValueError(f"rank must be an int >= 1, got {rank!r}")
  need_none(model)
  if targets is None:
    targets = default_targets(model)
  if isinstance(targets, str) or not targets:
    raise ValueError(
      f"targets must be a list of names, got {targets!r}; for example"
      f" {list(TARGETS)}"
    )
  everything = linears(model)
  if experts and not any(a.expert for a in everything):
    raise ValueError(
      f"experts=True, but {model.config.family} as configured has none; leave"
      " it out"
    )
  layers_ = [
    a
    for a in everything
    if (vision or not a.vision) and (experts or not a.expert)
  ]
  _check_targets(model, everything, layers_, targets, vision)
  if experts and not any(
    a.expert and any(a.matches(t) for t in targets) for a in layers_
  ):
    raise ValueError(
      f"experts=True, but no target is of experts; add some of"
      f" {', '.join(experts_lib.PARTS)} to targets"
    )
  for layer in layers_:
    if any(layer.matches(target) for target in targets):
      wide, out = layer.sizes
      bound = 1.0 / math.sqrt(wide)
      a = np.stack(
        [
          np.random.default_rng([seed, zlib.crc32(name.encode())])
          .uniform(-bound, bound, (wide, rank))
          .astype(np.float32)
          for name in layer.names
        ]
      )
      b = np.zeros((len(layer.names), rank, out), np.float32)
      attach(layer, a, b, alpha / rank)


def default_targets(model: qwen_text.QwenText) -> tuple[str, ...]:
  """Returns every matrix of the decoder's layers but experts'."""
  traits = model.config.traits
  targets: tuple[str, ...] = TARGETS
  if traits.fused_mlp:
    split = ("gate_proj", "up_proj")
    targets = (*(t for t in TARGETS if t not in split), *FUSED_TARGETS)
  return (*targets, *(LINEAR_TARGETS if traits.linear else ()))


def _check_targets(
  model: qwen_text.QwenText,
  everything: Sequence[Layer],
  allowed: Sequence[Layer],
  targets: Sequence[str],
  vision: bool,
) -> None:
  sparse = model.config.text.num_experts > 0
  short_names = sorted({a.names[0].rsplit(".", 1)[-1] for a in allowed})
  lost = [t for t in targets if not any(a.matches(t) for a in allowed)]
  experts = [t for t in lost if sparse and t.split(".")[-1] in _EXPERTS]
  if len(experts) == len(targets):
    raise ValueError(
      f"targets {', '.join(experts)} are of experts only; pass experts=True"
      f" (their matrices are {', '.join(experts_lib.PARTS)}), or choose among"
      f" {', '.join(short_names)}"
    )
  for target in lost:
    if target in experts:
      continue
    if any(a.matches(target) for a in everything):
      raise ValueError(
        f"target {target!r} is in the vision tower only; pass vision=True to"
        " adapt it"
      )
    hint = registry.did_you_mean(target, short_names) or ";"
    raise ValueError(
      f"target {target!r} matches no linear layer{hint}"
      f" There are {', '.join(short_names)}"
    )
  tower = [a for a in allowed if a.vision]
  if vision and not any(a.matches(t) for a in tower for t in targets):
    names = sorted({a.names[0].rsplit(".", 1)[-1] for a in tower})
    raise ValueError(
      f"vision=True, but no target is in the tower; add some of"
      f" {', '.join(names)} to targets"
    )


def attach(layer: Layer, a: np.ndarray, b: np.ndarray, scale: float) -> None:
  """Sets an adapter: a [names, in, r], b [names, r, out]."""
  linear = layer.linear
  metadata = layer.weight.get_metadata()
  *lead, into, out = metadata["axes"]
  place = getattr(layer.weight.get_value(), "sharding", None)

  def param(value: Any, ends: tuple[Any, Any]) -> layers.LoRAParam:
    value = value.reshape(*layer.lead, *value.shape[-2:])
    parameter = layers.LoRAParam(
      jax.ShapeDtypeStruct(value.shape, value.dtype),
      axes=(*lead, *ends),
      transposed=True,
      stacked=layer.stacked,
    )
    if isinstance(place, jax.sharding.NamedSharding):
      mesh: Any = place.mesh
      value = sharding.put(value, sharding.parameter_sharding(parameter, mesh))
    parameter.set_value(jnp.asarray(value))
    return parameter

  linear.lora_a = param(a, (into, None))
  linear.lora_b = param(b, (None, out))
  linear.lora_scale = float(scale)


def has_adapter(model: nnx.Module) -> bool:
  """Returns whether any layer has an adapter."""
  return bool(adapted(model))


def remove(model: nnx.Module) -> None:
  """Takes the adapter off and forgets it, in place.

  Raises:
    ValueError: there is none.
  """
  for layer in need_adapter(model):
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
  adapters = [
    (a.linear, a.linear.lora_a, a.linear.lora_b, a.linear.lora_scale)
    for a in need_adapter(model)
  ]
  for linear, *_ in adapters:
    _detach(linear)
  try:
    yield
  finally:
    for linear, a, b, scale in adapters:
      linear.lora_a, linear.lora_b, linear.lora_scale = a, b, scale


def reference(model: nnx.Module) -> Any:
  """Returns a second module that computes the base: a KL reference.

  It has the model's structure, so that the same compiled programs run it, and
  the same arrays in memory, which no one may donate; only B is replaced, by
  zeros.

  Raises:
    ValueError: there is no adapter.
  """
  need_adapter(model)
  base = nnx.merge(*nnx.split(model), copy=True)
  for layer in adapted(base):
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
  for layer in need_adapter(model):
    linear = layer.linear
    weight = layer.weight.get_value()
    columns = layer.columns or slice(0, weight.shape[-1])
    merged = _merged(
      weight,
      linear.lora_a.get_value(),
      linear.lora_b.get_value(),
      np.float32(linear.lora_scale),
      span=(columns.start, columns.stop),
      stacked=layer.stacked,
    )
    if isinstance(weight.sharding, jax.sharding.NamedSharding):
      merged = jax.device_put(merged, weight.sharding)
    # A variable of its own: views of the base may share the old one.
    module, name = layer.owner
    setattr(module, name, layer.weight.replace(merged))
    _detach(linear)


@functools.partial(jax.jit, static_argnames=("span", "stacked"))
def _merged(
  weight: jax.Array,
  a: jax.Array,
  b: jax.Array,
  scale: jax.Array,
  *,
  span: tuple[int, int],
  stacked: bool,
) -> jax.Array:
  def one(weight, a, b):
    change = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    change = scale * change.astype(jnp.float32)
    if span == (0, weight.shape[-1]):
      return (weight.astype(jnp.float32) + change).astype(weight.dtype)
    part = weight[..., slice(*span)].astype(jnp.float32) + change
    return weight.at[..., slice(*span)].set(part.astype(weight.dtype))

  if not stacked:
    return one(weight, a, b)
  # Layer by layer, so that no float32 copy of all layers is made.
  return jax.lax.map(lambda args: one(*args), (weight, a, b))
