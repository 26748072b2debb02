"""Parses MAI-UI: `<thinking>` and one `mobile_use` call in Qwen's tags.

Coordinates are 0 to 999 of the screenshot's sides (pixel = coordinate * size /
999), which are resized to multiples of 32; four numbers are a box, whose
centre counts. Reasoning may also end with `</think>`.

Source: src/prompt.py and src/mai_naivigation_agent.py of Tongyi-MAI/MAI-UI.
The tags, the lines of the action space and their arguments are those; the
sentences around them are ours.

Conventions: `swipe` moves the finger towards `direction`, from `coordinate` or
the middle of the screen, for a third of the screen. `ask_user` ends the
episode, as there is no user to ask. Calls of other tools are tool calls and no
GUI actions.
"""

from __future__ import annotations

import re
from typing import Sequence

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.tool_parser import base
from tunix.rl.multi_turn.parser.tool_parser import gui_table
from tunix.rl.multi_turn.parser.tool_parser.formats import qwen
from tunix.rl.multi_turn.parser.tool_parser.grammars import computer_use
from tunix.rl.multi_turn.parser.tool_parser.grammars import mobile_use

GuiAction = gui_action.GuiAction
Kind = gui_action.GuiActionKind

_PROMPT = """You operate a phone for the user. You see its screenshots and \
your earlier actions, and make the next action of the task.

## Output Format
Reason between <thinking> tags, then write one JSON object with a function's \
name and arguments between <tool_call> tags:
```
<thinking>
...
</thinking>
<tool_call>
{"name": "mobile_use", "arguments": <args-json-object>}
</tool_call>
```

## Action Space
Coordinates are 0 to 999 from the left and from the top.

{"action": "click", "coordinate": [x, y]}
{"action": "long_press", "coordinate": [x, y]}
{"action": "double_click", "coordinate": [x, y]}
{"action": "type", "text": ""}
{"action": "swipe", "direction": "up or down or left or right", "coordinate": \
[x, y]} # coordinate is optional: where the finger begins.
{"action": "open", "text": "app_name"}
{"action": "drag", "start_coordinate": [x1, y1], "end_coordinate": [x2, y2]}
{"action": "system_button", "button": "button_name"} # back, home, menu, enter
{"action": "wait"}
{"action": "terminate", "status": "success or fail"}
{"action": "answer", "text": "xxx"}
{"action": "ask_user", "text": "xxx"}
"""
_TOOLS = """
## MCP Tools
These functions may be called by their names in the same tags:
{tools}
"""
_NOTE = """
## Note
In <thinking>, plan briefly and end with one sentence that names the next \
action and its target."""
_STATUS = {"success": True, "fail": False, "failure": False}


def _swipe(a: gui_table.Arguments) -> GuiAction:
  way = a.choice("direction", {name: name for name in gui_table.DIRECTIONS})
  return a.swipe(way, a.point("coordinate") if a.has("coordinate") else None)


_READERS: dict[str, gui_table.Reader] = {
  "click": gui_table.point_of(Kind.CLICK, "coordinate"),
  "double_click": gui_table.point_of(Kind.CLICK, "coordinate", count=2),
  "long_press": mobile_use.read_long_press,
  "type": gui_table.text_of(Kind.TYPE, "text"),
  "swipe": _swipe,
  "open": lambda a: GuiAction(Kind.OPEN_APP, text=a.name("text")),
  "drag": lambda a: GuiAction(
    Kind.DRAG,
    **a.point("start_coordinate"),
    **a.point("end_coordinate", end=True),
  ),
  "system_button": mobile_use.read_button,
  "wait": computer_use.read_wait,
  "terminate": lambda a: GuiAction(
    Kind.TERMINATE, success=a.choice("status", _STATUS)
  ),
  "answer": gui_table.text_of(Kind.ANSWER, "text"),
  "ask_user": gui_table.always(Kind.TERMINATE, success=False),
}


def _write_click(w: gui_table.Writing) -> gui_table.Call | None:
  if w.action.button == "left" and w.action.count == 2 and not w.action.keys:
    return "double_click", w.place()
  return mobile_use.write_tap(w)


def _write_swipe(w: gui_table.Writing) -> gui_table.Call | None:
  way = w.swipe_direction()
  if way is None or w.action.duration is not None:
    return None
  return "swipe", {"direction": way, **w.place()}


def _write_button(w: gui_table.Writing) -> gui_table.Call | None:
  is_button = w.action.text in mobile_use.BUTTONS
  return ("system_button", {"button": w.action.text}) if is_button else None


_WRITERS: dict[Kind, gui_table.Writer] = {
  Kind.CLICK: _write_click,
  Kind.LONG_PRESS: lambda w: (
    ("long_press", w.place()) if w.action.duration is None else None
  ),
  Kind.TYPE: gui_table.writes("type", text="text"),
  Kind.SWIPE: _write_swipe,
  Kind.DRAG: gui_table.write_drag("drag", "start_coordinate", "end_coordinate"),
  Kind.OPEN_APP: gui_table.writes("open", text="text"),
  Kind.SYSTEM_BUTTON: _write_button,
  Kind.WAIT: lambda w: ("wait", {}) if w.action.duration is None else None,
  Kind.ANSWER: gui_table.writes("answer", text="text"),
  Kind.TERMINATE: lambda w: (
    "terminate",
    {"status": "fail" if w.action.success is False else "success"},
  ),
}


class MaiUiParser(gui_table.OneToolParser, qwen.QwenToolParser):
  """See the module docstring."""

  family = "MAI-UI"
  tool_name = mobile_use.TOOL_NAME
  space = gui_table.Space("relative", scale=999)
  resizing = base.QWEN3_VL
  boxes = True
  readers = _READERS
  writers = _WRITERS
  noise = re.compile(r"</?thinking>|```")

  def get_tool_prompt(self, tools_schema: base.ToolsSchema = None) -> str:
    """Returns the format and the actions; other tools follow in their own
    section."""
    tools = base.schema_lines(tools_schema) if tools_schema else ""
    section = _TOOLS.replace("{tools}", tools) if tools else ""
    return _PROMPT + section + _NOTE

  def format(
    self, calls: Sequence[trajectory.ToolCall], thought: str | None = None
  ) -> str:
    if thought:
      thought = f"<thinking>\n{thought}\n</thinking>"
    return super().format(calls, thought)
