"""Checks keyword arguments against a signature before anything is called.

What a run builds by name (gyms, environments, agents, policies) gets its own
keyword arguments from the configuration; these checks name what is wrong with
them by the key that the user wrote.
"""

from __future__ import annotations

import inspect
import typing
from typing import Any, Callable, Mapping

import pydantic
from tunix.rl.multi_turn.core import registry

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD,
          inspect.Parameter.KEYWORD_ONLY)


def parameters(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
  """Parameters of a class's constructor or a function that have a name."""
  return {
      name: p
      for name, p in inspect.signature(make).parameters.items()
      if p.kind in _NAMED
  }


def takes_any(make: Callable[..., Any]) -> bool:
  """Whether it takes keyword arguments of any name."""
  return any(
      p.kind is inspect.Parameter.VAR_KEYWORD
      for p in inspect.signature(make).parameters.values()
  )


def required(make: Callable[..., Any]) -> tuple[str, ...]:
  """Names of parameters without a default."""
  return tuple(
      name
      for name, p in parameters(make).items()
      if p.default is inspect.Parameter.empty
  )


def problems(
    make: Callable[..., Any], options: Mapping[str, Any], key: str
) -> list[str]:
  """Options that `make` does not take, or not with such a value.

  Args:
    make: a class or function.
    options: keyword arguments.
    key: the options' key in the configuration, e.g. "gym.options".
  """
  known = parameters(make)
  found = []
  if not takes_any(make):
    for name in options:
      if name not in known:
        wrong = registry.unknown_name("option", name, known)
        found.append(f"{key}.{name}={options[name]!r}: {wrong}")
  hints = _hints(make)
  for name, value in options.items():
    if name in known and name in hints:
      if wrong := _wrong_type(value, hints[name]):
        found.append(f"{key}.{name}={value!r}: {wrong}")
  return found


def _hints(make: Callable[..., Any]) -> dict[str, Any]:
  target = make.__init__ if isinstance(make, type) else make
  try:
    return typing.get_type_hints(target)
  except Exception:  # pylint: disable=broad-except
    return {}  # Annotations that only a type checker can read.


def _wrong_type(value: Any, kind: Any) -> str:
  try:
    pydantic.TypeAdapter(
        kind, config=pydantic.ConfigDict(arbitrary_types_allowed=True)
    ).validate_python(value)
  except pydantic.ValidationError as error:
    return error.errors()[0]["msg"].replace("Input should be", "must be")
  except Exception:  # pylint: disable=broad-except
    pass  # No schema for this annotation; the call itself will tell.
  return ""
