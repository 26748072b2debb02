"""Anthropic's prefill: a last message of the assistant begins the answer."""

import json

import pytest
from rollout_server import export
from rollout_server import MODEL
from rollout_server import start

pytestmark = pytest.mark.timeout(300)
USER = {"role": "user", "content": "Click the red square."}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {}}


def said(text):
  return {"role": "assistant", "content": text}


def ask(running, messages, session=None, **body):
  path = f"/sessions/{session['session_id']}" if session else ""
  body = {"model": MODEL, "max_tokens": 8, "return_token_ids": True, **body}
  answer = running.post(f"{path}/v1/messages", {"messages": messages, **body})
  assert answer.status_code == 200, answer.text
  return answer.json()


def text_of(answer):
  return "".join(block["text"] for block in answer["content"])


def test_the_answer_goes_on_where_the_message_ends(running):
  plain = ask(running, [USER], max_tokens=1)["prompt_token_ids"]
  begun = running.renderer.encode("I will").tolist()
  for content in ("I will", [{"type": "text", "text": "I will"}]):
    answer = ask(running, [USER, said(content)], temperature=0)
    assert answer["prompt_token_ids"] == plain + begun
    # As the same tokens sent without any messages.
    same = running.post(
      "/v1/completions",
      {
        "model": MODEL,
        "prompt": plain + begun,
        "temperature": 0,
        "max_tokens": 8,
        "return_token_ids": True,
      },
    ).json()["choices"][0]
    assert answer["token_ids"] == same["token_ids"]
    assert text_of(answer) == same["text"]


def test_a_session_trains_the_sampled_tokens_alone(running):
  session = start(running, sampling={"temperature": 1.5})
  first = ask(running, [USER, said("I will")], session, seed=4, temperature=1.5)
  begun = running.renderer.encode("I will").tolist()
  assert first["prompt_token_ids"][-len(begun) :] == begun
  text = "I will" + text_of(first)
  second = ask(running, [USER, said(text), USER], session, max_tokens=4)
  prefix = first["prompt_token_ids"] + first["token_ids"]
  assert second["prompt_token_ids"][: len(prefix)] == prefix
  (exported,) = export(running, session, style="concat").values()
  row = exported["tensor_dict"]
  trained = [
    token for token, on in zip(row["input_ids"][0], row["loss_mask"][0]) if on
  ]
  assert trained == first["token_ids"] + second["token_ids"]


def test_a_cut_answer_goes_on_by_its_tokens(running):
  session = start(running)
  for seed in range(50):
    one = ask(
      running, [USER], session, max_tokens=4, seed=seed, temperature=1.5
    )
    text = text_of(one)
    if one["stop_reason"] == "max_tokens" and text and text == text.rstrip():
      break
  two = ask(running, [USER, said(text)], session, max_tokens=4)
  assert two["prompt_token_ids"] == one["prompt_token_ids"] + one["token_ids"]


def test_a_stream_has_the_new_text_alone(running):
  body = {
    "messages": [USER, said("I will")],
    "max_tokens": 8,
    "seed": 4,
    "model": MODEL,
  }
  answer = running.post("/v1/messages", body).json()
  streamed = running.post("/v1/messages", body | {"stream": True}).text
  text = "".join(
    event["delta"]["text"]
    for event in map(_data, streamed.split("\n\n"))
    if event.get("delta", {}).get("type") == "text_delta"
  )
  assert text == text_of(answer)


def _data(event):
  lines = [x for x in event.splitlines() if x.startswith("data: ")]
  return json.loads(lines[0][6:]) if lines else {}


@pytest.mark.parametrize(
  "change, words",
  [
    ({"messages": [said("a")]}, "needs a message before it"),
    ({"messages": [USER, said("")]}, "does not end with blanks"),
    ({"messages": [USER, said("a ")]}, "does not end with blanks"),
    ({"messages": [USER, said("a\n")]}, "does not end with blanks"),
    ({"messages": [USER, said([CALL])], "tools": [TOOL]}, "holds a call"),
    ({"tools": [TOOL]}, "tools are about whole answers"),
    ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tools are about"),
    ({"guided_regex": "a+"}, "guided_regex are about whole answers"),
    ({"thinking": {"type": "adaptive"}}, "leave thinking out"),
  ],
)
def test_what_cannot_be_continued_is_refused(running, change, words):
  body = {"model": MODEL, "max_tokens": 4, "messages": [USER, said("a")]}
  answer = running.post("/v1/messages", body | change)
  assert answer.status_code == 400
  error = answer.json()["error"]
  last = len((body | change)["messages"]) - 1
  assert error["param"] == f"messages[{last}]"
  assert words in error["message"]


def test_tools_may_be_shown_while_none_is_called(running):
  got = ask(
    running, [USER, said("I will")], tools=[TOOL], tool_choice={"type": "none"}
  )
  shown = running.renderer.decode(got["prompt_token_ids"])
  assert '"name": "f"' in shown and shown.endswith("assistant\nI will")
