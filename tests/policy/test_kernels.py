"""Attention and products against their definitions."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trials
from tunix.rl.multi_turn.policy import compiling
from tunix.rl.multi_turn.policy.layers import kernels

from tests.policy import test_blocks

TOL = 2e-5


def dense(q, k, v, mask):
  """The definition, in numpy: q [B, T, N, H], k and v [B, C, K, H]."""
  repeat = q.shape[2] // k.shape[2]
  k, v = np.repeat(k, repeat, axis=2), np.repeat(v, repeat, axis=2)
  scores = np.einsum("btnh,bcnh->bntc", q, k) / np.sqrt(q.shape[-1])
  scores = np.where(mask[:, None], scores, -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  return np.einsum("bntc,bcnh->btnh", weights, v)


def random(rng, *shape):
  return rng.normal(size=shape).astype(np.float32)


def outputs_and_gradients(attention, q, k, v, real=True):
  """attention(q, k, v), and gradients of the sum of its real places' sines."""

  @jax.jit
  @functools.partial(jax.grad, argnums=(0, 1, 2), has_aux=True)
  def run(q, k, v):
    out = attention(q, k, v)
    return jnp.sum(jnp.where(real, jnp.sin(out), 0)), out

  gradients, out = run(q, k, v)
  return np.where(real, out, 0), gradients


@pytest.mark.parametrize("reach", (4, 7, 64))
def test_image_attention_with_a_cut_equals_dense_attention(reach):
  rng = np.random.default_rng(3)
  s, p, n, h = 2, 23, 2, 4
  q, k, v = (random(rng, s, p, n, h) for _ in "qkv")
  segments = np.sort(rng.integers(1, 4, (s, p)), axis=1).astype(np.int32)
  got = jax.jit(
    functools.partial(kernels.image_attention, reach=reach, cut=True)
  )(q, k, v, segments)
  distance = np.abs(np.arange(p)[:, None] - np.arange(p))
  mask = (segments[:, :, None] == segments[:, None]) & (distance <= reach)
  np.testing.assert_allclose(got, dense(q, k, v, mask), atol=TOL)


@pytest.mark.parametrize("elements", (1, 1 << 26))
def test_image_attention_sees_all_of_an_image_within_reach(
  elements, monkeypatch
):
  """Block by block or at once; values and gradients."""
  monkeypatch.setattr(kernels, "MAX_SCORES", elements)
  rng = np.random.default_rng(5)
  s, n, h, reach = 2, 2, 4, 8
  sizes = ((8, 3, 8, 1, 6), (2, 8, 8, 8))
  segments = np.stack([np.repeat(np.arange(1, len(z) + 1), z) for z in sizes])
  p = segments.shape[1]
  q, k, v = (random(rng, s, p, n, h) for _ in "qkv")
  mask = segments[:, :, None] == segments[:, None]

  banded = functools.partial(
    kernels.image_attention, segments_SP=segments, reach=reach
  )
  plain = lambda q, k, v: kernels.attend(
    q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask
  )
  out, got = outputs_and_gradients(banded, q, k, v)
  _, want = outputs_and_gradients(plain, q, k, v)
  np.testing.assert_allclose(out, dense(q, k, v, mask), atol=TOL)
  for a, b in zip(got, want):
    np.testing.assert_allclose(a, b, atol=TOL)


@pytest.mark.parametrize("reach", (8, 288))  # At once, and tile by tile.
def test_aligned_images_are_seen_in_their_windows_alone(reach):
  """Images that cross no multiple of `reach`, several in some windows."""
  rng = np.random.default_rng(11)
  s, n, h = 2, 2, 4
  filled = ((1, 1, 2, 3), (1, 2, 2, 2), (3, 3, 3, 1))  # Eighths of a window.
  parts = np.repeat(np.arange(8), reach // 8) // 2
  segments = np.stack(
    [
      np.concatenate(
        [
          10 * window + np.array(filled[(window + row) % 3])[parts]
          for window in range(3)
        ]
      )
      for row in range(s)
    ]
  )[:, : 3 * reach - reach // 4]  # The last window is not whole.
  p = segments.shape[1]
  q, k, v = (random(rng, s, p, n, h) for _ in "qkv")
  mask = segments[:, :, None] == segments[:, None]
  run = lambda aligned: outputs_and_gradients(
    functools.partial(
      kernels.image_attention,
      segments_SP=segments.astype(np.int32),
      reach=reach,
      aligned=aligned,
    ),
    q,
    k,
    v,
  )
  (out, got), (_, want) = run(True), run(False)
  np.testing.assert_allclose(out, dense(q, k, v, mask), atol=TOL)
  for a, b in zip(got, want):
    np.testing.assert_allclose(a, b, atol=TOL)


@pytest.mark.parametrize("head_dim", (32, 64, 72, 100))
@pytest.mark.parametrize("platform", ("cpu", "gpu", "tpu"))
def test_windows_help_wherever_splash_does_not_take_images(platform, head_dim):
  # float32: cuDNN, which is not on every machine, takes half precision only.
  q = jax.ShapeDtypeStruct((1, 256, 2, head_dim), jnp.float32)
  ids = jax.ShapeDtypeStruct((1, 256), jnp.int32)

  def program(aligned):
    run = lambda q, ids: kernels.image_attention(
      q, q, q, ids, 96, aligned=aligned
    )
    return str(jax.make_jaxpr(run)(q, ids))

  with compiling.compile_for(platform):
    helps = kernels.windows_help(head_dim)
    plain, in_windows = program(False), program(True)
  assert helps == ("pallas_call" not in in_windows)
  assert helps == (plain != in_windows)
  assert helps == (platform != "tpu" or head_dim in (32, 100))


@pytest.mark.parametrize("p, reach", ((23, 23), (23, 64), (300, 300)))
def test_one_image_a_buffer_is_seen_without_its_padding(p, reach):
  """Real places as under the mask; values and gradients."""
  rng = np.random.default_rng(6)
  s, n, h = 3, 2, 4
  q, k, v = (random(rng, s, p, n, h) for _ in "qkv")
  real = np.arange(p) < np.array([[p], [9], [0]])
  weight = random(rng, s, p, n, h) * real[:, :, None, None]

  def value(segments, q, k, v):
    out = kernels.image_attention(q, k, v, segments, reach=reach)
    return jnp.sum(out * weight), out

  results = [
    jax.jit(
      jax.value_and_grad(
        functools.partial(value, segments), argnums=(0, 1, 2), has_aux=True
      )
    )(q, k, v)
    for segments in (real, real.astype(np.int32))
  ]
  (got, got_seen), got_slopes = results[0]
  (want, want_seen), want_slopes = results[1]
  assert abs(got - want) < TOL
  np.testing.assert_allclose(got_seen[real], want_seen[real], atol=TOL)
  assert np.isfinite(got_seen).all()
  for a, b in zip(got_slopes, want_slopes):
    np.testing.assert_allclose(a, b, atol=TOL)


def packed(rng, b, t):
  """Segment ids of rows with several sequences and padding at the end."""
  rows = []
  for _ in range(b):
    cuts = np.sort(rng.integers(1, t, 3))
    row = np.searchsorted(cuts, np.arange(t), side="right") + 1
    rows.append(np.where(row == 4, 0, row))
  return np.stack(rows).astype(np.int32)


def test_causal_attention_in_chunks_equals_the_definition():
  rng = np.random.default_rng(4)
  b, t, n, kv, h = 2, 300, 4, 2, 8
  q, k, v = (
    random(rng, b, t, n, h),
    random(rng, b, t, kv, h),
    random(rng, b, t, kv, h),
  )
  mask, until, _ = test_blocks.draw_trees(rng, t)
  attention = functools.partial(
    kernels.causal_attention,
    segments_BT=np.ones((b, t), np.int32),
    until_BT=until,
  )
  one = lambda q, k, v: kernels.attend(
    q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask
  )
  out, got = outputs_and_gradients(attention, q, k, v)
  _, want = outputs_and_gradients(one, q, k, v)
  np.testing.assert_allclose(out, dense(q, k, v, mask), atol=TOL)
  for a, b_ in zip(got, want):
    np.testing.assert_allclose(a, b_, atol=TOL)


def test_splash_kernel_interpreted_equals_the_reference():
  """The kernel that TPUs run, on this machine by its interpreter."""
  rng = np.random.default_rng(6)
  b, t, n, kv, h = 1, 256, 2, 1, 128
  q, k, v = (
    random(rng, b, t, n, h),
    random(rng, b, t, kv, h),
    random(rng, b, t, kv, h),
  )
  segments = packed(rng, b, t)
  splash = lambda q, k, v: kernels._splash_local(
    q, k, v, segments, interpret=True
  )
  plain = lambda q, k, v: kernels.causal_attention(q, k, v, segments)
  real = (segments > 0)[..., None, None]
  (out, got), (reference, want) = (
    outputs_and_gradients(f, q, k, v, real) for f in (splash, plain)
  )
  np.testing.assert_allclose(out, reference, atol=1e-4)
  for a, b_ in zip(got, want):
    np.testing.assert_allclose(a, b_, atol=5e-4)


def test_splash_kernel_of_images_interpreted_equals_the_reference():
  """Images of several lengths, heads that do not fill a tile, and padding."""
  rng = np.random.default_rng(8)
  s, p, n, h, reach = 2, 256, 2, 72, 100
  q, k, v = (random(rng, s, p, n, h) for _ in "qkv")
  lengths = ((100, 60, 96), (90, 100, 40))
  segments = np.zeros((s, p), np.int32)
  for row, sizes in zip(segments, lengths):
    row[: sum(sizes)] = np.repeat([1, 2, 3], sizes)
  splash = lambda q, k, v: kernels._splash_local(
    q, k, v, segments, interpret=True, reach=reach
  )
  plain = lambda q, k, v: kernels.image_attention(q, k, v, segments, reach)
  real = (segments > 0)[..., None, None]
  (out, got), (reference, want) = (
    outputs_and_gradients(f, q, k, v, real) for f in (splash, plain)
  )
  np.testing.assert_allclose(out, reference, atol=1e-4)
  for a, b in zip(got, want):
    np.testing.assert_allclose(a, b, atol=5e-4)


def test_splash_is_what_a_tpu_program_holds():
  q = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.bfloat16)
  k = jax.ShapeDtypeStruct((1, 256, 1, 128), jnp.bfloat16)
  ids = jax.ShapeDtypeStruct((1, 256), jnp.int32)

  # A function of its own each time: tracing is cached by function.
  def program():
    return jax.jit(lambda *args: kernels.causal_attention(*args))

  with compiling.compile_for("tpu"):
    exported = jax.export.export(program(), platforms=["tpu"])(q, k, k, ids)
  assert "tpu_custom_call" in exported.mlir_module()
  plain = jax.export.export(program(), platforms=["cpu"])(q, k, k, ids)
  assert "tpu_custom_call" not in plain.mlir_module()


@pytest.mark.parametrize(
  "places",
  trials.by_default(
    [2 * 256 * 128], [2 * 256 * 128, 1 << 27], unlike=[1 << 27]
  ),
)
def test_chunks_for_a_flash_kernel_equal_the_reference(places, monkeypatch):
  """Runs the code around cuDNN's kernel with XLA's implementation of it."""
  monkeypatch.setattr(kernels, "MAX_MASK", places)
  rng = np.random.default_rng(9)
  b, t, n, kv, h, reach = 2, 256, 4, 2, 8, 64
  q, k, v = (random(rng, b, t, heads, h) for heads in (n, kv, kv))
  segments = packed(rng, b, t)
  images = np.repeat(rng.permuted(np.arange(16)), 32).reshape(b, t)
  causal = kernels._causal_local
  image = functools.partial(kernels._image_local, reach=reach, cut=True)
  _, until, _ = test_blocks.draw_trees(rng, t)

  def run_with(run, ids, flash, *qkv):
    return outputs_and_gradients(
      lambda *qkv: run(*qkv, *ids, flash=flash), *qkv
    )

  for run, keys, ids in (
    (causal, (k, v), (segments,)),
    (causal, (k, v), (segments, until)),
    (image, (q + 1, q - 1), (images,)),
  ):
    got, want = (run_with(run, ids, flash, q, *keys) for flash in ("xla", None))
    for a, b_ in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
      np.testing.assert_allclose(a, b_, atol=1e-4)


def test_cudnn_is_what_a_gpu_program_holds(monkeypatch):
  """Values, gradients, rows and images; other dtypes stay with XLA."""
  from jax._src.cudnn import fused_attention_stablehlo as fused  # pylint: disable=g-import-not-at-top

  class Installed:  # No cuDNN on a machine without a GPU.
    @staticmethod
    def cudnn_get_version():
      return 91000

  monkeypatch.setattr(fused, "cuda_versions", Installed)
  ids = jax.ShapeDtypeStruct((1, 256), jnp.int32)

  def module(dtype, run):
    q, k = (jax.ShapeDtypeStruct((1, 256, n, 64), dtype) for n in (2, 1))

    def value(q, k, v, ids):
      return jnp.sum(run(q, k, v, ids).astype(jnp.float32))

    with compiling.compile_for("gpu"):
      program = jax.jit(jax.grad(value, argnums=(0, 1, 2)))
      exported = jax.export.export(
        program,
        platforms=["cuda"],
        # Its version is the machine's business, not the file's.
        disabled_checks=[
          jax.export.DisabledSafetyCheck.custom_call(name)
          for name in (
            "__cudnn$fmhaScaleBiasSoftmax",
            "__cudnn$fmhaScaleBiasSoftmaxBackward",
          )
        ],
      )(q, k, k, ids)
    return exported.mlir_module()

  rows = lambda *args: kernels.causal_attention(*args)
  images = lambda q, k, v, ids: kernels.image_attention(q, q, q, ids, 64)
  sight = lambda ids: kernels.Sight(ids + np.arange(256), 96, 16)
  parts = lambda *args: kernels.causal_attention(*args, sight=sight(args[3]))
  for run in (rows, images, parts):
    assert "__cudnn$fmhaScaleBiasSoftmaxBackward" in module(jnp.bfloat16, run)
    assert "__cudnn" not in module(jnp.float32, run)


def as_documented(q, k, v, *, q_seqlen, q_offsets, scale, mask_type, **_):
  """cuDNN's attention of sequences in rows, by what `jax` documents of it:
  offsets begin each one, seqlen is its length, both are -1 for none."""
  b, t, n, h = q.shape
  k, v = (jnp.repeat(x, n // x.shape[2], axis=2) for x in (k, v))
  place = jnp.arange(t)
  starts, lengths = q_offsets[:, :-1, None], q_seqlen[:, :, None]
  inside = (starts >= 0) & (place >= starts) & (place < starts + lengths)
  mask = jnp.einsum("bmt,bmc->btc", inside.astype(int), inside.astype(int)) > 0
  if "CAUSAL" in mask_type.name:
    mask &= np.tri(t, dtype=bool)
  scores = jnp.einsum("btnh,bcnh->bntc", q, k) * scale
  weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30))
  return jnp.einsum("bntc,bcnh->btnh", weights, v)


@pytest.mark.parametrize(
  "segments, branches",
  trials.by_default(
    [(4, False), (16, True), (17, False)],
    itertools.product((1, 4, 16, 17, 40), (False, True)),
    unlike=itertools.product((1, 4, 16, 17, 40), (False, True)),
  ),
)
def test_hopper_gets_segments_by_their_places(segments, branches, monkeypatch):
  """Equal to XLA's values and gradients, with padding, also beyond the bound
  and in a tree, where a mask takes over."""
  from jax._src.cudnn import fused_attention_stablehlo as fused  # pylint: disable=g-import-not-at-top

  calls = []

  def kernel(*args, **options):
    calls.append(options["q_seqlen"].shape[1])
    return as_documented(*args, **options)

  monkeypatch.setattr(fused, "check_compute_capability", lambda _: True)
  monkeypatch.setattr(fused, "dot_product_attention", kernel)
  monkeypatch.setattr(kernels, "PACKED_FROM", 64)
  flash = kernels._flash  # pylint: disable=protected-access
  rng = np.random.default_rng(segments)
  b, t, n, h = 2, 96, 2, 8
  q, k, v = (random(rng, b, t, n, h) for _ in "qkv")
  ends = np.sort(
    np.stack([rng.permutation(t - 1)[: segments - 1] for _ in range(b)])
  )
  ids = (np.arange(t)[None, :, None] > ends[:, None]).sum(-1).astype(np.int32)
  ids[1] = np.where(ids[1] > segments // 2, 0, ids[1] + 1)
  ids[0] += 1
  place = np.arange(t, dtype=np.int32)
  end = np.array([[place[row == i].max() + 1 for i in row] for row in ids])
  until = np.where(ids == 0, place + 1, end).astype(np.int32)
  if branches:  # The first sequence goes on in two ways, from its half on.
    half = end[0, 0] // 2
    until[0, half // 2 : half] = half
  real = (ids > 0)[..., None, None]
  images = lambda q, k, v: kernels.image_attention(q, k, v, ids, t)
  rows = lambda q, k, v: kernels.causal_attention(q, k, v, ids, until)
  for run, most, masked in (
    (images, kernels.IMAGE_SEGMENTS, False),
    (rows, kernels.ROW_SEGMENTS, branches),
  ):
    want = outputs_and_gradients(run, q, k, v, real)
    monkeypatch.setattr(kernels, "_cudnn_applies", lambda *_: True)
    # The branch that is not to be taken would spoil the result.
    factor = 1 if masked or segments > most else np.nan
    monkeypatch.setattr(
      kernels,
      "_flash",
      lambda *a, f=factor, **_: f * flash(*a, implementation="xla"),
    )
    with compiling.compile_for("gpu"):
      got = outputs_and_gradients(run, q, k, v, real)
    monkeypatch.setattr(kernels, "_cudnn_applies", lambda *_: False)
    jax.tree.map(
      lambda a, b_: np.testing.assert_allclose(a, b_, atol=1e-4), got, want
    )
  assert calls == [kernels.IMAGE_SEGMENTS, kernels.ROW_SEGMENTS]


@pytest.mark.parametrize("lead", ((3, 5), (1, 1)), ids=("rows", "one row"))
def test_bfloat16_products_are_summed_in_float32(lead):
  rng = np.random.default_rng(7)
  x = jnp.asarray(random(rng, *lead, 512), jnp.bfloat16)
  w = random(rng, 512, 16)
  want = np.asarray(x, np.float32) @ np.asarray(
    jnp.asarray(w, jnp.bfloat16), np.float32
  )
  got = kernels.dot(x, jnp.asarray(w))
  assert got.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.float32(got), want, rtol=2**-7, atol=1e-3)
  dx, dw = jax.grad(
    lambda x, w: jnp.sum(jnp.float32(kernels.dot(x, w))), argnums=(0, 1)
  )(x, jnp.asarray(w))
  np.testing.assert_allclose(
    np.float32(dx[0, 0]),
    np.float32(jnp.bfloat16(w).sum(-1)),
    rtol=0.02,
    atol=0.05,
  )
  assert dw.dtype == jnp.float32
  np.testing.assert_allclose(
    dw[:, 0], np.float32(x).sum((0, 1)), rtol=0.02, atol=0.05
  )


@pytest.mark.parametrize("rows", (1, 2))
def test_a_product_with_a_table_is_kept_in_float32(rows):
  rng = np.random.default_rng(8)
  x = jnp.asarray(random(rng, rows, 64), jnp.bfloat16)
  table = jnp.asarray(random(rng, 33, 64), jnp.bfloat16)
  got = kernels.dot_wide(x, table)
  assert got.dtype == jnp.float32 and got.shape == (rows, 33)
  want = np.asarray(x, np.float32) @ np.asarray(table, np.float32).T
  np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("rows", (1, 5, kernels.MOST_SPLIT + 1))
def test_a_product_with_int8_keeps_a_row_to_a_float_s_bits(rows, dtype):
  rng = np.random.default_rng(rows)
  # Rows of very different sizes, one of zeros, and a number far above others.
  x = random(rng, 1, rows, 96) * 10.0 ** (np.arange(rows)[:, None] % 9)
  x[0, -1, :2] = 0.0, 1e4
  x[0, rows // 2] *= rows == 1
  x = jnp.asarray(x, dtype)
  levels = rng.integers(-127, 128, (96, 40)).astype(np.int8)
  got = kernels.dot_rounded(x, jnp.asarray(levels))
  assert got.dtype == x.dtype
  wide = np.asarray(x, np.float64)[0]
  want = wide @ levels
  bound = np.abs(wide).max(-1, keepdims=True) * np.abs(levels).sum(0) / 2**23
  rounding = 2.0**-8 if dtype == "bfloat16" else 2.0**-20
  bound = bound + np.abs(wide) @ np.abs(levels) * rounding
  assert (np.abs(np.float64(got[0]) - want) <= bound).all()
