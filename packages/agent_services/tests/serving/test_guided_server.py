"""Ends, grammars and log-probs of completions, by the real `openai` client."""

import json
import re

from agent_services.serving import answers
import numpy as np
import openai
import pytest
from rollout_server import ask
from rollout_server import export
from rollout_server import MODEL
from rollout_server import screenshot
from rollout_server import start
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.parser import tool_parser
from tunix.rl.multi_turn.parser.tool_parser.formats import qwen

pytestmark = pytest.mark.timeout(300)
USER = [{"role": "user", "content": "go"}]
POINT = {
  "type": "object",
  "properties": {
    "x": {"type": "integer", "minimum": 0, "maximum": 99},
    "button": {"enum": ["left", "right"]},
  },
  "required": ["x", "button"],
  "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "click", "parameters": POINT}},
    {"type": "function", "function": {"name": "wait", "parameters": {
        "type": "object", "properties": {}, "additionalProperties": False}}},
]  # fmt: skip


def schema(value):
  return {
    "type": "json_schema",
    "json_schema": {"name": "point", "schema": value, "strict": True},
  }


# --- alternatives -------------------------------------------------------------


def test_alternatives_are_told_in_every_shape(running):
  client = running.client()
  decoder = running.app._service.policy.decoder
  chat = ask(
    client,
    USER,
    logprobs=True,
    top_logprobs=3,
    extra_body={"return_raw_logprobs": True, "min_p": 0.001},
  )
  choice = chat.choices[0]
  plain = ask(client, USER, logprobs=True, extra_body={"min_p": 0.001})
  assert choice.token_ids == plain.choices[0].token_ids
  for entry in choice.logprobs.content:
    assert len(entry.top_logprobs) == 3
    top = [t.logprob for t in entry.top_logprobs]
    assert top == sorted(top, reverse=True)
    assert entry.logprob <= top[0] + 1e-6
  assert len(choice.raw_logprobs) == len(choice.token_ids)
  assert not hasattr(plain.choices[0], "raw_logprobs")
  old = client.completions.create(
    model=MODEL,
    prompt=chat.prompt_token_ids,
    logprobs=3,
    max_tokens=6,
    seed=1,
    extra_body={"min_p": 0.001},
  )
  new = client.responses.create(
    model=MODEL,
    input="go",
    include=["message.output_text.logprobs"],
    top_logprobs=3,
    max_output_tokens=6,
    extra_body={"seed": 1, "min_p": 0.001},
  )
  parts = new.output[0].content[0].logprobs
  for i, entry in enumerate(choice.logprobs.content):
    want = {
      t.token: pytest.approx(t.logprob, abs=1e-4) for t in entry.top_logprobs
    }
    got = old.choices[0].logprobs.top_logprobs[i]
    assert decoder.token(choice.token_ids[i]) in got or any(
      name.startswith("bytes:") for name in got
    )
    assert {k: v for k, v in got.items() if k in want}.items() <= want.items()
    assert {t.token: t.logprob for t in parts[i].top_logprobs} == want


def test_what_cannot_be_sampled_is_no_alternative(running):
  answer = ask(
    running.client(),
    USER,
    logprobs=True,
    top_logprobs=5,
    extra_body={"top_k": 2},
  )
  for entry in answer.choices[0].logprobs.content:
    total = sum(np.exp(t.logprob) for t in entry.top_logprobs)
    assert len(entry.top_logprobs) == 2 and total == pytest.approx(1, abs=1e-4)


# --- stop strings -------------------------------------------------------------


def long_answer(running, seed, **options):
  client = running.client()
  return ask(client, USER, max_tokens=32, seed=seed, **options).choices[0]


def a_part(text, decode, ids):
  """A string inside of a text that its own tokens show."""
  for at in range(3, len(text) - 3):
    part = text[at : at + 3]
    if "\ufffd" not in part and part in decode(ids):
      return part
  raise AssertionError(text)


@pytest.mark.parametrize("seed", range(4))
def test_a_stop_string_ends_text_before_it_and_tokens_with_it(running, seed):
  decode = running.renderer.decode
  answer = long_answer(running, seed)
  text = answer.message.content
  stop = a_part(text, decode, answer.token_ids)
  cut = long_answer(running, seed, stop=["not there", stop], logprobs=True)
  assert cut.finish_reason == "stop"
  assert cut.message.content == text[: text.index(stop)]
  ids = cut.token_ids
  assert ids == answer.token_ids[: len(ids)]
  assert stop in decode(ids) and stop not in decode(ids[:-1])
  assert len(cut.logprobs.content) == len(ids)
  events = list(
    ask(
      running.client(), USER, max_tokens=32, seed=seed, stop=stop, stream=True
    )
  )
  streamed = "".join(
    e.choices[0].delta.content or "" for e in events if e.choices
  )
  assert streamed == cut.message.content
  assert events[-1].choices[0].token_ids == ids


def test_what_comes_after_a_stop_string_keeps_its_tokens(running):
  session = start(running)
  client = running.client(f"/sessions/{session['session_id']}")
  answer = long_answer(running, 1)
  stop = a_part(
    answer.message.content, running.renderer.decode, answer.token_ids
  )
  first = ask(client, USER, max_tokens=32, stop=stop, seed=1)
  choice = first.choices[0]
  reply = {"role": "assistant", "content": choice.message.content}
  second = ask(client, [*USER, reply, *USER])
  prefix = first.prompt_token_ids + choice.token_ids
  assert second.prompt_token_ids[: len(prefix)] == prefix
  (row,) = export(running, session, style="concat").values()
  trained = np.sum(row["tensor_dict"]["loss_mask"])
  assert trained == len(choice.token_ids) + len(second.choices[0].token_ids)


def test_a_completion_whose_stop_string_is_told_again_goes_on(running):
  session = start(running)
  client = running.client(f"/sessions/{session['session_id']}")

  def complete(prompt, **options):
    answer = client.completions.create(
      model=MODEL,
      prompt=prompt,
      seed=2,
      extra_body={"return_token_ids": True},
      **options,
    )
    return answer.choices[0]

  free = complete("Think:", max_tokens=32)
  text = running.renderer.decode(free.token_ids)
  # One that ends where its last token does, as an agent's "Observation:" may.
  ends = [running.renderer.decode(free.token_ids[:i]) for i in range(4, 30)]
  end = next(
    e for e in ends if text.startswith(e) and text.find(e[-3:]) == (len(e) - 3)
  )
  stop = end[-3:]
  cut = complete("Think:", max_tokens=32, stop=stop)
  assert cut.text == end[:-3]
  again = complete("Think:" + cut.text + stop + " seen", max_tokens=4)
  prefix = cut.prompt_token_ids + cut.token_ids
  assert again.prompt_token_ids[: len(prefix)] == prefix


def test_strings_are_found_where_characters_are_split():
  names = [b"a\xe2\x98", b"\x83b", b"\xe2", b"\x98\x83c"]
  watch = answers.StopStrings(["\u2603c"], names.__getitem__, [9])
  assert watch(np.array([0, 1])) is None
  assert watch(np.array([0, 1, 9, 2])) is None
  assert watch(np.array([0, 1, 9, 2, 3, 0])) == 5
  assert watch.cut("a\u2603b\u2603c") == "a\u2603b"


# --- grammars -----------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_is_what_its_schema_describes(running, seed):
  answer = ask(
    running.client(),
    [screenshot(seed)],
    response_format=schema(POINT),
    max_tokens=32,
    seed=seed,
    logprobs=True,
    top_logprobs=20,
  )
  choice = answer.choices[0]
  assert choice.finish_reason == "stop"
  value = json.loads(choice.message.content)
  assert set(value) == {"x", "button"} and 0 <= value["x"] <= 99
  assert value["button"] in ("left", "right")
  assert choice.token_ids[-1] == running.renderer.end_of_turn_id
  for entry in choice.logprobs.content:
    top = [t.logprob for t in entry.top_logprobs]
    if len(top) < 20:  # Every token that the grammar allows.
      assert sum(np.exp(top)) == pytest.approx(1, abs=1e-3)
  assert running.renderer.image_token_id not in choice.token_ids


def test_every_endpoint_can_hold_its_answers(running):
  client = running.client()
  pattern = "(left|right)-[0-9]{3}"
  texts = [
    ask(client, USER, max_tokens=32, extra_body={"guided_regex": pattern})
    .choices[0]
    .message.content,
    client.completions.create(
      model=MODEL,
      prompt="x",
      max_tokens=32,
      extra_body={"guided_regex": pattern},
    )
    .choices[0]
    .text,
    client.responses.create(
      model=MODEL, input="x", extra_body={"guided_regex": pattern}
    ).output_text,
  ]
  assert all(re.fullmatch(pattern, text) for text in texts), texts
  response = client.responses.create(
    model=MODEL,
    input="x",
    text={"format": {"type": "json_schema", "name": "p", "schema": POINT}},
  )
  assert json.loads(response.output_text)["button"] in ("left", "right")
  assert response.text.format.type == "json_schema"


def test_a_tool_must_be_called_where_it_is_said_so(running, monkeypatch):
  client = running.client()
  policy = running.app._service.policy
  # Leaves room in the small context.
  monkeypatch.setattr(policy, "parser", qwen.QwenToolParser(compact=True))
  strict = [{**t, "function": t["function"] | {"strict": True}} for t in TOOLS]
  for stream in (False, True):
    answer = ask(
      client,
      USER,
      tools=strict,
      tool_choice={"type": "function", "function": {"name": "click"}},
      max_tokens=96,
      stream=stream,
    )
    if stream:
      deltas = [e.choices[0].delta for e in answer if e.choices]
      (call,) = [c for d in deltas for c in d.tool_calls or ()]
    else:
      assert answer.choices[0].finish_reason == "tool_calls"
      (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "click"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"x", "button"} and 0 <= arguments["x"] <= 99
  names = set()
  for seed in range(6):
    answer = ask(
      client,
      USER,
      tools=TOOLS,
      tool_choice="required",
      parallel_tool_calls=False,
      max_tokens=96,
      seed=seed,
    )
    (call,) = answer.choices[0].message.tool_calls
    names.add(call.function.name)
  assert names <= {"click", "wait"}
  answer = client.responses.create(
    model=MODEL,
    input="go",
    tools=[{"type": "function", **TOOLS[0]["function"], "strict": True}],
    tool_choice={"type": "function", "name": "click"},
  )
  (call,) = answer.output
  assert call.type == "function_call"
  assert set(json.loads(call.arguments)) == {"x", "button"}


@pytest.mark.parametrize("stream", (False, True))
def test_a_call_that_its_length_cuts_off_is_no_content(
  running, monkeypatch, stream
):
  policy = running.app._service.policy
  monkeypatch.setattr(policy, "parser", qwen.QwenToolParser(compact=True))
  options = {
    "tools": TOOLS,
    "tool_choice": "required",
    "max_tokens": 4,
    "stream": stream,
  }
  session = start(running)
  client = running.client(f"/sessions/{session['session_id']}")
  answer = ask(client, USER, **options)
  if stream:
    choices = [e.choices[0] for e in answer if e.choices]
    content = "".join(c.delta.content or "" for c in choices)
    calls = [c for choice in choices for c in choice.delta.tool_calls or ()]
    reason = choices[-1].finish_reason
  else:
    (choice,) = answer.choices
    content, calls = choice.message.content, choice.message.tool_calls
    reason = choice.finish_reason
  assert (reason, content, calls or []) == ("length", "", [])
  # What was sampled stays so in the session.
  history = [*USER, {"role": "assistant", "content": ""}, *USER]
  answer = ask(client, history, tools=TOOLS)
  first, _ = export(running, session).values()
  sampled = first["tensor_dict"]["input_ids"][0][-4:]
  assert running.renderer.decode(sampled).startswith("<tool")
  prompt = answer.prompt_token_ids
  assert any(prompt[i : i + 4] == sampled for i in range(len(prompt)))


def test_text_before_a_call_that_is_cut_off_is_content():
  parser = tool_parser.make_tool_parser("qwen")
  completion = lambda reason: policy_client.Completion(
    np.arange(3), np.zeros(3), np.zeros(3), reason
  )
  text = 'I go.\n<tool_call>\n{"name": "cli'
  cut = answers.make_choice(completion("length"), text, parser)
  assert cut.message == {"role": "assistant", "content": "I go."}
  assert cut.finish_reason == "length"
  # One that the policy ended itself is malformed, and shown.
  ended = answers.make_choice(completion("stop"), text, parser)
  assert ended.message["content"] == text
  # Of two calls the first is whole.
  call = '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>'
  two = answers.make_choice(completion("length"), call + text, parser)
  assert len(two.message["tool_calls"]) == 1
  assert two.finish_reason == "length" and not two.message["content"]
  thinking = "<think>I see <b"
  cut = answers.make_choice(completion("length"), thinking, parser)
  assert cut.message["content"] == thinking


def test_an_open_schema_is_answered_with_whole_json(running):
  """Without its end forced, most would be cut."""
  for seed in range(4):
    answer = ask(
      running.client(),
      USER,
      max_tokens=48,
      seed=seed,
      response_format={"type": "json_object"},
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop" and len(choice.token_ids) <= 48
    assert isinstance(json.loads(choice.message.content), dict)


def test_a_strict_tool_need_not_be_called(running, monkeypatch):
  policy = running.app._service.policy
  monkeypatch.setattr(policy, "parser", qwen.QwenToolParser(compact=True))
  strict = [{**t, "function": t["function"] | {"strict": True}} for t in TOOLS]
  tool_lists = []
  monkeypatch.setattr(
    policy.grammars,
    "start",
    lambda source, length, start=policy.grammars.start: (
      tool_lists.append(source) or start(source, length)
    ),
  )
  answer = ask(running.client(), USER, tools=strict)
  free = ask(running.client(), USER, tools=TOOLS)
  assert len(tool_lists) == 1 and "lazy" in tool_lists[0]
  # What is strict is not for the policy to read.
  assert answer.prompt_token_ids == free.prompt_token_ids
  assert answer.choices[0].token_ids


def test_with_tools_and_a_format_an_answer_is_a_call_or_json(
  running, monkeypatch
):
  client = running.client()
  policy = running.app._service.policy
  monkeypatch.setattr(policy, "parser", qwen.QwenToolParser(compact=True))
  tools = [{**t, "function": t["function"] | {"strict": True}} for t in TOOLS]
  ends = {"x": "<tool_call></tool_call>"}  # Is text in JSON.
  shape = {"enum": [ends]}
  kinds = set()
  for seed in range(8):
    (choice,) = ask(
      client,
      USER,
      tools=tools,
      response_format=schema(shape),
      seed=seed,
      max_tokens=96,
      parallel_tool_calls=False,
    ).choices
    message = choice.message
    kinds.add(choice.finish_reason)
    if choice.finish_reason == "tool_calls":
      assert not message.content and len(message.tool_calls) == 1
      assert message.tool_calls[0].function.name in ("click", "wait")
    elif choice.finish_reason == "stop":
      assert json.loads(message.content) == ends and not message.tool_calls
  assert kinds >= {"stop", "tool_calls"}
  kinds = set()
  for seed in range(8):
    answer = client.responses.create(
      model=MODEL,
      input="go",
      max_output_tokens=96,
      parallel_tool_calls=False,
      extra_body={"seed": seed},
      tools=[{"type": "function", **t["function"]} for t in tools],
      text={"format": {"type": "json_schema", "name": "p", "schema": shape}},
    )
    if answer.status == "completed":
      kinds |= {item.type for item in answer.output}
      assert json.loads(answer.output_text or "null") in (None, ends)
  assert kinds == {"message", "function_call"}
  # Where a call must be made, there is no text to have the format.
  forced = ask(
    client,
    USER,
    tools=tools,
    response_format=schema(shape),
    tool_choice="required",
    max_tokens=96,
  )
  assert forced.choices[0].message.tool_calls


def test_held_answers_are_trained_on_with_their_log_probs(running):
  started = running.post("/rl/start_session", {"other_sampling": "train"})
  session = started.json()
  client = running.client(f"/sessions/{session['session_id']}")
  answer = ask(
    client,
    USER,
    n=2,
    response_format=schema(POINT),
    max_tokens=32,
    logprobs=True,
    top_logprobs=2,
  )
  assert len({tuple(c.token_ids) for c in answer.choices}) == 2
  rows = export(running, session)
  for choice in answer.choices:
    one = rows[choice.interaction_id]["tensor_dict"]
    mask = np.array(one["loss_mask"][0], bool)
    assert np.array(one["input_ids"][0])[mask].tolist() == choice.token_ids
    np.testing.assert_allclose(
      np.array(one["logprobs"][0])[mask],
      [t.logprob for t in choice.logprobs.content],
      atol=1e-6,
    )
  interactions = running.app._service.store.get(
    session["session_id"]
  ).interactions
  assert all(i.completion.top_tokens is None for i in interactions)


def test_without_the_library_a_grammar_is_refused(running, monkeypatch):
  monkeypatch.setattr(running.app._service.policy, "grammars", None)
  with pytest.raises(openai.BadRequestError) as refused:
    ask(running.client(), USER, response_format=schema(POINT))
  assert "tunix-multi-turn[grammar]" in refused.value.message


def test_tools_that_a_parser_has_no_words_for_are_refused(running, monkeypatch):
  policy = running.app._service.policy
  for parser, options, words in (
    (tool_parser.make_tool_parser("ui_tars"), {}, "its own actions only"),
    (
      qwen.QwenToolParser("xml", compact=True),
      {"tool_choice": "required"},
      "no grammar",
    ),
  ):
    monkeypatch.setattr(policy, "parser", parser)
    with pytest.raises(openai.BadRequestError, match=words) as refused:
      ask(running.client(), USER, tools=TOOLS, **options)
    assert refused.value.param == "tools"
