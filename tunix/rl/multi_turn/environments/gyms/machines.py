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


async def take(
    urls: Sequence[str], seconds: float, kind: str, error: type[Exception]
) -> str:
  """Takes a free machine.

  Args:
    urls: Addresses of the machines.
    seconds: Longest wait for a free one.
    kind: Plural noun of the machines, for the message.
    error: Class of the exception that is raised when none becomes free.
  """
  deadline = asyncio.get_running_loop().time() + seconds
  while True:
    with _lock:
      for url in urls:
        if url not in _taken:
          _taken.add(url)
          return url
    if asyncio.get_running_loop().time() > deadline:
      raise error(
          f"none of {len(urls)} {kind} became free within {seconds:g} s; use"
          " fewer episodes at a time (collect.concurrency) or more machines"
      )
    await asyncio.sleep(_POLL_S)


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
    _taken.discard(url)
