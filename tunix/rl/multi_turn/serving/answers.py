"""What was sampled for a request, before it takes an endpoint's shape.

Promises: bytes of tokens concatenate to the bytes of their text, also where a
character is split over tokens.

Does not sample, or know sessions.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import secrets
from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.parser.tool_parser import base as parser_base
from tunix.rl.multi_turn.serving import errors
from tunix.rl.multi_turn.serving import interactions
from tunix.rl.multi_turn.serving import requests
from tunix.rl.multi_turn.serving import stops

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
    prompt: what was asked. A session's, which shares its tokens with those
      before it: an answer is kept for as long as its session.
    num_prompt_tokens: image placeholders expanded.
    reused_tokens: of them, those whose keys and values were cached.
    choices: completions.
  """

  id: str
  created: int
  model: str
  prompt: policy_client.TokenPrompt | interactions.PendingPrompt
  num_prompt_tokens: int
  reused_tokens: int
  choices: tuple[Choice, ...]

  @property
  def prompt_tokens(self) -> np.ndarray:
    """int32[T], put together at each call."""
    if isinstance(self.prompt, interactions.PendingPrompt):
      return self.prompt.prompt.tokens
    return self.prompt.tokens

  @property
  def num_sampled(self) -> int:
    return sum(len(c.completion.tokens) for c in self.choices)


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
  sampled, prompt = answer.num_sampled, answer.num_prompt_tokens
  return {
      "prompt_tokens": prompt,
      "completion_tokens": sampled,
      "total_tokens": prompt + sampled,
      "prompt_tokens_details": {"cached_tokens": answer.reused_tokens},
  }


def extras(
    asked: requests.Request, answer: Answer, index: int
) -> dict[str, Any]:
  """What is told of a choice beyond OpenAI's fields."""
  completion = answer.choices[index].completion
  told: dict[str, Any] = {
      "policy_versions": version_spans(completion.versions),
      "interaction_id": interaction_id(answer.id, index),
  }
  if asked.return_token_ids:
    told["token_ids"] = completion.tokens.tolist()
  if completion.raw_logprobs is not None:
    told["raw_logprobs"] = completion.raw_logprobs.tolist()
  return told


def interaction_id(answer_id: str, index: int) -> str:
  """Under which a choice is stored, and can be rewarded."""
  return f"{answer_id}-{index}" if index else answer_id


def version_spans(versions_S: np.ndarray) -> list[list[int]]:
  """[[first token, version], …] of tokens' policy versions."""
  starts = np.flatnonzero(np.diff(versions_S, prepend=-2))
  return [[int(i), int(versions_S[i])] for i in starts]


# --- text ---------------------------------------------------------------------


def _byte_of_character() -> dict[str, int]:
  """How byte-level BPE spells bytes: printable ones as they are."""
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [b for b in range(256) if b not in printable]
  spelled = {chr(b): b for b in printable}
  return spelled | {chr(256 + i): b for i, b in enumerate(others)}


class Decoder:
  """Text and bytes of tokens.

  Attributes:
    text: of a completion's tokens, without the end of its turn.
    special: ids that are no text.
    end: id of the end of a turn, which is no text where it comes last.
  """

  _BYTES = _byte_of_character()

  def __init__(
      self,
      text: Callable[[Sequence[int]], str],
      tokenizer: Any,
      end: int | None = None,
  ):
    """Args:

      text: the renderer's `decode`.
      tokenizer: a byte-level `tokenizers.Tokenizer`, or a transformers
        tokenizer around one.
      end: the renderer's `end_of_turn_id`.
    """
    self.end = end
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    self.text = text
    self._spelling = backend.id_to_token
    added = backend.get_added_tokens_decoder()
    self._added = {i: token.content.encode() for i, token in added.items()}
    self.special = frozenset(i for i, token in added.items() if token.special)

  def bytes(self, token: int) -> bytes:
    """Of one token; of an id that is none, none."""
    if token in self._added:
      return self._added[token]
    spelled = self._spelling(token) or ""
    if all(c in self._BYTES for c in spelled):
      return bytes(self._BYTES[c] for c in spelled)
    return spelled.encode()

  def token(self, token: int) -> str:
    """One token for people; U+FFFD stands for part of a character."""
    return self.bytes(token).decode(errors="replace")


def logprobs(
    completion: policy_client.Completion, decoder: Decoder
) -> list[dict[str, Any]]:
  """A completion's tokens, as chat completions tell them."""
  of = lambda token, logprob: {
      "token": decoder.token(token),
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
  """For each token the likeliest ones that could be sampled; none unless they
  were asked for."""
  if completion.top_tokens is None:
    return [[] for _ in completion.tokens]
  return [
      [(t, p) for t, p in zip(tokens, logprobs) if p > -np.inf]
      for tokens, logprobs in zip(
          completion.top_tokens.tolist(), completion.top_logprobs.tolist()
      )
  ]


def text_offsets(tokens: Sequence[int], decoder: Decoder) -> list[int]:
  """How many characters of the text each token has before it."""
  decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
  offsets, at = [], 0
  for token in tokens:
    offsets.append(at)
    at += len(decode(decoder.bytes(int(token))))
  return offsets


class TextStream:
  """Text of tokens that arrive a few at a time, each looked at once.

  Held back is what later tokens may still change: the bytes of a character
  that has begun, an end-of-turn token, and what may become a stop string.
  """

  def __init__(self, decoder: Decoder, strings: Sequence[str] = ()):
    self._decoder = decoder
    self._strings = strings
    self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
    self._ended = False  # By a token that is not told if it is the last.
    self._held = ""
    self._sent = 0
    self._stopped = False

  def feed(self, tokens: Sequence[int]) -> str:
    """The text that is new and certain."""
    parts = [self._held]
    for token in map(int, tokens):
      if self._ended:
        parts.append(self._text(self._decoder.end))
      self._ended = token == self._decoder.end
      if not self._ended:
        parts.append(self._text(token))
    text = "".join(parts)
    if self._stopped:
      return ""
    certain = stops.certain(text, self._strings)
    # What begins in `text` and is there in full: nothing follows that is told.
    self._stopped = stops.first(text, self._strings) < len(text)
    self._held = text[certain:]
    self._sent += certain
    return text[:certain]

  def rest(self, text: str) -> str:
    """What of the whole text has not been sent."""
    return text[self._sent :]

  def _text(self, token: int) -> str:
    return self._characters.decode(self._decoder.bytes(token))


class ChoiceStream:
  """The events of an answer in choices, as it is sampled: what chat completions
  and completions have in common (a `streams.Writer`).

  Attributes:
    kind: of an event's object.
  """

  last = b"data: [DONE]\n\n"
  kind: str

  def __init__(
      self,
      asked: requests.Request,
      answer_id: str,
      created: int,
      decoder: Decoder,
  ):
    self._asked = asked
    self._head = {
        "id": answer_id,
        "object": self.kind,
        "created": created,
        "model": asked.model,
    }
    self._decoder = decoder
    self._texts = [TextStream(decoder, asked.stop) for _ in range(asked.n)]

  def start(self) -> Iterator[dict[str, Any]]:
    return iter(())

  def tokens(self, index: int, tokens: np.ndarray) -> Iterator[dict[str, Any]]:
    if self._asked.parse_tools:  # Calls and content are told apart at the end.
      return
    if new := self._texts[index].feed(tokens):
      yield self._chunk(index, self._new(new))

  def finish(self, answer: Answer) -> Iterator[dict[str, Any]]:
    for i in range(self._asked.n):
      yield from self._ending(answer, i)
    if self._asked.include_usage:
      yield {**self._head, "choices": [], "usage": usage(answer)}

  def failed(self, error: errors.ApiError) -> Iterator[dict[str, Any]]:
    yield error.body()

  def _new(self, text: str) -> dict[str, Any]:
    """The field that tells of new text."""
    raise NotImplementedError

  def _ending(self, answer: Answer, index: int) -> Iterator[dict[str, Any]]:
    """A choice's last events."""
    raise NotImplementedError

  def _chunk(
      self, index: int, new: Mapping[str, Any], **ending: Any
  ) -> dict[str, Any]:
    choice = {
        "index": index,
        **new,
        "finish_reason": None,
        "logprobs": None,
        **ending,
    }
    return {**self._head, "choices": [choice]}
