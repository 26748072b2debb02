"""Defines the six easiest families: one or two turns, clean at level 0."""

from __future__ import annotations

from tunix.rl.multi_turn.environments.gyms.desktop import family
from tunix.rl.multi_turn.environments.gyms.desktop import font
from tunix.rl.multi_turn.environments.gyms.desktop import items
from tunix.rl.multi_turn.environments.gyms.desktop import layout
from tunix.rl.multi_turn.environments.gyms.desktop import widgets
from tunix.rl.multi_turn.environments.gyms.desktop import words


def add_buttons(parent, names, spots, height=16):
  """Buttons with `names` at `spots`, as children of `parent`."""
  return [
    parent.add(widgets.Button(x, y, *widgets.Button.size(name, height), name))
    for name, (x, y) in zip(names, spots)
  ]


def form(ep, rng, w=112, h=66):
  """A window with a random title; returns it and its client area."""
  win = layout.window(rng, ep.scene, rng.choice(words.WINDOW_TITLES), w, h)
  return win, win.client()


def text_fields(win, area, names, order, texts=None, height=15):
  """Adds a column of labelled text fields.

  Args:
    win: Window that gets them.
    area: Rectangle of the column.
    names: Labels of the fields.
    order: Indices of `names`, from the top of the column.
    texts: Text of each field; None leaves all of them empty.
    height: Height of a field in layout units.

  Returns:
    The fields in the order of `names`.
  """
  x, _, w, _ = area
  label = max(font.text_width(name) for name in names) + 6
  fields = [None] * len(names)
  for i, top in zip(order, layout.column(area, len(names), height)):
    win.add(widgets.Label(x, top + height - 11, names[i]))
    fields[i] = win.add(
      widgets.TextField(
        x + label, top, w - label, height, names[i], texts[i] if texts else ""
      )
    )
  return fields


class _Pick(family.Family):
  """Won when `event` hits the first of `ep.w[widgets]`, lost on another."""

  event = "press"
  widgets = "buttons"
  clicks = 1

  def judge(self, ep, event):
    if event.kind == self.event:
      return event.widget is ep.w[self.widgets][0]
    return None

  def oracle(self, ep):
    return family.click(ep, ep.w[self.widgets][0], count=self.clicks)


@family.register
class ClickButton(_Pick):
  """Click the named one of several buttons; another one loses."""

  name = "click-button"
  max_turns = (3, 3, 3)

  def sample(self, rng, level):
    count = rng.randint(2, 3) if level == 0 else 3 + level
    labels = rng.sample(words.BUTTON_LABELS, count)
    text = rng.choice(
      (
        "Click the {} button.",
        "Press {}.",
        "Click on {}.",
        "Press the button {}.",
      )
    ).format(labels[0])
    return family.Spec(text, {"labels": labels})

  def build(self, ep, data, rng):
    win, _ = form(ep, rng)
    labels = list(data["labels"])
    sizes = [widgets.Button.size(label) for label in labels]
    extra = []
    if ep.level == 2:
      extra = rng.sample(words.CHOICES, 2)
      sizes += [(widgets.CheckBox.width(name), 14) for name in extra]
    spots = layout.place(rng, win.client(2), sizes)
    ep.w["buttons"] = add_buttons(win, labels, spots)
    for name, at in zip(extra, spots[len(labels) :]):
      win.add(widgets.CheckBox(*at, name))


@family.register
class ClickColor(_Pick):
  """Click the shape of the named colour (and form, at level 2)."""

  name = "click-color"
  widgets = "shapes"

  def sample(self, rng, level):
    if level < 2:
      count = rng.randint(3, 4) if level == 0 else rng.randint(4, 6)
      colors = rng.sample(list(words.COLORS), count)
      things = [(color, "square") for color in colors]
    else:
      pairs = [(c, s) for c in words.COLORS for s in words.SHAPES]
      target = rng.choice(pairs)
      # Neither the colour nor the form alone gives the target away.
      same_color = [p for p in pairs if p[0] == target[0] and p != target]
      same_shape = [p for p in pairs if p[1] == target[1] and p != target]
      things = [target, rng.choice(same_color), rng.choice(same_shape)]
      things += rng.sample([p for p in pairs if p not in things], 3)
    text = rng.choice(
      ("Click the {}.", "Click on the {}.", "Select the {}.")
    ).format(" ".join(things[0]))
    return family.Spec(text, {"things": things})

  def build(self, ep, data, rng):
    win, _ = form(ep, rng)
    low, high = ((22, 26), (18, 22), (20, 24))[ep.level]
    sizes = [rng.randint(low, high) for _ in data["things"]]
    spots = layout.place(rng, win.client(2), [(s, s) for s in sizes])
    ep.w["shapes"] = [
      win.add(items.Shape(*at, size, *thing))
      for thing, size, at in zip(data["things"], sizes, spots)
    ]


def _head_shows(scene, win):
  """Whether nothing covers a window's title text and close box."""
  text = font.text_width(win.name)
  spots = [(win.x + 5, win.y + 7), (win.x + 5 + text, win.y + 7)]
  box = win.close_box
  return all(scene.hit(*spot) is win for spot in spots) and all(
    scene.hit(x, y) is box
    for x in (box.x, box.x + box.w - 1)
    for y in (box.y, box.y + box.h - 1)
  )


@family.register
class CloseDialog(family.Family):
  """Close a dialog by its close box or by the button that is named."""

  name = "close-dialog"

  def sample(self, rng, level):
    buttons = rng.sample(words.DIALOG_BUTTONS, 2)
    message = rng.choice(words.MESSAGES)
    titles = rng.sample(words.WINDOW_TITLES, 1 + level)
    if level == 2:
      text = rng.choice(
        ("Close the {} window.", "Close only the window {}.")
      ).format(titles[0])
      how = "window"
    elif rng.random() < 0.5:
      text = rng.choice(
        (
          "Close the dialog.",
          "Close the dialog with its close box.",
          "Dismiss the dialog with the cross.",
        )
      )
      how = "box"
    else:
      text = rng.choice(
        (
          "Press {} in the dialog.",
          "Answer the dialog with {}.",
          "Choose {} in the dialog.",
        )
      ).format(buttons[0])
      how = "button"
    order = rng.sample(range(2), 2)
    return family.Spec(
      text,
      {
        "how": how,
        "buttons": buttons,
        "message": message,
        "titles": titles,
        "order": order,
      },
    )

  def build(self, ep, data, rng):
    scene = ep.scene
    if data["how"] == "window":
      self._windows(ep, data, rng)
      return
    if ep.level:
      back = layout.window(rng, scene, data["titles"][1], 104, 60)
      x, y, w, _ = back.client()
      back.add(widgets.TextField(x, y + 2, w, 15, ""))
    labels = [data["buttons"][i] for i in data["order"]]
    dialog, buttons = layout.dialog(
      rng, scene, data["titles"][0], data["message"], labels
    )
    ep.w.update(
      dialog=dialog,
      target=dialog.close_box
      if data["how"] == "box"
      else buttons[data["order"].index(0)],
    )

  def _windows(self, ep, data, rng):
    """Three windows of which every title and close box is in sight."""
    scene = ep.scene
    titles = rng.sample(data["titles"], 3)
    for attempt in range(60):
      del scene.items[:]
      wins = [
        layout.window(rng, scene, title, 62, 24, grow=attempt < 30)
        for title in titles
      ]
      if all(_head_shows(scene, win) for win in wins):
        break
    else:  # a cascade always shows all heads
      for i, win in enumerate(wins):
        dx = (scene.w - win.w) * i // 2
        win.shift(dx - win.x, (scene.h - win.h) * i // 2 - win.y)
    for win in wins:
      x, y, w, _ = win.client()
      win.add(widgets.Label(x + 2, y + 4, data["message"], w=w - 4))
    (target,) = [w for w in wins if w.name == data["titles"][0]]
    ep.w.update(dialog=target, target=target.close_box)

  def judge(self, ep, event):
    if event.kind == "press":
      return event.widget is ep.w["target"]
    if event.kind == "close":
      return (
        event.widget is ep.w["dialog"]
        and ep.w["target"] is ep.w["dialog"].close_box
      )
    return None

  def oracle(self, ep):
    return family.click(ep, ep.w["target"])


@family.register
class EnterText(family.Family):
  """Click the field, then type the quoted word; nothing else may change."""

  name = "enter-text"
  max_turns = (4, 6, 8)

  def sample(self, rng, level):
    text = rng.choice(words.TYPING_WORDS)
    names = rng.sample(words.FIELD_NAMES, 1 + level)
    if level == 0:
      pattern = rng.choice(
        (
          'Type "{0}" into the text field.',
          'Enter "{0}" in the field.',
          'Click the field and type "{0}".',
        )
      )
    else:
      pattern = rng.choice(
        (
          'Type "{0}" into the {1} field.',
          'Enter "{0}" as {1}.',
          'Set the {1} field to "{0}".',
        )
      )
    old = ["" for _ in names]
    if level == 2:
      candidates = [w for w in words.TYPING_WORDS if w != text]
      old = rng.sample(candidates, len(names))
    order = rng.sample(range(len(names)), len(names))
    return family.Spec(
      pattern.format(text, names[0]),
      {"text": text, "names": names, "old": old, "order": order},
    )

  def build(self, ep, data, rng):
    names = data["names"]
    win, area = form(ep, rng, 104, 64)
    if ep.level == 0:
      width = rng.randint(64, max(64, min(area[2], 140)))
      (spot,) = layout.place(rng, area, [(width, 16)])
      ep.w["fields"] = [win.add(widgets.TextField(*spot, width, 16, ""))]
      return
    ep.w["fields"] = text_fields(
      win, area, names, data["order"], data["old"], 16
    )

  def solved(self, ep):
    want = [ep.spec.data["text"]] + list(ep.spec.data["old"][1:])
    return [field.text for field in ep.w["fields"]] == want

  def oracle(self, ep):
    want = [ep.spec.data["text"]] + list(ep.spec.data["old"][1:])
    for field, text in reversed(list(zip(ep.w["fields"], want))):
      action = family.enter(ep, field, text)
      if action is not None:
        return action
    return None


@family.register
class ClickCheckboxes(family.Family):
  """Tick exactly the named boxes; a wrong tick can be undone."""

  name = "click-checkboxes"
  max_turns = (4, 8, 12)

  def sample(self, rng, level):
    count = (rng.randint(2, 3), 4, 6)[level]
    targets = rng.randint(1, (1 if count == 2 else 2, 3, 4)[level])
    names = rng.sample(words.CHOICES, count)
    ticked = [level == 2 and rng.random() < 0.35 for _ in names]
    if ticked == [i < targets for i in range(count)]:
      ticked[0] = False  # never solved from the start
    pattern = rng.choice(
      ("Tick {}.", "Check {}.", "Select {}.")
      if level == 0
      else ("Tick only {}.", "Check {} and nothing else.", "Select just {}.")
    )
    order = rng.sample(range(count), count)
    named = rng.sample(names[:targets], targets)
    return family.Spec(
      pattern.format(family.quote(named)),
      {"names": names, "wanted": targets, "ticked": ticked, "order": order},
    )

  def build(self, ep, data, rng):
    names = data["names"]
    win, area = form(ep, rng, 116, 68)
    boxes = [None] * len(names)
    if ep.level == 0:
      sizes = [(widgets.CheckBox.width(name), 14) for name in names]
      spots = layout.place(rng, area, sizes, gap=4)
      for i, spot in enumerate(spots):
        boxes[i] = win.add(widgets.CheckBox(*spot, names[i]))
    else:
      columns = ep.level
      half = area[2] // columns
      rows = -(-len(names) // columns)
      tops = layout.column(area, rows, 14)
      for place, i in enumerate(data["order"]):
        boxes[i] = win.add(
          widgets.CheckBox(
            area[0] + (place // rows) * half + 1,
            tops[place % rows],
            names[i],
            data["ticked"][i],
          )
        )
    ep.w["boxes"] = boxes

  def _wrong(self, ep):
    return [
      box
      for i, box in enumerate(ep.w["boxes"])
      if box.ticked != (i < ep.spec.data["wanted"])
    ]

  def solved(self, ep):
    return not self._wrong(ep)

  def oracle(self, ep):
    wrong = self._wrong(ep)
    return family.click(ep, wrong[0]) if wrong else None


@family.register
class OpenIcon(_Pick):
  """Double-click the named icon; a single click only selects it."""

  name = "open-icon"
  event = "open"
  widgets = "icons"
  clicks = 2

  def sample(self, rng, level):
    count = (3, 4, 6)[level]
    names = rng.sample(words.ICON_NAMES, count)
    text = rng.choice(
      (
        "Open {}.",
        "Double-click the {} icon.",
        "Open the {} icon.",
        "Start {}.",
      )
    ).format(names[0])
    return family.Spec(text, {"names": names})

  def build(self, ep, data, rng):
    scene = ep.scene
    area = (1, 1, scene.w - 2, scene.h - 2)
    if ep.level == 2 and scene.w >= 250:  # a window to look past
      win = layout.window(
        rng, scene, rng.choice(words.WINDOW_TITLES), 80, 40, grow=False
      )
      blocked = [(win.x, win.y, win.w, win.h)]
    else:
      blocked = []
    sizes = [items.Icon.SIZE] * len(data["names"])
    spots = layout.place(rng, area, sizes, gap=4, blocked=blocked)
    icons = [items.Icon(*at, n) for at, n in zip(spots, data["names"])]
    scene.items[:0] = icons
    ep.w["icons"] = icons
