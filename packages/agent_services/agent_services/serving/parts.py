"""Holds one prompt of a request with its sampling, and scores it for `echo`.

Promises: the log-probs of a prompt are of the policy's own distribution, at
temperature 1 and with nothing banned; those of the alternatives too, although
tokens that are never sampled are not among them.

Does not render, or score images: a scored prompt is a text or tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Sequence

import numpy as np
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.parser.tool_parser import base as parser_base

from agent_services.serving import errors
from agent_services.serving import prompts
from agent_services.serving import requests
from agent_services.serving.sessions import caches
from agent_services.serving.sessions import interactions

_TOKENS = "token prompts"
"""Cache key for token prompts, which have no interaction id."""


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
  """A prompt and its completions' sampling.

  Attributes:
    request: The request, with this prompt alone.
    rendered: Result of rendering the prompt.
    prompt: Tokens and images of the prompt.
    pending: `rendered` where a session stores the completions, else None.
    sampling: Sampling of each completion, except for its seed.
    parser: Reads tool calls out of the completions; None leaves their text.
    untrained: Reason why a session does not train on the completions; "" when
      it does.
    seed: Seed of the first completion; None for fresh seeds.
    first: Number of its first choice among the answer's.
    ids: Ids of the choices.
    names: Names of the client's sessions, one a choice, from `with_names`.
  """

  request: requests.SamplingRequest
  rendered: policy_client.TokenPrompt | interactions.PendingPrompt
  prompt: policy_client.TokenPrompt
  pending: interactions.PendingPrompt | None
  sampling: policy_client.SamplingParams
  seed: int | None
  first: int
  ids: Sequence[str]
  names: Sequence[str] = ()
  parser: parser_base.ToolParser | None = None
  untrained: str = ""

  def with_names(self, cache: caches.SessionCache | None) -> Part:
    """Returns a copy with the client's sessions of its choices, which come from
    `cache` if there is one."""
    if cache is None:
      names = [f"request/{i}" for i in self.ids]
    else:
      parent = self.pending.parent if self.pending else _TOKENS
      names = [cache.take_cache(parent) for _ in self.ids]
    return dataclasses.replace(self, names=names)

  def gone(self, cache: caches.SessionCache | None, stored: bool) -> list[str]:
    """Returns the client's sessions to release, and gives the others back to
    `cache`."""
    if cache is None:
      return list(self.names)
    return [
      old
      for name, id_ in zip(self.names, self.ids)
      for old in cache.give_back(
        name, (id_ if self.pending else _TOKENS) if stored else None
      )
    ]


async def score(
  policy: prompts.ServedPolicy, part: Part, most: int
) -> policy_client.Completion | None:
  """Returns the prompt's tokens after the first, as if they were sampled.

  Args:
    policy: Policy that samples.
    part: Part with the prompt.
    most: Largest number of tokens of the prompt.

  Returns:
    float32[T - 1] `logprobs`, and alternatives where the request asks for them;
    None for a prompt of one token.

  Raises:
    ApiError: the prompt is too long, or holds a token that is never sampled.
  """
  tokens_T = part.prompt.tokens
  if len(tokens_T) < 2:
    return None
  where = part.request.prompt_field
  if len(tokens_T) > most:
    raise errors.invalid(
      where,
      f"echo with logprobs reads a prompt a token a step, {most} at most;"
      f" {where} has {len(tokens_T)}: shorten it, or leave logprobs out",
    )
  grammar = prompts.forced(tokens_T[1:], part.request, policy)
  name = f"{part.ids[0]}/echo"
  try:
    completion = await policy.client.generate(
      policy_client.TokenPrompt(tokens_T[:1]),
      policy_client.SamplingParams(
        max_new_tokens=len(tokens_T) - 1, raw_logprobs=True
      ),
      session=name,
      grammar=grammar,
    )
    assert completion.raw_logprobs is not None
    scored = dataclasses.replace(completion, logprobs=completion.raw_logprobs)
    if part.sampling.top_logprobs:
      scored = await _with_alternatives(policy, part, scored, name)
    return scored
  except ValueError as error:
    raise errors.invalid(
      where,
      f"{where} holds a token that this policy never samples, and that"
      f" has no log-prob ({error}); leave echo or logprobs out",
    ) from None
  finally:
    await policy.client.release(name)


async def _with_alternatives(
  policy: prompts.ServedPolicy,
  part: Part,
  scored: policy_client.Completion,
  name: str,
) -> policy_client.Completion:
  """Samples one token after each beginning of the prompt, from all of them."""
  tokens_T = part.prompt.tokens
  sampling = policy_client.SamplingParams(
    max_new_tokens=1,
    top_logprobs=part.sampling.top_logprobs,
    raw_logprobs=True,
    seed=0,
  )
  tops, logprobs = [], []
  for end in range(1, len(tokens_T)):
    one = await policy.client.generate(
      policy_client.TokenPrompt(tokens_T[:end]), sampling, session=name
    )
    assert one.raw_logprobs is not None and one.top_logprobs is not None
    # Log of the mass that allowed tokens have in the policy's distribution.
    log_allowed = one.raw_logprobs[0] - one.logprobs[0]
    tops.append(one.top_tokens[0])  # type: ignore[index]
    logprobs.append(one.top_logprobs[0] + log_allowed)
  return dataclasses.replace(
    scored,
    top_tokens=np.stack(tops),
    top_logprobs=np.minimum(np.stack(logprobs), 0.0).astype(np.float32),
  )
