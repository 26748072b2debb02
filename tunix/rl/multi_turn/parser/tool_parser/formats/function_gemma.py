"""Parses FunctionGemma's tool calls, in a notation of its own.

    <start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}\
<end_function_call>

A value is a text between two `<escape>`, a number, true, false, null, a list or
an object; nothing is escaped inside of a text. Tools are declared in the same
notation, with types in capitals.

Source: the page "FunctionGemma formatting and best practices" of Google's Gemma
documentation. The developer's sentence and the notation are those.
"""

from __future__ import annotations

import json
import re
from typing import Any, Mapping, Sequence

from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.tool_parser import base
from tunix.rl.multi_turn.parser.tool_parser import scanning

_OPEN, _CLOSE = "<start_function_call>", "<end_function_call>"
_ESCAPE = "<escape>"
_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_CALL = re.compile(rf"\s*call:\s*({_NAME.pattern})\s*(?=\{{)")
_PLAIN_KEY = re.compile(r"[^\s:{}\[\],<>]+")
_KEY = re.compile(rf"\s*({_PLAIN_KEY.pattern})\s*:\s*")
_COLON = re.compile(r"\s*:\s*")
_WORD = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
_DEEPEST = 32
_DEVELOPER = (
  "You are a model that can do function calling with the following functions"
)


class FunctionGemmaParser(scanning.ScanningParser):
  """See the module docstring."""

  opening = re.compile(re.escape(_OPEN))
  resuming = re.compile(f"{_CLOSE}|{_OPEN}")
  call_end = _CLOSE

  def get_tool_prompt(self, tools_schema: base.ToolsSchema = None) -> str:
    return "\n".join(
      [_DEVELOPER, "".join(map(_declared, base.as_schemas(tools_schema)))]
    )

  def read_block(
    self, text: str, start: int
  ) -> tuple[Sequence[trajectory.ToolCall], int]:
    where = start + len(_OPEN)
    named = _CALL.match(text, where)
    if named is None:
      raise base.ToolParseError(
        "expected call:NAME{…}, found"
        f" {scanning.quote(text, scanning.skip_space(text, where))}",
        where,
      )
    arguments, end = _read_object(text, named.end(), 0)
    call = trajectory.ToolCall(named.group(1), arguments)
    return (call,), scanning.end_of_block(
      text, end, (_CLOSE,), _OPEN, f"{_CLOSE} after the call of {call.name!r}"
    )

  def format(
    self, calls: Sequence[trajectory.ToolCall], thought: str | None = None
  ) -> str:
    block = "".join(map(self._write, calls))
    return base.with_thought(thought, *((block,) if calls else ()))

  def _write(self, call: trajectory.ToolCall) -> str:
    if not _NAME.fullmatch(call.name):
      raise base.ToolParseError(f"a call cannot be named {call.name!r}")
    return f"{_OPEN}call:{call.name}{_written(call.arguments)}{_CLOSE}"


def _written(value: object) -> str:
  """Returns a value in the notation.

  Raises:
    ToolParseError: a text that holds the mark, or a key that cannot be one.
  """
  if isinstance(value, str):
    if _ESCAPE in value:
      raise base.ToolParseError(f"a text cannot hold {_ESCAPE}: {value[:80]!r}")
    return f"{_ESCAPE}{value}{_ESCAPE}"
  if isinstance(value, Mapping):
    parts = (f"{_key(key)}:{_written(one)}" for key, one in value.items())
    return "{" + ",".join(parts) + "}"
  if isinstance(value, (list, tuple)):
    return "[" + ",".join(map(_written, value)) + "]"
  return scanning.compact_json(value)


def _key(key: str) -> str:
  """Returns a key, between the marks of texts where it is no word."""
  return key if _PLAIN_KEY.fullmatch(key) else _written(key)


def _read_object(
  text: str, start: int, depth: int
) -> tuple[dict[str, Any], int]:
  items: dict[str, Any] = {}
  end = scanning.skip_space(text, start + 1)
  while not text.startswith("}", end):
    if text.startswith(_ESCAPE, end):
      key, where = _read_value(text, end, depth)
      colon = _COLON.match(text, where)
    else:
      colon = _KEY.match(text, end)
      key = colon.group(1) if colon else ""
    if colon is None:
      raise base.ToolParseError(
        f"expected key:value or }}, found {scanning.quote(text, end)}", end
      )
    items[key], end = _read_value(text, colon.end(), depth + 1)
    end = _next(text, end, "}")
  return items, end + 1


def _read_value(text: str, start: int, depth: int) -> tuple[Any, int]:
  """Returns the value at `start`, and where it ends.

  Raises:
    ToolParseError: there is none.
  """
  if depth > _DEEPEST:
    raise base.ToolParseError(f"nested more than {_DEEPEST} deep", start)
  if text.startswith(_ESCAPE, start):
    inside = start + len(_ESCAPE)
    close = text.find(_ESCAPE, inside)
    if close < 0:
      raise base.ToolParseError("a text is never closed", start)
    return text[inside:close], close + len(_ESCAPE)
  if text.startswith("{", start):
    return _read_object(text, start, depth)
  if text.startswith("[", start):
    items: list[Any] = []
    end = scanning.skip_space(text, start + 1)
    while not text.startswith("]", end):
      item, end = _read_value(text, end, depth + 1)
      items.append(item)
      end = _next(text, end, "]")
    return items, end + 1
  word = _WORD.match(text, start)
  if word is None:
    raise base.ToolParseError(
      f"expected a value, found {scanning.quote(text, start)}", start
    )
  try:
    value, end = scanning.read_json(word.group(), 0)
  except base.ToolParseError as error:
    raise base.ToolParseError(str(error), start) from None
  if end != len(word.group()):  # A zero before other digits.
    raise base.ToolParseError(
      f"expected a value, found {scanning.quote(text, start)}", start
    )
  return value, word.end()


def _next(text: str, start: int, close: str) -> int:
  """Returns the offset of the next item, or of `close`."""
  end = scanning.skip_space(text, start)
  if text.startswith(",", end):
    after = scanning.skip_space(text, end + 1)
    if not text.startswith(close, after):
      return after
  elif text.startswith(close, end):
    return end
  raise base.ToolParseError(
    f"expected , or {close}, found {scanning.quote(text, end)}", end
  )


def _declared(schema: Mapping[str, Any]) -> str:
  """Returns a tool in the notation: description, then parameters."""
  function = schema.get("function", schema)
  body: dict[str, Any] = {"description": function.get("description", "")}
  if parameters := function.get("parameters"):
    body["parameters"] = _capitals(_ordered(parameters))
  return (
    f"<start_function_declaration>declaration:{function['name']}"
    f"{_described(body)}<end_function_declaration>"
  )


def _ordered(schema: Mapping[str, Any]) -> dict[str, Any]:
  """Moves `type` behind the other keys of a schema, as the page writes it."""
  ordered = {k: v for k, v in schema.items() if k != "type"}
  if isinstance(ordered.get("properties"), Mapping):
    ordered["properties"] = {
      name: _ordered(one) if isinstance(one, Mapping) else one
      for name, one in ordered["properties"].items()
    }
  return ordered | {k: v for k, v in schema.items() if k == "type"}


def _capitals(value: object) -> Any:
  if isinstance(value, Mapping):
    return {
      k: v.upper() if k == "type" and isinstance(v, str) else _capitals(v)
      for k, v in value.items()
    }
  return [_capitals(v) for v in value] if isinstance(value, list) else value


def _described(value: object) -> str:
  """Writes a schema; raises a ValueError for what cannot be written."""
  try:
    return _written(json.loads(json.dumps(value)))
  except (base.ToolParseError, TypeError) as error:
    raise ValueError(f"a tool cannot be declared: {error}") from None
