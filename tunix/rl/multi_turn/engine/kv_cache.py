"""Keeps the sequences' keys and values in pages that they share.

A sequence's keys and values lie in pages of a fixed number of tokens. Several
sequences that begin alike may hold one page; after the last holder has dropped
it, it stays findable by its content until its room is needed. Where sequences
part within a page, the later one gets a copy of the page. `PagePool` counts
holders, `CachedSequence` is one session's pages. On a mesh each shard of the
cache has a pool of its own, whose numbers count within the shard.

A sequence that is given a `Plan` shares nothing but what it would have computed
to the bit: what calls of the same program have computed from the same tokens.

Promises: one sequence alone writes a page, and not once it is published; a held
page is never handed out again; pages without a holder are reused in the order
in which they were dropped, ends of sequences first. The first `cached` tokens
of a sequence have valid keys and values, once the copies that its pool lists
are made. Page 0 holds nothing and is never handed out: tables are padded with
it.

Does not know requests or sessions, or touch the device (`page_layout` does);
not thread-safe.
"""

from __future__ import annotations

import collections
import functools
import hashlib
from typing import Callable, Iterable, Sequence

import numpy as np
from tunix.rl.multi_turn.core import trajectory

ROOT = b""
"""The key before a sequence's first page."""

Plan = Callable[[int], Iterable[tuple[int, int]]]
"""From a token on, the calls that compute a sequence: where each ends, and the
name of its program, 64 bits."""

_NO_LIMIT = 1 << 30
_NO_TOKENS = np.zeros(0, np.int32)
_NO_NAMES = np.zeros(0, np.uint64)
_MOST_ALIKE = 64  # Pages that begin with one token after one parent.


def content_ids(
    tokens: np.ndarray,
    spans: Sequence[trajectory.ImageSpan],
    start: int,
    end: int,
) -> np.ndarray:
  """uint64[end - start]: names of tokens, those of images by their pixels.

  Equal ids stand for equal tokens; of an image, for equal pixels and place
  within it, up to collisions of 63 bits.
  """
  ids = tokens[start:end].astype(np.uint64)
  for span in spans:
    a, b = max(start, span.offset), min(end, span.end)
    if a < b:
      pixels = int(span.image.sha256[:16], 16)
      place = np.arange(a - span.offset, b - span.offset, dtype=np.uint64)
      # Set, so that no token of text has such an id.
      ids[a - start : b - start] ^= (np.uint64(pixels) + place) | _PICTURE
  return ids


_PICTURE = np.uint64(1 << 63)


def _alike(a: np.ndarray, b: np.ndarray) -> int:
  """Leading ids that two arrays share."""
  n = min(len(a), len(b))
  differ = np.flatnonzero(a[:n] != b[:n])
  return int(differ[0]) if len(differ) else n


def page_key(
    parent: bytes,
    tokens: np.ndarray,
    start: int,
    spans: Sequence[trajectory.ImageSpan],
    programs: np.ndarray = _NO_NAMES,
) -> bytes:
  """Names a page's content: its tokens, its pixels, and all before it.

  Args:
    parent: key of the page before, or ROOT.
    tokens: int32[page size], those of the page.
    start: place of the first of them in its sequence.
    spans: images of the sequence, in order.
    programs: uint64[page size], the programs that compute them; empty where
      any will do.
  """
  digest = hashlib.blake2b(parent, digest_size=16)
  digest.update(np.ascontiguousarray(tokens, np.int32).tobytes())
  digest.update(programs.tobytes())
  end = start + len(tokens)
  for span in spans:
    if span.offset < end and span.end > start:
      digest.update(f"{span.image.sha256}@{span.offset - start}".encode())
  return digest.digest()


@functools.lru_cache(maxsize=4096)
def program_name(*parts: str | int | bool) -> int:
  """64 bits that stand for these parts, the same in every process."""
  digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
  return int.from_bytes(digest, "little")


class PagePool:
  """Hands out pages, counts their holders, finds them by key."""

  def __init__(
      self,
      pages: int,
      page_size: int,
      keeps_state: bool = False,
      copies: bool = False,
  ):
    """Args:

      pages: of the cache, page 0 included.
      page_size: tokens of a page.
      keeps_state: whether a page holds a state after its last token, see
        `state_pages`: a sequence goes on from its end or a page's.
      copies: whether the caller makes the copies that `take_copies` lists;
        else sequences share whole pages only.
    """
    if pages < 2:
      raise ValueError(f"pages must be >= 2, got {pages}")
    self.page_size = page_size
    self.keeps_state = keeps_state
    self.copies = copies
    self.adopted = 0  # Tokens that sequences took from others, ever.
    self._holders = [0] * pages
    self._keys: list[bytes | None] = [None] * pages
    self._by_key: dict[bytes, int] = {}
    self._free = list(range(pages - 1, 0, -1))
    # Pages by the key before them and their first id, with all ids known.
    self._alike: dict[tuple[bytes, int], dict[int, np.ndarray]] = {}
    self._places: dict[int, tuple[bytes, int]] = {}
    self._copies: dict[int, int] = {}  # From, by the page copied to.
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
      self._disown(page)
    elif self._kept:
      page, _ = self._kept.popitem(last=False)
      self._unpublish(page)
    else:
      return None
    self._holders[page] = 1
    return page

  def __contains__(self, key: bytes) -> bool:
    """Whether a page is published under `key`."""
    return key in self._by_key

  def find(self, key: bytes) -> int | None:
    """Holds the page published under `key`, if there is one."""
    page = self._by_key.get(key)
    if page is not None:
      self._hold(page)
    return page

  def _hold(self, page: int) -> None:
    self._kept.pop(page, None)
    self._holders[page] += 1

  def announce(self, page: int, parent: bytes, ids: np.ndarray) -> None:
    """Makes a held page's beginning findable by `copy`, in place of what it
    began with before.

    Args:
      page: the page.
      parent: key of the page before, or ROOT.
      ids: `content_ids` of its first tokens, one at least.
    """
    self._disown(page)
    place = parent, int(ids[0])
    pages = self._alike.setdefault(place, {})
    if len(pages) < _MOST_ALIKE:
      pages[page] = ids
      self._places[page] = place

  def copy(
      self,
      parent: bytes,
      ids: np.ndarray,
      held: int,
      target: int | None,
      least: int = 1,
  ) -> tuple[int, int] | None:
    """Lists a copy of the page that begins with the most of these ids.

    Args:
      parent: key of the page before, or ROOT.
      ids: `content_ids` of the tokens wanted, one at least.
      held: leading ones that the target holds already.
      target: a page that one sequence holds and may write; None = a new one.
      least: leading ids that are of use.

    Returns:
      (target, leading ids it will hold); None: no page has more than `held`
      and `least` at least, or none is left to copy to.
    """
    best, source = max(held, least - 1), 0
    for page, known in self._alike.get((parent, int(ids[0])), {}).items():
      if page != target and (count := _alike(known, ids)) > best:
        best, source = count, page
    if not source:
      return None
    self._hold(source)
    if target is None:
      target = self.take()
    if target is None:
      self.drop([source])
      return None
    if (former := self._copies.pop(target, None)) is not None:
      self.drop([former])
    self._copies[target] = source
    return target, best

  def take_copies(self) -> list[tuple[int, int]]:
    """(from, to) of the copies to be made before any page is written.

    No page is in both places. Ends the holds that kept the sources.
    """
    copies = [(source, target) for target, source in self._copies.items()]
    self._copies.clear()
    for source, _ in copies:
      self.drop([source])
    return copies

  def drop(self, pages: Sequence[int]) -> None:
    """Ends a hold of the last pages of a sequence, given in its order."""
    for page in reversed(pages):
      self._holders[page] -= 1
      if self._holders[page]:
        continue
      if self._keys[page] is None:
        self._disown(page)
        self._free.append(page)
      else:
        self._kept[page] = None

  def publish(self, page: int, key: bytes) -> bool:
    """Makes a held page findable, unless another page has this key; whether
    it has become so."""
    if self._keys[page] is not None or key in self._by_key:
      return False
    self._keys[page] = key
    self._by_key[key] = page
    return True

  def writable(self, page: int) -> bool:
    """Whether the page has one holder; it is no longer findable then."""
    if self._holders[page] != 1:
      return False
    self._unpublish(page)
    return True

  def forget(self) -> None:
    """Forgets all keys: the weights changed. Holders keep their pages."""
    self._by_key.clear()
    self._alike.clear()
    self._places.clear()
    self._keys = [None] * len(self._keys)
    self._free.extend(self._kept)
    self._kept.clear()

  def _unpublish(self, page: int) -> None:
    key = self._keys[page]
    if key is not None:
      del self._by_key[key]
      self._keys[page] = None
    self._disown(page)

  def _disown(self, page: int) -> None:
    """Makes a page's beginning unfindable by `copy`."""
    place = self._places.pop(page, None)
    if place is not None:
      pages = self._alike[place]
      del pages[page]
      if not pages:
        del self._alike[place]


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
    # With a plan: where its calls end, and the program of each token.
    self._ends: list[int] | None = None
    self._programs = _NO_NAMES

  def begin(
      self,
      tokens: np.ndarray,
      spans: tuple[trajectory.ImageSpan, ...],
      limit: int,
      plan: Plan | None = None,
  ) -> int:
    """Turns into another sequence; keeps and finds its cached prefix.

    Args:
      tokens: int32, `limit` or more; kept, and read again as it grows.
      spans: images of these tokens.
      limit: tokens that the cache may serve at most.
      plan: the calls that compute it up to the limit; None: it shares what
        any calls have computed.

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
    if plan is None:
      self._ends, self._programs = None, _NO_NAMES
    else:
      self._ends = []
      for end, program in plan(shared):
        self._name(self._ends[-1] if self._ends else shared, end, program)
        self._ends.append(end)
    self.adopt(limit)
    return common

  def _name(self, start: int, end: int, program: int) -> None:
    """Notes the program of tokens from `start` on."""
    if len(self._programs) < end:
      more = np.zeros(2 * end - len(self._programs), np.uint64)
      self._programs = np.concatenate([self._programs, more])
    self._programs[start:end] = program
    del self._keys[start // self._pool.page_size :]

  def ids(self, start: int, end: int) -> np.ndarray:
    """uint64[end - start]: names of tokens, and of their programs where these
    matter."""
    ids = content_ids(self.tokens, self.spans, start, end)
    return ids if self._ends is None else ids ^ self._programs[start:end]

  def next_end(self, limit: int) -> int:
    """Where the next call of the plan ends; at the limit without one."""
    return next((e for e in self._ends or () if self.cached < e), limit)

  def adopt(self, limit: int) -> int:
    """Takes pages that others have published; returns the tokens gained."""
    before = self.cached
    if self._ends is None:
      self._adopt_pages(limit)
      self._adopt_part(limit)
    elif self.shares:
      for end in reversed(self._ends):
        if end <= self.cached or self._adopt_calls(end):
          break
    self._pool.adopted += self.cached - before
    return self.cached - before

  def _adopt_calls(self, end: int) -> bool:
    """Takes what others have computed up to the end of a call, if all of it
    can be had."""
    size, pool = self._pool.page_size, self._pool
    block, held = divmod(self.cached, size)
    whole, part = divmod(end, size)
    keys = [self._key(i) for i in range(block, whole)]
    if not all(key in pool for key in keys) or (part and not pool.copies):
      return False
    found = [pool.find(key) for key in keys]
    pages = [page for page in found if page is not None]
    target: list[int] = []
    if part:
      own = self.pages[whole] if whole < len(self.pages) else None
      copied = pool.copy(
          self.parent_key(whole),
          self.ids(whole * size, end),
          0 if pages else held,
          own,
          least=part,
      )
      if copied is None:
        pool.drop(pages)
        return False
      if own is None:
        target = [copied[0]]
    former = self.pages[block:whole]
    self.pages[block:whole] = pages + target
    pool.drop(former)
    self.cached, self._published = end, max(self._published, whole)
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
    """Lists a copy of the page that begins as the next one is to begin."""
    size = self._pool.page_size
    block, held = divmod(self.cached, size)
    end = min(limit, (block + 1) * size)
    if not (self._pool.copies and self.shares) or end <= self.cached:
      return
    ids = self.ids(block * size, end)
    own = self.pages[block] if block < len(self.pages) else None
    copied = self._pool.copy(self.parent_key(block), ids, held, own)
    if copied is not None:
      page, count = copied
      if own is None:
        self.pages.append(page)
      self.cached = block * size + count

  def next_key(self, limit: int) -> bytes | None:
    """Key of the page to be filled next, if `limit` tokens fill it."""
    size = self._pool.page_size
    block = self.cached // size
    if not self.shares or (block + 1) * size > limit:
      return None
    return self._key(block)

  @property
  def shares(self) -> bool:
    """Whether it may go on with others' pages."""
    return self._share and not self._stale

  def grow(self, tokens: int) -> bool:
    """Makes room for so many tokens; False when the pool has too few pages."""
    for _ in range(self._pool.count(tokens) - len(self.pages)):
      page = self._pool.take()
      if page is None:
        return False
      self.pages.append(page)
    return True

  def advance(self, cached: int, program: int = 0) -> None:
    """Records that so many tokens are cached; publishes the full pages.

    Args:
      cached: leading tokens.
      program: that has computed the new ones, where there is a plan.
    """
    if self._ends is not None:
      self._name(self.cached, cached, program)
    self.cached = cached
    if not self._share or self._stale:
      return
    size = self._pool.page_size
    for block in range(self._published, cached // size):
      if self._pool.publish(self.pages[block], self._key(block)):
        self._announce(block, (block + 1) * size)
      self._published = block + 1

  def announce(self) -> None:
    """Makes the last page findable by what it begins with."""
    block, held = divmod(self.cached, self._pool.page_size)
    if held and self._pool.copies and self.shares:
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

  def parent_key(self, block: int) -> bytes:
    """Key of the page before a block."""
    return self._key(block - 1) if block else ROOT

  def _key(self, block: int) -> bytes:
    size = self._pool.page_size
    while len(self._keys) <= block:
      i = len(self._keys)
      parent = self._keys[-1] if i else ROOT
      at = slice(i * size, (i + 1) * size)
      tokens, programs = self.tokens[at], self._programs[at]
      self._keys.append(
          page_key(parent, tokens, i * size, self.spans, programs)
      )
    return self._keys[block]
