"""Implements the layers that the Qwen policies are made of.

Attribute names are those of the published checkpoints, so that the path of a
parameter is its key there. A parameter's metadata holds its place on a mesh
(`axes`: mesh axis, or tuple of them, of each dimension) and whether the
checkpoint holds it transposed (`transposed`).

Weights are kept in the configuration's `param_dtype` and cast where they are
used; norms and rotary positions are computed in float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

from flax import nnx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np
from tunix.rl.multi_turn.policy import random_keys
from tunix.rl.multi_turn.policy.layers import kernels

Axes = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Init:
  """Makes new parameters.

  Attributes:
    rngs: random numbers.
    dtype: Type of the parameters.
    std: Standard deviation of matrices, 0.02 as in the published models.
    stack: leading axes, () or (layers,): parameters of stacked layers.
  """

  rngs: random_keys.Source
  dtype: str = "float32"
  std: float = 0.02
  stack: tuple[int, ...] = ()

  def normal(
    self, shape: tuple[int, ...], axes: Axes, transposed: bool = False
  ) -> nnx.Param:
    value = jax.random.normal(
      self.rngs.params(), self.stack + shape, jnp.float32
    )
    return self._param((value * self.std).astype(self.dtype), axes, transposed)

  def full(self, value: float, *shape: int) -> nnx.Param:
    array = jnp.full(self.stack + shape, value, self.dtype)
    return self._param(array, (None,) * len(shape), False)

  def fixed(self, *shape: int) -> FixedParam:
    """Zeros that are not trained."""
    return FixedParam(
      jnp.zeros(self.stack + shape, jnp.float32),
      axes=(None,) * (len(self.stack) + len(shape)),
      transposed=False,
      stacked=bool(self.stack),
    )

  def log_uniform(self, most: float, *shape: int) -> nnx.Param:
    """Logarithms of numbers drawn from (0, most)."""
    drawn = jax.random.uniform(
      self.rngs.params(), self.stack + shape, jnp.float32, 1e-3, most
    )
    return self._param(
      jnp.log(drawn).astype(self.dtype), (None,) * len(shape), False
    )

  def _param(self, value: jax.Array, axes: Axes, transposed: bool):
    axes = (None,) * len(self.stack) + tuple(axes)
    return nnx.Param(
      value, axes=axes, transposed=transposed, stacked=bool(self.stack)
    )


class LoRAParam(nnx.Param):
  """A parameter of an adapter, which LoRA trains."""


class FixedParam(nnx.Param):
  """A parameter of the checkpoint that no optimizer moves; always float32."""


class Linear(nnx.Module):
  """x @ weight + bias, with an optional low-rank adapter.

  `weight` is [in, out], the transpose of the checkpoint's. With an adapter
  (`lora.add`), x @ lora_a @ lora_b * lora_scale is added. In an int8 copy
  (`int8.quantized`) `weight_scale` is a scale for each column.
  """

  def __init__(
    self, inputs: int, outputs: int, init: Init, axes: Axes, bias: bool
  ):
    self.weight = init.normal((inputs, outputs), axes, transposed=True)
    self.weight_scale = nnx.data(None)
    self.bias = init.full(0.0, outputs) if bias else None
    self.lora_a = nnx.data(None)
    self.lora_b = nnx.data(None)
    self.lora_scale = 0.0

  def __call__(self, x: jax.Array) -> jax.Array:
    weight = self.weight[...]
    if self.weight_scale is None:
      y = kernels.dot(x, weight)
    else:
      # Else the compiler restores all layers' weights ahead of a loop.
      weight, x = jax.lax.optimization_barrier((weight, x))
      y = kernels.dot_rounded(x, weight)
      y = (y * self.weight_scale[...][0]).astype(x.dtype)
    if self.lora_a is not None:
      low = kernels.dot(x, self.lora_a[...])
      y += kernels.dot(low, self.lora_b[...]) * jnp.asarray(
        self.lora_scale, x.dtype
      )
    if self.bias is not None:
      y += self.bias[...].astype(x.dtype)
    return y


class RMSNorm(nnx.Module):
  """x / rms(x) * (offset + weight) over the last axis."""

  def __init__(
    self, width: int, init: Init, eps: float = 1e-6, offset: float = 0.0
  ):
    self.weight = init.full(1.0 - offset, width)
    self.eps = eps
    self.offset = offset

  def __call__(self, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
    weight = self.weight[...].astype(jnp.float32)
    if self.offset:
      weight = weight + self.offset
    return (wide * weight).astype(x.dtype)


class LayerNorm(nnx.Module):
  """(x - mean) / std * weight + bias over the last axis."""

  def __init__(self, width: int, init: Init, eps: float = 1e-6):
    self.weight = init.full(1.0, width)
    self.bias = init.full(0.0, width)
    self.eps = eps

  def __call__(self, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide -= jnp.mean(wide, -1, keepdims=True)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
    wide = wide * self.weight[...].astype(jnp.float32)
    return (wide + self.bias[...].astype(jnp.float32)).astype(x.dtype)


def gelu(x: jax.Array) -> jax.Array:
  """Returns the Gaussian error linear unit, exactly."""
  return jax.nn.gelu(x, approximate=False)


def gelu_tanh(x: jax.Array) -> jax.Array:
  """Returns the Gaussian error linear unit by its approximation with tanh."""
  return jax.nn.gelu(x, approximate=True)


class GatedMLP(nnx.Module):
  """down(act(gate(x)) * up(x)), where the activation is silu unless given."""

  def __init__(
    self,
    width: int,
    hidden: int,
    init: Init,
    tensor: str | None = "tensor",
    bias: bool = False,
    act: Callable[[jax.Array], jax.Array] = jax.nn.silu,
  ):
    self.act = act
    self.gate_proj = Linear(width, hidden, init, ("fsdp", tensor), bias)
    self.up_proj = Linear(width, hidden, init, ("fsdp", tensor), bias)
    self.down_proj = Linear(hidden, width, init, (tensor, "fsdp"), bias)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class FusedMLP(nnx.Module):
  """down(silu(gate) * up), where gate and up are one product's halves.

  Split over `tensor`, the product's columns are exchanged once, so that each
  device has both halves of its hidden units.
  """

  def __init__(self, width: int, hidden: int, init: Init):
    self.gate_up_proj = Linear(
      width, 2 * hidden, init, ("fsdp", "tensor"), False
    )
    self.down_proj = Linear(hidden, width, init, ("tensor", "fsdp"), False)

  def __call__(self, x: jax.Array) -> jax.Array:
    gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
    return self.down_proj(jax.nn.silu(gate) * up)


class PatchEmbed(nnx.Module):
  """uint8 patches [S, P, F] to [S, P, D]: normalise, then one matrix.

  The checkpoint's kernel is [D, 3, 2, side, side] for two frames. A still is
  the same frame twice, so the frames' kernels are added.
  """

  def __init__(
    self,
    patch_size: int,
    width: int,
    init: Init,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    bias: bool,
  ):
    side = patch_size
    # As a module of its own for the sake of the parameter's path.
    self.proj = _Kernel(
      init.normal((width, 3, 2, side, side), (None,) * 5),
      init.full(0.0, width) if bias else None,
    )
    self.mean, self.std = tuple(mean), tuple(std)

  def __call__(self, patches_SPF: jax.Array, dtype: DTypeLike) -> jax.Array:
    kernel = self.proj.weight[...]
    x = normalised(patches_SPF, self.mean, self.std, dtype)
    flat = kernel.sum(2).reshape(kernel.shape[0], -1).T
    y = kernels.dot(x, flat)
    if self.proj.bias is not None:
      y += self.proj.bias[...].astype(dtype)
    return y


def normalised(
  patches_SPF: jax.Array,
  mean: tuple[float, ...],
  std: tuple[float, ...],
  dtype: DTypeLike,
) -> jax.Array:
  """Returns (patches / 255 - mean) / std, [S, P, F], by colour channel."""
  s, p, f = patches_SPF.shape
  pixels = patches_SPF.reshape(s, p, 3, f // 3).astype(jnp.float32)
  centre, scale = (np.array(v, np.float32)[:, None] for v in (mean, std))
  return ((pixels / 255.0 - centre) / scale).astype(dtype).reshape(s, p, f)


class _Kernel(nnx.Module):
  def __init__(self, weight: nnx.Param, bias: nnx.Param | None):
    self.weight = weight
    self.bias = bias


class Embedding(nnx.Module):
  """[rows, D], looked up by number.

  Where a mesh does not divide the dimension that `axes` split, the other one is
  split: a vocabulary of 151,936 does not divide by 256.
  """

  def __init__(self, rows: int, width: int, init: Init, axes: Axes):
    self.weight = init.normal((rows, width), axes)
    self.weight.set_metadata(else_axes=tuple(reversed(axes)))


# --- rotary positions ------------------------------------------------------


def rope_frequencies(dim: int, theta: float) -> np.ndarray:
  """Returns float32[dim / 2]."""
  return (1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float32) / dim)).astype(
    np.float32
  )


def rotate(
  x_BTNH: jax.Array, cos_BTH: jax.Array, sin_BTH: jax.Array, pairs: bool = False
) -> jax.Array:
  """Turns the halves of each head by angles [B, T, H / 2].

  With fewer angles, the halves of as much of a head's beginning; the rest
  stays. With `pairs`, neighbours turn together in place of halves.
  """
  width = 2 * cos_BTH.shape[-1]
  tail = x_BTNH[..., width:]
  head = x_BTNH[..., :width].astype(jnp.float32)
  cos, sin = cos_BTH[:, :, None], sin_BTH[:, :, None]
  if pairs:
    a, b = head[..., 0::2], head[..., 1::2]
    turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
    turned = turned.reshape(head.shape)
  else:
    a, b = jnp.split(head, 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  turned = turned.astype(x_BTNH.dtype)
  if not tail.shape[-1]:
    return turned
  return jnp.concatenate([turned, tail], axis=-1)


def vision_rotation(
  positions_SP: jax.Array, head_dim: int
) -> tuple[jax.Array, jax.Array]:
  """cos and sin [S, P, H / 2] of (row, column) [S, P, 2]: half a head each."""
  frequencies = rope_frequencies(head_dim // 2, 10000.0)
  angle = positions_SP[..., None].astype(jnp.float32) * frequencies
  angle = angle.reshape(*angle.shape[:2], -1)
  return jnp.cos(angle), jnp.sin(angle)


def mrope_axes(section: tuple[int, int, int], interleaved: bool) -> np.ndarray:
  """Returns int32[H / 2], each frequency's axis: time, height or width.

  In chunks (Qwen2.5-VL), or interleaved as time, height, width, time, … with
  the remaining frequencies following time (Qwen3-VL).
  """
  half = sum(section)
  if not interleaved:
    return np.repeat(np.arange(3), section).astype(np.int32)
  axes = np.zeros(half, np.int32)
  for axis in (1, 2):
    axes[axis : section[axis] * 3 : 3] = axis
  return axes


def mrope(
  positions_BT3: jax.Array, axes_H: np.ndarray, frequencies_H: np.ndarray
) -> tuple[jax.Array, jax.Array]:
  """cos and sin [B, T, H / 2] of the decoder's positions."""
  chosen = jnp.asarray(positions_BT3)[..., axes_H].astype(jnp.float32)
  return jnp.cos(chosen * frequencies_H), jnp.sin(chosen * frequencies_H)


# --- rematerialisation -----------------------------------------------------


def remat(policy: str) -> Callable[[Any], Any]:
  """Wraps a layer, see `config_checks.REMATS`."""
  if policy == "none":
    return lambda f: f
  keep = None
  if policy == "dots":
    keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
  return lambda f: jax.checkpoint(f, policy=keep)


def set_remat(model: nnx.Module, remat: str) -> None:
  """Gives a policy another `remat`; programs traced before keep theirs."""
  for _, module in nnx.iter_modules(model):
    config = getattr(module, "config", None)
    if dataclasses.is_dataclass(config) and hasattr(config, "remat"):
      module.config = dataclasses.replace(config, remat=remat)  # type: ignore[attr-defined, type-var]


def repeat(
  run: Callable[[Any, jax.Array], jax.Array],
  blocks: Any,
  x: jax.Array,
  scan: bool,
) -> jax.Array:
  """`x` through run(block, x) of equal modules, one after the other.

  With `scan` as one loop, over parameters that are stacked for it: compiled
  once instead of once a block. Blocks that differ in structure, as where only
  some have an adapter, are not equal and run one by one.
  """
  graphs, states = zip(*map(nnx.split, blocks)) if blocks else ((), ())
  if not scan or len(set(graphs)) != 1 or len(blocks) < 2:
    for block in blocks:
      x = run(block, x)
    return x
  graph = graphs[0]
  stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *states)

  def step(x: jax.Array, state: object) -> tuple[jax.Array, None]:
    return run(nnx.merge(graph, state), x), None

  return jax.lax.scan(step, x, stacked)[0]
