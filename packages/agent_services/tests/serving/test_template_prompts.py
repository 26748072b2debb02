"""The server's prompts against the exported chat template, tools included."""

import dataclasses

from agent_services.serving import answers
from agent_services.serving import errors
from agent_services.serving import prompts
from agent_services.serving import requests
from agent_services.serving.sessions import session_store
import chat_families
import chat_templates
import pytest
import rollout_server
from rollout_server import ask
from rollout_server import screenshot
from rollout_server import start
import small_server
import transformers
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.parser.renderer import chat_template
from tunix.rl.multi_turn.parser.renderer import choice
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.checkpoints import policy_files

TOOLS = [
  {
    "type": "function",
    "function": {
      "name": "click",
      "description": "Clicks é <|im_end|>",
      "parameters": {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
      },
    },
  }
]
CALL = {
  "id": "call_1",
  "type": "function",
  "function": {"name": "click", "arguments": '{"x": 3}'},
}


@pytest.fixture(scope="module")
def exported(running, tmp_path_factory):
  """transformers' tokenizer of the served policy's export."""
  directory = tmp_path_factory.mktemp("exported")
  checkpoint.save_policy(directory, running.model)
  return transformers.AutoTokenizer.from_pretrained(str(directory))


def expected(reference, messages, tools, image_tokens):
  """Ids by transformers, each image's placeholder `image_tokens` times."""
  plain = []
  for message in messages:
    content = message["content"]
    if isinstance(content, list):
      content = [
        {"type": "image"} if part["type"] == "image_url" else part
        for part in content
      ]
    plain.append({**message, "content": content})
  text = reference.apply_chat_template(
    plain, tools=tools, tokenize=False, add_generation_prompt=True
  )
  text = text.replace("<|image_pad|>", "<|image_pad|>" * image_tokens)
  return reference.encode(text, add_special_tokens=False)


def conversations():
  system = {"role": "system", "content": "Be brief."}
  called = {"role": "assistant", "content": "so", "tool_calls": [CALL]}
  result = {"role": "tool", "content": "done", "tool_call_id": "call_1"}
  for first in ([], [system]):
    yield [*first, screenshot(1, "look")]
    yield [*first, screenshot(1, "a"), called, result]


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("in_session", [False, True])
def test_the_exported_template_renders_what_the_server_renders(
  running, exported, tools, in_session
):
  count = running.processor.num_image_tokens(*small_server.SIZE)
  # Its tools spell a special token, which is one in transformers' text.
  safe = tools and [
    {**tools[0], "function": {**tools[0]["function"], "description": "é"}}
  ]
  options = {"tools": safe} if safe else {}
  for messages in conversations():
    client = running.client()
    if in_session:
      client = running.client(f"/sessions/{start(running)['session_id']}")
    answer = ask(client, messages, max_tokens=2, **options)
    assert answer.prompt_token_ids == expected(exported, messages, safe, count)


def test_tools_cannot_end_a_turn(running):
  answer = ask(running.client(), [screenshot(1)], max_tokens=2, tools=TOOLS)
  ends = answer.prompt_token_ids.count(running.renderer.end_of_turn_id)
  assert ends == 2  # Of the system message and the user's.
  assert "Clicks é <|im_end|>" in running.renderer.decode(
    answer.prompt_token_ids
  )


def served(family_name, parser, kind="auto"):
  """A policy of a family as the server has it; it samples nothing."""
  family = chat_families.FAMILIES[family_name]
  tokenizer = chat_families.tokenizer(family).backend_tokenizer
  renderer = choice.make_renderer(
    tokenizer,
    chat_families.image_tokens,
    chat_template.ChatTemplate(
      chat_families.source(family), dict(family.roles), dict(family.options)
    ),
    kind,
  )
  calls = tool_parser.make_tool_parser(parser)
  return prompts.ServedPolicy(
    name=family_name,
    client=None,
    renderer=renderer,
    parser=calls,
    decoder=answers.TokenDecoder(renderer.decode, tokenizer),
    context_length=4096,
  )


@pytest.mark.parametrize(
  "family_name, parser, by_template",
  [
    ("qwen2_5", "qwen", True),
    ("qwen3_vl", "qwen", True),
    ("qwen3_vl_thinking", "qwen", True),
    ("qwen3_5", "qwen", True),
    ("qwen3_5", "qwen_xml", True),
    ("qwen3_coder", "qwen_xml", True),
    ("llama3", "llama_json", True),
    ("mistral", "mistral", True),
    ("deepseek", "deepseek", True),
    ("qwen2_5_vl", "qwen", False),  # Its template shows none.
    ("qwen3_vl", "llama_json", False),  # Reads other calls.
    ("qwen3_vl", "computer_use_compact", False),  # Has its own words.
  ],
)
def test_tools_stand_where_the_checkpoints_template_puts_them(
  family_name, parser, by_template
):
  policy = served(family_name, parser)
  assert policy.template_tools is by_template
  family = chat_families.FAMILIES[family_name]
  tools = [{**TOOLS[0], "function": {"name": "click", "parameters": {}}}]
  messages = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "go"},
  ]
  request = requests.SamplingRequest(
    model="m", sampling=None, messages=tuple(messages), tools=tuple(tools)
  )
  alone = prompts.render(request, messages, None, policy)
  session = session_store.SessionStore(policy.renderer).start("t")
  pending = prompts.render(request, messages, session, policy)
  assert pending.extension.tokens.tolist() == alone.tokens.tolist()
  if by_template:
    ids, _ = chat_families.expected(family, messages, tools)
  else:
    shown = policy.parser.get_tool_prompt(tools)
    system = {"role": "system", "content": "Be brief.\n\n" + shown}
    ids = policy.renderer.render([system, messages[1]]).tokens.tolist()
  assert alone.tokens.tolist() == ids


@pytest.mark.parametrize(
  "family_name, switch, refused",
  [
    ("qwen3", {"enable_thinking": False}, "enable_thinking"),
    ("qwen3", {"enable_thinking": True, "thinking": False}, ""),
    ("qwen3_vl", {"enable_thinking": False}, ""),  # Has no such switch.
  ],
)
def test_a_request_for_another_rendering_is_refused(
  family_name, switch, refused
):
  policy = served(family_name, "qwen")
  messages = [{"role": "user", "content": "go"}]
  plain = requests.SamplingRequest(
    model="m", sampling=None, messages=tuple(messages)
  )
  switched = dataclasses.replace(plain, template_options=switch)
  if refused:
    with pytest.raises(errors.ApiError, match="--default-chat-templ") as error:
      prompts.render(switched, messages, None, policy)
    assert error.value.param == f"chat_template_kwargs.{refused}"
    return
  shown = prompts.render(switched, messages, None, policy).tokens
  alone = prompts.render(plain, messages, None, policy).tokens
  assert shown.tolist() == alone.tolist()


def test_a_thinking_policy_is_served_in_its_own_format(tmp_path):
  """The real engine and server, with the renderer that the command makes."""
  (tmp_path / "chat_template.jinja").write_text(
    chat_templates.TEMPLATES["qwen3_vl_thinking"]
  )
  small = small_server.SmallPolicy()
  renderer = choice.make_renderer(
    small.policy[2],
    small.processor.num_image_tokens,
    policy_files.chat_template(tmp_path),
  )
  small.engine.close()
  with rollout_server.Running(renderer=renderer) as running:
    client = running.client(f"/sessions/{start(running)['session_id']}")
    history = [screenshot(0, "go")]
    first = ask(client, history)
    shown = renderer.decode(first.prompt_token_ids)
    assert shown.endswith("<|im_start|>assistant\n<think>\n")
    history += [
      {"role": "assistant", "content": first.choices[0].message.content},
      screenshot(1, "on"),
    ]
    second = ask(client, history)
    before = first.prompt_token_ids + first.choices[0].token_ids
    # The sampled tokens stay, whatever the template makes of them.
    assert second.prompt_token_ids[: len(before)] == before
    bridge = renderer.decode(second.prompt_token_ids[len(before) :])
    assert bridge.endswith("<|im_start|>assistant\n<think>\n")
