"""Parses AndroidWorld's actions: `Reason: …` and `Action: {"action_type": …}`.

Coordinates are pixels of the screenshot. An element's `index` is refused: the
policy sees a screenshot and no list of elements.

Source: android_world/env/json_action.py and android_world/agents/m3a.py of
google-research/android_world; names and arguments are those.

Conventions: `scroll` shows what lies towards `direction`; `swipe` moves the
finger there, for a third of the screen. `input_text` with a place taps it
first; the Enter after it is the phone's, see the gym.
"""

from __future__ import annotations

import re
from typing import Any, Sequence

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.tool_parser import base
from tunix.rl.multi_turn.parser.tool_parser import gui_table
from tunix.rl.multi_turn.parser.tool_parser import scanning

GuiAction = gui_action.GuiAction
Kind = gui_action.GuiActionKind

_PROMPT = """You operate a phone for the user. The screen is {screen}; \
coordinates are pixels from the left and from the top.

Actions:
{"action_type": "click", "x": <x>, "y": <y>}
{"action_type": "double_tap", "x": <x>, "y": <y>}
{"action_type": "long_press", "x": <x>, "y": <y>}
{"action_type": "input_text", "text": "<text>", "x": <x>, "y": <y>}
{"action_type": "keyboard_enter"}
{"action_type": "navigate_home"}
{"action_type": "navigate_back"}
{"action_type": "scroll", "direction": "<up|down|left|right>"}
{"action_type": "swipe", "direction": "<up|down|left|right>"}
{"action_type": "open_app", "app_name": "<name>"}
{"action_type": "wait"}
{"action_type": "answer", "text": "<answer>"}
{"action_type": "status", "goal_status": "<complete|infeasible>"}

Answer with a reason and one action:
Reason: ...
Action: {"action_type": ...}"""
GOAL_STATUS = {"complete": True, "successful": True, "infeasible": False}


class Places:
  """Fields of an AndroidWorld action's place: `x` and `y`, in pixels."""

  def has(self, a: gui_table.Arguments) -> bool:
    if a.has("index") and not a.has("x", "y"):
      raise base.GuiActionError(
        "elements have no index here; give x and y in pixels"
      )
    return a.has("x", "y")

  def read(self, a: gui_table.Arguments) -> dict[str, Any]:
    self.has(a)
    return a.xy()

  def write(self, w: gui_table.Writing) -> dict[str, Any]:
    return w.xy()


def make_readers(places: Places) -> dict[str, gui_table.Reader]:
  """Returns the table of readers, for one way to write places."""

  def at(kind: Kind, **fields: Any) -> gui_table.Reader:
    return lambda a: GuiAction(kind, **places.read(a), **fields)

  def maybe(a: gui_table.Arguments) -> dict[str, Any]:
    return places.read(a) if places.has(a) else {}

  def input_text(a: gui_table.Arguments) -> list[GuiAction]:
    text = a.text("text")
    actions = [GuiAction(Kind.CLICK, **p)] if (p := maybe(a)) else []
    if a.flag("override", False):
      actions.append(GuiAction(Kind.KEY, keys=("ctrl", "a")))
    return [*actions, GuiAction(Kind.TYPE, text=text)]

  def scroll(a: gui_table.Arguments) -> GuiAction:
    dx, dy = a.choice("direction", gui_table.DIRECTIONS)
    notch = gui_table.NOTCH_PX
    return GuiAction(Kind.SCROLL, **maybe(a), dx=dx * notch, dy=dy * notch)

  def swipe(a: gui_table.Arguments) -> GuiAction:
    way = a.choice("direction", {name: name for name in gui_table.DIRECTIONS})
    return a.swipe(way, maybe(a) or None)

  def button(name: str) -> gui_table.Reader:
    return gui_table.always(Kind.SYSTEM_BUTTON, text=name)

  return {
    "click": at(Kind.CLICK),
    "double_tap": at(Kind.CLICK, count=2),
    "long_press": at(Kind.LONG_PRESS),
    "input_text": input_text,
    "keyboard_enter": button("enter"),
    "navigate_home": button("home"),
    "navigate_back": button("back"),
    "scroll": scroll,
    "swipe": swipe,
    "open_app": lambda a: GuiAction(Kind.OPEN_APP, text=a.name("app_name")),
    "wait": gui_table.always(Kind.WAIT),
    "answer": gui_table.text_of(Kind.ANSWER, "text"),
    "status": lambda a: GuiAction(
      Kind.TERMINATE, success=a.choice("goal_status", GOAL_STATUS)
    ),
  }


_BUTTONS = {
  "enter": "keyboard_enter",
  "home": "navigate_home",
  "back": "navigate_back",
}


def make_writers(places: Places) -> dict[Kind, gui_table.Writer]:
  """Returns the table of writers, for one way to write places."""

  def click(w: gui_table.Writing) -> gui_table.Call | None:
    names = {1: "click", 2: "double_tap"}
    if w.action.button != "left" or w.action.keys:
      return None
    name = names.get(w.action.count)
    return (name, places.write(w)) if name else None

  def scroll(w: gui_table.Writing) -> gui_table.Call | None:
    way = w.direction()
    return ("scroll", {"direction": way, **places.write(w)}) if way else None

  def swipe(w: gui_table.Writing) -> gui_table.Call | None:
    way = w.swipe_direction()
    if way is None or w.action.duration is not None:
      return None
    return "swipe", {"direction": way, **places.write(w)}

  def button(w: gui_table.Writing) -> gui_table.Call | None:
    name = _BUTTONS.get(w.action.text or "")
    return (name, {}) if name else None

  return {
    Kind.CLICK: click,
    Kind.LONG_PRESS: lambda w: (
      ("long_press", places.write(w)) if w.action.duration is None else None
    ),
    Kind.TYPE: gui_table.writes("input_text", text="text"),
    Kind.SCROLL: scroll,
    Kind.SWIPE: swipe,
    Kind.SYSTEM_BUTTON: button,
    Kind.OPEN_APP: gui_table.writes("open_app", app_name="text"),
    Kind.WAIT: lambda w: ("wait", {}) if w.action.duration is None else None,
    Kind.ANSWER: gui_table.writes("answer", text="text"),
    Kind.TERMINATE: lambda w: (
      "status",
      {
        "goal_status": (
          "infeasible" if w.action.success is False else "complete"
        )
      },
    ),
  }


class AndroidWorldParser(gui_table.TableParser, scanning.JsonCallsParser):
  """See the module docstring."""

  family = "AndroidWorld"
  own_prompt = _PROMPT
  name_key = "action_type"
  arguments_keys = ()
  noise = re.compile(
    r"(?m)^[ \t]*(?:Reason|Action):|<\|(?:begin|end)_of_box\|>"
  )
  readers = make_readers(Places())
  writers = make_writers(Places())

  def format(
    self, calls: Sequence[trajectory.ToolCall], thought: str | None = None
  ) -> str:
    return base.with_thought(
      thought and f"Reason: {thought}",
      *((f"Action: {self.format_calls(calls)}",) if calls else ()),
    )
