"""Implements the vision tower of Qwen3-VL.

Reads like the forward pass: patches and their learned positions, blocks of
full attention within an image, merging of 2x2 patches into a vision token. The
outputs of a few blocks are merged too ("deepstack") and later added to the
decoder's first layers.

Source: Qwen3-VL technical report, and `transformers`' `qwen3_vl`, to which the
numbers are held in tests. Axis names: see `base`.
"""

from __future__ import annotations

from flax import nnx
import jax
import jax.numpy as jnp
from tunix.rl.multi_turn.policy import kernels
from tunix.rl.multi_turn.policy import layers
from tunix.rl.multi_turn.policy import qwen_config
from tunix.rl.multi_turn.policy import sharding


class VisionAttention(nnx.Module):
  """Full attention within an image; q, k, v come from one product."""

  def __init__(
      self,
      vision: qwen_config.VisionConfig,
      init: layers.Init,
      tensor: str | None,
      mesh: jax.sharding.Mesh | None,
      bias: bool = True,
  ):
    width = vision.hidden_size
    self.num_heads = vision.num_heads
    self.tensor = tensor
    self.mesh = mesh
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
    mixed = kernels.image_attention(
        q,
        k,
        qkv[:, :, 2],
        segments_SP,
        reach.places,
        mesh=self.mesh,
        tensor=self.tensor,
        aligned=reach.aligned,
    )
    return self.proj(mixed.reshape(s, p, -1))


class VisionMLP(nnx.Module):

  def __init__(
      self,
      vision: qwen_config.VisionConfig,
      init: layers.Init,
      tensor: str | None,
  ):
    width, hidden = vision.hidden_size, vision.intermediate_size
    self.linear_fc1 = layers.Linear(
        width, hidden, init, ("fsdp", tensor), True
    )
    self.linear_fc2 = layers.Linear(
        hidden, width, init, (tensor, "fsdp"), True
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.linear_fc2(jax.nn.gelu(self.linear_fc1(x), approximate=True))


class VisionBlock(nnx.Module):

  def __init__(
      self,
      vision: qwen_config.VisionConfig,
      init: layers.Init,
      tensor: str | None,
      mesh: jax.sharding.Mesh | None,
  ):
    self.norm1 = layers.LayerNorm(vision.hidden_size, init)
    self.attn = VisionAttention(vision, init, tensor, mesh)
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


class PatchMerger(nnx.Module):
  """Four neighbouring patches to one vision token.

  The norm is over a patch, or (deepstack) over the four together.
  """

  def __init__(
      self,
      vision: qwen_config.VisionConfig,
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
    hidden = jax.nn.gelu(self.linear_fc1(x), approximate=False)
    return sharding.constrain(
        self.linear_fc2(hidden), self.mesh, *sharding.TOKENS
    )


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
        bias=True,
    )
    self.pos_embed = layers.Embedding(
        vision.num_position_embeddings, vision.hidden_size, init, (None, "fsdp")
    )
    self.blocks = nnx.List(
        [VisionBlock(vision, init, tensor, mesh) for _ in range(vision.depth)]
    )
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
      reach: of the patches of an image.
    """
    config, vision = self.config, self.config.vision
    x = self.patch_embed(patches_SPF, jnp.dtype(config.compute_dtype))
    x = x + self._learned_positions(positions_SP4).astype(x.dtype)
    rotation = layers.vision_rotation(positions_SP4[..., :2], vision.head_dim)
    run = layers.remat(config.remat)(
        lambda block, x: sharding.constrain(
            block(x, segments_SP, rotation, reach),
            self.mesh,
            *sharding.TOKENS,
        )
    )
    deep, done = [], 0
    blocks = list(self.blocks)
    for i in sorted(vision.deepstack_visual_indexes):
      x = layers.repeat(run, blocks[done : i + 1], x, config.scan_layers)
      number = vision.deepstack_visual_indexes.index(i)
      deep.append(self.deepstack_merger_list[number](x))
      done = i + 1
    x = layers.repeat(run, blocks[done:], x, config.scan_layers)
    return jnp.stack([self.merger(x), *deep], axis=2)

  def _learned_positions(self, positions_SP4: jax.Array) -> jax.Array:
    """[S, P, D]: the square of positions stretched over the image's grid.

    Bilinear, corner on corner. In whole numbers up to the fraction, so that no
    rounding picks another neighbour.
    """
    # A small table, looked up four times: once gathered is cheapest.
    table = sharding.constrain(self.pos_embed.weight[...], self.mesh)
    table = table.astype(jnp.float32)
    side = round(self.config.vision.num_position_embeddings**0.5)
    place = jnp.asarray(positions_SP4)
    steps = jnp.maximum(place[..., 2:] - 1, 1)
    scaled = place[..., :2] * (side - 1)
    low = scaled // steps
    fraction = (scaled % steps).astype(jnp.float32) / steps
    high = jnp.minimum(low + 1, side - 1)
    total = 0.0
    for rows, row_weight in ((low, 1 - fraction), (high, fraction)):
      for columns, column_weight in ((low, 1 - fraction), (high, fraction)):
        found = table[rows[..., 0] * side + columns[..., 1]]
        weight = row_weight[..., 0] * column_weight[..., 1]
        total += found * weight[..., None]
    return total
