"""One session's tokens and the pages that hold their keys and values.

Promises: the first `cached` of `tokens` have valid keys and values in
`pages`; pages that other sequences may read are never written.

Host side only; not thread-safe.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import pages as pages_lib

_NOTHING = np.zeros(0, np.int32)


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
  """See the module docstring."""

  def __init__(self, pool: pages_lib.PagePool, share: bool):
    """Args:

      pool: where pages come from.
      share: whether pages are exchanged with other sequences.
    """
    self._pool = pool
    self._share = share
    self.tokens = _NOTHING
    self.spans: tuple[trajectory.ImageSpan, ...] = ()
    self.pages: list[int] = []
    self.cached = 0
    self._keys: list[bytes] = []
    self._published = 0  # Leading pages that need no publishing any more.
    self._stale = False  # Holds keys and values of older weights.

  def begin(
      self,
      tokens: np.ndarray,
      spans: tuple[trajectory.ImageSpan, ...],
      limit: int,
  ) -> int:
    """Becomes another sequence; keeps and finds what is cached of it.

    Args:
      tokens: int32, `limit` or more; kept, and read again as it grows.
      spans: images of these tokens.
      limit: at most so many of them are taken from the cache.

    Returns:
      How many leading tokens it has in common with what was cached.
    """
    size = self._pool.page_size
    common = common_prefix(
        self.tokens[: self.cached], self.spans, tokens, spans
    )
    shared = min(common, limit)
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
    """Makes room for so many tokens; False when pages are wanting."""
    for _ in range(self._pool.count(tokens) - len(self.pages)):
      page = self._pool.take()
      if page is None:
        return False
      self.pages.append(page)
    return True

  def advance(self, cached: int) -> None:
    """So many tokens are cached now; publishes the pages they fill."""
    self.cached = cached
    if not self._share or self._stale:
      return
    for block in range(self._published, cached // self._pool.page_size):
      self._pool.publish(self.pages[block], self._key(block))
      self._published = block + 1

  def rest(self) -> None:
    """Keeps what is cached, and no more."""
    self.tokens = self.tokens[: self.cached].copy()
    self.spans = tuple(s for s in self.spans if s.offset < self.cached)
    self._cut(self._pool.count(self.cached))

  def outdate(self) -> None:
    """The weights have changed; the pool has forgotten all keys."""
    self._stale = self.cached > 0

  def clear(self) -> None:
    """Gives all pages back."""
    self._cut(0)
    self._keys.clear()
    self.tokens, self.spans = _NOTHING, ()
    self.cached = self._published = 0
    self._stale = False

  def _cut(self, count: int) -> None:
    self._pool.drop(self.pages[count:])
    del self.pages[count:]

  def _key(self, block: int) -> bytes:
    size = self._pool.page_size
    while len(self._keys) <= block:
      i = len(self._keys)
      parent = self._keys[-1] if i else pages_lib.ROOT
      tokens = self.tokens[i * size : (i + 1) * size]
      self._keys.append(
          pages_lib.page_key(parent, tokens, i * size, self.spans)
      )
    return self._keys[block]
