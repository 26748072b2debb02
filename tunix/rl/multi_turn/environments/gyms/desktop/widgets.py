"""Implements single widgets: their looks and their reactions.

A widget lives in layout units, draws itself from its state and answers to
`press`, `drag`, `key` and `insert`; it reports events to the scene with
`ui.emit(kind, widget, value)`, and a task's judge sees nothing else.
The controls of forms are here; shapes, icons, rows and tabs are in `items.py`,
widgets that hold others in `containers.py`.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from tunix.rl.multi_turn.environments.gyms.desktop import font
from tunix.rl.multi_turn.environments.gyms.desktop.canvas import Canvas

if TYPE_CHECKING:
  from tunix.rl.multi_turn.environments.gyms.desktop.scene import Scene

MAX_TEXT = 200  # characters a field holds; more is cut off


class Widget:
  """A rectangle with a name; the base does nothing when touched."""

  kind = "widget"
  focusable = False
  enabled = True
  movable = False
  context_items: tuple[str, ...] = ()
  parent: Any = None

  def __init__(self, x: int, y: int, w: int, h: int, name: str = ""):
    self.x, self.y, self.w, self.h = x, y, w, h
    self.name = name

  def contains(self, x: int, y: int) -> bool:
    return self.x <= x < self.x + self.w and self.y <= y < self.y + self.h

  def hit(self, x: int, y: int) -> Widget | None:
    return self if self.contains(x, y) else None

  def center(self) -> tuple[int, int]:
    return self.x + self.w // 2, self.y + self.h // 2

  def shift(self, dx: int, dy: int) -> None:
    self.x += dx
    self.y += dy

  def walk(self):
    """This widget and everything inside it."""
    yield self

  def phrases(self) -> tuple[str, ...]:
    """The phrase by which a person refers to it; empty without a name."""
    return (f"the {self.name} {self.kind}",) if self.name else ()

  def _named_or_kind(self) -> tuple[str, ...]:
    return (
      f"the {self.name} {self.kind}" if self.name else f"the {self.kind}",
    )

  def draw(self, c: Canvas, ui: Scene) -> None:
    raise NotImplementedError

  def press(self, ui: Scene, x: int, y: int, count: int) -> None:
    """A left click, `count` times."""

  def drag(self, ui: Scene, x: int, y: int, x2: int, y2: int) -> None:
    """The left button went down at (x, y) and up at (x2, y2).

    Letting go inside is a click, outside it is none.
    """
    if self.contains(x2, y2):
      self.press(ui, x2, y2, 1)

  def key(self, ui: Scene, combo: str) -> bool:
    """A key combination while focused; returns whether it was used."""
    del ui, combo
    return False

  def insert(self, ui: Scene, text: str) -> bool:
    """Text typed while focused; returns whether it was used."""
    del ui, text
    return False


class Label(Widget):
  """A line of text."""

  kind = "label"

  def __init__(self, x, y, text, faint=False, w=None):
    super().__init__(x, y, w or font.text_width(text), font.LINE)
    self.text = text
    self.faint = faint

  def draw(self, c, ui):
    color = ui.theme.faint if self.faint else ui.theme.text
    c.text(self.x, self.y, font.fit(self.text, self.w), color)


class Button(Widget):
  """A push button; disabled ones ignore everything."""

  kind = "button"
  focusable = True

  def __init__(self, x, y, w, h, name, enabled=True):
    super().__init__(x, y, w, h, name)
    self.enabled = enabled
    self.pressed = 0

  @staticmethod
  def size(label: str, height: int = 16) -> tuple[int, int]:
    return max(30, font.text_width(label) + 12), height

  def draw(self, c, ui):
    t = ui.theme
    if not self.enabled:
      c.box(self.x, self.y, self.w, self.h, t.window, t.faint)
    else:
      focused = ui.focus is self
      c.box(
        self.x,
        self.y,
        self.w,
        self.h,
        t.button,
        t.accent if focused else t.button_edge,
      )
      c.rect(self.x + 2, self.y + self.h - 2, self.w - 4, 1, t.button_edge)
    color = t.text if self.enabled else t.faint
    c.text_in(self.x + 2, self.y, self.w - 4, self.h, self.name, color)

  def press(self, ui, x, y, count):
    if self.enabled:
      self.pressed += 1
      ui.emit("press", self)

  def key(self, ui, combo):
    if combo in ("enter", "space"):
      self.press(ui, *self.center(), 1)
      return True
    return False


class TextField(Widget):
  """One line of editable text with a caret and a selection."""

  kind = "field"
  focusable = True

  def __init__(self, x, y, w, h, name, text="", secret=False):
    super().__init__(x, y, w, h, name)
    self.text = text
    self.secret = secret
    self.caret = self.anchor = len(text)

  def phrases(self):
    return (f"the {self.name} field",) if self.name else ("the text field",)

  def selection(self) -> tuple[int, int]:
    return min(self.caret, self.anchor), max(self.caret, self.anchor)

  def draw(self, c, ui):
    t = ui.theme
    focused = ui.focus is self
    c.rect(
      self.x, self.y, self.w, self.h, t.accent if focused else t.button_edge
    )
    c.rect(self.x + 1, self.y + 1, self.w - 2, self.h - 2, t.field)
    room = self.w - 8
    shown = "*" * len(self.text) if self.secret else self.text
    first = 0
    # Keep the caret in sight: cut from the left as far as needed.
    while font.text_width(shown[first : self.caret]) > room:
      first += 1
    part = font.fit(shown[first:], room)
    top = self.y + (self.h - font.ASCENT) // 2
    text_x = self.x + 4
    low, high = self.selection()
    if focused and low < high:
      a = font.text_width(shown[first : max(low, first)])
      b = min(room, font.text_width(shown[first:high]))
      c.rect(
        text_x + a + bool(a) - 1,
        self.y + 2,
        b - a + 2 - bool(a),
        self.h - 4,
        t.accent,
      )
      cut = max(0, low - first), max(0, high - first)
      c.text(text_x, top, part[: cut[0]], t.text)
      gap = 1 if cut[0] else 0
      c.text(text_x + a + gap, top, part[cut[0] : cut[1]], t.accent_text)
      c.text(text_x + b + 1, top, part[cut[1] :], t.text)
    else:
      c.text(text_x, top, part, t.text)
    if focused:
      at = font.text_width(shown[first : self.caret])
      c.rect(text_x + at + (1 if at else 0), self.y + 2, 1, self.h - 4, t.text)

  def press(self, ui, x, y, count):
    if count >= 2:
      self.anchor, self.caret = 0, len(self.text)
      return
    at = x - self.x - 4
    spot = 0
    while spot < len(self.text) and (
      font.text_width(self.text[: spot + 1]) <= at + 2
    ):
      spot += 1
    self.caret = self.anchor = spot

  def drag(self, ui, x, y, x2, y2):
    self.press(ui, x, y, 1)
    start = self.caret
    self.press(ui, x2, y2, 1)
    self.anchor = start

  def _replace(self, ui: Scene, low: int, high: int, text: str) -> None:
    new = (self.text[:low] + text + self.text[high:])[:MAX_TEXT]
    self.caret = self.anchor = min(len(new), low + len(text))
    if new != self.text:
      self.text = new
      ui.emit("edit", self, new)

  def insert(self, ui, text):
    low, high = self.selection()
    self._replace(ui, low, high, text)
    return True

  def key(self, ui, combo):
    low, high = self.selection()
    selected = low < high
    if combo == "backspace":
      self._replace(ui, low if selected else max(0, low - 1), high, "")
    elif combo == "delete":
      self._replace(ui, low, high if selected else high + 1, "")
    elif combo == "ctrl+a":
      self.anchor, self.caret = 0, len(self.text)
    elif combo in ("ctrl+c", "ctrl+x"):
      if selected and not self.secret:
        ui.clipboard = self.text[low:high]
        if combo == "ctrl+x":
          self._replace(ui, low, high, "")
    elif combo == "ctrl+v":
      self._replace(ui, low, high, ui.clipboard)
    elif combo in (
      "left",
      "right",
      "home",
      "end",
      "shift+left",
      "shift+right",
      "shift+home",
      "shift+end",
    ):
      shift, _, way = combo.rpartition("+")
      target = {
        "left": low if selected and not shift else max(0, self.caret - 1),
        "right": high
        if selected and not shift
        else min(len(self.text), self.caret + 1),
        "home": 0,
        "end": len(self.text),
      }[way]
      self.caret = target
      if not shift:
        self.anchor = target
    else:
      return False
    return True


class CheckBox(Widget):
  """A box that is ticked or not, with its label; the row is clickable."""

  kind = "check box"
  focusable = True

  def __init__(self, x, y, name, ticked=False, w=None, h=14):
    super().__init__(x, y, w or self.width(name), h, name)
    self.ticked = ticked

  @staticmethod
  def width(label: str) -> int:
    return 18 + font.text_width(label)

  def draw(self, c, ui):
    t = ui.theme
    top = self.y + (self.h - 11) // 2
    edge = t.accent if ui.focus is self else t.text
    c.rect(self.x + 1, top, 11, 11, edge)
    if self.ticked:
      c.rect(self.x + 2, top + 1, 9, 9, t.accent)
      for dx, dy in ((3, 5), (4, 6), (5, 7), (6, 6), (7, 5), (8, 4), (9, 3)):
        c.rect(self.x + dx, top + dy - 1, 1, 2, t.accent_text)
    else:
      c.rect(self.x + 2, top + 1, 9, 9, t.field)
    c.text(self.x + 16, self.y + (self.h - 7) // 2, self.name, t.text)

  def press(self, ui, x, y, count):
    for _ in range(count):
      self.ticked = not self.ticked
      ui.emit("tick", self, self.ticked)

  def key(self, ui, combo):
    if combo == "space":
      self.press(ui, *self.center(), 1)
      return True
    return False


class RadioButton(Widget):
  """A radio button; at most one of its group is chosen."""

  kind = "radio button"
  focusable = True

  def __init__(self, x, y, name, group: list[RadioButton], w=None, h=14):
    super().__init__(x, y, w or CheckBox.width(name), h, name)
    self.chosen = False
    self.group = group
    group.append(self)

  def draw(self, c, ui):
    t = ui.theme
    top = self.y + (self.h - 11) // 2
    c.shape(
      "circle",
      self.x + 1,
      top,
      11,
      11,
      t.accent if ui.focus is self else t.text,
    )
    c.shape("circle", self.x + 2, top + 1, 9, 9, t.field)
    if self.chosen:
      c.shape("circle", self.x + 4, top + 3, 5, 5, t.accent)
    c.text(self.x + 16, self.y + (self.h - 7) // 2, self.name, t.text)

  def press(self, ui, x, y, count):
    for other in self.group:
      other.chosen = other is self
    ui.emit("choose", self)

  def key(self, ui, combo):
    if combo == "space":
      self.press(ui, *self.center(), 1)
    elif combo in ("down", "up"):
      step = 1 if combo == "down" else -1
      other = self.group[(self.group.index(self) + step) % len(self.group)]
      ui.focus = other
      other.press(ui, *other.center(), 1)
    else:
      return False
    return True


class DropDown(Widget):
  """A closed list that shows its value; a click opens a menu of options."""

  kind = "drop-down"
  focusable = True

  def __init__(self, x, y, w, h, name, options, value=0):
    super().__init__(x, y, w, h, name)
    self.options = tuple(options)
    self.value = value

  def phrases(self):
    return self._named_or_kind()

  def draw(self, c, ui):
    t = ui.theme
    c.rect(
      self.x,
      self.y,
      self.w,
      self.h,
      t.accent if ui.focus is self else t.button_edge,
    )
    c.rect(self.x + 1, self.y + 1, self.w - 2, self.h - 2, t.field)
    right = self.x + self.w - self.h
    c.rect(right, self.y + 1, self.h - 1, self.h - 2, t.button)
    c.rect(right, self.y + 1, 1, self.h - 2, t.button_edge)
    c.shape(
      "down",
      right + (self.h - 7) // 2,
      self.y + (self.h - 7) // 2,
      7,
      7,
      t.text,
    )
    text = font.fit(self.options[self.value], self.w - self.h - 6)
    c.text(self.x + 4, self.y + (self.h - 7) // 2, text, t.text)

  def press(self, ui, x, y, count):
    ui.open_menu(self.x, self.y + self.h, self.options, self, self.w, self.h)

  def choose(self, ui: Scene, index: int) -> None:
    """Sets the value; the menu calls it."""
    self.value = index
    ui.emit("choose", self, self.options[index])

  def key(self, ui, combo):
    if combo in ("enter", "space", "alt+down"):
      self.press(ui, 0, 0, 1)
    elif combo in ("down", "up"):
      step = 1 if combo == "down" else -1
      index = self.value + step
      if 0 <= index < len(self.options):
        self.choose(ui, index)
    else:
      return False
    return True


class Slider(Widget):
  """Name and value over a knob on a track; drag, click or arrows.

  Values are the whole numbers 0..`steps`; the track is the lower part.
  """

  kind = "slider"
  focusable = True
  HEIGHT = 28

  def __init__(self, x, y, w, name, steps=10, value=0):
    super().__init__(x, y, w, self.HEIGHT, name)
    self.steps = steps
    self.value = value

  def knob_x(self, value: int | None = None) -> int:
    """Centre of the knob at `value`, in layout units."""
    value = self.value if value is None else value
    return self.x + 5 + (self.w - 11) * value // self.steps

  def center(self):
    return self.knob_x(), self.y + 19

  def at(self, value: int) -> tuple[int, int]:
    """Position of the knob's centre at `value`, in layout units."""
    return self.knob_x(value), self.y + 19

  def draw(self, c, ui):
    t = ui.theme
    mid = self.y + 19
    shown = str(self.value)
    room = self.w - 4 - font.text_width(shown)
    c.text(self.x + 1, self.y + 1, font.fit(self.name, room), t.text)
    c.text(
      self.x + self.w - 1 - font.text_width(shown), self.y + 1, shown, t.text
    )
    track_x, right = self.x + 5, self.x + self.w - 6
    for step in range(self.steps + 1):
      c.rect(self.knob_x(step), mid + 6, 1, 2, t.faint)
    c.rect(track_x - 2, mid - 1, right - track_x + 5, 3, t.button_edge)
    knob = self.knob_x()
    c.rect(track_x - 2, mid - 1, knob - track_x + 2, 3, t.accent)
    c.box(
      knob - 4,
      mid - 6,
      9,
      12,
      t.accent,
      t.text if ui.focus is self else t.button_edge,
    )

  def _value_at(self, x: int) -> int:
    span = self.w - 11
    spot = (2 * (x - self.x - 5) * self.steps + span) // (2 * span)
    return min(self.steps, max(0, spot))

  def _set(self, ui: Scene, value: int) -> None:
    if value != self.value:
      self.value = value
      ui.emit("slide", self, value)

  def press(self, ui, x, y, count):
    if y >= self.y + 11:
      self._set(ui, self._value_at(x))

  def drag(self, ui, x, y, x2, y2):
    if y >= self.y + 11:
      self._set(ui, self._value_at(x2))

  def key(self, ui, combo):
    step = {"right": 1, "up": 1, "left": -1, "down": -1}.get(combo)
    if combo in ("home", "end"):
      step = self.steps if combo == "end" else -self.steps
    if step is None:
      return False
    self._set(ui, min(self.steps, max(0, self.value + step)))
    return True
