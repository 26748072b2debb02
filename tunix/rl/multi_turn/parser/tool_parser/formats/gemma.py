"""Parses Gemma's tool calls: Python calls in a block of `tool_code`.

    ```tool_code
    get_weather(city="Paris")
    ```

Each statement is a call with named arguments, or one printed; they are parsed
as Python's syntax and never executed.

Source: the page "Function calling with Gemma" of Google's Gemma documentation.
The block is that; the sentences around are ours. Gemini's JSON is in `gemini`.
"""

from __future__ import annotations

import re
from typing import Any, Sequence

from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.tool_parser import base
from tunix.rl.multi_turn.parser.tool_parser import python_calls
from tunix.rl.multi_turn.parser.tool_parser import scanning
from tunix.rl.multi_turn.parser.tool_parser.formats import llama

_OPEN = "```tool_code"
_CLOSE = "```"
_PRINTED = re.compile(r"(?m)^print\((.*)\)[ \t]*$")
_PROMPT = """You have these functions:
{tools}

To call some, write Python calls with named arguments in a block:
```tool_code
function_name(parameter=value)
```"""


class GemmaToolParser(scanning.ScanningParser):
  """See the module docstring."""

  opening = re.compile(re.escape(_OPEN))
  resuming = re.compile(rf"\n{_CLOSE}|{re.escape(_OPEN)}")

  def read_block(
    self, text: str, start: int
  ) -> tuple[Sequence[trajectory.ToolCall], int]:
    inside = start + len(_OPEN)
    close = text.find(_CLOSE, inside)
    end = len(text) if close < 0 else close
    code = text[inside:end]
    # The offsets stay: a printed call moves by nothing but blanks.
    code = _PRINTED.sub(lambda m: f"      {m.group(1)} ", code)
    lead = len(code) - len(code.lstrip())
    lines = "\n".join(line.strip() for line in code[lead:].splitlines())
    calls = python_calls.read_calls(lines, inside + lead)
    if not calls:
      raise base.ToolParseError("a block of tool_code has no call", start)
    return (
      [llama.as_tool_call(call) for call in calls],
      min(len(text), end + len(_CLOSE)),
    )

  def get_tool_prompt(self, tools_schema: base.ToolsSchema = None) -> str:
    return _PROMPT.replace("{tools}", base.schema_lines(tools_schema))

  def format(
    self, calls: Sequence[trajectory.ToolCall], thought: str | None = None
  ) -> str:
    lines: list[Any] = [thought] if thought else []
    if calls:
      code = map(llama.write_tool_call, calls)
      # Backquotes stand in strings only; three of them would end the block.
      lines.append(_OPEN)
      lines.extend(c.replace(_CLOSE, r"\x60\x60\x60") for c in code)
      lines.append(_CLOSE)
    return "\n".join(lines)
