"""Parses GLM-V's GUI actions, as GLM-4.5V writes them.

Two grammars, both with coordinates 0 to 999 of the screenshot's sides:
- `glm_v` (computers): `left_click(start_box='[x, y]')`, in
  `<|begin_of_box|>` marks or without.
- `glm_v_mobile` (phones): AndroidWorld's JSON with places as boxes, `"box_2d":
  [[x0, y0, x1, y1]]`, whose centre counts.

Source: examples/gui-agent/glm-45v/agent.md of zai-org/GLM-V. Call rules and
arguments are those; the sentences around them are ours.

Conventions: a `step` of scroll is a notch of the wheel. `input_text` taps the
field first, and replaces what is in it with `override`.
"""

from __future__ import annotations

import re
from typing import Any, Sequence

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.tool_parser import base
from tunix.rl.multi_turn.parser.tool_parser import gui_table
from tunix.rl.multi_turn.parser.tool_parser import scanning

from cua_gyms.grammars import android_world
from cua_gyms.grammars import ui_tars

GuiAction = gui_action.GuiAction
Kind = gui_action.GuiActionKind

_PROMPT = """You operate a computer for the user. Coordinates are thousandths \
of the screen (0-999).

# Action Space
left_click(start_box='[x,y]', element_info='')
right_click(start_box='[x,y]', element_info='')
middle_click(start_box='[x,y]', element_info='')
left_double_click(start_box='[x,y]', element_info='')
hover(start_box='[x,y]', element_info='')
left_drag(start_box='[x1,y1]', end_box='[x2,y2]', element_info='')
key(keys='')  # e.g. ctrl+c
type(content='')
scroll(start_box='[x,y]', direction='', step=5, element_info='')  # down or up
WAIT()  # 5 seconds
DONE()  # the task is done
FAIL()  # the task cannot be done

# Output Format
Plain text explanation with action(param='...')
Memory:
[{"key": "value"}, ...]"""
_MOBILE_PROMPT = """You operate a phone for the user. Coordinates are \
thousandths of the screen (0-999).

# Action Space
{"action_type": "status", "goal_status": "<complete|infeasible>"}
{"action_type": "answer", "text": "<answer_text>"}
{"action_type": "click", "box_2d": [[xmin,ymin,xmax,ymax]]}
{"action_type": "long_press", "box_2d": [[xmin,ymin,xmax,ymax]]}
{"action_type": "input_text", "text": "<text_input>", "box_2d": \
[[xmin,ymin,xmax,ymax]], "override": true/false}
{"action_type": "keyboard_enter"}
{"action_type": "navigate_home"}
{"action_type": "navigate_back"}
{"action_type": "swipe", "direction": "<up|down|left|right>", "box_2d": \
[[xmin,ymin,xmax,ymax]](optional)}
{"action_type": "open_app", "app_name": "<name>"}
{"action_type": "wait"}

# Output Format
Memory: ...
Reason: ...
Action: {"action_type":...}"""
_WAIT_S = 5.0
_CLICKS = {
  "left_click": ("left", 1),
  "right_click": ("right", 1),
  "middle_click": ("middle", 1),
  "left_double_click": ("left", 2),
}
_READERS: dict[str, gui_table.Reader] = {
  **gui_table.clicks_of(_CLICKS, "start_box"),
  "hover": gui_table.point_of(Kind.MOVE, "start_box"),
  "left_drag": lambda a: GuiAction(
    Kind.DRAG, **a.point("start_box"), **a.point("end_box", end=True)
  ),
  "key": lambda a: GuiAction(Kind.KEY, keys=a.keys("keys")),
  "type": gui_table.text_of(Kind.TYPE, "content"),
  "scroll": gui_table.scroll_of(
    "direction", "start_box", step="step", notches=5.0
  ),
  "WAIT": gui_table.always(Kind.WAIT, duration=_WAIT_S),
  "DONE": gui_table.always(Kind.TERMINATE, success=True),
  "FAIL": gui_table.always(Kind.TERMINATE, success=False),
}


def _box(point: Sequence[Any]) -> str:
  return f"[{point[0]},{point[1]}]"


def _at(w: gui_table.Writing) -> dict[str, Any]:
  return {} if w.anywhere else {"start_box": _box(w.start())}


def _write_scroll(w: gui_table.Writing) -> gui_table.Call | None:
  way = w.direction()
  if way is None:
    return None
  step = gui_table.notches(w.action.dx or w.action.dy)
  return "scroll", {**_at(w), "direction": way, "step": step}


_WRITERS: dict[Kind, gui_table.Writer] = {
  Kind.CLICK: gui_table.write_clicks(_CLICKS, _at),
  Kind.MOVE: lambda w: ("hover", _at(w)),
  Kind.DRAG: gui_table.write_drag("left_drag", "start_box", "end_box", _box),
  Kind.KEY: gui_table.write_keys("key", "keys", "+"),
  Kind.TYPE: gui_table.writes("type", content="text"),
  Kind.SCROLL: _write_scroll,
  Kind.WAIT: lambda w: ("WAIT", {}) if w.action.duration == _WAIT_S else None,
  Kind.TERMINATE: lambda w: (
    "FAIL" if w.action.success is False else "DONE",
    {},
  ),
}


class GlmVParser(gui_table.TableParser, scanning.ScanningParser):
  """See the module docstring: computers."""

  family = "GLM-V"
  own_prompt = _PROMPT
  space = gui_table.THOUSANDTHS
  boxes = True
  readers = _READERS
  writers = _WRITERS
  opening = re.compile(
    r"(?<![\w.])(?:" + "|".join(map(re.escape, _READERS)) + r")\s*(?=\()"
  )
  noise = re.compile(r"<\|(?:begin|end)_of_box\|>|(?m:^[ \t]*Action:)")

  def read_block(
    self, text: str, start: int
  ) -> tuple[Sequence[trajectory.ToolCall], int]:
    call, end = ui_tars.read_action(text, start)
    return (call,), end

  def format(
    self, calls: Sequence[trajectory.ToolCall], thought: str | None = None
  ) -> str:
    actions = map(ui_tars.write_action, calls)
    return base.with_thought(
      thought, *(f"Action: <|begin_of_box|>{a}<|end_of_box|>" for a in actions)
    )


class _Boxes(android_world.Places):
  """Places as `"box_2d": [[x0, y0, x1, y1]]`."""

  def has(self, a: gui_table.Arguments) -> bool:
    return a.has("box_2d")

  def read(self, a: gui_table.Arguments) -> dict[str, Any]:
    return a.point("box_2d")

  def write(self, w: gui_table.Writing) -> dict[str, Any]:
    return {} if w.anywhere else {"box_2d": [[*w.start(), *w.start()]]}


class GlmVMobileParser(android_world.AndroidWorldParser):
  """See the module docstring: phones."""

  family = "GLM-V"
  own_prompt = _MOBILE_PROMPT
  space = gui_table.THOUSANDTHS
  boxes = True
  noise = re.compile(
    r"(?m)^[ \t]*(?:Memory|Reason|Action):|<\|(?:begin|end)_of_box\|>"
  )
  readers = android_world.make_readers(_Boxes())
  writers = android_world.make_writers(_Boxes())
