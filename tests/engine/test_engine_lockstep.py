"""Lockstep, and shapes that are compiled once."""

import asyncio

from engine_service import make_fixture  # noqa: F401
from engine_service import model_fixture  # noqa: F401
from engine_service import PROMPT
from engine_service import store_fixture  # noqa: F401
from flax import nnx
import jax
import numpy as np
import pytest
import rollout_micro_policy as micro
from tunix.rl.multi_turn.core import policy_client

# Compiling takes seconds, on a busy machine minutes.
pytestmark = pytest.mark.timeout(300)
Sampling = policy_client.SamplingParams


def play_lockstep(engine, store, delay_seed):
  """Plays four episodes with random delays; returns their completions."""
  delays = np.random.default_rng(delay_seed)

  async def episode(i):
    rng = np.random.default_rng(i)
    tokens, spans = np.array([3 + i], np.int32), ()
    completions = []
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
      completions.append((got.tokens.tolist(), got.logprobs.tobytes()))
    await asyncio.sleep(delays.random() * 0.02)
    await engine.release(f"d{i}")
    return completions

  async def run():
    for i in range(6):
      engine.open_session(f"d{i}")
    return await asyncio.gather(*(episode(i) for i in range(6)))

  return asyncio.run(asyncio.wait_for(run(), 250))


def test_lockstep_runs_are_equal_to_the_bit(make, store):
  first = make(lockstep="true", seed=9)  # Six sessions on four slots.
  want = play_lockstep(first, store, 1)
  assert want == play_lockstep(make(lockstep="true", seed=9), store, 2)
  assert want != play_lockstep(make(lockstep="true", seed=8), store, 1)
  assert first.stats()["lockstep_timeouts"] == 0


async def test_lockstep_outlives_a_hanging_episode(make):
  engine = make(lockstep="true", max_wait_s=0.05)
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
      decode_rows=(1, 3),
      window_buckets=(micro.CONTEXT,),
      prefill_rows=(1, 4),
      prefill_buckets=(16,),
    )
    with micro.make_engine(model, store, **shapes) as engine:
      progress = []
      engine.warm_up(lambda count, total, what: progress.append((count, total)))
      total = len(engine._buckets.variants())  # pylint: disable=protected-access
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
        engine._buckets.variants()[0].__class__("encode", 3, 8)  # pylint: disable=protected-access
      )
      assert compiled and engine.stats()["compiles_after_warm_up"] == 1
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
