"""Defines the bodies of the run service and the agents that it knows.

Field names are those of the protocol, in camel case.

Promises: a body with a field that the service does not know, or a value that
cannot be, is refused with the field's name.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Mapping

import pydantic
from tunix.rl.multi_turn import prompts
from tunix.rl.multi_turn.agents import tool_agent
from tunix.rl.multi_turn.core import json_models
from tunix.rl.multi_turn.parser import tool_parser


class _Body(json_models.Request):
  model_config = pydantic.ConfigDict(
      extra="forbid", strict=True, allow_inf_nan=False
  )


class Sampling(_Body):
  """Sampling of every turn; a field left out is the model server's own.

  Attributes:
    seed: of the run; the request of turn t, from 0, has `derive_seed(seed, t)`.
  """

  temperature: float | None = pydantic.Field(default=None, ge=0)
  top_p: float | None = pydantic.Field(default=None, gt=0, le=1)
  top_k: int | None = pydantic.Field(default=None, ge=0)
  min_p: float | None = pydantic.Field(default=None, ge=0, le=1)
  max_tokens: int | None = pydantic.Field(default=None, ge=1)
  seed: int | None = None


class Model(_Body):
  """The policy: an OpenAI-compatible server.

  Attributes:
    logprobs: ask for log-probs and token ids, which training needs.
    topLogprobs: alternatives a token; None asks for none.
    apiKey: sent as bearer token.
    images: the form in which screenshots are sent to it.
  """

  baseUrl: str
  name: str = pydantic.Field(min_length=1)
  provider: Literal["openai"] = "openai"
  logprobs: bool = True
  topLogprobs: int | None = pydantic.Field(default=None, ge=0, le=20)
  apiKey: str = ""
  images: Literal["base64", "url"] = "base64"
  sampling: Sampling = Sampling()


class AgentConfig(_Body):
  """Settings of the agent, instead of its preset's."""

  parser: str | None = None
  systemPrompt: str | None = None
  maxImages: int | None = pydantic.Field(default=None, ge=1)
  imageStride: int = pydantic.Field(default=1, ge=1)
  onParseError: Literal["end", "retry", "answer"] = "end"


class CreateBody(_Body):
  """A body of `POST /runs`.

  Attributes:
    images: the form of screenshots in events: signed addresses that expire, or
      data URLs.
  """

  task: str = ""
  agent: str = "tool"
  agentConfig: AgentConfig = AgentConfig()
  maxSteps: int = pydantic.Field(default=20, ge=1, le=10_000)
  maxRunTimeSec: float = pydantic.Field(default=600.0, gt=0, le=86_400)
  maxStepTimeSec: float = pydantic.Field(default=180.0, gt=0, le=86_400)
  model: Model
  env: dict[str, Any]
  standardActionSpace: Literal["mobile", "pc"] = "pc"
  images: Literal["base64", "url"] = "url"


@dataclasses.dataclass(frozen=True)
class Preset:
  """An agent by name: grammar and prompt."""

  parser: str
  system_prompt: str


PRESETS: Mapping[tuple[str, str], Preset] = {
    ("tool", "pc"): Preset("computer_use", "desktop"),
    ("tool", "mobile"): Preset("computer_use", "mobile"),
    # The prompt that the shipped policy has learned; 200 tokens instead of
    # 1,500.
    ("compact", "pc"): Preset("computer_use_compact", "desktop_compact"),
    ("qwen3-vl", "pc"): Preset("computer_use", "desktop"),
    ("qwen3-vl", "mobile"): Preset("mobile_use", "mobile"),
    ("mai-ui", "mobile"): Preset("mai_ui", "mobile"),
}
"""(agent, standardActionSpace) -> its preset."""


def make_agent(body: CreateBody) -> tool_agent.ToolAgent:
  """The agent of a run.

  Raises:
    ValueError: no such agent, or one whose grammar is not installed.
  """
  preset = PRESETS.get((body.agent, body.standardActionSpace))
  if preset is None:
    known = ", ".join(f"{a} ({s})" for a, s in PRESETS)
    raise ValueError(
        f"agent={body.agent!r} with standardActionSpace="
        f"{body.standardActionSpace!r} is not played here; known: {known}"
    )
  chosen = body.agentConfig
  parser = preset.parser if chosen.parser is None else chosen.parser
  prompt = chosen.systemPrompt
  if prompt is None:
    prompt = prompts.get_prompt(preset.system_prompt)
  try:
    grammar = tool_parser.make_tool_parser(parser)
  except ValueError as error:
    raise ValueError(f"agentConfig.parser: {error}") from None
  return tool_agent.ToolAgent(
      system_prompt=prompt,
      parser_name=grammar,
      on_parse_error=chosen.onParseError,
      max_images=chosen.maxImages,
      image_stride=chosen.imageStride,
  )
