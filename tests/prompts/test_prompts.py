"""System prompts as data."""

import pytest
from tunix.rl.multi_turn import prompts
from tunix.rl.multi_turn.parser import tool_parser


def rendered(name, tools_prompt):
  return prompts.insert_tools(prompts.get_prompt(name), tools_prompt)


@pytest.mark.parametrize("name", prompts.prompt_names())
def test_every_template_carries_the_tool_prompt_unchanged(name):
  tools_prompt = '<tools>\n{"a": "$5 {x}"}\n</tools>'
  text = rendered(name, tools_prompt)
  assert text.count(tools_prompt) == 1
  assert "$tools_prompt" not in text


def test_desktop_prompt_for_small_contexts_is_short():
  parser = tool_parser.make_tool_parser("computer_use_compact")
  text = rendered("desktop_compact", parser.get_tool_prompt())
  assert len(text.split()) <= 45


def test_own_template():
  prompts.register_prompt("own", "You cost $5. $tools_prompt")
  try:
    assert rendered("own", "TOOLS") == "You cost $5. TOOLS"
    with pytest.raises(ValueError, match="already registered"):
      prompts.register_prompt("own", "again")
  finally:
    prompts._PROMPTS.unregister("own")  # pylint: disable=protected-access


def test_tools_follow_a_text_without_their_field():
  assert prompts.insert_tools("Be brief.", "TOOLS") == "Be brief.\n\nTOOLS"
  assert prompts.insert_tools("", "TOOLS") == "TOOLS"
  assert prompts.insert_tools("Costs $5.", "") == "Costs $5."


def test_unknown_name_names_the_nearest():
  with pytest.raises(ValueError, match="did you mean 'desktop'"):
    prompts.get_prompt("desktp")
