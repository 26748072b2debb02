"""Where the tokens of a KV cache lie that is made of pages.

A policy's cache is a tree of arrays, each with an axis of rows and one of
tokens, wherever it likes. A page is to the policy a short row of its own.

Axis names: R = rows of a call, N = pages of a row.
"""

from __future__ import annotations

from typing import Any, Callable

import jax
import jax.numpy as jnp


def _axis_of(shapes_a: Any, shapes_b: Any) -> list[int | None]:
  """Per leaf the one axis on which two shape trees differ, or None."""
  axes = []
  for a, b in zip(jax.tree.leaves(shapes_a), jax.tree.leaves(shapes_b)):
    differ = [i for i, (x, y) in enumerate(zip(a.shape, b.shape)) if x != y]
    if len(differ) > 1:
      raise ValueError(
          f"init_cache made a leaf of shapes {a.shape} and {b.shape}; more than"
          " one axis depends on one argument"
      )
    axes.append(differ[0] if differ else None)
  return axes


class PageLayout:
  """Gathers rows from pages, and writes back what they have got."""

  def __init__(
      self, shape_of: Callable[[int, int], Any], pages: int, page_size: int
  ):
    """Args:

      shape_of: the cache's shapes by its number of rows and of tokens.
      pages: of the cache.
      page_size: tokens of a page.

    Raises:
      ValueError: a leaf of the cache has no such axes.
    """
    n = page_size
    self._pages = pages
    self._page_size = n
    self._page_axis = _axis_of(shape_of(2, n), shape_of(3, n))
    self._token_axis = _axis_of(shape_of(2, n), shape_of(2, n + 1))
    if None in (*self._page_axis, *self._token_axis):
      raise ValueError("every leaf of init_cache needs a batch and a length")

  def take(self, cache, pages_RN):
    """The rows' pages, side by side: as `init_cache(R, N * page size)`."""
    rows, width = pages_RN.shape
    leaves, tree = jax.tree.flatten(cache)
    part = []
    for leaf, page_axis, token_axis in zip(
        leaves, self._page_axis, self._token_axis
    ):
      leaf = jnp.take(leaf, pages_RN.reshape(-1), axis=page_axis, mode="clip")
      shape = list(leaf.shape)
      shape[page_axis : page_axis + 1] = [rows, width]
      leaf = jnp.moveaxis(leaf.reshape(shape), page_axis + 1, token_axis)
      shape = list(leaf.shape)
      shape[token_axis : token_axis + 2] = [width * self._page_size]
      part.append(leaf.reshape(shape))
    return jax.tree.unflatten(tree, part)

  def put(self, cache, part, pages_RN, starts, counts, most):
    """Writes back the `counts` positions that each row has got since `take`.

    Args:
      starts: int32[R] first new position of each row.
      counts: int32[R] new positions, at most `most`.
    """
    step = jnp.arange(most)
    position = starts[:, None] + step
    window = pages_RN.shape[1] * self._page_size
    source = jnp.minimum(position, window - 1)
    page = jnp.take_along_axis(pages_RN, source // self._page_size, axis=1)
    # Out of range is dropped: what is not new.
    page = jnp.where(step < counts[:, None], page, self._pages)
    row = jnp.arange(len(pages_RN))[:, None]
    leaves, tree = jax.tree.flatten(cache)
    out = []
    for leaf, new, page_axis, token_axis in zip(
        leaves, jax.tree.leaves(part), self._page_axis, self._token_axis
    ):
      at = [slice(None)] * leaf.ndim
      at[page_axis], at[token_axis] = row, source
      fresh = new[tuple(at)]
      at[page_axis], at[token_axis] = page, source % self._page_size
      out.append(leaf.at[tuple(at)].set(fresh, mode="drop"))
    return jax.tree.unflatten(tree, out)
