"""Parses Qwen's tool calls: `<tool_call>` blocks of JSON or XML parameters.

Qwen2.5 and Qwen3 write JSON, Qwen3.5 XML.

Rules of lenient parsing:
- A block holds one JSON object with "name" and "arguments", or one
  `<function=name>` with `<parameter=key>` children. Both are read whatever the
  style; the style decides what is written.
- JSON is read as JSON, so braces and tags inside strings mean nothing. A block
  whose object is complete counts even when `</tool_call>` is missing.
- Malformed blocks and reasoning: as `scanning` has it.
- XML values are text. Where the tool's schema declares another type, and the
  text is a value of it, they become that: with `{"type": "string"}`, or without
  a schema, "null" and "12" stay text. vLLM 0.32 reads the format so.
"""

from __future__ import annotations

import copy
import json
import math
import re
from typing import Any, Iterator, Mapping, Sequence

from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.tool_parser import base
from tunix.rl.multi_turn.parser.tool_parser import scanning

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_FUNCTION = re.compile(r"<function=([^>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>")
_INTEGER = re.compile(r"[+-]?\d{1,400}")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_CONTAINERS = {"object": dict, "array": list}
_JSON_TYPES = {
  type(None): "null",
  bool: "boolean",
  int: "integer",
  float: "number",
  dict: "object",
  list: "array",
}
_DEEPEST = 8  # Unions and references within one another.
_RESPONSE = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)

# A pretrained model knows the format by the words around the tools, so these
# are those of the chat templates: of Qwen2.5 and Qwen3 word for word, of
# Qwen3.5 without its second example parameter and its closing reminder.
_JSON_PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments \
within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

_XML_PROMPT = """# Tools

You have access to the following functions:

<tools>
{tools}
</tools>

If you choose to call a function ONLY reply in the following format with NO \
suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
</function>
</tool_call>"""

_COMPACT_PROMPT = """<tools>
{tools}
</tools>
<tool_call>
{{"name": ..., "arguments": {{...}}}}
</tool_call>"""


class QwenToolParser(scanning.ScanningParser):
  """See the module docstring."""

  opening = re.compile(_OPEN)
  resuming = re.compile(rf"{_CLOSE}|{_OPEN}|</think(?:ing)?>")
  style = "json"
  call_end = "</tool_call>"

  def __init__(
    self,
    style: str | None = None,
    tools_schema: base.ToolsSchema = None,
    compact: bool = False,
  ):
    """Args:

    style: "json" or "xml": how calls are written; None for the class's own.
    tools_schema: Tools whose declared types XML values have; see `for_tools`.
    compact: show tools as one-line signatures instead of JSON schemas.
    """
    if style is not None:
      if style not in ("json", "xml"):
        raise ValueError(f"style must be 'json' or 'xml', got {style!r}")
      self.style = style
    self.compact = compact
    self._types = _declared_types(tools_schema or self.default_tools)

  def for_tools(self, tools_schema: base.ToolsSchema) -> QwenToolParser:
    parser = copy.copy(self)
    parser._types = {**self._types, **_declared_types(tools_schema)}
    return parser

  def get_tool_prompt(self, tools_schema: base.ToolsSchema = None) -> str:
    if tools_schema is None:
      tools_schema = self.default_tools
    if self.compact:
      return _COMPACT_PROMPT.format(tools=base.signature_lines(tools_schema))
    template = _JSON_PROMPT if self.style == "json" else _XML_PROMPT
    return template.format(tools=base.schema_lines(tools_schema))

  def format(
    self, calls: Sequence[trajectory.ToolCall], thought: str | None = None
  ) -> str:
    return base.with_thought(thought, *map(self._format_call, calls))

  def parse_tool_outputs(self, model_response: str) -> dict[str, Any]:
    """Contents of `<tool_response>` blocks, by position ("0", "1", …)."""
    text = base.require_text(model_response)
    return {
      str(i): match.group(1) for i, match in enumerate(_RESPONSE.finditer(text))
    }

  def _format_call(self, call: trajectory.ToolCall) -> str:
    if self.style == "json":
      body = json.dumps(
        {"name": call.name, "arguments": call.arguments}, ensure_ascii=False
      )
      return f"{_OPEN}\n{body}\n{_CLOSE}"
    lines = [_OPEN, f"<function={call.name}>"]
    for name, value in call.arguments.items():
      if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False)
      elif "</parameter>" in value:
        raise base.ToolParseError(
          f"the XML style cannot carry '</parameter>' in {name!r}"
        )
      lines.extend((f"<parameter={name}>", value, "</parameter>"))
    lines.extend(("</function>", _CLOSE))
    return "\n".join(lines)

  def read_block(
    self, text: str, start: int
  ) -> tuple[Sequence[trajectory.ToolCall], int]:
    start = scanning.skip_space(text, start + len(_OPEN))
    if text.startswith("{", start):
      value, end = scanning.read_json(text, start)
      call = scanning.call_from_object(value, start)
    elif (function := _FUNCTION.match(text, start)) is not None:
      call, end = self._read_function(text, function)
    else:
      raise base.ToolParseError(
        "a <tool_call> must hold a JSON object or a <function=…>, found"
        f" {scanning.quote(text, start)}",
        start,
      )
    return (call,), scanning.end_of_block(
      text, end, (_CLOSE,), _OPEN, f"{_CLOSE} after the call of {call.name!r}"
    )

  def _read_function(
    self, text: str, function: re.Match[str]
  ) -> tuple[trajectory.ToolCall, int]:
    name = function.group(1).strip()
    if not name:
      raise base.ToolParseError("<function=> has no name", function.start())
    types = self._types.get(name, {})
    arguments: dict[str, Any] = {}
    end = function.end()
    while (parameter := _PARAMETER.match(text, end)) is not None:
      key = parameter.group(1).strip()
      close = text.find("</parameter>", parameter.end())
      if close < 0:
        raise base.ToolParseError(
          f"<parameter={key}> of {name!r} is never closed", parameter.start()
        )
      raw = text[parameter.end() : close]
      raw = raw.removeprefix("\n").removesuffix("\n")
      arguments[key] = _typed(raw, types.get(key, frozenset()))
      end = close + len("</parameter>")
    tail = scanning.skip_space(text, end)
    if text.startswith("</function>", tail):
      return trajectory.ToolCall(name, arguments), tail + len("</function>")
    raise base.ToolParseError(
      f"expected </function> of {name!r}, found {scanning.quote(text, tail)}",
      tail,
    )


class QwenXmlToolParser(QwenToolParser):
  """Qwen3.5: writes XML parameters."""

  style = "xml"


Types = Mapping[str, Mapping[str, frozenset[str]]]
"""Tool -> parameter -> the JSON types that its schema declares."""


def _declared_types(tools_schema: base.ToolsSchema) -> Types:
  types = {}
  for schema in base.as_schemas(tools_schema):
    function = schema.get("function", schema)
    root = function.get("parameters") or {}
    types[function["name"]] = {
      key: frozenset(_kinds(spec, root, 0))
      for key, spec in (root.get("properties") or {}).items()
    }
  return types


def _kinds(spec: object, root: Mapping[str, Any], depth: int) -> Iterator[str]:
  """JSON types that a schema names, also through unions and `$ref`s."""
  if not isinstance(spec, Mapping) or depth > _DEEPEST:
    return
  named = spec.get("type")
  names = [named] if isinstance(named, str) else named or ()
  yield from (name for name in names if isinstance(name, str))
  values = [*(spec.get("enum") or ())]
  values += [spec["const"]] if "const" in spec else []
  for value in values:
    yield _JSON_TYPES.get(type(value), "string")
  for union in ("anyOf", "oneOf", "allOf"):
    for one in spec.get(union) or ():
      yield from _kinds(one, root, depth + 1)
  if isinstance(reference := spec.get("$ref"), str):
    target: Any = root
    for step in reference.removeprefix("#/").split("/"):
      target = target.get(step) if isinstance(target, Mapping) else None
    yield from _kinds(target, root, depth + 1)


def _typed(raw: str, kinds: frozenset[str]) -> Any:
  """Converts a text to one of the JSON types, or returns it unchanged."""
  word = raw.strip()
  if "null" in kinds and word.lower() == "null":
    return None
  if kinds & {"integer", "number"} and _INTEGER.fullmatch(word):
    return int(word)
  if "number" in kinds and _NUMBER.fullmatch(word):
    value = float(word)
    if math.isfinite(value):
      return value
  if "boolean" in kinds and word.lower() in _BOOLEANS:
    return _BOOLEANS[word.lower()]
  containers = tuple(t for k, t in _CONTAINERS.items() if k in kinds)
  if containers:
    try:
      read, end = scanning.read_json(word, 0)
    except base.ToolParseError:
      return raw
    if end == len(word) and isinstance(read, containers):
      return read
  return raw
