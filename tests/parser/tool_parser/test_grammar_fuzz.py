"""Broken texts: the typed error with its position, or actions on the screen."""

import random

import grammar_fuzz
import pytest
import trials
from tunix.rl.multi_turn.parser import tool_parser

NAMES = tool_parser.tool_parser_names()


@pytest.mark.parametrize("name", NAMES)
def test_no_mutation_breaks_a_promise(name):
  parser = tool_parser.make_tool_parser(name)
  texts = grammar_fuzz.seeds(parser)
  rng = random.Random(name)
  failures = [
    grammar_fuzz.check(parser, grammar_fuzz.broken(texts, rng))
    for _ in range(400)
  ]
  # Both ways are tried: texts that still hold calls, and malformed ones.
  assert sum(calls for calls, _ in failures) > 40
  assert sum(errors for _, errors in failures) > 40


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
  "unit",
  trials.by_default(
    ['{"a":', "Action: type(content='"],
    ["\n", '{"a":', "[f(", "Action: type(content='", "- ", "'''"],
  ),
)
def test_a_long_response_is_read_in_linear_time(name, unit):
  """Reading such a text in quadratic time took half a minute: a time-out."""
  parser = tool_parser.make_tool_parser(name)
  for before in ("", "Action: ", "```python\n", "<tool_call>"):
    grammar_fuzz.check(parser, before + unit * (60_000 // len(unit)))
