"""Declares the settings of a run's agent.

Does not build an agent; imports no parser.
"""

from __future__ import annotations

from typing import Any, Iterator, Literal

from tunix.rl.multi_turn.core import settings

setting = settings.setting


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
      registry="tunix.rl.multi_turn.agents.registry:AGENTS",
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
      registry="tunix.rl.multi_turn.parser.tool_parser.registry:PARSERS",
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
      doc="Largest area of a screenshot, with resize=grammar. 0 = the"
      " grammar's.",
      unit="pixels",
      ge=0,
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
  summary: bool = setting(
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
    if self.summary and not self.max_images:
      yield (
          "summary=true summarizes turns whose screenshot is dropped, and"
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
