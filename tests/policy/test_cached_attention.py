"""Attention to caches in rows and in pages, against the definition."""

import asyncio
import dataclasses
import functools

from flax import nnx
import jax
from jax._src import literals
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest
from tunix.rl.multi_turn.core import images as images_lib
from tunix.rl.multi_turn.core import policy_client
from tunix.rl.multi_turn.engine import config as engine_config
from tunix.rl.multi_turn.engine import engine as engine_lib
from tunix.rl.multi_turn.policy import compiling
from tunix.rl.multi_turn.policy.checkpoints import checkpoint
from tunix.rl.multi_turn.policy.layers import cached_attention
from tunix.rl.multi_turn.policy.models.qwen import qwen_vl

# The interpreter compiles for as long as a busy machine wants.
pytestmark = pytest.mark.timeout(300)
SIZE, PAGES, WIDTH = 16, 24, 4  # Tokens of a page, pages, pages of a row.


@pytest.fixture(name="interpreted")
def _interpreted(monkeypatch):
  """Pallas kernels run in XLA's own operations, on this machine."""
  call = functools.partial(pl.pallas_call, interpret=True)
  monkeypatch.setattr(pl, "pallas_call", call)
  # It asks constant indices for a shape.
  monkeypatch.setattr(literals.TypedInt, "shape", (), raising=False)


def random(rng, *shape):
  return rng.normal(size=shape).astype(np.float32)


def definition(q_TNH, k_CKH, v_CKH, start):
  """Token t sees the first start + t + 1 keys; [T, N, H]."""
  t, n, h = q_TNH.shape
  repeat = n // k_CKH.shape[1]
  out = np.zeros_like(q_TNH)
  for i in range(t):
    keys = np.repeat(k_CKH[: start + i + 1], repeat, axis=1)
    values = np.repeat(v_CKH[: start + i + 1], repeat, axis=1)
    scores = np.einsum("nh,cnh->nc", q_TNH[i], keys) / np.sqrt(h)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out[i] = np.einsum("nc,cnh->nh", weights, values)
  return out


@pytest.mark.parametrize("tokens", (1, 8))
@pytest.mark.parametrize("kv", (1, 2))
def test_pages_and_rows_equal_the_definition(interpreted, tokens, kv):
  """Ragged rows, one that rests, pages in any order, twice in a row."""
  rng = np.random.default_rng(tokens + kv)
  b, n, h = 4, 4, 128
  pages = rng.permutation(np.arange(1, PAGES))[: b * WIDTH].reshape(b, WIDTH)
  starts = np.array([0, 17, 40, 5], np.int32)
  history = [random(rng, 2, WIDTH * SIZE, kv, h) for _ in range(b)]
  cache = np.zeros((PAGES, SIZE, 2 * kv, h), np.float32)
  rows = np.zeros((2, b, kv, WIDTH * SIZE, h), np.float32)
  for r in range(b):
    for i in range(starts[r]):
      cache[pages[r, i // SIZE], i % SIZE] = (
        history[r][:, i].swapaxes(0, 1).reshape(2 * kv, h)
      )
      rows[:, r, :, i] = history[r][:, i]
  cache = jnp.asarray(cache)
  rows = (jnp.asarray(rows[0].swapaxes(2, 3)), jnp.asarray(rows[1]))
  run = jax.jit(cached_attention.attend_pages)
  run_rows = jax.jit(cached_attention.attend_rows)
  for lengths in ([tokens, 1, tokens, 0], [1, tokens, 0, tokens]):
    lengths = np.asarray(lengths, np.int32)
    q = random(rng, b, tokens, n, h)
    k, v = random(rng, b, tokens, kv, h), random(rng, b, tokens, kv, h)
    got, cache = run(q, k, v, cache, pages.astype(np.int32), starts, lengths)
    by_rows, rows = run_rows(q, k, v, rows, starts, lengths)
    for r in range(b):
      m = lengths[r]
      history[r][0, starts[r] : starts[r] + m] = k[r, :m]
      history[r][1, starts[r] : starts[r] + m] = v[r, :m]
      want = definition(q[r, :m], *history[r], starts[r])
      np.testing.assert_allclose(got[r, :m], want, atol=2e-5)
      np.testing.assert_allclose(by_rows[r, :m], want, atol=2e-5)
    starts = starts + lengths
  used = np.asarray(cache)
  assert not used[0].any()  # The empty page.
  untouched = set(range(PAGES)) - set(pages.reshape(-1).tolist())
  assert not used[sorted(untouched)].any()


@pytest.mark.parametrize(
  "kv, dtype, fits",
  (
    (8, jnp.bfloat16, True),
    (2, jnp.bfloat16, True),
    (1, jnp.float32, True),
    (3, jnp.bfloat16, False),
  ),
)
def test_what_heads_the_kernel_takes(kv, dtype, fits):
  with compiling.compile_for("tpu"):
    assert cached_attention.pages_apply(128, kv, dtype) == fits
    assert not cached_attention.pages_apply(64, kv, dtype)
  assert not cached_attention.pages_apply(128, kv, dtype)


@pytest.fixture(name="small", params=(False, True), ids=("unrolled", "stacked"))
def _small(request):
  return small_policy(request.param)


@functools.cache
def built_in():
  return checkpoint.create_policy("qwen3_vl_tiny")


@functools.cache
def small_policy(scan_layers):
  """A Qwen3-VL with heads as wide as the kernel wants them."""
  model, _, _ = built_in()
  text = dataclasses.replace(
    model.config.text, head_dim=128, mrope_section=(24, 20, 20)
  )
  config = dataclasses.replace(model.config, text=text, scan_layers=scan_layers)
  return qwen_vl.QwenVL(config, nnx.Rngs(0))


@pytest.mark.slow
def test_a_policy_gives_the_same_with_either_cache(interpreted, small):
  """Prefill, then decoding, of rows of different lengths."""
  rng = np.random.default_rng(5)
  b, t = 3, 8
  pages = rng.permutation(np.arange(1, PAGES))[: b * WIDTH].reshape(b, WIDTH)
  pages = pages.astype(np.int32)

  def play(extend, cache):
    out, starts = [], np.zeros(b, np.int32)
    for lengths, width in (([8, 3, 0], t), ([5, 8, 8], t), ([1, 1, 1], 1)):
      lengths = np.asarray(lengths, np.int32)
      tokens = rng.integers(0, 90, (b, width)).astype(np.int32)
      positions = starts[:, None] + np.arange(width)
      positions = np.repeat(positions[..., None], 3, axis=2)
      hidden, cache = extend(small, tokens, positions, starts, lengths, cache)
      for r in range(b):
        out.append(np.asarray(hidden[r, : lengths[r]]))
      starts = starts + lengths
    return np.concatenate(out)

  rng = np.random.default_rng(6)
  rows = play(
    nnx.jit(lambda m, *a: m.extend(*a)), small.init_cache(b, WIDTH * SIZE)
  )
  rng = np.random.default_rng(6)
  paged = play(
    nnx.jit(lambda m, *a: m.extend_pages(*a, pages)),
    small.init_pages(PAGES, SIZE),
  )
  np.testing.assert_allclose(paged, rows, atol=2e-5)


@pytest.mark.parametrize("small", (False,), indirect=True)
@pytest.mark.slow
def test_an_engine_reads_pages_where_they_lie(interpreted, small, monkeypatch):
  """The engine's own calls, shared pages included, with the kernel."""
  monkeypatch.setattr(cached_attention, "pages_apply", lambda *args: True)
  _, processor, _ = built_in()
  prompt = policy_client.TokenPrompt(np.arange(3, 30, dtype=np.int32))
  greedy = policy_client.SamplingParams(max_new_tokens=6, temperature=0.0)

  def sample():
    with engine_lib.RolloutEngine(
      small,
      processor,
      images_lib.ImageStore(),
      engine_config.EngineConfig(
        slots=2,
        context_length=64,
        prefill_buckets=(8,),
        window_buckets=(64,),
        patch_buckets=(16,),
        decode_steps_per_call=4,
      ),
      banned_token_ids=small.config.banned_token_ids,
    ) as engine:

      async def both():
        return await asyncio.gather(
          *(engine.generate(prompt, greedy, session=name) for name in "ab")
        )

      completions = asyncio.run(asyncio.wait_for(both(), 250))
      return completions, engine.stats()

  got, stats = sample()
  monkeypatch.undo()
  want, _ = sample()
  assert stats["shared_tokens"] == 24
  for a, b in zip(got, want):
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


def test_the_kernel_is_what_a_tpu_program_holds(small):
  def program(state, cache):
    one = jnp.ones((2, 1), jnp.int32)
    return nnx.merge(graph, state).extend_pages(
      one,
      jnp.ones((2, 1, 3), jnp.int32),
      one[:, 0],
      one[:, 0],
      cache,
      jnp.ones((2, WIDTH), jnp.int32),
    )

  graph, state = nnx.split(small)
  # A kernel asks which TPU it is for.
  tpu = jax.sharding.AbstractDevice("TPU v5 lite", 1, "tpu")
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=tpu)
  with compiling.compile_for("tpu"), jax.sharding.use_abstract_mesh(mesh):
    assert small.reads_pages
    text = (
      jax.jit(program)
      .trace(state, small.init_pages(PAGES, SIZE))
      .lower(lowering_platforms=("tpu",))
      .as_text()
    )
  assert "ragged_paged_attention_kernel" in text and "tpu_custom_call" in text
