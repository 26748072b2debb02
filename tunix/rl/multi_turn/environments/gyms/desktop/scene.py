"""Holds the desktop's state, widgets, focus and menu, and applies actions.

A `Scene` carries out one `GuiAction` at a time and reports what happened as
events; it has no tasks. Deterministic: the state after a sequence
of actions, and its picture, depend on nothing else. No action raises: one that
does nothing returns why in the info (`{"ignored": reason}`).

Positions outside the screenshot are clamped to its edge, as a real pointer
cannot leave the screen. Time does not pass: `wait` changes nothing, and two
single clicks are never a double click (use `count=2`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.environments.gyms.desktop import canvas
from tunix.rl.multi_turn.environments.gyms.desktop import containers
from tunix.rl.multi_turn.environments.gyms.desktop import font
from tunix.rl.multi_turn.environments.gyms.desktop import widgets
from tunix.rl.multi_turn.parser.tool_parser import keys as key_names

MIN_WIDTH, MIN_HEIGHT = 128, 96

_Kind = gui_action.GuiActionKind
_MODIFIERS = ("ctrl", "alt", "shift", "meta")


@dataclasses.dataclass(frozen=True)
class Event:
  """An event in a scene: press, edit, tick, choose, slide, open, close, …"""

  kind: str
  widget: widgets.Widget | None = None
  value: Any = None


def normal_keys(keys: tuple[str, ...]) -> str:
  """Key names to one canonical combination: ("Control", "A") -> "ctrl+a"."""
  names: list[str] = []
  for key in keys:
    key = key.lower() if len(key) > 1 else key
    parts = key.split("+") if len(key) > 1 and key.strip("+") else [key]
    for part in parts:
      # A single character keeps its case.
      one = len(part) == 1 and part != " "
      names.append(part if one else key_names.key_name(part) or part)
  plain = [n for n in names if n not in _MODIFIERS]
  mods = [m for m in _MODIFIERS if m in names]
  if mods:
    plain = [p.lower() for p in plain]
  return "+".join(mods + plain)


def ui_scale(width: int, height: int) -> int:
  """Pixels a layout unit: 1 up to about 288x216, 2 at 640x480, 3 at 720p.

  Grows as the square root of the size, so that a larger screen has both
  larger text and more room.
  """
  return max(1, round(math.sqrt(min(width / 128, height / 96))))


class Scene:
  """Widgets on a desktop of `width` x `height` pixels."""

  def __init__(
    self, width: int, height: int, theme: canvas.Theme = canvas.LIGHT
  ):
    if width < MIN_WIDTH or height < MIN_HEIGHT:
      raise ValueError(
        f"a desktop needs at least {MIN_WIDTH}x{MIN_HEIGHT} pixels for its"
        f" text to be readable, got width={width}, height={height}"
      )
    self.width, self.height = width, height
    self.k = ui_scale(width, height)
    self.w, self.h = width // self.k, height // self.k  # layout units
    self.theme = theme
    self.items: list[widgets.Widget] = []
    self.focus: widgets.Widget | None = None
    self.menu: containers.Menu | None = None
    self.pointer: tuple[int, int] | None = None
    self.clipboard = ""
    self.answer: str | None = None
    self.terminated = False
    self.events: list[Event] = []
    self._pixels: np.ndarray | None = None

  # -- what widgets and builders use ---------------------------------------

  def add(self, item):
    """Puts a widget in front of all others and returns it."""
    self.items.append(item)
    return item

  def emit(self, kind: str, widget=None, value=None) -> None:
    self.events.append(Event(kind, widget, value))

  def front_window(self) -> containers.Window | None:
    for item in reversed(self.items):
      if isinstance(item, containers.Window):
        return item
    return None

  def close(self, window: containers.Window) -> None:
    if window in self.items:
      self.items.remove(window)
      self.focus = None
      self.emit("close", window)

  def open_menu(self, x, y, items, owner, width=0, below=0) -> None:
    """Shows a menu at (x, y), which is `below` units under its owner's top."""
    width = max([width] + [font.text_width(i) + 10 for i in items])
    height = len(items) * containers.Menu.ITEM_HEIGHT + 2
    x = max(0, min(x, self.w - width))
    if y + height > self.h and y - height - below >= 0:
      y -= height + below  # no room underneath: open upwards
    y = max(0, min(y, self.h - height))
    self.menu = containers.Menu(x, y, width, items, owner)

  # -- looking ---------------------------------------------------------------

  def hit(self, x: int, y: int) -> widgets.Widget | None:
    """Returns the frontmost widget at a layout position.

    None on the bare desktop and outside the screen.
    """
    if not (0 <= x < self.w and 0 <= y < self.h):
      return None
    roots = [*self.items, self.menu] if self.menu else self.items
    hits = (root.hit(x, y) for root in reversed(roots))
    return next((widget for widget in hits if widget is not None), None)

  def to_px(self, x: int, y: int) -> tuple[int, int]:
    """Middle pixel of a layout position."""
    return x * self.k + self.k // 2, y * self.k + self.k // 2

  def point(self, widget: widgets.Widget) -> tuple[int, int] | None:
    """Centre of a widget in pixels; None when another covers it."""
    x, y = widget.center()
    _, dy = self._local(widget, 0, 0)
    y -= dy
    if not (0 <= x < self.w and 0 <= y < self.h):
      return None
    return self.to_px(x, y) if self.hit(x, y) is widget else None

  def referring_expressions(self) -> list[tuple[str, int, int]]:
    """(phrase, x, y) of each visible object that a phrase names uniquely."""
    centres: dict[str, list[tuple[int, int] | None]] = {}
    roots = self.items + ([self.menu] if self.menu else [])
    for root in roots:
      for widget in root.walk():
        phrases = widget.phrases()
        if phrases:
          point = self.point(widget)
          for phrase in phrases:
            centres.setdefault(phrase, []).append(point)
        if isinstance(widget, containers.Window):
          x, y = widget.title_center()
          inside = 0 <= x < self.w and 0 <= y < self.h
          point = (
            self.to_px(x, y) if (inside and self.hit(x, y) is widget) else None
          )
          centres.setdefault(widget.title_phrase(), []).append(point)
    return [
      (phrase, *points[0])
      for phrase, points in centres.items()
      if len(points) == 1 and points[0] is not None
    ]

  def describe(self, x: float, y: float) -> str | None:
    """The phrase that names the object at a pixel; None when none does."""
    at = int(x) // self.k, int(y) // self.k
    widget = self.hit(*at)
    if widget is None:
      return None
    phrases = widget.phrases()
    if isinstance(widget, containers.Window) and widget.in_title(at[1]):
      phrases = (widget.title_phrase(),)
    unique = {phrase for phrase, _, _ in self.referring_expressions()}
    return next((phrase for phrase in phrases if phrase in unique), None)

  def screenshot(self) -> np.ndarray:
    """uint8[height, width, 3], read-only; the same array until a change."""
    if self._pixels is None:
      image = canvas.wallpaper(self.width, self.height, self.theme).copy()
      c = canvas.Canvas(image, self.k)
      for item in self.items:
        item.draw(c, self)
      if self.menu is not None:
        self.menu.draw(c, self)
      self._pixels = np.asarray(image)
      self._pixels.flags.writeable = False
    return self._pixels

  # -- acting ----------------------------------------------------------------

  def act(self, action: gui_action.GuiAction) -> dict[str, Any]:
    """Carries out one action; the events it caused are in `self.events`."""
    self.events = []
    positions = (action.x, action.y, action.x2, action.y2)
    for value in positions + (action.dx, action.dy):
      if value is not None and not math.isfinite(value):
        return {"ignored": f"a position or distance is {value}"}
    handler = getattr(self, f"_do_{action.kind.value}", None)
    if handler is None:
      return {"ignored": f"a desktop has no {action.kind.value!r}"}
    info: dict[str, Any] = {}
    limits = (self.width, self.height) * 2
    clamped = any(
      v is not None and not 0 <= v < limit
      for v, limit in zip(positions, limits)
    )
    if clamped:
      info["clamped"] = True
    ignored = handler(action)
    if ignored:
      info["ignored"] = ignored
    else:
      self._pixels = None
    return info

  def _position(self, x: float, y: float) -> tuple[int, int]:
    x = min(max(int(x), 0), self.width - 1) // self.k
    y = min(max(int(y), 0), self.height - 1) // self.k
    return min(x, self.w - 1), min(y, self.h - 1)

  def _local(self, widget, x: int, y: int) -> tuple[int, int]:
    """A screen position in the unscrolled frame that a widget lives in."""
    parent = widget.parent
    while parent is not None:
      if isinstance(parent, containers.ScrollArea):
        y += parent.offset
      parent = parent.parent
    return x, y

  def _root(self, widget: widgets.Widget) -> widgets.Widget:
    while widget.parent is not None:
      widget = widget.parent
    return widget

  def _modal(self) -> containers.Window | None:
    window = self.front_window()
    return window if window is not None and window.modal else None

  def _touch(self, x: int, y: int) -> tuple[widgets.Widget | None, str]:
    """Handles menu, modality, raising, focus; the widget hit, or the reason."""
    self.pointer = (x, y)
    widget = self.hit(x, y)
    if self.menu is not None:
      if widget is not None and self._root(widget) is self.menu:
        return widget, ""
      self.menu = None
      return None, ""  # the press only closes the menu
    modal = self._modal()
    if modal is not None and (
      widget is None or self._root(widget) is not modal
    ):
      return None, "a dialog is open"
    if widget is None:
      self.focus = None
      return None, ""
    root = self._root(widget)
    if isinstance(root, containers.Window) and self.items[-1] is not root:
      self.items.remove(root)
      self.items.append(root)
    usable = widget.focusable and widget.enabled
    self.focus = widget if usable else None
    return widget, ""

  def _do_click(self, action):
    x, y = self._position(action.x, action.y)
    if action.button == "right":
      return self._context(x, y)
    if action.button != "left":
      return f"nothing here uses the {action.button} button"
    widget, why = self._touch(x, y)
    if widget is not None:
      widget.press(self, *self._local(widget, x, y), action.count)
    return why

  def _context(self, x: int, y: int) -> str:
    """Opens the context menu of the object at a position."""
    if self.menu is not None:
      self.menu = None
    widget, why = self._touch(x, y)
    if why:
      return why
    if widget is not None and widget.context_items:
      self.emit("context", widget)
      self.open_menu(x, y, widget.context_items, widget)
    return ""

  def _do_long_press(self, action):
    return self._context(*self._position(action.x, action.y))

  def _do_move(self, action):
    self.pointer = self._position(action.x, action.y)
    self.emit("hover", self.hit(*self.pointer))
    return ""

  def _do_drag(self, action):
    if action.button != "left":
      return f"nothing here is dragged with the {action.button} button"
    if action.x is None or action.y is None:
      if self.pointer is None:
        return "a drag without a start needs an earlier pointer position"
      x, y = self.pointer
    else:
      x, y = self._position(action.x, action.y)
    x2, y2 = self._position(action.x2, action.y2)
    widget, why = self._touch(x, y)
    self.pointer = (x2, y2)
    if widget is not None:
      widget.drag(
        self, *self._local(widget, x, y), *self._local(widget, x2, y2)
      )
    return why

  def _do_swipe(self, action):
    x, y = self._position(action.x, action.y)
    _, y2 = self._position(action.x2, action.y2)
    widget = self.hit(x, y)
    area = self._scroll_area(widget)
    if area is None or isinstance(widget, widgets.Slider):
      return self._do_drag(
        dataclasses.replace(action, kind=_Kind.DRAG, duration=None)
      )
    _, why = self._touch(x, y)
    if not why:
      area.scroll(self, y - y2)
    return why

  def _scroll_area(self, widget) -> containers.ScrollArea | None:
    while widget is not None:
      if isinstance(widget, containers.ScrollArea):
        return widget
      widget = widget.parent
    return None

  def _do_scroll(self, action):
    if action.x is not None and action.y is not None:
      self.pointer = self._position(action.x, action.y)
    if self.pointer is None:
      return "a scroll without a position needs an earlier pointer position"
    widget = self.hit(*self.pointer)
    modal = self._modal()
    if widget is not None and modal not in (None, self._root(widget)):
      return "a dialog is open"
    area = self._scroll_area(widget)
    if area is None:
      return "nothing scrolls at this position"
    distance = abs(action.dy) / self.k
    # At least one unit, whatever the factor.
    units = max(1, round(distance)) if distance else 0
    area.scroll(self, units if action.dy > 0 else -units)
    return ""

  def _do_type(self, action):
    if not action.text:
      return "there is no text to type"
    text = action.text.replace("\r\n", "\n").replace("\r", "\n")
    used = False
    for char in _pieces(text):
      if char == "\n":
        used |= not self._press_keys("enter")
      elif char == "\t":
        used |= not self._press_keys("tab")
      elif self.focus is not None:
        used |= self.focus.insert(self, char)
    return "" if used else "nothing that takes text has the focus"

  def _do_key(self, action):
    combo = normal_keys(action.keys)
    self.emit("key", self.focus, combo)
    return self._press_keys(combo)

  def _press_keys(self, combo: str) -> str:
    """Returns why nothing happened, or ""."""
    if self.menu is not None:
      if combo == "escape":
        self.menu = None
        return ""
      if combo in ("up", "down", "enter"):
        return self._menu_key(self.menu, combo)
      return "a menu is open"
    if combo in ("tab", "shift+tab"):
      return self._next_focus(-1 if combo == "shift+tab" else 1)
    focus = self.focus
    if focus is not None and focus.key(self, combo):
      return ""
    if focus is not None:
      char = (
        combo
        if len(combo) == 1
        else (combo[6:].upper() if combo.startswith("shift+") else "")
      )
      if combo == "space":
        char = " "
      if len(char) == 1 and focus.insert(self, char):
        return ""
    window = self._root(focus) if focus is not None else self.front_window()
    default = window.default if isinstance(window, containers.Window) else None
    if combo == "enter" and default is not None:
      default.press(self, *default.center(), 1)
      return ""
    modal = self._modal()
    if combo == "escape" and modal is not None and modal.close_box:
      self.close(modal)
      return ""
    if combo in ("pageup", "pagedown"):
      areas = [
        w
        for w in (window.walk() if window is not None else ())
        if isinstance(w, containers.ScrollArea)
      ]
      if areas:
        step = areas[0].h * 3 // 4
        areas[0].scroll(self, step if combo == "pagedown" else -step)
        return ""
    return f"nothing uses the key {combo!r} here"

  def _menu_key(self, menu: containers.Menu, combo: str) -> str:
    children = menu.children
    at = next(
      (
        i
        for i, c in enumerate(children)
        if self.pointer is not None and c.contains(*self.pointer)
      ),
      None,
    )
    if combo == "enter":
      if at is None:
        return "no line of the menu is marked"
      children[at].press(self, *children[at].center(), 1)
      return ""
    if at is None:
      at = 0 if combo == "down" else len(children) - 1
    else:
      at = (at + (1 if combo == "down" else -1)) % len(children)
    self.pointer = children[at].center()
    return ""

  def _next_focus(self, step: int) -> str:
    window = self.front_window()
    roots = [window] if window is not None else self.items
    ring = [
      w for root in roots for w in root.walk() if w.focusable and w.enabled
    ]
    if not ring:
      return "nothing here can have the focus"
    if self.focus in ring:
      at = (ring.index(self.focus) + step) % len(ring)
    else:
      at = 0 if step > 0 else -1
    self.focus = ring[at]
    area = self._scroll_area(self.focus.parent)
    if area is not None:
      top = self.focus.y - area.y
      if not area.offset <= top <= area.offset + area.h - self.focus.h:
        area.scroll(self, top - area.offset)
    self.emit("focus", self.focus)
    return ""

  def _do_system_button(self, action):
    name = (action.text or "").lower()
    if name == "enter":
      return self._press_keys("enter")
    if name == "back":
      return self._press_keys("escape")
    return f"a desktop has no system button {name!r}"

  def _do_answer(self, action):
    self.answer = action.text
    self.emit("answer", None, action.text)
    return ""

  def _do_terminate(self, action):
    self.terminated = True
    self.emit("terminate", None, action.success)
    return ""

  def _do_wait(self, action):
    return ""

  _do_screenshot = _do_wait


def _pieces(text: str):
  """Runs of ordinary characters, and each tab or line end on its own."""
  start = 0
  for i, char in enumerate(text):
    if char in "\n\t":
      if i > start:
        yield text[start:i]
      yield char
      start = i + 1
  if start < len(text):
    yield text[start:]
