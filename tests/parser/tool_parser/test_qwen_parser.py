"""Qwen tool calls: what counts as a call, and that nothing else can happen."""

import json

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest
from tunix.rl.multi_turn.agents import ToolAgent
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser import tool_parser

ToolCall = trajectory.ToolCall
QWEN = tool_parser.get_tool_parser("qwen")()
XML = tool_parser.get_tool_parser("qwen_xml")()
WEATHER = {
  "type": "function",
  "function": {
    "name": "get_weather",
    "description": "Weather of a {city}.",
    "parameters": {
      "type": "object",
      "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
      "required": ["city"],
    },
  },
}


def call_text(body):
  return f"<tool_call>\n{body}\n</tool_call>"


def same(calls, expected):
  return [(c.name, c.arguments) for c in calls] == expected


ONE = call_text('{"name": "f", "arguments": {"a": 1}}')


class TestCalls:
  def test_no_call(self):
    assert QWEN.parse("just text") == []

  def test_one_call(self):
    assert same(QWEN.parse(ONE), [("f", {"a": 1})])

  def test_many_calls_in_order_with_unique_ids(self):
    calls = QWEN.parse(f"first {ONE} then {ONE}{ONE}")
    assert same(calls, [("f", {"a": 1})] * 3)
    assert len({c.call_id for c in calls}) == 3

  def test_nested_braces(self):
    text = call_text('{"name": "f", "arguments": {"a": {"b": {"c": "}}"}}}}')
    assert same(QWEN.parse(text), [("f", {"a": {"b": {"c": "}}"}}})])

  def test_tags_inside_strings_mean_nothing(self):
    arguments = {"text": "</tool_call><tool_call></think><think>"}
    text = QWEN.format([ToolCall("type", arguments)])
    assert same(QWEN.parse(text, strict=True), [("type", arguments)])

  def test_arguments_as_a_json_string(self):
    text = call_text(r'{"name": "f", "arguments": "{\"a\": 1}"}')
    assert same(QWEN.parse(text), [("f", {"a": 1})])

  def test_missing_arguments_are_none(self):
    assert same(QWEN.parse(call_text('{"name": "f"}')), [("f", {})])

  def test_complete_json_counts_without_its_closing_tag(self):
    text = '<tool_call>\n{"name": "f", "arguments": {}}'
    assert same(QWEN.parse(text), [("f", {})])


class TestMalformed:
  @pytest.mark.parametrize(
    "body, reason",
    [
      ("{'name': 'f'}", "bad JSON"),
      ('{"name": "f", "arguments": {"a": 1}', "bad JSON"),
      ('{"name": "f", "arguments": {"a": NaN}}', "NaN is not JSON"),
      ('{"name": "f", "arguments": {"a": 1e999}}', "out of range"),
      ('{"name": "f", "arguments": {"a": "\\ud800"}}', "bad JSON"),
      ('{"name": "f", "arguments": [1]}', "must be an object"),
      ('{"name": 3, "arguments": {}}', '"name" string'),
      ('{"name": "", "arguments": {}}', '"name" string'),
      ("[1, 2]", "must hold a JSON object"),
      ("", "must hold a JSON object"),
      ('{"name": "f"} trailing', "expected </tool_call>"),
      ("<function=f><parameter=a>1</function>", "never closed"),
      ("<function=f>stray</function>", "expected </function>"),
      ('{"a":' * 5000, "bad JSON"),
    ],
  )
  def test_is_reported_and_the_others_are_kept(self, body, reason):
    result = QWEN.parse_result(call_text(body) + ONE)
    assert same(result.calls, [("f", {"a": 1})])
    assert len(result.errors) == 1 and reason in result.errors[0]

  def test_strict_raises_the_typed_error(self):
    with pytest.raises(tool_parser.ToolParseError, match="bad JSON"):
      QWEN.parse(call_text("{") + ONE, strict=True)

  def test_unclosed_json_is_no_call(self):
    result = QWEN.parse_result('<tool_call>\n{"name": "f", "argum')
    assert not result.calls and result.errors

  @pytest.mark.parametrize("response", [None, 3, b"text", ["text"]])
  def test_what_is_not_text_is_refused(self, response):
    with pytest.raises(tool_parser.ToolParseError, match="must be a str"):
      QWEN.parse(response)


class TestReasoning:
  def test_thought_is_what_stands_before_the_call(self):
    result = QWEN.parse_result(f"Action: press it.\n{ONE}")
    assert result.thought == "Action: press it." and len(result.calls) == 1

  def test_think_block(self):
    result = QWEN.parse_result(f"<think>\nhm\n</think>\n\nok\n{ONE}")
    assert result.thought == "hm\nok" and len(result.calls) == 1

  def test_calls_inside_reasoning_do_not_count(self):
    text = f"<think>maybe {ONE}</think>" + call_text('{"name": "g"}')
    assert same(QWEN.parse(text), [("g", {})])

  def test_reasoning_opened_by_the_template(self):
    text = f"maybe {ONE} or not </think>" + call_text('{"name": "g"}')
    result = QWEN.parse_result(text)
    assert same(result.calls, [("g", {})])
    assert result.thought.startswith("maybe")

  def test_unclosed_reasoning_holds_no_call(self):
    result = QWEN.parse_result(f"<think>maybe {ONE}")
    assert result.calls == () and result.errors == ("<think> is never closed",)

  def test_answer_is_the_text_without_reasoning(self):
    result = QWEN.parse_result("<think>6 + 2</think>\n\n8")
    assert (result.thought, result.answer) == ("6 + 2", "8")


class TestXml:
  def test_parameters_are_read_by_either_style(self):
    text = (
      "<tool_call>\n<function=get_weather>\n<parameter=city>\nBrno\n"
      "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n"
      "</tool_call>"
    )
    for parser in (QWEN, XML):
      assert same(
        parser.parse(text, strict=True),
        [("get_weather", {"city": "Brno", "days": "3"})],
      )
      assert same(
        parser.for_tools([WEATHER]).parse(text, strict=True),
        [("get_weather", {"city": "Brno", "days": 3})],
      )

  @pytest.mark.parametrize("text", ("12", "null", "true", "[1]", '{"a": 1}'))
  def test_text_stays_text_unless_the_schema_says_otherwise(self, text):
    call = [ToolCall("get_weather", {"city": text, "note": text})]
    for parser in (
      XML,
      XML.for_tools([WEATHER]),
      tool_parser.get_tool_parser("qwen_xml")(tools_schema=[WEATHER]),
    ):
      assert parser.parse(parser.format(call))[0].arguments == {
        "city": text,
        "note": text,
      }

  @pytest.mark.parametrize(
    "schema,text,value",
    [
      ({"type": "integer"}, "12", 12),
      ({"type": "integer"}, "-3", -3),
      ({"type": "integer"}, "1.5", "1.5"),
      ({"type": "integer"}, "null", "null"),
      ({"type": "integer"}, "twelve", "twelve"),
      ({"type": "integer"}, "9" * 5000, "9" * 5000),
      ({"type": "number"}, "12", 12),
      ({"type": "number"}, "1.5e1", 15.0),
      ({"type": "number"}, "1e999", "1e999"),
      ({"type": "number"}, "nan", "nan"),
      ({"type": "boolean"}, "true", True),
      ({"type": "boolean"}, "False", False),
      ({"type": "boolean"}, "yes", "yes"),
      ({"type": "array"}, "[1, 2]", [1, 2]),
      ({"type": "array"}, '{"a": 1}', '{"a": 1}'),
      ({"type": "object"}, '{"a": null}', {"a": None}),
      ({"type": "object"}, '{"a": ', '{"a": '),
      ({"type": ["string", "null"]}, "null", None),
      ({"type": ["string", "null"]}, "12", "12"),
      ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
      ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "4", 4),
      ({"enum": [1, 2]}, "2", 2),
      ({"enum": ["1", "2"]}, "2", "2"),
      ({"const": 5}, "5", 5),
      ({"$ref": "#/$defs/Size"}, '{"w": 1}', {"w": 1}),
      ({"$ref": "#/$defs/Loop"}, "4", "4"),
      ({"$ref": "#/nowhere"}, "4", "4"),
      ({"description": "no type"}, "4", "4"),
      ({"type": "string", "enum": None}, "4", "4"),
      ({"type": ["integer", {"type": "null"}]}, "4", 4),
      ({"type": None, "anyOf": None, "enum": [3]}, "4", 4),
    ],
  )
  def test_values_have_the_declared_types(self, schema, text, value):
    tool = {"type": "function", "function": {"name": "f", "parameters": {
        "type": "object",
        "properties": {"x": schema},
        "$defs": {
            "Size": {"type": "object"},
            "Loop": {"$ref": "#/$defs/Loop"},
        },
    }}}  # fmt: skip
    block = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>"
    block += "\n</function>\n</tool_call>"
    (call,) = XML.for_tools([tool]).parse(block, strict=True)
    read = call.arguments["x"]
    assert read == value and type(read) is type(value)

  def test_an_agents_tools_declare_the_types(self):
    agent = ToolAgent("", "qwen_xml", tools_schema=[WEATHER])
    text = XML.format([ToolCall("get_weather", {"city": "12", "days": 3})])
    agent.reset()
    agent.update_from_env("go", 0.0, False, {})
    (call,) = agent.update_from_model(text).action
    assert call.arguments == {"city": "12", "days": 3}

  def test_multi_line_values_keep_their_lines(self):
    value = "\n a\n\nb \n"
    text = XML.format([ToolCall("f", {"text": value})])
    assert XML.parse(text)[0].arguments == {"text": value}

  def test_what_the_style_cannot_carry_is_refused(self):
    with pytest.raises(tool_parser.ToolParseError, match="cannot carry"):
      XML.format([ToolCall("f", {"text": "</parameter>"})])


class TestPrompt:
  @pytest.mark.parametrize("parser", [QWEN, XML])
  def test_markup_stays_in_the_prompt(self, parser):
    prompt = parser.get_tool_prompt([WEATHER])
    for tag in ("<tools>", "</tools>", "<tool_call>", "</tool_call>"):
      assert tag in prompt
    assert json.dumps(WEATHER) in prompt

  def test_schema_given_as_text_is_shown_as_it_is(self):
    assert "MY {schema}" in QWEN.get_tool_prompt("MY {schema}")

  def test_compact_shows_signatures(self):
    parser = tool_parser.get_tool_parser("qwen")(compact=True)
    prompt = parser.get_tool_prompt([WEATHER])
    assert "get_weather(city: string, days?: integer)" in prompt
    assert "<tool_call>" in prompt and "description" not in prompt

  def test_schema_without_a_name_is_refused(self):
    with pytest.raises(ValueError, match="function name"):
      QWEN.get_tool_prompt([{"type": "function", "function": {}}])


def test_tool_outputs_are_found_by_position():
  text = "<tool_response>\n1\n</tool_response> <tool_response>2</tool_response>"
  assert QWEN.parse_tool_outputs(text) == {"0": "1", "1": "2"}


class TestRegistry:
  def test_class_is_found_by_name(self):
    assert issubclass(
      tool_parser.get_tool_parser("qwen"), tool_parser.ToolParser
    )

  def test_every_name_can_be_built(self):
    for name in tool_parser.tool_parser_names():
      assert tool_parser.make_tool_parser(name).parse("nothing") == []

  def test_unknown_name_names_the_nearest(self):
    with pytest.raises(ValueError, match="did you mean 'qwen'"):
      tool_parser.get_tool_parser("qwem")

  def test_can_be_extended_once(self):
    class Mine(type(QWEN)):
      pass

    tool_parser.register_tool_parser("mine", Mine)
    try:
      assert tool_parser.get_tool_parser("mine") is Mine
      with pytest.raises(ValueError, match="already registered"):
        tool_parser.register_tool_parser("mine", Mine)
    finally:
      assert tool_parser.unregister_tool_parser("mine")

  def test_abstract_parser_cannot_be_built(self):
    with pytest.raises(TypeError):
      tool_parser.ToolParser()  # pylint: disable=abstract-class-instantiated


# --- properties --------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=("Cs",)))
VALUES = st.recursive(
  st.none()
  | st.booleans()
  | st.integers()
  | TEXT
  | st.floats(allow_nan=False, allow_infinity=False),
  lambda inner: (
    st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
  ),
  max_leaves=8,
)
CALLS = st.lists(
  st.builds(
    ToolCall,
    name=TEXT.filter(bool),
    arguments=st.dictionaries(TEXT, VALUES, max_size=3),
  ),
  max_size=3,
)
PIECES = st.lists(
  st.sampled_from(
    [
      "<tool_call>",
      "</tool_call>",
      "<think>",
      "</think>",
      "{",
      "}",
      '"',
      '{"name": "f", "arguments": {}}',
      "<function=f>",
      "</function>",
      "<parameter=a>",
      "</parameter>",
      "\\u",
      "\\",
      "[",
      "]",
      ":",
      ",",
      "\n",
      '"name"',
      "1e999",
      "9" * 5000,
      "Action:",
      "click(",
      "start_box='",
      "'",
      ")",
      "(1,2)",
      "<tools>",
      "action",
      "Thought:",
      "=",
    ]
  )
  | TEXT,
  max_size=20,
).map("".join)


@settings(max_examples=150, deadline=None)
@given(CALLS, st.none() | st.just("I look at the screen."))
def test_parse_is_the_inverse_of_format(calls, thought):
  result = QWEN.parse_result(QWEN.format(calls, thought))
  assert not result.errors
  assert same(result.calls, [(c.name, c.arguments) for c in calls])
  if calls:
    assert result.thought == (thought or "")


@pytest.mark.parametrize("name", tool_parser.tool_parser_names())
@settings(max_examples=120, deadline=None)
@given(text=PIECES)
def test_garbage_gives_calls_or_errors_and_nothing_else(name, text):
  parser = tool_parser.make_tool_parser(name)
  result = parser.parse_result(text)
  for call in result.calls:
    json.dumps(call.to_json(), ensure_ascii=False).encode()
  assert all(isinstance(error, str) for error in result.errors)
  assert (list(result.calls) == []) or result.answer == ""
  try:
    parser.parse(text, strict=True)
  except tool_parser.ToolParseError:
    assert result.errors
