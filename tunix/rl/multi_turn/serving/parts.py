"""Holds one prompt of a request, with what its sampling needs.

Does not sample, or render.
"""

from __future__ import annotations

import dataclasses
from typing import Sequence

from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.parser.tool_parser import base as parser_base
from tunix.rl.multi_turn.serving import caches
from tunix.rl.multi_turn.serving import interactions
from tunix.rl.multi_turn.serving import requests

_TOKENS = "token prompts"
"""Cache key for token prompts, which have no interaction id."""


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
  """A prompt and its completions' sampling.

  Attributes:
    request: with this prompt alone.
    asked: the prompt, as rendered.
    prompt: its tokens and images.
    pending: `asked`, where a session keeps the completions.
    sampling: of each completion, but for its seed.
    parser: reads tool calls out of the completions; None leaves their text.
    untrained: why a session does not train on the completions; "" when it does.
    seed: of the first completion; None for fresh ones.
    first: number of its first choice among the answer's.
    ids: of the choices.
    names: of the client's sessions, one a choice, from `with_names`.
  """

  request: requests.SamplingRequest
  asked: policy_client.TokenPrompt | interactions.PendingPrompt
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
    """With client's sessions for its choices, of `cache` if there is one."""
    if cache is None:
      names = [f"request/{i}" for i in self.ids]
    else:
      parent = self.pending.parent if self.pending else _TOKENS
      names = [cache.take_cache(parent) for _ in self.ids]
    return dataclasses.replace(self, names=names)

  def gone(self, cache: caches.SessionCache | None, stored: bool) -> list[str]:
    """The client's sessions to release, the others returned to `cache`."""
    if cache is None:
      return list(self.names)
    return [
        old
        for name, id_ in zip(self.names, self.ids)
        for old in cache.give_back(
            name, (id_ if self.pending else _TOKENS) if stored else None
        )
    ]

