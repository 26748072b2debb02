"""Objectives that compare the tokens of a buffer, against torch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tunix.rl.multi_turn.learner.algorithms import objectives

SIZE, PADDED = 40, 48


def tokens_of(seed, lp=None):
  """A buffer of several sequences with padding behind them."""
  rng = np.random.default_rng(seed)
  new = -np.abs(rng.normal(size=PADDED)) if lp is None else lp
  values = dict(
    logprobs=new,
    anchor=new + 0.3 * rng.normal(size=PADDED),
    weight=rng.uniform(0.5, 1.5, size=PADDED),
    advantages=rng.normal(size=PADDED),
  )
  numbers = np.full(PADDED, -1, np.int32)
  numbers[:SIZE] = np.sort(rng.integers(0, 6, SIZE))
  return objectives.TokenBatch(
    **{k: jnp.asarray(v, jnp.float32) for k, v in values.items()},
    sequences=numbers,
  )


def loss_and_slope(apply, tokens, options):
  def loss(lp):
    values, readings = apply(dataclasses.replace(tokens, logprobs=lp), options)
    real = jnp.asarray(tokens.sequences) >= 0
    return jnp.sum(jnp.where(real, values, 0.0)), (values, readings)

  (_, (values, readings)), slope = jax.value_and_grad(loss, has_aux=True)(
    tokens.logprobs
  )
  return np.asarray(values), readings, np.asarray(slope)


def in_torch(tokens):
  of = lambda name: torch.tensor(
    np.asarray(getattr(tokens, name))[:SIZE], dtype=torch.float64
  )
  new = of("logprobs").requires_grad_(True)
  return new, of("anchor"), of("weight"), of("advantages")


def covariances(new, advantage):
  return (new.detach() - new.detach().mean()) * (advantage - advantage.mean())


@pytest.mark.parametrize("share", [1e-4, 0.2])
def test_kl_cov_equals_torch(share):
  tokens = tokens_of(1)
  options = objectives.ObjectiveOptions(cov_share=share, cov_kl_coef=0.7)
  values, readings, slope = loss_and_slope(objectives.kl_cov, tokens, options)
  new, anchor, weight, advantage = in_torch(tokens)
  is_priced = torch.zeros(SIZE, dtype=torch.bool)
  count = max(int(share * SIZE), 1)
  is_priced[covariances(new, advantage).topk(count).indices] = True
  want = weight * (
    -(new - anchor).exp() * advantage + is_priced * 0.7 * (new - anchor).abs()
  )
  want.sum().backward()
  np.testing.assert_allclose(values[:SIZE], want.detach(), rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(slope[:SIZE], new.grad, rtol=1e-4, atol=1e-5)
  assert not slope[SIZE:].any()
  assert int(readings["held_fraction"].sum()) == count


@pytest.mark.parametrize("share, drawn", [(1e-4, 1), (0.1, 4), (1.0, None)])
def test_clip_cov_equals_torch_but_for_the_tokens_held_back(share, drawn):
  tokens = tokens_of(2)
  options = objectives.ObjectiveOptions(
    clip_low=0.2, clip_high=0.3, cov_share=share, cov_low=0.05, cov_high=0.9
  )
  values, readings, slope = loss_and_slope(objectives.clip_cov, tokens, options)
  new, anchor, weight, advantage = in_torch(tokens)
  ratio = (new - anchor).exp()
  gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
  want = -weight * gain
  want.sum().backward()
  np.testing.assert_allclose(values[:SIZE], want.detach(), rtol=1e-4, atol=1e-5)
  is_clipped = np.asarray(readings["held_fraction"])[:SIZE] > 0
  cov = covariances(new, advantage).numpy()
  clipped = ((ratio < 0.8) & (advantage < 0)) | (
    (ratio > 1.3) & (advantage > 0)
  )
  may = (cov > 0.05) & (cov < 0.9) & ~clipped.numpy()
  assert may.sum() > 4
  assert is_clipped.sum() == (may.sum() if drawn is None else drawn)
  assert not (is_clipped & ~may).any()
  np.testing.assert_allclose(
    slope[:SIZE], np.where(is_clipped, 0.0, new.grad), rtol=1e-4, atol=1e-5
  )


def test_the_draw_repeats_and_is_another_for_other_log_probs():
  options = objectives.ObjectiveOptions(
    cov_share=0.1, cov_low=-9.0, cov_high=9.0, clip_low=1.0, clip_high=50.0
  )
  draw = lambda seed: np.asarray(
    objectives.clip_cov(tokens_of(seed), options)[1]["held_fraction"]
  )
  np.testing.assert_array_equal(draw(3), draw(3))
  assert any((draw(3) != draw(seed)).any() for seed in (4, 5))


@pytest.mark.parametrize("apply", [objectives.clip_cov, objectives.kl_cov])
def test_padding_may_hold_anything(apply):
  options = objectives.ObjectiveOptions(cov_low=-9.0, cov_high=9.0)
  tokens = tokens_of(6)
  lp = np.asarray(tokens.logprobs).copy()
  lp[SIZE:] = -1e30
  a = loss_and_slope(apply, tokens, options)
  other = dataclasses.replace(tokens, logprobs=jnp.asarray(lp))
  b = loss_and_slope(apply, other, options)
  np.testing.assert_array_equal(a[0][:SIZE], b[0][:SIZE])
  np.testing.assert_array_equal(a[2][:SIZE], b[2][:SIZE])
