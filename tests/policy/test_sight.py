"""Intervals that tokens see, with whole images and layers with windows.

Every way of computing attention under a `kernels.Sight` is held to attention
under the explicit mask of the definition, written out token by token.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trials
from tunix.rl.multi_turn.policy import compiling
from tunix.rl.multi_turn.policy.layers import blocks
from tunix.rl.multi_turn.policy.layers import cached_attention
from tunix.rl.multi_turn.policy.layers import kernels
from tunix.rl.multi_turn.policy.models.gemma3 import gemma3

from tests.policy import test_blocks

B, N, K, H, IMAGE = 2, 4, 2, 8, 9


def row(rng, t):
  """Segments and images of a row: words, and runs of IMAGE vision tokens."""
  segments, images = np.zeros(t, np.int32), np.zeros(t, np.int32)
  at = segment = image = 0
  while at < t - 4 * IMAGE:
    segment += 1
    for _ in range(int(rng.integers(1, 4))):
      words, start = int(rng.integers(1, 12)), at
      at += words
      segments[start : at + IMAGE] = segment
      image += 1
      images[at : at + IMAGE] = image
      at += IMAGE
    if rng.random() < 0.5:  # Else the segment ends with an image.
      segments[at : at + 5] = segment
      at += 5
  return segments[:t], images[:t]


def rows(t, seed=0):
  rng = np.random.default_rng(seed)
  drawn = [row(rng, t) for _ in range(B)]
  return tuple(np.stack(part) for part in zip(*drawn, strict=True))


def definition(segments, images, window):
  """bool[B, T, T], token by token."""
  b, t = segments.shape
  mask = np.zeros((b, t, t), bool)
  for r in range(b):
    for q in range(t):
      for k in range(t):
        earlier = k <= q and (not window or q - k < window)
        one_image = images[r, q] > 0 and images[r, q] == images[r, k]
        same = segments[r, q] == segments[r, k]
        mask[r, q, k] = same and (earlier or one_image)
  return mask


def qkv(t, seed=1):
  rng = np.random.default_rng(seed)
  return tuple(
    jnp.asarray(rng.normal(size=(B, t, heads, H)), jnp.float32)
    for heads in (N, K, K)
  )


def dense(q, k, v, mask):
  return kernels.attend(q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask)


def sight(segments, images, window):
  last = gemma3.last_seen(jnp.asarray(images > 0), jnp.asarray(segments))
  return kernels.Sight(last, window, IMAGE)


# Tokens: by XLA at once, in chunks of queries, and block by block.
WAYS = [(120, "cpu"), (401, "gpu"), (401, "cpu")]
WINDOWS = [0, IMAGE, 20, 150]


@pytest.mark.parametrize("t, platform", WAYS)
@pytest.mark.parametrize("window", trials.by_default([20], WINDOWS, unlike=[0]))
def test_values_and_gradients_are_those_of_the_definition(
  t, platform, window, monkeypatch
):
  monkeypatch.setattr(blocks, "_most", lambda causal: 48)
  segments, images = rows(t)
  mask = definition(segments, images, window)
  later = np.triu(mask.any(0), 1)
  assert later.any() and mask.any(-1).all()
  interval = sight(segments, images, window)

  def ours(*qkv):
    with compiling.compile_for(platform):
      return kernels.causal_attention(*qkv, segments, sight=interval)

  got, slopes = test_blocks.value_and_slopes(ours, qkv(t))
  want, want_slopes = test_blocks.value_and_slopes(
    lambda *qkv: dense(*qkv, mask), qkv(t)
  )
  np.testing.assert_allclose(got, want, atol=3e-6)
  for a, b in zip(slopes, want_slopes, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_an_image_may_end_with_the_first_token_of_a_block(monkeypatch):
  monkeypatch.setattr(blocks, "_most", lambda causal: 48)
  segments = np.ones((B, 401), np.int32)
  images = np.zeros_like(segments)
  images[:, 49 - IMAGE : 49] = 1
  with compiling.compile_for("cpu"):
    got = kernels.causal_attention(
      *qkv(401), segments, sight=sight(segments, images, 0)
    )
  want = dense(*qkv(401), definition(segments, images, 0))
  np.testing.assert_allclose(got, want, atol=3e-6)


@pytest.mark.parametrize("t, platform", WAYS)
@pytest.mark.parametrize(
  "window",
  trials.by_default([20], [0, IMAGE, 20, 40]),  # Trees are shallow.
)
def test_in_a_tree_windows_count_along_the_sequence(
  t, platform, window, monkeypatch
):
  monkeypatch.setattr(blocks, "_most", lambda causal: 48)
  _, images = rows(t)
  images[:, t - t // 9 :] = 0  # Padding.
  sees, until, depth = test_blocks.draw_trees(
    np.random.default_rng(2), t, images
  )
  is_image = images > 0
  same = is_image[:, :, None] & (images[:, :, None] == images[:, None])
  near = True
  if window:
    near = depth[:, :, None] - depth[:, None] < window
  mask = (sees & near) | same
  assert (sees & ~near).any() or not window
  last = gemma3.last_seen(
    jnp.asarray(is_image), jnp.ones((B, t), jnp.int32), until
  )
  interval = kernels.Sight(last, window, IMAGE, jnp.asarray(depth))

  def ours(*qkv):
    with compiling.compile_for(platform):
      return kernels.causal_attention(
        *qkv, np.ones((B, t), np.int32), until, sight=interval
      )

  got, slopes = test_blocks.value_and_slopes(ours, qkv(t))
  want, want_slopes = test_blocks.value_and_slopes(
    lambda *qkv: dense(*qkv, mask), qkv(t)
  )
  np.testing.assert_allclose(got, want, atol=3e-6)
  for a, b in zip(slopes, want_slopes, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("window", trials.by_default([20], [0, 20], unlike=[0]))
def test_chunks_for_a_flash_kernel_are_those_of_the_definition(
  window, monkeypatch
):
  """Runs the code around cuDNN's kernel with XLA's implementation of it."""
  monkeypatch.setattr(kernels, "MAX_MASK", B * 401 * 128)
  segments, images = rows(401)
  mask = definition(segments, images, window)
  interval = sight(segments, images, window)
  got = kernels._seen_local(
    *qkv(401),
    segments,
    interval.last_BT,
    window=window,
    lookahead=IMAGE,
    flash="xla",
  )
  np.testing.assert_allclose(got, dense(*qkv(401), mask), atol=3e-6)


def test_blocks_are_what_a_long_row_on_a_cpu_takes(monkeypatch):
  called = []
  real = blocks.attend
  monkeypatch.setattr(
    blocks, "attend", lambda *a, **k: called.append(k) or real(*a, **k)
  )
  segments, images = rows(401)
  kernels.causal_attention(
    *qkv(401), segments, sight=sight(segments, images, 20)
  )
  assert called[0]["window"] == 20 and called[0]["last_BT"] is not None


def test_blocks_out_of_sight_are_not_computed():
  t, window = 4096, 64
  segments = np.ones((1, t), np.int32)
  ids = jnp.asarray(segments.reshape(1, -1, 128))
  last = jnp.arange(t, dtype=jnp.int32).reshape(1, -1, 128)
  rule = blocks._Rule(True, window)
  reachable = blocks._reachable(ids, rule, None, last, last)
  # Its own and the last.
  assert np.asarray(reachable).sum() == 2 * (t // 128) - 1


def test_a_window_in_a_tree_needs_the_depths():
  segments, images = rows(120)
  with pytest.raises(ValueError, match="needs depth_BT"):
    kernels.causal_attention(
      *qkv(120), segments, segments, sight=sight(segments, images, 0)
    )


def parts_an_image(images, end):
  return end < len(images) and images[end] and images[end] == images[end - 1]


@pytest.mark.parametrize(
  "window", trials.by_default([20], WINDOWS[:3], unlike=WINDOWS[:2])
)
def test_a_cache_is_seen_as_the_definition_has_it(window):
  """In chunks that end between images, then word by word."""
  t = 120
  q, k, v = qkv(t)
  rng = np.random.default_rng(7)
  drawn = []
  for _ in range(B):
    _, images = row(rng, t)
    images[-6:] = 0
    drawn.append(images)
  images = np.stack(drawn)
  segments = np.ones((B, t), np.int32)
  want = np.asarray(dense(q, k, v, definition(segments, images, window)))
  noise = lambda x: jnp.asarray(rng.normal(scale=99, size=x.shape), x.dtype)
  cache = jax.tree.map(
    noise, cached_attention.init_rows(B, t + 3, K, H, jnp.float32)
  )
  cached_B = np.zeros(B, np.int32)
  while (cached_B < t).any():
    width = 24 if (cached_B < t - 6).any() else 1
    count = np.minimum(width, t - cached_B).astype(np.int32)
    for r in range(B):
      while parts_an_image(images[r], cached_B[r] + count[r]):
        count[r] -= 1
    column = np.minimum(cached_B[:, None] + np.arange(width), t - 1)
    real = (np.arange(width) < count[:, None]).astype(np.int32)
    at = np.arange(B)[:, None], column
    # What lies beyond a row's real tokens may be anything.
    shown = np.where(real, images[at] > 0, rng.random(real.shape) < 0.5)
    interval = kernels.Sight(
      gemma3.last_seen(jnp.asarray(shown), jnp.asarray(real)), window, IMAGE
    )
    mixed, cache = cached_attention.attend_rows(
      q[at],
      k[at],
      v[at],
      cache,
      jnp.asarray(cached_B),
      jnp.asarray(count),
      sight=interval,
    )
    for r in range(B):
      np.testing.assert_allclose(
        mixed[r, : count[r]],
        want[r, cached_B[r] : cached_B[r] + count[r]],
        atol=3e-6,
      )
    cached_B += count


@pytest.mark.slow
def test_two_sequences_that_meet_in_images_do_not_see_each_other():
  is_image = jnp.asarray([[False, True, True, True, True, True, False, True]])
  segments = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 0]])
  got = gemma3.last_seen(is_image, segments)
  assert got.tolist() == [[0, 2, 2, 5, 5, 5, 6, 7]]
