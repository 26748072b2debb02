"""Joins tower and decoder to the policies Qwen2-VL to Qwen3.5, and GLM-V.

Implements `base.Policy`. Vision tokens take the place of the embeddings of
their placeholders; those of deeper blocks (deepstack) are added after the
first decoder layers.

Promises: a token attends to earlier tokens of its own segment only, a vision
token to its own image only; `extend` equals the full forward pass; with a mesh
neither the embedding nor the logits are ever gathered whole on a device.

Axis names: see `base`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy import sharding
from tunix.rl.multi_turn.policy.layers import cached_attention
from tunix.rl.multi_turn.policy.layers import decoder_layers as layers
from tunix.rl.multi_turn.policy.layers import kernels
from tunix.rl.multi_turn.policy.layers import siglip
from tunix.rl.multi_turn.policy.models.qwen import qwen_config
from tunix.rl.multi_turn.policy.models.qwen import qwen_decoder
from tunix.rl.multi_turn.policy.models.qwen import qwen_text
from tunix.rl.multi_turn.policy.models.qwen import vision_towers

_TOWERS = {
  "qwen2": vision_towers.Qwen2,
  "qwen2_5": vision_towers.Qwen2_5,
  "qwen3": vision_towers.Qwen3,
  "glm4v": vision_towers.Glm4v,
  "siglip": siglip.VisionTower,
  "idefics3": siglip.TiledTower,
}


class QwenVL(qwen_text.QwenText):
  """See the module docstring."""

  reads_image_patches = True
  vision_modules = ("visual",)

  config: qwen_config.QwenVLConfig

  def _make_parts(self, init: layers.Init) -> None:
    """Makes the tower, then the decoder.

    Raises:
      ValueError: heads that cannot be divided among the mesh.
    """
    config, mesh = self.config, self.mesh
    qwen_text.check_heads(
      mesh, "vision", config.vision.num_heads, config.vision_tensor_parallel
    )
    tower = _TOWERS[config.traits.tower]
    self.visual = tower(config, init, mesh)
    self.language_model = self.decoder_class(config, init, mesh)

  @property
  def decoder(self) -> qwen_decoder.Decoder:
    """See `QwenText.decoder`."""
    return self.language_model

  @property
  def wants_aligned_images(self) -> bool:
    """See `base.Policy`."""
    return kernels.windows_help(self.config.vision.head_dim)

  def encode_images(
    self,
    patches: base.Array,
    patch_segments: base.Array,
    patch_positions: base.Array,
    image_patches: int = 0,
    aligned_images: bool = False,
  ) -> jax.Array:
    """Returns [S, V, 1 + deepstack, D]; the last two as of `PolicyInputs`."""
    patches, patch_segments, patch_positions = map(
      jnp.asarray, (patches, patch_segments, patch_positions)
    )
    patches = sharding.constrain(patches, self.mesh, *sharding.TOKENS)
    # A buffer of bool segments is one image.
    is_one_image = not image_patches or patch_segments.dtype == jnp.bool_
    reach = kernels.Reach(patches.shape[1])
    if not is_one_image:
      reach = kernels.Reach(image_patches, aligned_images)
    return self.visual(patches, patch_segments, patch_positions, reach)

  def _embed(
    self,
    tokens_BT: base.Array,
    vision_index_BT: base.Array | None,
    vision_SVXD: base.Array | None,
  ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns [B, T, D], and the additions after each of the first layers."""
    x = self._look_up(tokens_BT)
    if vision_index_BT is None or vision_SVXD is None:
      return x, ()
    b, t = x.shape[:2]
    s, _, parts, d = vision_SVXD.shape
    # Any token of a row may show any vision token of its buffer.
    vision_SVXD = sharding.constrain(
      jnp.asarray(vision_SVXD), self.mesh, cached_attention.ROWS
    )
    index = jnp.asarray(vision_index_BT)
    flat = jnp.maximum(index, 0).reshape(s, b // s * t)
    vision_BTXD = jax.vmap(lambda v, i: v[i])(vision_SVXD, flat)
    vision_BTXD = vision_BTXD.reshape(b, t, parts, d).astype(x.dtype)
    vision_BTXD = sharding.constrain(vision_BTXD, self.mesh, *sharding.TOKENS)
    is_vision = (index >= 0)[..., None]
    x = jnp.where(is_vision, vision_BTXD[:, :, 0], x)
    early = tuple(
      jnp.where(is_vision, vision_BTXD[:, :, i], 0) for i in range(1, parts)
    )
    return x, early
