"""Parses BrowserGym's high-level actions: `mouse_click(56, 712.56, 'right')`.

Coordinates are pixels of the page. Calls are parsed as Python's syntax and
never executed. Actions on elements by their id (`click('12')`) need an
observation that shows ids; to a policy that sees a screenshot only they are
refused.

Source: browsergym.core.action.functions of ServiceNow/BrowserGym: the subsets
bid, coord, chat, infeas, nav and tab; names, order of the parameters and
defaults are those.

Conventions: `scroll` and `scroll_at` take pixels, positive to the right and
down. Navigation and tabs are the browser's keyboard shortcuts.
"""

from __future__ import annotations

from typing import Sequence

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.tool_parser import base
from tunix.rl.multi_turn.parser.tool_parser import gui_table
from tunix.rl.multi_turn.parser.tool_parser import python_calls

GuiAction = gui_action.GuiAction
Kind = gui_action.GuiActionKind

_ONE_ACTION = "\n\nEach turn, write one action as a Python call:\n"
_TREE = """ The page is shown as its accessibility tree, one element a line: \
[id] role 'name', states. Lines that are new or different begin with *."""
_ELEMENTS = """click(bid, button='left')
dblclick(bid)
hover(bid)
fill(bid, value)  # replaces the text of a field
clear(bid)
press(bid, key_comb)  # e.g. 'Enter', 'Control+a'
focus(bid)
check(bid)
uncheck(bid)
select_option(bid, options)
drag_and_drop(from_bid, to_bid)
scroll(delta_x, delta_y)
keyboard_press(key)
keyboard_type(text)
noop(wait_ms=1000)
send_msg_to_user(text)  # the answer; ends the task
report_infeasible(reason)  # the task cannot be done"""
_SCREEN = """You operate a browser for the user. The page is {screen}; \
coordinates are pixels from the left and from the top."""
_COORDINATES = """mouse_click(x, y, button='left')
mouse_dblclick(x, y, button='left')
mouse_move(x, y)
mouse_drag_and_drop(from_x, from_y, to_x, to_y)
scroll(delta_x, delta_y)
scroll_at(x, y, delta_x, delta_y)
keyboard_press(key)  # e.g. 'Enter', 'Control+a'
keyboard_type(text)
keyboard_insert_text(text)
goto(url)
go_back()
go_forward()
new_tab()
tab_close()
noop(wait_ms=1000)
send_msg_to_user(text)  # the answer; ends the task
report_infeasible(reason)  # the task cannot be done"""
_PROMPTS = {
  "screenshot": f"{_SCREEN}{_ONE_ACTION}{_COORDINATES}",
  "axtree": (
    f"You operate a browser for the user.{_TREE}{_ONE_ACTION}{_ELEMENTS}"
  ),
  "both": (
    f"{_SCREEN}{_TREE}{_ONE_ACTION}"
    + "\n".join(dict.fromkeys(f"{_ELEMENTS}\n{_COORDINATES}".split("\n")))
  ),
}
_PARAMETERS: dict[str, tuple[str, ...]] = {
  "mouse_click": ("x", "y", "button"),
  "mouse_dblclick": ("x", "y", "button"),
  "mouse_move": ("x", "y"),
  "mouse_drag_and_drop": ("from_x", "from_y", "to_x", "to_y"),
  "mouse_down": ("x", "y", "button"),
  "mouse_up": ("x", "y", "button"),
  "scroll": ("delta_x", "delta_y"),
  "scroll_at": ("x", "y", "delta_x", "delta_y"),
  "keyboard_press": ("key",),
  "keyboard_type": ("text",),
  "keyboard_insert_text": ("text",),
  "keyboard_down": ("key",),
  "keyboard_up": ("key",),
  "goto": ("url",),
  "go_back": (),
  "go_forward": (),
  "new_tab": (),
  "tab_close": (),
  "tab_focus": ("index",),
  "noop": ("wait_ms",),
  "send_msg_to_user": ("text",),
  "report_infeasible": ("reason",),
}
_BY_ID: dict[str, tuple[str, ...]] = {
  "click": ("bid", "button", "modifiers"),
  "dblclick": ("bid", "button", "modifiers"),
  "hover": ("bid",),
  "fill": ("bid", "value", "enable_autocomplete_menu"),
  "press": ("bid", "key_comb"),
  "focus": ("bid",),
  "clear": ("bid",),
  "check": ("bid",),
  "uncheck": ("bid",),
  "select_option": ("bid", "options"),
  "drag_and_drop": ("from_bid", "to_bid"),
}
_MOUSE_BUTTONS = {name: name for name in ("left", "middle", "right")}


def _click(count: int) -> gui_table.Reader:
  def read(a: gui_table.Arguments) -> GuiAction:
    button = a.choice("button", _MOUSE_BUTTONS) if a.has("button") else "left"
    return GuiAction(Kind.CLICK, **a.xy(), button=button, count=count)

  return read


def _bid(a: gui_table.Arguments, field: str = "bid") -> str:
  """Returns an element's id, which a policy may write as a number."""
  value = a.need(field)
  if isinstance(value, int) and not isinstance(value, bool):
    return str(value)
  return a.name(field).strip("[]")


def _click_element(count: int) -> gui_table.Reader:
  def read(a: gui_table.Arguments) -> GuiAction:
    button = a.choice("button", _MOUSE_BUTTONS) if a.has("button") else "left"
    keys = a.held_keys("modifiers") if a.has("modifiers") else ()
    return GuiAction(
      Kind.CLICK, element=_bid(a), button=button, count=count, keys=keys
    )

  return read


def _options(a: gui_table.Arguments) -> str:
  """Returns the options of a list, one a line."""
  options = a.need("options")
  if isinstance(options, list) and all(isinstance(o, str) for o in options):
    return "\n".join(options)
  return a.text("options")


def _scroll(a: gui_table.Arguments) -> GuiAction:
  place = a.xy() if a.has("x", "y") else {}
  return GuiAction(
    Kind.SCROLL, **place, dx=a.number("delta_x"), dy=a.number("delta_y")
  )


def _shortcut(*keys: str) -> gui_table.Reader:
  return gui_table.always(Kind.KEY, keys=keys)


_READERS: dict[str, gui_table.Reader] = {
  "mouse_click": _click(1),
  "mouse_dblclick": _click(2),
  "mouse_move": lambda a: GuiAction(Kind.MOVE, **a.xy()),
  "mouse_drag_and_drop": lambda a: GuiAction(
    Kind.DRAG, **a.xy("from_x", "from_y"), **a.xy("to_x", "to_y", end=True)
  ),
  "scroll": _scroll,
  "scroll_at": _scroll,
  "keyboard_press": lambda a: GuiAction(Kind.KEY, keys=a.keys("key")),
  "keyboard_type": gui_table.text_of(Kind.TYPE, "text"),
  "keyboard_insert_text": gui_table.text_of(Kind.TYPE, "text"),
  "goto": gui_table.read_url,
  "go_back": _shortcut("alt", "left"),
  "go_forward": _shortcut("alt", "right"),
  "new_tab": _shortcut("ctrl", "t"),
  "tab_close": _shortcut("ctrl", "w"),
  "noop": lambda a: GuiAction(
    Kind.WAIT, duration=a.seconds("wait_ms", 1000.0) / 1000
  ),
  "send_msg_to_user": gui_table.text_of(Kind.ANSWER, "text"),
  "report_infeasible": gui_table.always(Kind.TERMINATE, success=False),
  "mouse_down": gui_table.unavailable("use mouse_drag_and_drop"),
  "mouse_up": gui_table.unavailable("use mouse_drag_and_drop"),
  "keyboard_down": gui_table.unavailable("use keyboard_press"),
  "keyboard_up": gui_table.unavailable("use keyboard_press"),
  "tab_focus": gui_table.unavailable("use keyboard_press('Control+Tab')"),
  "click": _click_element(1),
  "dblclick": _click_element(2),
  "hover": lambda a: GuiAction(Kind.MOVE, element=_bid(a)),
  "fill": lambda a: GuiAction(Kind.FILL, element=_bid(a), text=a.text("value")),
  "press": lambda a: [
    GuiAction(Kind.FOCUS, element=_bid(a)),
    GuiAction(Kind.KEY, keys=a.keys("key_comb")),
  ],
  "focus": lambda a: GuiAction(Kind.FOCUS, element=_bid(a)),
  "clear": lambda a: GuiAction(Kind.FILL, element=_bid(a), text=""),
  "check": lambda a: GuiAction(Kind.FILL, element=_bid(a), text="true"),
  "uncheck": lambda a: GuiAction(Kind.FILL, element=_bid(a), text="false"),
  "select_option": lambda a: GuiAction(
    Kind.FILL, element=_bid(a), text=_options(a)
  ),
  "drag_and_drop": lambda a: GuiAction(
    Kind.DRAG, element=_bid(a, "from_bid"), element2=_bid(a, "to_bid")
  ),
}


def _write_click(w: gui_table.Writing) -> gui_table.Call | None:
  names = {1: "mouse_click", 2: "mouse_dblclick"}
  place = w.xy()
  if w.action.element is not None:
    names = {1: "click", 2: "dblclick"}
    place = {"bid": w.action.element}
  name = names.get(w.action.count)
  button = w.action.button
  if name is None or button not in _MOUSE_BUTTONS or w.action.keys:
    return None
  return name, {**place, **({} if button == "left" else {"button": button})}


def _write_move(w: gui_table.Writing) -> gui_table.Call:
  if w.action.element is not None:
    return "hover", {"bid": w.action.element}
  return "mouse_move", w.xy()


def _write_fill(w: gui_table.Writing) -> gui_table.Call:
  return "fill", {"bid": w.action.element, "value": w.action.text}


def _write_drag(w: gui_table.Writing) -> gui_table.Call | None:
  if w.action.element is not None and w.action.element2 is not None:
    bids = {"from_bid": w.action.element, "to_bid": w.action.element2}
    return ("drag_and_drop", bids) if w.action.button == "left" else None
  if w.action.element is not None or w.action.element2 is not None:
    return None
  if w.anywhere or w.action.button != "left":
    return None
  return "mouse_drag_and_drop", {
    **w.xy("from_x", "from_y"),
    **dict(zip(("to_x", "to_y"), w.end())),
  }


def _write_scroll(w: gui_table.Writing) -> gui_table.Call:
  deltas = {
    "delta_x": gui_table.plain(w.action.dx),
    "delta_y": gui_table.plain(w.action.dy),
  }
  return "scroll" if w.anywhere else "scroll_at", {**w.xy(), **deltas}


def _write_wait(w: gui_table.Writing) -> gui_table.Call | None:
  if w.action.duration is None:
    return None
  return "noop", {"wait_ms": gui_table.plain(w.action.duration * 1000)}


_WRITERS: dict[Kind, gui_table.Writer] = {
  Kind.CLICK: _write_click,
  Kind.MOVE: _write_move,
  Kind.FILL: _write_fill,
  Kind.FOCUS: gui_table.writes("focus", bid="element"),
  Kind.DRAG: _write_drag,
  Kind.SCROLL: _write_scroll,
  Kind.KEY: gui_table.write_keys("keyboard_press", "key", "+"),
  Kind.TYPE: gui_table.writes("keyboard_type", text="text"),
  Kind.WAIT: _write_wait,
  Kind.ANSWER: gui_table.writes("send_msg_to_user", text="text"),
  Kind.TERMINATE: lambda w: (
    ("report_infeasible", {"reason": "infeasible"})
    if w.action.success is False
    else None
  ),
}


class BrowserGymParser(gui_table.TableParser, python_calls.PythonCallsParser):
  """See the module docstring."""

  family = "BrowserGym"
  by_element = True
  space = gui_table.Space("absolute", decimals=2)
  parameters = {**_PARAMETERS, **_BY_ID}
  positional = frozenset({**_PARAMETERS, **_BY_ID})
  readers = _READERS
  writers = _WRITERS

  @property
  def own_prompt(self) -> str:  # type: ignore[override]
    return _PROMPTS[self.observation]

  def to_gui_actions(
    self, call: trajectory.ToolCall, width: int, height: int
  ) -> list[GuiAction]:
    if call.name in _BY_ID and self.observation == "screenshot":
      raise base.GuiActionError(
        f"action {call.name!r} is not available here; use mouse_click and"
        " keyboard_type"
      )
    return super().to_gui_actions(call, width, height)

  def format(
    self, calls: Sequence[trajectory.ToolCall], thought: str | None = None
  ) -> str:
    return base.with_thought(
      thought, *(self.write(call.name, call.arguments) for call in calls)
    )
