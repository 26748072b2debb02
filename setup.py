"""Lets the extras of a clone require the packages that lie in it.

`tunix-training-monitor` is then `packages/training_monitor` of this clone, so
that `pip install -e '.[monitor]'` needs no index that has it. A source
distribution holds PKG-INFO and keeps the names.
"""

import pathlib
import tomllib

import setuptools

ROOT = pathlib.Path(__file__).resolve().parent


class Distribution(setuptools.Distribution):
  """Reads pyproject.toml, and then puts addresses in the place of names."""

  def parse_config_files(self, *args, **kwargs):
    super().parse_config_files(*args, **kwargs)
    if (ROOT / "PKG-INFO").exists():
      return
    addresses = {}
    for path in ROOT.glob("packages/*/pyproject.toml"):
      name = tomllib.loads(path.read_text())["project"]["name"]
      addresses[name] = f"{name} @ {path.parent.as_uri()}"
    self.extras_require = self.metadata.extras_require = {
        extra: [addresses.get(one, one) for one in requirements]
        for extra, requirements in self.extras_require.items()
    }


if __name__ == "__main__":
  setuptools.setup(distclass=Distribution)
