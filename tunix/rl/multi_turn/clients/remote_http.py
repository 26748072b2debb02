"""Requests to a server of OpenAI's kind that may have to be repeated.

Promises: what may pass (no connection, a server that is full or not ready) is
asked again, less and less often; what a request has made is undone when nobody
waits for it any more, and made once however often it was asked for.

Sets no deadline on all of it: the caller does. Knows no protocol. Needs the
`openai` package. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import collections
from typing import Any, Awaitable, Callable, Mapping
import uuid

from tunix.rl.multi_turn.clients import remote_protocols

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
"""Between two attempts; doubled each time."""
_RETRIED = (408, 429, 500, 502, 503, 504)

RemoteError = remote_protocols.RemoteError


def import_openai() -> Any:
  """The `openai` package.

  Raises:
    ImportError: saying how to install it.
  """
  try:
    import openai  # pylint: disable=g-import-not-at-top
  except ImportError as error:
    raise ImportError(
        "talking to an OpenAI-compatible server needs the openai package; pip"
        " install 'tunix-multi-turn[client]'"
    ) from error
  return openai


async def or_undone(
    made: Awaitable[Any],
    undo: Callable[[Any], Awaitable[Any]],
    kept: set[asyncio.Future[Any]],
) -> Any:
  """Awaits what must not be made for nobody.

  Args:
    made: goes on when the caller is cancelled.
    undo: is called then with what it gave.
    kept: holds the task that does so until it is done.
  """
  making = asyncio.ensure_future(made)

  async def undone() -> None:
    try:
      await undo(await making)
    except Exception:  # pylint: disable=broad-except
      pass  # Nothing was made, or it ends by its own timeout.

  try:
    return await asyncio.shield(making)
  except asyncio.CancelledError:
    undoing = asyncio.ensure_future(undone())
    kept.add(undoing)
    undoing.add_done_callback(kept.discard)
    raise


class JsonRequests:
  """See the module docstring.

  Attributes:
    root: URL that paths are below.
    undoing: what is being undone, for whoever closes.
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
      retries: of a request. A server that says it is full (429) is asked on.
      counts: whose "retries" are counted.

    Raises:
      ImportError: the openai package is not installed.
    """
    openai = import_openai()
    self.root = root
    self.undoing: set[asyncio.Future[Any]] = set()
    self._counts = counts
    self._retries = retries
    self._openai = openai
    # Deadlines and repetitions are ours: the package's own would let a call
    # take several times as long.
    self._client = openai.AsyncOpenAI(
        base_url=f"{root}/v1", api_key=api_key, timeout=timeout_s, max_retries=0
    )

  async def post(self, path: str, body: Mapping[str, Any]) -> Any:
    """As `request`."""
    return await self.request("post", path, body)

  async def request(
      self,
      method: str,
      path: str,
      body: Mapping[str, Any] | None,
      made: Callable[[Any], Awaitable[Any]] | None = None,
  ) -> Any:
    """The answer's JSON; repeats what may pass. The caller sets the deadline.

    Args:
      method: "get" or "post".
      path: below `root`.
      body: JSON values; None for a "get".
      made: undoes what the request makes, if nobody waits for it any more;
        such a request has a name, by which a server makes it once however
        often it is repeated.

    Raises:
      ValueError: the server refuses the request; says why.
      RemoteError: it failed, or cannot be reached.
    """
    openai, url = self._openai, self.root + path
    wait, attempt = FIRST_WAIT_S, 0
    options: dict[str, Any] = {}
    if made is not None:
      options["headers"] = {"Idempotency-Key": uuid.uuid4().hex}
    while True:
      try:
        if method == "get":
          return await self._client.get(url, cast_to=object)
        posting = self._client.post(
            url, body=body, cast_to=object, options=options
        )
        if made is None:
          return await posting
        return await or_undone(posting, made, self.undoing)
      except openai.APIConnectionError as error:
        cause: Exception = error
        failure: Exception = RemoteError(
            f"{url} cannot be reached: {error.__cause__ or error}"
        )
        full, told = False, None
      except openai.APIStatusError as error:
        cause, failure = error, remote_protocols.refusal(url, error)
        if error.status_code not in _RETRIED or (
            error.response.headers.get("x-should-retry") == "false"
        ):
          raise failure from error
        full = error.status_code == 429
        told = remote_protocols.seconds(
            error.response.headers.get("retry-after")
        )
      except openai.OpenAIError as error:
        raise RemoteError(f"{url}: {error}") from error
      if not full and attempt >= self._retries:
        raise failure from cause
      attempt += 1
      self._counts["retries"] += 1
      await asyncio.sleep(wait if told is None else told)
      wait = min(2 * wait, LONGEST_WAIT_S)

  async def aclose(self) -> None:
    """Ends the connections. Idempotent."""
    await self._client.close()
