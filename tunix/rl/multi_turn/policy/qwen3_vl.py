"""Implements the vision tower of Qwen3-VL.

Reads like the forward pass: patches and their learned positions, blocks of
full attention within an image, merging of 2x2 patches into a vision token. The
outputs of a few blocks are merged too ("deepstack") and later added to the
decoder's first layers.

Source: Qwen3-VL technical report, and `transformers`' `qwen3_vl`, to which the
numbers are held in tests. Axis names: see `base`.
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

_LAYERS = ("linear_fc1", "linear_fc2")


class PatchMerger(nnx.Module):
  """Merges four neighbouring patches to one vision token.

  The norm is over a patch, or (deepstack) over the four together.
  """

  def __init__(
      self,
      vision: qwen_shapes.VisionConfig,
      init: layers.Init,
      tensor: str | None,
      mesh: jax.sharding.Mesh | None,
      norm_after: bool,
  ):
    self.mesh = mesh
    wide = vision.hidden_size * vision.patches_per_token
    self.merge = vision.patches_per_token
    self.norm_after = norm_after
    self.norm = layers.LayerNorm(
        wide if norm_after else vision.hidden_size, init
    )
    self.linear_fc1 = layers.Linear(wide, wide, init, ("fsdp", tensor), True)
    self.linear_fc2 = layers.Linear(
        wide, vision.out_hidden_size, init, (tensor, "fsdp"), True
    )

  def __call__(self, x_SPD: jax.Array) -> jax.Array:
    s, p, _ = x_SPD.shape
    x = x_SPD if self.norm_after else self.norm(x_SPD)
    x = x.reshape(s, p // self.merge, -1)
    x = self.norm(x) if self.norm_after else x
    x = self.linear_fc2(layers.gelu(self.linear_fc1(x)))
    return sharding.constrain(x, self.mesh, *sharding.TOKENS)


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
    self.pos_embed = layers.Embedding(
        vision.num_position_embeddings, width, init, (None, "fsdp")
    )
    self.blocks = nnx.List([
        vision_blocks.VisionBlock(
            functools.partial(layers.LayerNorm, width, init),
            vision_blocks.VisionAttention(vision, init, tensor, mesh),
            vision_blocks.TwoLayerMLP(
                (width, vision.intermediate_size, width),
                init,
                tensor,
                layers.gelu_tanh,
                _LAYERS,
            ),
        )
        for _ in range(vision.depth)
    ])
    self.merger = PatchMerger(vision, init, tensor, mesh, norm_after=False)
    self.deepstack_merger_list = nnx.List([
        PatchMerger(vision, init, tensor, mesh, norm_after=True)
        for _ in vision.deepstack_visual_indexes
    ])

  def __call__(
      self,
      patches_SPF: jax.Array,
      segments_SP: jax.Array,
      positions_SP4: jax.Array,
      reach: kernels.Reach,
  ) -> jax.Array:
    """Vision tokens [S, V, 1 + deepstack, D].

    Args:
      patches_SPF: uint8 (or any number in [0, 255]).
      segments_SP: int32, the image a patch belongs to.
      positions_SP4: int32, row and column of the patch and of its grid.
      reach: Most patches of an image, and whether images are aligned.
    """
    config, vision = self.config, self.config.vision
    x = self.patch_embed(patches_SPF, jnp.dtype(config.compute_dtype))
    x = x + self._learned_positions(positions_SP4).astype(x.dtype)
    rotation = layers.vision_rotation(positions_SP4[..., :2], vision.head_dim)
    run = vision_blocks.runner(
        config, self.mesh, segments_SP, rotation, reach
    )
    deep, first = [], 0
    blocks = list(self.blocks)
    for i in sorted(vision.deepstack_visual_indexes):
      x = layers.repeat(run, blocks[first : i + 1], x, config.scan_layers)
      number = vision.deepstack_visual_indexes.index(i)
      deep.append(self.deepstack_merger_list[number](x))
      first = i + 1
    x = layers.repeat(run, blocks[first:], x, config.scan_layers)
    return jnp.stack([self.merger(x), *deep], axis=2)

  def _learned_positions(self, positions_SP4: jax.Array) -> jax.Array:
    """Stretches the square of positions over the image's grid: [S, P, D].

    Bilinear, corner on corner. In whole numbers up to the fraction, so that no
    rounding picks another neighbour.
    """
    # A small table, looked up four times: once gathered is cheapest.
    table = sharding.constrain(self.pos_embed.weight[...], self.mesh)
    side = round(self.config.vision.num_position_embeddings**0.5)
    place = jnp.asarray(positions_SP4)
    steps = jnp.maximum(place[..., 2:] - 1, 1)
    scaled = place[..., :2] * (side - 1)
    low = scaled // steps
    fraction = (scaled % steps).astype(jnp.float32) / steps
    high = jnp.minimum(low + 1, side - 1)
    taps = (low, 1 - fraction), (high, fraction)
    return vision_blocks.interpolated(table.astype(jnp.float32), side, taps)
