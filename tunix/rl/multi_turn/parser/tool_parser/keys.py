"""Normalises key names of every dialect.

Models write keys as "ctrl+c", "ctrl c", "ctrl-c", ["ctrl", "c"], by X names
("Return", "Control_L", "Page_Down"), by DOM names ("ArrowLeft") or by
pyautogui's ("pgdn"). The one vocabulary: lower case; a single character for a
printing key; otherwise one of `NAMED_KEYS`.
"""

from __future__ import annotations

import re
from typing import Any, Iterable

from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.parser.tool_parser import base

_ALIASES = {
  "ctrl": "control controll controlr ctrll ctrlr ctl",
  "shift": "shiftl shiftr",
  "alt": "altl altr option optionl optionr isolevel3shift altgr",
  "meta": (
    "metal metar cmd command super superl superr win winl winr windows os"
  ),
  "enter": "return kpenter cr newline",
  "escape": "esc",
  "backspace": "back bksp bs",
  "delete": "del kpdelete",
  "insert": "ins kpinsert",
  "tab": "isolefttab kptab",
  "space": "spacebar kpspace",
  "up": "arrowup kpup uparrow",
  "down": "arrowdown kpdown downarrow",
  "left": "arrowleft kpleft leftarrow",
  "right": "arrowright kpright rightarrow",
  "home": "kphome",
  "end": "kpend",
  "pageup": "pgup prior kpprior kppageup",
  "pagedown": "pgdn pgdown next kpnext kppagedown",
  "capslock": "caps",
  "numlock": "",
  "scrolllock": "",
  "printscreen": "print prtsc prtscr prntscrn sysrq",
  "pause": "break",
  "menu": "contextmenu apps",
  "browserback": "xf86back",
  "browserforward": "xf86forward",
}
_CHARACTERS = {
  "plus": "+",
  "minus": "-",
  "hyphen": "-",
  "equal": "=",
  "equals": "=",
  "comma": ",",
  "period": ".",
  "dot": ".",
  "slash": "/",
  "backslash": "\\",
  "semicolon": ";",
  "colon": ":",
  "apostrophe": "'",
  "quotedbl": '"',
  "quoteright": "'",
  "quoteleft": "`",
  "grave": "`",
  "bracketleft": "[",
  "bracketright": "]",
  "braceleft": "{",
  "braceright": "}",
  "parenleft": "(",
  "parenright": ")",
  "underscore": "_",
  "asterisk": "*",
  "exclam": "!",
  "at": "@",
  "numbersign": "#",
  "dollar": "$",
  "percent": "%",
  "asciicircum": "^",
  "ampersand": "&",
  "question": "?",
  "less": "<",
  "greater": ">",
  "bar": "|",
  "asciitilde": "~",
  "kpadd": "+",
  "kpsubtract": "-",
  "kpmultiply": "*",
  "kpdivide": "/",
  "kpdecimal": ".",
  **{f"kp{i}": str(i) for i in range(10)},
  **{f"numpad{i}": str(i) for i in range(10)},
  **{f"num{i}": str(i) for i in range(10)},
  **{f"digit{i}": str(i) for i in range(10)},
  **{f"key{c}": c for c in "abcdefghijklmnopqrstuvwxyz"},
}
NAMED_KEYS = frozenset(_ALIASES) | {f"f{i}" for i in range(1, 25)}
MODIFIERS = frozenset(("ctrl", "shift", "alt", "meta"))
_NAMES: dict[str, str] = {name: name for name in NAMED_KEYS}
_NAMES.update(_CHARACTERS)
for _name, _aliases in _ALIASES.items():
  _NAMES.update({alias: _name for alias in _aliases.split()})

_DROP = re.compile(r"[\s_]+")
_MAX_KEYS = 8
_MAX_CHARACTERS = 128


def normalize_keys(keys: object) -> tuple[str, ...]:
  """Returns the keys of one chord, in the order given.

  Args:
    keys: a str in any dialect, or a list of such.

  Raises:
    GuiActionError: not a str or list of str, empty, more than 8 keys, a str of
      more than 128 characters, or an unknown key; the message names the
      nearest known one.
  """
  if isinstance(keys, str):
    items: Iterable[Any] = (keys,)
  elif isinstance(keys, (list, tuple)):
    items = keys
  else:
    raise base.GuiActionError(
      f"keys must be a string or a list of strings, got {type(keys).__name__}"
    )
  names: list[str] = []
  for item in items:
    if isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= 9:
      item = str(item)
    if not isinstance(item, str):
      raise base.GuiActionError(
        f"a key must be a string, got {type(item).__name__}"
      )
    if len(item) > _MAX_CHARACTERS:
      raise base.GuiActionError(
        f"keys are written in at most {_MAX_CHARACTERS} characters, got"
        f" {len(item)}; use the type action for text"
      )
    names.extend(_split(item))
    if len(names) > _MAX_KEYS:
      raise base.GuiActionError(
        f"a chord has at most {_MAX_KEYS} keys; use the type action for text"
      )
  if not names:
    raise base.GuiActionError("keys must name at least one key")
  return tuple(names)


def key_name(text: str) -> str | None:
  """Returns the key that the whole text names in any dialect, or None."""
  if len(text) == 1:
    return "space" if text.isspace() else text.lower()
  return _NAMES.get(_DROP.sub("", text.lower()))


def _split(text: str) -> list[str]:
  key = key_name(text)
  if key is not None:
    return [key]
  text = text.strip()
  if (key := key_name(text)) is not None:
    return [key]
  if "+" in text:
    # In "ctrl++" the last plus is a key.
    ends_in_plus = text.endswith("+") and text[:-1].rstrip().endswith("+")
    parts = [part for part in text.split("+") if part.strip()]
    if ends_in_plus:
      parts.append("+")
    if len(parts) > 1:
      return [key for part in parts for key in _split(part)]
  words = text.split()
  if len(words) > 1 and len(words) <= _MAX_KEYS:
    return [key for word in words for key in _split(word)]
  if "-" in text.strip("-"):
    head, _, tail = text.partition("-")
    modifier = key_name(head)
    if modifier is not None and modifier in MODIFIERS and tail:
      return [modifier, *_split(tail)]
    if (key := key_name(text.replace("-", ""))) is not None:
      return [key]
  raise base.GuiActionError(registry.unknown_name("key", text[:40], NAMED_KEYS))
