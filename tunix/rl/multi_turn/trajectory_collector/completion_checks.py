"""Checks that a completion can be trained on token by token; decodes it.

The collector's sequence builder and the rollout server's session store share
these checks.

Does not: sample, tokenise, or keep anything. S = tokens sampled in a turn.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Collection, Protocol

import numpy as np
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import token_sequence

LEAST_LOGPROB = -50.0
"""Log-prob of a sampled token, in nats, below which it was not sampled: of
1e15 tokens not one would be as unlikely."""


class SamplingContractError(ValueError):
  """A completion that no training sequence can hold."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """Token ids that a policy can sample.

  Attributes:
    size: Number of ids, from 0.
    banned: Those that are never sampled.
  """

  size: int
  banned: frozenset[int] = frozenset()

  def check(self, tokens_S: np.ndarray) -> None:
    """Refuses ids that were not sampled from this policy.

    Raises:
      SamplingContractError: It names the id.
    """
    outside = (tokens_S < 0) | (tokens_S >= self.size)
    if outside.any():
      raise SamplingContractError(
        f"token id {int(tokens_S[outside][0])} is outside of the vocabulary"
        f" of {self.size}: the sampler has another tokenizer or policy"
      )
    banned = self.banned.intersection(tokens_S.tolist())
    if banned:
      raise SamplingContractError(
        f"token id {min(banned)} is banned from being sampled; the sampler"
        " must ban the policy's banned_token_ids"
      )


class Decoder(Protocol):
  """The part of a renderer used here; see `parser/renderer`."""

  def decode(self, ids: Any) -> str:
    """Text of sampled ids, a sequence or int32[S]."""
    ...


def check(
  completion: policy_client.Completion, image_token_id: int | None
) -> None:
  """Refuses ids, log-probs, versions or entropies that cannot be trained on.

  Args:
    completion: one of no token is fine: it trains nothing.
    image_token_id: the placeholder, which stands for pixels only; None: the
      policy sees no images.

  Raises:
    SamplingContractError: naming what.
  """
  tokens_S = completion.tokens
  if image_token_id is not None and (tokens_S == image_token_id).any():
    raise SamplingContractError(
      f"the policy sampled the image placeholder id {image_token_id}; ban it"
      " in the sampler"
    )
  try:
    # What `TokenSequence` refuses later, without making one.
    token_sequence.check_numbers(
      tokens_S, completion.logprobs, completion.entropies
    )
    token_sequence.check_versions(completion.versions)
  except ValueError as error:
    raise SamplingContractError(
      "the completion's tokens, log-probs or versions cannot be trained on:"
      f" {error}"
    ) from error
  check_likely(completion.logprobs)


def check_likely(logprobs_S: np.ndarray) -> None:
  """Refuses log-probs that no sampled token has.

  Raises:
    SamplingContractError: It names the value.
  """
  least = float(logprobs_S.min(initial=0.0))
  if least < LEAST_LOGPROB:
    raise SamplingContractError(
      f"a sampled token's log-prob is {least:g}, below {LEAST_LOGPROB:g}: it"
      " is not that of the distribution it was sampled from"
    )


def check_outside(
  tokens_S: np.ndarray, logprobs_S: np.ndarray, vocabulary: Vocabulary
) -> None:
  """Refuses what another process says it has sampled.

  Args:
    tokens_S: Sampled ids.
    logprobs_S: Their log-probs, in nats.
    vocabulary: Ids of the policy that is trained.

  Raises:
    SamplingContractError: It names the id or the value.
  """
  vocabulary.check(tokens_S)
  try:
    token_sequence.check_numbers(tokens_S, logprobs_S, None)
  except ValueError as error:
    raise SamplingContractError(f"{error}") from error
  check_likely(logprobs_S)


def read(
  completion: policy_client.Completion,
  decoder: Decoder,
  stop_token_ids: Collection[int],
) -> tuple[str, bool]:
  """The text that was sampled, and whether it ends with a stop token.

  That token stays among the completion's ids and is not part of the text.
  """
  tokens_S = completion.tokens
  closed = bool(len(tokens_S)) and int(tokens_S[-1]) in stop_token_ids
  return decoder.decode(tokens_S[:-1] if closed else tokens_S), closed
