"""Implements the vision tower of Qwen2-VL.

Reads like the forward pass: patches, blocks of full attention within an image,
merging of 2x2 patches into a vision token.

Source: Qwen2-VL technical report, and `transformers`' `qwen2_vl`, to which the
numbers are held in tests. Axis names: see `base`.
"""

from __future__ import annotations

import functools

from flax import nnx
import jax
import jax.numpy as jnp
from tunix.rl.multi_turn.policy import kernels
from tunix.rl.multi_turn.policy import layers
from tunix.rl.multi_turn.policy import qwen2_5_vl
from tunix.rl.multi_turn.policy import qwen_shapes
from tunix.rl.multi_turn.policy import vision_blocks


def quick_gelu(x: jax.Array) -> jax.Array:
  """Returns x sigmoid(1.702 x)."""
  return x * jax.nn.sigmoid(1.702 * x)


class VisionTower(vision_blocks.VisionTower):
  """See the module docstring."""

  def __init__(
      self,
      config: qwen_shapes.QwenVLConfig,
      init: layers.Init,
      mesh: jax.sharding.Mesh | None = None,
  ):
    super().__init__(config, init, mesh, patch_bias=False)
    vision, tensor = config.vision, vision_blocks.tensor_axis(config)
    width = vision.hidden_size
    self.blocks = nnx.List([
        vision_blocks.VisionBlock(
            functools.partial(layers.LayerNorm, width, init),
            vision_blocks.VisionAttention(vision, init, tensor, mesh),
            vision_blocks.TwoLayerMLP(
                (width, vision.intermediate_size, width),
                init,
                tensor,
                quick_gelu,
            ),
        )
        for _ in range(vision.depth)
    ])
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
    run = vision_blocks.runner(
        config, self.mesh, segments_SP, rotation, reach
    )
    x = layers.repeat(run, self.blocks, x, config.scan_layers)
    return self.merger(x)[:, :, None]
