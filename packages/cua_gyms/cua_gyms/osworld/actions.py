"""Converts GUI actions to the pyautogui code that OSWorld's machines run.

Arguments of an action enter the code as literals only: numbers that were
rounded, strings by `repr`, names of keys from a fixed list. So a policy
chooses arguments and never code.
"""

from __future__ import annotations

import string

from tunix.rl.multi_turn.core import gui_action

Kind = gui_action.GuiActionKind
PREFIX = "import pyautogui; import time; pyautogui.FAILSAFE = False; "
"""As OSWorld's own controller begins every command."""

_SAME = (
    "alt", "ctrl", "shift", "enter", "tab", "space", "backspace", "delete",
    "insert", "esc", "home", "end", "pageup", "pagedown", "up", "down", "left",
    "right", "capslock", "numlock", "printscreen", "pause",
    *(f"f{i}" for i in range(1, 13)),
)  # fmt: skip
_NAMES = {
    **{k: k for k in _SAME},
    "control": "ctrl", "escape": "esc", "return": "enter", "del": "delete",
    "meta": "win", "super": "win", "win": "win", "cmd": "win", "command": "win",
    "option": "alt", "page_up": "pageup", "page_down": "pagedown",
    "menu": "apps",
}  # fmt: skip
_TYPED = frozenset(string.printable) - frozenset("\x0b\x0c")
_LONGEST_S = 30.0


def code(action: gui_action.GuiAction, scroll_px: float) -> str | None:
  """pyautogui statements, without `PREFIX`; None when there is none to run.

  Args:
    action: GUI action in pixels of the machine's screen.
    scroll_px: Pixels that one notch of the wheel stands for.

  Raises:
    ValueError: this machine has no such action; the text has the reason.
  """
  kind = action.kind
  at = "" if action.x is None else f"x={_int(action.x)}, y={_int(action.y)}"
  if kind in (Kind.CLICK, Kind.DRAG) and (
    action.button not in ("left", "middle", "right")
  ):
    raise ValueError(f"this machine has no mouse button {action.button!r}")
  if kind is Kind.CLICK:
    click = (
      f"pyautogui.click({at}, clicks={action.count}, interval=0.05,"
      f" button={action.button!r})"
    )
    keys = [repr(_key(k)) for k in action.keys]
    return "; ".join(
      [
        *(f"pyautogui.keyDown({k})" for k in keys),
        click,
        *(f"pyautogui.keyUp({k})" for k in reversed(keys)),
      ]
    )
  if kind is Kind.MOVE:
    return f"pyautogui.moveTo({at})"
  if kind in (Kind.DRAG, Kind.SWIPE):
    seconds = min(action.duration or 0.5, _LONGEST_S)
    drag = (
      f"pyautogui.dragTo(x={_int(action.x2)}, y={_int(action.y2)},"
      f" duration={seconds:g}, button={action.button!r})"
    )
    return f"pyautogui.moveTo({at}); {drag}" if at else drag
  if kind is Kind.SCROLL:
    # pyautogui means by > 0 up and right; we mean down and right.
    parts = [f"pyautogui.moveTo({at})"] if at else []
    if action.dy:
      parts.append(f"pyautogui.scroll({-_notches(action.dy, scroll_px)})")
    if action.dx:
      parts.append(f"pyautogui.hscroll({_notches(action.dx, scroll_px)})")
    return "; ".join(parts) or None
  if kind is Kind.TYPE:
    return _typing(action.text or "")
  if kind is Kind.KEY:
    keys = [repr(_key(k)) for k in action.keys]
    if action.duration:
      return "; ".join(
        [
          *(f"pyautogui.keyDown({k})" for k in keys),
          f"time.sleep({min(action.duration, _LONGEST_S):g})",
          *(f"pyautogui.keyUp({k})" for k in reversed(keys)),
        ]
      )
    return f"pyautogui.hotkey({', '.join(keys)})"
  if kind is Kind.LONG_PRESS:
    seconds = min(
      1.0 if action.duration is None else action.duration, _LONGEST_S
    )
    return (
      f"pyautogui.mouseDown({at}); time.sleep({seconds:g});"
      f" pyautogui.mouseUp({at})"
    )
  if kind is Kind.SYSTEM_BUTTON and action.text == "enter":
    return "pyautogui.hotkey('enter')"
  what = f"{kind.value} {action.text!r}" if action.text else kind.value
  raise ValueError(f"this machine has no {what}")


def _int(pixels: float | None) -> int:
  if pixels is None:
    raise ValueError("this action needs pixels")
  return int(round(pixels))


def _notches(pixels: float, scroll_px: float) -> int:
  count = max(1, round(abs(pixels) / scroll_px))
  return count if pixels > 0 else -count


def _key(name: str) -> str:
  lower = name.lower()
  if lower in _NAMES:
    return _NAMES[lower]
  if len(name) == 1 and name in _TYPED and not name.isspace() and name != "<":
    return lower
  raise ValueError(f"this machine has no key {name!r}")


def _typing(text: str) -> str | None:
  strange = sorted(set(text) - _TYPED)
  if strange:
    # pyautogui would leave it out without a word.
    raise ValueError(f"this machine's keyboard has no {strange[0]!r}")
  # pyautogui types ">" for "<" on X11, so that one is pressed.
  parts = []
  for i, part in enumerate(text.split("<")):
    if i:
      parts.append("pyautogui.hotkey('shift', ',')")
    if part:
      parts.append(f"pyautogui.typewrite({part!r}, interval=0.01)")
  return "; ".join(parts) or None
