"""Calls are dealt over shards; sessions get and keep theirs."""

import dataclasses

from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.engine import buckets
from tunix.rl.multi_turn.engine import cache_memory
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import device_state
from tunix.rl.multi_turn.engine import page_pool
from tunix.rl.multi_turn.engine import requests
from tunix.rl.multi_turn.planning import policy_facts
from tunix.rl.multi_turn.planning import update_memory
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.models.qwen import qwen_vl


@given(
  st.integers(1, 4).flatmap(
    lambda shards: st.tuples(
      st.just(shards),
      st.lists(st.integers(0, shards - 1), max_size=40),
      st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True),
    )
  )
)
def test_every_item_gets_one_row_of_its_shards_block(case):
  shards, shard_of, each = case
  sizes = [shards * n for n in sorted(each)]
  items = []
  for call in buckets.deal(shard_of, sizes, shards):
    assert call.size in sizes
    assert len(set(call.rows.tolist())) == len(call.rows) == len(call.items)
    block = call.size // shards
    for item, row in zip(call.items, call.rows):
      assert row // block == shard_of[item]
    items += call.items
  assert sorted(items) == list(range(len(shard_of)))


def test_one_shard_fills_calls_in_order():
  calls = list(buckets.deal([0] * 5, (1, 2, 4), 1))
  assert [c.items for c in calls] == [[0, 1, 2, 3], [4]]
  assert [c.size for c in calls] == [4, 1]


def table(shards=2, slots=4, pages=5):
  pools = [page_pool.PagePool(pages, 4) for _ in range(shards)]
  return requests.SlotTable(slots, 16, pools, share=True)


def ask(slots, name):
  request = requests.Request(
    name,
    policy_client.TokenPrompt(np.arange(8, dtype=np.int32)),
    policy_client.SamplingParams(),
  )
  slots.enqueue(request)
  return request


def run(slots, request):
  """Admits a request to the shard that suits it best; caches its prompt."""
  session = slots.sessions[request.session]
  shard = slots.shards_for(request)[0]
  slots.move(session, shard)
  slots.place(request)
  session.sequence.begin(request.prompt.tokens, (), 7)
  assert session.sequence.grow(8)
  session.sequence.advance(8)
  return shard


def test_new_sessions_go_where_the_fewest_run():
  slots = table()
  requests = [ask(slots, name) for name in "abcd"]
  assert [run(slots, r) for r in requests] == [0, 1, 0, 1]
  assert sorted(r.slot for r in requests) == [0, 1, 2, 3]
  assert {r.slot // 2 for r in requests[::2]} == {0}
  assert not slots.has_room


def test_a_session_stays_with_its_pages():
  slots = table()
  first = ask(slots, "a"), ask(slots, "b")
  assert [run(slots, r) for r in first] == [0, 1]
  slots.finish(first[1])
  again = ask(slots, "b")
  assert slots.shards_for(again) == [1]
  slots.sessions["b"].sequence.clear()
  assert slots.shards_for(again)[0] == 1  # Shard 0 runs a.


def test_pages_are_taken_from_sessions_of_the_own_shard():
  slots = table()
  first = [ask(slots, name) for name in "ab"]
  for request in first:
    run(slots, request)
    slots.finish(request)
  c = ask(slots, "c")
  for shard, name in ((0, "a"), (1, "b")):
    slots.move(slots.sessions["c"], shard)
    assert slots.victim(c).name == name


def sizes_of(shards, **settings):
  _, processor, _ = checkpoint.create_policy("qwen3_vl_tiny", screen=(32, 32))
  config = engine_config.EngineConfig(
    slots=6, context_length=64, page_size=8, **settings
  )
  chosen = buckets.choose(processor, config, ((32, 32),), shards)
  assert all(n % shards == 0 for n in (*chosen.decode_rows, *chosen.images))
  return cache_memory.sizes(processor, config, chosen, shards)


def test_a_shard_holds_a_context_at_least():
  assert sizes_of(1).pages == 1 + 6 * 8
  assert sizes_of(4).pages == 1 + 2 * 8  # Two slots a shard.
  assert sizes_of(4, cache_tokens=64).pages == 1 + 8
  assert sizes_of(4, vision_cache_tokens=2).vision_tokens >= 1


@pytest.fixture(name="wide", scope="module")
def _wide():
  """float32 parameters, computed in bfloat16."""
  model, processor, _ = checkpoint.create_policy(
    "qwen3_vl_tiny", screen=(32, 32)
  )
  config = dataclasses.replace(model.config, compute_dtype="bfloat16")
  return qwen_vl.QwenVL(config, nnx.Rngs(0)), processor


@pytest.mark.slow
def test_matrices_are_kept_in_the_type_they_are_computed_in(wide):
  model, processor = wide
  state = device_state.DeviceState(
    model, processor, pages=3, page_size=8, vision_tokens=4
  )
  kept_bytes = sum(x.nbytes for x in state.params)
  assert kept_bytes == device_state.weight_bytes(model, None)
  model_bytes = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
  assert kept_bytes < 0.55 * model_bytes
  narrow = state.merge(state.params)
  # The same numbers, to the bit.
  tokens = np.arange(8, dtype=np.int32)[None]
  positions = np.repeat(tokens[..., None], 3, axis=2)
  starts, lengths = np.zeros(1, np.int32), np.full(1, 8, np.int32)
  patches = np.random.default_rng(0).integers(
    0, 256, (1, 4, processor.patch_bytes), np.uint8
  )
  real = np.ones((1, 4), bool)
  places = np.array([[0, 0, 2, 2], [0, 1, 2, 2], [1, 0, 2, 2], [1, 1, 2, 2]])
  index = np.array([[-1, 0, -1, -1, -1, -1, -1, -1]], np.int32)

  @nnx.jit
  def score(model):
    vision = model.encode_images(patches, real, places[None].astype(np.int32))
    hidden, _ = model.extend(
      tokens, positions, starts, lengths, model.init_cache(1, 8), index, vision
    )
    return model.logits(hidden)

  np.testing.assert_array_equal(score(narrow), score(model))
  # New weights are cast alike.
  fresh = state.prepare(nnx.state(model))
  assert [x.dtype for x in fresh] == [x.dtype for x in state.params]


def test_shapes_are_enough_to_lower_an_engines_programs(wide):
  model, processor = wide
  shapes = nnx.eval_shape(lambda: type(model)(model.config, nnx.Rngs(0)))
  real = device_state.DeviceState(
    model, processor, pages=3, page_size=8, vision_tokens=4
  )
  state = device_state.DeviceState(
    shapes, processor, pages=3, page_size=8, vision_tokens=4
  )
  assert state.cache is None and state.pool is None
  for got, want in zip(
    jax.tree.leaves((state.params, state.cache_shape, state.pool_shape)),
    jax.tree.leaves((real.params, real.cache, real.pool)),
    strict=True,
  ):
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
  assert jnp.dtype(jnp.int8) in {
    x.dtype
    for x in device_state.DeviceState(
      shapes, processor, pages=3, page_size=8, vision_tokens=4, weights="int8"
    ).params
  }


def test_a_processs_mesh_is_its_part_of_the_whole_one():
  full = update_memory.abstract_mesh(fsdp=8, tensor=2)
  part = update_memory.process_mesh(full, 4)
  assert dict(part.shape) == {"data": 1, "fsdp": 2, "sequence": 1, "tensor": 2}
  assert update_memory.process_mesh(full, 1) is full


@pytest.mark.parametrize(
  ("settings", "parameters", "rows"),
  [
    ({}, 2_000_000, 6),  # All slots of the eight that there could be.
    ({}, 135_000_000, 2),
    ({"prefill_rows": (4,)}, 135_000_000, 4),
  ],
)
def test_a_large_policy_prefills_few_rows_on_a_cpu(settings, parameters, rows):
  _, processor, _ = checkpoint.create_policy("qwen3_vl_tiny", screen=(32, 32))
  config = engine_config.EngineConfig(slots=6, context_length=64, **settings)
  chosen = buckets.choose(
    processor, config, ((32, 32),), platform="cpu", parameters=parameters
  )
  assert chosen.prefill_rows == (rows,)


def test_parameters_are_counted():
  model, _, _ = checkpoint.create_policy("qwen3_vl_tiny", screen=(32, 32))
  parts = policy_facts.parameters_by_part(model)
  assert device_state.count_parameters(model) == parts["total"]
