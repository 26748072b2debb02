"""Offers tools to the policy and runs its calls."""

from tunix.rl.multi_turn.tools.calculator import CalculatorTool
from tunix.rl.multi_turn.tools.manager import ToolManager
from tunix.rl.multi_turn.tools.screenshot import fit_size
from tunix.rl.multi_turn.tools.screenshot import Screenshot
from tunix.rl.multi_turn.tools.screenshot import ScreenshotTool
from tunix.rl.multi_turn.tools.stateful import InstanceTool
from tunix.rl.multi_turn.tools.stateful import StatefulTool
from tunix.rl.multi_turn.tools.stateful import StatefulToolAdapter
from tunix.rl.multi_turn.tools.tool_base import BaseTool
from tunix.rl.multi_turn.tools.tool_base import normalize_calls
from tunix.rl.multi_turn.tools.tool_base import ToolCall
from tunix.rl.multi_turn.tools.tool_base import ToolOutput
