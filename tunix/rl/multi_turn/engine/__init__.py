"""Samples completions of the policy in the process, for many episodes at once.

`EngineConfig` loads no JAX. `RolloutEngine` does, on first use.
"""

import importlib

_HOMES = {
  "EngineConfig": "config",
  "EngineError": "engine",
  "RolloutEngine": "engine",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
  if name in _HOMES:
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
