"""Texts of every grammar, broken at random, and what must hold of them.

`check` raises for anything but the typed error, for an action outside the
screenshot, and for a position outside the text. benchmarks/fuzz_grammars.py
does it at length, tests/parser/tool_parser/test_grammar_fuzz.py in short.
"""

from __future__ import annotations

import json
import random
import re

from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser import tool_parser

Action = gui_action.GuiAction
Kind = gui_action.GuiActionKind
WIDTH, HEIGHT = 1280, 720

ACTIONS = [
  Action(Kind.CLICK, x=640, y=360),
  Action(Kind.CLICK, x=3, y=4, button="right"),
  Action(Kind.CLICK, x=3, y=4, button="middle"),
  Action(Kind.CLICK, x=3, y=4, count=2),
  Action(Kind.CLICK, x=3, y=4, count=3),
  Action(Kind.CLICK, x=3, y=4, keys=("ctrl", "shift")),
  Action(Kind.MOVE, x=1279, y=719),
  Action(Kind.DRAG, x=1, y=2, x2=300, y2=400),
  Action(Kind.DRAG, x2=300, y2=400),
  Action(Kind.SCROLL, x=5, y=6, dy=120),
  Action(Kind.SCROLL, dx=-240),
  Action(Kind.TYPE, text='it\'s "so" {} [] () \\n\n</tool_call>```'),
  Action(Kind.KEY, keys=("ctrl", "c")),
  Action(Kind.KEY, keys=("enter",)),
  Action(Kind.WAIT),
  Action(Kind.WAIT, duration=5.0),
  Action(Kind.LONG_PRESS, x=7, y=8),
  Action(Kind.SWIPE, x=640, y=360, x2=640, y2=120),
  Action(Kind.SYSTEM_BUTTON, text="back"),
  Action(Kind.OPEN_APP, text="Clock"),
  Action(Kind.ANSWER, text="42"),
  Action(Kind.TERMINATE, success=True),
  Action(Kind.TERMINATE, success=False),
  Action(Kind.SCREENSHOT),
]
CALLS = [
  trajectory.ToolCall("get_weather", {"city": "Paris", "days": 3}),
  trajectory.ToolCall("f", {"a": [1, 2.5, None], "b": {"c": True}}),
  trajectory.ToolCall("g", {}),
  trajectory.ToolCall("h", {"text": "</tool_call> ``` \" ' \\ \n {[("}),
]
_FRAGMENTS = (
    "", " ", "\n", "\n\n", "\0", "\ud800", "\\u0000", "\\ud800", "é", "🦊",
    "'", '"', "'''", '"""', "\\", "(", ")", "[", "]", "{", "}", ",", ":", "=",
    "#", "```", "```python\n", "<think>", "</think>", "<thinking>",
    "</thinking>", "<tool_call>", "</tool_call>", "<function=", "</function>",
    "<parameter=x>", "</parameter>", "Action:", "\nAction: ", "[TOOL_CALLS]",
    "[ARGS]", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<|begin_of_box|>", "<|python_tag|>", "{\"name\": ", "{\"type\": ",
    "\"arguments\": ", "null", "true", "NaN", "Infinity", "-1", "1e400",
    "9" * 5000, "-" * 200, "(" * 150, "[" * 150, "{\"a\":" * 150, "0x10",
    "1_0", "1j", "b'x'", "f'{x}'", "lambda: 0", "__import__('os')", "x=1, x=2",
    "**{}", "*a", "import os\n", "pyautogui.", "computer.", "start_box=",
    "\r", "\x0b", "\x0c", "\u2028", "\u200b",
)  # fmt: skip
_NUMBERS = (
    "-1", "0", "1", "999", "1000", "1001", "1279", "1280", "99999999", "1e9",
    "0.5", "-0.0", "1e400", "null", "true", '"7"', "[]", "{}",
)  # fmt: skip
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def seeds(parser: tool_parser.ToolParser) -> list[str]:
  """Well-formed texts of a grammar."""
  texts = []
  if isinstance(parser, tool_parser.GuiActionParser):
    for action in ACTIONS:
      try:
        texts.append(
          parser.format_gui_action(action, WIDTH, HEIGHT, "I see. So:")
        )
      except tool_parser.GuiActionError:
        pass  # The grammar has no word for it.
  else:
    texts = [parser.format([call], "I see. So:") for call in CALLS[:3]]
    texts.append(parser.format(CALLS[:3]))
  return texts


def broken(texts: list[str], rng: random.Random) -> str:
  """One of the texts after one to four accidents."""
  text = rng.choice(texts)
  for _ in range(rng.randint(1, 4)):
    start = rng.randrange(len(text) + 1)
    end = min(len(text), start + rng.randint(0, 12))
    accident = rng.randrange(7)
    if accident == 0:
      text = text[:start] + text[end:]
    elif accident == 1:
      text = text[:end] + text[start:]
    elif accident == 2:
      text = text[:start] + rng.choice(_FRAGMENTS) + text[end:]
    elif accident == 3:
      text = text[:start]
    elif accident == 4:
      other = rng.choice(texts)
      text = text[:start] + other[rng.randrange(len(other) + 1) :]
    elif accident == 5:
      found = list(_NUMBER.finditer(text))
      if found:
        where = rng.choice(found)
        number = rng.choice(_NUMBERS)
        text = text[: where.start()] + number + text[where.end() :]
    else:
      text = text[:start] + text[start:end].swapcase() + text[end:]
  return text


def check(parser: tool_parser.ToolParser, text: str) -> tuple[int, int]:
  """(calls, errors) of a text.

  Raises:
    AssertionError: a promise is broken.
    Exception: anything but the typed error.
  """
  result = parser.parse_result(text)
  assert len(result.calls) == len(result.positions)
  for failure in result.failures:
    assert isinstance(failure, tool_parser.ToolParseError)
    assert failure.position is not None
  for position in (*result.positions, *(f.position for f in result.failures)):
    assert 0 <= position <= len(text), position
  try:
    parser.parse(text, strict=True)
    assert not result.failures
  except tool_parser.ToolParseError:
    assert result.failures
  errors = len(result.failures)
  for call in result.calls:
    written = json.dumps(call.arguments, allow_nan=False)
    assert isinstance(call.name, str) and written
    if not isinstance(parser, tool_parser.GuiActionParser):
      continue
    try:
      actions = parser.to_gui_actions(call, WIDTH, HEIGHT)
    except tool_parser.GuiActionError:
      errors += 1
      continue
    assert actions
    for action in actions:
      inside(action)
  return len(result.calls), errors


def inside(action: gui_action.GuiAction) -> None:
  """Asserts that an action lies within the screenshot."""
  for value, extent in (
    (action.x, WIDTH),
    (action.y, HEIGHT),
    (action.x2, WIDTH),
    (action.y2, HEIGHT),
  ):
    assert value is None or 0 <= value <= extent - 1, action
