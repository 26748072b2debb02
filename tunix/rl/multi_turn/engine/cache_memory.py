"""Sizes an engine's caches, and predicts their bytes without making them.

Does not: count programs' temporary buffers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast, Sequence

from flax import nnx
import jax
import jax.numpy as jnp
from tunix.rl.multi_turn.engine import buckets as buckets_lib
from tunix.rl.multi_turn.engine import config as config_lib
from tunix.rl.multi_turn.engine import device_state
from tunix.rl.multi_turn.engine import page_layout
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy.layers import cached_attention


@dataclasses.dataclass(frozen=True)
class CacheSizes:
  """Sizes of a shard of an engine's caches.

  Attributes:
    pages: Pages of the KV cache, the empty page 0 included.
    vision_tokens: Places of the pool.
  """

  pages: int
  vision_tokens: int


def sizes(
  processor: base.Processor,
  config: config_lib.EngineConfig,
  chosen: buckets_lib.Buckets,
  shards: int = 1,
) -> CacheSizes:
  """Returns the sizes of the caches of one of `shards` shards.

  A shard holds at least a whole context, and the vision tokens of the largest
  image.
  """
  context, slots = config.context_length, -(-config.slots // shards)
  pages_of = lambda tokens: -(-tokens // chosen.page_size)
  # Whole pages a slot: full slots do not preempt one another.
  pages = slots * pages_of(context)
  if config.cache_tokens:
    pages = pages_of(-(-config.cache_tokens // shards))
  vision = -(-config.vision_cache_tokens // shards)
  if chosen.patches and vision:
    vision = max(vision, chosen.patches[-1] // processor.patches_per_token)
  return CacheSizes(
    pages=1 + max(pages, pages_of(context)),
    vision_tokens=vision or max(context, slots * context // 2),
  )


@dataclasses.dataclass(frozen=True)
class CacheBytes:
  """Bytes of the caches on a device.

  Attributes:
    kv: Bytes of its KV cache's pages.
    kv_tokens: Tokens that all shards' pages hold.
    vision: Bytes of its vision tokens.
    images: Bytes of its patches of the largest encode call.
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
  mesh: jax.sharding.Mesh | None = None,
  platform: str = "",
) -> CacheBytes:
  """Returns the bytes of the caches of a `RolloutEngine`.

  Args:
    model, processor, config, image_sizes: as of the engine.
    mesh: Mesh that the policy lies on, real or abstract.
    platform: Platform of its devices; "" = JAX's default.

  Raises:
    ValueError: The engine would refuse the arguments.
  """
  config = page_layout.sized(device_state.cache_shapes(model), config)
  shards = cached_attention.row_shards(mesh)
  chosen = buckets_lib.choose(
    processor,
    config,
    image_sizes,
    shards,
    platform,
    device_state.count_parameters(model),
  )
  cache_sizes = sizes(processor, config, chosen, shards)
  graphdef, state = nnx.split(cast(nnx.Module, model))
  paged = isinstance(model, device_state.PagedPolicy) and model.reads_pages

  def a_page(state: object) -> Any:
    policy: Any = nnx.merge(graphdef, state)
    make = policy.init_pages if paged else policy.init_cache
    return make(1, chosen.page_size)

  def a_token(state: object, *image: Any) -> Any:
    policy: Any = nnx.merge(graphdef, state)
    return policy.encode_images(*image)

  n = processor.patches_per_token
  image = (
    jax.ShapeDtypeStruct((1, n, processor.patch_bytes), jnp.uint8),
    jax.ShapeDtypeStruct((1, n), jnp.bool_),
    jax.ShapeDtypeStruct((1, n, processor.position_axes), jnp.int32),
  )
  heads = 1
  text = base.optional(model.config, "text")
  linear = base.optional(base.optional(model.config, "traits"), "linear")
  if (
    mesh is not None
    and text is not None
    and hasattr(model, "cache_axes")
    and not linear  # States have no such axes, and lie whole on each device.
  ):
    if cached_attention.split_heads(mesh, text.num_key_value_heads):
      heads = mesh.shape["tensor"]
  # Of one, and multiplied here: a cache of any size has a number of bytes.
  return CacheBytes(
    kv=cache_sizes.pages * _bytes(jax.eval_shape(a_page, state)) // heads,
    kv_tokens=shards * (cache_sizes.pages - 1) * chosen.page_size,
    vision=(
      cache_sizes.vision_tokens * _bytes(jax.eval_shape(a_token, state, *image))
      if n
      else 0
    ),
    images=max(chosen.images, default=0)
    // shards
    * max(chosen.patches, default=0)
    * processor.patch_bytes,
  )


def _bytes(tree: object) -> int:
  return sum(
    math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
    for leaf in jax.tree.leaves(tree)
  )
