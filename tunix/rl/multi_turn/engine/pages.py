"""Which pages of the KV cache hold what.

A sequence's keys and values lie in pages of a fixed number of tokens. A page
may be held by several sequences that begin alike, and stays findable by its
content after the last one has let go, until its room is needed.

Promises: a page is written by the one sequence that holds it alone, and not
once it is published; what is held is never handed out again; pages without a
holder go in the order in which they were let go, ends of sequences first.
Page 0 holds nothing and is never handed out: tables are padded with it.

Host side only; does not know requests or sessions; not thread-safe.
"""

from __future__ import annotations

import collections
import hashlib
from typing import Sequence

import numpy as np
from tunix.rl.multi_turn.core import trajectory

ROOT = b""
"""The key before a sequence's first page."""


def page_key(
    parent: bytes,
    tokens: np.ndarray,
    start: int,
    spans: Sequence[trajectory.ImageSpan],
) -> bytes:
  """Names what a page holds: its tokens, its pixels, and all before it.

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
  """Hands out pages, counts who holds them, finds them by key."""

  def __init__(self, pages: int, page_size: int):
    """Args:

      pages: how many there are, page 0 included.
      page_size: tokens of a page.
    """
    if pages < 2:
      raise ValueError(f"pages must be >= 2, got {pages}")
    self.page_size = page_size
    self.found = 0  # Pages that `find` has found, ever.
    self._holders = [0] * pages
    self._keys: list[bytes | None] = [None] * pages
    self._by_key: dict[bytes, int] = {}
    self._free = list(range(pages - 1, 0, -1))
    # Published pages that nobody holds, longest unused first.
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
    """Pages that nobody holds and that can still be found."""
    return len(self._kept)

  def count(self, tokens: int) -> int:
    """Pages that so many tokens fill, the last one perhaps in part."""
    return -(-tokens // self.page_size)

  def rows(
      self, held: Sequence[Sequence[int]], count: int, window: int
  ) -> np.ndarray:
    """int32[count, pages of a window]: the first ones of each sequence's, 0
    where there is none."""
    width = self.count(window)
    rows = np.zeros((count, width), np.int32)
    for row, pages in zip(rows, held):
      first = pages[:width]
      row[: len(first)] = first
    return rows

  def take(self) -> int | None:
    """A page of one's own, or None when all are held."""
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
    """Lets go of the last pages of a sequence, given in its order."""
    for page in reversed(pages):
      self._holders[page] -= 1
      if self._holders[page]:
        continue
      if self._keys[page] is None:
        self._free.append(page)
      else:
        self._kept[page] = None

  def publish(self, page: int, key: bytes) -> None:
    """Says what a held page holds from now on. A second page is not named."""
    if self._keys[page] is None and key not in self._by_key:
      self._keys[page] = key
      self._by_key[key] = page

  def writable(self, page: int) -> bool:
    """Whether its one holder may write there; it is not findable then."""
    if self._holders[page] != 1:
      return False
    self._unpublish(page)
    return True

  def forget(self) -> None:
    """Nothing is found any more: the weights changed. Holders keep theirs."""
    self._by_key.clear()
    self._keys = [None] * len(self._keys)
    self._free.extend(self._kept)
    self._kept.clear()

  def _unpublish(self, page: int) -> None:
    key = self._keys[page]
    if key is not None:
      del self._by_key[key]
      self._keys[page] = None
