"""Recognizes the framework's event types by their place and name.

A trainer's events are made of the framework's classes, while this package reads
with the copy of the same modules that it carries (`training_monitor.core`), so
that it imports nothing of the framework. The two have the same names and
fields.
"""

from __future__ import annotations

from typing import Any, TypeGuard, TypeVar

from training_monitor.core import events
from training_monitor.core import token_sequence
from training_monitor.core import trajectory

T = TypeVar("T")


def _place(kind: type[Any]) -> tuple[str, ...]:
  return *kind.__module__.split(".")[-2:], kind.__qualname__


_CARRIED = {
  _place(kind): kind
  for module in (events, token_sequence, trajectory)
  for kind in vars(module).values()
  if isinstance(kind, type) and kind.__module__ == module.__name__
}


class _Carried(dict[type[Any], type[Any]]):
  """Maps a class to its carried copy; one without a copy to itself."""

  def __missing__(self, kind: type[Any]) -> type[Any]:
    self[kind] = _CARRIED.get(_place(kind), kind)
    return self[kind]


carried = _Carried().__getitem__
"""Returns the carried class that a class is another copy of, else the class."""


def is_a(value: object, kind: type[T]) -> TypeGuard[T]:
  """Returns whether a value is of a carried class, or of another copy of it."""
  return carried(type(value)) is kind
