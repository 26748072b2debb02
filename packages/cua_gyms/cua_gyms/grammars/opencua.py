"""Parses OpenCUA: a thought, an action in words, and a block of pyautogui code.

Two grammars: `opencua` (the Qwen2.5 models: pixels of the screenshot as the
model saw it, sides resized to multiples of 28) and `opencua_relative` (0 to 1
of the sides).

Source: mm_agents/opencua_agent.py of xlang-ai/OSWorld and the model cards of
OpenCUA; the sections, the function names and their parameters are those.

The last code block counts; it is parsed as Python's syntax and never executed.
Its statements are calls of `pyautogui`, `computer` and `time.sleep` with
literals. Conventions:
- A click without a place happens where the code's last `moveTo` went.
- Keys between `keyDown` and `keyUp` are held during clicks, and pressed
  together with other keys.
- A turn of the wheel is a notch; > 0 is up, of hscroll to the right.
"""

from __future__ import annotations

import re
from typing import Any, Mapping, Sequence

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.tool_parser import base
from tunix.rl.multi_turn.parser.tool_parser import gui_table
from tunix.rl.multi_turn.parser.tool_parser import python_calls

GuiAction = gui_action.GuiAction
Kind = gui_action.GuiActionKind

_PROMPT = """You are a GUI agent. You get a task and a screenshot of the \
screen, and carry the task out by pyautogui actions.

Answer each step in this format:

Thought:
  what is done already, what the last action did, what comes next and why

Action:
  one instruction that names its target by its words, shape or place, without \
coordinates

Then write the action as PyAutoGUI code in a code block, or as one of these \
functions:
- {"name": "computer.triple_click", "parameters": {"type": "object", \
"properties": {"x": {"type": "number"}, "y": {"type": "number"}}, "required": \
["x", "y"]}}
- {"name": "computer.wait", "parameters": {"type": "object", "properties": {}}}
- {"name": "computer.terminate", "parameters": {"type": "object", \
"properties": {"status": {"type": "string", "enum": ["success", "failure"]}}, \
"required": ["status"]}}"""
_FENCE = re.compile(
  r"```(?:python|code|py)?[ \t]*\r?\n?(.*?)(?:```|\Z)",
  re.DOTALL | re.IGNORECASE,
)
_BARE = re.compile(r"(?m)^[ \t]*(?:pyautogui|computer)\.\w+\(")
_HEADERS = re.compile(
  r"(?m)^#*[ \t]*(?:Step[ \t]*:?[ \t]*\d*|(?:Observation|Thought|Action|Code)"
  r"[ \t]*:)[ \t]*:?"
)
_MAX_PRESSES = 20
_STATUS = {"success": True, "failure": False, "fail": False}
_BUTTONS = {
  "left": "left",
  "primary": "left",
  "right": "right",
  "secondary": "right",
  "middle": "middle",
}

_PARAMETERS: dict[str, tuple[str, ...]] = {
  "pyautogui.click": ("x", "y", "clicks", "interval", "button"),
  "pyautogui.leftClick": ("x", "y"),
  "pyautogui.rightClick": ("x", "y"),
  "pyautogui.middleClick": ("x", "y"),
  "pyautogui.doubleClick": ("x", "y", "interval", "button"),
  "pyautogui.tripleClick": ("x", "y", "interval", "button"),
  "computer.triple_click": ("x", "y"),
  "computer.tripleClick": ("x", "y"),
  "pyautogui.moveTo": ("x", "y", "duration"),
  "pyautogui.dragTo": ("x", "y", "duration", "tween", "button"),
  "pyautogui.scroll": ("clicks", "x", "y"),
  "pyautogui.vscroll": ("clicks", "x", "y"),
  "pyautogui.hscroll": ("clicks", "x", "y"),
  "pyautogui.write": ("message", "interval"),
  "pyautogui.typewrite": ("message", "interval"),
  "pyautogui.press": ("keys", "presses", "interval"),
  "pyautogui.hotkey": (),
  "pyautogui.keyDown": ("key",),
  "pyautogui.keyUp": ("key",),
  "pyautogui.mouseDown": ("x", "y", "button"),
  "pyautogui.mouseUp": ("x", "y", "button"),
  "pyautogui.sleep": ("seconds",),
  "time.sleep": ("seconds",),
  "computer.wait": ("seconds",),
  "computer.terminate": ("status", "answer"),
}
_COUNTS = {
  "pyautogui.leftClick": ("left", 1),
  "pyautogui.rightClick": ("right", 1),
  "pyautogui.middleClick": ("middle", 1),
  "pyautogui.doubleClick": ("left", 2),
  "pyautogui.tripleClick": ("left", 3),
  "computer.triple_click": ("left", 3),
  "computer.tripleClick": ("left", 3),
}
_BRIEF = (
  "pyautogui.press",
  "pyautogui.scroll",
  "pyautogui.hscroll",
  "time.sleep",
)
"""Functions whose first argument is written without its name."""
_POINTED = ("pyautogui.click", *_COUNTS)


def _button(a: gui_table.Arguments, default: str = "left") -> str:
  return a.choice("button", _BUTTONS) if a.has("button") else default


def _click(a: gui_table.Arguments) -> GuiAction:
  button, count = _COUNTS.get(a.action, ("left", None))
  if count is None:
    clicks = a.number("clicks", 1)
    if clicks not in (1, 2, 3):
      raise base.GuiActionError(f"clicks must be 1, 2 or 3, got {clicks:g}")
    count = int(clicks)
  return GuiAction(
    Kind.CLICK,
    **a.xy(),
    button=_button(a, button),
    count=count,
    keys=a.held_keys("held"),
  )


def _scroll(a: gui_table.Arguments) -> GuiAction:
  place = a.xy() if a.has("x", "y") else {}
  pixels = a.number("clicks") * gui_table.NOTCH_PX
  if a.action == "pyautogui.hscroll":
    return GuiAction(Kind.SCROLL, **place, dx=pixels)
  return GuiAction(Kind.SCROLL, **place, dy=0.0 - pixels)


def _drag(a: gui_table.Arguments) -> GuiAction:
  start = a.xy("from_x", "from_y") if a.has("from_x", "from_y") else {}
  return GuiAction(Kind.DRAG, **start, **a.xy(end=True), button=_button(a))


def _keys(a: gui_table.Arguments) -> GuiAction:
  return GuiAction(Kind.KEY, keys=a.held_keys("held") + a.keys("keys"))


def _wait(a: gui_table.Arguments) -> GuiAction:
  return GuiAction(Kind.WAIT, duration=a.seconds("seconds"))


_READERS: dict[str, gui_table.Reader] = {
  **dict.fromkeys(_POINTED, _click),
  "pyautogui.moveTo": lambda a: GuiAction(Kind.MOVE, **a.xy()),
  "pyautogui.dragTo": _drag,
  "pyautogui.scroll": _scroll,
  "pyautogui.vscroll": _scroll,
  "pyautogui.hscroll": _scroll,
  "pyautogui.write": gui_table.text_of(Kind.TYPE, "message"),
  "pyautogui.typewrite": gui_table.text_of(Kind.TYPE, "message"),
  "pyautogui.press": _keys,
  "pyautogui.hotkey": _keys,
  "pyautogui.mouseDown": gui_table.unavailable("use pyautogui.dragTo"),
  "pyautogui.mouseUp": gui_table.unavailable("use pyautogui.dragTo"),
  "pyautogui.sleep": _wait,
  "time.sleep": _wait,
  "computer.wait": _wait,
  "computer.terminate": lambda a: (
    GuiAction(Kind.ANSWER, text=a.text("answer"))
    if a.values.get("answer")
    else GuiAction(Kind.TERMINATE, success=a.choice("status", _STATUS))
  ),
}


def _write_click(w: gui_table.Writing) -> gui_table.Call | None:
  which = (w.action.button, w.action.count)
  keys = {"held": list(w.action.keys)} if w.action.keys else {}
  if which == ("left", 3):
    return "computer.triple_click", {**w.xy(), **keys}
  if which == ("left", 1):
    return "pyautogui.click", {**w.xy(), **keys}
  names = {
    ("right", 1): "rightClick",
    ("middle", 1): "middleClick",
    ("left", 2): "doubleClick",
  }
  if which not in names:
    return None
  return f"pyautogui.{names[which]}", {**w.xy(), **keys}


def _write_drag(w: gui_table.Writing) -> gui_table.Call | None:
  if w.action.button not in ("left", "right", "middle"):
    return None
  return "pyautogui.dragTo", {
    **w.xy("from_x", "from_y"),
    **dict(zip("xy", w.end())),
    "button": w.action.button,
  }


def _write_scroll(w: gui_table.Writing) -> gui_table.Call | None:
  dx, dy = w.action.dx, w.action.dy
  if bool(dx) == bool(dy):
    return None
  sign = 1 if dx > 0 or dy < 0 else -1
  name = "pyautogui.hscroll" if dx else "pyautogui.scroll"
  return name, {"clicks": sign * gui_table.notches(dx or dy), **w.xy()}


def _write_key(w: gui_table.Writing) -> gui_table.Call | None:
  if w.action.duration:
    return None
  keys = list(w.action.keys)
  if len(keys) == 1:
    return "pyautogui.press", {"keys": keys[0]}
  return "pyautogui.hotkey", {"keys": keys}


def _write_wait(w: gui_table.Writing) -> gui_table.Call:
  if w.action.duration is None:
    return "computer.wait", {}
  return "time.sleep", {"seconds": gui_table.plain(w.action.duration)}


_WRITERS: dict[Kind, gui_table.Writer] = {
  Kind.CLICK: _write_click,
  Kind.MOVE: lambda w: ("pyautogui.moveTo", w.xy()),
  Kind.DRAG: _write_drag,
  Kind.SCROLL: _write_scroll,
  Kind.TYPE: gui_table.writes("pyautogui.write", message="text"),
  Kind.KEY: _write_key,
  Kind.WAIT: _write_wait,
  Kind.ANSWER: lambda w: (
    ("computer.terminate", {"status": "success", "answer": w.action.text})
    if w.action.text
    else None
  ),
  Kind.TERMINATE: lambda w: (
    "computer.terminate",
    {"status": "failure" if w.action.success is False else "success"},
  ),
}


class OpenCuaParser(gui_table.TableParser):
  """See the module docstring. Coordinates in pixels."""

  family = "OpenCUA"
  own_prompt = _PROMPT
  resizing: base.Resizing | None = base.QWEN2_5_VL
  readers = _READERS
  writers = _WRITERS

  def parse_result(self, model_response: str) -> base.ParseResult:
    text = base.require_text(model_response)
    fences = list(_FENCE.finditer(text))
    if fences:
      begins, start, code = (
        fences[-1].start(),
        fences[-1].start(1),
        fences[-1].group(1),
      )
    elif (bare := _BARE.search(text)) is not None:
      begins = start = bare.start()
      code = text[start:]
    else:
      return base.ParseResult(answer=_without_headers(text))
    thought = _without_headers(text[:begins])
    start += len(code) - len(code.lstrip())
    try:
      python = python_calls.read_calls(code.strip(), start)
      placed = _in_order(python)
      if not placed:
        raise base.ToolParseError("the code block has no call", start)
    except base.ToolParseError as error:
      return base.ParseResult(thought=thought, failures=(error,))
    calls, positions = zip(*placed)
    return base.ParseResult(calls, thought, positions=positions)

  def format(
    self, calls: Sequence[trajectory.ToolCall], thought: str | None = None
  ) -> str:
    parts = [f"Thought:\n{thought}\n\n"] if thought else []
    if calls:
      code = "\n".join(line for call in calls for line in _code(call))
      parts.append(f"```python\n{code}\n```")
    return "".join(parts)


class OpenCuaRelativeParser(OpenCuaParser):
  """Coordinates 0 to 1 of the screenshot's sides."""

  space = gui_table.UNIT
  resizing = None


def _without_headers(text: str) -> str:
  return _HEADERS.sub("", text).replace("</think>", "").strip()


def _in_order(
  python: Sequence[python_calls.PythonCall],
) -> list[tuple[trajectory.ToolCall, int]]:
  """Returns (call, position) of each action of the code.

  Raises:
    ToolParseError: an unknown function, or arguments that it does not take.
  """
  placed: list[tuple[trajectory.ToolCall, int]] = []
  pressed: list[Any] = []
  pointer: Mapping[str, Any] = {}
  for item in python:
    name = item.function
    if name not in _PARAMETERS:
      raise base.ToolParseError(
        registry.unknown_name("function", name, _PARAMETERS), item.position
      )
    if name == "pyautogui.hotkey":
      keys = list(item.args)
      if len(keys) == 1 and isinstance(keys[0], list):
        keys = keys[0]
      arguments: dict[str, Any] = {"keys": keys, **item.kwargs}
    else:
      arguments = item.named(_PARAMETERS[name])
    if name == "pyautogui.keyDown":
      pressed.append(arguments.get("key"))
      continue
    if name == "pyautogui.keyUp":
      if arguments.get("key") in pressed:
        pressed.remove(arguments.get("key"))
      continue
    if name in _POINTED:
      if "x" not in arguments and "y" not in arguments:
        arguments = {**pointer, **arguments}
    elif name == "pyautogui.moveTo":
      pointer = {k: arguments[k] for k in "xy" if k in arguments}
    elif name == "pyautogui.dragTo" and pointer and _moved(placed):
      placed.pop()  # The drag begins there.
      arguments = {
        "from_x": pointer.get("x"),
        "from_y": pointer.get("y"),
        **arguments,
      }
    if pressed and name in (*_POINTED, "pyautogui.press", "pyautogui.hotkey"):
      arguments["held"] = list(pressed)
    placed.extend(
      (trajectory.ToolCall(name, each), item.position)
      for each in _repeats(name, arguments, item.position)
    )
  return placed


def _moved(placed: Sequence[tuple[trajectory.ToolCall, int]]) -> bool:
  return bool(placed) and placed[-1][0].name == "pyautogui.moveTo"


def _repeats(
  name: str, arguments: dict[str, Any], position: int
) -> list[dict[str, Any]]:
  """`press` presses each of its keys `presses` times, one after the other."""
  if name != "pyautogui.press":
    return [arguments]
  keys = arguments.get("keys")
  presses = arguments.get("presses", 1)
  several = keys if isinstance(keys, list) else [keys]
  if (
    isinstance(presses, bool)
    or not isinstance(presses, int)
    or not 1 <= presses * len(several) <= _MAX_PRESSES
  ):
    raise base.ToolParseError(
      f"press takes 1 to {_MAX_PRESSES} keys at a time, got"
      f" {gui_table.short(keys)} {gui_table.short(presses)} times",
      position,
    )
  options = {k: v for k, v in arguments.items() if k not in ("keys", "presses")}
  return [{"keys": key, **options} for key in several] * presses


def _code(call: trajectory.ToolCall) -> list[str]:
  """Returns the lines of a call, as `_in_order` reads them."""
  arguments = dict(call.arguments)
  pressed = arguments.pop("held", [])
  lines = [f"pyautogui.keyDown({key!r})" for key in pressed]
  if call.name == "pyautogui.dragTo" and "from_x" in arguments:
    start = {"x": arguments.pop("from_x"), "y": arguments.pop("from_y")}
    lines.append(python_calls.write_call("pyautogui.moveTo", start))
  if call.name == "pyautogui.hotkey":
    keys = ", ".join(map(repr, arguments["keys"]))
    lines.append(f"pyautogui.hotkey({keys})")
  else:
    first = int(call.name in _BRIEF)
    lines.append(python_calls.write_call(call.name, arguments, first))
  lines.extend(f"pyautogui.keyUp({key!r})" for key in reversed(pressed))
  # Backquotes stand in strings only; three of them would end the block.
  return [line.replace("```", r"\x60\x60\x60") for line in lines]
