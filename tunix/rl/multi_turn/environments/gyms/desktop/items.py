"""Implements the widgets beside form controls: shapes, icons, rows, tabs."""

from __future__ import annotations

from typing import Callable, TYPE_CHECKING

from tunix.rl.multi_turn.environments.gyms.desktop import widgets
from tunix.rl.multi_turn.environments.gyms.desktop import words
from tunix.rl.multi_turn.environments.gyms.desktop.canvas import Canvas
from tunix.rl.multi_turn.environments.gyms.desktop.canvas import Color

if TYPE_CHECKING:
  from tunix.rl.multi_turn.environments.gyms.desktop.scene import Scene


class Shape(widgets.Widget):
  """A coloured shape; `movable` ones are dragged about."""

  kind = "shape"

  def __init__(self, x, y, size, color: str, shape="square", movable=False):
    super().__init__(x, y, size, size, f"{color} {shape}")
    self.color = color
    self.shape = shape
    self.movable = movable

  def phrases(self):
    return (f"the {self.name}",)

  def draw(self, c, ui):
    edge = tuple(v * 5 // 9 for v in words.COLORS[self.color])
    c.shape(self.shape, self.x, self.y, self.w, self.h, edge)
    rim = 1 if self.shape in ("square", "circle") else 0
    if self.shape == "star":  # an outline would eat the points
      c.shape(
        self.shape, self.x, self.y, self.w, self.h, words.COLORS[self.color]
      )
    elif rim:
      c.shape(
        self.shape,
        self.x + 1,
        self.y + 1,
        self.w - 2,
        self.h - 2,
        words.COLORS[self.color],
      )
    else:
      c.shape(
        self.shape,
        self.x + 2,
        self.y + 2,
        self.w - 4,
        self.h - 4,
        words.COLORS[self.color],
      )

  def press(self, ui, x, y, count):
    ui.emit("press", self)

  def drag(self, ui, x, y, x2, y2):
    if self.movable:
      self.x += x2 - x
      self.y += y2 - y
      ui.emit("drop", self, (x2, y2))


class DropZone(widgets.Widget):
  """A marked area to drop things into."""

  kind = "box"

  def __init__(self, x, y, w, h, name, color: Color | None = None):
    super().__init__(x, y, w, h, name)
    self.color = color

  def phrases(self):
    return self._named_or_kind()

  def draw(self, c, ui):
    t = ui.theme
    edge = self.color or t.text
    c.rect(self.x, self.y, self.w, self.h, edge)
    c.rect(self.x + 2, self.y + 2, self.w - 4, self.h - 4, t.field)
    c.text_in(
      self.x + 3, self.y + self.h - 11, self.w - 6, 9, self.name, t.text
    )


class Icon(widgets.Widget):
  """A desktop icon: a click selects it, a double click opens it."""

  kind = "icon"
  focusable = True
  SIZE = (34, 32)

  def __init__(self, x, y, name):
    super().__init__(x, y, *self.SIZE, name)
    self.opened = False

  def draw(self, c, ui):
    t = ui.theme
    if ui.focus is self:
      c.shape("round2", self.x, self.y, self.w, self.h, t.accent)
    draw_icon(c, self.name, self.x + (self.w - 20) // 2, self.y + 1)
    c.text_in(
      self.x,
      self.y + 22,
      self.w,
      9,
      self.name,
      t.accent_text if ui.focus is self else t.icon_text,
    )

  def press(self, ui, x, y, count):
    if count >= 2:
      self._open(ui)
    else:
      ui.emit("select", self)

  def key(self, ui, combo):
    if combo == "enter":
      self._open(ui)
      return True
    return False

  def _open(self, ui: Scene) -> None:
    self.opened = True
    ui.emit("open", self)


class Row(widgets.Widget):
  """A line of a list; a click chooses it."""

  kind = "row"

  def __init__(self, x, y, w, h, name):
    super().__init__(x, y, w, h, name)
    self.chosen = False

  def draw(self, c, ui):
    t = ui.theme
    if self.chosen:
      c.rect(self.x, self.y, self.w, self.h, t.accent)
    c.text(
      self.x + 4,
      self.y + (self.h - 7) // 2,
      self.name,
      t.accent_text if self.chosen else t.text,
    )
    c.rect(self.x, self.y + self.h - 1, self.w, 1, t.title_idle)

  def press(self, ui, x, y, count):
    for other in self.parent.children:
      if isinstance(other, Row):
        other.chosen = other is self
    ui.emit("choose", self)


class Tab(widgets.Widget):
  """The head of a page; exactly one of a group is in front."""

  kind = "tab"
  focusable = True

  def __init__(self, x, y, w, h, name, group: list[Tab]):
    super().__init__(x, y, w, h, name)
    self.front = not group
    self.group = group
    group.append(self)

  def draw(self, c, ui):
    t = ui.theme
    top = self.y if self.front else self.y + 2
    c.rect(self.x, top, self.w, self.y + self.h - top, t.button_edge)
    c.rect(
      self.x + 1,
      top + 1,
      self.w - 2,
      self.y + self.h - top - 1,
      t.field if self.front else t.button,
    )
    if self.front:
      c.rect(self.x + 1, top, self.w - 2, 2, t.accent)
    c.text_in(self.x + 1, top, self.w - 2, self.h, self.name, t.text)

  def press(self, ui, x, y, count):
    for other in self.group:
      other.front = other is self
    ui.emit("front", self)

  def key(self, ui, combo):
    if combo in ("enter", "space"):
      self.press(ui, 0, 0, 1)
      return True
    return False


# --- pictures of icons, 20 x 20 layout units each -----------------------------
#
# Drawn from rectangles and masks, so that they stay crisp at every factor.

_WHITE = (250, 250, 252)
_INK = (30, 36, 52)
_PAINTERS: dict[str, Callable[[Canvas, int, int], None]] = {}


def _icon(name: str):
  def register(paint):
    _PAINTERS[name] = paint
    return paint

  return register


def draw_icon(c: Canvas, name: str, x: int, y: int) -> None:
  """Draws the icon `name` with its top left corner at (x, y)."""
  if name not in _PAINTERS:
    raise KeyError(
      f"no desktop icon is called {name!r}; known: {', '.join(_PAINTERS)}"
    )
  _PAINTERS[name](c, x, y)


@_icon("Mail")
def _mail(c, x, y):
  c.rect(x, y + 3, 20, 14, _INK)
  c.rect(x + 1, y + 4, 18, 12, _WHITE)
  for i in range(9):
    c.rect(x + 1 + i, y + 4 + i * 7 // 9, 2, 1, (214, 60, 60))
    c.rect(x + 17 - i, y + 4 + i * 7 // 9, 2, 1, (214, 60, 60))


@_icon("Music")
def _music(c, x, y):
  c.shape("round3", x, y, 20, 20, (226, 62, 120))
  c.rect(x + 7, y + 4, 2, 11, _WHITE)
  c.rect(x + 14, y + 4, 2, 9, _WHITE)
  c.rect(x + 7, y + 4, 9, 3, _WHITE)
  c.shape("circle", x + 4, y + 12, 5, 5, _WHITE)
  c.shape("circle", x + 11, y + 10, 5, 5, _WHITE)


@_icon("Files")
def _files(c, x, y):
  c.rect(x + 1, y + 2, 8, 4, (196, 140, 20))
  c.shape("round1", x, y + 4, 20, 14, (196, 140, 20))
  c.shape("round1", x, y + 7, 20, 11, (250, 200, 70))


@_icon("Photos")
def _photos(c, x, y):
  c.rect(x, y + 2, 20, 16, _WHITE)
  c.rect(x + 2, y + 4, 16, 12, (110, 190, 240))
  c.shape("circle", x + 12, y + 5, 5, 5, (250, 210, 60))
  c.shape("triangle", x + 2, y + 7, 11, 9, (40, 130, 70))
  c.shape("triangle", x + 9, y + 9, 9, 7, (70, 160, 90))


@_icon("Clock")
def _clock(c, x, y):
  c.shape("circle", x, y, 20, 20, _INK)
  c.shape("circle", x + 2, y + 2, 16, 16, _WHITE)
  c.rect(x + 9, y + 4, 2, 7, _INK)
  c.rect(x + 9, y + 10, 6, 2, (214, 60, 60))


@_icon("Notes")
def _notes(c, x, y):
  c.rect(x + 2, y, 16, 20, (176, 140, 30))
  c.rect(x + 3, y + 1, 14, 18, (255, 238, 140))
  c.rect(x + 3, y + 1, 14, 3, (236, 160, 40))
  for row in (7, 10, 13, 16):
    c.rect(x + 5, y + row, 10 if row < 16 else 6, 1, (120, 96, 30))


@_icon("Maps")
def _maps(c, x, y):
  c.rect(x, y + 2, 20, 17, (236, 240, 220))
  c.rect(x, y + 2, 7, 17, (150, 205, 130))
  c.rect(x + 13, y + 2, 7, 17, (130, 190, 235))
  c.rect(x, y + 12, 20, 2, (250, 220, 110))
  c.shape("circle", x + 6, y, 9, 9, (220, 40, 40))
  c.shape("down", x + 6, y + 5, 9, 9, (220, 40, 40))
  c.rect(x + 9, y + 3, 3, 3, _WHITE)


@_icon("Chat")
def _chat(c, x, y):
  c.shape("round3", x, y + 1, 20, 14, (46, 180, 90))
  c.shape("down", x + 3, y + 11, 8, 9, (46, 180, 90))
  for dot in (4, 9, 14):
    c.rect(x + dot, y + 7, 2, 2, _WHITE)


@_icon("Trash")
def _trash(c, x, y):
  c.rect(x + 7, y + 1, 6, 2, (90, 98, 112))
  c.rect(x + 2, y + 3, 16, 2, (90, 98, 112))
  c.rect(x + 4, y + 6, 12, 14, (160, 170, 186))
  for bar in (6, 9, 12):
    c.rect(x + bar, y + 8, 1, 10, (90, 98, 112))


@_icon("Games")
def _games(c, x, y):
  c.shape("round4", x, y + 4, 20, 13, (96, 70, 190))
  c.rect(x + 4, y + 9, 6, 2, _WHITE)
  c.rect(x + 6, y + 7, 2, 6, _WHITE)
  c.rect(x + 15, y + 7, 2, 2, (250, 210, 60))
  c.rect(x + 12, y + 11, 2, 2, (240, 90, 90))


@_icon("Camera")
def _camera(c, x, y):
  c.rect(x + 6, y + 2, 8, 3, (60, 66, 80))
  c.shape("round2", x, y + 4, 20, 14, (60, 66, 80))
  c.shape("circle", x + 5, y + 6, 10, 10, _WHITE)
  c.shape("circle", x + 7, y + 8, 6, 6, (50, 110, 200))
  c.rect(x + 16, y + 6, 2, 2, (250, 210, 60))


@_icon("Books")
def _books(c, x, y):
  c.rect(x + 1, y + 2, 5, 17, (200, 60, 50))
  c.rect(x + 7, y + 4, 5, 15, (40, 110, 200))
  c.rect(x + 13, y + 1, 6, 18, (40, 150, 90))
  c.rect(x + 2, y + 5, 3, 2, _WHITE)
  c.rect(x + 8, y + 7, 3, 2, _WHITE)
  c.rect(x + 14, y + 4, 4, 2, _WHITE)
