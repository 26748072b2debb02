"""Predicts the bytes of an engine's caches, without making them.

Does not: count programs' temporary buffers, or split over a mesh.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast, Sequence

from flax import nnx
import jax
import jax.numpy as jnp
from tunix.rl.multi_turn.engine import buckets as buckets_lib
from tunix.rl.multi_turn.engine import config as config_lib
from tunix.rl.multi_turn.engine import device_state
from tunix.rl.multi_turn.engine import state_pages
from tunix.rl.multi_turn.policy import base


@dataclasses.dataclass(frozen=True)
class CacheBytes:
  """Bytes of the caches on the device, all shards together.

  Attributes:
    kv: of the KV cache's pages.
    kv_tokens: that they hold.
    vision: of the pool of vision tokens.
    images: of the patches that the largest encode call takes.
  """

  kv: int
  kv_tokens: int
  vision: int
  images: int


def of_engine(
    model: base.Policy,
    processor: base.Processor,
    config: config_lib.EngineConfig,
    image_sizes: Sequence[tuple[int, int]] = (),
) -> CacheBytes:
  """The caches of a `RolloutEngine` of these arguments.

  Raises:
    ValueError: as of the engine.
  """
  config = state_pages.sized(device_state.cache_shapes(model), config)
  chosen = buckets_lib.choose(processor, config, image_sizes)
  context, slots = config.context_length, config.slots
  pages_of = lambda tokens: -(-tokens // chosen.page_size)
  pages = max(
      pages_of(config.cache_tokens or slots * context), pages_of(context)
  )
  vision_tokens = config.vision_cache_tokens or max(
      context, slots * context // 2
  )
  graphdef, state = nnx.split(cast(nnx.Module, model))
  paged = isinstance(model, device_state.PagedPolicy) and model.reads_pages

  def a_page(state: Any) -> Any:
    policy: Any = nnx.merge(graphdef, state)
    make = policy.init_pages if paged else policy.init_cache
    return make(1, chosen.page_size)

  def a_token(state: Any, *image: Any) -> Any:
    policy: Any = nnx.merge(graphdef, state)
    return policy.encode_images(*image)

  n = processor.patches_per_token
  image = (
      jax.ShapeDtypeStruct((1, n, processor.patch_bytes), jnp.uint8),
      jax.ShapeDtypeStruct((1, n), jnp.bool_),
      jax.ShapeDtypeStruct((1, n, processor.position_axes), jnp.int32),
  )
  # Of one, and multiplied here: a cache of any size has a number of bytes.
  return CacheBytes(
      kv=(1 + pages) * _bytes(jax.eval_shape(a_page, state)),
      kv_tokens=pages * chosen.page_size,
      vision=vision_tokens * _bytes(jax.eval_shape(a_token, state, *image))
      if n
      else 0,
      images=max(chosen.images, default=0)
      * max(chosen.patches, default=0)
      * processor.patch_bytes,
  )


def _bytes(tree: Any) -> int:
  total = 0
  for leaf in jax.tree.leaves(tree):
    size = int(jnp.dtype(leaf.dtype).itemsize)
    for side in leaf.shape:
      size *= int(side)
    total += size
  return total
