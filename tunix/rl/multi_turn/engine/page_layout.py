"""Gathers rows from a KV cache's pages on the device, and writes them back.

Promises: page 0 is only ever read; a copy writes pages that no other copy of
the call reads. On a mesh every shard reads and writes its own pages.

Does not know who holds a page; `page_pool` does.

Axis names: R = rows of a call, N = pages of a row.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.engine import config as config_lib
from tunix.rl.multi_turn.policy.layers import cached_attention

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


def _axis_of(shapes_a: object, shapes_b: object) -> list[int | None]:
  """Per leaf the one axis on which two shape trees differ, if any."""
  axes: list[int | None] = []
  for a, b in zip(jax.tree.leaves(shapes_a), jax.tree.leaves(shapes_b)):
    differ = [i for i, (x, y) in enumerate(zip(a.shape, b.shape)) if x != y]
    if len(differ) > 1:
      raise ValueError(
        f"init_cache made a leaf of shapes {a.shape} and {b.shape}; more than"
        " one axis depends on one argument"
      )
    axes.append(differ[0] if differ else None)
  return axes


def _spec(
  axes: Sequence[Any], page_axis: int, ndim: int
) -> jax.sharding.PartitionSpec:
  named = list(axes) or [None] * ndim
  if len(named) != ndim:
    raise ValueError(
      f"cache_axes names {len(named)} dimensions of a cache's array that has"
      f" {ndim}"
    )
  named[page_axis] = cached_attention.ROWS
  return jax.sharding.PartitionSpec(*named)


class PageLayout:
  """Gathers rows from a cache's pages, and writes new positions back.

  A policy's cache is a tree of arrays, each with one axis of rows and one of
  tokens. To the policy, a page is a short row. An array without tokens is a
  state, of which a page holds a snapshot; see `page_layout`. On a mesh, every
  shard has as many pages as any other, and gathers and writes its own block of
  the rows.

  Attributes:
    keeps_state: whether there are states.
    specs: Partition of each leaf, flat; () without a mesh.
  """

  def __init__(
    self,
    shape_of: Callable[[int, int], Any],
    page_size: int,
    mesh: jax.sharding.Mesh | None = None,
    axes: Sequence[Any] = (),
  ):
    """Args:

      shape_of: the cache's shapes by its number of rows and of tokens.
      page_size: tokens of a page.
      mesh: Mesh that the cache lies on.
      axes: mesh axes of the dimensions of every leaf; () = pages are split,
        nothing else is.

    Raises:
      ValueError: a leaf of the cache has no such axes.
    """
    n = page_size
    self._page_size = n
    page_axis = _axis_of(shape_of(2, n), shape_of(3, n))
    if None in page_axis:
      raise ValueError("every leaf of init_cache needs a batch")
    self._page_axis = [axis for axis in page_axis if axis is not None]
    self._token_axis = _axis_of(shape_of(2, n), shape_of(2, n + 1))
    self.keeps_state = None in self._token_axis
    self._mesh = mesh
    self.specs: tuple[jax.sharding.PartitionSpec, ...] = ()
    if mesh is not None:
      self.specs = tuple(
        _spec(axes, axis, leaf.ndim)
        for axis, leaf in zip(self._page_axis, jax.tree.leaves(shape_of(1, n)))
      )

  def copy(
    self, cache: object, sources_R: jax.Array, targets_R: jax.Array
  ) -> Any:
    """Copies whole pages; a target out of range is dropped.

    Args:
      cache: Cache to read from and write to.
      sources_R: int32, pages of the row's own shard.
      targets_R: int32, pages of the same shard; none of them is a source.
    """
    return self._local(self._copy, cache, sources_R, targets_R)

  def _copy(self, cache: object, sources_R, targets_R) -> Any:
    leaves, tree = jax.tree.flatten(cache)
    out = []
    for leaf, axis in zip(leaves, self._page_axis):
      at: list[Any] = [slice(None)] * leaf.ndim
      at[axis] = targets_R
      pages = jnp.take(leaf, sources_R, axis=axis, mode="clip")
      out.append(leaf.at[tuple(at)].set(pages, mode="drop"))
    return jax.tree.unflatten(tree, out)

  def take(self, cache: object, pages_RN: jax.Array, starts: jax.Array) -> Any:
    """Returns the rows' pages, side by side: as `init_cache(R, N * page size)`.

    Args:
      cache: Cache to read from.
      pages_RN: int32, each row's pages.
      starts: int32[R] tokens of each row that they hold.
    """
    return self._local(self._take, cache, pages_RN, starts)

  def _local(
    self,
    function: Callable[..., Any],
    cache: object,
    *more: Any,
    parts: tuple[Any, ...] = (),
  ) -> Any:
    """`function(cache, *parts, *more)`, each device on what it holds; `more`
    is split by rows."""
    if self._mesh is None:
      return function(cache, *parts, *more)
    places = jax.tree.unflatten(jax.tree.structure(cache), self.specs)
    rows = jax.sharding.PartitionSpec(cached_attention.ROWS)
    return jax.shard_map(
      function,
      mesh=self._mesh,
      in_specs=(places, *(places,) * len(parts), *(rows,) * len(more)),
      out_specs=places,
      check_vma=False,
    )(cache, *parts, *more)

  def _take(self, cache: object, pages_RN, starts) -> Any:
    rows, width = pages_RN.shape
    leaves, tree = jax.tree.flatten(cache)
    part = []
    for leaf, page_axis, token_axis in zip(
      leaves, self._page_axis, self._token_axis
    ):
      if token_axis is None:
        part.append(take(leaf, page_axis, pages_RN, starts, self._page_size))
        continue
      leaf = jnp.take(leaf, pages_RN.reshape(-1), axis=page_axis, mode="clip")
      shape = list(leaf.shape)
      shape[page_axis : page_axis + 1] = [rows, width]
      leaf = jnp.moveaxis(leaf.reshape(shape), page_axis + 1, token_axis)
      shape = list(leaf.shape)
      shape[token_axis : token_axis + 2] = [width * self._page_size]
      part.append(leaf.reshape(shape))
    return jax.tree.unflatten(tree, part)

  def put(
    self,
    cache: object,
    part: object,
    pages_RN: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    most: int,
  ) -> Any:
    """Writes back the positions that `extend` added to `take`'s rows.

    Args:
      cache: Cache to write to.
      part: the rows after `extend`.
      pages_RN: int32, each row's pages.
      starts: int32[R] first new position of each row.
      counts: int32[R] new positions, at most `most`.
      most: static.
    """
    return self._local(
      functools.partial(self._put, most=most),
      cache,
      pages_RN,
      starts,
      counts,
      parts=(part,),
    )

  def _put(
    self, cache: object, part: object, pages_RN, starts, counts, *, most: int
  ) -> Any:
    step = jnp.arange(most)
    position = starts[:, None] + step
    window = pages_RN.shape[1] * self._page_size
    source = jnp.minimum(position, window - 1)
    page = jnp.take_along_axis(pages_RN, source // self._page_size, axis=1)
    # A page out of range is dropped: it stands for positions that are not new.
    page = jnp.where(step < counts[:, None], page, np.iinfo(np.int32).max)
    row = jnp.arange(len(pages_RN))[:, None]
    leaves, tree = jax.tree.flatten(cache)
    out = []
    for leaf, new, page_axis, token_axis in zip(
      leaves, jax.tree.leaves(part), self._page_axis, self._token_axis
    ):
      if token_axis is None:
        out.append(
          put(leaf, new, page_axis, pages_RN, starts, counts, self._page_size)
        )
        continue
      at: list[Any] = [slice(None)] * leaf.ndim
      at[page_axis], at[token_axis] = row, source
      fresh = new[tuple(at)]
      at[page_axis], at[token_axis] = page, source % self._page_size
      out.append(leaf.at[tuple(at)].set(fresh, mode="drop"))
    return jax.tree.unflatten(tree, out)
