"""Attention block by block against attention under the explicit mask.

Trees are drawn token by token, each with the tokens before it in its sequence.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trials
from tunix.rl.multi_turn.policy.layers import blocks
from tunix.rl.multi_turn.policy.layers import kernels

B, N, K, H = 2, 4, 2, 8


def draw_tree(rng, t, images=None):
  """A row of sequences that begin alike, depth first, and padding.

  Args:
    rng: Generator of numbers.
    t: Tokens of the row.
    images: int[t], runs of equal numbers > 0 that no branch leaves or enters;
      None = there are none.

  Returns:
    bool[t, t], the tokens of its sequence that each token sees; int32[t], the
    place after the last that sees it; int32[t], its number in its sequence.
  """
  images = np.zeros(t, int) if images is None else images
  sees = np.zeros((t, t), bool)
  path = []
  for place in range(t):
    within = place and images[place] and images[place] == images[place - 1]
    if place >= t - t // 9:
      path = []  # Padding sees itself.
    elif not within and rng.random() < 0.08:
      cuts = [
        n
        for n in range(len(path))
        if not n
        or not images[path[n]]
        or images[path[n]] != images[path[n - 1]]
      ]
      path = path[: rng.choice(cuts)] if cuts else []
    path.append(place)
    sees[place, path] = True
  until = np.array([np.flatnonzero(sees[:, k]).max() + 1 for k in range(t)])
  return sees, until.astype(np.int32), sees.sum(1).astype(np.int32) - 1


def draw_trees(rng, t, images=None):
  """The same of B rows."""
  rows = [
    draw_tree(rng, t, None if images is None else images[row])
    for row in range(B)
  ]
  return tuple(np.stack(part) for part in zip(*rows, strict=True))


def case(t, kind, seed=4):
  """Queries, keys, values, segments, where trees end, and the mask."""
  rng = np.random.default_rng(seed)
  qkv = tuple(
    jnp.asarray(rng.normal(size=(B, t, heads, H)), jnp.float32)
    for heads in (N, K, K)
  )
  segments = rng.integers(0, 6, (B, t)).astype(np.int32)
  if kind == "in turn":
    segments = np.sort(segments, axis=1)
  elif kind == "one":
    segments[:] = 3
  elif kind == "filled":  # Padding after the last segment.
    segments = np.sort(segments, axis=1) + 1
    segments[:, t - t // 5 :] = -1
  elif kind == "tree":
    sees, until, _ = draw_trees(rng, t)
    return qkv, segments, until, sees
  return qkv, segments, None, segments[:, :, None] == segments[:, None]


def masked(q, k, v, mask, causal):
  if causal:
    mask = mask & np.tri(mask.shape[1], dtype=bool)
  return kernels.attend(q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask)


def value_and_slopes(attention, qkv):
  """The attention, and a random weighting's gradients."""
  weigh = np.random.default_rng(5).normal(size=qkv[0].shape)

  def weighed(*qkv):
    mixed = attention(*qkv)
    return jnp.sum(mixed * weigh), mixed

  slopes, mixed = jax.jit(jax.grad(weighed, argnums=(0, 1, 2), has_aux=True))(
    *qkv
  )
  return mixed, slopes


@pytest.mark.parametrize(
  "t, kind",
  trials.by_default(
    [(401, kind) for kind in ("one", "mixed", "tree")],
    [
      *((401, kind) for kind in ("in turn", "one", "filled", "mixed", "tree")),
      (160, "mixed"),
    ],
  ),
)
@pytest.mark.parametrize("causal", (False, True))
def test_values_and_gradients_are_those_under_the_mask(
  t, kind, causal, monkeypatch
):
  if kind == "tree" and not causal:
    pytest.skip("a tree is seen forwards only")
  monkeypatch.setattr(blocks, "_most", lambda causal: 48)
  qkv, segments, until, mask = case(t, kind)
  got, slopes = value_and_slopes(
    lambda *qkv: blocks.attend(*qkv, segments, until, causal=causal), qkv
  )
  want, want_slopes = value_and_slopes(
    lambda *qkv: masked(*qkv, mask, causal), qkv
  )
  np.testing.assert_allclose(got, want, atol=3e-6)
  for a, b in zip(slopes, want_slopes, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_scores_of_any_size_are_safe():
  """Large ones neither overflow nor hide the keys that come later."""
  (q, k, v), segments, _, mask = case(300, "in turn")
  got = blocks.attend(200 * q, k, v, segments, causal=True)
  want = masked(200 * q, k, v, mask, True)
  # Scores of a thousand carry errors of 1e-4.
  np.testing.assert_allclose(got, want, atol=5e-4)


def test_blocks_without_a_descendant_are_not_computed():
  """A prompt of a block, and branches of a block each."""
  until = np.arange(1, 9).repeat(128) * 128
  until[:128] = 1024
  ids = np.ones((1, 8, 128), np.int32)
  reachable = blocks._reachable(
    ids, blocks._Rule(True), until.reshape(1, 8, 128), None, None
  )
  want = np.eye(8, dtype=bool)
  want[:, 0] = True
  np.testing.assert_array_equal(reachable[0], want)


def compiled(t):
  """Compiles the gradient's program for one row of `t` tokens."""
  shape = lambda heads: jax.ShapeDtypeStruct((1, t, heads, H), jnp.float32)
  ids = jax.ShapeDtypeStruct((1, t), jnp.int32)
  attend = functools.partial(blocks.attend, causal=True)
  slopes = jax.grad(lambda *qkv: jnp.sum(attend(*qkv) ** 2), argnums=(0, 1, 2))
  return jax.jit(slopes).lower(shape(N), shape(K), shape(K), ids).compile()


def test_memory_grows_with_the_tokens_and_the_program_not_at_all():
  short, long = compiled(4096), compiled(32768)
  temporary = lambda c: c.memory_analysis().temp_size_in_bytes
  assert temporary(long) < 10 * temporary(short)
  assert len(long.as_text()) < 1.1 * len(short.as_text())
