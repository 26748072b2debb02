"""Tool calls in the text formats of model families, both ways."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.parser import tool_parser

FORMATS = (
    "qwen", "qwen_xml", "llama_json", "llama_pythonic", "mistral", "deepseek",
    "gemma", "gemini", "openai_function",
)  # fmt: skip
WEATHER = ("get_weather", {"city": "Paris"})
ADD = ("add", {"a": 1, "b": 2.5})
SCHEMA = [
  {
    "type": "function",
    "function": {
      "name": "get_weather",
      "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
      },
    },
  }
]
V3 = (
  "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
  '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)

# format, a model's text, its calls.
EXAMPLES = [
    ("llama_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}',
     [WEATHER]),
    ("llama_json",
     '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}};'
     ' {"name": "add", "parameters": {"a": 1, "b": 2.5}}<|eom_id|>',
     [WEATHER, ADD]),
    ("llama_pythonic", '[get_weather(city="Paris"), add(a=1, b=2.5)]',
     [WEATHER, ADD]),
    ("llama_pythonic", "<|python_start|>[get_weather(city='Paris')]"
     "<|python_end|>", [WEATHER]),
    ("mistral",
     '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"},'
     ' "id": "bbc5b7ede"}]', [WEATHER]),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]'
     'add[CALL_ID]x1[ARGS]{"a": 1, "b": 2.5}', [WEATHER, ADD]),
    ("deepseek", V3, [WEATHER]),
    ("deepseek",
     "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
     '{"city": "Paris"}<｜tool▁call▁end｜>'
     '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": 2.5}'
     '<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
     [WEATHER, ADD]),
    ("gemma", "```tool_code\nget_weather(city=\"Paris\")\n```", [WEATHER]),
    ("gemma", "Let me see.\n```tool_code\nprint(get_weather(city='Paris'))\n"
     "add(a=1, b=2.5)\n```\n", [WEATHER, ADD]),
    ("gemini", '{"functionCall": {"name": "get_weather", "args": {"city":'
     ' "Paris"}}}', [WEATHER]),
    ("openai_function",
     '{"id": "call_1", "type": "function", "function": {"name":'
     ' "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}}', [WEATHER]),
    ("openai_function",
     '{"role": "assistant", "tool_calls": [{"type": "function", "function":'
     ' {"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}}]}',
     [WEATHER]),
    ("openai_function",
     '{"type": "function_call", "call_id": "c", "name": "get_weather",'
     ' "arguments": "{\\"city\\": \\"Paris\\"}"}', [WEATHER]),
]  # fmt: skip


def simple(calls):
  return [(call.name, dict(call.arguments)) for call in calls]


@pytest.mark.parametrize("name, text, calls", EXAMPLES)
def test_what_models_write(name, text, calls):
  parser = tool_parser.make_tool_parser(name)
  assert simple(parser.parse(text, strict=True)) == calls


@pytest.mark.parametrize("name", FORMATS)
def test_prompt_shows_the_tools_and_the_format(name):
  parser = tool_parser.make_tool_parser(name)
  prompt = parser.get_tool_prompt(SCHEMA)
  assert "get_weather" in prompt and "city" in prompt
  assert "{tools}" not in prompt


@pytest.mark.parametrize("name", FORMATS)
def test_reasoning_and_plain_text(name):
  parser = tool_parser.make_tool_parser(name)
  assert parser.parse_result("It is 21 °C {today}.").answer == (
    "It is 21 °C {today}."
  )
  call = parser.format([trajectory.ToolCall(*WEATHER)])
  hidden = parser.parse_result(f"<think>Perhaps {call}</think>\nNo.")
  assert not hidden.calls and hidden.answer == "No."
  shown = parser.parse_result(f"<think>Why not.</think>\nI ask.\n{call}")
  assert simple(shown.calls) == [WEATHER]
  assert shown.thought == "Why not.\nI ask."


@pytest.mark.parametrize("name", FORMATS)
def test_a_malformed_call_beside_a_good_one_is_reported(name):
  parser = tool_parser.make_tool_parser(name)
  good = parser.format([trajectory.ToolCall(*WEATHER)])
  cut = good[: good.index("Paris") + 2]
  result = parser.parse_result(cut)
  assert not result.calls and len(result.failures) == 1
  with pytest.raises(tool_parser.ToolParseError):
    parser.parse(cut, strict=True)
  assert simple(parser.parse(f"{good}\n{cut}"))[:1] == [WEATHER]


@pytest.mark.parametrize(
  "name, style, other",
  [("mistral", "args", "list"), ("deepseek", "v3", "v3.1")],
)
def test_styles_are_written_and_both_are_read(name, style, other):
  make = tool_parser.get_tool_parser(name)
  calls = [trajectory.ToolCall(*WEATHER), trajectory.ToolCall(*ADD)]
  texts = [make(style=s).format(calls) for s in (style, other)]
  assert texts[0] != texts[1]
  for text in texts:
    for reader in (make(style=style), make(style=other)):
      assert simple(reader.parse(text, strict=True)) == [WEATHER, ADD]
  with pytest.raises(ValueError, match="style must be"):
    make(style="x")


def test_v3_is_deepseek_s_own_text():
  make = tool_parser.get_tool_parser("deepseek")
  assert make(style="v3").format([trajectory.ToolCall(*WEATHER)]) == V3


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
NAME = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: name not in ("and", "as", "in", "is", "or", "not", "if",
                              "def", "del", "for", "try", "class", "else",
                              "from", "pass", "with", "while", "yield",
                              "break", "raise", "return", "lambda", "import",
                              "global", "assert", "async", "await", "elif",
                              "except", "finally", "continue", "nonlocal",
                              "print")
)  # fmt: skip
VALUE = st.recursive(
  st.none()
  | st.booleans()
  | st.integers(-1000, 1000)
  | TEXT
  | st.floats(-100, 100).filter(lambda v: not float(v).is_integer()),
  lambda inner: (
    st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
  ),
  max_leaves=6,
)
CALLS = st.lists(
  st.builds(
    trajectory.ToolCall, NAME, st.dictionaries(NAME, VALUE, max_size=3)
  ),
  min_size=1,
  max_size=3,
)


@pytest.mark.parametrize("name", [f for f in FORMATS if f != "qwen_xml"])
@settings(max_examples=150)
@given(calls=CALLS)
def test_writing_and_reading_are_inverse(name, calls):
  parser = tool_parser.make_tool_parser(name)
  text = parser.format(calls, "I call.")
  result = parser.parse_result(text)
  assert not result.failures
  assert simple(result.calls) == simple(calls)
  assert result.thought == "I call."
