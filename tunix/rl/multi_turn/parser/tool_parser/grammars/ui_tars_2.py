"""Parses UI-TARS-2: functions with tagged parameters, several a call.

    <gui_think> I scroll to the form. </gui_think>
    <seed:tool_call><function=scroll><parameter=direction>down</parameter>
    <parameter=point><point>500 300</point></parameter></function>
    <function=wait></function></seed:tool_call>

Coordinates are 0 to 1000 of the screenshot's sides; actions are UI-TARS's,
others among them. A value is text from tag to tag; one line break at either end
of it is the layout's.

Source: examples/seed_16_gui.ipynb of the UI-TARS-2 demonstrations as
libs/python/agent/agent/loops/uitars2.py of trycua/cua has it. Names and
arguments are those; the sentences around them are ours.

Conventions: `wait` without a time has none. A scroll without a point is at the
mouse. A point of `type` is not used: text goes where the focus is. `press`,
`release`, `mouse_down` and `mouse_up` have no `GuiAction`.
"""

from __future__ import annotations

import re
from typing import Any, Sequence

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.tool_parser import base
from tunix.rl.multi_turn.parser.tool_parser import gui_table
from tunix.rl.multi_turn.parser.tool_parser import scanning
from tunix.rl.multi_turn.parser.tool_parser.grammars import ui_tars

GuiAction = gui_action.GuiAction
Kind = gui_action.GuiActionKind

_OPEN, _CLOSE = "<seed:tool_call>", "</seed:tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>")
_FUNCTION_END = re.compile(r"\s*</function>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>")
_PARAMETER_END = "</parameter>"
_SECONDS = re.compile(r"\s*([\d.]+)\s*s?\s*")
_PROMPT = """You operate a computer for the user. Points are x y, each 0 to \
1000 of the screen's sides.

## Function Definition
click(point: <point>x y</point>)
left_double(point)
right_single(point)
move_to(point)
drag(start_point, end_point)
scroll(direction: up|down|left|right, point?)
hotkey(key: keys split by spaces, lowercase)
type(content: text; a line break at its end submits it)
wait(time?: seconds)
take_screenshot()
call_user(content?: you need the user)
finished(content?: the answer)

## Output Format
<gui_think> your reasoning </gui_think>
<seed:tool_call><function=example_function><parameter=example_parameter>value\
</parameter></function></seed:tool_call>
A call may hold several functions, one after the other."""

_CLICKS = {
  "click": ("left", 1),
  "left_double": ("left", 2),
  "right_single": ("right", 1),
}
_HELD = "it is not released again; use click, drag or hotkey"


def _wait(a: gui_table.Arguments) -> GuiAction:
  time = a.values.get("time")
  if isinstance(time, str) and (match := _SECONDS.fullmatch(time)) is not None:
    time = match[1]
  if not time:
    return GuiAction(Kind.WAIT)
  seconds = gui_table.as_number(time, "time")
  return GuiAction(Kind.WAIT, duration=seconds)


_READERS: dict[str, gui_table.Reader] = {
  **gui_table.clicks_of(_CLICKS, "point"),
  "move_to": gui_table.point_of(Kind.MOVE, "point"),
  "drag": lambda a: GuiAction(
    Kind.DRAG, **a.point("start_point"), **a.point("end_point", end=True)
  ),
  "scroll": gui_table.scroll_of("direction", "point"),
  "hotkey": lambda a: GuiAction(Kind.KEY, keys=a.keys("key")),
  "type": gui_table.text_of(Kind.TYPE, "content"),
  "wait": _wait,
  "take_screenshot": gui_table.always(Kind.SCREENSHOT),
  "call_user": gui_table.always(Kind.TERMINATE, success=False),
  "finished": ui_tars.read_finished,
  **{
    name: gui_table.unavailable(_HELD)
    for name in ("press", "release", "mouse_down", "mouse_up")
  },
}


def _point(at: Sequence[Any]) -> str:
  return f"<point>{at[0]} {at[1]}</point>"


def _at(w: gui_table.Writing) -> dict[str, Any]:
  return {} if w.anywhere else {"point": _point(w.start())}


def _write_scroll(w: gui_table.Writing) -> gui_table.Call | None:
  way = w.direction()
  return None if way is None else ("scroll", {"direction": way, **_at(w)})


def _write_wait(w: gui_table.Writing) -> gui_table.Call | None:
  seconds = w.action.duration
  if seconds is None:
    return "wait", {}
  # Whole seconds, of which 0 is no time.
  if not seconds or seconds != int(seconds):
    return None
  return "wait", {"time": str(int(seconds))}


_WRITERS: dict[Kind, gui_table.Writer] = {
  Kind.CLICK: gui_table.write_clicks(_CLICKS, _at),
  Kind.MOVE: lambda w: ("move_to", _at(w)),
  Kind.DRAG: gui_table.write_drag("drag", "start_point", "end_point", _point),
  Kind.SCROLL: _write_scroll,
  Kind.KEY: gui_table.write_keys("hotkey", "key", " "),
  Kind.TYPE: gui_table.writes("type", content="text"),
  Kind.WAIT: _write_wait,
  Kind.SCREENSHOT: lambda w: ("take_screenshot", {}),
  Kind.ANSWER: ui_tars.write_answer,
  Kind.TERMINATE: ui_tars.write_end,
}


class UiTars2Parser(gui_table.TableParser, scanning.ScanningParser):
  """See the module docstring."""

  family = "UI-TARS-2"
  own_prompt = _PROMPT
  space = gui_table.Space("relative", scale=1000)
  boxes = True
  readers = _READERS
  writers = _WRITERS
  call_end = _CLOSE
  opening = re.compile(re.escape(_OPEN))
  resuming = re.compile(rf"{_CLOSE}|{_OPEN}")
  # Reasoning stands in tags of changing names.
  noise = re.compile(r"</?(?:gui_)?think\w*>")

  def read_block(
    self, text: str, start: int
  ) -> tuple[Sequence[trajectory.ToolCall], int]:
    calls: list[trajectory.ToolCall] = []
    end = start + len(_OPEN)
    while (function := _FUNCTION.match(text, end)) is not None:
      call, end = self._read_function(text, function)
      calls.append(call)
    tail = scanning.skip_space(text, end)
    if not calls:
      raise base.ToolParseError(
        "a <seed:tool_call> must hold a <function=…>, found"
        f" {scanning.quote(text, tail)}",
        tail,
      )
    return calls, scanning.end_of_block(
      text, end, (_CLOSE,), _OPEN, f"{_CLOSE} or another <function=…>"
    )

  def _read_function(
    self, text: str, function: re.Match[str]
  ) -> tuple[trajectory.ToolCall, int]:
    name, end = function.group(1), function.end()
    arguments: dict[str, Any] = {}
    while (parameter := _PARAMETER.match(text, end)) is not None:
      close = text.find(_PARAMETER_END, parameter.end())
      if close < 0:
        raise base.ToolParseError(
          f"<parameter={parameter.group(1)}> of {name!r} is never closed",
          parameter.start(1),
        )
      value = text[parameter.end() : close]
      value = value.removeprefix("\n").removesuffix("\n")
      arguments[parameter.group(1)] = value
      end = close + len(_PARAMETER_END)
    if (tail := _FUNCTION_END.match(text, end)) is None:
      raise base.ToolParseError(
        f"expected </function> of {name!r}, found {scanning.quote(text, end)}",
        end,
      )
    return trajectory.ToolCall(name, arguments), tail.end()

  def format(
    self, calls: Sequence[trajectory.ToolCall], thought: str | None = None
  ) -> str:
    block = f"{_OPEN}{''.join(map(_write_function, calls))}{_CLOSE}"
    return base.with_thought(
      thought and f"<gui_think> {thought} </gui_think>",
      *((block,) if calls else ()),
    )


def _write_function(call: trajectory.ToolCall) -> str:
  parts = [f"<function={call.name}>"]
  for key, value in call.arguments.items():
    text = value if isinstance(value, str) else scanning.compact_json(value)
    if _PARAMETER_END in text:
      raise base.GuiActionError(
        f"UI-TARS-2 cannot write {_PARAMETER_END!r} in {key!r}"
      )
    if text[:1] == "\n" or text[-1:] == "\n":  # Not to be read as layout.
      text = f"\n{text}\n"
    parts.append(f"<parameter={key}>{text}{_PARAMETER_END}")
  return "".join([*parts, "</function>"])
