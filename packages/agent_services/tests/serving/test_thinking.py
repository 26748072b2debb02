"""Reasoning switched by a request: prompts, sessions and refusals."""

import dataclasses

from agent_services.serving import answers
from agent_services.serving import errors
from agent_services.serving import prompts
from agent_services.serving import requests
from agent_services.serving.sessions import session_store
import chat_families
import chat_templates
import openai
import pytest
import rollout_server
from rollout_server import ask
from rollout_server import export
from rollout_server import MODEL
from rollout_server import start
import small_server
import told_sessions
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.parser.renderer import chat_template
from tunix.rl.multi_turn.parser.renderer import choice

pytestmark = pytest.mark.timeout(300)
USER = {"role": "user", "content": "go"}
SAID = {"role": "assistant", "content": "on it"}
OFF = "<think>\n\n</think>\n\n"
# Behind a user's message, as GLM-4.5V's template; before all, as gpt-oss's.
NOTHINK = chat_templates.TEMPLATES["glm_v"].replace(
  "{{- '<|' + m.role + '|>\\n' + show(m.content) }}",
  "{{- '<|' + m.role + '|>\\n' + show(m.content) }}"
  "{{- '/nothink' if m.role == 'user' and enable_thinking is defined and not"
  " enable_thinking else '' }}",
)
EFFORT = (
  "{{- '<|im_start|>system\\nReasoning: ' + (reasoning_effort or 'medium')"
  " + '<|im_end|>\\n' }}" + chat_templates.TEMPLATES["qwen2_5_vl"]
)


def policy_of(family_name, template="", **options):
  family = chat_families.FAMILIES[family_name]
  tokenizer = chat_families.tokenizer(family).backend_tokenizer
  renderer = choice.make_renderer(
    tokenizer,
    chat_families.image_tokens,
    chat_template.ChatTemplate(
      template or chat_families.source(family), dict(family.roles), options
    ),
  )
  return prompts.ServedPolicy(
    name="m",
    client=None,
    renderer=renderer,
    parser=tool_parser.make_tool_parser("qwen"),
    decoder=answers.TokenDecoder(renderer.decode, tokenizer),
    context_length=1 << 16,
  )


def request(messages=(USER,), **options):
  sampling_request = requests.SamplingRequest(
    model="m", sampling=None, messages=tuple(messages)
  )
  return dataclasses.replace(sampling_request, **options)


def kwargs(**options):
  return {"template_options": options}


def effort(level, field="reasoning_effort"):
  return {"thinking": requests.Thinking.by_effort(field, level)}


def anthropic(kind):
  return {
    "thinking": requests.Thinking(
      "thinking", on=kind != "disabled", needed=kind == "enabled"
    )
  }


def shown(policy, messages=(USER,), session=None, **options):
  prompt = prompts.render(
    request(messages, **options), list(messages), session, policy
  )
  return prompt if session is None else prompt.prompt


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize(
  "switch",
  [kwargs(enable_thinking=False), effort("none"), anthropic("disabled")],
)
def test_a_request_gets_the_prompt_of_its_own_switch(family, switch):
  policy = policy_of(family)
  talk = [USER, SAID, {"role": "user", "content": "more"}]
  reference = dataclasses.replace(
    chat_families.FAMILIES[family], options=(("enable_thinking", False),)
  )
  for messages in ([USER], talk):
    ids, _ = chat_families.expected(reference, messages)
    assert shown(policy, messages, **switch).tokens.tolist() == ids
    # The next request has the server's own again.
    ids, _ = chat_families.expected(chat_families.FAMILIES[family], messages)
    assert shown(policy, messages).tokens.tolist() == ids
  field = {"template_options": "chat_template_kwargs.enable_thinking"}.get(
    next(iter(switch)), ""
  ) or switch["thinking"].field
  ignoring = request(ignored=(field, "user"), **switch)
  assert policy.ignored(ignoring) == ("user",)


def test_a_server_without_thinking_thinks_where_a_request_asks_for_it():
  policy = policy_of("qwen3", enable_thinking=False)
  end = lambda **switch: policy.renderer.decode(shown(policy, **switch).tokens)
  assert end().endswith(OFF)
  assert not end(**kwargs(enable_thinking=True)).endswith(OFF)
  assert not end(**anthropic("enabled")).endswith(OFF)
  # A level that the template does not read switches nothing.
  assert end(**effort("high")).endswith(OFF)
  # The exact variable wins over the level.
  both = kwargs(enable_thinking=True) | effort("none")
  assert not end(**both).endswith(OFF)


@pytest.mark.parametrize("family, switch", [
    ("qwen3", kwargs(enable_thinking=True)), ("qwen3", kwargs(thinking=False)),
    ("qwen3_vl", kwargs(enable_thinking=False)), ("qwen3_vl", effort("none")),
    ("qwen3_vl", effort("high")), ("qwen3_vl", anthropic("disabled")),
    ("qwen3_vl_thinking", anthropic("enabled")), ("qwen3", effort("low")),
    ("qwen3", anthropic("enabled")), ("qwen3_vl", anthropic("adaptive")),
])  # fmt: skip
def test_what_changes_no_prompt_is_ignored_and_named(family, switch):
  policy = policy_of(family)
  assert shown(policy, **switch).tokens.tolist() == (
    shown(policy).tokens.tolist()
  )
  assert policy.ignored(request(ignored=("a",), **switch)) == ("a",)


def test_reasoning_is_refused_by_a_policy_that_never_reasons():
  with pytest.raises(
    errors.ApiError, match="no switch for reasoning"
  ) as refusal:
    shown(policy_of("qwen3_vl"), **anthropic("enabled"))
  assert refusal.value.body()["error"]["param"] == "thinking"


def test_an_effort_reaches_a_template_that_reads_it():
  policy = policy_of("qwen2_5_vl", EFFORT)
  text = lambda **switch: policy.renderer.decode(shown(policy, **switch).tokens)
  assert "Reasoning: high" in text(**effort("high"))
  assert "Reasoning: medium" in text()
  assert "Reasoning: low" in text(**effort("low", "reasoning"))


def answered(session, policy, messages, text, **switch):
  """(the interaction, its pending prompt's tokens)."""
  pending = prompts.render(
    request(messages, **switch), list(messages), session, policy
  )
  ids = [*policy.renderer.encode(text), policy.renderer.end_of_turn_id]
  sampled = told_sessions.completion(ids, [-0.5] * len(ids))
  message = {"role": "assistant", "content": text}
  return session.add(pending, sampled, assistant_message=message), ids


def test_turns_of_a_session_switch_and_keep_its_tokens():
  policy = policy_of("qwen3")
  session = session_store.SessionStore(policy.renderer).start("t")
  messages, tokens, mask = [USER], [], []
  for turn, off in enumerate((False, True, False)):
    switch = kwargs(enable_thinking=False) if off else {}
    interaction, ids = answered(
      session, policy, messages, f"so {turn}", **switch
    )
    prompt = interaction.prompt.tokens.tolist()
    assert prompt[: len(tokens)] == tokens
    assert policy.renderer.decode(prompt).endswith(OFF) is off
    mask += [False] * (len(prompt) - len(tokens)) + [True] * len(ids)
    tokens = prompt + ids
    messages = [*messages, {"role": "assistant", "content": f"so {turn}"}, USER]
  (exported,) = session.export("concat")
  assert exported.sequence.tokens.tolist() == tokens
  assert exported.sequence.loss_mask.tolist() == mask


@pytest.mark.parametrize(
  "family, template, switch",
  [
    ("glm_v", NOTHINK, kwargs(enable_thinking=False)),
    ("qwen2_5_vl", EFFORT, effort("high")),
  ],
)
def test_a_switch_that_writes_earlier_messages_anew_begins_a_sequence(
  family, template, switch
):
  policy = policy_of(family, template)
  session = session_store.SessionStore(policy.renderer).start("t")
  answered(session, policy, [USER], "so")
  more = [USER, {"role": "assistant", "content": "so"}, USER]
  other = prompts.render(request(more, **switch), more, session, policy)
  assert other.parent is None
  alone = shown(policy, more, **switch).tokens.tolist()
  assert other.prompt.tokens.tolist() == alone
  # Both go on by themselves.
  plain = prompts.render(request(more), more, session, policy)
  assert plain.parent is not None
  interaction, _ = answered(session, policy, more, "yes", **switch)
  longer = [*more, {"role": "assistant", "content": "yes"}, USER]
  again = prompts.render(request(longer, **switch), longer, session, policy)
  assert again.parent == interaction.id


def test_an_answer_is_not_continued_under_another_switch():
  policy = policy_of("qwen3")
  session = session_store.SessionStore(policy.renderer).start("t")
  pending = prompts.render(request(), [USER], session, policy)
  ids = policy.renderer.encode("so it").tolist()
  cut = session.add(
    pending,
    told_sessions.completion(ids, [-1.0] * len(ids)),
    assistant_message={"role": "assistant", "content": "so it"},
  )
  opened = [USER, {"role": "assistant", "content": "so it"}]
  go_on = lambda **switch: prompts.render(
    request(opened, continues=True, **switch), opened, session, policy
  )
  assert go_on().parent == cut.id
  off = go_on(**kwargs(enable_thinking=False))
  assert off.parent is None
  text = policy.renderer.decode(off.prompt.tokens)
  assert text.endswith(OFF + "so it")


@pytest.mark.slow
def test_the_server_switches_by_every_endpoints_own_field():
  """The real engine and server; a policy with Qwen3's template."""
  small = small_server.SmallPolicy()
  renderer = choice.make_renderer(
    small.policy[2],
    small.processor.num_image_tokens,
    chat_template.ChatTemplate(chat_templates.TEMPLATES["qwen3"]),
  )
  small.engine.close()
  with rollout_server.Running(renderer=renderer) as running:

    def ends(path, **body):
      answer = running.post(path, {"model": MODEL, **body})
      assert answer.status_code == 200, answer.text
      ids = (
        answer.json().get("prompt_token_ids")
        or (answer.json()["choices"][0]["prompt_token_ids"])
      )
      ignored = answer.headers.get("x-ignored-fields", "")
      return renderer.decode(ids).endswith(OFF), ignored

    chat = {"messages": [USER], "max_tokens": 2, "return_token_ids": True}
    anthropic_body = {**chat, "thinking": {"type": "disabled"}}
    responses = {
      "input": "go",
      "max_output_tokens": 2,
      "return_token_ids": True,
    }
    path = "/v1/chat/completions"
    assert ends(path, **chat) == (False, "")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert ends(path, **chat, **off) == (True, "")
    assert ends(path, **chat, reasoning_effort="none") == (True, "")
    high = ends(path, **chat, reasoning_effort="high")
    assert high == (False, "reasoning_effort")
    assert ends("/v1/messages", **anthropic_body) == (True, "")
    enabled = {"type": "enabled", "budget_tokens": 1024}
    assert ends("/v1/messages", **chat, thinking=enabled) == (
      False,
      "thinking.budget_tokens, thinking",
    )
    assert ends("/v1/responses", **responses, reasoning={"effort": "none"}) == (
      True,
      "",
    )
    client = running.client()
    for wrong in ("false", 1, [False]):
      with pytest.raises(openai.BadRequestError, match="true or false") as bad:
        ask(
          client,
          [USER],
          extra_body={"chat_template_kwargs": {"enable_thinking": wrong}},
        )
      assert bad.value.param == "chat_template_kwargs.enable_thinking"
    session = start(running)
    client = running.client(f"/sessions/{session['session_id']}")
    first = ask(client, [USER], max_tokens=4, extra_body=off)
    reply = {"role": "assistant", "content": first.choices[0].message.content}
    second = ask(client, [USER, reply, USER], max_tokens=4)
    prefix = first.prompt_token_ids + first.choices[0].token_ids
    assert second.prompt_token_ids[: len(prefix)] == prefix
    (row,) = export(running, session, style="concat").values()
    tokens = second.prompt_token_ids + second.choices[0].token_ids
    assert row["tensor_dict"]["input_ids"] == [tokens]
