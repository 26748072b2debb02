"""Rotary positions of a request's tokens.

The processor knows those of a prompt, images included; sampled tokens count on
from its end.
"""

from __future__ import annotations

import numpy as np
from tunix.rl.multi_turn.engine import requests as requests_lib
from tunix.rl.multi_turn.policy import base


class Positions:
  """Writes them to a request, and reads them off it."""

  def __init__(self, processor: base.Processor, text_token: int):
    """Args:

      processor: the policy's host side.
      text_token: any id that is text, to stand for the first sampled one.
    """
    self._processor = processor
    self._text_token = text_token

  def locate(self, request: requests_lib.Request, start: int) -> None:
    """Rotary positions from token `start` to one past the prompt."""
    prompt = request.prompt
    extended = np.append(prompt.tokens, np.int32(self._text_token))
    positions = np.asarray(
        self._processor.positions(extended, prompt.images, start), np.int32
    )
    if positions.shape != (len(extended) - start, 3):
      raise ValueError(
          f"processor.positions returned shape {positions.shape} for tokens"
          f" {start} to {len(extended)}"
      )
    request.positions, request.positions_from = positions, start

  def between(
      self, request: requests_lib.Request, start: int, end: int
  ) -> np.ndarray:
    """int32[end - start, 3]; sampled tokens count on from the prompt."""
    if start < request.positions_from:
      self.locate(request, start)
    known = request.positions[:-1]
    first = request.positions_from
    n = len(request.prompt)
    if end <= n:
      return known[start - first : end - first]
    after = int(request.positions[-1, 0]) + np.arange(end - n, dtype=np.int32)
    joined = np.concatenate([known, np.repeat(after[:, None], 3, axis=1)])
    return joined[start - first : end - first]
