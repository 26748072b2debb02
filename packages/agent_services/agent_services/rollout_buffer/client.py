"""Calls a rollout buffer: for writers of episodes, and for readers.

    async with client.BufferClient("http://127.0.0.1:8889") as buffer:
      await buffer.write(item)

Promises: a write returns once its item is on the service's disk; it is repeated
while the service is full, unreachable or failing, until its deadline, and is
one item all the same (its uid). A read with a lease is repeated under the id of
its lease, and returns the same groups; without one it is made once, and an
answer whose end is lost is lost data.

Belongs to one event loop. Does not check items: the service does.
"""

from __future__ import annotations

import os
from typing import Any, Mapping, Sequence
import uuid

import tenacity
from tunix.rl.multi_turn.net import http

_VARIABLE = "TUNIX_BUFFER_TOKEN"
_CALL_S = 60.0
_WRITE_S = 600.0
_WRONG = ("invalid_item", "uid_conflict")


class BufferError(http.CallError):
  """The service refused a call, or did not answer it."""


def _passes(error: BaseException) -> bool:
  """Whether the same call may succeed later."""
  if not isinstance(error, http.CallError) or error.late:
    return False
  if error.answer is None:
    return True  # No connection, or a lost answer.
  text = error.answer.quoted(4000)
  if any(f'"{code}"' in text for code in _WRONG):
    return False
  return error.status in (408, 500, 502, 503, 504)


class BufferClient:
  """One buffer of a service; an async context manager."""

  def __init__(
    self,
    url: str,
    *,
    buffer: str = "",
    token: str | None = None,
    connections: int = 64,
  ):
    """Args:

      url: Address of the service.
      buffer: its name; "" for the default one.
      token: Bearer token; None takes that of $TUNIX_BUFFER_TOKEN.
      connections: open at a time.

    Raises:
      ValueError: no address.
    """
    base = http.address(url, "url", "http://127.0.0.1:8889")
    self.url = f"{base}/b/{buffer}" if buffer else base
    token = os.environ.get(_VARIABLE, "") if token is None else token
    self._http = http.Http(
      BufferError,
      headers={"authorization": f"Bearer {token}"} if token else {},
      connections=connections,
    )
    self._retry = http.RetryPolicy(
      tries=1000,  # The deadline ends them.
      wait=tenacity.wait_random_exponential(multiplier=0.2, max=10.0),
      retry=tenacity.retry_if_exception(_passes),
      jitter=1.0,
    )

  async def __aenter__(self) -> BufferClient:
    return self

  async def __aexit__(self, *exc_info: Any) -> None:
    await self.aclose()

  async def aclose(self) -> None:
    """Ends the connections. Idempotent."""
    await self._http.aclose()

  async def write(
    self,
    items: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    seconds: float = _WRITE_S,
  ) -> int:
    """Writes an item, or several that are stored together or not at all.

    Returns:
      How many were new; the others had been written before.

    Raises:
      BufferError: they are refused, or time was up.
    """
    answer = await self._http.ask(
      "POST",
      f"{self.url}/buffer/write",
      seconds,
      body=items if isinstance(items, Mapping) else list(items),
      headers={"prefer": "return=minimal"},
      retry=self._retry,
    )
    return int(answer.get("new", 0))

  async def known(
    self, uids: Sequence[str], seconds: float = _WRITE_S
  ) -> set[str]:
    """Returns the uids that were written already."""
    known_uids: set[str] = set()
    for start in range(0, len(uids), 10_000):
      part = list(uids[start : start + 10_000])
      answer = await self._http.ask(
        "POST",
        f"{self.url}/buffer/known",
        seconds,
        body={"uids": part},
        retry=self._retry,
      )
      known_uids.update(answer["known"])
    return known_uids

  async def read(
    self,
    batch_size: int | None = None,
    *,
    lease_s: float | None = None,
    seconds: float = _CALL_S,
  ) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """(items, meta information, lease) of `/get_rollout_data`.

    Args:
      batch_size: items; None for all.
      lease_s: time until `ack`; None: the read is final, and the lease "".
      seconds: deadline.

    Raises:
      BufferError: the service failed, or time was up.
    """
    body: dict[str, Any] = {}
    if batch_size is not None:
      body["batch_size"] = batch_size
    if lease_s is not None:
      body.update(lease_s=lease_s, lease=uuid.uuid4().hex)
    answer = await self._http.ask(
      "POST",
      f"{self.url}/get_rollout_data",
      seconds,
      body=body,
      limit=2 << 30,
      retry=None if lease_s is None else self._retry,
    )
    data = answer["data"]
    return data["data"], data["meta_info"], data.get("lease", "")

  async def ack(self, lease: str, seconds: float = _CALL_S) -> None:
    """Ends a lease: its items are never read again. May be repeated."""
    await self._http.ask(
      "POST",
      f"{self.url}/buffer/ack",
      seconds,
      body={"lease": lease},
      retry=self._retry,
    )

  async def release(self, lease: str, seconds: float = _CALL_S) -> None:
    """Gives a lease's items back, to be read again at once."""
    await self._http.ask(
      "POST", f"{self.url}/buffer/release", seconds, body={"lease": lease}
    )

  async def start(
    self, payload: Mapping[str, Any], seconds: float = _CALL_S
  ) -> None:
    """Starts a rollout; the payload is that of `/start_rollout`."""
    await self._http.ask(
      "POST", f"{self.url}/start_rollout", seconds, body=dict(payload)
    )

  async def stop(self, seconds: float = _CALL_S) -> None:
    """Ends the rollout's generator; what is written stays."""
    await self._http.ask("POST", f"{self.url}/stop_rollout", seconds, body={})

  async def stats(self, seconds: float = _CALL_S) -> dict[str, Any]:
    """The figures of `/buffer/stats`."""
    answer = await self._http.ask(
      "GET", f"{self.url}/buffer/stats", seconds, retry=self._retry
    )
    return answer["data"]["data"][0]
