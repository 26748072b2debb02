"""Implements the widgets beside form controls: shapes, icons, rows, tabs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunix.rl.multi_turn.environments.gyms.desktop import icons
from tunix.rl.multi_turn.environments.gyms.desktop import widgets
from tunix.rl.multi_turn.environments.gyms.desktop import words
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
      c.shape(self.shape, self.x, self.y, self.w, self.h,
              words.COLORS[self.color])
    elif rim:
      c.shape(self.shape, self.x + 1, self.y + 1, self.w - 2, self.h - 2,
              words.COLORS[self.color])
    else:
      c.shape(self.shape, self.x + 2, self.y + 2, self.w - 4, self.h - 4,
              words.COLORS[self.color])

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
    c.text_in(self.x + 3, self.y + self.h - 11, self.w - 6, 9, self.name,
              t.text)


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
    icons.draw(c, self.name, self.x + (self.w - 20) // 2, self.y + 1)
    c.text_in(self.x, self.y + 22, self.w, 9, self.name,
              t.accent_text if ui.focus is self else t.icon_text)

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
    c.text(self.x + 4, self.y + (self.h - 7) // 2, self.name,
           t.accent_text if self.chosen else t.text)
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
    c.rect(self.x + 1, top + 1, self.w - 2, self.y + self.h - top - 1,
           t.field if self.front else t.button)
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
