"""Makes random scenes without a task: pictures to learn grounding from.

`fill` lays a random mixture of every kind of widget out on a desktop. Names
are distinct, so nearly all phrases of `Scene.referring_expressions` hold.
"""

from __future__ import annotations

import random

from tunix.rl.multi_turn.environments.gyms.desktop import canvas
from tunix.rl.multi_turn.environments.gyms.desktop import containers
from tunix.rl.multi_turn.environments.gyms.desktop import font
from tunix.rl.multi_turn.environments.gyms.desktop import items
from tunix.rl.multi_turn.environments.gyms.desktop import layout
from tunix.rl.multi_turn.environments.gyms.desktop import scene as scene_lib
from tunix.rl.multi_turn.environments.gyms.desktop import widgets
from tunix.rl.multi_turn.environments.gyms.desktop import words


class _Names:
  """Hands each name out once."""

  def __init__(self, rng: random.Random):
    self._rng = rng
    self._left: dict[tuple[str, ...], list[str]] = {}

  def take(self, pool: tuple[str, ...]) -> str:
    remaining = self._left.get(pool)
    if not remaining:
      remaining = self._left[pool] = self._rng.sample(pool, len(pool))
    return remaining.pop()


def _pieces(rng: random.Random, names: _Names):
  """kind -> (width, height, build(parent, x, y)) of one random piece."""

  def button():
    name = names.take(words.BUTTON_LABELS)
    size = widgets.Button.size(name)
    return *size, lambda p, x, y: p.add(
      widgets.Button(x, y, *size, name, rng.random() > 0.1)
    )

  def field():
    name = names.take(words.FIELD_NAMES)
    label = font.text_width(name) + 5
    width = rng.randint(36, 70)
    text = rng.choice(words.TYPING_WORDS) if rng.random() < 0.4 else ""

    def build(parent, x, y):
      parent.add(widgets.Label(x, y + 5, name))
      parent.add(widgets.TextField(x + label, y, width, 16, name, text))

    return label + width, 16, build

  def check():
    name = names.take(words.CHOICES)
    ticked = rng.random() < 0.4
    return (
      widgets.CheckBox.width(name),
      14,
      lambda p, x, y: p.add(widgets.CheckBox(x, y, name, ticked)),
    )

  def radios():
    labels = [names.take(words.CHOICES) for _ in range(2)]
    width = max(widgets.CheckBox.width(name) for name in labels)

    def build(parent, x, y):
      group: list[widgets.RadioButton] = []
      for i, name in enumerate(labels):
        parent.add(widgets.RadioButton(x, y + 15 * i, name, group))
      rng.choice(group).chosen = True

    return width, 29, build

  def drop_down():
    name = names.take(words.DROP_DOWN_NAMES)
    options = rng.sample(words.CHOICES, 3)
    label = font.text_width(name) + 5
    width = max(font.text_width(o) for o in options) + 26

    def build(parent, x, y):
      parent.add(widgets.Label(x, y + 5, name))
      parent.add(widgets.DropDown(x + label, y, width, 16, name, options))

    return label + width, 16, build

  def slider():
    name = names.take(words.SLIDER_NAMES)
    width, value = rng.randint(60, 100), rng.randint(0, 10)
    return (
      width,
      widgets.Slider.HEIGHT,
      lambda p, x, y: p.add(widgets.Slider(x, y, width, name, 10, value)),
    )

  def shape():
    color, form = names.take(_PAIRS).split()
    size = rng.randint(16, 26)
    return (
      size,
      size,
      lambda p, x, y: p.add(items.Shape(x, y, size, color, form)),
    )

  def box():
    name = names.take(("A", "B", "C", "D"))
    return 28, 28, lambda p, x, y: p.add(items.DropZone(x, y, 28, 28, name))

  def rows():
    labels = [names.take(words.CHOICES) for _ in range(4)]
    offset = rng.choice((0, 14))

    def build(parent, x, y):
      area = parent.add(containers.ScrollArea(x, y, 64, 42, 4 * 14))
      for i, name in enumerate(labels):
        area.add(items.Row(x + 1, y + i * 14, 54, 14, name))
      area.offset = min(area.limit, offset)

    return 64, 42, build

  return (
    button,
    button,
    button,
    field,
    field,
    check,
    check,
    radios,
    drop_down,
    slider,
    shape,
    shape,
    box,
    rows,
  )


_PAIRS = tuple(f"{c} {s}" for c in words.COLORS for s in words.SHAPES)


def _fill_window(rng, win, names, limit) -> None:
  """Adds random pieces until four did not fit."""
  x, y, w, h = win.client()
  pieces = _pieces(rng, names)
  occupied: list[layout.Rect] = []
  misses = 0
  while misses < 4 and len(occupied) < limit:
    width, height, build = rng.choice(pieces)()
    spot = layout.free_spot(rng, (x, y, w, h), (width, height), occupied)
    if spot is None:
      misses += 1
      continue
    occupied.append((*spot, width, height))
    build(win, *spot)


FIELD_KINDS = ("color", "shape", "icon", "button", "check box")


def field(width: int, height: int, seed: int, kind: str) -> scene_lib.Scene:
  """Five to eight things of one kind, scattered over a bare desktop.

  They differ in one word, so that only that word and its looks distinguish
  them. Kinds: coloured squares ("color"), coloured shapes
  ("shape"), icons, buttons, check boxes.
  """
  if kind not in FIELD_KINDS:
    raise ValueError(
      f"kind must be one of {', '.join(FIELD_KINDS)}, got {kind!r}"
    )
  rng = random.Random(f"field/{kind}/{seed}/{width}x{height}")
  theme = rng.choice((canvas.LIGHT,) * 3 + canvas.THEMES)
  scene = scene_lib.Scene(width, height, theme)
  names = _Names(rng)
  pools = {
    "color": tuple(words.COLORS),
    "shape": _PAIRS,
    "icon": words.ICON_NAMES,
    "button": words.BUTTON_LABELS,
    "check box": words.CHOICES,
  }
  sizes = {
    "icon": lambda name: items.Icon.SIZE,
    "button": widgets.Button.size,
    "check box": lambda name: (widgets.CheckBox.width(name), 14),
  }
  occupied: list[layout.Rect] = []
  for _ in range(min(rng.randint(5, 8), len(pools[kind]))):
    name = names.take(pools[kind])
    edge = rng.randint(14, 22)
    w, h = sizes[kind](name) if kind in sizes else (edge, edge)
    area = (1, 1, scene.w - 2, scene.h - 2)
    spot = layout.free_spot(rng, area, (w, h), occupied)
    if spot is None:
      continue
    occupied.append((*spot, w, h))
    if kind == "icon":
      scene.add(items.Icon(*spot, name))
    elif kind == "button":
      scene.add(widgets.Button(*spot, w, h, name))
    elif kind == "check box":
      scene.add(widgets.CheckBox(*spot, name, rng.random() < 0.3))
    else:
      color, form = name.split() if kind == "shape" else (name, "square")
      scene.add(items.Shape(*spot, edge, color, form))
  return scene


def random_scene(width: int, height: int, seed: int) -> scene_lib.Scene:
  """Returns a desktop with icons, one window or more and sometimes a dialog."""
  rng = random.Random(f"scene/{seed}/{width}x{height}")
  theme = rng.choice((canvas.LIGHT,) * 3 + canvas.THEMES)
  scene = scene_lib.Scene(width, height, theme)
  names = _Names(rng)
  count = max(1, scene.w * scene.h // 40_000)
  kind = rng.random()
  if kind < 0.15:  # only icons
    layout.clutter(rng, scene, rng.randint(3, 6))
    return scene
  for _ in range(count):
    title = names.take(words.WINDOW_TITLES)
    w = rng.randint(min(96, scene.w - 8), min(scene.w - 8, 160))
    h = rng.randint(50, min(scene.h - 22, 110))
    win = layout.window(rng, scene, title, w, h, grow=False)
    if kind < 0.3:
      tabs = rng.sample([n for n in words.TAB_NAMES if len(n) < 6], 3)
      view = win.add(containers.TabView(*win.client(), tabs))
      front = rng.choice(view.tabs)
      for tab in view.tabs:
        tab.front = tab is front
      page = view.pages[front.name]
      label = names.take(words.BUTTON_LABELS)
      size = widgets.Button.size(label)
      spot = layout.free_spot(
        rng, (page.x + 3, page.y + 3, page.w - 6, page.h - 6), size, []
      )
      if spot is not None:
        page.add(widgets.Button(*spot, *size, label))
    else:
      _fill_window(rng, win, names, rng.randint(3, 9))
  if rng.random() < 0.2:
    buttons = rng.sample(words.DIALOG_BUTTONS, 2)
    message = rng.choice(words.MESSAGES)
    layout.dialog(rng, scene, names.take(words.WINDOW_TITLES), message, buttons)
  layout.clutter(rng, scene, rng.randint(0, 4))
  fields = [
    widget for item in scene.items for widget in item.walk() if widget.focusable
  ]
  if fields and rng.random() < 0.3:
    scene.focus = rng.choice(fields)
  return scene
