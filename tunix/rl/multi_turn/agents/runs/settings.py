"""Declares the settings of episodes that a run service plays.

Does not call a service; imports no HTTP client.
"""

from __future__ import annotations

import os
from typing import Any, Iterator, Literal

from tunix.rl.multi_turn.core import settings

setting = settings.setting
URL_VARIABLE = "GBOX_MINI_AGENT_BASE_URL"
TOKEN_VARIABLE = "TUNIX_RUN_SERVICE_TOKEN"
_DEFAULT_URL = "http://127.0.0.1:3000"


@settings.settings
class RunServiceConfig:
  """The service that plays episodes with rollout.agent=run_service."""

  backend: Literal["run_service", "gbox_mini_agent"] = setting(
      default="run_service",
      doc="run_service: this package's, which also gets the agent's settings,"
      " the sampling and the form of screenshots. gbox_mini_agent: any other"
      " service, which gets the fields of the protocol and decides these by"
      " itself.",
  )
  base_url: str = setting(
      default="",
      doc=f"Where it listens. \"\" = ${URL_VARIABLE}, else {_DEFAULT_URL}. Its"
      f" token is ${TOKEN_VARIABLE}.",
  )
  agent: str = setting(
      default="tool",
      doc="With backend=gbox_mini_agent, the service's name of the agent, e.g."
      " compact, qwen3-vl, mai-ui.",
  )
  model: str = setting(
      default="", doc='Name of the policy in its requests. "" = policy.name.'
  )
  env: dict[str, Any] = setting(
      default={}, doc="Further fields of the run's env, for the service."
  )
  action_space: Literal["pc", "mobile"] = setting(
      default="pc", doc="Sent as standardActionSpace."
  )
  key: Literal["url", "field"] = setting(
      default="url",
      doc="How the service gets the episode's key for the policy's server. url:"
      " in model.baseUrl, for services that send none. field: model.apiKey.",
  )
  images: Literal["base64", "url"] = setting(
      default="base64",
      doc="With backend=run_service, how the service sends screenshots to the"
      " policy's server. url: as addresses of the service, which an image proxy"
      " at rollout.public_url turns into data URLs.",
  )
  tokens: Literal["session", "events"] = setting(
      default="session",
      doc="Source of training tokens. session: the record of the policy's own"
      " server. events: the service's model_output events.",
  )
  on_missing: Literal["refuse", "fallback"] = setting(
      default="refuse",
      doc="With tokens=events, a turn without its tokens or probabilities."
      " refuse: the episode is a model error. fallback: the tokenizer encodes"
      " its text as if certain, counted in fallback_turns.",
  )
  poll_s: float = setting(
      default=3.0, doc="Pause between two polls of a run.", unit="s", gt=0
  )
  timeout_s: float = setting(
      default=30.0, doc="Deadline of a call to the service.", unit="s", gt=0
  )

  @property
  def url(self) -> str:
    """`base_url`, or what stands for it."""
    return self.base_url or os.environ.get(URL_VARIABLE) or _DEFAULT_URL

  @property
  def token(self) -> str:
    """The service's token, "" for none."""
    return os.environ.get(TOKEN_VARIABLE, "")

  def problems(self) -> Iterator[str]:
    if self.base_url and not self.base_url.startswith(("http://", "https://")):
      yield f"base_url={self.base_url!r}: give http://host:port or https://host"
    if self.on_missing == "fallback" and self.tokens == "session":
      yield (
          "on_missing=fallback is for tokens=events: a session's record misses"
          " none; set tokens=events, or on_missing=refuse"
      )
