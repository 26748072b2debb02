"""Compares a request's sampling with what its session is trained under.

`trajectory_collector.sampling_rule` has the rule; here it meets the requests of
the API.

Promises: a field that a request leaves out is the session's; a request that
draws from another distribution is found, and named by its field.
"""

from __future__ import annotations

import dataclasses

from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.trajectory_collector import sampling_rule

from agent_services.serving import errors
from agent_services.serving import requests


class SessionSampling(sampling_rule.SamplingRule):
  """Distribution from which a session's trainable tokens are drawn.

  A request for another distribution is answered, refused as an error of the
  API, or trained on; see `SamplingRule`.
  """

  def complete(
    self, request: requests.SamplingRequest
  ) -> policy_client.SamplingParams:
    """Returns the request's sampling; fields that it leaves out are the
    session's."""
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
    values = sampling_rule.fields_of(sampling)
    if reason := self.distribution_difference(values):
      return self._refused(reason.partition("=")[0], reason)
    if self.other == "train":
      return ""
    for field in ("frequency_penalty", "presence_penalty"):
      if value := getattr(sampling, field):
        reason = f"{field}={value:g} lowers the odds of sampled tokens"
        return self._refused(field, reason)
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
      f" {sampling_rule.shown(self.fields)}; leave {field} out, ask outside"
      " of a session, or open the session with other_sampling=mask",
      "unsupported_parameter",
    )
