"""Converts values of clients to the form that the database holds.

Each reader takes a client's value and returns the stored one, or raises
`WrongValue` with the fix. None means "not given" everywhere: an absent value
changes nothing. What other writers make of a value is read where its meaning is
plain: "true" and 1.0 of a flag, "7" of a number, a number where text belongs.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import sys
from typing import Any, Callable

import orjson
import sqlalchemy as sa

from training_monitor.core import json_text as json_text_lib
from training_monitor.schema import tables
from training_monitor.schema import vocabulary

MAX_TEXT = 4 << 20
DEEPEST = json_text_lib.MOST_DEEP - 10
"""Levels of lists and objects in a value that is JSON; a body has some more."""
_MAX_KEY = 500  # An entry of PostgreSQL's indices is at most 2.7 kB.
_MAX_TIME = 100
_INT64 = 1 << 63
_UTC = datetime.timezone.utc
_MILLISECONDS_FROM = 1e11
_LATEST = 253402300799.0  # The end of the year 9999.
_LONE = re.compile("[\ud800-\udfff]")
_WHOLE = re.compile(r"[+-]?[0-9]{1,19}")
_DECIMAL = re.compile(
  r"[+-]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
)
_MAX_DECIMAL = 400  # The longest finite float has 309 digits before the point.
_FLAGS_AS_TEXT = {"true": 1, "1": 1, "false": 0, "0": 0}
NOT_FINITE = frozenset({"NaN", "Infinity", "-Infinity"})
"""Spellings of numbers that JSON lacks; stored as NULL."""


class WrongValue(ValueError):
  """A value that its field cannot have; the text has the fix."""


class Normalised:
  """A stored value, and the client's original."""

  __slots__ = ("value", "raw")

  def __init__(self, value: object, raw: str):
    self.value = value
    self.raw = raw


def text(value: object) -> str:
  if not isinstance(value, str):
    raise WrongValue(f"give text, not a {_kind(value)}")
  if len(value) > MAX_TEXT:
    raise WrongValue(f"has {len(value)} characters; at most {MAX_TEXT}")
  # PostgreSQL's text cannot hold NUL; its symbol stands for it.
  return value.replace("\0", "\u2400") if "\0" in value else value


def written_text(value: object) -> str:
  """Reads text; a number, list or object becomes its JSON."""
  return text(value if isinstance(value, str) else json_text(value))


def key(value: object) -> str:
  """Reads a text that rows are found by."""
  value = text(value)
  if not 0 < len(value) <= _MAX_KEY:
    raise WrongValue(f"give text of 1 to {_MAX_KEY} characters")
  return value


def raw_text(value: object) -> str:
  """Returns text unchanged, and any other value as JSON."""
  return text(value) if isinstance(value, str) else json_text(value)


def integer(value: object) -> int:
  if isinstance(value, float) and value.is_integer():
    value = int(value)
  elif isinstance(value, str) and _WHOLE.fullmatch(value):
    value = int(value)
  if type(value) is not int:  # A bool is not a number.
    raise WrongValue(f"give a whole number, not a {_kind(value)}")
  if not -_INT64 <= value < _INT64:
    raise WrongValue("does not fit into 64 bits")
  return value


def real(value: Any) -> Any:
  kind = type(value)
  decimal = (
    kind is str and len(value) <= _MAX_DECIMAL and _DECIMAL.fullmatch(value)
  )
  if kind is float or kind is int or decimal:
    try:
      value = float(value)
    except OverflowError:
      value = math.inf
    if math.isfinite(value):
      return value
    raise WrongValue("give a finite number")
  if kind is str and value in NOT_FINITE:
    return Normalised(None, value)
  raise WrongValue(
    f"give a number, or one of {', '.join(sorted(NOT_FINITE))}, not a"
    f" {_kind(value)}"
  )


def flag(value: object) -> int:
  if value is True or value is False:
    return int(value)
  if type(value) in (int, float) and value in (0, 1):
    return int(value)
  if isinstance(value, str) and value.lower() in _FLAGS_AS_TEXT:
    return _FLAGS_AS_TEXT[value.lower()]
  raise WrongValue("give true or false, or 1 or 0")


def percent(value: object) -> Any:
  number = real(value)
  if isinstance(number, float) and not 0 <= number <= 100:
    raise WrongValue("give a percentage from 0 to 100")
  return number


def time(value: Any) -> str:
  """Returns UTC as `YYYY-MM-DD HH:MM:SS.ffffff`, which sorts."""
  kind = type(value)
  if kind is str:
    try:
      moment = datetime.datetime.fromisoformat(value[:_MAX_TIME])
    except ValueError:
      raise WrongValue(
        "give a time as ISO 8601 (2026-01-31T12:00:00Z) or seconds since 1970"
      ) from None
  elif kind is float or kind is int:
    if abs(value) >= _MILLISECONDS_FROM:
      value /= 1000
    if not 0 <= value <= _LATEST:
      raise WrongValue("is not a time since 1970")
    # Without the offset, which is always UTC's.
    moment = datetime.datetime.fromtimestamp(value, _UTC)
    return moment.isoformat(" ", "microseconds")[:26]
  else:
    raise WrongValue(
      f"give a time as ISO 8601 or seconds, not a {_kind(value)}"
    )
  if moment.tzinfo is not None:
    try:
      moment = moment.astimezone(_UTC)
    except OverflowError:
      raise WrongValue("is not a time since 1970") from None
  return moment.replace(tzinfo=None).isoformat(" ", "microseconds")


def too_deep(written: str, value: object) -> bool:
  """Returns whether a value with the JSON `written` nests too deeply."""
  # Few brackets need no look.
  brackets = written.count("[") + written.count("{")
  return brackets > DEEPEST and json_text_lib.deeper(value, DEEPEST)


def python_json(written: str) -> Any:
  """Returns the value of JSON as Python's own writer has it.

  Bare NaN and infinities become their names, half of a surrogate pair U+FFFD.

  Raises:
    ValueError: It is no JSON, or nested too deeply.
    OverflowError: It has a whole number that no float holds.
  """
  try:
    value = json.loads(written, parse_constant=str)
  except RecursionError:
    raise ValueError("it is nested too deeply") from None
  return plain(json_text_lib.check_depth(value))


def plain(value: object) -> Any:
  """Returns a parsed value in which every text and number can be written."""
  if isinstance(value, str):
    return _LONE.sub("\ufffd", value)
  if isinstance(value, list):
    return [plain(one) for one in value]
  if isinstance(value, dict):
    return {plain(key_): plain(one) for key_, one in value.items()}
  if isinstance(value, int) and not -_INT64 <= value < 2 * _INT64:
    return float(value)  # As the fast reader has it.
  return value


def json_text(value: object, array: bool = False) -> str:
  """Returns a value as JSON text; text that is JSON already is unchanged.

  Text that only Python reads, with a bare NaN, is written anew.
  """
  if isinstance(value, str):
    try:
      content = orjson.loads(value)
    except orjson.JSONDecodeError:
      try:
        content = python_json(value)
      except (ValueError, OverflowError):
        raise WrongValue(
          "is text that is not JSON; give an array or an object, or its JSON"
        ) from None
      value = orjson.dumps(content).decode()
  else:
    content = value
    try:
      value = orjson.dumps(value).decode()
    except TypeError as error:
      raise WrongValue(f"cannot be JSON: {error}") from None
  if array and not isinstance(content, list):
    raise WrongValue(f"give an array, not a {_kind(content)}")
  if len(value) > MAX_TEXT:
    raise WrongValue(f"has {len(value)} characters; at most {MAX_TEXT}")
  if too_deep(value, content):
    raise WrongValue(
      f"is nested more than {DEEPEST} levels deep; send a flatter value"
    )
  return value.replace("\\u0000", "\\u2400") if "\\u0000" in value else value


def json_array(value: object) -> str:
  return json_text(value, array=True)


_STRICT = {"status", "current_phase", "source_type", "env_type"}


def choice(table: str, column: str) -> Callable[[Any], Any]:
  """Returns a reader of the words of a list and their aliases."""
  words = vocabulary.CHOICES[table, column]
  identity = {word: word for word in words}

  def read(value: object) -> Any:
    if value.__class__ is str and value in identity:
      return value
    if not isinstance(value, str):
      raise WrongValue(f"give one of {', '.join(words)}, not a {_kind(value)}")
    word = vocabulary.canonical(table, column, value)
    if word is None and column in _STRICT:
      more = vocabulary.ALIASES.get((table, column), {})
      raise WrongValue(f"give one of {', '.join([*words, *more])}")
    return Normalised(word, text(value))

  return read


_JSON_ARRAYS = frozenset(
  {"tags", "prerequisites", "errors", "tokens", "logprobs"}
)
_JSON = _JSON_ARRAYS | {
    "config_json", "rollout_progress", "training_progress", "metrics_json",
    "summary_json", "tool_args", "model_input_json", "details_json",
}  # fmt: skip
_KEYS = frozenset(
  {("training", "run_name"), ("task", "task_id"), ("rollout", "rollout_id")}
)
_FLAGS = frozenset({
    "is_eval", "task_completed", "task_success", "agent_reported_success",
    "validation_passed", "ran_out_of_turns", "attempted_completion",
    "episode_done", "success",
})  # fmt: skip


def reader(table: str, column: sa.Column) -> Callable[[Any], Any]:
  """Returns the reader of a column."""
  name = column.name
  if (table, name) in vocabulary.CHOICES:
    return choice(table, name)
  if (table, name) in _KEYS:
    return key
  if name in _JSON_ARRAYS:
    return json_array
  if name in _JSON:
    return json_text
  if name in _FLAGS:
    return flag
  if name == "progress_percent":
    return percent
  if isinstance(column.type, sa.TIMESTAMP):
    return time
  if column.type is tables.REAL:
    return real
  if column.type is tables.INTEGER:
    return integer
  return written_text


_REAL = {
  "anyOf": [
    {
      "type": "number",
      "minimum": -sys.float_info.max,
      "maximum": sys.float_info.max,
    },
    {"enum": [*sorted(NOT_FINITE), None]},
  ]
}
_JSON_SCHEMA = {"x-maxBytes": MAX_TEXT}
_SCHEMAS: dict[Callable[[Any], Any], dict[str, Any]] = {
  text: {"type": ["string", "null"], "maxLength": MAX_TEXT},
  key: {"type": ["string", "null"], "minLength": 1, "maxLength": _MAX_KEY},
  integer: {
    "type": ["integer", "null"],
    "minimum": -_INT64,
    "maximum": _INT64 - 1,
  },
  real: _REAL,
  flag: {"enum": [True, False, 1, 0, None]},
  percent: {
    "anyOf": [
      {"type": "number", "minimum": 0, "maximum": 100},
      _REAL["anyOf"][1],
    ]
  },
  time: {
    "anyOf": [
      {"type": ["string", "null"], "maxLength": _MAX_TIME},
      {"type": "number", "minimum": 0, "maximum": 1000 * _LATEST},
    ]
  },
  json_text: _JSON_SCHEMA,
  json_array: _JSON_SCHEMA,
}


def schema(reader_: Callable[[Any], Any]) -> dict[str, Any]:
  """Returns the JSON schema of the values that a reader takes."""
  return _SCHEMAS.get(reader_, _SCHEMAS[text])


def _kind(value: object) -> str:
  names = {
    bool: "boolean",
    int: "number",
    float: "number",
    str: "text",
    list: "list",
    dict: "object",
    type(None): "null",
  }
  return names.get(type(value), type(value).__name__)
