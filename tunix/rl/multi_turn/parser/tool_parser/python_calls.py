"""Reads and writes calls in Python's syntax; nothing is ever executed.

A call is parsed by `ast` and holds literals only: numbers, strings, booleans,
None, and lists, tuples and dicts of literals.

Promises: any text gives calls or a `ToolParseError` with its position.

Does not: know any function.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from typing import Any, Iterator, Mapping, Sequence
import warnings

from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.tool_parser import base
from tunix.rl.multi_turn.parser.tool_parser import scanning

MAX_CHARACTERS = 20_000
"""Of one call, or one block of code."""

_MAX_DEPTH = 32
_FILE = "<tool call>"
# Python warns of a policy's literals such as "1or" and "\\l".
warnings.filterwarnings("ignore", module=_FILE)
_STRING = re.compile(
  r"'''(?:[^\\]|\\.)*?'''"
  r'|"""(?:[^\\]|\\.)*?"""'
  r"|'(?:[^'\\\n]|\\.)*'"
  r'|"(?:[^"\\\n]|\\.)*"',
  re.DOTALL,
)
_LINE_ENDS = re.compile(r"(?<=\n)|(?<=\r)(?!\n)")
_STEP = re.compile(r"[()\[\]{}'\"#]")


@dataclasses.dataclass(frozen=True)
class PythonCall:
  """`function(*args, **kwargs)`.

  Attributes:
    function: its dotted name.
    args, kwargs: literals.
    position: offset in the text at which it begins.
  """

  function: str
  args: tuple[Any, ...]
  kwargs: Mapping[str, Any]
  position: int

  def named(self, parameters: Sequence[str]) -> dict[str, Any]:
    """Returns the arguments by name; the positional ones are called
    `parameters`.

    Raises:
      ToolParseError: too many of them, or one given twice.
    """
    if len(self.args) > len(parameters):
      raise base.ToolParseError(
        f"{self.function} takes at most {len(parameters)} positional"
        f" arguments, got {len(self.args)}",
        self.position,
      )
    values = dict(zip(parameters, self.args))
    twice = sorted(set(values) & set(self.kwargs))
    if twice:
      raise base.ToolParseError(
        f"{self.function} has {twice[0]!r} twice", self.position
      )
    return {**values, **self.kwargs}


def end_of_call(text: str, opening: int) -> int:
  """Offset behind the bracket that closes the one at `opening`.

  Raises:
    ToolParseError: it is never closed, or too long or too deep.
  """
  depth = 0
  position = opening
  limit = min(len(text), opening + MAX_CHARACTERS)
  while (step := _STEP.search(text, position, limit)) is not None:
    character = step.group()
    position = step.end()
    if character in "([{":
      depth += 1
      if depth > _MAX_DEPTH:
        raise base.ToolParseError(
          f"brackets are nested more than {_MAX_DEPTH} deep", step.start()
        )
    elif character in ")]}":
      depth -= 1
      if not depth:
        return position
    elif character == "#":
      line = text.find("\n", position, limit)
      position = limit if line < 0 else line
    else:
      string = _STRING.match(text, step.start(), limit)
      if string is None:
        raise base.ToolParseError("a string is never closed", step.start())
      position = string.end()
  if limit < len(text):
    raise base.ToolParseError(
      f"a call is longer than {MAX_CHARACTERS} characters", opening
    )
  raise base.ToolParseError("a call is never closed", opening)


def read_call(text: str, start: int, opening: int) -> tuple[PythonCall, int]:
  """Returns (the call, where it ends) of a call whose bracket is at `opening`.

  Raises:
    ToolParseError: malformed, or an argument that is no literal.
  """
  end = end_of_call(text, opening)
  (call,) = read_calls(text[start:end], start)
  return call, end


def read_calls(code: str, offset: int = 0) -> list[PythonCall]:
  """Returns the calls of a block of code, each a statement or an item of a
  list.

  `import` statements mean nothing and are left out.

  Args:
    code: Python code.
    offset: Position of the code in the response, for errors.

  Raises:
    ToolParseError: not Python, or anything but calls with literals.
  """
  if len(code) > MAX_CHARACTERS:
    raise base.ToolParseError(
      f"the code is longer than {MAX_CHARACTERS} characters", offset
    )
  lines = _LINE_ENDS.split(code)  # As Python counts them.
  starts = [0]
  for line in lines:
    starts.append(starts[-1] + len(line))

  def where(line: int | None, column: int, in_bytes: bool = True) -> int:
    index = min(max((line or 1) - 1, 0), max(len(lines) - 1, 0))
    text = lines[index] if lines else ""
    if in_bytes:
      column = len(text.encode()[:column].decode(errors="ignore"))
    return offset + starts[index] + min(column, len(text))

  try:
    tree = ast.parse(code, _FILE)
  except SyntaxError as error:
    raise base.ToolParseError(
      f"not Python: {error.msg}",
      where(error.lineno, max((error.offset or 1) - 1, 0), False),
    ) from None
  except (ValueError, RecursionError, MemoryError) as error:
    raise base.ToolParseError(f"not Python: {error}", offset) from None
  return [
    _call(node, where(node.lineno, node.col_offset))
    for node in _call_nodes(tree, where)
  ]


def _call_nodes(tree: ast.Module, where: Any) -> Iterator[ast.Call]:
  for statement in tree.body:
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
      continue
    value = statement.value if isinstance(statement, ast.Expr) else statement
    items = value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]
    for item in items:
      if not isinstance(item, ast.Call):
        raise base.ToolParseError(
          f"only calls are understood, found {type(item).__name__.lower()}",
          where(statement.lineno, statement.col_offset),
        )
      yield item


def _call(node: ast.Call, position: int) -> PythonCall:
  names: list[str] = []
  function: ast.expr = node.func
  while isinstance(function, ast.Attribute):
    names.append(function.attr)
    function = function.value
  if not isinstance(function, ast.Name):
    raise base.ToolParseError("a function must have a name", position)
  name = ".".join([function.id, *reversed(names)])
  kwargs: dict[str, Any] = {}
  for keyword in node.keywords:
    if keyword.arg is None:
      raise base.ToolParseError(f"{name} has ** arguments", position)
    kwargs[keyword.arg] = _literal(keyword.value, name, position)
  args = tuple(_literal(value, name, position) for value in node.args)
  return PythonCall(name, args, kwargs, position)


def _literal(node: ast.expr, name: str, position: int) -> Any:
  try:
    value = ast.literal_eval(node)
  except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
    raise base.ToolParseError(
      f"the arguments of {name} must be literals, found"
      f" {type(node).__name__.lower()}",
      position,
    ) from None
  return _plain(value, name, position)


def _plain(value: object, name: str, position: int) -> Any:
  """Returns the value as JSON would have it: lists for tuples, str keys."""
  if isinstance(value, (list, tuple)):
    return [_plain(v, name, position) for v in value]
  if isinstance(value, dict):
    return {str(k): _plain(v, name, position) for k, v in value.items()}
  if isinstance(value, str):
    try:
      value.encode()
      return value
    except UnicodeEncodeError:
      pass
  elif value is None or isinstance(value, (bool, int)):
    return value
  elif isinstance(value, float) and math.isfinite(value):
    return value
  raise base.ToolParseError(
    f"{name} has an argument of type {type(value).__name__} that no tool takes",
    position,
  )


def write_call(
  function: str, arguments: Mapping[str, Any], positional: int = 0
) -> str:
  """`function(…)`; the first `positional` arguments without their names."""
  parts = [
    repr(value) if i < positional else f"{name}={value!r}"
    for i, (name, value) in enumerate(arguments.items())
  ]
  return f"{function}({', '.join(parts)})"


class PythonCallsParser(scanning.ScanningParser):
  """Calls of known functions, wherever they stand in the text.

  Attributes:
    parameters: function -> names of its positional parameters.
    positional: functions whose arguments are written without names; for the
      others, names are written.
  """

  parameters: Mapping[str, Sequence[str]]
  positional: frozenset[str] = frozenset()

  def __init_subclass__(cls, **kwargs: Any):
    if "parameters" in vars(cls):
      names = "|".join(
        re.escape(n) for n in sorted(cls.parameters, key=len, reverse=True)
      )
      cls.opening = re.compile(rf"(?<![\w.])(?:{names})(?=\()")
    super().__init_subclass__(**kwargs)

  def read_block(self, text: str, start: int) -> tuple[Any, int]:
    call, end = read_call(text, start, text.index("(", start))
    arguments = call.named(self.parameters[call.function])
    return (trajectory.ToolCall(call.function, arguments),), end

  def write(self, name: str, arguments: Mapping[str, Any]) -> str:
    """Returns the text of a call."""
    return write_call(
      name, arguments, len(arguments) if name in self.positional else 0
    )
