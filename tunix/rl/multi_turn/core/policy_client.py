"""Defines the interface between collector and engine: `PolicyClient`.

A `PolicyClient` turns a token prompt with images into sampled tokens with
their log-probs and policy versions. Implementations: the in-process engine
(`engine/`), an OpenAI-compatible server that returns token ids, a scripted
one (oracles, replay). Numpy only: collecting never needs JAX.

Axis names: T = prompt tokens, S = sampled tokens.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Protocol

import numpy as np

from . import settings
from . import trajectory

MAX_TOP_LOGPROBS = 20


class FinishReason(str, enum.Enum):
  STOP = "stop"  # A stop token was sampled, or what completes a stop string.
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


@settings.settings
class SamplingConfig:
  """The distribution that completions are sampled from."""

  temperature: float = settings.setting(
    default=1.0,
    doc="Softens (> 1) or sharpens (< 1) the distribution. 0 = the likeliest"
    " token; log-probs are then those at temperature 1.",
    ge=0,
  )
  top_p: float = settings.setting(
    default=1.0,
    doc="Keep the smallest set of tokens with this probability. 1 = all.",
    gt=0,
    le=1,
  )
  top_k: int = settings.setting(
    default=0, doc="Keep this many tokens, the likeliest. 0 = all.", ge=0
  )
  min_p: float = settings.setting(
    default=0.0,
    doc="Keep tokens at least this likely, as a share of the likeliest one's"
    " probability; before top_k, as in vLLM. 0 = all.",
    ge=0,
    le=1,
  )
  max_new_tokens: int = settings.setting(
    default=32,
    doc="A turn's completion is cut here, the end-of-turn token included.",
    unit="tokens",
    ge=1,
  )


@settings.settings
class SamplingParams(SamplingConfig):
  """Sampling of one request: a `SamplingConfig` and fields of the request."""

  seed: int | None = settings.setting(
    default=None,
    doc="Each request with the same seed, prompt and weights gives the same"
    " tokens. None draws a fresh seed.",
  )
  stop_token_ids: tuple[int, ...] = settings.setting(
    default=(), doc="Sampling ends with the first of these, which is kept."
  )
  frequency_penalty: float = settings.setting(
    default=0.0,
    doc="Taken from a token's logit for each time the completion has it.",
    ge=-2,
    le=2,
  )
  presence_penalty: float = settings.setting(
    default=0.0,
    doc="Taken from a token's logit once the completion has it.",
    ge=-2,
    le=2,
  )
  top_logprobs: int = settings.setting(
    default=0,
    doc="Record so many likeliest tokens beside each sampled one.",
    ge=0,
    le=MAX_TOP_LOGPROBS,
  )
  raw_logprobs: bool = settings.setting(
    default=False,
    doc="Record the log-probs of the policy's own distribution, too: nothing"
    " banned, at temperature 1.",
  )


_REQUIRED = ("tokens", "logprobs", "versions")


@dataclasses.dataclass(frozen=True, eq=False)
class Completion:
  """Sampled tokens of one request, with their log-probs and versions.

  Attributes:
    tokens: int32[S], the end-of-turn token included when sampled, and all of
      the one that completes a stop string.
    logprobs: float32[S], nats, of the distribution sampled from.
    versions: int32[S], weights' version of each token.
    finish_reason: why sampling ended.
    metrics: numbers about the call (prefilled tokens, seconds).
    fallback: why tokens or log-probs are not the sampler's own; "" when they
      are. Such samples are counted, in `fallback_turns`.
    raw_logprobs: float32[S], of the policy's own distribution; None unless
      asked for.
    top_tokens: int32[S, K], the likeliest tokens of the distribution sampled
      from, best first; None unless asked for.
    top_logprobs: float32[S, K], theirs; -inf where fewer could be sampled.
    entropies: float32[S], nats, of the policy's distribution before each
      token, at temperature 1, nothing truncated, banned tokens left out.
      None when the sampler does not report them.
    support: int32[S, K], ids of the tokens that truncation (top_k, top_p,
      min_p) left to be sampled, -1 where there are fewer than K; a row of -1
      where nothing was truncated. None when the sampler does not report them.
  """

  tokens: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray
  finish_reason: FinishReason
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)
  fallback: str = ""
  raw_logprobs: np.ndarray | None = None
  top_tokens: np.ndarray | None = None
  top_logprobs: np.ndarray | None = None
  entropies: np.ndarray | None = None
  support: np.ndarray | None = None

  def __post_init__(self):
    for name, dtype, axes in (
      ("tokens", np.int32, 1),
      ("logprobs", np.float32, 1),
      ("versions", np.int32, 1),
      ("raw_logprobs", np.float32, 1),
      ("top_tokens", np.int32, 2),
      ("top_logprobs", np.float32, 2),
      ("entropies", np.float32, 1),
      ("support", np.int32, 2),
    ):
      if getattr(self, name) is None and name not in _REQUIRED:
        continue
      array = np.array(getattr(self, name), dtype=dtype)
      if array.ndim != axes:
        raise ValueError(
          f"Completion.{name} must be {axes}-D, got shape {array.shape}"
        )
      array.flags.writeable = False
      object.__setattr__(self, name, array)
    if not len(self.tokens) == len(self.logprobs) == len(self.versions):
      raise ValueError("Completion needs one log-prob and version a token")
    for name in (
      "raw_logprobs",
      "top_tokens",
      "top_logprobs",
      "entropies",
      "support",
    ):
      array = getattr(self, name)
      if array is not None and len(array) != len(self.tokens):
        raise ValueError(
          f"Completion.{name} has {len(array)} entries for"
          f" {len(self.tokens)} tokens"
        )

  def with_support(self) -> Completion:
    """With `support` from `top_tokens`, where it is not there already.

    Those are all tokens that could be sampled if no more than K could, as
    where 0 < top_k <= K and no logits tie at the threshold. One that was
    sampled among more ties than K belongs to it, too. A completion without both
    is returned unchanged.
    """
    tops, logprobs = self.top_tokens, self.top_logprobs
    if self.support is not None or tops is None or logprobs is None:
      return self
    support = np.where(np.isfinite(logprobs), tops, -1)
    missing = ~np.any(support == self.tokens[:, None], axis=1)
    if missing.any():
      own = np.where(missing, self.tokens, -1)
      support = np.concatenate([support, own[:, None]], axis=1)
    return dataclasses.replace(self, support=support)


class PolicyClient(Protocol):
  """Generates with the policy.

  A session is one growing token sequence (an episode between two rewrites of
  its history): its KV cache is kept between calls, so a prompt that extends
  the session's tokens is prefilled from where it differs.
  """

  async def generate(
    self, prompt: TokenPrompt, sampling: SamplingParams, *, session: str
  ) -> Completion:
    """Samples one completion.

    Raises:
      ContextLimitError: no room to sample in the context length.
    """
    ...

  async def release(self, session: str) -> None:
    """Ends the session and frees its cache. Unknown ids are fine."""
    ...
