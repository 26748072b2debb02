"""Parses H Company's Holo: a step of navigation as one JSON object.

    {"note": "", "thought": "The form has opened.",
     "action": {"action": "click_element", "element": "Search", "x": 9, "y": 7}}

Two grammars: `holo1_5` (Holo1 and Holo1.5: pixels of the screenshot as the
model sees it, sides resized to multiples of 28) and `holo2` (0 to 1000 of the
sides). An action alone, without its step, is read as well.

Source: navigation.py of Hcompany's spaces, hcompai/surfer-h-cli, and for its
coordinates the cookbook of Holo2. Names and arguments are those; the sentences
around them are ours.

Conventions: `write_element_abs` clicks the element, types (behind what the
field holds), and presses Enter; a text cannot be written otherwise. `refresh`
is F5. The description of an element is not used. `goto` and `restart` have no
`GuiAction`.
"""

from __future__ import annotations

from typing import Sequence

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser.tool_parser import base
from tunix.rl.multi_turn.parser.tool_parser import gui_table
from tunix.rl.multi_turn.parser.tool_parser import scanning

GuiAction = gui_action.GuiAction
Kind = gui_action.GuiActionKind

_WAIT_S = 2.0
_MOST_WAIT_S = 10.0
_PROMPT = """You browse the web for the user. Think about the screenshot, note \
what the task asks for, and choose the next action. x and y are {space}.

# Actions
{"action": "click_element", "element": "<description>", "x": <int>, "y": <int>}
{"action": "write_element_abs", "content": "<text>", "element": \
"<description>", "x": <int>, "y": <int>}  # presses Enter, too
{"action": "scroll", "direction": "down|up|left|right"}
{"action": "go_back"}
{"action": "refresh"}
{"action": "wait", "seconds": <0 to 10>}
{"action": "answer", "content": "<answer>"}  # the last action

# Output Format
{"note": "<new information for the task, or empty>", "thought": \
"<reasoning>", "action": {"action": ...}}"""


def _write_element(a: gui_table.Arguments) -> list[GuiAction]:
  at = a.xy()
  return [
    GuiAction(Kind.CLICK, **at),
    GuiAction(Kind.TYPE, text=a.text("content")),
    GuiAction(Kind.KEY, keys=("enter",)),
  ]


def _wait(a: gui_table.Arguments) -> GuiAction:
  return GuiAction(Kind.WAIT, duration=a.seconds("seconds", _WAIT_S))


_OTHERWISE = "use click_element on the page instead"
_READERS: dict[str, gui_table.Reader] = {
  "click_element": lambda a: GuiAction(Kind.CLICK, **a.xy()),
  "click_absolute": lambda a: GuiAction(Kind.CLICK, **a.xy()),
  "write_element_abs": _write_element,
  "write_element": _write_element,
  "scroll": gui_table.scroll_of("direction"),
  "go_back": gui_table.always(Kind.SYSTEM_BUTTON, text="back"),
  "refresh": gui_table.always(Kind.KEY, keys=("f5",)),
  "wait": _wait,
  "answer": gui_table.text_of(Kind.ANSWER, "content"),
  "goto": gui_table.unavailable(_OTHERWISE),
  "restart": gui_table.unavailable(_OTHERWISE),
}


def _write_click(w: gui_table.Writing) -> gui_table.Call | None:
  if (w.action.button, w.action.count) != ("left", 1) or w.action.keys:
    return None
  return None if w.anywhere else ("click_element", {"element": "", **w.xy()})


def _write_scroll(w: gui_table.Writing) -> gui_table.Call | None:
  way = w.direction() if w.anywhere else None
  return None if way is None else ("scroll", {"direction": way})


def _write_key(w: gui_table.Writing) -> gui_table.Call | None:
  plain = w.action.keys == ("f5",) and not w.action.duration
  return ("refresh", {}) if plain else None


def _write_wait(w: gui_table.Writing) -> gui_table.Call | None:
  seconds = w.action.duration
  if seconds is None or not seconds <= _MOST_WAIT_S:
    return None
  return "wait", {"seconds": gui_table.plain(seconds)}


_WRITERS: dict[Kind, gui_table.Writer] = {
  Kind.CLICK: _write_click,
  Kind.SCROLL: _write_scroll,
  Kind.KEY: _write_key,
  Kind.WAIT: _write_wait,
  Kind.SYSTEM_BUTTON: lambda w: (
    ("go_back", {}) if w.action.text == "back" else None
  ),
  Kind.ANSWER: gui_table.writes("answer", content="text"),
}


class Holo15Parser(gui_table.TableParser, scanning.JsonCallsParser):
  """See the module docstring: Holo1.5, in pixels."""

  family = "Holo"
  own_prompt = _PROMPT.replace("{space}", "pixels of {screen}")
  space = gui_table.ABSOLUTE
  resizing = base.QWEN2_5_VL
  readers = _READERS
  writers = _WRITERS
  name_key = "action"
  arguments_keys = ()

  def calls_of(
    self, value: object, position: int
  ) -> Sequence[trajectory.ToolCall] | None:
    if not isinstance(value, dict) or "action" not in value:
      return None
    action = value["action"]
    if isinstance(action, dict):
      value = action
    return super().calls_of(value, position) or [
      scanning.call_from_object(value, position, "action", ())
    ]

  def parse_result(self, model_response: str) -> base.ParseResult:
    result = super().parse_result(model_response)
    if not result.positions:
      return result
    step, _ = scanning.read_json(model_response, result.positions[0])
    fields = ("note", "notes", "thought")
    thoughts = [result.thought, *map(step.get, fields)]
    texts = [t for t in thoughts if isinstance(t, str) and t]
    return base.ParseResult(
      result.calls,
      "\n".join(texts),
      result.answer,
      failures=result.failures,
      positions=result.positions,
    )

  def format(
    self, calls: Sequence[trajectory.ToolCall], thought: str | None = None
  ) -> str:
    if not calls:
      return thought or ""
    return "\n".join(
      scanning.compact_json(
        {
          "note": "",
          "thought": "" if number else thought or "",
          "action": self.to_object(call),
        }
      )
      for number, call in enumerate(calls)
    )


class Holo2Parser(Holo15Parser):
  """See the module docstring: Holo2, in thousandths."""

  own_prompt = _PROMPT.replace("{space}", "0 to 1000 of the screen's sides")
  space = gui_table.Space("relative", scale=1000)
  resizing = base.QWEN3_VL
