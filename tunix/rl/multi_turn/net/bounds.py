"""Bounds what a request may ask for: screens, whole numbers, texts, objects.

Each number of a request that becomes memory, time or processes of a service has
a bound in its schema. This module has the bounds that services share: the types
of fields of pydantic models, the size of a screen, and the reader of whole
numbers in paths and queries.

Promises: an error names the field, the value and the bound; text of any length
is read in constant time.

Does not know HTTP statuses: callers choose the error to raise.
"""

from __future__ import annotations

from typing import Annotated, Any, Mapping

import pydantic

from ..core import settings
from . import json_models

MAX_PIXELS = 32_000_000
"""Pixels of the largest screen: 96 MB as uint8[H, W, 3]."""
MAX_SIDE = 8192
"""Pixels of the longest side of a screen."""
MAX_PATH = 16 << 10
"""Characters of a path: `net.connections` reads no larger head."""
MAX_VALUES = 10_000
"""Values in an object without a schema of its own."""
MAX_SECONDS = 7 * 86_400.0
LARGEST = settings.LARGEST
_LEAST = -LARGEST - 1
_DIGITS = 20  # Of a whole number of 64 bits, with its sign.
_DEPTH = 32

Name = Annotated[str, pydantic.Field(max_length=512)]
Address = Annotated[str, pydantic.Field(max_length=4096)]
Text = Annotated[str, pydantic.Field(max_length=1 << 20)]
Index = Annotated[int, pydantic.Field(ge=0, le=LARGEST)]
Whole = Annotated[int, pydantic.Field(ge=_LEAST, le=LARGEST)]
Seconds = Annotated[float, pydantic.Field(gt=0, le=MAX_SECONDS)]
Side = Annotated[int, pydantic.Field(ge=1, le=MAX_SIDE)]


def _bounded(value: object) -> Any:
  problem = json_problem(value)
  if problem:
    raise ValueError(problem)
  return value


Json = Annotated[
  dict[str, Any],
  pydantic.AfterValidator(_bounded),
  pydantic.WithJsonSchema(
    {
      "type": "object",
      "x-maxValues": MAX_VALUES,
      "x-maxDepth": _DEPTH,
      "description": (
        f"At most {MAX_VALUES} values, nested {_DEPTH} deep; whole numbers"
        " of 64 bits."
      ),
    }
  ),
]
"""An object without a schema of its own; the body's limit bounds its texts."""


def json_problem(value: object) -> str:
  """Names the bound that a value without a schema exceeds; "" for none."""
  pending, count = [(value, 1)], 1
  while pending:
    one, depth = pending.pop()
    if isinstance(one, (Mapping, list)):
      if depth > _DEPTH:
        return f"must nest at most {_DEPTH} deep"
      count += len(one)
      if count > MAX_VALUES:  # Before any of them is looked at.
        return f"must hold at most {MAX_VALUES} values"
      inner = one.values() if isinstance(one, Mapping) else one
      pending.extend((item, depth + 1) for item in inner)
    elif type(one) is int and not _LEAST <= one <= LARGEST:
      return f"must hold whole numbers of 64 bits, got {json_models.short(one)}"
  return ""


def screen_problem(width: int, height: int, prefix: str = "") -> str:
  """Why a screen of this size is too large; "" if it is not.

  Args:
    width, height: Pixels.
    prefix: Put before the fields' names, e.g. "env.".
  """
  for name, side in (("width", width), ("height", height)):
    if not 1 <= side <= MAX_SIDE:
      return (
        f"{prefix}{name}={json_models.short(side)} must be a whole number of"
        f" pixels in [1, {MAX_SIDE}]"
      )
  if width * height > MAX_PIXELS:
    return (
      f"{prefix}width={width} and {prefix}height={height} are"
      f" {width * height} pixels, and a screen has at most {MAX_PIXELS}"
    )
  return ""


def whole(text: str, name: str, low: int = 0, high: int = LARGEST) -> int:
  """Reads a whole number of a path or a query.

  Args:
    text: ASCII digits, with a minus before those of a negative number.
    name: Names the parameter in the error.
    low, high: Bounds, both included.

  Raises:
    ValueError: It is no whole number, or is out of bounds.
  """
  digits = text.removeprefix("-")
  if len(text) <= _DIGITS and digits.isascii() and digits.isdigit():
    number = int(text)
    if low <= number <= high:
      return number
  raise ValueError(
    f"{name}={json_models.short(text[:100])} must be a whole number in"
    f" [{low}, {high}]"
  )
