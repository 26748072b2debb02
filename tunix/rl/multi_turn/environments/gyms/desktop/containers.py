"""Implements widgets that hold widgets: windows, scroll areas and menus."""

from __future__ import annotations

from tunix.rl.multi_turn.environments.gyms.desktop import font
from tunix.rl.multi_turn.environments.gyms.desktop import items
from tunix.rl.multi_turn.environments.gyms.desktop import widgets

TITLE_HEIGHT = 14
CLOSE_WIDTH = 20


class Container(widgets.Widget):
  """Draws its children in order; the last one is in front."""

  def __init__(self, x, y, w, h, name=""):
    super().__init__(x, y, w, h, name)
    self.children: list[widgets.Widget] = []

  def add(self, child):
    """Adds a child and returns it."""
    child.parent = self
    self.children.append(child)
    return child

  def visible(self):
    """The children that are drawn and can be hit, from back to front."""
    return self.children

  def walk(self):
    yield self
    for child in self.visible():
      yield from child.walk()

  def hit(self, x, y):
    if not self.contains(x, y):
      return None
    hits = (child.hit(x, y) for child in reversed(self.visible()))
    return next((widget for widget in hits if widget is not None), self)

  def shift(self, dx, dy):
    super().shift(dx, dy)
    for child in self.children:
      child.shift(dx, dy)

  def draw(self, c, ui):
    for child in self.visible():
      child.draw(c, ui)


class CloseBox(widgets.Widget):
  """The cross at the right end of a title bar."""

  kind = "close box"

  def phrases(self):
    window = self.parent
    what = "dialog" if window.modal else f"{window.name} window"
    return (f"the close box of the {what}",)

  def draw(self, c, ui):
    c.rect(self.x, self.y, self.w, self.h, (200, 48, 48))
    mid, top = self.x + self.w // 2, self.y + (self.h - 7) // 2
    for i in range(7):
      c.rect(mid - 4 + i, top + i, 2, 1, (255, 255, 255))
      c.rect(mid + 2 - i, top + i, 2, 1, (255, 255, 255))

  def press(self, ui, x, y, count):
    ui.close(self.parent)


class Window(Container):
  """A title bar over a client area. A modal one blocks all others.

  Pressing anywhere in it raises it; dragging its title moves it.
  """

  kind = "window"

  def __init__(self, x, y, w, h, name, closable=True, modal=False):
    super().__init__(x, y, w, h, name)
    self.modal = modal
    self.default: widgets.Widget | None = None  # What the Enter key presses.
    if modal:
      self.kind = "dialog"
    self.close_box = None
    if closable:
      self.close_box = self.add(
        CloseBox(x + w - CLOSE_WIDTH - 1, y + 1, CLOSE_WIDTH, TITLE_HEIGHT, "")
      )

  def client(self, margin: int = 3) -> tuple[int, int, int, int]:
    """x, y, w, h of the room below the title bar."""
    return (
      self.x + 1 + margin,
      self.y + 1 + TITLE_HEIGHT + margin,
      self.w - 2 - 2 * margin,
      self.h - 2 - TITLE_HEIGHT - 2 * margin,
    )

  def title_center(self) -> tuple[int, int]:
    free = self.w - (CLOSE_WIDTH if self.close_box else 0)
    return self.x + free // 2, self.y + 1 + TITLE_HEIGHT // 2

  def phrases(self):
    return ()  # its centre is whatever lies there; see title_phrase

  def title_phrase(self) -> str:
    return f"the title bar of the {self.name} {self.kind}"

  def in_title(self, y: int) -> bool:
    """Whether a height within the window is its title bar's."""
    return y < self.y + 1 + TITLE_HEIGHT

  def draw(self, c, ui):
    t = ui.theme
    x, y, w, h = self.x, self.y, self.w, self.h
    c.rect(x + 2, y + h, w, 1, t.wall_bottom)  # shadow
    c.rect(x + w, y + 2, 1, h - 1, t.wall_bottom)
    c.rect(x, y, w, h, t.border)
    front = ui.front_window() is self
    c.rect(
      x + 1, y + 1, w - 2, TITLE_HEIGHT, t.title if front else t.title_idle
    )
    c.rect(x + 1, y + 1 + TITLE_HEIGHT, w - 2, h - 2 - TITLE_HEIGHT, t.window)
    room = w - 10 - (CLOSE_WIDTH if self.close_box else 0)
    c.text(x + 5, y + 4, font.fit(self.name, room), t.title_text)
    super().draw(c, ui)

  def drag(self, ui, x, y, x2, y2):
    if self.in_title(y):
      self.shift(x2 - x, y2 - y)
      ui.emit("move", self, (self.x, self.y))


class ScrollArea(Container):
  """A viewport on a taller content; children have unscrolled positions."""

  kind = "list"
  BAR = 9

  def __init__(self, x, y, w, h, content: int, name=""):
    super().__init__(x, y, w, h, name)
    self.content = content
    self.offset = 0

  @property
  def limit(self) -> int:
    """The largest offset, in layout units."""
    return max(0, self.content - self.h)

  def phrases(self):
    return ()

  def hit(self, x, y):
    if not self.contains(x, y):
      return None
    children = self.children if x < self.x + self.w - self.BAR else []
    hits = (c.hit(x, y + self.offset) for c in reversed(children))
    return next((widget for widget in hits if widget is not None), self)

  def _thumb(self) -> tuple[int, int]:
    """Top and height of the thumb, relative to the area."""
    height = max(8, self.h * self.h // max(self.h, self.content))
    room = self.h - height
    return room * self.offset // max(1, self.limit), height

  def draw(self, c, ui):
    t = ui.theme
    inner = c.sub(self.x, self.y, self.w, self.h, t.field)
    inner.oy += self.offset
    for child in self.children:
      if (
        child.y < self.y + self.h + self.offset
        and child.y + child.h > self.y + self.offset
      ):
        child.draw(inner, ui)
    inner.oy -= self.offset
    bar = self.x + self.w - self.BAR
    inner.rect(bar, self.y, self.BAR, self.h, t.button)
    top, height = self._thumb()
    inner.box(
      bar + 1, self.y + top, self.BAR - 2, height, t.faint, t.button_edge
    )
    inner.frame(self.x, self.y, self.w, self.h, t.button_edge)
    c.put(inner, self.x, self.y)

  def scroll(self, ui, dy: int) -> None:
    offset = min(self.limit, max(0, self.offset + dy))
    if offset != self.offset:
      self.offset = offset
      ui.emit("scroll", self, offset)

  def press(self, ui, x, y, count):
    if x >= self.x + self.w - self.BAR:
      top, height = self._thumb()
      if y < self.y + top:
        self.scroll(ui, -self.h * 3 // 4)
      elif y >= self.y + top + height:
        self.scroll(ui, self.h * 3 // 4)

  def drag(self, ui, x, y, x2, y2):
    if x >= self.x + self.w - self.BAR:
      room = max(1, self.h - self._thumb()[1])
      self.scroll(ui, (y2 - y) * self.limit // room)


class TabView(Container):
  """Pages of which one is in front; their heads stand in a row on top."""

  kind = "tab view"
  HEAD = 16

  def __init__(self, x, y, w, h, names):
    super().__init__(x, y, w, h)
    self.pages: dict[str, Container] = {}
    self.tabs: list[items.Tab] = []
    width = min(w // len(names), 60)
    for i, name in enumerate(names):
      last = i == len(names) - 1 and width < 60
      self.add(
        items.Tab(
          x + i * width,
          y,
          w - i * width if last else width,
          self.HEAD,
          name,
          self.tabs,
        )
      )
      self.pages[name] = page = Container(
        x + 1, y + self.HEAD, w - 2, h - self.HEAD - 1
      )
      page.parent = self

  def phrases(self):
    return ()

  def front(self) -> str:
    """Name of the page in front."""
    return next(tab.name for tab in self.tabs if tab.front)

  def visible(self):
    return [self.pages[self.front()]] + self.tabs

  def shift(self, dx, dy):
    super().shift(dx, dy)
    for page in self.pages.values():
      page.shift(dx, dy)

  def draw(self, c, ui):
    t = ui.theme
    c.rect(
      self.x,
      self.y + self.HEAD - 1,
      self.w,
      self.h - self.HEAD + 1,
      t.button_edge,
    )
    c.rect(
      self.x + 1,
      self.y + self.HEAD,
      self.w - 2,
      self.h - self.HEAD - 1,
      t.field,
    )
    super().draw(c, ui)


class MenuItem(widgets.Widget):
  """One line of an open menu."""

  kind = "menu item"

  def draw(self, c, ui):
    t = ui.theme
    if ui.pointer is not None and self.contains(*ui.pointer):
      c.rect(self.x, self.y, self.w, self.h, t.accent)
      c.text(self.x + 4, self.y + (self.h - 7) // 2, self.name, t.accent_text)
    else:
      c.text(self.x + 4, self.y + (self.h - 7) // 2, self.name, t.text)

  def press(self, ui, x, y, count):
    menu = self.parent
    index = menu.children.index(self)
    ui.menu = None
    if isinstance(menu.owner, widgets.DropDown):
      menu.owner.choose(ui, index)
    else:
      ui.emit("menu", menu.owner, self.name)


class Menu(Container):
  """An open list above everything else; one at a time."""

  kind = "menu"
  ITEM_HEIGHT = 14

  def __init__(self, x, y, w, items, owner):
    super().__init__(x, y, w, len(items) * self.ITEM_HEIGHT + 2)
    self.owner = owner
    for i, item in enumerate(items):
      self.add(
        MenuItem(
          x + 1, y + 1 + i * self.ITEM_HEIGHT, w - 2, self.ITEM_HEIGHT, item
        )
      )

  def phrases(self):
    return ()

  def draw(self, c, ui):
    c.rect(self.x, self.y, self.w, self.h, ui.theme.border)
    c.rect(self.x + 1, self.y + 1, self.w - 2, self.h - 2, ui.theme.field)
    super().draw(c, ui)
