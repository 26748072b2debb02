"""Implements `/v1/completions`: its bodies, answers and streams.

A prompt is a text or a list of token ids, and is sampled from as it stands:
without a template, and special tokens spelled in a text stay text. A list of
prompts is answered as a request for each: choice `i * n + j` is the prompt i's
completion j. With `echo`, a choice's text begins with its prompt's.

Promises: streamed text adds up to that of the whole answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Iterator, Mapping

import pydantic
from pydantic_core import core_schema
from tunix.rl.multi_turn.core import policy_client

from agent_services.serving import answers
from agent_services.serving import bodies
from agent_services.serving import errors
from agent_services.serving import requests
from agent_services.serving.endpoints import streams

# --- bodies -------------------------------------------------------------------


class _Prompt:
  """A text, or token ids; or a list of either."""

  text = "must be a text or a list of token ids, not empty, or a list of them"

  def __get_pydantic_core_schema__(
    self, source: Any, handler: pydantic.GetCoreSchemaHandler
  ) -> Any:
    del source, handler
    return core_schema.with_info_plain_validator_function(
      lambda value, info: _prompt(value, info.context.prompt_tokens)
    )

  def __get_pydantic_json_schema__(
    self, schema: core_schema.CoreSchema, handler: pydantic.GetJsonSchemaHandler
  ) -> Any:
    text = {"type": "string", "minLength": 1, **bodies.BY_BODY}
    one = [text, bodies.TOKEN_IDS_SCHEMA]
    listed = [
      {"type": "array", "items": i, "minItems": 1, bodies.LIMIT: "n"}
      for i in one
    ]
    return {"anyOf": [*one, *listed]}


class CompletionBody(requests.ChoicesBody):
  """A body of `/v1/completions`."""

  prompt: Annotated[tuple[requests.Prompt, ...], _Prompt()]
  # The number of alternatives, beside the sampled token.
  logprobs: (
    Annotated[int, bodies.Range(0, policy_client.MAX_TOP_LOGPROBS)] | None
  ) = None
  best_of: bodies.Unread = None
  echo: bodies.Flag = False
  suffix: Annotated[Any, bodies.Neutral("")] = None


def read(
  body: Mapping[str, Any], limits: requests.RequestLimits
) -> requests.SamplingRequest:
  """Checks a body.

  Raises:
    ApiError: naming the field.
  """
  fields = bodies.parse(CompletionBody, body, limits)
  fields.check_n()
  if fields.best_of not in (None, fields.n):
    raise bodies.unsupported("best_of", fields.best_of)
  if fields.echo and fields.logprobs is not None:
    raise errors.invalid(
      "echo",
      "echo and logprobs exclude each other: a prompt has no log-probs here;"
      " leave one out",
      "unsupported_parameter",
    )
  if (count := len(fields.prompt)) * fields.n > limits.n:
    raise errors.invalid(
      "prompt",
      f"prompt holds {count} prompts for n={fields.n} completions each, a"
      f" request has at most {limits.n} completions; send several requests",
    )
  (first, *more) = fields.prompt
  return fields.request(
    fields.sampling(fields.max_tokens, limits, fields.logprobs or 0),
    text=first if isinstance(first, str) and not more else None,
    tokens=None if isinstance(first, str) or more else first,
    prompts=fields.prompt if more else (),
    repeat_prompt=fields.echo,
    n=fields.n,
    logprobs=fields.logprobs is not None,
    stop=fields.stops,
    guide=fields.guide(fields.format_guide),
  )


def _prompt(value: object, most: int | None) -> tuple[requests.Prompt, ...]:
  if not isinstance(value, list) or not any(
    isinstance(p, (str, list)) for p in value
  ):
    return (_one_prompt("prompt", value, most),)
  kinds = {str if isinstance(one, str) else list for one in value}
  if len(kinds) > 1:
    raise errors.invalid(
      "prompt",
      "prompt holds texts and others; send texts alone, or lists of token ids"
      " alone",
    )
  return tuple(
    _one_prompt(f"prompt[{i}]", one, most) for i, one in enumerate(value)
  )


def _one_prompt(where: str, value: object, most: int | None) -> requests.Prompt:
  if isinstance(value, str) and value:
    return value
  if isinstance(value, list) and value:
    return bodies.token_ids(where, value, most)
  if where == "prompt":
    raise bodies.refusal(_Prompt.text)
  raise errors.invalid(
    where,
    f"{where} must be a text or a list of token ids, not empty, got"
    f" {bodies.shown(value)}",
  )


# --- answers ------------------------------------------------------------------


def _logprobs(
  choice: answers.Choice, decoder: answers.TokenDecoder
) -> dict[str, Any]:
  """Returns the log-probs of a choice."""
  tokens = choice.completion.tokens.tolist()
  return {
    "tokens": [decoder.token(t) for t in tokens],
    "token_logprobs": choice.completion.logprobs.tolist(),
    "top_logprobs": _alternatives(choice.completion, decoder),
    "text_offset": answers.text_offsets(tokens, decoder),
  }


def _echoes(
  request: requests.SamplingRequest, decoder: answers.TokenDecoder
) -> list[str]:
  """Returns the text of the prompt that each choice begins with."""
  if not request.repeat_prompt:
    return [""] * request.choices
  texts = [p.text or decoder.all_text(p.tokens or ()) for p in request.parts()]
  return [text for text in texts for _ in range(request.n)]


def _alternatives(
  completion: policy_client.Completion, decoder: answers.TokenDecoder
) -> list[dict[str, float]] | None:
  """Log-probs by token text, the sampled token included; non-text by bytes."""
  if completion.top_tokens is None:
    return None

  def name(token: int) -> str:
    text = decoder.token(token)
    if "\ufffd" not in text:
      return text
    return "bytes:" + "".join(f"\\x{b:02x}" for b in decoder.bytes(token))

  return [
    {name(t): p for t, p in [*top, (token, logprob)]}
    for token, logprob, top in zip(
      completion.tokens.tolist(),
      completion.logprobs.tolist(),
      answers.alternatives(completion),
    )
  ]


def _ending(
  request: requests.SamplingRequest,
  answer: answers.SampledAnswer,
  decoder: answers.TokenDecoder,
  index: int,
) -> dict[str, Any]:
  """Fields of a choice beside its index and text."""
  choice = answer.choices[index]
  ending = {
    "finish_reason": choice.finish_reason,
    "logprobs": _logprobs(choice, decoder) if request.logprobs else None,
    **answers.extras(request, answer, index),
  }
  if request.return_token_ids:
    ending["prompt_token_ids"] = answer.prompt_tokens_of(index).tolist()
  return ending


def whole(
  request: requests.SamplingRequest,
  answer: answers.SampledAnswer,
  decoder: answers.TokenDecoder,
) -> dict[str, Any]:
  """Returns the JSON object of an answer that is not streamed."""
  return {
    "id": answer.id,
    "object": "text_completion",
    "created": answer.created,
    "model": answer.model,
    "choices": [
      {
        "index": i,
        "text": echo + choice.message["content"],
        **_ending(request, answer, decoder, i),
      }
      for i, (choice, echo) in enumerate(
        zip(answer.choices, _echoes(request, decoder))
      )
    ],
    "usage": answers.usage(answer),
  }


class CompletionStream(streams.ChoiceStream):
  """Writer of an answer's events during sampling."""

  kind = "text_completion"

  def start(self) -> Iterator[dict[str, Any]]:
    for i, echo in enumerate(_echoes(self._request, self._decoder)):
      if echo:
        yield self._chunk(i, self._new(echo))

  def _new(self, text: str) -> dict[str, Any]:
    return {"text": text}

  def _ending(
    self, answer: answers.SampledAnswer, index: int
  ) -> Iterator[dict[str, Any]]:
    unsent = self._texts[index].rest(answer.choices[index].message["content"])
    ending = _ending(self._request, answer, self._decoder, index)
    yield self._chunk(index, self._new(unsent), **ending)


ENDPOINT = streams.Endpoint(
  "completions", "cmpl-", CompletionBody, read, whole, CompletionStream
)
