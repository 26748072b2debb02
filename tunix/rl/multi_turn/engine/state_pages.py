"""Keeps recurrent states in the pages of a KV cache.

A layer of linear attention has a state of fixed size in place of keys and
values. Each page holds a snapshot of it, taken after the last token that the
page holds. A sequence goes on from its last page's snapshot, and one that
begins alike goes on from the end of a page they share: pages are found, shared
and dropped as keys and values are (`kv_cache`). For that no call may pass a
page's end: `PagePool.room` is its limit.

Promises: `take` returns the state after a row's cached tokens, of whichever
session computed it; `put` changes the page of a row's last new token only.

Does not: keep snapshots within a page: a sequence that is cut there is computed
again from the page's beginning.

Axis names: R = rows of a call, N = pages of a row.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.engine import config as config_lib

_UNIT = 64  # Tokens of a page are a multiple of this.


def take(
    leaf: jax.Array,
    page_axis: int,
    pages_RN: jax.Array,
    starts: jax.Array,
    page_size: int,
) -> jax.Array:
  """Returns the rows' states after `starts` tokens; any where that is 0."""
  block = jnp.maximum(starts - 1, 0) // page_size
  page = jnp.take_along_axis(pages_RN, block[:, None], axis=1)[:, 0]
  return jnp.take(leaf, page, axis=page_axis, mode="clip")


def put(
    leaf: jax.Array,
    new: jax.Array,
    page_axis: int,
    pages_RN: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    page_size: int,
) -> jax.Array:
  """Writes the rows' states after `counts` new tokens, where there are any."""
  last = jnp.maximum(starts + counts - 1, 0) // page_size
  page = jnp.take_along_axis(pages_RN, last[:, None], axis=1)[:, 0]
  # Out of range, and dropped.
  page = jnp.where(counts > 0, page, np.iinfo(np.int32).max)
  at: list[Any] = [slice(None)] * leaf.ndim
  at[page_axis] = page
  return leaf.at[tuple(at)].set(new, mode="drop")


def sized(
    shape_of: Callable[[int, int], Any], config: config_lib.EngineConfig
) -> config_lib.EngineConfig:
  """Returns the settings with a page size that a policy's states are worth.

  Unless one is given, a page's keys and values are as large as its snapshot at
  least, or a page holds a whole context. Without states nothing changes.

  Args:
    shape_of: a cache's shapes by its number of rows and of tokens.
    config: Settings of the engine.
  """
  if config.page_size:
    return config
  one, two = (jax.tree.leaves(shape_of(1, n)) for n in (1, 2))
  size = lambda leaf: leaf.size * jnp.dtype(leaf.dtype).itemsize
  states = sum(size(a) for a, b in zip(one, two) if a.shape == b.shape)
  if not states:
    return config
  token = sum(size(b) - size(a) for a, b in zip(one, two))
  pages = -(-states // (max(token, 1) * _UNIT))
  return dataclasses.replace(
      config, page_size=min(pages * _UNIT, config.context_length)
  )
