"""Defines task families and the episodes that they run in.

A family samples a `Spec` (the instruction and its objects) from a seed
and a level, builds the scene for it at any screen size, judges events and
states, and computes the next right action. Reward is 0 or 1: an episode is won
when `solved` holds or `judge` returns True, lost when `judge` returns False.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any, Mapping

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.environments.gyms.desktop import canvas
from tunix.rl.multi_turn.environments.gyms.desktop import containers
from tunix.rl.multi_turn.environments.gyms.desktop import layout
from tunix.rl.multi_turn.environments.gyms.desktop import scene as scene_lib
from tunix.rl.multi_turn.environments.gyms.desktop import widgets

Action = gui_action.GuiAction
Kind = gui_action.GuiActionKind
LEVELS = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Spec:
  """One instance, the same whatever the screen size."""

  instruction: str
  data: Mapping[str, Any]


class Episode:
  """One run of one instance: its scene, its outcome and its turns."""

  def __init__(
    self, family: Family, seed: int, level: int, width: int, height: int
  ):
    self.family = family
    self.seed = seed
    self.level = level
    self.spec = spec_of(family, seed, level)
    # Strings seed Python's generator by their SHA-512: stable everywhere.
    rng = random.Random(f"layout/{family.name}/{level}/{seed}/{width}x{height}")
    theme = canvas.LIGHT if level == 0 else rng.choice(canvas.THEMES)
    self.scene = scene_lib.Scene(width, height, theme)
    self.w: dict[str, Any] = {}  # the widgets that the family needs again
    self.outcome: bool | None = None
    self.turns = 0
    family.build(self, self.spec.data, rng)
    if level:
      layout.clutter(rng, self.scene, 2 * level)
    self.scene.events = []

  def act(self, action: Action) -> dict[str, Any]:
    """Plays one turn; sets `outcome` when the episode is decided."""
    if self.outcome is not None:
      return {"ignored": "the episode is over"}
    self.turns += 1
    info = self.scene.act(action)
    for event in self.scene.events:
      if event.kind != "terminate":
        self.outcome = self.family.judge(self, event)
      if event.kind == "close" and self.outcome is None:
        self.outcome = False  # what the task needs is gone
      if self.outcome is not None:
        return info
    if self.family.solved(self):
      self.outcome = True
    elif self.scene.terminated:
      self.outcome = False
    return info


class Family:
  """Base of all families; the subclass's docstring describes the task."""

  name = ""
  max_turns = (3, 3, 3)  # by level; about twice what the oracle needs

  def sample(self, rng: random.Random, level: int) -> Spec:
    raise NotImplementedError

  def build(
    self, ep: Episode, data: Mapping[str, Any], rng: random.Random
  ) -> None:
    """Fills `ep.scene`; keeps objects that are needed later in `ep.w`."""
    raise NotImplementedError

  def judge(self, ep: Episode, event: scene_lib.Event) -> bool | None:
    """Whether an event decides the episode: won, lost or (None) neither."""
    del ep, event
    return None

  def solved(self, ep: Episode) -> bool:
    """Whether the state alone is the goal."""
    del ep
    return False

  def oracle(self, ep: Episode) -> Action | None:
    """Returns the next right action, None when nothing is left to do."""
    raise NotImplementedError

  def summary(self, ep: Episode) -> str:
    """Returns a demonstrator's summary of the turns so far."""
    return f"{ep.turns} turns are done."


FAMILIES: dict[str, Family] = {}


def register(cls: type[Family]) -> type[Family]:
  """Class decorator: registers a family under its name."""
  if not cls.name or cls.name in FAMILIES:
    raise ValueError(f"family name {cls.name!r} is empty or already taken")
  FAMILIES[cls.name] = cls()
  return cls


def get(name: str) -> Family:
  if name not in FAMILIES:
    raise ValueError(
      registry.unknown_name("family of desktop tasks", name, FAMILIES)
    )
  return FAMILIES[name]


def spec_of(family: Family, seed: int, level: int) -> Spec:
  """Returns the instance of `family` that a seed and a level stand for."""
  return family.sample(
    random.Random(f"spec/{family.name}/{level}/{seed}"), level
  )


# -- oracle helpers ------------------------------------------------------------


def click(ep: Episode, widget: widgets.Widget, count: int = 1) -> Action:
  """Returns a click on a widget's centre, or first an action to uncover it."""
  point = ep.scene.point(widget)
  if point is None:
    return uncover(ep, widget)
  return Action(Kind.CLICK, x=point[0], y=point[1], count=count)


def uncover(ep: Episode, widget: widgets.Widget) -> Action:
  """Returns the next action that uncovers a widget.

  Closes an open menu, drags its window back onto the screen, raises it, or
  drags the covering widget away.

  Raises:
    RuntimeError: no action uncovers the widget.
  """
  scene = ep.scene
  if scene.menu is not None:
    return Action(Kind.KEY, keys=("escape",))
  root = widget
  while root.parent is not None:
    root = root.parent
  if isinstance(root, containers.Window):
    dx = min(max(root.x, 0), max(0, scene.w - root.w)) - root.x
    dy = min(max(root.y, 0), max(0, scene.h - root.h)) - root.y
    points = title_points(ep, root)
    if points and (dx or dy):
      # From where the pointer can also end up on the screen.
      points.sort(key=lambda p: not _on_screen(scene, p[0] + dx, p[1] + dy))
      x, y = points[0]
      return drag(ep, x, y, x + dx, y + dy)
    if points and scene.front_window() is not root:
      x, y = scene.to_px(*points[0])
      return Action(Kind.CLICK, x=x, y=y)
  x, y = widget.center()
  cover = scene.hit(x, y) if _on_screen(scene, x, y) else None
  if cover is not None and cover.movable:
    # Just far enough to free the centre, to the roomier side.
    dx = cover.w if x < scene.w // 2 else -cover.w
    return drag(ep, x, y, x + dx, y)
  while cover is not None and cover.parent is not None:
    cover = cover.parent
  if isinstance(cover, containers.Window) and cover is not root:
    x, y = cover.title_center()
    if _on_screen(scene, x, y):
      down = scene.h - 4 if widget.center()[1] < scene.h // 2 else 2
      return drag(ep, x, y, x, down)
  raise RuntimeError(
    f"{ep.family.name} seed {ep.seed} level {ep.level}: the"
    f" {widget.name!r} {widget.kind} cannot be reached any more"
  )


def title_points(ep: Episode, window) -> list[tuple[int, int]]:
  """Layout positions in sight on a window's title bar, middle ones first."""
  scene = ep.scene
  middle = window.y + 1 + containers.TITLE_HEIGHT // 2
  near = window.title_center()[0]
  for y in (middle, middle - 6, middle + 6):
    points = [
      (x, y)
      for x in range(window.x, window.x + window.w)
      if _on_screen(scene, x, y) and scene.hit(x, y) is window
    ]
    if points:
      return sorted(points, key=lambda p: abs(p[0] - near))
  return []


def drag_to(ep: Episode, widget: widgets.Widget, x2: int, y2: int) -> Action:
  """Returns a drag of a widget's centre, or first an action to uncover it."""
  scene = ep.scene
  if (
    scene.menu is not None
    or scene.point(widget) is None
    or (not _on_screen(scene, x2, y2))
  ):
    return uncover(ep, widget)
  return drag(ep, *widget.center(), x2, y2)


def drag(ep: Episode, x: int, y: int, x2: int, y2: int) -> Action:
  """Returns a drag between layout positions."""
  x, y = ep.scene.to_px(x, y)
  x2, y2 = ep.scene.to_px(x2, y2)
  return Action(Kind.DRAG, x=x, y=y, x2=x2, y2=y2)


def _on_screen(scene: scene_lib.Scene, x: int, y: int) -> bool:
  return 0 <= x < scene.w and 0 <= y < scene.h


def spread_point(
  ep: Episode, x: float, y: float, spread: float, rng: random.Random
) -> tuple[int, int]:
  """Draws a pixel of the widget at (x, y), within its middle `spread`."""
  scene = ep.scene
  k = scene.k
  target = scene.hit(int(x) // k, int(y) // k)
  if target is None:
    return int(x), int(y)
  for _ in range(8):
    px = int(x + (rng.random() - 0.5) * spread * target.w * k)
    py = int(y + (rng.random() - 0.5) * spread * target.h * k)
    inside = 0 <= px < scene.width and 0 <= py < scene.height
    if inside and scene.hit(px // k, py // k) is target:
      return px, py
  return int(x), int(y)


def enter(ep: Episode, field: widgets.TextField, text: str) -> Action | None:
  """The next action that makes a field hold `text`; None when it does."""
  if field.text == text:
    return None
  if ep.scene.focus is not field:
    return click(ep, field)
  low, high = field.selection()
  if field.text and not (low == 0 and high == len(field.text)):
    if text.startswith(field.text) and field.caret == len(field.text):
      return Action(Kind.TYPE, text=text[len(field.text) :])
    return Action(Kind.KEY, keys=("ctrl", "a"))
  if not text:
    return Action(Kind.KEY, keys=("backspace",))
  return Action(Kind.TYPE, text=text)


def quote(items: list[str]) -> str:
  """Joins items as in English: "a", "a and b", "a, b and c"."""
  if len(items) == 1:
    return items[0]
  return ", ".join(items[:-1]) + " and " + items[-1]
