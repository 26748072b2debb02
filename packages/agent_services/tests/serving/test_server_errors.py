"""Failures around a request, and the errors that its client gets."""

import asyncio
import base64
import concurrent.futures
import io
import json
import re
import socket
import threading
import time

from agent_services.serving import answers
from agent_services.serving import bodies
from agent_services.serving import errors
from agent_services.serving.endpoints import session_routes
from agent_services.serving.endpoints import streams
from agent_services.serving.sessions import interactions
from agent_services.serving.sessions import session_store
import httpx
import numpy as np
import openai
from PIL import Image
import pytest
from rollout_server import ask
from rollout_server import export
from rollout_server import MODEL
from rollout_server import Running
from rollout_server import screenshot
from rollout_server import start
from starlette import responses as starlette_responses
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.net import http_server

pytestmark = pytest.mark.timeout(300)


# --- fields that no sample depends on ----------------------------------------


@pytest.mark.parametrize(
    "message, param",
    [
        ({"role": "user", "content": "x", "nick": "bob"}, "messages[0].nick"),
        ({"role": "user", "content": "x", "tool_calls": [{"id": "a"}]},
         "messages[0].tool_calls"),
        ({"role": "user", "content": [
            {"type": "text", "text": "x", "weight": 2}]},
         "messages[0].content[0].weight"),
        ({"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "u", "crop": 1}}]},
         "messages[0].content[0].image_url.crop"),
        ({"role": "assistant", "tool_calls": [
            {"type": "custom", "custom": {"name": "f"}}]},
         "messages[0].tool_calls[0].custom"),
        ({"role": "tool", "content": "x", "tool_call_id": 3},
         "messages[0].tool_call_id"),
    ],
)  # fmt: skip
def test_a_field_of_a_message_that_is_not_used_is_refused(
  running, message, param
):
  with pytest.raises(openai.BadRequestError) as refused:
    ask(running.client(), [message])
  assert refused.value.param == param


def test_a_tool_that_cannot_be_shown_as_meant_is_refused(running):
  for change, param in (
    ({"strict": "yes"}, "tools[0].function.strict"),
    ({"returns": {}}, "tools[0].function.returns"),
    ({"parameters": "x"}, "tools[0].function.parameters"),
    ({"name": ""}, "tools[0].function.name"),
  ):
    tool = {"type": "function", "function": {"name": "f"} | change}
    with pytest.raises(openai.BadRequestError) as refused:
      ask(running.client(), [{"role": "user", "content": "x"}], tools=[tool])
    assert refused.value.param == param


def test_an_answer_that_is_dumped_back_is_taken(running):
  session = start(running)
  client = running.client(f"/sessions/{session['session_id']}")
  history = [{"role": "user", "content": "a"}]
  answer = ask(client, history)
  history.append(answer.choices[0].message.model_dump())
  ask(client, [*history, {"role": "user", "content": "b"}])
  assert len(export(running, session, style="concat")) == 1


def test_half_a_character_is_refused(running):
  message = b'{"role": "user", "content": "\\ud83d"}'
  body = b'{"model": "nano", "messages": [%s]}' % message
  answer = running.post("/v1/chat/completions", content=body)
  assert answer.status_code == 400
  assert answer.json()["error"]["param"] == "messages[0].content"


@pytest.mark.parametrize(
  "path, field, param",
  [
    ("chat/completions", '"\\ud800": 1', "the body"),
    ("responses", '"user": "\\ud800"', "user"),
    ("responses", '"metadata": {"a": ["\\udfff"]}', "metadata.a[0]"),
    ("responses", '"metadata": {"\\ud800": "a"}', "metadata"),
    ("responses", '"metadata": {"a": NaN}', None),
    ("responses", '"metadata": {"a": 1e999}', None),
    ("completions", '"temperature": -Infinity', None),
  ],
)
def test_what_could_not_be_written_back_is_refused_before_it_is_sampled(
  running, path, field, param
):
  session = start(running)
  body = '"model": "nano", "messages": [{"role": "user", "content": "x"}]'
  body = '"model": "nano", "input": "x"' if path == "responses" else body
  answer = running.post(
    f"/sessions/{session['session_id']}/v1/{path}",
    content=f"{{{body}, {field}}}".encode(),
  )
  assert answer.status_code == 400
  assert answer.json()["error"]["param"] == param
  assert not export(running, session)


def test_a_whole_pair_of_escapes_is_a_character(running):
  body = rb'{"model": "nano", "input": "x", "user": "\ud83d\ude00"}'
  answer = running.post("/v1/responses", content=body)
  assert answer.json()["user"] == "\U0001f600"


def test_an_error_that_has_no_bytes_is_told_all_the_same():
  error = errors.invalid("\ud800", "\ud800 is not known")
  assert json.dumps(error.body(), ensure_ascii=False).encode()


@pytest.mark.parametrize(
  "choice",
  [
    {"type": "function", "function": "f"},
    {"type": "function", "function": ["f"]},
    ["auto"],
    True,
  ],
)
def test_a_tool_choice_of_another_shape_is_refused(running, choice):
  tool = {"type": "function", "function": {"name": "f"}}
  with pytest.raises(openai.BadRequestError) as refused:
    ask(
      running.client(),
      [{"role": "user", "content": "x"}],
      tools=[tool],
      tool_choice=choice,
    )
  assert refused.value.param.startswith("tool_choice")


def test_a_schema_that_is_nested_too_deep_is_refused(running):
  shape = {"name": "x", "schema": {"a": "X"}}
  body = json.dumps(
    {
      "model": MODEL,
      "messages": [{"role": "user", "content": "x"}],
      "response_format": {"type": "json_schema", "json_schema": shape},
    }
  )
  body = body.replace('"X"', "[" * 900 + "]" * 900)
  answer = running.post("/v1/chat/completions", content=body.encode())
  assert answer.status_code == 400
  error = answer.json()["error"]
  assert "nested deeper than 200 levels" in error["message"]
  assert error["param"] is None  # The body, before any of its fields.


# --- images -------------------------------------------------------------------


def test_an_image_that_is_too_large_names_the_servers_option(running):
  out = io.BytesIO()
  Image.new("RGB", (96, 64)).save(out, "PNG")
  url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
  message = screenshot(1)
  message["content"][1]["image_url"]["url"] = url
  answer = running.post(
    "/v1/chat/completions",
    {"model": MODEL, "messages": [message], "max_tokens": 1},
  )
  assert answer.status_code == 400
  error = answer.json()["error"]
  assert re.search(r"96x64 .*--screen 96x64", error["message"]), error


def test_an_image_that_the_server_lost_is_its_own_fault(running, monkeypatch):
  session = start(running)
  client = running.client(f"/sessions/{session['session_id']}", max_retries=0)
  lost = screenshot(77)

  def get(self, ref):
    raise KeyError("evicted")

  monkeypatch.setattr(images_lib.ImageStore, "get", get)
  monkeypatch.setattr(images_lib.ImageStore, "__contains__", lambda *_: False)
  with pytest.raises(openai.InternalServerError) as refused:
    ask(client, [lost])
  assert refused.value.status_code == 503
  assert refused.value.code == "image_lost"
  assert "--image-memory" in refused.value.message
  assert refused.value.response.headers["retry-after"]
  monkeypatch.undo()
  # It comes with each request: the next one has it again.
  assert ask(client, [lost]).choices[0].token_ids


def test_images_beyond_the_memory_are_found_in_the_folder(tmp_path):
  # 3 kB an image, memory for one.
  with Running(store=images_lib.ImageStore(tmp_path, 4096)) as running:
    session = start(running)
    client = running.client(f"/sessions/{session['session_id']}")
    history = []
    for turn in range(3):
      history.append(screenshot(turn))
      answer = ask(client, history)
      history.append(answer.choices[0].message.model_dump())
    running.images.flush(10)
    assert len(running.images) == 1
    assert len(list(tmp_path.glob("*.png"))) >= 2
    # Rewritten, so that all of it is prefilled again.
    history[0]["content"][0]["text"] = "look again"
    assert ask(client, history).choices[0].token_ids


# --- streams ------------------------------------------------------------------


def test_a_silent_stream_is_kept_alive_whatever_is_sampled(
  running, monkeypatch
):
  monkeypatch.setattr(streams, "KEEP_ALIVE_S", 0.05)

  async def slow(prompt, sampling, *, session, on_tokens):
    for _ in range(40):  # Faster than the keep-alives, and not told.
      on_tokens(np.array([300], np.int32))
      await asyncio.sleep(0.01)
    ids = np.array([300, 301], np.int32)
    stop = policy_client.FinishReason.LENGTH
    return policy_client.Completion(ids, ids * 0.0, ids * 0, stop)

  client = running.app._service.policy.client
  monkeypatch.setattr(client, "generate", slow)
  body = {
    "model": MODEL,
    "stream": True,
    "messages": [{"role": "user", "content": "x"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
  }
  url = f"{running.url}/v1/chat/completions"
  began = time.monotonic()
  with httpx.stream("POST", url, json=body, timeout=60) as stream:
    lines = [line for line in stream.iter_lines() if line]
  most = (time.monotonic() - began) / streams.KEEP_ALIVE_S + 1
  assert 3 <= sum(line.startswith(":") for line in lines) <= most
  assert lines[-1] == "data: [DONE]"


def test_a_stream_begins_before_anything_is_sampled(running, monkeypatch):
  monkeypatch.setattr(streams, "KEEP_ALIVE_S", 0.05)
  ids = np.array([300, 301], np.int32)

  async def late(prompt, sampling, *, session, on_tokens):
    await asyncio.sleep(2.0)  # Of forty keep-alives, three are asked for.
    stop = policy_client.FinishReason.LENGTH
    return policy_client.Completion(ids, ids * 0.0, ids * 0, stop)

  client = running.app._service.policy.client
  monkeypatch.setattr(client, "generate", late)
  session = start(running)
  url = f"{running.url}/sessions/{session['session_id']}/v1/chat/completions"
  body = {
    "model": MODEL,
    "stream": True,
    "messages": [{"role": "user", "content": "x"}],
  }

  async def read(client):
    async with client.stream("POST", url, json=body) as stream:
      return [line async for line in stream.aiter_lines() if line]

  async def twice():
    async with httpx.AsyncClient(timeout=60) as client:
      return await asyncio.gather(read(client), read(client))

  first_lines = asyncio.run(twice())
  for lines in first_lines:
    assert sum(line.startswith(":") for line in lines) >= 3
    assert lines[-1] == "data: [DONE]"
  # The second is a repeated request, and says so from the start.
  ids_of = {
    json.loads(line[5:])["id"]
    for lines in first_lines
    for line in lines
    if line.startswith("data: {")
  }
  assert ids_of == set(export(running, session)) and len(ids_of) == 1


# --- sessions -----------------------------------------------------------------


@pytest.fixture(name="narrow")
def _narrow(running, monkeypatch):
  """A session with room for three answers."""
  session = start(running)
  session_state = running.app._service.store.get(session["session_id"])
  monkeypatch.setattr(session_state, "_max_interactions", 3)
  return session


def test_nothing_is_sampled_that_a_session_has_no_room_for(running, narrow):
  client = running.client(f"/sessions/{narrow['session_id']}")
  message = [{"role": "user", "content": "x"}]
  before = running.settled()["decode_tokens"]
  with pytest.raises(openai.ConflictError) as refused:
    ask(client, message, n=4)
  assert refused.value.code == "session_full"
  assert refused.value.response.headers["x-should-retry"] == "false"
  assert running.settled()["decode_tokens"] == before
  assert not export(running, narrow)
  many = ask(client, message, n=3)
  assert len(export(running, narrow)) == 3
  # A repeated request needs no room.
  assert ask(client, message, n=3).id == many.id
  with pytest.raises(openai.ConflictError):
    ask(client, message, seed=2)


def test_requests_at_a_time_do_not_take_the_same_room(running, narrow):
  url = f"{running.url}/sessions/{narrow['session_id']}/v1/chat/completions"
  body = {"model": MODEL, "max_tokens": 24, "n": 2}

  async def both():
    async with httpx.AsyncClient(timeout=60) as client:
      return await asyncio.gather(
        *(
          client.post(
            url, json=body | {"messages": [{"role": "user", "content": c}]}
          )
          for c in "ab"
        )
      )

  statuses = sorted(a.status_code for a in asyncio.run(both()))
  assert statuses == [200, 409]
  assert len(export(running, narrow)) == 2


def test_room_is_given_back_when_sampling_fails():
  session = session_store.ServedSession(None, "s", max_interactions=2)
  with pytest.raises(KeyError), session.reserve(2):
    raise KeyError
  with session.reserve(1), session.reserve(1):
    with pytest.raises(interactions.InteractionError, match="room for 0"):
      with session.reserve(1):
        pass


def test_a_repeated_request_is_counted_once(running):
  def counts():
    text = httpx.get(f"{running.url}/metrics").text
    lines = [x.split() for x in text.splitlines() if "rollout_tokens_t" in x]
    return {name: float(value) for name, value in lines}

  session = start(running)
  client = running.client(f"/sessions/{session['session_id']}")
  message = [{"role": "user", "content": "count"}]
  before = counts()
  answer = ask(client, message)
  after = counts()
  sampled = 'rollout_tokens_total{kind="sampled"}'
  assert after[sampled] - before[sampled] == len(answer.choices[0].token_ids)
  assert ask(client, message).id == answer.id
  assert counts() == after
  ids = {e.id for _ in "ab" for e in ask(client, message, stream=True)}
  assert len(ids) == 1 and answer.id not in ids
  assert counts()[sampled] - after[sampled] == after[sampled] - before[sampled]


def test_answers_kept_for_repeats_share_their_prompts_tokens(running):
  session = start(running)
  client = running.client(f"/sessions/{session['session_id']}")
  history = []
  for turn in range(4):
    history.append({"role": "user", "content": f"turn {turn}"})
    answer = ask(client, history)
    history.append(answer.choices[0].message.model_dump())
  turns = running.app._service._caches[session["session_id"]]
  stored = [task.result() for task in turns.by_body.values()]
  prompts = [prompt.extension for a in stored for prompt in a.prompts]
  by_memory = {id(prompt.tokens): prompt for prompt in prompts}
  for a in stored:
    for ancestor in a.prompts[0].ancestors:
      by_memory[id(ancestor.extension.tokens)] = ancestor.extension
  sampled = sum(a.num_sampled for a in stored[:-1])
  in_memory = sum(map(len, by_memory.values()))
  assert in_memory + sampled == stored[-1].num_prompt_tokens


def test_an_export_is_what_json_would_write_and_holds_up_nobody(running):
  session = session_store.ServedSession(running.renderer, "s")
  length = 20_000
  messages = []
  for turn in range(2):
    messages.append({"role": "user", "content": f"turn {turn}"})
    pending = session.prompt(messages)
    tokens = np.full(length, 300 + turn, np.int32)
    reply = {"role": "assistant", "content": running.renderer.decode(tokens)}
    session.add(
      pending,
      policy_client.Completion(
        tokens,
        np.full(length, -0.25),
        np.full(length, turn),
        policy_client.FinishReason.LENGTH,
      ),
      assistant_message=reply,
    )
    messages.append(reply)
  session.set_reward(None, 1.0)
  for style, count in (("individual", 2), ("concat", 1)):
    exporter = session.exporter(style, 0.5)
    pieces = list(session_routes._encoded(exporter))
    assert len(pieces) == count + 1
    exported = json.loads(b"".join(pieces))["interactions"]
    expected = {one.id: one for one in session.export(style, 0.5)}
    assert set(exported) == set(expected)
    for name, one in exported.items():
      sequence = expected[name].sequence
      tensors = one["tensor_dict"]
      assert one["reward"] == expected[name].reward
      assert tensors["input_ids"] == [sequence.tokens.tolist()]
      assert tensors["logprobs"] == [sequence.logprobs.tolist()]
      assert tensors["loss_mask"] == [[int(m) for m in sequence.loss_mask]]
      assert tensors["attention_mask"] == [[True] * len(sequence)]
  assert json.loads(
    b"".join(
      session_routes._encoded(
        session_store.ServedSession(running.renderer, "t").exporter()
      )
    )
  ) == {"interactions": {}}


def test_an_export_runs_in_a_thread_of_its_own(running, monkeypatch):
  threads = []
  original = session_routes._array

  def array(values):
    threads.append(threading.current_thread().name)
    return original(values)

  monkeypatch.setattr(session_routes, "_array", array)
  session = start(running)
  client = running.client(f"/sessions/{session['session_id']}")
  ask(client, [{"role": "user", "content": "x"}])
  assert len(export(running, session)) == 1
  assert threads and all(name.startswith("tunix-export") for name in threads)


def _held_up(monkeypatch):
  """(set once an export is being put together, lets it go on)."""
  begun, go = threading.Event(), threading.Event()
  original = session_routes._array

  def array(values):
    begun.set()
    assert go.wait(30)
    return original(values)

  monkeypatch.setattr(session_routes, "_array", array)
  return begun, go


def _disconnected(monkeypatch):
  """Set once a stream was told that its client has gone."""
  heard = threading.Event()
  original = starlette_responses.StreamingResponse.__call__

  async def call(self, scope, receive, send):
    async def listening():
      message = await receive()
      if message["type"] == "http.disconnect":
        heard.set()
      return message

    await original(self, scope, listening, send)

  monkeypatch.setattr(starlette_responses.StreamingResponse, "__call__", call)
  return heard


def test_nothing_is_taken_that_a_dropping_export_would_lose(
  running, monkeypatch
):
  session = start(running)
  path = f"/sessions/{session['session_id']}"
  client = running.client(path, max_retries=0)
  ask(client, [{"role": "user", "content": "x"}])
  begun, go = _held_up(monkeypatch)
  exports = []
  sending = threading.Thread(
    target=lambda: exports.append(export(running, session, drop=True))
  )
  sending.start()
  try:
    assert begun.wait(30)
    with pytest.raises(openai.ConflictError) as refused:
      ask(client, [{"role": "user", "content": "y"}])
    assert refused.value.code == "session_ended"
    answer = running.post(f"{path}/rl/set_reward", {"reward": 1.0})
    assert answer.status_code == 409
  finally:
    go.set()
    sending.join()
  assert len(exports[0]) == 1
  with pytest.raises(openai.NotFoundError):
    ask(client, [{"role": "user", "content": "y"}])
  with pytest.raises(openai.AuthenticationError):
    ask(
      running.client(key=session["api_key"]), [{"role": "user", "content": "y"}]
    )


def test_a_dropping_export_that_was_cut_off_can_be_asked_for_again(
  running, monkeypatch
):
  session = start(running)
  path = f"/sessions/{session['session_id']}"
  ask(running.client(path), [{"role": "user", "content": "x"}])
  begun, go = _held_up(monkeypatch)
  heard = _disconnected(monkeypatch)
  body = {"session_id": session["session_id"], "drop": True}
  with httpx.stream(
    "POST", f"{running.url}/export_trajectories", json=body, timeout=30
  ):
    assert begun.wait(30)
  assert heard.wait(30)
  go.set()
  assert len(export(running, session)) == 1
  for _ in range(1000):
    answer = running.post(f"{path}/rl/set_reward", {"reward": 1.0})
    if answer.status_code == 200:
      break
    time.sleep(0.01)
  assert answer.status_code == 200
  assert len(export(running, session, drop=True)) == 1


# --- text and bytes -----------------------------------------------------------


def test_bytes_of_split_characters_concatenate(running, monkeypatch):
  text = "naïve ☃ 🦊 完"
  tokens = running.renderer.encode(text)
  decoder = running.app._service.policy.decoder
  assert any(b"\xef\xbf\xbd" in decoder.token(int(t)).encode() for t in tokens)

  async def says(prompt, sampling, *, session, on_tokens=None):
    ids = np.append(tokens, running.renderer.end_of_turn_id)
    stop = policy_client.FinishReason.STOP
    return policy_client.Completion(ids, ids * 0.0, ids * 0, stop)

  client = running.app._service.policy.client
  monkeypatch.setattr(client, "generate", says)
  answer = ask(
    running.client(), [{"role": "user", "content": "x"}], logprobs=True
  )
  content = answer.choices[0].logprobs.content
  assert len(content) == len(tokens) + 1
  joined = b"".join(bytes(t.bytes) for t in content)
  assert joined.decode() == text + "<|im_end|>"
  offsets = answers.text_offsets(tokens, decoder)
  for token, offset in zip(tokens, offsets):
    start_of = running.renderer.decode([token])
    if "\ufffd" not in start_of:
      assert text[offset:].startswith(start_of)


# --- the address --------------------------------------------------------------


def test_two_servers_cannot_have_one_address():
  first = http_server.listen("127.0.0.1", 0, 8)
  try:
    port = first.getsockname()[1]
    with pytest.raises(ValueError, match=f"--port={port}.*another port"):
      http_server.listen("127.0.0.1", port)
    # Who comes while the policy is compiled waits.
    socket.create_connection(("127.0.0.1", port), 5).close()
  finally:
    first.close()


@pytest.mark.parametrize(
  "path, status", [("chat/completions", 400), ("tokenize", 200)]
)
def test_health_is_answered_while_thousands_of_parts_are_read(
  running, monkeypatch, path, status
):
  reading, answered = threading.Event(), threading.Event()
  parse = bodies.parse

  def parse_until_answered(*args, **kwargs):
    reading.set()
    assert answered.wait(30), "the body was read on the event loop"
    return parse(*args, **kwargs)

  monkeypatch.setattr(bodies, "parse", parse_until_answered)
  parts = [{"type": "text", "text": "a"}] * 20_000
  body = {"model": MODEL, "messages": [{"role": "user", "content": parts}]}
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    answer = thread.submit(running.post, f"/v1/{path}", body)
    assert reading.wait(30)
    assert httpx.get(f"{running.url}/health", timeout=60).status_code == 200
    answered.set()
    assert answer.result().status_code == status


def test_a_dead_engine_is_told_everywhere():
  with Running() as running:
    assert httpx.get(f"{running.url}/health").status_code == 200
    running.engine.close()
    client = running.client(max_retries=0)
    answer = httpx.get(f"{running.url}/health")
    assert answer.status_code == 503
    assert answer.json()["status"] != "ok"
    for call in (
      lambda: ask(client, [{"role": "user", "content": "x"}]),
      lambda: client.completions.create(model=MODEL, prompt="x"),
      lambda: client.responses.create(model=MODEL, input="x"),
      lambda: client.responses.create(model=MODEL, input="x", stream=True),
    ):
      with pytest.raises(openai.InternalServerError) as refused:
        call()
      assert refused.value.code == "engine_dead"
      assert refused.value.status_code == 503


@pytest.mark.parametrize(
  "path, body",
  [
    ("chat/completions", {"messages": 3}),
    ("chat/completions", {"messages": [3]}),
    ("completions", {"prompt": {"a": 1}}),
    ("responses", {"input": 3}),
    ("responses", {"input": [[]]}),
  ],
)
def test_a_wrong_type_is_a_400_that_names_the_field(running, path, body):
  answer = running.post(f"/v1/{path}", {"model": MODEL, **body})
  assert answer.status_code == 400
  error = answer.json()["error"]
  assert set(error) == {"message", "type", "param", "code"}
  assert error["param"] and error["type"] == "invalid_request_error"
  assert "got" in error["message"] or "must be" in error["message"]
