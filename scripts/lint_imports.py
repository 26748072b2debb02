"""Checks the floors of the package: `lint-imports` on this clone alone.

google-tunix owns the package `tunix`, which hides this clone's rooms from
import-linter. Here `tunix` and `tunix.rl` are namespaces with nothing but the
clone in them, so nothing of google-tunix is imported.
"""

import importlib.abc
import importlib.machinery
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


class _CloneOnly(importlib.abc.MetaPathFinder):
  def find_spec(self, name, path=None, target=None):
    del path, target
    if name not in ("tunix", "tunix.rl", "tunix.rl.queue"):
      return None
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(ROOT.joinpath(*name.split(".")))]
    return spec


if __name__ == "__main__":
  sys.meta_path.insert(0, _CloneOnly())
  from importlinter import cli  # pylint: disable=g-import-not-at-top

  sys.exit(cli.lint_imports(config_filename=str(ROOT / "pyproject.toml")))
