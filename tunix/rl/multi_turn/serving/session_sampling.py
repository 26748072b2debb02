"""Compares a request's sampling with what its session is trained under.

A learner scores a session's tokens under one distribution: a temperature and a
truncation. Tokens drawn from another one (a colder request, a grammar, tokens
held back by `min_tokens`) have log-probs that the learner cannot reproduce.

Promises: a field that a request leaves out is the session's; a request that
draws from another distribution is found, and named by its field.
"""

from __future__ import annotations

import dataclasses
from typing import Mapping

from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.serving import errors
from tunix.rl.multi_turn.serving import requests

FIELDS = ("temperature", "top_p", "top_k", "min_p")
ACTIONS = ("mask", "refuse", "train")


@dataclasses.dataclass(frozen=True)
class SessionSampling:
  """The distribution of a session's trainable tokens.

  Attributes:
    temperature, top_p, top_k, min_p: as of `SamplingParams`.
    other: The treatment of a request with another distribution. "mask": it is
      answered, and its tokens are not trainable. "refuse": it is an error.
      "train": its tokens are trainable with the log-probs of their own
      distribution, for a learner that corrects by importance. Greedy ones are
      masked: their log-probs are those at temperature 1.
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
  def fields(self) -> dict[str, float]:
    return fields_of(self)

  def complete(
      self, request: requests.SamplingRequest
  ) -> policy_client.SamplingParams:
    """The request's sampling; fields that it leaves out are the session's."""
    own = {
        name: value
        for name, value in self.fields.items()
        if name not in request.chosen
    }
    return dataclasses.replace(request.sampling, **own)

  def difference(
      self,
      request: requests.SamplingRequest,
      sampling: policy_client.SamplingParams,
  ) -> str:
    """Names what makes the distribution another one; "" if nothing does.

    Args:
      request: A request of the session.
      sampling: The request's, as of `complete`.

    Raises:
      ApiError: The session refuses other distributions.
    """
    requested = fields_of(sampling)
    for name, value in self.fields.items():
      if requested[name] != value:
        if self.other == "train" and requested["temperature"]:
          continue
        reason = f"{name}={requested[name]:g}, not the session's {value:g}"
        return self._refused(name, reason)
    if self.other == "train":
      return ""
    if request.min_tokens:
      reason = f"min_tokens={request.min_tokens} holds back the turn's end"
      return self._refused("min_tokens", reason)
    if request.guide is not None:
      field = request.guide.field
      return self._refused(field, f"{field} constrains the tokens")
    return ""

  def _refused(self, field: str, reason: str) -> str:
    if self.other != "refuse":
      return reason
    raise errors.invalid(
        field,
        f"{reason}: a session's tokens are trained on as drawn with"
        f" {shown(self.fields)}; leave {field} out, ask outside of a session,"
        " or open the session with other_sampling=mask",
        "unsupported_parameter",
    )


def fields_of(sampling: object) -> dict[str, float]:
  return {name: getattr(sampling, name) for name in FIELDS}


def shown(fields: Mapping[str, float]) -> str:
  return ", ".join(f"{name}={value:g}" for name, value in fields.items())
