"""Validates JSON with pydantic models; an error names field, value and fix.

`parse` turns bytes into JSON values, `validate` turns those into a model, and
`problem` words a `ValidationError` as one line for the client that caused it:

    action.x must be <= 1e+06, got 1e+300
    options.gym must be an object, got [1]

Promises: text with half a surrogate pair, `NaN`, `Infinity` and numbers that no
float holds (`1e400`) are no JSON, so parsed text can always be written again.

Does not know HTTP statuses: callers choose the error to raise.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Annotated, Any, Iterable, Mapping, TypeVar

import pydantic
import pydantic_core

from ..core import json_text

short = json_text.short
T = TypeVar("T")

_FLAGS = {"true": True, "1": True, "false": False, "0": False}
Flag = Annotated[
  bool,
  pydantic.BeforeValidator(
    lambda v: _FLAGS.get(v, v) if isinstance(v, str) else v
  ),
]
"""true or false; also as text, as addresses have it."""


class Request(pydantic.BaseModel):
  """Base of requests: strict types; null means "not given"."""

  model_config = pydantic.ConfigDict(strict=True, allow_inf_nan=False)

  @pydantic.model_validator(mode="before")
  @classmethod
  def _drop_nulls(cls, data: object) -> Any:
    if not isinstance(data, Mapping):
      return data
    declared = cls.model_fields
    return {k: v for k, v in data.items() if v is not None or k not in declared}


def parse(text: str | bytes) -> Any:
  """The value that JSON text holds.

  Raises:
    ValueError: it is not JSON, or nests deeper than 200; quotes the place.
  """
  try:
    value = pydantic_core.from_json(text, allow_inf_nan=False)
  except ValueError as error:
    raise ValueError(f"{error}{_near(text, str(error))}") from None
  if place := infinite(value):
    raise ValueError(f"{place} is larger than any float")
  return value


def infinite(value: object) -> str:
  """The place of a float in JSON values that is not finite; "" for none.

  Takes memory for lists and objects only, whatever their depth.
  """
  pending: list[tuple[Any, Any]] = [(None, [value])]
  while pending:
    path, holder = pending.pop()
    parts: Iterable[tuple[Any, Any]]
    if isinstance(holder, dict):
      parts = holder.items()
    elif _INEXACT.isdisjoint(map(type, holder)):
      continue
    else:
      parts = enumerate(holder)
    for key, one in parts:
      if isinstance(one, float) and not math.isfinite(one):
        return _place((path, key))
      if isinstance(one, (dict, list)):
        pending.append(((path, key), one))
  return ""


def _place(path: Any) -> str:
  """Returns the dotted path of ((((None, 0), key), key), ...) below the 0."""
  keys = []
  while path is not None:
    path, key = path
    keys.append(str(key))
  return ".".join(keys[-2::-1])[:200] or "the number"


_INEXACT = {float, list, dict}
"""Types that may be, or hold, a float that is not finite."""


def _near(text: str | bytes, message: str) -> str:
  """The text before the place that the parser's message names."""
  place = re.search(r"line (\d+) column (\d+)", message)
  if place is None:
    return ""
  raw = text.encode("utf-8", "replace") if isinstance(text, str) else text
  line = raw.split(b"\n")[int(place[1]) - 1]
  end = int(place[2])
  cut = line[max(0, end - 20) : end].decode("utf-8", "replace")
  return f", after {cut!r}"


@functools.lru_cache(maxsize=None)
def adapter(model: Any) -> pydantic.TypeAdapter[Any]:
  """The validator of a model or annotated type, built once."""
  return pydantic.TypeAdapter(model)


def validate(model: type[T], data: object, what: str = "") -> T:
  """`data` as the model.

  Args:
    model: a model, or another type that pydantic knows.
    data: JSON values.
    what: name of the whole, "" where fields stand for themselves.

  Raises:
    ValueError: `problem` of the first wrong field.
  """
  hashable: Any = model  # Of any type that pydantic takes; hashable.
  try:
    return adapter(hashable).validate_python(data)
  except pydantic.ValidationError as error:
    raise ValueError(problem(error, what, _fields(model))) from None


def _fields(model: Any) -> tuple[str, ...]:
  fields = getattr(model, "model_fields", None)
  return tuple(model.__annotations__ if fields is None else fields)


_PROBLEMS = {
  "missing": "is missing",
  "string_type": "must be a string",
  "float_type": "must be a number",
  "int_type": "must be a whole number",
  "bool_type": "must be true or false",
  "dict_type": "must be an object",
  "model_type": "must be an object",
  "model_attributes_type": "must be an object",
  "list_type": "must be a list",
  "tuple_type": "must be a list",
  "finite_number": "must be finite",
  "greater_than": "must be > {gt}",
  "greater_than_equal": "must be >= {ge}",
  "less_than": "must be < {lt}",
  "less_than_equal": "must be <= {le}",
  "string_unicode": "must not hold half a surrogate pair",
  "string_too_long": "must have up to {max_length} characters",
  "string_too_short": "must have at least {min_length} characters",
  "too_long": "must have up to {max_length} items",
}


def refusal(error: Exception) -> str:
  """One line for the person who typed a command that `error` ended."""
  if isinstance(error, pydantic.ValidationError):
    return problem(error)
  if isinstance(error, OSError) and error.filename is not None:
    return f"{error.filename}: {error.strerror}"
  return str(error)


def problem(
  error: pydantic.ValidationError, what: str = "", known: tuple[str, ...] = ()
) -> str:
  """One line about the first wrong field.

  Args:
    error: Error of a validation.
    what: name of the whole, put before the fields.
    known: Names of all fields, listed for an unknown one.
  """
  first = error.errors(include_url=False)[0]
  kind, value, context = first["type"], first["input"], first.get("ctx", {})
  if kind == "extra_forbidden":
    *parents, name = first["loc"]
    where = ".".join(map(str, [what, *parents] if what else parents))
    listed = f"; known: {', '.join(known)}" if known else ""
    return f"{where or 'the request'} takes no {name!r}{listed}"
  path = [what, *first["loc"]] if what else list(first["loc"])
  where = ".".join(map(str, path)) or "the request"
  if kind in ("literal_error", "enum"):
    expected = context["expected"].replace("'", "").replace(" or ", ", ")
    return f"{where}={short(value)} must be one of {expected}"
  if kind == "value_error":
    return f"{where}: {context['error']}" if path else str(context["error"])
  text = _PROBLEMS.get(kind)
  if text is None:
    text = first["msg"]
  else:
    text = text.format_map(
      {
        key: f"{bound:g}" if isinstance(bound, float) else bound
        for key, bound in context.items()
      }
    )
  got = "" if kind == "missing" else f", got {short(value)}"
  return f"{where} {text}{got}"
