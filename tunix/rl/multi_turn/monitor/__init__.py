"""The package `training_monitor` by the names of its former room.

`tunix.rl.multi_turn.monitor.client.ingest_client` is the same object as the
module `training_monitor.client.ingest_client`, and so is every other module.
Nothing is imported in advance; without the package the imports raise
ImportError.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from typing import Any

PACKAGE = "training_monitor"


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
    return importlib.machinery.ModuleSpec(fullname, self)

  def create_module(self, spec):
    module = importlib.import_module(PACKAGE + spec.name[len(__name__) :])
    self._specs[spec.name] = module.__spec__
    return module

  def exec_module(self, module):
    # The import system has set the other name's.
    module.__spec__ = self._specs.pop(module.__spec__.name)


sys.meta_path.insert(0, _SameModules())
