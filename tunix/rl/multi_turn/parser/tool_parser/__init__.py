"""Model text to tool calls and back; see `base`."""

from tunix.rl.multi_turn.parser.tool_parser.base import GuiActionError
from tunix.rl.multi_turn.parser.tool_parser.base import GuiActionParser
from tunix.rl.multi_turn.parser.tool_parser.base import ParseResult
from tunix.rl.multi_turn.parser.tool_parser.base import ToolParseError
from tunix.rl.multi_turn.parser.tool_parser.base import ToolParser
from tunix.rl.multi_turn.parser.tool_parser.registry import get_tool_parser
from tunix.rl.multi_turn.parser.tool_parser.registry import make_tool_parser
from tunix.rl.multi_turn.parser.tool_parser.registry import register_tool_parser
from tunix.rl.multi_turn.parser.tool_parser.registry import tool_parser_names
from tunix.rl.multi_turn.parser.tool_parser.registry import unregister_tool_parser
