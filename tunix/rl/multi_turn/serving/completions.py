"""`/v1/completions`: its bodies, answers and streams.

A prompt is a text or a list of token ids, and is sampled on as it stands: no
template, and no special token that is spelled in a text. Only sampled tokens
come back (no `echo`).

Promises: text that is streamed adds up to that of the whole answer.
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping

from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.serving import answers
from tunix.rl.multi_turn.serving import errors
from tunix.rl.multi_turn.serving import fields
from tunix.rl.multi_turn.serving import requests

PREFIX = "cmpl-"

_KNOWN = requests.COMMON | {
    "prompt", "max_tokens", "n", "stream_options", "logprobs", "best_of",
    "stop", "response_format",
}  # pyformat: disable
_NEUTRAL = requests.NEUTRAL | {"echo": (False,), "suffix": ("",)}


def read(body: Mapping[str, Any], limits: requests.Limits) -> requests.Request:
  """Checks a body.

  Raises:
    ApiError: naming the field.
  """
  fields.refuse_others(body, _KNOWN, _NEUTRAL)
  # A number here: of alternatives, beside what was sampled.
  most = policy_client.MAX_TOP_LOGPROBS
  alternatives = fields.integer(body, "logprobs", 0, 0, most)
  sampling = requests.sampling(body, limits, "max_tokens", alternatives)
  n = requests.choices(body, limits, sampling)
  if body.get("best_of") not in (None, n):
    raise fields.unsupported("best_of", body["best_of"])
  text, tokens = _prompt(body.get("prompt"), limits)
  return requests.Request(
      model=fields.string(body, "model"),
      text=text,
      tokens=tokens,
      sampling=sampling,
      n=n,
      stream=fields.flag(body, "stream"),
      include_usage=requests.include_usage(body),
      logprobs=body.get("logprobs") is not None,
      stop=requests.stop(body),
      guide=requests.guide(
          body,
          requests.json_format("response_format", body.get("response_format")),
      ),
      return_token_ids=fields.flag(body, "return_token_ids"),
  )


def _prompt(
    given: Any, limits: requests.Limits
) -> tuple[str | None, tuple[int, ...] | None]:
  """A text, or tokens; each also as the only one of a list."""
  if isinstance(given, list) and any(isinstance(p, (str, list)) for p in given):
    if len(given) != 1:
      raise errors.invalid(
          "prompt",
          f"prompt holds {len(given)} prompts; send a request for each, or ask"
          " for several completions with n",
      )
    given = given[0]
  if isinstance(given, str) and given:
    return fields.text("prompt", given), None
  if isinstance(given, list) and given:
    return None, fields.token_ids("prompt", given, limits.prompt_tokens)
  raise errors.invalid(
      "prompt",
      "prompt must be a text or a list of token ids, not empty; got"
      f" {fields.shown(given)}",
  )


# --- answers ------------------------------------------------------------------


def _logprobs(
    choice: answers.Choice, decoder: answers.Decoder
) -> dict[str, Any]:
  tokens = choice.completion.tokens.tolist()
  return {
      "tokens": [decoder.token(t) for t in tokens],
      "token_logprobs": choice.completion.logprobs.tolist(),
      "top_logprobs": _alternatives(choice, decoder),
      "text_offset": answers.text_offsets(tokens, decoder),
  }


def _alternatives(
    choice: answers.Choice, decoder: answers.Decoder
) -> list[dict[str, float]] | None:
  """By their text, the sampled token among them; by bytes what is no text."""
  completion = choice.completion
  if completion.top_tokens is None:
    return None

  def name(token: int) -> str:
    text = decoder.token(token)
    if "\ufffd" not in text:
      return text
    return "bytes:" + "".join(f"\\x{b:02x}" for b in decoder.bytes(token))

  told = []
  for token, logprob, top in zip(
      completion.tokens.tolist(),
      completion.logprobs.tolist(),
      answers.alternatives(completion),
  ):
    told.append({name(t): p for t, p in [*top, (token, logprob)]})
  return told


def _ending(
    asked: requests.Request,
    answer: answers.Answer,
    decoder: answers.Decoder,
    index: int,
) -> dict[str, Any]:
  """What a choice holds beside its index and text."""
  choice = answer.choices[index]
  told = {
      "finish_reason": choice.finish_reason,
      "logprobs": _logprobs(choice, decoder) if asked.logprobs else None,
      **answers.extras(asked, answer, index),
  }
  if asked.return_token_ids:
    told["prompt_token_ids"] = answer.prompt_tokens.tolist()
  return told


def whole(
    asked: requests.Request, answer: answers.Answer, decoder: answers.Decoder
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
              "text": choice.message["content"],
              **_ending(asked, answer, decoder, i),
          }
          for i, choice in enumerate(answer.choices)
      ],
      "usage": answers.usage(answer),
  }


class Stream(answers.ChoiceStream):
  """The events of an answer as it is sampled."""

  kind = "text_completion"

  def _new(self, text: str) -> dict[str, Any]:
    return {"text": text}

  def _ending(
      self, answer: answers.Answer, index: int
  ) -> Iterator[dict[str, Any]]:
    rest = self._texts[index].rest(answer.choices[index].message["content"])
    ending = _ending(self._asked, answer, self._decoder, index)
    yield self._chunk(index, self._new(rest), **ending)
