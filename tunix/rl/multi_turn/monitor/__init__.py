"""The package `training_monitor` by the names of its former room.

`tunix.rl.multi_turn.monitor.client.ingest_client` is the same object as the
module `training_monitor.client.ingest_client`, and so is every other module;
`settings` is `training_monitor.core.monitor_settings`.
Nothing is imported in advance; without the package the imports raise
ImportError.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from typing import Any

PACKAGE = "training_monitor"
_MOVED = {"settings": "core.monitor_settings"}


class _SameModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Imports modules below this one from the package."""

  def __init__(self) -> None:
    self._specs: dict[str, Any] = {}
    """Specs that the modules have by their own names."""

  def find_spec(self, fullname, path=None, target=None):
    del path, target
    below = fullname.removeprefix(f"{__name__}.")
    if below == fullname or below == "__main__":
      return None
    spec = importlib.util.find_spec(_own_name(fullname))
    if spec is None:
      return None
    return importlib.machinery.ModuleSpec(
        fullname, self, is_package=spec.submodule_search_locations is not None
    )

  def get_code(self, fullname):
    """Returns the module's code, for `python -m`."""
    name = _own_name(fullname)
    return importlib.util.find_spec(name).loader.get_code(name)

  def create_module(self, spec):
    module = importlib.import_module(_own_name(spec.name))
    self._specs[spec.name] = module.__spec__
    return module

  def exec_module(self, module):
    # The import system has set the other name's.
    module.__spec__ = self._specs.pop(module.__spec__.name)


def _own_name(fullname: str) -> str:
  """Returns the name that a module has in the package."""
  below = fullname.removeprefix(f"{__name__}.")
  return f"{PACKAGE}.{_MOVED.get(below, below)}"


if not any(type(finder).__module__ == __name__ for finder in sys.meta_path):
  sys.meta_path.insert(0, _SameModules())
