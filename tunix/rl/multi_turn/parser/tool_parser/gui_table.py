"""Translates between tool calls and `GuiAction`s by tables: one a grammar.

A grammar is a `TableParser` with
- `space`: its coordinate convention,
- `readers`: action name -> function of an `Arguments`, which gives the
  `GuiAction`, or a list of them,
- `writers`: kind of action -> function of a `Writing`, which gives the name and
  the arguments, or None where the grammar has no word for that action.

Promises: any call gives actions inside the screenshot or a `GuiActionError`
whose text explains the fault to the policy.

Does not: read text; the grammar's other base class does.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any, Callable, cast, Iterable, Mapping, Sequence

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import json_text
from tunix.rl.multi_turn.core import registry
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.tool_parser import base
from tunix.rl.multi_turn.parser.tool_parser import keys as keys_lib

GuiAction = gui_action.GuiAction
Kind = gui_action.GuiActionKind

DIRECTIONS: Mapping[str, tuple[int, int]] = {
  "up": (0, -1),
  "down": (0, 1),
  "left": (-1, 0),
  "right": (1, 0),
}
"""Direction -> steps along x and y, origin top left."""

NOTCH_PX = 120
"""Pixels that a notch of the wheel, or a scroll without a distance, is."""

_SAME_PX = 0.05
"""Distance of two ends of a swipe that count as one: rounding, no more."""

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_MAX_POINT_TEXT = 200
_LARGEST = 1e6


@dataclasses.dataclass(frozen=True)
class Space:
  """A coordinate convention.

  Attributes:
    name: "relative", "unit" or "absolute".
    scale: the grammar's number at the far edge; None: a pixel is a pixel.
    top: the largest number that is written; None: of the scale, or the last
      pixel.
    decimals: digits behind the point that are written.
  """

  name: str
  scale: float | None = None
  top: float | None = None
  decimals: int = 0

  def read(self, number: float, extent: int, label: str) -> float:
    """Returns the pixel of a grammar's number.

    Raises:
      GuiActionError: outside the screenshot.
    """
    limit = extent if self.scale is None else self.scale
    if not 0 <= number <= limit:
      top = extent - 1 if self.scale is None else self.top or self.scale
      raise base.GuiActionError(
        f"{label} must be between 0 and {top:g}, got {number:g}"
      )
    if self.scale is not None:
      number = number * extent / self.scale
    return float(min(number, extent - 1))

  def write(self, pixel: float, extent: int, bins: int = 0) -> int | float:
    """Returns the grammar's number of a pixel.

    Args:
      pixel: Position on a side of the screenshot.
      extent: Length of that side, in pixels.
      bins: Number of bins, to the centre of one of which the position snaps; 0
        for none.

    Raises:
      GuiActionError: outside the screenshot.
    """
    if not 0 <= pixel <= extent:
      raise base.GuiActionError(
        f"pixel {pixel:g} lies outside a screenshot side of {extent}"
      )
    if bins:
      index = min(bins - 1, max(0, int(pixel * bins // extent)))
      pixel = (index + 0.5) * extent / bins
    top = extent - 1.0 if self.scale is None else self.top or self.scale
    if self.scale is not None:
      pixel = pixel * self.scale / extent
    return plain(min(top, max(0.0, round(pixel, self.decimals))))


ABSOLUTE = Space("absolute")
THOUSANDTHS = Space("relative", scale=1000, top=999)
UNIT = Space("unit", scale=1.0, decimals=4)


# --- calls to actions ---------------------------------------------------------

_MISSING = object()


@dataclasses.dataclass(frozen=True)
class Arguments:
  """The arguments of a call, read with errors that the policy understands.

  Attributes:
    values: Values as the policy wrote them; None counts as absent.
    action: Name of the action, for errors.
    size: (width, height) of the screenshot.
    space: Coordinate convention.
    boxes: Whether four numbers are a box, whose centre counts.
  """

  values: Mapping[str, Any]
  action: str
  size: tuple[int, int]
  space: Space
  boxes: bool = False

  def has(self, *fields: str) -> bool:
    return any(self.values.get(field) is not None for field in fields)

  def need(self, *fields: str) -> Any:
    """Returns the value of the first field that is set.

    Raises:
      GuiActionError: No field is set.
    """
    for field in fields:
      if self.values.get(field) is not None:
        return self.values[field]
    raise base.GuiActionError(f"action {self.action!r} needs {fields[0]!r}")

  def text(self, *fields: str, default: Any = _MISSING) -> str:
    """Text; what is no str is written as JSON."""
    if default is not _MISSING and not self.has(*fields):
      return default
    value = self.need(*fields)
    if isinstance(value, (bool, dict, list)):
      value = json.dumps(value)
    return value if isinstance(value, str) else str(value)

  def name(self, *fields: str) -> str:
    """Text that is not empty."""
    text = self.text(*fields)
    if not text.strip():
      raise base.GuiActionError(f"action {self.action!r} needs {fields[0]!r}")
    return text

  def number(self, field: str, default: object = _MISSING) -> Any:
    if default is not _MISSING and not self.has(field):
      return default
    return as_number(self.need(field), field)

  def seconds(self, field: str, default: object = None) -> Any:
    """Returns a number >= 0; `default` when absent."""
    value = self.number(field, default)
    if value is not None and value < 0:
      raise base.GuiActionError(f"{field} must be >= 0, got {value:g}")
    return value

  def flag(self, field: str, default: bool) -> bool:
    value = self.values.get(field)
    if value is None:
      return default
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
      return value.strip().lower() == "true"
    if not isinstance(value, bool):
      raise base.GuiActionError(
        f"{field} must be true or false, got {short(value)}"
      )
    return value

  def choice(self, field: str, options: Mapping[str, Any]) -> Any:
    """Returns the value of the option that is named, whatever its case."""
    value = self.need(field)
    option = options.get(str(value).strip().lower(), _MISSING)
    if option is _MISSING:
      raise base.GuiActionError(
        registry.unknown_name(field, short(value), options)
      )
    return option

  def keys(self, *fields: str) -> tuple[str, ...]:
    return keys_lib.normalize_keys(self.need(*fields))

  def held_keys(self, field: str) -> tuple[str, ...]:
    """Keys held during a click; () when absent or empty."""
    value = self.values.get(field)
    return keys_lib.normalize_keys(value) if value else ()

  def point(self, *fields: str, end: bool = False) -> dict[str, Any]:
    """{"x": pixel, "y": pixel} of a field with a point; x2, y2 for an `end`.

    A point is [x, y], or numbers in a str; a box where the grammar has them.
    """
    value = self.need(*fields)
    field = next(f for f in fields if self.values.get(f) is not None)
    if isinstance(value, str):
      if len(value) > _MAX_POINT_TEXT:
        value = ()
      else:
        value = _NUMBER.findall(value)
    elif isinstance(value, Mapping) and {"x", "y"} <= set(value):
      value = [value["x"], value["y"]]
    elif self.boxes and isinstance(value, (list, tuple)) and len(value) == 1:
      value = value[0]  # [[x0, y0, x1, y1]]
    lengths = (2, 4) if self.boxes else (2,)
    if not isinstance(value, (list, tuple)) or len(value) not in lengths:
      raise base.GuiActionError(
        f"{field} must be [x, y], got {short(self.values[field])}"
      )
    numbers = [
      as_number(number, f"{field} {'xy'[i % 2]}")
      for i, number in enumerate(value)
    ]
    if len(numbers) == 4:
      numbers = [(numbers[0] + numbers[2]) / 2, (numbers[1] + numbers[3]) / 2]
    return self._pixels(numbers, (f"{field} x", f"{field} y"), end)

  def xy(self, x: str = "x", y: str = "y", end: bool = False) -> dict[str, Any]:
    """As `point`, of two fields."""
    numbers = [as_number(self.need(field), field) for field in (x, y)]
    return self._pixels(numbers, (x, y), end)

  def _pixels(
    self, numbers: Sequence[float], labels: Sequence[str], end: bool
  ) -> dict[str, Any]:
    names = ("x2", "y2") if end else ("x", "y")
    return {
      name: self.space.read(number, extent, label)
      for name, number, extent, label in zip(names, numbers, self.size, labels)
    }

  def swipe(self, way: str, at: Mapping[str, float] | None) -> GuiAction:
    """Returns a swipe of the finger towards `way`, of a third of the screen.

    Args:
      way: "up", "down", "left" or "right".
      at: Beginning of the swipe; None for the middle of the screen.
    """
    width, height = self.size
    at = at or {"x": width / 2, "y": height / 2}
    dx, dy = DIRECTIONS[way]
    x2 = min(max(at["x"] + dx * width / 3, 0.0), width - 1.0)
    y2 = min(max(at["y"] + dy * height / 3, 0.0), height - 1.0)
    return GuiAction(Kind.SWIPE, x=at["x"], y=at["y"], x2=x2, y2=y2)


# --- actions to calls ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Writing:
  """An action to be written in a grammar's numbers.

  Attributes:
    action: Action in pixels.
    size: (width, height) of the screenshot.
    space: Coordinate convention.
    grid: (columns, rows) to snap to, (0, 0) for none.
  """

  action: GuiAction
  size: tuple[int, int]
  space: Space
  grid: tuple[int, int] = (0, 0)

  def start(self) -> list[Any]:
    """[x, y] of the action."""
    return self._point(self.action.x, self.action.y)

  def end(self) -> list[Any]:
    """[x, y] of where a drag or swipe ends."""
    return self._point(self.action.x2, self.action.y2)

  @property
  def anywhere(self) -> bool:
    """Whether the action names no place."""
    return self.action.x is None or self.action.y is None

  def _point(self, x: float | None, y: float | None) -> list[Any]:
    return [
      self.space.write(cast(float, value), extent, bins)
      for value, extent, bins in zip((x, y), self.size, self.grid)
    ]

  def place(self, field: str = "coordinate") -> dict[str, Any]:
    """{field: [x, y]}, or {} when the action names no place."""
    return {} if self.anywhere else {field: self.start()}

  def xy(self, x: str = "x", y: str = "y") -> dict[str, Any]:
    """{x: …, y: …}, or {} when the action names no place."""
    return {} if self.anywhere else dict(zip((x, y), self.start()))

  def direction(self) -> str | None:
    """Returns the way of a scroll of one axis, None for another."""
    sign = tuple((v > 0) - (v < 0) for v in (self.action.dx, self.action.dy))
    return next((k for k, v in DIRECTIONS.items() if v == sign), None)

  def swipe_direction(self) -> str | None:
    """Returns the way of a swipe that `Arguments.swipe` would read so.

    None: there is none, or the swipe moves less than a pixel.
    """
    action: Any = self.action
    x, y, x2, y2 = action.x, action.y, action.x2, action.y2
    if None in (x, y, x2, y2):
      return None
    reading = Arguments({}, "", self.size, ABSOLUTE)
    if (
      math.dist((x, y), (x2, y2)) < 1
    ):  # At a screen's edge, as if it were any way.
      return None
    for way in DIRECTIONS:
      swipe: Any = reading.swipe(way, {"x": x, "y": y})
      if math.dist((swipe.x2, swipe.y2), (x2, y2)) < _SAME_PX:
        return way
    return None


Reader = Callable[[Arguments], "GuiAction | list[GuiAction]"]
Call = tuple[str, dict[str, Any]]
Writer = Callable[[Writing], "Call | None"]


def unavailable(instead: str) -> Reader:
  """Reads an action that exists in the grammar and not in `GuiAction`."""

  def read(a: Arguments) -> GuiAction:
    raise base.GuiActionError(
      f"action {a.action!r} is not available here; {instead}"
    )

  return read


def always(kind: Kind, **fields: Any) -> Reader:
  """Reads an action without arguments."""
  return lambda a: GuiAction(kind, **fields)


def text_of(kind: Kind, *fields: str) -> Reader:
  """Reads an action that is a text, from the first of the fields."""
  return lambda a: GuiAction(kind, text=a.text(*fields))


def point_of(kind: Kind, *names: str, **fields: Any) -> Reader:
  """Reads an action at the point that is in a field."""
  return lambda a: GuiAction(kind, **a.point(*names), **fields)


def clicks_of(
  clicks: dict[str, tuple[str, int]],
  *fields: str,
  modifiers: Sequence[str] = (),
) -> dict[str, Reader]:
  """Returns readers of clicks at the point that is in one of the fields.

  Args:
    clicks: Name of an action -> (button, count).
    *fields: Fields of the point.
    modifiers: Fields of the keys that a click holds; the first that names any
      counts.
  """

  def reader(button: str, count: int) -> Reader:
    return lambda a: GuiAction(
      Kind.CLICK,
      **a.point(*fields),
      button=button,
      count=count,
      keys=next(filter(None, map(a.held_keys, modifiers)), ()),
    )

  return {name: reader(*which) for name, which in clicks.items()}


def drag_from_pointer(start: str, end: str) -> Reader:
  """Reads a drag that begins at the pointer unless the field `start` is set."""

  def read(a: Arguments) -> GuiAction:
    begin = a.point(start) if a.has(start) else {}
    return GuiAction(Kind.DRAG, **begin, **a.point(end, end=True))

  return read


def scroll_of(
  way: str, *place: str, step: str = "", notches: float = 1
) -> Reader:
  """Reads a scroll whose direction is in the field `way`.

  Args:
    way: Field of the direction.
    *place: Fields of the point, which may be absent.
    step: Field of the number of notches; "" where the grammar has none.
    notches: Length of a scroll without that field.
  """

  def read(a: Arguments) -> GuiAction:
    dx, dy = a.choice(way, DIRECTIONS)
    pixels = (a.seconds(step, notches) if step else notches) * NOTCH_PX
    at = a.point(*place) if a.has(*place) else {}
    return GuiAction(Kind.SCROLL, **at, dx=dx * pixels, dy=dy * pixels)

  return read


def read_url(a: Arguments) -> list[GuiAction]:
  """Reads a visit to the page in the field `url`, by the browser's shortcut."""
  return [
    GuiAction(Kind.KEY, keys=("ctrl", "l")),
    GuiAction(Kind.TYPE, text=a.name("url")),
    GuiAction(Kind.KEY, keys=("enter",)),
  ]


def write_clicks(
  clicks: dict[str, tuple[str, int]],
  place: Callable[[Writing], dict[str, Any]],
  modifiers: str = "",
) -> Writer:
  """Writes clicks as the first name of their button and count.

  Args:
    clicks: Name of an action -> (button, count).
    place: Returns the arguments of the point.
    modifiers: Field of the keys that a click holds; "" where it can hold none.
  """
  names = {which: name for name, which in reversed(clicks.items())}

  def write(w: Writing) -> Call | None:
    name, keys = names.get((w.action.button, w.action.count)), w.action.keys
    if name is None or (keys and not modifiers):
      return None
    return name, {**place(w), **({modifiers: "+".join(keys)} if keys else {})}

  return write


def write_drag(
  name: str, start: str, end: str, form: Callable[[Sequence[Any]], Any] = list
) -> Writer:
  """Writes a drag with the left button, `form` being the text of a point."""

  def write(w: Writing) -> Call | None:
    if w.anywhere or w.action.button != "left":
      return None
    return name, {start: form(w.start()), end: form(w.end())}

  return write


def write_keys(name: str, field: str, joint: str | None) -> Writer:
  """Writes keys that are pressed at once, as a list or joined to a text."""

  def write(w: Writing) -> Call | None:
    if w.action.duration:
      return None
    keys = list(w.action.keys)
    return name, {field: keys if joint is None else joint.join(keys)}

  return write


def writes(name: str, **fields: str) -> Writer:
  """Writes an action by fields of it: argument="field of the action"."""
  return lambda w: (
    name,
    {key: getattr(w.action, field) for key, field in fields.items()},
  )


def notches(pixels: float) -> int:
  """Turns of the wheel, at least one."""
  return max(1, round(abs(pixels) / NOTCH_PX))


class TableParser(base.GuiActionParser):
  """See the module docstring.

  Attributes:
    family: the grammar's name in errors.
    own_prompt: the tool prompt of a grammar that shows no other tools; {screen}
      stands for the size of the screenshots.
    space, readers, writers: see the module docstring.
    boxes: Whether four numbers are a box, whose centre counts.
    grid: (columns, rows) to which written coordinates snap; None for none.
  """

  family: str
  own_prompt = ""
  space: Space = ABSOLUTE
  boxes = False
  readers: Mapping[str, Reader] = {}
  writers: Mapping[Kind, Writer] = {}
  grid: tuple[int, int] | None = None

  def __init_subclass__(cls, **kwargs: Any):
    super().__init_subclass__(**kwargs)
    cls.coordinates = cls.space.name

  @property
  def default_tools(self) -> list[dict[str, Any]]:
    return [
      {"type": "function", "function": {"name": name}}
      for name in self.action_names
    ]

  def get_tool_prompt(self, tools_schema: base.ToolsSchema = None) -> str:
    """Returns the output format and the actions.

    Raises:
      ValueError: other tools are to be shown.
    """
    if not self.own_prompt:  # That of the format, with the tools' schemas.
      return super().get_tool_prompt(tools_schema)  # type: ignore[safe-super]
    if tools_schema is not None and base.as_schemas(tools_schema):
      raise ValueError(f"the {self.family} grammar has its own actions only")
    if self.screen is None:
      size = "the size of the screenshot"
    else:
      size = f"{self.screen[0]}x{self.screen[1]}"
    return self.own_prompt.replace("{screen}", size)

  def action_of(self, call: trajectory.ToolCall) -> Call:
    """Returns (name, arguments) of the action that a call holds.

    Raises:
      GuiActionError: it holds none.
    """
    return call.name, call.arguments

  def call_of(self, name: str, arguments: dict[str, Any]) -> Any:
    """Returns the call of an action, or a list of calls: `action_of`'s
    inverse."""
    return trajectory.ToolCall(name, arguments)

  @property
  def action_names(self) -> Iterable[str]:
    """Names of actions that are accepted."""
    return self.readers

  def to_gui_actions(
    self, call: trajectory.ToolCall, width: int, height: int
  ) -> list[GuiAction]:
    name, values = self.action_of(call)
    if not isinstance(name, str) or name not in self.action_names:
      raise base.UnknownActionError(
        registry.unknown_name("action", short(name), self.action_names)
      )
    arguments = Arguments(values, name, (width, height), self.space, self.boxes)
    try:
      actions = self.readers[name](arguments)
    except base.GuiActionError:
      raise
    except ValueError as error:  # GuiAction's own refusal.
      raise base.GuiActionError(str(error)) from None
    return actions if isinstance(actions, list) else [actions]

  def to_gui_action(
    self, call: trajectory.ToolCall, width: int, height: int
  ) -> GuiAction:
    actions = self.to_gui_actions(call, width, height)
    if len(actions) != 1:
      raise base.GuiActionError(
        f"a call of {call.name!r} stands for {len(actions)} actions; read it"
        " with to_gui_actions"
      )
    return actions[0]

  def format_gui_action(
    self,
    action: GuiAction,
    width: int,
    height: int,
    thought: str | None = None,
    grid: tuple[int, int] | None = None,
  ) -> str:
    """See the base class. `grid` overrides the parser's own."""
    writer = self.writers.get(action.kind)
    writing = Writing(
      action, (width, height), self.space, grid or self.grid or (0, 0)
    )
    written = writer(writing) if writer is not None else None
    if written is None:
      raise base.GuiActionError(
        f"{self.family} cannot express {short(action.to_json())}"
      )
    name, arguments = written
    if name not in self.action_names:
      raise base.GuiActionError(
        f"this grammar has no {name!r} action; it has:"
        f" {', '.join(self.action_names)}"
      )
    calls = self.call_of(name, arguments)
    if not isinstance(calls, list):
      calls = [calls]
    return self.format(calls, thought)


class OneToolParser(TableParser):
  """All actions are calls of one tool, with their name in `action`.

  Attributes:
    tool_name: Name of the tool.
  """

  tool_name: str

  def action_of(self, call: trajectory.ToolCall) -> Call:
    if call.name != self.tool_name:
      raise base.UnknownActionError(
        registry.unknown_name("tool", short(call.name), (self.tool_name,))
      )
    return call.arguments.get("action"), call.arguments  # type: ignore[return-value]

  def call_of(self, name: str, arguments: dict[str, Any]) -> Any:
    return trajectory.ToolCall(self.tool_name, {"action": name, **arguments})


def as_number(value: object, label: str) -> float:
  """Returns a finite number; numerals in a str count.

  Raises:
    GuiActionError: anything else, or more than a million.
  """
  try:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
      raise ValueError
    number = float(value)
    if not math.isfinite(number) or abs(number) > _LARGEST:
      raise ValueError
    return number
  except (ValueError, OverflowError):
    raise base.GuiActionError(
      f"{label} must be a number, got {short(value)}"
    ) from None


def plain(number: float) -> int | float:
  """12 rather than 12.0, and never -0."""
  return int(number) if float(number).is_integer() else float(number)


def short(value: object) -> str:
  """Returns text, or the `repr` of another value, cut to 60 characters."""
  if not isinstance(value, str):
    return json_text.short(value, 60)
  return value if len(value) <= 60 else value[:57] + "..."
