"""Hands what became of a request to whoever awaits it, in whatever thread.

Whoever has gone away is no error.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any, Sequence

from tunix.rl.multi_turn.engine import requests as requests_lib


def resolve(requests: Sequence[requests_lib.Request]) -> None:
  """Hands outcomes to the event loops that await them."""
  by_loop: dict[asyncio.AbstractEventLoop, list[requests_lib.Request]] = {}
  for request in requests:
    by_loop.setdefault(request.loop, []).append(request)
  for loop, group in by_loop.items():
    try:
      loop.call_soon_threadsafe(_set_outcomes, group)
    except RuntimeError:  # The loop was closed; nobody waits any more.
      pass


def settle(
    future: concurrent.futures.Future[Any], outcome: Any
) -> None:
  """Gives a result or an exception to whoever still wants it."""
  if not future.set_running_or_notify_cancel():
    return
  if isinstance(outcome, BaseException):
    future.set_exception(outcome)
  else:
    future.set_result(outcome)


def _set_outcomes(requests: Sequence[requests_lib.Request]) -> None:
  for request in requests:
    if request.future.done():
      continue
    if isinstance(request.outcome, BaseException):
      request.future.set_exception(request.outcome)
    else:
      request.future.set_result(request.outcome)
