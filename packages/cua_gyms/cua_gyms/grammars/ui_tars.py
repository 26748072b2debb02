"""Parses UI-TARS: `Thought: …` and `Action: click(start_box='(235,512)')`.

Three grammars: `ui_tars` (UI-TARS 1: coordinates 0 to 1000 of the
screenshot's sides), `ui_tars_absolute` (1.5: pixels of the screenshot as the
model saw it, sides resized to multiples of 28) and `ui_tars_mobile` (1.5 on a
phone).

Source: codes/ui_tars/prompt.py and README_deploy.md of bytedance/UI-TARS.

Rules of reading:
- Actions stand after the last "Action:"; several are separated by blank lines.
- A point is `(x,y)` in a box, with or without `<|box_start|>` marks, `<point>x
  y</point>`, `<bbox>x1 y1 x2 y2</bbox>`, or four numbers, whose centre counts.
- Strings are quoted with ' or ", and a backslash escapes; a quote that is
  followed by neither , nor ) counts as text, as models forget to escape.
- A malformed action is reported and the others are kept.

Its waits, presses and scrolls have no length: the one of an action that is
written is lost.
"""

from __future__ import annotations

import json
import re
from typing import Any, Sequence

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.tool_parser import base
from tunix.rl.multi_turn.parser.tool_parser import gui_table
from tunix.rl.multi_turn.parser.tool_parser import scanning

GuiAction = gui_action.GuiAction
Kind = gui_action.GuiActionKind

_ACTION = "Action:"
_THOUGHT_ENDS = "</think>"
_NAME = re.compile(r"\s*([A-Za-z_]\w*)\s*\(")
_ARGUMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*")
_BARE = re.compile(r"[^,)\s]+")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}

# action name -> (button, count)
_CLICKS = {
  "click": ("left", 1),
  "left_single": ("left", 1),
  "left_double": ("left", 2),
  "right_single": ("right", 1),
  "middle_single": ("middle", 1),
}
_FORMAT = """## Output Format
Thought: ...
Action: ...

## Action Space
"""
_SIGNATURES = """click(start_box='<|box_start|>(x1,y1)<|box_end|>')
left_double(start_box='<|box_start|>(x1,y1)<|box_end|>')
right_single(start_box='<|box_start|>(x1,y1)<|box_end|>')
drag(start_box='<|box_start|>(x1,y1)<|box_end|>', \
end_box='<|box_start|>(x2,y2)<|box_end|>')
hotkey(key='')
type(content='')
scroll(start_box='<|box_start|>(x1,y1)<|box_end|>', \
direction='down or up or right or left')
wait()
finished()
call_user()"""
_MOBILE_SIGNATURES = """click(start_box='<|box_start|>(x1,y1)<|box_end|>')
long_press(start_box='<|box_start|>(x1,y1)<|box_end|>')
type(content='')
scroll(start_box='<|box_start|>(x1,y1)<|box_end|>', \
direction='down or up or right or left')
open_app(app_name='')
drag(start_box='<|box_start|>(x1,y1)<|box_end|>', \
end_box='<|box_start|>(x2,y2)<|box_end|>')
press_home()
press_back()
finished(content='')"""

_START = ("start_box", "start_point", "point")
_END = ("end_box", "end_point")


def _drag(a: gui_table.Arguments) -> GuiAction:
  return GuiAction(Kind.DRAG, **a.point(*_START), **a.point(*_END, end=True))


def _hotkey(a: gui_table.Arguments) -> GuiAction:
  return GuiAction(Kind.KEY, keys=a.keys("key", "hotkey"))


def read_finished(a: gui_table.Arguments) -> GuiAction:
  """Reads the end of a task: an answer, or a success without one."""
  if a.values.get("content"):
    return GuiAction(Kind.ANSWER, text=a.text("content"))
  return GuiAction(Kind.TERMINATE, success=True)


_READERS: dict[str, gui_table.Reader] = {
  **gui_table.clicks_of(_CLICKS, *_START),
  "move": gui_table.point_of(Kind.MOVE, *_START),
  "hover": gui_table.point_of(Kind.MOVE, *_START),
  "drag": _drag,
  "select": _drag,
  "hotkey": _hotkey,
  "press": _hotkey,
  "type": gui_table.text_of(Kind.TYPE, "content"),
  "scroll": gui_table.scroll_of("direction", *_START),
  "wait": gui_table.always(Kind.WAIT),
  "finished": read_finished,
  "call_user": gui_table.always(Kind.TERMINATE, success=False),
  "long_press": gui_table.point_of(Kind.LONG_PRESS, *_START),
  "open_app": lambda a: GuiAction(
    Kind.OPEN_APP, text=a.name("app_name", "content")
  ),
  "press_home": gui_table.always(Kind.SYSTEM_BUTTON, text="home"),
  "press_back": gui_table.always(Kind.SYSTEM_BUTTON, text="back"),
}


def _box(point: Sequence[Any]) -> str:
  return f"<|box_start|>({point[0]},{point[1]})<|box_end|>"


def _at(w: gui_table.Writing) -> dict[str, Any]:
  return {} if w.anywhere else {"start_box": _box(w.start())}


def _write_scroll(w: gui_table.Writing) -> gui_table.Call | None:
  direction = w.direction()
  return direction and ("scroll", {**_at(w), "direction": direction})  # type: ignore[return-value]


def write_answer(w: gui_table.Writing) -> gui_table.Call | None:
  """Writes an answer with a text, without which `finished` claims success."""
  return ("finished", {"content": w.action.text}) if w.action.text else None


def write_end(w: gui_table.Writing) -> gui_table.Call:
  """Writes the end of a task without an answer."""
  return "call_user" if w.action.success is False else "finished", {}


def _write_button(w: gui_table.Writing) -> gui_table.Call | None:
  is_written = w.action.text in ("home", "back")
  return (f"press_{w.action.text}", {}) if is_written else None


_WRITERS: dict[Kind, gui_table.Writer] = {
  Kind.CLICK: gui_table.write_clicks(_CLICKS, _at),
  Kind.MOVE: lambda w: ("move", _at(w)),
  Kind.DRAG: gui_table.write_drag("drag", "start_box", "end_box", _box),
  Kind.KEY: lambda w: (
    ("hotkey", {"key": " ".join(w.action.keys)})
    if w.action.duration is None
    else None
  ),
  Kind.TYPE: gui_table.writes("type", content="text"),
  Kind.SCROLL: _write_scroll,
  Kind.WAIT: gui_table.writes("wait"),
  Kind.LONG_PRESS: lambda w: ("long_press", _at(w)),
  Kind.OPEN_APP: gui_table.writes("open_app", app_name="text"),
  Kind.SYSTEM_BUTTON: _write_button,
  Kind.ANSWER: write_answer,
  Kind.TERMINATE: write_end,
}


class UiTarsParser(gui_table.TableParser):
  """See the module docstring. Coordinates 0 to 1000."""

  family = "UI-TARS"
  space = gui_table.Space("relative", scale=1000)
  boxes = True
  readers = _READERS
  writers = _WRITERS
  own_prompt = _FORMAT + _SIGNATURES

  def format(
    self, calls: Sequence[trajectory.ToolCall], thought: str | None = None
  ) -> str:
    actions = "\n\n".join(map(write_action, calls))
    lines = [f"Thought: {thought}"] if thought else []
    if calls:
      lines.append(f"{_ACTION} {actions}")
    return "\n".join(lines)

  def parse_result(self, model_response: str) -> base.ParseResult:
    text = base.require_text(model_response)
    # An "Action: " that a type action carries stands inside quotes; the last
    # one that begins a line, or the last of all, is the real one.
    starts = [m.end() for m in re.finditer(r"(?m)^[ \t]*Action:", text)]
    start = starts[-1] if starts else text.rfind(_ACTION) + len(_ACTION)
    if not starts and _ACTION not in text:
      start = len(text)
    # Reasoning ends before the actions; a typed "</think>" comes after.
    end = text.rfind(_THOUGHT_ENDS, 0, start)
    reasoning, visible = "", 0
    if end >= 0:
      reasoning = text[:end].strip().removeprefix("<think>").strip()
      visible = end + len(_THOUGHT_ENDS)
    if start == len(text) and not text.endswith(_ACTION):
      return base.ParseResult(thought=reasoning, answer=text[visible:].strip())
    thought = text[visible : start - len(_ACTION)].strip()
    thought = thought.removeprefix("Thought:").strip()
    thought = "\n".join(part for part in (reasoning, thought) if part)
    calls: list[trajectory.ToolCall] = []
    positions: list[int] = []
    failures: list[base.ToolParseError] = []
    position = start
    while (position := scanning.skip_space(text, position)) < len(text):
      try:
        call, end = read_action(text, position)
        calls.append(call)
        positions.append(position)
        position = end
      except base.ToolParseError as error:
        failures.append(error)
        gap = text.find("\n\n", position + 1)
        if gap < 0 or len(failures) == scanning.MAX_FAILURES:
          break
        position = gap
    if not calls and not failures:
      failures.append(
        base.ToolParseError(f"nothing stands after {_ACTION}", start)
      )
    return base.ParseResult(
      tuple(calls),
      thought,
      failures=tuple(failures),
      positions=tuple(positions),
    )


class UiTarsAbsoluteParser(UiTarsParser):
  """UI-TARS 1.5: coordinates in pixels of the screenshot."""

  space = gui_table.ABSOLUTE
  resizing = base.Resizing(28, 100 * 28**2, 16384 * 28**2)


class UiTarsMobileParser(UiTarsAbsoluteParser):
  """UI-TARS 1.5 on a phone: the prompt offers its gestures and buttons."""

  own_prompt = _FORMAT + _MOBILE_SIGNATURES


def _quoted(value: object) -> str:
  if not isinstance(value, str):
    value = json.dumps(value)
  text = value.replace("\\", "\\\\").replace("'", "\\'")
  for letter, character in _ESCAPES.items():
    text = text.replace(character, f"\\{letter}")
  return f"'{text}'"


def write_action(call: trajectory.ToolCall) -> str:
  """`name(key='value', …)`."""
  arguments = (f"{k}={_quoted(v)}" for k, v in call.arguments.items())
  return f"{call.name}({', '.join(arguments)})"


def read_action(text: str, start: int) -> tuple[trajectory.ToolCall, int]:
  """Returns one `name(key='value', …)` and where it ends."""
  match = _NAME.match(text, start)
  if match is None:
    raise base.ToolParseError(
      f"expected an action, found {text[start : start + 60].strip()!r}", start
    )
  name = match.group(1)
  position = match.end()
  arguments: dict[str, Any] = {}
  while True:
    argument = _ARGUMENT.match(text, position)
    if argument is None:
      break
    position = argument.end()
    if text[position : position + 1] in ("'", '"'):
      value, position = _read_string(text, position, name)
    else:
      bare = _BARE.match(text, position)
      value = bare.group() if bare else ""
      position = bare.end() if bare else position
    arguments[argument.group(1)] = value
    comma = re.compile(r"\s*,").match(text, position)
    if comma is None:
      break
    position = comma.end()
  close = re.compile(r"\s*\)").match(text, position)
  if close is None:
    raise base.ToolParseError(
      f"action {name!r} is not closed, at"
      f" {text[position : position + 60].strip()!r}",
      position,
    )
  return trajectory.ToolCall(name, arguments), close.end()


def _read_string(text: str, start: int, name: str) -> tuple[str, int]:
  """Returns the string that begins with the quote at `start`, and where it
  ends."""
  quote = text[start]
  parts: list[str] = []
  position = start + 1
  while position < len(text):
    character = text[position]
    if character == "\\" and position + 1 < len(text):
      escaped = text[position + 1]
      parts.append(_ESCAPES.get(escaped, escaped))
      position += 2
      continue
    if character == quote and _ENDS.match(text, position + 1):
      return "".join(parts), position + 1
    parts.append(character)
    position += 1
  raise base.ToolParseError(
    f"a string of action {name!r} is never closed", start
  )


# The text after a string: the end of the action, or the next argument.
_ENDS = re.compile(r"\s*(?:\)|,\s*[A-Za-z_]\w*\s*=)")
