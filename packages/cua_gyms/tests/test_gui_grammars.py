"""GUI grammars of published models: outputs as they write them, both ways."""

import dataclasses
import json

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest
from tunix.rl.multi_turn.core import gui_action
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.parser.tool_parser import gui_table

Action = gui_action.GuiAction
Kind = gui_action.GuiActionKind
GUI = [
  name
  for name in tool_parser.tool_parser_names()
  if issubclass(tool_parser.get_tool_parser(name), tool_parser.GuiActionParser)
]


def parser_of(name):
  return tool_parser.make_tool_parser(name)


def read(name, text, width=1000, height=1000):
  return parser_of(name).parse_gui_actions(text, width, height)


def tagged(arguments, tool="mobile_use"):
  body = json.dumps({"name": tool, "arguments": arguments})
  return f"<tool_call>\n{body}\n</tool_call>"


def fenced(code):
  return f"Thought:\nLook.\n\nAction:\nDo it.\n\n```python\n{code}\n```"


CLICK = Action(Kind.CLICK, x=100, y=200)

# grammar, a model's text, the actions on a screen of 1000 x 1000.
EXAMPLES = [
    ("mobile_use", tagged({"action": "click", "coordinate": [100, 200]}),
     [CLICK]),
    ("mobile_use",
     "Action: \"Tap it.\"\n" + tagged({
         "action": "swipe", "coordinate": [500, 800],
         "coordinate2": [500, 200]}),
     [Action(Kind.SWIPE, x=500, y=800, x2=500, y2=200)]),
    ("mobile_use", tagged({"action": "system_button", "button": "Back"}),
     [Action(Kind.SYSTEM_BUTTON, text="back")]),
    ("mobile_use", tagged({"action": "key", "text": "KEYCODE_ENTER"}),
     [Action(Kind.SYSTEM_BUTTON, text="enter")]),
    ("mobile_use_absolute",
     tagged({"action": "long_press", "coordinate": [1, 2], "time": 2}),
     [Action(Kind.LONG_PRESS, x=1, y=2, duration=2)]),
    ("mobile_use", tagged({"action": "open", "text": "Clock"}),
     [Action(Kind.OPEN_APP, text="Clock")]),
    ("mai_ui",
     "<thinking>\nI tap it.\n</thinking>\n"
     + tagged({"action": "click", "coordinate": [999, 0]}),
     [Action(Kind.CLICK, x=999, y=0)]),
    ("mai_ui",
     "I tap it.\n</think>\n"
     + tagged({"action": "click", "coordinate": [0, 0, 999, 999]}),
     [Action(Kind.CLICK, x=500, y=500)]),
    ("mai_ui", tagged({"action": "terminate", "status": "fail"}),
     [Action(Kind.TERMINATE, success=False)]),
    ("mai_ui",
     tagged({"action": "drag", "start_coordinate": [0, 0],
             "end_coordinate": [999, 999]}),
     [Action(Kind.DRAG, x=0, y=0, x2=999, y2=999)]),
    # The model card's expected result.
    ("opencua", "```python\npyautogui.click(x=100, y=200)\n```", [CLICK]),
    ("opencua", fenced("pyautogui.click(100, 200)"), [CLICK]),
    ("opencua_relative", fenced("pyautogui.click(x=0.1, y=0.2)"), [CLICK]),
    ("opencua", fenced("import pyautogui\npyautogui.moveTo(100, 200)\n"
                       "pyautogui.click()"),
     [Action(Kind.MOVE, x=100, y=200), CLICK]),
    ("opencua", fenced("pyautogui.moveTo(1, 2)\npyautogui.dragTo(3, 4,"
                       " duration=0.5, button='left')"),
     [Action(Kind.DRAG, x=1, y=2, x2=3, y2=4)]),
    ("opencua", fenced("pyautogui.keyDown('ctrl')\n"
                       "pyautogui.click(x=100, y=200)\n"
                       "pyautogui.keyUp('ctrl')"),
     [dataclasses.replace(CLICK, keys=("ctrl",))]),
    ("opencua", fenced("pyautogui.press('tab', presses=2)"),
     [Action(Kind.KEY, keys=("tab",))] * 2),
    ("opencua", fenced("pyautogui.hotkey('ctrl', 'c')"),
     [Action(Kind.KEY, keys=("ctrl", "c"))]),
    ("opencua", fenced("pyautogui.hotkey(['ctrl', 'c'])"),
     [Action(Kind.KEY, keys=("ctrl", "c"))]),
    ("opencua", fenced("pyautogui.scroll(-2)"),
     [Action(Kind.SCROLL, dy=2 * gui_table.NOTCH_PX)]),
    ("opencua", fenced("pyautogui.write(message='it\\'s')"),
     [Action(Kind.TYPE, text="it's")]),
    ("opencua", "```code\ncomputer.terminate(status='success')\n```",
     [Action(Kind.TERMINATE, success=True)]),
    ("opencua", "```code\ncomputer.wait()\n```", [Action(Kind.WAIT)]),
    ("opencua", "```code\ncomputer.triple_click(x=100, y=200)\n```",
     [dataclasses.replace(CLICK, count=3)]),
    ("openai_computer",
     '{"type": "click", "button": "left", "x": 100, "y": 200}', [CLICK]),
    ("openai_computer",
     '{"id": "cu_1", "type": "computer_call", "call_id": "c", "action":'
     ' {"type": "keypress", "keys": ["CTRL", "C"]}, "status": "completed"}',
     [Action(Kind.KEY, keys=("ctrl", "c"))]),
    ("openai_computer",
     '{"type": "computer_call", "actions": [{"type": "double_click", "x": 1,'
     ' "y": 2}, {"type": "scroll", "x": 5, "y": 6, "scroll_x": 0,'
     ' "scroll_y": 300}]}',
     [Action(Kind.CLICK, x=1, y=2, count=2),
      Action(Kind.SCROLL, x=5, y=6, dy=300)]),
    ("openai_computer",
     '{"type": "drag", "path": [{"x": 1, "y": 2}, {"x": 9, "y": 9},'
     ' {"x": 3, "y": 4}]}', [Action(Kind.DRAG, x=1, y=2, x2=3, y2=4)]),
    ("openai_computer",
     '{"type": "click", "button": "wheel", "x": 100, "y": 200}',
     [dataclasses.replace(CLICK, button="middle")]),
    ("anthropic_computer",
     '{"type": "tool_use", "id": "toolu_1", "name": "computer", "input":'
     ' {"action": "left_click", "coordinate": [100, 200]}}', [CLICK]),
    ("anthropic_computer",
     '{"type": "tool_use", "name": "computer", "input": {"action": "scroll",'
     ' "coordinate": [5, 6], "scroll_direction": "down", "scroll_amount": 3}}',
     [Action(Kind.SCROLL, x=5, y=6, dy=3 * gui_table.NOTCH_PX)]),
    ("anthropic_computer",
     '{"type": "tool_use", "name": "computer", "input": {"action":'
     ' "hold_key", "text": "shift", "duration": 2}}',
     [Action(Kind.KEY, keys=("shift",), duration=2)]),
    ("gemini_computer",
     '{"functionCall": {"name": "click_at", "args": {"x": 100, "y": 200}}}',
     [CLICK]),
    ("gemini_computer",
     '{"function_call": {"name": "type_text_at", "args": {"x": 100, "y": 200,'
     ' "text": "cats"}}}',
     [CLICK, Action(Kind.KEY, keys=("ctrl", "a")),
      Action(Kind.KEY, keys=("delete",)), Action(Kind.TYPE, text="cats"),
      Action(Kind.KEY, keys=("enter",))]),
    ("gemini_computer",
     '{"name": "type_text_at", "args": {"x": 100, "y": 200, "text": "cats",'
     ' "press_enter": false, "clear_before_typing": false}}',
     [CLICK, Action(Kind.TYPE, text="cats")]),
    ("gemini_computer",
     '{"name": "scroll_at", "args": {"x": 5, "y": 6, "direction": "down",'
     ' "magnitude": 400}}', [Action(Kind.SCROLL, x=5, y=6, dy=400)]),
    ("gemini_computer", '{"name": "key_combination", "args": {"keys":'
     ' "control+a"}}', [Action(Kind.KEY, keys=("ctrl", "a"))]),
    ("glm_v",
     "I drag it.\nAction: <|begin_of_box|>left_drag(start_box='[100, 100]',"
     " end_box='[300, 300]')<|end_of_box|>\nMemory:\n[]",
     [Action(Kind.DRAG, x=100, y=100, x2=300, y2=300)]),
    ("glm_v", "left_click(start_box='[100,200]', element_info='the button')",
     [CLICK]),
    ("glm_v", "scroll(start_box='[5,6]', direction='up', step=2)",
     [Action(Kind.SCROLL, x=5, y=6, dy=-2 * gui_table.NOTCH_PX)]),
    ("glm_v", "type(content='it\\'s')\nMemory:\n[]",
     [Action(Kind.TYPE, text="it's")]),
    ("glm_v", "DONE()", [Action(Kind.TERMINATE, success=True)]),
    ("glm_v_mobile",
     'Memory: none\nReason: tap.\nAction: {"action_type": "click", "box_2d":'
     " [[50, 150, 150, 250]]}", [CLICK]),
    ("glm_v_mobile",
     'Action: {"action_type": "input_text", "text": "hi", "box_2d":'
     ' [[50, 150, 150, 250]], "override": true}',
     [CLICK, Action(Kind.KEY, keys=("ctrl", "a")),
      Action(Kind.TYPE, text="hi")]),
    ("android_world",
     'Reason: tap.\nAction: {"action_type": "click", "x": 100, "y": 200}',
     [CLICK]),
    ("android_world", '{"action_type": "scroll", "direction": "down"}',
     [Action(Kind.SCROLL, dy=gui_table.NOTCH_PX)]),
    ("android_world",
     '{"action_type": "status", "goal_status": "infeasible"}',
     [Action(Kind.TERMINATE, success=False)]),
    # The examples of BrowserGym's own documentation.
    ("browsergym", "mouse_click(56, 712.56, 'right')",
     [Action(Kind.CLICK, x=56, y=712.56, button="right")]),
    ("browsergym", "```\nmouse_dblclick(5, 236)\n```",
     [Action(Kind.CLICK, x=5, y=236, count=2)]),
    ("browsergym", "mouse_drag_and_drop(10.7, 325, 235.6, 24.54)",
     [Action(Kind.DRAG, x=10.7, y=325, x2=235.6, y2=24.54)]),
    ("browsergym", "keyboard_press('Control+a')",
     [Action(Kind.KEY, keys=("ctrl", "a"))]),
    ("browsergym", "send_msg_to_user('Based on the results')",
     [Action(Kind.ANSWER, text="Based on the results")]),
    ("browsergym", "noop(500)", [Action(Kind.WAIT, duration=0.5)]),
    ("ui_tars_mobile",
     "Thought: t\nAction: long_press(point='<point>1 2</point>')",
     [Action(Kind.LONG_PRESS, x=1, y=2)]),
]  # fmt: skip


def near(action, other, tolerance=1.01):
  """Equal within a step of the grammar's coordinates."""
  for name in ("x", "y", "x2", "y2"):
    a, b = getattr(action, name), getattr(other, name)
    if (a is None) != (b is None) or a is not None and abs(a - b) > tolerance:
      return False
  places = {name: getattr(other, name) for name in ("x", "y", "x2", "y2")}
  return dataclasses.replace(action, **places) == other


@pytest.mark.parametrize("name, text, actions", EXAMPLES)
def test_what_models_write(name, text, actions):
  result = read(name, text)
  assert len(result) == len(actions)
  assert all(map(near, result, actions)), result


BY_ID = [
    ("click('a51')", [Action(Kind.CLICK, element="a51")]),
    ("click(12, button='right')",
     [Action(Kind.CLICK, element="12", button="right")]),
    ("click('12', 'left', ['Shift'])",
     [Action(Kind.CLICK, element="12", keys=("shift",))]),
    ("dblclick('12')", [Action(Kind.CLICK, element="12", count=2)]),
    ("hover('b8')", [Action(Kind.MOVE, element="b8")]),
    ("fill('237', 'example value')",
     [Action(Kind.FILL, element="237", text="example value")]),
    ("clear('996')", [Action(Kind.FILL, element="996", text="")]),
    ("press('88', 'Control+a')",
     [Action(Kind.FOCUS, element="88"), Action(Kind.KEY, keys=("ctrl", "a"))]),
    ("focus('b455')", [Action(Kind.FOCUS, element="b455")]),
    ("check('55')", [Action(Kind.FILL, element="55", text="true")]),
    ("uncheck('55')", [Action(Kind.FILL, element="55", text="false")]),
    ("select_option('c48', ['red', 'green'])",
     [Action(Kind.FILL, element="c48", text="red\ngreen")]),
    ("select_option('48', 'blue')",
     [Action(Kind.FILL, element="48", text="blue")]),
    ("drag_and_drop('56', '498')",
     [Action(Kind.DRAG, element="56", element2="498")]),
]  # fmt: skip


class TestElements:
  """BrowserGym's actions on elements of a tree, by its own examples."""

  @pytest.mark.parametrize("text, actions", BY_ID)
  def test_what_models_write(self, text, actions):
    parser = parser_of("browsergym").seeing("axtree")
    assert parser.parse_gui_actions(text, 10, 10) == actions

  @pytest.mark.parametrize("text, actions", BY_ID)
  def test_what_is_written_is_read_back(self, text, actions):
    parser = parser_of("browsergym").seeing("axtree")
    for action in actions:
      if action.kind is Kind.CLICK and action.keys:
        continue  # Written by none: no oracle holds a key.
      text = parser.format_gui_action(action, 10, 10)
      assert parser.parse_gui_actions(text, 10, 10) == [action]
      assert text.split("(")[0] in parser.get_tool_prompt()

  def test_the_prompt_has_the_actions_of_what_is_seen(self):
    for observation in ("screenshot", "axtree", "both"):
      prompt = parser_of("browsergym").seeing(observation).get_tool_prompt()
      assert ("\nclick(bid" in prompt) == (observation != "screenshot")
      assert ("mouse_click(x, y" in prompt) == (observation != "axtree")
      assert ("accessibility tree" in prompt) == (observation != "screenshot")
      assert prompt.count("noop(") == 1

  @pytest.mark.parametrize(
    "text, words",
    [
      ("click()", "needs 'bid'"),
      ("click('')", "needs 'bid'"),
      ("fill('3')", "needs 'value'"),
      ("select_option('3')", "'options'"),
      ("click('3', button='top')", "button"),
      ("press('3', 'Kontrol')", "Kontrol"),
    ],
  )
  def test_wrong_arguments_are_told_to_the_policy(self, text, words):
    parser = parser_of("browsergym").seeing("axtree")
    with pytest.raises(tool_parser.ToolParseError, match=words):
      parser.parse_gui_actions(text, 10, 10)

  def test_a_shared_parser_is_not_changed(self):
    parser = parser_of("browsergym")
    assert parser.seeing("axtree") is not parser
    assert parser.seeing("screenshot") is parser
    assert parser.observation == "screenshot"


@pytest.mark.parametrize("name", GUI)
def test_every_grammar_has_an_example_or_a_test_of_its_own(name):
  shown = {example[0] for example in EXAMPLES}
  elsewhere = {
    "computer_use",
    "computer_use_absolute",
    "computer_use_compact",
    "ui_tars",
    "ui_tars_absolute",
  }
  assert name in shown | elsewhere


@pytest.mark.parametrize("name", GUI)
def test_prompt_states_actions_and_size(name):
  parser = parser_of(name)
  prompt = parser.get_tool_prompt()
  assert len(prompt) > 100 and parser.default_tools
  clicks = ("left_click", "click", "mouse_click", "click_at")
  assert any(word in prompt for word in clicks)
  parser.screen = (1234, 777)
  if parser.coordinates == "absolute" and name not in (
    "ui_tars_absolute",
    "ui_tars_mobile",
    "opencua",
  ):
    assert "1234x777" in parser.get_tool_prompt()
    assert "{screen}" not in prompt + parser.get_tool_prompt()


def test_other_tools_go_where_a_grammar_has_a_place_for_them():
  schema = [{"type": "function", "function": {"name": "search"}}]
  text = parser_of("mai_ui").get_tool_prompt(schema)
  assert "## MCP Tools" in text and '"name": "search"' in text
  with pytest.raises(ValueError, match="has its own actions only"):
    parser_of("opencua").get_tool_prompt(schema)


class TestErrors:
  @pytest.mark.parametrize(
    "name, text, at",
    [
      ("mobile_use", 'Tap.\n<tool_call>\n{"name": nope}\n</tool_call>', "nope"),
      ("openai_computer", 'Now {"type": "click", "x": oops}', "oops"),
      ("gemini", 'Now {"functionCall": {"name": ?}}', "?}}"),
      ("browsergym", "Then mouse_click(1, 2 3)", "2 3"),
      ("browsergym", "Then mouse_click('a", "'a"),
      ("opencua", "```python\nx = 1\n```", "x = 1"),
      (
        "opencua",
        "```python\npyautogui.click(1, 2)\nos.remove('x')\n```",
        "os.",
      ),
      ("opencua", "é\n```python\npyautogui.write('é'); foo(\n```", "(\n"),
      ("mistral", "[TOOL_CALLS]nothing", "nothing"),
      ("deepseek", "<｜tool▁call▁begin｜>f{", "{"),
      ("ui_tars", "Thought: t\nAction: click(start_box='(1,2)", "'(1"),
      ("llama_pythonic", "So [f(1)]", "f(1"),
      ("gemma", "```tool_code\nf(a=g())\n```", "f(a"),
    ],
  )
  def test_position_is_where_the_text_is_wrong(self, name, text, at):
    (failure,) = parser_of(name).parse_result(text).failures
    assert failure.position == text.index(at)
    with pytest.raises(tool_parser.ToolParseError) as caught:
      parser_of(name).parse(text, strict=True)
    assert caught.value.position == failure.position

  def test_an_action_that_is_none_has_its_call_s_position(self):
    text = "I tap.\n" + tagged({"action": "click", "coordinate": [1, 5000]})
    with pytest.raises(tool_parser.GuiActionError, match="between 0") as caught:
      read("mobile_use", text)
    assert caught.value.position == text.index("<tool_call>")

  @pytest.mark.parametrize(
    "code",
    [
      "__import__('os').system('true')",
      "pyautogui.click(x=open('/etc/passwd').read(), y=1)",
      "eval('1')",
      "pyautogui.write(f'{1}')",
      "pyautogui.click(*[1, 2])",
      "[pyautogui.click(1, 2) for _ in range(9)]",
      "while True: pyautogui.click(1, 2)",
      "def f(): pass",
      "x = 1",
    ],
  )
  def test_code_is_never_run(self, code):
    with pytest.raises(tool_parser.ToolParseError):
      read("opencua", fenced(code))

  @pytest.mark.parametrize(
      "name, text, reason",
      [
          ("android_world", '{"action_type": "click", "index": 4}', "no index"),
          ("browsergym", "click('a51')", "not available"),
          ("anthropic_computer",
           '{"name": "computer", "input": {"action": "left_mouse_down"}}',
           "left_click_drag"),
          ("openai_computer", '{"type": "drag", "path": [{"x": 1}]}',
           "two points"),
          ("openai_computer",
           '{"type": "move", "x": 1, "y": 2, "keys": ["CTRL"]}', "hold keys"),
          ("opencua", fenced("pyautogui.click()"), "needs 'x'"),
          ("opencua", fenced("pyautogui.press('a', presses=900)"), "1 to 20"),
          ("gemini_computer", '{"name": "click_at", "args": {"x": 2000,'
           ' "y": 1}}', "between 0 and 999"),
          ("mai_ui", tagged({"action": "swipe", "direction": "upp"}), "up"),
          ("mai_ui", tagged({}, tool="search"), "unknown tool"),
      ],
  )  # fmt: skip
  def test_what_cannot_be_done_is_told_to_the_policy(self, name, text, reason):
    with pytest.raises(tool_parser.ToolParseError, match=reason):
      read(name, text)

  def test_a_call_of_several_actions_is_not_one(self):
    parser = parser_of("gemini_computer")
    call = trajectory.ToolCall("navigate", {"url": "example.org"})
    assert len(parser.to_gui_actions(call, 10, 10)) == 3
    with pytest.raises(tool_parser.GuiActionError, match="3 actions"):
      parser.to_gui_action(call, 10, 10)


# --- properties ---------------------------------------------------------------

SIZES = st.tuples(st.integers(64, 4000), st.integers(64, 4000))
TYPED = st.text(st.characters(exclude_categories=("Cs",)), max_size=16)
NAMED = TYPED.filter(str.strip)


@st.composite
def cases(draw):
  """Any action that some grammar has, on a screen."""
  width, height = draw(SIZES)
  x = st.floats(0, width - 1)
  y = st.floats(0, height - 1)
  notch = gui_table.NOTCH_PX
  steps = st.integers(1, 4).map(lambda n: n * notch)
  place = {"x": draw(x), "y": draw(y)}
  end = {"x2": draw(x), "y2": draw(y)}
  action = draw(
    st.sampled_from(
      [
        lambda: Action(
          Kind.CLICK,
          **place,
          button=draw(st.sampled_from(["left", "right", "middle"])),
          count=draw(st.integers(1, 3)),
          keys=draw(st.sampled_from([(), ("ctrl",), ("ctrl", "shift")])),
        ),
        lambda: Action(Kind.MOVE, **place),
        lambda: Action(Kind.DRAG, **place, **end),
        lambda: Action(Kind.SCROLL, **place, dy=-draw(steps)),
        lambda: Action(Kind.SCROLL, **place, dx=draw(steps)),
        lambda: Action(Kind.TYPE, text=draw(TYPED)),
        lambda: Action(Kind.KEY, keys=("ctrl", draw(st.sampled_from("az+-")))),
        lambda: Action(Kind.WAIT),
        lambda: Action(Kind.LONG_PRESS, **place),
        lambda: Action(Kind.SWIPE, **place, **end),
        lambda: Action(
          Kind.SYSTEM_BUTTON,
          text=draw(st.sampled_from(["back", "home", "menu", "enter"])),
        ),
        lambda: Action(Kind.OPEN_APP, text=draw(NAMED)),
        lambda: Action(Kind.ANSWER, text=draw(NAMED)),
        lambda: Action(Kind.TERMINATE, success=draw(st.booleans())),
        lambda: Action(Kind.SCREENSHOT),
      ]
    )
  )()
  return action, width, height


def step_of(name, extent):
  """Pixels that the grammar's rounding may move a point."""
  space = parser_of(name).space
  if space.scale is None:
    return 0.51 if not space.decimals else 0.01
  return 1.51 * extent / space.scale * 10**-space.decimals + 1e-6


@pytest.mark.parametrize("name", GUI)
def test_a_swipe_of_no_length_has_no_direction(name):
  action = Action(Kind.SWIPE, x=0.0, y=0.0, x2=0.0, y2=0.5)
  try:
    text = parser_of(name).format_gui_action(action, 64, 64, "")
  except tool_parser.GuiActionError:
    return
  (back,) = parser_of(name).parse_gui_actions(text, 64, 64)
  assert abs(back.y2 - 0.5) <= step_of(name, 64) + 0.5  # With both its ends.
  assert "direction" not in text


@pytest.mark.parametrize("name", GUI)
@settings(max_examples=120)
@given(case=cases())
def test_writing_and_reading_are_inverse(name, case):
  action, width, height = case
  parser = parser_of(name)
  try:
    text = parser.format_gui_action(action, width, height, "So be it.")
  except tool_parser.GuiActionError:
    return  # The grammar has no word for it.
  assert parser.parse_result(text).thought == "So be it."
  (back,) = parser.parse_gui_actions(text, width, height)
  for field, extent in (
    ("x", width),
    ("y", height),
    ("x2", width),
    ("y2", height),
  ):
    expected, got = getattr(action, field), getattr(back, field)
    assert (expected is None) == (got is None)
    if expected is not None:
      assert abs(expected - got) <= step_of(name, extent)
      assert 0 <= got <= extent - 1
  same = {f: getattr(action, f) for f in ("x", "y", "x2", "y2")}
  if action.kind is Kind.SCROLL:
    # Some grammars have directions only, or steps of their own.
    assert back.dx * action.dx >= 0 and back.dy * action.dy >= 0
    assert bool(back.dx) == bool(action.dx)
    same |= {"dx": action.dx, "dy": action.dy}
  assert dataclasses.replace(back, **same) == action
  # A canonical text is a fixed point.
  assert parser.format_gui_action(back, width, height, "So be it.") == text


def test_a_grid_snaps_every_grammar_s_points():
  for name in GUI:
    parser = parser_of(name)
    texts = {
      parser.format_gui_action(
        Action(Kind.CLICK, x=x, y=10), 200, 100, grid=(4, 2)
      )
      for x in range(0, 50, 7)
    }
    assert len(texts) == 1, name
