"""Encodes items as JSON.

Values that JSON lacks are sent as text: "NaN", "Infinity", times, long
whole numbers, lone surrogates. Texts are cut to what it accepts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import math
from typing import Any

import numpy as np
import orjson

_MOST_TEXT = 1 << 20
_AS_IT_IS = frozenset({int, bool, type(None)})
_NUMBERS = frozenset({int, float})


def dumps(value: object) -> bytes:
  """Encodes a value; values that JSON lacks become text."""
  try:
    # Mostly it is JSON already, and a copy of it would be more work than it.
    plain = value if _is_plain(value) else _plain(value)
    return orjson.dumps(plain, option=orjson.OPT_SERIALIZE_NUMPY)
  except (TypeError, ValueError):
    # A lone surrogate, or a number beyond 64 bits.
    return orjson.dumps(_plain(value, strict=True))


def _is_plain(value: Any) -> bool:
  """Returns whether `_plain` would return the value unchanged."""
  kind = type(value)
  if kind is dict:
    for key in value:
      if type(key) is not str:
        return False
    items = value.values()
  elif kind is list or kind is tuple:
    items = value
  else:
    items = (value,)
  for item in items:
    kind = type(item)
    if kind is str:
      if len(item) > _MOST_TEXT:
        return False
    elif kind is float:
      if item - item != 0.0:
        return False
    elif kind is np.ndarray:
      if not _numbers_as_they_are(item):
        return False
    elif kind is list or kind is tuple:
      first = type(item[0]) if item else None
      numbers = (
        first in _NUMBERS
        and _finite_numbers(item)
        or first is list
        and _finite_rows(item)
      )
      if not numbers and not _is_plain(item):
        return False
    elif kind is dict:
      if not _is_plain(item):
        return False
    elif kind not in _AS_IT_IS:
      return False
  return True


def _numbers_as_they_are(array: np.ndarray) -> bool:
  """Returns whether orjson writes an array as it should be read."""
  return (
    array.dtype == np.float32
    and array.ndim == 1
    and array.flags.c_contiguous
    and bool(np.isfinite(array).all())
  )


def _plain(value: Any, strict: bool = False) -> Any:
  kind = type(value)
  if kind is dict:
    if strict:
      return {_plain(str(k), True): _plain(v, True) for k, v in value.items()}
    return {
      str(k): v if type(v) in _AS_IT_IS else _plain(v) for k, v in value.items()
    }
  if kind is str and not strict:
    return value if len(value) <= _MOST_TEXT else _clipped(value)
  if kind is float:
    if value != value:
      return "NaN"
    if value in (float("inf"), float("-inf")):
      return "Infinity" if value > 0 else "-Infinity"
    return value
  if kind in (list, tuple):
    if not strict and _finite_numbers(value):
      return value
    return [_plain(v, strict) for v in value]
  if kind in _AS_IT_IS and not (strict and kind is int):
    return value
  if strict:
    if isinstance(value, str):
      value = value if len(value) <= _MOST_TEXT else _clipped(value)
      return value.encode("utf-8", "replace").decode()
    if isinstance(value, int):
      return value if -(1 << 63) <= value < 1 << 63 else float(value)
    if isinstance(value, Mapping):
      return {_plain(str(k), True): _plain(v, True) for k, v in value.items()}
    if hasattr(value, "tolist"):
      return _plain(value.tolist(), True)
    if hasattr(value, "isoformat"):
      return value.isoformat()
    return _plain(str(value), True)
  if isinstance(value, Mapping):
    return {str(k): _plain(v) for k, v in value.items()}
  if kind is np.ndarray and value.dtype == np.float32 and value.ndim == 1:
    # Written with the fewest digits that identify the float32 number.
    if np.isfinite(value).all():
      return np.ascontiguousarray(value)
  if hasattr(value, "tolist"):  # numpy's, whose NaN JSON has not either.
    return _plain(value.tolist())
  return value


def _finite_numbers(values: Sequence[Any]) -> bool:
  """Returns whether the values surely are numbers that JSON has.

  Tokens and log-probs are most of the data, and a sum is the fastest check of
  all of them.
  """
  try:
    return math.isfinite(sum(values))
  except (TypeError, ValueError, OverflowError):
    return False


def _finite_rows(values: Sequence[Any]) -> bool:
  """Returns `_finite_numbers` of every list of numbers."""
  try:
    return math.isfinite(sum(map(sum, values)))
  except (TypeError, ValueError, OverflowError):
    return False


def _clipped(text: str) -> str:
  """Shortens a text to the length that the server accepts."""
  return f"{text[: _MOST_TEXT - 100]} … [{len(text)} characters]"
