"""Endpoints that render a prompt, compared with that prompt's completions."""

import pytest
from rollout_server import ask
from rollout_server import export
from rollout_server import MODEL
from rollout_server import screenshot
from rollout_server import start

pytestmark = pytest.mark.timeout(300)
TOOL = {
  "name": "click",
  "description": "Clicks.",
  "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
}
TOOLS = [{"type": "function", "function": TOOL}]


def tokenized(running, path="", **body):
  answer = running.post(f"{path}/tokenize", {"model": MODEL, **body})
  assert answer.status_code == 200, answer.text
  return answer.json()


def prompt_of(answer):
  return answer.model_dump()["prompt_token_ids"]


def test_the_tokens_of_messages_are_the_prompt_of_their_completion(running):
  messages = [{"role": "system", "content": "Be short."}, screenshot(3)]
  answer = ask(running.client(), messages, tools=TOOLS)
  result = tokenized(running, messages=messages, tools=TOOLS)
  assert result["tokens"] == prompt_of(answer)
  assert result["count"] == len(result["tokens"])
  assert result["max_model_len"] == running.engine.context_length


def test_the_tokens_of_a_text_are_the_prompt_of_its_completion(running):
  answer = running.client().completions.create(
    model=MODEL,
    prompt="a <b>",
    max_tokens=2,
    extra_body={"return_token_ids": True},
  )
  (choice,) = answer.model_dump()["choices"]
  assert (
    tokenized(running, prompt="a <b>")["tokens"] == (choice["prompt_token_ids"])
  )


def test_in_a_session_they_are_the_next_turns(running):
  """Also where the sampled tokens are not those of the answer's text; and
  nothing is stored."""
  session = start(running)
  path = f"/sessions/{session['session_id']}"
  messages = [screenshot(4)]
  first = ask(running.client(path), messages)
  messages += [
    {
      "role": "assistant",
      "content": first.choices[0].message.content,
      "prompt_token_ids": [1],
      "generation_token_ids": [2],
      "generation_log_probs": [-0.5],
    },
    screenshot(5, "on"),
  ]
  before = tokenized(running, path, messages=messages)["tokens"]
  again = tokenized(running, path + "/v1", messages=messages)["tokens"]
  assert before == again
  sampled = first.model_dump()["choices"][0]["token_ids"]
  start_ = prompt_of(first) + sampled
  assert before[: len(start_)] == start_
  assert prompt_of(ask(running.client(path), messages)) == before
  assert len(export(running, session)) == 2


def test_anthropics_count_is_the_usage_of_the_message(running):
  body = {
    "model": MODEL,
    "system": "Be short.",
    "messages": [{"role": "user", "content": "look"}],
    "tools": [
      {
        "name": "click",
        "description": "Clicks.",
        "input_schema": TOOL["parameters"],
      }
    ],
  }
  count = running.post("/v1/messages/count_tokens", body).json()
  answer = running.post("/v1/messages", body | {"max_tokens": 1}).json()
  usage = answer["usage"]
  assert count == {
    "input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]
  }


@pytest.mark.parametrize(
  "body, param",
  [
    ({}, "messages"),
    ({"prompt": "a", "messages": [screenshot(1)]}, "messages"),
    ({"prompt": "a", "return_token_strs": True}, "return_token_strs"),
    ({"messages": [{"role": "x"}]}, "messages[0].role"),
    ({"prompt": "a" * 10**6}, "prompt"),
    ({"prompt": "a", "model": "other"}, "model"),
  ],
)
def test_a_wrong_body_names_the_field(running, body, param):
  answer = running.post("/tokenize", {"model": MODEL, **body})
  assert answer.status_code in (400, 404)
  assert answer.json()["error"]["param"] == param


def test_log_probs_may_name_tokens_by_their_ids(running):
  answer = ask(
    running.client(),
    [screenshot(6)],
    logprobs=True,
    top_logprobs=2,
    extra_body={"return_tokens_as_token_ids": True},
  )
  choice = answer.choices[0]
  assert [t.token for t in choice.logprobs.content] == [
    f"token_id:{i}" for i in choice.model_dump()["token_ids"]
  ]
  for token in choice.logprobs.content:
    assert token.top_logprobs[0].token.startswith("token_id:")
