"""Evaluates arithmetic by walking its syntax tree; nothing is eval'd.

Numbers, + - * / // % **, parentheses and unary signs. Sizes are bounded, so
that `9**9**9` is an error and not a hang.
"""

from __future__ import annotations

import ast
import math
import operator
from typing import Any, Callable

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.FloorDiv: operator.floordiv,
  ast.Mod: operator.mod,
  ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
  ast.UAdd: operator.pos,
  ast.USub: operator.neg,
}
_MAX_CHARS = 1000
_MAX_BITS = 4096


def evaluate(expression: str) -> int | float:
  """The value of an arithmetic expression.

  Raises:
    ValueError: not arithmetic, too long, too large, or undefined.
  """
  if not isinstance(expression, str):
    raise ValueError(
      f"an expression must be a str, got {type(expression).__name__}"
    )
  if len(expression) > _MAX_CHARS:
    raise ValueError(f"an expression has at most {_MAX_CHARS} characters")
  text = expression.replace("×", "*").replace("÷", "/").replace("−", "-")
  try:
    tree = ast.parse(text.strip(), mode="eval")
    value = _value(tree.body)
  except (SyntaxError, RecursionError, MemoryError) as error:
    raise ValueError(f"{expression!r:.80} is not arithmetic") from error
  except ZeroDivisionError as error:
    raise ValueError(f"division by zero in {expression!r:.80}") from error
  except OverflowError as error:
    raise ValueError(f"{expression!r:.80} is too large") from error
  return value


def _value(node: ast.AST) -> int | float:
  if isinstance(node, ast.Constant) and type(node.value) in (int, float):
    return _bounded(node.value)
  if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
    return _UNARY[type(node.op)](_value(node.operand))
  if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
    left, right = _value(node.left), _value(node.right)
    if isinstance(node.op, ast.Pow) and isinstance(left, int):
      if abs(right) * max(1, left.bit_length()) > _MAX_BITS:
        raise OverflowError
    return _bounded(_BINARY[type(node.op)](left, right))
  raise ValueError(f"{ast.unparse(node)!r:.40} is not arithmetic")


def _bounded(value: Any) -> int | float:
  if isinstance(value, complex):
    raise ValueError("the result is not a real number")
  if isinstance(value, int):
    if value.bit_length() > _MAX_BITS:
      raise OverflowError
  elif not math.isfinite(value):
    raise OverflowError
  return value
