"""New weights under a running engine, and its rest between them."""

import asyncio
import time

from engine_service import make_fixture  # noqa: F401
from engine_service import model_fixture  # noqa: F401
from engine_service import PROMPT
from engine_service import scaled
from engine_service import store_fixture  # noqa: F401
from engine_service import until
from engine_service import with_params
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_micro_policy as micro
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.engine import requests as requests_lib

# Compiling takes seconds, on a busy machine minutes.
pytestmark = pytest.mark.timeout(300)
Sampling = policy_client.SamplingParams


def drive(engine, request, updates):
  """Runs rounds in this thread; `updates[i]` come before round i."""
  scheduler = engine._scheduler  # pylint: disable=protected-access
  scheduler.slots.enqueue(request)
  return drive_on(engine, request, updates)


def drive_on(engine, request, updates):
  """As `drive`, of a request that has been submitted."""
  scheduler = engine._scheduler  # pylint: disable=protected-access
  for i in range(50):
    if i in updates:
      version, params = updates[i]
      scheduler.set_weights(
        version,
        engine._state.prepare(params),  # pylint: disable=protected-access
      )
    scheduler.step()
    if request in scheduler.take_done():
      return request.outcome
  raise AssertionError("the request did not end")


def swap(make, model, **options):
  params = scaled(model, 1.3)
  request = requests_lib.Request(
    "w", PROMPT, Sampling(max_new_tokens=10, temperature=0.0)
  )
  got = drive(make(**options), request, {1: (7, params)})
  return got, with_params(params)


def test_weights_swap_in_the_middle_of_a_completion(make, model):
  got, new_model = swap(make, model)
  assert got.versions.tolist() == [0] * 4 + [7] * 6
  # By hand: old weights fill the cache up to the swap, new ones go on.
  cache = model.init_cache(1, micro.CONTEXT)
  tokens = [*PROMPT.tokens.tolist(), *got.tokens.tolist()]
  for i in range(len(tokens) - 1):
    policy = model if i < len(PROMPT) + 4 - 1 else new_model
    place = jnp.full((1, 1, 3), i, jnp.int32)
    hidden, cache = policy.extend(
        jnp.asarray([[tokens[i]]]), place, jnp.asarray([i]), jnp.asarray([1]),
        cache,
    )  # fmt: skip
    if i < len(PROMPT) - 1:
      continue
    logits = policy.logits(hidden)[0, 0]
    logits = logits.at[jnp.array([micro.PAD, micro.IMAGE])].set(-jnp.inf)
    logprobs = jax.nn.log_softmax(logits)
    sampled = i - (len(PROMPT) - 1)
    assert int(logprobs.argmax()) == got.tokens[sampled]
    np.testing.assert_allclose(logprobs.max(), got.logprobs[sampled], atol=1e-4)


def test_recompute_gives_what_the_new_weights_say(make, model, store):
  got, new_model = swap(make, model, on_update="recompute")
  mixed, _ = swap(make, model)
  full = np.append(PROMPT.tokens, got.tokens)
  rows = micro.reference_logprobs(new_model, store, full, ())
  rows = rows[len(PROMPT) - 1 : -1][4:]
  np.testing.assert_array_equal(got.tokens[4:], rows.argmax(-1))
  np.testing.assert_allclose(got.logprobs[4:], rows.max(-1), atol=1e-4)
  assert not np.allclose(got.logprobs, mixed.logprobs, atol=1e-4)


@pytest.mark.parametrize("on_update", ("keep_kv", "recompute"))
def test_the_turn_after_an_update_is_all_of_the_new_weights(
  make, model, store, on_update
):
  """Of a session whose last completion an update found running, as of one
  that rested; an image's tokens too."""
  engine = make(on_update=on_update)
  params = scaled(model, 1.3)
  params["vision"][...] = params["vision"][...] * -1.0
  new_model = with_params(params)
  rng = np.random.default_rng(0)
  for name, updates, version in (
    ("running", {1: (1, params)}, 1),
    ("resting", {}, 2),
  ):
    tokens, spans = micro.with_image(
      np.array([3, 8], np.int32), (), micro.picture(store, rng)
    )
    tokens = micro.with_text(tokens, rng, 12)
    first = requests_lib.Request(
      name,
      micro.prompt_of(tokens, spans),
      Sampling(max_new_tokens=10, temperature=0.0),
    )
    if not updates:  # The other case has left the new ones.
      engine._scheduler.set_weights(0, engine._state.prepare(model))  # pylint: disable=protected-access
    got = drive(engine, first, updates)
    mixed = engine.stats()["mixed_tokens"]
    if updates:
      assert got.versions.tolist() == [0] * 4 + [1] * 6
      assert mixed == (6 if on_update == "keep_kv" else 0)
    history = np.append(tokens, got.tokens).astype(np.int32)
    prompt = micro.with_text(history, rng, 3)
    again = engine.stats()["recomputed_tokens"]
    got = drive(
      engine,
      requests_lib.Request(
        name,
        micro.prompt_of(prompt, spans),
        Sampling(max_new_tokens=6, temperature=0.0),
      ),
      {} if updates else {0: (version, params)},
    )
    rows = micro.reference_logprobs(
      new_model, store, np.append(prompt, got.tokens), spans
    )[len(prompt) - 1 : -1]
    assert got.versions.tolist() == [version] * 6
    np.testing.assert_array_equal(got.tokens, rows.argmax(-1))
    np.testing.assert_allclose(got.logprobs, rows.max(-1), atol=1e-5)
    stats = engine.stats()
    assert stats["mixed_tokens"] == mixed
    if not updates or on_update == "keep_kv":
      # The session's whole cache, which lacks the last sampled token.
      assert stats["recomputed_tokens"] - again == len(history) - 1


def test_an_update_in_the_middle_of_a_prefill_begins_it_again(
  make, model, store
):
  """A prompt half computed under the old weights is mixed with no other."""
  engine = make(prefill_calls_per_round=1, prefill_buckets=(8,))
  scheduler = engine._scheduler  # pylint: disable=protected-access
  params = scaled(model, 1.3)
  new_model = with_params(params)
  scheduler.slots.enqueue(
    requests_lib.Request("runs", PROMPT, Sampling(max_new_tokens=40))
  )
  scheduler.step()
  tokens = micro.with_text(np.zeros(0, np.int32), np.random.default_rng(1), 30)
  request = requests_lib.Request(
    "late", micro.prompt_of(tokens), Sampling(max_new_tokens=4, temperature=0.0)
  )
  scheduler.slots.enqueue(request)
  scheduler.step()
  assert 0 < request.prefilled < len(tokens) - 1  # In the middle.
  got = drive_on(engine, request, {0: (1, params)})
  rows = micro.reference_logprobs(
    new_model, store, np.append(tokens, got.tokens), ()
  )[len(tokens) - 1 : -1]
  np.testing.assert_array_equal(got.tokens, rows.argmax(-1))
  np.testing.assert_allclose(got.logprobs, rows.max(-1), atol=1e-5)
  assert engine.stats()["recomputed_tokens"] == 8


def test_between_turns_never_mixes_versions(make, model):
  got, _ = swap(make, model, update_policy="between_turns")
  assert got.versions.tolist() == [0] * 10


async def test_updates_under_load_are_monotonic(make, model):
  engine = make(update_policy="immediate")
  versions = []

  async def play(i):
    for _ in range(6):
      got = await engine.generate(
        PROMPT, Sampling(max_new_tokens=16), session=f"u{i}"
      )
      assert (np.diff(got.versions) >= 0).all()
      versions.extend(got.versions.tolist())

  def publish():
    for version in range(1, 30):
      # A learner that donates its buffers publishes copies.
      params = scaled(model, 1 + version / 100)
      engine.update_weights(version, params).result(100)
      time.sleep(0.002)

  publisher = asyncio.create_task(asyncio.to_thread(publish))
  await asyncio.gather(*(play(i) for i in range(6)))
  await publisher
  assert len(set(versions)) > 3 and engine.version == 29
  last = await engine.generate(PROMPT, Sampling(max_new_tokens=2), session="z")
  assert last.versions.tolist() == [29, 29]


async def test_an_update_precedes_requests_submitted_after_it(make, model):
  engine = make()
  for version in range(1, 6):
    engine.update_weights(version, scaled(model, 1.0))
    got = await engine.generate(PROMPT, Sampling(max_new_tokens=2), session="a")
    assert got.versions.tolist() == [version] * 2


async def test_stale_prefix_and_vision_caches_between_sessions(
  make, model, store
):
  """A later session with an equal prompt, and one whose image differs in its
  pixels only, get what an engine without an earlier session gives them."""
  params = scaled(model, 1.3)
  params["vision"][...] = params["vision"][...] * -1.0
  engine = make()
  rng = np.random.default_rng(0)
  images = [micro.picture(store, rng) for _ in range(2)]
  prompts = []
  for image in images:
    tokens, spans = micro.with_image(np.array([3, 8], np.int32), (), image)
    tokens = micro.with_text(tokens, np.random.default_rng(1), 24)
    prompts.append(micro.prompt_of(tokens, spans))
  np.testing.assert_array_equal(prompts[0].tokens, prompts[1].tokens)
  greedy = Sampling(max_new_tokens=6, temperature=0.0)

  async def check(policy, version, prompt, name):
    got = await engine.generate(prompt, greedy, session=name)
    fresh = make(policy)
    alone = await fresh.generate(prompt, greedy, session=name)
    assert set(got.versions.tolist()) == {version}
    np.testing.assert_array_equal(got.tokens, alone.tokens)
    np.testing.assert_allclose(got.logprobs, alone.logprobs, atol=1e-5)
    return got.logprobs

  old = await check(model, 0, prompts[0], "first")
  other = await check(model, 0, prompts[1], "other image")
  engine.update_weights(1, params)
  new = await check(with_params(params), 1, prompts[0], "equal prompt")
  await check(with_params(params), 1, prompts[1], "other image again")
  for changed in (other, new):
    assert np.abs(changed - old).max() > 1e-3


async def test_a_pause_holds_requests_and_loses_none(make, model):
  engine = make()
  sampling = Sampling(max_new_tokens=30, temperature=0.0)
  sampled = []
  running = asyncio.ensure_future(
    engine.generate(
      PROMPT, sampling, session="a", on_tokens=lambda t: sampled.extend(t)
    )
  )
  await until(lambda: sampled)
  await asyncio.wait_for(asyncio.wrap_future(engine.pause()), 60)
  late = asyncio.ensure_future(engine.generate(PROMPT, sampling, session="b"))
  await asyncio.sleep(0.05)
  count, steps = len(sampled), engine.stats()["decode_steps"]
  await asyncio.sleep(0.1)
  assert engine.stats()["decode_steps"] == steps
  was_done = running.done()  # It may have been as fast as the pause.
  assert not late.done() and (was_done or count < 30)
  engine.update_weights(3, scaled(model, 1.3))
  engine.resume()
  first, second = await asyncio.wait_for(asyncio.gather(running, late), 60)
  assert len(first.tokens) == 30
  if not was_done:
    assert first.versions.tolist() == [0] * count + [3] * (30 - count)
  assert set(second.versions.tolist()) == {3}


def test_weights_that_do_not_fit_are_refused(make, model):
  engine = make()
  pure = nnx.to_pure_dict(nnx.state(model))
  with pytest.raises(ValueError, match="missing qkv"):
    engine.update_weights(1, {k: v for k, v in pure.items() if k != "qkv"})
  with pytest.raises(ValueError, match="unknown extra"):
    engine.update_weights(1, pure | {"extra": jnp.zeros(2)})
  with pytest.raises(ValueError, match=r"output has shape \(3,\)"):
    engine.update_weights(1, pure | {"output": jnp.zeros(3)})
  with pytest.raises(ValueError, match="version"):
    engine.update_weights(-1, pure)
  for params in (pure, model, nnx.state(model)):
    assert engine.update_weights(2, params).result(100) == 2


async def test_the_engine_copies_its_first_weights(make):
  model = micro.MicroPolicy(nnx.Rngs(0))
  engine = make(model=model)
  for leaf in jax.tree.leaves(nnx.state(model)):
    leaf.delete()
  await engine.generate(PROMPT, Sampling(max_new_tokens=2), session="a")
