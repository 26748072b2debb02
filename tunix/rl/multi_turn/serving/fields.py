"""Values of a request's body, read strictly.

Promises: what is refused is named with its place, its value and what would be
taken; a field that is not known is refused, unless its value asks for nothing.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Collection, Mapping, Sequence

import orjson
from tunix.rl.multi_turn.serving import errors

_SHOWN = 60  # Characters of a refused value.
# Bytes of a body whose values are counted first: smaller ones are parsed in the
# time that it takes to count those of screenshots.
_COUNTED = 4 << 20
_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # Or one of a whole pair.

# Fields about the caller and its bookkeeping: no sample depends on them.
NO_EFFECT = frozenset({"user", "metadata", "safety_identifier"})


def shown(value: Any) -> str:
  """A value for an error message."""
  if isinstance(value, (str, list)):
    value = value[: _SHOWN + 1]  # More would not be shown.
  text = repr(value)
  return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def unsupported(name: str, value: Any) -> errors.ApiError:
  return errors.invalid(
      name,
      f"{name}={shown(value)} is not supported by this server; leave"
      f" {name.rpartition('.')[2]} out",
      "unsupported_parameter",
  )


def refuse_others(
    body: Mapping[str, Any],
    known: Collection[str],
    neutral: Mapping[str, Sequence[Any]] | None = None,
    where: str = "",
) -> None:
  """Refuses what is not `known`, unless null or one of its `neutral` values.

  Raises:
    ApiError: naming the field, `where` being what it is a field of.
  """
  for name, value in body.items():
    if name in known or value is None:
      continue
    # `True == 1`: a flag is no number.
    asks_for_nothing = any(
        value == one and isinstance(value, bool) == isinstance(one, bool)
        for one in (neutral or {}).get(name, ())
    )
    if not asks_for_nothing:
      raise unsupported(f"{where}.{name}" if where else name, value)


def mapping(where: str, value: Any) -> Mapping[str, Any]:
  if not isinstance(value, Mapping):
    raise errors.invalid(
        where, f"{where} must be an object, got {shown(value)}"
    )
  return value


def string(body: Mapping[str, Any], name: str, where: str = "") -> str:
  """A string with a character."""
  at = f"{where}.{name}" if where else name
  value = body.get(name)
  if not isinstance(value, str) or not value:
    raise errors.invalid(
        at, f"{at} must be a string, not empty; got {shown(value)}"
    )
  return text(at, value)


def text(where: str, value: str) -> str:
  """A string that can be encoded: halves of surrogate pairs cannot."""
  try:
    value.encode()
  except UnicodeEncodeError as error:
    raise errors.invalid(
        where,
        f"{where} holds half a surrogate pair at character {error.start}; send"
        " whole characters",
    ) from None
  return value


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
  value = body.get(name)
  if value is None:
    return default
  if not isinstance(value, bool):
    raise errors.invalid(
        name, f"{name} must be true or false, got {shown(value)}"
    )
  return value


def integer(
    body: Mapping[str, Any], name: str, default: int, low: int, high: int
) -> int:
  return _in_range(body, name, default, low, high, int)


def number(
    body: Mapping[str, Any], name: str, default: float, low: float, high: float
) -> float:
  return float(_in_range(body, name, default, low, high, (int, float)))


def token_ids(
    where: str, value: Any, most: int | None = None
) -> tuple[int, ...]:
  """A list of token ids, as far as that can be told without a vocabulary.

  Args:
    where: the field.
    value: of it.
    most: ids that fit the context; more are refused before any is looked at.
  """
  if most is not None and isinstance(value, list) and len(value) > most:
    raise errors.invalid(
        where,
        f"the prompt has {len(value)} tokens, the context {most}; shorten the"
        f" {where}",
        "context_length_exceeded",
    )
  # A bool is an int, too. There may be many of them.
  good = isinstance(value, list) and (
      not value
      or set(map(type, value)) == {int}
      and 0 <= min(value)
      and max(value) < 2**31
  )
  if not good:
    raise errors.invalid(
        where, f"{where} must be a list of token ids, got {shown(value)}"
    )
  return tuple(value)


def read_json(
    body: bytes, max_bytes: int, max_values: int | None = None
) -> dict[str, Any]:
  """The object that a request's body holds.

  What comes out can be written again: its numbers are finite, its texts are
  whole characters. Integers beyond 64 bits are floats.

  Args:
    body: as it came.
    max_bytes: it may have.
    max_values: it may hold, counted by its commas before it is parsed: that
      holds up everybody else.

  Raises:
    ApiError: too large, or no JSON object.
  """
  if len(body) > max_bytes:
    raise errors.ApiError(
        413,
        f"the body has more than {max_bytes:,} bytes; send fewer or smaller"
        " images",
        code="request_too_large",
    )
  if max_values is not None and len(body) > _COUNTED:
    if body.count(b",") > max_values:
      raise errors.ApiError(
          413,
          f"the body holds more than {max_values:,} values, as can be told by"
          " its commas, which no prompt that fits the context does; send a"
          " shorter one",
          code="request_too_large",
      )
  try:
    found = orjson.loads(body)
  except orjson.JSONDecodeError:
    found = _read_other(body)  # Or says what is wrong with it.
  if not isinstance(found, dict):
    raise errors.invalid(None, "the body must be a JSON object", "invalid_json")
  return found


def written(told: Any) -> bytes:
  """JSON text of what is told. Numbers that are not finite become null.

  Raises:
    ValueError: half a surrogate pair.
  """
  try:
    return orjson.dumps(told)
  except orjson.JSONEncodeError:  # Integers of more than 64 bits.
    return json.dumps(told, ensure_ascii=False, allow_nan=False).encode()


def _read_other(body: bytes) -> Any:
  """What JSON is only to the standard library: UTF-16, byte order marks, deep
  nesting; and what is none, with the reason."""
  try:
    written = body.decode(json.detect_encoding(body))
    found = json.loads(
        written, parse_constant=_finite, parse_float=_finite
    )
    if _ESCAPED_HALF.search(written):
      _check_characters(found)
  except (ValueError, RecursionError) as error:
    raise errors.invalid(
        None, f"the body is not JSON: {error}", "invalid_json"
    ) from None
  return found


def _finite(written: str) -> float:
  value = float(written)
  if not math.isfinite(value):
    raise ValueError(f"{written[:_SHOWN]} is no finite number")
  return value


def _check_characters(body: Any) -> None:
  """Refuses halves of surrogate pairs, naming the first field that has one."""
  left = [("", body)]
  while left:
    where, value = left.pop()
    if isinstance(value, str):
      text(where, value)
    elif isinstance(value, list):
      inner = [(f"{where}[{i}]", one) for i, one in enumerate(value)]
      left += reversed(inner)
    elif isinstance(value, dict):
      for name in value:
        text(where or "the body", name)
      inner = [
          (f"{where}.{name}" if where else name, one)
          for name, one in value.items()
      ]
      left += reversed(inner)


def _in_range(
    body: Mapping[str, Any],
    name: str,
    default: Any,
    low: Any,
    high: Any,
    kind: type | tuple[type, ...],
) -> Any:
  value = body.get(name)
  if value is None:
    return default
  good = isinstance(value, kind) and not isinstance(value, bool)
  if not good or not low <= value <= high:  # Not a number is in no range.
    what = "an integer" if kind is int else "a number"
    raise errors.invalid(
        name, f"{name} must be {what} in [{low}, {high}], got {shown(value)}"
    )
  return value
