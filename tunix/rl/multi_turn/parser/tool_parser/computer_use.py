"""Parses Qwen's `computer_use` tool: GUI actions in Qwen tool calls.

Three grammars over one set of actions:
- `computer_use` (Qwen3-VL): coordinates are thousandths of the screenshot's
  width and height, whole numbers 0 to 999; pixel = coordinate * size / 1000.
- `computer_use_absolute` (Qwen2.5-VL): pixels of the screenshot as the model
  saw it, after resizing.
- `computer_use_compact`: the first, with a prompt short enough for a policy
  with a small context.

Promises: any call gives a `GuiAction` inside the screenshot or a
`GuiActionError` whose text explains the error to the policy. Formatting and
parsing are inverse within the rounding of the coordinates.

Conventions: `pixels` of scroll is positive upwards, of hscroll positive to the
right. A drag starts at `start_coordinate`, or at the pointer without one.
Modifier keys of a click stand in `text`. Arguments that an action does not
take are ignored, as the models do emit them.
"""

from __future__ import annotations

import json
import math
from typing import Any, Sequence

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.tool_parser import base
from tunix.rl.multi_turn.parser.tool_parser import keys as keys_lib
from tunix.rl.multi_turn.parser.tool_parser import qwen

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
_CLICK_NAMES = {value: name for name, value in _CLICKS.items()}

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


def computer_use_schema(
    coordinates: str = "relative", actions: Sequence[str] = ACTION_NAMES
) -> dict[str, Any]:
  """The OpenAI schema of the tool.

  Args:
    coordinates: "relative" (0-999) or "absolute" (pixels).
    actions: names to offer, a subset of `ACTION_NAMES`.
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


class ComputerUseParser(qwen.QwenToolParser, base.GuiActionParser):
  """See the module docstring. Coordinates 0 to 999."""

  coordinates = "relative"

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
    self.grid = tuple(grid) if grid is not None else None
    super().__init__(style=style, compact=compact)

  @property
  def default_tools(self) -> list[dict[str, Any]]:
    return [computer_use_schema(self.coordinates, self.actions)]

  # --- text to action -------------------------------------------------------

  def to_gui_action(
      self, call: trajectory.ToolCall, width: int, height: int
  ) -> gui_action.GuiAction:
    if call.name != TOOL_NAME:
      raise base.GuiActionError(
          registry.unknown_name("tool", call.name, (TOOL_NAME,))
      )
    args = {k: v for k, v in call.arguments.items() if v is not None}
    name = args.get("action")
    if name not in self.actions:
      raise base.GuiActionError(
          registry.unknown_name("action", _short(name), self.actions)
      )
    size = (width, height)
    try:
      return self._convert(name, args, size)
    except base.GuiActionError:
      raise
    except ValueError as error:  # GuiAction's own refusal.
      raise base.GuiActionError(str(error)) from None

  def _convert(
      self, name: str, args: dict[str, Any], size: tuple[int, int]
  ) -> gui_action.GuiAction:
    if name in _CLICKS:
      button, count = _CLICKS[name]
      x, y = self._point(args, "coordinate", name, size)
      keys = keys_lib.normalize_keys(args["text"]) if args.get("text") else ()
      return gui_action.GuiAction(
          Kind.CLICK, x=x, y=y, button=button, count=count, keys=keys
      )
    if name == "mouse_move":
      x, y = self._point(args, "coordinate", name, size)
      return gui_action.GuiAction(Kind.MOVE, x=x, y=y)
    if name == "left_click_drag":
      x = y = None
      if "start_coordinate" in args:
        x, y = self._point(args, "start_coordinate", name, size)
      x2, y2 = self._point(args, "coordinate", name, size)
      return gui_action.GuiAction(Kind.DRAG, x=x, y=y, x2=x2, y2=y2)
    if name in ("scroll", "hscroll"):
      pixels = _number(_need(args, "pixels", name), "pixels")
      x = y = None
      if "coordinate" in args:
        x, y = self._point(args, "coordinate", name, size)
      # `0.0 -` keeps a zero from becoming -0.0.
      shift = {"dy": 0.0 - pixels} if name == "scroll" else {"dx": pixels}
      return gui_action.GuiAction(Kind.SCROLL, x=x, y=y, **shift)
    if name == "type":
      return gui_action.GuiAction(Kind.TYPE, text=_text(args, name))
    if name == "key":
      keys = keys_lib.normalize_keys(_need(args, "keys", name))
      return gui_action.GuiAction(Kind.KEY, keys=keys)
    if name == "wait":
      if "time" not in args:
        return gui_action.GuiAction(Kind.WAIT)
      seconds = _number(args["time"], "time")
      if seconds < 0:
        raise base.GuiActionError(f"time must be >= 0, got {seconds:g}")
      return gui_action.GuiAction(Kind.WAIT, duration=seconds)
    if name == "answer":
      return gui_action.GuiAction(Kind.ANSWER, text=_text(args, name))
    status = args.get("status")
    if status not in (None, "success", "failure"):
      raise base.GuiActionError(
          f"status must be 'success' or 'failure', got {_short(status)!r}"
      )
    success = None if status is None else status == "success"
    return gui_action.GuiAction(Kind.TERMINATE, success=success)

  def _point(
      self, args: dict[str, Any], field: str, name: str, size: tuple[int, int]
  ) -> tuple[float, float]:
    value = _need(args, field, name)
    if isinstance(value, str):  # XML parameters carry "[512, 300]".
      value = value.strip().strip("[]()").replace(",", " ").split()
    if not isinstance(value, (list, tuple)) or len(value) != 2:
      raise base.GuiActionError(f"{field} must be [x, y], got {_short(value)}")
    point = []
    for axis, (number, extent) in enumerate(zip(value, size)):
      label = f"{field} {'xy'[axis]}"
      number = _number(number, label)
      limit = 1000 if self.coordinates == "relative" else extent
      if not 0 <= number <= limit:
        top = 999 if self.coordinates == "relative" else extent - 1
        raise base.GuiActionError(
            f"{label} must be between 0 and {top}, got {number:g}"
        )
      if self.coordinates == "relative":
        number = number * extent / 1000
      point.append(float(min(number, extent - 1)))
    return point[0], point[1]

  # --- action to text -------------------------------------------------------

  def format_gui_action(
      self,
      action: gui_action.GuiAction,
      width: int,
      height: int,
      thought: str | None = None,
      grid: tuple[int, int] | None = None,
  ) -> str:
    """See the base class. `grid` overrides the parser's own."""
    size = (width, height)
    grid = grid or self.grid
    arguments = self._arguments(action, size, grid)
    if arguments["action"] not in self.actions:
      raise base.GuiActionError(
          f"this grammar has no {arguments['action']!r} action; it has:"
          f" {', '.join(self.actions)}"
      )
    return self.format((trajectory.ToolCall(TOOL_NAME, arguments),), thought)

  def _arguments(
      self,
      action: gui_action.GuiAction,
      size: tuple[int, int],
      grid: tuple[int, int] | None,
  ) -> dict[str, Any]:
    kind = action.kind

    def point(x: float, y: float) -> list[int]:
      return [
          self._coordinate(value, extent, bins)
          for value, extent, bins in zip((x, y), size, grid or (0, 0))
      ]

    if kind is Kind.CLICK:
      name = _CLICK_NAMES.get((action.button, action.count))
      if name is None:
        raise base.GuiActionError(
            f"computer_use has no {action.button} click with count"
            f" {action.count}"
        )
      arguments = {"action": name, "coordinate": point(action.x, action.y)}
      if action.keys:
        arguments["text"] = "+".join(action.keys)
      return arguments
    if kind is Kind.MOVE:
      return {"action": "mouse_move", "coordinate": point(action.x, action.y)}
    if kind is Kind.DRAG:
      if action.button != "left":
        raise base.GuiActionError("computer_use drags with the left button")
      arguments = {"action": "left_click_drag"}
      if action.x is not None and action.y is not None:
        arguments["start_coordinate"] = point(action.x, action.y)
      arguments["coordinate"] = point(action.x2, action.y2)
      return arguments
    if kind is Kind.SCROLL:
      if action.dx and action.dy:
        raise base.GuiActionError("computer_use scrolls along one axis a call")
      arguments = {"action": "hscroll" if action.dx else "scroll"}
      if action.x is not None and action.y is not None:
        arguments["coordinate"] = point(action.x, action.y)
      arguments["pixels"] = _plain(action.dx if action.dx else -action.dy)
      return arguments
    if kind is Kind.TYPE:
      return {"action": "type", "text": action.text}
    if kind is Kind.KEY:
      return {"action": "key", "keys": list(action.keys)}
    if kind is Kind.WAIT:
      if action.duration is None:
        return {"action": "wait"}
      return {"action": "wait", "time": _plain(action.duration)}
    if kind is Kind.ANSWER:
      return {"action": "answer", "text": action.text}
    if kind is Kind.TERMINATE:
      if action.success is None:
        return {"action": "terminate"}
      status = "success" if action.success else "failure"
      return {"action": "terminate", "status": status}
    raise base.GuiActionError(f"computer_use cannot express {kind.value!r}")

  def _coordinate(self, value: float, extent: int, bins: int) -> int:
    """Pixels to the grammar's whole number."""
    if not 0 <= value <= extent:
      raise base.GuiActionError(
          f"pixel {value:g} lies outside a screenshot side of {extent}"
      )
    if bins:
      index = min(bins - 1, max(0, int(value * bins // extent)))
      value = (index + 0.5) * extent / bins
    if self.coordinates == "relative":
      return min(999, max(0, round(value * 1000 / extent)))
    return min(extent - 1, max(0, round(value)))


class ComputerUseAbsoluteParser(ComputerUseParser):
  """Qwen2.5-VL: coordinates in pixels of the screenshot."""

  coordinates = "absolute"


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


def _need(args: dict[str, Any], field: str, name: str) -> Any:
  if field not in args:
    raise base.GuiActionError(f"action {name!r} needs {field!r}")
  return args[field]


def _text(args: dict[str, Any], name: str) -> str:
  value = _need(args, "text", name)
  if isinstance(value, bool) or isinstance(value, (dict, list)):
    value = json.dumps(value)
  return value if isinstance(value, str) else str(value)


def _number(value: Any, label: str) -> float:
  """A finite number; numerals in a str count.

  Raises:
    GuiActionError: anything else.
  """
  try:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
      raise ValueError
    number = float(value)
    if not math.isfinite(number) or abs(number) > 1e6:
      raise ValueError
    return number
  except (ValueError, OverflowError):
    raise base.GuiActionError(
        f"{label} must be a number, got {_short(value)}"
    ) from None


def _plain(number: float) -> int | float:
  """12 rather than 12.0, and never -0."""
  return int(number) if float(number).is_integer() else float(number)


def _short(value: Any) -> str:
  text = value if isinstance(value, str) else repr(value)
  return text if len(text) <= 60 else text[:57] + "..."
