"""Implements the vision tower of SmolVLM and Idefics3.

An image is tiles of one size, among them the whole of it, made small. Each goes
through SigLIP on its own; a vision token is a square of patches, their outputs
side by side ("pixel shuffle"), times a matrix. The decoder is Llama's.

Source: Laurencon et al. 2024, "Building and better understanding
vision-language models", Marafioti et al. 2025, "SmolVLM", and `transformers`'
`idefics3` and `smolvlm`, to which the numbers are held in tests. Axis names:
see `base`.
"""

from __future__ import annotations

from flax import nnx
import jax
import jax.numpy as jnp
from tunix.rl.multi_turn.policy import kernels
from tunix.rl.multi_turn.policy import layers
from tunix.rl.multi_turn.policy import qwen_shapes
from tunix.rl.multi_turn.policy import siglip


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


class VisionTower(siglip.VisionTower):
  """See the module docstring."""

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
