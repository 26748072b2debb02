"""Parses DeepSeek's tool calls, between its special tokens.

Two shapes, both read whatever the style, which decides what is written:
- "v3.1": `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`.
- "v3" (and R1): `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, then the
  arguments in a block of json, then `<｜tool▁call▁end｜>`.
The calls of a turn stand between `<｜tool▁calls▁begin｜>` and its end.

Source: the chat templates of DeepSeek-V3 and DeepSeek-V3.1. The tokens and
their order are those; the sentences of the prompt are ours.
"""

from __future__ import annotations

import re
from typing import Sequence

from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.tool_parser import base
from tunix.rl.multi_turn.parser.tool_parser import scanning

_OPEN = "<｜tool▁call▁begin｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_CLOSE = "<｜tool▁call▁end｜>"
_ALL_OPEN = "<｜tool▁calls▁begin｜>"
_ALL_CLOSE = "<｜tool▁calls▁end｜>"
_WORD = re.compile(r"\s*([^\s<｜{`]+)")
_FENCE = re.compile(r"\s*```(?:json)?\s*")
_FENCE_END = re.compile(r"\s*```")


class DeepSeekToolParser(scanning.JsonCallsParser):
  """See the module docstring."""

  before = (_OPEN,)
  after = (_CLOSE,)
  noise = re.compile(f"{_ALL_OPEN}|{_ALL_CLOSE}|<｜end▁of▁sentence｜>")
  resuming = re.compile(f"{_CLOSE}|{_OPEN}")
  style = "v3.1"

  def __init__(self, style: str | None = None):
    """Args:

      style: "v3.1" or "v3"; None for the class's own.

    Raises:
      ValueError: another style.
    """
    if style is not None:
      if style not in ("v3.1", "v3"):
        raise ValueError(f"style must be 'v3.1' or 'v3', got {style!r}")
      self.style = style

  def get_tool_prompt(self, tools_schema: base.ToolsSchema = None) -> str:
    example = self.format_calls([trajectory.ToolCall("function_name", {})])
    schemas = base.schema_lines(tools_schema)
    return (
      f"## Tools\nYou have these tools:\n{schemas}"
      f"\n\nTo call one, write it in this form:\n{example}"
    )

  def read_block(
    self, text: str, start: int
  ) -> tuple[Sequence[trajectory.ToolCall], int]:
    first, where = _word(text, start + len(_OPEN), "a function's name")
    where = scanning.skip_space(text, where)
    if not text.startswith(_SEPARATOR, where):
      raise base.ToolParseError(
        f"expected {_SEPARATOR}, found {scanning.quote(text, where)}", where
      )
    where = scanning.skip_space(text, where + len(_SEPARATOR))
    if text.startswith("{", where):
      name = first
    else:
      name, where = _word(text, where, "a function's name")
    if (fence := _FENCE.match(text, where)) is not None:
      where = fence.end()
    where = scanning.skip_space(text, where)
    value, end = scanning.read_json(text, where)
    if (fence := _FENCE_END.match(text, end)) is not None:
      end = fence.end()
    call = trajectory.ToolCall(name, scanning.as_arguments(value, name, where))
    return (call,), scanning.end_of_block(
      text,
      end,
      (_CLOSE, _ALL_CLOSE),
      _OPEN,
      f"{_CLOSE} after the call of {name!r}",
    )

  def format_calls(self, calls: Sequence[trajectory.ToolCall]) -> str:
    return _ALL_OPEN + "\n".join(map(self._write, calls)) + _ALL_CLOSE

  def _write(self, call: trajectory.ToolCall) -> str:
    if _WORD.fullmatch(call.name) is None:
      raise base.ToolParseError(f"a call cannot be named {call.name!r}")
    body = scanning.compact_json(call.arguments)
    if self.style == "v3.1":
      return f"{_OPEN}{call.name}{_SEPARATOR}{body}{_CLOSE}"
    return (
      f"{_OPEN}function{_SEPARATOR}{call.name}\n```json\n{body}\n```{_CLOSE}"
    )


def _word(text: str, start: int, what: str) -> tuple[str, int]:
  match = _WORD.match(text, start)
  if match is None:
    raise base.ToolParseError(
      f"expected {what}, found {scanning.quote(text, start)}", start
    )
  return match.group(1), match.end()
