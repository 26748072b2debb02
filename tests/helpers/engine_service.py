"""Small engines for the tests of what the engine promises its callers."""

import asyncio
import functools
import threading
import time

from flax import nnx
import jax
import pytest
import rollout_micro_policy as micro

ONE_SHAPE = dict(
  decode_rows=(4,),
  prefill_rows=(4,),
  window_buckets=(micro.CONTEXT,),
  patch_buckets=(16,),
)
PROMPT = micro.prompt_of([3, 4, 5, 6, 7])


@pytest.fixture(scope="module", name="model")
def model_fixture():
  return micro.MicroPolicy(nnx.Rngs(0))


@pytest.fixture(scope="module", name="store")
def store_fixture():
  return micro.new_store()


@functools.cache
def compiled():
  """Programs compiled once, for all engines of one shape and lockstep."""
  model = micro.MicroPolicy(nnx.Rngs(0))
  with micro.make_engine(model, micro.new_store(), **ONE_SHAPE) as engine:
    engine.warm_up()
    return dict(engine._programs._compiled)  # pylint: disable=protected-access


@pytest.fixture(name="make")
def make_fixture(model, store):
  """Makes engines that need no compilation and are closed at the end."""
  made = []

  def make(model=model, **changes):
    engine = micro.make_engine(model, store, **(ONE_SHAPE | changes))
    engine._programs._compiled.update(compiled())  # pylint: disable=protected-access
    made.append(engine)
    return engine

  yield make
  for engine in made:
    engine.close()


def slow_down(engine, seconds):
  """Seconds that every decode call takes at least."""
  decode = engine._programs.decode  # pylint: disable=protected-access

  def slow(*args, **options):
    time.sleep(seconds)
    return decode(*args, **options)

  engine._programs.decode = slow  # pylint: disable=protected-access


def hold_up(engine):
  """(set once a decode call has begun, lets them all go on)."""
  begun, go = threading.Event(), threading.Event()
  decode = engine._programs.decode  # pylint: disable=protected-access

  def held(*args, **options):
    begun.set()
    assert go.wait(100)
    return decode(*args, **options)

  engine._programs.decode = held  # pylint: disable=protected-access
  return begun, go


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
