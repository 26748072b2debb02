"""Compares the sampling of a turn with the one that a run is trained under.

A learner scores a turn's tokens under one distribution: a temperature and a
truncation. Tokens drawn from another one (a colder request, a penalty, a
grammar, tokens held back) have log-probs that the learner cannot reproduce.

Promises: a field that a request leaves out is the run's; another distribution
is named by its field. Does not mask, count or refuse.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Iterator, Mapping

import pydantic
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import policy_client

FIELDS = ("temperature", "top_p", "top_k", "min_p")
ACTIONS = ("mask", "refuse", "train")
_NESTED = ("extra_body", "sampling_params")
# Values with which a field changes nothing, beside null, false and what is
# empty.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
  "min_tokens": (0,),
  "min_new_tokens": (0,),
  "presence_penalty": (0,),
  "frequency_penalty": (0,),
  "repetition_penalty": (1,),
  "typical_p": (1,),
  "logit_bias": (),
  "bad_words": (),
  "allowed_token_ids": (),
  "response_format": ({"type": "text"},),
  "tool_choice": ("auto", "none"),
  "structured_outputs": (),
  "guided_json": (),
  "guided_regex": (),
  "guided_choice": (),
  "guided_grammar": (),
  "json_schema": (),
  "regex": (),
  "ebnf": (),
  "structural_tag": (),
}


class OtherSampling(ValueError):
  """A turn of another distribution, where the run refuses those."""


@dataclasses.dataclass(frozen=True)
class SamplingRule:
  """The distribution of trainable tokens, and what becomes of another one.

  Attributes:
    temperature, top_p, top_k, min_p: as of `SamplingParams`.
    other: The treatment of a turn with another distribution. "mask": its tokens
      are not trainable. "refuse": it is an error. "train": its tokens are
      trainable with the log-probs of their own distribution, for a learner that
      corrects by importance. Greedy ones are masked: their log-probs are those
      at temperature 1.
  """

  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0
  min_p: float = 0.0
  other: str = "mask"

  def __post_init__(self):
    if self.other not in ACTIONS:
      raise ValueError(
        f"other_sampling must be one of {', '.join(ACTIONS)}; got"
        f" {self.other!r}"
      )
    policy_client.SamplingParams(**self.fields)  # Checks their ranges.

  @property
  def fields(self) -> dict[str, Any]:
    return fields_of(self)

  def reason_against(self, request: Mapping[str, Any]) -> str:
    """Names why a turn is not trained on; "" if it is.

    Args:
      request: The body of an OpenAI-compatible request, or its sampling
        parameters.

    Raises:
      OtherSampling: the rule refuses the turn.
    """
    difference = self._difference(_flat(request))
    if difference and self.other == "refuse":
      raise OtherSampling(
        f"{difference}: the run trains on tokens as drawn with"
        f" {shown(self.fields)}; leave the field out, or set"
        " rollout.other_sampling=mask"
      )
    return difference

  def distribution_difference(self, values: Mapping[str, float]) -> str:
    """Names the field of another distribution that is not trained on, with
    both values; "" for none. `values` has all of `FIELDS`."""
    for name, value in self.fields.items():
      if values[name] != value:
        if self.other == "train" and values["temperature"]:
          continue
        return f"{name}={values[name]:g}, not the session's {value:g}"
    return ""

  def _difference(self, values: Mapping[str, Any]) -> str:
    own = dict(self.fields)
    for name in FIELDS:
      if values.get(name) is None:
        continue
      number = _number(values[name])
      if number is None:
        return f"{name}={values[name]!r} is no number"
      # Both switch top_k off.
      own[name] = 0 if name == "top_k" and number == -1 else number
    if difference := self.distribution_difference(own):
      return difference.replace("the session's", "the run's")
    if self.other == "train":
      return ""
    return next(_constraints(values), "")


def of_text(
  text: str, other: str, kind: type[SamplingRule] = SamplingRule
) -> Any:
  """The rule of a command's `--sampling` and `--other-sampling`.

  Raises:
    ValueError: naming the option and the value.
  """
  try:
    fields = json_text.parse(text)
    if not isinstance(fields, dict) or set(fields) - set(FIELDS):
      raise ValueError(f"give an object of {', '.join(FIELDS)}")
    return kind(**fields, other=other)
  except pydantic.ValidationError as error:
    first = error.errors(include_url=False)[0]
    raise ValueError(
      f"--sampling={text}: {first['loc'][0]}={first['input']}: {first['msg']}"
    ) from None
  except (TypeError, ValueError) as error:
    raise ValueError(f"--sampling={text}: {error}") from None


def fields_of(sampling: object) -> dict[str, Any]:
  return {name: getattr(sampling, name) for name in FIELDS}


def shown(fields: Mapping[str, float]) -> str:
  return ", ".join(f"{name}={value:g}" for name, value in fields.items())


def _flat(request: Mapping[str, Any]) -> dict[str, Any]:
  flat = {k: v for k, v in request.items() if k in FIELDS or k in _NEUTRAL}
  for key in _NESTED:
    if isinstance(nested := request.get(key), Mapping):
      flat |= _flat(nested)
  return flat


def _constraints(values: Mapping[str, Any]) -> Iterator[str]:
  for name, neutral in _NEUTRAL.items():
    value = values.get(name)
    if not value and name not in ("repetition_penalty", "typical_p"):
      continue
    number = _number(value)
    if value is None or value in neutral or number in neutral:
      continue
    text = f"={number:g}" if number is not None else ""
    yield f"{name}{text} changes the distribution of the tokens"


def _number(value: object) -> float | None:
  """The number, also written as text; None for anything else."""
  if isinstance(value, bool) or not isinstance(value, (int, float, str)):
    return None
  try:
    number = float(value)
  except ValueError:
    return None
  return number if math.isfinite(number) else None
