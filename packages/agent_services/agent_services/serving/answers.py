"""Represents answers before they take an endpoint's shape; decodes their text.

Promises: bytes of tokens concatenate to the bytes of their text, also where a
character is split over tokens. With stop strings, the tokens end with the one
that completes a string; the text ends before the string, also where it is sent
in parts.

Does not sample, or know sessions.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import secrets
from typing import Any, Callable, Iterable, Sequence

import numpy as np
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.parser.renderer import base_renderer as renderer_base
from tunix.rl.multi_turn.parser.tool_parser import base as parser_base

from agent_services.serving import requests
from agent_services.serving.sessions import interactions

_REASONS = {
  policy_client.FinishReason.STOP: "stop",
  policy_client.FinishReason.LENGTH: "length",
  policy_client.FinishReason.CANCELLED: "abort",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
  """One of a request's completions.

  Attributes:
    completion: Sampled completion.
    message: OpenAI's assistant message that the client receives.
    finish_reason: "stop", "length", "tool_calls".
    stop: Stop string that ended it, if one did.
  """

  completion: policy_client.Completion
  message: dict[str, Any]
  finish_reason: str
  stop: str | None = None


@dataclasses.dataclass(frozen=True)
class SampledAnswer:
  """A request's answer.

  Attributes:
    id: Id of the answer.
    created: Unix seconds.
    model: Name of the model.
    prompts: Prompts of the request, one unless it has several. A session's
      prompts share their tokens with earlier ones, as answers are stored as
      long as their session.
    num_prompt_tokens: Number of prompt tokens, image placeholders expanded.
    reused_tokens: Number of prompt tokens whose keys and values were cached.
    choices: Completions of each prompt in turn.
  """

  id: str
  created: int
  model: str
  prompts: tuple[policy_client.TokenPrompt | interactions.PendingPrompt, ...]
  num_prompt_tokens: int
  reused_tokens: int
  choices: tuple[Choice, ...]

  @property
  def prompt_tokens(self) -> np.ndarray:
    """int32[T] of the first prompt, concatenated at each call."""
    return self.prompt_tokens_of(0)

  def prompt_tokens_of(self, choice: int) -> np.ndarray:
    """Returns int32[T] of a choice's prompt, concatenated at each call."""
    prompt = self.prompts[choice * len(self.prompts) // len(self.choices)]
    if isinstance(prompt, interactions.PendingPrompt):
      return prompt.prompt.tokens
    return prompt.tokens

  @property
  def num_sampled(self) -> int:
    return sum(len(c.completion.tokens) for c in self.choices)


def make_choice(
  completion: policy_client.Completion,
  text: str,
  parser: parser_base.ToolParser | None,
  stop: str | None = None,
  only_calls: bool = False,
) -> Choice:
  """Cuts the text into content and tool calls.

  A call that the completion's length cuts off is no content.

  Args:
    completion: Sampled completion.
    text: Text of the completion, without the end of the turn.
    parser: Reads tool calls; None leaves all text as content.
    stop: Stop string that ended it, if one did.
    only_calls: Whether text that the parser reads is nothing but calls.
  """
  message: dict[str, Any] = {"role": "assistant", "content": text}
  reason = _REASONS[completion.finish_reason]
  if parser is not None:
    result = parser.parse_result(text)
    if result.calls:
      message["content"] = result.thought or None
      message["tool_calls"] = [
        {
          "id": f"call_{secrets.token_hex(12)}",
          "type": "function",
          "function": {
            "name": call.name,
            "arguments": json.dumps(call.arguments, ensure_ascii=False),
          },
        }
        for call in result.calls
      ]
      reason = "tool_calls" if reason == "stop" else reason
    elif reason == "length" and only_calls:
      message["content"] = ""
    elif reason == "length" and result.first_call is not None:
      message["content"] = text[: result.first_call].rstrip()
  return Choice(completion, message, reason, stop)


def usage(answer: SampledAnswer) -> dict[str, Any]:
  sampled, prompt = answer.num_sampled, answer.num_prompt_tokens
  return {
    "prompt_tokens": prompt,
    "completion_tokens": sampled,
    "total_tokens": prompt + sampled,
    "prompt_tokens_details": {"cached_tokens": answer.reused_tokens},
  }


def extras(
  request: requests.SamplingRequest, answer: SampledAnswer, index: int
) -> dict[str, Any]:
  """Returns a choice's fields beyond OpenAI's."""
  completion = answer.choices[index].completion
  fields: dict[str, Any] = {
    "policy_versions": version_spans(completion.versions),
    "interaction_id": interaction_id(answer.id, index),
  }
  if request.return_token_ids:
    fields["token_ids"] = completion.tokens.tolist()
  if completion.raw_logprobs is not None:
    fields["raw_logprobs"] = completion.raw_logprobs.tolist()
  return fields


def extras_of_one(
  request: requests.SamplingRequest, answer: SampledAnswer
) -> dict[str, Any]:
  """Returns the fields beyond the API's of an answer with one choice."""
  fields = extras(request, answer, 0)
  if request.return_token_ids:
    fields["prompt_token_ids"] = answer.prompt_tokens.tolist()
    logprobs_S = answer.choices[0].completion.logprobs
    fields["token_logprobs"] = logprobs_S.tolist()
  return fields


def interaction_id(answer_id: str, index: int) -> str:
  """Returns the id under which a choice is stored, and can be rewarded."""
  return f"{answer_id}-{index}" if index else answer_id


def version_spans(versions_S: np.ndarray) -> list[list[int]]:
  """[[first token, version], …] of tokens' policy versions."""
  starts = np.flatnonzero(np.diff(versions_S, prepend=-2))
  return [[int(i), int(versions_S[i])] for i in starts]


# --- text ---------------------------------------------------------------------


def _byte_of_character() -> dict[str, int]:
  """Returns the byte that each character of byte-level BPE's vocabulary stands
  for."""
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  unprintable = [b for b in range(256) if b not in printable]
  spelled = {chr(b): b for b in printable}
  return spelled | {chr(256 + i): b for i, b in enumerate(unprintable)}


class TokenDecoder:
  """Decodes tokens to text and bytes.

  Attributes:
    text: Returns the text of a completion's tokens, without the end of its
      turn.
    special: Ids without text.
    end: Id of the end of a turn, which has no text where it comes last.
  """

  _BYTES = _byte_of_character()

  def __init__(
    self,
    text: Callable[[Sequence[int]], str],
    tokenizer: renderer_base.Tokenizer,
    end: int | None = None,
  ):
    """Args:

    text: the renderer's `decode`.
    tokenizer: a byte-level `tokenizers.Tokenizer`, or a transformers
      tokenizer around one.
    end: the renderer's `end_of_turn_id`.
    """
    self.end = end
    backend = renderer_base.backend_of(tokenizer)
    self.text = text
    self._spelling = backend.id_to_token
    added = backend.get_added_tokens_decoder()
    self._added = {i: token.content.encode() for i, token in added.items()}
    self.special = frozenset(i for i, token in added.items() if token.special)

  def bytes(self, token: int) -> bytes:
    """Returns the bytes of one token; b"" for an id outside the vocabulary."""
    if token in self._added:
      return self._added[token]
    spelled = self._spelling(token) or ""
    if all(c in self._BYTES for c in spelled):
      return bytes(self._BYTES[c] for c in spelled)
    return spelled.encode()

  def all_text(self, tokens: Sequence[int]) -> str:
    """Returns the text of all tokens, the end of a turn among them."""
    return b"".join(map(self.bytes, tokens)).decode(errors="replace")

  def token(self, token: int) -> str:
    """Returns the printable text of one token; U+FFFD is part of a
    character."""
    return self.bytes(token).decode(errors="replace")


def logprobs(
  completion: policy_client.Completion,
  decoder: TokenDecoder,
  as_ids: bool = False,
) -> list[dict[str, Any]]:
  """Returns a completion's tokens in the shape of chat completions'
  `logprobs`; `as_ids` names each "token_id:17" in place of its text."""
  of = lambda token, logprob: {
    "token": f"token_id:{token}" if as_ids else decoder.token(token),
    "logprob": logprob,
    "bytes": list(decoder.bytes(token)),
  }
  return [
    of(token, logprob) | {"top_logprobs": [of(*one) for one in top]}
    for token, logprob, top in zip(
      completion.tokens.tolist(),
      completion.logprobs.tolist(),
      alternatives(completion),
    )
  ]


def alternatives(
  completion: policy_client.Completion,
) -> list[list[tuple[int, float]]]:
  """Each position's likeliest tokens with log-probs; empty unless the request
  asks for them."""
  if completion.top_tokens is None or completion.top_logprobs is None:
    return [[] for _ in completion.tokens]
  return [
    [(t, p) for t, p in zip(tokens, logprobs) if p > -np.inf]
    for tokens, logprobs in zip(
      completion.top_tokens.tolist(), completion.top_logprobs.tolist()
    )
  ]


def text_offsets(tokens: Sequence[int], decoder: TokenDecoder) -> list[int]:
  """Returns the number of characters of the text before each token."""
  decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
  offsets, at = [], 0
  for token in tokens:
    offsets.append(at)
    at += len(decode(decoder.bytes(int(token))))
  return offsets


class TextStream:
  """Decodes tokens that arrive a few at a time, reading each once.

  Holds back text that later tokens may still change: the bytes of a character
  that has begun, an end-of-turn token, and the beginning of a stop string.
  """

  def __init__(self, decoder: TokenDecoder, strings: Sequence[str] = ()):
    self._decoder = decoder
    self._strings = strings
    self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
    # Token without text, where it is the last.
    self._end: int | None = None
    self._held = ""
    self._sent = 0
    self._stopped = False

  def feed(self, tokens: Iterable[int]) -> str:
    """Returns the new text that later tokens cannot change."""
    parts = [self._held]
    for token in map(int, tokens):
      if self._end is not None:
        parts.append(self._text(self._end))
      self._end = token if token == self._decoder.end else None
      if self._end is None:
        parts.append(self._text(token))
    text = "".join(parts)
    if self._stopped:
      return ""
    sure = certain(text, self._strings)
    # A stop string that is complete in `text`: no text is sent after it.
    self._stopped = first_of(text, self._strings) < len(text)
    self._held = text[sure:]
    self._sent += sure
    return text[:sure]

  def rest(self, text: str) -> str:
    """Returns the part of the whole text that has not been sent."""
    return text[self._sent :]

  def _text(self, token: int) -> str:
    return self._characters.decode(self._decoder.bytes(token))


# --- stop strings -------------------------------------------------------------


class StopStrings:
  """Watches one completion for stop strings.

  A `constrained_decoding.StopWhen`.
  """

  def __init__(
    self,
    strings: Sequence[str],
    token_bytes: Callable[[int], bytes],
    ends: Sequence[int],
    included: Sequence[str] = (),
  ):
    """Args:

    strings: Strings that end the completion; its text ends before them. None
      is empty.
    token_bytes: Returns the bytes of an id.
    ends: Ids that end a turn and have no text.
    included: Strings that end the completion and its text. None is empty.
    """
    self._strings = tuple(strings)
    self._bytes = [s.encode() for s in (*strings, *included)]
    self._longest = max(map(len, self._bytes))
    self._token_bytes = token_bytes
    self._ends = frozenset(ends)
    self._seen = 0
    self._tail = b""  # The last bytes, in which a string may begin.
    self.found = False

  def __call__(self, tokens: np.ndarray) -> int | None:
    """Returns the number of int32[S] tokens to keep; None until a string is
    complete."""
    for i in range(self._seen, len(tokens)):
      token = int(tokens[i])
      if token in self._ends:
        continue
      text = self._tail + self._token_bytes(token)
      if any(s in text for s in self._bytes):
        self.found = True
        return i + 1
      self._tail = text[-(self._longest - 1) :] if self._longest > 1 else b""
    self._seen = len(tokens)
    return None

  def cut(self, text: str) -> str:
    """Returns a completion's text up to the stop string."""
    return text[: first_of(text, self._strings)] if self.found else text

  def string(self, text: str) -> str | None:
    """Returns the stop string that ended a completion of this whole text."""
    end = first_of(text, self._strings) if self.found else len(text)
    return next((s for s in self._strings if text.startswith(s, end)), None)


def first_of(text: str, strings: Sequence[str], start: int = 0) -> int:
  """Offset of the earliest of the strings in the text, else its length."""
  places = (text.find(s, start) for s in strings)
  return min((p for p in places if p >= 0), default=len(text))


def certain(text: str, strings: Sequence[str]) -> int:
  """Returns the number of characters that no later text can turn into a stop
  string."""
  end = first_of(text, strings)
  if end < len(text):
    return end
  most = max(map(len, strings), default=1) - 1
  for size in range(min(most, len(text)), 0, -1):
    if any(s.startswith(text[-size:]) for s in strings):
      return len(text) - size
  return len(text)
