"""Implements the vision tower of Qwen2-VL.

Reads like the forward pass: patches, blocks of full attention within an image,
merging of 2x2 patches into a vision token.

Source: Qwen2-VL technical report, and `transformers`' `qwen2_vl`, to which the
numbers are held in tests. Axis names: see `base`.
"""

from __future__ import annotations

from flax import nnx
import jax
import jax.numpy as jnp
from tunix.rl.multi_turn.policy import kernels
from tunix.rl.multi_turn.policy import layers
from tunix.rl.multi_turn.policy import qwen2_5_vl
from tunix.rl.multi_turn.policy import qwen3_vl
from tunix.rl.multi_turn.policy import qwen_shapes
from tunix.rl.multi_turn.policy import sharding


class VisionMLP(nnx.Module):
  """fc2(quick_gelu(fc1(x))); quick_gelu(x) = x sigmoid(1.702 x)."""

  def __init__(
      self,
      vision: qwen_shapes.VisionConfig,
      init: layers.Init,
      tensor: str | None,
  ):
    width, hidden = vision.hidden_size, vision.intermediate_size
    self.fc1 = layers.Linear(width, hidden, init, ("fsdp", tensor), True)
    self.fc2 = layers.Linear(hidden, width, init, (tensor, "fsdp"), True)

  def __call__(self, x: jax.Array) -> jax.Array:
    hidden = self.fc1(x)
    return self.fc2(hidden * jax.nn.sigmoid(1.702 * hidden))


class VisionBlock(nnx.Module):

  def __init__(
      self,
      vision: qwen_shapes.VisionConfig,
      init: layers.Init,
      tensor: str | None,
      mesh: jax.sharding.Mesh | None,
  ):
    self.norm1 = layers.LayerNorm(vision.hidden_size, init)
    self.attn = qwen3_vl.VisionAttention(vision, init, tensor, mesh)
    self.norm2 = layers.LayerNorm(vision.hidden_size, init)
    self.mlp = VisionMLP(vision, init, tensor)

  def __call__(
      self,
      x_SPD: jax.Array,
      segments_SP: jax.Array,
      rotation: tuple[jax.Array, jax.Array],
      reach: kernels.Reach,
  ) -> jax.Array:
    x = x_SPD + self.attn(self.norm1(x_SPD), segments_SP, rotation, reach)
    return x + self.mlp(self.norm2(x))


class VisionTower(nnx.Module):
  """See the module docstring."""

  def __init__(
      self,
      config: qwen_shapes.QwenVLConfig,
      init: layers.Init,
      mesh: jax.sharding.Mesh | None = None,
  ):
    vision = config.vision
    tensor = "tensor" if config.vision_tensor_parallel else None
    self.config = config
    self.mesh = mesh
    self.patch_embed = layers.PatchEmbed(
        vision.patch_size,
        vision.hidden_size,
        init,
        vision.image_mean,
        vision.image_std,
        bias=False,
    )
    self.blocks = nnx.List(
        [VisionBlock(vision, init, tensor, mesh) for _ in range(vision.depth)]
    )
    self.merger = qwen2_5_vl.PatchMerger(
        vision, init, tensor, mesh, layers.LayerNorm
    )

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
    rotation = layers.vision_rotation(positions_SP4[..., :2], vision.head_dim)
    run = layers.remat(config.remat)(
        lambda block, x: sharding.constrain(
            block(x, segments_SP, rotation, reach),
            self.mesh,
            *sharding.TOKENS,
        )
    )
    x = layers.repeat(run, self.blocks, x, config.scan_layers)
    return self.merger(x)[:, :, None]
