"""Calls a rollout buffer: for writers of episodes, and for readers.

    async with client.BufferClient("http://127.0.0.1:8889") as buffer:
      await buffer.push(items_of_a_group)

Promises: a push returns once its items are on the service's disk; it is
repeated while the service is full, unreachable or failing, until its deadline.
So are reads under a lease, and acknowledgements.
"""

from __future__ import annotations

import tenacity
from tunix.rl.multi_turn.net import http
from tunix.rl.multi_turn.trajectory_collector.agent_rollout import client

BufferError = client.ClientError
_WRONG = ("invalid_item", "uid_conflict")


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


class BufferClient(client.BufferClient):
  """One buffer of a service; an async context manager."""

  def __init__(
    self, url: str, *, buffer: str = "", token: str = "", connections: int = 64
  ):
    """Args:

      url: Address of the service.
      buffer: its name; "" for the default one.
      token: Bearer token; "" takes that of $TUNIX_BUFFER_TOKEN.
      connections: open at a time.

    Raises:
      ValueError: no address.
    """
    base = http.address(url, "url", "http://127.0.0.1:8889")
    super().__init__(
      f"{base}/b/{buffer}" if buffer else base,
      token=token,
      connections=connections,
      retry=http.RetryPolicy(
        tries=1000,  # The deadline ends them.
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=10.0),
        retry=tenacity.retry_if_exception(_passes),
        jitter=1.0,
      ),
    )

  write = client.BufferClient.push
  ack = client.BufferClient.acknowledge
