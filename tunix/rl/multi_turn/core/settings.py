"""Declares settings: frozen dataclasses whose fields carry doc, unit and range.

    @settings.settings
    class EngineConfig:
      \"\"\"The in-process rollout engine.\"\"\"

      slots: int = settings.setting(
          default=96, doc="Requests sampled at a time.", ge=1
      )

      def problems(self):
        if self.cache_tokens and self.cache_tokens < self.context_length:
          yield "cache_tokens=… is below context_length=…; raise the first"

The class that a component takes is the section of a run's configuration: there
is no second declaration. Constructing one validates types, ranges, choices
(`Literal`) and `problems()`; each failure is a `ValueError` (pydantic's
`ValidationError`). `dataclasses.replace` validates again.

Does not: read YAML or command lines (`config` does), or import JAX.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any, Callable, cast, Iterator, Mapping, TypeVar

import pydantic
import pydantic.dataclasses

T = TypeVar("T")
LARGEST = 2**63 - 1
"""Bound of every whole number that has no other: arrays, seeds and databases
take 64 bits."""


def setting(
  *,
  default: object,
  doc: str,
  unit: str = "",
  registry: str = "",
  ge: float | None = None,
  gt: float | None = None,
  le: float | None = None,
  lt: float | None = None,
) -> Any:
  """A field with its documentation and range.

  Args:
    default: an immutable value, or a dict (copied for each instance).
    doc: meaning, and what 0, "" or None stand for where they are special.
    unit: Unit of a number, e.g. "px", "s", "tokens".
    registry: "package.module:REGISTRY" of the names that a text field, or each
      item of a list of texts, may hold; see `core.registry.Registry`. A
      "module:attribute" path is valid as well.
    ge, gt, le, lt: bounds of a number, or of each number of a tuple.
  """
  about: dict[str, Any] = {"unit": unit, "registry": registry}
  if type(default) is int and le is None and lt is None:
    le = LARGEST
  limits = {"ge": ge, "gt": gt, "le": le, "lt": lt}
  bounds: dict[str, Any] = {k: v for k, v in limits.items() if v is not None}
  # Of the class alone, pydantic would take positional arguments as well.
  options: dict[str, Any] = {"description": doc, "kw_only": True}
  if isinstance(default, dict):
    options["default_factory"] = functools.partial(dict, default)
  else:
    options["default"] = default
  if isinstance(default, tuple):
    # Lists are accepted too. Bounds are of the items, which `settings` checks.
    options["strict"] = False
    return pydantic.Field(
      **options, json_schema_extra={**about, "items": bounds}
    )
  return pydantic.Field(**options, json_schema_extra=about, **bounds)


def section(*, default: object) -> Any:
  """Declares a field that holds other settings; their class documents it."""
  return setting(default=default, doc="")


@typing.dataclass_transform(
  frozen_default=True, kw_only_default=True, field_specifiers=(setting, section)
)
def settings(cls: type[T]) -> type[T]:
  """Makes `cls` a frozen, validated, keyword-only dataclass.

  A method `problems(self) -> Iterator[str]` of the class yields contradictions
  between values: the fields, the reason, the change to make. All of them are
  raised at once.
  """

  def check(self: Any) -> Any:
    problems = [*_bad_items(self), *_own_problems(self)]
    if problems:
      raise ValueError("\n".join(problems))
    return self

  if hasattr(cls, "problems") or any(map(_has_item_bounds, vars(cls).values())):
    # A name of pydantic's own, so that subclasses keep and extend the check.
    cls._check_settings = pydantic.model_validator(mode="after")(check)  # type: ignore[attr-defined]
  cls._is_settings = True  # type: ignore[attr-defined]
  make = pydantic.dataclasses.dataclass(
    frozen=True,
    kw_only=True,
    config=pydantic.ConfigDict(
      extra="forbid",
      strict=True,
      allow_inf_nan=False,
      arbitrary_types_allowed=True,
    ),
  )
  return cast(type[T], make(cls))


def _has_item_bounds(declared: object) -> bool:
  about = getattr(declared, "json_schema_extra", None)
  return bool(isinstance(about, dict) and about.get("items"))


def _own_problems(value: object) -> Iterator[str]:
  problems = getattr(value, "problems", None)
  return problems() if problems else iter(())


def _bad_items(value: object) -> Iterator[str]:
  """Numbers of tuples outside the bounds of their field."""
  kind: Any = type(value)
  for field in fields(kind):
    if not field.item_bounds:
      continue
    for item in getattr(value, field.name):
      for name, bound in field.item_bounds.items():
        if not holds(name, item, bound):
          yield f"{field.name}: {item!r} must be {sign(name)} {bound:.12g}"


def holds(name: str, item: object, bound: float) -> bool:
  """Whether `item` keeps a bound called "ge", "gt", "le" or "lt"."""
  return _HOLDS[name](item, bound)


def sign(name: str) -> str:
  """The sign of a bound called "ge", "gt", "le" or "lt"."""
  return _SIGNS[name]


_HOLDS: Mapping[str, Callable[[Any, Any], bool]] = {
  "ge": lambda item, bound: item >= bound,
  "gt": lambda item, bound: item > bound,
  "le": lambda item, bound: item <= bound,
  "lt": lambda item, bound: item < bound,
}
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclasses.dataclass(frozen=True)
class Setting:
  """One field of a settings class, for loaders and documentation.

  Attributes:
    name: Name of the field.
    type: its resolved annotation.
    doc, unit, registry: as declared.
    bounds: Bounds of a number, by "ge", "gt", "le", "lt".
    item_bounds: Bounds of a tuple's items.
  """

  name: str
  type: Any
  doc: str
  unit: str
  registry: str
  bounds: Mapping[str, float]
  item_bounds: Mapping[str, float]
  _info: Any

  @property
  def default(self) -> Any:
    return self._info.get_default(call_default_factory=True)

  @property
  def nested(self) -> type | None:
    """The settings class that the field holds, if it does."""
    return self.type if is_settings(self.type) else None

  def range_of(self, wrong: object) -> str:
    """`range`, for the error of a value outside it."""
    if isinstance(wrong, int) and wrong > LARGEST:
      return ", ".join(filter(None, (self.range, "< 2**63")))
    return self.range

  @property
  def range(self) -> str:
    """The bounds as text, e.g. ">= 1, <= 8"."""
    bounds = self.bounds or self.item_bounds
    return ", ".join(f"{_SIGNS[n]} {value:.12g}" for n, value in bounds.items())


def is_settings(cls: object) -> bool:
  """Whether `cls` was made by `settings`."""
  return isinstance(cls, type) and hasattr(cls, "_is_settings")


@functools.lru_cache(maxsize=None)
def fields(cls: object) -> tuple[Setting, ...]:
  """The fields of a settings class, in order."""
  hints = typing.get_type_hints(cls)
  declared = []
  for name, info in cls.__pydantic_fields__.items():  # type: ignore[attr-defined]
    about = info.json_schema_extra or {}
    bounds = {}
    for item in info.metadata:
      for key in _SIGNS:
        bound = getattr(item, key, None)
        if bound is not None and bound != LARGEST:
          bounds[key] = bound
    declared.append(
      Setting(
        name=name,
        type=hints[name],
        doc=info.description or "",
        unit=about.get("unit", ""),
        registry=about.get("registry", ""),
        bounds=bounds,
        item_bounds=about.get("items", {}),
        _info=info,
      )
    )
  return tuple(declared)
