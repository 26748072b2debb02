"""Implements the vision tower of GLM-4.1V and GLM-4.5V.

Reads like the forward pass: patches, a norm and their learned positions, blocks
of full attention within an image, a convolution that merges 2x2 patches into a
vision token, and an MLP on it.

Source: the GLM-4.1V-Thinking technical report, and `transformers`' `glm4v`, to
which the numbers are held in tests. Axis names: see `base`.
"""

from __future__ import annotations

import functools

from flax import nnx
import jax
import jax.numpy as jnp
from tunix.rl.multi_turn.policy import kernels
from tunix.rl.multi_turn.policy import layers
from tunix.rl.multi_turn.policy import qwen_shapes
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy import vision_blocks

_SHARPNESS = -0.75
"""Of the cubic convolution (Keys 1981) that stretches learned positions."""


class Downsample(nnx.Module):
  """Convolution without overlap: the patches of a vision token become one.

  The kernel is [out, D, side, side], as in the checkpoint.
  """

  def __init__(self, vision: qwen_shapes.VisionConfig, init: layers.Init):
    side = vision.spatial_merge_size
    self.weight = init.normal(
        (vision.out_hidden_size, vision.hidden_size, side, side),
        ("fsdp", None, None, None),
    )
    self.bias = init.full(0.0, vision.out_hidden_size)
    self.merge = vision.patches_per_token

  def __call__(self, x_SPD: jax.Array) -> jax.Array:
    s, p, _ = x_SPD.shape
    kernel = self.weight[...]
    # A vision token's patches follow each other in raster order.
    flat = kernel.transpose(2, 3, 1, 0).reshape(-1, kernel.shape[0])
    y = kernels.dot(x_SPD.reshape(s, p // self.merge, -1), flat)
    return y + self.bias[...].astype(y.dtype)


class PatchMerger(layers.GatedMLP):
  """down(silu(gate(y)) * up(y)) with y = gelu(norm(proj(x)))."""

  def __init__(
      self,
      vision: qwen_shapes.VisionConfig,
      init: layers.Init,
      tensor: str | None,
  ):
    width = vision.out_hidden_size
    self.proj = layers.Linear(width, width, init, ("fsdp", tensor), False)
    self.post_projection_norm = layers.LayerNorm(width, init, 1e-5)
    super().__init__(width, vision.intermediate_size, init, tensor)

  def __call__(self, x: jax.Array) -> jax.Array:
    x = self.post_projection_norm(self.proj(x))
    return super().__call__(layers.gelu(x))


class Embeddings(nnx.Module):
  """A square of learned positions, one for each patch of a square image."""

  def __init__(self, vision: qwen_shapes.VisionConfig, init: layers.Init):
    self.position_embedding = layers.Embedding(
        vision.num_position_embeddings, vision.hidden_size, init, (None, "fsdp")
    )


class VisionTower(vision_blocks.VisionTower):
  """See the module docstring."""

  def __init__(
      self,
      config: qwen_shapes.QwenVLConfig,
      init: layers.Init,
      mesh: jax.sharding.Mesh | None = None,
  ):
    super().__init__(config, init, mesh, patch_bias=True)
    vision, tensor = config.vision, vision_blocks.tensor_axis(config)
    width = vision.hidden_size
    norm = functools.partial(layers.RMSNorm, width, init, vision.rms_norm_eps)
    self.post_conv_layernorm = norm()
    self.embeddings = Embeddings(vision, init)
    self.blocks = nnx.List([
        vision_blocks.VisionBlock(
            norm,
            vision_blocks.VisionAttention(
                vision, init, tensor, mesh, bias=False
            ),
            # As wide inside as a vision token: `intermediate_size` is the
            # merger's.
            layers.GatedMLP(width, vision.out_hidden_size, init, tensor),
        )
        for _ in range(vision.depth)
    ])
    self.post_layernorm = norm()
    self.downsample = Downsample(vision, init)
    self.merger = PatchMerger(vision, init, tensor)

  def __call__(
      self,
      patches_SPF: jax.Array,
      segments_SP: jax.Array,
      positions_SP4: jax.Array,
      reach: kernels.Reach,
  ) -> jax.Array:
    """Vision tokens [S, V, 1, D]; arguments as of Qwen3-VL's tower."""
    config, vision = self.config, self.config.vision
    x = self.patch_embed(patches_SPF, jnp.dtype(config.compute_dtype))
    x = self.post_conv_layernorm(x)
    rotation = layers.vision_rotation(positions_SP4[..., :2], vision.head_dim)
    x = x + self._learned_positions(positions_SP4).astype(x.dtype)
    run = vision_blocks.runner(
        config, self.mesh, segments_SP, rotation, reach
    )
    x = layers.repeat(run, self.blocks, x, config.scan_layers)
    x = self.downsample(self.post_layernorm(x))
    x = sharding.constrain(self.merger(x), self.mesh, *sharding.TOKENS)
    return x[:, :, None]

  def _learned_positions(self, positions_SP4: jax.Array) -> jax.Array:
    """Stretches the square of positions over the image's grid: [S, P, D].

    Bicubic, centre on centre; beyond the square its border repeats. In whole
    numbers up to the fraction, so that no rounding picks another neighbour.
    """
    # A small table, looked up sixteen times: once gathered is cheapest.
    table = self.embeddings.position_embedding.weight[...]
    table = sharding.constrain(table, self.mesh).astype(jnp.float32)
    side = round(self.config.vision.num_position_embeddings**0.5)
    place = jnp.asarray(positions_SP4)
    count = jnp.maximum(place[..., 2:], 1)
    # (place + 1/2) / count * side - 1/2, times 2 count.
    scaled = (2 * place[..., :2] + 1) * side - count
    low = scaled // (2 * count)
    fraction = (scaled % (2 * count)).astype(jnp.float32) / (2 * count)
    taps = [
        (jnp.clip(low + step, 0, side - 1), _cubic(fraction - step))
        for step in (-1, 0, 1, 2)
    ]
    return vision_blocks.interpolated(table, side, taps)


def _cubic(distance: jax.Array) -> jax.Array:
  """Weight of a neighbour at a distance within 2."""
  a, x = _SHARPNESS, jnp.abs(distance)
  near = ((a + 2) * x - (a + 3)) * x * x + 1
  far = ((x - 5) * x + 8) * x * a - 4 * a
  return jnp.where(x <= 1, near, far)
