"""Completions in the shapes of `/v1/chat/completions`, whole or as a stream.

Promises: what a client is told is the sampled text, cut into content and tool
calls and otherwise unchanged; text that is streamed adds up to that of the
whole answer.

Does not sample, or know sessions.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn import policy_client
from tunix.rl.multi_turn.parser.tool_parser import base as parser_base

_REASONS = {
    policy_client.FinishReason.STOP: "stop",
    policy_client.FinishReason.LENGTH: "length",
    policy_client.FinishReason.CANCELLED: "abort",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
  """One of a request's completions.

  Attributes:
    completion: what was sampled.
    message: what the client is told, an OpenAI assistant message.
    finish_reason: "stop", "length", "tool_calls".
  """

  completion: policy_client.Completion
  message: dict[str, Any]
  finish_reason: str


@dataclasses.dataclass(frozen=True)
class Answer:
  """A request's answer.

  Attributes:
    id: of the answer.
    created: Unix seconds.
    model: name.
    prompt_tokens: ids of the prompt, image placeholders expanded.
    reused_tokens: of them, those whose keys and values were cached.
    choices: completions.
  """

  id: str
  created: int
  model: str
  prompt_tokens: np.ndarray
  reused_tokens: int
  choices: tuple[Choice, ...]


def make_choice(
    completion: policy_client.Completion,
    text: str,
    parser: parser_base.ToolParser | None,
) -> Choice:
  """Cuts the text into content and tool calls.

  Args:
    completion: what was sampled.
    text: of it, without the end of the turn.
    parser: reads tool calls; None leaves all text as content.
  """
  message: dict[str, Any] = {"role": "assistant", "content": text}
  reason = _REASONS[completion.finish_reason]
  if parser is not None:
    found = parser.parse_result(text)
    if found.calls:
      message["content"] = found.thought or None
      message["tool_calls"] = [
          {
              "id": f"call_{secrets.token_hex(12)}",
              "type": "function",
              "function": {
                  "name": call.name,
                  "arguments": json.dumps(call.arguments, ensure_ascii=False),
              },
          }
          for call in found.calls
      ]
      reason = "tool_calls" if reason == "stop" else reason
  return Choice(completion, message, reason)


def usage(answer: Answer) -> dict[str, Any]:
  sampled = sum(len(c.completion.tokens) for c in answer.choices)
  prompt = len(answer.prompt_tokens)
  return {
      "prompt_tokens": prompt,
      "completion_tokens": sampled,
      "total_tokens": prompt + sampled,
      "prompt_tokens_details": {"cached_tokens": answer.reused_tokens},
  }


def whole(
    answer: Answer,
    decode: Callable[[Sequence[int]], str],
    *,
    logprobs: bool,
    token_ids: bool,
) -> dict[str, Any]:
  """The JSON object of an answer that is not streamed."""
  choices = []
  for i, choice in enumerate(answer.choices):
    entry: dict[str, Any] = {
        "index": i,
        "message": choice.message | {"refusal": None},
        "finish_reason": choice.finish_reason,
        "logprobs": (
            logprobs_of(choice.completion, decode) if logprobs else None
        ),
        "policy_versions": version_spans(choice.completion.versions),
        "interaction_id": interaction_id(answer.id, i),
    }
    if token_ids:
      entry["token_ids"] = choice.completion.tokens.tolist()
    choices.append(entry)
  result = {
      "id": answer.id,
      "object": "chat.completion",
      "created": answer.created,
      "model": answer.model,
      "choices": choices,
      "usage": usage(answer),
  }
  if token_ids:
    result["prompt_token_ids"] = answer.prompt_tokens.tolist()
  return result


def interaction_id(answer_id: str, index: int) -> str:
  """Under which a choice is stored, and can be rewarded."""
  return f"{answer_id}-{index}" if index else answer_id


def version_spans(versions_S: np.ndarray) -> list[list[int]]:
  """[[first token, version], …] of tokens' policy versions."""
  starts = np.flatnonzero(np.diff(versions_S, prepend=-2))
  return [[int(i), int(versions_S[i])] for i in starts]


def logprobs_of(
    completion: policy_client.Completion, decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
  content = []
  for token, logprob in zip(
      completion.tokens.tolist(), completion.logprobs.tolist()
  ):
    text = decode([token])
    content.append({
        "token": text,
        "logprob": logprob,
        "bytes": list(text.encode()),
        "top_logprobs": [],
    })
  return {"content": content, "refusal": None}


# --- streams ------------------------------------------------------------------


class TextStream:
  """Text of tokens that arrive a few at a time.

  Held back is what later tokens may still change: the bytes of a character
  that has begun, and an end-of-turn token.
  """

  def __init__(self, decode: Callable[[Sequence[int]], str]):
    self._decode = decode
    self._tokens: list[int] = []
    self._sent = 0

  def feed(self, tokens: Sequence[int]) -> str:
    """The text that is new and certain."""
    self._tokens.extend(int(t) for t in tokens)
    text = self._decode(self._tokens)
    certain = len(text)
    while certain > self._sent and text[certain - 1] == "\ufffd":
      certain -= 1
    new = text[self._sent : certain]
    self._sent = max(self._sent, certain)
    return new

  def rest(self, text: str) -> str:
    """What of the whole text has not been sent."""
    return text[self._sent :]


def chunk(
    answer_id: str,
    created: int,
    model: str,
    index: int,
    delta: Mapping[str, Any],
    finish_reason: str | None = None,
    **extra: Any,
) -> dict[str, Any]:
  """One event of a stream."""
  return {
      "id": answer_id,
      "object": "chat.completion.chunk",
      "created": created,
      "model": model,
      "choices": [{
          "index": index,
          "delta": dict(delta),
          "finish_reason": finish_reason,
          "logprobs": None,
          **extra,
      }],
  }


def last_deltas(choice: Choice, stream: TextStream) -> Iterator[dict[str, Any]]:
  """What ends a choice's stream, up to its finish reason."""
  calls = choice.message.get("tool_calls")
  content = choice.message["content"] or ""
  rest = content if calls else stream.rest(content)
  if rest:
    yield {"content": rest}
  for i, call in enumerate(calls or ()):
    yield {"tool_calls": [{"index": i, **call}]}
