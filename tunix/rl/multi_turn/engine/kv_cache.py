"""Keeps the sequences' keys and values in pages that they share.

A sequence's keys and values lie in pages of a fixed number of tokens. Several
sequences that begin alike may hold one page; after the last holder has dropped
it, it stays findable by its content until its room is needed. `PagePool` counts
holders, `CachedSequence` is one session's pages, `PageLayout` gathers rows from
pages on the device. On a mesh each shard of the cache has a pool of its own,
whose numbers count within the shard.

Promises: one sequence alone writes a page, and not once it is published; a held
page is never handed out again; pages without a holder are reused in the order
in which they were dropped, ends of sequences first. The first `cached` tokens
of a sequence have valid keys and values. Page 0 holds nothing and is never
handed out: tables are padded with it.

Does not know requests or sessions; not thread-safe.

Axis names: R = rows of a call, N = pages of a row.
"""

from __future__ import annotations

import collections
import functools
import hashlib
from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import state_pages
from tunix.rl.multi_turn.policy import cached_attention

ROOT = b""
"""The key before a sequence's first page."""

_NO_LIMIT = 1 << 30
_NO_TOKENS = np.zeros(0, np.int32)


def page_key(
    parent: bytes,
    tokens: np.ndarray,
    start: int,
    spans: Sequence[trajectory.ImageSpan],
) -> bytes:
  """Names a page's content: its tokens, its pixels, and all before it.

  Args:
    parent: key of the page before, or ROOT.
    tokens: int32[page size], those of the page.
    start: place of the first of them in its sequence.
    spans: images of the sequence, in order.
  """
  digest = hashlib.blake2b(parent, digest_size=16)
  digest.update(np.ascontiguousarray(tokens, np.int32).tobytes())
  end = start + len(tokens)
  for span in spans:
    if span.offset < end and span.end > start:
      digest.update(f"{span.image.sha256}@{span.offset - start}".encode())
  return digest.digest()


class PagePool:
  """Hands out pages, counts their holders, finds them by key."""

  def __init__(self, pages: int, page_size: int, keeps_state: bool = False):
    """Args:

      pages: of the cache, page 0 included.
      page_size: tokens of a page.
      keeps_state: whether a page holds a state after its last token, see
        `state_pages`: a sequence goes on from its end or a page's.
    """
    if pages < 2:
      raise ValueError(f"pages must be >= 2, got {pages}")
    self.page_size = page_size
    self.keeps_state = keeps_state
    self.found = 0  # Pages that `find` has found, ever.
    self._holders = [0] * pages
    self._keys: list[bytes | None] = [None] * pages
    self._by_key: dict[bytes, int] = {}
    self._free = list(range(pages - 1, 0, -1))
    # Published pages without a holder, longest unused first.
    self._kept: collections.OrderedDict[int, None] = collections.OrderedDict()

  @property
  def capacity(self) -> int:
    """Pages that can be handed out at all."""
    return len(self._holders) - 1

  @property
  def available(self) -> int:
    """Pages that can be handed out now."""
    return len(self._free) + len(self._kept)

  @property
  def kept(self) -> int:
    """Pages without a holder that can still be found."""
    return len(self._kept)

  def room(self, start: int) -> int:
    """Tokens that a call may add to a sequence of `start` tokens."""
    left = self.page_size - start % self.page_size
    return left if self.keeps_state else _NO_LIMIT

  def count(self, tokens: int) -> int:
    """Pages that so many tokens fill, the last one perhaps in part."""
    return -(-tokens // self.page_size)

  def table(
      self,
      held: Sequence[Sequence[int]],
      rows: Sequence[int] | np.ndarray,
      count: int,
      window: int,
  ) -> np.ndarray:
    """int32[count, pages of a window]: each sequence's first pages in its row,
    0 where there is none."""
    width = self.count(window)
    table = np.zeros((count, width), np.int32)
    for row, pages in zip(rows, held, strict=True):
      first = pages[:width]
      table[row, : len(first)] = first
    return table

  def take(self) -> int | None:
    """A page for one holder, or None when all are held."""
    if self._free:
      page = self._free.pop()
    elif self._kept:
      page, _ = self._kept.popitem(last=False)
      self._unpublish(page)
    else:
      return None
    self._holders[page] = 1
    return page

  def find(self, key: bytes) -> int | None:
    """Holds the page published under `key`, if there is one."""
    page = self._by_key.get(key)
    if page is not None:
      self._kept.pop(page, None)
      self._holders[page] += 1
      self.found += 1
    return page

  def __contains__(self, key: bytes) -> bool:
    return key in self._by_key

  def drop(self, pages: Sequence[int]) -> None:
    """Ends a hold of the last pages of a sequence, given in its order."""
    for page in reversed(pages):
      self._holders[page] -= 1
      if self._holders[page]:
        continue
      if self._keys[page] is None:
        self._free.append(page)
      else:
        self._kept[page] = None

  def publish(self, page: int, key: bytes) -> None:
    """Makes a held page findable, unless another page has this key."""
    if self._keys[page] is None and key not in self._by_key:
      self._keys[page] = key
      self._by_key[key] = page

  def writable(self, page: int) -> bool:
    """Whether the page has one holder; it is no longer findable then."""
    if self._holders[page] != 1:
      return False
    self._unpublish(page)
    return True

  def forget(self) -> None:
    """Forgets all keys: the weights changed. Holders keep their pages."""
    self._by_key.clear()
    self._keys = [None] * len(self._keys)
    self._free.extend(self._kept)
    self._kept.clear()

  def _unpublish(self, page: int) -> None:
    key = self._keys[page]
    if key is not None:
      del self._by_key[key]
      self._keys[page] = None


def common_prefix(
    old_T: np.ndarray,
    old_spans: Sequence[trajectory.ImageSpan],
    new_T: np.ndarray,
    new_spans: Sequence[trajectory.ImageSpan],
) -> int:
  """Leading tokens that two sequences share, same pixels included."""
  n = min(len(old_T), len(new_T))
  differ = np.flatnonzero(old_T[:n] != new_T[:n])
  n = int(differ[0]) if len(differ) else n
  for i in range(max(len(old_spans), len(new_spans))):
    old = old_spans[i] if i < len(old_spans) else None
    new = new_spans[i] if i < len(new_spans) else None
    if old == new:
      continue
    return min([n] + [s.offset for s in (old, new) if s is not None])
  return n


class CachedSequence:
  """One session's tokens and the pages with their keys and values.

  Attributes:
    tokens: int32, `cached` or more.
    spans: images of these tokens.
    pages: held, in the sequence's order.
    cached: leading tokens with valid keys and values.
  """

  def __init__(self, pool: PagePool, share: bool):
    """Args:

      pool: hands out pages.
      share: whether to share pages with other sequences.
    """
    self._pool = pool
    self._share = share
    self._reset()

  def move(self, pool: PagePool) -> None:
    """Drops all pages; takes further ones from another pool."""
    self.clear()
    self._pool = pool

  def _reset(self) -> None:
    self.tokens = _NO_TOKENS
    self.spans: tuple[trajectory.ImageSpan, ...] = ()
    self.pages: list[int] = []
    self.cached = 0
    self._keys: list[bytes] = []
    self._published = 0  # Leading pages that are published or need not be.
    self._stale = False  # Holds keys and values of older weights.

  def begin(
      self,
      tokens: np.ndarray,
      spans: tuple[trajectory.ImageSpan, ...],
      limit: int,
  ) -> int:
    """Turns into another sequence; keeps and finds its cached prefix.

    Args:
      tokens: int32, `limit` or more; kept, and read again as it grows.
      spans: images of these tokens.
      limit: tokens that the cache may serve at most.

    Returns:
      Leading tokens that the new sequence shares with the cached one.
    """
    size = self._pool.page_size
    common = common_prefix(
        self.tokens[: self.cached], self.spans, tokens, spans
    )
    shared = min(common, limit)
    if self._pool.keeps_state and shared < self.cached:
      shared -= shared % size
    self._cut(self._pool.count(shared))
    if shared % size and not self._pool.writable(self.pages[-1]):
      self._cut(shared // size)
      shared -= shared % size
    self._stale &= shared > 0
    del self._keys[shared // size :]
    self._published = shared // size
    self.tokens, self.spans, self.cached = tokens, spans, shared
    self.adopt(limit)
    return common

  def adopt(self, limit: int) -> int:
    """Takes pages that others have published; returns the tokens gained."""
    size, before = self._pool.page_size, self.cached
    while (key := self.next_key(limit)) is not None:
      page = self._pool.find(key)
      if page is None:
        break
      block = self.cached // size
      if block < len(self.pages):
        self._pool.drop(self.pages[block : block + 1])
        self.pages[block] = page
      else:
        self.pages.append(page)
      self.cached = (block + 1) * size
      self._published = block + 1
    return self.cached - before

  def next_key(self, limit: int) -> bytes | None:
    """Key of the page to be filled next, if `limit` tokens fill it."""
    size = self._pool.page_size
    block = self.cached // size
    if not self._share or self._stale or (block + 1) * size > limit:
      return None
    return self._key(block)

  def grow(self, tokens: int) -> bool:
    """Makes room for so many tokens; False when the pool has too few pages."""
    for _ in range(self._pool.count(tokens) - len(self.pages)):
      page = self._pool.take()
      if page is None:
        return False
      self.pages.append(page)
    return True

  def advance(self, cached: int) -> None:
    """Records that so many tokens are cached; publishes the full pages."""
    self.cached = cached
    if not self._share or self._stale:
      return
    for block in range(self._published, cached // self._pool.page_size):
      self._pool.publish(self.pages[block], self._key(block))
      self._published = block + 1

  def rest(self) -> None:
    """Keeps the cached tokens; frees the pages reserved beyond them."""
    self.tokens = self.tokens[: self.cached].copy()
    self.spans = tuple(s for s in self.spans if s.offset < self.cached)
    self._cut(self._pool.count(self.cached))

  def outdate(self) -> None:
    """Marks the cache as of older weights; the pool has forgotten all keys."""
    self._stale = self.cached > 0

  def clear(self) -> None:
    """Drops all pages."""
    self._cut(0)
    self._reset()

  def _cut(self, count: int) -> None:
    self._pool.drop(self.pages[count:])
    del self.pages[count:]

  def _key(self, block: int) -> bytes:
    size = self._pool.page_size
    while len(self._keys) <= block:
      i = len(self._keys)
      parent = self._keys[-1] if i else ROOT
      tokens = self.tokens[i * size : (i + 1) * size]
      self._keys.append(page_key(parent, tokens, i * size, self.spans))
    return self._keys[block]


def _axis_of(shapes_a: Any, shapes_b: Any) -> list[int | None]:
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
  state, of which a page holds a snapshot; see `state_pages`. On a mesh, every
  shard has as many pages as any other, and gathers and writes its own block of
  the rows.

  Attributes:
    keeps_state: whether there are states.
    specs: of each leaf, flat; () without a mesh.
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
      mesh: that the cache lies on.
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
          for axis, leaf in zip(
              self._page_axis, jax.tree.leaves(shape_of(1, n))
          )
      )

  def take(self, cache: Any, pages_RN: jax.Array, starts: jax.Array) -> Any:
    """The rows' pages, side by side: as `init_cache(R, N * page size)`.

    Args:
      cache: to read from.
      pages_RN: int32, each row's pages.
      starts: int32[R] tokens of each row that they hold.
    """
    return self._local(self._take, cache, pages_RN, starts)

  def _local(
      self, function: Any, cache: Any, *more: Any, parts: tuple[Any, ...] = ()
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
        in_specs=(
            places, *(places,) * len(parts), *(rows,) * len(more)
        ),
        out_specs=places,
        check_vma=False,
    )(cache, *parts, *more)  # pyformat: disable

  def _take(self, cache: Any, pages_RN, starts) -> Any:
    rows, width = pages_RN.shape
    leaves, tree = jax.tree.flatten(cache)
    part = []
    for leaf, page_axis, token_axis in zip(
        leaves, self._page_axis, self._token_axis
    ):
      if token_axis is None:
        part.append(
            state_pages.take(
                leaf, page_axis, pages_RN, starts, self._page_size
            )
        )
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
      cache: Any,
      part: Any,
      pages_RN: jax.Array,
      starts: jax.Array,
      counts: jax.Array,
      most: int,
  ) -> Any:
    """Writes back the positions that `extend` added to `take`'s rows.

    Args:
      cache: to write to.
      part: the rows after `extend`.
      pages_RN: as of `take`.
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
      self, cache: Any, part: Any, pages_RN, starts, counts, *, most: int
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
            state_pages.put(
                leaf,
                new,
                page_axis,
                pages_RN,
                starts,
                counts,
                self._page_size,
            )
        )
        continue
      at: list[Any] = [slice(None)] * leaf.ndim
      at[page_axis], at[token_axis] = row, source
      fresh = new[tuple(at)]
      at[page_axis], at[token_axis] = page, source % self._page_size
      out.append(leaf.at[tuple(at)].set(fresh, mode="drop"))
    return jax.tree.unflatten(tree, out)
