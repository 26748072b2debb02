"""Registers the environments with gymnasium, and imports none of them.

    import gymnasium
    import tunix_multi_turn.envs

    env = gymnasium.make("TunixDesktop/click-button-v0")
    flat = gymnasium.make("TunixDesktopFlat/click-button-v0")
    pages = gymnasium.make("Tunix/miniwob-v0", family="click-test-2")

An id with the module before it needs no second import:
`gymnasium.make("tunix_multi_turn.envs:TunixDesktop/click-button-v0")`.

Gymnasium 1.0 and later load no package by themselves; the entry point of the
group `gymnasium.envs` is for programs that look there.

Promises: importing this module imports gymnasium and nothing else; making one
of the environments imports neither google-tunix nor JAX.
"""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium

import tunix_multi_turn

FAMILIES = (
    "click-button", "click-color", "close-dialog", "enter-text",
    "click-checkboxes", "open-icon", "choose-radio", "choose-option",
    "set-slider", "login-form", "switch-tab",
    "recall-place", "scroll-and-click", "drag-to-target", "right-click-menu",
    "press-key", "answer-question",
)  # fmt: skip
"""The desktop's task families; a test compares them with the gym's own."""

GYMS = ("miniwob", "browser", "xdesktop")
"""The other gyms that make tasks without a server: `Tunix/<gym>-v0`."""

_GYMS = "tunix.rl.multi_turn.environments.gyms"
_DESKTOP = f"{_GYMS}.desktop"
_FOUND = {
  "DesktopEnv": f"{_DESKTOP}.env",
  "FlatDesktop": f"{_DESKTOP}.flat",
  "make_flat": f"{_DESKTOP}.flat",
  "GymEnv": f"{_GYMS}.gym_env",
}
_NAMESPACES = {"TunixDesktop": "DesktopEnv", "TunixDesktopFlat": "make_flat"}


def __getattr__(name: str) -> Any:
  """Imports what an id stands for, once it is made."""
  if name not in _FOUND:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  tunix_multi_turn.light()
  return getattr(importlib.import_module(_FOUND[name]), name)


def register() -> None:
  """Makes every id known to gymnasium; safe to call again."""
  ids = {
    f"{namespace}/{family}-v0": (attribute, {"family": family})
    for namespace, attribute in _NAMESPACES.items()
    for family in FAMILIES
  }
  ids |= {f"Tunix/{gym}-v0": ("GymEnv", {"gym": gym}) for gym in GYMS}
  for env_id, (attribute, kwargs) in ids.items():
    if env_id not in gymnasium.registry:
      gymnasium.register(
        env_id, entry_point=f"{__name__}:{attribute}", kwargs=kwargs
      )


register()
