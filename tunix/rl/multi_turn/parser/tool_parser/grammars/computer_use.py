"""Parses Qwen's `computer_use` tool: GUI actions in Qwen tool calls.

Three grammars over one set of actions:
- `computer_use` (Qwen3-VL): coordinates are thousandths of the screenshot's
  width and height, whole numbers 0 to 999; pixel = coordinate * size / 1000.
  Sides are resized to multiples of 32.
- `computer_use_absolute` (Qwen2.5-VL): pixels of the screenshot as the model
  saw it, after resizing to multiples of 28.
- `computer_use_compact`: the first, with a prompt short enough for a policy
  with a small context.

Promises: any call gives a `GuiAction` inside the screenshot or a
`GuiActionError` whose text explains the error to the policy. Formatting and
parsing are inverse within the rounding of the coordinates.

Source: cookbooks/utils/agent_function_call.py of QwenLM/Qwen2.5-VL and
QwenLM/Qwen3-VL. Names, arguments and choices are those; the descriptions are
ours.

Conventions: `pixels` of scroll is positive upwards, of hscroll positive to the
right. A drag starts at `start_coordinate`, or at the pointer without one.
Modifier keys of a click stand in `text`. Arguments that an action does not
take are ignored, as the models do emit them.
"""

from __future__ import annotations

from typing import Any, Sequence

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.parser.tool_parser import base
from tunix.rl.multi_turn.parser.tool_parser import gui_table
from tunix.rl.multi_turn.parser.tool_parser.formats import qwen

GuiAction = gui_action.GuiAction
Kind = gui_action.GuiActionKind
TOOL_NAME = "computer_use"

# action name -> (button, count)
_CLICKS = {
  "left_click": ("left", 1),
  "right_click": ("right", 1),
  "middle_click": ("middle", 1),
  "double_click": ("left", 2),
  "triple_click": ("left", 3),
}

# action name -> (what it does, the arguments it reads)
_ACTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
  "key": ("press keys together", ("keys",)),
  "type": ("type text at the keyboard focus", ("text",)),
  "mouse_move": ("move the pointer", ("coordinate",)),
  "left_click": ("click", ("coordinate", "text")),
  "left_click_drag": (
    "drag with the left button to coordinate",
    ("start_coordinate", "coordinate"),
  ),
  "right_click": ("click the right button", ("coordinate", "text")),
  "middle_click": ("click the middle button", ("coordinate", "text")),
  "double_click": ("click twice", ("coordinate", "text")),
  "triple_click": ("click three times", ("coordinate", "text")),
  "scroll": ("turn the wheel", ("coordinate", "pixels")),
  "hscroll": ("scroll sideways", ("coordinate", "pixels")),
  "wait": ("let time pass", ("time",)),
  "answer": ("give the answer to a question", ("text",)),
  "terminate": ("end the task", ("status",)),
}
ACTION_NAMES = tuple(_ACTIONS)
_ARGUMENT_ORDER = (
  "coordinate",
  "start_coordinate",
  "pixels",
  "text",
  "keys",
  "time",
  "status",
)

_SPACES = {
  "relative": (
    "0 to 999 from the left edge to the right, then from the top to the"
    " bottom, whatever the screen's size"
  ),
  "absolute": "pixels from the left edge, then from the top",
}


def screen_sentence(coordinates: str, screen: tuple[int, int] | None) -> str:
  """States the size of the screenshots, where pixels count; else ""."""
  if coordinates != "absolute" or screen is None:
    return ""
  return f" The screen's resolution is {screen[0]}x{screen[1]}."


def computer_use_schema(
  coordinates: str = "relative",
  actions: Sequence[str] = ACTION_NAMES,
  screen: tuple[int, int] | None = None,
) -> dict[str, Any]:
  """Returns the OpenAI schema of the tool.

  Args:
    coordinates: "relative" (0-999) or "absolute" (pixels).
    actions: names to offer, a subset of `ACTION_NAMES`.
    screen: (width, height) of the screenshots, shown where pixels count.
  """
  used = {name for action in actions for name in _ACTIONS[action][1]}
  properties: dict[str, Any] = {
    "action": {
      "type": "string",
      "description": "; ".join(
        f"{action}: {_ACTIONS[action][0]}" for action in actions
      ),
      "enum": list(actions),
    },
    "keys": {
      "type": "array",
      "items": {"type": "string"},
      "description": "Keys of the key action.",
    },
    "text": {
      "type": "string",
      "description": (
        "Text to type or to answer; for clicks, modifier keys to hold."
      ),
    },
    "coordinate": {
      "type": "array",
      "items": {"type": "number"},
      "description": f"[x, y]: {_SPACES[coordinates]}.",
    },
    "start_coordinate": {
      "type": "array",
      "items": {"type": "number"},
      "description": "[x, y] where a drag starts; the pointer if absent.",
    },
    "pixels": {
      "type": "number",
      "description": "Distance: up is positive, and so is right.",
    },
    "time": {"type": "number", "description": "Seconds to wait."},
    "status": {
      "type": "string",
      "description": "Whether the task was done.",
      "enum": ["success", "failure"],
    },
  }
  return {
    "type": "function",
    "function": {
      "name": TOOL_NAME,
      "description": (
        "Mouse and keyboard of the computer whose screenshots you see."
        + screen_sentence(coordinates, screen)
      ),
      "parameters": {
        "type": "object",
        "properties": {
          name: spec
          for name, spec in properties.items()
          if name == "action" or name in used
        },
        "required": ["action"],
      },
    },
  }


# --- calls to actions ---------------------------------------------------------


def _scroll(sideways: bool) -> gui_table.Reader:
  def read(a: gui_table.Arguments) -> GuiAction:
    pixels = a.number("pixels")
    place = a.point("coordinate") if a.has("coordinate") else {}
    # `0.0 -` keeps a zero from becoming -0.0.
    way = {"dx": pixels} if sideways else {"dy": 0.0 - pixels}
    return GuiAction(Kind.SCROLL, **place, **way)

  return read


def read_wait(a: gui_table.Arguments) -> GuiAction:
  return GuiAction(Kind.WAIT, duration=a.seconds("time"))


def read_terminate(a: gui_table.Arguments) -> GuiAction:
  """`terminate` of Qwen's tools; without a status nothing is claimed."""
  status = a.values.get("status")
  if status not in (None, "success", "failure"):
    raise base.GuiActionError(
      f"status must be 'success' or 'failure', got {gui_table.short(status)!r}"
    )
  success = None if status is None else status == "success"
  return GuiAction(Kind.TERMINATE, success=success)


READERS: dict[str, gui_table.Reader] = {
  **gui_table.clicks_of(_CLICKS, "coordinate", modifiers=("text",)),
  "mouse_move": gui_table.point_of(Kind.MOVE, "coordinate"),
  "left_click_drag": gui_table.drag_from_pointer(
    "start_coordinate", "coordinate"
  ),
  "scroll": _scroll(False),
  "hscroll": _scroll(True),
  "type": gui_table.text_of(Kind.TYPE, "text"),
  "key": lambda a: GuiAction(Kind.KEY, keys=a.keys("keys")),
  "wait": read_wait,
  "answer": gui_table.text_of(Kind.ANSWER, "text"),
  "terminate": read_terminate,
}


# --- actions to calls ---------------------------------------------------------


def _write_drag(w: gui_table.Writing) -> gui_table.Call | None:
  if w.action.button != "left":
    return None
  return "left_click_drag", {
    **w.place("start_coordinate"),
    "coordinate": w.end(),
  }


def _write_scroll(w: gui_table.Writing) -> gui_table.Call | None:
  dx, dy = w.action.dx, w.action.dy
  if dx and dy:
    return None
  pixels = gui_table.plain(dx if dx else -dy)
  return "hscroll" if dx else "scroll", {**w.place(), "pixels": pixels}


def write_wait(w: gui_table.Writing) -> gui_table.Call:
  if w.action.duration is None:
    return "wait", {}
  return "wait", {"time": gui_table.plain(w.action.duration)}


def write_terminate(w: gui_table.Writing) -> gui_table.Call:
  if w.action.success is None:
    return "terminate", {}
  status = "success" if w.action.success else "failure"
  return "terminate", {"status": status}


WRITERS: dict[Kind, gui_table.Writer] = {
  Kind.CLICK: gui_table.write_clicks(_CLICKS, gui_table.Writing.place, "text"),
  Kind.MOVE: lambda w: ("mouse_move", w.place()),
  Kind.DRAG: _write_drag,
  Kind.SCROLL: _write_scroll,
  Kind.TYPE: gui_table.writes("type", text="text"),
  Kind.KEY: lambda w: (
    ("key", {"keys": list(w.action.keys)})
    if w.action.duration is None
    else None
  ),
  Kind.WAIT: write_wait,
  Kind.ANSWER: gui_table.writes("answer", text="text"),
  Kind.TERMINATE: write_terminate,
}


class ComputerUseParser(gui_table.OneToolParser, qwen.QwenToolParser):
  """See the module docstring. Coordinates 0 to 999."""

  family = tool_name = TOOL_NAME
  space = gui_table.THOUSANDTHS
  resizing = base.QWEN3_VL
  readers = READERS
  writers = WRITERS

  def __init__(
    self,
    style: str | None = None,
    compact: bool = False,
    actions: Sequence[str] = ACTION_NAMES,
    grid: tuple[int, int] | None = None,
  ):
    """Args:

      style: "json" or "xml", how calls are written.
      compact: a short tool prompt.
      actions: names that the prompt offers and that are accepted.
      grid: (columns, rows); formatting snaps each coordinate to the centre of
        its bin, so that a small policy has few values to learn. Reading is
        not affected.

    Raises:
      ValueError: an unknown action, or a grid that is not two counts >= 1.
    """
    for action in actions:
      if action not in _ACTIONS:
        raise ValueError(
          registry.unknown_name("computer_use action", action, _ACTIONS)
        )
    if grid is not None and (len(grid) != 2 or min(grid) < 1):
      raise ValueError(f"grid must be (columns, rows) >= 1, got {grid!r}")
    self.actions = tuple(actions)
    self.grid = tuple(grid) if grid is not None else None  # type: ignore[assignment]
    super().__init__(style=style, compact=compact)

  @property
  def default_tools(self) -> list[dict[str, Any]]:
    return [computer_use_schema(self.coordinates, self.actions, self.screen)]

  @property
  def action_names(self) -> Sequence[str]:
    return self.actions


class ComputerUseAbsoluteParser(ComputerUseParser):
  """Qwen2.5-VL: coordinates in pixels of the screenshot."""

  space = gui_table.ABSOLUTE
  resizing = base.QWEN2_5_VL


# Actions for a small policy: enough for every desktop task.
COMPACT_ACTIONS = (
  "left_click",
  "double_click",
  "right_click",
  "left_click_drag",
  "scroll",
  "type",
  "key",
  "answer",
)


class ComputerUseCompactParser(ComputerUseParser):
  """Coordinates 0 to 999, few actions, and a tool prompt of one line."""

  def __init__(self, **kwargs: Any):
    kwargs.setdefault("compact", True)
    kwargs.setdefault("actions", COMPACT_ACTIONS)
    super().__init__(**kwargs)

  def get_tool_prompt(self, tools_schema: base.ToolsSchema = None) -> str:
    """Argument names without types: the policy was trained on their use."""
    if tools_schema is not None:
      return super().get_tool_prompt(tools_schema)
    used = {a for action in self.actions for a in _ACTIONS[action][1]}
    names = [a for a in _ARGUMENT_ORDER if a in used]
    return (
      f"<tools>\n{TOOL_NAME}(action: {'|'.join(self.actions)},"
      f" {', '.join(names)})\n</tools>"
    )
