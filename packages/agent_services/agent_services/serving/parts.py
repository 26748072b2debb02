"""Holds one prompt of a request with its sampling. Does not render it."""

from __future__ import annotations

import dataclasses
from typing import Sequence

from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.parser.tool_parser import base as parser_base

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
