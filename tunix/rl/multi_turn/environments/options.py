"""Parses options of environment commands; checks deadlines of clients."""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix.rl.multi_turn.core import yaml_text

_LONGEST_S = 10**7  # Four months; a longer one is a mistake for "never".


def yaml_object(text: str, name: str) -> dict[str, Any]:
  """Returns the object that a command's option holds as YAML.

  Raises:
    ValueError: `text` is not an object.
  """
  why = ""
  try:
    data = yaml_text.parse(text)
  except yaml_text.YamlError as error:
    data, why = None, f" {error}"
  if not isinstance(data, dict):
    raise ValueError(
      f"{name}={text}{why}: write an object such as '{{width: 256}}'"
    )
  return data


def check_seconds(seconds: Any, prefix: str = "") -> None:
  """Checks that deadlines are finite numbers above 0.

  Args:
    seconds: a dataclass of deadlines, which a user writes as `timeouts.x`, or
      a mapping by name.
    prefix: put before the names of a mapping.

  Raises:
    ValueError: naming the field and its value.
  """
  if dataclasses.is_dataclass(seconds) and not isinstance(seconds, type):
    seconds, prefix = dataclasses.asdict(seconds), "timeouts."
  for name, value in seconds.items():
    if (
      isinstance(value, bool)
      or not isinstance(value, (int, float))
      or (not 0 < value <= _LONGEST_S)
    ):
      raise ValueError(
        f"{prefix}{name}={value!r} must be a number of seconds > 0, and"
        f" {_LONGEST_S} at most"
      )
