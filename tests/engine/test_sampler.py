"""Draws follow the distribution whose log-probs are returned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tunix.rl.multi_turn.engine import sampler

pytestmark = pytest.mark.timeout(300)
ROWS, VOCAB = 64, 150  # Three blocks, the last one not full.

_sample = jax.jit(sampler.sample)


def draw(
  logits_V,
  *,
  temperature=1.0,
  top_k=0,
  top_p=1.0,
  min_p=0.0,
  banned=(),
  count=200,
):
  """`count` draws of each of ROWS equal rows with different keys."""
  mask = np.zeros(VOCAB, bool)
  mask[list(banned)] = True
  keys = np.stack([np.arange(ROWS), 7 * np.arange(ROWS) + 1], axis=1)
  tokens, logprobs = [], []
  for i in range(count):
    t, l, *_ = _sample(
      jnp.tile(jnp.asarray(logits_V, jnp.float32), (ROWS, 1)),
      mask,
      keys.astype(np.uint32),
      np.full(ROWS, i, np.int32),
      np.full(ROWS, temperature, np.float32),
      np.full(ROWS, top_k, np.int32),
      np.full(ROWS, top_p, np.float32),
      np.full(ROWS, min_p, np.float32),
      np.array(top_k > 0 or top_p < 1 or min_p > 0),
    )
    tokens.append(np.asarray(t))
    logprobs.append(np.asarray(l))
  return np.concatenate(tokens), np.concatenate(logprobs)


def expected(
  logits_V, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, banned=()
):
  """Probabilities by sorting, in float64."""
  logits = np.array(logits_V, np.float64) / temperature
  logits[list(banned)] = -np.inf
  order = np.argsort(-logits)
  p = np.exp(logits - logits.max())
  p[p < min_p] = 0
  if top_k:
    p[order[top_k:]] = 0
  p /= p.sum()
  before = np.cumsum(p[order]) - p[order]
  p[order[before >= top_p]] = 0
  return p / p.sum()


LOGITS = np.random.default_rng(0).normal(size=VOCAB) * 1.5


@pytest.mark.parametrize(
  "options",
  [
    {},
    {"temperature": 0.6, "banned": (3, 4, 149)},
    {"temperature": 1.7, "top_k": 7},
    {"top_p": 0.8},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.7, "banned": (0,)},
    {"top_p": 1e-6},
    {"top_k": 1},
    {"top_k": 10_000, "top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 0.2, "top_p": 0.7, "top_k": 9, "temperature": 1.5},
    {"min_p": 1.0},
  ],
)
def test_draws_follow_the_truncated_distribution(options):
  p = expected(LOGITS, **options)
  tokens, logprobs = draw(LOGITS, **options)
  # Log-probs are those of the renormalised distribution.
  np.testing.assert_allclose(logprobs, np.log(p[tokens]), atol=2e-5)
  counts = np.bincount(tokens, minlength=VOCAB)
  assert not counts[p == 0].any()
  # Chi-square, rare tokens pooled; 6 sigma above its mean never happens.
  want = p * len(tokens)
  rare = want < 8
  want = np.append(want[~rare], want[rare].sum())
  observed = np.append(counts[~rare], counts[rare].sum())
  possible = want > 0
  chi2 = ((observed[possible] - want[possible]) ** 2 / want[possible]).sum()
  freedom = max(1, possible.sum() - 1)
  assert chi2 < freedom + 6 * np.sqrt(2 * freedom), (chi2, freedom)
  if possible.sum() > 1:
    assert chi2 > 0


def test_greedy_takes_the_best_allowed_token_at_temperature_one():
  best = int(LOGITS.argmax())
  tokens, logprobs = draw(
    LOGITS, temperature=0.0, top_k=1, top_p=0.1, banned=(best,), count=1
  )
  p = expected(LOGITS, banned=(best,))
  assert (tokens == p.argmax()).all()
  np.testing.assert_allclose(logprobs, np.log(p.max()), atol=1e-5)


def test_extreme_logits_and_temperatures():
  logits = np.full(VOCAB, -1e9)
  logits[[5, 140]] = 1e9
  tokens, logprobs = draw(logits, temperature=1e-4, count=20)
  assert set(tokens.tolist()) == {5, 140}
  np.testing.assert_allclose(logprobs, np.log(0.5), atol=1e-6)
  tokens, _ = draw(LOGITS, temperature=1e-6, count=2)
  assert (tokens == LOGITS.argmax()).all()
  _, logprobs = draw(np.full(VOCAB, np.nan), count=1)
  assert np.isnan(logprobs).all()


def test_a_row_does_not_depend_on_its_neighbours():
  rng = np.random.default_rng(1)
  logits = rng.normal(size=(ROWS, VOCAB)).astype(np.float32)
  keys = rng.integers(0, 1 << 32, (ROWS, 2), dtype=np.uint32)
  ones = np.ones(ROWS, np.float32)
  zeros = np.zeros(ROWS, np.int32)
  mask = np.zeros(VOCAB, bool)

  def run(order):
    return _sample(
        logits[order], mask, keys[order], zeros, ones, zeros, ones,
        np.zeros(ROWS, np.float32), np.False_,
    )  # fmt: skip

  order = rng.permutation(ROWS)
  straight, shuffled = run(np.arange(ROWS)), run(order)
  np.testing.assert_array_equal(straight[0][order], shuffled[0])
  np.testing.assert_allclose(straight[1][order], shuffled[1], atol=1e-6)


def test_uniforms_are_uniform_and_distinct():
  keys = np.stack([np.arange(ROWS), np.zeros(ROWS)], 1).astype(np.uint32)
  u = np.concatenate(
    [
      np.asarray(sampler.uniforms(keys, np.full(ROWS, i, np.int32)))
      for i in range(100)
    ]
  )
  assert u.min() >= 0 and u.max() < 1
  counts = np.histogram2d(u[:, 0], u[:, 1], bins=8, range=[[0, 1]] * 2)[0]
  want = len(u) / 64
  chi2 = ((counts - want) ** 2 / want).sum()
  assert chi2 < 63 + 6 * np.sqrt(2 * 63)
  assert len(np.unique(u[:, 0])) > 0.99 * len(u)
