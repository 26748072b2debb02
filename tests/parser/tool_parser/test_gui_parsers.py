"""GUI grammars: exact texts, coordinates, dialects, and what is refused."""

import dataclasses

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.parser.tool_parser import keys as keys_lib
from tunix.rl.multi_turn.parser.tool_parser.grammars import computer_use

Action = gui_action.GuiAction
Kind = gui_action.GuiActionKind
REL = tool_parser.get_tool_parser("computer_use")()
ABS = tool_parser.get_tool_parser("computer_use_absolute")()
COMPACT = tool_parser.get_tool_parser("computer_use_compact")(
  actions=computer_use.ACTION_NAMES
)
TARS = tool_parser.get_tool_parser("ui_tars")()
TARS_ABS = tool_parser.get_tool_parser("ui_tars_absolute")()


def wrap(arguments):
  return (
    '<tool_call>\n{"name": "computer_use", "arguments": '
    + arguments
    + "}\n</tool_call>"
  )


def read(parser, text, width=1000, height=1000):
  calls = parser.parse(text, strict=True)
  return [parser.to_gui_action(call, width, height) for call in calls]


def use(**arguments):
  return trajectory.ToolCall("computer_use", arguments)


CANONICAL = [
  (
    Action(Kind.CLICK, x=512, y=300),
    '{"action": "left_click", "coordinate": [512, 300]}',
  ),
  (
    Action(Kind.CLICK, x=1, y=2, button="right"),
    '{"action": "right_click", "coordinate": [1, 2]}',
  ),
  (
    Action(Kind.CLICK, x=1, y=2, button="middle"),
    '{"action": "middle_click", "coordinate": [1, 2]}',
  ),
  (
    Action(Kind.CLICK, x=1, y=2, count=2),
    '{"action": "double_click", "coordinate": [1, 2]}',
  ),
  (
    Action(Kind.CLICK, x=1, y=2, count=3),
    '{"action": "triple_click", "coordinate": [1, 2]}',
  ),
  (
    Action(Kind.CLICK, x=1, y=2, keys=("ctrl", "shift")),
    '{"action": "left_click", "coordinate": [1, 2], "text": "ctrl+shift"}',
  ),
  (
    Action(Kind.MOVE, x=0, y=999),
    '{"action": "mouse_move", "coordinate": [0, 999]}',
  ),
  (
    Action(Kind.DRAG, x=1, y=2, x2=3, y2=4),
    (
      '{"action": "left_click_drag", "start_coordinate": [1, 2],'
      ' "coordinate": [3, 4]}'
    ),
  ),
  (
    Action(Kind.DRAG, x2=3, y2=4),
    '{"action": "left_click_drag", "coordinate": [3, 4]}',
  ),
  (
    Action(Kind.SCROLL, x=10, y=20, dy=120),
    '{"action": "scroll", "coordinate": [10, 20], "pixels": -120}',
  ),
  (Action(Kind.SCROLL, dx=80), '{"action": "hscroll", "pixels": 80}'),
  (Action(Kind.TYPE, text="cat"), '{"action": "type", "text": "cat"}'),
  (Action(Kind.TYPE, text='é\n"'), '{"action": "type", "text": "é\\n\\""}'),
  (Action(Kind.KEY, keys=("enter",)), '{"action": "key", "keys": ["enter"]}'),
  (Action(Kind.WAIT, duration=2.0), '{"action": "wait", "time": 2}'),
  (Action(Kind.WAIT), '{"action": "wait"}'),
  (Action(Kind.ANSWER, text="8"), '{"action": "answer", "text": "8"}'),
  (
    Action(Kind.TERMINATE, success=True),
    '{"action": "terminate", "status": "success"}',
  ),
  (
    Action(Kind.TERMINATE, success=False),
    '{"action": "terminate", "status": "failure"}',
  ),
]


@pytest.mark.parametrize("parser", [REL, ABS, COMPACT])
@pytest.mark.parametrize("action, arguments", CANONICAL)
def test_canonical_text_both_ways(parser, action, arguments):
  # On 1000 x 1000 pixels both conventions write the same numbers.
  assert parser.format_gui_action(action, 1000, 1000) == wrap(arguments)
  assert read(parser, wrap(arguments)) == [action]


def test_the_published_click_text_to_the_letter():
  assert REL.format_gui_action(
    Action(Kind.CLICK, x=512, y=300), 1000, 1000
  ) == (
    '<tool_call>\n{"name": "computer_use", "arguments": {"action":'
    ' "left_click", "coordinate": [512, 300]}}\n</tool_call>'
  )


def test_thought_stands_before_the_call():
  text = REL.format_gui_action(
    Action(Kind.WAIT), 100, 100, thought="Action: wait for it."
  )
  assert text == "Action: wait for it.\n" + wrap('{"action": "wait"}')
  assert REL.parse_result(text).thought == "Action: wait for it."


class TestCoordinates:
  def test_relative_are_thousandths(self):
    (action,) = read(
      REL,
      wrap('{"action": "left_click", "coordinate": [500, 250]}'),
      1920,
      1080,
    )
    assert (action.x, action.y) == (960.0, 270.0)

  def test_absolute_are_pixels(self):
    (action,) = read(
      ABS,
      wrap('{"action": "left_click", "coordinate": [500, 250]}'),
      1920,
      1080,
    )
    assert (action.x, action.y) == (500.0, 250.0)

  def test_the_far_edge_stays_inside(self):
    call = use(action="left_click", coordinate=[1000, 999])
    action = REL.to_gui_action(call, 224, 160)
    assert (action.x, action.y) == (223.0, 159.0)

  @pytest.mark.parametrize(
    "parser, coordinate, limit",
    [
      (REL, [1001, 5], "between 0 and 999"),
      (REL, [-1, 5], "between 0 and 999"),
      (ABS, [5, 161], "between 0 and 159"),
    ],
  )
  def test_outside_the_screenshot_is_refused(self, parser, coordinate, limit):
    with pytest.raises(tool_parser.GuiActionError, match=limit):
      parser.to_gui_action(
        use(action="left_click", coordinate=coordinate), 224, 160
      )

  def test_xml_parameters_carry_lists_as_text(self):
    text = (
      "<tool_call><function=computer_use><parameter=action>left_click"
      "</parameter><parameter=coordinate>[512, 300]</parameter></function>"
      "</tool_call>"
    )
    assert read(REL, text) == [Action(Kind.CLICK, x=512, y=300)]

  def test_numeric_text_stays_text_in_xml(self):
    parser = tool_parser.get_tool_parser("computer_use")(style="xml")
    action = Action(Kind.TYPE, text="007")
    assert read(parser, parser.format_gui_action(action, 9, 9)) == [action]

  def test_grid_snaps_to_the_middle_of_a_bin(self):
    parser = tool_parser.get_tool_parser("computer_use")(grid=(4, 2))
    values = set()
    for x in range(0, 224):
      text = parser.format_gui_action(Action(Kind.MOVE, x=x, y=0), 224, 160)
      (action,) = read(parser, text, 224, 160)
      values.add((action.x, action.y))
      assert abs(action.x - x) <= 28.2
    assert values == {(28, 40), (84, 40), (140, 40), (196, 40)}

  @pytest.mark.parametrize("grid", [(0, 4), (3,), (1, -1)])
  def test_bad_grid_is_refused(self, grid):
    with pytest.raises(ValueError, match="grid"):
      tool_parser.get_tool_parser("computer_use")(grid=grid)

  def test_formatting_outside_the_screenshot_is_refused(self):
    with pytest.raises(tool_parser.GuiActionError, match="outside"):
      REL.format_gui_action(Action(Kind.CLICK, x=225, y=0), 224, 160)


REFUSED = [
  ({}, "unknown action"),
  ({"action": "left_clik", "coordinate": [1, 2]}, "mean 'left_click'"),
  ({"action": ["left_click"]}, "unknown action"),
  ({"action": "left_click"}, "needs 'coordinate'"),
  ({"action": "left_click", "coordinate": None}, "needs 'coordinate'"),
  ({"action": "left_click", "coordinate": [1]}, r"must be \[x, y\]"),
  ({"action": "left_click", "coordinate": [1, True]}, "must be a number"),
  ({"action": "left_click", "coordinate": [1, "a"]}, "must be a number"),
  ({"action": "left_click", "coordinate": [1, 10**400]}, "must be a number"),
  ({"action": "left_click", "coordinate": [1, float("nan")]}, "a number"),
  ({"action": "left_click", "coordinate": {"x": 1}}, r"must be \[x, y\]"),
  ({"action": "left_click_drag", "start_coordinate": [1, 2]}, "coordinate"),
  ({"action": "scroll", "coordinate": [1, 2]}, "needs 'pixels'"),
  ({"action": "type"}, "needs 'text'"),
  ({"action": "key"}, "needs 'keys'"),
  ({"action": "key", "keys": []}, "at least one key"),
  ({"action": "key", "keys": ["entre"]}, "did you mean 'enter'"),
  ({"action": "key", "keys": [["a"]]}, "must be a string"),
  ({"action": "key", "keys": 7}, "string or a list"),
  ({"action": "wait", "time": -1}, "time must be >= 0"),
  ({"action": "terminate", "status": "maybe"}, "status must be"),
]


@pytest.mark.parametrize("arguments, reason", REFUSED)
def test_bad_arguments_are_told_to_the_policy(arguments, reason):
  with pytest.raises(tool_parser.GuiActionError, match=reason):
    REL.to_gui_action(trajectory.ToolCall("computer_use", arguments), 100, 100)


def test_another_tool_is_refused():
  with pytest.raises(tool_parser.GuiActionError, match="computer_use"):
    REL.to_gui_action(trajectory.ToolCall("browser", {}), 100, 100)


@pytest.mark.parametrize(
  "action",
  [
    Action(Kind.SWIPE, x=1, y=1, x2=2, y2=2),
    Action(Kind.CLICK, x=1, y=1, button="right", count=2),
    Action(Kind.DRAG, x=1, y=1, x2=2, y2=2, button="right"),
    Action(Kind.SCROLL, dx=1, dy=1),
    Action(Kind.SCREENSHOT),
  ],
)
def test_what_the_grammar_cannot_say_is_refused(action):
  with pytest.raises(tool_parser.GuiActionError):
    REL.format_gui_action(action, 100, 100)


def test_offered_actions_can_be_restricted():
  parser = tool_parser.get_tool_parser("computer_use_compact")(
    actions=("left_click", "type")
  )
  assert "scroll" not in parser.get_tool_prompt()
  with pytest.raises(
    tool_parser.GuiActionError, match="known: left_click, type"
  ):
    parser.to_gui_action(use(action="wait"), 9, 9)
  with pytest.raises(ValueError, match="unknown computer_use action"):
    tool_parser.get_tool_parser("computer_use")(actions=("clik",))


class TestPrompt:
  def test_schema_offers_the_published_actions(self):
    enum = REL.default_tools[0]["function"]["parameters"]["properties"][
      "action"
    ]["enum"]
    assert enum == [
      "key",
      "type",
      "mouse_move",
      "left_click",
      "left_click_drag",
      "right_click",
      "middle_click",
      "double_click",
      "triple_click",
      "scroll",
      "hscroll",
      "wait",
      "answer",
      "terminate",
    ]

  def test_each_grammar_says_what_its_coordinates_are(self):
    assert "0 to 999" in REL.get_tool_prompt()
    assert "pixels from the left edge" in ABS.get_tool_prompt()

  def test_compact_shows_one_short_line(self):
    parser = tool_parser.get_tool_parser("computer_use_compact")()
    prompt = parser.get_tool_prompt()
    assert len(prompt.split()) <= 30
    opening, line, closing = prompt.splitlines()
    assert (opening, closing) == ("<tools>", "</tools>")
    assert line.startswith("computer_use(action: left_click|")
    for action in parser.actions:
      assert action in line
    assert set(parser.actions) <= set(REL.actions)

  def test_compact_with_all_actions_differs_in_the_prompt_only(self):
    assert COMPACT.default_tools == REL.default_tools


class TestKeys:
  @pytest.mark.parametrize(
    "written, keys",
    [
      ("ctrl c", ("ctrl", "c")),
      ("ctrl+c", ("ctrl", "c")),
      ("Ctrl + C", ("ctrl", "c")),
      ("ctrl-c", ("ctrl", "c")),
      (["ctrl", "c"], ("ctrl", "c")),
      (["ctrl+shift", "T"], ("ctrl", "shift", "t")),
      ("Control_L+Page_Down", ("ctrl", "pagedown")),
      ("ctrl++", ("ctrl", "+")),
      ("+", ("+",)),
      ("-", ("-",)),
      (" ", ("space",)),
      ("Return", ("enter",)),
      ("KP_Enter", ("enter",)),
      ("Page Down", ("pagedown",)),
      ("page-up", ("pageup",)),
      ("Next", ("pagedown",)),
      ("ArrowLeft", ("left",)),
      ("esc", ("escape",)),
      ("super", ("meta",)),
      ("cmd+a", ("meta", "a")),
      ("alt F4", ("alt", "f4")),
      (["1"], ("1",)),
      ([1], ("1",)),
      ("ctrl+-", ("ctrl", "-")),
    ],
  )
  def test_dialects(self, written, keys):
    assert keys_lib.normalize_keys(written) == keys

  def test_is_its_own_fixed_point(self):
    for key in sorted(keys_lib.NAMED_KEYS):
      assert keys_lib.normalize_keys(key) == (key,)
      assert keys_lib.normalize_keys(f"ctrl+{key}") == ("ctrl", key)

  @pytest.mark.parametrize("bad", ["", "hello world", "nokey", "+" * 30, [""]])
  def test_text_is_not_keys(self, bad):
    with pytest.raises(tool_parser.GuiActionError):
      keys_lib.normalize_keys(bad)

  @pytest.mark.parametrize("written", ["ctrl-" * 1500 + "a", "a+" * 5000])
  def test_keys_without_end_are_refused(self, written):
    with pytest.raises(tool_parser.GuiActionError, match="at most 128 char"):
      keys_lib.normalize_keys(written)

  @settings(max_examples=200, deadline=None)
  @given(st.text() | st.lists(st.text()))
  def test_anything_gives_keys_or_the_typed_error(self, written):
    try:
      keys = keys_lib.normalize_keys(written)
    except tool_parser.GuiActionError:
      return
    assert keys
    for key in keys:
      assert len(key) == 1 or key in keys_lib.NAMED_KEYS


class TestUiTars:
  @pytest.mark.parametrize(
    "action",
    [
      "click(start_box='<|box_start|>(235,512)<|box_end|>')",
      "click(start_box='(235,512)')",
      "click(point='<point>235 512</point>')",
      "click(start_box='[235, 512, 235, 512]')",
      "click(start_box='<bbox>230 510 240 514</bbox>')",
    ],
  )
  def test_points_in_every_dress(self, action):
    assert read(TARS, f"Thought: there.\nAction: {action}") == [
      Action(Kind.CLICK, x=235, y=512)
    ]

  def test_the_last_action_counts(self):
    text = (
      "Thought: Action: is a word.\nAction: wait()\n"
      "Action: hotkey(key='ctrl c')"
    )
    assert read(TARS, text) == [Action(Kind.KEY, keys=("ctrl", "c"))]

  def test_several_actions(self):
    text = (
      "Action: click(start_box='(1,2)')\n\ntype(content='a)\\n\\nb')\n\nwait()"
    )
    assert read(TARS, text) == [
      Action(Kind.CLICK, x=1, y=2),
      Action(Kind.TYPE, text="a)\n\nb"),
      Action(Kind.WAIT),
    ]

  @pytest.mark.parametrize(
    "written, text",
    [
      (r"type(content='it\'s')", "it's"),
      ("type(content='it's')", "it's"),
      (r'type(content="say \"hi\"\n")', 'say "hi"\n'),
      (r"type(content='a\\b')", r"a\b"),
    ],
  )
  def test_quotes_in_typed_text(self, written, text):
    assert read(TARS, f"Action: {written}") == [Action(Kind.TYPE, text=text)]

  def test_finished_and_call_user(self):
    assert read(TARS, "Action: finished()")[0].success is True
    assert read(TARS, "Action: call_user()")[0].success is False
    assert read(TARS, "Action: finished(content='42')") == [
      Action(Kind.ANSWER, text="42")
    ]

  def test_scroll_down_shows_what_is_below(self):
    (action,) = read(
      TARS, "Action: scroll(start_box='(5,5)', direction='down')"
    )
    assert action.dy > 0 and action.dx == 0

  def test_malformed_actions_are_reported_and_the_others_kept(self):
    result = TARS.parse_result("Action: click(start_box='(1,2)\n\nwait()")
    assert result.errors
    result = TARS.parse_result("Action: ???\n\nwait()")
    assert [c.name for c in result.calls] == ["wait"] and result.errors

  def test_absolute_are_pixels(self):
    (action,) = read(
      TARS_ABS, "Action: click(start_box='(235,512)')", 1920, 1080
    )
    assert (action.x, action.y) == (235, 512)


# --- properties --------------------------------------------------------------

SIZES = st.tuples(st.integers(8, 4000), st.integers(8, 4000))
TYPED = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)


@st.composite
def sized_actions(draw, tars=False):
  width, height = draw(SIZES)
  x = st.floats(0, width - 1)
  y = st.floats(0, height - 1)
  clicks = [("left", 1), ("right", 1), ("middle", 1), ("left", 2)]
  if not tars:
    clicks.append(("left", 3))
  button, count = draw(st.sampled_from(clicks))
  make = draw(
    st.sampled_from(
      [
        lambda: Action(
          Kind.CLICK, x=draw(x), y=draw(y), button=button, count=count
        ),
        lambda: Action(Kind.MOVE, x=draw(x), y=draw(y)),
        lambda: Action(Kind.DRAG, x=draw(x), y=draw(y), x2=draw(x), y2=draw(y)),
        lambda: Action(Kind.SCROLL, x=draw(x), y=draw(y), dy=-120.0),
        lambda: Action(Kind.SCROLL, x=draw(x), y=draw(y), dx=120.0),
        lambda: Action(Kind.TYPE, text=draw(TYPED)),
        lambda: Action(Kind.KEY, keys=("ctrl", draw(st.sampled_from("az+-")))),
        lambda: Action(Kind.TERMINATE, success=draw(st.booleans())),
      ]
    )
  )
  return make(), width, height


def check_inverse(parser, action, width, height, tolerance):
  text = parser.format_gui_action(action, width, height)
  (back,) = read(parser, text, width, height)
  points = {}
  for name, extent in (
    ("x", width),
    ("y", height),
    ("x2", width),
    ("y2", height),
  ):
    expected, got = getattr(action, name), getattr(back, name)
    if expected is not None:
      assert abs(expected - got) <= tolerance(extent)
      assert 0 <= got <= extent - 1
      points[name] = expected
  assert dataclasses.replace(back, **points) == action
  # A canonical text is a fixed point.
  assert parser.format_gui_action(back, width, height) == text


def half_step(extent):
  return extent / 2000 + extent / 1000 + 1e-6


@pytest.mark.parametrize("parser", [REL, COMPACT])
@settings(max_examples=150, deadline=None)
@given(case=sized_actions())
def test_relative_is_inverse_within_a_thousandth(parser, case):
  check_inverse(parser, *case, half_step)


@settings(max_examples=150, deadline=None)
@given(case=sized_actions())
def test_absolute_is_inverse_within_half_a_pixel(case):
  check_inverse(ABS, *case, lambda _: 0.5)


@settings(max_examples=150, deadline=None)
@given(case=sized_actions(tars=True))
def test_ui_tars_is_inverse_within_a_thousandth(case):
  check_inverse(TARS, *case, lambda extent: half_step(extent) + 1)


ARGUMENTS = st.dictionaries(
  st.sampled_from(
    [
      "action",
      "coordinate",
      "start_coordinate",
      "text",
      "keys",
      "pixels",
      "time",
      "status",
      "start_box",
      "end_box",
      "content",
      "key",
      "direction",
    ]
  ),
  st.none()
  | st.booleans()
  | st.integers()
  | st.floats()
  | st.text()
  | st.lists(st.integers() | st.floats() | st.text(), max_size=4)
  | st.sampled_from(["left_click", "scroll", "key", "down", "(1,2)", "wait"]),
)


@pytest.mark.parametrize("parser", [REL, ABS, TARS])
@settings(max_examples=200, deadline=None)
@given(
  name=st.sampled_from(
    ["computer_use", "click", "drag", "scroll", "hotkey", "type", "x"]
  ),
  arguments=ARGUMENTS,
)
def test_any_arguments_give_an_action_inside_or_the_typed_error(
  parser, name, arguments
):
  try:
    action = parser.to_gui_action(
      trajectory.ToolCall(name, arguments), 224, 160
    )
  except tool_parser.GuiActionError:
    return
  for value, extent in ((action.x, 224), (action.y, 160)):
    assert value is None or 0 <= value <= extent - 1
