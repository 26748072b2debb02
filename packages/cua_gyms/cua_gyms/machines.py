"""Lends machines behind HTTP servers, each to one episode at a time.

`take` gives an episode a machine of its own and waits for a free one; loans
are known in the whole process, whatever gym or event loop took them.

Does not: start machines, or know of other processes that use them.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Sequence

from tunix.rl.multi_turn.net import http

_POLL_S = 0.05
_lent: set[str] = set()
_lock = threading.Lock()


def addresses(machines: str | Sequence[str], default: str) -> tuple[str, ...]:
  """Returns the base addresses that a setting `machines` names.

  Raises:
    ValueError: one is not an http address, or is given twice.
  """
  if isinstance(machines, str):
    machines = [machines]
  out = [
    http.address(url, "machines", default) for url in machines or [default]
  ]
  if len(set(out)) < len(out):
    raise ValueError(f"machines: an address is there twice: {out}")
  return tuple(out)


async def take(urls: Sequence[str], seconds: float) -> str | None:
  """Takes a free machine; None when none is free within `seconds`."""
  deadline = asyncio.get_running_loop().time() + seconds
  while True:
    with _lock:
      for url in urls:
        if url not in _lent:
          _lent.add(url)
          return url
    if asyncio.get_running_loop().time() > deadline:
      return None
    await asyncio.sleep(_POLL_S)


async def require(
  urls: Sequence[str], seconds: float, kind: str, error: type[Exception]
) -> str:
  """Takes a free machine, or raises `error`; `kind` is their plural noun."""
  url = await take(urls, seconds)
  if url is None:
    raise error(
      f"none of {len(urls)} {kind} became free within {seconds:g} s; use"
      " fewer episodes at a time (collect.concurrency) or more machines"
    )
  return url


def check_size(
  where: str,
  screen: tuple[int, int],
  size: tuple[int | None, int | None],
  error: type[Exception],
) -> None:
  """Raises `error` when a screen does not have the expected width and height.

  Args:
    where: Name of the screens, for the message.
    screen: Width and height of the screen.
    size: Expected width and height; None takes any.
    error: Class of the exception.
  """
  expected = (size[0] or screen[0], size[1] or screen[1])
  if screen != expected:
    width, height = screen
    raise error(
      f"the {where} is {width}x{height}, {expected[0]}x{expected[1]} was"
      f" expected; set gym.width={width} gym.height={height}"
    )


def give_back(url: str) -> None:
  with _lock:
    _lent.discard(url)
