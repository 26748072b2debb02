"""The calculator: a tool that evaluates an arithmetic expression."""

from __future__ import annotations

from typing import Any

from tunix.rl.multi_turn.core import arithmetic
from tunix.rl.multi_turn.tools import tool_base


class CalculatorTool(tool_base.BaseTool):
  """Evaluates an arithmetic expression."""

  def __init__(
    self,
    name: str = "calculator",
    description: str = "Evaluates an arithmetic expression.",
  ):
    super().__init__(name, description)

  @property
  def json(self) -> dict[str, Any]:
    return {
      "type": "function",
      "function": {
        "name": self.name,
        "description": self.description,
        "parameters": {
          "type": "object",
          "properties": {
            "expression": {
              "type": "string",
              "description": "Such as (2 + 3) * 4.",
            }
          },
          "required": ["expression"],
        },
      },
    }

  def forward(self, expression: str) -> tool_base.ToolOutput:
    try:
      value = arithmetic.evaluate(expression)
    except ValueError as error:
      return tool_base.ToolOutput(self.name, error=str(error))
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
      value = int(value)
    return tool_base.ToolOutput(self.name, str(value))
