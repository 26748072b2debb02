"""Parses Qwen's `mobile_use` tool: a phone's GUI actions in Qwen tool calls.

Two grammars: `mobile_use` (Qwen3-VL: coordinates 0 to 999 of the screenshot's
sides, which are resized to multiples of 32) and `mobile_use_absolute`
(Qwen2.5-VL: pixels of the screenshot as the model saw it, after resizing to
multiples of 28).

Source: cookbooks/utils/agent_function_call.py and mobile_agent.ipynb of
QwenLM/Qwen2.5-VL and QwenLM/Qwen3-VL. Names, arguments and choices are those;
the descriptions are ours.

Conventions: `key` names of Android's buttons are the system button.
"""

from __future__ import annotations

from typing import Any

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.parser.tool_parser import base
from tunix.rl.multi_turn.parser.tool_parser import gui_table
from tunix.rl.multi_turn.parser.tool_parser.formats import qwen
from tunix.rl.multi_turn.parser.tool_parser.grammars import computer_use

GuiAction = gui_action.GuiAction
Kind = gui_action.GuiActionKind
TOOL_NAME = "mobile_use"

# action name -> what it does
_ACTIONS = {
  "key": "press a key of adb's keyevent, e.g. enter",
  "click": "tap coordinate",
  "long_press": "press coordinate for time seconds",
  "swipe": "move a finger from coordinate to coordinate2",
  "type": "type text into the active field",
  "system_button": "press a button of the system",
  "open": "open the app called text",
  "wait": "let time seconds pass",
  "answer": "give the answer to a question",
  "terminate": "end the task",
}
BUTTONS = {name: name for name in ("back", "home", "menu", "enter")}
_SPACES = {
  "relative": (
    "0 to 999 from the left edge to the right, then from the top to the"
    " bottom; the screen counts as 1000x1000"
  ),
  "absolute": "pixels from the left edge, then from the top",
}


def mobile_use_schema(
  coordinates: str = "relative", screen: tuple[int, int] | None = None
) -> dict[str, Any]:
  """Returns the OpenAI schema of the tool.

  Args:
    coordinates: "relative" (0-999) or "absolute" (pixels).
    screen: (width, height) of the screenshots, shown where pixels count.
  """
  point = {
    "type": "array",
    "items": {"type": "number"},
    "description": f"[x, y]: {_SPACES[coordinates]}.",
  }
  return {
    "type": "function",
    "function": {
      "name": TOOL_NAME,
      "description": (
        "Touchscreen and buttons of the phone whose screenshots you see."
        + computer_use.screen_sentence(coordinates, screen)
      ),
      "parameters": {
        "type": "object",
        "properties": {
          "action": {
            "type": "string",
            "description": "; ".join(
              f"{name}: {does}" for name, does in _ACTIONS.items()
            ),
            "enum": list(_ACTIONS),
          },
          "coordinate": point,
          "coordinate2": {**point, "description": "[x, y] where a swipe ends."},
          "text": {
            "type": "string",
            "description": "Of key, type, open and answer.",
          },
          "time": {"type": "number", "description": "Seconds."},
          "button": {
            "type": "string",
            "description": "Of system_button.",
            "enum": [name.capitalize() for name in BUTTONS],
          },
          "status": {
            "type": "string",
            "description": "Whether the task was done.",
            "enum": ["success", "failure"],
          },
        },
        "required": ["action"],
      },
    },
  }


def _key(a: gui_table.Arguments) -> GuiAction:
  text = a.text("text", "keys").strip().lower().removeprefix("keycode_")
  if text in BUTTONS:
    return GuiAction(Kind.SYSTEM_BUTTON, text=text)
  return GuiAction(Kind.KEY, keys=a.keys("text", "keys"))


def read_long_press(a: gui_table.Arguments) -> GuiAction:
  return GuiAction(
    Kind.LONG_PRESS, **a.point("coordinate"), duration=a.seconds("time")
  )


def read_button(a: gui_table.Arguments) -> GuiAction:
  return GuiAction(Kind.SYSTEM_BUTTON, text=a.choice("button", BUTTONS))


_READERS: dict[str, gui_table.Reader] = {
  "key": _key,
  "click": gui_table.point_of(Kind.CLICK, "coordinate"),
  "long_press": read_long_press,
  "swipe": lambda a: GuiAction(
    Kind.SWIPE, **a.point("coordinate"), **a.point("coordinate2", end=True)
  ),
  "type": gui_table.text_of(Kind.TYPE, "text"),
  "system_button": read_button,
  "open": lambda a: GuiAction(Kind.OPEN_APP, text=a.name("text")),
  "wait": computer_use.read_wait,
  "answer": gui_table.text_of(Kind.ANSWER, "text"),
  "terminate": computer_use.read_terminate,
}


def write_tap(w: gui_table.Writing) -> gui_table.Call | None:
  """`click`, which a phone does with one finger and once."""
  plain = (w.action.button, w.action.count, w.action.keys) == ("left", 1, ())
  return ("click", w.place()) if plain else None


def write_button(w: gui_table.Writing) -> gui_table.Call | None:
  if w.action.text not in BUTTONS:
    return None
  return "system_button", {"button": w.action.text.capitalize()}


def _write_key(w: gui_table.Writing) -> gui_table.Call | None:
  keys = w.action.keys
  if w.action.duration or (len(keys) == 1 and keys[0] in BUTTONS):
    return None  # Would be read as the system button.
  return "key", {"text": "+".join(keys)}


def _write_long_press(w: gui_table.Writing) -> gui_table.Call:
  if w.action.duration is None:
    return "long_press", w.place()
  time = gui_table.plain(w.action.duration)
  return "long_press", {**w.place(), "time": time}


_WRITERS: dict[Kind, gui_table.Writer] = {
  Kind.CLICK: write_tap,
  Kind.LONG_PRESS: _write_long_press,
  Kind.SWIPE: lambda w: (
    ("swipe", {**w.place(), "coordinate2": w.end()})
    if w.action.duration is None
    else None
  ),
  Kind.TYPE: gui_table.writes("type", text="text"),
  Kind.KEY: _write_key,
  Kind.SYSTEM_BUTTON: write_button,
  Kind.OPEN_APP: gui_table.writes("open", text="text"),
  Kind.WAIT: computer_use.write_wait,
  Kind.ANSWER: gui_table.writes("answer", text="text"),
  Kind.TERMINATE: computer_use.write_terminate,
}


class MobileUseParser(gui_table.OneToolParser, qwen.QwenToolParser):
  """See the module docstring. Coordinates 0 to 999."""

  family = tool_name = TOOL_NAME
  space = gui_table.THOUSANDTHS
  resizing = base.QWEN3_VL
  readers = _READERS
  writers = _WRITERS

  @property
  def default_tools(self) -> list[dict[str, Any]]:
    return [mobile_use_schema(self.coordinates, self.screen)]


class MobileUseAbsoluteParser(MobileUseParser):
  """Qwen2.5-VL: coordinates in pixels of the screenshot."""

  space = gui_table.ABSOLUTE
  resizing = base.QWEN2_5_VL
