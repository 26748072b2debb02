"""Draws the seeds of training instances and of held-out ones.

The seeds of training instances lie in [0, bound), those of held-out ones in
[bound, 2 * bound): the two never share one.
"""

from __future__ import annotations

import hashlib


def train_seed(family: str, index: int, seed: int, bound: int) -> int:
  """The `index`-th training instance of the run with this `seed`."""
  return _number(f"train/{family}/{index}/{seed}") % bound


def eval_seed(family: str, index: int, seed: int, bound: int) -> int:
  """The `index`-th held-out instance; distinct for index < bound.

  Families share no seeds: a generator's first numbers decide what is easy in
  many of them alike, and an evaluation would count as many what is one.

  Raises:
    ValueError: a negative argument.
  """
  if index < 0 or seed < 0:
    raise ValueError(f"index and seed must be >= 0, got {index}, {seed}")
  return bound + (_number(f"eval/{family}/{seed}") + index) % bound


def _number(text: str) -> int:
  digest = hashlib.sha256(text.encode()).digest()
  return int.from_bytes(digest[:8], "little")
