"""Counts the tokens that prompts have in common, in any session or shard.

A measure to hold prefilling to: `KnownPrefixes.add` returns how many leading
tokens of a sequence other sequences have begun with before, to the token and
to the pixel, in whichever pages, sessions or shards these lie.

Does not hold tokens: a prefix is known by 64 bits, and after `MOST` of them all
are forgotten, so that long runs under the same weights count some twice.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import page_pool

MOST = 1 << 19

_STEP = np.uint64(0x9E3779B97F4A7C15)


def _mixed(x: np.ndarray) -> np.ndarray:
  """Returns each uint64 with its bits stirred (the finaliser of splitmix64)."""
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


class KnownPrefixes:
  """The prefixes of all sequences added so far."""

  def __init__(self) -> None:
    self._known: set[int] = set()

  def clear(self) -> None:
    """Forgets all: other weights make other keys and values."""
    self._known.clear()

  def add(
      self, tokens: np.ndarray, spans: Sequence[trajectory.ImageSpan]
  ) -> int:
    """Returns the length of the longest prefix added before; adds all prefixes.

    Args:
      tokens: int32[T].
      spans: Images; the ones within the tokens count.
    """
    n = len(tokens)
    ids = page_pool.content_ids(tokens, spans, 0, n)
    # A prefix's name is the sum of its tokens', each bound to its place.
    places = np.arange(1, n + 1, dtype=np.uint64) * _STEP
    names = _mixed(np.cumsum(_mixed(_mixed(ids) + places)))
    # All prefixes of a known prefix are known, so the longest one is found by
    # halving.
    low, high = 0, n
    while low < high:
      middle = (low + high) // 2
      if int(names[middle]) in self._known:
        low = middle + 1
      else:
        high = middle
    if len(self._known) + n - low > MOST:
      self._known.clear()
      self._known.update(names[:low].tolist())
    self._known.update(names[low:].tolist())
    return low
