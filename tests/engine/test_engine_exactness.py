"""The engine's completions equal those of a plain forward pass."""

import asyncio

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_micro_policy as micro
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.policy import base
from tunix.rl.multi_turn.policy.models.tiny_vl import tiny_vl
from tunix.rl.multi_turn.policy.models.tiny_vl import vision_inputs

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


async def play_greedy(engine, model, store, name, seed, turns):
  """A random episode; every completion is checked against a full forward."""
  rng = np.random.default_rng(seed)
  tokens, spans = micro.with_text(np.zeros(0, np.int32), rng, 3), ()
  for _ in range(turns):
    if rng.random() < 0.7:
      size = (16, 8) if rng.random() < 0.5 else (16, 16)
      image = micro.picture(store, rng, size)
      tokens, spans = micro.with_image(tokens, spans, image)
    if rng.random() < 0.8:  # Else the prompt may end in a placeholder.
      tokens = micro.with_text(tokens, rng, int(rng.integers(1, 6)))
    if len(tokens) >= micro.CONTEXT:
      break
    sampling = policy_client.SamplingParams(
      max_new_tokens=int(rng.integers(1, 7)), temperature=0.0
    )
    completion = await engine.generate(
      micro.prompt_of(tokens, spans), sampling, session=name
    )
    micro.check_greedy(model, store, tokens, spans, completion)
    tokens = np.append(tokens, completion.tokens)
    await asyncio.sleep(rng.random() * 0.005)
  await engine.release(name)


def test_greedy_multi_turn_equals_full_forward(engine, model, store):
  async def run():
    await asyncio.gather(
      *(
        play_greedy(engine, model, store, f"g{i}", i, 6)
        for i in range(10)  # More than slots.
      )
    )
    while engine.stats()["sessions"]:  # Releases are on their way.
      await asyncio.sleep(0.001)

  before = engine.stats()
  asyncio.run(asyncio.wait_for(run(), 250))
  after = engine.stats()
  assert after["evictions"] > before["evictions"]
  assert after["active"] == after["waiting"] == 0


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


def test_one_screenshot_of_a_group_is_encoded_once(engine, store):
  rng = np.random.default_rng(4)
  image = micro.picture(store, rng)
  tokens, spans = micro.with_image(np.array([9, 8], np.int32), (), image)
  prompt = micro.prompt_of(micro.with_text(tokens, rng, 2), spans)
  before = engine.stats()["images_encoded"]
  micro.generate(engine, *((f"same{i}", prompt, GREEDY) for i in range(4)))
  assert engine.stats()["images_encoded"] == before + 1


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


# --- the shipped policy ------------------------------------------------------


def test_tiny_vl_equals_its_own_forward_pass():
  """Greedy tokens and log-probs against `TinyVL.__call__`, with images."""
  config = tiny_vl.TinyVLConfig(
    vocab_size=1030,
    number_start=20,
    image_token_id=5,
    pad_token_id=0,
    banned_token_ids=(0, 5),
    **tiny_vl.SIZES["nano"],
  )
  model = tiny_vl.TinyVL(config, nnx.Rngs(1))
  processor = vision_inputs.TinyVLProcessor()
  store = images_lib.ImageStore()
  context = 48

  @nnx.jit
  def forward(model, inputs):
    logits = model.logits(model(inputs))
    logits = logits.at[..., np.array(config.banned_token_ids)].set(-jnp.inf)
    return jax.nn.log_softmax(logits)

  def reference(tokens, spans):
    n = len(tokens)
    patches = [processor.patchify(store.get(s.image)) for s in spans]
    total = sum(p.num_tokens for p in patches)
    inputs = base.PolicyInputs(
      tokens=np.zeros((1, context), np.int32),
      positions=np.zeros((1, context, 3), np.int32),
      segment_ids=np.zeros((1, context), np.int32),
      vision_index=np.full((1, context), -1, np.int32),
      patches=np.zeros((1, context, processor.patch_bytes), np.uint8),
      patch_segments=np.zeros((1, context), np.int32),
      patch_positions=np.zeros((1, context, 2), np.int32),
    )
    inputs.tokens[0, :n] = tokens
    inputs.positions[0, :n] = processor.positions(tokens, spans)
    inputs.segment_ids[0, :n] = 1
    inputs.patches[0, :total] = np.concatenate([p.patches for p in patches])
    inputs.patch_positions[0, :total] = np.concatenate(
      [p.positions for p in patches]
    )
    at = 0
    for i, span in enumerate(spans):
      run = np.arange(at, at + span.num_tokens)
      inputs.vision_index[0, span.offset : span.end] = run
      inputs.patch_segments[0, run] = i + 1
      at += span.num_tokens
    return np.asarray(forward(model, inputs))[0, :n]

  async def play(engine, seed):
    rng = np.random.default_rng(seed)
    tokens, spans = rng.integers(6, 1030, 2).astype(np.int32), ()
    for turn in range(2):
      pixels = rng.integers(0, 255, (32, 48, 3), dtype=np.uint8)
      span = trajectory.ImageSpan(store.put(pixels), len(tokens), 6)
      spans = (*spans, span)
      tokens = np.concatenate(
        [tokens, np.full(6, 5), rng.integers(6, 1030, 3 + turn)]
      )
      sampling = policy_client.SamplingParams(
        max_new_tokens=6, temperature=0.0 if turn else 1.0
      )
      got = await engine.generate(
        policy_client.TokenPrompt(tokens, spans), sampling, session=f"t{seed}"
      )
      full = np.append(tokens, got.tokens)
      rows = reference(full, spans)[len(tokens) - 1 : len(full) - 1]
      want = np.take_along_axis(rows, got.tokens[:, None], axis=1)[:, 0]
      np.testing.assert_allclose(got.logprobs, want, atol=1e-4)
      if turn:
        np.testing.assert_array_equal(got.tokens, rows.argmax(axis=-1))
      tokens = full

  async def play_all(engine):
    await asyncio.gather(*(play(engine, i) for i in range(3)))

  with engine_lib.RolloutEngine(
    model,
    processor,
    store,
    engine_config.EngineConfig(
      slots=2,
      context_length=context,
      prefill_rows=(2,),
      prefill_buckets=(16,),
      image_buckets=(2,),
      decode_steps_per_call=4,
    ),
    image_sizes=[(48, 32)],
    banned_token_ids=config.banned_token_ids,
  ) as engine:
    asyncio.run(asyncio.wait_for(play_all(engine), 250))
