"""Parses JSON that someone else may have written: a file, a peer, a policy.

Promises: text nested deeper than `MOST_DEEP`, or longer than its bound, is a
ValueError, as is any other fault; so what parses can be walked, shown and
written again without a RecursionError. The message says what is wrong; its
reader says where.

Does not check what the value means (`json_models` validates requests).
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import reprlib
from typing import Any, BinaryIO, Iterator

MOST_DEEP = 200
"""Objects and lists inside of one another; orjson writes up to 254."""
MOST_BYTES = 1 << 30


def parse(text: str | bytes, most_bytes: int = MOST_BYTES) -> Any:
  """The value of JSON text.

  Raises:
    ValueError: it is no JSON, too long, or nested too deeply.
  """
  if len(text) > most_bytes:
    raise ValueError(_too_long(most_bytes))
  try:
    value = json.loads(text)
  except RecursionError:
    raise ValueError(_TOO_DEEP) from None
  if isinstance(text, str):
    brackets = text.count("[") + text.count("{")
  else:
    brackets = text.count(b"[") + text.count(b"{")
  if brackets > MOST_DEEP:  # Fewer cannot nest as deeply.
    check_depth(value)
  return value


def read(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> Any:
  """The value of a file.

  Raises:
    ValueError: The fault of the text; see `parse`.
    OSError: the file cannot be read.
  """
  with pathlib.Path(path).open("rb") as file:
    return parse(file.read(most_bytes + 1), most_bytes)


def lines(file: BinaryIO, most_bytes: int = MOST_BYTES) -> Iterator[bytes]:
  """The lines of a file, without holding one that is too long.

  Raises:
    ValueError: a line is longer than `most_bytes`.
  """
  while line := file.readline(most_bytes + 1):
    if len(line) > most_bytes:
      raise ValueError(_too_long(most_bytes))
    yield line


def parts(raw: bytes) -> int:
  """Most values that JSON text may hold beside its first, before parsing it."""
  return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def check_depth(value: object) -> Any:
  """Returns a parsed value.

  Raises:
    ValueError: it is nested deeper than `MOST_DEEP`.
  """
  if deeper(value, MOST_DEEP):
    raise ValueError(_TOO_DEEP)
  return value


def deeper(value: Any, most: int) -> bool:
  """Whether lists and objects nest more than `most` levels deep in a value."""
  level = [value]
  for _ in range(most + 1):
    level = [one for one in level if isinstance(one, (dict, list))]
    if not level:
      return False
    level = [
      part
      for one in level
      for part in (one.values() if isinstance(one, dict) else one)
    ]
  return True


def short(value: object, most: int = 80) -> str:
  """Returns a value's `repr` for a message, at most `most` characters long.

  Reads the first items and outer levels only, so a value of any depth or size
  costs little and raises no RecursionError.
  """
  try:
    text = _BRIEF.repr(value)
  except ValueError:
    text = "a whole number of more than 4,300 digits"
  return text if len(text) <= most else text[: most - 3] + "..."


class _Brief(reprlib.Repr):
  """`repr` of the first 40 items and 8 levels, mappings in their own order."""

  def __init__(self):
    super().__init__()
    self.maxlevel = 8
    self.maxstring = self.maxother = self.maxlong = 200
    self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 40

  def repr_dict(self, x: dict[Any, Any], level: int) -> str:
    if level <= 0 and x:
      return "{...}"
    items = [
      f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}"
      for key, value in itertools.islice(x.items(), 40)
    ]
    return "{" + ", ".join(items + ["..."] * (len(x) > 40)) + "}"


_BRIEF = _Brief()
_TOO_DEEP = f"it is nested deeper than {MOST_DEEP} levels"


def _too_long(most_bytes: int) -> str:
  return f"it is longer than {most_bytes:,} bytes"
