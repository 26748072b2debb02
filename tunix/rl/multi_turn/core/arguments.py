"""Checks keyword arguments against a signature before anything is called.

A run builds gyms, environments, agents and policies by name, with keyword
arguments from the configuration: the factory's parameters declare them.
`takes(factory)` reads them, `Takes.wrong` compares values with them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from typing import Any, Callable, Iterator, Mapping

import pydantic

from . import registry


@dataclasses.dataclass(frozen=True)
class Option:
  """One named parameter of a factory.

  Attributes:
    name: Name of the parameter.
    annotation: its type as written in the source, "" without one.
    type: its type; Any where it has none, or none that can be checked.
    default: its default; `inspect.Parameter.empty` = required.
  """

  name: str
  annotation: str
  type: Any
  default: Any

  def accepts(self, value: object) -> bool:
    """Whether a value, as YAML gives it, is of the type."""
    if self.type is Any:
      return True
    check = _adapter(self.type)
    # YAML has no tuples.
    for form in (value, tuple(value)) if isinstance(value, list) else (value,):
      try:
        check.validate_python(form, strict=True)
        return True
      except pydantic.ValidationError:
        pass
    return False


@dataclasses.dataclass(frozen=True)
class Takes:
  """Parameters of a factory; `anything`: it has **kwargs."""

  options: Mapping[str, Option]
  anything: bool = False

  def __contains__(self, name: str) -> bool:
    return self.anything or name in self.options

  def of(
    self, values: Mapping[str, Any], other: Takes | None = None
  ) -> dict[str, Any]:
    """The values that are options of the factory and not of the `other` one."""
    inherited = other.options if other is not None else {}
    return {
      name: value
      for name, value in values.items()
      if name in self.options or (self.anything and name not in inherited)
    }

  @property
  def required(self) -> tuple[str, ...]:
    """Names of the parameters without a default."""
    return tuple(
      name
      for name, option in self.options.items()
      if option.default is inspect.Parameter.empty
    )

  def wrong(
    self, values: Mapping[str, Any], what: str
  ) -> Iterator[tuple[str, str]]:
    """(name, message) of each value that is unknown or of another type.

    Args:
      values: keyword arguments.
      what: takes them, for the messages.
    """
    for name, value in values.items():
      option = self.options.get(name)
      if option is None:
        if not self.anything:
          problem = registry.unknown_name(
            f"option of {what}:", name, self.options
          )
          yield name, f"{name}={value}: {problem}"
      elif not option.accepts(value):
        yield name, f"{name}={value!r}: {what} takes {option.annotation}"


@functools.lru_cache(maxsize=None)
def _adapter(kind: Any) -> pydantic.TypeAdapter:
  return pydantic.TypeAdapter(
    kind, config=pydantic.ConfigDict(arbitrary_types_allowed=True)
  )


def _parameters(factory: Callable[..., Any]) -> Mapping[str, Any]:
  try:
    return inspect.signature(factory).parameters
  except (TypeError, ValueError):  # One of C's: it checks by itself.
    return {
      "options": inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)
    }


def takes(factory: Callable[..., Any]) -> Takes:
  """The options that a factory's signature declares."""
  function = factory.__init__ if inspect.isclass(factory) else factory
  try:
    hints = typing.get_type_hints(function)
  except (NameError, TypeError):  # Names of type checkers only.
    hints = {}
  options, anything = {}, False
  for name, parameter in _parameters(factory).items():
    if parameter.kind is parameter.VAR_KEYWORD:
      anything = True
    elif parameter.kind not in (
      parameter.VAR_POSITIONAL,
      parameter.POSITIONAL_ONLY,
    ):
      written = parameter.annotation
      if written is parameter.empty:
        written = ""
      elif not isinstance(written, str):
        written = inspect.formatannotation(written)
      options[name] = Option(
        name, written, _checkable(hints.get(name, Any)), parameter.default
      )
  return Takes(options, anything)


def _checkable(kind: object) -> Any:
  try:
    _adapter(kind)
  except (pydantic.PydanticUserError, TypeError):
    return Any
  return kind
