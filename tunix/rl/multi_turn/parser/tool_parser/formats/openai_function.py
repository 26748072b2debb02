"""Parses OpenAI's function calls, written as the API's JSON.

    {"type": "function", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}

`arguments` is JSON in a string, or an object. A `tool_calls` list, the old
`function_call` and the Responses API's `{"type": "function_call", "name": …}`
are read as well.

Source: openai.types.chat.ChatCompletionMessageToolCall and
openai.types.responses.ResponseFunctionToolCall of the package openai 3.
"""

from __future__ import annotations

from typing import Any, Sequence

from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.tool_parser import base
from tunix.rl.multi_turn.parser.tool_parser import scanning


class OpenAiFunctionParser(scanning.JsonCallsParser):
  """See the module docstring."""

  arguments_keys = ("arguments",)
  prompt = """You have these functions:
{tools}

To call one, write it as a JSON object; its arguments are JSON in a string:
{"type": "function", "function": {"name": "<name>", "arguments": "{...}"}}"""

  def to_object(self, call: trajectory.ToolCall) -> dict[str, Any]:
    arguments = scanning.compact_json(call.arguments)
    return {
      "type": "function",
      "function": {"name": call.name, "arguments": arguments},
    }

  def calls_of(
    self, value: object, position: int
  ) -> Sequence[trajectory.ToolCall] | None:
    if not isinstance(value, dict):
      return None
    for key in ("function", "function_call"):
      if key in value:
        return [
          scanning.call_from_object(
            value[key], position, self.name_key, self.arguments_keys
          )
        ]
    if "tool_calls" in value:
      items = value["tool_calls"]
      if not isinstance(items, list):
        raise base.ToolParseError("tool_calls must be a list", position)
      all_calls: list[trajectory.ToolCall] = []
      for item in items:
        calls = self.calls_of(item, position)
        if calls is None:
          raise base.ToolParseError(
            "an item of tool_calls is no function call", position
          )
        all_calls.extend(calls)
      return all_calls
    return super().calls_of(value, position)
