"""vLLM and SGLang: how they are asked, and given new weights.

Against servers that speak their protocols (tests/helpers/fake_engines.py).
"""

import asyncio
import contextlib
import dataclasses
import json
import threading
import time

import fake_engines
from flax import nnx
import httpx
import numpy as np
import pytest
import small_server
from starlette import applications
from starlette import responses
from starlette import routing
from tunix.rl.multi_turn.clients import disk_weights
from tunix.rl.multi_turn.clients import hand_over_probe
from tunix.rl.multi_turn.clients import openai_client
from tunix.rl.multi_turn.clients import remote_engine
from tunix.rl.multi_turn.clients import vllm as vllm_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.learner import reference
from tunix.rl.multi_turn.net import concurrency
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.policy import lora
from tunix.rl.multi_turn.policy.checkpoints import checkpoint

pytestmark = pytest.mark.timeout(300)
Launch = vllm_lib.VllmLaunch


@pytest.fixture(scope="module", name="policy")
def _policy():
  """The policy that the others serve, and the engine that is the reference."""
  policy = small_server.SmallPolicy()
  with policy.engine:
    policy.warm_up()
    yield policy


@pytest.fixture(scope="module", name="saved")
def _saved(policy, tmp_path_factory):
  directory = tmp_path_factory.mktemp("policy")
  return checkpoint.save_policy(directory / "first", policy.model)


def launch_of(saved, **changes):
  options = {
    "served_name": "cua",
    "max_model_len": small_server.CONTEXT,
    "images": 3,
    "dtype": "float32",
  }
  return Launch(str(saved), **(options | changes))


@contextlib.contextmanager
def vllm(launch, **options):
  with fake_engines.FakeVllm(
    launch.argv(), launch.environment(), **options
  ) as fake:
    yield fake


@pytest.fixture(scope="module", name="fake")
def _fake(saved):
  with vllm(launch_of(saved)) as fake:
    yield fake


@pytest.fixture(scope="module", name="sglang")
def _sglang(saved):
  with fake_engines.FakeSglang(saved) as fake:
    yield fake


@contextlib.asynccontextmanager
async def client_of(fake, policy, protocol="vllm", **options):
  client = openai_client.OpenAIClient(
    f"{fake.url}/v1",
    "cua",
    policy.images,
    protocol=protocol,
    banned_token_ids=policy.model.config.banned_token_ids,
    **options,
  )
  try:
    yield client
  finally:
    await client.aclose()


# --- completions --------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_it_is_asked_in_tokens_and_answers_as_ours_would(
  request, policy, protocol, temperature
):
  fake = request.getfixturevalue("fake" if protocol == "vllm" else "sglang")
  async with client_of(fake, policy, protocol, version=5) as client:
    for seeds in ((), (1,), (2, 3)):
      prompt = policy.prompt(*seeds)
      sampling = policy.sampling(
        temperature=temperature, top_p=0.9, top_k=99, min_p=0.02
      )
      got = await client.generate(prompt, sampling, session="s")
      want = await policy.engine.generate(prompt, sampling, session="w")
      assert got.tokens.tolist() == want.tokens.tolist()
      np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
      assert got.finish_reason is want.finish_reason
      # The server does not tell; the client knows what it was given.
      assert set(got.versions.tolist()) == {5}
      assert not got.fallback
    assert not client.counts["prompt_mismatch"]
    await policy.engine.release("w")
  body = fake.bodies[-1]
  ids = body.get("token_ids") or body["input_ids"]
  # It expands placeholders itself: one for each image, not one a token.
  assert ids.count(policy.renderer.image_token_id) == 2
  bias = body["sampling_params"]["logit_bias"]
  assert bias == {str(i): -100 for i in policy.model.config.banned_token_ids}


@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
async def test_a_prompt_that_is_too_long_is_a_context_limit(
  request, policy, protocol
):
  fake = request.getfixturevalue("fake" if protocol == "vllm" else "sglang")
  long = policy_client.TokenPrompt(np.full(300, 5))
  async with client_of(fake, policy, protocol) as client:
    with pytest.raises(policy_client.ContextLimitError, match="256"):
      await client.generate(long, policy.sampling(), session="s")
    if protocol == "vllm":
      await client.check()
      assert client.context_length == 256


@pytest.mark.slow
async def test_the_65th_image_is_refused_and_64_are_not(policy, saved):
  launch = launch_of(saved, images=64, max_model_len=1024)
  with vllm(launch) as fake:
    async with client_of(fake, policy, max_images=99) as client:
      many = policy.prompt(*range(64))
      got = await client.generate(many, policy.sampling(), session="s")
      assert len(got.tokens)
      with pytest.raises(ValueError, match=r"400.*At most 64 image\(s\)"):
        await client.generate(
          policy.prompt(*range(65)), policy.sampling(), session="s"
        )
    async with client_of(fake, policy) as client:  # Nor is it sent.
      requests_before = len(fake.bodies)
      with pytest.raises(ValueError, match="65 images.*max_images=64"):
        await client.generate(
          policy.prompt(*range(65)), policy.sampling(), session="s"
        )
      assert len(fake.bodies) == requests_before


async def test_what_was_cut_off_goes_on(policy, saved):
  """As a server does that aborts requests when it gets new weights."""
  with vllm(launch_of(saved), abort_first=True) as fake:
    async with client_of(fake, policy) as client:
      prompt = policy.prompt(1)
      sampling = policy.sampling(temperature=0.0, stop_token_ids=())
      got = await client.generate(prompt, sampling, session="s")
      assert client.counts["resumed"] == 1
  want = await policy.engine.generate(prompt, sampling, session="w")
  await policy.engine.release("w")
  assert got.tokens.tolist() == want.tokens.tolist()
  np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
  first, second = fake.bodies
  resumed = second["sampling_params"]
  assert resumed["max_tokens"] == 6
  assert second["token_ids"][-2:] == got.tokens[:2].tolist()
  # It would draw the random numbers of the first part again.
  assert resumed["seed"] != first["sampling_params"]["seed"]


async def test_a_server_that_read_another_prompt_is_found_out(
  fake, policy, monkeypatch
):
  real = fake.expanded

  async def twice(ids, urls):
    prompt = await real(ids, urls)
    return policy_client.TokenPrompt(
      np.concatenate([[5], prompt.tokens]),
      [span.shifted(1) for span in prompt.images],
    )

  monkeypatch.setattr(fake, "expanded", twice)
  async with client_of(fake, policy) as client:
    with pytest.raises(
      openai_client.PromptMismatchError, match="image processor or tokenizer"
    ):
      await client.generate(policy.prompt(1), policy.sampling(), session="s")
    assert client.counts["prompt_mismatch"] == 1


# --- servers that tell less ---------------------------------------------------


@contextlib.contextmanager
def telling(**choice):
  """A server whose one choice is this."""

  async def complete(request):
    del request
    return responses.JSONResponse(
      {"choices": [{"index": 0, "finish_reason": "stop", **choice}]}
    )

  app = applications.Starlette(
    routes=[routing.Route("/v1/completions", complete, methods=["POST"])]
  )
  with http_server.LoopbackServer(app) as server:
    yield server


TEXT = "hello there"


@pytest.mark.parametrize(
    "cause, choice, exact",
    [
        ("", {"token_ids": [7, 8], "logprobs": {
            "token_logprobs": [-0.5, -1.5]}}, True),
        ("no_token_ids", {}, False),
        ("no_logprobs", {"token_ids": [7, 8]}, True),
        ("unequal_lengths", {"token_ids": [7, 8], "logprobs": {
            "token_logprobs": [-0.5]}}, False),
    ],
)  # fmt: skip
async def test_what_is_not_told_is_made_up_flagged_and_counted(
  policy, cause, choice, exact
):
  eot = policy.renderer.end_of_turn_id
  with telling(text=TEXT, **choice) as server:
    async with client_of(
      server,
      policy,
      tokenize=policy.renderer.encode,
      end_of_turn_id=eot,
      recompute=lambda prompt, tokens: np.full(len(tokens), -0.25),
    ) as client:
      got = await client.generate(
        policy.prompt(), policy.sampling(), session="s"
      )
    assert got.fallback == cause
    assert {k: v for k, v in client.counts.items() if k != "requests"} == (
      {cause: 1} if cause else {}
    )
    encoded = [*policy.renderer.encode(TEXT).tolist(), eot]
    assert got.tokens.tolist() == ([7, 8] if exact else encoded)
    if cause:
      assert set(got.logprobs.tolist()) == {-0.25}
    else:
      assert got.logprobs.tolist() == [-0.5, -1.5]
    async with client_of(server, policy) as client:
      if exact:
        got = await client.generate(
          policy.prompt(), policy.sampling(), session="s"
        )
        if cause:
          assert got.logprobs.tolist() == [0.0, 0.0]
      else:
        with pytest.raises(
          openai_client.RemoteError, match="return_token_ids.*tokenize="
        ):
          await client.generate(policy.prompt(), policy.sampling(), session="s")


def answer_of(tokens, logprobs):
  return {"token_ids": tokens, "logprobs": {"token_logprobs": logprobs}}


@pytest.mark.parametrize(
  "tokens, logprobs, reason",
  [
    ([7, 1 << 40], [-0.5, -0.5], "outside of the vocabulary"),
    ([7, -1], [-0.5, -0.5], "outside of the vocabulary"),
    ([7, "BANNED"], [-0.5, -0.5], "is banned"),
    ([7, 8], [-0.5, -1e30], "log-prob is -1e.30, below -50"),
    ([7, 8], [-0.5, 0.01], "must be <= 0"),
    ([7, 8], [-0.5, None], "must be finite"),
    ([7, 8], [-0.5, "low"], "no list of numbers"),
    ([7, [8]], [-0.5, -0.5], "no list of numbers"),
  ],
)
async def test_what_the_policy_cannot_have_sampled_is_not_believed(
  policy, tokens, logprobs, reason
):
  about = policy.model.config
  tokens = [about.banned_token_ids[0] if t == "BANNED" else t for t in tokens]
  with telling(text=TEXT, **answer_of(tokens, logprobs)) as server:
    async with client_of(server, policy, vocab_size=about.vocab_size) as client:
      with pytest.raises(openai_client.RemoteError, match=reason):
        await client.generate(policy.prompt(), policy.sampling(), session="s")
  # A certain token may round to more than 1.
  with telling(text=TEXT, **answer_of([7, 8], [1e-6, -49.0])) as server:
    async with client_of(server, policy, vocab_size=about.vocab_size) as client:
      got = await client.generate(
        policy.prompt(), policy.sampling(), session="s"
      )
      assert got.tokens.tolist() == [7, 8]


# --- weights ------------------------------------------------------------------


def calls_of(load):
  """Calls of a hand-over, in order."""
  return [
    "pause abort",
    load,
    "update_weight_version",
    "reset_prefix_cache",
    "resume",
  ]


def other_weights(seed):
  model, _, _ = checkpoint.create_policy(
    "nano", seed=seed, screen=small_server.SIZE
  )
  return model


@contextlib.contextmanager
def weights_for(directory, policy, engines, clients, **options):
  weights = disk_weights.DiskWeights(
    directory,
    disk_weights.policy_saver(policy.model),
    engines,
    clients,
    **options,
  )
  try:
    yield weights
  finally:
    weights.close()


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
async def test_after_an_update_it_answers_with_the_new_weights(
  policy, saved, tmp_path, protocol
):
  if protocol == "vllm":
    server = vllm(launch_of(saved))
    engine_of = disk_weights.VllmEngine
  else:
    server = fake_engines.FakeSglang(saved)
    engine_of = disk_weights.SglangEngine
  prompt = policy.prompt(1)
  sampling = policy.sampling(stop_token_ids=())
  answers = []
  with server as fake:
    async with client_of(fake, policy, protocol) as client:
      with weights_for(
        tmp_path, policy, [engine_of(fake.url)], [client]
      ) as weights:
        for version in (1, 2, 3):
          model = other_weights(version)
          publication = weights.publish(version, model)
          assert await asyncio.wrap_future(publication) == version
          assert client.version == weights.version == version
          got = await client.generate(prompt, sampling, session="s")
          assert set(got.versions.tolist()) == {version}
          await asyncio.wrap_future(
            policy.engine.update_weights(version, model)
          )
          want = await policy.engine.generate(prompt, sampling, session="w")
          await policy.engine.release("w")
          assert got.tokens.tolist() == want.tokens.tolist()
          np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
          answers.append(got.tokens.tolist())
    # A path of its own each time, and the old ones go.
    assert len(set(fake.loaded)) == 3
    paths = sorted(str(p) for p in tmp_path.glob("*/*"))
    assert paths == fake.loaded[1:]
    if protocol == "vllm":
      assert fake.calls == 3 * calls_of("reload_weights")
    else:
      assert fake.calls == 3 * [
        "pause_generation",
        "update_weights_from_disk",
        "flush_cache",
        "continue_generation",
      ]
    assert fake.weight_version == "3"
  assert len(set(map(tuple, answers))) > 1
  await asyncio.wrap_future(policy.engine.update_weights(0, policy.model))


def remote_of(client, weights):
  return remote_engine.RemoteEngine(
    lambda: client,
    weights,
    context_length=small_server.CONTEXT,
    prompts=lambda: (),
    sampling=policy_client.SamplingParams(),
  )


@pytest.mark.parametrize("images", [(), (1,)], ids=["text", "image"])
async def test_a_request_in_flight_is_continued_with_the_new_weights(
  policy, saved, tmp_path, images
):
  """And every token has the version of its weights, right across the cut."""
  model = other_weights(1)
  sampling = policy.sampling(temperature=0.0, stop_token_ids=())
  prompt = policy.prompt(*images)
  with vllm(launch_of(saved)) as fake:
    entered = threading.Event()
    real = fake.engine.generate

    async def late(*args, **kwargs):
      entered.set()  # It runs while the server is paused.
      while fake.gate.is_set():
        await asyncio.sleep(0.01)
      return await real(*args, **kwargs)

    fake.engine.generate = late
    async with client_of(fake, policy) as client:
      with weights_for(
        tmp_path, policy, [disk_weights.VllmEngine(fake.url)], []
      ) as weights:
        weights.version = 0
        engine = remote_of(client, weights)
        request = asyncio.ensure_future(
          engine.generate(prompt, sampling, session="s")
        )
        await asyncio.to_thread(entered.wait, 30)
        publication = weights.publish(1, model)
        while fake.gate.is_set():
          await asyncio.sleep(0.01)
        fake.engine.generate = real
        got = await request
        await asyncio.wrap_future(publication)
  assert got.versions.tolist() == [0] * 2 + [1] * (len(got.tokens) - 2)
  await asyncio.wrap_future(policy.engine.update_weights(1, model))
  continuation = policy_client.TokenPrompt(
    np.concatenate([prompt.tokens, got.tokens[:2]]), prompt.images
  )
  sampling = dataclasses.replace(
    sampling, max_new_tokens=sampling.max_new_tokens - 2
  )
  want = await policy.engine.generate(continuation, sampling, session="w")
  await policy.engine.release("w")
  await asyncio.wrap_future(policy.engine.update_weights(0, policy.model))
  assert got.tokens[2:].tolist() == want.tokens.tolist()
  np.testing.assert_allclose(got.logprobs[2:], want.logprobs, atol=1e-5)


# --- the proof of a hand-over -------------------------------------------------


def probe_of(fake, policy, protocol, tolerance=1e-3):
  prompts = [policy.prompt(), policy.prompt(1)]

  def make_client():
    return openai_client.OpenAIClient(
      f"{fake.url}/v1",
      "cua",
      policy.images,
      protocol=protocol,
      banned_token_ids=policy.model.config.banned_token_ids,
    )

  score = reference.Scorer(
    policy.model,
    policy.processor,
    policy.images,
    row_length=128,
    temperature=hand_over_probe.SAMPLING.temperature,
  )
  return hand_over_probe.Probe(make_client, prompts, score, tolerance)


def moved(model, by, only=""):
  """A copy of a policy whose parameters of a name are larger by a factor."""
  copy = nnx.clone(model)
  for path, part in nnx.to_flat_state(nnx.state(copy, nnx.Param)):
    if only in ".".join(map(str, path)):
      part.set_value(part.get_value() * (1 + by))
  return copy


def server_of(saved, protocol):
  """A server, and its class here."""
  if protocol == "vllm":
    return vllm(launch_of(saved)), disk_weights.VllmEngine
  return fake_engines.FakeSglang(saved), disk_weights.SglangEngine


@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
async def test_a_server_that_loads_nothing_is_found_out_at_once(
  policy, saved, tmp_path, protocol
):
  """Also where the step is smaller than the tolerance."""
  server, engine_of = server_of(saved, protocol)
  with server as fake:
    probe = probe_of(fake, policy, protocol)
    with weights_for(
      tmp_path, policy, [engine_of(fake.url)], (), probes=[probe]
    ) as weights:
      await asyncio.wrap_future(weights.publish(0, policy.model))
      small = moved(policy.model, 1e-4)
      await asyncio.wrap_future(weights.publish(1, small))
      fake.loads_nothing = True
      for version, by, words in (
        (2, 2e-4, "the new weights move the latter by"),
        (3, 0.05, "they differ by"),
      ):
        loads = len(fake.loaded)
        with pytest.raises(disk_weights.HandOverError) as error:
          await asyncio.wrap_future(weights.publish(version, moved(small, by)))
        text = str(error.value)
        assert words in text and fake.url in text
        assert f"version {version}" in text and "transfer=" in text
        assert text.count("has log-prob") == 1
        assert len(fake.loaded) == loads + 2  # Once more, then no more.
        assert weights.version == 1 and weights.failure is error.value
      fake.loads_nothing = False
      # The same weights again are no movement, and no mismatch.
      for version in (4, 5):
        await asyncio.wrap_future(weights.publish(version, small))
      assert weights.failure is None and weights.version == 5


@pytest.mark.slow
async def test_the_probe_sees_an_old_vision_tower(policy, saved, tmp_path):
  """By the prompt with an image."""
  with vllm(launch_of(saved)) as fake:
    probe = probe_of(fake, policy, "vllm")
    assert await asyncio.to_thread(probe.check, policy.model) < 1e-4
    other = moved(policy.model, 0.3, only="stem.")
    with pytest.raises(hand_over_probe.ProbeMismatch, match="with 1 images"):
      await asyncio.to_thread(probe.check, other)


async def test_a_hand_over_that_is_lost_once_is_repeated(
  policy, saved, tmp_path
):
  with vllm(launch_of(saved)) as fake:
    probe = probe_of(fake, policy, "vllm")
    with weights_for(
      tmp_path, policy, [disk_weights.VllmEngine(fake.url)], (), probes=[probe]
    ) as weights:
      await asyncio.wrap_future(weights.publish(0, policy.model))
      real = fake.load

      async def lost(path):
        fake.load = real

      fake.load = lost
      publication = weights.publish(1, other_weights(1))
      assert await asyncio.wrap_future(publication) == 1
  assert fake.calls.count("reload_weights") == 3


async def test_a_request_during_an_update_waits_and_is_not_lost(
  policy, saved, tmp_path
):
  entered, go_on = threading.Event(), threading.Event()
  with vllm(launch_of(saved)) as fake:
    real = fake.load

    async def slowly(path):
      entered.set()
      await asyncio.to_thread(go_on.wait, 30)
      await real(path)

    fake.load = slowly
    async with client_of(fake, policy) as client:
      with weights_for(
        tmp_path, policy, [disk_weights.VllmEngine(fake.url)], [client]
      ) as weights:
        publication = weights.publish(1, other_weights(1))
        await asyncio.to_thread(entered.wait, 30)
        request = asyncio.ensure_future(
          client.generate(policy.prompt(1), policy.sampling(), session="s")
        )
        await asyncio.sleep(0.2)
        assert not request.done() and client.version == 0
        go_on.set()
        got = await request
        await asyncio.wrap_future(publication)
    # The server names the weights that it answered with.
    assert set(got.versions.tolist()) == {1} and client.version == 1


@pytest.mark.parametrize("failure", ["out of memory", "older weights"])
async def test_an_engine_that_cannot_load_is_resumed_and_not_sampled_from(
  policy, saved, tmp_path, failure
):
  with vllm(launch_of(saved)) as fake:
    if failure == "older weights":
      fake.resets = False
    else:
      fake.load_failure = "CUDA out of memory"
    async with client_of(fake, policy) as client:
      with weights_for(
        tmp_path, policy, [disk_weights.VllmEngine(fake.url)], [client]
      ) as weights:
        with pytest.raises(
          disk_weights.HandOverError,
          match=f"{failure}.*half of these weights and was resumed.*restart",
        ):
          await asyncio.wrap_future(weights.publish(1, other_weights(1)))
        assert client.version == 0 and weights.version == -1
        engine = remote_of(client, weights)
        count = len(fake.bodies)
        with pytest.raises(openai_client.RemoteError, match="not sampled from"):
          await engine.generate(
            policy.prompt(1), policy.sampling(), session="s"
          )
        assert len(fake.bodies) == count
    assert fake.calls[-1] == "resume"


@pytest.mark.parametrize("refusals", [1, 9])
def test_a_refused_resume_is_repeated(
  policy, saved, tmp_path, refusals, monkeypatch
):
  monkeypatch.setattr(disk_weights, "_RESUME_AFTER_S", (0.0, 0.01, 0.01))
  with vllm(launch_of(saved)) as fake:
    fake.resume_failures = refusals
    engine = disk_weights.VllmEngine(fake.url)
    with weights_for(tmp_path, policy, [engine], []) as weights:
      publication = weights.publish(0, policy.model)
      if refusals == 1:
        assert publication.result(60) == 0
      else:
        with pytest.raises(
          disk_weights.HandOverError, match="new weights and could not be"
        ):
          publication.result(60)
      assert fake.gate.is_set() == (refusals == 1)


def test_any_failure_resumes_the_engine(policy, saved, tmp_path, monkeypatch):
  with vllm(launch_of(saved)) as fake:
    engine = disk_weights.VllmEngine(fake.url)

    def broken(path):
      raise KeyError(path)

    monkeypatch.setattr(engine, "_transfer_weights", broken)
    with pytest.raises(disk_weights.HandOverError, match="was resumed"):
      engine.load("/somewhere", 1)
    assert fake.gate.is_set()


def test_a_server_that_was_left_paused_is_resumed_before_the_first_request(
  policy, saved, tmp_path, caplog
):
  with vllm(launch_of(saved)) as fake:
    engine = disk_weights.VllmEngine(fake.url)
    engine.wake()
    assert not fake.calls
    with weights_for(tmp_path, policy, [engine], []) as weights:
      httpx.post(f"{fake.url}/pause?mode=abort").raise_for_status()
      remote = remote_engine.RemoteEngine(
        lambda: openai_client.OpenAIClient(
          f"{fake.url}/v1",
          "cua",
          policy.images,
          protocol="vllm",
          timeout_s=20.0,
        ),
        weights,
        context_length=small_server.CONTEXT,
        prompts=lambda: [policy.prompt()],
        sampling=policy_client.SamplingParams(),
      )
      remote.warm_up()
      assert fake.calls == ["pause abort", "resume"]
      assert "left paused" in caplog.text
  with vllm(launch_of(saved, reload_weights=False)) as closed:
    disk_weights.VllmEngine(closed.url).wake()  # It cannot say, nor be paused.


class Unanswering:
  """A probe that fails otherwise than by a mismatch."""

  def check(self, params):
    raise RuntimeError("out of memory")


def test_a_failed_comparison_names_the_engine_and_the_fix(policy, tmp_path):
  engine = NotingEngine()
  engine.transfer = "reload"
  with weights_for(
    tmp_path, policy, [engine], probes=[Unanswering()], clients=()
  ) as weights:
    with pytest.raises(
      disk_weights.HandOverError,
      match="http://told .transfer=reload, version 3.*RuntimeError: out of"
      " memory.*clients.vllm",
    ):
      weights.publish(3, policy.model).result(60)


def test_closing_begins_no_further_step_and_waits_no_longer(policy, tmp_path):
  entered, go_on, probed = threading.Event(), threading.Event(), []
  engine = NotingEngine()
  engine.transfer = "reload"

  def load(path, version):
    del path, version
    entered.set()
    go_on.wait(60)

  engine.load = load

  class Probed:
    def check(self, params):
      probed.append(params)
      return 0.0

  weights = disk_weights.DiskWeights(
    tmp_path, lambda *_: None, [engine], probes=[Probed()]
  )
  running, queued = weights.publish(1, None), weights.publish(2, None)
  assert entered.wait(30)
  started = time.monotonic()
  weights.close(0.2)
  assert time.monotonic() - started < 10
  assert queued.cancelled() and not running.done()
  go_on.set()
  with pytest.raises(disk_weights.HandOverError, match="ended by close"):
    running.result(60)
  assert not probed
  weights.close()


async def test_closing_ends_a_load_in_progress_and_resumes_the_engine(
  policy, saved, tmp_path
):
  """And no thread of it is left that the process would wait for."""
  entered = threading.Event()
  with vllm(launch_of(saved)) as fake:

    async def stuck(path):
      del path
      entered.set()
      await asyncio.sleep(60)

    fake.load = stuck
    engine = disk_weights.VllmEngine(fake.url)
    weights = disk_weights.DiskWeights(
      tmp_path, disk_weights.policy_saver(policy.model), [engine]
    )
    published = weights.publish(1, other_weights(1))
    assert await asyncio.to_thread(entered.wait, 30)
    names = {t.name for t in threading.enumerate() if not t.daemon}
    assert not any(name.startswith(("tunix-w", "tunix-l")) for name in names)
    started = time.monotonic()
    await asyncio.to_thread(weights.close, 0.2)
    assert time.monotonic() - started < 5
    with pytest.raises(disk_weights.HandOverError, match="run ended before"):
      await asyncio.wrap_future(published)
    assert fake.gate.is_set() and fake.calls[-1] == "resume"
    # Its files are no longer read, and the folder is free.
    disk_weights.DiskWeights(
      tmp_path, disk_weights.policy_saver(policy.model), [engine]
    ).close()


async def test_closing_lets_a_resume_in_progress_end(policy, saved, tmp_path):
  with vllm(launch_of(saved)) as fake:
    fake.resume_s = 1.0
    weights = disk_weights.DiskWeights(
      tmp_path,
      disk_weights.policy_saver(policy.model),
      [disk_weights.VllmEngine(fake.url)],
    )
    published = weights.publish(1, other_weights(1))
    while "resume" not in fake.calls:
      await asyncio.sleep(0.01)
    await asyncio.to_thread(weights.close, 0.1)
    await asyncio.wrap_future(published)
    assert fake.gate.is_set() and fake.calls.count("resume") == 1


async def test_waiting_for_weights_takes_no_time_of_a_request(policy, saved):
  with vllm(launch_of(saved)) as fake:
    async with client_of(fake, policy, timeout_s=2.0) as client:
      await client.generate(policy.prompt(), policy.sampling(), session="s")

      async def wait():
        await asyncio.sleep(2.5)

      client.before_request = wait
      got = await client.generate(
        policy.prompt(), policy.sampling(), session="s"
      )
      assert len(got.tokens)

      async def stuck(*_):
        await asyncio.sleep(60)

      client.before_request, fake.sample = None, stuck
      with pytest.raises(TimeoutError, match="timeout_s=2 s"):
        await client.generate(policy.prompt(), policy.sampling(), session="s")


async def test_a_load_takes_no_time_of_the_requests_that_wait_for_it(
  policy, saved, tmp_path
):
  """Of one that comes meanwhile, and of one that the paused server holds."""
  entered, go_on = threading.Event(), threading.Event()
  runner = concurrency.CallRunner(grace=0.05)
  with vllm(launch_of(saved)) as fake:
    real = fake.load

    async def slowly(path):
      entered.set()
      await asyncio.to_thread(go_on.wait, 30)
      await real(path)

    fake.load = slowly
    async with client_of(fake, policy, timeout_s=2.0) as client:
      with weights_for(
        tmp_path, policy, [disk_weights.VllmEngine(fake.url)], [client]
      ) as weights:
        engine = remote_of(client, weights)

        async def generate(session):
          with concurrency.clocked() as clock:
            completion_of = engine.generate(
              policy.prompt(1), policy.sampling(), session=session
            )
            completion = await runner.run(completion_of, seconds=2.0)
          return completion, clock.stopped_s

        await generate("warm")
        fake.gate.clear()  # It is paused when the request arrives.
        early = asyncio.ensure_future(generate("early"))
        while not engine._clocks:
          await asyncio.sleep(0.01)
        published = weights.publish(1, other_weights(1))
        assert await asyncio.to_thread(entered.wait, 30)
        late = asyncio.ensure_future(generate("late"))
        await asyncio.sleep(4)
        assert not early.done() and not late.done()
        go_on.set()
        for one in (early, late):
          completion, stopped_s = await one
          assert len(completion.tokens) and stopped_s >= 3.9
        await asyncio.wrap_future(published)
        _, stopped_s = await generate("after")
        assert stopped_s < 0.1 and not engine._clocks


async def test_weights_of_another_run_are_found_out(policy, saved, tmp_path):
  with vllm(launch_of(saved)) as fake:
    async with client_of(fake, policy) as client:
      vllm_engine = disk_weights.VllmEngine(fake.url)
      with weights_for(tmp_path, policy, [vllm_engine], []) as weights:
        engine = remote_of(client, weights)

        async def ask():
          return await engine.generate(
            policy.prompt(1), policy.sampling(), session="s"
          )

        await asyncio.wrap_future(weights.publish(1, policy.model))
        assert set((await ask()).versions.tolist()) == {1}
        fake.weight_version = "8"
        with pytest.raises(
          openai_client.RemoteError, match="version 8.*version 1.*another run"
        ):
          await ask()


def test_hand_overs_that_cannot_be_say_what_to_do(policy, saved, tmp_path):
  closed = launch_of(saved, reload_weights=False)
  with (
    vllm(closed) as fake,
    weights_for(
      tmp_path, policy, [disk_weights.VllmEngine(fake.url)], []
    ) as weights,
  ):
    publication = weights.publish(0, policy.model)
    with pytest.raises(disk_weights.HandOverError, match="SERVER_DEV_MODE"):
      publication.result(60)
  stopped = disk_weights.SglangEngine(fake.url, timeout_s=2)
  with weights_for(tmp_path / "b", policy, [stopped], []) as weights:
    with pytest.raises(disk_weights.HandOverError, match="cannot be reached"):
      weights.publish(0, policy.model).result(60)
    with pytest.raises(ValueError, match="version must be"):
      weights.publish(-1, policy.model)
  with pytest.raises(ValueError, match="engines is empty"):
    disk_weights.DiskWeights(tmp_path, lambda *_: None, [])
  with pytest.raises(ValueError, match="not a URL"):
    disk_weights.VllmEngine("localhost:8000")


class NotingEngine:
  """An engine that notes its loads and the files of each."""

  url = "http://told"

  def __init__(self):
    self.found = []
    self.interrupts = 0

  def interrupt(self):
    self.interrupts += 1

  def load(self, path, version):
    import os  # pylint: disable=g-import-not-at-top

    self.found.append((version, path, sorted(os.listdir(path))))


def test_half_a_checkpoint_is_never_seen(policy, tmp_path):
  engine = NotingEngine()
  real = disk_weights.policy_saver(policy.model)

  def breaking(directory, params):
    real(directory, params)
    if params is broken:
      raise OSError("No space left on device")

  broken = other_weights(1)
  weights = disk_weights.DiskWeights(tmp_path, breaking, [engine], keep=1)
  with pytest.raises(OSError, match="No space left"):
    weights.publish(1, broken).result(60)
  assert not engine.found and not list(tmp_path.glob("[!.]*"))
  assert weights.publish(2, policy.model).result(60) == 2
  weights.close()
  ((version, path, files),) = engine.found
  assert version == 2 and path.startswith(f"{tmp_path}/")
  assert "model.safetensors" in files and "config.json" in files
  loaded, _, _ = checkpoint.load_policy(path)
  want = checkpoint.named_parameters(policy.model)
  for name, value in checkpoint.named_parameters(loaded).items():
    np.testing.assert_array_equal(value, want[name], err_msg=name)
  assert [str(p) for p in tmp_path.glob("*/*")] == [path]


def test_a_path_is_told_with_one_content_only(tmp_path):
  """Also by the next run in the same directory, or the same version again."""

  def save(directory, params):
    (directory / "w").write_text(params)

  engine = NotingEngine()
  engine.load = lambda path, version: engine.found.append(path)
  first = disk_weights.DiskWeights(tmp_path, save, [engine])
  for version in (98, 99, 100):
    first.publish(version, f"first {version}").result(60)
  first.close()
  second = disk_weights.DiskWeights(tmp_path, save, [engine])
  texts = ["a", "b", "c", "d"]
  for version, text in zip((0, 98, 99, 99), texts):
    second.publish(version, text).result(60)
    assert (tmp_path / engine.found[-1] / "w").read_text() == text
  with pytest.raises(ValueError, match="98 is older than 99"):
    second.publish(98, "old")
  assert second.version == 99
  second.close()
  assert len(set(engine.found)) == len(engine.found) == 7
  contents = sorted(p.read_text() for p in tmp_path.glob("*/*/w"))
  assert contents == ["c", "d"]  # Those of the ended run went.


def test_engines_elsewhere_are_told_their_own_path(policy, tmp_path):
  engine = NotingEngine()
  engine.load = lambda path, version: engine.found.append(path)
  weights = disk_weights.DiskWeights(
    tmp_path, lambda d, p: None, [engine], seen_at="/mnt/weights"
  )
  weights.publish(7, None).result(60)
  weights.close()
  (path,) = tmp_path.glob("*/*")
  assert engine.found == [f"/mnt/weights/{path.relative_to(tmp_path)}"]


@pytest.mark.slow
def test_an_adapter_is_written_into_the_weights(tmp_path):
  """And the files are those that `transformers` reads."""
  import safetensors  # pylint: disable=g-import-not-at-top
  from tunix.rl.multi_turn.policy import lora  # pylint: disable=g-import-not-at-top

  model, _, _ = checkpoint.create_policy("qwen3_vl_tiny", seed=3)
  lora.add(model, rank=2, alpha=4.0, seed=0)
  engine = NotingEngine()
  weights = disk_weights.DiskWeights(
    tmp_path, disk_weights.policy_saver(model, dtype="bfloat16"), [engine]
  )
  weights.publish(1, model).result(60)
  weights.close()
  (path,) = tmp_path.glob("*/*-v00000001")
  with safetensors.safe_open(path / "model.safetensors", "numpy") as file:
    names = list(file.keys())
  assert names and not any("lora" in name for name in names)
  assert all(name.startswith(("model.", "lm_head")) for name in names)
  config = json.loads((path / "config.json").read_text())
  assert config["model_type"] == "qwen3_vl"


async def test_an_adapter_alone_is_handed_over(policy, saved, tmp_path):
  """Its files are what the policy trains, each version under one name."""
  model, _, _ = checkpoint.create_policy("qwen3_vl_tiny", seed=3)
  lora.add(model, rank=2, alpha=4.0, seed=0)
  with vllm(launch_of(saved, lora_rank=2)) as fake:
    weights = disk_weights.DiskWeights(
      tmp_path,
      disk_weights.adapter_saver(model, "cua"),
      [
        disk_weights.VllmEngine(
          fake.url, transfer="adapter", adapter="cua-adapter"
        )
      ],
    )
    for version in (1, 2):
      for layer in lora.need_adapter(model):
        part = layer.linear.lora_b
        part.set_value(part.get_value() + version)
      await asyncio.wrap_future(weights.publish(version, model))
      config, tensors = fake.adapters["cua-adapter"]
      assert config["r"] == 2 and config["base_model_name_or_path"] == "cua"
      assert len(tensors) > 4
      assert all(
        (value == (1, 3)[version - 1]).all()
        for name, value in tensors.items()
        if "lora_B" in name
      )
    size = sum(f.stat().st_size for f in fake_files(tmp_path, "v00000002"))
    weights.close()
  assert fake.calls == 2 * calls_of("load_lora_adapter")
  directory = checkpoint.save_policy(
    tmp_path / "whole", model_without_adapter()
  )
  assert size < 0.2 * sum(f.stat().st_size for f in directory.rglob("*"))


def fake_files(directory, version):
  return [f for f in directory.glob(f"*/*{version}/*") if f.is_file()]


def model_without_adapter():
  return checkpoint.create_policy("qwen3_vl_tiny", seed=3)[0]


async def test_a_server_not_started_for_a_transfer_names_the_fix(
  policy, saved, tmp_path
):
  with vllm(launch_of(saved)) as fake:
    engine = disk_weights.VllmEngine(fake.url, transfer="adapter", adapter="a")
    with pytest.raises(disk_weights.HandOverError, match="--lora-rank"):
      await asyncio.to_thread(engine.load, str(tmp_path), 1)
  with pytest.raises(ValueError, match="transfer='nccl' must be one of"):
    disk_weights.VllmEngine("http://a", transfer="nccl")
  with pytest.raises(ValueError, match="is given a name"):
    disk_weights.VllmEngine("http://a", adapter="a")
