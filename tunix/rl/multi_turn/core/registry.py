"""Registers extensions by name: parsers, tools, rewards, gyms, prompts.

A `Registry` maps a name to an object, or to a path "package.module:Name" that
is imported on first use, so that a registered gym costs nothing until a run
uses it. `Registry.get` decides whose names may be such a path: an operator's
may, those of a request never, and a caller that does not say is a request.
Promises: a name is taken once, but a module that is loaded again
(`%autoreload`) replaces its own entries; an unknown name is refused with the
nearest registered one; a request imports nothing but registered entries.

Does not: construct entries, or scan packages.
"""

from __future__ import annotations

import collections.abc
import difflib
import importlib
import traceback
from typing import (
  Any,
  Callable,
  cast,
  Generic,
  Iterable,
  Iterator,
  Literal,
  Sequence,
  TypeVar,
)

T = TypeVar("T")
_OURS = ("tunix.rl.multi_turn", "tunix.rl.queue")
_MOST_LISTED = 40

Source = Literal["operator", "request"]
"""Who chose a name. "operator": the command line, a file that it names, or the
program itself. "request": anyone else, such as a client of a server or the
author of a file of tasks."""


_CUTOFF = 0.6
"""Least similarity of a hint; of three letters, the first is equal too."""


def nearest(word: object, names: Iterable[str]) -> str:
  """Returns the name whose spelling is closest to `word`, or ""."""
  lower = {name.lower(): name for name in names}
  text = str(word).lower()
  like = [n for n in lower if len(text) != 3 or n[:1] == text[:1]]
  if matches := difflib.get_close_matches(text, like, cutoff=_CUTOFF):
    # Letters that changed places are the likelier slip.
    return lower[max(matches, key=lambda n: sorted(n) == sorted(text))]
  # A name may be a part of a longer one: `calc`, `qwen2_5_vl`.
  longer = [name for name in lower if len(text) > 2 and text in name]
  return lower[min(longer, key=len)] if longer else ""


def did_you_mean(word: object, names: Iterable[str]) -> str:
  """Returns `; did you mean 'x'?` with the `nearest` name, or ""."""
  near = nearest(word, names)
  return f"; did you mean {near!r}?" if near else ""


def unknown_name(kind: str, name: object, names: Iterable[str]) -> str:
  """Returns the message for a name that is not among `names`."""
  names = sorted(names)
  if str(name).endswith(".py"):
    module = str(name).removesuffix(".py").strip("./").replace("/", ".")
    return (
      f"unknown {kind} {name!r}; one of your own is module:name, here"
      f" {module}:NAME"
    )
  if not names:
    return f"unknown {kind} {name!r}; none is registered"
  hint = did_you_mean(name, names)
  opening = f"{hint} Known" if hint else "; known"
  return f"unknown {kind} {name!r}{opening}: {listed(names)}"


def listed(names: Sequence[str]) -> str:
  """Joins names in one line; of many, only the first and their count."""
  more = len(names) - _MOST_LISTED
  if more <= 0:
    return ", ".join(names)
  return f"{', '.join(names[:_MOST_LISTED])} and {more} more"


def import_module(name: str) -> Any:
  """Imports a module of a user's.

  Raises:
    ValueError: not a module's name.
    ImportError: no such module, or it raised or exited while it was imported;
      the message names the file and line.
  """
  if not all(part.isidentifier() for part in name.split(".")):
    raise ValueError(f"{name!r} is not the name of a module")
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as error:
    missing = error.name or ""
    if missing.startswith("tunix.") and not missing.startswith(_OURS):
      raise ImportError(
        f"{error}; google-tunix has it: pip install"
        " 'tunix-multi-turn[google-tunix]'"
      ) from error
    raise
  except ImportError:
    raise
  except (Exception, SystemExit) as error:  # pylint: disable=broad-except
    # The module's own code: it may raise anything, and must not end the
    # command that names it.
    where = _line_of(error)
    raise ImportError(
      f"importing {name!r} raised {type(error).__name__}: {error}"
      + (f" ({where})" if where else "")
    ) from error


def _line_of(error: BaseException) -> str:
  """File and line that an exception comes from."""
  if isinstance(error, SyntaxError):
    return ""  # Its text names them.
  frames = traceback.extract_tb(error.__traceback__)
  return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def import_path(path: str) -> Any:
  """Imports "package.module:attribute".

  Raises:
    ValueError: not of that form.
    ImportError: no such module or attribute, or as `import_module`.
  """
  module, separator, attribute = path.partition(":")
  if not separator or not module or not attribute:
    raise ValueError(f"expected 'package.module:attribute', got {path!r}")
  value = import_module(module)
  for part in attribute.split("."):
    try:
      value = getattr(value, part)
    except AttributeError as error:
      raise ImportError(f"module {module!r} has no {attribute!r}") from error
  return value


def import_function(path: str) -> Callable[..., Any]:
  """Imports a callable by "package.module.function" or "package.module:name".

  Raises:
    ValueError: not of that form, or no callable.
    ImportError: nothing at that path.
  """
  dotted = path
  if ":" not in path:
    module, _, name = path.rpartition(".")
    dotted = f"{module}:{name}"
  value = import_path(dotted)
  if not callable(value):
    raise ValueError(f"{path} is a {type(value).__name__}, no function")
  return cast(Callable[..., Any], value)


def lazy_attributes(package: str, **modules: str) -> Callable[[str], Any]:
  """A package's `__getattr__` that imports public names on first use.

  Args:
    package: its `__name__`.
    **modules: submodule -> the names in it, separated by spaces.
  """
  where = {
    name: module for module, names in modules.items() for name in names.split()
  }

  def find(name: str) -> Any:
    if name not in where:
      raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{package}.{where[name]}"), name)

  return find


def _same_definition(old: object, new: object) -> bool:
  """Whether both are one definition, of a module that was loaded again."""
  names = [
    (getattr(e, "__module__", ""), getattr(e, "__qualname__", ""))
    for e in (old, new)
  ]
  module, name = names[0]
  return names[0] == names[1] and bool(module and name) and "<" not in name


class Registry(Generic[T]):
  """Name -> object. `kind` is what error messages call an entry."""

  def __init__(
    self,
    kind: str,
    *,
    paths: bool = True,
    group: str = "",
    absent: Callable[[str], str] | None = None,
  ):
    """Makes an empty registry.

    Args:
      kind: Noun for error messages.
      paths: Whether str entries are paths to import; otherwise they are values.
      group: Group of entry points of installed packages, which are entries as
        well. They are looked up once, when a name is not registered yet or
        names are listed.
      absent: Returns which package has an unknown name, for the message; ""
        for none.
    """
    self.kind = kind
    self._paths = paths
    self._group = group
    self._absent = absent
    self._entries: dict[str, T | str] = {}

  def register(
    self, name: str, value: T | str | None = None, *, replace: bool = False
  ) -> Callable[[T], T]:
    """Adds `value` under `name`; without a value, returns a decorator.

    Args:
      name: non-empty.
      value: the object, or a dotted path "package.module:Name" imported on
        first use.
      replace: allow taking over an existing name.

    Raises:
      ValueError: the name is taken by another definition, or empty.
    """
    if not isinstance(name, str) or not name:
      raise ValueError(
        f"the name of a {self.kind} must be a non-empty str, got {name!r}"
      )

    def add(entry: Any) -> Any:
      is_taken = not replace and name in self
      if is_taken and not _same_definition(self._entries[name], entry):
        raise ValueError(
          f"{self.kind} {name!r} is already registered; choose another name,"
          " unregister it, or pass replace=True"
        )
      self._entries[name] = entry
      return entry

    if value is not None:
      add(value)
    return add

  def unregister(self, name: str) -> bool:
    """Removes `name`; False when it was not there."""
    return self._entries.pop(name, None) is not None

  def get(self, name: str, source: Source = "request") -> T:
    """Returns the entry, or the object at an operator's path.

    Args:
      name: Registered name, or of an operator "package.module:Name".
      source: Who chose the name.

    Raises:
      ValueError: no such name, the message gives the nearest one; or a path
        that a request names.
      ImportError: nothing at that path.
    """
    is_path = self._paths and isinstance(name, str) and ":" in name
    if is_path and name not in self:
      if source == "operator":
        return import_path(name)
      raise ValueError(
        f"{self.kind} {name!r} is a path to code, which only the operator's"
        " command line and files may name; choose a registered name:"
        f" {', '.join(self.names())}"
      )
    if not isinstance(name, str) or name not in self:
      package = self._absent(str(name)) if self._absent else ""
      raise ValueError(package or unknown_name(self.kind, name, self._entries))
    value = self._entries[name]
    if self._paths and isinstance(value, str):
      value = self._entries[name] = import_path(value)
    return cast(T, value)

  def names(self) -> tuple[str, ...]:
    self._add_installed()
    return tuple(sorted(self._entries))

  def __contains__(self, name: object) -> bool:
    if name not in self._entries:
      self._add_installed()
    return name in self._entries

  def _add_installed(self) -> None:
    """Adds the entry points of `group`; registered names win."""
    if not self._group:
      return
    from importlib import metadata  # pylint: disable=g-import-not-at-top

    for point in metadata.entry_points(group=self._group):
      self._entries.setdefault(point.name, f"{point.module}:{point.attr}")
    self._group = ""

  def __iter__(self) -> Iterator[str]:
    return iter(self.names())


class RegistryView(collections.abc.MutableMapping[str, T]):
  """A registry as a dict: writing replaces, reading imports what is a path."""

  def __init__(self, registry: Registry[T]):
    self._registry = registry

  def __getitem__(self, name: str) -> T:
    if name not in self._registry:
      raise KeyError(name)
    return self._registry.get(name)

  def __setitem__(self, name: str, value: T) -> None:
    self._registry.register(name, value, replace=True)

  def __delitem__(self, name: str) -> None:
    if not self._registry.unregister(name):
      raise KeyError(name)

  def __iter__(self) -> Iterator[str]:
    return iter(self._registry)

  def __len__(self) -> int:
    return len(self._registry.names())
