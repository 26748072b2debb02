"""Parses Anthropic's computer tool: a `tool_use` whose input is an action.

Coordinates are pixels of the screenshot. Plain text without a call ends the
task and is the answer.

Source: the tool types computer_20241022 and computer_20250124 of Anthropic's
documentation; names and arguments are those.

Conventions: a unit of `scroll_amount` is a notch of the wheel. Actions that
`GuiAction` does not have (single presses of the button, the pointer's
position) are refused with a hint.
"""

from __future__ import annotations

from typing import Any

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.tool_parser import gui_table
from tunix.rl.multi_turn.parser.tool_parser import scanning

GuiAction = gui_action.GuiAction
Kind = gui_action.GuiActionKind

_PROMPT = """You operate a computer for the user. The screen is {screen}; \
coordinates are pixels from the left and from the top.

Each turn, write one call of the tool "computer" as a JSON object:
{"type": "tool_use", "name": "computer", "input": {"action": ...}}

Inputs:
{"action": "key", "text": "ctrl+s"}
{"action": "hold_key", "text": "shift", "duration": 1}
{"action": "type", "text": ""}
{"action": "mouse_move", "coordinate": [x, y]}
{"action": "left_click", "coordinate": [x, y]}
{"action": "right_click", "coordinate": [x, y]}
{"action": "middle_click", "coordinate": [x, y]}
{"action": "double_click", "coordinate": [x, y]}
{"action": "triple_click", "coordinate": [x, y]}
{"action": "left_click_drag", "start_coordinate": [x, y], "coordinate": [x, y]}
{"action": "scroll", "coordinate": [x, y], "scroll_direction": \
"up|down|left|right", "scroll_amount": 3}
{"action": "wait", "duration": 1}
{"action": "screenshot"}
Clicks hold the keys in "text". When the task is done, answer in plain text \
without a call."""
_CLICKS = {
  "left_click": ("left", 1),
  "right_click": ("right", 1),
  "middle_click": ("middle", 1),
  "double_click": ("left", 2),
  "triple_click": ("left", 3),
}

_READERS: dict[str, gui_table.Reader] = {
  **gui_table.clicks_of(_CLICKS, "coordinate", modifiers=("text", "key")),
  "key": lambda a: GuiAction(Kind.KEY, keys=a.keys("text")),
  "hold_key": lambda a: GuiAction(
    Kind.KEY, keys=a.keys("text"), duration=a.seconds("duration", 1.0)
  ),
  "type": gui_table.text_of(Kind.TYPE, "text"),
  "mouse_move": gui_table.point_of(Kind.MOVE, "coordinate"),
  "left_click_drag": gui_table.drag_from_pointer(
    "start_coordinate", "coordinate"
  ),
  "scroll": gui_table.scroll_of(
    "scroll_direction", "coordinate", step="scroll_amount"
  ),
  "wait": lambda a: GuiAction(Kind.WAIT, duration=a.seconds("duration")),
  "screenshot": gui_table.always(Kind.SCREENSHOT),
  "left_mouse_down": gui_table.unavailable("use left_click_drag"),
  "left_mouse_up": gui_table.unavailable("use left_click_drag"),
  "cursor_position": gui_table.unavailable("look at the screenshot"),
}


def _write_drag(w: gui_table.Writing) -> gui_table.Call | None:
  if w.action.button != "left":
    return None
  return "left_click_drag", {
    **w.place("start_coordinate"),
    "coordinate": w.end(),
  }


def _write_scroll(w: gui_table.Writing) -> gui_table.Call | None:
  way = w.direction()
  if way is None:
    return None
  amount = gui_table.notches(w.action.dx or w.action.dy)
  return "scroll", {
    **w.place(),
    "scroll_direction": way,
    "scroll_amount": amount,
  }


def _write_key(w: gui_table.Writing) -> gui_table.Call:
  text = {"text": "+".join(w.action.keys)}
  if w.action.duration is None:
    return "key", text
  return "hold_key", {**text, "duration": gui_table.plain(w.action.duration)}


def _write_wait(w: gui_table.Writing) -> gui_table.Call:
  if w.action.duration is None:
    return "wait", {}
  return "wait", {"duration": gui_table.plain(w.action.duration)}


_WRITERS: dict[Kind, gui_table.Writer] = {
  Kind.CLICK: gui_table.write_clicks(_CLICKS, gui_table.Writing.place, "text"),
  Kind.MOVE: lambda w: ("mouse_move", w.place()),
  Kind.DRAG: _write_drag,
  Kind.SCROLL: _write_scroll,
  Kind.TYPE: gui_table.writes("type", text="text"),
  Kind.KEY: _write_key,
  Kind.WAIT: _write_wait,
  Kind.SCREENSHOT: gui_table.writes("screenshot"),
}


class AnthropicComputerParser(
  gui_table.OneToolParser, scanning.JsonCallsParser
):
  """See the module docstring."""

  family = "Anthropic's computer tool"
  own_prompt = _PROMPT
  tool_name = "computer"
  arguments_keys = ("input",)
  readers = _READERS
  writers = _WRITERS

  def to_object(self, call: trajectory.ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", **super().to_object(call)}
