"""`/v1/responses`, asked by the real `openai` client."""

import json

from agent_services.serving import errors
from agent_services.serving.sessions import caches
import openai
import pytest
from rollout_server import ask
from rollout_server import data_url
from rollout_server import export
from rollout_server import MODEL
from rollout_server import SIZE
from rollout_server import start

pytestmark = pytest.mark.timeout(300)
TOOLS = [
  {
    "type": "function",
    "name": "click",
    "description": "Clicks.",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    "strict": False,
  }
]
CALL = '{"name": "click", "arguments": {"x": 3}}'
SAID = f"Left.\n<tool_call>\n{CALL}\n</tool_call>"


def respond(client, items, **options):
  options = {"model": MODEL, "max_output_tokens": 8} | options
  extra = {"return_token_ids": True, "seed": 5}
  extra |= options.pop("extra_body", {})
  return client.responses.create(input=items, extra_body=extra, **options)


def test_a_response_is_the_chat_completion_of_its_items(running):
  client = running.client()
  items = [
      {"role": "user", "content": [
          {"type": "input_text", "text": "look"},
          {"type": "input_image", "image_url": data_url(1)},
      ]},
      {"type": "message", "role": "assistant",
       "content": [{"type": "output_text", "text": "I see."}]},
      {"type": "function_call", "call_id": "c1", "name": "click",
       "arguments": '{"x": 3}'},
      {"type": "function_call_output", "call_id": "c1", "output": [
          {"type": "input_text", "text": "done"},
          {"type": "input_image", "image_url": data_url(2)},
      ]},
  ]  # fmt: skip
  answer = respond(
    client,
    items,
    instructions="Use it.",
    tools=TOOLS,
    include=["message.output_text.logprobs"],
  )
  function = {k: v for k, v in TOOLS[0].items() if k not in ("type", "strict")}
  chat = ask(
      client,
      [
          {"role": "system", "content": "Use it."},
          {"role": "user", "content": [
              {"type": "text", "text": "look"},
              {"type": "image_url", "image_url": {"url": data_url(1)}},
          ]},
          {"role": "assistant", "content": "I see.", "tool_calls": [{
              "id": "c1", "type": "function",
              "function": {"name": "click", "arguments": '{"x": 3}'}}]},
          {"role": "tool", "tool_call_id": "c1", "content": [
              {"type": "text", "text": "done"},
              {"type": "image_url", "image_url": {"url": data_url(2)}},
          ]},
      ],
      tools=[{"type": "function", "function": function}],
      max_tokens=8,
      seed=5,
      logprobs=True,
  )  # fmt: skip
  assert answer.prompt_token_ids == chat.prompt_token_ids
  assert answer.token_ids == chat.choices[0].token_ids
  assert answer.output_text == chat.choices[0].message.content
  (message,) = answer.output
  logprobs = [t.logprob for t in message.content[0].logprobs]
  # What is prefilled beside what differs, and with it the last bit.
  chat_logprobs = [t.logprob for t in chat.choices[0].logprobs.content]
  assert logprobs == pytest.approx(chat_logprobs, abs=1e-5)
  assert answer.token_logprobs == logprobs
  assert answer.usage.input_tokens == len(answer.prompt_token_ids)
  assert answer.usage.output_tokens == len(answer.token_ids)
  assert answer.policy_versions == [[0, 0]]
  cut = chat.choices[0].finish_reason == "length"
  assert answer.status == ("incomplete" if cut else "completed")
  assert (answer.incomplete_details is not None) == cut


def test_a_stream_has_its_events_in_order_and_adds_up(running):
  client = running.client()
  answer = respond(client, "a b c", max_output_tokens=20)
  events = list(respond(client, "a b c", max_output_tokens=20, stream=True))
  kinds = [e.type for e in events]
  deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
  assert len(deltas) > 1
  assert kinds == [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    *["response.output_text.delta"] * len(deltas),
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    f"response.{answer.status}",
  ]
  assert [e.sequence_number for e in events] == list(range(len(events)))
  assert "".join(deltas) == answer.output_text
  last = events[-1].response
  assert last.token_ids == answer.token_ids
  assert last.usage == answer.usage
  assert last.output[0].content == answer.output[0].content
  assert events[0].response.id == last.id
  # The client's own way of putting a stream together.
  with client.responses.stream(
    model=MODEL, input="a b c", max_output_tokens=20, extra_body={"seed": 5}
  ) as stream:
    for _ in stream:
      pass
    if answer.status == "completed":
      assert stream.get_final_response().output_text == answer.output_text


def test_calls_are_items_and_their_outputs_go_on(running, saying, monkeypatch):
  session = start(running)
  client = running.client(f"/sessions/{session['session_id']}")
  saying(SAID)
  first = respond(client, "Click.", tools=TOOLS)
  message, call = first.output
  assert message.content[0].text == "Left." == first.output_text
  assert call.type == "function_call" and call.name == "click"
  assert json.loads(call.arguments) == {"x": 3}
  events = list(respond(client, "Click again.", tools=TOOLS, stream=True))
  kinds = [e.type.removeprefix("response.") for e in events]
  assert kinds[2:] == [
      "output_item.added", "content_part.added", "output_text.delta",
      "output_text.done", "content_part.done", "output_item.done",
      "output_item.added", "function_call_arguments.delta",
      "function_call_arguments.done", "output_item.done",
      events[-1].type.removeprefix("response."),
  ]  # fmt: skip
  assert events[-3].arguments == call.arguments
  monkeypatch.undo()
  # By its items as the client dumps them, and by its name: the same prompt.
  output = {
    "type": "function_call_output",
    "call_id": call.call_id,
    "output": "ok",
  }
  by_items = respond(
    client,
    [
      {"role": "user", "content": "Click."},
      *[item.model_dump() for item in first.output],
      output,
    ],
    tools=TOOLS,
  )
  by_name = respond(
    client, [output], tools=TOOLS, previous_response_id=first.id
  )
  assert by_items.prompt_token_ids == by_name.prompt_token_ids
  prefix = first.prompt_token_ids + first.token_ids
  assert by_name.prompt_token_ids[: len(prefix)] == prefix


def test_an_episode_by_names_is_one_token_exact_sequence(running):
  session = start(running)
  client = running.client(f"/sessions/{session['session_id']}")
  previous, tokens, mask = None, [], []
  for turn in range(3):
    answer = respond(
      client,
      [
        {
          "role": "user",
          "content": [
            {"type": "input_text", "text": f"turn {turn}"},
            {"type": "input_image", "image_url": data_url(turn)},
          ],
        }
      ],
      instructions="Use it.",
      previous_response_id=previous,
      extra_body={"seed": turn},
    )
    previous = answer.id
    assert answer.prompt_token_ids[: len(tokens)] == tokens
    new = len(answer.prompt_token_ids) - len(tokens)
    tokens = answer.prompt_token_ids + answer.token_ids
    mask += [0] * new + [1] * len(answer.token_ids)
  (row,) = export(running, session, style="concat").values()
  assert row["interaction_id"] == previous
  assert row["tensor_dict"]["input_ids"] == [tokens]
  assert row["tensor_dict"]["loss_mask"] == [mask]
  assert len(row["images"]) == 3
  pad = running.renderer.image_token_id
  assert tokens.count(pad) == 3 * running.policy[1].num_image_tokens(*SIZE)
  # A fourth image is one too many, wherever it comes from.
  with pytest.raises(openai.BadRequestError, match="at most 3"):
    respond(
      client,
      [
        {
          "role": "user",
          "content": [{"type": "input_image", "image_url": data_url(9)}],
        }
      ],
      previous_response_id=previous,
    )
  # What was said in a session is not found outside of it.
  with pytest.raises(openai.NotFoundError) as refused:
    respond(running.client(), "x", previous_response_id=previous)
  assert refused.value.code == "previous_response_not_found"


def test_what_is_not_to_be_stored_is_not(running):
  client = running.client()
  stored = respond(client, "a")
  assert respond(client, "b", previous_response_id=stored.id).output
  unstored = respond(client, "a", store=False)
  with pytest.raises(openai.NotFoundError):
    respond(client, "b", previous_response_id=unstored.id)


def test_a_stream_that_fails_says_so(running, monkeypatch):
  async def fails(*args, on_tokens, **options):
    raise RuntimeError("broken")

  monkeypatch.setattr(running.app._service.policy.client, "generate", fails)
  # Before anything was sent, by its status.
  with pytest.raises(openai.InternalServerError, match="broken"):
    list(respond(running.client(max_retries=0), "x", stream=True))

  async def fails_later(*args, on_tokens, **options):
    on_tokens([300])
    raise RuntimeError("broken")

  monkeypatch.setattr(
    running.app._service.policy.client, "generate", fails_later
  )
  with pytest.raises(openai.APIError, match="broken"):
    list(respond(running.client(), "x", stream=True))


@pytest.mark.parametrize(
    "change, param, words",
    [
        ({"input": ""}, "input", "not empty"),
        ({"input": []}, "input", "not empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type",
         "item_reference"),
        ({"input": [{"type": "reasoning", "id": "x", "summary": []}]},
         "input[0].type", "reasoning"),
        ({"input": [{"role": "cook", "content": "x"}]}, "input[0].role",
         "cook"),
        ({"input": [{"role": "user", "content": "x", "name": "y"}]},
         "input[0].name", "not supported"),
        ({"input": [{"role": "user", "content": [
            {"type": "input_file", "file_id": "x"}]}]},
         "input[0].content[0].type", "input_file"),
        ({"input": [{"role": "user", "content": [
            {"type": "input_image", "file_id": "x"}]}]},
         "input[0].content[0].file_id", "not supported"),
        ({"input": [{"type": "function_call_output", "output": "x"}]},
         "input[0].call_id", "must be a string"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]},
         "input[0].arguments", "JSON text"),
        ({"background": True}, "background", "not supported"),
        ({"truncation": "middle"}, "truncation", "auto or disabled"),
        ({"include": ["file_search_call.results"]}, "include",
         "message.output_text.logprobs"),
        ({"max_output_tokens": 100}, "max_output_tokens", "[1, 96]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"top_logprobs": 2}, "top_logprobs", "include="),
        ({"extra_body": {"n": 2}}, "n", "not supported"),
        ({"extra_body": {"stop": "x"}}, "stop", "not supported"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_its_name(
  running, change, param, words
):
  change = dict(change)
  items = change.pop("input", "x")
  with pytest.raises(openai.BadRequestError) as refused:
    respond(running.client(), items, **change)
  assert refused.value.param == param
  assert words in refused.value.message


def test_what_is_remembered_is_bounded():
  cache = caches.ConversationCache(max_answers=3, max_characters=2000)
  say = lambda text: [{"role": "assistant", "content": text}]
  answered = (None, None)  # Only handed back.
  for i in range(4):
    cache.put(f"r{i}", None, say(str(i)), answered)
  with pytest.raises(errors.ApiError):
    cache.get("r0", None)
  cache.get("r1", None)  # Used again, so that the next one goes.
  cache.put("r4", "s", say("4"), answered)
  assert cache.get("r1", None) == tuple(say("1"))
  for answer_id, session in (("r2", None), ("r4", None), ("r4", "t")):
    with pytest.raises(errors.ApiError):
      cache.get(answer_id, session)
  cache.drop_session("s")
  with pytest.raises(errors.ApiError):
    cache.get("r4", "s")
  cache.put("long", None, say("x" * 3000), answered)
  assert not cache._kept and cache._characters == 0
