"""Registers tool parsers by name.

Installed packages add theirs by the entry points
`tunix.rl.multi_turn.tool_parsers`.
"""

from __future__ import annotations

import importlib.util
from typing import Callable

from tunix.rl.multi_turn import moved_rooms
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.parser.tool_parser import base

_PACKAGE = "tunix.rl.multi_turn.parser.tool_parser"
_OF_GYMS = frozenset({
    "android_world", "anthropic_computer", "gemini", "gemini_computer",
    "glm_v", "glm_v_mobile", "mai_ui", "openai_computer", "opencua",
    "opencua_relative", "ui_tars", "ui_tars_absolute", "ui_tars_mobile",
})  # fmt: skip
"""Grammars of the package cua_gyms."""


def _absent(name: str) -> str:
  """Tells which package of this repository has the parser; "" for none."""
  if name not in _OF_GYMS or importlib.util.find_spec("cua_gyms") is not None:
    return ""
  return moved_rooms.where(f"tool parser {name!r}", "cua_gyms")


PARSERS: registry.Registry[type[base.ToolParser]] = registry.Registry(
  "tool parser", group="tunix.rl.multi_turn.tool_parsers", absent=_absent
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
  "openai_function": "formats.openai_function:OpenAiFunctionParser",
  # GUI actions.
  "computer_use": "grammars.computer_use:ComputerUseParser",
  "computer_use_absolute": "grammars.computer_use:ComputerUseAbsoluteParser",
  "computer_use_compact": "grammars.computer_use:ComputerUseCompactParser",
  "mobile_use": "grammars.mobile_use:MobileUseParser",
  "mobile_use_absolute": "grammars.mobile_use:MobileUseAbsoluteParser",
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
