"""Parses OpenAI's computer-use actions: `{"type": "click", "x": …, "y": …}`.

Coordinates are pixels of the screenshot. An action stands by itself, in the
`action` of a `computer_call` item, or in its `actions`. A plain message ends
the task: text without an action is the answer.

Source: openai.types.responses.computer_action of the package openai 3.

Conventions: the `wheel` is the middle button. Of a drag's `path`, the first
and the last point count. Keys held during anything but a click are refused.
"""

from __future__ import annotations

from typing import Sequence

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.tool_parser import base
from tunix.rl.multi_turn.parser.tool_parser import gui_table
from tunix.rl.multi_turn.parser.tool_parser import scanning

GuiAction = gui_action.GuiAction
Kind = gui_action.GuiActionKind

_PROMPT = """You operate a computer for the user. The screen is {screen}; \
coordinates are pixels from the left and from the top.

Each turn, write one action as a JSON object:
{"type": "click", "button": "left|right|wheel|back|forward", "x": 0, "y": 0}
{"type": "double_click", "x": 0, "y": 0}
{"type": "drag", "path": [{"x": 0, "y": 0}, {"x": 0, "y": 0}]}
{"type": "keypress", "keys": ["CTRL", "C"]}
{"type": "move", "x": 0, "y": 0}
{"type": "screenshot"}
{"type": "scroll", "x": 0, "y": 0, "scroll_x": 0, "scroll_y": 0}
{"type": "type", "text": ""}
{"type": "wait"}
When the task is done, answer in plain text without an action."""
_BUTTONS = {
  "left": "left",
  "right": "right",
  "wheel": "middle",
  "back": "back",
  "forward": "forward",
}
_BUTTON_NAMES = {button: name for name, button in _BUTTONS.items()}


def _click(a: gui_table.Arguments) -> GuiAction:
  button = a.choice("button", _BUTTONS) if a.has("button") else "left"
  return GuiAction(
    Kind.CLICK, **a.xy(), button=button, keys=a.held_keys("keys")
  )


def _no_keys(a: gui_table.Arguments) -> None:
  if a.values.get("keys"):
    raise base.GuiActionError(
      f"action {a.action!r} cannot hold keys here; leave keys out"
    )


def _drag(a: gui_table.Arguments) -> GuiAction:
  _no_keys(a)
  path = a.need("path")
  if not isinstance(path, (list, tuple)) or len(path) < 2:
    raise base.GuiActionError(
      f"path must have two points or more, got {gui_table.short(path)}"
    )
  ends = gui_table.Arguments(
    {"path[0]": path[0], "path[-1]": path[-1]}, a.action, a.size, a.space
  )
  return GuiAction(
    Kind.DRAG, **ends.point("path[0]"), **ends.point("path[-1]", end=True)
  )


def _move(a: gui_table.Arguments) -> GuiAction:
  _no_keys(a)
  return GuiAction(Kind.MOVE, **a.xy())


def _scroll(a: gui_table.Arguments) -> GuiAction:
  _no_keys(a)
  place = a.xy() if a.has("x", "y") else {}
  dx, dy = a.number("scroll_x", 0.0), a.number("scroll_y", 0.0)
  return GuiAction(Kind.SCROLL, **place, dx=dx, dy=dy)


_READERS: dict[str, gui_table.Reader] = {
  "click": _click,
  "double_click": lambda a: GuiAction(
    Kind.CLICK, **a.xy(), count=2, keys=a.held_keys("keys")
  ),
  "drag": _drag,
  "keypress": lambda a: GuiAction(Kind.KEY, keys=a.keys("keys")),
  "move": _move,
  "screenshot": gui_table.always(Kind.SCREENSHOT),
  "scroll": _scroll,
  "type": gui_table.text_of(Kind.TYPE, "text"),
  "wait": gui_table.always(Kind.WAIT),
}


def _write_click(w: gui_table.Writing) -> gui_table.Call | None:
  keys = {"keys": list(w.action.keys)} if w.action.keys else {}
  if w.action.count == 2 and w.action.button == "left":
    return "double_click", {**w.xy(), **keys}
  if w.action.count != 1:
    return None
  button = _BUTTON_NAMES[w.action.button]
  return "click", {"button": button, **w.xy(), **keys}


def _write_drag(w: gui_table.Writing) -> gui_table.Call | None:
  if w.anywhere or w.action.button != "left":
    return None
  path = [dict(zip("xy", point)) for point in (w.start(), w.end())]
  return "drag", {"path": path}


_WRITERS: dict[Kind, gui_table.Writer] = {
  Kind.CLICK: _write_click,
  Kind.DRAG: _write_drag,
  Kind.KEY: gui_table.write_keys("keypress", "keys", None),
  Kind.MOVE: lambda w: ("move", w.xy()),
  Kind.SCREENSHOT: gui_table.writes("screenshot"),
  Kind.SCROLL: lambda w: (
    "scroll",
    {
      **w.xy(),
      "scroll_x": gui_table.plain(w.action.dx),
      "scroll_y": gui_table.plain(w.action.dy),
    },
  ),
  Kind.TYPE: gui_table.writes("type", text="text"),
  Kind.WAIT: lambda w: ("wait", {}) if w.action.duration is None else None,
}
_OTHER_ITEMS = ("message", "reasoning", "output_text", "function_call")


class OpenAiComputerParser(gui_table.TableParser, scanning.JsonCallsParser):
  """See the module docstring."""

  family = "OpenAI's computer use"
  own_prompt = _PROMPT
  name_key = "type"
  arguments_keys = ()
  readers = _READERS
  writers = _WRITERS

  def calls_of(
    self, value: object, position: int
  ) -> Sequence[trajectory.ToolCall] | None:
    if isinstance(value, dict) and value.get("type") == "computer_call":
      actions = value.get("actions")
      if actions is None:
        actions = [value.get("action")]
      if not isinstance(actions, list):
        raise base.ToolParseError("actions must be a list", position)
      return [
        scanning.call_from_object(action, position, "type", ())
        for action in actions
      ]
    if isinstance(value, dict) and value.get("type") in _OTHER_ITEMS:
      return None
    return super().calls_of(value, position)
