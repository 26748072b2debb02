"""Defines families of forms: radio buttons, lists, sliders, fields, tabs."""

from __future__ import annotations

from tunix.rl.multi_turn.environments.gyms.desktop import containers
from tunix.rl.multi_turn.environments.gyms.desktop import families_basic
from tunix.rl.multi_turn.environments.gyms.desktop import family
from tunix.rl.multi_turn.environments.gyms.desktop import font
from tunix.rl.multi_turn.environments.gyms.desktop import items
from tunix.rl.multi_turn.environments.gyms.desktop import layout
from tunix.rl.multi_turn.environments.gyms.desktop import widgets
from tunix.rl.multi_turn.environments.gyms.desktop import words


def submit_button(win, area, name="OK"):
  """A button at the bottom right that Enter presses too."""
  w, h = widgets.Button.size(name)
  x, y, aw, ah = area
  win.default = win.add(
    widgets.Button(x + aw - w - 1, y + ah - h - 1, w, h, name)
  )
  return win.default


class _Form(family.Family):
  """Won by the right state: at once at level 0, else when submitted."""

  def right(self, ep) -> bool:
    raise NotImplementedError

  def fill(self, ep):
    """The next action towards the right state, None when it is reached."""
    raise NotImplementedError

  def judge(self, ep, event):
    if "ok" in ep.w and event.kind == "press" and event.widget is ep.w["ok"]:
      return self.right(ep)
    return None

  def solved(self, ep):
    return "ok" not in ep.w and self.right(ep)

  def oracle(self, ep):
    action = self.fill(ep)
    if action is None and "ok" in ep.w:
      return family.click(ep, ep.w["ok"])
    return action


@family.register
class ChooseRadio(_Form):
  """Choose one radio button; from level 1 on, confirm with OK."""

  name = "choose-radio"
  max_turns = (3, 4, 6)

  def sample(self, rng, level):
    count = (3, 3, 6)[level]
    names = rng.sample(words.CHOICES, count)
    targets = names[:1] if level < 2 else [names[0], names[3]]
    text = rng.choice(("Choose {}.", "Select {}.", "Pick {}.")).format(
      family.quote(targets)
    )
    if level:
      text = text[:-1] + rng.choice((" and press OK.", ", then click OK."))
    orders = [rng.sample(range(i, i + 3), 3) for i in range(0, count, 3)]
    return family.Spec(text, {"names": names, "orders": orders})

  def build(self, ep, data, rng):
    win, area = families_basic.form(ep, rng, 116, 70)
    x, _, w, h = area
    ep.w["targets"] = []
    for place, order in enumerate(data["orders"]):
      group: list[widgets.RadioButton] = []
      rows = (x, area[1], w, h - 18 if ep.level else h)
      for i, top in zip(order, layout.column(rows, 3, 14)):
        radio_x = x + 1 + place * (w // 2)
        radio = win.add(
          widgets.RadioButton(radio_x, top, data["names"][i], group)
        )
        if i % 3 == 0:
          ep.w["targets"].append(radio)
    if ep.level:
      ep.w["ok"] = submit_button(win, area)

  def right(self, ep):
    return all(radio.chosen for radio in ep.w["targets"])

  def fill(self, ep):
    for radio in ep.w["targets"]:
      if not radio.chosen:
        return family.click(ep, radio)
    return None


@family.register
class ChooseOption(_Form):
  """Choose an option of a drop-down list (of two, with OK, at level 2)."""

  name = "choose-option"
  max_turns = (4, 5, 8)

  def sample(self, rng, level):
    lists = 1 + (level == 2)
    count = (3, 4, 4)[level]
    names = rng.sample(words.DROP_DOWN_NAMES, lists)
    options, targets, old = [], [], []
    for _ in names:
      choices = rng.sample(words.CHOICES, count)
      goal, start = rng.sample(range(count), 2)
      options.append(choices)
      targets.append(goal)
      old.append(start)
    goals = [o[g] for o, g in zip(options, targets)]
    if level == 0:
      text = rng.choice(
        (
          "Choose {} from the list.",
          "Select {} in the drop-down.",
          "Open the list and pick {}.",
        )
      ).format(goals[0])
    else:
      text = (
        "Set "
        + family.quote(
          [f"{name} to {goal}" for name, goal in zip(names, goals)]
        )
        + ("." if level == 1 else ", then press OK.")
      )
    return family.Spec(
      text, {"names": names, "options": options, "wanted": targets, "old": old}
    )

  def build(self, ep, data, rng):
    win, area = families_basic.form(ep, rng)
    x, y, w, h = area
    lists = []
    if ep.level == 0:
      width = max(font.text_width(o) for o in data["options"][0]) + 32
      (spot,) = layout.place(rng, area, [(width, 16)])
      lists.append(
        win.add(
          widgets.DropDown(
            *spot, width, 16, "", data["options"][0], data["old"][0]
          )
        )
      )
    else:
      label = max(font.text_width(name) for name in data["names"]) + 6
      tops = layout.column((x, y, w, h - 18), len(data["names"]), 16)
      for i, top in enumerate(tops):
        win.add(widgets.Label(x, top + 5, data["names"][i]))
        lists.append(
          win.add(
            widgets.DropDown(
              x + label,
              top,
              min(w - label, 90),
              16,
              data["names"][i],
              data["options"][i],
              data["old"][i],
            )
          )
        )
    if ep.level == 2:
      ep.w["ok"] = submit_button(win, area)
    ep.w["lists"] = lists

  def right(self, ep):
    return [d.value for d in ep.w["lists"]] == list(ep.spec.data["wanted"])

  def fill(self, ep):
    menu = ep.scene.menu
    for drop, goal in zip(ep.w["lists"], ep.spec.data["wanted"]):
      if drop.value != goal:
        if menu is not None and menu.owner is drop:
          return family.click(ep, menu.children[goal])
        return family.click(ep, drop)
    return None


@family.register
class SetSlider(_Form):
  """Drag a slider to a value; at level 2 two of them, then OK."""

  name = "set-slider"
  max_turns = (4, 4, 7)

  def sample(self, rng, level):
    steps = (4, 10, 10)[level]
    names = rng.sample(words.SLIDER_NAMES, 1 + (level == 2))
    pairs = [rng.sample(range(steps + 1), 2) for _ in names]
    goals = family.quote([f"{n} to {p[0]}" for n, p in zip(names, pairs)])
    text = rng.choice(("Set {}.", "Move {}.", "Drag {}.")).format(goals)
    if level == 2:
      text = text[:-1] + ", then press OK."
    return family.Spec(text, {"names": names, "steps": steps, "pairs": pairs})

  def build(self, ep, data, rng):
    win, area = families_basic.form(ep, rng, 112, 73)
    x, y, w, h = area
    names = data["names"]
    width = rng.randint(96, max(96, min(w - 2, 180)))
    slider_x = x + rng.randrange(w - width + 1)
    if ep.level < 2:
      tops = [y + rng.randrange(h - widgets.Slider.HEIGHT + 1)]
    else:
      tops = layout.column((x, y, w, h - 17), 2, widgets.Slider.HEIGHT, 0)
      ep.w["ok"] = submit_button(win, area)
    ep.w["sliders"] = [
      win.add(widgets.Slider(slider_x, top, width, n, data["steps"], p[1]))
      for top, n, p in zip(tops, names, data["pairs"])
    ]

  def right(self, ep):
    goals = [pair[0] for pair in ep.spec.data["pairs"]]
    return [s.value for s in ep.w["sliders"]] == goals

  def fill(self, ep):
    for slider, (goal, _) in zip(ep.w["sliders"], ep.spec.data["pairs"]):
      if slider.value != goal:
        return family.drag_to(ep, slider, *slider.at(goal))
    return None


@family.register
class LoginForm(_Form):
  """Fill in user and password, then press the button; Enter works too."""

  name = "login-form"
  max_turns = (8, 8, 10)

  def sample(self, rng, level):
    user, secret, old = rng.sample(words.TYPING_WORDS, 3)
    text = rng.choice(
      (
        'Log in as "{}" with the password "{}".',
        'Enter the user "{}" and the password "{}", then log in.',
        'Sign in: user "{}", password "{}".',
      )
    ).format(user, secret)
    swap = level >= 1 and rng.random() < 0.5
    return family.Spec(
      text,
      {
        "want": [user, secret],
        "swap": swap,
        "old": [old if level == 2 else "", ""],
      },
    )

  def build(self, ep, data, rng):
    win, area = families_basic.form(ep, rng, 116, 64)
    x, y, w, h = area
    label = font.text_width("password") + 5
    tops = layout.column((x, y, w, h - 18), 2, 16, 2)
    if data["swap"]:
      tops.reverse()
    fields = []
    for name, top, old in zip(("user", "password"), tops, data["old"]):
      win.add(widgets.Label(x, top + 5, name))
      fields.append(
        win.add(
          widgets.TextField(
            x + label,
            top,
            w - label - 1,
            16,
            name,
            old,
            secret=name == "password",
          )
        )
      )
    ep.w["fields"] = fields
    ep.w["ok"] = submit_button(win, area, "Log in")
    if ep.level == 2:
      cancel = widgets.Button.size("Cancel")
      win.add(widgets.Button(x + 1, y + h - cancel[1] - 1, *cancel, "Cancel"))

  def judge(self, ep, event):
    if event.kind == "press" and event.widget is not ep.w["ok"]:
      return False
    return super().judge(ep, event)

  def right(self, ep):
    return [f.text for f in ep.w["fields"]] == list(ep.spec.data["want"])

  def fill(self, ep):
    for field, text in zip(ep.w["fields"], ep.spec.data["want"]):
      action = family.enter(ep, field, text)
      if action is not None:
        return action
    return None


@family.register
class SwitchTab(family.Family):
  """Bring a tab to the front; from level 1 on, tick a box on its page."""

  name = "switch-tab"
  max_turns = (2, 4, 5)

  def sample(self, rng, level):
    count = (3, 3, 4)[level]
    names = rng.sample([n for n in words.TAB_NAMES if len(n) < 6], count)
    goal = rng.randrange(1, count)
    boxes = rng.sample(words.CHOICES, count * (1 + (level == 2)))
    if level == 0:
      text = rng.choice(
        ("Open the {} tab.", "Switch to the {} tab.", "Go to the tab {}.")
      ).format(names[goal])
      pages: list[list[str]] = [[] for _ in names]
    else:
      per = len(boxes) // count
      pages = [boxes[i * per : (i + 1) * per] for i in range(count)]
      text = rng.choice(
        ("Tick {} on the {} tab.", "Check {} on the tab {}.")
      ).format(pages[goal][0], names[goal])
    return family.Spec(text, {"names": names, "goal": goal, "pages": pages})

  def build(self, ep, data, rng):
    win, area = families_basic.form(ep, rng, 118, 70)
    view = win.add(containers.TabView(*(*area, data["names"])))
    ep.w.update(view=view, tab=view.tabs[data["goal"]], wrong=[])
    for place, (name, labels) in enumerate(zip(data["names"], data["pages"])):
      page = view.pages[name]
      inner = (page.x + 3, page.y + 3, page.w - 6, page.h - 6)
      sizes = [(widgets.CheckBox.width(label), 14) for label in labels]
      spots = layout.place(rng, inner, sizes) if labels else []
      boxes = [
        page.add(widgets.CheckBox(*at, label))
        for at, label in zip(spots, labels)
      ]
      if not boxes:
        page.add(widgets.Label(page.x + 4, page.y + 5, name, faint=True))
      elif place == data["goal"]:
        ep.w["box"] = boxes[0]
        boxes = boxes[1:]
      ep.w["wrong"] += boxes

  def solved(self, ep):
    if "box" not in ep.w:
      return ep.w["tab"].front
    return ep.w["box"].ticked and not any(b.ticked for b in ep.w["wrong"])

  def oracle(self, ep):
    for box in ep.w["wrong"]:  # mend what went wrong
      if box.ticked:
        point = ep.scene.point(box)
        if point is not None and box.parent in ep.w["view"].walk():
          return family.click(ep, box)
        tab = next(
          t
          for t in ep.w["view"].tabs
          if ep.w["view"].pages[t.name] is box.parent
        )
        return family.click(ep, tab)
    if not ep.w["tab"].front:
      return family.click(ep, ep.w["tab"])
    return family.click(ep, ep.w["box"])


@family.register
class RecallPlace(family.Family):
  """Click the place that page 2 of 14 showed; another place loses.

  Its demonstrator is forgetful: in a quarter of the instances its summaries
  tell the page only. A policy cloned from it has seen both kinds.
  """

  name = "recall-place"
  max_turns = (18, 18, 20)
  PAGES = 14

  def sample(self, rng, level):
    places = ([0, 2, 3, 5], [0, 1, 2, 3, 5], list(range(6)))[level]
    place, color = rng.choice(places), rng.choice(list(words.COLORS))
    text = rng.choice(
      (
        "Remember where the {} square is and click it on the last page.",
        "Click the place of the {} square on the last page.",
        "Page 2 shows a {} square. Click its place at the end.",
      )
    ).format(color)
    tells = rng.random() < 0.75
    return family.Spec(
      text, {"place": place, "places": places, "color": color, "tells": tells}
    )

  def build(self, ep, data, rng):
    win, area = families_basic.form(ep, rng)
    x, y, w, _ = area
    label = win.add(widgets.Label(x + 2, y + 2, "Page 1: press Next", w=w - 4))
    button = submit_button(win, area, "Next")
    squares = [
      items.Shape(x + 2 + i % 3 * 28, y + 13 + i // 3 * 26, 24, data["color"])
      for i in data["places"]
    ]
    target = squares[data["places"].index(data["place"])]
    ep.w.update(win=win, label=label, next=button, page=1)
    ep.w.update(squares=squares, target=target)

  def judge(self, ep, event):
    if event.kind != "press":
      return None
    if event.widget is ep.w["next"]:
      self._turn_page(ep)
      return None
    if ep.w["page"] != self.PAGES:
      return None
    return event.widget is ep.w["target"]

  def _turn_page(self, ep):
    win, target = ep.w["win"], ep.w["target"]
    page = ep.w["page"] = ep.w["page"] + 1
    ep.w["label"].text = f"Page {page}"
    if page == 2:
      win.add(target)
    elif page == 3:
      win.children.remove(target)
    elif page == self.PAGES:
      win.children.remove(ep.w["next"])
      win.default = ep.scene.focus = None
      for square in ep.w["squares"]:
        win.add(square)

  def oracle(self, ep):
    if ep.w["page"] == self.PAGES:
      return family.click(ep, ep.w["target"])
    return family.click(ep, ep.w["next"])

  def summary(self, ep):
    if ep.w["page"] == 1 or not ep.spec.data["tells"]:
      return f"Page {ep.w['page']}."
    # As the shipped policy was taught to name points: bins of its grid, in
    # thousandths of the screenshot's sides.
    scene, target = ep.scene, ep.w["target"]
    point = (
      round((at * bins // side + 0.5) / bins * 1000)
      for at, side, bins in zip(
        target.center(), (scene.w, scene.h), (32, 24), strict=True
      )
    )
    return f"[{', '.join(map(str, point))}]"
