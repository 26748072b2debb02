"""The seam between whoever collects and whoever generates.

A `PolicyClient` turns a token prompt with images into sampled tokens with
their log-probs and policy versions. Implementations: the in-process engine
(`rollout/`), an OpenAI-compatible server that returns token ids, a scripted
one (oracles, replay). Numpy only: collecting never needs JAX.

Axis names: T = prompt tokens, S = sampled tokens.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Protocol

import numpy as np
from tunix.rl.multi_turn import trajectory


class FinishReason(str, enum.Enum):
  STOP = "stop"  # An end-of-turn token was sampled; it is the last token.
  LENGTH = "length"  # max_new_tokens or the context length was reached.
  CANCELLED = "cancelled"


class ContextLimitError(Exception):
  """The prompt leaves no room to sample within the context length."""


@dataclasses.dataclass(frozen=True, eq=False)
class TokenPrompt:
  """A rendered prompt.

  Attributes:
    tokens: int32[T], image placeholders expanded to their full runs.
    images: spans of the placeholders.
  """

  tokens: np.ndarray
  images: tuple[trajectory.ImageSpan, ...] = ()

  def __post_init__(self):
    tokens = np.array(self.tokens, dtype=np.int32)
    tokens.flags.writeable = False
    object.__setattr__(self, "tokens", tokens)
    object.__setattr__(self, "images", tuple(self.images))
    trajectory.check_spans(tokens, self.images)

  def __len__(self) -> int:
    return len(self.tokens)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """How to sample.

  Attributes:
    max_new_tokens: at most this many tokens, the end-of-turn one included.
    temperature: > 0; 0 means greedy (log-probs are then those at
      temperature 1).
    top_p: keep the smallest set of tokens with this probability mass.
    top_k: keep this many most likely tokens; 0 keeps all.
    seed: each request with the same seed, prompt and weights gives the same
      tokens. None draws a fresh seed.
    stop_token_ids: sampling ends with the first of these, which is kept.
  """

  max_new_tokens: int = 64
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0
  seed: int | None = None
  stop_token_ids: tuple[int, ...] = ()

  def __post_init__(self):
    if self.max_new_tokens < 1:
      raise ValueError(
          f"max_new_tokens must be >= 1, got {self.max_new_tokens}"
      )
    if not self.temperature >= 0:
      raise ValueError(f"temperature must be >= 0, got {self.temperature}")
    if not 0 < self.top_p <= 1:
      raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
    if self.top_k < 0:
      raise ValueError(f"top_k must be >= 0, got {self.top_k}")


@dataclasses.dataclass(frozen=True, eq=False)
class Completion:
  """What was sampled.

  Attributes:
    tokens: int32[S], the end-of-turn token included when sampled.
    logprobs: float32[S], nats, of the distribution sampled from.
    versions: int32[S], weights' version of each token.
    finish_reason: why sampling ended.
    metrics: numbers about the call (prefilled tokens, seconds).
    fallback: why tokens or log-probs are not the sampler's own; "" when they
      are. Such samples are counted, in `fallback_turns`.
  """

  tokens: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray
  finish_reason: FinishReason
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)
  fallback: str = ""

  def __post_init__(self):
    for name, dtype in (
        ("tokens", np.int32),
        ("logprobs", np.float32),
        ("versions", np.int32),
    ):
      array = np.array(getattr(self, name), dtype=dtype)
      array.flags.writeable = False
      object.__setattr__(self, name, array)
    if not len(self.tokens) == len(self.logprobs) == len(self.versions):
      raise ValueError("Completion needs one log-prob and version a token")


class PolicyClient(Protocol):
  """Generates with the policy.

  A session is one growing token sequence (an episode between two rewrites of
  its history): its KV cache is kept between calls, so a prompt that extends
  the session's tokens is prefilled from where it differs.
  """

  async def generate(
      self,
      prompt: TokenPrompt,
      sampling: SamplingParams,
      *,
      session: str,
  ) -> Completion:
    """Samples one completion.

    Raises:
      ContextLimitError: no room to sample in the context length.
    """
    ...

  async def release(self, session: str) -> None:
    """Forgets the session and frees what it held. Unknown ids are fine."""
    ...
