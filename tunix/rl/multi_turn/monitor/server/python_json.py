"""Reads JSON as Python's own writer writes it, which is more than JSON.

    data = python_json.loads(body)

Bare NaN and infinities become their names, which `fields.real` takes as
unknown; half of a surrogate pair becomes U+FFFD. Whatever is JSON is read by
the fast reader. What nests too deeply to be written again is refused.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.monitor.server import errors

_LONE = re.compile("[\ud800-\udfff]")


def loads(body: bytes) -> Any:
  """The value of a request's body.

  Raises:
    ApiError: 400, it is no JSON, or nested too deeply.
  """
  try:
    value = orjson.loads(body)
  except orjson.JSONDecodeError as error:
    wrong = f"the body is not JSON: {error}"
    try:
      # A name in the place of a number; the readers of fields know it.
      value = json.loads(body.decode(), parse_constant=str)
      return _clean(json_text.check_depth(value))
    except (ValueError, RecursionError, OverflowError):
      raise errors.ApiError(400, wrong) from None
  try:
    return json_text.check_depth(value)
  except ValueError as error:
    raise errors.ApiError(400, f"the body: {error}; send it as text") from None


def _clean(value: Any) -> Any:
  if isinstance(value, str):
    return _LONE.sub("\ufffd", value)
  if isinstance(value, list):
    return [_clean(one) for one in value]
  if isinstance(value, dict):
    return {_clean(key): _clean(one) for key, one in value.items()}
  if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
    return float(value)  # As the fast reader has it.
  return value
