"""Keeps each session's keys and values in pages that sessions share.

A sequence's keys and values lie in pages of a fixed number of tokens, which a
`page_pool.PagePool` hands out. `CachedSequence` is one session's pages: some it
has computed itself, others it shares because another sequence begins alike.

A sequence that is given a `Plan` shares nothing but what it would have computed
to the bit: what calls of the same program have computed from the same tokens.

Promises: one sequence alone writes a page, and not once it is published. The
first `cached` tokens of a sequence have valid keys and values, once the copies
that its pool lists are made.

Does not know requests or sessions, or touch the device (`page_layout` does);
not thread-safe.
"""

from __future__ import annotations

from typing import Callable, Iterable, Sequence

import numpy as np
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import page_pool

Plan = Callable[[int], Iterable[tuple[int, int]]]
"""From a token on, the calls that compute a sequence: where each ends, and the
name of its program, 64 bits."""

_NO_TOKENS = np.zeros(0, np.int32)


def common_prefix(
  old_T: np.ndarray,
  old_spans: Sequence[trajectory.ImageSpan],
  new_T: np.ndarray,
  new_spans: Sequence[trajectory.ImageSpan],
) -> int:
  """Returns the number of leading tokens, pixels included, that are shared."""
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
    spans: Images among `tokens`.
    pages: Pages that the sequence holds, in its order.
    cached: leading tokens with valid keys and values.
    outdated: Whether older weights computed some of them. Only the completion
      that ran during the update may read such a cache.
    lost: Leading tokens that were cached until an update dropped them.
  """

  def __init__(self, pool: page_pool.PagePool, share: bool):
    """Args:

    pool: hands out pages.
    share: whether to share pages with other sequences.
    """
    self._pool = pool
    self._share = share
    # What the last update has dropped; its tokens are to be computed again.
    self._former: tuple[np.ndarray, tuple[trajectory.ImageSpan, ...]] = (
      _NO_TOKENS,
      (),
    )
    self._reset()

  def move(self, pool: page_pool.PagePool) -> None:
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
    self.outdated = False
    self.lost = 0
    # With a plan: where its calls end, and the program of each token.
    self._ends: list[int] | None = None
    self._programs = page_pool.NO_PROGRAMS

  def begin(
    self,
    tokens: np.ndarray,
    spans: tuple[trajectory.ImageSpan, ...],
    limit: int,
    plan: Plan | None = None,
  ) -> int:
    """Begins another sequence; keeps and finds its cached prefix.

    Args:
      tokens: int32, `limit` or more; kept, and read again as it grows.
      spans: Images among `tokens`.
      limit: tokens that the cache may serve at most.
      plan: the calls that compute it up to the limit; None: it shares what
        any calls have computed.

    Returns:
      Leading tokens that the new sequence shares with the cached one.
    """
    size = self._pool.page_size
    # 1. Keep what the session has cached of the new sequence: whole pages of
    #    it where there are recurrent states or a plan.
    common = common_prefix(
      self.tokens[: self.cached], self.spans, tokens, spans
    )
    shared = min(common, limit)
    if (self._pool.keeps_state or plan) and shared < self.cached:
      shared -= shared % size
    self._cut(self._pool.count(shared))
    # 2. The last page will be written behind the shared tokens: give it up if
    #    another sequence holds it. With a plan nothing may depend on other
    #    holders: only a copy that is still to be made can be one, and it reads
    #    the page before it is written.
    alone = plan is not None or not shared % size
    if not alone and not self._pool.writable(self.pages[-1]):
      self._cut(shared // size)
      shared -= shared % size
    # 3. Count what an update has dropped, and forget the names of pages whose
    #    tokens change.
    self.lost = min(common_prefix(*self._former, tokens, spans), limit)
    del self._keys[shared // size :]
    self._published = shared // size
    self.tokens, self.spans, self.cached = tokens, spans, shared
    # 4. With a plan, name each token by the program that will compute it, so
    #    that only equal bits are shared.
    if plan is None:
      self._ends, self._programs = None, page_pool.NO_PROGRAMS
    else:
      self._ends = []
      for end, program in plan(shared):
        self._name(self._ends[-1] if self._ends else shared, end, program)
        self._ends.append(end)
    # 5. Take further pages that other sequences have computed.
    self.adopt(limit)
    return common

  def _name(self, start: int, end: int, program: int) -> None:
    """Notes the program of tokens from `start` on."""
    if (self._programs[start:end] == program).sum() == end - start:
      return  # As planned: keys stay valid.
    if len(self._programs) < end:
      more = np.zeros(2 * end - len(self._programs), np.uint64)
      self._programs = np.concatenate([self._programs, more])
    self._programs[start:end] = program
    del self._keys[start // self._pool.page_size :]

  def ids(self, start: int, end: int) -> np.ndarray:
    """Returns uint64[end - start], the names of tokens.

    With a plan a name includes the token's program.
    """
    ids = page_pool.content_ids(self.tokens, self.spans, start, end)
    return ids if self._ends is None else ids ^ self._programs[start:end]

  def next_end(self) -> int | None:
    """Returns the next end of a call at which pages can be shared, or None."""
    later = (e for e in self._ends or () if e > self.cached)
    return next(filter(self._is_adoptable, later), None)

  def adopt(self, limit: int) -> int:
    """Takes pages that other sequences have published.

    Returns:
      The number of tokens gained.
    """
    before = self.cached
    if self._ends is None:
      self._adopt_pages(limit)
      self._adopt_part(limit)
    elif self.shares and self._ends and self._ends[-1] > self.cached:
      self._adopt_calls(self._ends)
    self._pool.adopted += self.cached - before
    return self.cached - before

  def _adopt_calls(self, ends: Sequence[int]) -> None:
    """Adopts everything up to the last possible end of a call.

    Half a call would leave the other half to a program of another shape, whose
    rounding differs: only ends of planned calls count.
    """
    size = self._pool.page_size
    # 1. Count the pages in a row that can be found.
    full_pages = self.cached // size
    while full_pages < ends[-1] // size and self._key(full_pages) in self._pool:
      full_pages += 1
    # 2. Try the ends from the last on; one within a page needs a copy as well.
    for end in reversed(ends):
      if end <= self.cached:
        break
      can = end // size <= full_pages and self._is_adoptable(end)
      if can and self._adopt_up_to(end):
        break

  def _is_adoptable(self, end: int) -> bool:
    return self._pool.copies or end % self._pool.page_size == 0

  def _adopt_up_to(self, end: int) -> bool:
    """Adopts up to `end`, if the page that it lies in can be copied.

    All full pages before it can be found.
    """
    size, pool = self._pool.page_size, self._pool
    # 1. Hold the full pages, so that taking a page for the copy evicts none.
    block, cached_part = divmod(self.cached, size)
    last_block, part = divmod(end, size)
    candidates = [pool.find(self._key(i)) for i in range(block, last_block)]
    pages = [page for page in candidates if page is not None]
    # 2. List a copy of the page that begins with all tokens up to the end;
    #    without one let go of the pages again: nothing has changed.
    target: list[int] = []
    if part:
      own = self.pages[last_block] if last_block < len(self.pages) else None
      copied = pool.copy(
        self.parent_key(last_block),
        self.ids(last_block * size, end),
        0 if pages else cached_part,
        own,
        least=part,
      )
      if copied is None:
        pool.drop(pages)
        return False
      if own is None:
        target = [copied[0]]
    # 3. Put them in the place of the pages that this sequence had there.
    former = self.pages[block:last_block]
    self.pages[block:last_block] = pages + target
    pool.drop(former)
    self.cached, self._published = end, max(self._published, last_block)
    return True

  def _adopt_pages(self, limit: int) -> None:
    size = self._pool.page_size
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

  def _adopt_part(self, limit: int) -> None:
    """Copies the page that begins with the most tokens of the next page."""
    size = self._pool.page_size
    block, cached_part = divmod(self.cached, size)
    end = min(limit, (block + 1) * size)
    if not (self._pool.copies and self.shares) or end <= self.cached:
      return
    ids = self.ids(block * size, end)
    own = self.pages[block] if block < len(self.pages) else None
    copied = self._pool.copy(self.parent_key(block), ids, cached_part, own)
    if copied is not None:
      page, count = copied
      if own is None:
        self.pages.append(page)
      self.cached = block * size + count

  def next_key(self, limit: int) -> bytes | None:
    """Returns the key of the next page, if `limit` tokens fill it."""
    size = self._pool.page_size
    block = self.cached // size
    if not self.shares or (block + 1) * size > limit:
      return None
    return self._key(block)

  @property
  def shares(self) -> bool:
    """Whether it may take pages that other sequences have computed."""
    return self._share and not self.outdated

  def grow(self, tokens: int) -> bool:
    """Makes room for `tokens` tokens; False if the pool has too few pages."""
    for _ in range(self._pool.count(tokens) - len(self.pages)):
      page = self._pool.take()
      if page is None:
        return False
      self.pages.append(page)
    return True

  def advance(self, cached: int, program: int = 0) -> None:
    """Records `cached` leading tokens as cached and publishes the full pages.

    Args:
      cached: Leading tokens with valid keys and values.
      program: Name of the program that computed the new ones; used with a plan.
    """
    if self._ends is not None:
      self._name(self.cached, cached, program)
    self.cached = cached
    if cached >= self.lost:
      self._former = _NO_TOKENS, ()
    if not self.shares:
      return
    size = self._pool.page_size
    for block in range(self._published, cached // size):
      if self._pool.publish(self.pages[block], self._key(block)):
        self._announce(block, (block + 1) * size)
      self._published = block + 1

  def announce(self) -> None:
    """Makes the last page findable by what it begins with."""
    block, cached_part = divmod(self.cached, self._pool.page_size)
    if cached_part and self._pool.copies and self.shares:
      self._announce(block, self.cached)

  def _announce(self, block: int, end: int) -> None:
    if not self._pool.copies:
      return
    start = block * self._pool.page_size
    self._pool.announce(
      self.pages[block], self.parent_key(block), self.ids(start, end)
    )

  def rest(self) -> None:
    """Keeps the cached tokens; frees the pages reserved beyond them."""
    self.tokens = self.tokens[: self.cached].copy()
    self.spans = tuple(s for s in self.spans if s.offset < self.cached)
    self._cut(self._pool.count(self.cached))

  def outdate(self, keep: bool = False) -> None:
    """Takes notice of new weights; the pool has forgotten all keys.

    Args:
      keep: Keeps the pages, for the completion that is reading them. The caller
        clears the sequence when that ends.
    """
    if keep:
      self.outdated = self.cached > 0
      return
    if self.cached:
      self._former = self.tokens[: self.cached].copy(), self.spans
    self.clear()

  def clear(self) -> None:
    """Drops all pages."""
    self._cut(0)
    self._reset()

  def _cut(self, count: int) -> None:
    self._pool.drop(self.pages[count:])
    del self.pages[count:]

  def parent_key(self, block: int) -> bytes:
    """Returns the key of the page before a block."""
    return self._key(block - 1) if block else page_pool.ROOT

  def _key(self, block: int) -> bytes:
    size = self._pool.page_size
    while len(self._keys) <= block:
      i = len(self._keys)
      parent = self._keys[-1] if i else page_pool.ROOT
      at = slice(i * size, (i + 1) * size)
      tokens, programs = self.tokens[at], self._programs[at]
      self._keys.append(
        page_pool.page_key(parent, tokens, i * size, self.spans, programs)
      )
    return self._keys[block]
