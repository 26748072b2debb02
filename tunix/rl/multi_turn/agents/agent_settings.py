"""Declares the settings of a run's agent, and of a service that plays episodes.

Does not build an agent or call a service; imports no parser or HTTP client.
"""

from __future__ import annotations

import os
from typing import Any, Iterator, Literal

from tunix.rl.multi_turn.core import settings

setting = settings.setting
RUN_SERVICE_URL_VARIABLE = "GBOX_MINI_AGENT_BASE_URL"
RUN_SERVICE_TOKEN_VARIABLE = "TUNIX_RUN_SERVICE_TOKEN"
_RUN_SERVICE_URL = "http://127.0.0.1:3000"
SUMMARY_PROMPT = (
  "Earlier turns are about to be removed. Write down briefly what you need of"
  " them to finish the task."
)
OF_WINDOWS = ("max_images", "image_stride", "list_dropped_turns", "older_scale")
OF_SUMMARIES = (
  "summary_at",
  "summary_tokens",
  "summary_images",
  "summary_prompt",
)
"""Settings that the other `AgentConfig.history` does not read."""


@settings.settings
class AgentConfig:
  """Turns observations into messages, and the policy's text into actions."""

  name: str = setting(
    default="tool",
    doc="tool: ToolAgent. A model's name (qwen3_vl_computer_use,"
    " qwen2_5_vl_computer_use, qwen3_vl_mobile_use, ui_tars_1_5, mai_ui,"
    " opencua, ...; --help agent lists them): ToolAgent with that model's"
    " grammar, form of prompt, resizing and history as published, each of"
    " which may be overridden. Or package.module:Class, a BaseAgent or an"
    " agent of tunix.rl.agentic; it gets those settings of this section that"
    " its constructor takes.",
    registry="tunix.rl.multi_turn.agents.agent_registry:AGENTS",
  )
  parser: str = setting(
    default="computer_use_compact",
    doc="Grammar of the policy's calls. GUI actions (environment=cua):"
    " computer_use, computer_use_absolute, computer_use_compact, mobile_use,"
    " mobile_use_absolute, mai_ui, ui_tars, ui_tars_absolute, ui_tars_mobile,"
    " opencua, opencua_relative, glm_v, glm_v_mobile, openai_computer,"
    " anthropic_computer, gemini_computer, android_world, browsergym. Tool"
    " calls (the other environments): qwen, qwen_xml, llama_json,"
    " llama_pythonic, mistral, deepseek, gemma, gemini, openai_function."
    " Or package.module:Class. See docs/grammars.md.",
    registry="tunix.rl.multi_turn.parser.tool_parser.parser_registry:PARSERS",
  )
  system_prompt: str = setting(
    default="desktop_compact",
    doc='Name of a registered prompt, or a path to a text file. "" = none.',
  )
  show_tools: bool = setting(
    default=True,
    doc="The grammar's prompt stands in place of $tools_prompt in the system"
    " prompt, or behind it. false: the system prompt is complete, e.g. a"
    " model's own from a file.",
  )
  resize: Literal["none", "grammar"] = setting(
    default="none",
    doc="Size of the screenshots that the policy sees. none: the gym's."
    " grammar: as the grammar's model resizes them, so that its pixels are"
    " theirs.",
  )
  min_pixels: int = setting(
    default=0,
    doc="Least area of a screenshot, with resize=grammar. 0 = the grammar's.",
    unit="pixels",
    ge=0,
  )
  max_pixels: int = setting(
    default=0,
    doc="Largest area of a screenshot, with resize=grammar. 0 = the grammar's.",
    unit="pixels",
    ge=0,
  )
  history: Literal["window", "summary"] = setting(
    default="window",
    doc="What the policy sees of earlier turns. window: all of them, or as"
    " max_images, list_dropped_turns and older_scale say. summary: once the"
    " context has passed summary_at, the policy is asked for a summary, a turn"
    " without an action that is trained on like any other; the history is then"
    " the system prompt, the task, the summary and the newest summary_images"
    " screenshots,"
    " and a new training sequence begins.",
  )
  summary_at: float = setting(
    default=0.6,
    doc="With history=summary, the context after whose passing the policy is"
    " asked: up to 1 a share of engine.context_length, above it tokens.",
    unit="share or tokens",
    gt=0.0,
  )
  summary_tokens: int = setting(
    default=64,
    doc="With history=summary, a summary is cut here, the end-of-turn token"
    " included.",
    unit="tokens",
    ge=2,
  )
  summary_images: int = setting(
    default=1,
    doc="With history=summary, newest screenshots that stay beside a summary;"
    " those of the newest observation always do.",
    ge=1,
  )
  summary_prompt: str = setting(
    default=SUMMARY_PROMPT,
    doc="With history=summary, the text that asks for a summary.",
  )
  max_images: int = setting(
    default=0,
    doc="Newest screenshots, or trees of pages (gym.observation=axtree), kept"
    " in the prompt. When an older one is dropped a new training sequence"
    " begins. 0 = keep all.",
    ge=0,
  )
  image_stride: int = setting(
    default=1,
    doc="Screenshots dropped at a time once there are more than max_images: a"
    " larger stride rewrites the prompt less often.",
    ge=1,
  )
  list_dropped_turns: bool = setting(
    default=False,
    doc="Turns whose screenshot is dropped become a line each in the task's"
    " message. false: their texts stay.",
  )
  older_scale: float = setting(
    default=1.0,
    doc="Share of their sides at which screenshots before the newest are"
    " seen. Below 1 each turn rewrites the prompt and begins a new training"
    " sequence.",
    gt=0.0,
    le=1.0,
  )
  on_parse_error: Literal["end", "retry", "answer"] = setting(
    default="end",
    doc="end: the episode ends with status parse_error. retry: the error is"
    " shown to the policy as the next message. answer: text without a call"
    " is the answer, as tool environments want it.",
  )
  options: dict[str, Any] = setting(
    default={}, doc="Further keyword arguments of the agent's class."
  )

  def problems(self) -> Iterator[str]:
    yield from self._summary_problems()
    if self.list_dropped_turns and not self.max_images:
      yield (
        "list_dropped_turns=true lists turns whose screenshot is dropped, and"
        " max_images=0 drops none; set max_images"
      )
    if 0 < self.max_images < self.image_stride:
      yield (
        f"image_stride={self.image_stride} is more than"
        f" max_images={self.max_images}, all that are seen; lower the first"
      )
    for name in ("min_pixels", "max_pixels"):
      if getattr(self, name) and self.resize == "none":
        yield (
          f"{name}={getattr(self, name)} resizes nothing with resize=none;"
          " set resize=grammar"
        )
    if 0 < self.max_pixels < self.min_pixels:
      yield (
        f"min_pixels={self.min_pixels} is more than"
        f" max_pixels={self.max_pixels}; lower the first"
      )

  def _summary_problems(self) -> Iterator[str]:
    other = "window" if self.history == "summary" else "summary"
    unread = OF_WINDOWS if other == "window" else OF_SUMMARIES
    for field in settings.fields(AgentConfig):
      value = getattr(self, field.name)
      if field.name in unread and value != field.default:
        yield (
          f"{field.name}={value} is of history={other}, and history="
          f"{self.history}; set {field.name}={field.default}, or"
          f" history={other}"
        )
    if not self.summary_prompt.strip():
      yield "summary_prompt is empty; write what a summary is to hold"
    if self.summary_at > 1 and self.summary_at != int(self.summary_at):
      yield (
        f"summary_at={self.summary_at} is neither a share up to 1 nor a whole"
        " number of tokens"
      )

  def summary_bound(self, context_length: int) -> int:
    """Tokens of context after which a summary is asked for; 0 = never."""
    if self.history != "summary":
      return 0
    at = self.summary_at
    return int(at) if at > 1 else max(1, int(at * context_length))


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
    doc=f'Where it listens. "" = ${RUN_SERVICE_URL_VARIABLE}, else'
    f" {_RUN_SERVICE_URL}. Its token is ${RUN_SERVICE_TOKEN_VARIABLE}.",
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
    other = os.environ.get(RUN_SERVICE_URL_VARIABLE)
    return self.base_url or other or _RUN_SERVICE_URL

  @property
  def token(self) -> str:
    """The service's token, "" for none."""
    return os.environ.get(RUN_SERVICE_TOKEN_VARIABLE, "")

  def problems(self) -> Iterator[str]:
    if self.base_url and not self.base_url.startswith(("http://", "https://")):
      yield f"base_url={self.base_url!r}: give http://host:port or https://host"
    if self.on_missing == "fallback" and self.tokens == "session":
      yield (
        "on_missing=fallback is for tokens=events: a session's record misses"
        " none; set tokens=events, or on_missing=refuse"
      )
