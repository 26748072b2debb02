"""Reads YAML that a person wrote: files, and values of a command line.

Promises: whatever the text, `parse` returns plain values (mappings, lists,
texts, numbers, booleans, null) or raises `YamlError` with one line about the
place and the fix. A date stays text. Values that contain themselves, and
aliases that unfold to more than `MAX_VALUES` values, are refused.

Does not: check the values' meaning.
"""

from __future__ import annotations

import pathlib
from typing import Any, Iterator

import yaml

MAX_VALUES = 100_000
MAX_DEPTH = 64
_DEEP = f"is nested deeper than {MAX_DEPTH} levels, or contains itself"
_PLAIN = (str, int, float, bool, type(None))


class YamlError(ValueError):
  """The text is no YAML of plain values.

  The message is one line that follows the text's name: "is not valid YAML …".
  """


class _Loader(yaml.SafeLoader):
  """Without dates: PyYAML raises on 2026-99-99, and a name may be a date."""

  yaml_implicit_resolvers = {
    first: [pair for pair in pairs if not pair[0].endswith(":timestamp")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
  }


def parse(text: str) -> Any:
  """Returns the value of a YAML text; None for an empty one.

  Raises:
    YamlError: not YAML, or not plain values.
  """
  try:
    value = yaml.load(text, Loader=_Loader)  # A SafeLoader.
  except yaml.YAMLError as error:
    raise YamlError(f"is not valid YAML{_where(error)}") from None
  except RecursionError:
    raise YamlError(_DEEP) from None
  except (ValueError, OverflowError, TypeError) as error:
    raise YamlError(
      f"is not valid YAML: {error}; quote what is meant as text"
    ) from None
  for count, (depth, one) in enumerate(_walk(value)):
    if depth > MAX_DEPTH:
      raise YamlError(_DEEP)
    if count > MAX_VALUES:
      raise YamlError(f"unfolds to more than {MAX_VALUES} values")
    if not isinstance(one, (dict, list, *_PLAIN)):
      raise YamlError(
        f"holds {type(one).__name__}; write text, numbers, lists and"
        " mappings only, without tags such as !!binary"
      )
  return value


def read(path: pathlib.Path) -> Any:
  """Parses a file, as `parse` does a text.

  Raises:
    YamlError: naming the file.
  """
  try:
    return parse(path.read_text(encoding="utf-8"))
  except OSError as error:
    raise YamlError(f"{path} cannot be read: {error.strerror}") from None
  except UnicodeDecodeError as error:
    raise YamlError(
      f"{path} is not text in UTF-8 ({error}); give a YAML file"
    ) from None
  except YamlError as error:
    raise YamlError(f"{path} {error}") from None


def _walk(value: object) -> Iterator[tuple[int, Any]]:
  """Yields (depth, value) of a value and of everything in it, keys too."""
  waiting = [(0, value)]
  while waiting:
    depth, one = waiting.pop()
    yield depth, one
    if isinstance(one, dict):
      waiting += ((depth + 1, inner) for pair in one.items() for inner in pair)
    elif isinstance(one, list):
      waiting += ((depth + 1, inner) for inner in one)


def _where(error: yaml.YAMLError) -> str:
  if (
    isinstance(error, yaml.MarkedYAMLError)
    and (mark := error.problem_mark) is not None
    and error.problem
  ):
    problem = error.problem.replace("\t", r"\t")
    hint = "; indent with spaces, not tabs" if r"\t" in problem else ""
    place = f"line {mark.line + 1}, column {mark.column + 1}"
    return f" at {place}: {problem}{hint}"
  return f": {' '.join(str(error).split())}"
