"""What steers a completion, or ends it, beyond sampling parameters.

The engine does not know text. Who does hands over a `StopWhen`, which sees
tokens that were sampled, or a `Grammar`, which says what may be sampled next.
Both are called in the engine's thread, between decode calls, and hold up all
that it does: they must be quick. One that raises fails its request alone.
"""

from __future__ import annotations

from typing import Callable, Protocol

import numpy as np

StopWhen = Callable[[np.ndarray], "int | None"]
"""Told all int32[S] tokens sampled so far; returns how many of them to keep
when the completion has ended with one of them, else None."""


class Grammar(Protocol):
  """What may be said, one token at a time. Made for one completion."""

  def allowed(self) -> np.ndarray:
    """uint32[ceil(V / 32)], bit t % 32 of word t // 32 set when token t may
    come next. Where the text may end, a stop token of the request is one."""

  def advance(self, token: int) -> None:
    """Takes note of a sampled token, unless that was a stop token."""


def pack(tokens_V: np.ndarray) -> np.ndarray:
  """bool[V] as a grammar gives it, uint32[ceil(V / 32)]."""
  padded = np.pad(tokens_V, (0, -len(tokens_V) % 32))
  return np.packbits(padded, bitorder="little").view(np.uint32)
