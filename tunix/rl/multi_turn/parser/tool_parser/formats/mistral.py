"""Parses Mistral's tool calls, which follow `[TOOL_CALLS]`.

Two shapes, both read whatever the style, which decides what is written:
- "list": `[TOOL_CALLS][{"name": "f", "arguments": {…}, "id": "…"}]`, up to
  tokenizer v7.
- "args": `[TOOL_CALLS]f[ARGS]{…}` for each call, since v11; an id may stand
  between in `[CALL_ID]`.

Source: mistral-common's tokenizers v7 and v11, whose shapes these are; the
sentences of the prompt are ours.
"""

from __future__ import annotations

import re
from typing import Sequence

from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.tool_parser import base
from tunix.rl.multi_turn.parser.tool_parser import scanning

_MARK = "[TOOL_CALLS]"
_ARGS = "[ARGS]"
_NAME = re.compile(r"([\w.:/-]+)(?:\[CALL_ID\][\w-]*)?\[ARGS\]")


class MistralToolParser(scanning.JsonCallsParser):
  """See the module docstring."""

  before = (_MARK,)
  noise = re.compile(r"</s>")
  prompt = """[AVAILABLE_TOOLS]{tools}[/AVAILABLE_TOOLS]

To call tools, write [TOOL_CALLS] and a list of JSON objects:
[TOOL_CALLS][{"name": <function-name>, "arguments": <args-json-object>}]"""
  style = "list"

  def __init__(self, style: str | None = None):
    """Args:

      style: "list" or "args"; None for the class's own.

    Raises:
      ValueError: another style.
    """
    if style is not None:
      if style not in ("list", "args"):
        raise ValueError(f"style must be 'list' or 'args', got {style!r}")
      self.style = style

  def get_tool_prompt(self, tools_schema: base.ToolsSchema = None) -> str:
    text = super().get_tool_prompt(tools_schema)
    if self.style == "list":
      return text
    return text[: text.index("\n\n")] + (
      "\n\nTo call a tool, write"
      " [TOOL_CALLS]<function-name>[ARGS]<args-json-object>"
    )

  def read_block(
    self, text: str, start: int
  ) -> tuple[Sequence[trajectory.ToolCall], int]:
    inside = scanning.skip_space(text, start + len(_MARK))
    if (name := _NAME.match(text, inside)) is None:
      if text[inside : inside + 1] not in ("[", "{"):
        raise base.ToolParseError(
          f"expected a list of calls or name{_ARGS}, found"
          f" {scanning.quote(text, inside)}",
          inside,
        )
      return super().read_block(text, start)
    where = scanning.skip_space(text, name.end())
    value, end = scanning.read_json(text, where)
    arguments = scanning.as_arguments(value, name.group(1), where)
    return (trajectory.ToolCall(name.group(1), arguments),), end

  def format_calls(self, calls: Sequence[trajectory.ToolCall]) -> str:
    if self.style == "list":
      return _MARK + scanning.compact_json([self.to_object(c) for c in calls])
    return "".join(
      f"{_MARK}{c.name}{_ARGS}{scanning.compact_json(c.arguments)}"
      for c in calls
    )
