"""Test session: runs on CPU, finds the package also when not installed."""

import os
import pathlib

_HERE = pathlib.Path(__file__).resolve().parent

# Before anything imports JAX. An explicit choice of the caller wins.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests and the processes they start compile many equal programs.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(_HERE / ".pytest_cache" / "jax"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
os.environ.setdefault("MPLBACKEND", "Agg")


def _extend_tunix() -> None:
  """Makes `tunix.rl.multi_turn` of this clone importable uninstalled."""
  import tunix.rl  # pylint: disable=g-import-not-at-top

  ours = str(_HERE / "tunix" / "rl")
  if ours not in tunix.rl.__path__:
    tunix.rl.__path__.append(ours)


_extend_tunix()


def pytest_collection_modifyitems(items) -> None:
  """Files with slow tests come first: begun last, one would run alone."""
  slow = {item.path for item in items if item.get_closest_marker("slow")}
  items.sort(key=lambda item: item.path not in slow)
