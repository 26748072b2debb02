"""The PolicyClient over HTTP against this package's own server."""

import asyncio
import contextlib
import dataclasses

import httpx
import numpy as np
import openai
import pytest
import small_server
from starlette import applications
from starlette import responses
from starlette import routing
from tunix.rl.multi_turn.clients import openai_client
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.trajectory_collector import model_calls

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", name="served")
def _served():
  with small_server.SmallServer() as served:
    yield served
    assert served.engine.stats()["compiles_after_warm_up"] == 0


@contextlib.asynccontextmanager
async def client_of(served, **options):
  client = openai_client.OpenAIClient(
    f"{served.url}/v1", small_server.MODEL, served.images, **options
  )
  try:
    yield client
  finally:
    await client.aclose()


def assert_equal(got, want):
  assert got.tokens.tolist() == want.tokens.tolist()
  np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
  assert got.versions.tolist() == want.versions.tolist()
  assert got.finish_reason is want.finish_reason
  assert not got.fallback


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_it_samples_what_the_engine_in_process_samples(
  served, temperature
):
  async with client_of(served) as client:
    for seeds in ((), (1,), (1, 2), (3, 3)):
      prompt = served.prompt(*seeds)
      sampling = served.sampling(
        temperature=temperature, top_p=0.9, top_k=40, min_p=0.01
      )
      got = await client.generate(prompt, sampling, session="a")
      want = await served.engine.generate(prompt, sampling, session="b")
      assert_equal(got, want)
    await served.engine.release("b")


async def test_an_episode_in_tokens_is_that_of_the_engine(served):
  """Sampled ids stay unchanged where encoding their text would give others."""

  async def episode(client, name):
    model = model_calls.PolicyModel(
      client, served.renderer, served.sampling(), runs_inline=True
    )
    session = model.new_session(name, seed=9)
    messages, call = [], lambda fn, *args, inline: fn(*args)
    for turn in range(3):
      image = served.images.put(small_server.pixels(turn))
      messages.append(
        {"role": "user", "content": [{"type": "image", "image": image}]}
      )
      reply = await session.reply(messages, turn, call)
      messages.append({"role": "assistant", "content": reply.text})
    for session_id in session.sessions():
      await session.release(session_id)
    return session.build()

  async with client_of(served) as client:
    before = served.engine.stats()["prefilled_tokens"]
    (got,) = await episode(client, "wire")
    prefilled = served.engine.stats()["prefilled_tokens"] - before
    (want,) = await episode(served.engine, "inside")
    # Each turn reads what is new, also over the wire.
    assert prefilled <= len(got) + 3
    assert client.counts["requests"] == 3
  assert got.tokens.tolist() == want.tokens.tolist()
  assert got.loss_mask.tolist() == want.loss_mask.tolist()
  assert got.turn_ids.tolist() == want.turn_ids.tolist()
  assert got.images == want.images
  np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
  # What was started is released.
  assert not len(served.app._service.store)


async def test_a_session_is_opened_with_its_sampling(served, caplog):
  """So that no reply is said to be not trained on."""
  async with client_of(served) as client:
    sampling = served.sampling(temperature=0.7, top_k=9)
    await client.generate(served.prompt(), sampling, session="s")
    (session,) = served.app._service.store._sessions.values()
    assert session.sampling.fields["temperature"] == 0.7
    assert session.sampling.fields["top_k"] == 9
    other = dataclasses.replace(sampling, temperature=0.5)
    await client.generate(served.prompt(), other, session="s")
  assert "not trained on" not in caplog.text


async def test_versions_of_new_weights_are_told(served):
  async with client_of(served) as client:
    prompt = served.prompt(1)
    await asyncio.wrap_future(served.engine.update_weights(7, served.model))
    try:
      got = await client.generate(prompt, served.sampling(), session="v")
    finally:
      await asyncio.wrap_future(served.engine.update_weights(0, served.model))
  assert set(got.versions.tolist()) == {7}


async def test_what_cannot_be_is_told_as_the_seam_tells_it(served):
  store = images_lib.ImageStore()
  async with client_of(served, max_images=2) as client:
    long = policy_client.TokenPrompt(np.full(300, 5))
    with pytest.raises(policy_client.ContextLimitError, match="256"):
      await client.generate(long, served.sampling(), session="c")
    with pytest.raises(ValueError, match="max_new_tokens|max_tokens"):
      await client.generate(
        served.prompt(), served.sampling(max_new_tokens=99), session="c"
      )
    with pytest.raises(ValueError, match="3 images.*max_images=2"):
      await client.generate(
        served.prompt(1, 2, 3), served.sampling(), session="c"
      )
    for name in ("top_logprobs", "frequency_penalty", "presence_penalty"):
      with pytest.raises(ValueError, match=f"{name}=2"):
        await client.generate(
          served.prompt(), served.sampling(**{name: 2}), session="c"
        )
    missing_image = trajectory.ImageRef("0" * 64, *small_server.SIZE)
    span = served.prompt(1).images[0]
    lost = policy_client.TokenPrompt(
      served.prompt(1).tokens,
      (trajectory.ImageSpan(missing_image, span.offset, span.num_tokens),),
    )
    with pytest.raises(KeyError, match="not in the store"):
      await client.generate(lost, served.sampling(), session="c")
    with pytest.raises(ValueError, match="placeholders"):
      await client.generate(
        policy_client.TokenPrompt([5, served.renderer.image_token_id, 6]),
        served.sampling(),
        session="c",
      )
  with pytest.raises(ValueError, match="must end with /v1"):
    openai_client.OpenAIClient(served.url, "m", store)
  with pytest.raises(ValueError, match="protocol must be one of"):
    openai_client.OpenAIClient(f"{served.url}/v1", "m", store, protocol="x")


async def test_the_server_is_asked_what_it_serves(served):
  async with client_of(served) as client:
    await client.check()
    assert client.context_length == small_server.CONTEXT
  other = openai_client.OpenAIClient(f"{served.url}/v1", "gpt-5", served.images)
  with pytest.raises(ValueError, match="gpt-5.*it serves 'nano'"):
    await other.check()
  with pytest.raises(ValueError, match="404.*gpt-5"):
    await other.generate(served.prompt(), served.sampling(), session="m")
  await other.aclose()


async def test_a_session_that_was_dropped_is_started_anew(served):
  async with client_of(served) as client:
    prompt = served.prompt(1)
    first = await client.generate(prompt, served.sampling(), session="s")
    (session_id,) = list(served.app._service.store._sessions)
    httpx.post(
      f"{served.url}/export_trajectories",
      json={"session_id": session_id, "drop": True},
    )
    again = await client.generate(prompt, served.sampling(), session="s")
    assert_equal(again, first)


async def test_nobody_listening_is_an_error_within_the_deadline(served):
  async def late(request):
    del request
    await asyncio.sleep(2)

  app = applications.Starlette(
    routes=[routing.Route("/{rest:path}", late, methods=["POST"])]
  )
  loop = asyncio.get_running_loop()
  with http_server.LoopbackServer(app) as slow:
    client = openai_client.OpenAIClient(
      f"{slow.url}/v1", "m", served.images, timeout_s=0.5
    )
    started = loop.time()
    with pytest.raises(TimeoutError, match="timeout_s=0.5"):
      await client.generate(served.prompt(), served.sampling(), session="t")
    assert loop.time() - started < 5
    await client.aclose()
    url = slow.url
  client = openai_client.OpenAIClient(
    f"{url}/v1", "m", served.images, retries=1
  )
  with pytest.raises(openai_client.RemoteError, match="cannot be reached"):
    await client.generate(served.prompt(), served.sampling(), session="t")
  assert client.counts["retries"] == 1
  await client.aclose()


class Breaking:
  """Breaks off, or refuses, the first answers of a server behind it."""

  def __init__(self, asgi, failures):
    self.asgi = asgi
    self.failures = list(failures)
    self.bodies = []

  async def __call__(self, scope, receive, send):
    if scope["type"] == "lifespan":
      return  # The application lives on behind its own server.
    if "completions" not in scope["path"]:
      await self.asgi(scope, receive, send)
      return
    failure = self.failures.pop(0) if self.failures else None
    if isinstance(failure, int):
      answer = responses.JSONResponse(
        {"error": {"message": "busy"}}, failure, {"retry-after": "0.01"}
      )
      await answer(scope, receive, send)
      return

    async def dropping(message):
      if message["type"] == "http.response.start":
        return
      # The answer was made, and is lost on its way.
      raise ConnectionResetError

    async def keeping():
      message = await receive()
      self.bodies.append(message.get("body"))
      return message

    await self.asgi(scope, keeping, dropping if failure else send)


async def test_what_is_repeated_is_no_second_sample(served):
  service = served.app._service
  sampled = served.engine.stats()["requests"]
  breaking = Breaking(served.app.asgi, ["lost", 503, 429, "lost"])
  with http_server.LoopbackServer(breaking) as server:
    client = openai_client.OpenAIClient(
      f"{server.url}/v1", small_server.MODEL, served.images
    )
    # Without a seed: a repeated request has to be the same all the same.
    got = await client.generate(
      served.prompt(1), served.sampling(seed=None), session="r"
    )
    assert client.counts["retries"] == 4
    other = await client.generate(
      served.prompt(1), served.sampling(seed=None), session="r"
    )
    await client.aclose()
  assert len(set(breaking.bodies[:3])) == 1
  assert served.engine.stats()["requests"] - sampled == 2
  assert len(got.tokens) and len(other.tokens)
  assert not len(service.store)


async def test_who_goes_away_ends_the_sampling(served):
  async with client_of(served) as client:
    before = served.engine.stats()["cancelled"]
    served.engine.pause().result(60)  # No request is served in time.
    many = [
      asyncio.ensure_future(
        client.generate(
          served.prompt(i),
          served.sampling(max_new_tokens=32, stop_token_ids=()),
          session=f"g{i}",
        )
      )
      for i in range(12)
    ]

    async def until(condition):
      async with asyncio.timeout(90):
        while not condition(served.engine.stats()):
          await asyncio.sleep(0.005)

    try:
      await until(lambda stats: stats["waiting"] == len(many))
      for task in many:
        task.cancel()
      await asyncio.gather(*many, return_exceptions=True)
      await until(lambda stats: stats["cancelled"] == before + len(many))
      assert not served.engine.stats()["waiting"]
    finally:
      served.engine.resume()


@pytest.mark.parametrize(
    "change, param, words",
    [
        ({"prompt_token_ids": []}, "prompt_token_ids", "not empty"),
        ({"prompt_token_ids": [1, -2]}, "prompt_token_ids", "token ids"),
        ({"prompt_token_ids": [1, True]}, "prompt_token_ids", "token ids"),
        ({"prompt_token_ids": [1, 10**7]}, "prompt_token_ids", "vocabulary"),
        ({"prompt_token_ids": [1], "messages": [
            {"role": "user", "content": "read me"}]}, "messages", "images"),
        ({"prompt_token_ids": [1], "messages": [
            {"role": "system", "content": ""}]}, "messages", "images"),
    ],
)  # fmt: skip
def test_token_prompts_that_cannot_be_are_refused(served, change, param, words):
  client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
  messages = change.get("messages", [{"role": "user", "content": ""}])
  with pytest.raises(openai.BadRequestError) as refused:
    client.chat.completions.create(
      model=small_server.MODEL,
      messages=messages,
      extra_body={"prompt_token_ids": change["prompt_token_ids"]},
    )
  assert refused.value.param == param
  assert words in refused.value.message
