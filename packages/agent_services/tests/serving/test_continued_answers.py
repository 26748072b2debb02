"""`continue_final_message`: the last message is the beginning of the answer."""

import json

import hypothesis
from hypothesis import strategies as st
import numpy as np
import openai
import pytest
from rollout_server import ask
from rollout_server import export
from rollout_server import MODEL
from rollout_server import screenshot
from rollout_server import start
import told_sessions
import transformers
from tunix.rl.multi_turn.policy.checkpoints import policy_files

pytestmark = pytest.mark.timeout(300)
USER = {"role": "user", "content": "Click the red square."}
CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}


def said(text):
  return {"role": "assistant", "content": text}


def go_on(client, messages, **options):
  extra = CONTINUE | options.pop("extra_body", {})
  return ask(client, messages, extra_body=extra, **options)


def test_the_answer_goes_on_where_the_message_ends(running):
  client = running.client()
  answer = ask(client, [screenshot(), USER], temperature=0, max_tokens=12)
  tokens = answer.choices[0].token_ids
  renderer = running.renderer
  # Text that is encoded as it was sampled.
  cut = next(
    n
    for n in range(4, 0, -1)
    if renderer.encode(renderer.decode(tokens[:n])).tolist() == tokens[:n]
  )
  text = renderer.decode(tokens[:cut])
  continuation = go_on(
    client, [screenshot(), USER, said(text)], temperature=0, max_tokens=12 - cut
  )
  assert continuation.prompt_token_ids == answer.prompt_token_ids + tokens[:cut]
  assert continuation.choices[0].token_ids == tokens[cut:]
  assert text + continuation.choices[0].message.content == (
    answer.choices[0].message.content
  )
  parts = [{"type": "text", "text": part} for part in (text[:2], text[2:])]
  same = go_on(
    client,
    [screenshot(), USER, said(parts)],
    temperature=0,
    max_tokens=12 - cut,
  )
  assert same.choices[0].token_ids == tokens[cut:]


@pytest.mark.parametrize("text", ["I will", "a\nb ", "<tool_call>\n{", "🙂"])
def test_the_prompt_is_that_of_the_chat_template(running, text):
  reference = transformers.AutoTokenizer.from_pretrained(
    str(policy_files.resolve("tiny_vl"))
  )
  messages = [
    {"role": "system", "content": "Be brief."},
    USER,
    said("b"),
    USER,
    said(text),
  ]
  shown = reference.apply_chat_template(
    messages, tokenize=False, continue_final_message=True
  )
  if text.endswith(" "):  # The reference trims, as some templates do.
    shown = shown.rstrip(" ") + " "
  got = go_on(running.client(), messages, max_tokens=2)
  assert got.prompt_token_ids == reference.encode(
    shown, add_special_tokens=False
  )


def test_a_stream_has_the_new_text_alone(running):
  messages = [USER, said("I will")]
  options = dict(temperature=1.0, seed=4, max_tokens=10)
  answer = go_on(running.client(), messages, **options)
  events = go_on(running.client(), messages, stream=True, **options)
  text = "".join(e.choices[0].delta.content or "" for e in events)
  assert text == answer.choices[0].message.content


def test_a_cut_answer_keeps_its_tokens_in_a_session(running):
  session = start(running, sampling={"temperature": 1.5})
  client = running.client(f"/sessions/{session['session_id']}")
  messages, tokens, mask, prefilled = [screenshot(), USER], [], [], 0
  for turn in range(2):
    text = ""
    for piece in range(3):
      request = [*messages, said(text)] if text else messages
      one = (go_on if text else ask)(
        client, request, max_tokens=4, seed=10 * turn + piece, temperature=1.5
      )
      choice = one.choices[0]
      # Nothing comes between the pieces.
      assert one.prompt_token_ids[: len(tokens)] == tokens
      new = len(one.prompt_token_ids) - len(tokens)
      assert not (text and new)
      prefilled += new + len(choice.token_ids)
      tokens = one.prompt_token_ids + choice.token_ids
      mask += [0] * new + [1] * len(choice.token_ids)
      text += choice.message.content
      if choice.finish_reason != "length":
        break
    messages = [*messages, said(text), {"role": "user", "content": f"{turn}?"}]
  (row,) = export(running, session, style="concat").values()
  assert row["tensor_dict"]["input_ids"] == [tokens]
  assert row["tensor_dict"]["loss_mask"] == [mask]


def test_other_text_than_the_sampled_one_starts_its_own_sequence(running):
  session = start(running, sampling={"temperature": 1.5})
  client = running.client(f"/sessions/{session['session_id']}")
  first = ask(client, [USER], max_tokens=4, temperature=1.5)
  text = first.choices[0].message.content
  changed = go_on(client, [USER, said(text + "!")], max_tokens=4)
  assert changed.prompt_token_ids == (
    first.prompt_token_ids + running.renderer.encode(text + "!").tolist()
  )
  rows = export(running, session, style="concat")
  trained = sorted(
    [
      t
      for t, m in zip(
        *(one["tensor_dict"][k][0] for k in ("input_ids", "loss_mask"))
      )
      if m
    ]
    for one in rows.values()
  )
  assert trained == sorted(
    [first.choices[0].token_ids, changed.choices[0].token_ids]
  )
  # What follows the whole message follows its tokens.
  more = [USER, said(text + "!" + changed.choices[0].message.content), USER]
  third = ask(client, more, max_tokens=2)
  prefix = changed.prompt_token_ids + changed.choices[0].token_ids
  assert third.prompt_token_ids[: len(prefix)] == prefix


def test_an_answer_that_ended_is_not_opened_again(running):
  session = start(running)
  client = running.client(f"/sessions/{session['session_id']}")
  for seed in range(200):
    one = ask(client, [USER], max_tokens=24, seed=seed, temperature=2.0)
    if one.choices[0].finish_reason == "stop" and (
      one.choices[0].message.content
    ):
      break
  text = one.choices[0].message.content
  again = go_on(client, [USER, said(text)], max_tokens=3)
  assert again.prompt_token_ids == (
    one.prompt_token_ids + running.renderer.encode(text).tolist()
  )


CALL = {
  "type": "function",
  "id": "a",
  "function": {"name": "f", "arguments": "{}"},
}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("change, param, words", [
    ({"add_generation_prompt": True}, "continue_final_message",
     "add_generation_prompt=false"),
    ({"continue_final_message": False}, "add_generation_prompt",
     "needs continue_final_message=true"),
    ({"continue_final_message": 1}, "continue_final_message", "true or false"),
    ({"messages": [USER]}, "messages", "one before the last"),
    ({"messages": [said("a")]}, "messages", "one before the last"),
    ({"messages": [USER, USER]}, "messages[1].role", "'user' cannot"),
    ({"messages": [USER, said("")]}, "messages[1].content", "is empty"),
    ({"messages": [USER, {**said("a"), "tool_calls": [CALL]}]},
     "messages[1].tool_calls", "cannot be continued"),
    ({"tools": [TOOL]}, "continue_final_message", "tool_choice to none"),
    ({"tools": [TOOL], "tool_choice": "required"}, "continue_final_message",
     "tools exclude"),
    ({"response_format": {"type": "json_object"}}, "continue_final_message",
     "response_format exclude"),
    ({"guided_regex": "a+"}, "continue_final_message", "guided_regex exclude"),
    ({"prompt_token_ids": [1]}, "continue_final_message", "append"),
    ({"messages": [USER, said("word " * 100_000)]}, "messages",
     "context length is 256"),
])  # fmt: skip
def test_what_cannot_be_continued_is_refused(running, change, param, words):
  body = {"messages": [USER, said("a")], **CONTINUE} | change
  messages = body.pop("messages")
  with pytest.raises(openai.BadRequestError) as refused:
    ask(running.client(), messages, extra_body=body)
  assert refused.value.param == param
  assert words in refused.value.message


def test_tools_may_be_shown_while_none_is_called(running):
  got = go_on(
    running.client(),
    [USER, said("I will")],
    max_tokens=3,
    extra_body={"tools": [TOOL], "tool_choice": "none"},
  )
  shown = running.renderer.decode(got.prompt_token_ids)
  assert '"name": "f"' in shown and shown.endswith("assistant\nI will")


@pytest.mark.parametrize(
  "endpoint, body",
  [
    ("completions", {"prompt": "a"}),
    ("responses", {"input": "a"}),
    ("messages", {"messages": [USER], "max_tokens": 4}),
  ],
)
def test_other_endpoints_refuse_it_by_name(running, endpoint, body):
  answer = running.post(f"/v1/{endpoint}", {"model": MODEL, **body, **CONTINUE})
  assert answer.status_code == 400
  error = json.loads(answer.content)["error"]
  named = error.get("param") or error["message"]
  assert "continue_final_message" in named


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=200)
def test_each_sampled_token_is_trained_once_however_answers_continue(data):
  draw = lambda *choices: data.draw(st.sampled_from(choices))
  session, renderer = told_sessions.new_session(), told_sessions.renderer()
  messages, open_text, before = [USER], "", None
  logprobs = []
  for _ in range(data.draw(st.integers(1, 8))):
    kind = draw("exact", "exact", "edited", "new") if open_text else "new"
    if kind == "new":
      if open_text:
        messages = [*messages, said(open_text), USER]
      open_text = ""
      pending = session.prompt(messages)
    else:
      open_text += " and" if kind == "edited" else ""
      pending = session.prompt_continuing([*messages, said(open_text)])
    prompt = pending.prompt.tokens.tolist()
    if kind == "exact" and not before.closed:
      # Nothing but what was asked and sampled before.
      assert prompt == [*before.prompt.tokens, *before.completion.tokens]
    elif open_text:
      rendered = renderer.render(messages).tokens
      text = renderer.encode(open_text).tolist()
      assert prompt[-len(text) :] == text
      if len(messages) == 1:
        assert prompt == [*rendered, *text]
    ids = data.draw(st.lists(st.integers(300, 1500), min_size=1, max_size=3))
    if draw(True, False):
      ids.append(renderer.end_of_turn_id)
    own = -1e-3 * (1 + len(logprobs) + np.arange(len(ids)))
    logprobs += own.tolist()
    text = renderer.decode(ids)
    sampled = told_sessions.completion(ids, own)
    before = session.add(pending, sampled, assistant_message=said(text))
    open_text += text
    assert before.whole_text == before.answer["content"] == open_text
  for style in ("concat", "individual"):
    trained = []
    for one in session.export(style):
      mask = one.sequence.loss_mask
      trained += one.sequence.logprobs[mask].tolist()
    np.testing.assert_allclose(sorted(trained), sorted(logprobs), rtol=1e-6)
