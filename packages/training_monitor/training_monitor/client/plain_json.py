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


def dumps(value: object) -> bytes:
  """Encodes a value; values that JSON lacks become text."""
  try:
    return orjson.dumps(_plain(value), option=orjson.OPT_SERIALIZE_NUMPY)
  except (TypeError, ValueError):
    # A lone surrogate, or a number beyond 64 bits.
    return orjson.dumps(_plain(value, strict=True))


def _plain(value: Any, strict: bool = False) -> Any:
  kind = type(value)
  if kind is float:
    if value != value:
      return "NaN"
    if value in (math.inf, -math.inf):
      return "Infinity" if value > 0 else "-Infinity"
    return value
  if isinstance(value, str):
    value = value if len(value) <= _MOST_TEXT else _clipped(value)
    return value.encode("utf-8", "replace").decode() if strict else value
  if isinstance(value, Mapping):
    return {_plain(str(k), strict): _plain(v, strict) for k, v in value.items()}
  if kind in (list, tuple):
    if not strict and _finite_numbers(value):
      return value
    return [_plain(v, strict) for v in value]
  if kind in (int, bool, type(None)):
    in_range = not strict or value is None or -(1 << 63) <= value < 1 << 63
    return value if in_range else float(value)
  if kind is np.ndarray and value.dtype == np.float32 and value.ndim == 1:
    # Written with the fewest digits that identify the float32 number.
    if not strict and np.isfinite(value).all():
      return np.ascontiguousarray(value)
  if hasattr(value, "tolist"):  # numpy's, whose NaN JSON has not either.
    return _plain(value.tolist(), strict)
  if not strict:
    return value
  return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _finite_numbers(values: Sequence[Any]) -> bool:
  """Returns whether the values surely are numbers that JSON has.

  Tokens and log-probs are most of the data, and a sum is the fastest check of
  all of them.
  """
  try:
    return math.isfinite(sum(values))
  except (TypeError, ValueError, OverflowError):
    return False


def _clipped(text: str) -> str:
  """Shortens a text to the length that the server accepts."""
  return f"{text[: _MOST_TEXT - 100]} … [{len(text)} characters]"
