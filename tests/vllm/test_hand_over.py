"""The real vLLM samples with the weights that it was handed over last."""

import asyncio
import contextlib
import threading
import time

from flax import nnx
import httpx
import numpy as np
import pytest
from tunix.rl.multi_turn.clients import disk_weights
from tunix.rl.multi_turn.clients import hand_over_probe
from tunix.rl.multi_turn.clients import openai_client
from tunix.rl.multi_turn.clients import remote_engine
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.policy import lora
import vllm_server

GAP = vllm_server.GAP
ADAPTER = f"{vllm_server.NAME}-adapter"
RANK = 4


@pytest.fixture(scope="module", name="score")
def _score(policy):
  return vllm_server.scorer_of(policy, policy.model, 1.0)


@pytest.fixture(scope="module", name="probe_score")
def _probe_score(policy):
  return vllm_server.scorer_of(
    policy, policy.model, hand_over_probe.SAMPLING.temperature
  )


def probe_of(policy, server, score, model_name=vllm_server.NAME):
  def make_client():
    client = policy.client(server)
    client.model = model_name
    return client

  prompts = [policy.prompt(), policy.prompt(1)]
  return hand_over_probe.Probe(make_client, prompts, score, 1e-3)


@contextlib.contextmanager
def weights_for(directory, save, engine, *probes):
  weights = disk_weights.DiskWeights(directory, save, [engine], probes=probes)
  try:
    yield weights
  finally:
    weights.close()


def whole(policy, untied=True):
  return disk_weights.policy_saver(
    policy.model, policy.directory, untied=untied
  )


@pytest.fixture(autouse=True)
def _first_weights_again(policy, server, tmp_path):
  """The next test finds the server as it began."""
  yield
  engine = disk_weights.VllmEngine(server.url)
  with weights_for(tmp_path / "last", whole(policy), engine) as weights:
    weights.publish(0, policy.model).result(300)


def engine_of(policy, server, weights, adapter=""):
  return remote_engine.RemoteEngine(
    lambda: policy.client(server, timeout_s=400.0),
    weights,
    context_length=vllm_server.CONTEXT,
    prompts=lambda: (),
    sampling=policy_client.SamplingParams(),
    adapter=adapter,
  )


async def asked(engine, prompts, sampling):
  try:
    return await asyncio.gather(
      *(
        engine.generate(prompt, sampling, session=str(i))
        for i, prompt in enumerate(prompts)
      )
    )
  finally:
    await engine.aclose()


def test_a_tied_policy_is_followed_over_three_versions(
  policy, server, score, probe_score, tmp_path
):
  """Layers, vision tower, and both uses of the one table."""
  assert policy.model.config.tie_word_embeddings
  probe = probe_of(policy, server, probe_score)
  prompts = [policy.prompt(), policy.prompt(1), policy.prompt(2, 3)]
  gaps = []
  with weights_for(
    tmp_path, whole(policy), disk_weights.VllmEngine(server.url), probe
  ) as weights:
    for version in (1, 2, 3):
      model = vllm_server.other(policy, version)
      weights.publish(version, model).result(300)
      assert probe.check(model) < GAP
      engine = engine_of(policy, server, weights)
      answers = asyncio.run(asked(engine, prompts, policy.sampling()))
      for prompt, completion in zip(prompts, answers):
        assert set(completion.versions.tolist()) == {version}
        gaps.append(vllm_server.gap(score, model, prompt, completion))
  print(f"largest gap over three versions: {max(gaps):.2e}")
  assert max(gaps) < GAP


def test_an_output_head_that_is_left_behind_is_found_out(
  policy, server, probe_score, tmp_path
):
  """This vLLM keeps it on reloading a checkpoint without one."""
  probe = probe_of(policy, server, probe_score)
  engine = disk_weights.VllmEngine(server.url)
  with weights_for(tmp_path, whole(policy, False), engine, probe) as weights:
    with pytest.raises(disk_weights.HandOverError) as error:
      weights.publish(1, vllm_server.other(policy, 1)).result(300)
  for words in (
    f"{server.url} (transfer=reload, version 1)",
    "second hand-over",
    "in the engine and",
    "with the learner's weights",
  ):
    assert words in str(error.value)


def test_an_adapter_is_followed_over_three_versions(
  policy, server, score, tmp_path
):
  model = nnx.clone(policy.model)
  lora.add(model, rank=RANK, alpha=8.0, seed=0)
  score_adapted = vllm_server.scorer_of(policy, model, 1.0)
  probe = probe_of(
    policy,
    server,
    vllm_server.scorer_of(policy, model, hand_over_probe.SAMPLING.temperature),
    ADAPTER,
  )
  engine = disk_weights.VllmEngine(
    server.url, transfer="adapter", adapter=ADAPTER
  )
  prompts = [policy.prompt(), policy.prompt(1)]
  rng = np.random.default_rng(0)
  gaps = []
  with weights_for(
    tmp_path, disk_weights.adapter_saver(model, vllm_server.NAME), engine, probe
  ) as weights:
    for version in (1, 2, 3):
      for layer in lora.need_adapter(model):
        part = layer.linear.lora_b
        noise = rng.normal(size=part.get_value().shape) * 0.1
        part.set_value(noise.astype(np.float32))
      weights.publish(version, model).result(300)
      answers = asyncio.run(
        asked(
          engine_of(policy, server, weights, ADAPTER),
          prompts,
          policy.sampling(),
        )
      )
      for prompt, completion in zip(prompts, answers):
        assert set(completion.versions.tolist()) == {version}
        gaps.append(vllm_server.gap(score_adapted, model, prompt, completion))
      base = vllm_server.gap(score, policy.model, prompts[0], answers[0])
      assert base > 10 * GAP
  print(f"largest gap over three adapters: {max(gaps):.2e}")
  assert max(gaps) < GAP


class Holding(disk_weights.DiskWeights):
  """Lets requests begin once weights are saved, and loads in their midst."""

  def __init__(self, server, *args):
    super().__init__(*args)
    self._sampled = lambda: vllm_server.metric(
      server, "vllm:generation_tokens_total"
    )
    self.saved = threading.Event()

  def _write(self, version, params):
    path = super()._write(version, params)
    first, end = self._sampled(), time.monotonic() + 300
    self.saved.set()
    while self._sampled() < first + 40:
      assert time.monotonic() < end, "the server samples nothing"
      time.sleep(0.01)
    return path


def test_requests_in_flight_are_cut_and_continued(
  policy, server, score, tmp_path
):
  """Text and images; each token has the version of its weights."""
  prompts = [
    policy.prompt(),
    policy.prompt(1),
    policy.prompt(2, 3),
    policy.prompt(4, text="and this"),
  ]
  sampling = policy.sampling(max_new_tokens=300, stop_token_ids=())
  models = {0: policy.model}

  async def run(weights, version):
    engine = engine_of(policy, server, weights)
    weights.saved.clear()
    publication = weights.publish(version, models[version])
    assert await asyncio.to_thread(weights.saved.wait, 300)
    with vllm_server.slow_engine(server):
      waiting = asyncio.ensure_future(asked(engine, prompts, sampling))
      assert await asyncio.wrap_future(publication) == version
    return await waiting, engine.stats()

  weights = Holding(
    server, tmp_path, whole(policy), [disk_weights.VllmEngine(server.url)]
  )
  weights.version = 0
  with contextlib.closing(weights):
    # On a busy machine a request may not have begun, or be done.
    for version in range(1, 6):
      models[version] = vllm_server.other(policy, version)
      completions, stats = asyncio.run(run(weights, version))
      cut = 0
      for prompt, completion in zip(prompts, completions):
        versions = completion.versions
        assert set(versions.tolist()) <= {version - 1, version}
        assert (np.diff(versions) >= 0).all()
        for part in set(versions.tolist()):
          tokens = versions == part
          assert (
            vllm_server.gap(score, models[part], prompt, completion, tokens)
            < GAP
          )
        cut += len(set(versions.tolist())) == 2
      print(f"version {version}: {cut} cut, {stats}")
      if cut >= 2:
        break
  assert cut >= 2 and stats["resumed"] >= 2
  assert httpx.get(f"{server.url}/health", timeout=10).is_success


class Skipping(disk_weights.VllmEngine):
  """Makes every call but the one that loads."""

  loads = 0

  def _transfer_weights(self, path):
    self.loads += 1


def test_an_engine_that_loads_nothing_is_found_out_at_once(
  policy, server, probe_score, tmp_path
):
  """Also after a step much smaller than the tolerance."""
  probe = probe_of(policy, server, probe_score)
  assert probe.check(policy.model) < GAP
  small = nnx.clone(policy.model)
  for _, part in nnx.to_flat_state(nnx.state(small, nnx.Param)):
    part.set_value(part.get_value() * (1 + 3e-5))
  engine = Skipping(server.url)
  with weights_for(tmp_path, whole(policy), engine, probe) as weights:
    with pytest.raises(disk_weights.HandOverError, match="move the latter by"):
      weights.publish(1, small).result(300)
    assert engine.loads == 2 and weights.version == -1
    with pytest.raises(disk_weights.HandOverError, match="they differ by"):
      weights.publish(2, vllm_server.other(policy, 2)).result(300)


def test_a_server_that_cannot_load_is_resumed_and_named(
  policy, server, tmp_path
):
  saver, broken = whole(policy), [True]

  def save(directory, params):
    saver(directory, params)
    if broken:
      (directory / "model.safetensors").write_bytes(b"no tensors")

  async def one(client):
    try:
      return await client.generate(
        policy.prompt(1), policy.sampling(max_new_tokens=2), session="s"
      )
    finally:
      await client.aclose()

  engine = disk_weights.VllmEngine(server.url)
  with weights_for(tmp_path, save, engine) as weights:
    with pytest.raises(
      disk_weights.HandOverError, match=r"half of these .* was resumed"
    ):
      weights.publish(1, policy.model).result(300)
    remote = engine_of(policy, server, weights)
    with pytest.raises(openai_client.RemoteError, match="not sampled from"):
      asyncio.run(asked(remote, [policy.prompt()], policy.sampling()))
    paused = httpx.get(f"{server.url}/is_paused", timeout=10).json()
    assert paused == {"is_paused": False}
    # It has no weights until others are loaded; a request would end it.
    broken.clear()
    weights.publish(2, policy.model).result(300)
    assert weights.failure is None
  assert len(asyncio.run(one(policy.client(server))).tokens)
