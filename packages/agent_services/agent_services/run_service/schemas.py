"""Defines the bodies of the run service and the agents that it knows.

Field names are those of the protocol, in camel case.

Promises: a body with a field that the service does not know, or a value that
cannot be, is refused with the field's name; every number, text, list and object
of a body has a bound, which the JSON schema states.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any, Literal, Mapping

import pydantic
from pydantic_core import core_schema
from tunix.rl.multi_turn import prompts
from tunix.rl.multi_turn.agents import tool_agent
from tunix.rl.multi_turn.net import bounds
from tunix.rl.multi_turn.net import json_models
from tunix.rl.multi_turn.parser import tool_parser


class _Body(json_models.Request):
  model_config = pydantic.ConfigDict(
    extra="forbid", strict=True, allow_inf_nan=False
  )


class Sampling(_Body):
  """Sampling of every turn; a field left out is the model server's own.

  Attributes:
    seed: Seed of the run; the request of turn t, from 0, has
      `derive_seed(seed, t)`.
  """

  temperature: float | None = pydantic.Field(default=None, ge=0, le=100)
  top_p: float | None = pydantic.Field(default=None, gt=0, le=1)
  top_k: int | None = pydantic.Field(default=None, ge=0, le=1 << 31)
  min_p: float | None = pydantic.Field(default=None, ge=0, le=1)
  max_tokens: int | None = pydantic.Field(default=None, ge=1, le=1 << 20)
  seed: bounds.Whole | None = None


def _sendable(key: object) -> str:
  """Checks that a header can carry the key; its message does not quote it."""
  if not isinstance(key, str) or not re.fullmatch("[!-~]{0,4096}", key):
    raise ValueError("must be up to 4096 printable ASCII characters, no space")
  return key


class Model(_Body):
  """The policy: an OpenAI-compatible server.

  Attributes:
    logprobs: ask for log-probs and token ids, which training needs.
    topLogprobs: alternatives a token; None asks for none.
    apiKey: sent as bearer token; printable ASCII without spaces.
    images: the form in which screenshots are sent to it.
  """

  baseUrl: bounds.Address
  name: str = pydantic.Field(min_length=1, max_length=512)
  provider: Literal["openai"] = "openai"
  logprobs: bool = True
  topLogprobs: int | None = pydantic.Field(default=None, ge=0, le=20)
  apiKey: Annotated[bounds.Address, pydantic.BeforeValidator(_sendable)] = ""
  images: Literal["base64", "url"] = "base64"
  sampling: Sampling = Sampling()


class AgentConfig(_Body):
  """Settings of the agent, instead of its preset's."""

  parser: bounds.Name | None = None
  systemPrompt: bounds.Text | None = None
  maxImages: int | None = pydantic.Field(default=None, ge=1, le=10_000)
  imageStride: int = pydantic.Field(default=1, ge=1, le=10_000)
  onParseError: Literal["end", "retry", "answer"] = "end"


class Env(json_models.Request):
  """The world of a run; a field that neither kind has is ignored.

  Attributes:
    type: "genv" for an execution of a gym server, "gym" for a gym here.
    gymBaseUrl, gymId, executionId: Of an execution.
    gym, task, settings: Of a gym: its name, task and options.
    width, height: Pixels of a gym's screen, together at most 32 million.
  """

  type: Literal["genv", "gym"]
  gymBaseUrl: bounds.Address | None = None
  gymId: bounds.Name | None = None
  executionId: bounds.Name | None = None
  gym: bounds.Name | None = None
  task: bounds.Json | None = None
  settings: bounds.Json = {}
  width: bounds.Side | None = None
  height: bounds.Side | None = None

  @pydantic.model_validator(mode="after")
  def _small_screen(self) -> Env:
    if self.width is not None and self.height is not None:
      if problem := bounds.screen_problem(self.width, self.height, "env."):
        raise ValueError(problem)
    return self


class _OfEnv:
  """Validates a mapping as an `Env`, whose JSON schema it has."""

  def __get_pydantic_core_schema__(
    self, source: Any, handler: pydantic.GetCoreSchemaHandler
  ) -> Any:
    del source
    return core_schema.no_info_after_validator_function(
      Env.model_dump, handler.generate_schema(Env)
    )


class CreateBody(_Body):
  """A body of `POST /runs`.

  Attributes:
    images: the form of screenshots in events: signed addresses that expire, or
      data URLs.
  """

  task: bounds.Text = ""
  agent: bounds.Name = "tool"
  agentConfig: AgentConfig = AgentConfig()
  maxSteps: int = pydantic.Field(default=20, ge=1, le=10_000)
  maxRunTimeSec: float = pydantic.Field(default=600.0, gt=0, le=86_400)
  maxStepTimeSec: float = pydantic.Field(default=180.0, gt=0, le=86_400)
  model: Model
  env: Annotated[dict[str, Any], _OfEnv()]
  standardActionSpace: Literal["mobile", "pc"] = "pc"
  images: Literal["base64", "url"] = "url"


def pixels(body: CreateBody) -> int:
  """Pixels of the screen that a run draws in this process."""
  if body.env["type"] != "gym":
    return 0
  return (body.env["width"] or 0) * (body.env["height"] or 0)


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
  """Returns the agent of a run.

  Raises:
    ValueError: no such agent, or one whose grammar is not installed.
  """
  preset = PRESETS.get((body.agent, body.standardActionSpace))
  if preset is None:
    offered = ", ".join(f"{a} ({s})" for a, s in PRESETS)
    raise ValueError(
      f"agent={body.agent!r} with standardActionSpace="
      f"{body.standardActionSpace!r} is not played here; known: {offered}"
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
