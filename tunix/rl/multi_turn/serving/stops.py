"""Stop strings: where a completion's tokens end, and where its text does.

Promises: a completion ends with the token that completes a stop string, which
is sampled and kept; the text that is told ends before the string, also where
it is told in parts.
"""

from __future__ import annotations

from typing import Callable, Sequence

import numpy as np


class StopStrings:
  """Watches one completion; a `constrained_decoding.StopWhen`."""

  def __init__(
      self,
      strings: Sequence[str],
      token_bytes: Callable[[int], bytes],
      ends: Sequence[int],
  ):
    """Args:

      strings: none empty.
      token_bytes: of an id.
      ends: ids that end a turn, and whose spelling is not told.
    """
    self._strings = tuple(strings)
    self._bytes = [s.encode() for s in strings]
    self._longest = max(map(len, self._bytes))
    self._token_bytes = token_bytes
    self._ends = frozenset(ends)
    self._seen = 0
    self._tail = b""  # The last bytes, in which a string may have begun.
    self.found = False

  def __call__(self, tokens: np.ndarray) -> int | None:
    """How many of all int32[S] tokens so far to keep, once that is known."""
    for i in range(self._seen, len(tokens)):
      token = int(tokens[i])
      if token in self._ends:
        continue
      text = self._tail + self._token_bytes(token)
      if any(s in text for s in self._bytes):
        self.found = True
        return i + 1
      self._tail = text[-(self._longest - 1) :] if self._longest > 1 else b""
    self._seen = len(tokens)
    return None

  def cut(self, text: str) -> str:
    """What of a completion's whole text is told."""
    return text[: first(text, self._strings)] if self.found else text


def first(text: str, strings: Sequence[str], start: int = 0) -> int:
  """Where the first of the strings begins in the text; else its length."""
  places = (text.find(s, start) for s in strings)
  return min((p for p in places if p >= 0), default=len(text))


def certain(text: str, strings: Sequence[str]) -> int:
  """How much of a text is told whatever comes after it."""
  end = first(text, strings)
  if end < len(text):
    return end
  most = max(map(len, strings), default=1) - 1
  for size in range(min(most, len(text)), 0, -1):
    if any(s.startswith(text[-size:]) for s in strings):
      return len(text) - size
  return len(text)
