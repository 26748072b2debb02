"""Posts JSON to an inference server; retries temporary failures.

Promises: a request that found no connection, or a server that is full or not
ready, is repeated, less and less often; a creation is undone when its caller
has gone away, and made once however often it was asked for.

Does not: set a deadline over all attempts (the caller does), or know a
protocol. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import collections
from typing import Any, Awaitable, Callable, Mapping
import uuid

import tenacity
from tunix.rl.multi_turn.clients import remote_protocols
from tunix.rl.multi_turn.core import concurrency
from tunix.rl.multi_turn.core import http

WAIT = tenacity.wait_exponential(multiplier=0.1, max=5.0)
"""Between two attempts."""
_RETRIED = (408, 429, 500, 502, 503, 504)


def _may_pass(error: BaseException) -> bool:
  if not isinstance(error, http.CallError):
    return False
  if error.answer is None:
    return True
  refused = error.answer.headers.get("x-should-retry") == "false"
  return error.status in _RETRIED and not refused


class JsonRequests:
  """See the module docstring.

  Attributes:
    root: URL that paths are below.
    undoing: creations that are being undone, for the caller that closes.
  """

  def __init__(
      self,
      root: str,
      *,
      api_key: str,
      timeout_s: float,
      retries: int,
      counts: collections.Counter[str],
  ):
    """Args:

      root: of the server, without a path.
      api_key: presented as a bearer token.
      timeout_s: of an attempt.
      retries: of a request. A full server (429) is asked on.
      counts: whose "retries" are counted.
    """
    self.root = root
    self.undoing: set[asyncio.Future[Any]] = set()
    self._counts = counts
    self._timeout_s = timeout_s
    self._policy = http.RetryPolicy(
        retries + 1, WAIT, tenacity.retry_if_exception(_may_pass)
    )
    self._http = http.Http(
        headers={"authorization": f"Bearer {api_key}"},
        proxies=True,
        connections=1000,
    )

  async def post(self, path: str, body: Mapping[str, Any]) -> Any:
    """As `request`."""
    return await self.request("post", path, body)

  async def request(
      self,
      method: str,
      path: str,
      body: Mapping[str, Any] | None,
      undo: Callable[[Any], Awaitable[Any]] | None = None,
  ) -> Any:
    """Returns the answer's JSON; retries. The caller sets the deadline.

    Args:
      method: "get" or "post".
      path: below `root`.
      body: JSON values; None for a "get".
      undo: undoes what the request creates, if its caller has gone away; such
        a request has a key, by which a server creates once however often it
        is repeated.

    Raises:
      ValueError: the server refuses the request, and its reason.
      RemoteError: it failed, or cannot be reached.
    """
    url = self.root + path
    headers = {"idempotency-key": uuid.uuid4().hex} if undo else None

    async def attempt() -> Any:
      call = self._http.json(
          method.upper(), url, self._timeout_s, body=body, headers=headers
      )
      if undo is None:
        return await call
      return await concurrency.create_or_rollback(call, undo, self.undoing)

    try:
      return await self._policy.run(attempt, before_sleep=self._count)
    except http.CallError as error:
      raise remote_protocols.refusal(url, error) from error

  def _count(self, state: tenacity.RetryCallState) -> None:
    del state
    self._counts["retries"] += 1

  async def aclose(self) -> None:
    """Ends the connections. Idempotent."""
    await self._http.aclose()
