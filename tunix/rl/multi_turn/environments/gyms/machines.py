"""Lends machines behind HTTP servers, each to one episode at a time.

`take` gives an episode a machine of its own and waits for a free one; loans
are known in the whole process, whatever gym or event loop took them.

Does not: start machines, or know of other processes that use them.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Sequence

from tunix.rl.multi_turn.core import http

_POLL_S = 0.05
_taken: set[str] = set()
_lock = threading.Lock()


def addresses(given: Any, default: str) -> tuple[str, ...]:
  """The base addresses that a setting `machines` names.

  Raises:
    ValueError: one is not an http address, or is given twice.
  """
  urls = [given] if isinstance(given, str) else list(given or [default])
  out = [http.address(url, "machines", default) for url in urls]
  if len(set(out)) < len(out):
    raise ValueError(f"machines: an address is there twice: {out}")
  return tuple(out)


async def take(urls: Sequence[str], seconds: float) -> str | None:
  """Takes a free machine; None when none is free within `seconds`."""
  deadline = asyncio.get_running_loop().time() + seconds
  while True:
    with _lock:
      for url in urls:
        if url not in _taken:
          _taken.add(url)
          return url
    if asyncio.get_running_loop().time() > deadline:
      return None
    await asyncio.sleep(_POLL_S)


def give_back(url: str) -> None:
  with _lock:
    _taken.discard(url)
