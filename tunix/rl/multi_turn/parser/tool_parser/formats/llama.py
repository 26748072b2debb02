"""Parses Llama 3's tool calls: JSON objects, or a list of Python calls.

- `llama_json` (3.1): `{"name": "f", "parameters": {…}}`, several separated by
  `; `, after `<|python_tag|>` or without it.
- `llama_pythonic` (3.2 and 4): `[f(a=1), g(b="x")]`; parsed as Python's syntax,
  never executed.

Source: the pages "Llama 3.1", "Llama 3.2" and "Llama 4" of Meta's "Model cards
and prompt formats". The shapes are those; the sentences around are ours.
"""

from __future__ import annotations

import keyword
import re
from typing import Sequence

from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.tool_parser import base
from tunix.rl.multi_turn.parser.tool_parser import python_calls
from tunix.rl.multi_turn.parser.tool_parser import scanning

_MARKS = r"<\|(?:python_tag|python_start|python_end|eom_id|eot_id|eot)\|>"
_JSON_PROMPT = """You have these functions:
{tools}

To call one, answer with JSON alone, without variables:
{"name": function name, "parameters": dictionary of argument name and its \
value}"""
_PYTHONIC_PROMPT = """You have these functions:
{tools}

To call one or more, answer with a list of calls alone:
[func_name1(params_name1=params_value1, params_name2=params_value2), \
func_name2(params)]"""


class LlamaJsonParser(scanning.JsonCallsParser):
  """See the module docstring: JSON."""

  arguments_keys = ("parameters", "arguments")
  noise = re.compile(_MARKS)
  prompt = _JSON_PROMPT

  def format_calls(self, calls: Sequence[trajectory.ToolCall]) -> str:
    return "; ".join(
      scanning.compact_json(self.to_object(call)) for call in calls
    )


class LlamaPythonicParser(scanning.ScanningParser):
  """See the module docstring: Python calls."""

  opening = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")
  noise = re.compile(_MARKS)

  def read_block(
    self, text: str, start: int
  ) -> tuple[Sequence[trajectory.ToolCall], int]:
    end = python_calls.end_of_call(text, start)
    calls = python_calls.read_calls(text[start:end], start)
    return [as_tool_call(call) for call in calls], end

  def get_tool_prompt(self, tools_schema: base.ToolsSchema = None) -> str:
    return _PYTHONIC_PROMPT.replace("{tools}", base.schema_lines(tools_schema))

  def format(
    self, calls: Sequence[trajectory.ToolCall], thought: str | None = None
  ) -> str:
    block = f"[{', '.join(map(write_tool_call, calls))}]"
    return base.with_thought(thought, *((block,) if calls else ()))


def as_tool_call(call: python_calls.PythonCall) -> trajectory.ToolCall:
  """Returns a Python call with named arguments as a tool call.

  Raises:
    ToolParseError: a positional argument, whose name is unknown.
  """
  if call.args:
    raise base.ToolParseError(
      f"the arguments of {call.function} need names, e.g. name=value",
      call.position,
    )
  return trajectory.ToolCall(call.function, dict(call.kwargs))


def write_tool_call(call: trajectory.ToolCall) -> str:
  """`name(argument=value, …)`.

  Raises:
    ToolParseError: a name that is none in Python.
  """
  for name in (*call.name.split("."), *call.arguments):
    if not name.isidentifier() or keyword.iskeyword(name):
      raise base.ToolParseError(f"{name!r} is no name in Python")
  return python_calls.write_call(call.name, call.arguments)
