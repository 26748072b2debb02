"""Registers tool parsers by name."""

from __future__ import annotations

from typing import Callable

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.parser.tool_parser import base

_PACKAGE = "tunix.rl.multi_turn.parser.tool_parser"
PARSERS: registry.Registry[type[base.ToolParser]] = registry.Registry(
  "tool parser"
)
_PARSER_REGISTRY = registry.RegistryView(PARSERS)
"""The registry by its name in the source document, as a dict."""
for _name, _path in {
  # Calls of any tools.
  "qwen": "formats.qwen:QwenToolParser",
  "qwen_xml": "formats.qwen:QwenXmlToolParser",
  "llama_json": "formats.llama:LlamaJsonParser",
  "llama_pythonic": "formats.llama:LlamaPythonicParser",
  "mistral": "formats.mistral:MistralToolParser",
  "deepseek": "formats.deepseek:DeepSeekToolParser",
  "gemma": "formats.gemma:GemmaToolParser",
  "gemini": "grammars.gemini:GeminiToolParser",
  "function_gemma": "formats.function_gemma:FunctionGemmaParser",
  "openai_function": "formats.openai_function:OpenAiFunctionParser",
  # GUI actions.
  "computer_use": "grammars.computer_use:ComputerUseParser",
  "computer_use_absolute": "grammars.computer_use:ComputerUseAbsoluteParser",
  "computer_use_compact": "grammars.computer_use:ComputerUseCompactParser",
  "mobile_use": "grammars.mobile_use:MobileUseParser",
  "mobile_use_absolute": "grammars.mobile_use:MobileUseAbsoluteParser",
  "mai_ui": "grammars.mai_ui:MaiUiParser",
  "ui_tars": "grammars.ui_tars:UiTarsParser",
  "ui_tars_absolute": "grammars.ui_tars:UiTarsAbsoluteParser",
  "ui_tars_mobile": "grammars.ui_tars:UiTarsMobileParser",
  "ui_tars_2": "grammars.ui_tars_2:UiTars2Parser",
  "holo1_5": "grammars.holo:Holo15Parser",
  "holo2": "grammars.holo:Holo2Parser",
  "opencua": "grammars.opencua:OpenCuaParser",
  "opencua_relative": "grammars.opencua:OpenCuaRelativeParser",
  "glm_v": "grammars.glm_v:GlmVParser",
  "glm_v_mobile": "grammars.glm_v:GlmVMobileParser",
  "openai_computer": "grammars.openai_computer:OpenAiComputerParser",
  "anthropic_computer": "grammars.anthropic_computer:AnthropicComputerParser",
  "gemini_computer": "grammars.gemini:GeminiComputerParser",
  "android_world": "grammars.android_world:AndroidWorldParser",
  "browsergym": "grammars.browsergym:BrowserGymParser",
}.items():
  PARSERS.register(_name, f"{_PACKAGE}.{_path}")


def register_tool_parser(
  name: str, parser: type[base.ToolParser] | None = None
) -> Callable[[type[base.ToolParser]], type[base.ToolParser]]:
  """Adds a parser class; without one, returns a class decorator.

  Raises:
    ValueError: the name is taken.
  """
  return PARSERS.register(name, parser)


def unregister_tool_parser(name: str) -> bool:
  """Removes a parser; False when there was none of that name."""
  return PARSERS.unregister(name)


def get_tool_parser(
  parser_name: str = "qwen", source: registry.Source = "request"
) -> type[base.ToolParser]:
  """Returns the parser class of that name.

  Args:
    parser_name: Registered, or of an operator "package.module:Class".
    source: Who chose the name.

  Raises:
    ValueError: unknown, the message names the nearest one; or a path that a
      request names.
    ImportError: nothing at that path.
  """
  return PARSERS.get(parser_name, source)


def tool_parser_names() -> tuple[str, ...]:
  return PARSERS.names()


def make_tool_parser(
  parser: str | type[base.ToolParser] | base.ToolParser,
  source: registry.Source = "request",
) -> base.ToolParser:
  """Returns an instance, from a class, an instance, or a name with its
  source."""
  if isinstance(parser, str):
    parser = get_tool_parser(parser, source)
  return parser() if isinstance(parser, type) else parser
