"""Implements a PolicyClient by a function, without a model.

It serves demonstrations by oracles, benchmarks without a model, and tests of
everything above the policy. Every token is certain: log-prob 0. No JAX.
"""

from __future__ import annotations

import inspect
from typing import Awaitable, Callable, Iterable

import numpy as np
from tunix.rl.multi_turn.core import policy_client

PolicyFn = Callable[
  [policy_client.TokenPrompt, str], "Iterable[int] | Awaitable[Iterable[int]]"
]


class ScriptedClient:
  """Samples the tokens that a function of (prompt, session) returns."""

  def __init__(
    self,
    policy_fn: PolicyFn,
    version: int = 0,
    context_length: int | None = None,
  ):
    """Args:

    policy_fn: Function that returns the completion's token ids, end-of-turn
      id included; may be a coroutine function.
    version: Version of every token; may be changed at any time.
    context_length: Context in tokens. A prompt that leaves no room in it is
      refused, as by an engine; None accepts any.
    """
    if version < 0:
      raise ValueError(f"version must be >= 0, got {version}")
    self._policy_fn = policy_fn
    self._context_length = context_length
    self.version = version

  def open_session(self, session: str) -> None:
    """Does nothing."""

  async def generate(
    self,
    prompt: policy_client.TokenPrompt,
    sampling: policy_client.SamplingParams,
    *,
    session: str,
    on_tokens: Callable[[np.ndarray], None] | None = None,
  ) -> policy_client.Completion:
    """Returns the scripted tokens, cut as an engine cuts them.

    They end with the first stop token (STOP), or at `max_new_tokens` or the end
    of the context (LENGTH). `on_tokens` gets all of them at once.
    """
    room = sampling.max_new_tokens
    if self._context_length is not None:
      room = min(room, self._context_length - len(prompt))
      if room < 1:
        raise policy_client.ContextLimitError(
          f"prompt of {len(prompt)} tokens leaves no room in the context of"
          f" {self._context_length}"
        )
    scripted = self._policy_fn(prompt, session)
    if inspect.isawaitable(scripted):
      scripted = await scripted
    tokens = np.fromiter(scripted, np.int32)
    if not len(tokens):
      raise ValueError(f"the script returned no token in session {session!r}")
    if tokens.min() < 0:
      raise ValueError(f"the script returned a negative id: {tokens.min()}")
    reason = policy_client.FinishReason.LENGTH
    if sampling.stop_token_ids:
      stops = np.flatnonzero(np.isin(tokens, sampling.stop_token_ids))
      if len(stops) and stops[0] < room:
        room = int(stops[0]) + 1
        reason = policy_client.FinishReason.STOP
    tokens = tokens[:room]
    if on_tokens is not None:
      on_tokens(tokens)
    return policy_client.Completion(
      tokens=tokens,
      logprobs=np.zeros(len(tokens), np.float32),
      versions=np.full(len(tokens), self.version, np.int32),
      finish_reason=reason,
    )

  async def release(self, session: str) -> None:
    """Does nothing."""
