"""Texts sampled under a grammar belong to it."""

import json
import re

from agent_services.serving import answers
from agent_services.serving import grammars as grammars_lib
import numpy as np
import pytest
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

pytestmark = pytest.mark.timeout(200)
VOCABULARY = 2570  # Ten ids more than the tokenizer has.
POINT = {
  "type": "object",
  "properties": {
    "x": {"type": "integer", "minimum": 0, "maximum": 99},
    "to": {"enum": ["left", "right"]},
  },
  "required": ["x", "to"],
  "additionalProperties": False,
}
PARSER = tool_parser.make_tool_parser("qwen")


def tool(name, parameters=None, **options):
  function = {"name": name, "parameters": parameters, **options}
  return {"type": "function", "function": function}


class Policy:
  """A tokenizer, and one who says anything that he may."""

  def __init__(self):
    tokenizer = checkpoint.load_tokenizer("tiny_vl")
    self.renderer = qwen.QwenRenderer(tokenizer, lambda width, height: 6)
    self.decoder = answers.TokenDecoder(self.renderer.decode, tokenizer)
    self.end = self.renderer.end_of_turn_id
    self.grammars = grammars_lib.Grammars(
      self.decoder.bytes,
      self.renderer.encode,
      VOCABULARY,
      self.decoder.special,
      self.renderer.stop_token_ids,
    )

  def may(self, grammar):
    bits = np.unpackbits(grammar.allowed().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits)

  def babble(self, source, seed, most=200, length=None):
    """(text, whether it came to its end)"""
    rng = np.random.default_rng(seed)
    grammar, tokens = self.grammars.start(source, length), []
    for _ in range(most):
      may = self.may(grammar)
      assert len(may) and may.max() < VOCABULARY - 10
      assert not set(may) & (self.decoder.special - {self.end})
      # The end is where the text may end, and only there.
      assert (self.end in may) == grammar.may_end
      token = int(rng.choice(may))
      if token == self.end:
        return self.renderer.decode(tokens), True
      tokens.append(token)
      grammar.advance(token)
    return self.renderer.decode(tokens), False

  def says(self, source, text):
    """Whether the text's own tokens are accepted by the grammar."""
    grammar = self.grammars.start(source)
    for token in self.renderer.encode(text):
      if token not in self.may(grammar):
        return False
      grammar.advance(int(token))
    return grammar.may_end


@pytest.fixture(scope="module", name="policy")
def _policy():
  return Policy()


@pytest.mark.parametrize("seed", range(8))
def test_anything_that_may_be_said_is_of_the_schema(policy, seed):
  text, ended = policy.babble(policy.grammars.json(POINT), seed)
  value = json.loads(text)
  assert ended and set(value) == {"x", "to"}
  assert 0 <= value["x"] <= 99 and value["to"] in ("left", "right")
  # Blanks cannot be written for ever.
  assert not re.search(r"\s\s", text)


def test_json_is_taken_as_it_is_written(policy):
  source = policy.grammars.json(POINT)
  value = {"x": 7, "to": "left"}
  assert policy.says(source, json.dumps(value))
  assert policy.says(source, json.dumps(value, separators=(",", ":")))
  for wrong in (
    '{"x": 100, "to": "left"}',
    '{"x": 7}',
    '{"x": 7, "to": "up"}',
    '{"x": 7, "to": "left", "y": 1}',
    '{"x": 7, "to": "left"} ',
  ):
    assert not policy.says(source, wrong), wrong
  anything = policy.grammars.json()
  assert policy.says(anything, '{"naïve ☃": [1, {"🦊": null}]}')
  assert not policy.says(anything, "[1]")


@pytest.mark.parametrize("seed", range(4))
def test_a_pattern_is_matched(policy, seed):
  pattern = "(a|🦊){1,3}-[0-9]{2}"
  text, ended = policy.babble(policy.grammars.regex(pattern), seed)
  assert ended and re.fullmatch(pattern, text)


@pytest.mark.parametrize("seed", range(4))
def test_calls_that_must_be_made_are_read_by_the_parser(policy, seed):
  tools = [
    tool("move", POINT),
    tool(
      "shut",
      {"type": "object", "properties": {}, "additionalProperties": False},
    ),
  ]
  for many in (False, True):
    source = policy.grammars.calls(PARSER, tools, many=many)
    text, ended = policy.babble(source, seed, most=400)
    result = PARSER.parse_result(text)
    if ended:
      assert not result.errors and not result.thought
      assert len(result.calls) >= 1 if many else len(result.calls) == 1
      for call in result.calls:
        assert set(call.arguments) == (
          {"x", "to"} if call.name == "move" else set()
        )
    assert not policy.says(source, "No.")
  call = '<tool_call>\n{"name": "shut", "arguments": {}}\n</tool_call>'
  assert policy.says(source, call) and policy.says(source, f"{call}\n{call}")
  once = policy.grammars.calls(PARSER, tools)
  assert policy.says(once, call) and not policy.says(once, f"{call}\n{call}")


def test_a_strict_tool_is_held_to_its_schema_where_it_is_called(policy):
  tools = [tool("move", POINT, strict=True), tool("say")]
  source = policy.grammars.calls(PARSER, tools, free=True)
  calls = lambda name, arguments: PARSER.format(
    [tool_parser.base.trajectory.ToolCall(name, arguments)]
  )
  good = calls("move", {"x": 3, "to": "left"})
  for text in (
    "",
    "Nothing to do: 1 < 2 > 0.\nReally <tool",
    good,
    f"I go.\n{good}",
    f"{good}\nThen {good} and on.",
    calls("say", {"any": ["thing"]}),
  ):
    assert policy.says(source, text), text
  for text in (
    calls("move", {"x": 300, "to": "left"}),
    "Hm. " + calls("move", {"x": 3}),
    calls("jump", {}),
    "<tool_call>oh",
  ):
    assert not policy.says(source, text), text


def test_a_reference_in_a_tools_schema_begins_at_its_root(policy):
  shape = {
    "type": "object",
    "properties": {"to": {"$ref": "#/$defs/way"}},
    "required": ["to"],
    "additionalProperties": False,
    "$defs": {"way": {"anyOf": [{"enum": ["left"]}, {"$ref": "#"}]}},
  }
  for free in (False, True):
    names = ('go/"on"', r"a\d", "go")  # Escaped in three ways.
    tools = [tool(name, shape, strict=True) for name in names]
    source = policy.grammars.calls(PARSER, tools, free=free)
    for name in names:
      for arguments in ({"to": "left"}, {"to": {"to": "left"}}):
        call = tool_parser.base.trajectory.ToolCall(name, arguments)
        assert policy.says(source, PARSER.format([call]))
        tight = PARSER.format([call]).replace(": ", ":").replace(", ", ",")
        assert policy.says(source, tight)
      call = tool_parser.base.trajectory.ToolCall(name, {"to": "up"})
      assert not policy.says(source, PARSER.format([call]))


@pytest.mark.parametrize("seed", range(6))
def test_an_answer_is_calls_or_json(policy, seed):
  tools = [tool("move", POINT, strict=True), tool("say")]
  source = policy.grammars.calls(PARSER, tools, otherwise=POINT)
  json_text = '{"x": 3, "to": "left"}'
  call = PARSER.format(
    [tool_parser.base.trajectory.ToolCall("move", json.loads(json_text))]
  )
  say = call.replace("move", "say").replace('"x"', '"any"')
  assert all(policy.says(source, text) for text in (json_text, call, say))
  for text in (
    "",
    "Done.",
    f"I go.\n{call}",
    f"{call}\n{json_text}",
    f"{call}\n{call}",
    '{"x": 3}',
    say.replace("say", "move"),
  ):
    assert not policy.says(source, text), text
  anything = policy.grammars.calls(PARSER, tools, otherwise={})
  assert policy.says(anything, "[1]") and policy.says(anything, say)
  many = policy.grammars.calls(PARSER, tools, many=True, otherwise=POINT)
  assert policy.says(many, f"{call}\n{say}")
  assert not policy.says(many, f"{json_text}\n{json_text}")
  text, ended = policy.babble(source, seed)
  assert text.startswith(("<tool_call>", "{")) and (
    not ended or PARSER.parse_result(text).calls or json.loads(text)
  )


NESTED = {
  "type": "object",
  "properties": {
    "note": {"type": "string"},
    "path": {
      "type": "array",
      "items": {
        "type": "object",
        "properties": {"to": {"enum": ["left", "right"]}},
        "required": ["to"],
      },
      "minItems": 2,
    },
  },
  "required": ["note", "path"],
}


@pytest.mark.parametrize("length", (60, 90))
@pytest.mark.parametrize("schema", ({"type": "object"}, NESTED))
def test_an_open_object_is_closed_before_the_length_is_over(
  policy, schema, length
):
  """One who says anything would nest and write for ever."""
  source, lengths = policy.grammars.json(schema), set()
  for seed in range(15):
    text, ended = policy.babble(source, seed, length, length)
    value = json.loads(text)
    assert ended and isinstance(value, dict)
    assert set(value) >= set(schema.get("required", ()))
    lengths.add(len(text))
  assert len(lengths) > 3  # It says what it likes up to there.
  assert not any(policy.babble(source, seed, length)[1] for seed in range(3))


@pytest.mark.parametrize("free", (True, False))
def test_a_call_is_closed_before_the_length_is_over(policy, free):
  shape = {"properties": {"text": {"type": "string"}}, "required": ["text"]}
  tools = [tool("type", shape, strict=True), tool("wait")]
  source = policy.grammars.calls(PARSER, tools, free=free)
  grammar = policy.grammars.start(source, 60)
  begun = '<tool_call>\n{"name": "type", "arguments": {"text": "a'
  tokens = [int(t) for t in policy.renderer.encode(begun)]
  assert len(tokens) < 40
  for token in tokens:
    assert token in policy.may(grammar)
    grammar.advance(token)
  (letter,) = policy.renderer.encode("a")
  while len(tokens) < 60:  # Letters, while the grammar allows them.
    may = policy.may(grammar)
    token = letter if letter in may else int(may[0])
    tokens.append(token)
    if token == policy.end:
      break
    grammar.advance(token)
  result = PARSER.parse_result(policy.renderer.decode(tokens))
  (call,) = result.calls
  assert set(call.arguments["text"]) == {"a"} and not result.failures
  assert len(call.arguments["text"]) > 3 and 50 < len(tokens) <= 60


def test_a_length_without_room_for_the_end_cuts_the_text(policy):
  source = policy.grammars.json(NESTED)
  text, ended = policy.babble(source, 0, 9, 9)
  assert not ended and text.startswith('{"note":')


@pytest.mark.parametrize(
  "make, words",
  [
    (lambda g: g.json({"type": "objekt"}), "objekt"),
    (lambda g: g.json({"not": {"type": "string"}}), "not"),
    (lambda g: g.json({"$ref": "#/nowhere"}), "nowhere"),
    (lambda g: g.json({"$ref": "#"}), r"\$ref lead to itself"),
    (
      lambda g: g.json(
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
      ),
      "nothing can be",
    ),
    (lambda g: g.regex("a("), "unclosed"),
    (lambda g: g.calls(PARSER, [tool("f", {"properties": 3})]), "3"),
  ],
)
def test_a_grammar_that_cannot_be_is_refused(policy, make, words):
  for _ in "ab":  # The second time, too.
    with pytest.raises(grammars_lib.GrammarError, match=words):
      policy.grammars.start(make(policy.grammars))


@pytest.mark.parametrize("depth", [300, 3000])
def test_a_schema_that_is_nested_too_deep_is_refused(policy, depth):
  deep = {"type": "string"}
  for _ in range(depth):
    deep = {"type": "array", "items": deep}
  with pytest.raises(grammars_lib.GrammarError, match="recursion"):
    policy.grammars.start(policy.grammars.json(deep))
  tools = [tool("f", {"properties": {"x": deep}})]
  with pytest.raises(grammars_lib.GrammarError, match="recursion"):
    policy.grammars.start(policy.grammars.calls(PARSER, tools))


def test_a_text_without_bytes_is_no_grammar(policy):
  for make in (
    lambda: policy.grammars.json({"enum": ["\ud800"]}),
    lambda: policy.grammars.regex("\ud800"),
  ):
    with pytest.raises(grammars_lib.GrammarError):
      policy.grammars.start(make())


def test_completions_of_one_grammar_do_not_share_their_state(policy):
  source = policy.grammars.regex("ab|cd")
  one, two = policy.grammars.start(source), policy.grammars.start(source)
  a, c = (int(policy.renderer.encode(x)[0]) for x in "ac")
  one.advance(a)
  assert c in policy.may(two)
  with pytest.raises(grammars_lib.GrammarError):
    one.advance(c)
