"""Implements the parts that the vision towers of several families share.

Attention within an image, a block, an MLP of two layers, learned positions and
what every tower does with its patches and blocks. A family's own module reads
like its forward pass and takes these parts.

Axis names: see `base`.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

from flax import nnx
import jax
import jax.numpy as jnp
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.layers import decoder_layers as layers
from tunix.rl.multi_turn.policy.layers import kernels
from tunix.rl.multi_turn.policy.models.qwen import qwen_shapes

Act = Callable[[jax.Array], jax.Array]


class Make(NamedTuple):
  """Sizes and weights for the parts of a tower.

  Attributes:
    vision: Sizes of the tower.
    init: Source of the weights.
    tensor: Mesh axis that splits the layers, or None.
    mesh: Mesh of the weights, or None.
  """

  vision: qwen_shapes.VisionConfig
  init: layers.Init
  tensor: str | None
  mesh: jax.sharding.Mesh | None


class ImageAttention(nnx.Module):
  """Base of full attention within an image."""

  def __init__(self, make: Make):
    self.num_heads = make.vision.num_heads
    self.tensor, self.mesh = make.tensor, make.mesh

  def _mixed(
    self,
    queries_keys_values: tuple[jax.Array, jax.Array, jax.Array],
    segments_SP: jax.Array,
    reach: kernels.Reach,
  ) -> jax.Array:
    mixed = kernels.image_attention(
      *queries_keys_values,
      segments_SP,
      reach.places,
      mesh=self.mesh,
      tensor=self.tensor,
      aligned=reach.aligned,
    )
    return mixed.reshape(*mixed.shape[:2], -1)


class VisionAttention(ImageAttention):
  """Attention with rotated positions; q, k, v come from one product."""

  def __init__(self, make: Make, bias: bool = True):
    super().__init__(make)
    width, init, tensor = make.vision.hidden_size, make.init, make.tensor
    self.qkv = layers.Linear(width, 3 * width, init, ("fsdp", tensor), bias)
    self.proj = layers.Linear(width, width, init, (tensor, "fsdp"), bias)

  def __call__(
    self,
    x_SPD: jax.Array,
    segments_SP: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
    reach: kernels.Reach,
  ) -> jax.Array:
    s, p, _ = x_SPD.shape
    qkv = self.qkv(x_SPD).reshape(s, p, 3, self.num_heads, -1)
    q = layers.rotate(qkv[:, :, 0], *rotation)
    k = layers.rotate(qkv[:, :, 1], *rotation)
    return self.proj(self._mixed((q, k, qkv[:, :, 2]), segments_SP, reach))


class TwoLayerMLP(nnx.Module):
  """second(act(first(x))), each layer with a bias.

  Attributes:
    names: Names of the two layers in the checkpoint.
  """

  def __init__(
    self,
    widths: tuple[int, int, int],
    init: layers.Init,
    tensor: str | None,
    act: Act,
    names: tuple[str, str] = ("fc1", "fc2"),
  ):
    inputs, hidden, outputs = widths
    self.act, self.names = act, names
    axes = ("fsdp", tensor), (tensor, "fsdp")
    setattr(self, names[0], layers.Linear(inputs, hidden, init, axes[0], True))
    setattr(self, names[1], layers.Linear(hidden, outputs, init, axes[1], True))

  def __call__(self, x: jax.Array) -> jax.Array:
    first, second = (getattr(self, name) for name in self.names)
    return second(self.act(first(x)))


class VisionBlock(nnx.Module):
  """x + attn(norm1(x)), then x + mlp(norm2(x)).

  Attributes:
    names: Names of the first norm, the attention and the second norm in the
      checkpoint.
  """

  def __init__(
    self,
    norm: Callable[[], nnx.Module],
    attn: ImageAttention,
    mlp: nnx.Module,
    names: tuple[str, str, str] = ("norm1", "attn", "norm2"),
  ):
    self.names = names
    for name, part in zip(names, (norm(), attn, norm())):
      setattr(self, name, part)
    self.mlp = mlp

  def __call__(self, x_SPD: jax.Array, *inputs: Any) -> jax.Array:
    norm1, attn, norm2 = (getattr(self, name) for name in self.names)
    x = x_SPD + attn(norm1(x_SPD), *inputs)
    return x + self.mlp(norm2(x))


def tensor_axis(config: qwen_shapes.QwenVLConfig) -> str | None:
  """Returns the mesh axis that splits a tower's layers, or None."""
  return "tensor" if config.vision_tensor_parallel else None


def runner(
  config: qwen_shapes.QwenVLConfig, mesh: jax.sharding.Mesh | None, *inputs: Any
) -> Callable[[Any, jax.Array], jax.Array]:
  """Returns run(block, x [S, P, D]) -> [S, P, D] for
  `decoder_layers.repeat`.

  The backward pass computes a block again as `config.remat` says; on a mesh
  the output lies as tokens do.

  Args:
    config: Configuration of the policy.
    mesh: Mesh of the weights, or None.
    *inputs: What a block takes after x.
  """
  return layers.remat(config.remat)(
    lambda block, x: sharding.constrain(
      block(x, *inputs), mesh, *sharding.TOKENS
    )
  )


def interpolated(
  table_ND: jax.Array, side: int, taps: Sequence[tuple[jax.Array, jax.Array]]
) -> jax.Array:
  """Sums weighted neighbours of a square of learned positions: [S, P, D].

  Args:
    table_ND: float32, the square's rows one after the other, N = side**2.
    side: Positions of a side of the square.
    taps: For each neighbour of an axis its place, int32[S, P, 2] with row and
      column, and its weight, float32[S, P, 2].
  """
  total = jnp.zeros((), jnp.float32)
  for rows, row_weight in taps:
    for columns, column_weight in taps:
      neighbours = table_ND[rows[..., 0] * side + columns[..., 1]]
      weight = row_weight[..., 0] * column_weight[..., 1]
      total += neighbours * weight[..., None]
  return total
