"""Implements `/v1/completions`: its bodies, answers and streams.

A prompt is a text or a list of token ids, and is sampled from as it stands:
without a template, and special tokens spelled in a text stay text. A list of
prompts is answered as a request for each: choice `i * n + j` is the prompt i's
completion j. With `echo`, a choice's text, tokens and log-probs begin with its
prompt's.

Promises: streamed text adds up to that of the whole answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Iterator, Mapping, Sequence

from pydantic_core import core_schema
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.serving import answers
from tunix.rl.multi_turn.serving import bodies
from tunix.rl.multi_turn.serving import errors
from tunix.rl.multi_turn.serving import requests
from tunix.rl.multi_turn.serving import streams

# --- bodies -------------------------------------------------------------------


class _Prompt:
  """A text, or token ids; or a list of either."""

  text = "must be a text or a list of token ids, not empty, or a list of them"

  def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
    del source, handler
    return core_schema.with_info_plain_validator_function(
        lambda value, info: _prompt(value, info.context.prompt_tokens)
    )

  def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
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
  asked = bodies.parse(CompletionBody, body, limits)
  asked.check_n()
  if asked.best_of not in (None, asked.n):
    raise bodies.unsupported("best_of", asked.best_of)
  if (count := len(asked.prompt)) * asked.n > limits.n:
    raise errors.invalid(
        "prompt",
        f"prompt holds {count} prompts for n={asked.n} completions each, a"
        f" request has at most {limits.n} completions; send several requests",
    )
  (first, *more) = asked.prompt
  return requests.SamplingRequest(
      model=asked.model,
      text=first if isinstance(first, str) and not more else None,
      tokens=None if isinstance(first, str) or more else first,
      prompts=asked.prompt if more else (),
      repeat_prompt=asked.echo,
      min_tokens=asked.min_tokens,
      sampling=asked.sampling(asked.max_tokens, limits, asked.logprobs or 0),
      n=asked.n,
      chosen=frozenset(asked.model_fields_set),
      stream=asked.stream,
      include_usage=asked.include_usage,
      logprobs=asked.logprobs is not None,
      stop=asked.stops,
      guide=asked.guide(asked.format_guide),
      return_token_ids=asked.wants_token_ids,
      ignored=bodies.ignored(asked),
  )


def _prompt(given: Any, most: int | None) -> tuple[requests.Prompt, ...]:
  if not isinstance(given, list) or not any(
      isinstance(p, (str, list)) for p in given
  ):
    return (_one_prompt("prompt", given, most),)
  kinds = {str if isinstance(one, str) else list for one in given}
  if len(kinds) > 1:
    raise errors.invalid(
        "prompt",
        "prompt holds texts and others; send texts alone, or lists of token ids"
        " alone",
    )
  return tuple(
      _one_prompt(f"prompt[{i}]", one, most) for i, one in enumerate(given)
  )


def _one_prompt(where: str, given: Any, most: int | None) -> requests.Prompt:
  if isinstance(given, str) and given:
    return given
  if isinstance(given, list) and given:
    return bodies.token_ids(where, given, most)
  if where == "prompt":
    raise bodies.refusal(_Prompt.text)
  raise errors.invalid(
      where,
      f"{where} must be a text or a list of token ids, not empty, got"
      f" {bodies.shown(given)}",
  )


# --- answers ------------------------------------------------------------------


def _logprobs(
    choice: answers.Choice,
    prompt: Sequence[int],
    decoder: answers.TokenDecoder,
) -> dict[str, Any]:
  """`prompt`: the tokens that the choice begins with; [] without `echo`."""
  tokens = [*prompt, *choice.completion.tokens.tolist()]
  logprobs: list[float | None] = choice.completion.logprobs.tolist()
  if prompt:
    # Nothing comes before the first token, that it could be likely after.
    logprobs = [None, *_known(choice), *logprobs]
  return {
      "tokens": [decoder.token(t) for t in tokens],
      "token_logprobs": logprobs,
      "top_logprobs": _alternatives(choice, prompt, decoder),
      "text_offset": answers.text_offsets(tokens, decoder),
  }


def _known(choice: answers.Choice) -> list[float]:
  """Log-probs of the prompt's tokens after the first."""
  return [] if choice.echoed is None else choice.echoed.logprobs.tolist()


def _echoes(
    asked: requests.SamplingRequest, decoder: answers.TokenDecoder
) -> list[str]:
  """The text that each choice begins with, as the prompt was sent."""
  if not asked.repeat_prompt:
    return [""] * asked.choices
  texts = [p.text or decoder.all_text(p.tokens) for p in asked.parts()]
  return [text for text in texts for _ in range(asked.n)]


def _alternatives(
    choice: answers.Choice,
    prompt: Sequence[int],
    decoder: answers.TokenDecoder,
) -> list[dict[str, float] | None] | None:
  """Log-probs by token text, the sampled token included; non-text by bytes."""
  completion = choice.completion
  if completion.top_tokens is None:
    return None
  echoed = choice.echoed

  def name(token: int) -> str:
    text = decoder.token(token)
    if "\ufffd" not in text:
      return text
    return "bytes:" + "".join(f"\\x{b:02x}" for b in decoder.bytes(token))

  told: list[dict[str, float] | None] = []
  pieces = [(completion.tokens.tolist(), completion)]
  if prompt:
    told.append(None)
  if echoed is not None:
    pieces.insert(0, ([*prompt[1:]], echoed))
  for tokens, found in pieces:
    tops = answers.alternatives(found)
    for token, logprob, top in zip(tokens, found.logprobs.tolist(), tops):
      told.append({name(t): p for t, p in [*top, (token, logprob)]})
  return told


def _ending(
    asked: requests.SamplingRequest,
    answer: answers.SampledAnswer,
    decoder: answers.TokenDecoder,
    index: int,
) -> dict[str, Any]:
  """Fields of a choice beside its index and text."""
  choice = answer.choices[index]
  prompt = []
  if asked.repeat_prompt:
    prompt = answer.prompt_tokens_of(index).tolist()
  told = {
      "finish_reason": choice.finish_reason,
      "logprobs": (
          _logprobs(choice, prompt, decoder) if asked.logprobs else None
      ),
      **answers.extras(asked, answer, index),
  }
  if asked.return_token_ids:
    told["prompt_token_ids"] = answer.prompt_tokens_of(index).tolist()
  return told


def whole(
    asked: requests.SamplingRequest,
    answer: answers.SampledAnswer,
    decoder: answers.TokenDecoder,
) -> dict[str, Any]:
  """The JSON object of an answer that is not streamed."""
  return {
      "id": answer.id,
      "object": "text_completion",
      "created": answer.created,
      "model": answer.model,
      "choices": [
          {
              "index": i,
              "text": echo + choice.message["content"],
              **_ending(asked, answer, decoder, i),
          }
          for i, (choice, echo) in enumerate(
              zip(answer.choices, _echoes(asked, decoder))
          )
      ],
      "usage": answers.usage(answer),
  }


class CompletionStream(streams.ChoiceStream):
  """The events of an answer as it is sampled."""

  kind = "text_completion"

  def start(self) -> Iterator[dict[str, Any]]:
    for i, echo in enumerate(_echoes(self._asked, self._decoder)):
      if echo:
        yield self._chunk(i, self._new(echo))

  def _new(self, text: str) -> dict[str, Any]:
    return {"text": text}

  def _ending(
      self, answer: answers.SampledAnswer, index: int
  ) -> Iterator[dict[str, Any]]:
    rest = self._texts[index].rest(answer.choices[index].message["content"])
    ending = _ending(self._asked, answer, self._decoder, index)
    yield self._chunk(index, self._new(rest), **ending)


ENDPOINT = streams.Endpoint(
    "completions", "cmpl-", CompletionBody, read, whole, CompletionStream
)
