"""Faults between clients and the engine, and their traces.

Every test keeps a ledger of the tokens that clients received, and compares it
with the exports: no token is lost, trained twice, or trained without having
been received.
After each, the engine is idle, and all of its slots can be filled at a time.
"""

import asyncio
import base64
import collections
import contextlib
import io
import itertools
import threading
import time

from agent_services.serving import requests as requests_lib
from flax import nnx
import httpx
import jax
import numpy as np
import openai
from PIL import Image
import pytest
import rollout_references as references
import rollout_server_runner
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib

pytestmark = pytest.mark.timeout(200)
MODEL, SLOTS, CONTEXT = "qwen", 8, 384
LONG = 250  # Tokens that take a while.


@pytest.fixture(scope="module", name="policy")
def _policy():
  return references.tiny_qwen(talkative=True)


@pytest.fixture(scope="module", name="server")
def _server(policy):
  model, processor, _ = policy
  store = images_lib.ImageStore()
  with engine_lib.RolloutEngine(
    model,
    processor,
    store,
    engine_config.EngineConfig(
      slots=SLOTS,
      context_length=CONTEXT,
      decode_steps_per_call=4,
      decode_rows=(SLOTS,),
      prefill_rows=(SLOTS,),
      prefill_buckets=(64,),
      window_buckets=(CONTEXT,),
    ),
    image_sizes=references.SIZES[:1],
    banned_token_ids=model.config.banned_token_ids,
  ) as engine:
    engine.warm_up()
    with rollout_server_runner.Server(
      MODEL,
      engine,
      policy,
      store,
      limits=requests_lib.RequestLimits(max_new_tokens=256),
    ) as server:
      yield server
    assert engine.stats()["compiles_after_warm_up"] == 0


@pytest.fixture(name="client")
async def _client(server):
  """The real client; the engine is whole and empty when a test has ended."""
  async with openai.AsyncOpenAI(
    base_url=f"{server.url}/v1",
    api_key="none",
    timeout=100,
    # Reading certificates would take longer than many a request.
    http_client=openai.DefaultAsyncHttpxClient(verify=False),
  ) as client:
    async with asyncio.timeout(200):
      yield client
      await all_slots_are_free(server)


async def until(condition, seconds=60):
  """Waits until it is so."""
  async with asyncio.timeout(seconds):
    while not condition():
      await asyncio.sleep(0.002)


async def settled(server):
  """The engine's statistics once nothing is under way."""

  def idle():
    stats = server.engine.stats()
    return not stats["active"] and not stats["waiting"]

  await until(idle)
  return server.engine.stats()


async def all_slots_are_free(server):
  """Nothing runs, no session is stored, and every slot can be filled."""
  await settled(server)
  service = server.app._service  # pylint: disable=protected-access
  await until(lambda: service.running == 0)
  prompt = policy_client.TokenPrompt(np.arange(300, 310))
  tasks = [
    asyncio.create_task(
      server.engine.generate(
        prompt,
        policy_client.SamplingParams(max_new_tokens=300),
        session=f"probe{i}",
      )
    )
    for i in range(SLOTS)
  ]
  most = 0
  with slow_decode(server.engine):
    while most < SLOTS and not all(task.done() for task in tasks):
      most = max(most, server.engine.stats()["active"])
      await asyncio.sleep(0.0005)
  for task in tasks:
    task.cancel()
  outcomes = await asyncio.gather(*tasks, return_exceptions=True)
  for i in range(SLOTS):
    await server.engine.release(f"probe{i}")
  assert most == SLOTS, f"{most} of {SLOTS} slots can be used: {outcomes}"
  await settled(server)


# --- a device that is slow, or fails -----------------------------------------


@contextlib.contextmanager
def decode_calls(engine, before):
  """`before(number of the call)` comes before each decode call."""
  programs = engine._programs  # pylint: disable=protected-access
  decode, calls = programs.decode, itertools.count(1)

  def changed(*args, **kwargs):
    before(next(calls))
    return decode(*args, **kwargs)

  programs.decode = changed
  try:
    yield
  finally:
    programs.decode = decode


def slow_decode(engine, seconds=0.02):
  return decode_calls(engine, lambda _: time.sleep(seconds))


def failing_decode(engine, after, times):
  """Decode calls number `after` to `after + times` raise."""

  def fails(call):
    if after <= call < after + times:
      raise RuntimeError("the device is on fire")

  return decode_calls(engine, fails)


# --- sessions, and what their clients were told ------------------------------


class Session:
  """An agent's side of a session: what it asked and what it was told."""

  def __init__(self, server, client, opened):
    self._server = server
    self.id = opened["session_id"]
    self.client = client.with_options(base_url=opened["base_url"])
    self.messages = []
    self.told = {}  # Id of an interaction -> (ids, log-probs, versions).

  @classmethod
  async def open(cls, server, client):
    return cls(server, client, await server.start())

  def say(self, text, image=None):
    content = [{"type": "text", "text": text}]
    if image is not None:
      url = {"url": data_url(image)}
      content.append({"type": "image_url", "image_url": url})
    self.messages.append({"role": "user", "content": content})

  def request(self, **options):
    options = {"max_tokens": 8, "logprobs": True} | options
    return self.client.chat.completions.create(
      model=MODEL,
      messages=self.messages,
      extra_body={"return_token_ids": True},
      **options,
    )

  async def ask(self, **options):
    """A whole answer, which the next turn goes on from."""
    answer = await self.request(**options)
    for choice in answer.choices:
      self.book(choice.interaction_id, choice)
    text = answer.choices[0].message.content
    self.messages.append({"role": "assistant", "content": text})
    return answer

  async def stream(self, leave_after=None, on_piece=None, **options):
    """The same by a stream; None if it leaves after `leave_after` pieces."""
    pieces, last = [], None
    stream = await self.request(stream=True, **options)
    async with stream:
      async for event in stream:
        if not event.choices:
          continue
        pieces.append(event.choices[0].delta.content or "")
        if event.choices[0].finish_reason:
          last = event.choices[0]
        if on_piece is not None:
          on_piece()
        if leave_after is not None and len(pieces) > leave_after:
          return None
    if last is None:
      raise AssertionError("the stream was cut")
    self.book(last.interaction_id, last)
    self.messages.append({"role": "assistant", "content": "".join(pieces)})
    return last

  def book(self, id_, choice):
    logprobs = [
      (t["logprob"] if isinstance(t, dict) else t.logprob)
      for t in (
        choice.logprobs["content"]
        if isinstance(choice.logprobs, dict)
        else choice.logprobs.content
      )
    ]
    spans = [*choice.policy_versions, [len(choice.token_ids), None]]
    versions = [
      version
      for (start, version), (end, _) in zip(spans, spans[1:])
      for _ in range(end - start)
    ]
    sampled = (list(choice.token_ids), logprobs, versions)
    assert self.told.setdefault(id_, sampled) == sampled, (
      "two answers of one id"
    )

  async def export(self, style):
    answer = await self._server.post(
      "/export_trajectories", {"session_id": self.id, "style": style}
    )
    return answer.json()["interactions"]

  async def check(self, turns):
    """The export is what was told, once; then the session is dropped."""
    assert len(self.told) == turns
    apart = await self.export("individual")
    assert set(apart) == set(self.told)
    for id_, (tokens, logprobs, versions) in self.told.items():
      tensors = apart[id_]["tensor_dict"]
      mask = np.array(tensors["loss_mask"][0], bool)
      ids, rates, created = (
        np.array(tensors[name][0])[mask]
        for name in ("input_ids", "logprobs", "versions")
      )
      assert ids.tolist() == tokens and created.tolist() == versions
      np.testing.assert_allclose(rates, logprobs, atol=1e-6)
    count = 0
    trained = collections.Counter()
    for one in (await self.export("concat")).values():
      tensors = one["tensor_dict"]
      mask = np.array(tensors["loss_mask"][0], bool)
      count += mask.sum()
      trained.update(np.array(tensors["input_ids"][0])[mask].tolist())
    want = collections.Counter()
    for tokens, *_ in self.told.values():
      want.update(tokens)
    assert trained == want and count == want.total()
    await self._server.post(
      "/export_trajectories", {"session_id": self.id, "drop": True}
    )


def data_url(seed):
  rng = np.random.default_rng(seed)
  width, height = references.SIZES[0]
  pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
  out = io.BytesIO()
  Image.fromarray(pixels).save(out, "PNG")
  return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


async def open_sessions(server, client, count):
  return await asyncio.gather(
    *(Session.open(server, client) for _ in range(count))
  )


# --- clients that go away ----------------------------------------------------


@pytest.mark.slow
async def test_streams_that_are_left_and_asked_for_again(server, client):
  """The second of two equal bodies gets a whole answer, and the only one."""
  sessions = await open_sessions(server, client, 2 * SLOTS)

  async def play(i, session):
    for turn in range(2):
      session.say(f"turn {turn} of {i}", image=i)
      if i % 4:
        cut_off = await session.stream(leave_after=i % 5, max_tokens=LONG)
        assert cut_off is None
      await session.stream(max_tokens=LONG // 4 if i % 4 == 0 else LONG)

  before = await settled(server)
  await asyncio.gather(*(play(i, s) for i, s in enumerate(sessions)))
  after = await settled(server)
  assert after["cancelled"] > before["cancelled"]
  await asyncio.gather(*(s.check(turns=2) for s in sessions))


async def test_streams_that_are_left_for_good_leave_no_trace(server, client):
  sessions = await open_sessions(server, client, 2 * SLOTS)

  async def play(i, session):
    session.say(f"session {i}")
    assert await session.stream(leave_after=1, max_tokens=LONG) is None

  before = await settled(server)
  await asyncio.gather(*(play(i, s) for i, s in enumerate(sessions)))
  after = await settled(server)
  assert after["completed"] == before["completed"]
  assert after["cancelled"] == before["cancelled"] + len(sessions)
  await asyncio.gather(*(s.check(turns=0) for s in sessions))


async def test_who_leaves_while_it_waits_for_a_slot_is_not_served(
  server, client
):
  busy = await open_sessions(server, client, SLOTS)
  waiting = await open_sessions(server, client, SLOTS)

  async def play(session):
    session.say("work")
    await session.stream(max_tokens=LONG)

  before = await settled(server)
  stats = server.engine.stats
  with slow_decode(server.engine):
    working = [asyncio.create_task(play(s)) for s in busy]
    await until(lambda: stats()["active"] == SLOTS)
    impatient = []
    for session in waiting:
      session.say("impatient")
      impatient.append(asyncio.create_task(session.request(max_tokens=LONG)))
    await until(lambda: stats()["waiting"] == SLOTS)
    for task in impatient:
      task.cancel()
    await asyncio.gather(*impatient, return_exceptions=True)
    await until(lambda: stats()["waiting"] == 0)
    assert stats()["active"] == SLOTS  # They got no slot.
  await asyncio.gather(*working)
  after = await settled(server)
  assert after["completed"] == before["completed"] + len(busy)
  assert after["cancelled"] == before["cancelled"] + len(waiting)
  await asyncio.gather(*(s.check(turns=1) for s in busy))
  await asyncio.gather(*(s.check(turns=0) for s in waiting))


async def test_all_choices_of_a_request_end_with_its_client(server, client):
  (session,) = await open_sessions(server, client, 1)
  session.say("many")
  before = await settled(server)
  assert await session.stream(leave_after=4, n=4, max_tokens=LONG) is None
  after = await settled(server)
  assert after["cancelled"] == before["cancelled"] + 4
  await session.check(turns=0)


async def test_a_session_that_is_ended_in_mid_stream(server, client):
  sessions = await open_sessions(server, client, SLOTS // 2)

  async def play(session):
    session.say("first")
    await session.ask()
    session.say("second")
    begun = asyncio.Event()
    ending = asyncio.create_task(end(session, begun))
    with pytest.raises(openai.APIError, match="ended"):
      await session.stream(on_piece=begun.set, max_tokens=LONG)
    await ending

  async def end(session, begun):
    await begun.wait()
    path = f"/sessions/{session.id}/rl/end_session"
    assert (await server.post(path)).status_code == 200

  with slow_decode(server.engine):
    await asyncio.gather(*(play(s) for s in sessions))
  await asyncio.gather(*(s.check(turns=1) for s in sessions))


# --- requests that come twice ------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_duplicated_requests_are_sampled_once(server, client, stream):
  sessions = await open_sessions(server, client, SLOTS)

  async def play(i, session):
    session.say(f"session {i}", image=i)
    ask = session.stream if stream else session.ask
    messages = list(session.messages)

    async def again():
      session.messages = list(messages)
      await ask(max_tokens=30)

    await asyncio.gather(*(again() for _ in range(4)))  # At a time,
    for _ in range(2):  # and one after the other.
      await again()
    session.say("and on")
    messages[:] = session.messages
    await again()
    await again()

  before = await settled(server)
  await asyncio.gather(*(play(i, s) for i, s in enumerate(sessions)))
  after = await settled(server)
  assert after["requests"] == before["requests"] + 2 * len(sessions)
  await asyncio.gather(*(s.check(turns=2) for s in sessions))


async def test_a_duplicate_outlives_the_stream_it_repeats(server, client):
  sessions = await open_sessions(server, client, SLOTS // 2)

  async def play(session):
    session.say("wait for me")
    second = asyncio.create_task(session.ask(max_tokens=LONG, stream=False))
    await second
    # A stream of the same words is another body, hence another sample.
    session.messages.pop()
    stream = asyncio.create_task(session.stream(max_tokens=LONG))
    await asyncio.sleep(0.02)
    other = Session(server, client, {"session_id": session.id, "base_url": ""})
    other.client, other.messages = session.client, session.messages[:1]
    cut_off = await other.stream(leave_after=1, max_tokens=LONG)
    assert cut_off is None
    assert await stream is not None

  await asyncio.gather(*(play(s) for s in sessions))
  await asyncio.gather(*(s.check(turns=2) for s in sessions))


async def test_the_clients_own_retries_are_no_second_sample(server, client):
  """A timeout repeats the request; the answer comes when it can."""
  (session,) = await open_sessions(server, client, 1)
  session.say("slow", image=5)
  hasty = session.client
  session.client = hasty.with_options(timeout=0.02, max_retries=2)
  with contextlib.suppress(openai.APITimeoutError):
    await session.request(max_tokens=LONG)
  session.client = hasty
  await session.ask(max_tokens=LONG)
  assert len(await session.export("individual")) == 1
  await session.check(turns=1)


# --- an engine that fails ----------------------------------------------------


@pytest.mark.slow
async def test_an_engine_exception_in_the_middle(server, client):
  sessions = await open_sessions(server, client, 2 * SLOTS)
  failures = []

  async def play(i, session):
    for turn in range(2):
      session.say(f"turn {turn} of {i}", image=i)
      for _ in range(6):
        try:
          await session.stream(max_tokens=60)
          break
        except openai.APIError as error:
          failures.append(error)
      else:
        raise AssertionError("no answer after six attempts")

  before = await settled(server)
  with failing_decode(server.engine, after=6, times=2):
    await asyncio.gather(*(play(i, s) for i, s in enumerate(sessions)))
  after = await settled(server)
  assert after["recoveries"] == before["recoveries"] + 2
  assert len(failures) >= SLOTS
  assert all("on fire" in str(e) for e in failures)
  assert server.engine.healthy
  await asyncio.gather(*(s.check(turns=2) for s in sessions))


async def test_the_client_is_told_not_to_repeat_what_failed(server, client):
  """The client would repeat any 500; the agent decides on a second sample."""
  sessions = await open_sessions(server, client, SLOTS)
  before = await settled(server)

  async def play(i, session):
    session.say(f"session {i}")
    with pytest.raises(openai.InternalServerError, match="on fire"):
      await session.ask(max_tokens=100)

  with failing_decode(server.engine, after=1, times=1):
    await play(0, sessions[0])
  after = await settled(server)
  assert after["requests"] == before["requests"] + 1
  assert after["failed"] == before["failed"] + 1
  await asyncio.gather(*(s.ask() for s in sessions[1:] if not s.say("x")))
  await sessions[0].ask()
  await asyncio.gather(*(s.check(turns=1) for s in sessions))


async def test_weights_that_are_broken_fail_requests_and_train_nothing(
  server, client, policy
):
  sessions = await open_sessions(server, client, SLOTS)
  good = nnx.state(policy[0], nnx.Param)
  broken = jax.tree.map(lambda x: x * np.nan, good)
  failures = []

  async def play(i, session):
    session.say(f"session {i}", image=i)
    for _ in range(100):
      try:
        return await session.stream(max_tokens=100)
      except openai.APIError as error:
        failures.append(error)
        await asyncio.sleep(0.05)
    raise AssertionError("no answer after all attempts")

  async def train():
    await until(lambda: server.engine.stats()["active"] >= SLOTS // 2)
    version = server.engine.version
    await asyncio.wrap_future(server.engine.update_weights(version + 1, broken))
    await until(lambda: failures)
    await asyncio.wrap_future(server.engine.update_weights(version + 2, good))

  bad = server.engine.version + 1
  await asyncio.gather(train(), *(play(i, s) for i, s in enumerate(sessions)))
  assert any("not finite" in str(e) for e in failures)
  for session in sessions:
    for *_, versions in session.told.values():
      assert bad not in versions
  await asyncio.gather(*(s.check(turns=1) for s in sessions))


# --- many --------------------------------------------------------------------


@pytest.mark.slow
async def test_more_sessions_than_slots(server, client):
  sessions = await open_sessions(server, client, 5 * SLOTS)

  async def play(i, session):
    for turn in range(3):
      session.say(f"turn {turn} of {i}", image=(i, turn))
      await (session.stream if i % 2 else session.ask)(max_tokens=1 + i % 9)

  before = await settled(server)
  await asyncio.gather(*(play(i, s) for i, s in enumerate(sessions)))
  after = await settled(server)
  assert after["completed"] == before["completed"] + 3 * len(sessions)
  assert after["failed"] == before["failed"]
  # One branch each: no turn was rendered anew.
  for session in sessions[::7]:
    assert len(await session.export("concat")) == 1
  await asyncio.gather(*(s.check(turns=3) for s in sessions))


@pytest.mark.slow
async def test_updates_during_64_streams(server, client, policy):
  sessions = await open_sessions(server, client, 64)
  state = nnx.state(policy[0], nnx.Param)
  first = server.engine.version
  finished = threading.Event()

  async def play(i, session):
    for turn in range(2):
      session.say(f"turn {turn} of {i}")
      await session.stream(max_tokens=40)

  def train():
    version = first
    while not finished.wait(0.02):
      version += 1
      params = jax.tree.map(lambda x, f=1 + version / 1e4: x * f, state)
      assert server.engine.update_weights(version, params).result(60) == version
    return version

  before = await settled(server)
  training = asyncio.create_task(asyncio.to_thread(train))
  try:
    await asyncio.gather(*(play(i, s) for i, s in enumerate(sessions)))
  finally:
    finished.set()
  last = await training
  after = await settled(server)
  assert after["completed"] == before["completed"] + 128
  assert after["failed"] == before["failed"]
  assert after["weight_updates"] == before["weight_updates"] + last - first
  all_versions = set()
  mixed = 0
  for session in sessions:
    for *_, versions in session.told.values():
      assert (np.diff(versions) >= 0).all()
      mixed += len(set(versions)) > 1
      all_versions |= set(versions)
  assert len(all_versions) > 5 and mixed > 5
  assert all_versions <= set(range(first, last + 1))
  await asyncio.gather(*(s.check(turns=2) for s in sessions))


async def test_engine_sessions_are_released_with_theirs(server, client):
  """The engine frees the caches of dropped sessions."""
  before = (await settled(server))["sessions"]
  sessions = await open_sessions(server, client, SLOTS)

  async def play(i, session):
    session.say(f"session {i}")
    await session.ask(n=2, temperature=1.0)

  await asyncio.gather(*(play(i, s) for i, s in enumerate(sessions)))
  assert (await settled(server))["sessions"] > before
  await asyncio.gather(*(s.check(turns=2) for s in sessions))
  await until(lambda: server.engine.stats()["sessions"] <= before)


async def test_the_check_sees_what_is_lost_or_doubled(server, client):
  (session,) = await open_sessions(server, client, 1)
  session.say("x")
  await session.ask()
  ((id_, sampled),) = session.told.items()
  session.told = {id_: (sampled[0][:-1], sampled[1], sampled[2])}
  with pytest.raises(AssertionError):
    await session.check(turns=1)
  session.told = {"another": sampled}
  with pytest.raises(AssertionError):
    await session.check(turns=1)
  session.told = {id_: sampled}
  await session.check(turns=1)
  async with httpx.AsyncClient() as plain:
    reply = await plain.post(
      f"{server.url}/export_trajectories", json={"session_id": session.id}
    )
  assert reply.status_code == 404
