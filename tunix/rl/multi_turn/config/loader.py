"""Reads layers of plain mappings into nested settings classes.

Turns YAML and `key=value` overrides into classes made with `core.settings`,
and refuses bad ones: the error for an unknown key or choice names the nearest
valid one, the error for a wrong type or range names the values allowed.

Promises: reading never stops at the first problem; a list receives all of
them, and the readable values are returned.

Does not: know any particular section, or build anything from them.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import functools
import re
import types
import typing
from typing import Any, Collection, Literal, Mapping, Sequence

import pydantic
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.core import settings
from tunix.rl.multi_turn.core import yaml_text
from tunix.rl.multi_turn.net import credentials
import yaml

MISSING = object()
TOKEN = "project_token"
"""Former name that holds a secret; see `former_names`."""
_UNITS_S = {"ms": 1e-3, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600,
            "d": 86400}  # fmt: skip


class ConfigError(ValueError):
  """The configuration is wrong; the text lists every problem and its fix."""

  def __init__(self, problems: Sequence[str]):
    # An address may hold a password, and a problem is printed and logged.
    self.problems = tuple(credentials.masked(p) for p in problems)
    if len(self.problems) == 1:
      text = self.problems[0]
    else:
      text = f"{len(self.problems)} problems:\n" + "\n".join(
        f"  - {p}" for p in self.problems
      )
    super().__init__(text)

  def _render_traceback_(self) -> list[str]:
    """Returns what a notebook shows: the problems without a traceback."""
    return [f"ConfigError: {self}"]


@dataclasses.dataclass(frozen=True)
class Raw:
  """A value as typed on the command line: its text beside its YAML reading.

  A text field keeps the text (`run.name=007` is not the number 7).
  """

  text: str
  value: Any


def unwrap(value: object) -> Any:
  return value.value if isinstance(value, Raw) else value


# --- keys ---------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def leaves(cls: object, prefix: str = "") -> Mapping[str, settings.Setting]:
  """Every dotted key of `cls` with its field, sections expanded, in order."""
  fields: dict[str, settings.Setting] = {}
  for field in settings.fields(cls):
    path = prefix + field.name
    if field.nested:
      fields |= leaves(field.nested, path + ".")
    else:
      fields[path] = field
  return fields


@functools.lru_cache(maxsize=None)
def sections(cls: type, prefix: str = "") -> Mapping[str, type]:
  """Every nested settings class by its dotted key, outer ones first."""
  by_key: dict[str, type] = {}
  for field in settings.fields(cls):
    if field.nested:
      path = prefix + field.name
      by_key[path] = field.nested
      by_key |= sections(field.nested, path + ".")
  return by_key


def nearest_key(path: str, cls: type, aliases: Mapping[str, str]) -> str:
  """As `registry.did_you_mean` for a dotted key, which a right name in a wrong
  place may be."""
  all_sections, keys = sections(cls), leaves(cls)
  section, _, leaf = path.rpartition(".")
  by_leaf: dict[str, list[str]] = {}
  for key in keys:
    by_leaf.setdefault(key.rpartition(".")[2], []).append(key)
  near: list[str] = []
  if not section:  # A short key, mistyped.
    near = difflib.get_close_matches(path, aliases, n=1, cutoff=0.8)
  near += by_leaf.get(leaf, [])
  if section in all_sections:
    names = [f.name for f in settings.fields(all_sections[section])]
    if near:
      return f"{_meant(near)} {section} has {', '.join(names)}"
    if match := registry.nearest(leaf, names):
      return _meant([f"{section}.{match}"])
    return f"; {section} has {', '.join(names)}"
  if near:
    return _meant(near)
  words = [*keys, *all_sections, *aliases, *by_leaf]
  best = registry.nearest(path, words)
  if not best:
    return (
      "; sections are"
      f" {', '.join(name for name in all_sections if '.' not in name)};"
      " `--help SECTION` lists the keys of one, --help all lists every key"
    )
  return _meant([best] if best in aliases else by_leaf.get(best, [best]))


def _meant(keys: Sequence[str]) -> str:
  return "; did you mean " + " or ".join(map(repr, keys)) + "?"


def parse_override(text: str) -> tuple[str, Raw]:
  """`"a.b=value"` to its key and value; the value is read as YAML."""
  key, equals, value = text.partition("=")
  key = key.strip()
  if not equals or not key:
    raise ConfigError(
      [
        f"{text!r} is not an override; write key=value, e.g."
        " learner.steps=100, or give one YAML file before the overrides"
      ]
    )
  if key == TOKEN:  # A secret is text, and no error repeats it.
    return key, Raw(value, value)
  try:
    parsed = yaml_text.parse(value)
  except yaml_text.YamlError as error:
    raise ConfigError(
      [f"the value of {key}={value} {error}; quote it"]
    ) from None
  return key, Raw(value, parsed)


def merge(old: object, new: object) -> Any:
  """`new`, or both key by key where both are mappings."""
  plain = unwrap(new)
  old = unwrap(old)
  if not (isinstance(old, dict) and isinstance(plain, dict)):
    return new
  return {**old, **{k: merge(old.get(k), v) for k, v in plain.items()}}


def flatten(
  data: Mapping[str, Any],
  cls: type,
  aliases: Mapping[str, str],
  source: str,
  problems: list[str],
  hidden: Collection[str] = (),
) -> dict[str, Any]:
  """One layer as `{"section.field": value}`.

  Accepts nested mappings, dotted keys, the aliases, and a plain value for a
  section that has an alias (`gym: miniwob`).

  Args:
    data: Keys and values of the layer.
    cls: the root class.
    aliases: short key -> dotted key.
    source: names the layer in problems; "" where the user knows.
    problems: gets unknown keys, and fields given twice.
    hidden: Aliases that no hint of a problem names.
  """
  shown = {k: v for k, v in aliases.items() if k not in hidden}
  flat: dict[str, Any] = {}
  of = f"{source}: " if source else ""
  all_sections, paths = sections(cls), leaves(cls)

  def put(path: str, value: object, written: str) -> None:
    if path in flat:
      problems.append(
        f"{of}{path} is given twice (again as {written!r}); keep one"
      )
    flat[path] = value

  def below_mapping(parent: str, path: str, value: object) -> None:
    inner = unwrap(flat.setdefault(parent, {}))
    if not isinstance(inner, dict):
      problems.append(f"{of}{parent} is given twice; keep one")
      return
    inner = flat[parent] = dict(inner)
    names = path[len(parent) + 1 :].split(".")
    for name in names[:-1]:
      below = inner.get(name)
      inner[name] = dict(below) if isinstance(below, dict) else {}
      inner = inner[name]
    inner[names[-1]] = value

  def visit(path: str, value: object) -> None:
    plain = unwrap(value)
    if path in all_sections and isinstance(plain, collections.abc.Mapping):
      for name, inner in plain.items():
        visit(f"{path}.{name}", inner)
    elif aliases.get(path) in paths:
      put(aliases[path], value, path)
    elif path in aliases:  # Of a key in a mapping.
      visit(aliases[path], value)
    elif path in all_sections:
      if plain is not None:  # None: an empty section in a YAML file.
        first = settings.fields(all_sections[path])[0].name
        problems.append(
          f"{of}{path} is a section, not a value; set one of its"
          f" fields, e.g. {path}.{first}"
        )
    elif path in paths:
      put(path, value, path)
    elif parent := _mapping_above(path, paths):
      below_mapping(parent, path, plain)
    else:
      problems.append(
        f"{of}unknown key {path!r}{nearest_key(path, cls, shown)}"
      )

  for key, value in data.items():
    visit(str(key), value)
  return flat


def _mapping_above(
  path: str, paths: Mapping[str, settings.Setting]
) -> str | None:
  """The field holding a mapping that `path` reaches into, or None."""
  parts = path.split(".")
  for end in range(len(parts) - 1, 0, -1):
    field = paths.get(".".join(parts[:end]))
    if field is not None:
      kinds = _members(field.type)
      holds = any(typing.get_origin(kind) is dict for kind in kinds)
      return ".".join(parts[:end]) if holds else None
  return None


# --- values -------------------------------------------------------------------


def build(
  cls: type,
  flat: Mapping[str, Any],
  problems: list[str],
  prefix: str = "",
  refused: set[str] | None = None,
) -> Any:
  """An instance of `cls` from dotted keys; absent ones keep their default.

  Args:
    cls: a settings class.
    flat: Result of `flatten`.
    problems: receives each value of a wrong type, choice or range, and the
      classes' own problems; the instance has defaults in their place.
    prefix: Prefix of the class's keys.
    refused: gets the keys of all fields of a class that refused its values:
      they have their defaults, of which nothing can be derived.
  """
  values: dict[str, Any] = {}
  for field in settings.fields(cls):
    path = prefix + field.name
    if field.nested:
      values[field.name] = build(
        field.nested, flat, problems, path + ".", refused
      )
      continue
    if path not in flat:
      continue
    value = coerce(flat[path], field.type)
    if wrong := field_problem(cls, field, value, path):
      problems.append(wrong)
    else:
      values[field.name] = value
  try:
    return cls(**values)
  except pydantic.ValidationError as error:
    for detail in error.errors():
      text = str(detail.get("ctx", {}).get("error", detail["msg"]))
      problems += [_dotted(cls, line, prefix) for line in text.splitlines()]
    nested = {f.name for f in settings.fields(cls) if f.nested}
    if refused is not None:
      refused |= {prefix + f.name for f in settings.fields(cls) if not f.nested}
    return cls(**{k: v for k, v in values.items() if k in nested})


def _dotted(cls: type, problem: str, prefix: str) -> str:
  """A class's own problem, with its fields under their dotted keys."""
  names = "|".join(re.escape(f.name) for f in settings.fields(cls))
  named = re.compile(rf"(?<![\w.])({names})(?==|\.\w+=)|^({names})(?=[ :])")
  text = named.sub(lambda match: prefix + match.group(0), problem)
  if text == problem and prefix and prefix not in problem:
    return f"{prefix.rstrip('.')}: {problem}"
  return text


def field_problem(
  cls: type, field: settings.Setting, value: Any, path: str
) -> str | None:
  """Describes why `value` does not fit the field; None if it fits."""
  try:
    # The field alone: checks between fields run later.
    _adapter(cls, field.name).validate_python(value)
  except pydantic.ValidationError as error:
    return f"{path}={_shown(value)} must be {_wanted(field, error)}"
  for name, bound in field.item_bounds.items():
    for item in value:
      if not settings.holds(name, item, bound):
        return f"{path}: {item!r} must be {settings.sign(name)} {bound:.12g}"
  return None


@functools.lru_cache(maxsize=None)
def _adapter(cls: type, name: str) -> pydantic.TypeAdapter:
  info = cls.__pydantic_fields__[name]  # type: ignore[attr-defined]
  kind = typing.get_type_hints(cls)[name]
  constraints = tuple(info.metadata)
  annotated: Any = kind
  if constraints:
    annotated = typing.Annotated[(kind, *constraints)]
  return pydantic.TypeAdapter(
    annotated,
    config=pydantic.ConfigDict(
      strict=True, allow_inf_nan=False, arbitrary_types_allowed=True
    ),
  )


def _members(kind: object) -> tuple[Any, ...]:
  if typing.get_origin(kind) in (typing.Union, types.UnionType):
    return typing.get_args(kind)
  return (kind,)


def coerce(value: object, kind: object) -> Any:
  """Converts a value written by hand to the field's type.

  A float may be written 1e-3 and an int 1e3; a list as a,b; text as anything.
  A value that cannot be converted is returned unchanged, and validation
  refuses it.
  """
  plain = unwrap(value)
  members = _members(kind)
  if type(None) in members and plain in (None, "none"):
    return None
  for member in members:
    read = _coerce_one(value, member)
    if read is not MISSING:
      return read
  return plain


def _coerce_one(value: object, kind: object) -> Any:
  plain = unwrap(value)
  origin = typing.get_origin(kind)
  if origin is tuple:
    return _coerce_items(plain, typing.get_args(kind)[0])
  if origin is dict or kind is dict:
    if plain is None:
      return {}
    if isinstance(plain, collections.abc.Mapping):
      return {str(k): v for k, v in plain.items()}
    return MISSING
  if kind is str or origin is Literal:
    return _coerce_text(value)
  if kind in (int, float) and not isinstance(plain, bool):
    try:
      number = float(plain)
    except (TypeError, ValueError, OverflowError):
      return MISSING
    if kind is float or isinstance(plain, int):
      return plain if isinstance(plain, int) else number
    if number.is_integer():
      return int(number)
  return MISSING


def _coerce_items(plain: object, kind: object) -> Any:
  if isinstance(plain, str):
    plain = [item.strip() for item in plain.split(",") if item.strip()]
  elif plain is None:
    plain = []
  elif isinstance(plain, collections.abc.Mapping):
    return MISSING
  elif not isinstance(plain, (list, tuple)):
    plain = [plain]
  return tuple(coerce(item, kind) for item in plain)


def _coerce_text(value: object) -> Any:
  plain = unwrap(value)
  if isinstance(plain, (collections.abc.Mapping, list, tuple)):
    return MISSING
  if isinstance(plain, str):
    return plain
  if isinstance(value, Raw):
    text = value.text.strip()
    return "" if text in ("null", "~") else text
  if plain is None:
    return ""
  if isinstance(plain, bool):
    return str(plain).lower()
  return str(plain)


def _shown(value: object) -> str:
  return repr(list(value) if isinstance(value, tuple) else value)


def _wanted(field: settings.Setting, error: pydantic.ValidationError) -> str:
  """Describes the values a field takes, for an error message."""
  details = error.errors()
  kinds = {detail["type"] for detail in details}
  choices = literal_choices(field.type)
  if choices and kinds & {"literal_error"}:
    wrong = str(details[0]["input"])
    hint = registry.did_you_mean(wrong, choices)
    return f"one of {', '.join(choices)}{hint}"
  if kinds & {"finite_number"}:
    return "a finite number"
  bounds = (
    "greater_than",
    "greater_than_equal",
    "less_than",
    "less_than_equal",
  )
  if kinds & set(bounds):
    return field.range_of(details[0]["input"])
  where = next((d["loc"] for d in details if d["loc"]), ())
  item = f"item {where[0]} " if where and isinstance(where[0], int) else ""
  words = item + _type_words(field.type, bool(item))
  if field.unit == "s" and (seconds := _seconds(details[0]["input"])):
    words += f" of seconds: {seconds:g}"
  thousands = re.fullmatch(r"(\d{1,6})[kK]", str(details[0]["input"]))
  if thousands and field.type is int:
    tokens = field.name.endswith(("_length", "_tokens"))
    words += f": {(1024 if tokens else 1000) * int(thousands[1])}"
  return words


def _seconds(text: object) -> float:
  """Of a duration with a unit, as 10m or 2 h; else 0."""
  match = re.fullmatch(r"([\d.]+)\s*([a-z]+)", str(text).strip().lower())
  try:
    return _UNITS_S[match[2]] * float(match[1]) if match else 0
  except (KeyError, ValueError):
    return 0


def _type_words(kind: object, item: bool = False) -> str:
  words = []
  for member in _members(kind):
    origin = typing.get_origin(member)
    if origin is tuple:
      inner = _type_words(typing.get_args(member)[0])
      words.append(inner if item else f"a list of {inner.split(' ', 1)[-1]}")
    elif origin is dict or member is dict:
      numbers = typing.get_args(member)[1:] == (float,)
      of = " of names to numbers" if numbers else ""
      words.append(f"a mapping{of}, e.g. {{key: {1 if of else 'value'}}}")
    elif member is bool:
      words.append("true or false")
    elif member is int:
      words.append("a whole number")
    elif member is float:
      words.append("a number")
    elif member is str or origin is Literal:
      words.append("text; put quotes around it")
    elif member is type(None):
      words.append("null")
  return " or ".join(words)


def literal_choices(kind: object) -> tuple[str, ...]:
  """The values of a `Literal`, or of the `Literal`s in a tuple; else ()."""
  for member in _members(kind):
    if typing.get_origin(member) is tuple:
      member = typing.get_args(member)[0]
    if typing.get_origin(member) is Literal:
      return tuple(str(value) for value in typing.get_args(member))
  return ()


def name_problems(config: object) -> list[str]:
  """Names that no registry knows: field, value, and the nearest known one.

  Imports the registries, so call it after the user's modules are imported. A
  default is registered; those of algorithms would import JAX.
  """
  problems = []
  kind: Any = type(config)
  for path, field in leaves(kind).items():
    if not field.registry:
      continue
    value = functools.reduce(getattr, path.split("."), config)
    if value == field.default:
      continue
    names = tuple(value) if isinstance(value, (tuple, dict)) else (value,)
    names_of = registry.import_path(field.registry)
    for name in names:
      if not name:
        continue
      try:
        names_of.get(name, "operator")
      except (ValueError, ImportError, TypeError) as error:
        problems.append(f"{path}={name}: {error}")
  return problems


# --- out ----------------------------------------------------------------------


def plain(value: object) -> Any:
  """Lists in place of tuples, dicts in place of other mappings."""
  if isinstance(value, (list, tuple)):
    return [plain(v) for v in value]
  if isinstance(value, collections.abc.Mapping):
    return {k: plain(v) for k, v in value.items()}
  return value


def to_dict(config: Any) -> dict[str, Any]:
  """Nested plain values (tuples as lists), ready for YAML or JSON."""
  return plain(dataclasses.asdict(config))


def value_of(config: object, path: str) -> Any:
  """Returns the plain value of a dotted key, also of one in a mapping."""
  for name in path.split("."):
    config = config[name] if isinstance(config, dict) else getattr(config, name)
  return plain(config)


def changed(config: object) -> dict[str, Any]:
  """Dotted key of each setting that is not its default -> the default, plain.

  A value that a preset or another setting chose counts, too.
  """
  defaults = {}
  cls: Any = type(config)
  for path, field in leaves(cls).items():
    if value_of(config, path) != plain(field.default):
      defaults[path] = plain(field.default)
  return defaults


def to_yaml(config: object) -> str:
  """YAML that reads back as the same values."""
  data = to_dict(config)
  text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=79)
  if yaml.safe_load(text) == data:
    return text
  # PyYAML loses some line separators when it may write Unicode.
  return yaml.safe_dump(data, sort_keys=False, width=79)
