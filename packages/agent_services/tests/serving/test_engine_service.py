"""The engine under load and faults: who samples what, and what fails alone."""

import asyncio
import threading

from engine_service import hold_up
from engine_service import make_fixture  # noqa: F401
from engine_service import model_fixture  # noqa: F401
from engine_service import PROMPT
from engine_service import scaled
from engine_service import slow_down
from engine_service import store_fixture  # noqa: F401
from engine_service import until
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_micro_policy as micro
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.core import trajectory
from tunix.rl.multi_turn.engine import engine as engine_lib

# Compiling takes seconds, on a busy machine minutes.
pytestmark = pytest.mark.timeout(300)
Sampling = policy_client.SamplingParams


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


# --- bad requests ------------------------------------------------------------


async def test_bad_requests_fail_alone(make, store):
  engine = make()
  rng = np.random.default_rng(0)
  unknown = trajectory.ImageRef("ab" * 32, 16, 16)
  large = micro.picture(store, rng, (32, 32))
  lost_tokens, gone_spans = micro.with_image(
    np.array([3], np.int32), (), unknown
  )
  big, big_spans = micro.with_image(np.array([3], np.int32), (), large)
  picture = micro.picture(store, rng)
  short = (trajectory.ImageSpan(picture, 0, 3),)
  bad = [
    (micro.prompt_of(np.append(lost_tokens, 4), gone_spans), {}, "ImageStore"),
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
  first = asyncio.create_task(engine.generate(PROMPT, sampling, session="one"))
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
    {"prefill_buckets": (0,)},
    {"patch_buckets": (3,)},
    {"banned_token_ids": (40,)},
    {"banned_token_ids": tuple(range(40))},
    {"vision_cache_tokens": -1},
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
    for leaf in jax.tree.leaves(programs.state.cache):
      leaf.delete()  # As a failed call leaves a donated buffer.
    raise RuntimeError("RESOURCE_EXHAUSTED: no memory")

  programs.decode = broken
  with pytest.raises(engine_lib.EngineError, match="RESOURCE_EXHAUSTED"):
    await engine.generate(PROMPT, sampling, session="b")
  assert engine.healthy
  # The failure took the other session's cache, without an effect on tokens.
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
        engine.generate(PROMPT, Sampling(max_new_tokens=50), session=f"s{i}")
      )
      for i in range(3)
    ]
    await until(lambda: engine.stats()["active"] == 1)
    await asyncio.to_thread(engine.close)
    return await asyncio.gather(*tasks, return_exceptions=True)

  outcomes = asyncio.run(run())
  assert all(isinstance(o, engine_lib.EngineError) for o in outcomes)
  threads = [
    t for t in set(threading.enumerate()) - before if "engine" in t.name
  ]
  assert not threads and not engine.healthy
  engine.close()
  with pytest.raises(engine_lib.EngineError, match="closed"):
    asyncio.run(engine.generate(PROMPT, Sampling(), session="x"))
  with pytest.raises(engine_lib.EngineError, match="closed"):
    engine.update_weights(1, micro.MicroPolicy(nnx.Rngs(0)))


async def test_nobody_waits_for_a_pause_or_an_update(make, model):
  """Their futures may be cancelled at any time."""
  engine = make()
  completion = await engine.generate(
    PROMPT, Sampling(max_new_tokens=3), session="a"
  )
  begun, go = hold_up(engine)
  running = asyncio.ensure_future(
    engine.generate(PROMPT, Sampling(max_new_tokens=20), session="b")
  )
  await until(begun.is_set)
  for future in (engine.pause(), engine.update_weights(1, model)):
    assert future.cancel()
  engine.resume()
  go.set()
  assert len((await asyncio.wait_for(running, 60)).tokens)
  assert len(completion.tokens) and engine.healthy


async def test_close_ends_requests_beside_cancelled_futures(make, model):
  engine = make()
  begun, go = hold_up(engine)
  running = asyncio.ensure_future(
    engine.generate(PROMPT, Sampling(max_new_tokens=20), session="a")
  )
  await until(begun.is_set)
  assert engine.update_weights(1, model).cancel()
  waiting = engine.pause()
  closing = asyncio.ensure_future(asyncio.to_thread(engine.close))
  await until(lambda: not engine.healthy)
  go.set()
  await closing
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
