"""Makes int8 copies of policies of published families, for rollout.

Decoding reads all weights for each token; at a byte a number it reads a half
of bfloat16's, and a device keeps room for more KV cache. The matrices of the
decoder (attention, MLP, experts) are rounded to 255 levels, symmetric about 0,
with a float32 scale for each output channel; embeddings, head, norms, router,
gates of linear attention and vision tower stay unchanged. Activations are not
rounded, but to 1e-7 where a CPU decodes (`kernels.dot_rounded`).

The copy is another policy than the one trained, though a near one: the recorded
log-probs are its own, and `algorithm.importance=tis` corrects for the
difference.

Promises: a weight is off by at most half a level, 1/254 of its channel's
largest. Zero channels stay zero. Not differentiable.
"""

from __future__ import annotations

import functools
from typing import Any, Iterator, Mapping
import weakref

from flax import nnx
import jax
import jax.numpy as jnp
from tunix.rl.multi_turn.policy.layers import decoder_layers as layers
from tunix.rl.multi_turn.policy.layers import experts
from tunix.rl.multi_turn.policy.layers import linear_attention
from tunix.rl.multi_turn.policy.models.qwen import qwen_text

Path = tuple[str, ...]

_LEVELS = 127
_SCALE = "_scale"


@jax.jit
def quantize(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Rounds matrices [..., in, out].

  Returns:
    int8[..., in, out] and float32[..., 1, out]; their product is near
    `weight`.
  """
  wide = weight.astype(jnp.float32)
  most = jnp.max(jnp.abs(wide), axis=-2, keepdims=True)
  scale = most / _LEVELS
  levels = jnp.round(wide / jnp.where(scale > 0, scale, 1.0))
  return levels.astype(jnp.int8), scale


class Converter:
  """Weights of a policy to those of its int8 copy.

  Matrices that are the very arrays of the last call are not rounded again: a
  frozen base costs nothing.
  """

  def __init__(self, model: Any):
    """Args:

      model: the policy that is copied; held until `copy`.

    Raises:
      ValueError: not a Qwen policy, or an int8 copy already.
    """
    if not isinstance(model, qwen_text.QwenText):
      raise ValueError(
        f"int8 weights are for Qwen policies, not {type(model).__name__};"
        " roll out with the weights as they are"
      )
    refuse(model)
    self._model = model
    self._paths = {(*path, name) for path, _, name in _matrices(model)}
    self._last: dict[Path, tuple[Any, jax.Array, jax.Array]] = {}

  def copy(self) -> qwen_text.QwenText:
    """Returns the copy of the policy; shares arrays that are not rounded."""
    copy = nnx.clone(self._model)
    del self._model
    for path, module, name in _matrices(copy):
      weight = getattr(module, name)
      about = weight.get_metadata()
      axes = about["axes"]
      levels, scale = self._round((*path, name), weight.get_value())
      about_scale = about | {"axes": (*axes[:-2], None, axes[-1])}
      setattr(module, name, nnx.Param(levels, **about))
      setattr(module, name + _SCALE, nnx.Param(scale, **about_scale))
    return copy

  def __call__(self, named: Mapping[Path, jax.Array]) -> dict[Path, jax.Array]:
    """Named parameters of the original to those of the copy."""
    result = {}
    for path, value in named.items():
      if path in self._paths:
        result[path], result[(*path[:-1], path[-1] + _SCALE)] = self._round(
          path, value
        )
      else:
        result[path] = value
    return result

  def _round(self, path: Path, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    last = self._last.get(path)
    if last is None or last[0]() is not value:
      last = self._last[path] = (weakref.ref(value), *quantize(value))
    return last[1:]


def quantized(model: qwen_text.QwenText) -> qwen_text.QwenText:
  """Copies a policy with int8 matrices in its decoder; see `Converter`."""
  return Converter(model).copy()


def paths(model: Any) -> frozenset[Path]:
  """Of the matrices of a Qwen policy that its copy rounds."""
  return frozenset((*path, name) for path, _, name in _matrices(model))


def refuse(model: Any) -> None:
  """Refuses an int8 copy, for callers that need the exact weights.

  Raises:
    ValueError: the model is an int8 copy.
  """
  for path, module in nnx.iter_modules(model):
    for name in _names(module):
      if getattr(module, name + _SCALE) is not None:
        raise ValueError(
          f"{'.'.join(map(str, path))} is rounded to int8, which is for"
          " rollout only; use the policy that the copy was made of"
        )


def _matrices(
  model: qwen_text.QwenText,
) -> Iterator[tuple[Path, nnx.Module, str]]:
  """(path, module, attribute) of each matrix to round."""
  for path, module in nnx.iter_modules(model):
    if path[:1] == ("visual",):
      continue
    for name in _names(module):
      yield tuple(map(str, path)), module, name


@functools.singledispatch
def _names(module: nnx.Module) -> tuple[str, ...]:
  """Attributes of a module that hold matrices to round."""
  del module
  return ()


@_names.register
def _(module: layers.Linear) -> tuple[str, ...]:
  del module
  return ("weight",)


@_names.register
def _(module: linear_attention.Gates) -> tuple[str, ...]:
  del module  # A decay's error grows with every token that it is applied to.
  return ()


@_names.register
def _(module: experts.Experts) -> tuple[str, ...]:
  del module
  return ("gate_up_proj", "down_proj")
