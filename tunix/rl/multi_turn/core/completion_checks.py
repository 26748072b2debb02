"""Checks that a completion can be trained on token by token; decodes it.

The collector's sequence builder and the rollout server's session store share
these checks.

Does not: sample, tokenise, or keep anything. S = tokens sampled in a turn.
"""

from __future__ import annotations

from typing import Any, Collection, Protocol

from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import token_sequence


class SamplingContractError(ValueError):
  """A completion that no training sequence can hold."""


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
