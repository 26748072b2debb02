"""Model text to tool calls and back; see `base`."""

from tunix.rl.multi_turn.parser.tool_parser import base
from tunix.rl.multi_turn.parser.tool_parser import parser_registry

_PARSER_REGISTRY = parser_registry._PARSER_REGISTRY
GuiActionError = base.GuiActionError
GuiActionParser = base.GuiActionParser
ParseResult = base.ParseResult
ToolParseError = base.ToolParseError
ToolParser = base.ToolParser
UnknownActionError = base.UnknownActionError
get_tool_parser = parser_registry.get_tool_parser
make_tool_parser = parser_registry.make_tool_parser
register_tool_parser = parser_registry.register_tool_parser
tool_parser_names = parser_registry.tool_parser_names
unregister_tool_parser = parser_registry.unregister_tool_parser
