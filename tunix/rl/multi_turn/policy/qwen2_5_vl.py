"""Implements the vision tower of Qwen2.5-VL.

Reads like the forward pass: patches, blocks of attention within windows of
112 pixels (a few within the whole image), merging of 2x2 patches into a
vision token. Windows are a second kind of segment: patches are never moved.

Source: Qwen2.5-VL technical report, and `transformers`' `qwen2_5_vl`, to which
the numbers are held in tests. Axis names: see `base`.
"""

from __future__ import annotations

import itertools

from flax import nnx
import jax
import jax.numpy as jnp
from tunix.rl.multi_turn.policy import kernels
from tunix.rl.multi_turn.policy import layers
from tunix.rl.multi_turn.policy import qwen3_vl
from tunix.rl.multi_turn.policy import qwen_config
from tunix.rl.multi_turn.policy import sharding


class VisionBlock(nnx.Module):

  def __init__(
      self,
      vision: qwen_config.VisionConfig,
      init: layers.Init,
      tensor: str | None,
      mesh: jax.sharding.Mesh | None,
  ):
    self.norm1 = layers.RMSNorm(vision.hidden_size, init)
    self.attn = qwen3_vl.VisionAttention(vision, init, tensor, mesh)
    self.norm2 = layers.RMSNorm(vision.hidden_size, init)
    self.mlp = layers.GatedMLP(
        vision.hidden_size,
        vision.intermediate_size,
        init,
        tensor,
        bias=True,
    )

  def __call__(
      self,
      x_SPD: jax.Array,
      segments_SP: jax.Array,
      rotation: tuple[jax.Array, jax.Array],
      reach: kernels.Reach,
  ) -> jax.Array:
    x = x_SPD + self.attn(self.norm1(x_SPD), segments_SP, rotation, reach)
    return x + self.mlp(self.norm2(x))


class MergerMLP(nnx.Module):
  """Two layers; the checkpoint numbers them with the activation between."""

  def __init__(self, wide: int, out: int, init: layers.Init, tensor):
    setattr(self, "0", layers.Linear(wide, wide, init, ("fsdp", tensor), True))
    setattr(self, "2", layers.Linear(wide, out, init, (tensor, "fsdp"), True))

  def __call__(self, x: jax.Array) -> jax.Array:
    first, second = getattr(self, "0"), getattr(self, "2")
    return second(jax.nn.gelu(first(x), approximate=False))


class PatchMerger(nnx.Module):
  """Four neighbouring patches to one vision token."""

  def __init__(
      self,
      vision: qwen_config.VisionConfig,
      init: layers.Init,
      tensor: str | None,
      mesh: jax.sharding.Mesh | None,
      norm: type[layers.RMSNorm] | type[layers.LayerNorm] = layers.RMSNorm,
  ):
    self.mesh = mesh
    wide = vision.hidden_size * vision.patches_per_token
    self.merge = vision.patches_per_token
    self.ln_q = norm(vision.hidden_size, init)
    self.mlp = MergerMLP(wide, vision.out_hidden_size, init, tensor)

  def __call__(self, x_SPD: jax.Array) -> jax.Array:
    s, p, _ = x_SPD.shape
    x = self.mlp(self.ln_q(x_SPD).reshape(s, p // self.merge, -1))
    return sharding.constrain(x, self.mesh, *sharding.TOKENS)


class VisionTower(nnx.Module):
  """See the module docstring."""

  def __init__(
      self,
      config: qwen_config.QwenVLConfig,
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
    windows = self._windows(segments_SP, positions_SP4)
    run = layers.remat(config.remat)(
        lambda block, x, segments: sharding.constrain(
            block(x, segments, rotation, reach),
            self.mesh,
            *sharding.TOKENS,
        )
    )
    numbered = enumerate(self.blocks)
    whole = lambda pair: pair[0] in vision.fullatt_block_indexes
    for is_whole, alike in itertools.groupby(numbered, whole):
      segments = segments_SP if is_whole else windows
      x = layers.repeat(
          lambda block, x: run(block, x, segments),  # noqa: B023
          [block for _, block in alike],
          x,
          config.scan_layers,
      )
    return self.merger(x)[:, :, None]

  def _windows(
      self, segments_SP: jax.Array, positions_SP4: jax.Array
  ) -> jax.Array:
    """int32[S, P]: equal for patches of one window of one image."""
    vision = self.config.vision
    # A window holds whole merged tokens.
    side = vision.window_size // vision.patch_size // vision.spatial_merge_size
    side *= vision.spatial_merge_size
    place = jnp.asarray(positions_SP4)
    at, of = place[..., :2] // side, -(-place[..., 2:] // side)
    # Room for 4096 windows of an image: 117 megapixels.
    number = jnp.minimum(at[..., 0] * of[..., 1] + at[..., 1], 4095)
    return jnp.where(segments_SP > 0, segments_SP * 4096 + number, 0)
