"""Finds which known sequence a new one begins with.

A sequence is stored as its length and the hash of its bytes, so memory does not
grow with its length, and a search reads the new sequence once, however many are
known.
"""

from __future__ import annotations

import hashlib
from typing import Generic, TypeVar

T = TypeVar("T")


class RunningHash:
  """The hash of a sequence that grows; extending a copy leaves it alone."""

  __slots__ = ("_hash", "length")

  def __init__(self):
    self._hash = hashlib.blake2b(digest_size=16)
    self.length = 0

  def extended(self, *parts: bytes) -> RunningHash:
    """This sequence and `parts`."""
    longer = RunningHash()
    longer._hash = self._hash.copy()
    longer.length = self.length
    for part in parts:
      longer._hash.update(part)
      longer.length += len(part)
    return longer

  def digest(self) -> bytes:
    return self._hash.digest()


class Prefixes(Generic[T]):
  """A value for each sequence; the newest for equal ones."""

  def __init__(self):
    self._by_length: dict[int, dict[bytes, T]] = {}

  def add(self, sequence: RunningHash, value: T) -> None:
    found = self._by_length.setdefault(sequence.length, {})
    found[sequence.digest()] = value

  def longest(self, data: bytes) -> tuple[T | None, int]:
    """The value of the longest sequence that `data` begins with, and its
    length in bytes; (None, 0) when there is none."""
    view, at = memoryview(data), RunningHash()
    best: tuple[T | None, int] = None, 0
    for length in sorted(self._by_length):
      if length > len(data):
        break
      at = at.extended(view[at.length : length])
      value = self._by_length[length].get(at.digest())
      if value is not None:
        best = value, length
    return best
