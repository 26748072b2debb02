"""Before a run begins, the server answers one request of each kind.

What it answered with then, each later answer must have, too.
"""

import contextlib
import itertools
import math

import fake_engines
import pytest
import small_server
from starlette import applications
from starlette import responses
from starlette import routing
from tunix.rl.multi_turn import config as config_lib
from tunix.rl.multi_turn.clients import openai_client
from tunix.rl.multi_turn.clients import remote_engine
from tunix.rl.multi_turn.clients import vllm
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.net import http_server
from tunix.rl.multi_turn.parser.renderer import qwen
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.run import episodes
from tunix.rl.multi_turn.run import tasks as run_tasks

pytestmark = pytest.mark.timeout(300)


class NoWeights:
  """Hands nothing over."""

  version = -1
  loading = failure = None

  def wake(self):
    pass


@pytest.fixture(scope="module", name="small")
def _small():
  small = small_server.SmallPolicy()
  with small.engine:
    yield small


@pytest.fixture(scope="module", name="saved")
def _saved(small, tmp_path_factory):
  directory = tmp_path_factory.mktemp("policy")
  return checkpoint.save_policy(directory / "first", small.model)


def engine_of(small, url, *seeds, protocol="vllm", top_k=0, **options):
  return remote_engine.RemoteEngine(
    lambda: openai_client.OpenAIClient(
      f"{url}/v1",
      "cua",
      small.images,
      protocol=protocol,
      banned_token_ids=small.model.config.banned_token_ids,
      tokenize=small.renderer.encode,
      retries=0,
    ),
    NoWeights(),
    context_length=small_server.CONTEXT,
    prompts=lambda: [small.prompt(), small.prompt(*seeds)],
    sampling=small.sampling(temperature=0.7, top_p=0.9, top_k=top_k),
    **options,
  )


@contextlib.contextmanager
def served(saved, remove=(), **options):
  launch = vllm.VllmLaunch(
    str(saved),
    served_name="cua",
    max_model_len=small_server.CONTEXT,
    images=2,
    dtype="float32",
  )
  words = [word for word in launch.argv() if word not in remove]
  with fake_engines.FakeVllm(words, launch.environment(), **options) as fake:
    yield fake


def test_each_kind_is_asked_once_and_with_the_likeliest_token(small, saved):
  with served(saved) as fake:
    engine_of(small, fake.url, 1, 2).warm_up()
  text, certain, images, certain_images = fake.bodies
  assert text["temperature"] == 0.7 and text["top_p"] == 0.9
  assert text["top_k"] == -1 and certain["top_k"] == 1
  assert (
    len(images["content_parts"]) == 2 == len(certain_images["content_parts"])
  )


@pytest.mark.parametrize(
  "removed, seeds, words",
  [
    (("--enable-scale-out",), (1,), "start vLLM with --enable-scale-out"),
    (
      ("--logprobs-mode", "processed_logprobs"),
      (1,),
      "top_k=1.*not 0.*--logprobs-mode processed_logprobs",
    ),
    ((), (1, 2, 3), "3 images.*--limit-mm-per-prompt '{\"image\":3}'"),
  ],
)
def test_a_missing_flag_is_named(small, saved, removed, seeds, words):
  with served(saved, removed) as fake:
    with pytest.raises(ValueError, match=words):
      engine_of(small, fake.url, *seeds).warm_up()


@pytest.mark.parametrize(
  "shift, good",
  [(0.0, True), (math.log(2), True), (math.log(4), True), (0.3, False)],
)
def test_tokens_that_tie_are_the_likeliest_too(small, saved, shift, good):
  with served(saved) as fake:
    real = fake.sample

    async def sample(prompt, sampling):
      tokens, logprobs, reason = await real(prompt, sampling)
      if sampling.top_k == 1:
        logprobs = [value - shift for value in logprobs]
      return tokens, logprobs, reason

    fake.sample = sample
    if good:
      engine_of(small, fake.url).warm_up()
    else:
      with pytest.raises(ValueError, match="top_k=1.*not 0"):
        engine_of(small, fake.url).warm_up()


def test_a_context_that_is_too_short_names_the_flag(small, saved):
  with served(saved) as fake:
    fake.context = 4
    engine = engine_of(small, fake.url)
    engine.context_length = 4
    with pytest.raises(ValueError, match="longer --max-model-len"):
      engine.warm_up()


def test_a_server_without_log_probs_is_refused(small):
  async def models(request):
    del request
    return responses.JSONResponse({"data": [{"id": "cua"}]})

  async def complete(request):
    del request
    return responses.JSONResponse(
      {"choices": [{"finish_reason": "stop", "token_ids": [7, 8]}]}
    )

  app = applications.Starlette(
    routes=[
      routing.Route("/v1/models", models),
      routing.Route("/v1/completions", complete, methods=["POST"]),
    ]
  )
  with http_server.LoopbackServer(app) as server:
    with pytest.raises(ValueError, match="the answer has no logprobs"):
      engine_of(small, server.url).warm_up()


async def test_an_episode_whose_log_probs_are_lost_later_is_not_trained_on():
  """They would be recorded as 0, as of tokens that were certain."""
  config = config_lib.load_config(
    [
      "tasks=[click-button]",
      "collect.group_size=4",
      "collect.min_valid=2",
      "collect.concurrency=1",
      "environment.max_turns=1",
    ]
  )
  _, processor, tokenizer = checkpoint.create_policy(
    "nano", screen=episodes.screen_size(config)
  )
  renderer = qwen.QwenRenderer(tokenizer, processor.num_image_tokens)
  tokens = [*map(int, renderer.encode("wait")), renderer.end_of_turn_id]
  count = itertools.count()

  async def complete(request):
    del request
    choice = {"finish_reason": "stop", "token_ids": tokens}
    if next(count) < 3:
      choice["logprobs"] = {"content": [{"logprob": -1.0}] * len(tokens)}
    return responses.JSONResponse({"choices": [choice]})

  path = "/inference/v1/generate"
  app = applications.Starlette(
    routes=[routing.Route(path, complete, methods=["POST"])]
  )
  images = images_lib.ImageStore()
  with http_server.LoopbackServer(app) as server:
    engine = remote_engine.RemoteEngine(
      lambda: openai_client.OpenAIClient(
        f"{server.url}/v1",
        "cua",
        images,
        protocol="vllm",
        tokenize=renderer.encode,
      ),
      NoWeights(),
      context_length=config.engine.context_length,
      prompts=list,
      sampling=config.sampling,
    )
    collector = episodes.make_collector(
      config,
      episodes.EpisodeFactory(config, images),
      engine,
      renderer,
      observers=None,
    )
    source = run_tasks.make_tasks(config)
    tasks = run_tasks.TrainTasks(source, config.task_source.families, 0)
    group = await collector.collect(next(tasks))
    await engine.aclose()
  *trained, lost = group
  assert group.valid == tuple(trained) and len(trained) == 3
  for episode in trained:
    (sequence,) = episode.sequences
    assert set(sequence.logprobs[sequence.loss_mask].tolist()) == {-1.0}
  assert lost.status is trajectory.TrajectoryStatus.MODEL_ERROR
  assert f"{server.url}: the answer has no logprobs" in lost.error
  assert "use a server that returns" in lost.error


def test_a_server_that_dies_of_narrow_heads_is_explained(small, saved):
  """vLLM's CPU build ends at such a request, and no answer says why."""
  problem = vllm.head_problem({"text_config": {"head_dim": 40}})
  with served(saved) as fake:
    engine_of(small, fake.url, 1, cpu_problem=problem).warm_up()
    fake.dies = True
    with pytest.raises(ValueError, match="heads 40 wide.*in_process"):
      engine_of(small, fake.url, 1, cpu_problem=problem).warm_up()
    with pytest.raises(openai_client.RemoteError):
      engine_of(small, fake.url, 1).warm_up()


def test_sglang_is_asked_too(small, saved):
  with fake_engines.FakeSglang(saved) as fake:
    options = {"protocol": "sglang", "top_k": 50}
    engine = engine_of(small, fake.url, 1, **options)
    assert fake.model_path != "cua"  # It has one model, of any name.
    with pytest.raises(ValueError, match="set sampling.top_k"):
      engine_of(small, fake.url, 1, protocol="sglang").warm_up()
    engine.warm_up()
  assert len(fake.bodies[-1]["image_data"]) == 1
