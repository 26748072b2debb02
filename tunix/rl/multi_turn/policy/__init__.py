"""Vision-language and text policies in flax nnx, imported lazily.

Naming one of `__all__` imports JAX; `policy.policy_settings` does not.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
  "PatchedImage": "base",
  "Policy": "base",
  "PolicyInputs": "base",
  "Processor": "base",
  "create_policy": "checkpoints.checkpoint",
  "load_policy": "checkpoints.checkpoint",
  "load_tokenizer": "checkpoints.checkpoint",
  "save_policy": "checkpoints.checkpoint",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
  if name not in _HOMES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
  return getattr(module, name)
