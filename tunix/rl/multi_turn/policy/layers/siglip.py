"""Implements SigLIP's towers: those of Gemma 3, SmolVLM and Idefics3.

Reads like the forward pass: patches and their learned positions, blocks of full
attention within an image, the mean of a square of patches as a vision token, a
norm and a matrix. All images have one size, that of the learned positions; of
SmolVLM and Idefics3, all tiles of an image have.

Source: Zhai et al. 2023, "Sigmoid loss for language image pre-training", the
Gemma 3 technical report, Laurencon et al. 2024, "Building and better
understanding vision-language models", Marafioti et al. 2025, "SmolVLM", and
`transformers`' `siglip`, `gemma3`, `idefics3` and `smolvlm`, to which the
numbers are held in tests. Axis names: see `base`.
"""

from __future__ import annotations

from typing import Callable

from flax import nnx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.layers import decoder_layers as layers
from tunix.rl.multi_turn.policy.layers import kernels
from tunix.rl.multi_turn.policy.layers import vision_blocks
from tunix.rl.multi_turn.policy.models.qwen import qwen_shapes


class PatchEmbed(nnx.Module):
  """uint8 patches [S, P, F] to [S, P, D]: normalise, then one matrix."""

  def __init__(self, vision: qwen_shapes.VisionConfig, init: layers.Init):
    side = vision.patch_size
    self.weight = init.normal((vision.hidden_size, 3, side, side), (None,) * 4)
    self.bias = init.full(0.0, vision.hidden_size)
    self.mean, self.std = vision.image_mean, vision.image_std

  def __call__(self, patches_SPF: jax.Array, dtype: DTypeLike) -> jax.Array:
    kernel = self.weight[...]
    x = layers.normalised(patches_SPF, self.mean, self.std, dtype)
    y = kernels.dot(x, kernel.reshape(kernel.shape[0], -1).T)
    return y + self.bias[...].astype(dtype)


class Embeddings(nnx.Module):
  """A patch's pixels and its place."""

  def __init__(
    self,
    vision: qwen_shapes.VisionConfig,
    init: layers.Init,
    mesh: jax.sharding.Mesh | None,
  ):
    self.patch_embedding = PatchEmbed(vision, init)
    self.position_embedding = layers.Embedding(
      vision.num_position_embeddings, vision.hidden_size, init, (None, "fsdp")
    )
    self.side = round(vision.num_position_embeddings**0.5)
    self.mesh = mesh

  def __call__(
    self, patches_SPF: jax.Array, positions_SP4: jax.Array, dtype: DTypeLike
  ) -> jax.Array:
    # A small table: once gathered is cheapest.
    table = sharding.constrain(self.position_embedding.weight[...], self.mesh)
    place = jnp.asarray(positions_SP4)
    number = place[..., 0] * self.side + place[..., 1]
    x = self.patch_embedding(patches_SPF, dtype)
    # Padding may have any place.
    return x + table[jnp.clip(number, 0, self.side**2 - 1)].astype(dtype)


class Attention(vision_blocks.ImageAttention):
  """Attention of patches that know their places."""

  def __init__(self, make: vision_blocks.Make):
    super().__init__(make)
    width = make.vision.hidden_size
    linear = lambda axes: layers.Linear(width, width, make.init, axes, True)
    into, back = ("fsdp", make.tensor), (make.tensor, "fsdp")
    self.q_proj, self.k_proj, self.v_proj = (linear(into) for _ in range(3))
    self.out_proj = linear(back)

  def __call__(
    self, x_SPD: jax.Array, segments_SP: jax.Array, reach: kernels.Reach
  ) -> jax.Array:
    s, p, _ = x_SPD.shape
    q, k, v = (
      linear(x_SPD).reshape(s, p, self.num_heads, -1)
      for linear in (self.q_proj, self.k_proj, self.v_proj)
    )
    return self.out_proj(self._mixed((q, k, v), segments_SP, reach))


def _block(make: vision_blocks.Make) -> vision_blocks.VisionBlock:
  vision, init, tensor, _ = make
  width = vision.hidden_size
  return vision_blocks.VisionBlock(
    lambda: layers.LayerNorm(width, init, vision.rms_norm_eps),
    Attention(make),
    vision_blocks.TwoLayerMLP(
      (width, vision.intermediate_size, width), init, tensor, layers.gelu_tanh
    ),
    ("layer_norm1", "self_attn", "layer_norm2"),
  )


class Encoder(nnx.Module):
  """The blocks, under their name in the checkpoint."""

  def __init__(self, make: vision_blocks.Make):
    self.layers = nnx.List([_block(make) for _ in range(make.vision.depth)])


class Projector(nnx.Module):
  """Means of squares of patches, normed, times a matrix."""

  def __init__(self, vision: qwen_shapes.VisionConfig, init: layers.Init):
    self.merge = vision.patches_per_token
    self.mm_soft_emb_norm = layers.RMSNorm(
      vision.hidden_size, init, vision.rms_norm_eps, 1.0
    )
    # The one matrix that the checkpoint does not hold transposed.
    self.mm_input_projection_weight = init.normal(
      (vision.hidden_size, vision.out_hidden_size), ("fsdp", None)
    )

  def __call__(self, x_SPD: jax.Array) -> jax.Array:
    s, p, d = x_SPD.shape
    # A vision token's patches follow each other.
    square = x_SPD.reshape(s, p // self.merge, self.merge, d)
    mean = square.astype(jnp.float32).mean(2).astype(x_SPD.dtype)
    matrix = self.mm_input_projection_weight[...]
    return kernels.dot(self.mm_soft_emb_norm(mean), matrix)


class VisionTower(nnx.Module):
  """See the module docstring."""

  projector_class: Callable[..., nnx.Module] = Projector

  def __init__(
    self,
    config: qwen_shapes.QwenVLConfig,
    init: layers.Init,
    mesh: jax.sharding.Mesh | None = None,
  ):
    vision, tensor = config.vision, vision_blocks.tensor_axis(config)
    self.config = config
    self.mesh = mesh
    self.embeddings = Embeddings(vision, init, mesh)
    self.encoder = Encoder(vision_blocks.Make(vision, init, tensor, mesh))
    self.post_layernorm = layers.LayerNorm(
      vision.hidden_size, init, vision.rms_norm_eps
    )
    self.projector = self.projector_class(vision, init)

  def __call__(
    self,
    patches_SPF: jax.Array,
    segments_SP: jax.Array,
    positions_SP4: jax.Array,
    reach: kernels.Reach,
  ) -> jax.Array:
    """Vision tokens [S, V, 1, D]; arguments as of Qwen3-VL's tower."""
    config = self.config
    dtype = jnp.dtype(config.compute_dtype)
    x = self.embeddings(patches_SPF, positions_SP4, dtype)
    run = vision_blocks.runner(config, self.mesh, segments_SP, reach)
    x = layers.repeat(run, self.encoder.layers, x, config.scan_layers)
    x = self.projector(self.post_layernorm(x))
    return sharding.constrain(x, self.mesh, *sharding.TOKENS)[:, :, None]


# --- SmolVLM, Idefics3 -------------------------------------------------------


class _Matrix(nnx.Module):
  """A linear layer, under its name in the checkpoint."""

  def __init__(self, vision: qwen_shapes.VisionConfig, init: layers.Init):
    wide = vision.hidden_size * vision.patches_per_token
    self.proj = layers.Linear(
      wide, vision.out_hidden_size, init, ("fsdp", None), False
    )


class Connector(nnx.Module):
  """The patches of each vision token side by side, times a matrix."""

  def __init__(self, vision: qwen_shapes.VisionConfig, init: layers.Init):
    self.modality_projection = _Matrix(vision, init)
    self.merge = vision.patches_per_token

  def __call__(self, x_SPD: jax.Array) -> jax.Array:
    s, p, d = x_SPD.shape
    # A vision token's patches follow each other, row by row.
    x = x_SPD.reshape(s, p // self.merge, self.merge * d)
    return self.modality_projection.proj(x)


class TiledTower(VisionTower):
  """SigLIP on tiles of one size, among them the whole image, made small.

  A vision token is a square of patches, their outputs side by side ("pixel
  shuffle"), times a matrix.
  """

  projector_class = Connector

  def __call__(
    self,
    patches_SPF: jax.Array,
    segments_SP: jax.Array,
    positions_SP4: jax.Array,
    reach: kernels.Reach,
  ) -> jax.Array:
    """Vision tokens [S, V, 1, D]; arguments as of Qwen3-VL's tower.

    A patch's position is (row, column, tile, tiles of its image).
    """
    place = jnp.asarray(positions_SP4)
    image = jnp.asarray(segments_SP).astype(jnp.int32)
    # No image has as many tiles.
    tile = jnp.where(image > 0, image * (1 << 12) + place[..., 2], 0)
    patches = self.config.vision.num_position_embeddings
    # Images that are aligned are so by a multiple of tiles.
    aligned = reach.aligned and reach.places % patches == 0
    reach = kernels.Reach(min(patches, patches_SPF.shape[1]), aligned)
    return super().__call__(patches_SPF, tile, place, reach)
