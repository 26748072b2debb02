"""Defines the one vocabulary of GUI actions, in pixels of the screenshot.

Tool parsers translate their grammars into it, gyms carry it out. A missing or
superfluous argument is refused at construction, naming the field.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from . import registry


class GuiActionKind(str, enum.Enum):
  CLICK = "click"  # x, y or element, button, count
  MOVE = "move"  # x, y or element
  DRAG = "drag"  # x, y -> x2, y2; x, y None = from the pointer; or elements
  SCROLL = "scroll"  # x, y, dx, dy in pixels; dy > 0 shows what is below
  TYPE = "type"  # text
  KEY = "key"  # keys pressed together, e.g. ("ctrl", "c")
  WAIT = "wait"  # duration
  LONG_PRESS = "long_press"  # x, y, duration
  SWIPE = "swipe"  # x, y -> x2, y2
  SYSTEM_BUTTON = "system_button"  # text: back, home, menu, enter
  OPEN_APP = "open_app"  # text
  ANSWER = "answer"  # text
  TERMINATE = "terminate"  # success
  SCREENSHOT = "screenshot"
  FILL = "fill"  # element, text: text of a field, option of a list, state
  FOCUS = "focus"  # element


# kind -> (required fields, optional fields)
_FIELDS: dict[GuiActionKind, tuple[set[str], set[str]]] = {
  GuiActionKind.CLICK: ({"x", "y"}, {"element", "button", "count", "keys"}),
  GuiActionKind.MOVE: ({"x", "y"}, {"element"}),
  GuiActionKind.DRAG: (
    {"x2", "y2"},
    {"x", "y", "element", "element2", "button"},
  ),
  GuiActionKind.SCROLL: (set(), {"x", "y", "dx", "dy"}),
  GuiActionKind.TYPE: ({"text"}, set()),
  GuiActionKind.KEY: ({"keys"}, {"duration"}),
  GuiActionKind.WAIT: (set(), {"duration"}),
  GuiActionKind.LONG_PRESS: ({"x", "y"}, {"duration"}),
  GuiActionKind.SWIPE: ({"x", "y", "x2", "y2"}, {"duration"}),
  GuiActionKind.SYSTEM_BUTTON: ({"text"}, set()),
  GuiActionKind.OPEN_APP: ({"text"}, set()),
  GuiActionKind.ANSWER: ({"text"}, set()),
  GuiActionKind.TERMINATE: (set(), {"success"}),
  GuiActionKind.SCREENSHOT: (set(), set()),
  GuiActionKind.FILL: ({"element", "text"}, set()),
  GuiActionKind.FOCUS: ({"element"}, set()),
}
_PLACES = {"element": {"x", "y"}, "element2": {"x2", "y2"}}
"""An element's id stands in place of these."""
_BUTTONS = ("left", "right", "middle", "back", "forward")


def fields_of(kind: GuiActionKind) -> tuple[set[str], set[str]]:
  """(fields that an action of this kind needs, fields that it may have)."""
  required, optional = _FIELDS[GuiActionKind(kind)]
  return set(required), set(optional)


def _kind(value: object) -> GuiActionKind:
  try:
    return GuiActionKind(value)
  except ValueError:
    names = [kind.value for kind in GuiActionKind]
    message = registry.unknown_name("GUI action kind", value, names)
    raise ValueError(message) from None


@dataclasses.dataclass(frozen=True)
class GuiAction:
  """One action.

  Attributes:
    kind: Kind of action; decides which of the other fields are allowed.
    x, y, x2, y2: pixels of the screenshot the policy saw, origin top left.
    element, element2: Ids of elements in the tree that the policy saw, in place
      of (x, y) and (x2, y2).
    button: mouse button.
    count: number of clicks.
    dx, dy: scroll distance in pixels.
    text: text to type, answer, app or button name.
    keys: key names pressed together, lower case ("ctrl", "enter", "a").
    duration: seconds.
    success: the policy's claim when it terminates.
  """

  kind: GuiActionKind
  x: float | None = None
  y: float | None = None
  x2: float | None = None
  y2: float | None = None
  button: str = "left"
  count: int = 1
  dx: float = 0.0
  dy: float = 0.0
  text: str | None = None
  keys: tuple[str, ...] = ()
  duration: float | None = None
  success: bool | None = None
  element: str | None = None
  element2: str | None = None

  def __post_init__(self):
    object.__setattr__(self, "kind", _kind(self.kind))
    object.__setattr__(self, "keys", tuple(self.keys))
    required, optional = fields_of(self.kind)
    for name, places in _PLACES.items():
      if getattr(self, name) is not None and name in required | optional:
        required -= places
        optional -= places
    defaults = {f.name: f.default for f in dataclasses.fields(self)}
    for name, default in defaults.items():
      if name == "kind":
        continue
      is_set = getattr(self, name) != default
      if name in required and not is_set:
        if name == "text" and self.text == "":
          continue
        raise ValueError(f"GUI action {self.kind.value!r} needs {name!r}")
      if is_set and name not in required | optional:
        raise ValueError(
          f"GUI action {self.kind.value!r} takes no {name!r} (got"
          f" {getattr(self, name)!r})"
        )
    if self.button not in _BUTTONS:
      raise ValueError(
        f"button must be one of {', '.join(_BUTTONS)}; got {self.button!r}"
      )
    if self.count not in (1, 2, 3):
      raise ValueError(f"count must be 1, 2 or 3, got {self.count!r}")

  def scaled(self, sx: float, sy: float) -> GuiAction:
    """The action on a screenshot `sx` times as wide and `sy` times as high."""
    if sx == 1 and sy == 1:
      return self
    factors = (("x", sx), ("y", sy), ("x2", sx), ("y2", sy), ("dx", sx),
               ("dy", sy))  # fmt: skip
    changes = {
      name: getattr(self, name) * factor
      for name, factor in factors
      if getattr(self, name)  # Neither None nor 0.
    }
    return dataclasses.replace(self, **changes) if changes else self

  def to_json(self) -> dict[str, Any]:
    """Only the fields that differ from their defaults."""
    data: dict[str, Any] = {"kind": self.kind.value}
    for f in dataclasses.fields(self):
      value = getattr(self, f.name)
      if f.name != "kind" and value != f.default:
        data[f.name] = list(value) if f.name == "keys" else value
    return data

  @classmethod
  def from_json(cls, data: dict[str, Any]) -> GuiAction:
    return cls(**data)
