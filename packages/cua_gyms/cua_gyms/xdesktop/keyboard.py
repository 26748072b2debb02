"""Translates keys into an X server's key codes and modifiers.

A `Keyboard` is made from the server's own mapping. Characters that no key
gives borrow a key that is not used; their sender changes the mapping
first (`Stroke.keysym`). A program looks at the mapping when it comes to a key,
which may be long after: a key gives another character as late as can be.
"""

from __future__ import annotations

import dataclasses
from typing import Sequence

from tunix.rl.multi_turn.parser.tool_parser import keys as key_names

_NAMED = {
    "ctrl": 0xFFE3, "shift": 0xFFE1, "alt": 0xFFE9, "meta": 0xFFEB,
    "enter": 0xFF0D, "escape": 0xFF1B, "backspace": 0xFF08, "tab": 0xFF09,
    "delete": 0xFFFF, "insert": 0xFF63, "space": 0x0020, "home": 0xFF50,
    "left": 0xFF51, "up": 0xFF52, "right": 0xFF53, "down": 0xFF54,
    "pageup": 0xFF55, "pagedown": 0xFF56, "end": 0xFF57, "capslock": 0xFFE5,
    "numlock": 0xFF7F, "scrolllock": 0xFF14, "printscreen": 0xFF61,
    "pause": 0xFF13, "menu": 0xFF67, "browserback": 0x1008FF26,
    "browserforward": 0x1008FF27,
    **{f"f{n}": 0xFFBD + n for n in range(1, 25)},
}  # fmt: skip
_TYPED = {"\n": 0xFF0D, "\t": 0xFF09}
# Of multimedia keyboards: "play", "mail". But for `_NAMED` no task needs them.
_MULTIMEDIA = range(0x1008FE00, 0x10090000)


class UnknownKey(ValueError):
  """A key that this keyboard does not have."""


@dataclasses.dataclass(frozen=True)
class Stroke:
  """One key to press.

  Attributes:
    code: the key.
    shift: whether Shift must be held.
    keysym: symbol to map the key to first; 0 keeps its mapping.
  """

  code: int
  shift: bool = False
  keysym: int = 0


def keysym_of(character: str) -> int:
  """Returns X's number of a character: its code point, flagged above 0xFF."""
  if character in _TYPED:
    return _TYPED[character]
  point = ord(character)
  if 0x20 <= point <= 0x7E or 0xA0 <= point <= 0xFF:
    return point
  return 0x01000000 | point


class Keyboard:
  """The key codes of an X server's mapping; see the module docstring.

  Attributes:
    shift: code of the Shift key.
  """

  def __init__(self, first: int, per_code: int, keysyms: Sequence[int]):
    """`keysyms`: `per_code` for each code from `first`, as X lists them."""
    self._strokes: dict[int, Stroke] = {}
    self._spare: list[int] = []  # The next to be lent first.
    self._borrowed: dict[int, int] = {}  # keysym -> its code
    codes = range(first, first + len(keysyms) // per_code)
    for row, code in enumerate(codes):
      levels = keysyms[row * per_code : row * per_code + per_code]
      if all(self._unused(keysym) for keysym in levels):
        self._spare.append(code)
        continue
      for shift, keysym in enumerate(levels[:2]):
        if keysym and keysym not in self._strokes:
          self._strokes[keysym] = Stroke(code, bool(shift))
    self.shift = self.key("shift").code

  @staticmethod
  def _unused(keysym: int) -> bool:
    named = keysym in _NAMED.values()
    return not keysym or (keysym in _MULTIMEDIA and not named)

  def key(self, name: str) -> Stroke:
    """Returns the key of a name, in any dialect.

    Raises:
      UnknownKey: there is none.
    """
    canonical = key_names.key_name(name) if len(name) > 1 else name
    keysym = _NAMED.get(canonical or "")
    if keysym is None and canonical and len(canonical) == 1:
      keysym = keysym_of(canonical)
    if keysym not in self._strokes:
      raise UnknownKey(f"there is no key {name!r}")
    return self._strokes[keysym]

  def text(self, text: str) -> list[list[Stroke]]:
    """Batches of strokes that type `text`; each borrows a key once at most.

    Raises:
      UnknownKey: a control character.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    for character in text:
      if ord(character) < 0x20 and character not in _TYPED:
        raise UnknownKey(f"there is no key for {character!r}")
    batches: list[list[Stroke]] = [[]]
    used: set[int] = set()
    for keysym in map(keysym_of, text):
      stroke = self._strokes.get(keysym)
      if stroke is None:
        code = self._borrowed.get(keysym, self._spare[0])
        if keysym not in self._borrowed and code in used:
          batches.append([])
          used = set()
        self._lend(code, keysym)
        used.add(code)
        stroke = Stroke(code, False, keysym)
      batches[-1].append(stroke)
    return batches

  def _lend(self, code: int, keysym: int) -> None:
    self._spare.remove(code)
    self._spare.append(code)
    for old in [k for k, c in self._borrowed.items() if c == code]:
      del self._borrowed[old]
    self._borrowed[keysym] = code
