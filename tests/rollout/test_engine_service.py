"""The engine under load, faults and weight updates."""

import asyncio
import threading
import time

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_micro_policy as micro
from tunix.rl.multi_turn import policy_client
from tunix.rl.multi_turn import trajectory
from tunix.rl.multi_turn.rollout import engine as engine_lib
from tunix.rl.multi_turn.rollout import slots as slots_lib

# Compiling takes seconds, on a busy machine minutes.
pytestmark = pytest.mark.timeout(300)
Sampling = policy_client.SamplingParams
ONE_SHAPE = dict(
    decode_rows=(4,),
    prefill_rows=(4,),
    window_buckets=(),
    patch_buckets=(16,),
)
PROMPT = micro.prompt_of([3, 4, 5, 6, 7])


@pytest.fixture(scope="module", name="model")
def _model():
  return micro.MicroPolicy(nnx.Rngs(0))


@pytest.fixture(scope="module", name="store")
def _store():
  return micro.new_store()


@pytest.fixture(scope="module", name="compiled")
def _compiled(model, store):
  """Programs compiled once, for all engines of one shape and lockstep."""
  with micro.make_engine(model, store, **ONE_SHAPE) as engine:
    engine.warm_up()
    return dict(engine._programs._compiled)  # pylint: disable=protected-access


@pytest.fixture(name="make")
def _make(model, store, compiled):
  """Makes engines that need no compilation and are closed at the end."""
  made = []

  def make(model=model, **changes):
    engine = micro.make_engine(model, store, **(ONE_SHAPE | changes))
    engine._programs._compiled.update(compiled)  # pylint: disable=protected-access
    made.append(engine)
    return engine

  yield make
  for engine in made:
    engine.close()


def slow_down(engine, seconds):
  """Every decode call takes at least so long."""
  decode = engine._programs.decode  # pylint: disable=protected-access

  def slow(*args, **options):
    time.sleep(seconds)
    return decode(*args, **options)

  engine._programs.decode = slow  # pylint: disable=protected-access


async def until(condition, seconds=100.0):
  async with asyncio.timeout(seconds):
    while not condition():
      await asyncio.sleep(0.002)


def scaled(model, factor):
  """The model's parameters, changed."""
  state = nnx.state(model, nnx.Param)
  return jax.tree.map(lambda x: x * factor, state)


def with_params(params):
  model = micro.MicroPolicy(nnx.Rngs(0))
  nnx.update(model, params)
  return model


# --- randomness --------------------------------------------------------------


async def test_samples_of_a_group_differ(make):
  engine = make()
  for seeds in ([None] * 4, range(4)):
    got = await asyncio.gather(
        *(
            engine.generate(
                PROMPT, Sampling(max_new_tokens=12, seed=s), session=f"g{i}"
            )
            for i, s in enumerate(seeds)
        )
    )
    assert len({g.tokens.tobytes() for g in got}) == 4
  # A fresh seed for each call, also within a session.
  again = await engine.generate(
      PROMPT, Sampling(max_new_tokens=12), session="g0"
  )
  assert again.tokens.tobytes() not in {g.tokens.tobytes() for g in got}


async def test_engine_seed_decides_unseeded_requests(make):
  runs = []
  for seed in (5, 5, 6):
    engine = make(seed=seed)
    got = await engine.generate(
        PROMPT, Sampling(max_new_tokens=20), session="a"
    )
    runs.append(got.tokens.tolist())
  assert runs[0] == runs[1] != runs[2]


async def test_seeded_request_is_the_same_in_any_company(make):
  engine = make()
  sampling = Sampling(max_new_tokens=14, seed=(1 << 40) + 3, top_p=0.9)
  alone = await engine.generate(PROMPT, sampling, session="x")
  await engine.release("x")

  async def noise(i):
    for turn in range(4):
      prompt = micro.prompt_of(np.arange(3, 8 + i + turn))
      await engine.generate(
          prompt, Sampling(max_new_tokens=3 + i, top_k=i), session=f"n{i}"
      )

  noises = [asyncio.create_task(noise(i)) for i in range(6)]
  await asyncio.sleep(0.01)
  crowded = await engine.generate(PROMPT, sampling, session="x")
  await asyncio.gather(*noises)
  np.testing.assert_array_equal(alone.tokens, crowded.tokens)
  np.testing.assert_allclose(alone.logprobs, crowded.logprobs, atol=1e-5)


async def test_banned_tokens_are_never_sampled(make):
  flat = micro.MicroPolicy(nnx.Rngs(0))
  # All logits are equal: the banned ids would come up in a few draws.
  flat.output[...] = jnp.zeros_like(flat.output[...])
  engine = make(model=flat)
  for i in range(4):
    got = await engine.generate(
        PROMPT, Sampling(max_new_tokens=50), session=f"b{i}"
    )
    assert not np.isin(got.tokens, (micro.PAD, micro.IMAGE)).any()
    np.testing.assert_allclose(
        got.logprobs, -np.log(micro.VOCAB - 2), atol=1e-5
    )


# --- weights -----------------------------------------------------------------


def drive(engine, request, updates):
  """Runs rounds in this thread; `updates[i]` come before round i."""
  scheduler = engine._scheduler  # pylint: disable=protected-access
  scheduler.slots.enqueue(request)
  for i in range(50):
    if i in updates:
      version, params = updates[i]
      scheduler.set_weights(
          version, engine._programs.prepare_params(params)  # pylint: disable=protected-access
      )
    scheduler.step()
    if scheduler.take_done():
      return request.outcome
  raise AssertionError("the request did not end")


def swap(make, model, **options):
  params = scaled(model, 1.3)
  request = slots_lib.Request(
      "w", PROMPT, Sampling(max_new_tokens=10, temperature=0.0)
  )
  got = drive(make(**options), request, {1: (7, params)})
  return got, with_params(params)


def test_weights_swap_in_the_middle_of_a_completion(make, model):
  got, new_model = swap(make, model)
  assert got.versions.tolist() == [0] * 4 + [7] * 6
  # By hand: old weights fill the cache up to the swap, new ones go on.
  cache = model.init_cache(1, micro.CONTEXT)
  known = [*PROMPT.tokens.tolist(), *got.tokens.tolist()]
  for i in range(len(known) - 1):
    policy = model if i < len(PROMPT) + 4 - 1 else new_model
    place = jnp.full((1, 1, 3), i, jnp.int32)
    hidden, cache = policy.extend(
        jnp.asarray([[known[i]]]), place, jnp.asarray([i]), jnp.asarray([1]),
        cache,
    )  # fmt: skip
    if i < len(PROMPT) - 1:
      continue
    logits = policy.logits(hidden)[0, 0]
    logits = logits.at[jnp.array([micro.PAD, micro.IMAGE])].set(-jnp.inf)
    logprobs = jax.nn.log_softmax(logits)
    sampled = i - (len(PROMPT) - 1)
    assert int(logprobs.argmax()) == got.tokens[sampled]
    np.testing.assert_allclose(
        logprobs.max(), got.logprobs[sampled], atol=1e-4
    )


def test_recompute_gives_what_the_new_weights_say(make, model, store):
  got, new_model = swap(make, model, on_update="recompute")
  kept, _ = swap(make, model)
  full = np.append(PROMPT.tokens, got.tokens)
  rows = micro.reference_logprobs(new_model, store, full, ())
  rows = rows[len(PROMPT) - 1 : -1][4:]
  np.testing.assert_array_equal(got.tokens[4:], rows.argmax(-1))
  np.testing.assert_allclose(got.logprobs[4:], rows.max(-1), atol=1e-4)
  assert not np.allclose(got.logprobs, kept.logprobs, atol=1e-4)


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
    got = await engine.generate(
        PROMPT, Sampling(max_new_tokens=2), session="a"
    )
    assert got.versions.tolist() == [version] * 2


async def test_vision_follows_the_weights(make, model, store):
  engine = make()
  rng = np.random.default_rng(0)
  tokens, spans = micro.with_image(
      np.array([3], np.int32), (), micro.picture(store, rng)
  )
  prompt = micro.prompt_of(micro.with_text(tokens, rng, 2), spans)
  greedy = Sampling(max_new_tokens=3, temperature=0.0)
  await engine.generate(prompt, greedy, session="a")
  params = scaled(model, 1.0)
  params["vision"][...] = params["vision"][...] * -1.0
  engine.update_weights(1, params)
  got = await engine.generate(prompt, greedy, session="b")
  full = np.append(prompt.tokens, got.tokens)
  rows = micro.reference_logprobs(with_params(params), store, full, spans)
  np.testing.assert_allclose(
      got.logprobs, rows[len(prompt) - 1 : -1].max(-1), atol=1e-4
  )


async def test_a_pause_holds_requests_and_loses_none(make, model):
  engine = make()
  sampling = Sampling(max_new_tokens=30, temperature=0.0)
  seen = []
  running = asyncio.ensure_future(
      engine.generate(
          PROMPT, sampling, session="a", on_tokens=lambda t: seen.extend(t)
      )
  )
  await until(lambda: seen)
  await asyncio.wait_for(asyncio.wrap_future(engine.pause()), 60)
  late = asyncio.ensure_future(
      engine.generate(PROMPT, sampling, session="b")
  )
  await asyncio.sleep(0.05)
  held, steps = len(seen), engine.stats()["decode_steps"]
  await asyncio.sleep(0.1)
  assert engine.stats()["decode_steps"] == steps
  done = running.done()  # It may have been as fast as the pause.
  assert not late.done() and (done or held < 30)
  engine.update_weights(3, scaled(model, 1.3))
  engine.resume()
  first, second = await asyncio.wait_for(asyncio.gather(running, late), 60)
  assert len(first.tokens) == 30
  if not done:
    assert first.versions.tolist() == [0] * held + [3] * (30 - held)
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


# --- bad requests ------------------------------------------------------------


async def test_bad_requests_fail_alone(make, store):
  engine = make()
  rng = np.random.default_rng(0)
  unknown = trajectory.ImageRef("ab" * 32, 16, 16)
  large = micro.picture(store, rng, (32, 32))
  gone, gone_spans = micro.with_image(np.array([3], np.int32), (), unknown)
  big, big_spans = micro.with_image(np.array([3], np.int32), (), large)
  known = micro.picture(store, rng)
  short = (trajectory.ImageSpan(known, 0, 3),)
  bad = [
      (micro.prompt_of(np.append(gone, 4), gone_spans), {}, "ImageStore"),
      (micro.prompt_of(np.append(big, 4), big_spans), {}, "patch_buckets"),
      (micro.prompt_of([1, 1, 1, 4], short), {}, "8 tokens.* holds 3"),
      (micro.prompt_of([]), {}, "empty"),
      (micro.prompt_of([3, -2]), {}, "id -2"),
      (micro.prompt_of([3, micro.VOCAB]), {}, f"id {micro.VOCAB}"),
      (PROMPT, {"stop_token_ids": tuple(range(9))}, "at most 8"),
      (PROMPT, {"stop_token_ids": (99,)}, "stop_token_ids holds 99"),
  ]
  async def attempt(i, prompt, options):
    try:
      return await engine.generate(
          prompt, Sampling(max_new_tokens=3, **options), session=f"bad{i}"
      )
    except Exception as error:  # pylint: disable=broad-except
      return error

  good = [(PROMPT, {}, None)] * 6
  outcomes = await asyncio.gather(
      *(attempt(i, p, o) for i, (p, o, _) in enumerate(bad + good))
  )
  for (_, _, pattern), outcome in zip(bad, outcomes):
    assert isinstance(outcome, ValueError)
    with pytest.raises(ValueError, match=pattern):
      raise outcome
  assert all(len(o.tokens) == 3 for o in outcomes[len(bad) :])
  assert engine.healthy and engine.stats()["recoveries"] == 0


async def test_one_session_has_one_request(make):
  engine = make()
  slow_down(engine, 0.05)
  sampling = Sampling(max_new_tokens=8)
  first = asyncio.create_task(
      engine.generate(PROMPT, sampling, session="one")
  )
  await until(lambda: engine.stats()["active"] == 1)
  with pytest.raises(ValueError, match="'one' already has a request"):
    await engine.generate(PROMPT, sampling, session="one")
  assert len((await first).tokens) == 8


@pytest.mark.parametrize(
    "options",
    [
        {"slots": 0},
        {"context_length": 1},
        {"on_update": "forget"},
        {"update_policy": "never"},
        {"decode_steps_per_call": 0},
        {"prefill_buckets": ()},
        {"patch_buckets": (3,)},
        {"banned_token_ids": (40,)},
        {"banned_token_ids": tuple(range(40))},
        {"vision_cache_tokens": 0},
        {"features": ("telepathy",)},
    ],
)
def test_bad_options_are_refused(model, store, options):
  with pytest.raises(ValueError):
    micro.make_engine(model, store, **options)


# --- cancellation, faults, closing -------------------------------------------


async def test_cancelling_frees_the_slot(make):
  engine = make(slots=1, prefill_rows=(1,))
  slow_down(engine, 0.02)
  long = Sampling(max_new_tokens=50)
  running = asyncio.create_task(engine.generate(PROMPT, long, session="a"))
  await until(lambda: engine.stats()["active"] == 1)
  waiting = asyncio.create_task(engine.generate(PROMPT, long, session="b"))
  await until(lambda: engine.stats()["waiting"] == 1)
  waiting.cancel()
  await until(lambda: engine.stats()["waiting"] == 0)
  running.cancel()
  got = await engine.generate(
      PROMPT, Sampling(max_new_tokens=3, seed=1), session="c"
  )
  assert len(got.tokens) == 3
  stats = engine.stats()
  assert stats["cancelled"] == 2 and stats["decode_tokens"] < 50
  # The cancelled session goes on as if nothing had been.
  again = await engine.generate(
      PROMPT, Sampling(max_new_tokens=3, seed=1), session="a"
  )
  np.testing.assert_array_equal(again.tokens, got.tokens)


async def test_releasing_a_busy_session_fails_its_request(make):
  engine = make()
  slow_down(engine, 0.05)
  task = asyncio.create_task(
      engine.generate(PROMPT, Sampling(max_new_tokens=50), session="a")
  )
  await until(lambda: engine.stats()["active"] == 1)
  await engine.release("a")
  with pytest.raises(engine_lib.EngineError, match="released"):
    await task
  await engine.release("never opened")


async def test_a_device_failure_is_contained(make):
  engine = make()
  programs = engine._programs  # pylint: disable=protected-access
  sampling = Sampling(max_new_tokens=6, seed=3)
  want = await engine.generate(PROMPT, sampling, session="a")
  decode = programs.decode

  def broken(*args, **options):
    programs.decode = decode
    for leaf in jax.tree.leaves(programs.cache):
      leaf.delete()  # As a failed call leaves a donated buffer.
    raise RuntimeError("RESOURCE_EXHAUSTED: no memory")

  programs.decode = broken
  with pytest.raises(engine_lib.EngineError, match="RESOURCE_EXHAUSTED"):
    await engine.generate(PROMPT, sampling, session="b")
  assert engine.healthy
  # The other session's cache went with the failure; nobody notices.
  got = await engine.generate(PROMPT, sampling, session="a")
  np.testing.assert_array_equal(got.tokens, want.tokens)
  np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
  assert engine.stats()["recoveries"] == 1


async def test_a_broken_engine_says_so_and_refuses(make):
  engine = make()

  def broken(*args, **options):
    del args
    raise RuntimeError("device lost")

  engine._programs.decode = broken  # pylint: disable=protected-access
  for i in range(3):
    with pytest.raises(engine_lib.EngineError, match="device lost"):
      await engine.generate(PROMPT, Sampling(), session=f"s{i}")
  await until(lambda: not engine.healthy)
  with pytest.raises(engine_lib.EngineError, match="for good.*device lost"):
    await engine.generate(PROMPT, Sampling(), session="t")
  await engine.release("t")


async def test_diverged_weights_are_reported(make, model):
  engine = make()
  engine.update_weights(4, scaled(model, jnp.nan))
  with pytest.raises(engine_lib.EngineError, match="not finite.*version 4"):
    await engine.generate(PROMPT, Sampling(), session="a")
  engine.update_weights(5, model)
  await engine.generate(PROMPT, Sampling(max_new_tokens=2), session="a")


async def test_the_event_loop_runs_while_the_engine_works(make):
  engine = make()
  slow_down(engine, 0.1)
  ticks = 0

  async def tick():
    nonlocal ticks
    while True:
      await asyncio.sleep(0.001)
      ticks += 1

  ticker = asyncio.create_task(tick())
  await engine.generate(PROMPT, Sampling(max_new_tokens=8), session="a")
  ticker.cancel()
  assert ticks > 10  # Two calls of 0.1 s; a blocked loop would tick once.


def test_close_fails_what_is_pending_and_leaves_no_thread(make):
  before = set(threading.enumerate())
  engine = make(slots=1, prefill_rows=(1,))
  slow_down(engine, 0.05)

  async def run():
    tasks = [
        asyncio.create_task(
            engine.generate(
                PROMPT, Sampling(max_new_tokens=50), session=f"s{i}"
            )
        )
        for i in range(3)
    ]
    await until(lambda: engine.stats()["active"] == 1)
    await asyncio.to_thread(engine.close)
    return await asyncio.gather(*tasks, return_exceptions=True)

  outcomes = asyncio.run(run())
  assert all(isinstance(o, engine_lib.EngineError) for o in outcomes)
  left = [
      t for t in set(threading.enumerate()) - before if "engine" in t.name
  ]
  assert not left and not engine.healthy
  engine.close()
  with pytest.raises(engine_lib.EngineError, match="closed"):
    asyncio.run(engine.generate(PROMPT, Sampling(), session="x"))
  with pytest.raises(engine_lib.EngineError, match="closed"):
    engine.update_weights(1, micro.MicroPolicy(nnx.Rngs(0)))


async def test_nobody_waits_for_a_pause_or_an_update(make, model):
  """Their futures may be cancelled at any time."""
  engine = make()
  done = await engine.generate(PROMPT, Sampling(3), session="a")
  slow_down(engine, 0.2)
  running = asyncio.ensure_future(
      engine.generate(PROMPT, Sampling(20), session="b")
  )
  await until(lambda: engine.stats()["active"])
  for future in (engine.pause(), engine.update_weights(1, model)):
    assert future.cancel()
  engine.resume()
  assert len((await asyncio.wait_for(running, 60)).tokens)
  assert len(done.tokens) and engine.healthy


async def test_close_ends_requests_beside_cancelled_futures(make, model):
  engine = make()
  slow_down(engine, 0.3)
  running = asyncio.ensure_future(
      engine.generate(PROMPT, Sampling(20), session="a")
  )
  await until(lambda: engine.stats()["active"])
  engine.update_weights(1, model).cancel()
  waiting = engine.pause()
  await asyncio.to_thread(engine.close)
  with pytest.raises(engine_lib.EngineError, match="closed"):
    await asyncio.wait_for(running, 60)
  with pytest.raises(engine_lib.EngineError, match="closed"):
    waiting.result(60)


def test_several_event_loops_share_an_engine(make):
  engine = make()
  counts = []

  def loop(i):
    async def run():
      for turn in range(3):
        got = await engine.generate(
            PROMPT, Sampling(max_new_tokens=3), session=f"l{i}.{turn}"
        )
        counts.append(len(got.tokens))

    asyncio.run(run())

  threads = [threading.Thread(target=loop, args=(i,)) for i in range(3)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(30)
  assert counts == [3] * 9


# --- lockstep and shapes -----------------------------------------------------


def play_lockstep(engine, store, delay_seed):
  """Four episodes with random delays; returns all that was sampled."""
  delays = np.random.default_rng(delay_seed)

  async def episode(i):
    rng = np.random.default_rng(i)
    tokens, spans = np.array([3 + i], np.int32), ()
    found = []
    for _ in range(1 + i % 3):  # Episodes end at different times.
      image = micro.picture(store, rng, (16, 8))
      tokens, spans = micro.with_image(tokens, spans, image)
      tokens = micro.with_text(tokens, rng, 1 + i)
      await asyncio.sleep(delays.random() * 0.03)
      got = await engine.generate(
          micro.prompt_of(tokens, spans),
          Sampling(max_new_tokens=5),
          session=f"d{i}",
      )
      tokens = np.append(tokens, got.tokens)
      found.append((got.tokens.tolist(), got.logprobs.tobytes()))
    await asyncio.sleep(delays.random() * 0.02)
    await engine.release(f"d{i}")
    return found

  async def run():
    for i in range(6):
      engine.open_session(f"d{i}")
    return await asyncio.gather(*(episode(i) for i in range(6)))

  return asyncio.run(asyncio.wait_for(run(), 250))


def test_lockstep_runs_are_equal_to_the_bit(make, store):
  first = make(lockstep=True, seed=9)  # Six sessions on four slots.
  want = play_lockstep(first, store, 1)
  assert want == play_lockstep(make(lockstep=True, seed=9), store, 2)
  assert want != play_lockstep(make(lockstep=True, seed=8), store, 1)
  assert first.stats()["lockstep_timeouts"] == 0


async def test_lockstep_outlives_a_hanging_episode(make):
  engine = make(lockstep=True, max_wait_s=0.05)
  engine.open_session("hangs")
  got = await asyncio.wait_for(
      engine.generate(PROMPT, Sampling(max_new_tokens=3), session="a"), 20
  )
  assert len(got.tokens) == 3
  assert engine.stats()["lockstep_timeouts"] == 1
  await engine.release("hangs")
  await engine.generate(PROMPT, Sampling(max_new_tokens=3), session="a")
  assert engine.stats()["lockstep_timeouts"] == 1


def test_nothing_compiles_after_warm_up(model, store):
  compiled = []

  def listen(event, seconds, **kwargs):
    del seconds, kwargs
    if event.endswith("backend_compile_duration"):
      compiled.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    shapes = dict(
        decode_rows=(1, 3), window_buckets=(), prefill_rows=(1, 4),
        prefill_buckets=(16,),
    )  # fmt: skip
    with micro.make_engine(model, store, **shapes) as engine:
      progress = []
      engine.warm_up(lambda done, total, what: progress.append((done, total)))
      total = len(engine._shapes.variants())  # pylint: disable=protected-access
      assert progress == [(i + 1, total) for i in range(total)]
      assert engine.stats()["compile_count"] == total <= len(compiled)
      compiled.clear()

      async def play(i):
        rng = np.random.default_rng(i)
        for turn in range(5):
          tokens = micro.with_text(
              np.zeros(0, np.int32), rng, int(rng.integers(1, 40))
          )
          spans = ()
          for _ in range(int(rng.integers(0, 3))):
            size = ((16, 8), (16, 16))[int(rng.integers(2))]
            image = micro.picture(store, rng, size)
            tokens, spans = micro.with_image(tokens, spans, image)
          tokens = np.append(tokens, 5)
          sampling = Sampling(
              max_new_tokens=int(rng.integers(1, 12)),
              temperature=float(rng.integers(0, 2)),
              top_p=float(rng.choice([1.0, 0.8])),
              top_k=int(rng.choice([0, 5])),
          )
          await engine.generate(
              micro.prompt_of(tokens, spans), sampling, session=f"r{i}.{turn}"
          )
          await engine.release(f"r{i}.{turn}")
          if i == 0:
            engine.update_weights(turn, scaled_host)

      scaled_host = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))

      async def run():
        await asyncio.gather(*(play(i) for i in range(5)))

      asyncio.run(asyncio.wait_for(run(), 250))
      assert not compiled
      assert engine.stats()["compiles_after_warm_up"] == 0
      # The counter does count.
      engine._programs.compile(  # pylint: disable=protected-access
          engine._shapes.variants()[0].__class__("encode", 3, 8)  # pylint: disable=protected-access
      )
      assert compiled and engine.stats()["compiles_after_warm_up"] == 1
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
