"""Derives seeds, so that a run has one and every random choice its own.

Pure functions; the same on every machine and in every process.
"""

from __future__ import annotations

import hashlib
from typing import Any


def derive_seed(*parts: Any) -> int:
  """A number in [0, 2**31) that depends on every part and on their order."""
  text = "\x1f".join(repr(part) for part in parts)
  digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
  return int.from_bytes(digest, "big") & 0x7FFFFFFF
