"""Declares the settings of a run's agent.

Does not build an agent; imports no parser.
"""

from __future__ import annotations

from typing import Any, Literal

from tunix.rl.multi_turn.core import settings

setting = settings.setting


@settings.settings
class AgentConfig:
  """Turns observations into messages, and the policy's text into actions."""

  name: str = setting(
      default="tool",
      doc="tool: ToolAgent. Or package.module:Class, a BaseAgent or an agent of"
      " tunix.rl.agentic; it gets those settings of this section that its"
      " constructor takes.",
      registry="tunix.rl.multi_turn.agents.registry:AGENTS",
  )
  parser: str = setting(
      default="computer_use_compact",
      doc="Grammar of the policy's calls. GUI actions (environment=cua):"
      " computer_use, computer_use_absolute, computer_use_compact, ui_tars,"
      " ui_tars_absolute. Tool calls (the other environments): qwen, qwen_xml."
      " Or package.module:Class.",
      registry="tunix.rl.multi_turn.parser.tool_parser.registry:PARSERS",
  )
  system_prompt: str = setting(
      default="desktop_compact",
      doc='Name of a registered prompt, or a path to a text file. "" = none.',
  )
  max_images: int = setting(
      default=0,
      doc="Newest screenshots kept in the prompt. When an older one is"
      " dropped a new training sequence begins. 0 = keep all.",
      ge=0,
  )
  image_stride: int = setting(
      default=1,
      doc="Screenshots dropped at a time once there are more than max_images: a"
      " larger stride rewrites the prompt less often.",
      ge=1,
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
