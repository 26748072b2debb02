"""Implements the vision tower of Qwen2.5-VL.

Reads like the forward pass: patches, blocks of attention within windows of
112 pixels (a few within the whole image), merging of 2x2 patches into a
vision token. Windows are a second kind of segment: patches are never moved.

Source: Qwen2.5-VL technical report, and `transformers`' `qwen2_5_vl`, to which
the numbers are held in tests. Axis names: see `base`.
"""

from __future__ import annotations

import functools
import itertools

from flax import nnx
import jax
import jax.numpy as jnp
from tunix.rl.multi_turn.policy import kernels
from tunix.rl.multi_turn.policy import layers
from tunix.rl.multi_turn.policy import qwen_shapes
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy import vision_blocks


class PatchMerger(nnx.Module):
  """Merges four neighbouring patches to one vision token."""

  def __init__(
      self,
      vision: qwen_shapes.VisionConfig,
      init: layers.Init,
      tensor: str | None,
      mesh: jax.sharding.Mesh | None,
      norm: type[layers.RMSNorm] | type[layers.LayerNorm] = layers.RMSNorm,
  ):
    self.mesh = mesh
    wide = vision.hidden_size * vision.patches_per_token
    self.merge = vision.patches_per_token
    self.ln_q = norm(vision.hidden_size, init)
    # The checkpoint numbers the layers with the activation between.
    self.mlp = vision_blocks.TwoLayerMLP(
        (wide, wide, vision.out_hidden_size),
        init,
        tensor,
        layers.gelu,
        ("0", "2"),
    )

  def __call__(self, x_SPD: jax.Array) -> jax.Array:
    s, p, _ = x_SPD.shape
    x = self.mlp(self.ln_q(x_SPD).reshape(s, p // self.merge, -1))
    return sharding.constrain(x, self.mesh, *sharding.TOKENS)


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
            functools.partial(layers.RMSNorm, width, init),
            vision_blocks.VisionAttention(vision, init, tensor, mesh),
            layers.GatedMLP(
                width, vision.intermediate_size, init, tensor, bias=True
            ),
        )
        for _ in range(vision.depth)
    ])
    self.merger = PatchMerger(vision, init, tensor, mesh)

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
    runs = [
        vision_blocks.runner(config, self.mesh, segments, rotation, reach)
        for segments in (self._windows(segments_SP, positions_SP4), segments_SP)
    ]
    # Neighbouring blocks that attend alike run as one loop.
    attends_to_all = lambda pair: pair[0] in vision.fullatt_block_indexes
    for to_all, numbered in itertools.groupby(
        enumerate(self.blocks), attends_to_all
    ):
      blocks = [block for _, block in numbered]
      x = layers.repeat(runs[to_all], blocks, x, config.scan_layers)
    return self.merger(x)[:, :, None]

  def _windows(
      self, segments_SP: jax.Array, positions_SP4: jax.Array
  ) -> jax.Array:
    """Returns int32[S, P], equal for patches of one window of one image."""
    vision = self.config.vision
    # A window holds whole merged tokens.
    side = vision.window_size // vision.patch_size // vision.spatial_merge_size
    side *= vision.spatial_merge_size
    place = jnp.asarray(positions_SP4)
    at, of = place[..., :2] // side, -(-place[..., 2:] // side)
    # Room for 4096 windows of an image: 117 megapixels.
    number = jnp.minimum(at[..., 0] * of[..., 1] + at[..., 1], 4095)
    return jnp.where(segments_SP > 0, segments_SP * 4096 + number, 0)
