"""Reads a prompt token by token: the policy's log-probs of it, for `echo`.

Promises: log-probs are of the policy's own distribution, at temperature 1 and
with nothing banned; those of the alternatives too, although tokens that are
never sampled are not among them.

Does not use images: prompts are a text or tokens.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.serving import errors
from tunix.rl.multi_turn.serving import parts as parts_lib
from tunix.rl.multi_turn.serving import prompts


async def score(
    policy: prompts.ServedPolicy, part: parts_lib.Part, most: int
) -> policy_client.Completion | None:
  """The prompt's tokens after the first, as if they had been sampled.

  Args:
    policy: that samples.
    part: with the prompt.
    most: tokens that it may have.

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
    found = dataclasses.replace(completion, logprobs=completion.raw_logprobs)
    if part.sampling.top_logprobs:
      found = await _with_alternatives(policy, part, found, name)
    return found
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
    part: parts_lib.Part,
    found: policy_client.Completion,
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
    # What the tokens that are banned have of the policy's distribution.
    rest = one.raw_logprobs[0] - one.logprobs[0]
    tops.append(one.top_tokens[0])  # type: ignore[index]
    logprobs.append(one.top_logprobs[0] + rest)
  return dataclasses.replace(
      found,
      top_tokens=np.stack(tops),
      top_logprobs=np.minimum(np.stack(logprobs), 0.0).astype(np.float32),
  )
