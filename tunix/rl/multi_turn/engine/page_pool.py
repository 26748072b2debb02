"""Hands out the pages of a KV cache, counts their holders, finds them again.

Several sequences that begin alike may hold one page; after the last holder has
dropped it, it stays findable by its content until its room is needed. Where
sequences part within a page, the later one gets a copy of the page. On a mesh
each shard of the cache has a pool of its own, whose numbers count within the
shard.

Promises: a held page is never handed out again; pages without a holder are
reused in the order in which they were dropped, ends of sequences first. Page 0
holds nothing and is never handed out: tables are padded with it.

Does not know sequences (`kv_cache` does), or touch the device (`page_layout`
does); not thread-safe.
"""

from __future__ import annotations

import collections
import functools
import hashlib
from typing import Sequence

import numpy as np
from tunix.rl.multi_turn.core import trajectory

ROOT = b""
"""The key before a sequence's first page."""

NO_PROGRAMS = np.zeros(0, np.uint64)

_NO_LIMIT = 1 << 30
_MOST_ALIKE = 64  # Pages that begin with one token after one parent.


def content_ids(
  tokens: np.ndarray,
  spans: Sequence[trajectory.ImageSpan],
  start: int,
  end: int,
) -> np.ndarray:
  """Returns uint64[end - start], names of tokens; images' by their pixels.

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
  """Returns the leading ids that two arrays share."""
  n = min(len(a), len(b))
  differ = np.flatnonzero(a[:n] != b[:n])
  return int(differ[0]) if len(differ) else n


def page_key(
  parent: bytes,
  tokens: np.ndarray,
  start: int,
  spans: Sequence[trajectory.ImageSpan],
  programs: np.ndarray = NO_PROGRAMS,
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

    pages: Pages of the cache, page 0 included.
    page_size: tokens of a page.
    keeps_state: whether a page holds a state after its last token, see
      `page_layout`: a sequence goes on from its end or a page's.
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
    """Returns the most tokens that a call may add to `start` tokens."""
    places = self.page_size - start % self.page_size
    return places if self.keeps_state else _NO_LIMIT

  def count(self, tokens: int) -> int:
    """Returns the pages that `tokens` fill, the last one perhaps in part."""
    return -(-tokens // self.page_size)

  def table(
    self,
    pages_of_rows: Sequence[Sequence[int]],
    rows: Sequence[int] | np.ndarray,
    count: int,
    window: int,
  ) -> np.ndarray:
    """int32[count, pages of a window]: each sequence's first pages in its row,
    0 where there is none."""
    width = self.count(window)
    table = np.zeros((count, width), np.int32)
    for row, pages in zip(rows, pages_of_rows, strict=True):
      first = pages[:width]
      table[row, : len(first)] = first
    return table

  def take(self) -> int | None:
    """Returns a page for one holder, or None when all are held."""
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
    if len(pages) == _MOST_ALIKE:
      self._disown(next(iter(pages)))  # The oldest.
    pages[page] = ids
    self._places[page] = place

  def copy(
    self,
    parent: bytes,
    ids: np.ndarray,
    cached: int,
    target: int | None,
    least: int = 1,
  ) -> tuple[int, int] | None:
    """Lists a copy of the page that begins with the most of the ids.

    Args:
      parent: key of the page before, or ROOT.
      ids: `content_ids` of the next tokens, one at least.
      cached: Leading ids that the target holds already.
      target: a page that one sequence holds and may write; None = a new one.
      least: leading ids that are of use.

    Returns:
      (target, leading ids it will hold); None: no page has more than `cached`
      and `least` at least, or no page is free to copy to.
    """
    # 1. Find the page that agrees longest, among those of the same beginning.
    best, source = max(cached, least - 1), 0
    for page, page_ids in self._alike.get((parent, int(ids[0])), {}).items():
      if page != target and (count := _alike(page_ids, ids)) > best:
        best, source = count, page
    if not source:
      return None
    # 2. Hold the source until the copy is made: taking a page for the copy
    #    must not evict it.
    self._hold(source)
    if target is None:
      target = self.take()
    if target is None:
      self.drop([source])
      return None
    # 3. One copy a target: a longer agreement replaces an earlier one.
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
    """Returns whether the page has one holder, and hides it if so."""
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
