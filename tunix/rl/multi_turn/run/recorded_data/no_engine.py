"""Stands where a run has its rollout engine and needs none.

`rollout.via=offline` without evaluations samples nothing: no KV cache is
reserved and no program of an engine is compiled.
"""

from __future__ import annotations

import concurrent.futures
from typing import Callable


class NoEngine:
  """Takes weights and keeps their version.

  Attributes:
    version: Version of the weights published last.
  """

  cache_tokens = cache_bytes = 0
  engines = 1

  def __init__(self, version: int = 0):
    self.version = version

  def warm_up(self, progress: Callable[..., object] | None = None) -> None:
    """Nothing is compiled."""

  def update_weights(
    self, version: int, state: object
  ) -> concurrent.futures.Future[int]:
    """Records the version; the future has ended."""
    del state
    self.version = version
    result: concurrent.futures.Future[int] = concurrent.futures.Future()
    result.set_result(version)
    return result

  def stats(self) -> dict[str, float]:
    return {}

  def close(self, timeout_s: float = 30.0) -> None:
    """Nothing is open."""
