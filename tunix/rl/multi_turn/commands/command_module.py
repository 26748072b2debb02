"""The modules `train` and `evaluate`: commands, and calls of the Python API.

Importing a submodule binds its name in the package, so `mt.train` is the module
and `mt.train(...)` the call. `deferred` makes the module of the first use: a
call refuses a wrong setting before the seconds that JAX takes, and any
attribute imports the rest.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import types
from typing import Any

_API = {"train": "api.training", "evaluate": "api.evaluating"}
_LOADING = threading.RLock()
_RUNNING: set[str] = set()


class CommandModule(types.ModuleType):
  """A command's module; a call of it is that of the Python API."""

  def __call__(self, *args: Any, **settings: Any) -> Any:
    package, _, name = self.__name__.rpartition(".")
    api = importlib.import_module(f"{package}.{_API[name]}")
    return getattr(api, name)(*args, **settings)


class _Deferred(CommandModule):
  """A command's module before the end of its code, which sets the class."""

  def __getattr__(self, name: str) -> Any:
    with _LOADING:
      # The import system asks for names that begin so; the code has none.
      if not name.startswith("__") and self.__name__ not in _RUNNING:
        _RUNNING.add(self.__name__)
        try:
          self.__spec__.loader.exec_module(self)  # type: ignore[union-attr]
        finally:
          _RUNNING.remove(self.__name__)
    if name not in self.__dict__:
      raise AttributeError(f"module {self.__name__!r} has no {name!r}")
    return self.__dict__[name]


def deferred(name: str) -> types.ModuleType:
  """Returns the module of a full name, which runs at its first attribute."""
  with _LOADING:
    if name not in sys.modules:
      spec = importlib.util.find_spec(name)
      assert spec is not None and spec.loader is not None
      module = importlib.util.module_from_spec(spec)
      code = spec.loader.get_code(name)  # type: ignore[attr-defined]
      module.__doc__ = code.co_consts[0]
      module.__class__ = _Deferred
      sys.modules[name] = module
    return sys.modules[name]
