"""Results of tool calls reach the policy in the order of their calls."""

from agent_services.serving import errors
from agent_services.serving import tool_results
import pytest
from rollout_server import export
from rollout_server import MODEL
from rollout_server import start

pytestmark = pytest.mark.timeout(300)
SEEN = {"a": "it is 5 degrees", "b": "it is noon"}
NAMES = {"a": "weather", "b": "clock"}


def chat(ids, results, after="and now?"):
  """Of `/v1/chat/completions`: calls with these ids, then these results."""
  calls = [
    {"type": "function", "function": {"name": NAMES[i], "arguments": "{}"}}
    | ({"id": i} if has_id else {})
    for i, has_id in ids
  ]
  messages = [{"role": "user", "content": "go"}]
  messages.append({"role": "assistant", "content": None, "tool_calls": calls})
  for id_ in results:
    one = {"role": "tool", "content": SEEN.get(id_, "it is late")}
    messages.append(one if id_ is None else one | {"tool_call_id": id_})
  if after:
    messages.append({"role": "user", "content": after})
  return "/chat/completions", {"messages": messages}


def responses(ids, results, after="and now?"):
  items = [{"role": "user", "content": "go"}]
  items += [
    {"type": "function_call", "call_id": i, "name": NAMES[i], "arguments": "{}"}
    for i, _ in ids
  ]
  items += [
    {
      "type": "function_call_output",
      "call_id": i,
      "output": SEEN.get(i, "it is late"),
    }
    for i in results
  ]
  items += [{"role": "user", "content": after}] if after else []
  return "/responses", {"input": items, "max_output_tokens": 4}


def messages(ids, results, after="and now?"):
  blocks = [
    {
      "type": "tool_result",
      "tool_use_id": i,
      "content": SEEN.get(i, "it is late"),
    }
    for i in results
  ]
  blocks += [{"type": "text", "text": after}] if after else []
  return "/messages", {
    "messages": [
      {"role": "user", "content": "go"},
      {
        "role": "assistant",
        "content": [
          {"type": "tool_use", "id": i, "name": NAMES[i], "input": {}}
          for i, _ in ids
        ],
      },
      {"role": "user", "content": blocks},
    ]
  }


ROUTES = (chat, responses, messages)
BOTH = (("a", True), ("b", True))


def sent(running, session, route, body):
  body = {"model": MODEL, "max_tokens": 4, "seed": 1} | body
  if route == "/responses":
    body = {k: v for k, v in body.items() if k not in ("max_tokens", "seed")}
  return running.post(f"/sessions/{session['session_id']}/v1{route}", body)


def prompts_of(running, session):
  """The prompts' texts of a session's answers."""
  prompts = []
  for one in export(running, session).values():
    tensors = one["tensor_dict"]
    prompt = [
      token
      for token, mask in zip(tensors["input_ids"][0], tensors["loss_mask"][0])
      if not mask
    ]
    prompts.append(running.renderer.decode(prompt))
  return prompts


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("after", ("and now?", ""))
def test_results_are_shown_in_the_order_of_their_calls(running, route, after):
  """The policy's template names no ids: else each call gets the other's."""
  session = start(running)
  for results in ("ab", "ba"):
    answer = sent(running, session, *route(BOTH, results, after))
    assert answer.status_code == 200, answer.text
  first, second = prompts_of(running, session)
  assert first == second
  assert first.index(SEEN["a"]) < first.index(SEEN["b"])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
  "ids,results,reason",
  [
    (BOTH, "a", "'b' has no tool result"),
    (BOTH, "", "'a' has no tool result"),
    (BOTH, "abc", "tool_call_id 'c'"),
    (BOTH, "ac", "tool_call_id 'c'"),
    (BOTH, "aba", "'a' has two tool results"),
    (BOTH[:1], "b", "tool_call_id 'b'"),
  ],
)
def test_what_answers_no_call_and_what_is_missing_is_refused(
  running, route, ids, results, reason
):
  session = start(running)
  answer = sent(running, session, *route(ids, results))
  assert answer.status_code == 400
  error = answer.json()["error"]
  assert error["code"] == "invalid_tool_results"
  assert error["param"] == "messages" and reason in error["message"]
  assert not export(running, session)


class Counted(str):
  """An id that counts how often it is compared."""

  comparisons = 0

  def __eq__(self, other):
    Counted.comparisons += 1
    return str.__eq__(self, other)

  __hash__ = str.__hash__


def test_thousands_of_results_are_compared_once_each():
  calls = [Counted(f"call_{i}") for i in range(2000)]
  results = [
    {"role": "tool", "tool_call_id": Counted(id_), "content": id_}
    for id_ in reversed(calls)
  ]
  answer = {"role": "assistant", "tool_calls": [{"id": id_} for id_ in calls]}
  Counted.comparisons = 0
  ordered = tool_results.in_order([answer, *results], "messages")
  assert ordered == [answer, *reversed(results)]
  with pytest.raises(errors.ApiError, match="and 1980 more") as refused:
    tool_results.in_order([answer, *results[1:]], "messages")
  assert len(str(refused.value)) < 1000
  assert Counted.comparisons < 20 * len(calls)


def test_a_chats_results_without_ids(running):
  """By their place where calls have none either, or there is one call."""
  session = start(running)
  for ids, results, status in (
    ((("a", False), ("b", False)), "ab", 200),
    ((("a", False), ("b", False)), "a", 400),
    (BOTH[:1], [None], 200),
    (BOTH, [None, None], 400),
    (BOTH, ["a", None], 400),
  ):
    answer = sent(running, session, *chat(ids, results))
    assert answer.status_code == status, (ids, results, answer.text)
    if status == 400:
      assert "tool" in answer.json()["error"]["message"]


def test_results_after_text_stay_as_they_are_sent(running):
  """An agent that reads the calls out of the text by itself."""
  session = start(running)
  history = [
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": "weather()"},
  ]
  bare = {"role": "tool", "content": SEEN["a"]}
  own = [
    {"role": "tool", "content": SEEN[id_], "tool_call_id": id_} for id_ in "ba"
  ]
  for results in ([bare], own):
    answer = sent(
      running, session, "/chat/completions", {"messages": [*history, *results]}
    )
    assert answer.status_code == 200, answer.text
  last = prompts_of(running, session)[-1]  # As sent.
  assert 0 < last.index(SEEN["b"]) < last.index(SEEN["a"])


def test_results_of_a_remembered_response_are_ordered_too(running):
  """Its calls are the server's, in the conversation before the request."""
  session = start(running)
  route, body = responses(BOTH, "", "")
  body["input"] = body["input"][:1]
  first = sent(running, session, route, body | {"store": True}).json()
  memory = running.app._service.conversations
  conversation = memory.get(first["id"], session["session_id"])
  _, example = chat(BOTH, "")
  conversation[-1]["tool_calls"] = example["messages"][1]["tool_calls"]
  outputs = lambda ids: {
    "previous_response_id": first["id"],
    "input": responses((), ids, "")[1]["input"][1:],
    "max_output_tokens": 4,
  }
  wrong = sent(running, session, route, outputs("b"))
  assert wrong.status_code == 400 and "'a' has no" in wrong.text
  for ids in ("ab", "ba"):
    assert sent(running, session, route, outputs(ids)).status_code == 200
  prompts = prompts_of(running, session)[1:]
  assert len(set(prompts)) == 1
