"""Layers of configuration over typed, nested, frozen dataclasses.

Turns plain mappings (YAML, overrides) into dataclasses whose fields were made
with `option`, and refuses what does not fit: an unknown key or choice is
answered with the nearest valid one, a value of the wrong type or outside its
range with what would be right. All problems are reported at once.

Does not know any particular section: those are in the modules beside it.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import functools
import math
import types
import typing
from typing import Any, Mapping, Sequence

import yaml


class ConfigError(ValueError):
  """The configuration is wrong; the text lists every problem and its fix."""

  def __init__(self, problems: Sequence[str]):
    self.problems = tuple(problems)
    if len(self.problems) == 1:
      text = self.problems[0]
    else:
      text = f"{len(self.problems)} problems:\n" + "\n".join(
          f"  - {p}" for p in self.problems
      )
    super().__init__(text)


@dataclasses.dataclass(frozen=True)
class Raw:
  """A value as typed on the command line: its text beside its YAML reading.

  A text field keeps the text (`run.name=007` is not the number 7).
  """

  text: str
  value: Any


def option(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    choices: Sequence[str] = (),
    open_choices: bool = False,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> Any:
  """A dataclass field with its documentation and its bounds.

  Args:
    default: immutable value, or a dict (copied for each instance).
    doc: what it means, and what 0, null or "" mean where they are special.
    unit: of a number, e.g. "px", "s", "tokens".
    choices: the valid values of a text field.
    open_choices: other values are valid too once a run imports the modules
      that register them.
    at_least: smallest valid number.
    above: every valid number is larger than this.
    at_most: largest valid number.
  """
  metadata = {
      "doc": doc,
      "unit": unit,
      "choices": tuple(choices),
      "open": open_choices,
      "at_least": at_least,
      "above": above,
      "at_most": at_most,
  }
  if isinstance(default, dict):
    return dataclasses.field(
        default_factory=lambda: dict(default), metadata=metadata
    )
  return dataclasses.field(default=default, metadata=metadata)


@functools.lru_cache(maxsize=None)
def field_types(cls: type) -> dict[str, Any]:
  return typing.get_type_hints(cls)


def sections(cls: type) -> dict[str, type]:
  """The nested dataclasses of `cls`, by field name, in order."""
  hints = field_types(cls)
  return {
      f.name: hints[f.name]
      for f in dataclasses.fields(cls)
      if dataclasses.is_dataclass(hints[f.name])
  }


@functools.lru_cache(maxsize=None)
def leaf_paths(cls: type) -> tuple[str, ...]:
  """Every dotted key of `cls`, sections expanded."""
  paths = []
  for section, section_cls in sections(cls).items():
    paths += [f"{section}.{f.name}" for f in dataclasses.fields(section_cls)]
  return tuple(paths)


def nearest(word: str, valid: Sequence[str]) -> str:
  """`; did you mean 'x'?` for the valid word closest to `word`, or ""."""
  lower = {v.lower(): v for v in valid}
  match = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.55)
  return f"; did you mean {lower[match[0]]!r}?" if match else ""


def nearest_key(path: str, cls: type, aliases: Mapping[str, str]) -> str:
  """As `nearest` for a dotted key: a right name in a wrong place counts."""
  leaf = path.rpartition(".")[2]
  same = [p for p in leaf_paths(cls) if p.rpartition(".")[2] == leaf]
  if same:
    return "; did you mean " + " or ".join(repr(p) for p in same) + "?"
  section = path.partition(".")[0]
  known = sections(cls)
  if "." in path and section in known:
    names = [f.name for f in dataclasses.fields(known[section])]
    match = difflib.get_close_matches(leaf, names, n=1, cutoff=0.55)
    if match:
      return f"; did you mean '{section}.{match[0]}'?"
    return f"; {section} has {', '.join(names)}"
  leaves = {p.rpartition(".")[2]: p for p in leaf_paths(cls)}
  words = [*leaf_paths(cls), *known, *aliases, *leaves]
  match = difflib.get_close_matches(path, words, n=1, cutoff=0.55)
  if not match:
    return "; --help lists every key"
  best = match[0]
  if best not in aliases:
    best = leaves.get(best, best)
  return f"; did you mean {best!r}?"


def parse_override(text: str) -> tuple[str, Raw]:
  """`"a.b=value"` to its key and value; the value is read as YAML."""
  key, equals, value = text.partition("=")
  key = key.strip()
  if not equals or not key:
    raise ConfigError([
        f"{text!r} is not an override; write key=value, e.g."
        " learner.steps=100, or give one YAML file before the overrides"
    ])
  try:
    parsed = yaml.safe_load(value)
  except yaml.YAMLError as error:
    raise ConfigError([
        f"the value of {key}={value} is not valid YAML"
        f" ({str(error).splitlines()[0]}); quote it"
    ]) from error
  return key, Raw(value, parsed)


def unwrap(value: Any) -> Any:
  return value.value if isinstance(value, Raw) else value


def merge(old: Any, new: Any) -> Any:
  """`new`, or both key by key where both are mappings."""
  plain = unwrap(new)
  if not (isinstance(old, dict) and isinstance(plain, dict)):
    return new
  return {**old, **{k: merge(old.get(k), v) for k, v in plain.items()}}


def flatten(
    data: Mapping[str, Any],
    cls: type,
    aliases: Mapping[str, str],
    source: str,
) -> dict[str, Any]:
  """One layer as `{"section.field": value}`.

  Accepts nested mappings, dotted keys, the aliases, and a plain value for a
  section that has an alias (`gym: miniwob`). `source` names the layer in
  errors.

  Raises:
    ConfigError: unknown keys, or a field given twice.
  """
  problems: list[str] = []
  flat: dict[str, Any] = {}
  known = sections(cls)
  paths = leaf_paths(cls)

  def put(path: str, value: Any, written: str) -> None:
    if path in flat:
      problems.append(
          f"{source}: {path} is given twice (again as {written!r}); keep one"
      )
    flat[path] = value

  def visit(path: str, value: Any) -> None:
    plain = unwrap(value)
    if path in known and isinstance(plain, collections.abc.Mapping):
      for name, inner in plain.items():
        visit(f"{path}.{name}", inner)
    elif path in aliases:
      put(aliases[path], value, path)
    elif path in known:
      if plain is None:  # An empty section in a YAML file.
        return
      problems.append(
          f"{source}: {path} is a section, not a value; set one of its fields,"
          f" e.g. {path}.{dataclasses.fields(known[path])[0].name}"
      )
    elif path in paths:
      put(path, value, path)
    else:
      parent = _dict_parent(path, cls)
      if parent:
        inner = flat.setdefault(parent, {})
        if not isinstance(unwrap(inner), dict):
          problems.append(f"{source}: {parent} is given twice; keep one")
          return
        inner = flat[parent] = dict(unwrap(inner))
        names = path[len(parent) + 1 :].split(".")
        for name in names[:-1]:
          inner[name] = dict(inner.get(name) or {})
          inner = inner[name]
        inner[names[-1]] = plain
      else:
        problems.append(
            f"{source}: unknown key {path!r}{nearest_key(path, cls, aliases)}"
        )

  for key, value in data.items():
    visit(str(key), value)
  if problems:
    raise ConfigError(problems)
  return flat


def _dict_parent(path: str, cls: type) -> str | None:
  """The dict-valued field that `path` reaches into, or None."""
  parts = path.split(".")
  if len(parts) < 3:
    return None
  section = sections(cls).get(parts[0])
  if section is None:
    return None
  kind = field_types(section).get(parts[1])
  if typing.get_origin(kind) is dict:
    return f"{parts[0]}.{parts[1]}"
  return None


def build(cls: type, flat: Mapping[str, Any], *, open_names: bool) -> Any:
  """An instance of `cls` from dotted keys; absent ones keep their default.

  Args:
    cls: the root dataclass.
    flat: as from `flatten`.
    open_names: whether fields with open choices accept unlisted names.

  Raises:
    ConfigError: listing every value of a wrong type, choice or range.
  """
  problems: list[str] = []
  built = {}
  for section, section_cls in sections(cls).items():
    hints = field_types(section_cls)
    values = {}
    for f in dataclasses.fields(section_cls):
      path = f"{section}.{f.name}"
      if path not in flat:
        continue
      try:
        value = _coerce(path, flat[path], hints[f.name])
        _check(path, value, f.metadata, open_names)
        values[f.name] = value
      except ConfigError as error:
        problems += error.problems
    built[section] = section_cls(**values)
  if problems:
    raise ConfigError(problems)
  return cls(**built)


def _coerce(path: str, value: Any, kind: Any) -> Any:
  """`value` as the field's type; a float may be written 1e-3, an int 1e3."""
  raw_text = value.text if isinstance(value, Raw) else None
  value = unwrap(value)
  origin = typing.get_origin(kind)
  if origin in (typing.Union, types.UnionType):
    inner = [k for k in typing.get_args(kind) if k is not type(None)]
    if value is None or value == "none" and inner[0] is not str:
      return None
    return _coerce(path, value, inner[0])
  if origin is tuple:
    item = typing.get_args(kind)[0]
    if isinstance(value, str):
      value = [v.strip() for v in value.split(",") if v.strip()]
    elif value is None:
      value = []
    elif not isinstance(value, (list, tuple)):
      value = [value]
    return tuple(
        _coerce(f"{path}[{i}]", v, item) for i, v in enumerate(value)
    )
  if origin is dict or kind is dict:
    if value is None:
      return {}
    if not isinstance(value, collections.abc.Mapping):
      raise _wrong(path, value, "a mapping, e.g. {key: value}")
    return {str(k): v for k, v in value.items()}
  if kind is str:
    if isinstance(value, str):
      return value
    if raw_text is not None and not isinstance(value, (dict, list)):
      return "" if raw_text.strip() in ("null", "~") else raw_text.strip()
    if value is None:
      return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
      raise _wrong(path, value, "text; put quotes around it")
    return str(value)
  if kind is bool:
    if isinstance(value, bool):
      return value
    raise _wrong(path, value, "true or false")
  if isinstance(value, bool) or value is None:
    raise _wrong(path, value, "a number")
  try:
    number = float(value)
  except (TypeError, ValueError):
    raise _wrong(path, value, "a number") from None
  if not math.isfinite(number):
    raise _wrong(path, value, "a finite number")
  if kind is float:
    return number
  if isinstance(value, int):
    return value
  if number != int(number):
    raise _wrong(path, value, "a whole number")
  return int(number)


def _wrong(path: str, value: Any, wanted: str) -> ConfigError:
  return ConfigError([f"{path}={value!r} must be {wanted}"])


def _check(
    path: str, value: Any, metadata: Mapping[str, Any], open_names: bool
) -> None:
  choices = metadata["choices"]
  if choices and not (metadata["open"] and open_names):
    for item in value if isinstance(value, tuple) else (value,):
      if path == "gym.name" and ":" in item:
        continue  # The path of one: importing it checks it.
      if item not in choices:
        hint = nearest(str(item), choices)
        more = (
            " (a name of your own is known once run.imports lists the module"
            " that registers it)"
            if metadata["open"]
            else ""
        )
        raise ConfigError([
            f"{path}={item!r} is not one of {', '.join(choices)}{hint}{more}"
        ])
  numbers = value if isinstance(value, tuple) else (value,)
  for number in numbers:
    if isinstance(number, bool) or not isinstance(number, (int, float)):
      continue
    if metadata["at_least"] is not None and number < metadata["at_least"]:
      raise _wrong(path, number, f">= {metadata['at_least']}")
    if metadata["above"] is not None and number <= metadata["above"]:
      raise _wrong(path, number, f"> {metadata['above']}")
    if metadata["at_most"] is not None and number > metadata["at_most"]:
      raise _wrong(path, number, f"<= {metadata['at_most']}")


def to_dict(config: Any) -> dict[str, Any]:
  """Nested plain values (tuples as lists), ready for YAML or JSON."""

  def plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
      return [plain(v) for v in value]
    if isinstance(value, collections.abc.Mapping):
      return {k: plain(v) for k, v in value.items()}
    return value

  return plain(dataclasses.asdict(config))


def to_yaml(config: Any) -> str:
  """YAML that reads back as the same values."""
  data = to_dict(config)
  text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=79)
  if yaml.safe_load(text) == data:
    return text
  # PyYAML loses some line separators when it may write Unicode.
  return yaml.safe_dump(data, sort_keys=False, width=79)
