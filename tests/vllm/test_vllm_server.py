"""The real vLLM computes, refuses and continues as the client promises."""

import asyncio
import contextlib
import json
import os
import subprocess

import httpx
import numpy as np
import openai
import pytest
from tunix.rl.multi_turn.clients import remote_engine
from tunix.rl.multi_turn.clients import vllm
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.net import data_urls
import vllm_server
from vllm_server import metric

GAP = vllm_server.GAP


@pytest.fixture(scope="module", name="scores")
def _scores(policy):
  return vllm_server.Scores(policy)


@contextlib.asynccontextmanager
async def client_of(policy, server, **options):
  client = policy.client(server, **options)
  try:
    yield client
  finally:
    await client.aclose()


async def test_text_and_images_agree_with_our_engine(policy, server, scores):
  prompts = [
    policy.prompt(*seeds, text=text)
    for seeds, text in (
      ((), "look"),
      ((), "and again?"),
      ((1,), "look"),
      ((2,), "where"),
      ((3, 4), "look"),
      ((1, 5), "which"),
      ((6, 7, 8), "look"),
      ((1, 2, 3), "what now"),
    )
  ]
  sampling = policy.sampling(temperature=0.0)
  async with client_of(policy, server) as client:
    answers = await vllm_server.answers_of(client, prompts, sampling)
    assert not client.counts["prompt_mismatch"]
  gap = scores.check(answers)
  assert gap < GAP, gap
  engine = engine_lib.RolloutEngine(
    policy.model,
    policy.processor,
    policy.images,
    engine_config.EngineConfig(slots=4, context_length=128),
    image_sizes=(vllm_server.SIZE,),
    banned_token_ids=policy.banned,
  )
  with engine:
    for prompt, _, answer in answers[1::2]:
      expected = await engine.generate(prompt, sampling, session="s")
      await engine.release("s")
      np.testing.assert_array_equal(expected.tokens, answer.tokens)
      np.testing.assert_allclose(expected.logprobs, answer.logprobs, atol=GAP)


@pytest.mark.parametrize(
  "options",
  [
    {},
    {"temperature": 0.7},
    {"top_p": 0.8},
    {"top_k": 12},
    {"min_p": 0.05},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
  ],
  ids=lambda options: " ".join(options) or "plain",
)
async def test_log_probs_are_of_the_distribution_sampled_from(
  policy, server, scores, options
):
  prompts = [
    policy.prompt(*seeds, text=text)
    for text in ("look", "where")
    for seeds in ((), (1,), (2, 3))
  ]
  sampling = policy.sampling(**options)
  async with client_of(policy, server) as client:
    answers = await vllm_server.answers_of(client, prompts, sampling)
    again = await client.generate(prompts[-1], sampling, session="s")
  gap = scores.check(answers)
  assert gap < GAP, gap
  sampled = np.concatenate([c.logprobs for _, _, c in answers])
  assert sampled.mean() < -0.3  # Else any distribution would agree.
  np.testing.assert_array_equal(again.tokens, answers[-1][-1].tokens)


async def test_64_images_are_taken_and_65_are_refused(policy, server):
  async with client_of(policy, server, max_images=99) as client:
    completion = await client.generate(
      policy.prompt(*range(64)), policy.sampling(), session="s"
    )
    assert len(completion.tokens)
    with pytest.raises(ValueError, match=r"400.*At most 64 image\(s\)"):
      await client.generate(
        policy.prompt(*range(65)), policy.sampling(), session="s"
      )


async def test_a_prompt_beyond_the_context_is_a_context_limit(policy, server):
  long = policy_client.TokenPrompt(np.full(vllm_server.CONTEXT + 5, 300))
  async with client_of(policy, server) as client:
    with pytest.raises(policy_client.ContextLimitError, match="2048"):
      await client.generate(long, policy.sampling(), session="s")


async def test_a_turn_finds_the_last_one_in_the_cache(policy, server, scores):
  """Pages are of 128 tokens: the prompt has two, with their images."""
  first = policy.prompt(*range(30, 48))
  sampling = policy.sampling(temperature=0.0)
  async with client_of(policy, server) as client:
    completion = await client.generate(first, sampling, session="s")
    hits = metric(server, "vllm:prefix_cache_hits_total")
    second = policy_client.TokenPrompt(
      np.concatenate([first.tokens, completion.tokens, policy.prompt().tokens]),
      first.images,
    )
    cached = await client.generate(second, sampling, session="s")
    assert metric(server, "vllm:prefix_cache_hits_total") >= hits + 128
    httpx.post(
      f"{server.url}/reset_prefix_cache", timeout=30
    ).raise_for_status()
    hits = metric(server, "vllm:prefix_cache_hits_total")
    fresh = await client.generate(second, sampling, session="s")
    assert metric(server, "vllm:prefix_cache_hits_total") == hits
  np.testing.assert_array_equal(cached.tokens, fresh.tokens)
  np.testing.assert_allclose(cached.logprobs, fresh.logprobs, atol=GAP)


async def test_a_cancelled_request_ends_at_the_server(policy, server):
  async with client_of(policy, server) as client:
    sampling = policy.sampling(max_new_tokens=1500, stop_token_ids=())
    running = "vllm:num_requests_running"
    with vllm_server.slow_engine(server):
      task = asyncio.ensure_future(
        client.generate(policy.prompt(1), sampling, session="s")
      )
      await wait_for(lambda: metric(server, running) == 1)
      task.cancel()
      with pytest.raises(asyncio.CancelledError):
        await task
      sampled = metric(server, "vllm:generation_tokens_total")
      await wait_for(lambda: metric(server, running) == 0)
    more = metric(server, "vllm:generation_tokens_total") - sampled
    assert more < 500


async def test_an_aborted_completion_continues(policy, server):
  """As at a weight update: what was sampled stays, the rest follows."""
  prompts = [policy.prompt(1), policy.prompt(), policy.prompt(2, 3)]
  sampling = policy.sampling(max_new_tokens=300, stop_token_ids=())
  async with client_of(policy, server, timeout_s=400) as client:
    # On a busy machine all may be done before they are aborted.
    for _ in range(5):
      with vllm_server.slow_engine(server):
        tasks = asyncio.ensure_future(
          vllm_server.answers_of(client, prompts, sampling)
        )
        await wait_for(
          lambda tasks=tasks: (
            tasks.done() or metric(server, "vllm:num_requests_running") == 3
          )
        )
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
          (await http.post("/pause?mode=abort")).raise_for_status()
          (await http.post("/resume")).raise_for_status()
      answers = await tasks
      if client.counts["resumed"]:
        break
    assert client.counts["resumed"]
  for _, _, completion in answers:  # vLLM itself ends at the end of a turn.
    ended = completion.finish_reason is policy_client.FinishReason.STOP
    assert ended or len(completion.tokens) == 300
  gap = vllm_server.Scores(policy, length=420).check(answers)
  assert gap < GAP, gap


async def wait_for(condition, timeout_s=300):
  async with asyncio.timeout(timeout_s):
    while not await asyncio.to_thread(condition):
      await asyncio.sleep(0.02)


@pytest.mark.parametrize("size", [(70, 50), (37, 91), (200, 24)])
async def test_images_of_odd_sizes_are_sent_as_the_policy_sees_them(
  policy, server, scores, size
):
  """vLLM's own resizing differs by one level of 255 here and there."""
  prompt = policy.prompt(1, 2, size=size)
  gaps = []
  for options in ({}, {"resize": None}):
    async with client_of(policy, server, **options) as client:
      answers = await vllm_server.answers_of(
        client, [prompt], policy.sampling()
      )
    gaps.append(scores.check(answers))
  assert gaps[0] < GAP < gaps[1] < 0.02, gaps


def test_the_openai_package_is_served(policy, server):
  """And the chat template gives the renderer's tokens."""
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
      extra_body={"return_token_ids": True},
    )
    text = client.completions.create(
      model=vllm_server.NAME,
      prompt=policy.prompt().tokens.tolist(),
      max_tokens=4,
      extra_body={"return_token_ids": True},
    )
  assert answer.prompt_token_ids == prompt.tokens.tolist()
  (choice,) = answer.choices
  assert len(choice.token_ids) == len(choice.logprobs.content) <= 4
  assert text.choices[0].prompt_token_ids == policy.prompt().tokens.tolist()
  with (
    openai.OpenAI(
      base_url=f"{server.url}/v1", api_key="none", timeout=100, max_retries=0
    ) as client,
    pytest.raises(openai.BadRequestError, match="At most 64 image"),
  ):
    client.chat.completions.create(
      model=vllm_server.NAME,
      messages=[{"role": "user", "content": content[:1] * 65}],
      max_tokens=1,
    )


class NoWeights:
  """Hands nothing over."""

  version = -1

  def wake(self) -> None:
    pass


@pytest.mark.parametrize(
  "images, context, words",
  [
    ((), 512, None),
    ((1, 2), 512, None),
    (range(65), 512, "65 images.*--limit-mm-per-prompt '{\"image\":65}'"),
    ((), 4096, "2048 tokens.*--max-model-len 4096"),
  ],
)
def test_a_run_asks_before_it_begins(policy, server, images, context, words):
  engine = remote_engine.RemoteEngine(
    lambda: policy.client(server, max_images=99),
    NoWeights(),
    context_length=context,
    prompts=lambda: [policy.prompt(), policy.prompt(*images)],
    sampling=policy.sampling(),
  )
  if words is None:
    engine.warm_up()
  else:
    with pytest.raises(ValueError, match=words):
      engine.warm_up()


_KERNELS = """
import importlib.util, json, pathlib, torch
folder = pathlib.Path(importlib.util.find_spec("vllm").origin).parent
torch.ops.load_library(str(folder / "_C_AVX2.abi3.so"))
one = torch.tensor([5], dtype=torch.int32)
rows = torch.tensor([0, 5], dtype=torch.int32)
values = []
for width in range(8, 520, 8):
  isa = "vec16" if width % 32 and width % 16 == 0 else "vec"
  try:
    torch.ops._C.get_scheduler_metadata(
        1, 2, 1, width, one, torch.float32, rows, True, -1, isa, True, None,
        "auto")
  except RuntimeError:
    continue
  values.append(width)
print(json.dumps(values))
"""


def test_heads_are_as_wide_as_the_cpu_build_has_kernels_for():
  process = subprocess.run(
    [vllm_server.BIN / "python", "-c", _KERNELS],
    env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    capture_output=True,
    check=True,
    timeout=300,
  )
  widths = json.loads(process.stdout.splitlines()[-1])
  assert widths == list(vllm.CPU_HEAD_WIDTHS)
