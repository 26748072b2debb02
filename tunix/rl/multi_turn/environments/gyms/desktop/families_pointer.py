"""Defines families of pointing, scrolling, dragging, menus, keys, answers."""

from __future__ import annotations

from tunix.rl.multi_turn.environments.gyms.desktop import containers
from tunix.rl.multi_turn.environments.gyms.desktop import families_basic
from tunix.rl.multi_turn.environments.gyms.desktop import family
from tunix.rl.multi_turn.environments.gyms.desktop import font
from tunix.rl.multi_turn.environments.gyms.desktop import items
from tunix.rl.multi_turn.environments.gyms.desktop import layout
from tunix.rl.multi_turn.environments.gyms.desktop import scene as scene_lib
from tunix.rl.multi_turn.environments.gyms.desktop import widgets
from tunix.rl.multi_turn.environments.gyms.desktop import words


@family.register
class ScrollAndClick(family.Family):
  """Find a row of a list that is longer than its area, and click it."""

  name = "scroll-and-click"
  max_turns = (4, 5, 6)
  ROW = 14

  def sample(self, rng, level):
    count = (8, 14, 22)[level]
    names = rng.sample(words.CHOICES, count)
    goal = rng.randrange(count)
    text = rng.choice(
      (
        "Click {} in the list.",
        "Scroll the list and choose {}.",
        "Find {} in the list and click it.",
      )
    ).format(names[goal])
    return family.Spec(text, {"names": names, "goal": goal})

  def build(self, ep, data, rng):
    win, (x, y, w, h) = families_basic.form(ep, rng, 100, 66)
    h = min(h, self.ROW * (len(data["names"]) - 2))  # always worth scrolling
    area = win.add(
      containers.ScrollArea(x, y, w, h, len(data["names"]) * self.ROW)
    )
    for i, name in enumerate(data["names"]):
      area.add(
        items.Row(x + 1, y + i * self.ROW, w - area.BAR - 1, self.ROW, name)
      )
    ep.w.update(area=area, row=area.children[data["goal"]])

  def judge(self, ep, event):
    if event.kind == "choose":
      return event.widget is ep.w["row"]
    return None

  def oracle(self, ep):
    area, row = ep.w["area"], ep.w["row"]
    top = row.y - area.y - area.offset
    if 0 <= top <= area.h - row.h:
      return family.click(ep, row)
    goal = min(area.limit, max(0, row.y - area.y - (area.h - row.h) // 2))
    middle = area.center()
    if ep.scene.hit(*middle) not in area.walk():
      return family.uncover(ep, area)
    x, y = ep.scene.to_px(*middle)
    dy = (goal - area.offset) * ep.scene.k
    return family.Action(family.Kind.SCROLL, x=x, y=y, dy=dy)


@family.register
class DragToTarget(family.Family):
  """Drag the named shape into the (named) box."""

  name = "drag-to-target"
  max_turns = (3, 4, 4)

  def sample(self, rng, level):
    colors = rng.sample(list(words.COLORS), 1 + level)
    forms = [rng.choice(("square", "circle")) for _ in colors]
    things = list(zip(colors, forms))
    boxes = rng.sample("ABCD", 1 + (level == 2))
    what = " ".join(things[0])
    if len(boxes) == 1:
      text = rng.choice(
        (
          "Drag the {} into the box.",
          "Move the {} into the box.",
          "Drop the {} in the box.",
        )
      ).format(what)
    else:
      text = rng.choice(
        ("Drag the {} into box {}.", "Move the {} to box {}.")
      ).format(what, boxes[0])
    return family.Spec(text, {"things": things, "boxes": boxes})

  def build(self, ep, data, rng):
    win, area = families_basic.form(ep, rng, 114, 68)
    boxes, things = data["boxes"], data["things"]
    side = 38 if len(boxes) == 1 else 32
    sizes = [(side, side)] * len(boxes) + [(18, 18)] * len(things)
    spots = layout.place(rng, area, sizes, gap=2)
    names = boxes if len(boxes) > 1 else [""]
    ep.w["boxes"] = [
      win.add(items.DropZone(*at, side, side, name))
      for at, name in zip(spots, names)
    ]
    ep.w["shapes"] = [
      win.add(items.Shape(x, y, 18, color, shape, movable=True))
      for (x, y), (color, shape) in zip(spots[len(boxes) :], things)
    ]

  def judge(self, ep, event):
    if event.kind != "drop":
      return None
    for box in ep.w["boxes"]:
      if box.contains(*event.widget.center()):
        return event.widget is ep.w["shapes"][0] and box is ep.w["boxes"][0]
    return None  # dropped beside: may be taken up again

  def oracle(self, ep):
    shape, box = ep.w["shapes"][0], ep.w["boxes"][0]
    return family.drag_to(ep, shape, *box.center())


@family.register
class RightClickMenu(family.Family):
  """Open an icon's context menu and choose an entry of it."""

  name = "right-click-menu"
  max_turns = (4, 4, 5)

  def sample(self, rng, level):
    names = rng.sample(words.ICON_NAMES, (2, 3, 4)[level])
    items = rng.sample(words.MENU_ITEMS, (3, 3, 4)[level])
    goal = rng.randrange(len(items))
    text = rng.choice(
      (
        "Choose {1} in the menu of {0}.",
        "Right-click {0} and choose {1}.",
        "Right-click the {0} icon, then pick {1}.",
      )
    ).format(names[0], items[goal])
    return family.Spec(text, {"names": names, "items": items, "goal": goal})

  def build(self, ep, data, rng):
    scene = ep.scene
    sizes = [items.Icon.SIZE] * len(data["names"])
    spots = layout.place(rng, (1, 1, scene.w - 2, scene.h - 2), sizes, gap=4)
    ep.w["icons"] = []
    for at, name in zip(spots, data["names"]):
      icon = scene.add(items.Icon(*at, name))
      icon.context_items = tuple(data["items"])
      ep.w["icons"].append(icon)

  def judge(self, ep, event):
    if event.kind == "menu":
      return (
        event.widget is ep.w["icons"][0]
        and event.value == ep.spec.data["items"][ep.spec.data["goal"]]
      )
    if event.kind == "open":
      return False
    return None

  def oracle(self, ep):
    menu, icon = ep.scene.menu, ep.w["icons"][0]
    if menu is not None and menu.owner is icon:
      return family.click(ep, menu.children[ep.spec.data["goal"]])
    if menu is not None:
      return family.Action(family.Kind.KEY, keys=("escape",))
    x, y = ep.scene.point(icon)
    return family.Action(family.Kind.CLICK, x=x, y=y, button="right")


@family.register
class PressKey(family.Family):
  """Press the named key or combination; any other combination loses."""

  name = "press-key"
  max_turns = (2, 2, 2)

  def sample(self, rng, level):
    keys = words.SHORTCUTS
    pool = (keys[:6], keys[:12], keys)[level]
    combo = rng.choice(pool)
    text = rng.choice(
      ("Press {}.", "Use the shortcut {}.", "Press the keys {}.")
      if "+" in combo
      else ("Press {}.", "Press the {} key.")
    ).format(combo)
    return family.Spec(text, {"combo": combo})

  def build(self, ep, data, rng):
    win, (x, y, w, h) = families_basic.form(ep, rng, 104, 60)
    lines = rng.sample(words.TYPING_WORDS, 6)
    for i in range(min(h // 12, 5)):
      text = " ".join(lines[j % 6] for j in range(i, i + 3))
      win.add(widgets.Label(x + 2, y + 2 + i * 12, text, w=w - 4))

  def judge(self, ep, event):
    if event.kind == "key":
      return event.value == scene_lib.normal_keys((ep.spec.data["combo"],))
    return None

  def oracle(self, ep):
    return family.Action(
      family.Kind.KEY, keys=tuple(ep.spec.data["combo"].split("+"))
    )


class _Question(family.Family):
  """Won by the right answer, lost by any other; `answer` ends it."""

  max_turns = (2, 2, 2)

  def judge(self, ep, event):
    if event.kind == "answer":
      answer = " ".join(str(event.value).lower().split()).strip(".!\"' ")
      return answer == ep.spec.data["answer"].lower()
    return None

  def oracle(self, ep):
    return family.Action(family.Kind.ANSWER, text=ep.spec.data["answer"])


@family.register
class AnswerQuestion(_Question):
  """Read a value off the screen and answer with it; add two at level 2."""

  name = "answer-question"

  def sample(self, rng, level):
    names = rng.sample(words.FACT_NAMES, (2, 4, 4)[level])
    values: list = [rng.randrange(2, (100, 1000, 50)[level]) for _ in names]
    if level == 1:
      values[2:] = rng.sample(words.TYPING_WORDS, 2)
    goal = rng.randrange(len(names))
    if level == 2:
      second = (goal + rng.randrange(1, 4)) % 4
      answer = str(values[goal] + values[second])
      text = f"What is {names[goal]} plus {names[second]}?"
    else:
      answer = str(values[goal])
      text = rng.choice(
        ("What is the {}?", "What is shown as {}?", "Read the {}.")
      ).format(names[goal])
    return family.Spec(
      text, {"names": names, "values": values, "answer": answer}
    )

  def build(self, ep, data, rng):
    win, area = families_basic.form(ep, rng, 108, 66)
    x, _, w, _ = area
    column = max(font.text_width(name) for name in data["names"]) + 12
    rows = layout.column(area, len(data["names"]), 12)
    for name, value, top in zip(data["names"], data["values"], rows):
      win.add(widgets.Label(x + 3, top + 2, name))
      win.add(widgets.Label(x + 3 + column, top + 2, str(value)))
