"""Runs of any service: reading its answers, and its events as tokens."""

import dataclasses
import functools
import itertools
import json

from agent_services import content_store
from agent_services.runs import client as client_lib
from agent_services.runs import conversion
from agent_services.runs import run_agent
import numpy as np
import pytest
import run_services
from tunix.rl.multi_turn.core import trajectory

PAD = 9
IMAGES = [trajectory.ImageRef(str(i) * 64, 8, 8) for i in range(4)]


def event(kind, ts, **fields):
  return {"type": kind, "ts": ts, "step": 1, **fields}


def called(*urls):
  parts = [{"type": "image_url", "image_url": {"url": u}} for u in urls]
  return {"messages": [{"role": "user", "content": parts}]}


def said(prompt, ids=(5, 6), **fields):
  return run_services.completion("t", ids=ids, prompt=prompt, **fields)


# --- the client ---------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [False, True])
async def test_bare_and_wrapped_answers_are_read(wrapped):
  rows = {
    "events": [event("step_start", 1)],
    "trajectory": [{"step": 0}],
    "tokens": [{"token_ids": [1]}],
    "steps": [{"text": "a"}],
  }

  def answer(method, path, body):
    what = path.rpartition("/")[2]
    if what == "0":
      return 200, {"step": {"text": "a"}} if wrapped else {"text": "a"}
    if what in rows:
      return 200, {what: rows[what]} if wrapped else rows[what]
    status = {"status": "completed", "reason": "done"}
    return 200, {"run": status} if wrapped else status

  with run_services.scripted(answer) as (url, service):
    runs = client_lib.RunServiceClient(url, token="t")
    for name, expected in rows.items():
      assert await getattr(runs, name)("r/1") == expected
    assert await runs.step("r/1", 0) == {"text": "a"}
    assert await runs.status("r/1") == ("completed", "done")
    await runs.events("r/1", first="2025-01-01T00:00:00Z", last=5)
    _, path, query, headers, _ = service.requests[-1]
    assert query == "from=2025-01-01T00%3A00%3A00Z&to=5"
    assert headers["authorization"] == "Bearer t"
    await runs.aclose()


async def test_nothing_yet_is_empty_and_garbage_is_an_error():
  with run_services.scripted(lambda *_: (404, {"detail": "none"})) as (url, _):
    runs = client_lib.RunServiceClient(url)
    assert await runs.events("r") == await runs.steps("r") == []
    assert await runs.trajectory("r") == await runs.tokens("r") == []
    assert await runs.step("r", 3) is None
    with pytest.raises(client_lib.RunServiceError, match="404"):
      await runs.status("r")
    await runs.aclose()
  for garbage in (b"<html>", [1], {"events": "no"}, {"events": [1]}, 5):
    with run_services.scripted(lambda *_, g=garbage: (200, g)) as (url, _):
      runs = client_lib.RunServiceClient(url)
      with pytest.raises(client_lib.RunServiceError):
        await runs.events("r")
      await runs.aclose()


async def test_a_run_is_followed_to_its_end_and_no_event_is_seen_twice():
  """Polls overlap, fail now and then, and late events come after the end."""
  events = [event("step_start", t, actionIndex=t % 2) for t in range(6)]
  polls = itertools.count()

  def answer(method, path, body):
    poll = next(polls)
    if poll == 3:
      return 503, {"detail": "busy"}
    ended = poll > 12
    if path.endswith("/events"):
      # The bounds are ignored: all events of every poll come again.
      return 200, events if ended else events[: 1 + poll // 3]
    return 200, {"status": "completed" if ended else "running"}

  with run_services.scripted(answer) as (url, _):
    runs = client_lib.RunServiceClient(url, poll_s=0.01)
    followed = [e async for e in runs.follow("r", 20.0)]
    assert followed == events
    await runs.aclose()


@pytest.mark.parametrize(
  "names", [("step_start", "step_end"), ("turn_start", "turn_end")]
)
async def test_an_agent_plays_by_the_service_s_documented_exchange(names):
  """gbox-mini-agent's: bare lists, 404 until there are events, times as ISO
  text, whole replies, the answer in `finished`, and events after the end."""
  begin, end = names
  reply = said([1, 2])
  shot = {"screenshots": [{"name": "screenshot_after", "url": "http://s/1"}]}

  def action(index, name, **args):
    return {"actionIndex": index, "action": {
        "name": name, "args": args, "callId": f"c{index}",
        "rawFeedback": "", "rawResult": {}, "obs": shot}}  # fmt: skip

  rows = [
      {"type": begin, "step": 1},
      {"type": "model_call", "step": 1, "modelSpecificInput": called("u")},
      {"type": "model_output", "step": 1, "modelOutput": reply},
      {"type": "action_executed", "step": 1, "durationMs": 5,
       **action(0, "tap", point={"x": 1, "y": 2})},
      {"type": "action_executed", "step": 1,
       **action(1, "type", content="hello")},
      {"type": end, "step": 1},
      {"type": "model_call", "step": 2, "modelInput": called("u", "v")},
      {"type": "model_output", "step": 2, "modelOutput": reply},
      {"type": "action_executed", "step": 2,
       **action(0, "finished", content="42")},
      {"type": "run_end", "ok": True, "reason": "finished"},
  ]  # fmt: skip
  for second, row in enumerate(rows):
    row["ts"] = f"2026-01-01T00:00:{second:02}.000Z"
  polls = itertools.count()

  def answer(method, path, body):
    if (method, path) == ("POST", "/runs"):
      return 200, {"runId": "run-1"}
    poll = next(polls)
    if path.endswith("/events"):
      if poll < 3:
        return 404, {"detail": "no events"}
      return 200, rows[:6] if poll < 7 else rows[:8] if poll < 11 else rows
    # The run ends before its last events arrive.
    return 200, {"status": "running" if poll < 10 else "completed"}

  body = {
      "task": "Say hello.", "agent": "qwen3-vl", "maxSteps": 20,
      "maxRunTimeSec": 600, "maxStepTimeSec": 180,
      "model": {"baseUrl": "http://m/v1", "name": "m", "provider": "openai"},
      "env": {"type": "genv", "gymBaseUrl": "http://g", "gymId": "desktop",
              "executionId": "e"},
      "standardActionSpace": "mobile",
  }  # fmt: skip
  with run_services.scripted(answer) as (url, service):
    runs = client_lib.RunServiceClient(url, poll_s=0.01)
    agent = run_agent.RunAgent()
    assert await agent.start(runs, body, 20.0) == "run-1"
    assert (await agent.output(0))["modelOutput"] == reply
    assert [a["name"] for a in await agent.actions(0)] == ["tap", "type"]
    assert agent.chat_completions[0]["content"][0]["text"] == "[screenshot u]"
    ended = await agent.finished()
    assert (ended.status, ended.reason, ended.answer) == (
      "completed",
      "finished",
      "42",
    )
    assert agent.events == rows
    assert await agent.output(2) is None
    await agent.close()
    await runs.aclose()
    first, *later = service.requests
    assert first[:2] == ("POST", "/runs") and json.loads(first[-1]) == body
    assert {r[:2] for r in later} == {
      ("GET", "/runs/run-1"),
      ("GET", "/runs/run-1/events"),
    }
    bounds = [r[2] for r in later if r[1].endswith("events")]
    assert not bounds[0]
    assert bounds[-1] == "from=2026-01-01T00%3A00%3A07.000Z"


async def test_following_ends_with_its_deadline():
  def answer(method, path, body):
    return 200, [] if path.endswith("/events") else {"status": "running"}

  with run_services.scripted(answer) as (url, _):
    runs = client_lib.RunServiceClient(url, poll_s=0.01)
    with pytest.raises(client_lib.RunTimeout, match="0.2 s"):
      async for _ in runs.follow("r", 0.2):
        pass
    await runs.aclose()


async def test_a_screenshot_is_fetched_from_the_service_alone():
  with run_services.scripted(lambda *_: (200, b"png")) as (url, _):
    runs = client_lib.RunServiceClient(url)
    assert await runs.fetch(f"{url}/images/x") == b"png"
    for other in ("http://169.254.169.254/", f"{url}.evil.test/x", "file:///"):
      with pytest.raises(client_lib.RunServiceError, match="is not of"):
        await runs.fetch(other)
    await runs.aclose()


async def test_an_agent_that_is_closed_ends_its_run():
  def answer(method, path, body):
    if method == "POST" and path == "/runs":
      return 200, {"runId": "r"}
    return 200, [] if path.endswith("/events") else {"status": "running"}

  with run_services.scripted(answer) as (url, service):
    runs = client_lib.RunServiceClient(url, poll_s=0.01)
    agent = run_agent.RunAgent()
    with pytest.raises(RuntimeError, match="start first"):
      await agent.output(0)
    await agent.start(runs, {}, 30.0)
    with pytest.raises(RuntimeError, match="already"):
      await agent.start(runs, {}, 30.0)
    await agent.close()
    await agent.close()
    ended = [r for r in service.requests if r[1] == "/runs/r/cancel"]
    assert len(ended) == 1
    await runs.aclose()


# --- tokens -------------------------------------------------------------------


def test_turns_that_extend_one_another_are_one_sequence():
  first = [1, PAD, PAD, 2]
  second = [*first, 5, 6, 3, PAD, 4]
  events = [
    event("model_call", 1, modelSpecificInput=called("a")),
    event("model_output", 2, modelOutput=said(first)),
    event("model_call", 3, modelInput=called("a", "b")),
    event(
      "model_output", 4, modelOutput=said(second, ids=(7,), logprobs=(-0.125,))
    ),
  ]
  turns = conversion.turns_of(events)
  assert [conversion.image_urls(t.messages) for t in turns] == [
    ["a"],
    ["a", "b"],
  ]
  (sequence,), encoded = conversion.sequences_of(
    turns, [IMAGES[:1], IMAGES[:2]], PAD, version=4
  )
  assert encoded == 0
  assert sequence.tokens.tolist() == [*second, 7]
  assert sequence.loss_mask.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 1]
  assert sequence.logprobs[sequence.loss_mask].tolist() == [-0.5, -0.25, -0.125]
  assert sequence.versions.tolist() == [-1] * 4 + [4, 4] + [-1] * 3 + [4]
  assert sequence.turn_ids.tolist() == [0] * 6 + [1] * 4
  assert [(s.image, s.offset, s.num_tokens) for s in sequence.images] == [
    (IMAGES[0], 1, 2),
    (IMAGES[1], 7, 1),
  ]


def test_images_of_rows_are_read_with_their_breaks():
  """Pixtral: rows of placeholders, a break between each two, then an end."""
  brk, end = 8, 7
  wide = [PAD, PAD, PAD, brk, PAD, PAD, PAD, end]
  flat = [PAD, PAD, end]
  prompt = [1, *wide, *flat, 2]
  turns = conversion.turns_of(
    [
      event("model_call", 1, messages=called("a", "b")),
      event("model_output", 2, modelOutput=said(prompt)),
    ]
  )
  read = functools.partial(
    conversion.sequences_of, turns, [IMAGES[:2]], PAD, version=0
  )
  ((sequence,), _) = read(image_break_id=brk)
  assert [
    (s.offset, s.row, s.numbers(sequence.tokens).tolist())
    for s in sequence.images
  ] == [(1, 3, [0, 1, 2, -1, 3, 4, 5]), (9, 0, [0, 1])]
  assert [s.image for s in sequence.images] == list(IMAGES[:2])
  again = trajectory.TokenSequence.from_json(sequence.to_json())
  assert again == sequence and again.images == sequence.images
  with pytest.raises(ValueError, match="3 runs of image placeholders for 2"):
    read()
  uneven = [1, PAD, PAD, brk, PAD, end, *flat, 2]
  turns[0] = dataclasses.replace(turns[0], prompt_ids=np.array(uneven))
  with pytest.raises(ValueError, match="is not made of runs of 2"):
    read(image_break_id=brk)


def test_sglang_s_reply_has_the_prompt_in_its_choice():
  reply = said([1, 2])
  reply["choices"][0]["prompt_token_ids"] = reply.pop("prompt_token_ids")
  (turn,) = conversion.turns_of([event("model_output", 1, modelOutput=reply)])
  assert turn.is_exact and turn.prompt_ids.tolist() == [1, 2]


def test_a_rewritten_history_begins_another_sequence():
  turns = conversion.turns_of(
    [
      event("model_call", 1, messages=[]),
      event("model_output", 2, modelOutput=said([1, 2])),
      event("model_output", 3, modelOutput=said([1, 3])),
    ]
  )
  sequences, _ = conversion.sequences_of(turns, [(), ()], None)
  assert [s.tokens.tolist() for s in sequences] == [[1, 2, 5, 6], [1, 3, 5, 6]]
  assert sum(s.num_sampled for s in sequences) == 4
  assert [set(s.turn_ids.tolist()) for s in sequences] == [{0}, {1}]


def test_versions_of_the_reply_win():
  reply = said([1], ids=(5, 6, 7), logprobs=(-1.0, -1.0, -1.0))
  reply["choices"][0]["policy_versions"] = [[0, 2], [2, 3]]
  turns = conversion.turns_of([event("model_output", 1, modelOutput=reply)])
  (sequence,), _ = conversion.sequences_of(turns, [()], None, version=9)
  assert sequence.versions.tolist() == [-1, 2, 2, 3]


@pytest.mark.parametrize(
  "reply, missing",
  [
    (said([1], ids=None), "token_ids, logprobs"),
    (said([1], logprobs=None), "logprobs"),
    (said([1], logprobs=(-1.0,)), "logprobs"),
    (said([1], logprobs=(-1.0, float("nan"))), "logprobs"),
    (said([1], logprobs=(-1.0, 0.5)), "logprobs"),
    (said(None), "prompt_ids"),
    (said([1], ids=(5, True)), "token_ids"),
    (said([1], ids=(5, -1)), "token_ids"),
    (said([1], ids=(5, "6")), "token_ids"),
  ],
)
def test_what_the_server_did_not_report_is_refused_or_counted(reply, missing):
  (turn,) = conversion.turns_of([event("model_output", 1, modelOutput=reply)])
  assert not turn.is_exact
  with pytest.raises(conversion.MissingTokens, match=missing):
    conversion.sequences_of([turn], [()], None)
  (sequence,), encoded = conversion.sequences_of(
    [turn],
    [()],
    None,
    on_missing="fallback",
    encode=lambda _: ([1, 2], [8, 8, 8]),
  )
  assert encoded == 1
  assert not sequence.logprobs.any() and sequence.num_sampled >= 2
  if turn.token_ids is not None:  # Ids that are known stay.
    assert sequence.tokens[-2:].tolist() == [5, 6]


@pytest.mark.parametrize(
  "output", [None, {}, {"choices": []}, {"choices": [{"message": None}]}, 5]
)
def test_an_output_that_is_no_completion_is_an_error(output):
  with pytest.raises(ValueError, match="no chat completion"):
    conversion.turns_of([event("model_output", 1, modelOutput=output)])


def test_screenshots_that_do_not_fit_the_prompt_are_an_error():
  turn = conversion.turns_of(
    [event("model_output", 1, modelOutput=said([1, PAD, 2]))]
  )
  for images in ((), IMAGES[:2]):
    with pytest.raises(ValueError, match="placeholders"):
      conversion.sequences_of(turn, [images], PAD)
  other = conversion.turns_of(
    [
      event("model_output", 1, modelOutput=said([1, PAD, 2])),
      event("model_output", 2, modelOutput=said([1, PAD, 2, 5, 6, 3])),
    ]
  )
  with pytest.raises(ValueError, match="screenshots"):
    conversion.sequences_of(other, [IMAGES[:1], IMAGES[1:2]], PAD)


def test_cloning_samples_are_the_former_form():
  events = [
    event("model_call", 1, modelSpecificInput=called("a")),
    event("model_output", 2, modelOutput=said([1])),
  ]
  ((messages, text, weight),) = conversion.samples_of(events, 0.5)
  assert messages == called("a")["messages"]
  assert (text, weight) == ("t", 0.5)
  # One a turn, each with the messages that its own call sent.
  more = [
    *events,
    event("action_executed", 3, action={"name": "click"}),
    event("model_call", 4, modelSpecificInput=called("a", "b")),
    event("model_output", 5, modelOutput=said([1, 2])),
    event("run_end", 6, ok=True),
  ]
  assert conversion.samples_of(more) == [
    (called("a")["messages"], "t", 1.0),
    (called("a", "b")["messages"], "t", 1.0),
  ]
  assert conversion.samples_of([]) == []


# --- addresses of screenshots -------------------------------------------------


def test_data_urls_become_addresses_that_expire():
  now = [1000.0]
  store = content_store.ContentStore(100)
  urls = content_store.SignedUrls(
    "http://h:1/", lifetime_s=60, key=b"k", clock=lambda: now[0]
  )
  value = {"a": ["data:image/png;base64,aGk=", "text", 1], "b": "http://x"}
  message = content_store.externalize(value, store, urls)
  assert value["a"][0].startswith("data:")
  assert message["a"][1:] == ["text", 1] and message["b"] == "http://x"
  address, _, query = message["a"][0].partition("?")
  name = address.rpartition("/")[2]
  assert address == f"http://h:1/images/{name}"
  assert store.get(name) == (b"hi", "image/png")
  parameters = dict(part.split("=") for part in query.split("&"))
  assert urls.problem(name, parameters) == ""
  assert "signature" in urls.problem(name, {**parameters, "expires": "2000"})
  assert "signature" in urls.problem("0" * 64, parameters)
  assert urls.problem("../x", parameters) and urls.problem(name, {})
  other = content_store.SignedUrls(key=b"other", clock=lambda: now[0])
  assert "signature" in other.problem(name, parameters)
  now[0] += 61
  assert "expired" in urls.problem(name, parameters)


def test_a_content_store_is_bounded():
  store = content_store.ContentStore(10)
  names = [store.put(bytes([i]) * 4, "image/png") for i in range(3)]
  assert store.get(names[0]) is None and store.get(names[2])
  with pytest.raises(ValueError, match="capacity_bytes"):
    store.put(b"x" * 11, "image/png")
  with pytest.raises(ValueError, match="base64"):
    content_store.read_data_url("data:image/png;base64,@@@")
  assert content_store.read_data_url("http://x") is None
