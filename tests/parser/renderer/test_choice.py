"""The choice of a policy's renderer, and the errors where none fits."""

import re

import chat_families
import pytest
import train_tokenizer
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.parser.renderer import chat_template
from tunix.rl.multi_turn.parser.renderer import choice
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.parser.renderer import template

FAMILIES = chat_families.FAMILIES


def made(name, kind="auto", source=None, size=chat_families.image_tokens):
  family = FAMILIES[name]
  return choice.make_renderer(
    chat_families.tokenizer(family).backend_tokenizer,
    size,
    chat_template.ChatTemplate(
      source or chat_families.source(family),
      dict(family.roles),
      dict(family.options),
    ),
    kind,
  )


def too_small(width, height):
  raise ValueError(f"{width}x{height} is too small for this policy")


def test_our_own_template_is_rendered_the_fast_way():
  for size in (chat_families.image_tokens, too_small):
    own = made("qwen3", source=train_tokenizer.CHAT_TEMPLATE, size=size)
    assert isinstance(own, qwen.QwenRenderer)
    assert choice.described(own) == "ChatML"
  forced = made("qwen3", "template", train_tokenizer.CHAT_TEMPLATE)
  assert isinstance(forced, template.TemplateRenderer)
  assert not choice.difference(own, forced)


def test_our_policies_come_with_that_template():
  from tunix.rl.multi_turn.policy.checkpoints import policy_files  # pylint: disable=g-import-not-at-top

  for name in ("tiny_vl", "qwen3_vl_tiny"):
    assert policy_files.chat_template(name).source == (
      train_tokenizer.CHAT_TEMPLATE
    )


@pytest.mark.parametrize(
  "name, difference",
  [
    ("qwen2_5", "a user message: .*You are Qwen"),
    ("qwen2_5_vl", "a user message: .*You are a helpful assistant"),
    ("qwen3", "earlier reasoning: .*hm.* and .*yes"),
    ("qwen3_vl", "a later system message: .*refused"),
    ("qwen3_vl_thinking", "a user message: .*<think>"),
    ("qwen3_5", "a user message"),
    ("qwen3_coder", "reasoning before a result"),
  ],
)
def test_a_template_of_its_own_is_rendered_by_itself(name, difference):
  own = made(name)
  assert isinstance(own, template.TemplateRenderer)
  chatml = made(name, "qwen")
  assert isinstance(chatml, qwen.QwenRenderer)
  assert re.match(difference, choice.difference(chatml, own), re.DOTALL)


def test_a_tokenizer_without_qwens_tokens_has_its_template_only():
  family = FAMILIES["llama3"]
  bare = chat_families.tokenizer(FAMILIES["mistral"]).backend_tokenizer
  lacking = r"no token '<\|im_start\|>' for ChatML; put the chat_template.jinja"
  with pytest.raises(ValueError, match=lacking):
    choice.make_renderer(bare, chat_families.image_tokens, None)
  assert isinstance(made(family.name), template.TemplateRenderer)


def test_no_template_is_chatml_unless_one_is_asked_for():
  tokenizer = chat_families.tokenizer(FAMILIES["qwen3"]).backend_tokenizer
  plain = choice.make_renderer(tokenizer, chat_families.image_tokens, None)
  assert isinstance(plain, qwen.QwenRenderer)
  with pytest.raises(ValueError, match="no chat template; put its"):
    choice.make_renderer(
      tokenizer, chat_families.image_tokens, None, "template"
    )
  with pytest.raises(ValueError, match="must be one of auto, qwen, template"):
    choice.make_renderer(tokenizer, chat_families.image_tokens, None, "jinja")


def test_a_template_without_bridge_is_refused_with_the_way_out():
  source = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content"
    " }}{%- endfor %}{{- '<|im_end|>' * (messages | length) }}"
  )
  with pytest.raises(ValueError, match="so that .*; choose qwen to have"):
    made("qwen3", source=source)


CALLS = {
  "qwen3_vl": ("qwen", "qwen_xml"),
  "qwen3_5": ("qwen", "qwen_xml"),
  "qwen3_coder": ("qwen", "qwen_xml"),
  "llama3": ("llama_json",),
  "deepseek": ("deepseek",),
  "mistral": ("mistral",),
  "qwen2_5_vl": (),  # Its template shows no tools.
  "gemma": (),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_template_shows_tools_to_parsers_that_read_its_calls(name):
  renderer = made(name)
  general = (
      "qwen", "qwen_xml", "llama_json", "llama_pythonic", "mistral",
      "deepseek", "gemma", "gemini", "openai_function",
      "computer_use_compact",
  )  # fmt: skip
  shown = [
    parser
    for parser in general
    if renderer.shows_tools_of(tool_parser.make_tool_parser(parser))
  ]
  for parser in CALLS[name]:
    assert parser in shown
  assert "gemini" not in shown and "computer_use_compact" not in shown
  if not CALLS[name]:
    assert not shown


def test_chatml_shows_tools_in_the_words_of_one_parser():
  renderer = made("qwen3", "qwen")
  reads = lambda p: renderer.shows_tools_of(tool_parser.make_tool_parser(p))
  assert reads("qwen")
  assert not any(map(reads, ("qwen_xml", "llama_json", "computer_use_compact")))
