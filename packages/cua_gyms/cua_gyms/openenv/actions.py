"""Converts GUI actions to actions of OpenEnv environments.

A grammar is a function `GuiAction -> data of a step`. It returns a str, shown
to the policy, for an action the environment lacks, and None to send nothing.
"""

from __future__ import annotations

from typing import Any, Callable

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import registry

Kind = gui_action.GuiActionKind
Grammar = Callable[[gui_action.GuiAction], "dict[str, Any] | str | None"]

# Names of keys that differ between our vocabulary and the browser's.
_KEYS = {
    "ctrl": "Control", "alt": "Alt", "shift": "Shift", "meta": "Meta",
    "cmd": "Meta", "win": "Meta", "super": "Meta", "enter": "Enter",
    "return": "Enter", "esc": "Escape", "escape": "Escape", "tab": "Tab",
    "space": "Space", "backspace": "Backspace", "delete": "Delete",
    "insert": "Insert", "home": "Home", "end": "End", "pageup": "PageUp",
    "pagedown": "PageDown", "up": "ArrowUp", "down": "ArrowDown",
    "left": "ArrowLeft", "right": "ArrowRight",
    **{f"f{i}": f"F{i}" for i in range(1, 13)},
}  # fmt: skip


def gui(action: gui_action.GuiAction) -> dict[str, Any]:
  """GuiAction's JSON, in pixels, for this package's servers."""
  return action.to_json()


def browsergym(action: gui_action.GuiAction) -> dict[str, Any] | str | None:
  """BrowserGym's coordinate actions, as OpenEnv's browsergym_env takes them.

  Texts are written as Python literals, so that typed text stays text.
  """
  kind = action.kind
  if kind is Kind.SCREENSHOT:
    return _call("noop")
  if kind is Kind.CLICK:
    name = "mouse_dblclick" if action.count == 2 else "mouse_click"
    if action.count == 3 or action.keys:
      return "Error: the browser takes no triple clicks and no keys with them"
    return _call(name, action.x, action.y, action.button)
  if kind is Kind.MOVE:
    return _call("mouse_move", action.x, action.y)
  if kind is Kind.DRAG or kind is Kind.SWIPE:
    if action.x is None:
      return "Error: a drag needs its start, x and y"
    return _call(
      "mouse_drag_and_drop", action.x, action.y, action.x2, action.y2
    )
  if kind is Kind.SCROLL:
    if action.x is None:
      return _call("scroll", action.dx, action.dy)
    return _call("scroll_at", action.x, action.y, action.dx, action.dy)
  if kind is Kind.TYPE:
    return _call("keyboard_type", action.text)
  if kind is Kind.KEY:
    return _call(
      "keyboard_press", "+".join(_KEYS.get(k, k) for k in action.keys)
    )
  if kind is Kind.WAIT:
    return _call("noop", int(1000 * (action.duration or 1.0)))
  if kind is Kind.SYSTEM_BUTTON and action.text == "enter":
    return _call("keyboard_press", "Enter")
  if kind is Kind.SYSTEM_BUTTON and action.text == "back":
    return _call("go_back")
  if kind is Kind.ANSWER:
    return _call("send_msg_to_user", action.text)
  if kind is Kind.TERMINATE:
    if action.success is False:
      return _call("report_infeasible", "The task cannot be done.")
    return None
  return f"Error: the browser has no action {kind.value!r}"


def _call(name: str, *args: Any) -> dict[str, Any]:
  return {"action_str": f"{name}({', '.join(map(repr, args))})"}


GRAMMARS: registry.Registry[Grammar] = registry.Registry("OpenEnv grammar")
GRAMMARS.register("gui", gui)
GRAMMARS.register("browsergym", browsergym)


def get(grammar: Any) -> Grammar:
  """Returns the function of that name or path, or the function itself.

  Raises:
    ValueError: there is none.
  """
  if callable(grammar):
    return grammar
  try:
    return GRAMMARS.get(grammar, "operator")
  except ImportError as error:
    raise ValueError(f"actions={grammar}: {error}") from None
  except ValueError as error:
    raise ValueError(f"actions: {error}; or package.module:function") from None
