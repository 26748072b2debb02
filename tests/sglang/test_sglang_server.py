"""The real SGLang computes, refuses and takes weights as the client says."""

import asyncio
import base64
import contextlib
import json
import threading

from agent_services.serving import image_proxy
from agent_services.serving import media
import httpx
import media_sites
from media_sites import make_fixture  # noqa: F401
from media_sites import site_fixture  # noqa: F401
import numpy as np
import openai
import pytest
from tunix.rl.multi_turn import train
from tunix.rl.multi_turn.clients import disk_weights
from tunix.rl.multi_turn.clients import hand_over_probe
from tunix.rl.multi_turn.clients import remote_engine
from tunix.rl.multi_turn.clients import remote_protocols
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.net import data_urls
import vllm_server

GAP = vllm_server.GAP


@pytest.fixture(scope="module", name="scores")
def _scores(policy):
  return vllm_server.Scores(policy)


@pytest.fixture(scope="module", name="score")
def _score(policy):
  return vllm_server.scorer_of(policy, policy.model, 1.0)


def client_of(policy, server, **options):
  return policy.client(server, protocol="sglang", **options)


async def answers_of(policy, server, prompts, sampling, **options):
  client = client_of(policy, server, **options)
  try:
    return await vllm_server.answers_of(client, prompts, sampling)
  finally:
    await client.aclose()


def engine_of(policy, server, weights, prompts=(), context=512, **sampling):
  return remote_engine.RemoteEngine(
    lambda: client_of(policy, server, max_images=99),
    weights,
    context_length=context,
    prompts=lambda: prompts,
    sampling=policy.sampling(**sampling),
  )


class NoWeights:
  """Hands nothing over."""

  version = -1

  def wake(self) -> None:
    pass


# --- sampling -----------------------------------------------------------------


@pytest.mark.parametrize(
  "options",
  [{"temperature": 0.0}, {}, {"temperature": 0.7}, {"top_k": 12}],
  ids=lambda options: " ".join(options) or "plain",
)
async def test_text_and_images_agree_with_our_policy(
  policy, server, scores, options
):
  prompts = [
    policy.prompt(*seeds, text=text)
    for text in ("look", "where")
    for seeds in ((), (1,), (2, 3), (4, 5, 6))
  ]
  answers = await answers_of(
    policy, server, prompts, policy.sampling(**options)
  )
  gap = scores.check(answers)
  assert gap < GAP, gap
  assert all(completion.support is None for _, _, completion in answers)


async def test_a_sampling_mask_is_kept_where_it_is_asked_for(
  policy, server, scores
):
  """Log-probs are of its tokens, whatever order of truncation chose them."""
  sampling = policy.sampling(
    temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, top_logprobs=20
  )
  answers = await answers_of(
    policy, server, [policy.prompt(1), policy.prompt()], sampling
  )
  sizes = set()
  for (prompt, _, completion), logits in zip(answers, scores.logits(answers)):
    for token, logprob, row, x in zip(
      completion.tokens,
      completion.logprobs,
      completion.support,
      logits[len(prompt) - 1 :],
    ):
      mask = row[row >= 0]
      assert token in mask
      sizes.add(len(mask))
      x = x.astype(np.float64) / 0.7
      expected = x[token] - np.logaddexp.reduce(x[mask])
      assert abs(expected - logprob) < GAP
  assert min(sizes) < max(sizes) <= 20


async def test_64_images_are_taken_and_65_are_refused(policy, server):
  ((_, _, completion),) = await answers_of(
    policy,
    server,
    [policy.prompt(*range(64))],
    policy.sampling(),
    max_images=99,
  )
  assert len(completion.tokens)
  with pytest.raises(ValueError, match="400.*Image count 65"):
    await answers_of(
      policy,
      server,
      [policy.prompt(*range(65))],
      policy.sampling(),
      max_images=99,
    )


async def test_a_prompt_beyond_the_context_is_a_context_limit(policy, server):
  long = policy_client.TokenPrompt(np.full(vllm_server.CONTEXT + 5, 300))
  with pytest.raises(policy_client.ContextLimitError, match="2048"):
    await answers_of(policy, server, [long], policy.sampling())


@pytest.mark.parametrize(
  "images, context, options, words",
  [
    ((1, 2), 512, {}, None),
    ((1,), 512, {"top_p": 0.9, "top_k": 50}, None),
    ((1,), 512, {"top_p": 0.9}, "set sampling.top_k"),
    (range(65), 512, {}, "--limit-mm-data-per-request '{\"image\":65}'"),
    ((), 4096, {}, "2048 tokens.*--context-length 4096"),
  ],
)
def test_a_run_asks_before_it_begins(
  policy, server, images, context, options, words
):
  prompts = [policy.prompt(), policy.prompt(*images)]
  engine = engine_of(policy, server, NoWeights(), prompts, context, **options)
  if words is None:
    engine.warm_up()
  else:
    with pytest.raises(ValueError, match=words):
      engine.warm_up()


def test_the_openai_package_is_served(policy, server):
  prompt = policy.prompt(1)
  (span,) = prompt.images
  urls = data_urls.DataUrls(policy.images)
  url = asyncio.run(urls.of(span.image))
  urls.close()
  content = [
    {"type": "image_url", "image_url": {"url": url}},
    {"type": "text", "text": "look"},
  ]
  with openai.OpenAI(
    base_url=f"{server.url}/v1", api_key="none", timeout=100
  ) as client:
    assert client.models.list().data[0].id == vllm_server.NAME
    answer = client.chat.completions.create(
      model=vllm_server.NAME,
      messages=[{"role": "user", "content": content}],
      max_tokens=4,
      temperature=0,
      logprobs=True,
    )
  assert answer.usage.prompt_tokens == len(prompt)
  assert len(answer.choices[0].logprobs.content) <= 4


async def test_an_address_is_sent_along_as_pixels(policy, server, make, site):
  """SGLang itself would fetch it from any host."""
  png = media_sites.encoded(vllm_server.noise(1))
  site.answer("/i.png", png)
  data = "data:image/png;base64," + base64.b64encode(png).decode()
  proxy = image_proxy.ImageProxy(
    server.url, media.MediaLimits(), loader=make(site.name)
  )
  sampling = policy.sampling(temperature=0.0, max_new_tokens=8)

  def body(address):
    return remote_protocols.sglang_body(
      policy.prompt(1), sampling, [address], policy.banned
    )

  async with (
    httpx.AsyncClient(
      transport=httpx.ASGITransport(proxy.asgi),
      base_url="http://127.0.0.1:1",
      timeout=100,
    ) as through,
    httpx.AsyncClient(base_url=server.url, timeout=100) as direct,
  ):
    sampled = await through.post("/generate", json=body(f"{site.url}/i.png"))
    expected = await direct.post("/generate", json=body(data))
    for answer in (sampled, expected):
      assert answer.status_code == 200, answer.text
    assert sampled.json()["output_ids"] == expected.json()["output_ids"]
    refused = await through.post(
      "/generate", json=body("http://other.test/i.png")
    )
  assert refused.json()["error"]["code"] == "image_host_not_allowed"


# --- weights ------------------------------------------------------------------


def probe_of(policy, server):
  return hand_over_probe.Probe(
    lambda: client_of(policy, server),
    [policy.prompt(), policy.prompt(1)],
    vllm_server.scorer_of(
      policy, policy.model, hand_over_probe.SAMPLING.temperature
    ),
    1e-3,
  )


@pytest.fixture(name="weights_in")
def _weights_in(policy, server, tmp_path):
  """Makes `DiskWeights`; the next test finds the server as it began."""
  with contextlib.ExitStack() as stack:

    def make(engine=None, probes=(), kind=disk_weights.DiskWeights):
      return stack.enter_context(
        contextlib.closing(
          kind(
            tmp_path / "weights",
            disk_weights.policy_saver(policy.model, policy.directory),
            [engine or disk_weights.SglangEngine(server.url)],
            probes=probes,
          )
        )
      )

    yield make
  with contextlib.closing(make()) as weights:
    weights.publish(0, policy.model).result(300)


def test_a_tied_policy_is_followed_over_three_versions(
  policy, server, score, weights_in
):
  """Images that an older vision tower has seen, too."""
  assert policy.model.config.tie_word_embeddings
  weights = weights_in(probes=[probe_of(policy, server)])
  prompts = [policy.prompt(), policy.prompt(1), policy.prompt(2, 3)]
  for version in (1, 2, 3):
    model = vllm_server.other(policy, version)
    weights.publish(version, model).result(300)
    answers = asyncio.run(
      answers_of(policy, server, prompts, policy.sampling())
    )
    for prompt, _, completion in answers:
      assert set(completion.versions.tolist()) == {version}
      assert vllm_server.gap(score, model, prompt, completion) < GAP


class Skipping(disk_weights.SglangEngine):
  """Loads nothing."""

  def load(self, path, version):
    pass


def test_an_engine_that_loads_nothing_is_found_out(policy, server, weights_in):
  weights = weights_in(Skipping(server.url), [probe_of(policy, server)])
  with pytest.raises(
    disk_weights.HandOverError, match="SGLANG_VLM_CACHE_SIZE_MB=0"
  ):
    weights.publish(1, vllm_server.other(policy, 1)).result(300)


def running(server) -> int:
  """Requests that the server is sampling."""
  answer = httpx.get(f"{server.url}/v1/loads", timeout=60).json()
  return sum(load["num_running_reqs"] for load in answer["loads"])


class Waiting(disk_weights.DiskWeights):
  """Loads once the requests of a test are in flight."""

  def __init__(self, *args, **options):
    super().__init__(*args, **options)
    self.saved, self.in_flight = threading.Event(), threading.Event()

  def _write(self, version, params):
    path = super()._write(version, params)
    self.saved.set()
    assert self.in_flight.wait(300)
    return path


def test_requests_in_flight_are_cut_and_continued(
  policy, server, score, weights_in
):
  """Text and images; each token has the version of its weights."""
  weights = weights_in(kind=Waiting)
  models = {0: policy.model, 1: vllm_server.other(policy, 1)}
  prompts = [policy.prompt(), policy.prompt(1), policy.prompt(2, 3)]
  sampling = policy.sampling(max_new_tokens=100, stop_token_ids=())

  async def run():
    weights.version = 0
    engine = engine_of(policy, server, weights)
    try:
      publication = weights.publish(1, models[1])
      assert await asyncio.to_thread(weights.saved.wait, 300)
      tasks = [
        asyncio.ensure_future(engine.generate(p, sampling, session=str(i)))
        for i, p in enumerate(prompts)
      ]
      while await asyncio.to_thread(running, server) < len(prompts):
        await asyncio.sleep(0.2)
      weights.in_flight.set()
      assert await asyncio.wrap_future(publication) == 1
      later = await engine.generate(prompts[1], sampling, session="later")
      return await asyncio.gather(*tasks), later
    finally:
      await engine.aclose()

  completions, later = asyncio.run(run())
  for prompt, completion in zip([*prompts, prompts[1]], [*completions, later]):
    assert len(completion.tokens) == 100
    versions = set(completion.versions.tolist())
    assert versions <= {0, 1}
    for version in versions:
      tokens = completion.versions == version
      assert (
        vllm_server.gap(score, models[version], prompt, completion, tokens)
        < GAP
      )
  assert set(later.versions.tolist()) == {1}
  assert any(len(set(c.versions.tolist())) == 2 for c in completions)


@pytest.mark.usefixtures("weights_in")
def test_three_steps_raise_the_success_of_a_cloned_policy(
  policy, server, tmp_path
):
  """With the sampling mask of each token."""
  status = train.main([
      f"policy={policy.directory}", "gym=two_sides:GYM",
      f"gym.width={vllm_server.SIZE[0]}", f"gym.height={vllm_server.SIZE[1]}",
      "environment.max_turns=2", "engine.context_length=512",
      "learner.row_length=512", "collect.group_size=8",
      "learner.groups_per_step=4", "collect.concurrency=16",
      "rollout.via=external", f"external.url={server.url}/v1",
      f"external.model={vllm_server.NAME}", "external.protocol=sglang",
      "sampling.top_k=20", "algorithm.keep_sampling_mask=true",
      "warm_start.source=none", "warm_start.steps=30",
      "warm_start.batch_size=16", "warm_start.demonstrations=64",
      "warm_start.learning_rate=0.003", "learner.learning_rate=0.003",
      "steps=3", "eval.episodes_per_task=24", "eval.modes=[sampled]",
      "report.progress=none", f"run.dir={tmp_path}", "name=e",
  ])  # fmt: skip
  assert status == 0
  summary = json.loads((tmp_path / "e" / "summary.json").read_text())
  assert summary["status"] == "completed" and not summary.get("faults")
  before, after = (
    summary["eval"][stage]["sampled"]["success_rate"]
    for stage in ("warm_start", "final")
  )
  assert after >= before + 0.2, (before, after)
  lines = (tmp_path / "e" / "metrics.jsonl").read_text().splitlines()
  metrics = [json.loads(line) for line in lines]
  assert [m["step"] for m in metrics] == [1, 2, 3]
  assert "logprob_gap_max" in metrics[0]
  for step in metrics:
    if "logprob_gap_max" in step:  # Else all succeeded.
      assert step["logprob_gap_max"] < 1e-4, step["logprob_gap_max"]
      assert step["fallback_turns"] == 0 and step["staleness_max"] == 0
