"""The server, asked by the real `openai` client."""

import asyncio
import contextlib
import json

from agent_services.serving.sessions import caches
import httpx
import numpy as np
import openai
import pytest
from rollout_server import ask
from rollout_server import export
from rollout_server import MODEL
from rollout_server import Running
from rollout_server import screenshot
from rollout_server import SIZE
from rollout_server import start
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.engine import programs
from tunix.rl.multi_turn.parser.tool_parser.formats import qwen

pytestmark = pytest.mark.timeout(300)


# --- completions ------------------------------------------------------------


def test_a_completion_carries_what_training_needs(running):
  answer = ask(running.client(), [screenshot()], logprobs=True)
  choice = answer.choices[0]
  ids = choice.token_ids
  assert 1 <= len(ids) <= 6 == answer.usage.completion_tokens or (
    choice.finish_reason == "stop"
  )
  assert len(choice.logprobs.content) == len(ids)
  assert all(t.logprob <= 0 for t in choice.logprobs.content)
  assert choice.policy_versions == [[0, 0]]
  assert choice.message.content == running.renderer.decode(ids)
  pad = running.renderer.image_token_id
  tokens = running.policy[1].num_image_tokens(*SIZE)
  assert answer.prompt_token_ids.count(pad) == tokens
  assert pad not in ids
  assert answer.usage.prompt_tokens == len(answer.prompt_token_ids)


def test_equal_seeds_give_equal_completions_and_n_different_ones(running):
  client = running.client()
  message = [{"role": "user", "content": "hello"}]
  one, two = (ask(client, message, max_tokens=12) for _ in "ab")
  assert one.choices[0].token_ids == two.choices[0].token_ids
  many = ask(client, message, max_tokens=12, n=3)
  assert [c.index for c in many.choices] == [0, 1, 2]
  assert many.choices[0].token_ids == one.choices[0].token_ids
  assert len({tuple(c.token_ids) for c in many.choices}) == 3


def test_a_stream_adds_up_to_the_whole_answer(running):
  client = running.client()
  messages = [{"role": "user", "content": "a b c"}]
  answer = ask(client, messages, max_tokens=20)
  events = list(
    ask(
      client,
      messages,
      max_tokens=20,
      stream=True,
      stream_options={"include_usage": True},
    )
  )
  assert events[0].choices[0].delta.role == "assistant"
  text = "".join(e.choices[0].delta.content or "" for e in events if e.choices)
  assert text == answer.choices[0].message.content
  ends = [e for e in events if e.choices and e.choices[0].finish_reason]
  assert len(ends) == 1
  assert ends[0].choices[0].token_ids == answer.choices[0].token_ids
  assert events[-1].choices == [] and events[-1].usage == answer.usage
  assert events[-2].prompt_token_ids == answer.prompt_token_ids
  # In several parts: it came while sampling went on.
  assert sum(bool(e.choices and e.choices[0].delta.content) for e in events) > 1


@pytest.mark.parametrize(
    "change, param, words",
    [
        ({"presence_penalty": "x"}, "presence_penalty", "[-2.0, 2.0]"),
        ({"extra_body": {"repetition_penalty": 1.1}}, "repetition_penalty",
         "not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"stop": ["x"] * 17}, "stop", "up to 16"),
        ({"stop": ["x", ""]}, "stop", "none empty"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "[0, 20]"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
        ({"temperature": -1}, "temperature", "[0.0, 100.0]"),
        ({"max_tokens": 97}, "max_tokens", "[1, 96]"),
        ({"n": 9}, "n", "[1, 4]"),
        ({"n": 2, "temperature": 0}, "n", "temperature=0"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}},
          "tools": [{"type": "function", "function": {"name": "f"}}]},
         "tool_choice", "name of one of the tools"),
        ({"extra_body": {"guided_regex": "a"}, "tools": [{
            "type": "function", "function": {"name": "f"}}]},
         "guided_regex", "no room for tool calls"),
        ({"response_format": {"type": "grammar"}}, "response_format.type",
         "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {
            "name": "a", "schema": {"type": "objekt"}}}},
         "response_format.json_schema.schema", "objekt"),
        ({"response_format": {"type": "json_schema", "json_schema": {
            "name": "a", "schema": {"not": {"type": "string"}}}}},
         "response_format.json_schema.schema", "not"),
        ({"extra_body": {"guided_regex": "a("}}, "guided_regex", "unclosed"),
        ({"extra_body": {"guided_regex": "a"}, "response_format": {
            "type": "json_object"}}, "response_format", "exclude each other"),
        ({"extra_body": {"chat_template": "{{ x }}"}}, "chat_template",
         "not supported"),
        ({"extra_body": {"min_p": 1.1}}, "min_p", "[0.0, 1.0]"),
        ({"extra_body": {"guided_grammar": "x"}}, "guided_grammar",
         "not supported"),
        ({"messages": []}, "messages", "list with an entry"),
        ({"messages": [{"role": "cook", "content": "x"}]},
         "messages[0].role", "cook"),
        ({"messages": [screenshot(i) for i in range(4)]}, "messages",
         "at most 3"),
        ({"messages": [{"role": "user", "content": "x " * 400}]}, "messages",
         "maximum context length is 256 tokens"),
        ({"messages": [{"role": "user", "content": [{
            "type": "image_url",
            "image_url": {"url": "https://example.com/a.png"}}]}]},
         "messages[0].content[0].image_url", "example.com"),
        ({"messages": [{"role": "user", "content": [{
            "type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
         "messages[0].content[0].image_url", "file"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_its_name(
  running, change, param, words
):
  change = dict(change)
  messages = change.pop("messages", [{"role": "user", "content": "x"}])
  with pytest.raises(openai.BadRequestError) as refused:
    ask(running.client(), messages, **change)
  assert refused.value.param == param
  assert words in refused.value.message
  assert refused.value.body["type"] == "invalid_request_error"


def test_other_refusals_have_the_same_shape(running):
  with pytest.raises(openai.NotFoundError) as refused:
    ask(running.client(), [screenshot()], model="gpt-5")
  assert "'nano'" in refused.value.message
  for path, status in (("/v1/embeddings", 404), ("/sessions/x/v1/models", 404)):
    answer = (
      running.post(path) if "emb" in path else httpx.get(running.url + path)
    )
    assert answer.status_code == status
    assert answer.json()["error"]["code"]
  answer = httpx.post(
    f"{running.url}/v1/chat/completions", content=b"{not json", timeout=60
  )
  assert answer.status_code == 400
  assert answer.json()["error"]["code"] == "invalid_json"


def test_models_health_and_metrics(running):
  (model,) = running.client().models.list().data
  assert model.id == MODEL and model.max_model_len == 256
  assert httpx.get(f"{running.url}/health").status_code == 200
  ask(running.client(), [{"role": "user", "content": "x"}])
  text = httpx.get(f"{running.url}/metrics").text
  route = 'route="/v1/chat/completions",status="200"'
  assert f"rollout_requests_total{{{route}}}" in text
  assert "rollout_engine_version 0" in text


# --- tools ------------------------------------------------------------------


def test_tools_are_shown_and_calls_are_read(running, monkeypatch):
  tools = [
    {
      "type": "function",
      "function": {"name": "click", "parameters": {"properties": {}}},
    }
  ]
  text = '<tool_call>\n{"name": "click", "arguments": {"x": 3}}\n</tool_call>'
  real = running.renderer.decode
  service = running.app._service
  monkeypatch.setattr(
    service.policy.renderer, "decode", lambda ids: text if len(ids) else ""
  )
  for stream in (False, True):
    answer = ask(running.client(), [screenshot()], tools=tools, stream=stream)
    if stream:
      deltas = [e.choices[0].delta for e in answer if e.choices]
      (call,) = [c for d in deltas for c in d.tool_calls or ()]
      assert not any(d.content for d in deltas)
    else:
      (call,) = answer.choices[0].message.tool_calls
      assert answer.choices[0].message.content is None
      shown = real(answer.prompt_token_ids)
      assert '"name": "click"' in shown
    assert call.function.name == "click"
    assert json.loads(call.function.arguments) == {"x": 3}


# --- sessions ---------------------------------------------------------------


@pytest.mark.parametrize("by", ["path", "key"])
def test_an_episode_is_one_token_exact_sequence(running, by):
  session = start(running)
  if by == "path":
    client = running.client(f"/sessions/{session['session_id']}")
  else:
    client = running.client(key=session["api_key"])
  history, tokens, mask, logprobs = [], [], [], []
  before = running.settled()["prefilled_tokens"]
  for turn in range(3):
    history.append(screenshot(turn, f"turn {turn}"))
    answer = ask(client, history, logprobs=True)
    choice = answer.choices[0]
    # The prompt is the whole history and the new messages.
    assert answer.prompt_token_ids[: len(tokens)] == tokens
    new = len(answer.prompt_token_ids) - len(tokens)
    tokens = answer.prompt_token_ids + choice.token_ids
    mask += [0] * new + [1] * len(choice.token_ids)
    logprobs += [0.0] * new + [t.logprob for t in choice.logprobs.content]
    history.append({"role": "assistant", "content": choice.message.content})
  # Every token went through the policy about once.
  prefilled = running.settled()["prefilled_tokens"] - before
  assert prefilled <= len(tokens) + 3
  running.post(
    f"/sessions/{session['session_id']}/rl/set_reward", {"reward": 1.0}
  )
  (row,) = export(running, session, style="concat").values()
  tensors = row["tensor_dict"]
  assert tensors["input_ids"] == [tokens]
  assert tensors["loss_mask"] == [mask]
  np.testing.assert_allclose(tensors["logprobs"], [logprobs], atol=1e-6)
  assert tensors["rewards"] == [1.0]
  assert [v >= 0 for v in tensors["versions"][0]] == [m == 1 for m in mask]
  assert len(row["images"]) == 3
  apart = export(running, session, style="individual", discount=0.5)
  assert [one["reward"] for one in apart.values()] == [0.25, 0.5, 1.0]
  masks = [one["tensor_dict"]["loss_mask"][0] for one in apart.values()]
  assert sum(map(sum, masks)) == sum(mask)


def test_every_choice_of_a_turn_can_be_rewarded(running):
  session = start(running)
  path = f"/sessions/{session['session_id']}"
  many = ask(running.client(path), [{"role": "user", "content": "n"}], n=3)
  for i, choice in enumerate(many.choices):
    body = {"reward": i, "interaction_id": choice.interaction_id}
    assert running.post(f"{path}/rl/set_reward", body).status_code == 200
  rows = export(running, session, discount=0)
  rewards = {name: one["reward"] for name, one in rows.items()}
  assert rewards == {c.interaction_id: i for i, c in enumerate(many.choices)}


def test_tools_that_may_not_be_called_do_not_break_the_sequence(running):
  session = start(running)
  client = running.client(f"/sessions/{session['session_id']}")
  tools = [{"type": "function", "function": {"name": "f"}}]
  history = [{"role": "user", "content": "a"}]
  first = ask(client, history, tools=tools, tool_choice="none")
  content = first.choices[0].message.content
  history += [
    {"role": "assistant", "content": content},
    {"role": "user", "content": "b"},
  ]
  ask(client, history, tools=tools)
  assert len(export(running, session, style="concat")) == 1


def test_answers_that_the_client_keeps_are_not_kept_for_ever(
  running, monkeypatch
):
  monkeypatch.setattr(caches.SessionCache, "_UNSTORED", 3)
  session = start(running)
  client = running.client(f"/sessions/{session['session_id']}")
  empty = [{"role": "user", "content": ""}]
  play = lambda i: ask(
    client, empty, max_tokens=1, extra_body={"prompt_token_ids": [300 + i]}
  )
  ids = [play(i).id for i in range(8)]
  turns = running.app._service._caches[session["session_id"]]
  assert len(turns.by_body) == 3
  assert [play(i).id for i in (5, 6, 7)] == ids[5:]
  # Those of the session itself stay, however many follow.
  stored = ask(client, [{"role": "user", "content": "x"}]).id
  for i in range(4):
    play(i)
  assert ask(client, [{"role": "user", "content": "x"}]).id == stored
  assert len(turns.by_body) == 4


def test_stop_tokens_are_counted_as_the_client_does(running):
  client, own = running.client(), running.renderer.end_of_turn_id
  most = programs.MAX_STOP_TOKENS - 1
  user = [{"role": "user", "content": "x"}]
  stop = lambda ids: ask(client, user, extra_body={"stop_token_ids": ids})
  ids = list(range(300, 300 + most))
  assert stop(ids + ids + [own] * 20)
  with pytest.raises(openai.BadRequestError) as refused:
    stop([*ids, 299, own])
  assert refused.value.param == "stop_token_ids"
  assert f"{most + 1} different ids" in refused.value.message
  assert f"at most {most} " in refused.value.message


def _calls(count, **function):
  call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
  call["function"] |= function
  results = [{"role": "tool", "content": ""}] * count
  return [{"role": "assistant", "tool_calls": [call] * count}, *results]


@pytest.mark.parametrize("in_session", [False, True])
@pytest.mark.parametrize(
  "messages",
  [
    _calls(1, arguments="the cat " * 10_000),
    _calls(1, name="f" * 80_000),
    _calls(2_000),
    [{"role": "user", "content": ""}] * 1_000,
  ],
)
def test_what_cannot_fit_counts_whole_messages(
  running, monkeypatch, messages, in_session
):
  renderer = running.app._service.policy.renderer
  monkeypatch.setattr(renderer, "_encode_text", None)
  session = start(running)
  path = f"/sessions/{session['session_id']}" if in_session else ""
  with pytest.raises(openai.BadRequestError, match="messages cannot fit"):
    ask(running.client(path), messages)


def test_tokens_that_cannot_fit_are_refused_before_they_are_looked_at(
  running, monkeypatch
):
  renderer = running.app._service.policy.renderer
  monkeypatch.setattr(renderer, "prompt_of_tokens", None)
  reason = "maximum context length is 256 tokens"
  with pytest.raises(openai.BadRequestError, match=reason) as refused:
    ask(
      running.client(),
      [{"role": "user", "content": ""}],
      extra_body={"prompt_token_ids": [renderer.image_token_id] * 300},
    )
  assert refused.value.param == "prompt_token_ids"
  answer = running.post(
    "/v1/completions",
    {"model": MODEL, "prompt": [renderer.image_token_id] * 300},
  )
  assert reason in answer.json()["error"]["message"]


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
  running, monkeypatch
):
  renderer = running.app._service.policy.renderer
  monkeypatch.setattr(renderer, "_encode_text", None)
  messages = [{"role": "user", "content": "word " * 100_000}]
  with pytest.raises(openai.BadRequestError, match="messages cannot fit"):
    ask(running.client(), messages)


def test_a_repeated_request_gets_the_same_completion(running):
  session = start(running)
  url = f"{running.url}/sessions/{session['session_id']}/v1/chat/completions"
  body = {
    "model": MODEL,
    "max_tokens": 24,
    "messages": [{"role": "user", "content": "again"}],
  }

  async def both():
    async with httpx.AsyncClient(timeout=60) as client:
      return await asyncio.gather(*(client.post(url, json=body) for _ in "ab"))

  one, two = asyncio.run(both())
  three = httpx.post(url, json=body, timeout=60)
  assert one.json()["id"] == two.json()["id"] == three.json()["id"]
  assert len(export(running, session)) == 1
  other = httpx.post(url, json=body | {"temperature": 0.5}, timeout=60)
  assert other.json()["id"] != one.json()["id"]
  assert len(export(running, session)) == 2


def test_a_streamed_turn_is_an_interaction_too(running):
  session = start(running)
  client = running.client(f"/sessions/{session['session_id']}")
  history = [{"role": "user", "content": "stream"}]
  ids = []
  for _ in "ab":  # The second is a repeated request.
    events = list(ask(client, history, stream=True, max_tokens=20))
    ids += [{e.id for e in events}]
    text = "".join(e.choices[0].delta.content or "" for e in events)
  assert ids[0] == ids[1] and set(export(running, session)) == ids[0]
  history += [
    {"role": "assistant", "content": text},
    {"role": "user", "content": "go on"},
  ]
  answer = ask(client, history)
  (row,) = export(running, session, style="concat").values()
  tokens = row["tensor_dict"]["input_ids"][0]
  prompt = answer.prompt_token_ids
  assert tokens == prompt + answer.choices[0].token_ids


def test_a_client_that_goes_away_frees_its_slot_and_leaves_no_trace(running):
  session = start(running)
  client = running.client(
    f"/sessions/{session['session_id']}", max_retries=0
  ).with_options(timeout=0.001)
  for _ in range(3):
    with contextlib.suppress(openai.APITimeoutError):
      ask(client, [screenshot(5)], max_tokens=32)
  running.settled()
  assert len(export(running, session)) <= 1
  answer = ask(
    running.client(f"/sessions/{session['session_id']}"), [screenshot(5)]
  )
  assert answer.choices[0].token_ids


def test_who_still_waits_is_answered_when_the_first_sender_has_gone(running):
  session = start(running)
  url = f"{running.url}/sessions/{session['session_id']}/v1/chat/completions"
  body = {"model": MODEL, "max_tokens": 32, "messages": [screenshot(9, "wait")]}

  async def impatient_and_patient():
    async with httpx.AsyncClient(timeout=60) as client:
      first = asyncio.create_task(client.post(url, json=body))
      await asyncio.sleep(0.005)
      second = asyncio.create_task(client.post(url, json=body))
      await asyncio.sleep(0.005)
      first.cancel()
      return await second

  for _ in range(5):
    assert asyncio.run(impatient_and_patient()).status_code == 200
  assert len(export(running, session)) == 1
  running.settled()


def test_a_start_that_is_repeated_gives_the_same_session(running):
  store = running.app._service.store
  body, before = {"task_id": "t"}, len(store)
  header = {"idempotency-key": "once-and-no-more"}
  first = running.post("/rl/start_session", body, **header).json()
  assert running.post("/rl/start_session", body, **header).json() == first
  assert len(store) == before + 1
  other = running.post("/rl/start_session", {"task_id": "u"}, **header)
  assert other.status_code == 422
  assert other.json()["error"]["code"] == "request_differs"
  assert "'t', not of 'u'" in other.json()["error"]["message"]
  one, two = start(running), start(running)  # Without a name.
  assert len({s["session_id"] for s in (first, one, two)}) == 3
  for session in (first, one, two):
    export(running, session, drop=True)
  # Nothing is held of a session that is gone: the name starts another.
  again = running.post("/rl/start_session", body, **header).json()
  assert again["session_id"] != first["session_id"]
  export(running, again, drop=True)
  assert len(store) == before
  assert not store._by_request and not store._request_of


@pytest.mark.parametrize(
  "body, header, words",
  [
    ({"task_id": 3}, {}, "task_id must be a string"),
    ({"task": "t"}, {}, "task='t' is not supported"),
    ({}, {"idempotency-key": "x" * 300}, "Idempotency-Key has 300"),
  ],
)
def test_a_start_that_cannot_be_meant_is_refused(running, body, header, words):
  answer = running.post("/rl/start_session", body, **header)
  assert answer.status_code == 400
  assert words in answer.json()["error"]["message"]


def test_an_ended_session_refuses_and_still_exports(running):
  session = start(running)
  path = f"/sessions/{session['session_id']}"
  ask(running.client(path), [{"role": "user", "content": "x"}])
  assert running.post(f"{path}/rl/end_session").status_code == 200
  with pytest.raises(openai.ConflictError) as refused:
    ask(running.client(path), [{"role": "user", "content": "y"}])
  assert refused.value.code == "session_ended"
  assert len(export(running, session)) == 1


@pytest.mark.parametrize(
  "host", ["evil.example", "localhost.evil.example:80", "10.0.0.1", "a@[", "["]
)
def test_without_a_token_only_names_of_the_loopback_interface_are_answered(
  running, host
):
  for path in ("/rl/start_session", "/v1/completions"):
    answer = running.post(path, host=host)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "cross_site"


@pytest.mark.parametrize(
  "host", ["localhost", "LOCALHOST:1", "127.0.0.1:80", "127.8.0.1", "[::1]:9"]
)
def test_names_of_the_loopback_interface_are_answered(running, host):
  answer = running.post("/rl/start_session", host=host)
  base = answer.json()["base_url"].lower()
  assert base.startswith(f"http://{host.lower()}/")


def test_a_dropped_session_makes_room_and_its_key_opens_nothing(running):
  session = start(running)
  client = running.client(key=session["api_key"])
  ask(client, [{"role": "user", "content": "x"}])
  assert len(export(running, session, drop=True)) == 1
  with pytest.raises(openai.AuthenticationError):
    ask(client, [{"role": "user", "content": "y"}])
  reply = running.post(
    "/export_trajectories", {"session_id": session["session_id"]}
  )
  assert reply.status_code == 404
  assert not running.app._service._caches.get(session["session_id"])


@pytest.mark.parametrize(
  "path, body",
  [
    ("/export_trajectories", {"discount": None}),
    ("/export_trajectories", {"discount": 2}),
    ("/sessions/{}/rl/set_reward", {"reward": 10**400}),
    ("/sessions/{}/rl/set_reward", {"reward": 1, "interaction_id": [1]}),
    (
      "/sessions/{}/v1/chat/completions",
      {
        "model": MODEL,
        "temperature": 10**400,
        "messages": [{"role": "user", "content": "x"}],
      },
    ),
  ],
)
def test_bad_values_are_the_clients_fault(running, path, body):
  session = start(running)
  name = session["session_id"]
  answer = running.post(path.format(name), {"session_id": name, **body})
  assert answer.status_code == 400, answer.text
  assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_session_exports_whatever_it_accepted(running):
  """No message, name or reward that is taken keeps the rest back."""
  odd = ["\ud800", "\x00\u2028", "\U0010ffff" * 9, "NaN", ""]
  deep = '{"a": ' * 150 + "1" + "}" * 150
  messages = [[{"role": "user", "content": text}] for text in odd]
  messages.append([
      {"role": "user", "content": "x"},
      {"role": "assistant", "content": None, "tool_calls": [{
          "id": "c", "type": "function",
          "function": {"name": "f", "arguments": deep},
      }]},
      {"role": "tool", "tool_call_id": "c", "content": deep},
  ])  # fmt: skip
  session = start(running, task_id="\x00\u2028")
  path = f"/sessions/{session['session_id']}"
  accepted = 0
  for one in messages:
    body = {"model": MODEL, "messages": one, "max_tokens": 2}
    answer = running.post(
      f"{path}/v1/chat/completions", content=json.dumps(body).encode()
    )
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 200:
      accepted += 1
      for reward in (1e400, -9e29, 5e-324, 2**70):
        reply = running.post(
          f"{path}/rl/set_reward",
          content=json.dumps(
            {"reward": reward, "interaction_id": answer.json()["id"]}
          ).encode(),
        )
        assert reply.status_code == (400 if reward == 1e400 else 200)
  assert accepted > 2
  for style in ("individual", "concat"):
    for arrays in ("lists", "tensors"):
      exported = export(running, session, style=style, arrays=arrays)
      assert len(exported) == accepted
      assert all(np.isfinite(one["reward"]) for one in exported.values())


def test_a_stream_that_fails_says_so(running, monkeypatch):
  service = running.app._service

  async def fails(*args, on_tokens, **options):
    on_tokens(np.arange(3, 6))
    await asyncio.sleep(0.05)
    raise KeyError("broken")

  monkeypatch.setattr(service.policy.client, "generate", fails)
  with pytest.raises(openai.APIError, match="broken"):
    list(ask(running.client(), [{"role": "user", "content": "x"}], stream=True))


def test_weights_that_change_are_told(running):
  session = start(running)
  path = f"/sessions/{session['session_id']}"
  running.engine.update_weights(7, running.policy[0]).result(60)
  try:
    answer = ask(running.client(path), [{"role": "user", "content": "x"}])
    assert answer.choices[0].policy_versions == [[0, 7]]
  finally:
    running.engine.update_weights(0, running.policy[0]).result(60)


# --- who may ask ------------------------------------------------------------


def test_a_token_is_asked_for_and_capacity_is_told():
  with Running(token="secret", max_sessions=1) as running:
    for key, error in (("wrong", True), ("secret", False)):
      client = running.client(key=key)
      if error:
        with pytest.raises(openai.AuthenticationError):
          client.models.list()
      else:
        assert client.models.list().data
    assert httpx.get(f"{running.url}/health").status_code == 200
    sly = httpx.post(
      f"{running.url}/v1/chat/completions", headers={"host": "x/health?"}
    )
    assert sly.status_code == 401
    header = {"Authorization": "Bearer secret"}
    first = running.post("/rl/start_session", **header).json()
    own = running.client(key=first["api_key"])
    assert own.models.list().data  # A session's key is enough for it.
    key = {"Authorization": f"Bearer {first['api_key']}"}
    export_body = {"session_id": first["session_id"]}
    assert (
      running.post("/export_trajectories", export_body, **key).status_code
      == 200
    )
    for path, body in (
      ("/export_trajectories", {"session_id": "another"}),
      ("/sessions/another/rl/end_session", {}),
      ("/rl/start_session", {}),
    ):
      refused = running.post(path, body, **key)
      assert refused.status_code == 403, path
      assert refused.json()["error"]["code"] == "wrong_session"
      # Who may not ask is not told what there is.
      assert running.post(path, body).status_code == 401
    full = running.post("/rl/start_session", **header)
    assert full.status_code == 429 and full.headers["retry-after"]
    running.engine.close()
    dead = httpx.get(f"{running.url}/health")
    assert dead.status_code == 503
    with pytest.raises(openai.InternalServerError) as refused:
      ask(running.client(key="secret"), [{"role": "user", "content": "x"}])
    assert refused.value.code == "engine_dead"


def test_arguments_have_the_types_that_the_requests_tools_declare(
  running, monkeypatch
):
  """The policy writes the arguments as XML, where all values are text."""
  policy = running.app._service.policy
  text = (
    "<tool_call>\n<function=book>\n<parameter=name>\n12\n</parameter>\n"
    "<parameter=seats>\n12\n</parameter>\n<parameter=note>\nnull\n"
    "</parameter>\n</function>\n</tool_call>"
  )

  async def says(prompt, sampling, **options):
    ids = running.renderer.encode(text)
    tokens = np.array([*ids, *sampling.stop_token_ids])
    zeros = np.zeros(len(tokens))
    return policy_client.Completion(
      tokens, zeros, zeros.astype(np.int32), policy_client.FinishReason.STOP
    )

  monkeypatch.setattr(policy, "parser", qwen.QwenXmlToolParser())
  monkeypatch.setattr(policy.client, "generate", says)
  tool = {"type": "function", "function": {"name": "book", "parameters": {
      "type": "object",
      "properties": {
          "name": {"type": "string"}, "seats": {"type": "integer"},
      },
  }}}  # fmt: skip
  user = [{"role": "user", "content": "book"}]
  message = ask(running.client(), user, tools=[tool]).choices[0].message
  (call,) = message.tool_calls
  assert json.loads(call.function.arguments) == {
    "name": "12",
    "seats": 12,
    "note": "null",
  }
