"""Machines behind HTTP servers that hold one episode each.

`take` gives an episode a machine of its own and waits for a free one; what is
taken is known in the whole process, whatever gym or event loop took it. `Http`
makes `http_calls`, and what fails raises the gym's error.

Does not start machines, and does not know of other processes that use them.
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
    ValueError: one is no http address, or is there twice.
  """
  urls = [given] if isinstance(given, str) else list(given or [default])
  out = [http.address(url, "machines", default) for url in urls]
  if len(set(out)) < len(out):
    raise ValueError(f"machines: an address is there twice: {out}")
  return tuple(out)


async def take(urls: Sequence[str], seconds: float) -> str | None:
  """One that is free, within so many seconds; None when none became free."""
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


class Http:
  """Calls of one gym; belongs to one event loop."""

  def __init__(self, error: type[RuntimeError], **options: Any):
    """Args:

      error: `error(message, status)` is raised for what fails.
      **options: of `http_calls.Http`.
    """
    self._error = error
    self._http = http.Http(**options)

  async def call(
      self, method: str, url: str, seconds: float, **more: Any
  ) -> bytes:
    """The body of an answer that says it was done; made once."""
    try:
      reply = await self._http.call(method, url, seconds, **more)
    except http.CallError as error:
      raise self._error(str(error), 0) from error
    if not reply.ok:
      raise self._error(
          f"{method} {url}: {reply.quoted(500)}", reply.status
      )
    return reply.content

  async def ask(
      self, method: str, url: str, seconds: float, **more: Any
  ) -> dict[str, Any]:
    """The JSON object of such an answer."""
    raw = await self.call(method, url, seconds, **more)
    try:
      data = await http.read(
          lambda: http.json_of(raw), len(raw), seconds, "an answer"
      )
    except ValueError:
      data = None
    if not isinstance(data, dict):
      raise self._error(
          f"{method} {url} answered with no object of JSON, but"
          f" {raw[:80]!r}",
          0,
      )
    return data

  async def aclose(self) -> None:
    """Idempotent."""
    await self._http.aclose()
