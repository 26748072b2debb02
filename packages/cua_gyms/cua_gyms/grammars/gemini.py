"""Parses Gemini's function calls, and the actions of its computer-use tool.

Two grammars: `gemini` (any tools: `{"functionCall": {"name": …, "args": …}}`)
and `gemini_computer` (the actions of the computer-use tool in that form;
coordinates are thousandths of the screenshot's sides). An object may also be
called `function_call`, or stand without that key.

Source: the pages "Function calling" and "Computer use" of the Gemini API;
names, arguments and defaults are those.

Conventions: `type_text_at` clicks, deletes the field's text, types, and presses
Enter; its flags switch the deletion and the Enter off. `navigate` and the
browser's buttons are their keyboard shortcuts. Plain text without a call ends
the task.
"""

from __future__ import annotations

from typing import Any, Sequence

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.tool_parser import gui_table
from tunix.rl.multi_turn.parser.tool_parser import scanning

GuiAction = gui_action.GuiAction
Kind = gui_action.GuiActionKind

_WRAPPERS = ("functionCall", "function_call")
_PROMPT = """You operate a browser for the user. Coordinates are 0 to 999 from \
the left and from the top.

Each turn, write one call:
{"functionCall": {"name": ..., "args": {...}}}

Functions:
click_at(x, y)
hover_at(x, y)
type_text_at(x, y, text, press_enter=true, clear_before_typing=true)
scroll_document(direction)
scroll_at(x, y, direction, magnitude=800)
drag_and_drop(x, y, destination_x, destination_y)
key_combination(keys)  e.g. "control+a"
navigate(url)
go_back()
go_forward()
wait_5_seconds()
Directions are up, down, left and right. When the task is done, answer in \
plain text without a call."""
_TOOLS_PROMPT = """You may call these functions:
{tools}

To call one, write this and nothing else:
{"functionCall": {"name": <function-name>, "args": <args-json-object>}}"""


class GeminiToolParser(scanning.JsonCallsParser):
  """See the module docstring: any tools."""

  arguments_keys: tuple[str, ...] = ("args", "arguments")
  prompt = _TOOLS_PROMPT

  def to_object(self, call: trajectory.ToolCall) -> dict[str, Any]:
    return {_WRAPPERS[0]: super().to_object(call)}

  def calls_of(
    self, value: object, position: int
  ) -> Sequence[trajectory.ToolCall] | None:
    for key in _WRAPPERS:
      if isinstance(value, dict) and key in value:
        return [
          scanning.call_from_object(
            value[key], position, self.name_key, self.arguments_keys
          )
        ]
    return super().calls_of(value, position)


# --- computer use -------------------------------------------------------------

_WAIT_S = 5.0
_MAGNITUDE = 800


def _type_text(a: gui_table.Arguments) -> list[GuiAction]:
  actions = [GuiAction(Kind.CLICK, **a.xy())]
  if a.flag("clear_before_typing", True):
    actions.append(GuiAction(Kind.KEY, keys=("ctrl", "a")))
    actions.append(GuiAction(Kind.KEY, keys=("delete",)))
  actions.append(GuiAction(Kind.TYPE, text=a.text("text")))
  if a.flag("press_enter", True):
    actions.append(GuiAction(Kind.KEY, keys=("enter",)))
  return actions


def _scroll_at(a: gui_table.Arguments) -> GuiAction:
  dx, dy = a.choice("direction", gui_table.DIRECTIONS)
  part = a.seconds("magnitude", float(_MAGNITUDE)) / 1000
  return GuiAction(
    Kind.SCROLL,
    **a.xy(),
    dx=dx * round(part * a.size[0]),
    dy=dy * round(part * a.size[1]),
  )


_READERS: dict[str, gui_table.Reader] = {
  "click_at": lambda a: GuiAction(Kind.CLICK, **a.xy()),
  "hover_at": lambda a: GuiAction(Kind.MOVE, **a.xy()),
  "type_text_at": _type_text,
  "scroll_document": gui_table.scroll_of("direction", notches=4),
  "scroll_at": _scroll_at,
  "drag_and_drop": lambda a: GuiAction(
    Kind.DRAG, **a.xy(), **a.xy("destination_x", "destination_y", end=True)
  ),
  "key_combination": lambda a: GuiAction(Kind.KEY, keys=a.keys("keys")),
  "navigate": gui_table.read_url,
  "go_back": gui_table.always(Kind.KEY, keys=("alt", "left")),
  "go_forward": gui_table.always(Kind.KEY, keys=("alt", "right")),
  "wait_5_seconds": gui_table.always(Kind.WAIT, duration=_WAIT_S),
  "open_web_browser": gui_table.always(Kind.OPEN_APP, text="browser"),
  "search": gui_table.unavailable("use navigate"),
}


def _write_scroll(w: gui_table.Writing) -> gui_table.Call | None:
  way = w.direction()
  if way is None:
    return None
  if w.anywhere:
    return "scroll_document", {"direction": way}
  extent = w.size[0] if w.action.dx else w.size[1]
  part = round(abs(w.action.dx or w.action.dy) * 1000 / extent)
  return "scroll_at", {**w.xy(), "direction": way, "magnitude": part}


def _write_click(w: gui_table.Writing) -> gui_table.Call | None:
  plain = (w.action.button, w.action.count, w.action.keys) == ("left", 1, ())
  return ("click_at", w.xy()) if plain else None


def _write_drag(w: gui_table.Writing) -> gui_table.Call | None:
  if w.anywhere or w.action.button != "left":
    return None
  return "drag_and_drop", {
    **w.xy(),
    **dict(zip(("destination_x", "destination_y"), w.end())),
  }


_WRITERS: dict[Kind, gui_table.Writer] = {
  Kind.CLICK: _write_click,
  Kind.MOVE: lambda w: ("hover_at", w.xy()),
  Kind.SCROLL: _write_scroll,
  Kind.DRAG: _write_drag,
  Kind.KEY: gui_table.write_keys("key_combination", "keys", "+"),
  Kind.WAIT: lambda w: (
    ("wait_5_seconds", {}) if w.action.duration == _WAIT_S else None
  ),
  Kind.OPEN_APP: lambda w: (
    ("open_web_browser", {}) if w.action.text == "browser" else None
  ),
}


class GeminiComputerParser(gui_table.TableParser, GeminiToolParser):
  """See the module docstring: computer use."""

  family = "Gemini's computer use"
  own_prompt = _PROMPT
  space = gui_table.THOUSANDTHS
  readers = _READERS
  writers = _WRITERS
