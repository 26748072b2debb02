"""Parses UI-TARS: `Thought: …` and `Action: click(start_box='(235,512)')`.

Two grammars: `ui_tars` (UI-TARS 1 and 2: coordinates 0 to 1000 of the
screenshot's sides) and `ui_tars_absolute` (1.5: pixels of the screenshot as the
model saw it).

Rules of reading:
- Actions stand after the last "Action:"; several are separated by blank lines.
- A point is `(x,y)` in a box, with or without `<|box_start|>` marks, `<point>x
  y</point>`, `<bbox>x1 y1 x2 y2</bbox>`, or four numbers, whose centre counts.
- Strings are quoted with ' or ", and a backslash escapes; a quote that is
  followed by neither , nor ) counts as text, as models forget to escape.
- A malformed action is reported and the others are kept.
"""

from __future__ import annotations

import json
import re
from typing import Any, Sequence

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.tool_parser import base
from tunix.rl.multi_turn.parser.tool_parser import keys as keys_lib

Kind = gui_action.GuiActionKind

_ACTION = "Action:"
_NAME = re.compile(r"\s*([A-Za-z_]\w*)\s*\(")
_ARGUMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*")
_BARE = re.compile(r"[^,)\s]+")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_SCROLL_PIXELS = 120

# action name -> (button, count)
_CLICKS = {
    "click": ("left", 1),
    "left_single": ("left", 1),
    "left_double": ("left", 2),
    "right_single": ("right", 1),
    "middle_single": ("middle", 1),
}
_CLICK_NAMES = {
    ("left", 1): "click",
    ("left", 2): "left_double",
    ("right", 1): "right_single",
    ("middle", 1): "middle_single",
}
_DIRECTIONS = {
    "up": (0, -1),
    "down": (0, 1),
    "left": (-1, 0),
    "right": (1, 0),
}
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
_NAMES = (
    *_CLICKS,
    "move",
    "hover",
    "drag",
    "select",
    "hotkey",
    "press",
    "type",
    "scroll",
    "wait",
    "finished",
    "call_user",
    "long_press",
    "open_app",
    "press_home",
    "press_back",
)


class UiTarsParser(base.GuiActionParser):
  """See the module docstring. Coordinates 0 to 1000."""

  coordinates = "relative"

  @property
  def default_tools(self) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name}} for name in _NAMES
    ]

  def get_tool_prompt(self, tools_schema: base.ToolsSchema = None) -> str:
    """The output format and the action space; other tools cannot be shown."""
    if tools_schema is not None and base.as_schemas(tools_schema):
      raise ValueError("the UI-TARS grammar has its own actions only")
    return (
        "## Output Format\nThought: ...\nAction: ...\n\n## Action Space\n"
        + _SIGNATURES
    )

  def format(
      self, calls: Sequence[trajectory.ToolCall], thought: str | None = None
  ) -> str:
    actions = "\n\n".join(
        f"{call.name}("
        + ", ".join(f"{k}={_quoted(v)}" for k, v in call.arguments.items())
        + ")"
        for call in calls
    )
    lines = [f"Thought: {thought}"] if thought else []
    if calls:
      lines.append(f"{_ACTION} {actions}")
    return "\n".join(lines)

  def parse_result(self, model_response: str) -> base.ParseResult:
    text = base.require_text(model_response)
    if "</think>" in text:
      reasoning, _, rest = text.rpartition("</think>")
      reasoning = reasoning.strip().removeprefix("<think>").strip()
    else:
      reasoning, rest = "", text
    # An "Action: " that a type action carries stands inside quotes; the last
    # one that begins a line, or the last of all, is the real one.
    starts = [m.end() for m in re.finditer(r"(?m)^\s*Action:", rest)]
    start = starts[-1] if starts else rest.rfind(_ACTION) + len(_ACTION)
    if not starts and _ACTION not in rest:
      return base.ParseResult(thought=reasoning, answer=rest.strip())
    thought = rest[: start - len(_ACTION)].strip()
    thought = thought.removeprefix("Thought:").strip()
    thought = "\n".join(part for part in (reasoning, thought) if part)
    calls: list[trajectory.ToolCall] = []
    errors: list[str] = []
    position = start
    while position < len(rest) and rest[position:].strip():
      try:
        call, position = _read_action(rest, position)
        calls.append(call)
      except base.ToolParseError as error:
        errors.append(str(error))
        gap = rest.find("\n\n", position + 1)
        position = len(rest) if gap < 0 else gap
    if not calls and not errors:
      errors.append(f"nothing stands after {_ACTION}")
    return base.ParseResult(tuple(calls), thought, "", tuple(errors))

  def to_gui_action(
      self, call: trajectory.ToolCall, width: int, height: int
  ) -> gui_action.GuiAction:
    try:
      return self._convert(call, (width, height))
    except base.GuiActionError:
      raise
    except ValueError as error:  # GuiAction's own refusal.
      raise base.GuiActionError(str(error)) from None

  def _convert(
      self, call: trajectory.ToolCall, size: tuple[int, int]
  ) -> gui_action.GuiAction:
    name, args = call.name, call.arguments
    if name in _CLICKS:
      button, count = _CLICKS[name]
      x, y = self._point(args, ("start_box", "start_point", "point"), size)
      return gui_action.GuiAction(
          Kind.CLICK, x=x, y=y, button=button, count=count
      )
    if name in ("move", "hover"):
      x, y = self._point(args, ("start_box", "start_point", "point"), size)
      return gui_action.GuiAction(Kind.MOVE, x=x, y=y)
    if name in ("drag", "select"):
      x, y = self._point(args, ("start_box", "start_point"), size)
      x2, y2 = self._point(args, ("end_box", "end_point"), size)
      return gui_action.GuiAction(Kind.DRAG, x=x, y=y, x2=x2, y2=y2)
    if name in ("hotkey", "press"):
      keys = keys_lib.normalize_keys(args.get("key") or args.get("hotkey", ""))
      return gui_action.GuiAction(Kind.KEY, keys=keys)
    if name == "type":
      if "content" not in args:
        raise base.GuiActionError("action 'type' needs 'content'")
      return gui_action.GuiAction(Kind.TYPE, text=str(args["content"]))
    if name == "scroll":
      direction = str(args.get("direction", "")).strip().lower()
      if direction not in _DIRECTIONS:
        raise base.GuiActionError(
            registry.unknown_name("direction", direction, _DIRECTIONS)
        )
      dx, dy = (step * _SCROLL_PIXELS for step in _DIRECTIONS[direction])
      x = y = None
      if any(k in args for k in ("start_box", "start_point", "point")):
        x, y = self._point(args, ("start_box", "start_point", "point"), size)
      return gui_action.GuiAction(Kind.SCROLL, x=x, y=y, dx=dx, dy=dy)
    if name == "wait":
      return gui_action.GuiAction(Kind.WAIT)
    if name == "long_press":
      x, y = self._point(args, ("start_box", "start_point", "point"), size)
      return gui_action.GuiAction(Kind.LONG_PRESS, x=x, y=y)
    if name == "open_app":
      app = str(args.get("app_name") or args.get("content") or "")
      if not app:
        raise base.GuiActionError("action 'open_app' needs 'app_name'")
      return gui_action.GuiAction(Kind.OPEN_APP, text=app)
    if name in ("press_home", "press_back"):
      return gui_action.GuiAction(
          Kind.SYSTEM_BUTTON, text=name.removeprefix("press_")
      )
    if name == "finished":
      if args.get("content"):
        return gui_action.GuiAction(Kind.ANSWER, text=str(args["content"]))
      return gui_action.GuiAction(Kind.TERMINATE, success=True)
    if name == "call_user":
      return gui_action.GuiAction(Kind.TERMINATE, success=False)
    raise base.GuiActionError(registry.unknown_name("action", name, _NAMES))

  def _point(
      self, args: dict[str, Any], fields: Sequence[str], size: tuple[int, int]
  ) -> tuple[float, float]:
    for field in fields:
      if args.get(field):
        break
    else:
      raise base.GuiActionError(f"the action needs {fields[0]!r}")
    numbers = [float(n) for n in _NUMBER.findall(str(args[field]))]
    if len(numbers) == 4:
      numbers = [(numbers[0] + numbers[2]) / 2, (numbers[1] + numbers[3]) / 2]
    if len(numbers) != 2:
      raise base.GuiActionError(
          f"{field} must hold a point (x,y), got {str(args[field])[:60]!r}"
      )
    point = []
    for axis, (number, extent) in enumerate(zip(numbers, size)):
      limit = 1000 if self.coordinates == "relative" else extent
      if not 0 <= number <= limit:
        raise base.GuiActionError(
            f"{field} {'xy'[axis]} must be between 0 and {limit}, got"
            f" {number:g}"
        )
      if self.coordinates == "relative":
        number = number * extent / 1000
      point.append(float(min(number, extent - 1)))
    return point[0], point[1]

  def format_gui_action(
      self,
      action: gui_action.GuiAction,
      width: int,
      height: int,
      thought: str | None = None,
  ) -> str:
    call = self._call(action, (width, height))
    return self.format((call,), thought)

  def _call(
      self, action: gui_action.GuiAction, size: tuple[int, int]
  ) -> trajectory.ToolCall:
    kind = action.kind

    def box(x: float, y: float) -> str:
      point = []
      for value, extent in zip((x, y), size):
        if not 0 <= value <= extent:
          raise base.GuiActionError(
              f"pixel {value:g} lies outside a screenshot side of {extent}"
          )
        if self.coordinates == "relative":
          point.append(round(value * 1000 / extent))
        else:
          point.append(min(extent - 1, round(value)))
      return f"<|box_start|>({point[0]},{point[1]})<|box_end|>"

    if kind is Kind.CLICK and not action.keys:
      name = _CLICK_NAMES.get((action.button, action.count))
      if name is not None:
        return trajectory.ToolCall(name, {"start_box": box(action.x, action.y)})
    elif kind is Kind.MOVE:
      return trajectory.ToolCall("move", {"start_box": box(action.x, action.y)})
    elif kind is Kind.DRAG and action.button == "left" and action.x is not None:
      return trajectory.ToolCall(
          "drag",
          {
              "start_box": box(action.x, action.y),
              "end_box": box(action.x2, action.y2),
          },
      )
    elif kind is Kind.KEY:
      return trajectory.ToolCall("hotkey", {"key": " ".join(action.keys)})
    elif kind is Kind.TYPE:
      return trajectory.ToolCall("type", {"content": action.text})
    elif kind is Kind.SCROLL and bool(action.dx) != bool(action.dy):
      sign = (
          (action.dx > 0) - (action.dx < 0),
          (action.dy > 0) - (action.dy < 0),
      )
      arguments = {}
      if action.x is not None and action.y is not None:
        arguments["start_box"] = box(action.x, action.y)
      arguments["direction"] = next(
          k for k, v in _DIRECTIONS.items() if v == sign
      )
      return trajectory.ToolCall("scroll", arguments)
    elif kind is Kind.WAIT:
      return trajectory.ToolCall("wait")
    elif kind is Kind.LONG_PRESS:
      return trajectory.ToolCall(
          "long_press", {"start_box": box(action.x, action.y)}
      )
    elif kind is Kind.OPEN_APP:
      return trajectory.ToolCall("open_app", {"app_name": action.text})
    elif kind is Kind.SYSTEM_BUTTON and action.text in ("home", "back"):
      return trajectory.ToolCall(f"press_{action.text}")
    elif kind is Kind.ANSWER and action.text:
      return trajectory.ToolCall("finished", {"content": action.text})
    elif kind is Kind.TERMINATE:
      name = "call_user" if action.success is False else "finished"
      return trajectory.ToolCall(name)
    raise base.GuiActionError(f"UI-TARS cannot express {action.to_json()}")


class UiTarsAbsoluteParser(UiTarsParser):
  """UI-TARS 1.5: coordinates in pixels of the screenshot."""

  coordinates = "absolute"


def _quoted(value: Any) -> str:
  if not isinstance(value, str):
    value = json.dumps(value)
  text = value.replace("\\", "\\\\").replace("'", "\\'")
  for letter, character in _ESCAPES.items():
    text = text.replace(character, f"\\{letter}")
  return f"'{text}'"


def _read_action(text: str, start: int) -> tuple[trajectory.ToolCall, int]:
  """One `name(key='value', …)` and where it ends."""
  match = _NAME.match(text, start)
  if match is None:
    raise base.ToolParseError(
        f"expected an action, found {text[start : start + 60].strip()!r}"
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
        f" {text[position : position + 60].strip()!r}"
    )
  return trajectory.ToolCall(name, arguments), close.end()


def _read_string(text: str, start: int, name: str) -> tuple[str, int]:
  """The string that begins with the quote at `start`, and where it ends."""
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
  raise base.ToolParseError(f"a string of action {name!r} is never closed")


# The text after a string: the end of the action, or the next argument.
_ENDS = re.compile(r"\s*(?:\)|,\s*[A-Za-z_]\w*\s*=)")
