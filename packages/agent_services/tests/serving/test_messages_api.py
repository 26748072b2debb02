"""`/v1/messages`, and what every endpoint accepts without using it."""

import json

import pytest
from rollout_server import ask
from rollout_server import data_url
from rollout_server import export
from rollout_server import MODEL
from rollout_server import start

pytestmark = pytest.mark.timeout(300)
TOOL = {
  "name": "click",
  "description": "Clicks.",
  "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}},
}
CALL = '{"name": "click", "arguments": {"x": 3}}'
SAID = f"Left.\n<tool_call>\n{CALL}\n</tool_call>"


def image(seed):
  data = data_url(seed).partition(",")[2]
  source = {"type": "base64", "media_type": "image/png", "data": data}
  return {"type": "image", "source": source}


def messages(running, conversation, path="", **options):
  body = {"model": MODEL, "max_tokens": 8, "seed": 5, "messages": conversation}
  answer = running.post(f"{path}/v1/messages", body | options)
  return answer


def events_of(answer):
  lines = answer.text.splitlines()
  names = [l.removeprefix("event: ") for l in lines if l.startswith("event: ")]
  events = [
    json.loads(l.removeprefix("data: "))
    for l in lines
    if l.startswith("data: ")
  ]
  assert names == [e["type"] for e in events]
  return events


def test_a_message_is_the_chat_completion_of_its_blocks(running):
  answer = messages(
      running,
      [
          {"role": "user", "content": [
              {"type": "text", "text": "look"}, image(1)]},
          {"role": "assistant", "content": [
              {"type": "text", "text": "I see."},
              {"type": "tool_use", "id": "c1", "name": "click",
               "input": {"x": 3}}]},
          {"role": "user", "content": [
              {"type": "tool_result", "tool_use_id": "c1", "content": [
                  {"type": "text", "text": "done"}, image(2)]},
              {"type": "text", "text": "go on"}]},
      ],
      system=[{"type": "text", "text": "Use it."}],
      tools=[TOOL],
      return_token_ids=True,
  ).json()  # fmt: skip
  chat = ask(
      running.client(),
      [
          {"role": "system", "content": "Use it."},
          {"role": "user", "content": [
              {"type": "text", "text": "look"},
              {"type": "image_url", "image_url": {"url": data_url(1)}}]},
          {"role": "assistant", "content": "I see.", "tool_calls": [{
              "id": "c1", "type": "function",
              "function": {"name": "click", "arguments": '{"x": 3}'}}]},
          {"role": "tool", "tool_call_id": "c1", "content": [
              {"type": "text", "text": "done"},
              {"type": "image_url", "image_url": {"url": data_url(2)}}]},
          {"role": "user", "content": "go on"},
      ],
      tools=[{"type": "function", "function": {
          "name": "click", "description": "Clicks.",
          "parameters": TOOL["input_schema"]}}],
      max_tokens=8,
      seed=5,
  )  # fmt: skip
  assert answer["prompt_token_ids"] == chat.prompt_token_ids
  assert answer["token_ids"] == chat.choices[0].token_ids
  (block,) = answer["content"]
  assert block == {"type": "text", "text": chat.choices[0].message.content}
  cut = chat.choices[0].finish_reason == "length"
  assert answer["stop_reason"] == ("max_tokens" if cut else "end_turn")
  usage = answer["usage"]
  read = usage["input_tokens"] + usage["cache_read_input_tokens"]
  assert read == len(answer["prompt_token_ids"])
  assert usage["output_tokens"] == len(answer["token_ids"])


def test_a_stream_adds_up(running):
  conversation = [{"role": "user", "content": "a b c"}]
  answer = messages(running, conversation, max_tokens=20).json()
  events = events_of(
    messages(running, conversation, max_tokens=20, stream=True)
  )
  kinds = [e["type"] for e in events]
  deltas = [e for e in events if e["type"] == "content_block_delta"]
  assert len(deltas) > 1
  assert kinds == [
    "message_start",
    "content_block_start",
    *["content_block_delta"] * len(deltas),
    "content_block_stop",
    "message_delta",
    "message_stop",
  ]
  text = "".join(e["delta"]["text"] for e in deltas)
  assert text == answer["content"][0]["text"]
  assert events[-2]["delta"]["stop_reason"] == answer["stop_reason"]
  tokens = events[-2]["usage"]["output_tokens"]
  assert tokens == answer["usage"]["output_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_with_a_call_goes_on_in_its_session(running, saying, stream):
  session = start(running)
  path = f"/sessions/{session['session_id']}"
  conversation = [{"role": "user", "content": [image(4)]}]
  options = {"tools": [TOOL], "stream": stream}
  saying(SAID)
  answer = messages(running, conversation, path, **options)
  if stream:
    events = events_of(answer)
    begun = [e for e in events if e["type"] == "content_block_start"]
    content = [e["content_block"] for e in begun]
    for event in events:
      if event["type"] == "content_block_delta":
        block, delta = content[event["index"]], event["delta"]
        if delta["type"] == "text_delta":
          block["text"] += delta["text"]
        else:
          block["input"] = json.loads(delta["partial_json"])
  else:
    content = answer.json()["content"]
  text, call = content
  assert text == {"type": "text", "text": "Left."}
  assert call["name"] == "click" and call["input"] == {"x": 3}
  conversation += [
    {"role": "assistant", "content": content},
    {
      "role": "user",
      "content": [
        {"type": "tool_result", "tool_use_id": call["id"], "content": "clicked"}
      ],
    },
  ]
  saying("Done.")
  assert messages(running, conversation, path, **options).status_code == 200
  assert len(export(running, session, style="concat")) == 1


def test_the_stop_sequence_is_named(running):
  conversation = [{"role": "user", "content": "a b c"}]
  text = messages(running, conversation, max_tokens=20).json()["content"][0][
    "text"
  ]
  stop = text[3:6]
  answer = messages(
    running, conversation, max_tokens=20, stop_sequences=[stop]
  ).json()
  assert answer["stop_reason"] == "stop_sequence"
  assert answer["stop_sequence"] == stop
  shown = "".join(b["text"] for b in answer["content"])
  assert shown == text[: text.index(stop)]


def test_one_call_at_a_time_ends_the_completion(running, monkeypatch):
  """By the tokens that spell the end of a call."""
  policy = running.app._service.policy
  full_answer = messages(
    running,
    [{"role": "user", "content": "a"}],
    max_tokens=24,
    return_token_ids=True,
  ).json()
  text = full_answer["content"][0]["text"]
  end = text[4:7]
  monkeypatch.setattr(policy.parser, "call_end", end)
  answer = messages(
    running,
    [{"role": "user", "content": "a"}],
    max_tokens=24,
    return_token_ids=True,
    tools=[TOOL],
    tool_choice={"type": "auto", "disable_parallel_tool_use": True},
  ).json()
  content = "".join(b["text"] for b in answer["content"])
  # Kept, and at the end; tools change the prompt, hence the text.
  assert end not in content or content.endswith(end)


@pytest.mark.parametrize(
    "change, param, words",
    [
        ({"max_tokens": None}, "max_tokens", "at least 1"),
        ({"messages": []}, "messages", "with an entry"),
        ({"messages": [{"role": "tool", "content": "x"}]},
         "messages[0].role", "one of user, assistant"),
        ({"messages": [{"role": "user", "content": [
            {"type": "document", "source": {}}]}]},
         "messages[0].content[0].type", "tool_result"),
        ({"messages": [{"role": "user", "content": [
            {"type": "image", "source": {
                "type": "base64", "media_type": "image/bmp", "data": "x"}}]}]},
         "messages[0].content[0].source.media_type", "image/png"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}},
         "tool_choice.name", "name one of the tools"),
        ({"tools": [{"type": "computer_20250124", "name": "computer",
                     "input_schema": {}}]}, "tools[0].type", "custom"),
        ({"messages": [{"role": "user", "content": "x"},
                       {"role": "assistant", "content": "y"}]},
         "messages[1]", "continue_final_message"),
        ({"temperatur": 1}, "temperatur", "did you mean temperature"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_its_name(
  running, change, param, words
):
  body = {"messages": [{"role": "user", "content": "x"}]} | change
  answer = messages(running, body.pop("messages"), **body)
  assert answer.status_code == 400
  error = answer.json()
  assert error["type"] == "error"
  assert error["error"]["param"] == param
  assert words in error["error"]["message"]


def test_a_session_key_opens_its_session_as_x_api_key(running):
  session = start(running)
  body = {
    "model": MODEL,
    "max_tokens": 4,
    "messages": [{"role": "user", "content": "x"}],
  }
  answer = running.post(
    "/v1/messages", body, **{"x-api-key": session["api_key"]}
  )
  assert answer.json()["id"] in export(running, session)


# --- what changes nothing -----------------------------------------------------


def test_fields_that_change_nothing_are_accepted_and_named(running):
  plain = [
    {
      "role": "user",
      "content": [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": data_url(3)}},
      ],
    },
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
  ]
  body = {"model": "default", "max_tokens": 6, "seed": 3, "messages": plain}
  before = running.post("/v1/chat/completions", body)
  assert "x-ignored-fields" not in before.headers
  noisy = json.loads(json.dumps(plain))
  noisy[0]["name"] = "bob"
  noisy[0]["content"][0]["cache_control"] = {"type": "ephemeral"}
  noisy[0]["content"][1]["image_url"]["detail"] = "low"
  noisy[1] |= {
    "reasoning_content": "hm",
    "provider_specific_fields": {"refusal": None},
    "refusal": None,
    "audio": None,
    "function_call": None,
    "tool_calls": None,
  }
  more = {
      "prompt_cache_key": "k", "reasoning_effort": "high", "verbosity": "low",
      "parallel_tool_calls": False, "min_tokens": 0, "echo": None,
      "chat_template_kwargs": {"enable_thinking": True}, "user": "u",
      "continue_final_message": False, "max_completion_tokens": 6,
  }  # fmt: skip
  after = running.post(
    "/v1/chat/completions", body | more | {"messages": noisy}
  )
  assert after.status_code == 200, after.text
  assert set(after.headers["x-ignored-fields"].split(", ")) == {
    "messages[].name",
    "messages[].content[].cache_control",
    "messages[].content[].image_url.detail",
    "messages[].reasoning_content",
    "messages[].provider_specific_fields",
    "prompt_cache_key",
    "reasoning_effort",
    "verbosity",
    "chat_template_kwargs.enable_thinking",
  }
  sampled_part = lambda reply: (reply.json()["choices"], reply.json()["usage"])
  for choice in (*sampled_part(before)[0], *sampled_part(after)[0]):
    choice.pop("interaction_id")
  texts = lambda choices: [
    (c["message"]["content"], c["finish_reason"]) for c in choices
  ]
  assert texts(sampled_part(before)[0]) == texts(sampled_part(after)[0])
  assert before.json()["model"] == MODEL


@pytest.mark.parametrize(
  "field",
  [
    {"continue_final_message": True},
    {"add_generation_prompt": False},
    {"chat_template_kwargs": {"add_vision_id": True}},
    {"chat_template_kwargs": {"tools_first": True}},
  ],
)
def test_what_would_change_the_answer_is_refused(running, field):
  body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
  answer = running.post("/v1/chat/completions", body | field)
  assert answer.status_code == 400
  assert answer.json()["error"]["param"].startswith(next(iter(field)))


def test_an_answer_has_a_request_id(running):
  body = {
    "model": MODEL,
    "max_tokens": 2,
    "messages": [{"role": "user", "content": "x"}],
  }
  own = running.post("/v1/chat/completions", body, **{"x-request-id": "mine-1"})
  assert own.headers["x-request-id"] == "mine-1"
  streamed = running.post("/v1/chat/completions", body | {"stream": True})
  refused = running.post("/v1/chat/completions", {"model": MODEL})
  ids = [r.headers["x-request-id"] for r in (streamed, refused)]
  assert all(i.startswith("req_") for i in ids) and len(set(ids)) == 2


def test_a_model_and_a_response_are_found_by_their_ids(running):
  client = running.client()
  assert client.models.retrieve(MODEL).id == MODEL
  answer = client.responses.create(
    model=MODEL, input="a", max_output_tokens=4, instructions="b"
  )
  stored = client.responses.retrieve(answer.id)
  assert stored.output_text == answer.output_text
  assert stored.instructions == "b" and stored.usage == answer.usage
  session = start(running)
  session_client = running.client(key=session["api_key"])
  for path in (f"/v1/responses/{answer.id}", "/v1/responses/none"):
    status = session_client._client.get(
      running.url + path,
      headers={"authorization": f"Bearer {session['api_key']}"},
    ).status_code
    assert status == 404  # It belongs to the session.
  dropped = client.responses.create(
    model=MODEL, input="a", max_output_tokens=4, store=False
  )
  with pytest.raises(Exception, match="is kept here"):
    client.responses.retrieve(dropped.id)


def test_areal_may_grant_capacity(running):
  free = running.post("/grant_capacity").json()["capacity"]
  start(running)
  assert running.post("/grant_capacity").json()["capacity"] == free - 1
