"""Translates key names of `GuiAction` into DevTools key events.

A US keyboard: `key_events` presses keys together (the last released first) and
`text_events` types text as a person would, so that pages which listen to
key events see them. Returns parameters for `Input.dispatchKeyEvent` and
`Input.insertText`; sends nothing.
"""

from __future__ import annotations

import re
from typing import Any

from tunix.rl.multi_turn.parser.tool_parser import keys as key_names

# Above this many characters the lines of a text are inserted at once, as a
# paste would.
MAX_TYPED = 200

MODIFIERS = {"alt": 1, "ctrl": 2, "meta": 4, "shift": 8}

# name -> (key, code, Windows virtual key code, text)
_NAMED: dict[str, tuple[str, str, int, str]] = {
  "alt": ("Alt", "AltLeft", 18, ""),
  "ctrl": ("Control", "ControlLeft", 17, ""),
  "meta": ("Meta", "MetaLeft", 91, ""),
  "shift": ("Shift", "ShiftLeft", 16, ""),
  "enter": ("Enter", "Enter", 13, "\r"),
  "tab": ("Tab", "Tab", 9, ""),
  "space": (" ", "Space", 32, " "),
  "backspace": ("Backspace", "Backspace", 8, ""),
  "delete": ("Delete", "Delete", 46, ""),
  "insert": ("Insert", "Insert", 45, ""),
  "escape": ("Escape", "Escape", 27, ""),
  "home": ("Home", "Home", 36, ""),
  "end": ("End", "End", 35, ""),
  "pageup": ("PageUp", "PageUp", 33, ""),
  "pagedown": ("PageDown", "PageDown", 34, ""),
  "left": ("ArrowLeft", "ArrowLeft", 37, ""),
  "up": ("ArrowUp", "ArrowUp", 38, ""),
  "right": ("ArrowRight", "ArrowRight", 39, ""),
  "down": ("ArrowDown", "ArrowDown", 40, ""),
  "capslock": ("CapsLock", "CapsLock", 20, ""),
  "menu": ("ContextMenu", "ContextMenu", 93, ""),
} | {f"f{n}": (f"F{n}", f"F{n}", 111 + n, "") for n in range(1, 13)}

# Unshifted and shifted character of each other key.
_SYMBOL_KEYS = (
    ("Backquote", 192, "`~"), ("Minus", 189, "-_"), ("Equal", 187, "=+"),
    ("BracketLeft", 219, "[{"), ("BracketRight", 221, "]}"),
    ("Backslash", 220, "\\|"), ("Semicolon", 186, ";:"),
    ("Quote", 222, "'\""), ("Comma", 188, ",<"), ("Period", 190, ".>"),
    ("Slash", 191, "/?"), ("Digit1", 49, "1!"), ("Digit2", 50, "2@"),
    ("Digit3", 51, "3#"), ("Digit4", 52, "4$"), ("Digit5", 53, "5%"),
    ("Digit6", 54, "6^"), ("Digit7", 55, "7&"), ("Digit8", 56, "8*"),
    ("Digit9", 57, "9("), ("Digit0", 48, "0)"),
)  # fmt: skip
# character -> (code, Windows virtual key code, needs shift, other character)
_CHARACTERS: dict[str, tuple[str, int, bool, str]] = {
  " ": ("Space", 32, False, " ")
}
for _code, _vk, _both in _SYMBOL_KEYS:
  _plain, _shifted = _both[0], _both[1]
  _CHARACTERS[_plain] = (_code, _vk, False, _shifted)
  _CHARACTERS[_shifted] = (_code, _vk, True, _plain)
for _letter in "abcdefghijklmnopqrstuvwxyz":
  _upper = _letter.upper()
  _CHARACTERS[_letter] = (f"Key{_upper}", ord(_upper), False, _upper)
  _CHARACTERS[_upper] = (f"Key{_upper}", ord(_upper), True, _letter)

Command = tuple[str, dict[str, Any]]
"""A DevTools method and its parameters."""


class UnknownKey(ValueError):
  """A key name that this keyboard does not have."""


def normalise(name: str) -> str:
  """Returns the name of a key: a single character or one of the named keys.

  Raises:
    UnknownKey: naming it.
  """
  if len(name) == 1 and name in _CHARACTERS:
    return "space" if name == " " else name
  key = key_names.key_name(name.strip())
  if key in _NAMED or key in _CHARACTERS:
    return key
  raise UnknownKey(f"there is no key {name!r}")


def modifier_bits(names: tuple[str, ...]) -> int:
  """Bit set of the modifier keys held during a click.

  Raises:
    UnknownKey: a key is not a modifier.
  """
  bits = 0
  for name in names:
    key = normalise(name)
    if key not in MODIFIERS:
      raise UnknownKey(f"{name!r} cannot be held during a click")
    bits |= MODIFIERS[key]
  return bits


def key_events(names: tuple[str, ...]) -> tuple[list[Command], list[Command]]:
  """Commands that press the keys together, and those that release them.

  Raises:
    UnknownKey: a name is not known.
  """
  keys = [normalise(name) for name in names]
  modifiers = 0
  down: list[Command] = []
  up: list[Command] = []
  for key in keys:
    modifiers |= MODIFIERS.get(key, 0)
    down.append(_event(key, modifiers, True))
  for key in reversed(keys):
    modifiers &= ~MODIFIERS.get(key, 0)
    up.append(_event(key, modifiers, False))
  return down, up


def text_events(text: str) -> list[Command]:
  """Commands that type `text`; new lines are Enter, tabs are Tab.

  Text between these is inserted at once if `text` is longer than `MAX_TYPED`.
  """
  text = text.replace("\r\n", "\n").replace("\r", "\n")
  pieces = list(text)
  if len(text) > MAX_TYPED:
    pieces = [piece for piece in re.split(r"([\n\t])", text) if piece]
  commands: list[Command] = []
  for piece in pieces:
    name = {"\n": "enter", "\t": "tab", " ": "space"}.get(piece, piece)
    if len(piece) == 1 and (name in _NAMED or name in _CHARACTERS):
      shift = name in _CHARACTERS and _CHARACTERS[name][2]
      modifiers = MODIFIERS["shift"] if shift else 0
      commands += [_event(name, modifiers, down) for down in (True, False)]
    else:  # No key makes it: an input method would insert it.
      commands.append(("Input.insertText", {"text": piece}))
  return commands


def _event(key: str, modifiers: int, pressed: bool) -> Command:
  if key in _NAMED:
    name, code, number, text = _NAMED[key]
  else:
    code, number, shifted, other = _CHARACTERS[key]
    # With Shift held, the key gives its upper character.
    shift_held = bool(modifiers & MODIFIERS["shift"])
    name = key if shift_held == shifted or shifted else other
    text = name
  if modifiers & ~MODIFIERS["shift"]:
    text = ""  # A shortcut, not input.
  params: dict[str, Any] = {
    "key": name,
    "code": code,
    "windowsVirtualKeyCode": number,
    "modifiers": modifiers,
  }
  if not pressed:
    params["type"] = "keyUp"
  elif text:
    params |= {"type": "keyDown", "text": text, "unmodifiedText": text}
  else:
    params["type"] = "rawKeyDown"
  return "Input.dispatchKeyEvent", params
