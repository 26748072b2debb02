"""The engine's completions equal those of a plain forward pass."""

import asyncio

from flax import nnx
import numpy as np
import pytest
import rollout_micro_policy as micro
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory

# Compiling takes seconds, on a busy machine minutes.
pytestmark = pytest.mark.timeout(300)
ONE_SHAPE = dict(
  decode_rows=(4,), window_buckets=(micro.CONTEXT,), patch_buckets=(16,)
)
GREEDY = policy_client.SamplingParams(max_new_tokens=5, temperature=0.0)
FinishReason = policy_client.FinishReason


@pytest.fixture(scope="module", name="model")
def _model():
  return micro.MicroPolicy(nnx.Rngs(0))


@pytest.fixture(scope="module", name="store")
def _store():
  return micro.new_store()


@pytest.fixture(scope="module", name="engine")
def _engine(model, store):
  with micro.make_engine(model, store) as engine:
    engine.warm_up()
    yield engine
    assert engine.stats()["compiles_after_warm_up"] == 0


def test_a_turn_prefills_its_new_tokens_only(engine, model, store):
  rng = np.random.default_rng(1)
  image = micro.picture(store, rng)
  tokens, spans = micro.with_image(np.array([5, 6], np.int32), (), image)
  tokens = micro.with_text(tokens, rng, 3)
  (first,) = micro.generate(
    engine, ("p", micro.prompt_of(tokens, spans), GREEDY)
  )
  # The prompt's last token is the first that decoding computes.
  assert first.metrics["prefilled_tokens"] == len(tokens) - 1
  tokens = micro.with_text(np.append(tokens, first.tokens), rng, 4)
  (second,) = micro.generate(
    engine, ("p", micro.prompt_of(tokens, spans), GREEDY)
  )
  # The last sampled token was never computed; three of the four new ones.
  assert second.metrics["prefilled_tokens"] == 1 + 3
  micro.check_greedy(model, store, tokens, spans, second)
  # A rewritten history is prefilled from where it differs.
  tokens = tokens.copy()
  tokens[-6] = (tokens[-6] - 3 + 1) % (micro.VOCAB - 3) + 3
  (third,) = micro.generate(
    engine, ("p", micro.prompt_of(tokens, spans), GREEDY)
  )
  assert third.metrics["prefilled_tokens"] == 5
  micro.check_greedy(model, store, tokens, spans, third)
  # So is one whose tokens are equal but whose picture is not.
  spans = (trajectory.ImageSpan(micro.picture(store, rng), 2, 8),)
  (fourth,) = micro.generate(
    engine, ("p", micro.prompt_of(tokens, spans), GREEDY)
  )
  assert fourth.metrics["reused_tokens"] == 2
  micro.check_greedy(model, store, tokens, spans, fourth)
  asyncio.run(engine.release("p"))


def test_stop_token_is_kept_and_next_turn_begins_with_it(model, store, engine):
  rng = np.random.default_rng(2)
  for seed in range(50):
    tokens = micro.with_text(np.zeros(0, np.int32), rng, 4)
    sampling = policy_client.SamplingParams(
      max_new_tokens=20, seed=seed, stop_token_ids=tuple(range(2, 9))
    )
    (got,) = micro.generate(engine, ("stop", micro.prompt_of(tokens), sampling))
    stops = np.isin(got.tokens, sampling.stop_token_ids)
    assert not stops[:-1].any()
    if got.finish_reason is FinishReason.STOP:
      assert stops[-1] and len(got.tokens) <= 20
    else:
      assert not stops[-1] and len(got.tokens) == 20
    if stops[-1]:
      break
  assert got.finish_reason is FinishReason.STOP
  full = np.append(tokens, got.tokens)
  logprobs = micro.reference_logprobs(model, store, full, ())
  want = logprobs[np.arange(3, len(full) - 1), got.tokens]
  np.testing.assert_allclose(got.logprobs, want, atol=1e-4)
  tokens = micro.with_text(full, rng, 2)
  (after,) = micro.generate(engine, ("stop", micro.prompt_of(tokens), GREEDY))
  assert after.metrics["reused_tokens"] == len(full) - 1
  micro.check_greedy(model, store, tokens, (), after)


def test_prompt_that_ends_in_an_image(engine, model, store):
  rng = np.random.default_rng(3)
  requests = []
  for i in range(3):
    image = micro.picture(store, rng)
    tokens, spans = micro.with_image(np.array([7], np.int32), (), image)
    requests.append((f"end{i}", micro.prompt_of(tokens, spans), GREEDY))
  for (_, prompt, _), got in zip(requests, micro.generate(engine, *requests)):
    micro.check_greedy(model, store, prompt.tokens, prompt.images, got)


def test_a_small_vision_pool_serves_many_images(model, store):
  rng = np.random.default_rng(5)
  with micro.make_engine(
    model, store, vision_cache_tokens=16, prefill_rows=(4,), **ONE_SHAPE
  ) as engine:
    requests = []
    for i in range(4):
      tokens, spans = micro.with_text(np.zeros(0, np.int32), rng, 1), ()
      for _ in range(3):
        image = micro.picture(store, rng)
        tokens, spans = micro.with_image(tokens, spans, image)
      requests.append((f"pool{i}", micro.prompt_of(tokens, spans), GREEDY))
    for (_, prompt, _), got in zip(requests, micro.generate(engine, *requests)):
      micro.check_greedy(model, store, prompt.tokens, prompt.images, got)


def test_eviction_then_continue_equals_uninterrupted(engine, model, store):
  sampling = policy_client.SamplingParams(max_new_tokens=4, seed=11)

  async def play(engine, name, seed):
    rng = np.random.default_rng(seed)
    tokens, spans, sampled = np.array([3], np.int32), (), []
    for _ in range(3):
      image = micro.picture(store, rng, (16, 8))
      tokens, spans = micro.with_image(tokens, spans, image)
      tokens = micro.with_text(tokens, rng, 3)
      got = await engine.generate(
        micro.prompt_of(tokens, spans), sampling, session=name
      )
      tokens = np.append(tokens, got.tokens)
      sampled.append(got)
    return sampled

  async def play_all(engine):
    return await asyncio.gather(*(play(engine, f"ev{i}", i) for i in range(4)))

  one = ONE_SHAPE | dict(slots=1, prefill_rows=(1,))
  with micro.make_engine(model, store, **one) as narrow:
    interrupted = asyncio.run(asyncio.wait_for(play_all(narrow), 250))
    assert narrow.stats()["evictions"] > 4
  uninterrupted = asyncio.run(asyncio.wait_for(play_all(engine), 250))
  for a, b in zip(sum(interrupted, []), sum(uninterrupted, [])):
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


def test_context_length_ends_a_completion(engine, model, store):
  rng = np.random.default_rng(6)
  tokens = micro.with_text(np.zeros(0, np.int32), rng, micro.CONTEXT - 3)
  sampling = policy_client.SamplingParams(max_new_tokens=9, temperature=0.0)
  (got,) = micro.generate(engine, ("ctx", micro.prompt_of(tokens), sampling))
  assert len(got.tokens) == 3 and got.finish_reason is FinishReason.LENGTH
  micro.check_greedy(model, store, tokens, (), got)
  tokens = np.append(tokens, got.tokens)
  (last,) = micro.generate(
    engine, ("ctx", micro.prompt_of(tokens[:-1]), sampling)
  )
  assert last.tokens.tolist() == [tokens[-1]]
  with pytest.raises(policy_client.ContextLimitError, match="64"):
    micro.generate(engine, ("ctx", micro.prompt_of(tokens), sampling))
